"""Text that is cut into pieces in any way, for the tests of parsers."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from shardwise.parsers import Message, Parser, join


def cuts(text: str) -> st.SearchStrategy[list[int]]:
    """Places at which a text is cut: a few, or nearly everywhere."""
    place = st.integers(0, len(text))
    return st.lists(place, max_size=6) | st.just(list(range(len(text))))


def in_pieces(parser: Parser, text: str, places: Sequence[int] | None = None) -> Message:
    """The message of a text cut at the places, or behind each character."""
    ends = [0, *sorted(range(len(text)) if places is None else places), len(text)]
    deltas = [parser.push(text[start:end]) for start, end in zip(ends, ends[1:], strict=False)]
    deltas.append(parser.finish())
    for delta in deltas:  # the shape that OpenAI's clients rely on
        for index, call in enumerate(delta.tool_calls):
            assert call.name or index == 0, "only the first call of a delta goes on from the delta before"
    calls = [call for delta in deltas for call in delta.tool_calls]
    named = [call.index for call in calls if call.name is not None]
    assert named == list(range(len(named)))
    begun = -1
    for call in calls:
        begun += call.name is not None
        assert call.index == begun, "a piece of a call without a beginning, or of one before"
        assert call.arguments, "an empty piece"
    return join(deltas)
