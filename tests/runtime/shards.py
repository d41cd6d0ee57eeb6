"""A sampler on every cut of a vocabulary: what the tests of sampling share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.kernels.ops import load_ops
from shardwise.parallel.axis import Axis
from shardwise.parallel.placement import Run, split
from shardwise.parallel.threads import thread_axes
from shardwise.runtime.logits import Row
from shardwise.runtime.sampler import Sampler
from shardwise.schedule.step import Sampling

T = TypeVar("T")
OPS, _ = load_ops("auto", "cpu", torch.float32)


def by(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0, **others: Any
) -> Sampling:
    return Sampling(temperature, top_k, top_p, min_p, seed, **others)


def over(ranks: int, vocab: int, work: Callable[[Sampler, Callable[[Tensor], Tensor]], T], **settings: Any) -> T:
    """What ``work(sampler, cut)`` yields, the same on every rank; ``cut`` takes a rank's columns of a whole row."""
    parts = split(vocab, ranks)
    axes = [tp for tp, _ in thread_axes(ranks, 1, 20.0)]

    def one(rank: int) -> T:
        start, stop = parts[rank]
        return work(Sampler(OPS, axes[rank], parts, **settings), lambda whole: whole[:, start:stop].contiguous())

    if ranks == 1:
        return one(0)
    with ThreadPoolExecutor(ranks) as pool:
        first, *others = list(pool.map(one, range(ranks)))
    for other in others:
        assert torch.equal(other, first) if isinstance(first, Tensor) and isinstance(other, Tensor) else other == first
    return first


def sample(logits: Tensor, rows: list[Row], ranks: int = 1, **settings: Any) -> list[int]:
    return over(ranks, logits.shape[1], lambda sampler, cut: sampler.sample(cut(logits), rows), **settings)


def alone(vocab: int, **settings: Any) -> Sampler:
    return Sampler(OPS, Axis(), [Run(0, vocab)], **settings)


def normal(rows: int, vocab: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def pack(allowed: NDArray[np.bool_]) -> bytes:
    return np.packbits(allowed, bitorder="little").tobytes()


def chances(logits: Tensor, row: Row) -> dict[int, float]:
    """The probabilities that a row's tokens are drawn with, written out plainly, token by token."""
    way, scores = row.by, {token: float(logit) for token, logit in enumerate(logits.double())}
    before = [] if row.before is None else row.before.tolist()
    for token, bias in zip(way.biased, way.biases, strict=True):
        scores[token] += bias
    for token in set(before):
        scores[token] = scores[token] / way.repetition if scores[token] > 0 else scores[token] * way.repetition
    for token in set(before[way.num_prompt :]):
        scores[token] = scores[token] - before[way.num_prompt :].count(token) * way.frequency - way.presence
    if row.mask:
        bits = "".join(f"{byte:08b}"[::-1] for byte in row.mask)
        scores = {token: score for token, score in scores.items() if bits[token : token + 1] == "1"}
    order = sorted(scores, key=lambda token: (-scores[token], token))
    if way.temperature == 0:
        return {order[0]: 1.0}
    if way.top_k:
        order = order[: way.top_k]
    odds = {token: math.exp((scores[token] - scores[order[0]]) / way.temperature) for token in order}
    total, mass, nucleus = sum(odds.values()), 0.0, []
    for token in order:
        nucleus.append(token)
        mass += odds[token]
        if way.top_p < 1 and mass >= way.top_p * total:
            break
    kept = [token for token in nucleus if odds[token] >= way.min_p and odds[token] > 0]
    total = sum(odds[token] for token in kept)
    return {token: odds[token] / total for token in kept}


def assert_follows(counts: Mapping[int, int], expected: Mapping[int, float]) -> None:
    """Chi-square at one in a million (Wilson and Hilferty's approximation), and nothing that may not occur."""
    draws = sum(counts.values())
    if draws < 100:
        return
    assert {token for token, count in counts.items() if count} <= {token for token, share in expected.items() if share}
    sizes = {token: draws * share for token, share in expected.items() if draws * share >= 5}
    rest = draws - sum(sizes.values())
    chi = sum((counts.get(token, 0) - size) ** 2 / size for token, size in sizes.items())
    if rest >= 5:
        chi += (draws - sum(counts.get(token, 0) for token in sizes) - rest) ** 2 / rest
    freedom = len(sizes) - 1 + (rest >= 5)
    if freedom > 0:
        spread = 2 / (9 * freedom)
        assert ((chi / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(spread) < 4.76, (chi, freedom)
    else:
        assert chi < 1e-6
