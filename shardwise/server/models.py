"""What the model is called: the list of names that requests may use, and the check that one of them was used."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from shardwise.server.deps import Deps
from shardwise.server.errors import ApiError
from shardwise.server.running import reply


def check_model(deps: Deps, name: str) -> str:
    """The model's name as answers tell it. ApiError 404 if it isn't asked for by a served name."""
    names = deps.model_names
    if name not in names and "*" not in names:
        said = name if len(name) <= 100 else name[:100] + " …"
        raise ApiError(404, f"the model {said!r} is not served here", param="model", code="model_not_found")
    return next((each for each in names if each != "*"), name)


def router(deps: Deps) -> APIRouter:
    """/v1/models and /v1/models/{id}."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> Response:
        """The names that the model is served by."""
        return reply({"object": "list", "data": [model_card(deps, name) for name in deps.model_names if name != "*"]})

    @routes.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """One of the names."""
        check_model(deps, model)
        return reply(model_card(deps, model))

    return routes


def model_card(deps: Deps, name: str) -> dict[str, Any]:
    """What is told of the model under one of its names."""
    return {
        "id": name,
        "object": "model",
        "created": deps.created,
        "owned_by": "shardwise",
        "max_model_len": deps.max_model_len,
    }
