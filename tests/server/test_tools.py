"""Tools, from the request to the call: told to the template, made into a grammar, read back from the text, streamed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from shardwise.intake import Intake
from shardwise.params import SamplingParams
from shardwise.parsers import parse
from shardwise.server import chat
from shardwise.server.config import ServerConfig
from shardwise.server.document import MAX_DEPTH
from shardwise.server.messages import arguments_of
from shardwise.server.tools import SHAPES, Offer, Tool, new_call_id
from tests.server.dictation import END, Api, dictated, save_chat_model

CHAT = "/v1/chat/completions"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
FORMATS = tuple(SHAPES)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Köln", "Rome"]},
                "at": {"$ref": "#/$defs/place"},
            },
            "required": ["city", "at"],
            "additionalProperties": False,
            "$defs": {"place": {"type": "object", "properties": {"x": {"enum": [0.8, -1]}}, "required": ["x"]}},
        },
    },
}
WEATHER["function"]["parameters"]["$defs"]["place"]["additionalProperties"] = False  # type: ignore[index]
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
ARGUMENTS = '{"city": "Köln", "at": {"x": 0.8, "deep": [[1, 2.50], {"q": "\\"}{\\\\"}]}, "n": 12}'
TEXTS = {
    "hermes": 'So:\n<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": %s}; {"name": "now", "parameters": {}}',
    "mistral": 'So:\n[TOOL_CALLS][{"name": "weather", "arguments": %s}, {"name": "now", "arguments": {}}]',
}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module", params=["1", "tp2", "pp2"])
def api(request: pytest.FixtureRequest, chat_model: Path) -> Iterator[Api]:
    with dictated(chat_model, request.param, chat.router, tool_parser="hermes", reasoning_parser="qwen3") as found:
        yield found


@pytest.fixture(autouse=True)
def silence(request: pytest.FixtureRequest) -> Iterator[None]:
    """A script is one test's."""
    yield
    if "api" in request.fixturenames:
        request.getfixturevalue("api").say(None)


@pytest.fixture(scope="module")
def intake(chat_model: Path) -> Intake:
    from shardwise.tokenizer import Tokenizer

    return Intake(Tokenizer.from_directory(chat_model), 290, frozenset({END}))


def told(api: Api, **body: Any) -> dict[str, Any]:
    """The first choice."""
    found: dict[str, Any] = api.post(CHAT, **{"messages": HI, "tools": TOOLS, **body})["choices"][0]
    return found


def streamed(api: Api, **body: Any) -> dict[str, Any]:
    """A choice put together from its deltas."""
    content, calls, end = "", list[dict[str, Any]](), None
    for event in api.events(CHAT, **{"messages": HI, "tools": TOOLS, **body}):
        (choice,) = event["choices"]
        content += choice["delta"].get("content") or ""
        end = choice["finish_reason"]
        for piece in choice["delta"].get("tool_calls", ()):
            if piece["index"] == len(calls):
                assert (piece["type"], bool(piece["id"])) == ("function", True)
                calls.append({"id": piece["id"], **piece["function"]})
            else:
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    return {"content": content, "calls": [(call["name"], call["arguments"]) for call in calls], "end": end} | {
        "ids": [call["id"] for call in calls]
    }


@pytest.mark.parametrize("form", FORMATS)
def test_calls_in_each_format(chat_model: Path, form: str) -> None:
    """C77: guards against arguments lost, doubled or rewritten: whole and streamed they are what the model wrote."""
    with dictated(chat_model, "1", chat.router, tool_parser=form) as api:
        api.say(TEXTS[form] % ARGUMENTS)
        choice = told(api)
        calls = choice["message"]["tool_calls"]
        assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == [
            ("weather", ARGUMENTS),
            ("now", "{}"),
        ]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == (None if form == "llama3_json" else "So:")
        found = streamed(api)
        assert found["calls"] == [("weather", ARGUMENTS), ("now", "{}")]
        assert (found["content"], found["end"]) == (choice["message"]["content"] or "", "tool_calls")
        ids = [call["id"] for call in calls] + found["ids"]
        assert len(set(ids)) == 4
        if form == "mistral":
            assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_the_same_on_every_layout(api: Api) -> None:
    """C77 on layouts: thought, words and calls, whole and streamed."""
    api.say("<think>hm</think>" + TEXTS["hermes"] % ARGUMENTS)
    message = told(api)["message"]
    assert (message["content"], message["reasoning_content"]) == ("So:", "hm")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [ARGUMENTS, "{}"]
    assert streamed(api)["calls"] == [("weather", ARGUMENTS), ("now", "{}")]


def test_forced_calls_are_good_calls(api: Api) -> None:
    """C70, C86: guards against a required call that the model's own words can miss, on layouts, greedy and sampled."""
    for asked in ({"temperature": 0}, {"temperature": 1.5, "seed": 4}):
        body = {"tool_choice": {"type": "function", "function": {"name": "weather"}}, **asked}
        choice = told(api, **body)
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        values = json.loads(call["function"]["arguments"])
        assert values["city"] in ("Köln", "Rome")
        assert values["at"]["x"] in (0.8, -1)
        assert streamed(api, **body)["calls"] == [("weather", call["function"]["arguments"])]
    choice = told(api, tool_choice="required", parallel_tool_calls=False, tools=[WEATHER], temperature=1.0, seed=1)
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Köln", "Rome")


def test_a_conversation_with_tools(api: Api) -> None:
    """Guards against a second turn that refuses what the first one gave."""
    api.say(TEXTS["hermes"] % '{"city": "Rome"}')
    message = told(api)["message"]
    results = [{"role": "tool", "content": "rain", "tool_call_id": call["id"]} for call in message["tool_calls"]]
    api.say("It rains.")
    choice = told(api, messages=[*HI, message, *results])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("It rains.", "stop")
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 600, 100_000])
def test_arguments_that_are_nested(depth: int) -> None:
    """Guards against an internal error for what a model, or a client, has nested deeper than any code can follow."""
    text = '{"a":' * depth + "1" + "}" * depth
    value = arguments_of(text)
    assert (value == text) is (depth > MAX_DEPTH)
    assert arguments_of('{"a": ["}"]}') == {"a": ["}"]}
    assert arguments_of("") == {}


def test_a_conversation_with_nested_arguments(server: Api) -> None:
    """Guards the route against the same: here it is only too long."""
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a":' * 600 + "1" + "}" * 600}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert "context" in server.refused(CHAT, "messages", messages=messages)


def test_no_calls_when_there_may_be_none(api: Api) -> None:
    """Guards against text read as calls where none may be made."""
    text = TEXTS["hermes"] % "{}"
    api.say(text)
    for asked in ({"tool_choice": "none"}, {"tools": None}):
        choice = told(api, **asked)
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_calls_or_json(api: Api) -> None:
    """Guards against a response_format that rules out calls, or is forgotten because of tools."""
    shape = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": shape}}
    choice = told(api, response_format=format_, max_tokens=300)
    message = choice["message"]
    if "tool_calls" in message:
        assert message["content"] is None or choice["finish_reason"] == "length"  # what is cut off is no call
    else:
        assert json.loads(message["content"])["a"] in (1, 2)
    api.say('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert told(api, response_format=format_)["message"]["tool_calls"][0]["function"]["name"] == "now"
    api.say('{"a": 2}')
    assert told(api, response_format={"type": "json_object"})["message"]["content"] == '{"a": 2}'


def bad(parameters: Any = None, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tools.0.type", {"tools": [{"type": "web_search", "function": {"name": "f"}}]}),
    ("tools.0.function.name", {"tools": [bad(name="a b")]}),
    ("tools.0.function.name", {"tools": [bad(name="")]}),
    ("tools.1", {"tools": [NOW, NOW]}),
    ("tools", {"tools": [bad(name=f"f{at}") for at in range(129)]}),
    ("tools.0.function.parameters", {"tools": [bad({"type": "array"})]}),
    ("tools.0.function.bogus", {"tools": [bad(bogus=1)]}),
    ("tools", {"tools": [bad({"properties": {"a": {"typo": 1}}})], "tool_choice": "required"}),
    ("tools", {"tools": [bad({"properties": {"a": {"$ref": "#/none"}}})], "tool_choice": "required"}),
    ("tool_choice", {"tool_choice": "sometimes"}),
    ("tool_choice", {"tools": None, "tool_choice": "auto"}),
    ("tool_choice", {"tools": [], "tool_choice": "required"}),
    ("tool_choice.function.name", {"tool_choice": {"type": "function", "function": {"name": "other"}}}),
    ("tool_choice.function.name", {"tool_choice": {"type": "function", "function": {}}}),
    ("tool_choice.function.bogus", {"tool_choice": {"type": "function", "function": {"name": "f", "bogus": 1}}}),
    ("guided_regex", {"guided_regex": "a"}),
    ("response_format", {"tool_choice": "required", "response_format": {"type": "json_object"}}),
    ("parallel_tool_calls", {"parallel_tool_calls": "yes"}),
]


@pytest.mark.parametrize(("param", "body"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_name_the_field(server: Api, param: str, body: dict[str, Any]) -> None:
    """C75: guards against tools that are half honoured, and grammars that fail later than the request."""
    server.refused(CHAT, param, **{"messages": HI, "tools": TOOLS, **body})


@pytest.fixture(scope="module")
def server(chat_model: Path) -> Iterator[Api]:
    """For what no layout can change."""
    with dictated(chat_model, "1", chat.router, tool_parser="hermes") as found:
        yield found


def test_a_server_without_a_format(chat_model: Path) -> None:
    """Guards against tools that are told to a model whose calls nobody reads."""
    assert ServerConfig().tool_parser is None
    with dictated(chat_model, "1", chat.router) as api:
        assert "--tool-parser" in api.refused(CHAT, "tools", messages=HI, tools=TOOLS)
        api.say("ok")
        assert told(api, tool_choice="none")["message"]["content"] == "ok"


def test_a_template_without_tools(text_model: Path) -> None:
    """Guards against tools that the model never hears of."""
    with dictated(text_model, "1", chat.router, tool_parser="hermes") as api:
        api.refused(CHAT, "tools", messages=HI, tools=TOOLS)


def test_marks_that_are_special_tokens(chat_model: Path, tmp_path: Path) -> None:
    """Guards against calls that vanish because decoding leaves special tokens out."""
    path = tmp_path / "special"
    shutil.copytree(chat_model, path)
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens(["<tool_call>", "</tool_call>"])
    backend.save(str(path / "tokenizer.json"))
    with dictated(path, "1", chat.router, tool_parser="hermes") as api:
        api.say('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
        assert api.script.line is not None
        assert {259, 260} <= set(api.script.line)
        assert told(api)["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
        assert streamed(api)["calls"] == [("now", "{}")]
        assert told(api, tools=None)["message"]["content"].startswith('\n{"name"')
        assert told(api, tools=None, skip_special_tokens=False)["message"]["content"].startswith("<tool_call>")
        api.refused(CHAT, "skip_special_tokens", messages=HI, tools=TOOLS, skip_special_tokens=True)
        api.say(None)
        choice = told(
            api, tools=[NOW], tool_choice="required", parallel_tool_calls=False, max_tokens=300, temperature=0
        )
        assert choice["message"]["content"] is None


def accepts(intake: Intake, lark: str, text: str) -> bool:
    """Is the text one that the grammar allows, to its end?"""
    prepared = intake.prepare("", [0], SamplingParams(ebnf=lark, max_tokens=500))
    matcher = prepared.parts[0].matcher
    assert matcher is not None
    tokens = [*intake.tokenizer.encode(text, add_special_tokens=False), END]
    for token in tokens:
        mask = matcher.mask()
        if not mask[token // 8] >> token % 8 & 1:
            return False
        matcher.advance(token)
    return True


GOOD = '{"city": "Rome", "at": {"x": -1}}'
EACH = {
    "hermes": ('<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>', "\n", "", ""),
    "llama3_json": ('{"name": "weather", "parameters": %s}', "; ", "", ""),
    "mistral": ('{"name": "weather", "arguments": %s}', ", ", "[TOOL_CALLS][", "]"),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("choice", ["required", "named", "strict"])
def test_grammars_of_calls(intake: Intake, form: str, choice: str) -> None:
    """Guards against a grammar that allows what the parser can't read back, or what the schema doesn't allow."""
    one, between, before, after = EACH[form]
    strict = choice == "strict"
    raw = {**WEATHER["function"], "strict": strict}  # type: ignore[dict-item]
    tools = [Tool.model_validate({"type": "function", "function": raw}), Tool.model_validate(NOW)]
    for parallel in (True, False):
        offer = Offer(tools, "auto" if strict else "required", "weather" if choice == "named" else None, parallel)
        found = offer.grammar(form, None)
        assert found is not None
        assert found.free is strict
        several = parallel and choice != "named"
        wanted = {
            before + one % GOOD + after: True,
            before + between.join([one % GOOD] * 2) + after: several,
            before + one % GOOD.replace("Rome", "Bonn") + after: False,
            before + one % "{}" + after: False,
            before + one.replace("weather", "other") % GOOD + after: False,
            "just text": strict,
            "": strict,
        }
        if strict and form != "llama3_json":
            wanted["so: " + before + one % GOOD + after + " done"] = True
            wanted["so: " + before + one % "{}" + after] = False
        for text, allowed in wanted.items():
            assert accepts(intake, found.lark, text) is allowed, text
            if allowed and "weather" in text:
                calls = parse(text, None, form).tool_calls
                assert {(call.name, call.arguments) for call in calls} == {("weather", GOOD)}
                assert len(calls) == text.count("weather")


def test_many_tools(intake: Intake) -> None:
    """Guards against a limit on grammars that a hundred tools pass."""
    schema = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(8)}}
    tools = [Tool.model_validate(bad(schema, name=f"tool_{at}")) for at in range(128)]
    found = Offer(tools, "required", None, True).grammar("hermes", None)
    assert found is not None
    assert accepts(intake, found.lark, '<tool_call>\n{"name": "tool_127", "arguments": {"p3": "x"}}\n</tool_call>')


@pytest.mark.parametrize("form", [None, *FORMATS])
def test_ids_are_new(form: str | None) -> None:
    """Guards against two calls with one id."""
    made = {new_call_id(form) for _ in range(1000)}
    assert len(made) == 1000
