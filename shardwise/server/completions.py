"""/v1/completions: prompts as they are, their continuations, and OpenAI's older form of log-probabilities.

Knows the fields and the shapes of this route; how requests run is `running`'s business.
"""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from shardwise.engine import Output
from shardwise.intake import Prepared
from shardwise.params import SamplingParams
from shardwise.schedule.step import Logprob
from shardwise.server.deps import Deps
from shardwise.server.errors import ApiError
from shardwise.server.fields import Ids, SamplingFields, Texts, one_of
from shardwise.server.models import check_model
from shardwise.server.reading import LOWEST, prompt_scored
from shardwise.server.running import STREAMED, Running, answer, check_count, frame, prepare, stream
from shardwise.tokenizer import Tokenizer

MAX_TOKENS = 16
"""OpenAI's default."""

Prompts = str | Ids | Texts | Annotated[list[Ids], Field(fail_fast=True)]


class CompletionFields(SamplingFields):
    """The body of a request."""

    prompt: Annotated[Prompts, one_of("a text, a list of token ids, or a list of either")]
    echo: bool | None = None
    """The text begins with the prompt; with ``logprobs``, so do the log-probabilities."""
    logprobs: int | None = None
    best_of: int | None = None
    """Only as large as ``n``."""
    suffix: None = None
    """Not for models that only continue a text."""
    add_special_tokens: bool | None = None
    """False leaves out what the tokenizer puts around a text."""
    return_token_ids: bool | None = None
    """Tell the ids of prompt and continuation too."""
    return_tokens_as_token_ids: bool | None = None
    """In the log-probabilities, name tokens "token_id:N" instead of by their texts."""

    def prompts(self, deps: Deps) -> list[str | list[int]]:
        """Each of the prompts. ApiError 400 if there are none, or too many."""
        one = isinstance(self.prompt, str) or (len(self.prompt) > 0 and isinstance(self.prompt[0], int))
        found: list[Any] = [self.prompt] if one else list(self.prompt)
        most = deps.config.max_prompts
        if not 1 <= len(found) <= most:
            raise ApiError(400, f"prompt must be 1 to {most} prompts on this server, not {len(found)}", param="prompt")
        return found

    def sampling(self, deps: Deps) -> SamplingParams:
        """What is asked of each continuation."""
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise ApiError(400, "best_of must be left out, or equal to n", param="best_of")
        more: dict[str, Any] = {"logprobs": self.logprobs}
        if self.echo and self.logprobs is not None:
            more["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return self.params(deps, max_tokens=MAX_TOKENS, **more)


def router(deps: Deps) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/v1/completions", responses=STREAMED)
    async def completions(body: CompletionFields, request: Request) -> Response:
        """Continue one or more prompts."""
        call = Call(deps, body, check_model(deps, body.model))
        params, prompts = body.sampling(deps), body.prompts(deps)
        check_count(deps, len(prompts) * params.n)

        def make() -> list[Prepared]:
            read = [encode(deps, body, prompt) for prompt in prompts]
            return [prepare(deps, request, body, text, tokens, params) for text, tokens in read]

        if body.stream:
            return await stream(deps, request, body, make, call.events)
        return await answer(deps, request, body, make, call.whole)

    return routes


def encode(deps: Deps, body: CompletionFields, prompt: str | list[int]) -> tuple[str, list[int]]:
    """A prompt's text and tokens. Raises ValueError for what can't be encoded."""
    plain = not deps.config.allow_special_tokens
    if isinstance(prompt, str) and body.add_special_tokens is False:
        return prompt, deps.intake.tokenizer.encode(prompt, add_special_tokens=False, plain=plain)
    return deps.intake.encode(prompt, plain=plain)


class Call:
    """One request on its way to an answer: a whole one, or events."""

    def __init__(self, deps: Deps, body: CompletionFields, model: str) -> None:
        self._deps = deps
        self._body = body
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._num_generated = 0

    async def whole(self, running: Running) -> dict[str, Any]:
        """The answer in one piece."""
        prompts = self._prompts(running)
        choices: dict[int, dict[str, Any]] = {}
        async for at, output in running:
            self._num_generated += len(output.token_ids)
            for piece in prompts[at].push(output):
                before = choices.setdefault(piece["index"], piece)
                if before is not piece:
                    _extend(before, piece)
        return {**self._head, "choices": [choices[index] for index in sorted(choices)], "usage": self._usage(running)}

    async def events(self, running: Running) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        prompts = self._prompts(running)
        options = self._body.stream_options
        last = options is not None and bool(options.include_usage)
        each = options is not None and bool(options.continuous_usage_stats)
        async for at, output in running:
            self._num_generated += len(output.token_ids)
            for piece in prompts[at].push(output):
                document = {**self._head, "choices": [piece]}
                if last or each:
                    document["usage"] = self._usage(running) if each else None
                yield frame(document)
        if last:
            yield frame({**self._head, "choices": [], "usage": self._usage(running)})

    def _prompts(self, running: Running) -> list[Choices]:
        first, found = 0, []
        for prepared in running.prepared:
            found.append(Choices(self._deps.intake.tokenizer, self._body, prepared, first))
            first += prepared.params.n
        return found

    def _usage(self, running: Running) -> dict[str, int]:
        num_prompt = sum(len(prepared.tokens) for prepared in running.prepared)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": num_prompt + self._num_generated,
        }


def _extend(before: dict[str, Any], piece: dict[str, Any]) -> None:
    before["text"] += piece["text"]
    before["finish_reason"] = piece["finish_reason"]
    if piece["logprobs"] is not None:
        for name, values in piece["logprobs"].items():
            before["logprobs"][name] += values
    if "token_ids" in piece:
        before["token_ids"] += piece["token_ids"]


class Choices:
    """The continuations of one prompt as choices, numbered from ``first`` on, piece by piece."""

    def __init__(self, tokenizer: Tokenizer, body: CompletionFields, prepared: Prepared, first: int) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._prepared = prepared
        self._first = first
        self._held: list[Output] = []
        self._scores: list[Logprob] = []
        """Of the prompt, from its second token on."""
        self._waits = prepared.params.prompt_logprobs is not None
        """For these, before anything is told."""
        self._shown: dict[int, Shown] = {}
        """Of each continuation that has begun."""

    def push(self, output: Output) -> list[dict[str, Any]]:
        """What one piece brings. All wait for the prompt's log-probabilities, which come with number 0."""
        self._scores += output.prompt_logprobs
        self._held.append(output)
        ended = output.index == 0 and output.finish_reason is not None  # then no more will come: it may be aborted
        self._waits = self._waits and not ended and len(self._scores) < len(self._prepared.tokens) - 1
        if self._waits:
            return []
        ready, self._held = self._held, []
        return [self._piece(each) for each in ready if each.text or each.token_ids or each.finish_reason]

    def _piece(self, output: Output) -> dict[str, Any]:
        body, params = self._body, self._prepared.params
        piece: dict[str, Any] = {
            "index": self._first + output.index,
            "text": output.text,
            "logprobs": None,
            "finish_reason": output.finish_reason,
        }
        if body.return_token_ids:
            piece["token_ids"] = output.token_ids
        shown = self._shown.get(output.index)
        begins = shown is None
        if shown is None:
            skipped = self._tokenizer.special if params.skip_special_tokens else frozenset[int]()
            shown = Shown(self._tokenizer, skipped, body.logprobs, bool(body.return_tokens_as_token_ids))
            self._shown[output.index] = shown
        if body.logprobs is not None:
            piece["logprobs"] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if begins and body.echo:
            piece["text"] = self._prepared.text + output.text
            shown.echo(self._prepared.text, self._prepared.tokens, self._scores, piece["logprobs"])
        if body.logprobs is not None:
            shown.tell(output, piece["logprobs"])
        if begins and body.return_token_ids:
            piece["prompt_token_ids"] = list(self._prepared.tokens)
        if begins and body.prompt_logprobs is not None:
            piece["prompt_logprobs"] = prompt_scored(self._tokenizer, self._scores, body.prompt_logprobs)
        return piece


Lists = dict[str, list[Any]]
"""OpenAI's older form: parallel lists."""


class Shown:
    """The tokens of one choice, each with its place in the choice's text and the likeliest ones in its stead.

    ``skipped`` ones are no part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], num_top: int | None, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._num_top = num_top or 0
        self._as_ids = as_ids
        self._offset = 0
        """Characters up to the next token."""
        self._end = 0
        """Characters told of, which a stop string may have cut."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def echo(self, text: str, tokens: Sequence[int], scores: Sequence[Logprob], lists: Lists | None) -> None:
        """The choice begins with the prompt. A text need not hold its tokens as they are spelt: see those around it."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for at, token in enumerate(tokens if lists is not None else ()):
            assert lists is not None
            self._add(lists, token, scores[at - 1] if 0 < at <= len(scores) else None)
            spelt = decoder.decode(self._tokenizer.spell(token))
            if not text.startswith(spelt, self._offset):
                bare = spelt.removeprefix(" ")  # what a SentencePiece vocabulary sets before the first word
                spelt = bare if text.startswith(bare, self._offset) else ""
            self._offset += len(spelt)
        self._offset = self._end = len(text)

    def tell(self, output: Output, lists: Lists) -> None:
        """The tokens that come with one piece."""
        self._end += len(output.text)
        for token, score in zip(output.token_ids, output.logprobs, strict=True):
            self._add(lists, token, score)
            if token not in self._skipped:
                self._offset = min(self._offset + len(self._decoder.decode(self._tokenizer.spell(token))), self._end)

    def _add(self, lists: Lists, token: int, score: Logprob | None) -> None:
        lists["tokens"].append(self._name(token))
        lists["text_offset"].append(self._offset)
        if score is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        own = max(score.logprob, LOWEST)
        top: dict[str, float] = {}
        for each, value in (*score.top[: self._num_top], (token, own)):
            top.setdefault(self._name(each), max(value, LOWEST))
        lists["token_logprobs"].append(own)
        lists["top_logprobs"].append(top)

    def _name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        spelt = self._tokenizer.spell(token)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)
