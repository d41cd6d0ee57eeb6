"""The order in which waiting requests start: fair between keys, then by priority among a key's own, then as they came.

Knows neither bounds nor time. Start-time fair queueing (Goyal et al. 1996) in tokens: a key's *service* is what it was
given so far, and the key with the least goes first. A key is charged at the start of a request for all that this may
need, and what was not needed is given back at its end. Whoever comes anew begins where the others are by then: idleness
earns nothing. Priority is what a client says of itself, so it moves nobody else's requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Any

MAX_IDLE = 1024
"""Keys without requests whose lead is remembered."""


@dataclass(eq=False)
class Ticket:
    """A request in the queue, or out of it and running. Its ``cost`` is in tokens, its times in seconds of a clock."""

    cost: int
    parts: int
    """Continuations."""
    key: str
    """Whose it is."""
    priority: int
    """Of the key's own requests the lowest number goes first."""
    entered: float
    stream: Any = None
    """Whatever its owner wants to find here."""
    number: int = 0
    """Its place in the order of arrival."""
    started: float | None = None


@dataclass
class _Lane:
    """What one key has."""

    key: str
    service: int = 0
    waiting: list[tuple[int, int, Ticket]] = field(default_factory=list)
    """Sorted: priority, number and the ticket itself."""
    num_running: int = 0


class FairQueue:
    """Tickets are added, then removed or taken, and what was taken is settled once.

    Each costs a few steps and binary searches. Of keys without requests nothing is kept but how far they are ahead of
    the others, until these have caught up or nobody is left.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._order: list[tuple[int, int, str]] = []
        """Sorted: of each lane with waiting tickets the service, the first ticket's number, and the key."""
        self._idle: list[tuple[int, str]] = []
        """Sorted: service and key of lanes without requests that are still ahead of the others."""
        self._reached = 0
        """The service at which somebody was last taken."""
        self._num_open = 0
        """Tickets waiting or running."""

    def add(self, ticket: Ticket) -> None:
        """One more waits."""
        lane = self._lanes.setdefault(ticket.key, _Lane(ticket.key))
        if not lane.waiting and not lane.num_running:
            place = lane.service, lane.key
            at = bisect_left(self._idle, place)
            if self._idle[at : at + 1] == [place]:
                del self._idle[at]
        self._unlist(lane)
        if not lane.waiting:
            lane.service = max(lane.service, self._reached)
        insort(lane.waiting, (ticket.priority, ticket.number, ticket))
        self._num_open += 1
        self._list(lane)

    def take(self) -> Ticket | None:
        """The next to start, which is then running; None if nobody waits."""
        if not self._order:
            return None
        lane = self._lanes[self._order[0][2]]
        self._unlist(lane)
        ticket = lane.waiting.pop(0)[2]
        self._reach(lane.service)
        lane.service += ticket.cost
        lane.num_running += 1
        self._list(lane)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """One that waits goes away."""
        lane = self._lanes[ticket.key]
        self._unlist(lane)
        del lane.waiting[bisect_left(lane.waiting, (ticket.priority, ticket.number))]
        self._list(lane)
        self._close(lane)

    def settle(self, ticket: Ticket, tokens: int) -> None:
        """One that ran has ended, and has taken so many tokens in all."""
        lane = self._lanes[ticket.key]
        self._unlist(lane)
        lane.service -= max(0, ticket.cost - tokens)
        lane.num_running -= 1
        self._list(lane)
        self._close(lane)

    def _list(self, lane: _Lane) -> None:
        if lane.waiting:
            insort(self._order, (lane.service, lane.waiting[0][1], lane.key))

    def _unlist(self, lane: _Lane) -> None:
        if lane.waiting:
            del self._order[bisect_left(self._order, (lane.service, lane.waiting[0][1], lane.key))]

    def _close(self, lane: _Lane) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._lanes.clear()
            self._idle.clear()
            self._reached = 0
        elif not lane.waiting and not lane.num_running:
            insort(self._idle, (lane.service, lane.key))
            self._reach(self._idle[0][0] if len(self._idle) > MAX_IDLE else self._reached)

    def _reach(self, service: int) -> None:
        """The others have come this far: forget those that had been ahead and want nothing."""
        self._reached = max(self._reached, service)
        caught_up = bisect_left(self._idle, (self._reached + 1, ""))
        for _, key in self._idle[:caught_up]:
            del self._lanes[key]
        del self._idle[:caught_up]
