"""One replica's loop: ties the scheduler (who computes what), the executor (the ranks) and the detokenisers (text).

Knows neither processes nor tensors. Used by one thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import monotonic

from shardwise.runtime.executor import Executor
from shardwise.schedule.scheduler import News, Scheduler
from shardwise.schedule.sequence import Request
from shardwise.schedule.speculation import Tally
from shardwise.schedule.step import Logprob, Step
from shardwise.tokenizer import Detokenizer, Tokenizer


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
    drafts: Tally | None = None
    """What became of its drafts so far, with speculation."""


@dataclass
class _Text:
    """The text of a request, and its tokens whose text is still uncertain, each with the characters up to its end."""

    pieces: Detokenizer
    held: deque[tuple[int, int, bytes | None, Logprob | None]] = field(default_factory=deque)


class Engine:
    """``add`` requests, ``step`` until there is no work; ``abort`` at any time."""

    def __init__(self, executor: Executor, scheduler: Scheduler, tokenizer: Tokenizer) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self._in_flight: deque[tuple[Step, float]] = deque()
        self._texts: dict[int, _Text] = {}
        self._tokens: dict[int, int] = {}
        self._collected = 0.0
        self.load = 0
        """Tokens that the unfinished requests may still need, prompts included: a measure for balancing."""

    def add(self, request: Request) -> None:
        """Accept a request; ValueError with the remedy if it can never run."""
        self.scheduler.add(request)
        self._texts[request.id] = _Text(
            Detokenizer(self.tokenizer, request.params.stop, request.params.skip_special_tokens)
        )
        self._tokens[request.id] = most = len(request.prompt) + request.params.max_tokens
        self.load += most

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

    def fill(self) -> None:
        """Give the ranks all steps that can run now."""
        while (step := self.scheduler.schedule()) is not None:
            self.executor.submit(step)
            self._in_flight.append((step, monotonic()))

    def collect(self) -> list[Output]:
        """Wait for the oldest step in flight and apply its result. Raises RankFailure."""
        result = self.executor.collect()
        step, submitted = self._in_flight.popleft()
        now = monotonic()
        self.scheduler.observe(step, now - max(submitted, self._collected))
        self._collected = now
        outputs = [self._output(news) for news in self.scheduler.update(step, result)]
        return [out for out in outputs if out.text or out.token_ids or out.prompt_logprobs or out.finish_reason]

    def step(self) -> list[Output]:
        """``fill``, then ``collect`` if anything is in flight."""
        self.fill()
        return self.collect() if self._in_flight else []

    def _output(self, news: News) -> Output:
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
            drafts=sequence.drafting.tally if sequence.drafting is not None else None,
        )

    def _forget(self, number: int) -> None:
        del self._texts[number]
        self.load -= self._tokens.pop(number)
