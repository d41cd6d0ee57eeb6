"""Requests to a custom handler while they wait: who is next, when a batch is due, who has waited for too long.

Knows clocks; nothing of workers. A queue is used by one thread at a time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from shardwise.store.handler import TEXT
from shardwise.store.manifest import load

log = logging.getLogger("shardwise")


class Busy(Exception):
    """A request is not taken now: no worker is free for it, too many wait, or none will ever be ready."""


class Piece(NamedTuple):
    """A piece of an answer."""

    content: bytes
    content_type: str
    status: int
    last: bool
    headers: dict[str, str]
    failed: bool = False
    """Is it a sentence of what went wrong? (A handler may give its own answers any status.)"""


class Request(NamedTuple):
    """What a handler gets: data by name ("body", or the parts of a form), headers, and a number for the logs."""

    data: dict[str, bytes | str]
    headers: dict[str, str]
    id: str

    def check(self) -> None:
        """Raise ValueError for a body that isn't the JSON it says."""
        kind = next((value for name, value in self.headers.items() if name.lower() == "content-type"), "")
        body = self.data.get("body")
        if kind.partition(";")[0].strip().lower() == "application/json" and isinstance(body, bytes):
            try:
                load(body)
            except ValueError as error:
                raise ValueError(f"the body {error}") from None


@dataclass(eq=False)
class Job:
    """A request on its way."""

    request: Request
    deliver: Callable[[Piece], None]
    since: float = field(default_factory=monotonic)
    started: float | None = None
    """When its turn came."""
    done: bool = False

    def cancel(self) -> None:
        """Nobody waits for it any more. (The batch that it is in goes on.)"""
        self.done = True

    def put(self, piece: Piece) -> None:
        """Hand on a piece, unless nobody waits."""
        if self.done:
            return
        self.done = piece.last
        try:
            self.deliver(piece)
        except Exception:  # whoever waits has gone wrong, which is no fault of the workers
            self.done = True
            log.exception("an answer could not be handed on")

    def fail(self, text: str, status: int) -> None:
        """End it with an error."""
        self.put(Piece(text.encode(errors="replace"), TEXT, status, True, {}, failed=True))


class Queue:
    """Batches of up to ``size`` requests, first come first served. Times are in seconds.

    A batch that isn't full waits for others until its first request has waited for ``delay``. No request waits for
    longer than ``limit``, if there is one.
    """

    def __init__(self, size: int, delay: float, limit: float | None) -> None:
        self._size = size
        self._delay = delay if size > 1 else 0.0
        self._limit = limit
        self._jobs: deque[Job] = deque()

    def __len__(self) -> int:
        self._jobs = deque(job for job in self._jobs if not job.done)
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """One more."""
        self._jobs.append(job)

    def take(self) -> list[Job]:
        """The next batch, if one is due."""
        waiting = len(self)
        if not waiting or (waiting < self._size and monotonic() < self._jobs[0].since + self._delay):
            return []
        taken = [self._jobs.popleft() for _ in range(min(self._size, waiting))]
        for job in taken:
            job.started = monotonic()
        return taken

    def expire(self) -> list[Job]:
        """Those that have waited for too long, taken out."""
        expired = []
        while len(self) and self._limit is not None and monotonic() >= self._jobs[0].since + self._limit:
            expired.append(self._jobs.popleft())
        return expired

    def clear(self) -> list[Job]:
        """All of them, taken out."""
        jobs, self._jobs = self._jobs, deque()
        return list(jobs)

    def dues(self, hungry: bool) -> list[float]:
        """When to look again, by the monotonic clock; ``hungry``: is there a worker for a batch that waits for more?"""
        if not len(self):
            return []
        first = self._jobs[0].since
        dues = [first + self._delay] if hungry else []
        return dues + ([first + self._limit] if self._limit is not None else [])
