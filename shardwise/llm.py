"""The offline door: load a model on a layout, then generate, chat or stream. Used by one thread at a time."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardwise.config import EngineConfig, Layout, Speculation
from shardwise.defaults import model_defaults
from shardwise.engine import Engine, Output
from shardwise.outputs import CompletionOutput, RequestOutput
from shardwise.params import MAX_SEED, SamplingParams
from shardwise.replicas import Replicas
from shardwise.runtime.launch import RunPlan, launch, plan_run
from shardwise.runtime.source import Source, open_source
from shardwise.schedule.scheduler import Scheduler
from shardwise.schedule.sequence import Request
from shardwise.schedule.speculation import Tally
from shardwise.tokenizer import Tokenizer

if TYPE_CHECKING:
    from shardwise.grammar import Grammars

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model on a layout.

    ``model`` is an alias (``smollm2``), a Hugging Face directory, a .gguf file or a hub id; ``layout`` such as
    ``"tp2.pp2"``; ``settings`` are the other fields of EngineConfig, ``speculate`` as text too (see Speculation.parse).
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
        started = time.monotonic()
        if isinstance(settings.get("speculate"), str):
            settings["speculate"] = Speculation.parse(settings["speculate"])
        config = EngineConfig(layout=Layout.parse(layout) if isinstance(layout, str) else layout, **settings)
        self.source = open_source(model)
        self.tokenizer = open_tokenizer(self.source)
        self.eos = self.source.eos | self.tokenizer.eos
        self.defaults = model_defaults(self.source.generation if generation_config else {})
        """What holds for fields that a request leaves open, where params aren't given as a whole."""
        self.plan = plan_run(self.source, config)
        if self.plan.draft is not None and self.plan.draft.source is not None:
            check_vocabulary(self.tokenizer, open_tokenizer(self.plan.draft.source))
        executors = launch(self.plan, on_progress)
        self._replicas = Replicas(
            [Engine(executor, make_scheduler(self.plan, self.eos), self.tokenizer) for executor in executors]
        )
        self.figures = [executor.figures for executor in executors]
        """What the ranks of each replica said of themselves when they were ready."""
        self.load_s = time.monotonic() - started
        self._grammars: Grammars | None = None
        self._numbers = itertools.count()
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
        """Yield the pieces of one continuation as they come; leaving the loop early aborts the request."""
        return self.pieces(self.submit(prompt, params or SamplingParams(**self.defaults.fields)))

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
            text = self.tokenizer.chat(messages)
            tokens = self.tokenizer.encode(text, add_special_tokens=False)  # a template writes its own
        elif isinstance(prompt, str):
            text, tokens = prompt, self.tokenizer.encode(prompt)
        else:
            assert prompt is not None
            tokens = list(prompt)
            known = range(self.source.config.vocab_size)
            for token in tokens:
                if type(token) is not int or token not in known:  # True is an int too
                    raise ValueError(f"the prompt: {token!r} is not a token id from 0 to {known[-1]}")
            text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        number, *others = itertools.islice(self._numbers, params.n)  # in a row: see abort
        began = text if params.echo else ""
        self._open[number] = RequestOutput(
            index, text, tokens, [CompletionOutput(at, began) for at in range(params.n)], submitted=time.monotonic()
        )
        self._inbox[number] = deque(Output(number, began, [], [], None, at) for at in range(params.n) if began)
        try:
            for at, request in enumerate(self._requests([number, *others], tuple(tokens), params, want_logits)):
                self._replicas.add(request)
                self._parts[request.id] = number, at
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

    def _requests(
        self, numbers: Sequence[int], tokens: tuple[int, ...], params: SamplingParams, want_logits: bool
    ) -> Iterator[Request]:
        """One request for each of the n continuations: the first is the one that n=1 has."""
        seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
        encode, words = self.tokenizer.encode, params.bad_words
        spelled = {tuple(encode(start + word, add_special_tokens=False)) for word in words for start in ("", " ")}
        matcher = None
        if params.grammar is not None:
            from shardwise.grammar import Grammars

            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, self.source.config.vocab_size, self.eos)
            ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos)
            matcher = self._grammars.compile(params, ends)
        for at, number in enumerate(numbers):
            yield Request(
                number,
                tokens,
                params if at == 0 else replace(params, prompt_logprobs=None),
                seed_of(seed, at),
                want_logits=want_logits,
                bad_words=tuple(sorted(spelled)),
                matcher=matcher if at == 0 or matcher is None else matcher.copy(),
            )

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


def seed_of(seed: int, index: int) -> int:
    """The seed of one of a request's n continuations: the request's own for number 0, a hash for the others."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def check_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """ValueError unless a draft model means the same as the target by the ids they share; special tokens may differ."""
    special = target.special | draft.special
    for token in range(min(target.vocab_size, draft.vocab_size)):
        if token not in special and target.spell(token) != draft.spell(token):
            raise ValueError(
                f"speculate: the draft model has another vocabulary: token {token} is {draft.spell(token)!r} there and "
                f"{target.spell(token)!r} here; choose a draft of the same family, or speculate with ngram or self"
            )


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
        "speculation": engine.speculate,
        "max_draft_len": plan.draft.max_len if plan.draft is not None else None,
        "num_draft_ids": plan.draft.num_ids if plan.draft is not None else None,
    }
    return Scheduler(**{**chosen, **settings})
