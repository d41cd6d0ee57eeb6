"""The two applications of a store's server: the main port's and the manager's, each with its guard in front.

Knows which routes there are and what errors look like; nothing of sockets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, cast

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from shardwise import __version__
from shardwise.server.config import ServerConfig
from shardwise.server.errors import ApiError
from shardwise.server.guard import Guard
from shardwise.server.health import METRICS_TYPE
from shardwise.server.running import INTERNAL
from shardwise.server.store import management, openai, predictions
from shardwise.server.store.errors import StoreError, document
from shardwise.server.store.registry import Registry

STATUSES = {
    404: "Requested resource is not found, please refer to API document.",
    405: "Requested method is not allowed, please refer to API document.",
}
"""TorchServe's own sentences."""


def inference_app(registry: Registry, config: ServerConfig) -> ASGIApp:
    """The main port: predictions, health, metrics, and OpenAI's routes for engine models."""
    routes = _app("inference", (predictions.router(registry), openai.router(registry)))
    return _guarded(openai.Door(routes, registry), registry, config, lambda path: path.startswith("/predictions/"))


def management_app(registry: Registry, config: ServerConfig) -> ASGIApp:
    """The manager's port."""
    return _guarded(_app("management", (management.router(registry),)), registry, config)


def metrics_app(registry: Registry, config: ServerConfig) -> ASGIApp:
    """A port for /metrics alone."""
    routes = APIRouter()

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Figures for Prometheus."""
        return PlainTextResponse(predictions.page(registry), media_type=METRICS_TYPE)

    return _guarded(_app("metrics", (routes,)), registry, config)


def _guarded(
    app: ASGIApp, registry: Registry, config: ServerConfig, is_raw: Callable[[str], bool] = lambda path: False
) -> ASGIApp:
    guard = Guard(app, config, lambda: registry.draining, is_raw=is_raw, document=document)
    return registry.requests.counted(guard)


def _app(kind: str, routers: Iterable[APIRouter]) -> FastAPI:
    app = FastAPI(
        title=f"shardwise {kind}",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={
            ApiError: _handler(lambda error: cast(ApiError, error)),
            RequestValidationError: _handler(lambda _: StoreError(400, "a parameter is not understood")),
            HTTPException: _handler(_unknown),
            Exception: _handler(lambda _: StoreError(500, INTERNAL)),
        },
    )
    for router in routers:
        app.include_router(router)
    predictions.describe_routes(app)
    return app


def _handler(translate: Callable[[Exception], ApiError]) -> Callable[[Request, Exception], Any]:
    async def handle(request: Request, error: Exception) -> Response:
        answer = translate(error)
        told = document(request.url.path, answer, getattr(request.state, "request_id", None))
        return Response(json.dumps(told), answer.status, answer.headers, media_type="application/json")

    return handle


def _unknown(error: Exception) -> ApiError:
    status = cast(HTTPException, error).status_code
    return StoreError(status if status in STATUSES else 400, STATUSES.get(status, "bad request"))
