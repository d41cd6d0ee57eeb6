"""Sampling: the right distribution, ties to the lowest id, and the same token on any cut of the vocabulary."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwise.kernels.ops import Ops
from shardwise.runtime.logits import Row
from tests.runtime.shards import alone, assert_follows, by, chances, normal, over, pack, sample

WAYS = [by(0), by(1), by(0.7, seed=3), by(1, top_k=7), by(1, top_p=0.6), by(1, min_p=0.1), by(1.5, 50, 0.8, 0.02, 9)]


def random_row(rng: np.random.Generator, vocab: int) -> Row:
    """Every field is set or not, whatever the others are."""

    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    before = rng.integers(0, vocab, rng.integers(1, 60)).astype(np.int32)
    biased = sorted(set(rng.integers(0, vocab, maybe(9, 0)).tolist()))
    way = by(
        maybe(float(rng.uniform(0.2, 2)), 0.0) if rng.random() < 0.5 else 1.0,
        maybe(int(rng.integers(1, 40)), 0),
        maybe(float(rng.uniform(0.05, 0.99)), 1.0),
        maybe(float(rng.uniform(0.001, 0.3)), 0.0),
        int(rng.integers(2**62)),
        presence=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition=maybe(float(rng.uniform(0.5, 2)), 1.0),
        num_prompt=int(rng.integers(0, len(before) + 1)),
        biased=biased,
        biases=rng.uniform(-5, 5, len(biased)).tolist(),
    )
    allowed = rng.random(int(rng.integers(1, vocab + 1))) < 0.4
    allowed[rng.integers(len(allowed))] = True
    return Row(way, int(rng.integers(2**31)), maybe(pack(allowed), b""), before if way.penalises else None)


def expected(logits: Tensor, row: Row) -> int:
    """The winner among what may be drawn, by the kernels' plain twin."""
    kept = chances(logits, row)
    if row.by.temperature == 0:
        return next(iter(kept))
    noise = Ops(torch.float32).gumbel([row.by.seed], [row.position], 0, logits.shape[0])[0].tolist()
    return max(sorted(kept), key=lambda token: math.log(kept[token]) + noise[token])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_every_mixture_is_as_written_out_plainly(ranks: int, seed: int) -> None:
    """C4, C18: all fields at once, mates of all kinds, any cut: each row gets the token of a dense, separate draw."""
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(40, 260))
    logits = normal(40, vocab, seed)
    logits[::2] = (logits[::2] * 2).round() / 2  # ties abound
    logits[1::4, ::3] = -torch.inf
    rows = [random_row(rng, vocab) for _ in range(len(logits))]
    rows = [row._replace(mask=b"") if -torch.inf in logits[number] else row for number, row in enumerate(rows)]
    found = sample(logits, rows, ranks)
    assert found == [expected(logits[number], row) for number, row in enumerate(rows)]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_cut_of_the_vocabulary_does_not_matter(ranks: int) -> None:
    """C18: every rank draws the token that a single one would, for each way of sampling, mixed in one batch (C4)."""
    logits = normal(len(WAYS) * 8, 203, 1)
    rows = [Row(way, position) for position, way in enumerate(WAYS * 8)]
    assert sample(logits, rows, ranks) == sample(logits, rows)


def test_ties_go_to_the_lowest_id() -> None:
    """Guards against a tie that each layout breaks in its own way, also between ranks and among the filtered."""
    logits = torch.zeros(1, 40)
    logits[0, [7, 8, 21, 39]] = 5.0
    for ranks in (1, 2, 4):
        assert sample(logits, [Row(by(0), 0)], ranks) == [7]
        kept = {sample(logits, [Row(by(1, top_k=2, seed=seed), 0)], ranks)[0] for seed in range(40)}
        assert kept == {7, 8}


def test_mates_do_not_disturb() -> None:
    """C14: a row's draw is its own, whatever stands in the other rows."""
    logits = normal(6, 101, 2, 1.0)
    together = sample(logits, [Row(by(1, seed=5), 3)] * 6)
    assert together == [sample(logits[number : number + 1], [Row(by(1, seed=5), 3)])[0] for number in range(6)]
    rng = np.random.default_rng(0)
    mates = [random_row(rng, 101) for _ in range(5)]
    mine = Row(by(0.8, seed=42), 17)
    for place in range(6):
        assert sample(logits[[0] * 6], [*mates[:place], mine, *mates[place:]])[place] == sample(logits[:1], [mine])[0]


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_draws_follow_the_filtered_distribution(way: Any) -> None:
    """Guards the law of the samples: chi-square over 4000 draws, and nothing drawn that a filter removed."""
    logits = normal(1, 12, 4, 1.5)
    rows = [Row(by(way.temperature, way.top_k, way.top_p, way.min_p, seed=seed), 9) for seed in range(4000)]
    assert_follows(Counter(sample(logits.expand(4000, -1), rows)), chances(logits[0], rows[0]))


@pytest.mark.parametrize("ranks", [1, 3])
def test_filters_look_beyond_the_first_candidates(ranks: int) -> None:
    """Guards the short cuts: a flat row needs more tokens than are exchanged or looked at first."""
    logits = torch.zeros(300, 5000)
    for way, most in ((by(top_p=0.9), 4500), (by(top_k=3000), 3000), (by(top_k=2000, top_p=0.5), 1000)):
        rows = [Row(by(1, way.top_k, way.top_p, seed=seed), 0) for seed in range(300)]
        drawn = sample(logits, rows, ranks)
        assert max(drawn) < most
        assert max(drawn) > most - most // 20


def test_filters_that_keep_all_change_nothing() -> None:
    """Guards against noise or rounding that depends on how a row was filtered."""
    logits = normal(50, 90, 8)
    plain = sample(logits, [Row(by(seed=seed), 0) for seed in range(50)])
    for way in (by(top_k=90), by(top_k=10**9), by(top_p=1 - 2**-53), by(min_p=1e-300)):
        rows = [Row(by(1, way.top_k, way.top_p, way.min_p, seed), 0) for seed in range(50)]
        assert sample(logits, rows, 2) == plain


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-7, 1e-12, 1e-300, 5e-324])
def test_hardly_any_temperature_is_greedy(temperature: float) -> None:
    """C1: overflow at temperatures near zero: NaN, infinity or an arbitrary token."""
    logits = normal(20, 64, 5, 1.0)
    logits[:10] *= 1e30
    greedy = sample(logits, [Row(by(0), 0)] * 20)
    for way in (by(temperature), by(temperature, top_k=5), by(temperature, top_p=0.5), by(temperature, min_p=0.1)):
        assert sample(logits, [Row(way, 0)] * 20, 2) == greedy
        assert alone(64).probabilities(logits, [Row(way, 0)] * 20).argmax(1).tolist() == greedy


def test_a_tiny_top_p_keeps_a_token() -> None:
    """C2: an empty nucleus."""
    logits = normal(20, 64, 6)
    greedy = logits.argmax(1).tolist()
    for way in (by(top_p=1e-4), by(top_p=5e-324), by(top_p=1e-4, top_k=5), by(min_p=1.0), by(2.0, top_k=1)):
        assert sample(logits, [Row(way, 3)] * 20, 2) == greedy
    assert sample(torch.zeros(1, 64), [Row(by(top_p=1e-4), 3)]) == [0]


def test_penalties_count_what_they_should() -> None:
    """C13: presence and frequency count the answer only, repetition the prompt too."""
    logits = torch.tensor([[3.0, 2.0, 1.0, -1.0, -2.0]])
    before = np.array([0, 0, 0, 1], np.int32)

    def best(num_prompt: int, **penalties: float) -> int:
        return sample(logits, [Row(by(0, num_prompt=num_prompt, **penalties), 4, before=before)], 2)[0]

    assert best(4, presence=2.0, frequency=2.0) == 0  # all of it is the prompt
    assert best(3, presence=2.0) == 0  # 3, 0, 1
    assert best(0, presence=2.0) == 0  # 1, 0, 1: a tie
    assert best(2, presence=1.5, frequency=0.6) == 2  # 0.9, -0.1, 1
    assert best(0, frequency=0.5) == 0  # 1.5, 1.5, 1
    assert best(0, frequency=0.7) == 1  # 0.9, 1.3, 1
    assert best(4, repetition=3.1) == 2  # 0.97, 0.65, 1
    assert best(4, repetition=0.5) == 0
    negative = sample(-logits.abs(), [Row(by(0, repetition=4.0), 2, before=np.array([2, 3], np.int32))])
    assert negative == [1]  # -3, -2, -4, -4, -2: a negative logit is multiplied


def test_bias_comes_before_the_repetition_penalty() -> None:
    """Guards the order of the field: a bias that makes a logit positive has it divided, not multiplied."""
    logits = torch.tensor([[-1.0, 2.5]])
    row = Row(by(0, repetition=2.0, biased=[0], biases=[5.0]), 1, before=np.array([0], np.int32))
    assert sample(logits, [row]) == [1]  # (-1 + 5) / 2 = 2; the other order gives -1 * 2 + 5 = 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_forbidden_token_never_wins(ranks: int) -> None:
    """Guards the mask: any length, any cut, any noise and bias."""
    vocab = 61
    for length in (1, 7, 8, 9, 30, 61, 400):
        allowed = np.zeros(length, bool)
        allowed[[0, min(length, vocab) - 1]] = True
        logits = normal(60, vocab, length, 30.0)
        ways = [by(0), by(5.0), by(1, top_k=9), by(9, top_p=0.9), by(1, min_p=0.5), by(1, biased=[3], biases=[100.0])]
        rows = [Row(way, number, pack(allowed)) for number, way in enumerate(ways * 10)]
        assert set(sample(logits, rows, ranks)) <= {0, min(length, vocab) - 1}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ids_beyond_the_tokens_are_never_drawn(ranks: int) -> None:
    """Guards a drafter with more vocabulary rows than the model has tokens."""
    logits = torch.arange(50.0).expand(4, 50)
    rows = [Row(way, 0) for way in (by(0), by(30.0), by(1, top_k=1), by(1, top_p=0.1))]
    found = sample(logits, rows, ranks, num_tokens=7)
    assert max(found) < 7
    assert [found[0], *found[2:]] == [6, 6, 6]
    assert alone(50, num_tokens=7).probabilities(logits, rows)[:, 7:].count_nonzero() == 0


@pytest.mark.parametrize("way", [by(0), by(1), by(1, top_k=3), by(1, top_p=0.5), by(1, min_p=0.5), by(0, top_p=0.5)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_not_a_number_is_an_error(way: Any, ranks: int) -> None:
    """Guards against NaN or infinite logits becoming a plausible token, even where a mask forbids theirs."""
    for worst in (torch.nan, torch.inf):
        logits = normal(1, 20, 0)
        logits[0, 13] = worst
        for row in (Row(way, 0), Row(way, 0, b"\x07")):
            with pytest.raises(FloatingPointError, match="NaN"):
                sample(logits, [row], ranks)
        with pytest.raises(FloatingPointError, match="NaN"):
            alone(20).probabilities(logits, [Row(way, 0)])


@pytest.mark.parametrize("way", [by(0), by(1), by(1, top_k=3), by(1, top_p=0.5), by(1, min_p=0.5)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_allowed_is_an_error(way: Any, ranks: int) -> None:
    """Guards against a forbidden token where the mask, or the model, allows none."""
    logits = normal(1, 20, 0)
    for row, whole in ((Row(way, 0, b"\0"), logits), (Row(way, 0), logits - torch.inf)):
        with pytest.raises(FloatingPointError, match="no token may be drawn"):
            sample(whole, [row], ranks)


def test_logits_are_left_alone() -> None:
    """Guards the raw rows, which are reported and whose log-probabilities are taken afterwards."""
    rng = np.random.default_rng(3)
    for dtype in (torch.float32, torch.float64):
        logits = normal(30, 70, 3).to(dtype)
        before = logits.clone()
        rows = [random_row(rng, 70) for _ in range(30)]
        sample(logits, rows)
        alone(70).probabilities(logits, rows)
        alone(70).probabilities(logits, [Row(by(0), 0)] * 30)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_probabilities_are_those_of_the_draws(ranks: int) -> None:
    """Guards the distributions that drafts are judged by: every field, and the same bits on any cut."""
    rng = np.random.default_rng(ranks)
    logits = normal(40, 150, ranks)
    logits[::2] = (logits[::2] * 2).round() / 2
    rows = [random_row(rng, 150) for _ in range(40)]
    found = over(ranks, 150, lambda sampler, cut: sampler.probabilities(cut(logits), rows))
    assert torch.equal(found, alone(150).probabilities(logits, rows))
    for number, row in enumerate(rows):
        wanted = torch.zeros(150, dtype=torch.float64)
        for token, chance in chances(logits[number], row).items():
            wanted[token] = chance
        torch.testing.assert_close(found[number], wanted, rtol=1e-12, atol=1e-15)
