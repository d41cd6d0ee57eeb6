"""The offline door: load a model on a layout, then generate, chat or stream. Used by one thread at a time."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from shardwise.config import EngineConfig, Layout
from shardwise.engine import Engine, Output
from shardwise.params import MAX_SEED, SamplingParams
from shardwise.replicas import Replicas
from shardwise.runtime.launch import RunPlan, launch, plan_run
from shardwise.runtime.source import Source, open_source
from shardwise.schedule.scheduler import Scheduler
from shardwise.schedule.sequence import Request
from shardwise.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass
class RequestOutput:
    """A finished request. Times are in seconds on the monotonic clock."""

    index: int
    prompt: str
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """"stop" (an end token or a stop string) or "length"."""
    logits: list[bytes] = field(default_factory=list, repr=False)
    """Each token's raw logits row, where asked for."""
    submitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


class LLM:
    """A model on a layout.

    ``model`` is an alias (``smollm2``), a Hugging Face directory, a .gguf file or a hub id; ``layout`` such as
    ``"tp2.pp2"``; ``settings`` are the other fields of EngineConfig. Raises ValueError, before any weight is read, for
    what cannot be done, LoadError for broken files and RankFailure if a rank does not start. Close it, or use it as a
    context manager, to end its ranks.
    """

    def __init__(
        self,
        model: str | Path,
        layout: str | Layout = "1",
        *,
        on_progress: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> None:
        started = time.monotonic()
        config = EngineConfig(layout=Layout.parse(layout) if isinstance(layout, str) else layout, **settings)
        self.source = open_source(model)
        self.tokenizer = open_tokenizer(self.source)
        self.eos = self.source.eos | self.tokenizer.eos
        self.plan = plan_run(self.source, config)
        executors = launch(self.plan, on_progress)
        self._replicas = Replicas(
            [Engine(executor, make_scheduler(self.plan, self.eos), self.tokenizer) for executor in executors]
        )
        self.figures = [executor.figures for executor in executors]
        """What the ranks of each replica said of themselves when they were ready."""
        self.load_s = time.monotonic() - started
        self._numbers = itertools.count()
        self._open: dict[int, RequestOutput] = {}
        self._inbox: dict[int, deque[Output]] = {}

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids; one or many) by its params (one for all, or one each).

        Prompts run together, and the results come in their order. ValueError names the prompt that can't be run; none
        is started then.
        """
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many = cast("Sequence[Prompt]", [prompts] if one else prompts)
        return self._finish([(prompt, None) for prompt in many], params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation (one list of {"role", "content"}, or many) through the model's chat template."""
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        many = cast("Sequence[Messages]", [messages] if one else messages)
        return self._finish([(None, conversation) for conversation in many], params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Output]:
        """Yield the pieces of one continuation as they come; leaving the loop early aborts the request."""
        return self.pieces(self.submit(prompt, params or SamplingParams()))

    def submit(
        self,
        prompt: Prompt | None,
        params: SamplingParams,
        messages: Messages | None = None,
        *,
        index: int = 0,
        want_logits: bool = False,
    ) -> int:
        """Accept one request, of a prompt or of chat messages, and return its number for ``pieces`` or ``result``.

        Raises ValueError with the remedy for one that can't be run.
        """
        if messages is not None:
            text = self.tokenizer.chat(messages)
            tokens = self.tokenizer.encode(text, add_special_tokens=False)  # a template writes its own
        elif isinstance(prompt, str):
            text, tokens = prompt, self.tokenizer.encode(prompt)
        else:
            assert prompt is not None
            tokens = list(prompt)
            text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        number = next(self._numbers)
        seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
        self._replicas.add(Request(number, tuple(tokens), params, seed, want_logits=want_logits))
        self._open[number] = RequestOutput(index, text, tokens, submitted=time.monotonic())
        self._inbox[number] = deque()
        return number

    def pieces(self, number: int) -> Iterator[Output]:
        """The outputs of an accepted request as they come, to the last; leaving early aborts it."""
        inbox = self._inbox[number]
        try:
            while True:
                while not inbox:
                    self._step()
                piece = inbox.popleft()
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self.abort(number)

    def result(self, number: int) -> RequestOutput:
        """Run until an accepted request is done."""
        result = self._open[number]
        for _ in self.pieces(number):
            pass
        return result

    def abort(self, number: int) -> None:
        """Forget a request; harmless if it is done or unknown."""
        self._replicas.abort(number)
        self._inbox.pop(number, None)
        self._open.pop(number, None)

    def close(self) -> None:
        """End all ranks; harmless when repeated."""
        self._replicas.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish(
        self,
        items: Sequence[tuple[Prompt | None, Messages | None]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        each = [params or SamplingParams()] * len(items) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(items):
            raise ValueError(f"{len(items)} prompts need one SamplingParams or {len(items)}, not {len(each)}")
        numbers: list[int] = []
        try:
            for index, ((prompt, messages), by) in enumerate(zip(items, each, strict=True)):
                try:
                    numbers.append(self.submit(prompt, by, messages, index=index))
                except ValueError as error:
                    raise ValueError(f"prompt {index}: {error}") from None
            return [self.result(number) for number in numbers]
        finally:
            for number in numbers:
                self.abort(number)

    def _step(self) -> None:
        now_open = self._open
        for output in self._replicas.step():
            result = now_open.get(output.request_id)
            if result is None:
                continue
            moment = time.monotonic()
            if not result.token_ids:
                result.first_token = moment
            result.text += output.text
            result.token_ids += output.token_ids
            result.logits += output.logits
            result.finish_reason = output.finish_reason
            result.finished = moment
            self._inbox[output.request_id].append(output)


def open_tokenizer(source: Source) -> Tokenizer:
    """The tokenizer that came with the model."""
    if source.metadata is not None:
        return Tokenizer.from_gguf(source.metadata)
    return Tokenizer.from_directory(Path(source.resolved.path))


def make_scheduler(plan: RunPlan, eos: frozenset[int], **settings: Any) -> Scheduler:
    """A scheduler for one replica of ``plan``; ``settings`` replace the plan's own."""
    engine = plan.engine
    chosen = {
        "num_blocks": plan.num_blocks,
        "max_model_len": plan.max_model_len,
        "max_batch_tokens": engine.max_batch_tokens,
        "max_chunk": engine.max_chunk,
        "max_num_seqs": engine.max_num_seqs,
        "num_in_flight": engine.layout.pp,
        "prefix_cache": engine.prefix_cache,
        "eos": eos,
        "vocab_size": plan.source.config.vocab_size,
        "secret": secrets.token_bytes(32),
    }
    return Scheduler(**{**chosen, **settings})
