"""One worker of a custom handler as the front sees it: its processes, one a rank, and the batch that they have.

They live and die together. Knows frames and clocks; nothing of queues. Used by one thread.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import msgspec

from shardwise.runtime.frames import Failed, Kind, pack
from shardwise.runtime.spawn import ForkServer, Process, end
from shardwise.store.stored import StoredModel
from shardwise.store.wire import Answer, Batch, Reply, Start

PAUSES = (0.0, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0)
"""Seconds before each new start of processes that die before they are ready."""
GRACE = 1.0
"""Seconds in which other ranks may finish a batch that one has failed at; after that they are held to hang."""
MOMENT = 0.01
"""Seconds between looks for the pids of processes that are ready: the fork server may tell of them a little later."""
STOPPED = 5.0
"""Seconds that a process may stay stopped."""

log = logging.getLogger("shardwise")

News = Callable[[list[Answer], bool], None]


@dataclass(frozen=True)
class Times:
    """Seconds: to be ready in, to wait for news of a batch, and to try to get processes in again."""

    startup: float = 120.0
    response: float = 120.0
    retry: float = 300.0


@dataclass(frozen=True)
class Place:
    """Where a worker runs: how many processes it is, with how many threads each, and on which GPUs."""

    ranks: int = 1
    threads: int = 1
    gpus: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them; empty on the CPU. A worker of one process may see several."""
    all_ranks: bool = True
    """Is each batch handed to all ranks, or to the first only?"""


@dataclass(eq=False)
class Crew:
    """A worker. ``state`` is "starting", "ready", "busy", "waiting" (for its next start) or "dead" (for good)."""

    number: int
    stored: StoredModel
    place: Place
    times: Times
    observe: Callable[[str, str, float], None]
    state: str = "waiting"
    cause: str = ""
    """Why it died last."""
    retiring: bool = False
    """Is it to end when it has nothing to do?"""
    starts: int = 0
    """Since it was last ready."""
    ever_ready: bool = False
    _processes: list[Process] = field(default_factory=list)
    _batch: Batch | None = None
    _deliver: News | None = None
    _fail: Callable[[str, int], None] | None = None
    _given_at: float = 0.0
    """When it got the batch."""
    _left: set[int] = field(default_factory=set)
    """Ranks that haven't finished the batch."""
    _last: list[Answer] | None = None
    _failed: bool = False
    _due: float = field(default_factory=monotonic)
    """When something is late, or, where it waits, when it starts."""
    _lost_at: float = field(default_factory=monotonic)

    @property
    def pids(self) -> list[int]:
        """Of its processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def due(self) -> float | None:
        """When to look at it again, by the monotonic clock; None: when something comes."""
        if self.state == "starting" and all(process.ready for process in self._processes):
            return monotonic() + MOMENT
        return self._due if self.state in ("waiting", "starting", "busy") else None

    def give(self, batch: Batch, deliver: News, fail: Callable[[str, int], None]) -> None:
        """Have the batch handled: pieces of its answers go to ``deliver``, or an error and its status to ``fail``."""
        assert self.state == "ready"
        self._batch, self._deliver, self._fail = batch, deliver, fail
        self._last, self._failed = None, False
        asked = self._processes if self.place.all_ranks else self._processes[:1]
        self._left = {process.rank for process in asked}
        for process in asked:
            process.frames.send(pack(Kind.STEP, batch))
        self._given_at = monotonic()
        self.state, self._due = "busy", self._given_at + self.times.response

    def start(self, forks: ForkServer, selector: selectors.BaseSelector) -> None:
        """Start its processes. Raises OSError if there is nobody to fork them."""
        self.starts += 1
        port = _free_port() if self.place.ranks > 1 else 0
        nothing = os.open(os.devnull, os.O_RDONLY)
        self.state, self._due = "starting", monotonic() + self.times.startup
        try:
            for rank in range(self.place.ranks):
                process = forks.fork(rank, self.place.threads, nothing)
                self._processes.append(process)
                selector.register(process.frames.connection, selectors.EVENT_READ, self)
                process.frames.send(pack(Kind.START, self._order(rank, port)))
        finally:
            os.close(nothing)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have the selector wake for what comes, and for room for what is unsent."""
        for process in self._processes:
            process.frames.watch(selector)

    def hear(self, selector: selectors.BaseSelector) -> None:
        """Take what has come from its processes, and see whether they are late or gone."""
        for process in self._processes:
            lives = process.frames.exchange()
            try:
                failed = self._read(process)
            except ValueError as error:  # msgspec's own are such too
                return self.lose(selector, f"{self._who(process)} sent what can't be read: {error}")
            if not lives or failed is not None:
                cause = f"{failed.kind}: {failed.text}" if failed is not None else "\n".join(process.epitaph()).strip()
                return self.lose(selector, f"{self._who(process)} {'failed with ' if failed else ''}{cause}")
            if process.overslept(STOPPED):
                return self.lose(selector, f"{self._who(process)} has been stopped for {STOPPED:g} s")
        if self.state == "starting" and all(process.ready and process.pid for process in self._processes):
            self.state, self.starts, self.ever_ready = "ready", 0, True
        late = monotonic() >= self._due
        if self.state == "starting" and late:
            return self.lose(selector, f"was not ready within {self.times.startup:g} s (startupTimeout)")
        if self.state == "busy" and late:
            ranks = ", ".join(map(str, sorted(self._left)))
            why = f"gave no answer within {self.times.response:g} s (responseTimeout)"
            if self._failed:
                why = f"did not finish what another rank has failed at; rank {ranks} hung"
            return self.lose(selector, why)
        return None

    def lose(self, selector: selectors.BaseSelector, cause: str) -> None:
        """Kill what is left of it, fail its batch, and say when it starts again."""
        if self.starts == 0:
            self._lost_at = monotonic()
        self.cause = cause
        log.warning("%s, worker %d: %s", self.stored.name, self.number, cause)
        self.end(selector, f"the worker {cause}", 500)
        self.state, self._due = "waiting", monotonic() + PAUSES[min(self.starts, len(PAUSES) - 1)]
        if monotonic() - self._lost_at > self.times.retry:
            self.state = "dead"

    def end(self, selector: selectors.BaseSelector, why: str, status: int) -> None:
        """Kill its processes; its batch, if it has one, hears why."""
        processes, self._processes = self._processes, []
        for process in processes:
            selector.unregister(process.frames.connection)
        end(processes, 0.0)
        if self._fail is not None and not self._failed:
            self._fail(why, status)
        self._batch, self._deliver, self._fail = None, None, None

    def _read(self, process: Process) -> Failed | None:
        """Take all that a process has sent; what has ended it, if it says so."""
        failed = None
        while (frame := process.frames.take()) is not None:
            kind, payload = frame
            if kind is Kind.READY:
                process.ready = True
            elif kind is Kind.FAILED:
                failed = msgspec.msgpack.decode(payload, type=Failed)
                log.warning("%s, worker %d: %s", self.stored.name, self.number, failed.trace.strip())
            else:
                self._news(process, msgspec.msgpack.decode(payload, type=Reply))
        return failed

    def _news(self, process: Process, reply: Reply) -> None:
        for name, unit, value in reply.metrics:
            self.observe(name, unit, value)
            if name == "PredictionTime" and process.rank == 0:
                self.observe("WorkerThreadTime", "ms", (monotonic() - self._given_at) * 1e3 - value)
        if self._batch is None or reply.number != self._batch.number:
            return
        assert self._deliver is not None
        assert self._fail is not None
        if reply.error and not self._failed:
            self._failed = True
            self._fail(f"{self._who(process)}: {reply.error}" if self.place.ranks > 1 else reply.error, reply.status)
            self._due = monotonic() + GRACE
        elif process.rank == 0 and not self._failed:
            self._due = monotonic() + self.times.response
            if reply.last:
                self._last = reply.answers
            else:
                self._deliver(reply.answers, False)
        if reply.last:
            self._left.discard(process.rank)
        if not self._left:
            if self._last is not None and not self._failed:
                self._deliver(self._last, True)
            self._batch, self._deliver, self._fail, self.state = None, None, None, "ready"

    def _order(self, rank: int, port: int) -> Start:
        gpus, ranks = self.place.gpus, self.place.ranks
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        if ranks > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
            environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        stored = self.stored
        assert stored.handler is not None
        return Start(
            name=stored.name,
            folder=str(stored.folder.resolve()),
            handler=stored.handler,
            manifest=json.dumps(stored.manifest.document).encode(),
            config=json.dumps(stored.settings.document).encode(),
            batch_size=stored.frontend.batch_size or 1,
            gpu=rank if gpus else None,
            environment=environment,
        )

    def _who(self, process: Process) -> str:
        return f"rank {process.rank}" if self.place.ranks > 1 else "process"


def _free_port() -> int:
    """A port of the loopback interface that is free at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
