"""Sums of hidden states, for embeddings, in whole numbers: how a prompt is cut into chunks then changes no bit.

Knows chunks and rows; what becomes of the sums is the front process's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.schedule.step import GRAIN, Chunk


def pool(chunks: Sequence[Chunk], x: Tensor, final: Callable[[Tensor], Tensor]) -> list[bytes]:
    """`StepResult.sums`: over each chunk's pooled rows of ``final(x)``, where ``x`` is [M, hidden], not normed yet.

    Rows that are too large to be added up count as not finite.
    """
    if not any(chunk.pooled for chunk in chunks):
        return []
    found = []
    end = 0
    for chunk in chunks:
        end += len(chunk.tokens)
        found.append(_sum(final(x[end - chunk.pooled : end])) if chunk.pooled else b"")
    return found


def _sum(rows: Tensor) -> bytes:
    units = (rows.double() * GRAIN).round()
    if not bool((units.abs().sum(0) < 2.0**62).all()):  # false for NaN too
        return b""
    return units.to(torch.int64).sum(0).cpu().numpy().tobytes()
