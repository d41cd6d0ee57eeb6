"""From checkpoint slices to a rank's parameters, in pieces so small that no second copy of the model ever exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.parallel.placement import Placement, Plan, Run
from shardwise.weights.checkpoint import Checkpoint

PIECE = 16 * 2**20
"""Elements' bytes (as float32) read at once."""


def load(checkpoint: Checkpoint, plan: Plan, write: Callable[[str, int, Tensor], None]) -> None:
    """Read every slice of ``plan`` and hand it to ``write(parameter, first row, part)``; raises LoadError."""
    for parameter, placements in plan.items():
        row = 0
        for placement in placements:
            for rows in _pieces(placement):
                write(parameter, row, _read(checkpoint, placement, rows))
                row += rows.size


def _pieces(placement: Placement) -> list[Run]:
    """Runs of rows of at most PIECE bytes, never cutting a group of paired rows."""
    width = 4 * (1 if placement.cols is None else placement.cols.size)
    unit = placement.paired or 1
    step = max(1, PIECE // (width * unit)) * unit
    return [
        Run(start, min(start + step, placement.rows.stop))
        for start in range(placement.rows.start, placement.rows.stop, step)
    ]


def _read(checkpoint: Checkpoint, placement: Placement, rows: Run) -> Tensor:
    if placement.cols is None:
        part = as_tensor(checkpoint.read(placement.tensor, rows))
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
