"""Data parallelism: engines that share nothing, and the choice of one for each request."""

from __future__ import annotations

import selectors
from collections.abc import Sequence

from shardwise.engine import Engine, Output
from shardwise.schedule.sequence import Request

IDLE_CHECK = 0.2
"""Seconds between looks at whether the ranks still live while nothing comes from them."""


class Replicas:
    """One or more engines as a single one."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self._home: dict[int, Engine] = {}

    def add(self, request: Request) -> None:
        """Accept a request on the engine where it costs least: fewest tokens in flight, less what is cached there.

        Raises ValueError with the remedy if it can never run.
        """
        engine = self.engines[0]
        if len(self.engines) > 1:  # else there is no choice that would be worth hashing the prompt for
            engine = min(
                self.engines,
                key=lambda engine: engine.load - engine.scheduler.cached_tokens(request.prompt, request.salt),
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

    def step(self) -> list[Output]:
        """Keep every engine busy and return the news of those that have some. Raises RankFailure."""
        for engine in self.engines:
            engine.fill()
        outputs = [output for engine in self._ready() for output in engine.collect()]
        for output in outputs:
            if output.finish_reason is not None:
                self._home.pop(output.request_id, None)
        return outputs

    def close(self) -> None:
        """End all ranks."""
        for engine in self.engines:
            engine.executor.close()

    def _ready(self) -> list[Engine]:
        """Engines whose next result has come; waits for at least one if any is in flight."""
        busy = [engine for engine in self.engines if engine.in_flight]
        if len(busy) <= 1:
            return busy  # collect waits by itself, with its deadline
        with selectors.DefaultSelector() as selector:
            for engine in busy:
                for fd in engine.executor.waitables():
                    selector.register(fd, selectors.EVENT_READ, engine)
            while not (found := selector.select(IDLE_CHECK)):
                for engine in self.engines:
                    engine.executor.check()
        ready = [key.data for key, _ in found]
        return [engine for engine in busy if engine in ready]
