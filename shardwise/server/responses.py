"""/v1/responses, stateless: the fields of a request, and its answer, whole or in events. Nothing is stored.

What can only be asked of a server that keeps responses is refused by name.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from shardwise.intake import Prepared
from shardwise.params import SamplingParams
from shardwise.server.calling import CallingFields, Constraints
from shardwise.server.deps import Deps
from shardwise.server.errors import ApiError
from shardwise.server.fields import JsonSchema, ResponseFormat, constraints_of, one_of
from shardwise.server.flat import FlatChoice, FlatTool, Reasoning, TextOptions
from shardwise.server.input import Inputs, plain
from shardwise.server.items import Event, Items
from shardwise.server.models import check_model
from shardwise.server.prompting import Conversation, check_values, reader
from shardwise.server.reading import Reading, scored
from shardwise.server.running import STREAMED, Running, answer, frame, prepare, stream
from shardwise.server.tools import Named, NamedChoice, Offer, make_offer


def _no_number(value: Any) -> Any:
    """Of what may only be false: 0 equals it."""
    if value is not None and not isinstance(value, bool):
        raise PydanticCustomError("bool_type", "Input should be a valid boolean")
    return value


UNUSED = ("max_tokens", "response_format", "prompt_logprobs", "stream_options")
"""Fields of other routes that have no meaning here."""


class ResponseFields(CallingFields):
    """The body of a request."""

    NAMES: ClassVar[dict[str, str]] = {
        "prompt": "input",
        "logprobs": "top_logprobs",
        "max_tokens": "max_output_tokens",
    }

    input: Annotated[str | Inputs, one_of("a text or a list of items")]
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | FlatChoice,
            one_of('"none", "auto", "required" or a function to call'),
        ]
        | None
    ) = None
    reasoning: Reasoning | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    truncation: Literal["disabled"] | None = None
    background: Annotated[Literal[False] | None, BeforeValidator(_no_number)] = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None

    @property
    def limit(self) -> int | None:
        """The most tokens that the request asks for, if it says so."""
        return self.max_output_tokens

    @property
    def wants_scores(self) -> bool:
        """Are log-probabilities told?"""
        return self.top_logprobs is not None or bool(self.include)

    def offer(self, deps: Deps) -> Offer:
        """The tools that may be called."""
        choice = self.tool_choice
        return make_offer(
            [tool.tool() for tool in self.tools or ()],
            NamedChoice(type="function", function=Named(name=choice.name))
            if isinstance(choice, FlatChoice)
            else choice,
            self.parallel_tool_calls,
            deps.config.tool_parser,
            "tool_choice.name",
        )

    def checked(self, deps: Deps, offer: Offer) -> SamplingParams:
        """What is asked of the answer. ApiError 400 names a field that can't be honoured."""
        for name in UNUSED:
            if getattr(self, name) is not None:
                raise ApiError(400, f"{name}: unknown field", param=name)
        if self.n not in (None, 1):
            raise ApiError(400, "n must be 1: a response is one", param="n")
        return self.sampling(deps, offer, scores=self.wants_scores)

    def dialogue(self, deps: Deps, offer: Offer) -> Conversation:
        """What the prompt is made of. ApiError 400 names a field that can't be honoured."""
        values = check_values(deps.config, self.chat_template_kwargs, "chat_template_kwargs")
        effort = self.reasoning.effort if self.reasoning is not None else None
        if effort is not None:
            values |= check_values(deps.config, {"reasoning_effort": effort}, "reasoning.effort")
        return Conversation(plain(self.instructions, self.input), offer, where="input", values=values)

    def wanted(self) -> Constraints:
        """What constrains a text that calls no tools."""
        found = list(super().wanted())
        asked = self.text.format if self.text is not None else None
        if asked is None:
            return found
        inner = None
        if asked.schema_ is not None or asked.type == "json_schema":
            inner = JsonSchema.model_validate({"name": asked.name or "schema", "schema": asked.schema_})
        try:
            inners = constraints_of(ResponseFormat(type=asked.type, json_schema=inner))
        except ApiError:
            raise ApiError(
                400, "text.format.schema goes with the type json_schema, and only with it", param="text.format.schema"
            ) from None
        return found + [(kind, "text.format", value) for kind, _, value in inners]


def router(deps: Deps) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/v1/responses", responses=STREAMED)
    async def responses(body: ResponseFields, request: Request) -> Response:
        """Answer an input."""
        model = check_model(deps, body.model)
        offer = body.offer(deps)
        params = body.checked(deps, offer)
        told = Answer(deps, body, offer, params, model)

        def make() -> list[Prepared]:
            text, tokens = body.dialogue(deps, offer).write(deps)
            return [prepare(deps, request, body, text, tokens, params)]

        if body.stream:
            return await stream(deps, request, body, make, told.events, end=b"")
        return await answer(deps, request, body, make, told.whole)

    return routes


class Answer:
    """One request on its way to an answer: a whole one, or events."""

    def __init__(self, deps: Deps, body: ResponseFields, offer: Offer, params: SamplingParams, model: str) -> None:
        self._deps = deps
        self._body = body
        self._offer = offer
        self._params = params
        self._model = model
        self._id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())
        self._num_events = 0
        self._num_reasoning = 0

    async def whole(self, running: Running) -> dict[str, Any]:
        """The answer in one piece."""
        reading, items = self._begin(running)
        async for _ in self._pieces(running, reading, items):
            pass
        return self._document(running, reading, items)

    async def events(self, running: Running) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        reading, items = self._begin(running)
        for kind in ("response.created", "response.in_progress"):
            yield self._frame({"type": kind, "response": self._document(running, reading, items)})
        try:
            async for event in self._pieces(running, reading, items):
                yield self._frame(event)
        except ApiError as error:
            code = "invalid_prompt" if error.status == 400 else "server_error"
            failed = {"status": "failed", "error": {"code": code, "message": error.message}}
            document = {**self._document(running, reading, items), **failed}
            yield self._frame({"type": "response.failed", "response": document})
            return
        document = self._document(running, reading, items)
        yield self._frame({"type": f"response.{document['status']}", "response": document})

    def _begin(self, running: Running) -> tuple[Reading, Items]:
        prepared = running.prepared[0]
        reading = reader(self._deps.config, self._offer, self._body.constrained, prepared.text)()
        return reading, Items(reading)

    async def _pieces(self, running: Running, reading: Reading, items: Items) -> AsyncGenerator[Event, None]:
        top = self._body.top_logprobs or 0
        num_held = 0  # tokens whose text the parser has kept so far
        async for _, output in running:
            num_held += len(output.token_ids)
            scores = scored(self._deps.intake.tokenizer, output.logprobs, top)
            for delta in reading.push(output):
                told = bool(delta.content or delta.tool_calls)
                if delta.reasoning and not told:
                    self._num_reasoning += num_held
                if delta.reasoning or told:
                    num_held = 0
                for event in items.push(delta, scores):
                    yield event
                scores = []
        for event in items.finish("completed" if _status(reading) == "completed" else "incomplete"):
            yield event

    def _frame(self, event: Event) -> bytes:
        self._num_events += 1
        return frame({**event, "sequence_number": self._num_events - 1}, event["type"])

    def _document(self, running: Running, reading: Reading, items: Items) -> dict[str, Any]:
        body, params, status = self._body, self._params, _status(reading)
        reasons = {"length": "max_output_tokens"}
        reason = reasons.get(reading.finish_reason or "", reading.finish_reason)
        effort = body.reasoning.effort if body.reasoning is not None else None
        choice = body.tool_choice
        asked = body.text.format if body.text is not None else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [{**item} for item in items.items],
            "parallel_tool_calls": self._offer.parallel,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": asked.model_dump(by_alias=True, exclude_none=True) if asked else {"type": "text"}},
            "tool_choice": choice.model_dump() if isinstance(choice, FlatChoice) else choice or self._offer.choice,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "background": False,
            "user": body.user,
            "usage": self._usage(running, reading) if reading.finish_reason is not None else None,
        }

    def _usage(self, running: Running, reading: Reading) -> dict[str, Any]:
        num_prompt = len(running.prepared[0].tokens)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reading.num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": num_prompt + reading.num_tokens,
        }


def _status(reading: Reading) -> str:
    if reading.finish_reason is None:
        return "in_progress"
    return "completed" if reading.finish_reason in ("stop", "tool_calls") else "incomplete"
