"""The official client against the whole server, on threaded layouts: what its users call is what they get."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from tests.server.dictation import Api, dictated, save_chat_model

HI: Any = [{"role": "user", "content": "hi"}]
CALL = '<think>hm</think>So: <tool_call>\n{"name": "Weather", "arguments": {"city": "Rome", "x": 0.8}}\n</tool_call>'
KEY = "sk-test"


class Weather(BaseModel):
    """The weather of a place."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Köln"]
    x: float


class Place(BaseModel):
    """A place, of which there are few."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Köln"]
    near: Literal[1, 2]


class Answer(BaseModel):
    """An answer."""

    kind: Literal["yes", "no"]
    sure: bool


@dataclass
class Client:
    """The client, and the server that it talks to."""

    api: Api
    openai: OpenAI


@pytest.fixture(scope="module", params=["1", "tp2", "pp2"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path = save_chat_model(tmp_path_factory.mktemp("official"))
    settings = {"tool_parser": "hermes", "reasoning_parser": "qwen3", "api_keys": (KEY,)}
    with (
        dictated(path, request.param, **settings) as api,
        OpenAI(base_url=f"{api.url}/v1", api_key=KEY, max_retries=0, timeout=60) as found,
    ):
        yield Client(api, found)


@pytest.fixture(autouse=True)
def silence(client: Client) -> Iterator[None]:
    """A script is one test's."""
    yield
    client.api.say(None)


def test_chat(client: Client) -> None:
    """Guards against an answer that the client can't read."""
    client.api.say("héllo 😀")
    found = client.openai.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
    (choice,) = found.choices
    assert (choice.message.content, choice.finish_reason) == ("héllo 😀", "stop")
    assert found.usage is not None
    assert found.usage.completion_tokens == len("héllo 😀".encode()) + 1
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert b"".join(bytes(score.bytes or ()) for score in choice.logprobs.content[:-1]).decode() == "héllo 😀"
    assert all(len(score.top_logprobs) == 2 for score in choice.logprobs.content)


def test_chat_stream(client: Client) -> None:
    """C30, C31: guards against chunks that the client drops."""
    client.api.say("héllo 😀")
    stream = client.openai.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "héllo 😀"
    assert chunks[-1].usage is not None
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"


def test_chat_stream_helper(client: Client) -> None:
    """Guards against deltas that the client's own accumulation can't join: thought, words and a call."""
    tool: Any = openai.pydantic_function_tool(Weather)
    client.api.say(CALL)
    with client.openai.chat.completions.stream(model="tiny", messages=HI, tools=[tool]) as stream:
        kinds = {event.type for event in stream}
        found = stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    (choice,) = found.choices
    assert (choice.message.content, choice.finish_reason) == ("So:", "tool_calls")
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Rome", x=0.8)


def test_tools(client: Client) -> None:
    """Guards against calls and results that don't go round: asked, called, answered."""
    tool: Any = openai.pydantic_function_tool(Weather)
    client.api.say(CALL)
    message = client.openai.chat.completions.create(model="tiny", messages=HI, tools=[tool]).choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Rome", "x": 0.8}
    client.api.say("It rains.")
    messages = [*HI, message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    found = client.openai.chat.completions.create(model="tiny", messages=messages, tools=[tool])
    assert found.choices[0].message.content == "It rains."


def test_forced_tools(client: Client) -> None:
    """Guards against a forced call that the client's model of the arguments refuses."""
    tool: Any = openai.pydantic_function_tool(Place)
    choice: Any = {"type": "function", "function": {"name": "Place"}}
    found = client.openai.chat.completions.parse(
        model="tiny", messages=HI, tools=[tool], tool_choice=choice, temperature=1.5, seed=1, max_tokens=200
    )
    assert found.choices[0].message.tool_calls is not None
    assert isinstance(found.choices[0].message.tool_calls[0].function.parsed_arguments, Place)


def test_structured_outputs(client: Client) -> None:
    """C70, C86: guards against JSON that the client's own model of it refuses."""
    found = client.openai.chat.completions.parse(
        model="tiny", messages=HI, response_format=Answer, temperature=1.5, seed=3, max_tokens=200
    )
    assert isinstance(found.choices[0].message.parsed, Answer)
    answer = client.openai.responses.parse(model="tiny", input="hi", text_format=Answer, max_output_tokens=200)
    assert isinstance(answer.output_parsed, Answer)


def test_responses(client: Client) -> None:
    """Guards against an answer whose items the client can't read, or send back."""
    tool: Any = {"type": "function", "name": "Weather", "parameters": Weather.model_json_schema(), "strict": False}
    client.api.say(CALL)
    found = client.openai.responses.create(model="tiny", input="hi", tools=[tool], store=False)
    assert found.output_text == "So:"
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
    call = found.output[-1]
    assert call.type == "function_call"
    client.api.say("It rains.")
    given: Any = [
        {"role": "user", "content": "hi"},
        *(item.model_dump(exclude_none=True) for item in found.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    assert client.openai.responses.create(model="tiny", input=given, tools=[tool]).output_text == "It rains."


def test_responses_stream(client: Client) -> None:
    """Guards against events that the client's own accumulation refuses."""
    tool: Any = {"type": "function", "name": "Weather", "parameters": Weather.model_json_schema(), "strict": False}
    client.api.say(CALL)
    with client.openai.responses.stream(model="tiny", input="hi", tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert {"response.output_text.delta", "response.function_call_arguments.delta"} <= set(kinds)
    assert found.output_text == "So:"
    plain = client.openai.responses.create(model="tiny", input="hi", stream=True)
    assert [event.type for event in plain][-1] == "response.completed"


def test_completions(client: Client) -> None:
    """Guards against the older route's shape."""
    client.api.say(" and so on")
    found = client.openai.completions.create(model="tiny", prompt="once", logprobs=1, echo=True, max_tokens=20)
    assert found.choices[0].text == "once and so on"
    assert found.choices[0].logprobs is not None
    stream = client.openai.completions.create(model="tiny", prompt="once", stream=True, max_tokens=20)
    assert "".join(chunk.choices[0].text for chunk in stream) == " and so on"


def test_embeddings(client: Client) -> None:
    """Guards against vectors in a form that the client doesn't decode: it asks for base64 by itself."""
    found = client.openai.embeddings.create(model="tiny", input=["one", "two"])
    assert len(found.data) == 2
    assert len({len(item.embedding) for item in found.data}) == 1
    floats = client.openai.embeddings.create(model="tiny", input="one", encoding_format="float").data[0].embedding
    assert floats == pytest.approx(found.data[0].embedding, rel=1e-5, abs=1e-6)


def test_models(client: Client) -> None:
    """Guards against a server whose model can't be listed."""
    assert [model.id for model in client.openai.models.list()] == ["tiny"]
    assert client.openai.models.retrieve("tiny").id == "tiny"


def test_errors(client: Client) -> None:
    """Guards against errors of which the client makes the wrong exception."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.openai.chat.completions.create(model="tiny", messages=HI, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.openai.chat.completions.create(model="other", messages=HI)
    with (
        OpenAI(base_url=f"{client.api.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
