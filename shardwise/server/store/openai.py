"""OpenAI's routes over several models: each request goes to the routes of the engine model that it names.

Knows the field ``model`` and nothing else of what is asked.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from shardwise.intake import Intake, Prepared
from shardwise.params import SamplingParams
from shardwise.server import tokens
from shardwise.server.app import SUBMITTING, bare_app
from shardwise.server.deps import Deps
from shardwise.server.errors import ApiError
from shardwise.server.guard import replay
from shardwise.server.models import model_card
from shardwise.server.running import reply, turn_away
from shardwise.server.service import Service, Stream
from shardwise.server.store.answers import Pace, check_room
from shardwise.server.store.engines import EngineModel
from shardwise.server.store.errors import StoreError
from shardwise.server.store.registry import Registry
from shardwise.store.styles import Style

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize")


class Door:
    """ASGI: takes the requests for `PATHS`, and lets all others go on to ``app``."""

    def __init__(self, app: ASGIApp, registry: Registry) -> None:
        self._app = app
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["path"] not in PATHS or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        body = await Request(scope, receive).body()
        model, deps = self._model(body, optional=not scope["path"].startswith("/v1/"))
        if scope["path"].startswith("/v1/"):
            turn_away(deps, scope["state"]["key"])
            check_room(model)
        if model.routes is None:
            lent = cast(Deps, Lent(model, deps))
            model.routes = bare_app([module.router(lent) for module in (*SUBMITTING, tokens)])
        return await model.routes(scope, replay(body, receive), send)

    def _model(self, body: bytes, *, optional: bool) -> tuple[EngineModel, Deps]:
        document = json.loads(body) if body else None  # the guard has looked at it
        name = document.get("model") if isinstance(document, dict) else None
        if name is None and optional and len(self._registry.entries) == 1:
            name = next(iter(self._registry.entries))
        if not isinstance(name, str):
            raise ApiError(400, "model: field required", param="model")
        return model_of(self._registry, name)


class Lent:
    """What routes need, with the limits and defaults of the model's own handler.

    For as long as somebody else keeps it: FastAPI's caches keep routes beyond their end.
    """

    def __init__(self, model: EngineModel, deps: Deps) -> None:
        self._model, self._deps = weakref.ref(model), weakref.ref(deps)

    def __getattr__(self, name: str) -> Any:
        model, deps = self._model(), self._deps()
        assert model is not None, "the request's own frame keeps it"
        assert deps is not None, "and this"
        style = model.stored.style
        assert style is not None
        if name == "defaults":
            return deps.defaults._replace(fields=style.defaults(deps.defaults.fields))
        if name == "intake":
            return Capped(deps.intake, style)
        return Timed(deps.service, model) if name == "service" else getattr(deps, name)


class Capped:
    """An intake that refuses what is longer than a handler lets it be."""

    def __init__(self, intake: Intake, style: Style) -> None:
        self._intake, self._style = intake, style

    def __getattr__(self, name: str) -> Any:
        return getattr(self._intake, name)

    def prepare(self, text: str, tokens: Sequence[int], params: SamplingParams, **more: Any) -> Prepared:
        """See `Intake`."""
        self._style.check_prompt(len(tokens))
        self._style.check_tokens(params.max_tokens)
        return self._intake.prepare(text, tokens, params, **more)


class Timed:
    """A service for one call, whose requests are taken where their model has room, and ended by its responseTimeout."""

    def __init__(self, service: Service, model: EngineModel) -> None:
        self._service, self._model = service, model
        self._taken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def submit(self, prepared: Prepared, **more: Any) -> Stream:
        """See `Service`. Raises StoreError where there is no room for the first of the call."""
        if not self._taken:
            check_room(self._model)  # others may have come while this one was read
        self._taken = True
        stream = self._service.submit(prepared, **more)
        self._model.answers.add(Pace(self._model, stream, in_pieces=True))
        return stream


def model_of(registry: Registry, name: str) -> tuple[EngineModel, Deps]:
    """The default version of an engine model, and what routes need of it. ApiError where it isn't there, or not now."""
    try:
        served = registry.find(name)
    except StoreError:
        said = name if len(name) <= 100 else name[:100] + " …"
        raise ApiError(404, f"the model {said!r} is not served here", param="model", code="model_not_found") from None
    if served.stored.custom:
        raise ApiError(400, f"the model {name} has a handler of its own: ask it at /predictions/{name}", param="model")
    if served.state != "READY" or not isinstance(served.model, EngineModel) or served.model.deps is None:
        raise ApiError(503, f"the model {name} is not ready", retry_after=2 if served.state == "LOADING" else None)
    return served.model, served.model.deps


def router(registry: Registry) -> APIRouter:
    """/v1/models and /v1/models/{id}."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> Response:
        """The engine models that are ready."""
        return reply({"object": "list", "data": [card for name in sorted(registry.entries) for card in _cards(name)]})

    @routes.get("/v1/models/{model}")
    async def model(model: str) -> Response:
        """One of them."""
        return reply(model_card(model_of(registry, model)[1], model))

    def _cards(name: str) -> list[dict[str, Any]]:
        try:
            return [model_card(model_of(registry, name)[1], name)]
        except ApiError:
            return []

    return routes
