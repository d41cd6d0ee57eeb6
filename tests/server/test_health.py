"""The whole app's table of routes, its errors, and what /health says while ranks come and go."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from starlette.routing import Route

from shardwise.runtime.executor import RankFailure
from shardwise.server.app import TICK, bare_app, create_app
from shardwise.server.deps import Deps
from tests.server.conftest import BASE, client, deps_on
from tests.server.stage import KEY, KEYED, Stage


async def until(http: httpx.AsyncClient, path: str, status: int, word: str) -> dict[str, Any]:
    """Ask until the answer is this; it must come within a second (R28)."""
    deadline = asyncio.get_running_loop().time() + 1.0
    while True:
        answer = await http.get(path)
        found: dict[str, Any] = answer.json()
        if (answer.status_code, found["status"]) == (status, word):
            return found
        assert asyncio.get_running_loop().time() < deadline, (answer.status_code, found)
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def app(text_model: Path) -> Iterator[FastAPI]:
    with deps_on(text_model, api_keys=(KEY,)) as deps:
        yield create_app(deps)


def table(app: Any) -> set[tuple[str, str]]:
    """Every method and path that is routed."""
    found = set()
    waiting = list(app.routes)
    while waiting:
        route = waiting.pop()
        if isinstance(route, Route) or hasattr(route, "methods"):
            found |= {(method, route.path) for method in route.methods or ()}
        else:
            inner = getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", None)
            assert inner, f"{route!r} is no route that this test understands"
            waiting += inner
    return found


def test_every_route_but_health_asks_for_a_key(app: FastAPI) -> None:
    """R6: guards against a new route that answers without a key: the router's own table is asked, method by method."""
    routes = table(app)
    assert {path for _, path in routes} >= {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models", "/tokenize"),
        *("/detokenize", "/health", "/health/live", "/health/ready", "/metrics", "/openapi.json"),
    }

    async def ask() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as http:
            for method, path in sorted(routes):
                answer = await http.request(method, re.sub(r"{.*?}", "x", path))
                expected = 200 if path.startswith("/health") and method == "GET" else 401
                if not path.startswith("/health") or method == "GET":
                    assert answer.status_code == expected, (method, path)

    asyncio.run(ask())


def test_the_schema_names_every_route(app: FastAPI) -> None:
    """Guards /openapi.json, which schema-driven tests and clients read: every route with what it may answer."""
    schema = app.openapi()
    documented = {path for path in schema["paths"] if not path.startswith("/v1/models/")}
    routed = {path for _, path in table(app) if not path.startswith("/v1/models/")}
    assert routed - documented == {"/openapi.json"}
    json.dumps(schema)


def test_errors_have_one_shape(text_model: Path) -> None:
    """R18: guards unknown routes, wrong methods and wrong fields: OpenAI's shape, and only sentences of ours."""

    async def ask(deps: Deps) -> None:
        async with client(deps) as http:
            http.headers.update(KEYED)
            for method, path, status in (
                ("GET", "/nothing/here", 404),
                ("GET", "/v1/chat/completions/", 404),
                ("DELETE", "/v1/chat/completions", 405),
                ("POST", "/v1/chat/completions", 400),
            ):
                answer = await http.request(method, path)
                assert answer.status_code == status, answer.text
                assert set(answer.json()["error"]) == {"message", "type", "param", "code", "request_id"}
            for body, param in (
                ({"model": "m", "messages": 1}, "messages"),
                ({"model": "m", "messages": [{"role": "user", "content": "a"}], "nonsense": 1}, "nonsense"),
                (
                    {"model": "m", "messages": [{"role": "user", "content": "a"}], "temperature": "hot" * 500},
                    "temperature",
                ),
            ):
                error = (await http.post("/v1/chat/completions", json=body)).json()["error"]
                assert error["param"] == param
                assert len(error["message"]) < 500
                assert "hothot" not in error["message"]
            assert (await http.get("/metrics")).text.count("shardwise_state") > 3

    with deps_on(text_model, api_keys=(KEY,)) as deps:
        asyncio.run(ask(deps))


def test_health_follows_the_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """R28: guards against a health of 200 while ranks are gone; live stays 200, and all is well once they are back."""

    async def watch(stage: Stage) -> None:
        async with client(stage.deps) as http:
            fine = await until(http, "/health", 200, "ok")
            assert fine["replicas"] == [
                {"ready": True, "failures": 0, "last_failure": None, "running": 0, "waiting": 0} for _ in range(2)
            ]
            assert fine["queue"] == {"open": 0, "waiting": 0, "tokens": 0}
            stage.may_start = False
            stage.ranks[1].failure = RankFailure(3, "was killed by SIGKILL; its last lines:\n/home/someone/secret.py")
            for path in ("/health", "/health/ready"):
                state = await until(http, path, 503, "recovering")
                assert [each["ready"] for each in state["replicas"]] == [True, False]
                assert state["replicas"][1]["last_failure"] == {"rank": 3, "kind": "lost"}
                assert "secret" not in json.dumps(state)
            await until(http, "/health/live", 200, "recovering")
            stage.ranks[1].ready = True
            state = await until(http, "/health", 200, "ok")
            assert state["replicas"][1]["failures"] == 1
            await asyncio.sleep(2 * TICK)

    with caplog.at_level("INFO", "shardwise"):
        asyncio.run(watch(Stage(2)))
    said = [record for record in caplog.records if "replica" in record.message]
    assert ["rank 3" in record.message for record in said] == [True, False]
    assert [record.fields["replica"] for record in said] == [1, 1]  # type: ignore[attr-defined]


def test_health_of_the_dead() -> None:
    """R28: guards against a process that can't get well and looks alive: all three say 503."""

    async def watch(stage: Stage) -> None:
        async with client(stage.deps) as http:
            await until(http, "/health/live", 200, "ok")
            stage.ranks[0].failure = RankFailure(0, "exited with code 1", own=True)
            for path in ("/health", "/health/ready", "/health/live"):
                await until(http, path, 503, "dead")
            await asyncio.wait_for(stage.service.dead.wait(), 1)
            answer = await http.post("/v1/completions", headers=KEYED, json={"model": "tiny", "prompt": "a"})
            assert answer.status_code == 503

    asyncio.run(watch(Stage(1, restarts=False)))


def test_health_of_a_drain() -> None:
    """R31: guards against traffic sent to a server that is about to end: 503 and "draining" at once."""

    async def watch(stage: Stage) -> None:
        async with client(stage.deps) as http:
            await until(http, "/health", 200, "ok")
            await stage.service.drain(1.0)
            await until(http, "/health", 503, "draining")
            await until(http, "/health/ready", 503, "draining")
            await until(http, "/health/live", 200, "draining")
            answer = await http.post("/v1/completions", headers=KEYED, json={"model": "tiny", "prompt": "a"})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1

    asyncio.run(watch(Stage()))


def test_an_exception_in_a_bare_app() -> None:
    """R18: guards against starlette's own page, where no guard is inside its net."""
    routes = APIRouter()

    @routes.get("/fails")
    async def fails() -> None:
        raise RuntimeError("secret of /home/someone")

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(bare_app([routes]), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as http:
            return await http.get("/fails")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "internal error")
    assert "secret" not in answer.text
