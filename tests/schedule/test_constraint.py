"""Masks of one sequence: bad words, drafts that are read ahead, and matchers that fail or come to a limit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.features import Speculation
from shardwise.grammar import Matcher
from shardwise.params import SamplingParams
from shardwise.schedule.constraint import Constraint
from shardwise.schedule.sequence import Request
from shardwise.schedule.step import StepResult
from tests.grammar.vocabulary import END, allowed, byte_level, grammars, start
from tests.schedule.test_scheduler import make

VOCAB = 6
TOKENS = st.integers(0, VOCAB - 1)


def may(mask: bytes, vocab_size: int = VOCAB) -> set[int]:
    """The tokens of a mask."""
    return {token for token in range(vocab_size) if not mask or mask[token >> 3] >> (token & 7) & 1}


# Bad words


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(TOKENS, min_size=1, max_size=8),
    drafts=st.lists(TOKENS, max_size=4),
    words=st.lists(st.lists(TOKENS, min_size=1, max_size=5).map(tuple), max_size=8),
)
def test_no_bad_word_is_completed(tokens: list[int], drafts: list[int], words: list[tuple[int, ...]]) -> None:
    """Guards against a word that is missed, or barred where the text only resembles it or is shorter than it."""
    masks = Constraint(VOCAB, frozenset(), 0, None, words, None).masks(tokens, drafts)
    for count, mask in enumerate(masks):
        text = (*tokens, *drafts[:count])
        barred = {word[-1] for word in words if len(word) <= len(text) + 1 and (*text, word[-1])[-len(word) :] == word}
        left = set(range(VOCAB)) - barred
        assert may(mask) == (left or set(range(VOCAB) if count else ()))


class Counted(list[int]):
    """Tokens that count how many of them are copied."""

    copied = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.copied += len(found) if isinstance(place, slice) else 0
        return found


def test_long_bad_words_cost_little() -> None:
    """Guards the engines' loop: every word was copied at every token, 50 ms of it for words that could not come."""
    words = [(*[1] * 900, token, 5) for token in (0, 2, 3)] + [(*[1] * 5000, 4), (1, 1, 2, 5)]
    tokens = Counted([1] * 1000)
    constraint = Constraint(VOCAB, frozenset(), 0, None, words, None)
    assert constraint.ended(tokens) is None
    assert tokens.copied == 0
    assert may(constraint.masks(tokens, [2])[1]) == {0, 1, 2, 3, 4}


# Drafts


class Free:
    """A matcher that allows everything, and counts."""

    finished = False
    error: str | None = None

    def __init__(self) -> None:
        self.num_masks = self.num_read = 0
        self.taken: list[int] = []

    def mask(self) -> bytes:
        self.num_masks += 1
        return b"\xff" * 8

    def advance(self, token: int) -> bool:
        self.num_read += 1
        self.taken.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]


def test_a_mask_is_made_once() -> None:
    """Guards against masks that are made again with each draft: their number grew with the square of the drafts'."""
    matcher = Free()
    constraint = Constraint(VOCAB, frozenset(), 0, None, [], matcher)
    drafts = [1, 2, 3, 4, 5, 0, 1, 2]
    for count in range(9):
        assert len(constraint.masks([0], drafts[:count])) == count + 1
        assert matcher.taken == []
    assert len(constraint.masks([0], drafts)) == 9
    assert matcher.num_masks == 9
    constraint.advance(1)
    assert len(constraint.masks([0, 1], [2, 3])) == 3
    assert len(constraint.masks([0, 1], [2, 4])) == 3
    assert matcher.num_masks == 9 + 4
    assert matcher.taken == [1]


class Broken(Free):
    """One that raises when it is asked for ``what`` for the ``time``-th time."""

    def __init__(self, what: str, time: int) -> None:
        super().__init__()
        self.what, self.time = what, time

    def mask(self) -> bytes:
        found = super().mask()
        if self.what == "mask" and self.num_masks == self.time:
            raise ZeroDivisionError("a bug")
        return found

    def advance(self, token: int) -> bool:
        super().advance(token)
        if self.what == "advance" and self.num_read == self.time:
            raise ZeroDivisionError("a bug")
        return True


@pytest.mark.parametrize("what", ["mask", "advance"])
@pytest.mark.parametrize("drafts", ["ngram,k=3,min_match=1", "draft=x,k=3"])
@pytest.mark.parametrize("time", range(3, 16, 2))
def test_an_exception_among_drafts_is_one_requests(what: str, drafts: str, time: int) -> None:
    """R17: guards the engine, and all others in it, against an exception while one request's drafts are looked at."""
    scheduler = make(speculation=Speculation.parse(drafts))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    scheduler.add(Request(0, (1, 2, 1, 2), params, seed=0, matcher=Broken(what, time)))
    scheduler.add(Request(1, (1, 2, 1, 2), params, seed=0))
    ends: dict[int, tuple[str | None, str]] = {}
    while (step := scheduler.schedule()) is not None:
        tokens = []
        for chunk in step.chunks:
            kept = [] if step.draft else chunk.tokens[len(chunk.tokens) - chunk.drafts :]
            tokens.append([*kept, 3 - chunk.tokens[-1]] if chunk.sampling else [])  # 1 and 2 by turns
        none: list[list[Any]] = [[]] * len(tokens)
        for news in scheduler.update(step, StepResult(step.epoch, step.number, tokens, none, none)):
            if news.sequence.finish_reason is not None:
                ends[news.sequence.request.id] = news.sequence.finish_reason, news.sequence.error
        scheduler.check()
    assert ends[0] == ("error", "its constraint failed: ZeroDivisionError: a bug")
    assert ends[1] == ("length", "")


# Limits


class Tired(Free):
    """One that reads 20 tokens, those included that were taken back."""

    def mask(self) -> bytes:
        return b"\0" * 8 if self.error else super().mask()

    def advance(self, token: int) -> bool:
        self.error = "too much" if self.num_read == 20 else None
        return self.error is None and super().advance(token)

    def rollback(self, count: int) -> None:
        super().rollback(count)
        if self.error:
            self.num_read, self.error = len(self.taken), None


@pytest.mark.parametrize("count", range(5))
def test_drafts_use_up_nothing(count: int) -> None:
    """Guards one answer: a matcher's limit is reached by what was written, wherever it is met."""
    constraint = Constraint(VOCAB, frozenset(), 0, None, [], Tired())
    tokens = [0]
    while (end := constraint.ended(tokens)) is None:
        constraint.masks(tokens, [1, 2, 3, 4][:count])
        tokens.append(5)
        constraint.advance(5)
    assert (len(tokens), end) == (22, ("error", "too much"))


INTRICATE = r"((\p{L}{0,30}){0,30}){0,30}"
"""Each letter makes the parser remember more."""


def written(matcher: Matcher, rng: random.Random, drafts: Sequence[Sequence[int]]) -> tuple[list[int], Any]:
    """Letters until nothing may follow, where ``drafts`` are looked at by turns; and why that is."""
    constraint = Constraint(OWNER_SIZE, frozenset({END}), 0, None, [], matcher)
    tokens = [97]
    while (end := constraint.ended(tokens)) is None:
        for some in drafts:
            masks = constraint.masks(tokens, some)
            assert len(masks) <= len(some) + 1
        able = sorted(may(constraint.masks(tokens, [])[0], OWNER_SIZE) - {END})
        tokens.append(able[rng.randrange(len(able))])
        constraint.advance(tokens[-1])
        assert len(tokens) < 200
    return tokens, end


OWNER = grammars(byte_level())
OWNER_SIZE = len(OWNER.spellings())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("count", "length"), [(1, 1), (1, 3), (3, 4)])
def test_a_limit_is_reached_where_it_is_without_drafts(seed: int, count: int, length: int) -> None:
    """Guards one answer: what the parser remembers of drafts must not bring its limits nearer."""
    first = start("regex", INTRICATE, OWNER)
    plain = written(start("regex", INTRICATE, OWNER), random.Random(seed), [])
    assert plain[1][0] == "error"
    letters = allowed(first)
    draws = random.Random(-seed)
    drafts = [[draws.choice(letters) for _ in range(length)] for _ in range(count)]
    assert written(first, random.Random(seed), drafts) == plain
