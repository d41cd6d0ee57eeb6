"""What the guard lets through, against a stand-in for the routes behind it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from shardwise.server import document
from shardwise.server.config import ServerConfig
from shardwise.server.document import MAX_DEPTH, MAX_VALUES, check_document
from shardwise.server.errors import ApiError
from shardwise.server.guard import OPEN, Guard
from shardwise.server.logs import set_up_logs


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What is logged, in JSON lines; logging is as before afterwards."""
    root, own = logging.getLogger(), logging.getLogger("shardwise")
    before = root.handlers[:], root.level, own.level
    stream = io.StringIO()
    set_up_logs("json", "info", KEYS, stream)
    yield stream
    logging.captureWarnings(False)
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])


KEYS = ("sk-first", "sk-second")
JSON = {"Content-Type": "application/json"}
BUSY = ("/v1/completions",)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    body = await request.body()
    state = {"key": request.state.key, "id": request.state.request_id, "bytes": len(body)}
    if scope["path"] == "/fails":
        raise RuntimeError("secret of /home/someone at 0x7f00")
    await JSONResponse(state)(scope, receive, send)


def ask(
    config: ServerConfig,
    method: str = "GET",
    path: str = "/v1/models",
    *,
    base: str = "http://127.0.0.1:8000",
    draining: Callable[[], bool] = lambda: False,
    turn_away: Callable[[str], None] = lambda key: None,
    **more: Any,
) -> httpx.Response:
    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(Guard(echo, config, draining, BUSY, turn_away))
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            return await client.request(method, path, **more)

    return asyncio.run(one())


def refused(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, (answer.status_code, answer.text)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == answer.headers["x-request-id"]
    message: str = error["message"]
    return message


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer sk-third", "Basic sk-first", "sk-first", "Bearer sk-firs"]
)
def test_a_wrong_key_is_refused(header: str | None) -> None:
    """R6: guards against routes that answer without a key, and against keys by another scheme or cut short."""
    config = ServerConfig(api_keys=KEYS)
    headers = {} if header is None else {"Authorization": header}
    answer = ask(config, headers=headers)
    assert "API key" in refused(answer, 401)
    assert answer.headers["www-authenticate"] == "Bearer"
    assert refused(ask(config, path="/no/such/route", headers=headers), 401)
    assert refused(ask(config, path="/health/../v1/models", headers=headers), 401)


def test_each_key_is_known_by_its_number_only() -> None:
    """R6: guards against the key itself reaching the routes, the logs or the answer."""
    config = ServerConfig(api_keys=KEYS)
    for number, key in enumerate(KEYS, 1):
        answer = ask(config, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        assert answer.json()["key"] == str(number)
        assert key not in answer.text
    assert ask(ServerConfig()).json()["key"] == ""


def test_health_asks_for_no_key() -> None:
    """R6: guards against probes that would need a key; those three routes and no others."""
    config = ServerConfig(api_keys=KEYS)
    for path in ("/health", "/health/live", "/health/ready"):
        assert ask(config, path=path).status_code == 200
    for path in ("/metrics", "/healthy", "/health/", "/health/x", "/openapi.json"):
        assert refused(ask(config, path=path), 401)


@pytest.mark.parametrize(
    ("host", "base", "fine"),
    [
        *(
            ("127.0.0.1", f"http://{name}", True)
            for name in ("127.0.0.1:8000", "localhost:99", "[::1]:8000", "127.9.9.9")
        ),
        *(("127.0.0.1", f"http://{name}", False) for name in ("evil.example", "10.1.2.3", "localhost.evil.example")),
        *(("0.0.0.0", f"http://{name}", True) for name in ("10.1.2.3:8000", "localhost", "[2001:db8::1]")),
        *(("0.0.0.0", f"http://{name}", False) for name in ("evil.example", "127.0.0.1.evil.example:8000")),
        ("gpu7.example", "http://gpu7.example:8000", True),
        ("gpu7.example", "http://evil.example:8000", False),
    ],
)
def test_foreign_hosts_are_refused(host: str, base: str, fine: bool) -> None:
    """R37: guards against DNS rebinding, where a page's own name is made to point at the server."""
    answer = ask(ServerConfig(host=host), base=base)
    assert answer.status_code == 200 if fine else refused(answer, 403)


@pytest.mark.parametrize("host", ["", "evil@127.0.0.1", "127.0.0.1, evil.example", "127.0.0.1/x", "[::1"])
def test_odd_hosts_are_refused(host: str) -> None:
    """R37: guards against Host headers that one reader takes for ours and another for theirs."""
    assert refused(ask(ServerConfig(), headers={"Host": host}), 403)


def test_hosts_can_be_allowed() -> None:
    """R37: guards the way out that the message names."""
    assert ask(ServerConfig(allowed_hosts=("Llm.example",)), base="http://llm.example:8000").status_code == 200
    assert ask(ServerConfig(allowed_hosts=("*",)), base="http://any.example").status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE", "HEAD"])
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:8000", ""])
def test_browser_origins_are_refused(method: str, origin: str) -> None:
    """R37: guards against pages that use the server behind their visitor's back, by any method."""
    answer = ask(ServerConfig(), method, headers={"Origin": origin, "Access-Control-Request-Method": "POST"})
    assert answer.status_code == 403
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_an_allowed_origin_gets_cors() -> None:
    """R37: guards --allowed-origin: a preflight needs no key, an answer names the origin, others stay out."""
    config = ServerConfig(api_keys=KEYS, allowed_origins=("https://app.example",))
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    answer = ask(config, "OPTIONS", headers={"Origin": "https://app.example", **asked})
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    answer = ask(config, headers={"Origin": "https://app.example", "Authorization": f"Bearer {KEYS[0]}"})
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert answer.headers["vary"] == "origin"
    assert refused(ask(config, headers={"Origin": "https://app.example"}), 401)
    assert ask(config, headers={"Origin": "https://app.example.evil"}).status_code == 403


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "deep"),
        (b"[" * 200_000, "deep"),
        (b'{"a":' * 200_000, "deep"),
        (b"0," * 1_000_000, "values"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"x": [{"a": 1, "a": 1}]}', "twice"),
        (b'{"a": NaN}', "finite"),
        (b"[-Infinity]", "finite"),
        (b"[1e999]", "finite"),
        (b"[" + b"9" * 5000 + b"]", "too long"),
        (b'{"a": "\xff"}', "UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
        ('{"a": 1}'.encode("utf-16-le"), "JSON"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": 1', "JSON"),
        (b"{'a': 1}", "JSON"),
        (b"[" + b"0," * MAX_VALUES + b"0]", "values"),
    ],
)
def test_odd_documents_are_refused(body: bytes, word: str) -> None:
    """R13: guards against JSON that is too deep, ambiguous or no JSON, before anything reads it."""
    assert word in refused(ask(ServerConfig(), "POST", "/v1/completions", content=body, headers=JSON), 400)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
        b'{"a": "[[[[{{{{\\\\\\"[[[' + b"[" * 1000 + b'"}',
        b'{"a": "' + b"," * 2 * MAX_VALUES + b'"}',
        b'{"a": "\\ud83d\\ude00", "b": "\\\\ud800"}',
        b'{"a": {"b": 1}, "c": {"b": 1}}',
    ],
)
def test_plain_documents_pass(body: bytes) -> None:
    """R13: guards against limits that count what stands within strings."""
    assert ask(ServerConfig(), "POST", "/v1/completions", content=body, headers=JSON).json()["bytes"] == len(body)


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


TEXT = st.text(st.sampled_from('"\\[]{},:ab\n\u00e9'), max_size=8)
VALUES = st.recursive(
    TEXT | st.integers() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
)


@given(VALUES, st.booleans(), st.integers(1, 9))
def test_the_depth_is_that_of_the_document(value: Any, plain: bool, piece: int) -> None:
    """R13: guards the look at the bare bytes: whatever stands in strings, it finds the depth that there is."""
    body = json.dumps(value, ensure_ascii=plain).encode()
    depth = depth_of(value)
    with patch.object(document, "PIECE", piece):
        with patch.object(document, "MAX_DEPTH", depth):
            check_document(body)
        with patch.object(document, "MAX_DEPTH", depth - 1), pytest.raises(ApiError) if depth else nullcontext():
            check_document(body)


@pytest.mark.parametrize("pattern", [b'"\\', b"\\", b'\\"', b'"', b'{"', b"[]", b'"a":', b"\x00", b"1", b" "])
def test_the_shape_is_checked_in_linear_time(pattern: bytes) -> None:
    """R13, R15: guards against bodies that make the check itself the attack."""
    body = (pattern * 2**20)[: 2**20]
    began = time.thread_time()
    with pytest.raises(ApiError):
        check_document(body)
    assert time.thread_time() - began < 2


def test_a_refused_body_takes_little_memory() -> None:
    """R13: guards against a refused request that takes more than twice the limit while it is read."""
    config = ServerConfig(max_body=2**20)

    async def pieces() -> Any:
        for _ in range(64):
            yield b" " * 2**16

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        assert "1048576" in refused(ask(config, "POST", content=pieces(), headers=JSON), 413)
        assert tracemalloc.get_traced_memory()[1] - before < 2 * config.max_body
        for piece in (b"[", b"1,", b'"', b'""', b"\\", b'\\"', b"{", b"[],", b" "):
            body = (piece * config.max_body)[: config.max_body]
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(ApiError):
                check_document(body)
            assert tracemalloc.get_traced_memory()[1] - before < 2 * config.max_body, piece
    finally:
        tracemalloc.stop()


def test_sizes_and_types_of_bodies() -> None:
    """R13: guards the refusal by Content-Length before a byte is read, and of what is not plain JSON."""
    config = ServerConfig(max_body=100)
    assert refused(ask(config, "POST", content=b'"' + b"a" * 99 + b'"', headers=JSON), 413)
    assert ask(config, "POST", content=b'"' + b"a" * 98 + b'"', headers=JSON).json()["bytes"] == 100
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/json2"):
        assert refused(ask(config, "POST", content=b"{}", headers={"Content-Type": kind}), 415)
    assert (
        ask(config, "POST", content=b"{}", headers={"Content-Type": "application/JSON; charset=utf-8"}).status_code
        == 200
    )
    assert refused(ask(config, "POST", content=b"{}", headers={**JSON, "Content-Encoding": "gzip"}), 415)


def test_health_takes_no_body() -> None:
    """Guards against bodies that anyone, without a key, may have the server read and parse."""
    config = ServerConfig(api_keys=KEYS)
    with patch("shardwise.server.guard._read", side_effect=AssertionError):
        for path in OPEN:
            for length in ({}, {"Transfer-Encoding": "chunked"}):
                assert refused(ask(config, "POST", path, content=b"[1]", headers={**JSON, **length}), 413)


def test_request_ids() -> None:
    """R39: guards an id for every answer, the client's own where that is a plain word."""
    assert ask(ServerConfig(), headers={"X-Request-ID": "my-id.1"}).headers["x-request-id"] == "my-id.1"
    made = {
        ask(ServerConfig(), headers={"X-Request-ID": odd}).headers["x-request-id"] for odd in ("", "a b", "x" * 129)
    }
    assert len(made) == 3
    assert all(name.startswith("req-") for name in made)
    assert ask(ServerConfig()).json()["id"].startswith("req-")


def test_an_exception_tells_nothing(written: io.StringIO) -> None:
    """R18: guards against the text of an exception in the answer; the log has it, by the request's id."""
    answer = ask(ServerConfig(), path="/fails")
    assert refused(answer, 500) == "internal error"
    assert "secret" not in answer.text
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert any("secret" in line.get("trace", "") for line in lines)
    assert any(line.get("request_id") == answer.headers["x-request-id"] and line["status"] == 500 for line in lines)


def test_paths_are_escaped_in_logs(written: io.StringIO) -> None:
    """R39: guards log lines from line ends and terminal codes in what a stranger asks for."""
    set_up_logs("text", "info", KEYS, written)
    ask(
        ServerConfig(api_keys=KEYS),
        path="/a%0d%0aERROR%20forged%1b[31m?api_key=sk-first",
        headers={"Authorization": "Bearer sk-second"},
    )
    text = written.getvalue()
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text
    assert "forged" in text
    assert "sk-first" not in text
    assert "sk-second" not in text


@pytest.mark.parametrize("wanted", [False, True])
def test_prompts_are_logged_only_where_that_is_wanted(written: io.StringIO, wanted: bool) -> None:
    """R39: guards people's words from the log, and the operator's wish to see them."""
    ask(ServerConfig(log_prompts=wanted), "POST", content=b'{"prompt": "my words"}', headers=JSON)
    line = json.loads(written.getvalue())
    assert line.get("body") == ('{"prompt": "my words"}' if wanted else None)
    assert ("my words" in written.getvalue()) is wanted


def test_nothing_new_is_let_in_while_draining() -> None:
    """R31: guards a drain: 503, when to come back, and the connection's end; health and metrics go on."""
    answer = ask(ServerConfig(), "POST", "/v1/completions", content=b"{}", headers=JSON, draining=lambda: True)
    assert refused(answer, 503)
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["connection"] == "close"
    assert ask(ServerConfig(), path="/health", draining=lambda: True).status_code == 200
    assert ask(ServerConfig(), path="/metrics", draining=lambda: True).status_code == 200


def test_where_there_is_no_room_nothing_is_read() -> None:
    """F15, R26: guards the cost of a refusal: the key and the size are looked at before it, the document is not."""
    asked: list[str] = []

    def turn_away(key: str) -> None:
        asked.append(key)
        raise ApiError(429, "full", retry_after=7)

    config = ServerConfig(api_keys=KEYS, max_body=1024)
    keyed = {"Authorization": "Bearer sk-second", **JSON}
    with patch("shardwise.server.guard.check_document", side_effect=AssertionError):
        answer = ask(config, "POST", *BUSY, content=b"{", headers=keyed, turn_away=turn_away)
    assert refused(answer, 429) == "full"
    assert (answer.headers["retry-after"], asked) == ("7", ["2"])
    assert refused(ask(config, "POST", *BUSY, content=b"{}", headers=JSON, turn_away=turn_away), 401)
    assert refused(ask(config, "POST", *BUSY, content=b"a" * 2000, headers=keyed, turn_away=turn_away), 413)
    assert ask(config, "POST", "/tokenize", content=b"{}", headers=keyed, turn_away=turn_away).status_code == 200
    assert ask(config, "GET", *BUSY, headers=keyed, turn_away=turn_away).status_code == 200
    assert asked == ["2"]
