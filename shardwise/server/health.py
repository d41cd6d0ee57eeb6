"""How the server is: /health and its two narrower forms, /metrics, and what the log is told of replicas."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse

from shardwise.engine import Engine
from shardwise.runtime.executor import RankFailure
from shardwise.server.deps import Deps
from shardwise.server.service import Service

log = logging.getLogger("shardwise")

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: {"description": "not at the moment; the state says why"}}


def router(deps: Deps) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/health", responses=UNAVAILABLE)
    async def health() -> JSONResponse:
        """200 while every replica runs and new requests are let in."""
        return _answer(deps.service, deps.service.state == "ok")

    @routes.get("/health/ready", responses=UNAVAILABLE)
    async def ready() -> JSONResponse:
        """The same: should requests be sent here?"""
        return _answer(deps.service, deps.service.state == "ok")

    @routes.get("/health/live", responses=UNAVAILABLE)
    async def live() -> JSONResponse:
        """200 while this process can still get well by itself: a new one would do no better."""
        return _answer(deps.service, deps.service.state != "dead")

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Figures for Prometheus."""
        return PlainTextResponse(deps.service.metrics.render(deps.service), media_type=METRICS_TYPE)

    return routes


def _answer(service: Service, fine: bool) -> JSONResponse:
    return JSONResponse(state(service), 200 if fine else 503)


def state(service: Service) -> dict[str, Any]:
    """The state of the layout: whoever may ask for the health may know it, so it names no paths and no prompts."""
    admission = service.admission
    return {
        "status": service.state,
        "queue": {"open": service.num_open, "waiting": admission.num_waiting, "tokens": admission.waiting_tokens},
        "replicas": [_replica(engine) for engine in service.replicas.engines],
    }


def _replica(engine: Engine) -> dict[str, Any]:
    failure = engine.failure
    return {
        "ready": engine.ready,
        "failures": engine.num_failures,
        "last_failure": None if failure is None else {"rank": failure.rank, "kind": _kind(failure)},
        "running": engine.scheduler.num_running,
        "waiting": engine.scheduler.num_waiting,
    }


def _kind(failure: RankFailure) -> str:
    return failure.kind or ("crashed" if failure.own else "lost")


class Watch:
    """Tells the log when a replica's ranks fail, and when there are ranks again. `look` now and then."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self._known: dict[Engine, tuple[int, bool]] = {}

    def look(self) -> None:
        """Tell what is new."""
        for number, engine in enumerate(self.engines):
            now, before = (engine.num_failures, engine.ready), self._known.get(engine, (0, True))
            self._known[engine] = now
            failure = engine.failure
            if failure is not None and now[0] > before[0]:
                about = {"replica": number, "rank": failure.rank, "kind": _kind(failure), "times": now[0]}
                log.error("a replica has failed: %s", failure, extra={"fields": about})
            if now[1] and now != before:
                log.info("a replica is ready again", extra={"fields": {"replica": number}})
