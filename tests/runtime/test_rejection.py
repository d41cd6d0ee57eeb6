"""Rejection sampling of drafts: by exact enumeration, and end to end by the law of the emitted tokens."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from shardwise.kernels.ops import Ops
from shardwise.parallel.placement import split
from shardwise.runtime.logits import Row
from shardwise.runtime.rejection import acceptance, decide, replace, residual
from shardwise.runtime.sampler import Sampler
from shardwise.schedule.step import Sampling
from tests.runtime.shards import alone, assert_follows, by, chances, normal, over, pack

OPS = Ops(torch.float32)


def law(rng: np.random.Generator, vocab: int, zeros: float) -> Tensor:
    """A random distribution, some tokens of which are impossible."""
    odds = rng.exponential(size=vocab) ** 2 * (rng.random(vocab) >= zeros)
    odds[rng.integers(vocab)] += 0.1
    return torch.from_numpy(odds / odds.sum())


def pairs(vocab: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """p and q of all kinds: near, far, disjoint, equal, certain."""
    rng = np.random.default_rng(vocab)
    for _ in range(40):
        p = law(rng, vocab, rng.choice([0.0, 0.5, 0.9]))
        q = law(rng, vocab, rng.choice([0.0, 0.5, 0.9]))
        yield p, q
        yield p, p.clone()
        yield p, 0.999 * p + 0.001 * q
        yield p, None
    certain = torch.eye(vocab, dtype=torch.float64)
    yield certain[0], certain[0]
    yield certain[0], certain[1]
    yield certain[1], None


def emitted(p: Tensor, q: Tensor | None, draft: int) -> Tensor:
    """The exact law of the token emitted at one position, given the draft."""
    rate = acceptance(p, q, draft)
    mass = (1.0 - rate) * residual(p, q, draft)
    mass[draft] += rate
    return mass


@pytest.mark.parametrize("vocab", range(2, 9))
def test_the_token_is_distributed_as_the_model_says(vocab: int) -> None:
    """Guards the theorem itself: summed over all drafts, the emitted token has the law p, to rounding."""
    for p, q in pairs(vocab):
        if q is None:  # certain of any one token
            for draft in range(vocab):
                torch.testing.assert_close(emitted(p, None, draft), p, rtol=0, atol=1e-12)
            continue
        total = sum(q[draft] * emitted(p, q, draft) for draft in range(vocab))
        torch.testing.assert_close(total, p, rtol=0, atol=1e-12)
        rate = sum(float(q[draft]) * acceptance(p, q, draft) for draft in range(vocab))
        assert rate == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_a_chain_is_distributed_as_the_model_says(drafts: int, certain: bool) -> None:
    """Guards the chain: after a rejection the rest is the model's, and the joint law of all tokens is too."""
    vocab = 4
    rng = np.random.default_rng(drafts)
    p: dict[tuple[int, ...], Tensor] = defaultdict(lambda: law(rng, vocab, 0.3))
    q: dict[tuple[int, ...], Tensor] = defaultdict(lambda: law(rng, vocab, 0.3))
    found: dict[tuple[int, ...], float] = defaultdict(float)
    guesses = [(0, 3, 1)[:drafts]] if certain else list(product(range(vocab), repeat=drafts))
    for guess in guesses:
        chance = 1.0
        for at in range(drafts):
            chance *= 1.0 if certain else float(q[guess[:at]][guess[at]])
        for at, draft in enumerate(guess):  # rejected there
            theirs = None if certain else q[guess[:at]]
            rate = acceptance(p[guess[:at]], theirs, draft)
            for token, share in enumerate(residual(p[guess[:at]], theirs, draft).tolist()):
                found[(*guess[:at], token)] += chance * (1 - rate) * share
            chance *= rate
        for token, share in enumerate(p[guess].tolist()):
            found[(*guess, token)] += chance * share
    for line in product(range(vocab), repeat=drafts + 1):
        wanted, got = 1.0, 0.0
        rest = 1.0  # what plain decoding adds after the tokens of one round
        for at in range(drafts, -1, -1):
            got += found[line[: at + 1]] * rest
            rest *= float(p[line[:at]][line[at]])
        for at in range(drafts + 1):
            wanted *= float(p[line[:at]][line[at]])
        assert got == pytest.approx(wanted, abs=1e-12)


def test_edges() -> None:
    """Guards the corners: impossible drafts, equal laws, laws that rounding makes equal, drafts q has no chance for."""
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.5, 0.0], [0.25, 0.25, 0.5]))
    none = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    assert acceptance(p, q, 2) == 0.0
    assert acceptance(p, p, 0) == acceptance(p, q, 0) == acceptance(p, none, 0) == 1.0
    assert acceptance(q, None, 2) == 0.5
    assert acceptance(none, p, 0) == acceptance(p, None, 2) == 0.0
    assert torch.equal(residual(p, p, 1), p)
    assert residual(q, None, 2).tolist() == [0.5, 0.5, 0.0]
    tiny = torch.tensor([0.5, 0.5, 5e-324], dtype=torch.float64)
    assert residual(tiny, p, 0).tolist() == [0.0, 0.0, 1.0]
    assert {replace(OPS, tiny, p, 0, seed, 1) for seed in range(50)} == {2}
    for seed in range(2000):
        assert decide(p, p, 1, seed, 7)
        assert not decide(p, q, 2, seed, 7)
    for draft in range(2):
        taken = {replace(OPS, p, None, draft, seed, 3) for seed in range(50)}
        assert taken == {1 - draft}


WAYS = {
    "plain": by(1.0),
    "warm": by(1.7),
    "cool, top_k": by(0.6, top_k=4),
    "top_p": by(1.0, top_p=0.8),
    "all filters": by(1.2, top_k=6, top_p=0.9, min_p=0.05),
    "penalties and bias": by(1, presence=1.0, repetition=1.3, num_prompt=1, biased=[2, 5], biases=[1.0, -1.0]),
}
VOCAB, DRAFTS = 7, 2


class Once(Sampler):
    """Computes each distribution a single time: the seed does not count."""

    def __init__(self, like: Sampler) -> None:
        vars(self).update(vars(like))
        self.known: dict[str, Tensor] = {}

    def probabilities(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        plain = [(msgspec.structs.replace(row.by, seed=0), *row[1:3], row.before.tolist()) for row in rows]  # type: ignore[union-attr]
        key = repr((logits.tolist(), plain))
        if key not in self.known:
            self.known[key] = super().probabilities(logits, rows)
        return self.known[key]


def rows_of(way: Sampling, seed: int) -> list[Row]:
    by_seed, mask = msgspec.structs.replace(way, seed=seed), pack(np.arange(VOCAB) != 0)
    before = np.array([1, 2, 2, 4], np.int32)
    return [Row(by_seed, 30 + at, mask if at < DRAFTS else b"", before) for at in range(DRAFTS + 1)]


def rounds(kind: str, way: Sampling, seeds: range) -> list[tuple[list[int], list[int]]]:
    """The drafts of a round and the tokens that come of it, for each seed; all start from the same logits."""
    theirs, wanted = normal(DRAFTS, VOCAB, 1, 1.0), normal(DRAFTS + 1, VOCAB, 2, 1.0)
    if kind == "near":
        theirs = wanted[:-1] + 0.3 * theirs
    sampler, drafter = Once(alone(VOCAB)), Once(alone(VOCAB + 2, num_tokens=VOCAB))
    guesses = torch.cat([theirs, torch.full((DRAFTS, 2), 9.0)], dim=1)  # a vocabulary padded otherwise
    rows = [rows_of(way, seed) for seed in seeds]
    if kind == "certain":
        drafts = [[seed % VOCAB, seed // VOCAB % VOCAB] for seed in seeds]
        return [(own, sampler.accept(wanted, mine, own)) for own, mine in zip(drafts, rows, strict=True)]
    drawn = drafter.sample(guesses.repeat(len(seeds), 1), [row for mine in rows for row in mine[:-1]])
    drafts = [drawn[at : at + DRAFTS] for at in range(0, len(drawn), DRAFTS)]
    return [(own, sampler.accept(wanted, mine, own, drafter, guesses)) for own, mine in zip(drafts, rows, strict=True)]


GRID = [(kind, name, 20_000) for kind in ("random", "near", "certain") for name in WAYS]
QUICK = [("random", "plain", 20_000), ("near", "all filters", 5000), ("certain", "top_p", 20_000)]


@pytest.mark.parametrize(
    ("kind", "name", "count"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID if case not in QUICK)],
)
def test_tokens_follow_the_law_of_the_model(kind: str, name: str, count: int) -> None:
    """Guards the whole way, drafts drawn by `sample` and judged by `accept`: noise that is used twice, a filter that
    one side forgets, a row too far. Over many rounds, each position has the law of plain sampling.
    """
    found = rounds(kind, WAYS[name], range(count))
    logits, rows = normal(DRAFTS + 1, VOCAB, 2, 1.0), rows_of(WAYS[name], 0)
    for at in range(DRAFTS + 1):
        law = chances(logits[at], rows[at])
        assert_follows(Counter(line[at] for _, line in found if len(line) > at), law)
        for token in range(VOCAB):  # whatever came before, accepted or drafted
            assert_follows(Counter(line[at] for _, line in found if len(line) > at > 0 and line[at - 1] == token), law)
    for drafts, line in found:
        assert line[:-1] == drafts[: len(line) - 1]
    if kind != "random":
        assert sum(len(line) > DRAFTS for _, line in found) > count / 200


def test_as_many_drafts_are_accepted_as_can_be() -> None:
    """Guards the use of speculation: a draft is accepted as often as p and q overlap, and always if they are equal."""
    wanted, theirs = normal(2, VOCAB, 2, 1.0), normal(1, VOCAB, 1, 1.0)
    sampler = alone(VOCAB)
    rows = [[Row(by(seed=seed), 5), Row(by(seed=seed), 6)] for seed in range(4000)]
    drawn = sampler.sample(theirs.expand(4000, -1), [mine[0] for mine in rows])
    taken = sum(
        len(sampler.accept(wanted, mine, [draft], sampler, theirs)) == 2
        for mine, draft in zip(rows, drawn, strict=True)
    )
    p, q = sampler.probabilities(wanted[:1], rows[0][:1]), sampler.probabilities(theirs, rows[0][:1])
    rate = float(torch.minimum(p, q).sum())
    assert abs(taken - 4000 * rate) < 5 * (4000 * rate * (1 - rate)) ** 0.5
    own = sampler.sample(wanted[:1].expand(4000, -1), [mine[0] for mine in rows])
    for mine, draft in zip(rows[:500], own, strict=False):
        assert sampler.accept(wanted, mine, [draft], sampler, wanted[:1]) == [
            draft,
            *sampler.sample(wanted[1:], mine[1:]),
        ]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("surplus", [0, 31, -20])
def test_the_cut_of_the_vocabularies_does_not_matter(surplus: int, name: str) -> None:
    """C18: every rank accepts the same drafts, also where the drafter's vocabulary is larger or smaller."""
    vocab, count, theirs = 97, 4, 97 + surplus
    logits, guesses = normal(count + 1, vocab, 1, 1.0), normal(count, theirs, 1, 1.0)
    before = np.arange(20, dtype=np.int32)
    rows = [Row(msgspec.structs.replace(WAYS[name], seed=3), 9 + at, b"", before) for at in range(count + 1)]
    drafts = alone(theirs, num_tokens=vocab).sample(guesses, rows[:-1])

    def judge(sampler: Sampler, columns: Callable[[Tensor], Tensor]) -> list[list[int]]:
        cut = split(theirs, sampler.axis.size)
        drafter = Sampler(sampler.ops, sampler.axis, cut, vocab)
        start, stop = cut[sampler.axis.rank]
        own = guesses[:, start:stop].contiguous()
        certain = sampler.accept(columns(logits), rows, drafts)
        return [certain, sampler.accept(columns(logits), rows, drafts, drafter, own)]

    whole = over(1, vocab, judge)
    for ranks in (2, 3, 5):
        assert over(ranks, vocab, judge) == whole


def test_greedy_drafts_are_compared() -> None:
    """Guards temperature 0: exactly the tokens of plain decoding, and no draft for a chance that it does not have."""
    logits = normal(4, 50, 1)
    best = logits.argmax(1).tolist()
    rows = [Row(by(0, top_p=0.5, seed=7), 3 + at) for at in range(4)]
    sampler = alone(50)
    for right in range(4):
        drafts = [*best[:right], *((token + 1) % 50 for token in best[right:3])]
        guesses = torch.zeros(3, 50)
        guesses[range(3), drafts] = 5.0
        for law in ((None, None), (sampler, guesses), (sampler, normal(3, 50, 9))):
            assert sampler.accept(logits, rows, drafts, *law) == best[: right + 1]
    assert sampler.accept(logits[:1], rows[:1], []) == best[:1]
