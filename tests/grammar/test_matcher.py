"""One sequence's state: taken back, copied, ended and in error."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.grammar import Matcher
from tests.grammar.vocabulary import END, accepts, allowed, byte_level, byte_tokens, grammars, start

OWNER = grammars(byte_level())
OTHER_END = 256
FIELDS: list[tuple[str, object]] = [
    ("json_object", True),
    ("json_schema", {"type": "array", "items": {"type": ["integer", "string"]}, "maxItems": 3}),
    ("regex", "(ab|a)*c?"),
    ("choice", ["a", "ab", "b é"]),
    ("ebnf", 'root ::= "(" root ")" | [a-z]{1,3}'),
    ("ebnf", 'start: item*\nitem: WORD | "[" item "]"\nWORD: /[a-c]+;/'),
]


def draw(matcher: Matcher, choices: list[int]) -> list[int]:
    """Advance by allowed tokens, as the numbers choose; ends included."""
    tokens = []
    for choice in choices:
        able = allowed(matcher)
        tokens.append(able[choice % len(able)])
        assert matcher.advance(tokens[-1])
    return tokens


@pytest.fixture(scope="module")
def starts() -> list[Matcher]:
    return [start(field, value, OWNER, frozenset({END, OTHER_END})) for field, value in FIELDS]


@settings(max_examples=150, deadline=None)
@given(
    index=st.integers(0, len(FIELDS) - 1),
    before=st.lists(st.integers(0, 10**6), max_size=12),
    drafts=st.lists(st.integers(0, 10**6), max_size=8),
    wrong=st.lists(st.integers(-3, 400), max_size=5),
)
def test_rollback_is_never_having_advanced(
    starts: list[Matcher], index: int, before: list[int], drafts: list[int], wrong: list[int]
) -> None:
    """Guards speculation: drafts that are taken back, an end among them, leave no trace; nor do refused tokens."""
    matcher = starts[index].copy()
    tokens = draw(matcher, before)
    fresh = starts[index].copy()
    for token in tokens:
        assert fresh.advance(token)
    for token in wrong:
        mask = matcher.mask()
        if token not in allowed(matcher):
            assert not matcher.advance(token)
            assert matcher.mask() == mask
    draw(matcher, drafts)
    matcher.rollback(len(drafts))
    for now in (matcher, matcher.copy()):
        assert now.mask() == fresh.mask()
        assert (now.finished, now.error) == (fresh.finished, fresh.error)
    again = draw(matcher, drafts)
    assert all(fresh.advance(token) for token in again)
    assert matcher.mask() == fresh.mask()
    matcher.rollback(len(tokens) + len(again))
    assert matcher.mask() == starts[index].mask()


def test_copies_are_independent() -> None:
    """Guards n > 1: one continuation's tokens must not constrain another's."""
    first = start("choice", ["ab", "cd"], OWNER)
    assert first.advance(byte_tokens("a")[0])
    second = first.copy()
    assert second.advance(byte_tokens("b")[0])
    assert first.finished is False
    assert second.finished is True
    assert allowed(first) == byte_tokens("b")
    second.rollback(2)
    assert allowed(second) == sorted(byte_tokens("ac"))
    assert allowed(first) == byte_tokens("b")


def test_ends_follow_complete_texts_only() -> None:
    """Guards against a text that stops half-way, or can't stop: all end tokens in force, or none, are allowed."""
    matcher = start("regex", "a+", OWNER, frozenset({END, OTHER_END, 9999}))
    a = byte_tokens("a")[0]
    assert allowed(matcher) == [a]
    assert not matcher.advance(END)
    assert matcher.advance(a)
    assert allowed(matcher) == sorted([a, END, OTHER_END])
    assert matcher.advance(OTHER_END)
    assert matcher.finished
    assert allowed(matcher) == [OTHER_END, END]
    assert not matcher.advance(a)
    matcher.rollback(1)
    assert not matcher.finished
    assert matcher.advance(a)


def test_no_end_in_force() -> None:
    """Guards ignore_eos: the text is finished where nothing can follow, though no token says so."""
    matcher = start("choice", ["a"], OWNER, frozenset())
    assert not matcher.finished
    assert matcher.advance(byte_tokens("a")[0])
    assert (matcher.finished, matcher.error, allowed(matcher)) == (True, None, [])


def test_a_stop_token_is_no_text() -> None:
    """Guards against a stop token with a spelling that ends the text half-way because the grammar has such a letter."""
    brace = byte_tokens("}")[0]
    matcher = start("regex", "a}?", OWNER, frozenset({brace}))
    assert not matcher.advance(brace)
    assert matcher.advance(byte_tokens("a")[0])
    assert allowed(matcher) == [brace]
    assert matcher.finished
    with pytest.raises(ValueError, match=r"^regex: it allows no text"):
        start("regex", "}", OWNER, frozenset({brace}))


def test_an_ambiguous_grammar_ends_in_an_error() -> None:
    """R15: guards the loop against a parse that grows with the square of the text; what came before stays usable."""
    matcher = start("ebnf", 'start: s\ns: s s | "a"', OWNER)
    a = byte_tokens("a")[0]
    count = 0
    while matcher.advance(a) and matcher.error is None:
        count += 1
        assert count < 400
    assert matcher.error is not None
    assert "\n" not in matcher.error
    assert not any(matcher.mask())
    assert not matcher.finished
    assert matcher.copy().error is not None
    back = len(matcher._taken) - 5
    matcher.rollback(back)
    assert matcher.error is None
    assert a in allowed(matcher)
    assert accepts(matcher, "aa")


def test_a_vocabulary_that_can_not_go_on() -> None:
    """Guards against an unconstrained token where the vocabulary has none that fits."""
    owner = grammars(byte_level(), vocab_size=byte_tokens("é")[0])  # a model without the higher bytes
    matcher = start("regex", "aé", owner, frozenset({1}))
    assert matcher.advance(byte_tokens("a")[0])
    assert not any(matcher.mask())
    assert matcher.error == "no token of the vocabulary continues the text"
    matcher.rollback(1)
    assert matcher.error is None
    assert allowed(matcher) == byte_tokens("a")
