"""The ranks of a map as the front sees them: given items, listened to, replaced when they die.

Knows items as lines and nothing of where they come from or go. A rank's death costs no item: what the rank had is given
out again, one by one, and the death counts against it. See `engine` for the same strikes.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from signal import SIGKILL, SIGTERM
from time import monotonic
from typing import NoReturn

import msgspec

from shardwise.mapping.config import MapConfig, Place
from shardwise.mapping.wire import Answer, Order, Post, Work, failure
from shardwise.runtime.executor import RankFailure
from shardwise.runtime.frames import Failed, Kind, pack
from shardwise.runtime.spawn import ForkServer, Process, end

COMMAND = (sys.executable, "-m", "shardwise.mapping.rank")
STRIKES = 4
"""With so many an item is given up: a death of the work's own (an exception, a crash) counts 2, one from outside (a
kill, a stop) 1. So an item falls with its second crash, and items that met a kill by chance go on."""
FALLS = 3
"""So often in a row a rank may die before it is ready."""
STOPPED = 5.0
"""Seconds that a rank may stay stopped."""
LOOK = 0.2
"""Seconds between looks at clocks and stopped ranks."""
POLITE = 1.0
"""Seconds that ranks get to end by themselves."""


@dataclass(eq=False)
class Item:
    """An item on its way."""

    index: int
    line: bytes
    strikes: int = 0
    deaths: int = 0
    """Of ranks that had it."""


@dataclass(eq=False)
class Seat:
    """A rank's place and whoever sits there."""

    place: Place
    process: Process | None = None
    items: list[Item] = field(default_factory=list)
    since: float = 0.0
    """When it was forked, or was given its items."""
    falls: int = 0


class Team:
    """Starts ranks at these places when built; closed, none is left.

    ``turn`` raises RankFailure when no rank can be had, and ValueError for a factory that can't be used as named.
    """

    def __init__(self, config: MapConfig, places: Sequence[Place]) -> None:
        self.restarts = 0
        self._config = config
        self._seats = [Seat(place) for place in places]
        self._again: deque[Item] = deque()
        self._answered: list[tuple[Item, Answer]] = []
        self._selector = selectors.DefaultSelector()
        self._order = Order(
            *(config.factory, json.dumps(dict(config.settings)).encode(), config.share, config.batch_size is not None),
            config.compile,
        )
        self._answers = msgspec.msgpack.Decoder(list[Answer])
        self._forks: ForkServer | None = None
        self._holder: Process | None = None
        self._held = Seat(Place(0, 1, "cpu", 1))
        self._ever_ready = False
        self._look_at = 0.0
        self._hold()

    @property
    def idle(self) -> bool:
        """Is nothing on its way?"""
        return not self._again and not any(seat.items for seat in self._seats)

    @property
    def hungry(self) -> bool:
        """Does a rank wait for items?"""
        return any(not seat.items and seat.process is not None and seat.process.ready for seat in self._seats)

    def fill(self, take: Callable[[int], list[Item]]) -> None:
        """Give every rank without work the next items; ``take(n)`` is asked for up to n of them."""
        for seat in self._seats:
            if seat.items or seat.process is None or not seat.process.ready:
                continue
            items = [self._again.popleft()] if self._again else take(self._config.batch_size or 1)
            if items:
                seat.items, seat.since = items, monotonic()
                work = Work([item.index for item in items], [item.line for item in items])
                seat.process.frames.send(pack(Kind.STEP, work))

    def turn(self, wake: int | None = None, timeout: float = LOOK) -> list[tuple[Item, Answer]]:
        """Wait a moment for something to happen, or for the descriptor ``wake``; what has been answered since."""
        for seat in self._everyone():
            if seat.process is not None:
                seat.process.frames.watch(self._selector)
        if wake is not None:
            self._selector.register(wake, selectors.EVENT_READ, None)
        try:
            ready = [key.data for key, _ in self._selector.select(0.0 if self._answered else timeout)]
        finally:
            if wake is not None:
                self._selector.unregister(wake)
        for seat in ready:
            if seat is not None and seat.process is not None:
                self._hear(seat, seat.process)
        if monotonic() > self._look_at:
            self._look_at = monotonic() + LOOK
            self._look()
        if self._held.process is None:
            self._hold()
        self._seat_ranks()
        answered, self._answered = self._answered, []
        return answered

    def close(self, grace: float = 0.0) -> None:
        """End all ranks, by themselves within ``grace`` seconds or else killed; harmless when repeated."""
        end([seat.process for seat in self._seats if seat.process is not None], grace)
        end([self._holder] if self._holder is not None else [], 0.0)
        self._seats, self._holder = [], None
        self._selector.close()
        if self._forks is not None:
            self._forks.close()

    def _everyone(self) -> list[Seat]:
        return [*self._seats, self._held]

    def _hold(self) -> None:
        """Start a holder, and a fork server where there is none."""
        if self._forks is None or not self._forks.alive:
            if self._forks is not None:
                self._forks.close()
            self._forks = ForkServer(COMMAND)
        try:
            self._holder = self._fork(self._held, None)
        except OSError:  # the fork server is going; the next turn starts another
            return
        self._holder.frames.send(pack(Kind.START, self._order))

    def _fork(self, seat: Seat, holder: Process | None) -> Process:
        assert self._forks is not None
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            seat.process = self._forks.fork(seat.place.rank, seat.place.threads, nothing, holder)
        finally:
            os.close(nothing)
        seat.since = monotonic()
        self._selector.register(seat.process.frames.connection, selectors.EVENT_READ, seat)
        return seat.process

    def _seat_ranks(self) -> None:
        """Fork a rank for every empty seat."""
        for seat in self._seats:
            if seat.process is None and self._holder is not None and self._holder.ready:
                try:
                    rank = self._fork(seat, self._holder)
                except OSError:  # the holder is going; its end is heard next
                    return
                place = seat.place
                rank.frames.send(pack(Kind.START, Post(place.rank, place.world, place.device, place.threads)))

    def _hear(self, seat: Seat, process: Process) -> None:
        lives = process.frames.exchange()
        failed: Failed | None = None
        while (frame := process.frames.take()) is not None:
            kind, payload = frame
            if kind is Kind.READY:
                process.ready, seat.falls = True, 0
                self._ever_ready = self._ever_ready or seat is not self._held
            elif kind is Kind.FAILED:
                failed = msgspec.msgpack.decode(payload, type=Failed)
            else:
                answers = self._answers.decode(payload)
                for said in [answer.said for answer in answers if answer.said]:
                    print(f"shardwise: rank {seat.place.rank}: {said}", file=sys.stderr)
                self._answered += zip(seat.items, answers, strict=True)
                seat.items = []
        if not lives or failed is not None:
            self._lost(seat, failed)

    def _look(self) -> None:
        """Whoever is late or stays stopped is killed."""
        now = monotonic()
        for seat in self._everyone():
            process = seat.process
            if process is None:
                continue
            if process.overslept(STOPPED):
                self._lost(seat, None, f"has been stopped for {STOPPED:g} s")
                continue
            if not process.ready and now - seat.since > self._config.startup_timeout:
                told = f"was not ready within {self._config.startup_timeout:g} s (--startup-timeout)"
                if not self._ever_ready:
                    self._fail(seat, told, "")
                self._lost(seat, None, told)
                continue
            limit = self._config.item_timeout if process.stopped_since is None else None
            if limit is not None and seat.items and now - seat.since > limit * len(seat.items):
                if len(seat.items) == 1:
                    told = f"took more than {limit:g} s (--item-timeout)"
                    self._answered.append((seat.items.pop(), failure("TimeoutError", told)))
                self._lost(seat, None, f"took more than {limit:g} s an item")

    def _lost(self, seat: Seat, failed: Failed | None, cause: str | None = None) -> None:
        """A process has died, or is killed now for this ``cause``; its items will be given out again."""
        process = seat.process
        assert process is not None
        seat.process = None
        self._selector.unregister(process.frames.connection)
        lines = ""
        if cause is None:
            cause, lines = process.epitaph()
        end([process], 0.0)
        own = failed is not None or process.status not in (None, -SIGKILL, -SIGTERM)
        kind = failed.kind if failed is not None else "RankFailure"
        told = failed.text if failed is not None else cause
        if not process.ready:
            seat.falls += 1
            if kind == "ValueError" and not self._ever_ready:
                raise ValueError(told)
            if (own and not self._ever_ready) or seat.falls == FALLS:
                self._fall(seat, failed, told, lines)
        self.restarts += seat is not self._held
        for item in reversed(seat.items):
            item.strikes += 2 if own else 1
            item.deaths += 1
            if item.strikes < STRIKES:
                self._again.appendleft(item)
            else:
                died = f"{item.deaths} ranks died of it; the last {told}"
                self._answered.append((item, failure(kind, told if failed is not None else died)))
        seat.items = []

    def _fall(self, seat: Seat, failed: Failed | None, told: str, lines: str) -> None:
        """A rank can't be had: the others go on, if there are any that could."""
        self._seats = [each for each in self._seats if each is not seat]
        if seat is self._held or not self._ever_ready or not self._seats:
            self._fail(
                seat, f"{failed.kind}: {told}" if failed is not None else told, failed.trace if failed else lines
            )
        print(f"shardwise: rank {seat.place.rank} can't be started again ({told}); the others go on", file=sys.stderr)

    def _fail(self, seat: Seat, cause: str, detail: str) -> NoReturn:
        what = f"importing {self._config.factory}: " if seat is self._held else f"building {self._config.factory}: "
        raise RankFailure(seat.place.rank, what + cause, detail=detail)
