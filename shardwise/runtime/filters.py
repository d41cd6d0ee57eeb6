"""top_k, top_p and min_p on one rank's run of the vocabulary, given the best scores of all ranks.

Of equal scores the lower ids are kept first, so the least score kept and the number of its equals say what stays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.kernels.ops import Ops
from shardwise.schedule.step import Sampling

CANDIDATES = 1024
"""The largest top_k for which ranks exchange their best scores alone; also the scores that top_p looks at first."""
ALL = 2**62


def needed(by: Sampling) -> int:
    """So many of a row's best scores settle what is kept: 0 without filters, `ALL` where top_p wants the whole mass."""
    if by.temperature == 0:
        return 0  # the best score wins, and no filter removes it
    if by.top_k:
        return by.top_k if by.top_k <= CANDIDATES else ALL
    return ALL if by.top_p < 1.0 else int(by.min_p > 0)


def keep(ops: Ops, own: Tensor, known: Tensor, ahead: int, by: Sampling) -> Tensor:
    """Which of a rank's ``own`` [n] scores stay: [n] bool. top_k applies first, then top_p, then min_p.

    ``known`` [m] are the `needed` best scores of each rank, or all of them, in rank order; the first ``ahead`` come
    from the ranks with lower ids. Scores are float64, divided by the temperature. min_p keeps tokens at least that
    likely in proportion to the likeliest one. A row whose best score is not finite is left as it is.
    """
    kept = torch.ones_like(own, dtype=torch.bool)
    best = known.max()
    if not bool(best.isfinite()):
        return kept
    if by.top_k or by.top_p < 1.0:
        least, equals = _threshold(ops, known, by)
        ties = own == least
        equals -= int((known[:ahead] == least).sum())
        kept = (own > least) | (ties & (ties.cumsum(0) <= equals))
    if by.min_p:
        kept &= ops.exp(own - best) >= by.min_p
    return kept


def _threshold(ops: Ops, scores: Tensor, by: Sampling) -> tuple[float, int]:
    """The least score that top_k and then top_p keep, and how many of its equals; at least one token stays.

    top_p keeps the smallest set of the likeliest tokens, within the top_k, whose probability reaches it (Holtzman et
    al. 2020).
    """
    count = min(by.top_k or scores.shape[0], scores.shape[0])
    best = scores.topk(count if by.top_k else min(count, CANDIDATES)).values
    if by.top_p < 1.0:
        whole = None if by.top_k else ops.exp(scores - best[0]).cumsum(0)[-1]  # cumsum adds in one fixed order
        while True:
            mass = ops.exp(best - best[0]).cumsum(0)
            bar = by.top_p * (mass[-1] if whole is None else whole)
            if len(best) == count or bool(mass[-1] >= bar):
                break
            best = scores.topk(min(count, 4 * len(best))).values
        best = best[: int((mass < bar).sum()) + 1]
    return float(best[-1]), int((best == best[-1]).sum())
