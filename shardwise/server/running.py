"""From prepared requests to an answer: accept them, pass on their pieces, notice that the client has gone, frame SSE.

Knows no route's fields and no answer's shape. Whatever happens, what was accepted is closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from shardwise.config import BLOCK
from shardwise.engine import Output
from shardwise.intake import Prepared
from shardwise.params import SamplingParams
from shardwise.server.admission import Refused
from shardwise.server.deps import Deps
from shardwise.server.errors import ApiError
from shardwise.server.fields import Fields
from shardwise.server.service import Cut, Stream
from shardwise.server.waiting import ClientGone, Streamed, watched

INTERNAL = "internal error"
DONE = b"data: [DONE]\n\n"
"""The end of a stream in OpenAI's completions."""
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
"""For the documents of routes whose answers may be streams."""

T = TypeVar("T")
Prepare = Callable[[], Sequence[Prepared]]
"""Makes a call's requests; run in a thread. May raise ValueError, with the remedy, and ApiError."""

log = logging.getLogger("shardwise")


def prepare(
    deps: Deps, request: Request, body: Fields, text: str, tokens: Sequence[int], params: SamplingParams
) -> Prepared:
    """One prompt's request, vetted; to be called in a thread. Raises ValueError with the remedy, and ApiError.

    ``max_tokens`` is cut to the room in the context; where ``body`` sets no limit of its own, also to that in the KV
    cache.
    """
    room = deps.max_model_len - len(tokens)
    if room < min(1, params.max_tokens):
        raise ApiError(
            400,
            f"the prompt has {len(tokens)} tokens and the model's context is {deps.max_model_len}, with the answer: "
            "shorten it",
            param=body.NAMES.get("prompt", "prompt"),
            code="context_length_exceeded",
        )
    if body.limit is None:
        blocks = deps.service.replicas.engines[0].scheduler.pool.num_blocks
        room = max(1, min(room, blocks * BLOCK + 1 - len(tokens)))
    if params.min_tokens > room:
        raise ApiError(
            400,
            f"min_tokens {params.min_tokens} is too many: after the prompt there is room for {room} tokens",
            param="min_tokens",
        )
    if params.max_tokens > room:
        params = replace(params, max_tokens=room)
    prepared = deps.intake.prepare(text, tokens, params, salt=salt_of(deps, request))
    deps.service.vet(prepared)
    return prepared


def salt_of(deps: Deps, request: Request) -> bytes:
    """What keeps the cached KV of different API keys apart. (The cache's own hash is keyed by a secret.)"""
    key: str = getattr(request.state, "key", "")
    if deps.config.share_prefix_cache or not key:
        return b""
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


def turn_away(deps: Deps, key: str) -> None:
    """Raise ApiError where nothing that comes with ``key`` would be let in now, however small it is."""
    try:
        deps.service.admission.check(key=key)
    except Refused as refused:
        raise _told(deps, refused) from None


def check_count(deps: Deps, count: int) -> None:
    """Raise ApiError for more continuations in a call than the server ever takes: before any of them is prepared."""
    most = deps.service.admission.largest[0]
    if count > most:
        raise _told(deps, Refused(400, f"{count} continuations are more than the server ever takes ({most})"))


def _told(deps: Deps, refused: Refused) -> ApiError:
    deps.service.metrics.refused(refused.status)
    return ApiError(refused.status, refused.message, retry_after=refused.retry_after)


class Running:
    """The accepted requests of one call, one for each prompt: ``async for at, output in running``.

    ``at`` numbers the prompts; their pieces come as they are made. Raises ApiError where one of them can't go on.
    `close` it in the end, whatever has happened.
    """

    def __init__(self, deps: Deps, request: Request) -> None:
        self.prepared: Sequence[Prepared] = ()
        self.request_id: str | None = getattr(request.state, "request_id", None)
        self._deps = deps
        self._state = request.state
        self._key: str = getattr(request.state, "key", "")
        self._streams: list[Stream] = []
        self._next: dict[asyncio.Future[Output | None], int] = {}
        self._ready: deque[tuple[int, Output]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._first_token_s: float | None = None
        self._ends: set[str] = set()
        """The finish reasons that have come."""
        self._is_closed = False

    async def begin(self, body: Fields, prepare: Prepare) -> None:
        """Prepare and submit; ApiError for what is refused, and then nothing is running."""
        service, priority = self._deps.service, body.priority or 0
        try:
            self.prepared = await self._prepare(body, prepare)
            self._check_sum()
            for each in self.prepared:
                self._streams.append(service.submit(each, key=self._key, priority=priority))
        except ValueError as error:
            raise body.refusal(error) from None
        except Refused as refused:
            while self._streams:
                self._streams.pop().close()
            raise _told(self._deps, refused) from None
        if len(self._streams) > 1:
            self._next = {asyncio.ensure_future(self._piece(at)): at for at in range(len(self._streams))}
        self._timer = asyncio.get_running_loop().call_later(self._deps.config.request_timeout, self._expire)

    async def wait(self) -> None:
        """Wait for the first piece, which is then still to come: until there is one, an answer may be an error."""
        self._ready.append(await self.__anext__())

    def __aiter__(self) -> Running:
        return self

    async def __anext__(self) -> tuple[int, Output]:
        if self._ready:
            return self._ready.popleft()
        if len(self._streams) == 1:
            output = await self._piece(0)
            if output is None:
                raise StopAsyncIteration
            return 0, output
        while self._next:
            done, _ = await asyncio.wait(self._next, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                at = self._next.pop(future)
                output = future.result()
                if output is not None:
                    self._ready.append((at, output))
                    self._next[asyncio.ensure_future(self._piece(at))] = at
            if self._ready:
                return self._ready.popleft()
        raise StopAsyncIteration

    def close(self) -> None:
        """Let go of what is unfinished, and tell the log of what there was; harmless when repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._streams:
            self._state.log = {**getattr(self._state, "log", {}), **self._figures()}
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._streams:
            stream.close()
        for future in self._next:
            if not future.cancel() and not future.cancelled():
                future.exception()  # which nobody will ask for

    async def _prepare(self, body: Fields, prepare: Prepare) -> Sequence[Prepared]:
        if not body.constraints():
            return await asyncio.to_thread(prepare)
        return await compiled(self._deps, prepare)

    def _figures(self) -> dict[str, Any]:
        """For the log."""
        cut = next((stream.cut_by.reason for stream in self._streams if stream.cut_by is not None), None)
        if cut is None and "error" in self._ends:
            cut = "error"
        elif cut is None and any(stream.places for stream in self._streams):
            cut = "disconnect"
        return {
            "prompt_tokens": sum(len(prepared.tokens) for prepared in self.prepared),
            "generated_tokens": sum(stream.num_tokens for stream in self._streams),
            "first_token_s": self._first_token_s,
            "reason": cut or ",".join(sorted(self._ends)) or None,
        }

    def _check_sum(self) -> None:
        """Prompts that fit one by one may never fit together."""
        cost = sum(each.cost for each in self.prepared)
        most = self._deps.service.admission.largest[1]
        if cost > most:
            raise Refused(400, f"{cost} tokens, prompts included, are more than the server ever takes ({most})")

    async def _piece(self, at: int) -> Output | None:
        try:
            output = await self._streams[at].__anext__()
        except StopAsyncIteration:
            return None
        except Cut as cut:
            retry_after = self._deps.service.admission.retry_after if cut.status in (429, 503) else None
            raise ApiError(cut.status, str(cut), retry_after=retry_after, is_final=cut.status == 408) from None
        if output.token_ids and self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._streams[at].ticket.entered
        if output.finish_reason is not None:
            self._ends.add(output.finish_reason)
        if output.unsatisfiable:
            raise ApiError(400, output.error)
        if output.finish_reason == "error":
            log.error("request %s failed: %r", self.request_id, output.error)
            raise ApiError(500, INTERNAL, is_final=True)
        return output

    def _expire(self) -> None:
        for stream in self._streams:
            if stream.places:
                stream.cut(Cut("request_timeout", "the request has taken longer than this server allows", 408))


async def compiled(deps: Deps, prepare: Callable[[], T]) -> T:
    """What ``prepare`` makes, in a thread, where that may compile a grammar: when its turn has come, or Refused."""
    turn = deps.compiling
    try:
        await asyncio.wait_for(turn.acquire(), deps.config.queue_timeout)
    except asyncio.TimeoutError:
        raise Refused(503, "too many grammars wait to be compiled; try again later", 1) from None
    work = asyncio.get_running_loop().run_in_executor(None, prepare)

    def done(work: asyncio.Future[T]) -> None:
        turn.release()  # not when the client goes, for the thread works on
        if not work.cancelled():
            work.exception()

    work.add_done_callback(done)
    return await asyncio.shield(work)


async def answer(
    deps: Deps, request: Request, body: Fields, prepare: Prepare, whole: Callable[[Running], Awaitable[dict[str, Any]]]
) -> Response:
    """Run to the end and answer with what ``whole`` makes of the pieces. Raises ApiError."""
    running = Running(deps, request)

    async def work() -> dict[str, Any]:
        await running.begin(body, prepare)
        return await whole(running)

    try:
        return reply(await watched(request.receive, work()))
    except ClientGone:
        return Response(status_code=499)
    finally:
        running.close()


async def stream(
    deps: Deps,
    request: Request,
    body: Fields,
    prepare: Prepare,
    events: Callable[[Running], AsyncGenerator[bytes, None]],
    end: bytes = DONE,
) -> Response:
    """Answer with the frames that ``events`` makes of the pieces as they come, and ``end``.

    Raises ApiError for what goes wrong before the first piece; later that is an event. ``events`` may catch the
    ApiError that `Running` raises, to tell of it in its own shape.
    """
    running = Running(deps, request)

    async def work() -> None:
        await running.begin(body, prepare)
        await running.wait()

    try:
        await watched(request.receive, work())
    except ClientGone:
        running.close()
        return Response(status_code=499)
    except BaseException:
        running.close()
        raise
    return EventStream(running, events(running), end)


class EventStream(Streamed):
    """Frames, and ``end`` after the last one."""

    def __init__(self, running: Running, frames: AsyncGenerator[bytes, None], end: bytes) -> None:
        super().__init__("text/event-stream")
        self._running = running
        self._frames = frames
        self._end = end

    async def close(self) -> None:
        """See `Streamed`."""
        self._running.close()
        await self._frames.aclose()

    async def send(self, send: Send) -> None:
        """See `Streamed`."""
        request_id = self._running.request_id
        try:
            async for data in self._frames:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            last = b""
        except ApiError as error:
            last = frame(error.document(request_id))
        except Exception:
            log.exception("request %s failed", request_id)
            last = frame(ApiError(500, INTERNAL).document(request_id))
        await send({"type": "http.response.body", "body": last + self._end, "more_body": False})


def frame(document: dict[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if event is None else f"event: {event}\n".encode()
    return head + b"data: " + msgspec.json.encode(document) + b"\n\n"


def reply(document: dict[str, Any]) -> Response:
    """An answer in JSON."""
    return Response(msgspec.json.encode(document), media_type="application/json")
