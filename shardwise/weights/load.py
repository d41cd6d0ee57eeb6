"""From checkpoint slices to a rank's parameters, in pieces so small that no second copy of the model ever exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shardwise.parallel.placement import Placement, Plan, Run
from shardwise.weights.checkpoint import Index, Span
from shardwise.weights.quantise import quantise, restore, unpack
from shardwise.weights.stored import FORMATS, OFFSETS, SCALES


class Reader(Protocol):
    """A `Checkpoint`, or what reads like one."""

    index: Index

    def read(self, name: str, *spans: Span | None) -> np.ndarray[Any, Any]:
        """See `Checkpoint.read`."""


PIECE = 16 * 2**20
"""Elements' bytes (as float32) read at once."""


def load(checkpoint: Reader, plan: Plan, write: Callable[[str, int, Any], None]) -> None:
    """Read every slice of ``plan`` and hand it to ``write(parameter, first row, part)``; raises LoadError.

    A part is a tensor, or numbers and scales where the plan says to quantise (see `quantise`).
    """
    for parameter, placements in plan.items():
        row = 0
        for placement in placements:
            for rows in pieces(placement):
                write(parameter, row, read_part(checkpoint, placement, rows))
                row += rows.size


def pieces(placement: Placement) -> list[Run]:
    """Runs of rows of at most PIECE bytes, never cutting a group of paired rows."""
    width = 4 * (1 if placement.cols is None else _reach(placement).size)
    unit = placement.paired or 1
    step = max(1, PIECE // (width * unit)) * unit
    return [
        Run(start, min(start + step, placement.rows.stop))
        for start in range(placement.rows.start, placement.rows.stop, step)
    ]


def _reach(placement: Placement) -> Run:
    """The columns that must be read: whole groups, since a scale comes of all that share it."""
    cols = placement.cols
    assert cols is not None
    if placement.quantize is None:
        return cols
    return Run(placement.groups.start * placement.group, min(placement.groups.stop * placement.group, placement.width))


def read_part(checkpoint: Reader, placement: Placement, rows: Run) -> Tensor | tuple[Tensor, Tensor]:
    """Some rows of a placement as `load` hands them on."""
    if placement.quantize is None:
        return _read(checkpoint, placement, rows)
    bits, cols = placement.quantize.bits, placement.cols
    assert cols is not None
    stored = _stored_bits(checkpoint, placement)
    if stored == bits:
        return _rounded(checkpoint, placement, rows)
    reach = _reach(placement)
    if stored is None:
        part = _read(checkpoint, replace(placement, cols=reach), rows)
    else:
        kept = replace(placement, cols=reach, quantize=checkpoint.index.quantization)
        part = restore(*_rounded(checkpoint, kept, rows), kept.group, reach.start % kept.group)
    numbers, scales = quantise(part, bits, placement.group)
    return numbers[:, cols.start - reach.start : cols.stop - reach.start], scales


def _stored_bits(checkpoint: Reader, placement: Placement) -> int | None:
    """Bits of the whole numbers that the checkpoint holds; None: it holds floats."""
    if placement.tensor + SCALES not in checkpoint.index.tensors:
        return None
    return 8 if checkpoint.index.tensors[placement.tensor].dtype == FORMATS[8] else 4


def _rounded(checkpoint: Reader, placement: Placement, rows: Run) -> tuple[Tensor, Tensor]:
    """Numbers and scales as they are stored, always as [output, input]."""
    cols, kinds = placement.cols, [SCALES]
    assert cols is not None
    assert placement.quantize is not None
    if placement.quantize.bits == 8:
        numbers = as_tensor(checkpoint.read(placement.tensor, rows, cols))
    else:
        kinds = [SCALES, OFFSETS]
        first, last = cols.start // 2, -(-cols.stop // 2)
        packed = as_tensor(checkpoint.read(placement.tensor, rows, (first, last)))
        numbers = unpack(packed)[:, cols.start - 2 * first : cols.stop - 2 * first]
    scales = [as_tensor(checkpoint.read(placement.tensor + kind, rows, placement.groups)) for kind in kinds]
    return numbers, torch.stack(scales)


def _read(checkpoint: Reader, placement: Placement, rows: Run) -> Tensor:
    if placement.cols is None:
        part = as_tensor(checkpoint.read(placement.tensor, rows))
    elif placement.index is not None:
        one = placement.index, placement.index + 1
        part = as_tensor(checkpoint.read(placement.tensor, one, rows, placement.cols)[0])
    elif placement.transposed:
        part = as_tensor(checkpoint.read(placement.tensor, placement.cols, rows)).T
    else:
        part = as_tensor(checkpoint.read(placement.tensor, rows, placement.cols))
    if placement.paired:
        heads = part.view(rows.size // placement.paired, placement.paired // 2, 2, *part.shape[1:])
        part = heads.transpose(1, 2).reshape(part.shape)
    return part


def as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """A numpy array as a tensor without a copy; uint16 holds bfloat16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
