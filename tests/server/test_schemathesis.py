"""Requests made from /openapi.json, good and bad ones: no 5xx, no hang, OpenAI's errors, and others unharmed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis import Case, GenerationMode

from tests.server.fuzz import Traffic, check_error, under_fire

OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/health/ready"),
    ("GET", "/health/live"),
    ("GET", "/metrics"),
]
STORMS = [
    (method, path, mode)
    for method, path in OPERATIONS
    for mode in GenerationMode
    if mode.is_positive or method == "POST"  # without a body there is nothing to get wrong
]
PLAIN = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi", "tokens": [104, 105]}
"""Put in the place of what was generated, every other time, so that the other fields get their turn too."""
HANGS = 20
"""Seconds after which an answer is held to be lost, on a machine that may be busy."""


@pytest.fixture(scope="module")
def fire(text_model: Path) -> Iterator[tuple[str, Traffic]]:
    with under_fire(text_model) as found:
        yield found


def test_every_operation_is_described(fire: tuple[str, Traffic]) -> None:
    """Guards the list above, and the errors that each route declares: a new route must be fuzzed too."""
    document = requests.get(f"{fire[0]}/openapi.json", timeout=HANGS).json()
    found = {
        (method.upper(), path): each for path, methods in document["paths"].items() for method, each in methods.items()
    }
    assert set(found) == set(OPERATIONS)
    for each in found.values():
        assert {"200", "4XX", "5XX"} <= set(each["responses"])
        assert "422" not in each["responses"]


@pytest.mark.parametrize(("method", "path", "mode"), STORMS)
def test_requests_from_the_schema(fire: tuple[str, Traffic], method: str, path: str, mode: GenerationMode) -> None:
    """F11, R18: 100 requests an operation, by the schema and against it."""
    storm(*fire, method, path, mode, 100)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("method", "path", "mode"), STORMS)
def test_many_requests_from_the_schema(fire: tuple[str, Traffic], method: str, path: str, mode: GenerationMode) -> None:
    """F11, R18: 1,000 of them."""
    storm(*fire, method, path, mode, 1000)


def storm(url: str, traffic: Traffic, method: str, path: str, mode: GenerationMode, count: int) -> None:
    """Send ``count`` requests to an operation and look at each answer."""
    operation = schemathesis.openapi.from_url(f"{url}/openapi.json")[path][method]
    with requests.Session() as session:

        @settings(
            max_examples=count,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode), plain=strategies.booleans())
        def send(case: Case, plain: bool) -> None:
            if plain and mode.is_positive and isinstance(case.body, dict):
                case.body = {name: PLAIN.get(name, value) for name, value in case.body.items()}
            answer = case.call(base_url=url, session=session, timeout=HANGS)
            asked = f"{answer.request.url} {case.headers} {answer.request.body!r} {case.body!r}"
            assert answer.status_code < 500, (asked, answer.text)
            assert mode.is_positive or answer.status_code >= 400, (asked, answer.text)
            if answer.status_code >= 400:
                check_error(answer.content, asked)
            elif answer.headers["content-type"] == "application/json":
                assert isinstance(answer.json(), dict)
            assert b"internal error" not in answer.content, asked  # in an event of a stream

        send()
    traffic.check()
