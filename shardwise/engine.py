"""One replica's loop: ties the scheduler (who computes what), the executor (the ranks) and the detokenisers (text).

Knows neither processes nor tensors. Used by one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

from shardwise.runtime.executor import Executor
from shardwise.schedule.scheduler import Scheduler
from shardwise.schedule.sequence import Request, Sequence
from shardwise.schedule.step import Step
from shardwise.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True)
class Output:
    """News of one request. The pieces of a request, joined, are its whole text, ids and logits."""

    request_id: int
    text: str
    token_ids: list[int]
    logits: list[bytes]
    """Raw logits of each token's row, if the request wants them."""
    finish_reason: str | None
    """"stop", "length" or "abort" with the last piece, None before."""


class Engine:
    """``add`` requests, ``step`` until there is no work; ``abort`` at any time."""

    def __init__(self, executor: Executor, scheduler: Scheduler, tokenizer: Tokenizer) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self._in_flight: deque[Step] = deque()
        self._texts: dict[int, Detokenizer] = {}
        self._tokens: dict[int, int] = {}
        self.load = 0
        """Tokens that the unfinished requests may still need, prompts included: a measure for balancing."""

    def add(self, request: Request) -> None:
        """Accept a request; ValueError with the remedy if it can never run."""
        self.scheduler.add(request)
        self._texts[request.id] = Detokenizer(self.tokenizer, request.params.stop)
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
            self._in_flight.append(step)

    def collect(self) -> list[Output]:
        """Wait for the oldest step in flight and apply its result. Raises RankFailure."""
        result = self.executor.collect()
        step = self._in_flight.popleft()
        rows = {chunk.sequence: raw for chunk, raw in zip(step.chunks, result.logits, strict=True) if raw}
        return [
            self._output(sequence, tokens, rows) for sequence, tokens in self.scheduler.update(step, result) if tokens
        ]

    def step(self) -> list[Output]:
        """``fill``, then ``collect`` if anything is in flight."""
        self.fill()
        return self.collect() if self._in_flight else []

    def _output(self, sequence: Sequence, tokens: Items[int], rows: dict[int, bytes]) -> Output:
        number = sequence.request.id
        text = self._texts[number]
        visible = tokens[:-1] if sequence.finish_reason == "stop" else tokens  # the token that stops is not text
        piece = ""
        for token in visible:
            piece += text.push(token)
            if text.stopped:
                self.scheduler.finish(number, "stop")
                break
        if sequence.finish_reason is not None:
            piece += text.finish()
            self._forget(number)
        logits = [rows[number]] if number in rows else []
        return Output(number, piece, list(tokens), logits, sequence.finish_reason)

    def _forget(self, number: int) -> None:
        del self._texts[number]
        self.load -= self._tokens.pop(number)
