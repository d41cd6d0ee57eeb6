"""The application: every route in one table, what goes wrong put into OpenAI's shape, and the guard in front of all.

Knows routes by their modules only, and nothing of sockets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shardwise import __version__
from shardwise.server import chat, completions, embeddings, health, models, responses, tokens
from shardwise.server.deps import Deps
from shardwise.server.errors import SHAPE, ApiError
from shardwise.server.guard import Guard
from shardwise.server.running import INTERNAL, turn_away

SUBMITTING = (chat, responses, completions, embeddings)
"""Those whose routes ask for work of the engines."""
MODULES = (*SUBMITTING, tokens, models, health)
TICK = 0.25
"""Seconds between looks for requests that have waited too long, and for what has become of replicas."""
MAX_TOLD = 300
"""Characters of a validation error that are told."""
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": why, "content": {"application/json": {"schema": SHAPE}}}
    for status, why in (("4XX", "the request is refused"), ("5XX", "it can't be answered, or not now"))
}
STATUSES = {404: "there is no such route", 405: "this route does not know the method"}

log = logging.getLogger("shardwise")


def create_app(deps: Deps) -> FastAPI:
    """The ASGI application. Its lifespan starts the service, and stops it at the end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        deps.service.start()
        watch = health.Watch(deps.service.replicas.engines)
        ticking = asyncio.create_task(tick(deps.service.tick, watch.look))
        try:
            yield
        finally:
            ticking.cancel()
            with suppress(asyncio.CancelledError):
                await ticking
            await deps.service.stop()

    routers = {module: module.router(deps) for module in MODULES}
    app = bare_app(routers.values(), lifespan)
    app.add_middleware(
        Guard,
        config=deps.config,
        is_draining=lambda: deps.service.state in ("draining", "dead"),
        busy={route.path for module in SUBMITTING for route in routers[module].routes},
        turn_away=partial(turn_away, deps),
    )
    return app


def bare_app(
    routers: Iterable[APIRouter], lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None
) -> FastAPI:
    """The routes, and what goes wrong in them in OpenAI's shape; without a guard."""
    app = FastAPI(
        title="shardwise",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        responses=ERRORS,
        exception_handlers={
            ApiError: _handler(lambda error: cast(ApiError, error)),
            RequestValidationError: _handler(lambda error: _invalid(cast(RequestValidationError, error))),
            HTTPException: _handler(lambda error: _unknown(cast(HTTPException, error))),
            Exception: _handler(lambda _: ApiError(500, INTERNAL)),  # where no guard stands within starlette's own net
        },
    )
    for router in routers:
        app.include_router(router)
    return app


async def tick(*acts: Callable[[], None]) -> None:
    """Do all of it every now and then, until this is cancelled."""
    while True:
        await asyncio.sleep(TICK)
        for act in acts:
            try:
                act()
            except Exception:
                log.exception("what is to be done now and then has failed")


def _handler(translate: Callable[[Exception], ApiError]) -> Callable[[Request, Exception], Any]:
    async def handle(request: Request, error: Exception) -> Response:
        answer = translate(error)
        # ASCII, since a field's name may hold half of a surrogate pair
        body = json.dumps(answer.document(getattr(request.state, "request_id", None)))
        headers = {**answer.headers, **dict(getattr(error, "headers", None) or {})}
        return Response(body, answer.status, headers, media_type="application/json")

    return handle


def _invalid(error: RequestValidationError) -> ApiError:
    """What pydantic found, said of the first field at fault."""
    first: Mapping[str, Any] = error.errors()[0]
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    param = ".".join(where)[:MAX_TOLD] or None
    text = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        text = "unknown field"
    elif first["type"] == "missing":
        text = "field required" if param else "a JSON body is required"
    text = re.sub(r"[\x00-\x1f\x7f]", " ", text)[:MAX_TOLD]
    return ApiError(400, f"{param}: {text}" if param else text, param=param)


def _unknown(error: HTTPException) -> ApiError:
    status = error.status_code if error.status_code in STATUSES else 400
    return ApiError(status, STATUSES.get(status, "bad request"))
