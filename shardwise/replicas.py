"""Data parallelism: engines that share nothing, the choice of one for each request, and what is left when one fails."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Sequence
from time import monotonic

from shardwise.engine import Engine, Output
from shardwise.runtime.executor import RankFailure
from shardwise.schedule.sequence import Request

LOOK = 0.2
"""Seconds between looks at engines of which nothing comes: their ranks may be late, or stopped."""


class Replicas:
    """One or more engines as a single one."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self._retiring: list[Engine] = []
        self._home: dict[int, Engine] = {}
        self._look_at = 0.0

    def add(self, request: Request) -> None:
        """Accept a request on the engine where it costs least: fewest tokens in flight, less what is cached there.

        Engines whose ranks are being replaced come last. Raises ValueError with the remedy if it can never run.
        """
        engine = self.engines[0]
        if len(self.engines) > 1:  # else there is no choice that would be worth hashing the prompt for
            engine = min(
                self.engines,
                key=lambda engine: (
                    engine in self._retiring,
                    not engine.ready,
                    engine.load - engine.scheduler.cached_tokens(request.prompt, request.salt),
                ),
            )
        engine.add(request)
        self._home[request.id] = engine

    def abort(self, request_id: int) -> None:
        """Forget a request; harmless if it is already done."""
        engine = self._home.pop(request_id, None)
        if engine is not None:
            engine.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Is any accepted request unfinished?"""
        return bool(self._home)

    def retire(self, leaving: Sequence[Engine], least: int) -> tuple[list[Engine], list[Engine]]:
        """Give these engines nothing new and let go of each that has no work, while there are more than ``least``.

        Returns those that are gone, whose ranks are to be closed, and those to ask for again until there are none:
        where others were lost meanwhile, fewer need to go.
        """
        there = [engine for engine in leaving if engine in self.engines]
        there = self._retiring = there[: max(0, len(self.engines) - least)]
        for engine in [engine for engine in there if not (engine.has_work or engine.in_flight)]:
            there.remove(engine)
            self.engines.remove(engine)
        return [engine for engine in leaving if engine not in self.engines], list(there)

    def step(self, wake: int | None = None) -> list[Output]:
        """Keep every engine busy and return the news of those that have some; also for idle ones, whose ranks may fail.

        Returns without news when the descriptor ``wake`` is readable, and now and then while there is nothing to do.
        Raises RankFailure where no ranks are left and none can be started.
        """
        outputs: list[Output] = []
        for engine in tuple(self.engines):
            if not engine.ready:
                outputs += self._guard(engine, engine.tend)
            if engine.ready:
                outputs += self._guard(engine, engine.fill)
        busy = [engine for engine in self.engines if engine.in_flight]
        if len(self.engines) == len(busy) == 1 and wake is None:
            outputs += self._guard(busy[0], busy[0].collect)  # waits by itself, with its deadline
        elif not outputs:
            found = self._wait(wake)
            look = monotonic() >= self._look_at
            if look:
                self._look_at = monotonic() + LOOK
            for engine in tuple(self.engines):
                if engine in found and engine.in_flight:
                    outputs += self._guard(engine, engine.collect)
                elif engine in found or look:
                    outputs += self._guard(engine, engine.tend)
        for output in outputs:
            if output.finish_reason is not None:
                self._home.pop(output.request_id, None)
        return outputs

    def close(self) -> None:
        """End all ranks."""
        for engine in self.engines:
            engine.executor.close()

    def _wait(self, wake: int | None) -> set[Engine | None]:
        """Engines of which something has come, None standing for ``wake``; empty after a moment without."""
        with selectors.DefaultSelector() as selector:
            if wake is not None:
                selector.register(wake, selectors.EVENT_READ)
            for engine in self.engines:
                for fd in engine.waitables():
                    selector.register(fd, selectors.EVENT_READ, engine)
            return {key.data for key, _ in selector.select(LOOK)}

    def _guard(self, engine: Engine, act: Callable[[], list[Output] | None]) -> list[Output]:
        """Act on an engine; where its ranks fail over that, its requests go on, by other engines if there are some.

        Requests that may have killed the ranks themselves stay, to harm nobody else.
        """
        try:
            return act() or []
        except RankFailure as failure:
            outputs = engine.recover(failure)
            for output in outputs:
                del self._home[output.request_id]
            if engine.lost:
                if len(self.engines) == 1:
                    raise
                self.engines.remove(engine)
                engine.executor.close()
            rest = [other for other in self.engines if other is not engine]
            others = [other for other in rest if other.ready] or (rest if engine.lost else [])
            if others and (engine.lost or not failure.own):
                for number in [number for number, home in self._home.items() if home is engine]:
                    self._home[number] = min(others, key=lambda other: other.load)
                    engine.move(number, self._home[number])
            return outputs
