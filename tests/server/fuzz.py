"""What fuzzing needs: the whole server on its own listener, good traffic beside the bad, what no answer may hold."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from shardwise.server.app import create_app
from shardwise.server.deps import Deps
from shardwise.server.errors import SHAPE
from shardwise.server.listener import Listener
from shardwise.server.port import bind
from tests.server.conftest import client_of, deps_on, wait_for

GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "good traffic", "max_tokens": 12, "seed": 5}),
    (
        "/v1/completions",
        {"prompt": "and a choice: ", "max_tokens": 20, "seed": 6, "guided_regex": "[a-f]{9}", "logprobs": 1},
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "temperature": 0}),
    ("/v1/embeddings", {"input": "good traffic"}),
]
LEAKS = re.compile(r"Traceback|0x[0-9a-f]{4,}|site-packages|(?<![\w#])/\w+/\w|/tmp\b|\w\.py\b|line \d+, in ")
"""What tells of the inside: addresses, paths, stack traces (R18)."""
NAMES: dict[str, Any] = {"served_model_names": ("*",), "max_model_len": 96, "max_n": 4, "tool_parser": "hermes"}
"""Settings under which random requests go far, and are soon over."""


@contextmanager
def listening(deps: Deps) -> Iterator[str]:
    """The whole server on a socket of this host, by its own listener; yields its address."""
    ready, stop, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()
    sock = bind("127.0.0.1", 0)

    async def live() -> None:
        app = create_app(deps)
        listener = Listener(app, deps.config, sock)
        async with app.router.lifespan_context(app):
            await listener.start()
            ready.set()
            await stop.wait()
            await listener.close(2.0)

    def run() -> None:
        loop.run_until_complete(live())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        wait_for(ready.is_set, 30)
        yield "http://127.0.0.1:{1}".format(*sock.getsockname())
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        assert not thread.is_alive()
        sock.close()


class Traffic:
    """Good requests again and again, by a thread of its own. `check`: each had the answer that it has alone."""

    def __init__(self, url: str) -> None:
        self.num_right = 0
        self.slowest = 0.0
        self._url = url
        self._http = client_of(url)
        self._expected = [self._ask(at) for at in range(len(GOOD))]
        self._wrong: list[object] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="good traffic")
        self._thread.start()

    def check(self) -> None:
        wait_for(lambda: self.num_right > 0 or bool(self._wrong))
        assert not self._wrong, self._wrong[:2]
        assert self._thread.is_alive()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self._http.close()

    def _ask(self, at: int) -> object:
        route, body = GOOD[at]
        answer = self._http.post(route, json={"model": "any", **body})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return found.get("choices") or found["data"]

    def _run(self) -> None:
        at = 0
        while not self._stop.wait(0.05):
            at = (at + 1) % len(GOOD)
            began = time.monotonic()
            try:
                found = self._ask(at)
            except Exception as error:
                self._wrong.append(error)
                continue
            self.slowest = max(self.slowest, time.monotonic() - began)
            if found == self._expected[at]:
                self.num_right += 1
            else:
                self._wrong.append((at, found, self._expected[at]))


@contextmanager
def under_fire(path: Path, layout: str = "1", **settings: Any) -> Iterator[tuple[str, Traffic]]:
    """A server with good traffic; at the end that must have been unharmed, and nothing of any request is left."""
    with deps_on(path, layout, **{**NAMES, **settings}) as deps, listening(deps) as url:
        traffic = Traffic(url)
        try:
            yield url, traffic
            traffic.check()
        finally:
            traffic.close()
        wait_for(lambda: deps.service.num_open == 0 and not deps.service.replicas.has_work, 30)
        assert deps.service.state == "ok"
        assert deps.service.admission.num_open == 0
        for engine in deps.service.replicas.engines:
            engine.scheduler.check()
            assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def check_error(body: bytes, asked: str = "") -> None:
    """An error's body has OpenAI's shape and tells nothing of the inside; ``asked`` is what the client had said."""
    document = json.loads(body)
    Draft202012Validator(SHAPE).validate(document)
    message = document["error"]["message"]
    assert message
    found = LEAKS.search(message)
    assert found is None or found[0] in asked, message
