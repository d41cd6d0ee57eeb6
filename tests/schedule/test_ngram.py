"""Prompt lookup against a scan of the whole text, and what it may cost."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardwise.schedule.ngram import LONGEST, Lookup, continuation

TEXTS = st.lists(st.integers(0, 3), max_size=60)
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted)


def scan(tokens: list[int], min_match: int, max_match: int) -> int | None:
    """The distance by definition: longest run first, and of those the most recent."""
    size = len(tokens)
    for length in range(min(max_match, size - 1), min_match - 1, -1):
        for distance in range(1, size - length + 1):
            if tokens[size - length - distance : size - distance] == tokens[size - length :]:
                return distance
    return None


def agreeing(tokens: list[int], distance: int) -> int:
    """How many last tokens are the same so far back."""
    size = len(tokens)
    return next(
        (n for n in range(size - distance) if tokens[size - 1 - n] != tokens[size - 1 - n - distance]), size - distance
    )


@given(TEXTS, SIZES)
def test_finds_what_a_scan_finds(tokens: list[int], sizes: list[int]) -> None:
    """Guards against an index that misses a run, prefers a shorter one or an older one, or finds the end itself."""
    match = Lookup(*sizes).find(tokens)
    assert (match.distance if match else None) == scan(tokens, *sizes)


@given(TEXTS, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=12), SIZES)
def test_growing_text(prompt: list[int], pieces: list[list[int]], sizes: list[int]) -> None:
    """Guards against stale or missing entries as several tokens come in at once; and states the rule of following."""
    lookup = Lookup(*sizes)
    tokens = list(prompt)
    last: int | None = None
    for piece in [[], *pieces]:
        tokens += piece
        match = lookup.find(tokens)
        if last is not None and last < len(tokens) and agreeing(tokens, last) >= sizes[0]:
            assert match is not None
            assert match.distance == last
        else:
            assert (match.distance if match else None) == scan(tokens, *sizes)
        assert match == lookup.find(tokens), "asking twice is harmless"
        last = match.distance if match else last


@given(TEXTS, SIZES)
def test_length_of_a_match(tokens: list[int], sizes: list[int]) -> None:
    """Guards against confidence in a longer match than there is: the length doubles as far as the texts agree."""
    match = Lookup(*sizes).find(tokens)
    if match is not None:
        real = agreeing(tokens, match.distance)
        assert match.length in [sizes[0] * 2**place for place in range(6)]
        assert match.length <= min(real, LONGEST)
        assert 2 * match.length > min(real, LONGEST)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 20), st.integers(0, 50))
def test_continuation_goes_on_with_itself(tokens: list[int], distance: int, count: int) -> None:
    """Guards against short or wrong drafts where the copied passage runs into the end of the text."""
    distance = min(distance, len(tokens))
    whole = list(tokens)
    for _ in range(count):
        whole.append(whole[-distance])
    assert continuation(tokens, distance, count) == whole[len(tokens) :]


def test_a_loop_is_continued() -> None:
    """Guards repetition loops, the easiest text of all: each turn is foretold from the one before."""
    tokens = [7, 1, 2, 3, 1, 2, 3]
    match = Lookup(2, 4).find(tokens)
    assert match is not None
    assert continuation(tokens, match.distance, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_copy_is_followed_through_repeated_passages() -> None:
    """Guards copies of texts that repeat themselves: after a passage seen twice the copy goes on as its source did."""
    passage = [1, 2, 3, 4, 5]
    tokens = [10, 11, *passage, 12, 13, *passage, 14, 15, 99]
    lookup = Lookup(2, 4)
    for token in [10, 11, *passage]:
        tokens.append(token)
        match = lookup.find(tokens)
    assert match is not None
    assert continuation(tokens, match.distance, 2) == [12, 13]
    assert Lookup(2, 4).find(tokens) != match, "the most recent occurrence alone would say otherwise"


def test_nothing_found() -> None:
    """Guards against guesses out of nothing: short texts and texts without repetition have none."""
    for tokens in ([], [1], [1, 2], [1, 2, 3, 4, 5, 1], [1, 2, 3, 2]):
        assert Lookup(2, 4).find(tokens) is None


class Watched(list[int]):
    """A list that counts the tokens that are read."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.reads += len(found) if isinstance(key, slice) else 1
        return found


def test_time_does_not_grow_with_the_text() -> None:
    """Guards long prompts: a new token costs the same however long the text is; nothing is scanned again."""
    worst = []
    for size in (100, 10_000):
        source = random.Random(0)
        tokens = Watched(source.randrange(50) for _ in range(size))
        lookup = Lookup(2, 4)
        lookup.find(tokens)
        costs = []
        for place in range(300):
            tokens.append(list.__getitem__(tokens, place) if place > 150 else source.randrange(50))
            before = tokens.reads
            lookup.find(tokens)
            costs.append(tokens.reads - before)
        worst.append(max(costs))
    assert worst[0] == worst[1] <= 200


def test_memory_per_token() -> None:
    """Guards the documented size of the index: 260 bytes a token where nothing repeats."""
    source = random.Random(0)
    tokens = [source.randrange(10**6) for _ in range(20_000)]
    tracemalloc.start()
    try:
        lookup = Lookup(2, 4)
        lookup.find(tokens)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 100 < size / len(tokens) < 330
