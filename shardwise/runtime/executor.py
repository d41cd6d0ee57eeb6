"""What the engine sees of the ranks: submit steps, collect results in order, hear of a failure.

Imports no torch: it lives in the front process, and knows neither how ranks run nor what a model is.
"""

from __future__ import annotations

import os
import select
from typing import Protocol

from shardwise.schedule.step import Step, StepResult


class RankFailure(RuntimeError):
    """A rank died, hung or raised. Its whole replica is gone: the executor that raised this is of no more use.

    ``rank`` counts within the replica. ``cause`` is a sentence for people. ``kind`` is the name of the exception that
    the rank reported, or empty when it died without a word; ``detail`` is that exception's traceback or the last lines
    of the rank's stderr. ``own``: it came from the work itself (an exception, a crash in native code), so the same work
    may bring it again; else it came from outside (a kill, a stop, a lost peer). ``final``: it is no use to start again.
    """

    def __init__(
        self, rank: int, cause: str, kind: str = "", detail: str = "", own: bool = False, final: bool = False
    ) -> None:
        super().__init__(f"rank {rank}: {cause}")
        self.rank, self.cause, self.kind, self.detail, self.own, self.final = rank, cause, kind, detail, own, final

    def on(self, host: str) -> RankFailure:
        """The same, of a rank on another host."""
        return RankFailure(self.rank, f"on {host}: {self.cause}", self.kind, self.detail, self.own, self.final)


Figures = dict[str, int | float | str]
"""What a rank tells about itself when it is ready."""


class Rank(Protocol):
    """One rank's work, wherever it runs."""

    def load(self) -> Figures | None:
        """Read the weights; tell about it."""

    def step(self, step: Step) -> StepResult | None:
        """Run one step; the rank that samples (last stage, tp rank 0) returns its result, the others None."""

    def close(self) -> None:
        """No step follows; harmless when repeated. Not called after a step that failed."""


class Executor(Protocol):
    """Runs steps on all ranks of one replica. Used by one thread; any method may raise RankFailure."""

    figures: list[Figures]
    """Of each rank, in rank order; complete when ``ready``."""

    @property
    def ready(self) -> bool:
        """Have all ranks loaded? Until then only `check`, which hears of it, and `close` may be called."""

    def submit(self, step: Step) -> None:
        """Start a step. Several may be in flight."""

    def collect(self) -> StepResult:
        """The result of the oldest step in flight; blocks up to the step timeout."""

    def waitables(self) -> list[int]:
        """File descriptors, fixed for life, of which one is readable when `collect` would not block, or would raise."""

    def check(self) -> None:
        """Hear what ranks have to say, and raise if one has died, is late or stays stopped.

        For whoever waits elsewhere than in `collect`.
        """

    def close(self) -> None:
        """End all ranks and free what they held; harmless when repeated."""


class Signal:
    """A counter of ready results that a selector can wait for."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        """The descriptor that is readable while the count is above 0."""
        return self._read

    def raise_one(self) -> None:
        """Count one more."""
        if self._write >= 0:
            os.write(self._write, b"!")

    def lower_one(self) -> None:
        """Count one less; the count must be above 0."""
        os.read(self._read, 1)

    def clear(self) -> None:
        """Count from 0 again."""
        while select.select([self._read], [], [], 0.0)[0]:
            os.read(self._read, 4096)

    def close(self) -> None:
        """Give both descriptors back; harmless when repeated."""
        for fd in (self._read, self._write):
            if fd >= 0:
                os.close(fd)
        self._read = self._write = -1

    def __del__(self) -> None:
        self.close()
