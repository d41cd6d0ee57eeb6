"""Stand-ins that need no torch and no process: ranks whose tokens are given, and a tokenizer of single letters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from shardwise.runtime.executor import Figures, RankFailure, Signal
from shardwise.schedule.scheduler import Scheduler
from shardwise.schedule.step import Chunk, Step, StepResult


class ScriptedExecutor:
    """Ranks that draw ``script(request id, position)``; ``fail_at`` is the number of a step that kills rank 0."""

    ready = True

    def __init__(self, script: Callable[[int, int], int], fail_at: int | None = None) -> None:
        self.figures: list[Figures] = [{}]
        self.steps: list[Step] = []
        self.closed = False
        self._script = script
        self._fail_at = fail_at
        self._due: deque[Step] = deque()
        self._signal = Signal()

    def submit(self, step: Step) -> None:
        self.steps.append(step)
        self._due.append(step)
        self._signal.raise_one()

    def collect(self) -> StepResult:
        step = self._due.popleft()
        self._signal.lower_one()
        if step.number == self._fail_at:
            raise RankFailure(0, "was killed by SIGKILL")
        tokens = [self._answer(chunk) if chunk.sampling else [] for chunk in step.chunks]
        return StepResult(step.epoch, step.number, tokens, [[]] * len(tokens), [[]] * len(tokens))

    def _answer(self, chunk: Chunk) -> list[int]:
        first = len(chunk.tokens) - chunk.drafts
        drafts = chunk.tokens[first:]
        true = [self._script(chunk.sequence, chunk.start + first + place) for place in range(chunk.drafts + 1)]
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, true, strict=False)))
        return true[: accepted + 1]

    def waitables(self) -> list[int]:
        return [self._signal.fileno()]

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        self._signal.close()


class Letters:
    """Token n is the character with code n; 0 and 1 are special."""

    special = frozenset({0, 1})

    def spell(self, number: int) -> bytes:
        return chr(number).encode()


def small_scheduler(**settings: Any) -> Scheduler:
    """Of a few blocks and short steps, for tokens that are characters; ``settings`` replace its own."""
    chosen = {
        "num_blocks": 32,
        "max_model_len": 200,
        "max_batch_tokens": 64,
        "max_chunk": 64,
        "max_num_seqs": 16,
        "num_in_flight": 1,
        "prefix_cache": True,
        "eos": frozenset({0}),
        "vocab_size": 0x20000,
        "secret": b"test",
    }
    return Scheduler(**{**chosen, **settings})
