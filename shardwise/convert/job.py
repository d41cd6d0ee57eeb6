"""`shardwise convert` once its options are read: one model in, one folder out, which appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.config import Layout
from shardwise.convert.gguf import write_json
from shardwise.convert.given import Given, open_given
from shardwise.convert.write import FORMATS, SHARD_BYTES, Entry, Output, write_checkpoint
from shardwise.features import Quantization
from shardwise.models.families.table import make_plan
from shardwise.models.shard import make_shard
from shardwise.parallel.placement import Placement, Run
from shardwise.runtime.source import METHOD
from shardwise.weights.load import Reader, pieces, read_part
from shardwise.weights.quantise import pack
from shardwise.weights.stored import OFFSETS, SCALES, stored_shapes


@dataclass(frozen=True)
class Job:
    """What to convert, and into what; a ``dtype`` of None keeps each tensor's own, float32 where it is quantised."""

    model: str
    to: Path
    dtype: str | None = None
    quantize: Quantization | None = None
    shard_bytes: int = SHARD_BYTES


def convert(
    job: Job,
    trust: Callable[[str], None],
    progress: Callable[[int], Callable[[int], None]] = lambda total: lambda n: None,
) -> dict[str, Any]:
    """Do it: what was written, JSON-ready. ``progress`` is given the bytes in all, and its result those written.

    Raises ValueError, before anything is written, for what can't be done, LoadError for broken files and OSError for
    a disk that can't be written to; then nothing is left behind.
    """
    to = job.to.absolute()
    if to.exists():
        raise ValueError(f"convert: {job.to} is there already; give another name, or remove it")
    if not to.parent.is_dir():
        raise ValueError(f"convert: there is no directory {to.parent}; make it first")
    given = open_given(job.model, trust)
    entries = list(_entries(given, job))
    size = sum(entry.size for entry in entries)
    free = shutil.disk_usage(to.parent).free
    if size > free:
        raise ValueError(f"convert: {size} bytes are to be written, and {to.parent} has {free} left")
    scratch = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    try:
        files = write_checkpoint(scratch, entries, progress(size), job.shard_bytes)
        write_json(scratch / "config.json", _config(given, job, entries))
        given.tokenizer(scratch)
        scratch.chmod(0o777 & ~_umask())
        os.rename(scratch, to)
    finally:
        given.checkpoint.close()
        shutil.rmtree(scratch, ignore_errors=True)
    return {
        "source": given.what,
        "output": str(job.to),
        "quantize": str(job.quantize) if job.quantize is not None else None,
        "tensors": sum(len(entry.outputs) for entry in entries),
        "bytes": size,
        "files": [file.name for file in files],
    }


def _entries(given: Given, job: Job) -> Iterator[Entry]:
    """Every tensor that the model makes use of, in its order."""
    plan = make_plan(given.config, make_shard(given.config, Layout()), job.quantize)
    done: set[str] = set()
    for placement in (placement for placements in plan.values() for placement in placements):
        if placement.tensor not in done:
            done.add(placement.tensor)
            yield _entry(given.checkpoint, placement, job.dtype)


def _entry(checkpoint: Reader, placement: Placement, dtype: str | None) -> Entry:
    name, shape = placement.tensor, placement.shape
    if placement.quantize is None:
        own = {found: torch_type for torch_type, found in FORMATS.items()}
        kind = (
            getattr(torch, dtype) if dtype is not None else own.get(checkpoint.index.tensors[name].dtype, torch.float32)
        )
        cols = Run(0, shape[1]) if len(shape) == 2 else None
        stored = replace(placement, rows=Run(0, shape[0]), cols=cols, transposed=False)
        outputs: tuple[Output, ...] = (Output(name, shape, kind),)
        return Entry(
            outputs, lambda: ((_tensor(read_part(checkpoint, stored, rows)).to(kind),) for rows in pieces(stored))
        )
    shapes = stored_shapes(placement)
    numbers = torch.int8 if placement.quantize.bits == 8 else torch.uint8
    whole = replace(placement, rows=Run(0, shapes[name][0]), cols=Run(0, placement.width))
    kinds = {name: numbers, name + SCALES: torch.bfloat16, name + OFFSETS: torch.bfloat16}
    outputs = tuple(Output(part, size, kinds[part]) for part, size in shapes.items())
    return Entry(outputs, lambda: (_rounded(checkpoint, whole, rows) for rows in pieces(whole)))


def _tensor(part: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(part, Tensor)
    return part


def _rounded(checkpoint: Reader, whole: Placement, rows: Run) -> Sequence[Tensor]:
    part = read_part(checkpoint, whole, rows)
    assert isinstance(part, tuple)
    assert whole.quantize is not None
    numbers, scales = part
    return numbers if whole.quantize.bits == 8 else pack(numbers), *scales


def _config(given: Given, job: Job, entries: Sequence[Entry]) -> dict[str, Any]:
    """config.json: its dtype is that of the floats, as asked for or as they were."""
    values = {name: value for name, value in given.values.items() if name not in ("dtype", "torch_dtype")}
    values["dtype"] = job.dtype or given.config.dtype
    if job.quantize is not None:
        by = {"quant_method": METHOD, "bits": job.quantize.bits, "group_size": job.quantize.group}
        values["quantization_config"] = by
    return values


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
