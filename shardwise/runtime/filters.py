"""top_k and top_p as a threshold on scores: a rank that is told it filters its own run of the vocabulary.

Of equal scores the lower ids are kept first, so the least score kept and the number of its equals say it all.
"""

from __future__ import annotations

import math

from torch import Tensor

from shardwise.kernels.ops import Ops
from shardwise.schedule.step import Sampling

CANDIDATES = 1024
"""Most scores that a rank sends of a row instead of all; also those that top_p looks at first."""


def needed(by: Sampling) -> float:
    """So many of a row's best scores settle what is kept: all of them for top_p alone, whose mass is that of the row."""
    if by.top_k:
        return by.top_k if by.top_k <= CANDIDATES else math.inf
    return math.inf if by.top_p < 1.0 else 1


def threshold(ops: Ops, scores: Tensor, by: Sampling) -> tuple[float, int]:
    """The least score that top_k and then top_p keep, and how many of its equals; at least one token stays.

    ``scores`` [n] float64 holds at least the `needed` best of the row, all finite or minus infinity. top_p keeps the
    smallest set of the likeliest tokens, within the top_k, whose probability reaches it (Holtzman et al. 2020).
    """
    count = min(by.top_k or scores.shape[0], scores.shape[0])
    best = scores.topk(count if by.top_k else min(count, CANDIDATES)).values
    if by.top_p < 1.0:
        total = None if by.top_k else ops.exp(scores - best[0]).cumsum(0)[-1]  # cumsum adds in one fixed order
        while True:
            mass = ops.exp(best - best[0]).cumsum(0)
            bar = by.top_p * (mass[-1] if total is None else total)
            if len(best) == count or bool(mass[-1] >= bar):
                break
            best = scores.topk(min(count, 4 * len(best))).values
        count = min(int((mass < bar).sum()) + 1, count)
    best = best[:count]
    return float(best[-1]), int((best == best[-1]).sum())
