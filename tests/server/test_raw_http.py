"""Bytes that are nearly HTTP, on the real listener: a good refusal or a closed connection, and others unharmed."""

from __future__ import annotations

import random
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.fuzz import LEAKS, Traffic, check_error, under_fire

TOOK = 15.0
"""Seconds after which a connection is held to hang: the server's own limits are half a second."""
MOST = 2**22
"""Bytes that no answer to these requests comes near."""
JSON = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\n"


def whole(path: bytes, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (path, JSON, len(body), body)


def in_chunks(path: bytes, body: bytes) -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(body[at : at + 9]), body[at : at + 9]) for at in range(0, len(body), 9))
    return b"POST %s HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\n%s0\r\n\r\n" % (path, JSON, chunks)


SEEDS = [
    whole(b"/v1/completions", b'{"model": "any", "prompt": "hi", "max_tokens": 3, "n": 2}'),
    whole(b"/v1/completions", b'{"model": "any", "prompt": [[1, 2], [3]], "max_tokens": 4, "stream": true}'),
    in_chunks(b"/v1/chat/completions", b'{"model": "any", "messages": [{"role": "user", "content": "h\xc3\xa9"}]}'),
    whole(b"/tokenize", b'{"prompt": "abc"}') + whole(b"/detokenize", b'{"tokens": [97, 98]}'),
    in_chunks(b"/v1/embeddings", b'{"model": "any", "input": ["a", "b"], "encoding_format": "base64"}'),
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\nX-Request-Id: me-1\r\n\r\n" * 2,
    b"GET /health HTTP/1.1\r\nHost: localhost:80\r\nConnection: keep-alive\r\n\r\n",
    b"OPTIONS /v1/models HTTP/1.1\r\nHost: [::1]\r\nOrigin: http://a.b\r\nAccess-Control-Request-Method: GET\r\n\r\n",
]
ODD = [
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\x00",
        b"\xff",
        b" ",
        b"\t",
        b":",
        b";",
        b"%",
        b"%00",
        b"../",
        b"\r\n\r\n",
        b"\xc3",
        b"{",
    ),
    *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n", b"0x10\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Expect: 100-continue\r\n"),
    *(
        b"Connection: upgrade\r\nUpgrade: websocket\r\n",
        b"Content-Encoding: gzip\r\n",
        b"Host: evil\r\n",
        b" folded\r\n",
    ),
    *(b"X: " + b"y" * 20_000 + b"\r\n", b"A: b\r\n" * 100, b"[" * 1000, b'"\\ud800"', b"NaN", b"1e999", b"-" * 5000),
    *(b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT a:1", b"HEAD", b"TRACE"),
    *(b"http://evil.example/", b"//", b"?a=b", b"#", b"ffffffffffffffff\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"),
]
"""Bytes with a meaning, put where they don't belong."""


def mutated(rng: random.Random) -> bytes:
    """A valid request after one to four changes."""
    data = rng.choice(SEEDS)

    def span() -> tuple[int, int]:
        first = rng.randrange(len(data))
        return first, min(len(data), first + rng.choice((1, 1, 2, 8, 40)))

    changes: list[Callable[[int, int], bytes]] = [
        lambda first, last: data[:first] + data[last:],
        lambda first, last: data[:last] + data[first:],
        lambda first, last: data[:first] + rng.randbytes(last - first) + data[last:],
        lambda first, _: data[:first] + rng.choice(ODD) + data[first:],
        lambda first, last: data[:first] + rng.choice(ODD) + data[last:],
        lambda first, _: data[:first],
        lambda first, last: data[:first] + data[first:last].swapcase() + data[last:],
        lambda first, last: data[:first] + data[first:last] * rng.choice((2, 500)) + data[last:],
        lambda first, last: data.replace(data[first:last], rng.choice(ODD), 1),
        lambda *_: data + rng.choice(SEEDS),
        lambda *_: re.sub(rb"\d+", lambda _: b"%d" % rng.choice((0, 1, 7, 65536, 2**63)), data, count=1),
    ]
    for _ in range(rng.randint(1, 4)):
        data = rng.choice(changes)(*span()) or b"\r\n"
    return data


def exchange(address: tuple[str, int], data: bytes, rng: random.Random) -> bytes:
    """Send it, now and then in pieces, and read until the server closes, which it must do soon."""
    answer, deadline = bytearray(), time.monotonic() + TOOK
    with socket.create_connection(address, timeout=TOOK) as client:
        try:
            cut = rng.randrange(len(data)) if rng.random() < 0.3 else len(data)
            client.sendall(data[:cut])
            client.sendall(data[cut:])
            while piece := client.recv(2**16):
                answer += piece
                assert time.monotonic() < deadline, "it goes on and on"
                assert len(answer) < MOST
        except (ConnectionResetError, BrokenPipeError):
            pass  # what it had not read when it closed
    return bytes(answer)


def check(data: bytes, answer: bytes) -> int:
    """Look at what came back; the first status, 0 if nothing did."""
    if not answer:
        return 0
    found = re.match(rb"HTTP/1\.1 (\d{3})", answer)
    assert found is not None, (data, answer)
    status, asked = int(found[1]), data.decode("latin-1")
    assert status < 500, (data, answer)
    assert b"internal error" not in answer, data
    leak = LEAKS.search(answer.decode("latin-1"))
    assert leak is None or leak[0] in asked, (data, answer)
    head, _, rest = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    if status >= 400 and length is not None and len(rest) >= int(length[1]) > 0:
        check_error(rest[: int(length[1])], asked)
    return status


def storm(url: str, traffic: Traffic, count: int) -> None:
    host, port = url.removeprefix("http://").split(":")

    def one(number: int) -> int:
        rng = random.Random(number)
        data = mutated(rng)
        return check(data, exchange((host, int(port)), data, rng))

    with ThreadPoolExecutor(64) as pool:
        statuses = Counter(pool.map(one, range(count)))
    assert {200, 400, 408} < set(statuses), statuses
    traffic.check()


@pytest.fixture
def fire(text_model: Path) -> Iterator[tuple[str, Traffic]]:
    with under_fire(text_model, header_timeout=0.5, body_timeout=0.5) as found:
        yield found


def test_requests_as_they_are(fire: tuple[str, Traffic]) -> None:
    """Guards this file: what is changed is valid before."""
    host, port = fire[0].removeprefix("http://").split(":")
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        answers = list(pool.map(lambda seed: exchange((host, int(port)), seed, random.Random(1)), SEEDS))
    for seed, answer in zip(SEEDS, answers, strict=True):
        assert check(seed, answer) == (403 if b"Origin" in seed else 200), seed


def test_changed_requests(fire: tuple[str, Traffic]) -> None:
    """F11, R13: 1,000 of them: no 5xx, no hang, nothing told of the inside, good traffic as ever."""
    storm(*fire, 1000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_very_many_changed_requests(fire: tuple[str, Traffic]) -> None:
    """F11: 10,000 of them."""
    storm(*fire, 10_000)
