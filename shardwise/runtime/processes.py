"""One replica's ranks as processes, fed with steps and watched. No torch, and no idea of models.

All the ranks of a replica live and die together.
"""

from __future__ import annotations

import selectors
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import NoReturn

import msgspec

from shardwise.runtime.executor import Figures, RankFailure, Signal
from shardwise.runtime.frames import Failed, Kind, WorkerSpec, pack
from shardwise.runtime.spawn import Keeper, end
from shardwise.schedule.step import Step, StepResult

COMMAND = (sys.executable, "-m", "shardwise.runtime.worker")
COMPLAINTS = ("ConnectionError", "TimeoutError")
"""What a rank raises when the fault is likely a peer's."""
GRACE = 0.05
"""Seconds in which a death may still turn up as the cause of another rank's complaint."""
POLITE = 1.0
"""Seconds that ranks get to end by themselves."""
STOPPED = 5.0
"""Seconds that a rank may stay stopped while idle."""


class ProcessExecutor:
    """The ranks of one replica as processes; see `Executor`. Started when built; usable after `wait_ready`.

    ``specs`` are in rank order. ``step_timeout`` is in seconds.
    """

    def __init__(
        self, specs: Sequence[WorkerSpec], step_timeout: float = 300.0, command: Sequence[str] = COMMAND
    ) -> None:
        self.figures: list[Figures] = [{} for _ in specs]
        self._sampler = len(specs) - specs[0].tp
        self._step_timeout = step_timeout
        self._failure: RankFailure | None = None
        self._since = monotonic()
        """When the ranks began with the oldest step in flight, as far as is known here."""
        self._expected: deque[tuple[int, int]] = deque()
        self._results: deque[StepResult] = deque()
        self._decoder = msgspec.msgpack.Decoder(StepResult)
        self._signal = Signal()
        self._selector = selectors.DefaultSelector()
        self._keeper = Keeper(command, specs)
        self._processes = self._keeper.processes
        self._finalizer = weakref.finalize(self, end, self._keeper, 0.0)
        try:
            self._keeper.fork()
            for rank, process in enumerate(self._processes):
                for fd in (process.frames.connection.fileno(), process.pidfd):
                    if fd >= 0:
                        self._selector.register(fd, selectors.EVENT_READ, rank)
        except BaseException:
            self.kill()
            raise

    def wait_ready(self, timeout: float, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Wait until every rank has loaded. ``on_progress`` hears how many are ready, and of how many.

        Raises RankFailure when one fails or takes longer than ``timeout`` seconds; then none is left running.
        """
        deadline = monotonic() + timeout
        ready, size = 0, len(self._processes)
        try:
            while waiting := [rank for rank, process in enumerate(self._processes) if not process.ready]:
                if size - len(waiting) > ready and on_progress is not None:
                    on_progress(size - len(waiting), size)
                ready = size - len(waiting)
                left = deadline - monotonic()
                if left <= 0:
                    peers = f" (nor were {', '.join(map(str, waiting[1:]))})" if waiting[1:] else ""
                    self._late(waiting[0], f"was not ready within {timeout:g} s{peers}")
                self._turn(left)
            if on_progress is not None:
                on_progress(size, size)
        except BaseException:
            self.kill()
            raise

    def submit(self, step: Step) -> None:
        """See `Executor`. Returns when the step has left for every rank."""
        self._alive()
        if not self._expected:
            self._since = monotonic()
        self._expected.append((step.epoch, step.number))
        frame = pack(Kind.STEP, step)
        for process in self._processes:
            process.frames.send(frame)
        deadline = monotonic() + self._step_timeout
        if not self._pump(lambda: not any(p.frames.unsent for p in self._processes), deadline):
            stuck = next(rank for rank, process in enumerate(self._processes) if process.frames.unsent)
            self._late(stuck, f"took no new step within {self._step_timeout:g} s")

    def collect(self) -> StepResult:
        """See `Executor`. With nothing in flight it only looks for failures, and must find one."""
        self._alive()
        if not self._results and not self._expected:
            self._turn(0.0)
        assert self._results or self._expected, "no step is in flight"
        if not self._pump(lambda: bool(self._results), self._since + self._step_timeout):
            self._late(self._sampler, f"gave no result within {self._step_timeout:g} s")
        self._signal.lower_one()
        return self._results.popleft()

    def waitables(self) -> list[int]:
        """See `Executor`."""
        return [self._signal.fileno(), *(key.fd for key in self._selector.get_map().values())]

    def check(self) -> None:
        """See `Executor`."""
        self._alive()
        self._turn(0.0)
        for rank, process in enumerate(self._processes):
            if not process.stopped():
                process.stopped_since = None
            elif process.stopped_since is None:
                process.stopped_since = monotonic()
            elif monotonic() - process.stopped_since > STOPPED:
                self._fail(RankFailure(rank, f"has been stopped for {STOPPED:g} s"))
        if self._expected and monotonic() - self._since > self._step_timeout:
            self._late(self._sampler, f"gave no result within {self._step_timeout:g} s")

    def close(self) -> None:
        """See `Executor`. Ranks that don't end by themselves within a second are killed."""
        self._end(POLITE)

    def kill(self) -> None:
        """Close without waiting for anybody."""
        self._end(0.0)

    def _pump(self, done: Callable[[], bool], deadline: float) -> bool:
        """Carry frames both ways until ``done``; False when the time is up."""
        while not done():
            left = deadline - monotonic()
            self._turn(max(left, 0.0))
            if left <= 0:
                return done()
        return True

    def _turn(self, timeout: float) -> None:
        """Wait for something to happen, and deal with it."""
        for rank, process in enumerate(self._processes):
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.frames.unsent else 0)
            fd = process.frames.connection.fileno()
            if self._selector.get_key(fd).events != wanted:
                self._selector.modify(fd, wanted, rank)
        dead: set[int] = set()
        failed: dict[int, Failed] = {}
        for rank in {key.data for key, _ in self._selector.select(timeout)}:
            process = self._processes[rank]
            process.frames.send()
            came = process.frames.receive()
            if came is False or process.popen.poll() is not None:
                dead.add(rank)
                while came:  # its last words; a child of its own may still hold the socket open
                    came = process.frames.receive()
            try:
                while (frame := process.frames.take()) is not None:
                    self._accept(rank, frame[0], frame[1], failed)
            except (ValueError, msgspec.MsgspecError) as error:
                self._fail(RankFailure(rank, f"sent what makes no sense ({error})"))
        if dead or failed:
            self._blame(dead, failed)

    def _accept(self, rank: int, kind: Kind, payload: bytes, failed: dict[int, Failed]) -> None:
        if kind is Kind.FAILED:
            failed[rank] = msgspec.msgpack.decode(payload, type=Failed)
        elif kind is Kind.READY:
            self.figures[rank] = msgspec.msgpack.decode(payload, type=Figures)
            self._processes[rank].ready = True
        else:
            result = self._decoder.decode(payload)
            answered = (result.epoch, result.number)
            if not self._expected or self._expected.popleft() != answered:
                self._fail(RankFailure(rank, f"answered step {answered} out of turn"))
            self._since = monotonic()
            self._results.append(result)
            self._signal.raise_one()

    def _blame(self, dead: set[int], failed: dict[int, Failed]) -> None:
        """Raise the failure that explains the others.

        A rank that is killed or stopped makes its peers complain of lost connections and missed deadlines, sometimes
        before the kernel tells of the death: so such complaints are the last to be believed.
        """
        deadline = monotonic() + GRACE
        while not (killed := [rank for rank, p in enumerate(self._processes) if (p.popen.poll() or 0) < 0]):
            if monotonic() > deadline:
                break
            sleep(0.002)
        plain = [rank for rank, error in failed.items() if error.kind not in COMPLAINTS]
        rank = [*killed, *plain, *self._stopped(), *failed, *dead][0]
        process = self._processes[rank]
        if rank in failed and rank not in killed:
            error = failed[rank]
            self._fail(RankFailure(rank, f"{error.kind}: {error.text}", error.kind, error.trace))
        if process.stopped():
            self._fail(RankFailure(rank, "is stopped"))
        cause, lines = process.epitaph()
        self._fail(RankFailure(rank, f"{cause}; its last lines:\n{lines}" if lines else cause, detail=lines))

    def _late(self, rank: int, cause: str) -> NoReturn:
        stopped = self._stopped()
        self._fail(RankFailure(stopped[0], "is stopped") if stopped else RankFailure(rank, cause))

    def _end(self, grace: float) -> None:
        self._failure = self._failure or RankFailure(0, "the executor is closed")
        end(self._keeper, grace)
        self._selector.close()
        self._signal.close()
        self._finalizer.detach()

    def _stopped(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.stopped()]

    def _alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, failure: RankFailure) -> NoReturn:
        self._failure = failure
        self.kill()
        raise failure
