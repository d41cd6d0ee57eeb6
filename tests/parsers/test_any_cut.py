"""Random texts in random pieces: the same message whatever the cuts, arguments to the letter, nothing lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.parsers import TOOL_FORMATS, Message, ToolCall, make_parser, parse
from tests.parsers.pieces import cuts, in_pieces

FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "call>",
        "<|python_tag|>",
        "<|python",
        "[TOOL_CALLS]",
        "[TOOL_",
        "f[ARGS]",
    ),
    *(
        "[CALL_ID]",
        "<think>",
        "</think>",
        "<",
        "[",
        "]",
        "{",
        "}",
        "{}",
        ",",
        ";",
        ":",
        '"',
        "\\",
        "\\\\",
        '\\"',
        "\\u00e9",
    ),
    *(
        '{"name": "f", "arguments": ',
        '{"name":',
        '"name"',
        '"f"',
        '"arguments": {',
        '"parameters":',
        '{"arguments": {"a": ',
    ),
    *('{"name": "g"}', '{"x": ', ', "id": 1', "null", "0.8", "\n", " ", " " * 250, "x" * 250, "é", "\U0001f600", "a"),
    *('<tool_call>{"name": "h", "arguments": {}}</tool_call>', '<tool_call>{"name": "h", "arguments": {"a": "b', '"}}'),
    *('{"name": "h", "parameters": {}}', '[TOOL_CALLS][{"name": "h", "arguments": {}}', "}}</tool_call>"),
]

each = pytest.mark.parametrize("form", TOOL_FORMATS)


@each
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_text_in_any_pieces(form: str, data: st.DataObject) -> None:
    """C77: guards against a result that depends on where tokens end, exceptions, and text lost without a call."""
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=20)))
    reasoning = data.draw(st.sampled_from([None, "qwen3"]))
    whole = parse(text, reasoning, form)
    assert in_pieces(make_parser(reasoning, form), text, data.draw(cuts(text))) == whole
    if not whole.tool_calls and not whole.reasoning and "think>" not in text:
        assert (whole.content or "") == text
    rest = iter(text)
    assert all(char in rest for char in whole.content or ""), "content that was not in the text, or out of order"
    for call in whole.tool_calls:
        assert call.arguments in text or call.arguments == "{}"


@each
@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_characters="<[{;")))
def test_text_without_markers_is_content(form: str, text: str) -> None:
    """Guards against text that is changed though it has no call: stripped, held back for ever, or taken for one."""
    assert in_pieces(make_parser(None, form), text) == Message(text or None, None, [])


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(FRAGMENTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
SPACES = st.text(" \n\t\r", max_size=3)


@st.composite
def written(draw: st.DrawFn, value: Any) -> str:
    """A JSON value as some model may write it."""
    return json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, None, 2])))


@st.composite
def calls(draw: st.DrawFn, form: str) -> tuple[str, ToolCall]:
    """A call in its JSON object, and what it means."""
    name = draw(st.text(min_size=1, max_size=8))
    pairs = [("name", draw(written(name)))]
    arguments = "{}"
    if form == "llama3_json" or draw(st.booleans()):
        value = draw(st.dictionaries(st.text(max_size=4), JSON, max_size=3))
        arguments = draw(written(value))
        pairs.append(("parameters" if form == "llama3_json" else "arguments", arguments))
        pairs += [(key, draw(written(draw(JSON)))) for key in draw(st.lists(st.sampled_from(["id", "x"]), max_size=2))]
    space = draw(SPACES)
    body = f",{space}".join(f'{space}"{key}"{space}:{space}{text}{space}' for key, text in draw(st.permutations(pairs)))
    return f"{{{body}}}", ToolCall(name, arguments)


@each
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_calls_to_the_letter(form: str, data: st.DataObject) -> None:
    """C77: guards against arguments that are not what the model wrote, calls missed, and markers in the content."""
    made = data.draw(st.lists(calls(form), min_size=1, max_size=3))
    spaces = [data.draw(SPACES) for _ in made]
    prose = data.draw(st.sampled_from(["", "Well.", "a b\nc"]))
    if form == "hermes":
        body = "".join(
            f"<tool_call>{space}{text}{space}</tool_call>{space}" for (text, _), space in zip(made, spaces, strict=True)
        )
    elif form == "mistral":
        body = f"[TOOL_CALLS]{spaces[0]}[{','.join(text for text, _ in made)}]{spaces[-1]}"
    else:
        body = data.draw(st.sampled_from([";", "; ", "\n", ""])).join(text for text, _ in made)
        body = ("<|python_tag|>" if prose else spaces[0]) + body + spaces[-1]
    text = prose + spaces[0] + body
    expected = Message(prose or None, None, [call for _, call in made])
    assert parse(text, None, form) == expected
    assert in_pieces(make_parser(None, form), text, data.draw(cuts(text))) == expected


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_named_mistral_calls_to_the_letter(data: st.DataObject) -> None:
    """C77: the same for the newer form of Mistral's models."""
    text, expected = data.draw(st.sampled_from(["", "Well."])), []
    content = text or None
    for name in data.draw(st.lists(st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True), min_size=1, max_size=3)):
        arguments = data.draw(written(data.draw(st.dictionaries(st.text(max_size=4), JSON, max_size=3))))
        number = data.draw(st.sampled_from(["", "[CALL_ID]a1B2c3D4e"]))
        text += f"[TOOL_CALLS]{name}{number}{data.draw(st.sampled_from(['', '[ARGS]']))}{arguments}"
        expected.append(ToolCall(name, arguments))
    # without [ARGS] the arguments would run into the number
    text = text.replace("a1B2c3D4e{", "a1B2c3D4e[ARGS]{")
    whole = parse(text, None, "mistral")
    assert whole == Message(content, None, expected)
    assert in_pieces(make_parser(None, "mistral"), text, data.draw(cuts(text))) == whole
