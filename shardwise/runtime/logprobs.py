"""Log-probabilities by the raw model, of given tokens and of the likeliest ones, on vocabulary shards.

A row's sum of exponentials is made of whole numbers, which add up to the same in any order: any cut of the vocabulary
gives the same bits, and no logits are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.kernels.ops import Ops
from shardwise.parallel.axis import Axis
from shardwise.runtime.logits import check
from shardwise.schedule.step import Logprob

PIECE = 2**18
"""Logits of a rank looked at together: float64 copies of these stay in the cache; those of a prompt take gigabytes."""
GRAIN = 2.0**30
"""Exponentials are counted in units of 2^-30 and the rest in units of 2^-60: float64 adds 2^23 of either exactly."""


def logprobs(
    ops: Ops, axis: Axis, sizes: Sequence[int], logits: Tensor, tokens: Sequence[int], nums_top: Sequence[int]
) -> list[Logprob]:
    """Natural logarithms for ``logits`` [R, sizes[rank]]: of one token a row and of its ``nums_top`` likeliest.

    Of equal ones the lower id comes first. Raises FloatingPointError if a row's highest logit is not a finite number.
    """
    found: list[Logprob] = []
    rows = max(1, PIECE // max(sizes))
    for start in range(0, len(tokens), rows):
        part = slice(start, start + rows)
        found += _logprobs(ops, axis, sizes, logits[part], tokens[part], nums_top[part])
    return found


def _logprobs(
    ops: Ops, axis: Axis, sizes: Sequence[int], logits: Tensor, tokens: Sequence[int], nums_top: Sequence[int]
) -> list[Logprob]:
    first, ones = sum(sizes[: axis.rank]), [1] * axis.size
    best = axis.all_gather(logits.amax(1, keepdim=True).double(), ones).amax(1, keepdim=True)
    check(best)
    units = ops.exp(logits.double() - best) * GRAIN
    whole = units.round()
    rest = units.sub_(whole).mul_(GRAIN).round_()
    whole, rest = (axis.all_gather(part.sum(1, keepdim=True), ones).sum(1, keepdim=True) for part in (whole, rest))
    totals = ((whole + rest / GRAIN) / GRAIN).flatten().tolist()
    log_totals = torch.tensor([[math.log(total)] for total in totals], dtype=torch.float64, device=logits.device)

    columns = torch.tensor(tokens, device=logits.device)[:, None] - first
    elsewhere = (columns < 0) | (columns >= logits.shape[1])
    given = logits.gather(1, columns.clamp(0, logits.shape[1] - 1)).double().masked_fill(elsewhere, -math.inf)
    given = axis.all_gather(given, ones).amax(1, keepdim=True)

    counts = [min(max(nums_top), size) for size in sizes]
    likely = _likeliest(logits, counts[axis.rank])
    values = axis.all_gather(logits.gather(1, likely).double(), counts)
    ids = axis.all_gather(likely + first, counts)
    values, order = values.sort(dim=1, descending=True, stable=True)  # ranks hold ascending ids
    ids = ids.gather(1, order)

    own, top = ((each - best - log_totals).tolist() for each in (given, values))
    return [
        Logprob(token, logprob, list(zip(row_ids[:num_top], row, strict=False)))
        for token, (logprob,), row_ids, row, num_top in zip(tokens, own, ids.tolist(), top, nums_top, strict=True)
    ]


def _likeliest(scores: Tensor, count: int) -> Tensor:
    """Columns [R, count] of each row's highest ``scores`` [R, n], highest first, the lower one first among equals."""
    if count == 0:
        return torch.empty(scores.shape[0], 0, dtype=torch.int64, device=scores.device)
    rows, columns = (scores >= scores.topk(count).values[:, -1:]).nonzero(as_tuple=True)
    order = scores[rows, columns].sort(descending=True, stable=True).indices
    order = order[rows[order].sort(stable=True).indices]
    starts = torch.searchsorted(rows, torch.arange(scores.shape[0], device=scores.device))
    return columns[order][starts[:, None] + torch.arange(count, device=scores.device)]
