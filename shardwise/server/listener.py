"""Connections: one listening socket, HTTP/1.1 by uvicorn and h11 on it, and what no client may make us bear.

Knows bytes, times and counts; nothing of what is asked for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
from contextlib import suppress
from email.utils import formatdate
from time import monotonic
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from shardwise.server.config import ServerConfig
from shardwise.server.errors import ApiError
from shardwise.server.port import BACKLOG, ignore_newcomers

PAUSE = 0.003
"""Seconds between looks at connections while they are to end."""
SILENCE = 10
"""Looks at the very end, all without news, after which no more requests are expected to be on their way.

They are counted, not timed: on a busy machine what has come is not heard at once, and clients are late as well.
"""
GREETING = 0.5
"""Seconds in which whoever has just connected is expected to ask something, however busy its machine is."""
LOOK = 0.25
"""Seconds between looks at all connections for what takes too long."""
CROSSING = 0.01
"""Seconds in which what a client sends while we hang up is still taken, lest it be answered with a reset."""
LINGER = 3.0
"""Seconds in which the rest of a refused body is thrown away, so that its sender comes to read the refusal."""
MAX_FRAMING = 2**18
"""Bytes of a chunked body that may be something else than the body: tiny chunks cost far more than they carry."""
BUFFER = 2**15
"""Bytes for a slow client that are kept here before whoever makes them is made to wait."""
SPARE_FILES = 256
"""Descriptors kept free of connections."""

log = logging.getLogger("shardwise")


class Listener:
    """Serves an ASGI application on a socket from `start` to `close`."""

    def __init__(self, app: ASGIApp, config: ServerConfig, sock: socket.socket) -> None:
        self._state = ServerState()
        files = _allow_files(config.max_connections + SPARE_FILES)
        self._config = _Settings(app, config, max(1, min(config.max_connections, files - SPARE_FILES)))
        self._config.load()
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # of odd bytes it would warn each time
        self._sock = sock
        self._server: asyncio.Server | None = None
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to take connections."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connect, sock=self._sock, backlog=BACKLOG)
        self._looking = asyncio.create_task(self._look())

    @property
    def num_connections(self) -> int:
        """Clients that are connected."""
        return len(self._state.connections)

    def finish(self) -> None:
        """From now on each answer that begins is the last on its connection, and tells so; connections are still taken.

        What goes on is not cut off behind its end: its client, who knows of nothing, may ask again at that moment.
        """
        self._config.finishing = True

    async def close(self, timeout: float) -> None:
        """Take no more connections, and leave nobody who has one without an answer; cut them after ``timeout`` seconds.

        Whoever is connected may ask until there is a moment of silence. Idle connections are closed last: a client that
        asks over one just then finds it closed, which can't be helped. Harmless when repeated.
        """
        deadline = monotonic() + timeout
        self.finish()
        if self._server is not None:
            ignore_newcomers(self._sock)
            for _ in range(SILENCE):
                await asyncio.sleep(PAUSE)
            self._server.close()  # this resets what has not been accepted: by now, nothing
            self._server = None
        looks = 0
        while looks < SILENCE and monotonic() < deadline:
            heard = self._config.num_heard
            await asyncio.sleep(PAUSE)
            silent = heard == self._config.num_heard and not any(each.is_busy for each in self._connections())
            looks = looks + 1 if silent else 0
        for connection in self._connections():
            connection.hang_up()
        deadline = min(deadline, monotonic() + CROSSING)
        while self._state.connections and monotonic() < deadline:
            await asyncio.sleep(PAUSE)
        for connection in self._connections():
            connection.transport.abort()
        if tasks := list(self._state.tasks):
            await asyncio.wait(tasks, timeout=1.0)
        for task in list(self._state.tasks):
            task.cancel()
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking

    def _connections(self) -> list[Connection]:
        return [each for each in self._state.connections if isinstance(each, Connection)]

    def _connect(self) -> Connection:
        return Connection(self._config, self._state, {})

    async def _look(self) -> None:
        while True:
            now = monotonic()
            self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            for connection in self._connections():
                try:
                    connection.look(now)
                except Exception:
                    log.exception("a connection could not be looked at")
                    connection.transport.abort()
            await asyncio.sleep(LOOK)


def _allow_files(wanted: int) -> int:
    """How many descriptors this process may have: as many as are wanted, where the system lets us."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY or now >= wanted:
        return wanted
    with suppress(ValueError, OSError):
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most)
        )
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class _Settings(uvicorn.Config):
    """uvicorn's settings, and ours for its protocol."""

    def __init__(self, app: ASGIApp, limits: ServerConfig, max_connections: int) -> None:
        super().__init__(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=limits.max_header,
            timeout_keep_alive=max(1, int(limits.header_timeout)),
        )
        self.limits = limits
        self.max_connections = max_connections
        self.finishing = False
        """Whether each answer is the last on its connection."""
        self.num_heard = 0
        """How often a client has come, or said something."""


class Reader(h11.Connection):
    """h11's state, with bounds on what it leaves unbounded. ``error`` is what was wrong with the last request."""

    def __init__(self, settings: _Settings) -> None:
        super().__init__(h11.SERVER, settings.limits.max_header)
        self.num_requests = 0
        self.num_said = 0
        """Bytes of all that we have said."""
        self.error = ApiError(400, "this is not HTTP")
        self._settings = settings
        self._limits = settings.limits
        self._framing = 0
        """Bytes of the current request's body so far, less those that it really has."""

    def receive_data(self, data: bytes) -> None:
        """More has come."""
        self._framing += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        """What comes next; raises RemoteProtocolError."""
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                self.error = ApiError(431, f"the headers are longer than {self._limits.max_header} bytes")
            raise
        if isinstance(event, h11.Request):
            self.num_requests += 1
            self._framing = len(self.trailing_data[0])
            self._check_headers(event)
        elif isinstance(event, h11.Data):
            self._framing -= len(event.data)
        elif event is h11.NEED_DATA and self.their_state is h11.SEND_BODY and self._framing > MAX_FRAMING:
            self._refuse(413, f"the chunks of the body carry more than {MAX_FRAMING} bytes besides it")
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """The bytes of what we say."""
        # With a body unread the connection goes on, since closing it would take the answer back.
        if isinstance(event, h11.Response) and self._settings.finishing and self.their_state is not h11.SEND_BODY:
            headers = [each for each in event.headers if each[0] != b"connection"]
            close = (b"connection", b"close")
            event = h11.Response(status_code=event.status_code, headers=[*headers, close], reason=event.reason)
        data = super().send_with_data_passthrough(event)
        self.num_said += sum(map(len, data or ()))
        return data

    def _check_headers(self, request: h11.Request) -> None:
        limits = self._limits
        if len(request.headers) > limits.max_headers:
            self._refuse(431, f"there are more than {limits.max_headers} headers")
        size = len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
        if size > limits.max_header:
            self._refuse(431, f"the headers are longer than {limits.max_header} bytes")

    def _refuse(self, status: int, message: str) -> None:
        self.error = ApiError(status, message)
        raise h11.RemoteProtocolError(message, error_status_hint=status)


class Connection(H11Protocol):
    """One client. `look` at it now and then: it ends by itself when the client takes too long over anything."""

    config: _Settings

    def __init__(self, config: _Settings, server_state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, app_state)
        self._reader = self.conn = Reader(config)
        self._stage: tuple[Any, ...] = ()
        self._made = self._since = monotonic()
        self._refused = False
        self._taken = 0
        self._moved = monotonic()
        """When the client last took something of what there is for it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        self.config.num_heard += 1
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=BUFFER)
        if len(self.connections) > self.config.max_connections:
            self._refuse(ApiError(503, "there are too many connections", retry_after=1))

    def data_received(self, data: bytes) -> None:
        """The client has said something."""
        self.config.num_heard += 1
        if not self._refused:
            super().data_received(data)

    def look(self, now: float) -> None:
        """End the connection if it has been at one thing for too long."""
        if self._is_stuck(now):
            self.transport.abort()
            return
        answered = self._refused or (self.cycle is not None and self.cycle.response_complete)
        stage = (self._reader.num_requests, self.conn.their_state, answered)
        if stage != self._stage:
            self._stage, self._since = stage, now
        limits, spent = self.config.limits, now - self._since
        if self._refused:
            if spent > LINGER:
                self.transport.abort()
        elif self.conn.their_state is h11.IDLE and spent > limits.header_timeout:
            if self._reader.trailing_data[0]:
                self._refuse(ApiError(408, "the headers took too long"))
            else:
                self.transport.close()
        elif self.conn.their_state is h11.SEND_BODY and answered and spent > LINGER:
            self.transport.abort()
        elif self.conn.their_state is h11.SEND_BODY and spent > limits.body_timeout:
            self._refuse(ApiError(408, "the body took too long"))

    @property
    def is_busy(self) -> bool:
        """Has the client only just come, or begun to ask, or is it owed some of an answer?"""
        is_new = self.cycle is None and not self._refused and monotonic() - self._made < GREETING
        return is_new or self._is_asked or self.transport.get_write_buffer_size() > 0

    @property
    def _is_asked(self) -> bool:
        if self._refused:
            return False
        if self.cycle is not None and not self.cycle.response_complete:
            return True
        return self.conn.their_state is h11.IDLE and bool(self._reader.trailing_data[0])

    def hang_up(self) -> None:
        """Say no more, and heed no more; yet read on: closing with something unread would reset the connection."""
        if self._is_asked:
            self._refuse(ApiError(503, "the server has shut down", retry_after=1))
        else:
            self._refused = True
            self.transport.write_eof()
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Answer what can't be understood, or is too much."""
        self._refuse(self._reader.error)

    def _is_stuck(self, now: float) -> bool:
        unsent = self.transport.get_write_buffer_size()
        taken = self._reader.num_said - unsent
        if unsent == 0 or taken > self._taken:
            self._moved = now
        self._taken = taken
        return now - self._moved > self.config.limits.write_timeout

    def _refuse(self, error: ApiError) -> None:
        self._refused = True
        if self.cycle is not None:
            self.cycle.disconnected = True  # its task has nothing to say any more
            self.cycle.message_event.set()
        if self.transport.is_closing() or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = json.dumps(error.document()).encode()
        headers = [
            *((name, value) for name, value in error.headers.items()),
            *(("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")),
        ]
        response = h11.Response(status_code=error.status, headers=headers, reason=b"")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()  # with bytes unread, closing would take the answer back
        self.flow.resume_reading()
