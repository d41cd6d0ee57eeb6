"""From a step's plain data to the tensors of one forward pass: the one place where they are made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.config import BLOCK
from shardwise.models.batch import Batch
from shardwise.schedule.step import Chunk


def make_batch(chunks: Sequence[Chunk], device: torch.device) -> Batch:
    """Rows in the order of the chunks. Of each chunk the scored rows, then those to sample, are the rows wanted."""
    lengths = np.array([len(chunk.tokens) for chunk in chunks], dtype=np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), lengths.cumsum()])
    rows = int(starts[-1])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    firsts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    positions = np.arange(rows) - starts[:-1][owner] + firsts[owner]

    # Never one column: of sizes that are 1 torch.compile makes graphs of their own.
    table = np.zeros((len(chunks), max(2, *(len(chunk.blocks) for chunk in chunks))), dtype=np.int64)
    for row, chunk in enumerate(chunks):
        table[row, : len(chunk.blocks)] = chunk.blocks
    slots = table[owner, positions // BLOCK] * BLOCK + positions % BLOCK

    def tensor(values: NDArray[np.int64], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    wanted: list[int] = []
    for chunk, start, end in zip(chunks, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        wanted += range(start, start + len(chunk.scored))
        if chunk.sampling is not None:
            wanted += range(end - chunk.drafts - 1, end)
    return Batch(
        ids=tensor(np.fromiter((token for chunk in chunks for token in chunk.tokens), np.int64, rows), torch.int64),
        positions=tensor(positions),
        slots=tensor(slots),
        starts=tensor(starts),
        table=tensor(table),
        sample_rows=tensor(np.array(wanted, dtype=np.int64), torch.int64),
    )
