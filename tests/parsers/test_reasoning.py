"""Reasoning apart from the answer, as users of the usual servers expect it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.parsers import REASONING_FORMATS, TOOL_FORMATS, Message, make_parser, parse
from tests.parsers.pieces import cuts, in_pieces

TEXTS = [
    # format, opened by the prompt, text, reasoning, content
    ("qwen3", False, "<think>\nHm.\n</think>\n\n4", "\nHm.\n", "\n\n4"),
    ("qwen3", False, "\n <think>Hm.</think>4", "Hm.", "4"),
    ("qwen3", False, "<think>\n\n</think>\n\n4", "\n\n", "\n\n4"),
    ("qwen3", False, "<think></think>4", None, "4"),
    ("qwen3", False, "4", None, "4"),
    ("qwen3", False, "", None, None),
    ("qwen3", False, " <thin", None, " <thin"),
    ("qwen3", False, "Say <think>no</think>", None, "Say <think>no</think>"),
    ("qwen3", False, "<think>cut off</thin", "cut off</thin", None),
    ("qwen3", False, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    ("qwen3", True, "Hm.\n</think>\n\n4", "Hm.\n", "\n\n4"),
    ("qwen3", True, "<think>Hm.</think>4", "Hm.", "4"),
    ("qwen3", True, "</think>4", None, "4"),
    ("qwen3", True, "no end", "no end", None),
    ("deepseek_r1", False, "Hm.</think>4", "Hm.", "4"),
    ("deepseek_r1", False, "<think>Hm.</think>4", "Hm.", "4"),
    ("deepseek_r1", False, "no end", "no end", None),
    ("deepseek_r1", True, "a < b </think > c</think></think>", "a < b </think > c", "</think>"),
]


@pytest.mark.parametrize(("form", "opened", "text", "reasoning", "content"), TEXTS)
def test_texts(form: str, opened: bool, text: str, reasoning: str | None, content: str | None) -> None:
    """Guards against reasoning in the answer, an answer in the reasoning, and tags in either, in any pieces."""
    parser = make_parser(form, None, reasoning_opened=opened)
    expected = Message(content, reasoning, [])
    assert parse(text, form, None, reasoning_opened=opened) == in_pieces(parser, text) == expected


def test_much_space_before_the_tag() -> None:
    """Guards against a limit that is one in whole texts and another where text comes letter by letter."""
    for blank in range(45):
        text = " " * blank + "<think>a</think>"
        whole = parse(text, "qwen3", None)
        assert in_pieces(make_parser("qwen3", None), text) == whole
        assert whole.reasoning == ("a" if blank <= 32 else None)


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</thi", "nk>", "a", " ", "\n" * 20, "\U0001f914"]), max_size=12
    ),
    form=st.sampled_from(REASONING_FORMATS),
    opened=st.booleans(),
    data=st.data(),
)
def test_any_cut(words: list[str], form: str, opened: bool, data: st.DataObject) -> None:
    """Guards against a result that depends on where tokens end, and against lost or doubled text."""
    text = "".join(words)
    whole = parse(text, form, None, reasoning_opened=opened)
    parser = make_parser(form, None, reasoning_opened=opened)
    assert in_pieces(parser, text, data.draw(cuts(text))) == whole
    told = [whole.reasoning or "", whole.content or ""]
    tags = [text.lstrip().startswith("<think>"), "</think>" in text]
    if not any(tags):
        assert "".join(told) == text
    assert "".join(told) in (text, text.replace("</think>", "", 1)) or tags[0]


def test_reasoning_then_calls() -> None:
    """Guards against calls that are only thought about, and against calls lost behind the reasoning."""
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    message = parse(f"<think>I could {call}</think>\n\n{call}", "qwen3", "hermes")
    assert message.reasoning == f"I could {call}"
    assert message.content is None
    assert [call.name for call in message.tool_calls] == ["f"]
    llama = parse('Hm.</think>\n{"name": "f", "parameters": {"a": 1}}', "qwen3", "llama3_json", reasoning_opened=True)
    assert (llama.content, [call.arguments for call in llama.tool_calls]) == (None, ['{"a": 1}'])


def test_unknown_names() -> None:
    """Guards against a mistyped format that is silently none, and a message without the names there are."""
    with pytest.raises(ValueError, match="deepseek_r1, qwen3"):
        make_parser("r1", None)
    with pytest.raises(ValueError, match="hermes, llama3_json, mistral"):
        make_parser(None, "")
    assert TOOL_FORMATS == ("hermes", "llama3_json", "mistral")


def test_markers_that_decoding_must_keep() -> None:
    """Guards against special tokens that decoding drops before the parser sees them."""
    assert make_parser("qwen3", "mistral").markers == ("<think>", "</think>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    assert make_parser(None, None).markers == ()
