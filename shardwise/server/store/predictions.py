"""The routes of the main port: predictions, health, metrics, and a description of all of them.

Knows routes and their parameters; who answers is the registry's business.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from shardwise.server.health import METRICS_TYPE
from shardwise.server.health import state as state_of
from shardwise.server.store.engines import EngineModel
from shardwise.server.store.errors import StoreError
from shardwise.server.store.figures import Page
from shardwise.server.store.registry import Registry
from shardwise.server.store.served import Served

FINE = ("ok", "degraded")


def router(registry: Registry) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.put("/predictions/{name}")  # which is what `curl -T` sends
    @routes.post("/predictions/{name}")
    async def predict(name: str, request: Request) -> Response:
        """Ask the default version of a model."""
        return await _predict(registry.find(name), request)

    @routes.put("/predictions/{name}/{version}")
    @routes.post("/predictions/{name}/{version}")
    async def predict_version(name: str, version: str, request: Request) -> Response:
        """Ask a version of a model."""
        return await _predict(registry.find(name, version), request)

    @routes.get("/ping")
    async def ping() -> JSONResponse:
        """TorchServe's health: 200 while every model has its workers."""
        fine = registry.is_healthy and not registry.draining
        return JSONResponse({"status": "Healthy" if fine else "Unhealthy"}, 200 if fine else 500)

    @routes.get("/health")
    async def health() -> JSONResponse:
        """200 while requests are let in: a model that has failed keeps nobody from the others."""
        return _health(registry, registry.state in FINE)

    @routes.get("/health/ready")
    async def ready() -> JSONResponse:
        """The same: should requests be sent here?"""
        return _health(registry, registry.state in FINE)

    @routes.get("/health/live")
    async def live() -> JSONResponse:
        """200 while this process can do anything at all."""
        return _health(registry, True)

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Figures for Prometheus, under TorchServe's names and ours."""
        return PlainTextResponse(page(registry), media_type=METRICS_TYPE)

    return routes


def describe_routes(app: FastAPI) -> None:
    """Have ``OPTIONS /`` and ``GET /api-description`` tell what an app's routes are, as TorchServe does."""

    async def description(_: Request) -> JSONResponse:
        return JSONResponse(app.openapi())

    app.add_route("/", description, methods=["OPTIONS"], include_in_schema=False)
    app.add_route("/api-description", description, methods=["GET"], include_in_schema=False)


def page(registry: Registry) -> bytes:
    """All figures, in Prometheus's text format."""
    served = list(registry)
    ours = []
    for each in served:
        if isinstance(each.model, EngineModel) and each.model.deps is not None:
            service = each.model.deps.service
            ours.append((each.tally, service.metrics.families(service)))
    return Page(registry.requests, [each.tally for each in served], ours).render()


async def _predict(served: Served, request: Request) -> Response:
    if served.stored.style is not None and request.query_params:
        name = next(iter(request.query_params))[:100]
        raise StoreError(400, f"unknown parameter {name!r}: what is asked for is said in the body")
    return await served.predict(request)


def _health(registry: Registry, fine: bool) -> JSONResponse:
    return JSONResponse({"status": registry.state, "models": [_model(each) for each in registry]}, 200 if fine else 503)


def _model(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": served.tally.name,
        "version": served.tally.version,
        "status": served.state,
        "workers": 0 if served.model is None else served.model.num_workers,
    }
    if isinstance(served.model, EngineModel) and served.model.deps is not None:
        found |= {name: value for name, value in state_of(served.model.deps.service).items() if name != "status"}
    return found
