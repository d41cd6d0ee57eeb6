"""Log-probabilities by the raw model: exact, in a fixed order, and the same bits on any cut of the vocabulary."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwise.schedule.step import Logprob
from tests.runtime.shards import alone, over


def logits_of(rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """Sharp, flat, tied, shifted and partly impossible rows."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab), dtype=torch.float64)
    logits[::5] *= 20
    logits[1::5] *= 0.01
    logits[2::5] = logits[2::5].round()
    logits[3::5] += 1000
    logits[4::5, 1::3] = -torch.inf
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [17, 300, 50_000])
def test_they_are_those_of_a_float64_log_softmax(vocab: int, dtype: torch.dtype) -> None:
    """Guards against single precision, a processed row, a wrong neighbour, or an order that ties upset."""
    logits = logits_of(10, vocab, dtype)
    rng = np.random.default_rng(vocab)
    tokens, tops = rng.integers(0, vocab, 10).tolist(), [0, 1, 20, 5, 20, 20, 3, 2, 20, 17]
    wanted = torch.log_softmax(logits.double(), dim=1)
    found = alone(vocab).logprobs(logits, tokens, tops)
    for row, (told, token, top) in enumerate(zip(found, tokens, tops, strict=True)):
        order = np.lexsort((np.arange(vocab), -logits[row].numpy()))[:top].tolist()
        assert told.token == token
        assert [other for other, _ in told.top] == order
        for other, logprob in [(token, told.logprob), *told.top]:
            assert logprob == pytest.approx(float(wanted[row, other]), rel=0, abs=1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("vocab", [17, 1003])
def test_the_cut_of_the_vocabulary_does_not_matter(vocab: int, ranks: int) -> None:
    """Guards against sums that depend on who adds them: the same bits on every rank, in more rows than go at once."""
    logits = logits_of(150, vocab, torch.float32)
    rng = np.random.default_rng(ranks)
    tokens, tops = rng.integers(0, vocab, 150).tolist(), rng.integers(0, 21, 150).tolist()
    whole = alone(vocab).logprobs(logits, tokens, tops)
    assert over(ranks, vocab, lambda sampler, cut: sampler.logprobs(cut(logits), tokens, tops)) == whole
    for row in (0, 70, 149):  # nor do a row's mates
        assert alone(vocab).logprobs(logits[[row]], [tokens[row]], [tops[row]]) == [whole[row]]


def test_the_least_that_can_be_asked() -> None:
    """Guards the edges: no rows, no likeliest tokens, more of them than there are, an impossible token."""
    sampler = alone(4)
    assert sampler.logprobs(torch.empty(0, 4), [], []) == []
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]])
    half = math.log(0.5)
    assert sampler.logprobs(logits, [1], [0]) == [Logprob(1, -math.inf, [])]
    top = [(0, half), (2, half), (1, -math.inf), (3, -math.inf)]
    assert over(3, 4, lambda sampler, cut: sampler.logprobs(cut(logits), [2], [20])) == [Logprob(2, half, top)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_not_a_number_is_an_error(ranks: int) -> None:
    """Guards against log-probabilities of a broken model."""
    for worst in (torch.nan, torch.inf):
        logits = torch.zeros(1, 9)
        logits[0, 4] = worst
        with pytest.raises(FloatingPointError, match="NaN"):
            over(ranks, 9, lambda sampler, cut, logits=logits: sampler.logprobs(cut(logits), [0], [1]))  # type: ignore[misc]
