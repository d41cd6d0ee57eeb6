"""HTTP/1.1 clients that cost little: many connections in one loop, and answers that are kept as bytes until later.

Knows how an answer ends, and nothing of what it says; for loads whose sender shares its cores with the server.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any

HEAD = b"\r\n\r\n"
CHUNKS = b"\r\n0\r\n\r\n"
"""The last bytes of an answer in chunks, whose lines are JSON and so hold no line ends."""


def message(path: str, body: dict[str, Any]) -> bytes:
    """A whole POST, to be sent as it is."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + HEAD + data


@dataclass(eq=False)
class Exchange:
    """A request and what came of it. Times are in seconds of the monotonic clock."""

    what: Any
    """Whatever its sender wants to find here."""
    due: float
    """When it was to be sent."""
    sent: float
    ended: float = 0.0
    answer: bytearray = field(default_factory=bytearray)
    whole: bool = False
    """Is the answer complete? Otherwise the connection broke."""
    _size: int | None = None
    """Bytes of the answer; 0 if its head does not tell, None if that has not come."""

    @property
    def status(self) -> int:
        """Of a whole answer."""
        return int(self.answer[9:12])

    def header(self, name: str) -> str | None:
        """The value of a header, once these have come."""
        for line in self.answer.partition(HEAD)[0].decode("latin-1").split("\r\n")[1:]:
            found, _, value = line.partition(":")
            if found.lower() == name:
                return value.strip()
        return None

    @property
    def body(self) -> bytes:
        """Of a whole answer."""
        data = bytes(self.answer.partition(HEAD)[2])
        if self._size:
            return data
        parts, at = [], 0
        while True:
            end = data.index(b"\r\n", at)
            size = int(data[at:end], 16)
            if not size:
                return b"".join(parts)
            parts.append(data[end + 2 : end + 2 + size])
            at = end + 4 + size

    def take(self, data: bytes) -> bool:
        """More of the answer; is that all?"""
        self.answer += data
        if self._size is None and (at := self.answer.find(HEAD)) >= 0:
            length = self.header("content-length")
            self._size = 0 if length is None else at + len(HEAD) + int(length)
        if self._size is not None:
            self.whole = len(self.answer) >= self._size if self._size else self.answer.endswith(CHUNKS)
        return self.whole


@dataclass(eq=False)
class _Line:
    """A connection, and what it is about."""

    sock: socket.socket
    exchange: Exchange | None = None


class Wire:
    """Connections to one server, each kept for the next request."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._selector = selectors.DefaultSelector()
        self._free: list[_Line] = []
        self.num_open = 0
        """Requests that are not answered yet."""

    def send(self, what: Any, data: bytes, due: float) -> None:
        """Send a request now. Raises OSError, for instance where no connection is taken within five seconds."""
        line = self._free.pop() if self._free else self._connect()
        line.exchange = Exchange(what, due, time.monotonic())
        self.num_open += 1
        line.sock.sendall(data)

    def wait(self, until: float) -> list[Exchange]:
        """What has ended, as soon as there is news; nothing after that moment."""
        ended = []
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            line: _Line = key.data
            try:
                data = line.sock.recv(2**16)
            except ConnectionError:
                data = b""
            exchange = line.exchange
            if data and exchange is not None and not exchange.take(data):
                continue
            if exchange is not None:
                exchange.ended = time.monotonic()
                self.num_open -= 1
                ended.append(exchange)
                line.exchange = None
            if data:
                self._free.append(line)
            else:
                self._leave(line)
        return ended

    def close(self) -> None:
        """Leave; what is not answered is given up."""
        for key in list(self._selector.get_map().values()):
            self._leave(key.data)
        self._selector.close()

    def _connect(self) -> _Line:
        sock = socket.create_connection(self._address, timeout=5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        line = _Line(sock)
        self._selector.register(sock, selectors.EVENT_READ, line)
        return line

    def _leave(self, line: _Line) -> None:
        self._selector.unregister(line.sock)
        line.sock.close()
        if line in self._free:
            self._free.remove(line)
