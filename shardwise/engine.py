"""One replica's loop: ties the scheduler (who computes what), the executor (the ranks) and the detokenisers (text).

Ranks may fail: new ones then go on from the tokens that are known. Knows neither processes nor tensors. Used by one
thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from time import monotonic

from shardwise.runtime.executor import Executor, RankFailure
from shardwise.schedule.scheduler import Scheduler
from shardwise.schedule.sequence import News, Request
from shardwise.schedule.speculation import Tally
from shardwise.schedule.step import Logprob, Step
from shardwise.tokenizer import Detokenizer, Tokenizer

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Output:
    """News of one request. The pieces of a request, joined, are its whole text, ids and log-probabilities.

    A token comes with the piece that holds the last of its text, so that the text of a piece is that of its tokens,
    but for what a stop string cuts off.
    """

    request_id: int
    text: str
    token_ids: list[int]
    logits: list[bytes]
    """Raw logits of each token's row, if the request wants them."""
    finish_reason: str | None
    """"stop", "length", "abort" or "error" with the last piece, None before."""
    index: int = 0
    """Which of the request's n continuations it is."""
    logprobs: list[Logprob] = field(default_factory=list)
    """Of each token, if the request wants them."""
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    """Of the prompt's next tokens, from its second one on, if the request wants them."""
    error: str = ""
    """A sentence to go with "error"."""
    unsatisfiable: bool = False
    """The error is the request's: nothing may follow under the constraints that it asks for."""
    drafts: Tally | None = None
    """What became of its drafts so far, with speculation."""
    embedding: list[float] = field(default_factory=list)
    """The pooled hidden state of the prompt, with the last piece, if the request wants it."""


@dataclass
class _Text:
    """The text of a request, and its tokens whose text is still uncertain, each with the characters up to its end."""

    pieces: Detokenizer
    held: deque[tuple[int, int, bytes | None, Logprob | None]] = field(default_factory=deque)


STRIKES = {False: 1, True: 2}
"""What a fault counts against the requests in flight: less from outside than where it came from the work itself."""
PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each new start of ranks that fail before they are ready."""


class Engine:
    """``add`` requests, ``step`` until there is no work; ``abort`` at any time.

    ``restart`` makes the executor that follows one that failed; without it the failure is raised. Ranks that fail
    before they are ready are started again for ``patience`` seconds, or as often as `PAUSES` has it.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        restart: Callable[[Executor], Executor] | None = None,
        patience: float | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.restart = restart
        self._start_at: float | None = None
        """When to start ranks, where there are none."""
        self._patience = patience
        self._num_starts = 0
        """Starts since ranks were last ready."""
        self._failing_since = inf
        """When ranks failed that had been ready."""
        self._in_flight: deque[tuple[Step, float]] = deque()
        self._texts: dict[int, _Text] = {}
        self._tokens: dict[int, int] = {}
        self._collected = 0.0
        self.load = 0
        """Tokens that the unfinished requests may still need, prompts included: a measure for balancing."""
        self.num_failures = 0
        self.failure: RankFailure | None = None
        """The last one."""
        self.lost = False
        """Is there no way to get ranks any more?"""

    def add(self, request: Request) -> None:
        """Accept a request; ValueError with the remedy if it can never run."""
        self.scheduler.add(request)
        text = _Text(Detokenizer(self.tokenizer, request.params.stop, request.params.skip_special_tokens))
        self._hold(request, text)

    def move(self, request_id: int, other: Engine) -> None:
        """Have another engine of the same plan go on with a request that holds no blocks."""
        sequence = self.scheduler.release(request_id)
        text = self._forget(request_id)
        other.scheduler.adopt(sequence)
        other._hold(sequence.request, text)

    def abort(self, request_id: int) -> None:
        """Forget a request and free what it holds; harmless if it is already done."""
        if request_id in self._texts:
            self._forget(request_id)
            self.scheduler.finish(request_id, "abort")

    @property
    def has_work(self) -> bool:
        """Is any accepted request unfinished?"""
        return bool(self._texts)

    @property
    def in_flight(self) -> int:
        """Steps whose results are due."""
        return len(self._in_flight)

    @property
    def ready(self) -> bool:
        """Are there ranks to give steps to?"""
        return self._start_at is None and self.executor.ready

    def fill(self) -> None:
        """Give the ranks all steps that can run now."""
        while self.ready and (step := self.scheduler.schedule()) is not None:
            self._in_flight.append((step, monotonic()))
            self.executor.submit(step)

    def collect(self) -> list[Output]:
        """Wait for the oldest step in flight and apply its result. Raises RankFailure."""
        result = self.executor.collect()
        if result.said:
            log.warning(result.said)
        self._num_starts = 0
        step, submitted = self._in_flight.popleft()
        now = monotonic()
        self.scheduler.observe(step, now - max(submitted, self._collected))
        self._collected = now
        outputs = [self._output(news) for news in self.scheduler.update(step, result)]
        return [out for out in outputs if out.text or out.token_ids or out.prompt_logprobs or out.finish_reason]

    def recover(self, failure: RankFailure) -> list[Output]:
        """After a failure of its ranks: forget all KV; `tend` will start new ranks, unless this engine is ``lost``.

        Returns the end of those requests that ranks failed over again and again.
        """
        if self._num_starts == 0:
            self._failing_since = monotonic()
        pause = PAUSES[min(self._num_starts, len(PAUSES) - 1)]
        over = self._num_starts == len(PAUSES)
        if self._patience is not None:
            over = monotonic() + pause - self._failing_since > self._patience
        self.lost = self.restart is None or failure.final or over
        self._start_at = inf if self.lost else monotonic() + pause
        self.num_failures += 1
        self.failure = failure
        self._in_flight.clear()
        outputs = []
        for sequence in self.scheduler.reset(STRIKES[failure.own]):
            sequence.error = f"ranks failed over this request again and again, at last {failure}"
            outputs.append(self._output(News(sequence, [], [], [], [])))
        return outputs

    def tend(self) -> None:
        """Start ranks where that is due, and hear from those that start, are idle or are late. Raises RankFailure."""
        if self._start_at is None:
            self.executor.check()
            if self.executor.ready:
                self._num_starts = 0
        elif monotonic() >= self._start_at:
            assert self.restart is not None
            self._num_starts += 1
            self._start_at = None
            try:
                self.executor = self.restart(self.executor)
            except OSError as error:
                raise RankFailure(0, f"can't be started: {error}") from error

    def waitables(self) -> list[int]:
        """Descriptors of which one is readable when `collect` or `tend` has something to do."""
        return self.executor.waitables() if self._start_at is None else []

    def step(self) -> list[Output]:
        """``fill``, then ``collect`` if anything is in flight. Raises RankFailure."""
        self.fill()
        return self.collect() if self._in_flight else []

    def _output(self, news: News) -> Output:
        try:
            return self._text_of(news)
        except Exception as error:  # a request whose text can't be made fails alone
            number = news.sequence.request.id
            self.scheduler.finish(number, "error")
            if number in self._texts:
                self._forget(number)
            return Output(number, "", [], [], "error", error=f"its text failed: {type(error).__name__}: {error}")

    def _text_of(self, news: News) -> Output:
        sequence, number = news.sequence, news.sequence.request.id
        text = self._texts[number]
        piece = ""
        for at, token in enumerate(news.tokens):
            if token not in sequence.stops:  # the token that stops is not text
                piece += text.pieces.push(token)
            row = news.logits[at] if news.logits else None
            text.held.append((text.pieces.received, token, row, news.logprobs[at] if news.logprobs else None))
            if text.pieces.stopped:
                self.scheduler.finish(number, "stop")
                sequence.finish_reason = "stop"  # also where this step ended it otherwise: the stop string came first
                break
        if sequence.finish_reason is not None:
            piece += text.pieces.finish()
            self._forget(number)
        ready = []
        while text.held and (sequence.finish_reason is not None or text.held[0][0] <= text.pieces.released):
            ready.append(text.held.popleft())
        return Output(
            number,
            piece,
            [token for _, token, _, _ in ready],
            [row for _, _, row, _ in ready if row is not None],
            sequence.finish_reason,
            logprobs=[logprob for _, _, _, logprob in ready if logprob is not None],
            prompt_logprobs=news.prompt_logprobs,
            error=sequence.error,
            unsatisfiable=sequence.unsatisfiable,
            drafts=sequence.drafting.tally if sequence.drafting is not None else None,
            embedding=sequence.embedding if sequence.request.pooling and sequence.finish_reason == "length" else [],
        )

    def _hold(self, request: Request, text: _Text) -> None:
        self._texts[request.id] = text
        self._tokens[request.id] = most = len(request.prompt) + request.params.max_tokens
        self.load += most

    def _forget(self, number: int) -> _Text:
        self.load -= self._tokens.pop(number)
        return self._texts.pop(number)
