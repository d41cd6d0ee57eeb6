"""From a step's plain data to the tensors of one forward pass: the one place where they are made."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.config import BLOCK
from shardwise.models.batch import Batch
from shardwise.schedule.step import Step


def make_batch(step: Step, device: torch.device) -> Batch:
    """Rows in the step's order; the last row of each sampled chunk is a row to sample."""
    lengths = np.array([len(chunk.tokens) for chunk in step.chunks], dtype=np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), lengths.cumsum()])
    rows = int(starts[-1])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    firsts = np.array([chunk.start for chunk in step.chunks], dtype=np.int64)
    positions = np.arange(rows) - starts[:-1][owner] + firsts[owner]

    table = np.zeros((len(step.chunks), max(len(chunk.blocks) for chunk in step.chunks)), dtype=np.int64)
    for row, chunk in enumerate(step.chunks):
        table[row, : len(chunk.blocks)] = chunk.blocks
    slots = table[owner, positions // BLOCK] * BLOCK + positions % BLOCK

    def tensor(values: NDArray[np.int64], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    sampled = [end - 1 for chunk, end in zip(step.chunks, starts[1:], strict=True) if chunk.sampling is not None]
    return Batch(
        ids=tensor(
            np.fromiter((token for chunk in step.chunks for token in chunk.tokens), np.int64, rows), torch.int64
        ),
        positions=tensor(positions),
        slots=tensor(slots),
        starts=tensor(starts),
        table=tensor(table),
        sample_rows=tensor(np.array(sampled, dtype=np.int64), torch.int64),
    )
