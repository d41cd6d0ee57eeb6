"""How a model is run, checked when it is said: the layout and the engine's settings.

Knows nothing of models, processes or tensors; anyone may import it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from shardwise.features import DTYPES, Compile, MaxMemory, Quantization, Speculation

BLOCK = 16
"""Tokens in one KV block. Attention sums run block by block, so the size is part of the answer and not a setting."""


class Coordinates(NamedTuple):
    """Where a rank sits in the mesh."""

    dp: int
    tp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """How many replicas (dp), tensor shards (tp) and pipeline stages (pp) run the model."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"layout: {axis.name} must be a whole number of at least 1, not {size!r}")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``"dp2.tp2.pp2"``: any order, a missing axis is 1, and ``"1"`` is a single device.

        Raises ValueError, naming the valid form, for anything else.
        """
        text = text.strip().lower()
        sizes: dict[str, int] = {}
        for part in [] if text == "1" else text.split("."):
            match = re.fullmatch(r"(dp|tp|pp)([0-9]{1,5})", part)
            if match is None or match[1] in sizes:
                raise ValueError(
                    f"layout {text!r}: expected parts such as tp2 or pp2, each axis once, joined by dots "
                    "(dp2.tp2.pp2), or 1 for a single device"
                )
            sizes[match[1]] = int(match[2])
        return cls(**sizes)

    def __str__(self) -> str:
        parts = [f"{axis.name}{getattr(self, axis.name)}" for axis in fields(self) if getattr(self, axis.name) > 1]
        return ".".join(parts) or "1"

    @property
    def replica_size(self) -> int:
        """Ranks in one replica."""
        return self.tp * self.pp

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of global rank ``rank``: tp varies fastest, then pp, then dp."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside layout {self} of {self.world_size} ranks")
        return Coordinates(dp=rank // self.replica_size, tp=rank % self.tp, pp=rank % self.replica_size // self.tp)


def _is_finite(kinds: Any, value: Any) -> bool:
    """Is it a finite number of one of these types?"""
    return isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < math.inf


TEXTS: dict[str, Any] = {
    "quantize": Quantization,
    "speculate": Speculation,
    "compile": Compile,
    "max_memory": MaxMemory,
}
"""Fields of EngineConfig that can be said in one text."""


@dataclass(frozen=True)
class EngineConfig:
    """How a model is run. Sizes are in tokens; ``None`` means: chosen for the model and the machine."""

    layout: Layout = field(default_factory=Layout)
    dtype: str = "auto"
    quantize: Quantization | None = None
    """None: as the checkpoint is."""
    device: str = "auto"
    device_ids: tuple[int, ...] | None = None
    """GPUs of each host that ranks take, in their order; None: the first ones."""
    kernels: str = "auto"
    transport: str = "auto"
    threads: int | None = None
    split: tuple[float, ...] | None = None
    stages: tuple[int, ...] | None = None
    max_model_len: int | None = None
    kv_tokens: int | None = None
    max_batch_tokens: int = 512
    max_chunk: int = 512
    max_num_seqs: int = 256
    prefix_cache: bool = True
    speculate: Speculation | None = None
    compile: Compile | None = None
    """None: nothing is compiled but the kernels."""
    max_memory: MaxMemory | None = None
    offload_dir: str | None = None
    """Where weights beyond ``max_memory`` lie, in files without names; None: the user's cache directory."""
    profile: str | None = None
    """Directory for a trace of each rank's first steps; see `runtime.profile`."""
    isolate: bool = False
    """Run even a single rank on the CPU in a process of its own, which can die without harm."""
    start_timeout: float = 300.0
    step_timeout: float = 300.0
    restart_timeout: float | None = None
    """Seconds in which ranks that fail before they are ready are started again; None: five times, however long."""

    def __post_init__(self) -> None:
        choices = {
            "dtype": DTYPES,
            "device": ("auto", "cpu", "cuda"),
            "kernels": ("auto", "native", "torch"),
            "transport": ("auto", "shm", "gloo", "nccl"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        for name in ("max_batch_tokens", "max_chunk", "max_num_seqs", "threads", "max_model_len", "kv_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        for name in ("start_timeout", "step_timeout", "restart_timeout"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a number of seconds above 0, not {getattr(self, name)!r}")
        for name, kinds, what in (("split", int | float, ""), ("stages", int, "whole "), ("device_ids", int, "whole ")):
            value = getattr(self, name)
            if value is not None and not (
                isinstance(value, tuple | list) and all(_is_finite(kinds, part) for part in value)
            ):
                raise ValueError(f"{name} must be a tuple of {what}numbers, not {value!r}")
        if (gpus := self.device_ids) is not None and (len({*gpus}) < max(1, len(gpus)) or min(gpus) < 0):
            raise ValueError(f"device_ids must be different numbers of GPUs, from 0 on, not {gpus!r}")
        if self.device_ids is not None and self.device == "cpu":
            raise ValueError("device_ids are numbers of GPUs, and device is cpu: leave out one of them")
        if self.kv_tokens is not None and self.kv_tokens < BLOCK:
            raise ValueError(f"kv_tokens must be at least one block of {BLOCK} tokens, not {self.kv_tokens}")
        if self.split is not None and (len(self.split) != self.layout.tp or not all(part > 0 for part in self.split)):
            raise ValueError(f"split must give a weight above 0 to each of the {self.layout.tp} tp ranks")
        if self.stages is not None and (len(self.stages) != self.layout.pp or not all(n > 0 for n in self.stages)):
            raise ValueError(f"stages must give a number of layers above 0 to each of the {self.layout.pp} pp stages")
        if self.max_memory is not None and self.compile is not None:
            raise ValueError(
                "compile with max_memory: a layer that comes from elsewhere for each step takes longer than what a "
                "compiler saves; give one of the two"
            )
        if self.max_memory is not None:
            ranks, named = range(self.layout.replica_size), [rank for rank, _ in self.max_memory.ranks]
            if beyond := [rank for rank in named if rank not in ranks]:
                raise ValueError(
                    f"max_memory: there is no rank {beyond[0]} in layout {self.layout}: a replica has {ranks.stop}, "
                    "from 0 on, and all replicas are alike"
                )
            if named and self.max_memory.every is None and (free := [rank for rank in ranks if rank not in named]):
                raise ValueError(
                    f"max_memory: rank {free[0]} of layout {self.layout} has no limit: give each its own, or one for "
                    f"all others first, as in 10GB,{named[0]}=6GB"
                )
        elif self.offload_dir is not None:
            raise ValueError("offload_dir is for what max_memory leaves no room for: give both or neither")

    @classmethod
    def read(cls, layout: str | Layout = "1", **settings: Any) -> EngineConfig:
        """The fields, of which those may be text that have a ``parse``, as `Layout` has; ``max_memory`` a mapping too.

        Raises ValueError for what can't be.
        """
        for name, kind in TEXTS.items():
            if isinstance(settings.get(name), str) or (kind is MaxMemory and isinstance(settings.get(name), Mapping)):
                settings[name] = kind.parse(settings[name])
        return cls(layout=Layout.parse(layout) if isinstance(layout, str) else layout, **settings)
