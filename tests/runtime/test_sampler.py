"""Sampling: the right distribution, ties to the lowest id, and the same token on any cut of the vocabulary."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from shardwise.kernels.ops import load_ops
from shardwise.parallel.axis import Axis
from shardwise.parallel.placement import Run, split
from shardwise.parallel.threads import thread_axes
from shardwise.runtime.sampler import Sampler
from shardwise.schedule.step import Sampling

OPS, _ = load_ops("auto", "cpu", torch.float32)


def by(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0) -> Sampling:
    return Sampling(temperature, top_k, top_p, min_p, seed)


def sample(logits: Tensor, samplings: list[Sampling], positions: list[int], ranks: int = 1) -> list[int]:
    """Sample with the vocabulary cut over ``ranks`` threads; all ranks must agree."""
    parts = split(logits.shape[1], ranks)
    if ranks == 1:
        return Sampler(OPS, Axis(), [Run(0, logits.shape[1])]).sample(logits, samplings, positions)
    axes = [tp for tp, _ in thread_axes(ranks, 1, 20.0)]

    def work(rank: int) -> list[int]:
        own = logits[:, parts[rank].start : parts[rank].stop].contiguous()
        return Sampler(OPS, axes[rank], parts).sample(own, samplings, positions)

    with ThreadPoolExecutor(ranks) as pool:
        first, *others = list(pool.map(work, range(ranks)))
    assert all(other == first for other in others)
    return first


WAYS = [by(0), by(1), by(0.7, seed=3), by(1, top_k=7), by(1, top_p=0.6), by(1, min_p=0.1), by(1.5, 50, 0.8, 0.02, 9)]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_cut_of_the_vocabulary_does_not_matter(ranks: int) -> None:
    """C18: every rank draws the token that a single one would, for each way of sampling, mixed in one batch (C4)."""
    logits = torch.randn(len(WAYS) * 8, 203, generator=torch.Generator().manual_seed(1)) * 3
    samplings, positions = WAYS * 8, list(range(len(WAYS) * 8))
    assert sample(logits, samplings, positions, ranks) == sample(logits, samplings, positions)


def test_ties_go_to_the_lowest_id() -> None:
    """Guards against a tie that each layout breaks in its own way, also between ranks and among the filtered."""
    logits = torch.zeros(1, 40)
    logits[0, [7, 8, 21, 39]] = 5.0
    for ranks in (1, 2, 4):
        assert sample(logits, [by(0)], [0], ranks) == [7]
        kept = {sample(logits, [by(1, top_k=2, seed=seed)], [0], ranks)[0] for seed in range(40)}
        assert kept == {7, 8}


def test_mates_do_not_disturb() -> None:
    """C14: a row's draw is its own, whatever stands in the other rows."""
    logits = torch.randn(6, 101, generator=torch.Generator().manual_seed(2))
    together = sample(logits, [by(1, seed=5)] * 6, [3] * 6)
    alone = [sample(logits[row : row + 1], [by(1, seed=5)], [3])[0] for row in range(6)]
    assert together == alone


def distribution(logits: Tensor, way: Sampling) -> dict[int, float]:
    """The probabilities that a filter leaves, written out plainly."""
    scaled = logits.double() / way.temperature
    kept = sorted(range(len(scaled)), key=lambda token: (-float(scaled[token]), token))
    if way.top_k:
        kept = kept[: way.top_k]
    odds = {token: math.exp(float(scaled[token] - scaled.max())) for token in kept}
    if way.top_p < 1:
        total, mass, nucleus = sum(odds.values()), 0.0, []
        for token in kept:
            nucleus.append(token)
            mass += odds[token]
            if mass >= way.top_p * total:
                break
        kept = nucleus
    kept = [token for token in kept if odds[token] >= way.min_p * max(odds.values())]
    total = sum(odds[token] for token in kept)
    return {token: odds[token] / total for token in kept}


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_draws_follow_the_filtered_distribution(way: Sampling) -> None:
    """Guards the law of the samples: chi-square over 4000 draws, and nothing drawn that a filter removed."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(4)) * 1.5
    expected = distribution(logits[0], way)
    draws = 4000
    samplings = [by(way.temperature, way.top_k, way.top_p, way.min_p, seed=seed) for seed in range(draws)]
    found = Counter(sample(logits.expand(draws, -1), samplings, [9] * draws))
    assert set(found) <= set(expected)
    chi = sum((found[token] - draws * share) ** 2 / (draws * share) for token, share in expected.items())
    freedom = len(expected) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom) + 1e-9, (chi, freedom)


def test_top_p_looks_beyond_the_first_candidates() -> None:
    """Guards the short cut of top_p: a flat distribution needs more tokens than are looked at first."""
    logits = torch.zeros(1, 5000)
    drawn = {sample(logits, [by(1, top_p=0.9, seed=seed)], [0])[0] for seed in range(300)}
    assert max(drawn) < 4500
    assert max(drawn) > 3500


@pytest.mark.parametrize("way", [by(0), by(1), by(1, top_k=3), by(0, top_p=0.5)])
def test_not_a_number_is_an_error(way: Sampling) -> None:
    """Guards against NaN logits becoming a plausible token."""
    logits = torch.randn(1, 20)
    logits[0, 13] = torch.nan
    for ranks in (1,):
        with pytest.raises(FloatingPointError, match="NaN"):
            sample(logits, [way], [0], ranks)
