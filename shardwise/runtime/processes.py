"""One replica's ranks as processes: starts, feeds, watches and buries them. No torch, and no idea of models.

All the ranks of a replica live and die together. Nothing of them can outlast the front process: the kernel kills a rank
with its parent, the control socket is a pair without a name, and the memory that ranks share is a file without one.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

import msgspec

from shardwise.runtime.executor import Figures, RankFailure, Signal
from shardwise.runtime.frames import Failed, Frames, Kind, WorkerSpec, pack
from shardwise.schedule.step import Step, StepResult

COMMAND = (sys.executable, "-m", "shardwise.runtime.worker")
DEBUG = "SHARDWISE_DEBUG"
"""Environment variable: when set, what ranks write to stderr is passed on."""
GRACE = 0.05
"""Seconds in which a death may still turn up as the cause of another rank's complaint."""
POLITE = 1.0
"""Seconds that ranks get to end by themselves."""
STOPPED = 5.0
"""Seconds that a rank may stay stopped while idle."""
TAIL = 4096
"""Bytes kept of a rank's stderr."""


@dataclass
class _Process:
    """A rank as the front sees it."""

    popen: subprocess.Popen[bytes]
    frames: Frames
    stderr: int
    pidfd: int
    tail: bytes = b""
    silent: threading.Event = field(default_factory=threading.Event)
    ready: bool = False
    stopped_since: float | None = None

    def bury(self) -> None:
        """Kill, reap and let go; harmless when repeated."""
        self.popen.kill()
        self.popen.wait()
        self.frames.connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def stopped(self) -> bool:
        """Whether the kernel says, where it can be asked, that the process is stopped."""
        try:
            return Path(f"/proc/{self.popen.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"Tt"
        except OSError:
            return False

    def epitaph(self) -> tuple[str, str]:
        """How the process ended, in words, and its last lines."""
        code = self.popen.poll()
        if code is None:
            cause = "closed its connection"
        elif code >= 0:
            cause = f"exited with code {code}"
        else:
            cause = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                cause += ", probably because memory ran out (the kernel's log, dmesg, tells)"
        self.silent.wait(GRACE)
        lines = self.tail.decode(errors="replace").strip().splitlines()[-12:]
        return cause, "\n".join(lines)


class _Keeper(threading.Thread):
    """Forks the ranks, then reads their stderr to its end.

    The kernel's parent-death signal follows the thread that forked, not the process: were a rank forked by a thread of
    some pool, it would be killed when the pool lets go of the thread. This one ends after its ranks.
    """

    def __init__(self, command: Sequence[str], specs: Sequence[WorkerSpec]) -> None:
        super().__init__(name="keeper of ranks", daemon=True)
        self.processes: list[_Process] = []
        self.begun = threading.Event()
        self.cancelled = False
        self.error: Exception | None = None
        self._command, self._specs = command, specs

    def run(self) -> None:
        """Fork, then listen."""
        try:
            self._fork()
        except Exception as error:
            self.error = error
        self.begun.set()
        with selectors.DefaultSelector() as selector:
            for process in self.processes:
                selector.register(process.stderr, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    self._hear(key.data, selector)

    def _fork(self) -> None:
        shared = _anonymous_file()
        try:
            for spec in self._specs:
                if self.cancelled:
                    return
                self.processes.append(_spawn(self._command, spec.threads, shared))
                start = msgspec.structs.replace(spec, shared=shared)
                self.processes[-1].frames.send(pack(Kind.START, start))
        finally:
            os.close(shared)

    def _hear(self, process: _Process, selector: selectors.BaseSelector) -> None:
        data = os.read(process.stderr, 1 << 16)
        process.tail = (process.tail + data)[-TAIL:]
        if not data:
            selector.unregister(process.stderr)
            os.close(process.stderr)
            process.silent.set()
        elif os.environ.get(DEBUG):
            os.write(2, data)


class ProcessExecutor:
    """The ranks of one replica as processes; see `Executor`.

    ``specs`` are in rank order. Times are in seconds. ``on_progress`` hears how many ranks are ready, and of how many.
    Raises RankFailure when a rank can't be started within ``start_timeout``; then none is left running.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        start_timeout: float = 300.0,
        step_timeout: float = 300.0,
        on_progress: Callable[[int, int], None] | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.figures: list[Figures] = [{} for _ in specs]
        self._step_timeout = step_timeout
        self._on_progress = on_progress
        self._failure: RankFailure | None = None
        self._expected: deque[tuple[int, int]] = deque()
        self._results: deque[StepResult] = deque()
        self._decoder = msgspec.msgpack.Decoder(StepResult)
        self._signal = Signal()
        self._selector = selectors.DefaultSelector()
        self._keeper = _Keeper(command, specs)
        self._processes = self._keeper.processes
        self._finalizer = weakref.finalize(self, _end, self._keeper, self._selector, self._signal, 0.0)
        try:
            self._start(specs, start_timeout)
        except BaseException:
            self._end(0.0)
            raise

    def submit(self, step: Step) -> None:
        """See `Executor`. Returns when the step has left for every rank."""
        self._alive()
        self._expected.append((step.epoch, step.number))
        frame = pack(Kind.STEP, step)
        for process in self._processes:
            process.frames.send(frame)
        sent = self._pump(lambda: not any(p.frames.unsent for p in self._processes), self._step_timeout)
        if not sent:
            stuck = next(rank for rank, process in enumerate(self._processes) if process.frames.unsent)
            self._late(stuck, f"took no new step within {self._step_timeout:g} s")

    def collect(self) -> StepResult:
        """See `Executor`. With nothing in flight it only looks for failures, and must find one."""
        self._alive()
        if not self._results and not self._expected:
            self._turn(0.0)
        assert self._results or self._expected, "no step is in flight"
        if not self._pump(lambda: bool(self._results), self._step_timeout):
            sampler = len(self._processes) - self._specs[0].tp
            self._late(sampler, f"gave no result within {self._step_timeout:g} s")
        self._signal.lower_one()
        return self._results.popleft()

    def waitables(self) -> list[int]:
        """See `Executor`."""
        return [self._signal.fileno(), *(int(key.fd) for key in self._selector.get_map().values())]

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

    def close(self) -> None:
        """See `Executor`. Ranks that don't end by themselves within a second are killed."""
        self._failure = self._failure or RankFailure(0, "the executor is closed")
        self._end(POLITE)

    def _start(self, specs: Sequence[WorkerSpec], timeout: float) -> None:
        deadline = monotonic() + timeout
        self._specs = specs
        self._keeper.start()
        self._keeper.begun.wait(timeout)
        if self._keeper.error is not None:
            raise self._keeper.error
        for rank, process in enumerate(self._processes):
            self._selector.register(process.frames.connection, selectors.EVENT_READ, rank)
            if process.pidfd >= 0:
                self._selector.register(process.pidfd, selectors.EVENT_READ, rank)
        if not self._pump(lambda: all(process.ready for process in self._processes), deadline - monotonic()):
            waiting = [rank for rank, process in enumerate(self._processes) if not process.ready]
            peers = f" (nor were {', '.join(map(str, waiting[1:]))})" if waiting[1:] else ""
            self._late(waiting[0], f"was not ready within {timeout:g} s{peers}")

    def _pump(self, done: Callable[[], bool], timeout: float) -> bool:
        """Carry frames both ways until ``done``; False when the time is up."""
        deadline = monotonic() + timeout
        while not done():
            left = deadline - monotonic()
            if left <= 0:
                return False
            self._turn(left)
        return True

    def _turn(self, timeout: float) -> None:
        """Wait for something to happen, and deal with it."""
        for rank, process in enumerate(self._processes):
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.frames.unsent else 0)
            if self._selector.get_key(process.frames.connection).events != wanted:
                self._selector.modify(process.frames.connection, wanted, rank)
        dead: set[int] = set()
        failed: dict[int, Failed] = {}
        for rank in {key.data for key, _ in self._selector.select(timeout)}:
            process = self._processes[rank]
            process.frames.send()
            open_still = process.frames.receive()
            if not open_still or process.popen.poll() is not None:
                dead.add(rank)
                while open_still:  # its last words
                    open_still = process.frames.receive()
            while (frame := process.frames.take()) is not None:
                self._accept(rank, *frame, failed)
        if dead or failed:
            self._blame(dead, failed)

    def _accept(self, rank: int, kind: Kind, payload: bytes, failed: dict[int, Failed]) -> None:
        if kind is Kind.FAILED:
            failed[rank] = msgspec.msgpack.decode(payload, type=Failed)
        elif kind is Kind.READY:
            self.figures[rank] = msgspec.msgpack.decode(payload, type=Figures)
            self._processes[rank].ready = True
            if self._on_progress is not None:
                self._on_progress(sum(process.ready for process in self._processes), len(self._processes))
        else:
            result = self._decoder.decode(payload)
            answered = (result.epoch, result.number)
            if not self._expected or self._expected.popleft() != answered:
                self._fail(RankFailure(rank, f"answered step {answered} out of turn"))
            self._results.append(result)
            self._signal.raise_one()

    def _blame(self, dead: set[int], failed: dict[int, Failed]) -> None:
        """Raise the failure that explains the others.

        A rank that is killed or stopped makes its peers complain of broken connections and missed deadlines, sometimes
        before the kernel tells of the death: so such complaints are the last to be believed.
        """
        deadline = monotonic() + GRACE
        while True:
            codes = {rank: process.popen.poll() for rank, process in enumerate(self._processes)}
            killed = [rank for rank, code in codes.items() if code is not None and code < 0]
            if killed or all(codes[rank] is not None for rank in dead - set(failed)) and monotonic() > deadline:
                break
            if monotonic() > deadline + 1.0:
                break
            sleep(0.002)
        stopped = [rank for rank, process in enumerate(self._processes) if process.stopped()]
        if failed and not killed:
            rank = min(failed, key=lambda rank: (failed[rank].kind in ("ConnectionError", "TimeoutError"), rank))
            if stopped and failed[rank].kind in ("ConnectionError", "TimeoutError"):
                self._fail(RankFailure(stopped[0], "is stopped"))
            error = failed[rank]
            self._fail(RankFailure(rank, f"{error.kind}: {error.text}", error.kind, error.trace))
        rank = min(killed or dead)
        cause, lines = self._processes[rank].epitaph()
        self._fail(RankFailure(rank, f"{cause}; its last lines:\n{lines}" if lines else cause, detail=lines))

    def _late(self, rank: int, cause: str) -> None:
        stopped = [rank for rank, process in enumerate(self._processes) if process.stopped()]
        self._fail(RankFailure(stopped[0], f"is stopped; {cause}" if stopped[0] == rank else f"is stopped; rank {rank} {cause}") if stopped else RankFailure(rank, cause))
