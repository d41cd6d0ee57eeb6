"""The offline door: load a model on a layout, then generate, chat or stream. Used by one thread at a time."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from shardwise.config import EngineConfig, Layout
from shardwise.engine import Output
from shardwise.intake import Messages, Prompt
from shardwise.open import open_model
from shardwise.outputs import CompletionOutput, RequestOutput
from shardwise.params import SamplingParams
from shardwise.runtime.launch import launch
from shardwise.schedule.speculation import Tally


class LLM:
    """A model on a layout.

    ``model`` is an alias (``smollm2``), a Hugging Face directory, a .gguf file or a hub id; ``layout`` such as
    ``"tp2.pp2"``; ``settings`` are the other fields of EngineConfig, of which ``speculate``, ``quantize``,
    ``compile`` and ``max_memory`` may be text too (see Speculation.parse and the other kinds' ``parse``).
    ``generation_config`` False leaves aside what the model's generation_config.json says: it gives the params of
    requests that come without any. Raises ValueError, before any weight is read, for
    what cannot be done, LoadError for broken files and RankFailure if a rank does not start. Close it, or use it as a
    context manager, to end its ranks.
    """

    def __init__(
        self,
        model: str | Path,
        layout: str | Layout = "1",
        *,
        on_progress: Callable[[str], None] | None = None,
        generation_config: bool = True,
        **settings: Any,
    ) -> None:
        config = EngineConfig.read(layout, **settings)
        opened = open_model(model, config, generation_config=generation_config, on_progress=on_progress, start=launch)
        self.source, self.tokenizer, self.eos = opened.source, opened.tokenizer, opened.eos
        self.defaults = opened.defaults
        """What holds for fields that a request leaves open, where params aren't given as a whole."""
        self.plan, self.intake, self.load_s = opened.plan, opened.intake, opened.load_s
        self.compile_s = opened.compile_s
        """Of ``load_s``, what torch.compile took; None where nothing was compiled."""
        self.figures = opened.figures
        """What the ranks of each replica said of themselves when they were ready."""
        self._replicas = opened.replicas
        self._open: dict[int, RequestOutput] = {}
        self._inbox: dict[int, deque[Output]] = {}
        self._parts: dict[int, tuple[int, int]] = {}  # a part's number → its request and which continuation it is

    @property
    def drafts(self) -> Tally | None:
        """What became of all drafts so far; None without speculation."""
        drafts = [engine.scheduler.drafts for engine in self._replicas.engines]
        found = [each.speculator.tally for each in drafts if each is not None]
        return sum(found[1:], found[0]) if found else None

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
        """The pieces of one continuation as they come; leaving the loop early, or never entering it, aborts it.

        It is in line from now on. Raises ValueError with the remedy for one that can't be run.
        """
        number = self.submit(prompt, params or SamplingParams(**self.defaults.fields))
        pieces = self.pieces(number)
        weakref.finalize(pieces, self.abort, number).atexit = False  # a generator that never began has no end either
        return pieces

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
            if params.max_tokens == 0:
                raise ValueError("max_tokens must be at least 1 for a chat")
            text, tokens = self.intake.encode_chat(messages)
        else:
            assert prompt is not None
            text, tokens = self.intake.encode(prompt)
        prepared = self.intake.prepare(text, tokens, params, want_logits=want_logits)
        number = prepared.parts[0].id
        began = text if params.echo else ""
        self._open[number] = RequestOutput(
            index, text, tokens, [CompletionOutput(at, began) for at in range(params.n)], submitted=time.monotonic()
        )
        self._inbox[number] = deque(Output(number, began, [], [], None, at) for at in range(params.n) if began)
        try:
            for at, request in enumerate(prepared.parts):
                self._parts[request.id] = number, at
                self._replicas.add(request)
        except ValueError:
            self.abort(number)
            raise
        return number

    def pieces(self, number: int) -> Iterator[Output]:
        """The outputs of an accepted request as they come, to the last; leaving early aborts it."""
        inbox = self._inbox[number]
        left = len(self._open[number].outputs)
        try:
            while left:
                while not inbox:
                    self._step()
                piece = inbox.popleft()
                left -= piece.finish_reason is not None
                yield piece
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
        result = self._open.pop(number, None)
        for part in range(number, number + len(result.outputs)) if result is not None else ():
            self._replicas.abort(part)
            self._parts.pop(part, None)
        self._inbox.pop(number, None)

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
        default = params or SamplingParams(**self.defaults.fields)
        each = list(default) if isinstance(default, Sequence) else [default] * len(items)
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
        for output in self._replicas.step():
            number, at = self._parts.get(output.request_id, (-1, 0))
            result = self._open.get(number)
            if result is None:
                continue
            moment = time.monotonic()
            if output.token_ids and not result.first_token:
                result.first_token = moment
            part = result.outputs[at]
            part.text += output.text
            part.token_ids += output.token_ids
            part.logprobs += output.logprobs
            part.logits += output.logits
            part.finish_reason = output.finish_reason
            part.error = output.error
            part.drafts = output.drafts
            result.prompt_logprobs += output.prompt_logprobs
            result.finished = moment
            self._inbox[number].append(replace(output, request_id=number, index=at))
