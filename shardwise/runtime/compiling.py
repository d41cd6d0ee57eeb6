"""torch.compile as the operator has asked for it: for the layers of a part of a model, and for any other callable.

Knows the settings, what a graph may depend on, and where inductor keeps what it has made; nothing of steps. All layers
of a part go through one function, so that their number costs no compilation. A layer whose MLP is made of experts is
compiled up to there: which experts run is read back from the device in the middle.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from shardwise.features import Compile
from shardwise.kernels.build import cache_directory
from shardwise.models.batch import KV, Batch
from shardwise.models.decoder import Decoder, Layer
from shardwise.models.moe import MoE
from shardwise.parallel.placement import Tree
from shardwise.runtime.backends import PACKAGES
from shardwise.runtime.batch import make_batch
from shardwise.schedule.step import Chunk

SIZES = ((1, 1), (3, 1), (3, 2), (8, 1), (8, 3))
"""Rows and sequences of the batches that layers are compiled with before the first step: they stand for all others.

A graph holds for any sizes but 1, which has a graph of its own, and the torch twin of a linear treats less than 4 rows
apart."""
LIMIT = 8
"""Graphs that may be made of one function; with sizes left open it takes 3 with the native kernels, else 5."""
PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
"""Other names of torch's dtypes."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable: where inductor keeps what it has made."""


class CompiledLayers:
    """Calls layers compiled ``by``; see `RunLayer`. One for each part of a model, whose layers are all of one shape.

    Raises ValueError for a mode or an option that the backend refuses.
    """

    def __init__(self, by: Compile) -> None:
        import torch._dynamo
        from torch._dynamo.exc import FailOnRecompileLimitHit

        self._over = FailOnRecompileLimitHit
        self._whole = compile_call(_own(_whole), by, fullgraph=True)
        self._attention = compile_call(_own(_attention), by, fullgraph=True)
        self.numbers_are_constants = torch._dynamo.config.patch(
            specialize_int=True, specialize_float=True, recompile_limit=LIMIT
        )
        """A context for what may compile: the numbers in layers are of the model, and only sizes of batches vary."""
        self.full = False
        """Has a batch come that would have taken one graph too many? Then layers run as they are from there on."""

    def __call__(self, layer: Layer, x: Tensor, kv: KV, batch: Batch) -> Tensor:
        """[M, hidden] → [M, hidden]."""
        if self.full:
            return layer(x, kv, batch)
        try:
            if not isinstance(layer.mlp, MoE):
                return self._whole(layer, x, kv, batch)  # type: ignore[no-any-return]
            x = self._attention(layer, x, kv, batch)
        except self._over:  # before anything of the layer has run
            self.full = True
            return layer(x, kv, batch)
        return layer.mlp(layer.mlp_norm(x), x)

    def warm(self, decoder: Decoder, cache: Sequence[KV], hidden_size: int) -> None:
        """Make the graphs that batches will need, before there are any: KV blocks are written to.

        The ranks of an axis do it together, for their sums meet.
        """
        from torch._dynamo.convert_frame import compile_lock

        pairs = list(zip(decoder.layers.values(), cache, strict=True))
        with compile_lock:  # marks that are made while another thread compiles are lost
            for pair in pairs:
                _hold_still(pair)
        with self.numbers_are_constants:
            for rows, sequences in SIZES:
                lengths = [(rows + index) // sequences for index in range(sequences)]
                chunks = [Chunk(index, 0, [0] * length, [0] * 11, None) for index, length in enumerate(lengths)]
                for layer, kv in pairs[:1]:
                    batch = make_batch(chunks, kv.keys.device)
                    batch.positions.zero_()  # there may be no others: contexts can be that short
                    x = torch.zeros(rows, hidden_size, dtype=kv.keys.dtype, device=kv.keys.device)
                    self(layer, x, kv, batch)


def _whole(layer: Layer, x: Tensor, kv: KV, batch: Batch) -> Tensor:
    assert x.shape[1] == layer.attention_norm.weight.shape[0]  # so the width is a constant of the graph
    x = layer.attention(layer.attention_norm(x), x, kv, batch)
    return layer.mlp(layer.mlp_norm(x), x)


def _attention(layer: Layer, x: Tensor, kv: KV, batch: Batch) -> Tensor:
    assert x.shape[1] == layer.attention_norm.weight.shape[0]
    return layer.attention(layer.attention_norm(x), x, kv, batch)


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own, by which torch keeps and counts graphs: parts don't share those."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _hold_still(part: Any) -> None:
    """Mark every tensor of a part of a model as one whose sizes stay as they are."""
    if isinstance(part, Tensor):
        torch._dynamo.mark_static(part)
    elif isinstance(part, tuple):
        for each in part:
            _hold_still(each)
    elif isinstance(part, Tree):
        _ = part.counts, part.finish  # worked out now, since a property that caches can't be traced
    elif type(part).__module__.startswith("shardwise.models."):
        for each in vars(part).values():
            _hold_still(each)


def compile_model(model: Any, by: Compile) -> Any:
    """A model that is called through ``torch.compile``: a module itself, so that its methods call it so too.

    Raises ValueError for a mode or an option that the backend refuses.
    """
    if isinstance(model, torch.nn.Module):
        model.forward = compile_call(model.forward, by)
        return model
    return compile_call(model, by)


def compile_call(function: Any, by: Compile, *, fullgraph: bool = False) -> Any:
    """``torch.compile`` of a callable. ValueError for a mode or an option that the backend refuses."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if by.backend in PACKAGES and PACKAGES[by.backend][0] == "torch_tensorrt":
        import torch_tensorrt  # type: ignore[import-not-found]  # noqa: F401
    elif by.backend in PACKAGES:
        import openvino.torch  # type: ignore[import-not-found]  # noqa: F401
    if os.environ.get(CACHE) in (None, default_cache_dir()):  # which torch itself sets when it is imported
        os.environ[CACHE] = str(private_cache())
    options = open_options(by.passed) or None
    try:
        with compile_lock:  # two threads that look for a backend would both register it
            return torch.compile(
                function, fullgraph=fullgraph, dynamic=by.dynamic, backend=by.backend, mode=by.mode, options=options
            )
    except RuntimeError as error:
        raise ValueError(f"compile: backend {by.backend} refuses: {error}") from error


def open_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as the backend gets them: what JSON has is passed as it is.

    Those of Torch-TensorRT that are dtypes, "enabled_precisions" and "precision", are named: fp16, float16 and
    torch.float16 are one.
    """
    opened = dict(options)
    if isinstance(precisions := opened.get("enabled_precisions"), list):
        opened["enabled_precisions"] = {_dtype(name) for name in precisions}
    if isinstance(precision := opened.get("precision"), str):
        opened["precision"] = _dtype(precision)
    return opened


def _dtype(name: Any) -> torch.dtype:
    short = str(name).removeprefix("torch.")
    found = getattr(torch, PRECISIONS.get(short, short), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"compile: {name!r} is no precision such as fp32, fp16, bf16, fp8, int8 or torch.float16")
    return found


def private_cache() -> Path:
    """The directory of compiled graphs, which torch reads back as pickles: nobody else may write there.

    Beside the compiled kernels (see `kernels.build`), and not below /tmp, where torch has it. Raises ValueError if it
    can't be had.
    """
    home = cache_directory()
    directory = home / "inductor"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in (home, directory):
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise ValueError(f"compile: {path} isn't a directory of yours: set XDG_CACHE_HOME, or {CACHE}")
            if found.st_mode & 0o022:
                path.chmod(0o700)
    except OSError as error:
        raise ValueError(f"compile: no cache can be kept in {directory} ({error}): set XDG_CACHE_HOME") from error
    return directory
