"""Rows of a batch job by themselves: what one may say, and what is told of all."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.outputs import CompletionOutput, RequestOutput
from shardwise.rows import read_row, timings_of

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hi", "a list of at least one"),
        ({"role": "user", "content": "hi"}, "a list of at least one"),
        ([], "a list of at least one"),
        (["hi"], "messages[0] must be an object"),
        ([{"role": "user", "content": "hi"}, {"rol": "user", "content": "hi"}], "messages[1].role must be"),
        ([{"role": "", "content": "hi"}], "messages[0].role must be"),
        ([{"role": 3, "content": "hi"}], "messages[0].role must be"),
        ([{"role": "user", "contnt": "hi"}], "messages[0].content must be"),
        ([{"role": "user", "content": None}], "messages[0].content must be"),
        ([{"role": "user", "content": 3}], "messages[0].content must be"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content must be"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content must be"),
    ],
)
def test_messages_are_checked(messages: Any, words: str) -> None:
    """Guards against an answer to a message that the template drew nothing from, as of a misspelt key."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read_row({"messages": messages}, {})
    assert words in str(error.value)


def test_what_templates_may_want_is_passed_on() -> None:
    """Guards messages from being refused, or cut, for keys and parts that only their template knows."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "", "tool_call_id": "1", "mood": {"of": "the day"}},
    ]
    assert read_row({"messages": messages}, {})[1] == messages


def test_a_result_without_tokens_spoils_no_times() -> None:
    """Guards times from a request that came to nothing: it has no first token, and decoded none fewer than none."""
    results = [
        RequestOutput(0, "a", [1], [CompletionOutput(0, token_ids=[5, 6, 7])], [], 100.0, 102.0, 104.0),
        RequestOutput(1, "b", [1], [CompletionOutput(0, finish_reason="error", error="no")], [], 100.0, 0.0, 101.0),
    ]
    found = timings_of(1.0, results)
    assert (found["ttft_s"], found["total_s"], found["decode_tokens_per_s"]) == (2.0, 4.0, 1.0)
    nothing = timings_of(1.0, results[1:])
    assert (nothing["ttft_s"], nothing["total_s"], nothing["decode_tokens_per_s"]) == (0.0, 1.0, 0.0)
    assert timings_of(1.0, [])["ttft_s"] == 0.0
