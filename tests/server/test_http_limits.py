"""What a client can make a connection bear: real sockets, raw bytes, and a stand-in for the application."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from shardwise.server.config import ServerConfig
from shardwise.server.guard import Guard
from shardwise.server.listener import BUFFER, LINGER, MAX_FRAMING, Listener
from shardwise.server.port import PortTaken, bind, url_of
from tests.server.conftest import wait_for

HEAD = b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
FRAME = b"data: " + b"x" * 1000 + b"\n\n"


class Server:
    """A listener on a thread of its own, and what its application has seen."""

    def __init__(self, **settings: Any) -> None:
        self.config = ServerConfig(port=0, **settings)
        self.sock = bind("127.0.0.1", 0)
        self.address: tuple[str, int] = self.sock.getsockname()
        self.frames_sent = 0
        self.num_streams = 0
        self.num_bytes = 0
        self.go = threading.Event()
        """Ends what waits."""
        self.loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="listener")

    def __enter__(self) -> Server:
        self._thread.start()
        wait_for(self._ready.is_set, 10)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    @property
    def num_connections(self) -> int:
        return self.listener.num_connections

    def connect(self) -> Any:
        return closing(socket.create_connection(self.address, timeout=20))

    def ask(self, data: bytes) -> tuple[int, bytes]:
        with self.connect() as client:
            client.sendall(data)
            return answer(client)

    def do(self, what: Callable[[], Coroutine[Any, Any, None]]) -> Future[None]:
        """Have its loop do something."""
        return asyncio.run_coroutine_threadsafe(what(), self.loop)

    def close(self) -> Future[None]:
        """Shut the listener down, with far more time than that takes."""
        return self.do(lambda: self.listener.close(20.0))

    def _run(self) -> None:
        with closing(self.loop):
            self.loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self.listener = Listener(Guard(self._app, self.config, lambda: False), self.config, self.sock)
        await self.listener.start()
        self._ready.set()
        await self._stop.wait()
        await self.listener.close(1.0)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/stream":
            return await self._stream(send, receive)
        if scope["path"] == "/wait":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
            await send({"type": "http.response.body", "body": b"do", "more_body": True})
            await asyncio.to_thread(self.go.wait, 20)
            return await send({"type": "http.response.body", "body": b"ne"})
        body = await Request(scope, receive).body()
        self.num_bytes += len(body)
        return await JSONResponse({"bytes": len(body)})(scope, receive, send)

    async def _stream(self, send: Send, receive: Receive) -> None:
        self.num_streams += 1
        while (await receive()).get("more_body"):
            pass
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": FRAME, "more_body": True})
            self.frames_sent += 1
            await asyncio.sleep(0)
        self.num_streams -= 1


def answer(client: socket.socket) -> tuple[int, bytes]:
    """Status and body of the answer to come."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = client.recv(2**16)
        if not more:
            return 0, data
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lines = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
    length = next(int(value) for name, _, value in lines if name.lower() == b"content-length")
    while len(body) < length:
        more = client.recv(2**16)
        assert more, "the answer was cut off"
        body += more
    return int(head.split()[1]), body


def refused(found: tuple[int, bytes], status: int) -> str:
    assert found[0] == status, found
    message: str = json.loads(found[1])["error"]["message"]
    return message


def received(client: socket.socket) -> bytes:
    """All that comes, to the end of the connection, which must not be a reset."""
    data = b""
    while more := client.recv(2**16):
        data += more
    return data


def ended(client: socket.socket, seconds: float) -> float:
    """How long it took until the server ended the connection, whatever it had said before."""
    began = time.monotonic()
    client.settimeout(seconds)
    try:
        while client.recv(2**16):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - began


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(max_body=2**20, header_timeout=1.0, body_timeout=1.5) as found:
        yield found


@contextmanager
def unharmed(server: Server) -> Iterator[None]:
    """Whatever happens within, the server answers others at once and is rid of it afterwards."""
    yield
    assert server.ask(HEAD + b"Content-Length: 2\r\n\r\n{}") == (200, b'{"bytes":2}')
    wait_for(lambda: server.num_connections == 0, 10)


def test_a_plain_request(server: Server) -> None:
    """Guards the ordinary: an answer, and another on the same connection, in chunks."""
    with server.connect() as client:
        client.sendall(HEAD + b"Content-Length: 7\r\n\r\n[1,2,3]")
        assert answer(client) == (200, b'{"bytes":7}')
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\n[1,\r\n2\r\n2]\r\n0\r\n\r\n")
        assert answer(client) == (200, b'{"bytes":5}')
    wait_for(lambda: server.num_connections == 0, 10)


def test_a_body_beyond_the_limit(server: Server) -> None:
    """R13: guards against long bodies, told by Content-Length or found in chunks; the refusal arrives in both cases."""
    with unharmed(server), server.connect() as client:
        client.sendall(HEAD + b"Content-Length: 2000000\r\n\r\n")
        assert "2000000" in refused(answer(client), 413)
        client.sendall(b" " * 2_000_000)  # a client that only reads afterwards may go on with the connection
        client.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")
        assert answer(client)[0] == 200
    with unharmed(server), server.connect() as client:
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b" " * 2**16 + b"\r\n") * 40)
        assert refused(answer(client), 413)


def test_a_refused_body_is_not_swallowed_for_ever(server: Server) -> None:
    """R13: guards against a client that goes on sending what was refused."""
    with unharmed(server), server.connect() as client:
        client.sendall(HEAD + b"Content-Length: 100000000000\r\n\r\n")
        assert refused(answer(client), 413)
        began = time.monotonic()
        try:
            while time.monotonic() - began < 20:
                client.sendall(b" " * 2**16)
                time.sleep(0.01)
        except (ConnectionResetError, BrokenPipeError):
            pass
        assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(80)) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 17_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        + b"".join(b"X-%d: %s\r\n" % (n, b"a" * 500) for n in range(40))
        + b"\r\n",
        b"GET /" + b"a" * 17_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 100_000,
    ],
    ids=["many", "long", "together", "target", "unfinished"],
)
def test_headers_beyond_the_limits(server: Server, request_bytes: bytes) -> None:
    """R13: guards against headers that are too many or too long, whether they come at once or never end."""
    with unharmed(server):
        assert "headers" in refused(server.ask(request_bytes), 431)


def test_framing_beyond_the_limit(server: Server) -> None:
    """R13: guards against chunks that carry far more framing than body: tiny ones, and long extensions."""
    for chunk in (b"1\r\n \r\n", b"1;" + b"e" * 8000 + b"\r\n \r\n"):
        count = 2 * MAX_FRAMING // len(chunk)
        with unharmed(server), server.connect() as client:
            client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * count)
            assert "chunks" in refused(answer(client), 413)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: gzip\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX\x00Y: 1\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ],
)
def test_what_is_not_http(server: Server, request_bytes: bytes) -> None:
    """R18, F11: guards against bytes that are no HTTP: one sentence of ours, and the connection's end."""
    with unharmed(server), server.connect() as client:
        client.sendall(request_bytes)
        assert refused(answer(client), 400) == "this is not HTTP"
        assert ended(client, 10) < LINGER + 2


def test_headers_and_bodies_that_take_too_long(server: Server) -> None:
    """R14: guards against requests that come a byte at a time, and against idle connections."""
    slow = [b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", HEAD + b"Content-Length: 1000\r\n\r\n", b""]
    limits = [server.config.header_timeout, server.config.body_timeout, server.config.header_timeout]
    with server.connect() as header, server.connect() as body, server.connect() as idle:
        began = time.monotonic()
        clients = [header, body, idle]
        for client, data in zip(clients, slow, strict=True):
            client.sendall(data)
            client.setblocking(False)
        open_since = dict.fromkeys(range(3), began)
        took: dict[int, float] = {}
        said = dict.fromkeys(range(3), b"")
        while len(took) < 3:
            assert time.monotonic() - began < 20
            for at, client in enumerate(clients):
                try:
                    if at in took:
                        continue
                    if at < 2 and not said[at]:
                        client.send(b" ")
                    more = client.recv(2**16)
                    said[at] += more
                    if not more or b"\r\n\r\n" in said[at]:
                        took[at] = time.monotonic() - open_since[at]
                except BlockingIOError:
                    pass
            time.sleep(0.02)
        assert all(limit <= took[at] + 0.3 < limit + 2.3 for at, limit in enumerate(limits)), took
        assert b" 408 " in said[0].splitlines()[0]
        assert b" 408 " in said[1].splitlines()[0]
        assert said[2] == b""
    wait_for(lambda: server.num_connections == 0, 10)


def test_slow_requests_leave_others_alone(server: Server) -> None:
    """R14: guards against a crowd of unfinished requests that slows others down, or that makes any of them wait."""

    def median_of_20() -> float:
        took = []
        for _ in range(20):
            began = time.monotonic()
            assert server.ask(HEAD + b"Content-Length: 2\r\n\r\n{}")[0] == 200
            took.append(time.monotonic() - began)
        assert max(took) < 5, took
        return statistics.median(took)

    alone = median_of_20()
    crowd = [socket.create_connection(server.address, timeout=20) for _ in range(1000)]
    try:
        for client in crowd:
            client.sendall(HEAD + b"Content-Length: 1000\r\n\r\n")
        assert median_of_20() < 3 * alone + 0.01
    finally:
        for client in crowd:
            client.close()
    wait_for(lambda: server.num_connections == 0, 10)


def test_a_storm_of_resets(server: Server) -> None:
    """C72: guards against connections that are reset before or after they ask: none is left behind."""
    for _ in range(2):
        for at in range(200):
            client = socket.create_connection(server.address, timeout=20)
            if at % 3:
                client.sendall((HEAD + b"Content-Length: 1000\r\n\r\n[")[: 40 * (at % 3)])
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
            client.close()
    with unharmed(server):
        pass


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    """R25: guards against a slow reader that fills memory or holds its place: little is kept, and it is cut off."""
    with Server(write_timeout=1.0) as server, server.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GET /stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        wait_for(lambda: server.num_streams == 1, 10)
        began = time.monotonic()
        kept = 0

        def watch() -> bool:
            nonlocal kept
            for connection in list(server.listener._state.connections):
                kept = max(kept, connection.transport.get_write_buffer_size())
            return server.num_streams == 0

        wait_for(watch, 20)
        assert time.monotonic() - began > 0.5
        assert 0 < kept <= BUFFER + 2 * len(FRAME)
        frames = server.frames_sent
        wait_for(lambda: server.num_connections == 0, 10)
        assert server.frames_sent == frames


def test_a_client_that_reads_slowly_is_not_cut_off() -> None:
    """R25: guards against cutting off clients that do take something, if only little."""
    with Server(write_timeout=1.0) as server, server.connect() as client:
        client.sendall(b"GET /stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        began, took = time.monotonic(), 0
        while time.monotonic() - began < 3:
            took += len(client.recv(2**15))
            time.sleep(0.02)
        assert server.num_streams == 1
        assert took > 2**17


def test_an_unread_answer_is_cut_off() -> None:
    """R25: guards against answers that are done for us and wait in memory for a client that never reads."""
    with Server(write_timeout=0.5) as server, server.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(3000):  # pipelined; answers of 200 bytes
            try:
                client.settimeout(0.5)
                client.send(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            except OSError:
                break
        wait_for(lambda: server.num_connections == 0, 20)


def test_too_many_connections() -> None:
    """R14: guards the bound on connections: one too many is told so, and there is room again afterwards."""
    with Server(max_connections=5) as server, ExitStack() as crowd:
        last = [crowd.enter_context(server.connect()) for _ in range(5)][-1]
        wait_for(lambda: server.num_connections == 5, 10)
        with server.connect() as client:
            assert "connections" in refused(answer(client), 503)
        last.close()
        wait_for(lambda: server.num_connections == 4, 10)
        assert server.ask(HEAD + b"Content-Length: 2\r\n\r\n{}")[0] == 200


def test_the_backlog_is_answered_at_the_end() -> None:
    """F17: guards connections that the kernel has made and nobody has taken yet when the end comes, asked or not."""
    with Server() as server, ExitStack() as stack:
        crowd: list[socket.socket] = []

        async def come_and_close() -> None:  # with no turn of the loop in between
            crowd.extend(stack.enter_context(server.connect()) for _ in range(50))
            for client in crowd[:25]:
                client.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")
            await server.listener.close(20.0)

        closed = server.do(come_and_close)
        wait_for(lambda: len(crowd) == 50, 10)
        for client in crowd[25:]:
            client.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")
        for client in crowd:
            assert answer(client) == (200, b'{"bytes":2}')
            assert client.recv(1) == b""
        closed.result(10)


def test_whoever_connects_is_answered() -> None:
    """F17: guards those who connect while the listener goes: an answer, or no connection, and nothing in between."""
    with Server() as server, ThreadPoolExecutor(3) as pool:
        asked = threading.Semaphore(0)

        def ask() -> int:
            for number in itertools.count():
                try:
                    with server.connect() as client:
                        client.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")
                        assert answer(client) == (200, b'{"bytes":2}')
                except ConnectionRefusedError:
                    return number
                asked.release()
            raise AssertionError

        clients = [pool.submit(ask) for _ in range(3)]
        for _ in range(30):
            assert asked.acquire(timeout=10)
        server.close().result(10)
        assert sum(client.result(10) for client in clients) >= 30


def test_the_silent_are_not_waited_for() -> None:
    """F17: guards the end from connections over which nothing is asked, new or idle; they are closed, and not reset."""
    with Server() as server, server.connect() as new, server.connect() as idle:
        idle.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")
        assert answer(idle)[0] == 200
        wait_for(lambda: server.num_connections == 2, 10)
        closed = server.close()
        assert new.recv(1) == idle.recv(1) == b""
        idle.sendall(HEAD)  # this crosses the end
        closed.result(10)
        assert idle.recv(1) == b""


def test_what_is_asked_is_answered_to_its_end() -> None:
    """F17: guards an answer over a reused connection, and a request of which a part has come, when the end comes."""
    with Server() as server, server.connect() as waiting, server.connect() as half, server.connect() as idle:
        for client in (waiting, idle):
            client.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")
            assert answer(client)[0] == 200
        waiting.sendall(b"GET /wait HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        data = waiting.recv(2**16)
        half.sendall(HEAD[:20])
        wait_for(lambda: server.num_connections == 3, 10)
        closed = server.close()
        wait_for(lambda: server.sock.fileno() < 0, 10)
        for client, rest in ((half, HEAD[20:]), (idle, HEAD)):
            client.sendall(rest + b"Content-Length: 2\r\n\r\n{}")
            head, _, body = received(client).partition(b"\r\n\r\n")
            assert b"connection: close" in head.lower()
            assert body == b'{"bytes":2}'
        server.go.set()
        data += received(waiting)
        assert data.endswith(b"\r\n\r\ndone")
        closed.result(10)


def test_what_never_comes_is_not_waited_for_too_long() -> None:
    """F17: guards the end from half a request: its time is bounded, and the client is told."""
    with Server() as server, server.connect() as half:
        half.sendall(HEAD)
        wait_for(lambda: server.num_connections == 1, 10)
        server.do(lambda: server.listener.close(0.2)).result(10)
        assert b" 503 " in received(half).splitlines()[0]


def test_a_port_is_taken_once() -> None:
    """C78, R3: guards against two servers on one port, and against a message that doesn't name it."""
    with closing(bind("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        assert url_of(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(PortTaken, match=f"port {port}.*--port"):
            bind("127.0.0.1", port)
    with closing(bind("127.0.0.1", port)):
        pass
    with pytest.raises(PortTaken, match="--host"):
        bind("no-such-host.invalid", 0)
