"""What a request changes in its logits before a token is drawn: bias, penalties and forbidden tokens.

Every value depends on its own logit and id alone, in float64, so each rank works on its own run of the vocabulary and
any cut gives the same bits. Knows nothing of temperature, noise and other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.schedule.step import Sampling

BROKEN = "logits are not numbers (NaN or infinity): the weights or the number format are broken"
EMPTY = "no token may be drawn: every one is forbidden, by the request's mask or by a logit of minus infinity"


class Row(NamedTuple):
    """A row of logits and what the token drawn from it must heed."""

    by: Sampling
    position: int
    """Where the drawn token will stand."""
    mask: bytes = b""
    """Bit t % 8 of byte t // 8 tells whether token t may be drawn; those beyond its end may not. Empty: all may."""
    before: NDArray[np.int32] | None = None
    """All tokens before the position, drafts included; needed where ``by`` penalises."""


def process(logits: Tensor, rows: Sequence[Row], first: int, count: int) -> Tensor:
    """The scores of ``logits`` [R, n], whose ids start at ``first``: new and float64, or ``logits`` if all is plain.

    In this order, which is that of vLLM and transformers: the bias is added; the repetition penalty divides positive
    and multiplies other logits of tokens in prompt or answer (Keskar et al. 2019); the frequency penalty, times the
    token's count, and the presence penalty are subtracted for tokens of the answer; forbidden tokens become minus
    infinity, and so do the columns from ``count`` on. A NaN stays one even where it is forbidden, and so is found.
    """
    plain = all(not (row.mask or row.by.biased or row.by.penalises) for row in rows)
    if plain and count >= logits.shape[1]:
        return logits
    scores = logits.to(torch.float64, copy=True)
    for own, row in zip(scores, rows, strict=True):
        if row.by.biased:
            _bias(own, row.by, first)
        if row.by.penalises:
            assert row.before is not None
            _penalise(own, row.by, row.before, first)
        if row.mask:
            own += _bars(row.mask, first, own.shape[0]).to(own.device)
    scores[:, max(count, 0) :] += -math.inf
    return scores


def check(best: Tensor) -> None:
    """Raise FloatingPointError unless each row's ``best`` score is a finite number."""
    if not bool(best.isfinite().all()):
        raise FloatingPointError(EMPTY if bool((best < math.inf).all()) else BROKEN)


def _bias(own: Tensor, by: Sampling, first: int) -> None:
    ids = np.array(by.biased) - first
    inside = (ids >= 0) & (ids < own.shape[0])
    own[_to(ids[inside], own)] += _to(np.array(by.biases)[inside], own)


def _penalise(own: Tensor, by: Sampling, before: NDArray[np.int32], first: int) -> None:
    if by.repetition != 1.0:
        seen, _ = _count(before, own, first)
        values = own[seen]
        own[seen] = torch.where(values > 0, values / by.repetition, values * by.repetition)
    if by.frequency or by.presence:
        seen, counts = _count(before[by.num_prompt :], own, first)
        own[seen] = own[seen] - by.frequency * counts - by.presence


def _count(tokens: NDArray[np.int32], own: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Which columns of ``own`` stand for one of the tokens, and how often it occurs."""
    ids = tokens[(tokens >= first) & (tokens < first + own.shape[0])] - first
    counts = np.bincount(ids, minlength=own.shape[0])
    (seen,) = counts.nonzero()
    return _to(seen, own), _to(counts[seen].astype(np.float64), own)


def _bars(mask: bytes, first: int, size: int) -> Tensor:
    """0 for the allowed ones of ids ``first`` to ``first + size``, minus infinity for the others."""
    own = np.frombuffer(mask, np.uint8)[first // 8 : -(-(first + size) // 8)]
    allowed = np.unpackbits(own, bitorder="little")[first % 8 :][:size].astype(bool)
    bars = np.full(size, -np.inf)
    bars[: len(allowed)][allowed] = 0.0
    return torch.from_numpy(bars)


def _to(values: NDArray[np.int64] | NDArray[np.float64], own: Tensor) -> Tensor:
    return torch.from_numpy(values).to(own.device)
