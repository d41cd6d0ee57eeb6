"""A model of the store on engines of its own: its replicas are loaded, scaled, drained and ended here.

Knows one version of one model, and workers as replicas of its layout; nothing of routes and of what is asked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from shardwise.engine import Engine
from shardwise.open import Opened, one_more, open_model
from shardwise.runtime.executor import Executor
from shardwise.runtime.launch import RunPlan, begin_replica, plan_run
from shardwise.server.admission import Admission
from shardwise.server.config import ServerConfig
from shardwise.server.deps import Deps
from shardwise.server.health import Watch
from shardwise.server.metrics import Metrics, resident_bytes
from shardwise.server.service import Service
from shardwise.server.store.answers import predict
from shardwise.server.store.apart import apart
from shardwise.server.store.errors import told
from shardwise.server.store.figures import Tally
from shardwise.store.stored import StoredModel

Begin = Callable[[RunPlan, int], Executor]
"""Starts the ranks of one replica, which need not be ready then."""
LOOK = 0.25
"""Seconds between looks at ranks that load."""
PAUSE = 0.05
"""Seconds between looks at a replica that is to go and still has work."""

log = logging.getLogger("shardwise")


class Limited(Protocol):
    """Something that may only take so long."""

    def look(self) -> None:
        """End it if it has taken longer."""


class Abandoned(Exception):
    """It is to be unregistered, and so not to be loaded any more."""


class EngineModel:
    """`load` it once, then `scale` as you like; in the end `drain` and `close`. For the loop that it is loaded on.

    ``given`` are settings of EngineConfig that win over the model's own.
    """

    def __init__(
        self,
        stored: StoredModel,
        config: ServerConfig,
        tally: Tally,
        given: Mapping[str, Any],
        *,
        generation_config: bool = True,
        begin: Begin = begin_replica,
    ) -> None:
        self.stored = stored
        self.tally = tally
        self.progress = ""
        """How far it has loaded, in words."""
        self.deps: Deps | None = None
        """None until it has loaded."""
        self.routes: ASGIApp | None = None
        """OpenAI's routes over it, once they have been asked for."""
        self.answers: set[Limited] = set()
        """Requests that are being answered."""
        self._config = config
        self._given = given
        self._generation_config = generation_config
        self._begin = begin
        self._abandoned = threading.Event()
        self._opened: Opened | None = None
        self._watch = Watch(())
        self._places: dict[Engine, tuple[int, float]] = {}
        """Of each replica its number, and when it was ready, in seconds since 1970."""

    async def load(self, workers: int) -> None:
        """Raises ValueError for what cannot be, LoadError, RankFailure, OSError and Abandoned; nothing is left then."""
        opened = await apart(lambda: self._open(workers), f"loading {self.tally.name}")
        config, limits = self._config, self.stored.limits
        admission = Admission(
            config.max_queue_requests,
            config.max_queue_tokens,
            limits.queue_timeout or config.queue_timeout,
            num_keys=max(1, len(config.api_keys)),
        )
        service = Service(opened.replicas, admission, Metrics(self.tally.name), most=opened.plan.engine.max_num_seqs)
        self._opened = opened
        self._know(list(enumerate(opened.replicas.engines)), opened.load_s)
        service.start()
        self.deps = Deps(
            config=config,
            service=service,
            intake=opened.intake,
            defaults=opened.defaults,
            model_names=(self.tally.name,),
            max_model_len=opened.plan.max_model_len,
            created=int(time.time()),
        )

    async def scale(self, workers: int) -> None:
        """Have so many replicas, at least one; what they have accepted is finished by those that go.

        Raises ValueError, RankFailure and OSError where more can't be started, and those that run go on.
        """
        assert self._opened is not None
        assert self.deps is not None
        assert workers > 0
        opened, service = self._opened, self.deps.service
        engines = list(service.replicas.engines)
        if workers > len(engines):
            began = time.monotonic()
            taken = {self._places[engine][0] for engine in engines}
            places = [at for at in range(workers) if at not in taken][: workers - len(engines)]
            grown, started = await apart(lambda: self._grow(opened, workers, places), f"scaling {self.tally.name}")
            self._opened = grown
            new = [(at, one_more(grown, executor, at)) for at, executor in zip(places, started, strict=True)]
            self._know(new, time.monotonic() - began)
            await service.change(lambda replicas: replicas.engines.extend(engine for _, engine in new))
        leaving = sorted(engines, key=lambda engine: (engine.ready, -self._places[engine][0]))
        leaving = leaving[: max(0, len(engines) - workers)]
        while leaving and not self._abandoned.is_set():
            asked = leaving
            gone, leaving = await service.change(lambda replicas: replicas.retire(asked, workers))  # noqa: B023
            for engine in gone:
                await asyncio.to_thread(engine.executor.close)
                self._forget(engine)
            if leaving:
                await asyncio.sleep(PAUSE)

    def capacity(self, *, ready: bool) -> int:
        """Sequences that can run at once, on all replicas or on those that have their ranks."""
        assert self._opened is not None
        num = self.num_workers if ready or self.deps is None else len(self.deps.service.replicas.engines)
        return num * self._opened.plan.engine.max_num_seqs

    def tick(self) -> None:
        """To be called now and then."""
        for answer in list(self.answers):
            answer.look()
        if self.deps is not None:
            self.deps.service.tick()
            self._watch.look()

    @property
    def failure(self) -> str:
        """Why there are no ranks and no way to get any; empty while there are."""
        service = None if self.deps is None else self.deps.service
        return "" if service is None or service.failure is None else str(service.failure)

    @property
    def num_workers(self) -> int:
        """Replicas that are ready to run."""
        return 0 if self.deps is None else sum(engine.ready for engine in list(self.deps.service.replicas.engines))

    @property
    def pending(self) -> int:
        """Requests that are accepted and not done."""
        return 0 if self.deps is None else self.deps.service.num_open

    async def predict(self, request: Request) -> Response:
        """Answer a request with the text that its body asks for. Raises StoreError."""
        return await predict(self, request)

    def workers(self) -> list[dict[str, Any]]:
        """Each replica, in the words of TorchServe's describe."""
        return [] if self.deps is None else [self._worker(each) for each in list(self.deps.service.replicas.engines)]

    def abandon(self) -> None:
        """Stop loading."""
        self._abandoned.set()

    async def drain(self, timeout: float) -> None:
        """Refuse what comes and finish what is there, within ``timeout`` seconds."""
        if self.deps is not None and not self.failure:
            await self.deps.service.drain(timeout)

    async def close(self) -> None:
        """End all ranks; harmless when repeated."""
        self.abandon()
        deps, self.deps, self.routes = self.deps, None, None
        if deps is not None:
            await deps.service.stop()

    def _open(self, workers: int) -> Opened:
        plan = self.stored.plan(workers, self._given)
        for note in plan.notes:
            log.info("%s: %s", self.tally.name, note)

        def start(made: RunPlan, _: object) -> list[Executor]:
            return self._start(made, range(made.engine.layout.dp))

        self.progress = "reading the model's files"
        return open_model(plan.model, plan.engine, generation_config=self._generation_config, start=start)

    def _grow(self, opened: Opened, workers: int, places: Sequence[int]) -> tuple[Opened, list[Executor]]:
        """The same model on a layout that has these places, too, and the ranks for them. Raises ValueError, as well."""
        engine, layout = opened.plan.engine, opened.plan.engine.layout
        plan_run(opened.source, replace(self.stored.plan(workers, self._given).engine, device=opened.plan.device))
        engine = replace(engine, layout=replace(layout, dp=max(layout.dp, *(at + 1 for at in places))))
        grown = opened._replace(plan=replace(opened.plan, engine=engine))
        return grown, self._start(grown.plan, places)

    def _start(self, plan: RunPlan, places: Iterable[int]) -> list[Executor]:
        """The ranks of some replicas, side by side. Raises RankFailure, and Abandoned; then none is left running."""
        executors: list[Executor] = []
        try:
            executors.extend(self._begin(plan, at) for at in places)
            while waiting := [each for each in executors if not each.ready]:
                self.progress = f"{len(executors) - len(waiting)} of {len(executors)} workers are ready"
                if self._abandoned.is_set():
                    raise Abandoned
                with selectors.DefaultSelector() as selector:
                    for fd in {fd for each in waiting for fd in each.waitables()}:
                        selector.register(fd, selectors.EVENT_READ)
                    selector.select(LOOK)
                for each in waiting:
                    each.check()
        except BaseException:
            for each in executors:
                each.close()
            raise
        self.progress = ""
        return executors

    def _know(self, engines: Iterable[tuple[int, Engine]], seconds: float) -> None:
        for at, engine in engines:
            self.tally.load_s[str(at)] = seconds
            self._places[engine] = at, time.time()
            self._watch.engines.append(engine)

    def _forget(self, engine: Engine) -> None:
        at, _ = self._places.pop(engine)
        self.tally.load_s.pop(str(at), None)
        self._watch.engines.remove(engine)
        if self.deps is not None:
            self.deps.service.metrics.forget(engine)

    def _worker(self, engine: Engine) -> dict[str, Any]:
        figures = [each for each in engine.executor.figures if each]
        pids = [int(each.get("pid", os.getpid())) for each in figures]
        at, since = self._places[engine]
        gpu = self._opened is not None and self._opened.plan.device == "cuda"
        return {
            "id": str(at),
            "startTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since)),
            "status": "READY" if engine.ready else "UNLOADING" if engine.lost else "LOADING",
            "memoryUsage": sum(resident_bytes(pid) or 0 for pid in pids),
            "pid": pids[0] if pids else 0,
            "pids": pids,
            "gpu": gpu,
            "gpuUsage": "N/A",
            "failures": engine.num_failures,
            "lastFailure": "" if engine.failure is None else told(engine.failure),
        }
