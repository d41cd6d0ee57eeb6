"""Between many clients on the event loop and the one thread that steps the engines: queue, streams, health, drain.

Knows requests and their pieces; nothing of HTTP, and nothing of how ranks run.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from shardwise.engine import Output
from shardwise.intake import Prepared
from shardwise.replicas import Replicas
from shardwise.runtime.executor import Signal
from shardwise.schedule.sequence import Request
from shardwise.server.admission import Admission, Ticket
from shardwise.server.metrics import Metrics

MAX_BACKLOG = 1024
"""Tokens that may wait for a client that reads slowly."""
PATIENCE = 1.0
"""Seconds in which a client with more waiting tokens may catch up."""
SLACK = 8
"""Sequences that may wait in each engine; all others wait in the fair queue."""

T = TypeVar("T")

log = logging.getLogger("shardwise")


class Cut(Exception):
    """A request ended before its time, through no fault of its own text. ``reason`` is a short word for metrics."""

    def __init__(self, reason: str, text: str, status: int = 500) -> None:
        super().__init__(text)
        self.reason, self.status = reason, status


class Stream:
    """The pieces of one accepted request, in the order in which they come: ``async for output in stream``.

    ``output.index`` says of which continuation it is, ``request_id`` means nothing here. Raises Cut where the request
    can't go on. ``close`` it when it is no longer wanted; that is harmless when it is done.
    """

    def __init__(self, prepared: Prepared, ticket: Ticket, close: Callable[[Stream], None]) -> None:
        self.prepared = prepared
        self.ticket = ticket
        self.places = {part.id: at for at, part in enumerate(prepared.parts)}
        """Of the continuations that are unfinished: request id → index."""
        self.ended = False
        self._close = close
        self.num_tokens = 0
        """Generated so far, over all continuations."""
        self._pieces: deque[Output] = deque()
        self._backlog = 0
        self._watched = False
        self.cut_by: Cut | None = None
        """What has ended it before its time."""
        self._news = asyncio.Event()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Output:
        while not self._pieces:
            if self.cut_by is not None:
                raise self.cut_by
            if not self.places:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        piece = self._pieces.popleft()
        self._backlog -= len(piece.token_ids)
        return piece

    def put(self, output: Output) -> None:
        """One more piece has come."""
        index = self.places[output.request_id]
        if output.finish_reason is not None:
            del self.places[output.request_id]
        self._pieces.append(output if output.index == index else replace(output, index=index))
        self.num_tokens += len(output.token_ids)
        self._backlog += len(output.token_ids)
        if self._backlog > MAX_BACKLOG and not self._watched:
            self._watched = True
            asyncio.get_running_loop().call_later(PATIENCE, self._judge)
        self._news.set()

    def _judge(self) -> None:
        self._watched = False
        if self._backlog > MAX_BACKLOG:
            self.cut(Cut("slow_reader", f"the client is {MAX_BACKLOG} tokens behind", 408))

    def cut(self, cut: Cut) -> None:
        """End it: what has come is dropped, and whoever reads on gets the exception."""
        self._pieces.clear()
        self.cut_by = cut
        self._news.set()
        self.close()

    def close(self) -> None:
        """The rest is not wanted: free what the request holds."""
        self._close(self)


class Service:
    """The engines as the server sees them. All methods are for the event loop that ``start`` was called on.

    ``most`` sequences for each engine may be out of the fair queue at once; None: a few more than run there.
    """

    def __init__(self, replicas: Replicas, admission: Admission, metrics: Metrics, *, most: int | None = None) -> None:
        self.replicas = replicas
        self.admission = admission
        self.metrics = metrics
        self.most = most
        self.failure: Exception | None = None
        """Why it is dead: no ranks, and no way to get any."""
        self.dead = asyncio.Event()
        self.draining = False
        self._streams: dict[int, Stream] = {}
        """By the ids of their unfinished continuations, queued or running."""
        self._empty = asyncio.Event()
        self._empty.set()
        self._sent = 0
        """Sequences given to the engines since they last said how many wait."""
        self._waiting = 0
        self._commands: queue.SimpleQueue[Request | int | Callable[[], None] | None] = queue.SimpleQueue()
        """For the thread: a request to add, the id of one to abort, something to do between steps, or None to end."""
        self._wake = Signal()
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to step the engines."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Continuations that are queued or running."""
        return len(self._streams)

    @property
    def state(self) -> str:
        """ "dead", "draining", "recovering" (some replica has no ranks at the moment) or "ok"."""
        if self.failure is not None:
            return "dead"
        if self.draining:
            return "draining"
        return "ok" if all(engine.ready for engine in self.replicas.engines) else "recovering"

    def vet(self, prepared: Prepared) -> None:
        """Raise ValueError with the remedy for a request that can never run. May be called in any thread."""
        self.replicas.engines[0].scheduler.vet(prepared.parts[0])

    def submit(self, prepared: Prepared, *, key: str = "", priority: int = 0) -> Stream:
        """Accept a vetted request, or raise Refused. ``key`` is whose it is.

        Of a key's own requests the lowest ``priority`` goes first.
        """
        ticket = self.admission.enter(prepared.cost, len(prepared.parts), key=key, priority=priority)
        stream = Stream(prepared, ticket, self._end)
        ticket.stream = stream
        for part in prepared.parts:
            self._streams[part.id] = stream
        self._empty.clear()
        self.metrics.began(stream)
        self._admit()
        return stream

    async def change(self, act: Callable[[Replicas], T]) -> T:
        """Do something to the engines in their own thread, between two steps. Raises what it raises, and Cut if they
        have failed for good."""
        assert self._loop is not None
        loop, done = self._loop, self._loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if not done.done():
                done.set_result(result) if error is None else done.set_exception(error)

        def command() -> None:
            try:
                result = act(self.replicas)
            except Exception as error:
                loop.call_soon_threadsafe(settle, None, error)
            else:
                loop.call_soon_threadsafe(settle, result, None)

        self._command(command)
        dead = asyncio.ensure_future(self.dead.wait())
        try:
            await asyncio.wait({done, dead}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            dead.cancel()
        if not done.done():
            raise Cut("engine_dead", "the engine has failed and can't be restarted", 503)
        result: T = done.result()
        return result

    async def drain(self, timeout: float) -> None:
        """Refuse what comes, finish what is there within ``timeout`` seconds, and end the rest with "abort"."""
        self.draining = True
        self.admission.close()
        try:
            await asyncio.wait_for(self._empty.wait(), timeout)
        except asyncio.TimeoutError:
            for number, stream in list(self._streams.items()):
                self._command(number)
                self._receive(Output(number, "", [], [], "abort"), stream)

    async def stop(self) -> None:
        """End the thread, and all ranks."""
        self._command(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self.replicas.close)
        self._wake.close()

    def tick(self) -> None:
        """To be called now and then: requests that have waited too long are told so."""
        for ticket in self.admission.expire():
            ticket.stream.cut(Cut("queue_timeout", "the request has waited too long for its turn", 503))

    def _admit(self) -> None:
        num_engines = len(self.replicas.engines)
        room = SLACK * num_engines - self._waiting - self._sent
        if self.most is not None:
            room = min(room, self.most * num_engines - (self.num_open - self.admission.num_waiting))
        for ticket in self.admission.take(room):
            self._sent += ticket.parts
            for part in ticket.stream.prepared.parts:
                self._command(part)

    def _end(self, stream: Stream) -> None:
        if stream.ended:
            return
        stream.ended = True
        for number in stream.places:
            if self._streams.pop(number, None) is not None:
                self._command(number)
        stream.places.clear()
        self.admission.leave(stream.ticket, len(stream.prepared.tokens) * stream.ticket.parts + stream.num_tokens)
        stream.ticket.stream = (
            None  # else they would keep each other, and what is compiled for them, until a collection
        )
        self.metrics.ended(stream)
        if not self._streams:
            self._empty.set()
        elif self.most is not None:
            self._admit()  # there is room now, of which the engines need not have any news

    def _receive(self, output: Output, stream: Stream) -> None:
        if output.finish_reason is not None:
            self._streams.pop(output.request_id, None)
        self.metrics.piece(stream, output)
        stream.put(output)
        if not stream.places:
            self._end(stream)

    def _deliver(self, outputs: list[Output], waiting: int, sent: int) -> None:
        """What the engines' thread has to say, on the event loop."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                self._receive(output, stream)
        self._waiting, self._sent = waiting, self._sent - sent
        self._admit()

    def _die(self, failure: Exception) -> None:
        self.failure = failure
        self.dead.set()
        self.admission.close()
        for stream in set(self._streams.values()):
            stream.cut(Cut("engine_dead", "the engine has failed and can't be restarted", 503))

    def _command(self, command: Request | int | Callable[[], None] | None) -> None:
        self._commands.put(command)
        self._wake.raise_one()

    def _run(self) -> None:
        """The thread: commands, a step, news; to the end, or until no ranks are left."""
        assert self._loop is not None
        told = 0
        try:
            while True:
                sent = 0
                while not self._commands.empty():
                    command = self._commands.get()
                    self._wake.lower_one()
                    if command is None:
                        return
                    if isinstance(command, int):
                        self.replicas.abort(command)
                    elif not isinstance(command, Request):
                        command()
                    else:
                        sent += 1
                        self.replicas.add(command)
                outputs = self.replicas.step(self._wake.fileno())
                waiting = sum(engine.scheduler.num_waiting for engine in self.replicas.engines)
                if outputs or sent or waiting != told:
                    self._loop.call_soon_threadsafe(self._deliver, outputs, waiting, sent)
                    told = waiting
        except Exception as failure:
            log.critical("the engines have failed for good", exc_info=failure)
            self._loop.call_soon_threadsafe(self._die, failure)
