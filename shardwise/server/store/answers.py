"""A prediction of an engine model, from its body to its text: accepted, waited for, whole or piece by piece.

Knows one model's engines and TorchServe's limits; nothing of routes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from shardwise.engine import Output
from shardwise.intake import Prepared
from shardwise.runtime.executor import RankFailure
from shardwise.server.admission import Refused
from shardwise.server.deps import Deps
from shardwise.server.document import check_document
from shardwise.server.errors import ApiError
from shardwise.server.running import compiled, salt_of
from shardwise.server.service import Cut, Service, Stream
from shardwise.server.store.errors import NO_WORKER, StoreError, told
from shardwise.server.store.payload import one_of, parts_of
from shardwise.server.waiting import ClientGone, Streamed, watched
from shardwise.store.styles import Asked, Call

if TYPE_CHECKING:
    from shardwise.server.store.engines import EngineModel

TEXT = "text/plain; charset=utf-8"

log = logging.getLogger("shardwise")


async def predict(model: EngineModel, request: Request) -> Response:
    """Answer a request with the text that its body asks for. Raises StoreError."""
    answer = Answer(model, request)
    check_room(model)
    body = await request.body()
    try:
        streams = await watched(request.receive, answer.begin(body))
        if streams:
            return Pieces(answer)
        texts = await watched(request.receive, answer.texts())
    except ClientGone:
        answer.close()
        return Response(status_code=499)
    except BaseException:
        answer.close()
        raise
    answer.close()
    if answer.many:
        return Response(msgspec.json.encode(texts), media_type="application/json")
    return Response(texts[0], media_type=TEXT)


class Answer:
    """One request's texts to be. `close` it in the end, whatever has happened."""

    def __init__(self, model: EngineModel, request: Request) -> None:
        assert model.deps is not None
        self.many = False
        self._model = model
        self._deps: Deps = model.deps
        self._request = request
        self._asked: tuple[Asked, ...] = ()
        self._streams: list[Stream] = []
        self._is_stream = False
        self._began = time.monotonic()
        self._read = self._began
        """When the body was understood."""
        self._last = self._began
        """When the newest piece came."""
        self._paces: list[Pace] = []
        self._first: Output | None = None
        self._done = False

    async def begin(self, body: bytes) -> bool:
        """Understand the body and submit what it asks for; if it is to be streamed, wait for the first piece.

        Returns whether it is. Raises StoreError.
        """
        call = await asyncio.to_thread(self._understand, body)
        self.many, self._asked, self._is_stream = call.many, call.asked, call.stream
        key = getattr(self._request.state, "key", "")
        self._model.answers.add(self)
        try:
            if any(asked.params.grammar is not None for asked in call.asked):
                prepared = await compiled(self._deps, lambda: self._prepare(call))
            else:
                prepared = await asyncio.to_thread(self._prepare, call)
            self._read = time.monotonic()
            check_room(self._model)  # others may have come while this one was read
            for each in prepared:
                self._streams.append(self._deps.service.submit(each, key=key))
                self._paces.append(Pace(self._model, self._streams[-1], self._is_stream))
        except Refused as refused:
            self._deps.service.metrics.refused(refused.status)
            status = 503 if refused.status == 429 else refused.status  # TorchServe's clients know no 429
            raise StoreError(status, refused.message, retry_after=refused.retry_after) from None
        if self._is_stream:
            self._first = await self._next(self._streams[0])
        return self._is_stream

    async def texts(self) -> list[str]:
        """All that was asked for. Raises StoreError."""
        tasks = [asyncio.ensure_future(self._text(at)) for at in range(len(self._streams))]
        try:
            texts = list(await asyncio.gather(*tasks))
            self._done = True
            return texts
        finally:
            for task in tasks:
                task.cancel()

    async def pieces(self) -> AsyncIterator[str]:
        """The one text as it comes. Raises StoreError."""
        yield self._asked[0].opening
        output = self._first
        while output is not None:
            yield output.text
            output = await self._next(self._streams[0])
        self._done = True

    def look(self) -> None:
        """To be called now and then: end what takes longer than it may."""
        now, most = time.monotonic(), self._deps.config.request_timeout
        for stream in self._streams:
            if not stream.ended and now - stream.ticket.entered > most:
                stream.cut(Cut("request_timeout", "the request has taken longer than this server allows", 408))
        for pace in self._paces:
            pace.look()

    def close(self) -> None:
        """Let go of what is unfinished, and count the rest; harmless when repeated."""
        if self not in self._model.answers:
            return
        self._model.answers.discard(self)
        for stream in self._streams:
            stream.close()
        if self._done:
            self._measure()

    def _measure(self) -> None:
        now, tally, last = time.monotonic(), self._model.tally, self._last
        started = [each.ticket.started for each in self._streams]
        begun = min((each for each in started if each is not None), default=last)
        queued, read, inferred = max(0.0, begun - self._read), self._read - self._began, last - begun
        tally.done(now - self._began, queued)
        tally.observe("HandlerTime", "s", read + inferred)
        tally.observe("PredictionTime", "s", read + inferred)
        tally.observe("WorkerThreadTime", "s", now - last)
        style = self._model.stored.style
        if style is not None and style.profile:
            tally.observe("ts_handler_preprocess", "s", read)
            tally.observe("ts_handler_inference", "s", inferred)

    def _understand(self, body: bytes) -> Call:
        style = self._model.stored.style
        assert style is not None
        kind = self._request.headers.get("content-type", "")
        parts = parts_of(body, kind)
        if "body" not in parts or len(parts) > 1:
            kind = ""  # it was the form's
        content = one_of(parts)
        if kind.startswith("application/json") or (
            content.lstrip()[:1] in (b"{", b"[") and not kind.startswith("text/")
        ):
            check_document(content)
        try:
            return style.read(content, kind, self._deps.defaults.fields, self._deps.config.max_prompts)
        except ValueError as error:
            raise StoreError(400, str(error)) from None

    def _prepare(self, call: Call) -> list[Prepared]:
        deps, style = self._deps, self._model.stored.style
        assert style is not None
        prepared = []
        for asked in call.asked:
            try:
                if asked.messages is not None:
                    text, tokens = deps.intake.encode_chat(asked.messages)
                else:
                    text, tokens = deps.intake.encode(asked.prompt or "", plain=not deps.config.allow_special_tokens)
                style.check_prompt(len(tokens))
                room = deps.max_model_len - len(tokens)
                if room < min(1, asked.params.max_tokens):
                    raise ValueError(
                        f"the prompt has {len(tokens)} tokens and the model's context is {deps.max_model_len}, with "
                        "the answer: shorten it"
                    )
                params = replace(asked.params, max_tokens=min(room, asked.params.max_tokens))
                each = deps.intake.prepare(text, tokens, params, salt=salt_of(deps, self._request))
                deps.service.vet(each)
            except ValueError as error:
                raise StoreError(400, str(error)) from None
            prepared.append(each)
        return prepared

    async def _text(self, at: int) -> str:
        pieces = [self._asked[at].opening]
        while (output := await self._next(self._streams[at])) is not None:
            pieces.append(output.text)
        return "".join(pieces)

    async def _next(self, stream: Stream) -> Output | None:
        service = self._deps.service
        try:
            output = await stream.__anext__()
        except StopAsyncIteration:
            return None
        except Cut as cut:
            retry_after = service.admission.retry_after if cut.status in (429, 503) else None
            raise StoreError(cut.status, cut_of(service, cut), retry_after=retry_after) from None
        self._last = time.monotonic()
        if output.unsatisfiable:
            raise StoreError(400, output.error)
        if output.finish_reason == "error":
            number = getattr(self._request.state, "request_id", None)
            log.error("request %s failed: %r", number, output.error)
            status, text = cause_of(service, output.error)
            raise StoreError(status, text)
        if output.finish_reason == "abort":
            raise StoreError(503, "the model is shut down before the answer is whole")
        return output


class Pace:
    """The responseTimeout of a request that has its turn: for all of its answer or, ``in_pieces``, for each token."""

    def __init__(self, model: EngineModel, stream: Stream, in_pieces: bool) -> None:
        self._model, self._stream, self._in_pieces = model, stream, in_pieces
        self._heard = 0
        """Tokens that have come."""
        self._since: float | None = None

    def look(self) -> None:
        """To be called now and then: end it if it takes longer than it may."""
        stream, limit, now = self._stream, self._model.stored.limits.response_timeout, time.monotonic()
        if stream.ended:
            self._model.answers.discard(self)
            return
        if limit is None or stream.ticket.started is None:
            return
        if self._in_pieces and stream.num_tokens != self._heard:
            self._heard, self._since = stream.num_tokens, now
        if now - (self._since or stream.ticket.started) > limit:
            text = f"the model has not responded within the {limit:g} s of its responseTimeout"
            stream.cut(Cut("response_timeout", text, 500))


class Pieces(Streamed):
    """The text piece by piece, chunked. Where it can't go on, the connection ends without an end of the body."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(TEXT)
        self._answer = answer

    async def close(self) -> None:
        """See `Streamed`."""
        self._answer.close()

    async def send(self, send: Send) -> None:
        """See `Streamed`."""
        try:
            async for text in self._answer.pieces():
                if text:
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        except ApiError as error:
            log.error("a stream ends before its end: %s", error.message)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def check_room(model: EngineModel) -> None:
    """Raise StoreError 503 where no worker is free and none may be waited for."""
    assert model.deps is not None
    service, limits = model.deps.service, model.stored.limits
    waiting = 0 if limits.job_ticket else limits.queue_requests
    if waiting is not None and service.num_open >= model.capacity(ready=limits.job_ticket) + waiting:
        service.metrics.refused(503)
        text = NO_WORKER.format(model.tally.name, model.tally.version)
        raise StoreError(503, text, retry_after=service.admission.retry_after)


def cause_of(service: Service, error: str) -> tuple[int, str]:
    """The status and the sentence for a request that ranks have failed over, of which ``error`` tells."""
    failures = [engine.failure for engine in service.replicas.engines if engine.failure is not None]
    failure = next((each for each in failures if str(each) in error), None)
    if failure is None:
        return 500, "the request failed"
    memory = failure.kind in ("OutOfMemoryError", "MemoryError")
    return (507 if memory else 500), f"Worker died: {told(failure)}"


def cut_of(service: Service, cut: Cut) -> str:
    """The sentence for a request that was cut."""
    if isinstance(service.failure, RankFailure):
        return f"Worker died: {told(service.failure)}"
    return str(cut)
