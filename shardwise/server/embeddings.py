"""/v1/embeddings: a prompt's last hidden states, pooled to one vector.

Knows the fields and the shape of this route; how requests run is `running`'s business.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from shardwise.intake import Prepared
from shardwise.params import SamplingParams
from shardwise.server.deps import Deps
from shardwise.server.errors import ApiError
from shardwise.server.fields import Fields, Ids, Texts, one_of
from shardwise.server.guard import ENDING, RETRY_AFTER
from shardwise.server.models import check_model
from shardwise.server.running import Running, answer, check_count, prepare

Inputs = str | Ids | Texts | Annotated[list[Ids], Field(fail_fast=True)]


class EmbeddingFields(Fields):
    """The body of a request."""

    NAMES: ClassVar[dict[str, str]] = {"prompt": "input"}

    input: Annotated[Inputs, one_of("a text, a list of token ids, or a list of either")]
    encoding_format: Literal["float", "base64"] | None = None
    """base64 is of little-endian float32."""
    dimensions: int | None = None
    """Only the model's own number."""
    pooling: Literal["mean", "last"] | None = None
    """The mean of all tokens' states (the default), or the last token's."""
    normalize: bool | None = None
    """False leaves out the scaling to length 1."""

    def inputs(self, deps: Deps) -> list[str | list[int]]:
        """Each of the inputs. ApiError 400 if there are none, or too many."""
        one = isinstance(self.input, str) or (len(self.input) > 0 and isinstance(self.input[0], int))
        found: list[Any] = [self.input] if one else list(self.input)
        most = deps.config.max_prompts
        if not 1 <= len(found) <= most:
            raise ApiError(400, f"input must be 1 to {most} inputs on this server, not {len(found)}", param="input")
        return found


def router(deps: Deps) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/v1/embeddings")
    async def embeddings(body: EmbeddingFields, request: Request) -> Response:
        """A vector for each input."""
        model = check_model(deps, body.model)
        inputs = body.inputs(deps)
        check_count(deps, len(inputs))
        params = SamplingParams(max_tokens=0)

        def make() -> list[Prepared]:
            read = [deps.intake.encode(each, plain=not deps.config.allow_special_tokens) for each in inputs]
            return [_pooled(prepare(deps, request, body, *each, params), body.pooling or "mean") for each in read]

        async def whole(running: Running) -> dict[str, Any]:
            found: list[Sequence[float]] = [()] * len(inputs)
            async for at, output in running:
                if output.finish_reason == "abort":
                    raise ApiError(503, ENDING, retry_after=RETRY_AFTER)
                if output.finish_reason is not None:
                    found[at] = output.embedding
            size = len(found[0])
            if body.dimensions not in (None, size):
                raise ApiError(400, f"dimensions must be left out, or the model's own {size}", param="dimensions")
            num_tokens = sum(len(prepared.tokens) for prepared in running.prepared)
            return {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": at, "embedding": _shown(body, values)}
                    for at, values in enumerate(found)
                ],
                "model": model,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }

        return await answer(deps, request, body, make, whole)

    return routes


def _pooled(prepared: Prepared, pooling: str) -> Prepared:
    return replace(prepared, parts=tuple(replace(part, pooling=pooling) for part in prepared.parts))


def _shown(body: EmbeddingFields, values: Sequence[float]) -> list[float] | str:
    """A vector as it was asked for."""
    if body.normalize is not False:
        length = math.sqrt(math.fsum(value * value for value in values))
        values = [value / length for value in values] if length else values
    if body.encoding_format == "base64":
        return base64.b64encode(array("f", values).tobytes()).decode()
    return list(values)
