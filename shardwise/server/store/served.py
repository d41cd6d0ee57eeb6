"""One registered version of a model: how many workers it is to have, how it fares, and its end.

Knows that a model is loaded, scaled and closed; not by what. Changes of one model come one after another, and those of
different models go on side by side.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from shardwise.runtime.executor import RankFailure
from shardwise.server.service import Cut
from shardwise.server.store.engines import Abandoned
from shardwise.server.store.errors import NO_WORKER, StoreError
from shardwise.server.store.figures import Tally
from shardwise.server.store.model import Model
from shardwise.store.custom import HandlerFailure
from shardwise.store.stored import StoredModel
from shardwise.weights.checkpoint import LoadError

FAULTS = (ValueError, LoadError, RankFailure, HandlerFailure, Cut, OSError)
"""What a model may raise while it is loaded or scaled; their texts are for operators."""
RETRY_AFTER = 2
"""Seconds after which a client may ask again for a model that is being loaded."""

T = TypeVar("T")

log = logging.getLogger("shardwise")


class Served:
    """A version and its present state: "STOPPED" without workers, "LOADING", "READY", "FAILED" or "UNLOADING"."""

    def __init__(
        self, url: str, stored: StoredModel, make: Callable[[StoredModel, Tally], Model], at_start: bool = False
    ) -> None:
        self.url = url
        self.stored = stored
        self.at_start = at_start
        self.tally = Tally(stored.name, stored.version)
        self.state = "STOPPED"
        self.failure = ""
        """Why it failed, or why it could not be scaled."""
        self.model: Model | None = None
        """None while it has no workers."""
        self._make = make
        self._check_workers = stored.check_workers
        """By the model's own maxWorkers, whatever has been asked for since."""
        self._bounds: tuple[int, int | None] = (0, None)
        """Least and most workers that it is to have."""
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    def scale(self, least: int, most: int | None) -> Awaitable[str]:
        """Have at least so many workers and at most so many others, from now on; returns what ends when it is so.

        That gives why it failed, or "". Raises ValueError for numbers that can't be.
        """
        if least < 0 or (most is not None and most < least):
            raise ValueError("max_worker cannot be less than min_worker.")
        self._check_workers(max(least, most or 0))
        self.reset(min_workers=least, max_workers=None if most is None else max(1, most))
        self._bounds = least, most
        return self._begin(self._reach())

    def reset(self, **values: Any) -> None:
        """Change settings that all handlers have; ValueError names one that can't be."""
        settings = self.stored.settings
        self.stored = replace(self.stored, settings=replace(settings, frontend=replace(settings.frontend, **values)))
        if self.model is not None:
            self.model.stored = self.stored

    async def predict(self, request: Request) -> Response:
        """Answer a request. Raises StoreError."""
        self.tally.num_requests += 1
        if self.state != "READY" or self.model is None:
            text = NO_WORKER.format(self.tally.name, self.tally.version)
            if self.state == "LOADING":
                text = f'Model "{self.tally.name}" Version {self.tally.version} is being loaded'
            raise StoreError(503, text, retry_after=RETRY_AFTER if self.state == "LOADING" else None)
        return await self.model.predict(request)

    def tick(self) -> None:
        """To be called now and then."""
        if self.model is None:
            return
        self.model.tick()
        if self.state == "READY" and self.model.failure:
            self._fail(self.model.failure)
            self._begin(self._give_up())

    @property
    def is_healthy(self) -> bool:
        """Has it the workers that it is to have?"""
        wanted = self.stored.limits.min_workers
        return wanted == 0 or (self.state == "READY" and self.model is not None and self.model.num_workers >= wanted)

    async def drain(self, timeout: float) -> None:
        """Refuse what comes and finish what is there, within ``timeout`` seconds."""
        self.state = "UNLOADING"
        if self.model is not None:
            self.model.abandon()
            await self.model.drain(timeout)

    async def close(self, timeout: float) -> None:
        """The end: drained, its processes gone, and its files too where they were unpacked."""
        await self.drain(timeout)
        async with self._lock:
            await self._drop()
        await asyncio.to_thread(self.stored.close)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _reach(self) -> str:
        """Bring the number of workers between the bounds that hold when its turn has come; returns why it failed."""
        async with self._lock:
            if self.state == "UNLOADING":
                return ""
            self.failure = ""
            least, most = self._bounds
            have = len(self.model.workers()) if self.model is not None and self.state == "READY" else 0
            wanted = max(least, have if most is None else min(have, most))
            try:
                if wanted == 0:
                    await self._stop()
                elif self.state != "READY" or self.model is None:
                    await self._load(wanted)
                else:  # as many may be there, and some of them dead
                    await self.model.scale(wanted)
            except Abandoned:
                pass
            except FAULTS as error:
                self._fail(str(error))
            except Exception as error:
                log.exception("%s could not be loaded or scaled", self.tally.name)
                self._fail(f"{type(error).__name__}: {error}")
            return self.failure

    async def _load(self, workers: int) -> None:
        old, self.model, self.state = self.model, self._make(self.stored, self.tally), "LOADING"
        try:
            if old is not None:
                await old.close()
            await self.model.load(workers)
        except BaseException:
            self.model = None
            if self.state == "LOADING":
                self.state = "FAILED"
            raise
        if self.state == "LOADING":
            self.state = "READY"
            fields = {"model": self.tally.name, "version": self.tally.version, "workers": workers}
            log.info("a model is ready", extra={"fields": fields})

    async def _stop(self) -> None:
        self.state = "STOPPED"
        if self.model is not None:
            await self.model.drain(float("inf"))
        await self._drop()

    async def _give_up(self) -> None:
        async with self._lock:
            if self.state == "FAILED":  # else what has failed was replaced meanwhile
                await self._drop()

    async def _drop(self) -> None:
        model, self.model = self.model, None
        if model is not None:
            await model.close()

    def _fail(self, failure: str) -> None:
        self.failure = failure
        if self.model is None or self.model.failure:
            self.state = "FAILED" if self.state != "UNLOADING" else self.state
        fields = {"model": self.tally.name, "version": self.tally.version}
        log.error("a model has failed: %s", failure, extra={"fields": fields})
