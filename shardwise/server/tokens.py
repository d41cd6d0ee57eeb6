"""/tokenize and /detokenize: what the model reads for a text or a conversation, and what its tokens say.

Runs no model.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from shardwise.server.deps import Deps
from shardwise.server.errors import ApiError
from shardwise.server.fields import Body, Ids
from shardwise.server.messages import Messages, plain
from shardwise.server.models import check_model
from shardwise.server.running import reply
from shardwise.tokenizer.quoting import encode_chat


class TokenizeFields(Body):
    """A text or a conversation."""

    model: str | None = None
    """The served one if left out."""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Put around it what the tokenizer does: by default so for a text, but not for a conversation, whose template has
    written it already."""
    add_generation_prompt: bool | None = None
    """Of a conversation: end with the head of the answer, as by default, or without."""
    return_token_strs: bool | None = None


class DetokenizeFields(Body):
    """Tokens."""

    model: str | None = None
    """The served one if left out."""
    tokens: Ids


def router(deps: Deps) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeFields) -> Response:
        """The token ids of a text, or of a conversation in the model's chat template."""
        if body.model is not None:
            check_model(deps, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.messages is None and body.add_generation_prompt is not None:
            raise ApiError(400, "add_generation_prompt goes with messages", param="add_generation_prompt")
        return reply(await asyncio.to_thread(_tokenize, deps, body))

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeFields) -> Response:
        """The text of token ids, special tokens included."""
        if body.model is not None:
            check_model(deps, body.model)
        return reply(await asyncio.to_thread(_detokenize, deps, body.tokens))

    return routes


def _tokenize(deps: Deps, body: TokenizeFields) -> dict[str, Any]:
    tokenizer = deps.intake.tokenizer
    try:
        if body.messages is not None:
            opened = body.add_generation_prompt is not False
            tokens = encode_chat(tokenizer, plain(body.messages), add_generation_prompt=opened)[1]
            tokens = tokenizer.wrap(tokens) if body.add_special_tokens else tokens
        else:
            assert body.prompt is not None
            as_text = not deps.config.allow_special_tokens
            tokens = tokenizer.encode(body.prompt, body.add_special_tokens is not False, plain=as_text)
    except ValueError as error:
        raise ApiError(400, str(error), param="prompt" if body.messages is None else "messages") from None
    found: dict[str, Any] = {"count": len(tokens), "max_model_len": deps.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        found["token_strs"] = [tokenizer.spell(token).decode(errors="replace") for token in tokens]
    return found


def _detokenize(deps: Deps, tokens: list[int]) -> dict[str, Any]:
    tokenizer = deps.intake.tokenizer
    for token in tokens:
        if not 0 <= token < tokenizer.vocab_size:
            raise ApiError(
                400, f"tokens: {token} is not a token id from 0 to {tokenizer.vocab_size - 1}", param="tokens"
            )
    return {"prompt": tokenizer.decode(tokens, skip_special_tokens=False)}
