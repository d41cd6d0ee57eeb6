"""A model of the store served by a handler of its own: its workers, and what they answer.

Knows one version of one model, and pieces of bytes; nothing of routes, nor of what a handler computes.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from shardwise.server.config import ServerConfig
from shardwise.server.metrics import resident_bytes
from shardwise.server.store.apart import apart
from shardwise.server.store.errors import NO_WORKER, StoreError
from shardwise.server.store.figures import Tally
from shardwise.server.store.payload import parts_of
from shardwise.server.waiting import ClientGone, Streamed, watched
from shardwise.store.custom import Custom, HandlerFailure
from shardwise.store.jobs import Busy, Job, Piece
from shardwise.store.jobs import Request as Asked
from shardwise.store.stored import StoredModel

UP = ("ready", "busy")
"""States of workers that can be asked, at once or in their turn."""
RETRY_AFTER = 1
"""Seconds after which a client may ask again that no worker was free for."""
PAUSE = 0.05
"""Seconds between looks at what is unfinished while all is to end."""
TELLING = ("content-type", "accept", "user-agent", "x-request-id")
"""Headers that a handler is told. Never the one with the key."""


class HandlerModel:
    """See `engines.EngineModel`, which has the same methods for the same purpose."""

    def __init__(self, stored: StoredModel, config: ServerConfig, tally: Tally) -> None:
        self.stored = stored
        self.tally = tally
        self.progress = ""
        self._config = config
        self._custom: Custom | None = None
        self._open: set[Answer] = set()
        self._draining = self._abandoned = False
        self._drained_by = float("inf")
        self._since = 0.0

    async def load(self, workers: int) -> None:
        """Start the workers. Raises HandlerFailure, ValueError and OSError; nothing is left then."""
        if self._abandoned:
            raise HandlerFailure("it is no longer wanted")
        began = time.monotonic()
        custom = self._custom = Custom(self.stored, workers=workers, observe=self.tally.observe)
        self.progress = f"{workers} workers start"
        try:
            await apart(custom.start, f"loading {self.tally.name}")
        except BaseException:
            self._custom = None
            raise
        self.progress = ""
        self._since = time.time()
        seconds = time.monotonic() - began
        self.tally.load_s.update({str(at): seconds for at in range(workers)})

    async def scale(self, workers: int) -> None:
        """Have so many workers, at least one."""
        assert self._custom is not None
        custom, began = self._custom, time.monotonic()
        custom.stored = self.stored
        custom.scale(workers)
        while not self._is_settled(workers) and not self._abandoned:
            await asyncio.sleep(PAUSE)
        if failed := [each for each in custom.workers if each.state == "dead"]:
            raise HandlerFailure(failed[0].cause)
        before, seconds = len(self.tally.load_s), time.monotonic() - began
        self.tally.load_s.update({str(at): seconds for at in range(before, workers)})
        for at in range(workers, before):
            self.tally.load_s.pop(str(at), None)

    def tick(self) -> None:
        """To be called now and then: what takes longer than it may is answered so."""
        now = time.monotonic()
        for answer in list(self._open):
            if now - answer.began > self._config.request_timeout:
                answer.expire()

    @property
    def failure(self) -> str:
        """See `Model`: workers that die are replaced, for some time."""
        workers = [] if self._custom is None else self._custom.workers
        return workers[0].cause if workers and all(each.state == "dead" for each in workers) else ""

    @property
    def num_workers(self) -> int:
        """Workers that can be asked."""
        custom = self._custom
        return 0 if custom is None else sum(each.state in UP for each in custom.workers)

    @property
    def pending(self) -> int:
        """Requests that are accepted and not done."""
        return len(self._open)

    def workers(self) -> list[dict[str, Any]]:
        """Each of them, in the words of TorchServe's describe."""
        return [
            {
                "id": str(each.number),
                "startTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._since)),
                "status": "READY" if each.state in UP else "UNLOADING" if each.state == "dead" else "LOADING",
                "memoryUsage": sum(resident_bytes(pid) or 0 for pid in each.pids),
                "pid": each.pids[0] if each.pids else 0,
                "pids": list(each.pids),
                "gpu": bool(each.gpus),
                "gpuUsage": "N/A",
                "lastFailure": each.cause,
            }
            for each in ([] if self._custom is None else self._custom.workers)
        ]

    def abandon(self) -> None:
        """Stop loading: the workers that start are killed, which `load` hears of."""
        self._abandoned = True
        if self._custom is not None and self.progress:
            self._custom.stop()

    async def drain(self, timeout: float) -> None:
        """Refuse what comes and finish what is there, within ``timeout`` seconds."""
        self._draining = True
        self._drained_by = min(self._drained_by, time.monotonic() + timeout)  # whoever else drains it may wait longer
        while self._open and time.monotonic() < self._drained_by:
            await asyncio.sleep(PAUSE)

    async def close(self) -> None:
        """End all workers; harmless when repeated."""
        custom, self._custom = self._custom, None
        if custom is not None:
            await apart(custom.close, f"closing {self.tally.name}")

    def _is_settled(self, workers: int) -> bool:
        custom = self._custom
        if custom is None:
            return True
        found = custom.workers
        return len(found) == workers and all(each.state in (*UP, "dead") for each in found)

    async def predict(self, request: Request) -> Response:
        """Answer a request with what the handler makes of it. Raises StoreError."""
        custom = self._custom
        if custom is None or self._draining:
            raise StoreError(503, "the model is being shut down", retry_after=RETRY_AFTER)
        answer = Answer(self._open, self.tally)
        try:
            data: dict[str, bytes | str] = dict(request.query_params)
            kind = request.headers.get("content-type", "")
            data |= await asyncio.to_thread(parts_of, await request.body(), kind)
            headers = {name: value for name, value in request.headers.items() if name in TELLING}
            try:
                answer.job = custom.submit(Asked(data, headers, request.state.request_id), answer.deliver)
            except ValueError as error:
                raise StoreError(400, str(error)) from None
            first = await watched(request.receive, answer.next())
            if first.failed:
                raise StoreError(first.status, first.content.decode(errors="replace"))
            empty = first.status in (204, 304)
            if not first.last and not empty:
                return Pieces(answer, first)
            content = b"" if empty else first.content
            response = Response(content, first.status, first.headers, media_type=first.content_type)
        except ClientGone:
            answer.close()
            return Response(status_code=499)
        except Busy:
            answer.close()
            text = NO_WORKER.format(self.tally.name, self.tally.version)
            raise StoreError(503, text, retry_after=RETRY_AFTER) from None
        except BaseException:
            answer.close()
            raise
        answer.close()
        return response


class Answer:
    """One request's pieces, on the loop that it is made on. `close` it in the end."""

    def __init__(self, among: set[Answer], tally: Tally) -> None:
        self.job: Job | None = None
        self.began = time.monotonic()
        self._among = among
        self._tally = tally
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._whole = False
        among.add(self)

    def deliver(self, piece: Piece) -> None:
        """More has come; called in a worker's thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def expire(self) -> None:
        """It has taken too long."""
        self._pieces.put_nowait(None)

    async def next(self) -> Piece:
        """The next piece. Raises StoreError."""
        piece = await self._pieces.get()
        if piece is None:
            raise StoreError(408, "the request has taken longer than this server allows")
        self._whole = piece.last
        return piece

    def close(self) -> None:
        """Nothing more is wanted; harmless when repeated."""
        if self not in self._among:
            return
        self._among.discard(self)
        if self.job is None:
            return
        self.job.cancel()
        if self._whole:
            now = time.monotonic()
            self._tally.done(now - self.began, (self.job.started or now) - self.job.since)


class Pieces(Streamed):
    """Pieces as they come, chunked. After an error the connection ends without an end of the body."""

    def __init__(self, answer: Answer, first: Piece) -> None:
        super().__init__(first.content_type, first.status, first.headers)
        self._answer = answer
        self._first = first

    async def close(self) -> None:
        """See `Streamed`."""
        self._answer.close()

    async def send(self, send: Send) -> None:
        """See `Streamed`."""
        piece = self._first
        while True:
            if piece.failed:
                return
            await send({"type": "http.response.body", "body": piece.content, "more_body": not piece.last})
            if piece.last:
                return
            try:
                piece = await self._answer.next()
            except StoreError:
                return
