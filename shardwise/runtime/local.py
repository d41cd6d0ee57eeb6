"""Ranks within this process: one by direct call, or a whole layout as threads.

Knows axes and steps; what a rank does with a step is the rank's business.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic

from shardwise.config import Coordinates, Layout
from shardwise.parallel.axis import Axis
from shardwise.parallel.threads import thread_axes
from shardwise.runtime.executor import Figures, Rank, RankFailure, Signal
from shardwise.schedule.step import Step, StepResult

MakeRank = Callable[[Coordinates, tuple[Axis, Axis]], Rank]
"""Builds a rank from its place in the mesh and its (tp, pp) axes; called where the rank will run."""


class InProcessExecutor:
    """One rank, run in the caller's thread by `collect`. A step that failed leaves it fit for the next.

    So does one that was interrupted, but for what was in flight with it: whoever calls next hears that it has failed.
    """

    ready = True

    def __init__(self, make_rank: MakeRank) -> None:
        self._rank = make_rank(Coordinates(0, 0, 0), (Axis(), Axis()))
        self.figures: list[Figures] = [self._rank.load() or {}]
        self._steps: deque[Step] = deque()
        self._signal = Signal()
        self._interrupted = False

    def submit(self, step: Step) -> None:
        """See `Executor`."""
        self.check()
        self._steps.append(step)
        self._signal.raise_one()

    def collect(self) -> StepResult:
        """See `Executor`."""
        self.check()
        assert self._steps, "no step is in flight"
        try:
            self._signal.lower_one()
            result = self._rank.step(self._steps.popleft())
        except BaseException as error:
            self._steps.clear()
            self._signal.clear()
            if isinstance(error, Exception):
                raise _failure(0, error) from error
            self._interrupted = True
            raise
        assert result is not None, "a single rank samples"
        return result

    def waitables(self) -> list[int]:
        """See `Executor`."""
        return [self._signal.fileno()]

    def check(self) -> None:
        """See `Executor`."""
        if self._interrupted:
            self._interrupted = False
            raise RankFailure(0, "a step was interrupted")

    def close(self) -> None:
        """See `Executor`."""
        self._rank.close()
        self._steps.clear()
        self._signal.close()


class ThreadExecutor:
    """The tp x pp ranks of a replica as threads. Times are in seconds."""

    ready = True

    def __init__(
        self, layout: Layout, make_rank: MakeRank, start_timeout: float = 60.0, step_timeout: float = 60.0
    ) -> None:
        assert layout.dp == 1, "an executor runs one replica"
        self._step_timeout = step_timeout
        self._make_rank = make_rank
        self._results: SimpleQueue[StepResult | RankFailure] = SimpleQueue()
        self._ready: SimpleQueue[tuple[int, Figures] | RankFailure] = SimpleQueue()
        self._failure: RankFailure | None = None
        self._signal = Signal()
        size = layout.replica_size
        self._axes = thread_axes(layout.tp, layout.pp, step_timeout)
        self._steps: list[SimpleQueue[Step | None]] = [SimpleQueue() for _ in range(size)]
        self._threads = [
            threading.Thread(target=self._run, args=(rank, layout.coordinates(rank)), name=f"rank {rank}", daemon=True)
            for rank in range(size)
        ]
        for thread in self._threads:
            thread.start()
        self.figures: list[Figures] = [{} for _ in range(size)]
        deadline = monotonic() + start_timeout
        waiting = set(range(size))
        while waiting:
            try:
                ready = self._ready.get(timeout=max(0.0, deadline - monotonic()))
            except Empty:
                ready = RankFailure(min(waiting), f"was not ready within {start_timeout:g} s")
            if isinstance(ready, RankFailure):
                self.close()
                raise ready
            self.figures[ready[0]] = ready[1]
            waiting.remove(ready[0])

    def submit(self, step: Step) -> None:
        """See `Executor`."""
        if self._failure is not None:
            raise self._failure
        for steps in self._steps:
            steps.put(step)

    def collect(self) -> StepResult:
        """See `Executor`."""
        if self._failure is not None:
            raise self._failure
        try:
            result = self._results.get(timeout=self._step_timeout)
            self._signal.lower_one()
        except Empty:
            result = RankFailure(len(self._threads) - 1, f"gave no result within {self._step_timeout:g} s")
        if isinstance(result, RankFailure):
            self._failure = result
            self.close()
            raise result
        return result

    def waitables(self) -> list[int]:
        """See `Executor`."""
        return [self._signal.fileno()]

    def check(self) -> None:
        """See `Executor`."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End all ranks; one that is busy is given five seconds to see it."""
        self._failure = self._failure or RankFailure(0, "the executor is closed")
        for steps, axes in zip(self._steps, self._axes, strict=True):
            steps.put(None)
            for axis in axes:
                axis.close()
        for thread in self._threads:
            thread.join(timeout=5.0)
        self._signal.close()

    def _run(self, index: int, coordinates: Coordinates) -> None:
        report: Callable[[RankFailure], None] = self._ready.put
        try:
            rank = self._make_rank(coordinates, self._axes[index])
            self._ready.put((index, rank.load() or {}))
            report = self._fail
            while (step := self._steps[index].get()) is not None:
                result = rank.step(step)
                if result is not None:
                    self._results.put(result)
                    self._signal.raise_one()
            rank.close()
        except Exception as error:
            # The report comes before the peers are woken, so theirs, of a peer that left, can only come after it.
            report(_failure(index, error))
            for axis in self._axes[index]:
                axis.close()

    def _fail(self, failure: RankFailure) -> None:
        self._results.put(failure)
        self._signal.raise_one()


def _failure(rank: int, error: Exception) -> RankFailure:
    kind = type(error).__name__
    own = not isinstance(error, ConnectionError | TimeoutError)
    return RankFailure(rank, f"{kind}: {error}", kind, traceback.format_exc(), own)
