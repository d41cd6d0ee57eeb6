"""The responses route on threaded layouts, over real sockets: inputs, refusals, output items and their events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from shardwise.engine import Engine
from shardwise.server import responses
from shardwise.server.responses import ResponseFields
from tests.server.conftest import wait_for
from tests.server.dictation import Api, dictated, save_chat_model

ROUTE = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {"x": {"enum": [0.8, -1]}},
        "required": ["x"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 0.8, "é": [1, {}]}}\n</tool_call>'


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("responses"))


@pytest.fixture(scope="module", params=["1", "tp2", "pp2"])
def api(request: pytest.FixtureRequest, chat_model: Path) -> Iterator[Api]:
    settings = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    with dictated(chat_model, request.param, responses.router, **settings) as found:
        yield found


@pytest.fixture(scope="module")
def single(chat_model: Path) -> Iterator[Api]:
    """For what no layout can change."""
    with dictated(chat_model, "1", responses.router, tool_parser="hermes", reasoning_parser="qwen3") as found:
        yield found


@pytest.fixture(autouse=True)
def silence(request: pytest.FixtureRequest) -> Iterator[None]:
    """A script is one test's."""
    yield
    for name in ("api", "single"):
        if name in request.fixturenames:
            request.getfixturevalue(name).say(None)


def without_ids(value: Any) -> Any:
    """A document to be compared: ids and times are new each time."""
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "item_id", "call_id", "created_at")}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def built(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items put together from deltas alone."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(json.loads(json.dumps(event["item"])))
        elif kind == "response.content_part.added":
            items[event["output_index"]]["content"].append(dict(event["part"]))
        elif kind.endswith("_text.delta"):
            part = items[event["output_index"]]["content"][event["content_index"]]
            part["text"] += event["delta"]
            if kind == "response.output_text.delta":
                part["logprobs"] = part["logprobs"] + event["logprobs"]
        elif kind == "response.function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "response.output_item.done":
            assert {**items[event["output_index"]], "status": event["item"]["status"]} == event["item"]
            items[event["output_index"]] = event["item"]
    return items


def test_all_kinds_of_output(api: Api) -> None:
    """C77 on layouts: guards against items that depend on whether they are streamed, and events that don't add up."""
    api.say("<think>hm</think>So: " + CALL)
    asked: dict[str, Any] = {
        "input": "hi",
        "tools": [TOOL],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    asked["temperature"] = 0
    found = api.post(ROUTE, **asked)
    reasoning, message, call = found["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (message["role"], message["content"][0]["text"]) == ("assistant", "So:")
    assert (call["name"], call["arguments"]) == ("f", '{"x": 0.8, "é": [1, {}]}')
    assert found["status"] == "completed"
    assert found["store"] is False
    assert found["usage"]["total_tokens"] == found["usage"]["input_tokens"] + found["usage"]["output_tokens"]
    assert "So:" in "".join(score["token"] for score in message["content"][0]["logprobs"])
    assert all(len(score["top_logprobs"]) == 2 for score in message["content"][0]["logprobs"])
    events = api.events(ROUTE, **asked)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[-1]["type"] == "response.completed"
    last = events[-1]["response"]
    assert built(events) == last["output"]
    assert without_ids(last) == without_ids(found)
    ids = [item["id"] for item in last["output"] + found["output"]]
    assert len(set(ids)) == 6


def test_a_text_alone(single: Api) -> None:
    """Guards against an event too many, or text that is told twice."""
    single.say("héllo 😀")
    events = single.events(ROUTE, input="hi")
    kinds = [event["type"].removeprefix("response.") for event in events]
    head = ["created", "in_progress", "output_item.added", "content_part.added"]
    tail = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[:4] == head
    assert kinds[-4:] == tail
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event["delta"] for event in events[4:-4]) == "héllo 😀"
    assert events[-4]["text"] == "héllo 😀"


def test_an_answer_that_is_cut(single: Api) -> None:
    """Guards against a cut answer that says it is complete."""
    found = single.post(ROUTE, input="hi", max_output_tokens=3, ignore_eos=True)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["usage"]["output_tokens"] == 3
    assert single.events(ROUTE, input="hi", max_output_tokens=3, ignore_eos=True)[-1]["type"] == "response.incomplete"


def test_reasoning_that_is_cut(single: Api) -> None:
    """Guards the count of reasoning from what was held back, as it might have been a mark, when the answer is cut."""
    text = "<think>because</thi"
    single.say(text)
    found = single.post(ROUTE, input="hi", max_output_tokens=len(text))
    assert found["output"][0]["content"] == [{"type": "reasoning_text", "text": "because</thi"}]
    usage = found["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == usage["output_tokens"] == len(text)
    single.say("<think>a</think>b")
    assert single.post(ROUTE, input="hi")["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>a")


def test_constraints(api: Api) -> None:
    """C86: guards against a text.format or a tool_choice that doesn't hold, on layouts."""
    shape = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    format_ = {"type": "json_schema", "name": "x", "schema": shape, "strict": True}
    found = api.post(ROUTE, input="hi", text={"format": format_})
    (message,) = found["output"]
    assert json.loads(message["content"][0]["text"])["a"] in (1, 2)
    assert found["text"]["format"]["schema"] == shape
    found = api.post(ROUTE, input="hi", tools=[TOOL], tool_choice={"type": "function", "name": "f"})
    (call,) = found["output"]
    assert json.loads(call["arguments"])["x"] in (0.8, -1)
    assert found["tool_choice"] == {"type": "function", "name": "f"}


def test_items_reach_the_template(single: Api) -> None:
    """Guards against a turn, thought, call or result that the model never sees: all of it comes with each request."""
    single.say("<think>hm</think>So: " + CALL)
    output = single.post(ROUTE, input="hi", tools=[TOOL])["output"]
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        *output,
        {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "3"},
        {"type": "message", "role": "user", "content": "and?"},
    ]
    fields = ResponseFields.model_validate(
        {"model": "tiny", "instructions": "be brief", "input": given, "reasoning": {"effort": "low"}}
    )
    text, _ = fields.dialogue(single.deps, fields.offer(single.deps)).write(single.deps)
    assert text == (
        "<s>system: be brief</s><s>user: one\ntwo</s><s>assistant: <think>hm</think>So:"
        '<tool_call>\n{"name": "f", "arguments": {"x": 0.8, "é": [1, {}]}}\n</tool_call></s>'
        f"<s>tool: 3 for {output[-1]['call_id']}</s><s>user: and?</s><s>effort: low</s><s>assistant: "
    )
    single.say("ok")
    assert single.post(ROUTE, input=given)["output"][0]["content"][0]["text"] == "ok"


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": []}),
    ("input", {"input": 3}),
    ("input.0.type", {"input": [{"type": "web_search_call"}]}),
    ("input", {"input": "x" * 9000}),
    ("input", {"input": "forbidden"}),
    ("input.0.content", {"input": [{"role": "user"}]}),
    ("input.0.role", {"input": [{"content": "x"}]}),
    ("input.0.call_id", {"input": [{"type": "function_call_output", "output": "x"}]}),
    ("input.0.output", {"input": [{"role": "user", "content": "x", "output": "y"}]}),
    ("input.0.content.0.text", user({"type": "input_text"})),
    ("input.0.content.0.image_url", user({"type": "input_image", "image_url": "file:///etc/passwd"})),
    ("input.0.content.0.image_url", user({"type": "input_image", "file_id": "f"})),
    ("input.0.content.0.file_data", user({"type": "input_file", "file_url": "http://example.com"})),
    ("input.0.content.0.file_url", user({"type": "input_text", "text": "x", "file_url": "http://example.com"})),
    ("store", {"store": True}),
    ("background", {"background": True}),
    ("background", {"background": 0.0}),
    ("previous_response_id", {"previous_response_id": "resp_1"}),
    ("conversation", {"conversation": "conv_1"}),
    ("prompt", {"prompt": {"id": "p"}}),
    ("include.0", {"include": ["reasoning.encrypted_content"]}),
    ("truncation", {"truncation": "auto"}),
    ("max_tool_calls", {"max_tool_calls": 1}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("max_tokens", {"max_tokens": 3}),
    ("n", {"n": 2}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("prompt_logprobs", {"prompt_logprobs": 1}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("temperature", {"temperature": -1}),
    ("text.verbosity", {"text": {"verbosity": "low"}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
    ("text.format.schema", {"text": {"format": {"type": "text", "schema": {}}}}),
    ("text.format", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"typo": 1}}}}),
    ("reasoning.summary", {"reasoning": {"summary": "auto"}}),
    ("tools.0.type", {"tools": [{"type": "web_search"}]}),
    ("tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"tools": []}}),
    ("bogus", {"bogus": 1}),
    ("input.0.bogus", {"input": [{"role": "user", "content": "hi", "bogus": 1}]}),
    ("input.0.content.0.bogus", {"input": [{"role": "user", "content": [{"type": "text", "text": "a", "bogus": 1}]}]}),
    ("input.1.type", {"input": [{"role": "user", "content": "hi"}, {"type": "item_reference", "id": "x"}]}),
]


@pytest.mark.parametrize(("param", "body"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_name_the_field(single: Api, param: str, body: dict[str, Any]) -> None:
    """R20, R21: guards against what only a server with a memory or the network could do, silently left out."""
    assert single.refused(ROUTE, param, **{"input": "hi", **body})


def test_a_failure_within_a_stream(single: Api) -> None:
    """R18: guards against a stream that ends without a word, or with one about our inside."""
    single.say("x" * 50)
    text_of, seen = Engine._text_of, []

    def poisoned(engine: Any, news: Any) -> Any:
        seen.append(news)
        if len(seen) == 20:
            raise RuntimeError("secret")
        return text_of(engine, news)

    with patch.object(Engine, "_text_of", poisoned):
        events = single.events(ROUTE, input="hi")
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["message"] == "internal error"
    assert "secret" not in json.dumps(events)
    wait_for(lambda: single.deps.service.num_open == 0)
