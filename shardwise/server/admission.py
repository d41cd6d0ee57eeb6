"""Who may come in, who is next, and when to come back: bounds of the queue, its time-outs, and Retry-After.

Plain code for one thread: knows requests only by what they cost, and neither engines nor HTTP.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.server.config import QUEUE_TOKENS
from shardwise.server.fair import FairQueue, Ticket

__all__ = ["Admission", "Refused", "Ticket"]

MEMORY = 30.0
"""Seconds of work after which a measurement counts e times less."""


class Refused(Exception):
    """Not accepted: 400, it can never fit; 429, not now; 503, nobody is accepted any more.

    ``retry_after`` is in whole seconds, at least 1, or None where it is of no use to try again.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after


@dataclass
class _Bound:
    """So many of something, for all keys together; ``sure`` of them are kept for each key in case it asks."""

    most: int
    num_keys: int

    def __post_init__(self) -> None:
        self.sure = self.most // (2 * self.num_keys)
        self.common = self.most - self.num_keys * self.sure
        """For whoever comes first."""
        self.total = 0
        self.held: dict[str, int] = {}
        self._beyond = 0
        """Taken from the common part."""

    @property
    def largest(self) -> int:
        """What one key can have at most."""
        return self.sure + self.common

    def fits(self, key: str, count: int) -> bool:
        """Is there room for so many more?"""
        held = self.held.get(key, 0)
        if self.total + count > self.most:
            return False  # implied by what follows, unless there are more keys than was said
        return self._beyond + self._excess(held + count) - self._excess(held) <= self.common

    def add(self, key: str, count: int) -> None:
        """Take so many, or give them back if below 0."""
        held = self.held.pop(key, 0)
        self._beyond += self._excess(held + count) - self._excess(held)
        self.total += count
        if held + count:
            self.held[key] = held + count

    def _excess(self, held: int) -> int:
        return max(0, held - self.sure)


class Admission:
    """A bounded queue of requests, and the count of those that run.

    ``max_requests`` continuations and ``max_tokens`` tokens (None: QUEUE_TOKENS) may be waiting or running. Where
    ``num_keys`` above 1 share it, half of both is divided among the keys and each is sure of its part, whatever the
    others ask for. ``queue_timeout`` is in seconds.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int | None,
        queue_timeout: float,
        clock: Callable[[], float] = time.monotonic,
        num_keys: int = 1,
    ) -> None:
        self._parts = _Bound(max_requests, max(1, num_keys))
        self._tokens = _Bound(QUEUE_TOKENS if max_tokens is None else max_tokens, max(1, num_keys))
        self._queue_timeout = queue_timeout
        self._clock = clock
        self._queue = FairQueue()
        self._waiting: OrderedDict[Ticket, None] = OrderedDict()
        """In order of arrival."""
        self._running: set[Ticket] = set()
        self._num_waiting = 0
        self._waiting_tokens = 0
        self._next_number = 0
        self._closed = False
        self._ended_tokens = self._ended_seconds = self._ended_at = 0.0
        """What ended requests might have needed and how long they ran, in all; the past counts less and less."""

    @property
    def num_waiting(self) -> int:
        """Continuations that wait."""
        return self._num_waiting

    @property
    def waiting_tokens(self) -> int:
        """Tokens that these may need."""
        return self._waiting_tokens

    @property
    def num_open(self) -> int:
        """Continuations that wait or run."""
        return self._parts.total

    @property
    def largest(self) -> tuple[int, int]:
        """Continuations and tokens that one key can have here at most."""
        return self._parts.largest, self._tokens.largest

    @property
    def retry_after(self) -> int:
        """Whole seconds in which, as fast as of late, all that is here will be done; at least 1.

        Requests in the queue are measured by what they may need, and so is how long others ran: so it does not matter
        if most need less. By Little's law, of as many that run at a time as do now. No more than the queue's time
        limit, after which none of them waits.
        """
        if not self._ended_tokens:
            return 1
        ahead = self._waiting_tokens + (self._tokens.total - self._waiting_tokens) / 2  # what runs is half done
        seconds = ahead * self._ended_seconds / self._ended_tokens / max(1, self._parts.total - self._num_waiting)
        return max(1, math.ceil(min(seconds, self._queue_timeout)))

    def check(self, cost: int = 1, parts: int = 1, *, key: str) -> None:
        """Raise Refused unless a request of so many tokens and continuations, at least one of each, is accepted now."""
        if self._closed:
            raise Refused(503, "the server accepts no more requests", self.retry_after)
        for bound, count, what in ((self._parts, parts, "continuations"), (self._tokens, cost, "tokens")):
            if count > bound.largest:
                raise Refused(400, f"the request needs {count} {what}; the server takes {bound.largest} at most")
        if not (self._parts.fits(key, parts) and self._tokens.fits(key, cost)):
            raise Refused(429, "too many requests are waiting; try again later", self.retry_after)

    def enter(self, cost: int, parts: int, *, key: str, priority: int) -> Ticket:
        """Accept a request of so many tokens and continuations, or raise Refused."""
        self.check(cost, parts, key=key)
        self._parts.add(key, parts)
        self._tokens.add(key, cost)
        ticket = Ticket(cost, parts, key, priority, self._clock(), number=self._next_number)
        self._next_number += 1
        self._queue.add(ticket)
        self._waiting[ticket] = None
        self._num_waiting += parts
        self._waiting_tokens += cost
        return ticket

    def take(self, room: int) -> list[Ticket]:
        """The next to start, while there is ``room`` for continuations.

        The last may have more of them than the room that is left: else one with more than there ever is would block
        all others. The key with the least service first, and of its own requests the lowest priority number.
        """
        taken: list[Ticket] = []
        while room > 0 and (ticket := self._queue.take()) is not None:
            ticket.started = self._clock()
            self._forget_waiting(ticket)
            self._running.add(ticket)
            taken.append(ticket)
            room -= ticket.parts
        return taken

    def expire(self) -> list[Ticket]:
        """Remove those that have waited for longer than the time limit."""
        expired: list[Ticket] = []
        before = self._clock() - self._queue_timeout
        while self._waiting and (oldest := next(iter(self._waiting))).entered < before:
            self.leave(oldest)
            expired.append(oldest)
        return expired

    def leave(self, ticket: Ticket, tokens: int = 0) -> None:
        """It has ended, and has taken so many tokens, prompts included; or it is withdrawn. Harmless when repeated."""
        if ticket in self._waiting:
            self._forget_waiting(ticket)
            self._queue.remove(ticket)
        elif ticket in self._running:
            self._running.remove(ticket)
            self._queue.settle(ticket, tokens)
            self._measure(ticket)
        else:
            return
        self._parts.add(ticket.key, -ticket.parts)
        self._tokens.add(ticket.key, -ticket.cost)

    def close(self) -> None:
        """Refuse all that comes from now on."""
        self._closed = True

    def _forget_waiting(self, ticket: Ticket) -> None:
        del self._waiting[ticket]
        self._num_waiting -= ticket.parts
        self._waiting_tokens -= ticket.cost

    def _measure(self, ticket: Ticket) -> None:
        assert ticket.started is not None
        now = self._clock()
        fade = math.exp((self._ended_at - now) / MEMORY)
        self._ended_seconds = self._ended_seconds * fade + (now - ticket.started) * ticket.parts
        self._ended_tokens = self._ended_tokens * fade + ticket.cost
        self._ended_at = now
