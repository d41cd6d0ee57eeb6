"""/v1/chat/completions: the fields of a request, and its answer, whole or in events.

How a conversation becomes a prompt, and what the pieces of text mean, is for others to know.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from shardwise.engine import Output
from shardwise.intake import Prepared
from shardwise.params import SamplingParams
from shardwise.parsers import Delta
from shardwise.server.calling import CallingFields
from shardwise.server.deps import Deps
from shardwise.server.errors import ApiError
from shardwise.server.fields import one_of
from shardwise.server.messages import Messages, plain
from shardwise.server.models import check_model
from shardwise.server.prompting import Conversation, check_values, reader
from shardwise.server.reading import Reading, prompt_scored, scored
from shardwise.server.running import STREAMED, Running, answer, frame, prepare, stream
from shardwise.server.tools import Choice, Offer, Tools, make_offer


class ChatFields(CallingFields):
    """The body of a request."""

    NAMES: ClassVar[dict[str, str]] = {"prompt": "messages", "logprobs": "top_logprobs"}

    messages: Messages
    tools: Tools | None = None
    tool_choice: Annotated[Choice, one_of('"none", "auto", "required" or a function to call')] | None = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    """The same as max_tokens: all that is generated, reasoning included."""
    reasoning_effort: str | None = None
    """Told to the chat template, if it makes something of it."""
    modalities: list[Literal["text"]] | None = None
    chat_template: str | None = None
    """Refused, unless the server trusts its clients' templates."""
    add_generation_prompt: bool | None = None
    """True unless said otherwise: the prompt ends with the beginning of an assistant's message."""
    continue_final_message: bool | None = None
    """The answer goes on from the last message's text."""

    @property
    def limit(self) -> int | None:
        """The most tokens that the request asks for, if it says so."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def offer(self, deps: Deps) -> Offer:
        """The tools that may be called."""
        return make_offer(
            self.tools, self.tool_choice, self.parallel_tool_calls, deps.config.tool_parser, "tool_choice.function.name"
        )

    def checked(self, deps: Deps, offer: Offer) -> SamplingParams:
        """What is asked of each continuation. ApiError 400 names a field that can't be honoured."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one", param="max_tokens")
        if self.limit == 0:
            name = self._named()["max_tokens"]
            raise ApiError(400, f"{name}: an answer has at least 1 token", param=name)
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs can't be streamed", param="prompt_logprobs")
        return self.sampling(deps, offer, scores=bool(self.logprobs))

    def dialogue(self, deps: Deps, offer: Offer) -> Conversation:
        """What the prompt is made of. ApiError 400 names a field that can't be honoured."""
        values = check_values(deps.config, self.chat_template_kwargs, "chat_template_kwargs")
        if self.reasoning_effort is not None:
            values |= check_values(deps.config, {"reasoning_effort": self.reasoning_effort}, "reasoning_effort")
        if self.chat_template is not None and not deps.config.trust_request_chat_template:
            raise ApiError(400, "chat_template: this server uses the model's own", param="chat_template")
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        return Conversation(
            plain(self.messages),
            offer,
            values=values,
            template=self.chat_template,
            begins_answer=self.add_generation_prompt is not False,
            continues=bool(self.continue_final_message),
        )

    def _named(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {**super()._named(), "max_tokens": limit}


def router(deps: Deps) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", responses=STREAMED)
    async def chat_completions(body: ChatFields, request: Request) -> Response:
        """Answer a conversation."""
        model = check_model(deps, body.model)
        offer = body.offer(deps)
        params = body.checked(deps, offer)
        told = Answer(deps, body, offer, model)

        def make() -> list[Prepared]:
            text, tokens = body.dialogue(deps, offer).write(deps)
            return [prepare(deps, request, body, text, tokens, params)]

        if body.stream:
            return await stream(deps, request, body, make, told.events)
        return await answer(deps, request, body, make, told.whole)

    return routes


class Answer:
    """One request on its way to an answer: a whole one, or events."""

    def __init__(self, deps: Deps, body: ChatFields, offer: Offer, model: str) -> None:
        self._deps = deps
        self._body = body
        self._offer = offer
        self._id, self._created, self._model = f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), model
        self._readings: dict[int, Reading] = {}

    async def whole(self, running: Running) -> dict[str, Any]:
        """The answer in one piece."""
        readings = self._begin(running)
        scores = []
        async for _, output in running:
            readings[output.index].push(output)
            scores += output.prompt_logprobs
        document = {
            **self._head("chat.completion"),
            "choices": [self._choice(index, readings[index]) for index in sorted(readings)],
            "usage": self._usage(running),
        }
        if self._body.prompt_logprobs is not None:
            top = self._body.prompt_logprobs
            document["prompt_logprobs"] = prompt_scored(self._deps.intake.tokenizer, scores, top)
        return document

    async def events(self, running: Running) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        readings = self._begin(running)
        options = self._body.stream_options
        last = options is not None and bool(options.include_usage)
        each = options is not None and bool(options.continuous_usage_stats)
        head = self._head("chat.completion.chunk")
        async for _, output in running:
            begins = output.index not in readings
            for choice in self._pieces(output, readings[output.index], begins):
                document = {**head, "choices": [choice]}
                if last or each:
                    document["usage"] = self._usage(running) if each else None
                yield frame(document)
        if last:
            yield frame({**head, "choices": [], "usage": self._usage(running)})

    def _begin(self, running: Running) -> dict[int, Reading]:
        prepared = running.prepared[0]
        make = reader(self._deps.config, self._offer, self._body.constrained, prepared.text)
        self._readings = defaultdict(make)
        return self._readings

    def _choice(self, index: int, reading: Reading) -> dict[str, Any]:
        reasoning = "".join(reading.reasoning) or None
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for call in reading.calls
        ]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(reading.content) or (None if calls else ""),
            "refusal": None,
        }
        if reasoning is not None:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(reading.scores),
            "finish_reason": reading.finish_reason,
        }

    def _pieces(self, output: Output, reading: Reading, begins: bool) -> list[dict[str, Any]]:
        """What one piece of text brings, each as a choice of a chunk."""
        deltas: list[tuple[dict[str, Any], Any]] = [({"role": "assistant", "content": ""}, None)] if begins else []
        found = self._delta(reading, reading.push(output))
        if found or output.logprobs:
            deltas.append((found, self._logprobs(output.logprobs)))
        choices = [
            {"index": output.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
            for delta, logprobs in deltas
        ]
        if reading.finish_reason is not None:  # by itself: some clients look at nothing else in such a chunk
            choices.append(
                {"index": output.index, "delta": {}, "logprobs": None, "finish_reason": reading.finish_reason}
            )
        return choices

    def _delta(self, reading: Reading, deltas: list[Delta]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        content, reasoning = "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas)
        if content:
            found["content"] = content
        if reasoning:
            found |= {"reasoning_content": reasoning, "reasoning": reasoning}
        calls: list[dict[str, Any]] = []
        for piece in (piece for delta in deltas for piece in delta.tool_calls):
            call: dict[str, Any] = {"index": piece.index}
            function = {"arguments": piece.arguments}
            if piece.name is not None:
                call |= {"id": reading.calls[piece.index].id, "type": "function"}
                function = {"name": piece.name, **function}
            calls.append({**call, "function": function})
        return {**found, "tool_calls": calls} if calls else found

    def _logprobs(self, scores: Sequence[Any]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        top = self._body.top_logprobs or 0
        return {"content": scored(self._deps.intake.tokenizer, scores, top), "refusal": None}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _usage(self, running: Running) -> dict[str, int]:
        num_prompt = len(running.prepared[0].tokens)
        num_generated = sum(reading.num_tokens for reading in self._readings.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }
