"""What clients could do to each other and to the server, beyond what the tests of each part hold."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from shardwise.config import BLOCK
from shardwise.grammar import grammars
from shardwise.intake import Intake, Prepared
from shardwise.params import SamplingParams
from shardwise.schedule.sequence import Request
from shardwise.schedule.step import StepResult
from shardwise.server.admission import Admission
from shardwise.server.deps import MAX_COMPILING, Deps
from shardwise.server.metrics import Metrics
from shardwise.server.service import Service
from tests.server.conftest import client_of, deps_on, serving, wait_for
from tests.server.stage import Ranks, Stage
from tests.server.test_serve import serve
from tests.tiny import save_text_model

COMPLETIONS = "/v1/completions"
LONG = "the quick brown fox jumps over the lazy dog, and then it does so again"


class Api:
    """A whole server behind a socket; ``key`` is whose requests these are."""

    def __init__(self, deps: Deps, http: httpx.Client) -> None:
        self.deps, self.http = deps, http

    def send(self, route: str, key: str = "", **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.http.post(route, json={"model": "tiny", **body}, headers=headers)

    def post(self, route: str, key: str = "", **body: Any) -> dict[str, Any]:
        answer = self.send(route, key, **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


class server:  # noqa: N801
    """``with server(path, **settings) as api``."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self._deps = deps_on(path, served_model_names=("tiny",), **settings)

    def __enter__(self) -> Api:
        deps = self._deps.__enter__()
        self._serving = serving(deps)
        self._http = client_of(self._serving.__enter__())
        return Api(deps, self._http)

    def __exit__(self, *error: Any) -> None:
        self._http.close()
        self._serving.__exit__(None, None, None)
        self._deps.__exit__(None, None, None)


@pytest.fixture(scope="module")
def single(text_model: Path) -> Iterator[Api]:
    with server(text_model) as found:
        yield found


# What listens


def sockets(family: list[psutil.Process]) -> tuple[set[tuple[str, int]], set[str], set[str]]:
    """Of all these processes: inet listeners, addresses of any inet socket, and names of Unix sockets."""
    listening: set[tuple[str, int]] = set()
    addresses: set[str] = set()
    names: set[str] = set()
    for process in family:
        for each in process.net_connections("all"):
            if each.family.name == "AF_UNIX":
                names.add(str(each.laddr))
                continue
            addresses |= {address.ip for address in (each.laddr, each.raddr) if address}
            if each.status == psutil.CONN_LISTEN:
                listening.add((each.laddr.ip, each.laddr.port))
    return listening, addresses, names


@pytest.mark.skipif(sys.platform != "linux", reason="only there is all of 127/8 this machine")
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_what_listens(text_model: Path, transport: str) -> None:
    """R3, R4: guards against any socket but the port asked for, on the address asked for: in no process, of no kind.

    Only gloo has more, between its ranks, and all of those are on the loopback address.
    """
    with serve(text_model, "--layout", "tp2", "--transport", transport, "--host", "127.0.0.2") as process:
        url = httpx.URL(process.url())
        family = process.family()
        assert len(family) >= 3
        listening, addresses, names = sockets(family)
        own = {address for address in listening if address[0] != "127.0.0.1"}
        assert own == {("127.0.0.2", url.port)}
        assert addresses == ({"127.0.0.2"} if transport == "shm" else {"127.0.0.1", "127.0.0.2"})
        assert (listening == own) == (transport == "shm")
        assert names <= {""}, "a Unix socket with a name can be reached by others"


def test_importing_opens_nothing() -> None:
    """R38: guards against ports, and against Ray and TorchServe, that come with a mere import of any part of it.

    Not of the ready factories, which are imported with their libraries when one is asked for.
    """
    code = (
        "import importlib, pkgutil, sys\n"
        "seen = []\n"
        "sys.addaudithook(lambda event, args: seen.append(event) if event.startswith('socket.') else None)\n"
        "import shardwise\n"
        "names = [each.name for each in pkgutil.walk_packages(shardwise.__path__, 'shardwise.')]\n"
        "assert len(names) > 100, names\n"
        "for name in names:\n"
        "    if name != 'shardwise.__main__' and not name.startswith('shardwise.factories.'):\n"
        "        importlib.import_module(name)\n"
        "asked = [event for event in seen if event in ('socket.bind', 'socket.connect', 'socket.getaddrinfo')]\n"
        "assert not asked, asked\n"
        "found = {'ray', 'ts', 'torchserve', 'transformers'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_model_that_is_cut_short_while_it_serves(tmp_path: Path) -> None:
    """R34: guards a server from whoever replaces its files: what it has read is its own."""
    model = save_text_model(tmp_path / "model")
    with serve(model, "--layout", "tp2") as process:
        url = process.url()
        asked = {"model": model.name, "prompt": "one two", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        expected = httpx.post(url + COMPLETIONS, json=asked, timeout=60).json()["choices"]
        for file in model.iterdir():
            os.truncate(file, 10)
        assert httpx.post(url + COMPLETIONS, json={**asked, "seed": 1}, timeout=60).json()["choices"] == expected
        assert httpx.get(f"{url}/health", timeout=60).json()["status"] == "ok"


# What users spell


@pytest.mark.parametrize("allowed", [False, True])
def test_special_tokens_in_prompts(text_model: Path, allowed: bool) -> None:
    """R19: guards an application's users from each other: what they spell is text, unless the operator says otherwise.

    Token ids are no text, and what the template writes is what it is.
    """
    with server(text_model, allow_special_tokens=allowed) as api:
        text, ids = "a</s><s>b", [97, 258, 257, 98]
        spelt = ids if allowed else list(text.encode())
        tokens = api.post("/tokenize", prompt=text)["tokens"]
        vocabulary = api.deps.intake.tokenizer
        assert len(tokens) == len(spelt)
        assert bool(vocabulary.control.intersection(tokens)) == allowed
        assert b"".join(vocabulary.spell(token) for token in tokens) == text.encode()
        for more in ({}, {"add_special_tokens": False}, {"stream": False}):
            answer = api.post(COMPLETIONS, prompt=text, max_tokens=1, return_token_ids=True, echo=True, **more)
            assert answer["choices"][0]["prompt_token_ids"] == tokens
            assert answer["choices"][0]["text"].startswith(text)
        own = api.post(COMPLETIONS, prompt=tokens, max_tokens=1, return_token_ids=True)
        assert own["choices"][0]["prompt_token_ids"] == tokens
        assert api.post("/v1/embeddings", input=text)["usage"]["prompt_tokens"] == len(spelt)
        messages = [{"role": "user", "content": text}]
        chat = api.post("/tokenize", messages=messages)["tokens"]
        assert [token for token in chat if token in vocabulary.control] == [257, 258, 257]
        found = api.post("/v1/chat/completions", messages=messages, max_tokens=1)
        assert found["usage"]["prompt_tokens"] == len(chat)


# Keys among themselves


@pytest.mark.parametrize("shared", [False, True])
def test_keys_share_no_cache(text_model: Path, shared: bool) -> None:
    """R22: guards against a key that learns from the time of an answer what another key has asked.

    It would have to be told by less work; yet no token of another key's is ever found, and one's own always are.
    """
    keys = ("one", "two")
    with server(text_model, api_keys=keys, share_prefix_cache=shared) as api:
        (engine,) = api.deps.service.replicas.engines
        most = len(LONG.encode()) // BLOCK * BLOCK

        def hits(key: str, prompt: str) -> int:
            before = engine.scheduler.pool.num_hits
            api.post(COMPLETIONS, key, prompt=prompt, max_tokens=1)
            return engine.scheduler.pool.num_hits - before

        assert hits("one", LONG) == 0
        assert hits("one", LONG) == most
        for at in range(3):
            assert hits("two", LONG) == (most if shared or at else 0)
        assert hits("one", LONG) == most
        wait_for(lambda: api.deps.service.num_open == 0)


# What takes long


def test_grammars_leave_room_for_others(single: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """R15: guards the engines' loop, and the threads that prepare requests, against any number of costly grammars."""
    go = threading.Event()
    lock = threading.Lock()
    busy = most = 0

    def slow(lark: str, limits: dict[str, Any]) -> None:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        assert go.wait(60)
        with lock:
            busy -= 1

    monkeypatch.setattr(grammars, "attempt", slow)
    schemas = [{"type": "object", "patternProperties": {f"^{at}": {"type": "null"}}} for at in range(40)]

    def constrained(schema: dict[str, Any]) -> int:
        return single.send(COMPLETIONS, prompt="x", max_tokens=2, guided_json=schema).status_code

    with ThreadPoolExecutor(len(schemas)) as crowd:
        asked = [crowd.submit(constrained, schema) for schema in schemas]
        try:
            wait_for(lambda: busy == MAX_COMPILING)
            for _ in range(3):
                assert single.send(COMPLETIONS, prompt="y", max_tokens=20, ignore_eos=True).status_code == 200
            assert single.http.get("/health").status_code == 200
            assert not any(each.done() for each in asked)
        finally:
            go.set()
        assert {each.result(60) for each in asked} == {200}
    assert most == MAX_COMPILING


def test_who_waits_for_a_grammar_is_told(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: guards against a silent wait for the turn of a grammar; a client that has gone keeps its turn meanwhile."""
    go = threading.Event()
    monkeypatch.setattr(grammars, "attempt", lambda lark, limits: go.wait(60))
    schema: dict[str, Any] = {"type": "object", "patternProperties": {"^a": {"type": "null"}}}
    with server(text_model, queue_timeout=0.3) as api:
        try:
            for at in range(MAX_COMPILING):
                body = {"model": "tiny", "prompt": "x", "guided_json": {**schema, "title": str(at)}}
                with pytest.raises(httpx.ReadTimeout):
                    api.http.post(COMPLETIONS, json=body, timeout=0.3)
            answer = api.send(COMPLETIONS, prompt="x", guided_json=schema)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
        finally:
            go.set()
        wait_for(lambda: api.send(COMPLETIONS, prompt="x", max_tokens=2, guided_json=schema).status_code == 200)


def nested(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {"type": "null"}


COSTLY: dict[str, dict[str, Any]] = {
    "deep": {"guided_json": nested(17)},  # each level is two of a document's
    "wide": {"guided_json": {"enum": list(range(10_001))}},
    "recursive": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}},
    "endless": {"guided_json": {"$ref": "#"}},
    "repeats": {"guided_json": {"type": "string", "pattern": "^((a{1,1001}){1,1001}){1,1001}$"}},
    "long pattern": {"guided_json": {"type": "string", "pattern": "x" * 100_000}},
    "stars": {"guided_regex": "(((((a+)+)+)+)+){1,1001}{1,1001}"},
    "choices": {"guided_choice": ["x"] * 1025},
    "rules": {"guided_grammar": "start: a\n" + "a: a a\n" * 10},
}


@pytest.mark.parametrize("name", COSTLY)
def test_costly_grammars(single: Api, name: str) -> None:
    """R15, R16: guards the limits as clients meet them: a 400 that names the field, or an answer; and soon."""
    began = time.monotonic()
    answer = single.send(COMPLETIONS, prompt="x", max_tokens=3, **COSTLY[name])
    assert time.monotonic() - began < 20
    if name in (
        "repeats",
        "long pattern",
        "stars",
        "recursive",
        "rules",
    ):  # which may be compiled, if that is soon done
        assert answer.status_code in (200, 400), answer.text
    else:
        assert answer.status_code == 400, answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == next(iter(COSTLY[name]))
        assert len(answer.text) < 1500


# Clients that go


class Stepwise(Ranks):
    """Ranks that do a step when they are let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Semaphore(0)

    def collect(self) -> StepResult:
        assert self.let.acquire(timeout=60)
        return super().collect()


def test_a_withdrawn_request_is_gone_within_two_steps() -> None:
    """R24: guards against work for nobody: two steps after a client has gone all its KV is free, and nothing runs."""
    stage, ranks = Stage(), Stepwise()
    (engine,) = stage.service.replicas.engines
    engine.executor.close()
    engine.executor = ranks
    service = Service(stage.service.replicas, Admission(10, 1000, 10.0), Metrics("tiny"))
    params = SamplingParams(max_tokens=40)
    prompt = tuple(range(2, 22))
    prepared = Prepared("", prompt, params, tuple(Request(at, prompt, params, seed=at) for at in range(3)))

    async def whole() -> None:
        service.start()
        stream = service.submit(prepared)
        for _ in range(6):
            ranks.let.release()
        await asyncio.wait_for(stream.__anext__(), 30)
        pool = engine.scheduler.pool
        assert pool.num_free < pool.num_blocks
        before = len(ranks.steps)
        stream.close()
        for _ in range(2):
            ranks.let.release()
        deadline = time.monotonic() + 30
        while engine.has_work or pool.num_free < pool.num_blocks:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        assert len(ranks.steps) - before <= 6 + 2  # those that had been let, and two
        assert service.num_open == service.admission.num_open == 0
        for _ in range(10):
            ranks.let.release()
        await service.stop()

    asyncio.run(asyncio.wait_for(whole(), 100))


def test_an_error_while_a_request_is_prepared(single: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17, R18: guards against a bug in tokenising, templates or grammars that ends more than its own request."""
    plain = Intake.prepare

    def poisoned(self: Intake, text: str, *arguments: Any, **more: Any) -> Prepared:
        if "poison" in text:
            raise RuntimeError("secret /home/me at 0x7f00")
        return plain(self, text, *arguments, **more)

    monkeypatch.setattr(Intake, "prepare", poisoned)
    asked = {"prompt": LONG, "max_tokens": 60, "ignore_eos": True, "seed": 4}
    alone = single.post(COMPLETIONS, **asked)["choices"]
    with ThreadPoolExecutor(1) as other:
        beside = other.submit(single.post, COMPLETIONS, **asked)
        for _ in range(5):
            answer = single.send(COMPLETIONS, prompt="poison")
            error = answer.json()["error"]
            assert (answer.status_code, error["message"]) == (500, "internal error")
            assert error["request_id"] == answer.headers["x-request-id"]
            assert "secret" not in answer.text
        assert beside.result(60)["choices"] == alone
    wait_for(lambda: single.deps.service.num_open == 0)
