"""Tool calls as models write them, and what they are taken for."""

from __future__ import annotations

import pytest

from shardwise.parsers import Message, ToolCall, make_parser, parse
from tests.parsers.pieces import in_pieces

Calls = list[tuple[str, str]]

TEXTS: list[tuple[str, str, str | None, Calls]] = [
    # format, text, content, calls
    ("hermes", "Hello, world.\n", "Hello, world.\n", []),
    ("hermes", "", None, []),
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}\n</tool_call>',
        None,
        [("get_weather", '{"city": "Paris", "unit": "celsius"}')],
    ),
    (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "a", "arguments": {"x": 0.8}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>\n',
        "Let me look.",
        [("a", '{"x": 0.8}'), ("b", "{}")],
    ),
    ("hermes", 'A\n<tool_call>{"name": "a"}</tool_call>\nB ', "A\n\nB ", [("a", "{}")]),
    # C77: nested, floats, no arguments, unicode, escapes, spacing: as written
    ("hermes", '<tool_call>{"name": "a", "arguments": null}</tool_call>', None, [("a", "{}")]),
    ("hermes", '<tool_call>{"name": "a", "arguments": { }}</tool_call>', None, [("a", "{ }")]),
    ("hermes", '<tool_call>{"name": "a", "arguments": 1.50 }</tool_call>', None, [("a", "1.50")]),
    ("hermes", '<tool_call>{"name": "a", "arguments": [1, 2]}</tool_call>', None, [("a", "[1, 2]")]),
    ("hermes", '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', None, [("a", '"{\\"x\\": 1}"')]),
    (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {"x": [1, 2.50, {"y": -1e-9}], "z": "\\u00e9é\U0001f600"}}</tool_call>',
        None,
        [("a", '{"x": [1, 2.50, {"y": -1e-9}], "z": "\\u00e9é\U0001f600"}')],
    ),
    ("hermes", '<tool_call>{"name": "caf\\u00e9 \\"x\\"", "arguments": {}}</tool_call>', None, [('café "x"', "{}")]),
    # markers and brackets in strings
    (
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"text": "}</tool_call><tool_call>{[\\\\"}}</tool_call>',
        None,
        [("write", '{"text": "}</tool_call><tool_call>{[\\\\"}')],
    ),
    # the order of keys, and keys beside
    (
        "hermes",
        '<tool_call>{"arguments": {"name": "no"}, "id": 7, "name": "a"}</tool_call>',
        None,
        [("a", '{"name": "no"}')],
    ),
    (
        "hermes",
        '<tool_call>{"x": {"name": "no"}, "name": "a", "arguments": {}, "y": [1]}</tool_call>',
        None,
        [("a", "{}")],
    ),
    ("hermes", '<tool_call>{"type": "function", "name": "a", "id": "1"}</tool_call>', None, [("a", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {}, "name": "b", "arguments": 1}</tool_call>',
        None,
        [("a", "{}")],
    ),
    # cut off, a brace too few, a brace too many, a missing end
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "y', None, [("a", '{"x": "y')]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "y\\', None, [("a", '{"x": "y\\')]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1}\n</tool_call>ok', "ok", [("a", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1}}}\n</tool_call>ok', "ok", [("a", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1</tool_call>ok', "ok", [("a", '{"x": 1')]),
    (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {}}<tool_call>{"name": "b", "arguments": {}}',
        None,
        [("a", "{}"), ("b", "{}")],
    ),
    # broken before it is a call: content, unchanged
    ("hermes", '<tool_call>{"name": "a", "argum', '<tool_call>{"name": "a", "argum', []),
    ("hermes", "<tool_call>\nno\n</tool_call>", "<tool_call>\nno\n</tool_call>", []),
    ("hermes", "<tool_call> {} </tool_call> ", "<tool_call> {} </tool_call> ", []),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"name": "", "arguments": {}}', []),
    ("hermes", '<tool_call>{"name": 1, "arguments": {}}', '<tool_call>{"name": 1, "arguments": {}}', []),
    (
        "hermes",
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        [],
    ),
    ("hermes", '<tool_call>{"name": "\\x", "arguments": {}}', '<tool_call>{"name": "\\x", "arguments": {}}', []),
    ("hermes", '<tool_call>{"name": "a", "arguments": }', '<tool_call>{"name": "a", "arguments": }', []),
    ("hermes", '<tool_call>{"name": "a", "other": {}}', '<tool_call>{"name": "a", "other": {}}', []),
    ("hermes", '<tool_call>{"arguments": {"x": <b>', '<tool_call>{"arguments": {"x": <b>', []),
    ("hermes", "a <tool_cal", "a <tool_cal", []),
    ("hermes", "a </tool_call> b", "a </tool_call> b", []),
    ("hermes", '<tool_call>no <tool_call>{"name": "a"}</tool_call>', "<tool_call>no", [("a", "{}")]),
    ("hermes", '<tool_call>{"name": "a"}</tool_call>\n<tool_call> no', "\n<tool_call> no", [("a", "{}")]),
    ("llama3_json", '{"name": "a", "parameters": {"x": "1"}}', None, [("a", '{"x": "1"}')]),
    ("llama3_json", '\n<|python_tag|>{"name": "a", "parameters": {}}', None, [("a", "{}")]),
    ("llama3_json", '{"type": "function", "name": "a", "parameters": null}', None, [("a", "{}")]),
    ("llama3_json", '{"name": "a", "arguments": {}}', None, [("a", "{}")]),
    (
        "llama3_json",
        '{"name": "a", "parameters": {"q": "x; {y}"}}; {"name": "b", "parameters": {}};'
        '{"name": "c", "parameters": {}}\n{"name": "d", "parameters": {"z": 1}}',
        None,
        [("a", '{"q": "x; {y}"}'), ("b", "{}"), ("c", "{}"), ("d", '{"z": 1}')],
    ),
    (
        "llama3_json",
        'Looking.<|python_tag|>{"name": "a", "parameters": {}} Done; {x}',
        "Looking. Done; {x}",
        [("a", "{}")],
    ),
    ("llama3_json", '<|python_tag|>print("x")', '<|python_tag|>print("x")', []),
    ("llama3_json", '{"name": "Ann"}', '{"name": "Ann"}', []),
    ("llama3_json", ' {"name": "Ann", "age": 7} ', ' {"name": "Ann", "age": 7} ', []),
    ("llama3_json", '{"a": [{"name": "b", "parameters": {}}]}', '{"a": [{"name": "b", "parameters": {}}]}', []),
    ("llama3_json", "Use {braces} <b>so</b>.", "Use {braces} <b>so</b>.", []),
    ("llama3_json", "<b>so</b>;", "<b>so</b>;", []),
    ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {"x": 3.5}}]', None, [("a", '{"x": 3.5}')]),
    (
        "mistral",
        'Hm. [TOOL_CALLS] [{"name": "a", "arguments": {"x": [[]]}, "id": "123456789"}, '
        '{"arguments": {}, "name": "b"}]\n',
        "Hm.",
        [("a", '{"x": [[]]}'), ("b", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]a[ARGS]{"x": "[TOOL_CALLS]"}', None, [("a", '{"x": "[TOOL_CALLS]"}')]),
    (
        "mistral",
        'Hm.[TOOL_CALLS]a_b-c[ARGS]{"x": {}}[TOOL_CALLS]d[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]e{} done',
        "Hm. done",
        [("a_b-c", '{"x": {}}'), ("d", "{}"), ("e", "{}")],
    ),
    ("mistral", "[TOOL_CALLS]a[ARGS]", "[TOOL_CALLS]a[ARGS]", []),
    ("mistral", "[TOOL_CALLS] not JSON [at all]", "[TOOL_CALLS] not JSON [at all]", []),
    ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {}}, no', ", no", [("a", "{}")]),
    ("mistral", '[TOOL_CALLS]a{"x": 1, ', None, [("a", '{"x": 1, ')]),
    ("mistral", "a[0][TOOL_CALL", "a[0][TOOL_CALL", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
def test_texts(form: str, text: str, content: str | None, calls: Calls) -> None:
    """C77: guards against arguments lost, doubled or rewritten, markers in the content, and content lost to markers."""
    expected = Message(content, None, [ToolCall(*call) for call in calls])
    assert parse(text, None, form) == expected
    assert in_pieces(make_parser(None, form), text) == expected


def test_calls_are_told_as_they_come() -> None:
    """Guards against a call that is held back until it ends, and a name that comes twice or late."""
    parser = make_parser(None, "hermes")
    told = [parser.push(text) for text in ("Hm. <tool", '_call>{"name": "a", "arg', 'uments": {"x', '": "y', '"}}</t')]
    told += [parser.push("ool_call> "), parser.finish()]
    assert [delta.content for delta in told] == ["Hm.", *[""] * 6]
    calls = [[(call.index, call.name, call.arguments) for call in delta.tool_calls] for delta in told]
    assert calls == [[], [], [(0, "a", '{"x')], [(0, None, '": "y')], [(0, None, '"}')], [], []]


def test_prose_is_told_at_once() -> None:
    """Guards against text that waits though it can't begin a marker."""
    for form, text in (("hermes", "a<b"), ("llama3_json", "a {"), ("mistral", "a[b")):
        parser = make_parser(None, form)
        assert "".join(parser.push(char).content for char in text) == text
    parser = make_parser(None, "hermes")
    assert parser.push("<tool_call>no").content == "<tool_call>no"


def test_names_that_nobody_declared_pass() -> None:
    """Guards against a parser that judges names: which tools there are is the server's business."""
    assert parse('[TOOL_CALLS]rm-rf{"x": 1}', None, "mistral").tool_calls == [ToolCall("rm-rf", '{"x": 1}')]


def test_neither() -> None:
    """Guards against a parser without formats that changes text."""
    text = '<think>a</think><tool_call>{"name": "a"}</tool_call>'
    assert in_pieces(make_parser(None, None), text) == Message(text, None, [])


def test_too_many_calls() -> None:
    """R16: guards a client against calls without end; what isn't read as calls is content."""
    call = '<tool_call>{"name": "a"}</tool_call>'
    message = parse(call * 1002, None, "hermes")
    assert len(message.tool_calls) == 1000
    assert message.content == call * 2
    assert in_pieces(make_parser(None, "hermes"), call * 1002) == message
    for needless, calls in ((900, 1), (1100, 0)):
        text = "{" + '"x": 0, ' * needless + '"name": "a", "parameters": {}}'
        assert len(parse(text, None, "llama3_json").tool_calls) == calls


@pytest.mark.parametrize("blank", range(200, 270))
def test_long_headers_in_any_pieces(blank: int) -> None:
    """Guards against a limit that is one in whole texts and another where text comes letter by letter."""
    for text in (
        f'<tool_call>{" " * blank}{{"name": "a"}}</tool_call>',
        f'<tool_call>{{{" " * blank}"name": "a"}}</tool_call>',
        f'<tool_call>{{"name": "{"a" * blank}"}}</tool_call>',
        f'<tool_call>{{"name": "a"{" " * blank}}}</tool_call>',
        f'<tool_call>{{"name": "a", "arguments": {"1" * blank}}}</tool_call>',
        f'<tool_call>{{"name": "a"}}{" " * blank}</tool_call>',
    ):
        assert in_pieces(make_parser(None, "hermes"), text) == parse(text, None, "hermes")
