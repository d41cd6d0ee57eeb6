"""Every field with values that somebody might send: the edges of numbers, odd texts, grammars, tools and messages."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.conftest import client_of
from tests.server.dictation import save_chat_model
from tests.server.fuzz import Traffic, check_error, under_fire


def function(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def schema(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": more}}


ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, -0.0, 0.5, 1e-320, 1e-30, 1e308, -1e308, 10**30, 10**400),
    *(2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63)),
    *("", "a", "\x00", "\u202e", "\ud800", "é" * 10, "😀", "x" * 3000, "null", "5", "NaN", "<s></s>"),
    *("{", "{{ 1/0 }}", "{% for %}", "(", "[a-z]+", "(a|b)*c", "a{1000}", "\\p{L}+", "^$", "(?i)a", "\\b"),
    *([], [None], [0], [-1], [10**9], [0] * 3000, ["a"], [""], ["a"] * 2000, [[]], [[1]], [["a"]], [{}]),
    *({}, {"": ""}, {"a": 1}, {"0": 100}, {"0": -100}, {"0": 1e300}, {"-1": 1}, {"999": 1}, {"1.5": 1}),
    *({"type": "object"}, {"type": "json_object"}, {"type": "text"}, {"include_usage": True}, {"thinking": "x" * 9999}),
    *(schema(), schema(**{"$ref": "#"}), schema(type=["string", "null"], pattern="^a*$", maxLength=3)),
    *({"enum": []}, {"const": 1e300}, {"not": {}}, {"anyOf": []}, {"oneOf": [True, True]}),
    *({"allOf": [{"type": "string"}, {"type": "integer"}]}, {"type": "integer", "minimum": 5, "maximum": 4}),
    *({"type": "array", "minItems": 10**9}, {"type": "array", "prefixItems": [{"type": "null"}], "items": False}),
    {"properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
    *({"regex": "a"}, {"json": {}}, {"choice": ["a"]}, {"choice": [""]}, {"choice": ["\x00"]}, {"json_object": True}),
    *({"grammar": 'root ::= "a"'}, {"grammar": "start: start"}, "root ::= root", 'start: "a"* ', "start: /a/ | start"),
    *("root ::= [^\\n]*", 'root ::= ""', "required", "auto", "none", "float", "base64", "mean", "last", "low", "flex"),
    *([function()], [function(parameters={"properties": {"a": {"enum": [1e300, "é", None, [], {}]}}}, strict=True)]),
    *(function(), {"type": "function", "name": "f"}, [{"type": "function", "name": "f", "parameters": {}}]),
    *([{"role": "user", "content": "\x00<s>"}], [{"role": "user", "content": []}], [{"role": "tool", "content": ""}]),
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "", **function("", arguments="[[[")}]}],
    [{"role": "assistant", "content": "x"}] * 300,
    *([{"type": "message", "role": "user", "content": "hi"}], [{"type": "reasoning", "summary": []}]),
    [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}],
    [{"type": "function_call_output", "call_id": "1", "output": "x"}],
    *({"format": {"type": "json_schema", "name": "x", "schema": {}}}, {"effort": "low"}, {"enable_thinking": True}),
]
BASE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(scope="module", params=["1", "tp2", "pp2"])
def fire(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Traffic]]:
    path = save_chat_model(tmp_path_factory.mktemp("model"))
    settings = {"reasoning_parser": "qwen3", "trust_request_chat_template": True}
    with under_fire(path, request.param, **settings) as found:
        yield found


def test_odd_values(fire: tuple[str, Traffic]) -> None:
    """F11, C1, C5, C6, C75, C85: guards against a value that a field takes and the engine doesn't."""
    storm(*fire, 1000)


def test_odd_numbers(fire: tuple[str, Traffic]) -> None:
    """F11: guards against a number that divides by nothing or is infinite further on: each in each field."""
    url, traffic = fire
    numbers = [value for value in ODD if isinstance(value, int | float)]
    with client_of(url) as http, ThreadPoolExecutor(8) as pool:
        route = "/v1/completions"
        bodies = [{"temperature": 1, name: value} for name in fields_of(http)[route] for value in numbers]
        statuses = Counter(pool.map(lambda body: send(http, route, body), bodies))
    assert {200, 400} <= set(statuses), statuses
    traffic.check()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_odd_values(fire: tuple[str, Traffic]) -> None:
    """F11: 10,000 of them."""
    storm(*fire, 10_000)


def fields_of(http: httpx.Client) -> dict[str, list[str]]:
    """The fields of each route, as the server tells them."""
    document = http.get("/openapi.json").json()
    found = {}
    for route in BASE:
        content = document["paths"][route]["post"]["requestBody"]["content"]
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        found[route] = sorted(set(document["components"]["schemas"][name]["properties"]) - {"model"})
    return found


def storm(url: str, traffic: Traffic, count: int) -> None:
    """Valid bodies of which one to three fields have odd values, 8 at once."""
    with client_of(url) as http, ThreadPoolExecutor(8) as pool:
        fields = fields_of(http)

        def one(number: int) -> int:
            rng = random.Random(number)
            route = rng.choice(list(BASE))
            odd = {rng.choice(fields[route]): rng.choice(ODD) for _ in range(rng.randint(1, 3))}
            return send(http, route, odd)

        statuses = Counter(pool.map(one, range(count)))
    assert {200, 400} <= set(statuses), statuses
    traffic.check()


def send(http: httpx.Client, route: str, odd: dict[str, Any]) -> int:
    """One request, of which some fields are odd; the status of its answer."""
    body = json.dumps({"model": "any", **BASE[route], **odd})
    answer = http.post(route, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, (body, answer.text)
    assert b"internal error" not in answer.content, body
    if answer.status_code >= 400:
        check_error(answer.content, body)
    return answer.status_code
