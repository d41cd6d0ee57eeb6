"""One replica's ranks as processes, fed with steps and watched. No torch, and no idea of models.

All the ranks of a replica live and die together.
"""

from __future__ import annotations

import selectors
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from signal import SIGKILL, SIGTERM
from time import monotonic, sleep
from typing import NoReturn

import msgspec

from shardwise.runtime.executor import Figures, RankFailure, Signal
from shardwise.runtime.forks import Forks
from shardwise.runtime.frames import Failed, Kind, WorkerSpec, pack
from shardwise.runtime.spawn import ForkServer, Process, end
from shardwise.schedule.step import Step, StepResult

COMMAND = (sys.executable, "-m", "shardwise.runtime.worker")
COMPLAINTS = ("ConnectionError", "TimeoutError")
"""What a rank raises when the fault is likely a peer's."""
GRACE, GRACE_FAR = 0.05, 0.5
"""Seconds in which a death, of another host too, may still turn up as the cause of another rank's complaint."""
STOPPED = 5.0
"""Seconds that a rank may stay stopped."""
LOOK = 0.5
"""Seconds between looks for stopped ranks while nothing comes from them."""


class ProcessExecutor:
    """The ranks of one replica as processes; see `Executor`. Started when built; usable once they are ``ready``.

    ``specs`` are in rank order. Timeouts are in seconds. ``forks`` starts what forks the ranks of each host that
    the specs name, by default a fork server of this ``command``. It takes over what is alive of ``former``, which has
    failed: the weights need not be read again then.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        step_timeout: float = 300.0,
        command: Sequence[str] = COMMAND,
        start_timeout: float = 300.0,
        former: ProcessExecutor | None = None,
        forks: Sequence[Callable[[], Forks]] = (),
    ) -> None:
        self.figures: list[Figures] = [{} for _ in specs]
        self._specs = specs
        self._step_timeout = step_timeout
        self._start_timeout = start_timeout
        self._started = monotonic()
        self._failure: RankFailure | None = None
        self._since = monotonic()
        """When the ranks began with the oldest step in flight, as far as is known here."""
        self._expected: deque[tuple[int, int]] = deque()
        self._results: deque[StepResult] = deque()
        self._decoder = msgspec.msgpack.Decoder(StepResult)
        self._addresses: dict[int, str] = {}
        """Where ranks can be reached from other hosts."""
        alive, holders = former._bequeath() if former is not None else ({}, {})
        self._forks: list[Forks] = []
        self._signal = Signal()
        self._selector = selectors.DefaultSelector()
        self._holders: list[Process] = []
        self._ranks: list[Process] = []
        try:
            for at, start in enumerate(forks or [lambda: ForkServer(command)]):
                self._forks.append(alive[at] if at in alive else start())
            for spec in specs:
                if former is not None and spec.rank in holders:
                    self.figures[spec.rank] = former.figures[spec.rank]
                    self._holders.append(holders[spec.rank])
                else:
                    self._hold(spec)
            if all(holder.ready for holder in self._holders):
                self._fork_ranks()
        except BaseException:  # what is the former's stays with it, for the next
            self._end(0.0)
            own = [holder for holder in self._holders if holder is not holders.get(holder.rank)]
            _leave(own, self._ranks, [each for at, each in enumerate(self._forks) if each is not alive.get(at)])
            raise
        self._finalizer = weakref.finalize(self, _leave, self._holders, self._ranks, self._forks)
        if former is not None:
            former._finalizer.detach()

    @property
    def ready(self) -> bool:
        """See `Executor`."""
        return bool(self._ranks) and all(rank.ready for rank in self._ranks)

    def wait_ready(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Wait until every rank can step. ``on_progress`` hears how many have loaded, and of how many.

        Raises RankFailure when one fails or takes too long; then none is left running.
        """
        told = 0
        try:
            while not self.ready:
                self._turn(LOOK)
                self.check()
                loaded = sum(holder.ready for holder in self._holders)
                if on_progress is not None and loaded > told:
                    on_progress(loaded, len(self._specs))
                told = loaded
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
        for rank in self._ranks:
            rank.frames.send(frame)
        deadline = monotonic() + self._step_timeout
        if not self._pump(lambda: not any(rank.frames.unsent for rank in self._ranks), deadline):
            stuck = next(rank for rank in self._ranks if rank.frames.unsent)
            self._late(stuck.rank, f"took no new step within {self._step_timeout:g} s")

    def collect(self) -> StepResult:
        """See `Executor`. With nothing in flight it only looks for failures, and must find one."""
        self._alive()
        if not self._results and not self._expected:
            self._turn(0.0)
        assert self._results or self._expected, "no step is in flight"
        if not self._pump(lambda: bool(self._results), self._since + self._step_timeout):
            self._late(len(self._specs) - self._specs[0].tp, f"gave no result within {self._step_timeout:g} s")
        self._signal.lower_one()
        return self._results.popleft()

    def waitables(self) -> list[int]:
        """See `Executor`."""
        return [self._signal.fileno(), *(key.fd for key in self._selector.get_map().values())]

    def check(self) -> None:
        """See `Executor`."""
        self._alive()
        self._turn(0.0)
        self._fence_stopped()
        if self._expected and monotonic() - self._since > self._step_timeout:
            self._late(len(self._specs) - self._specs[0].tp, f"gave no result within {self._step_timeout:g} s")
        waiting = [process.rank for process in self._ranks or self._holders if not process.ready]
        if waiting and monotonic() - self._started > self._start_timeout:
            late = f"was not ready within {self._start_timeout:g} s"
            for rank in waiting:
                if absent := self._forks_of(rank).absent:
                    self._fail(RankFailure(rank, f"{late}: {absent}", final=True))
            peers = f" (nor were {', '.join(map(str, waiting[1:]))})" if waiting[1:] else ""
            self._late(waiting[0], late + peers)

    def close(self) -> None:
        """See `Executor`. Ranks that don't end by themselves within their time of grace are killed."""
        self._end(max(spec.grace for spec in self._specs))
        self._finalizer()

    def kill(self) -> None:
        """Close without waiting for anybody."""
        self._end(0.0)
        self._finalizer()

    def _bequeath(self) -> tuple[Mapping[int, Forks], dict[int, Process]]:
        """What is alive after a failure, for the next executor: what forks, by hosts, and holders by their ranks.

        It is still ours until that is built.
        """
        asked = {self._specs[holder.rank].host for holder in self._holders if holder.pid}
        alive = {at: forks for at, forks in enumerate(self._forks) if forks.alive and at in asked}
        fit = [
            holder
            for holder in self._holders
            if holder.ready and holder.status is None and not holder.stopped()
            if self._specs[holder.rank].host in alive
        ]
        end([holder for holder in self._holders if holder not in fit], 0.0)
        for at, forks in enumerate(self._forks):
            if at not in alive:  # it has ended, or may hang, if it forked nothing
                forks.close()
        return alive, {holder.rank: holder for holder in fit}

    def _forks_of(self, rank: int) -> Forks:
        return self._forks[self._specs[rank].host]

    def _hold(self, spec: WorkerSpec) -> None:
        """Have a process read the weights of one rank."""
        forks = self._forks_of(spec.rank)
        with forks.meeting() as unused:
            holder = forks.fork(spec.rank, spec.threads, unused)
        self._holders.append(holder)
        self._selector.register(holder.frames.connection, selectors.EVENT_READ, holder)
        holder.frames.send(pack(Kind.START, spec))

    def _fork_ranks(self) -> None:
        """All weights are there: fork the ranks from their holders, with a new file in which those of a host meet."""
        try:
            with ExitStack() as stack:
                meetings = [stack.enter_context(forks.meeting()) for forks in self._forks]
                for spec, holder in zip(self._specs, self._holders, strict=True):
                    rank = self._forks_of(spec.rank).fork(spec.rank, spec.threads, meetings[spec.host], holder)
                    self._ranks.append(rank)
                    self._selector.register(rank.frames.connection, selectors.EVENT_READ, rank)
        except OSError as error:
            holder = self._holders[len(self._ranks)]
            if holder.gone.wait(GRACE):
                self._blame({holder}, {})
            self._fail(RankFailure(holder.rank, f"can't be forked: {error}"))

    def _pump(self, done: Callable[[], bool], deadline: float) -> bool:
        """Carry frames both ways until ``done``; False when the time is up."""
        while not done():
            left = deadline - monotonic()
            self._turn(min(max(left, 0.0), LOOK))
            if left <= 0:
                return done()
            if not done():
                self._fence_stopped()
        return True

    def _fence_stopped(self) -> None:
        """A rank that stays stopped is as good as dead."""
        for process in self._everyone():
            if process.overslept(STOPPED):
                self._fail(RankFailure(process.rank, f"has been stopped for {STOPPED:g} s"))

    def _turn(self, timeout: float) -> None:
        """Wait for something to happen, and deal with it."""
        for rank in self._ranks:
            rank.frames.watch(self._selector)
        dead: set[Process] = set()
        failed: dict[Process, Failed] = {}
        for process in {key.data for key, _ in self._selector.select(timeout)}:
            if not process.frames.exchange():
                dead.add(process)
            try:
                while (frame := process.frames.take()) is not None:
                    self._accept(process, frame[0], frame[1], failed)
            except (ValueError, msgspec.MsgspecError) as error:
                self._fail(RankFailure(process.rank, f"sent what makes no sense ({error})"))
        if dead or failed:
            self._blame(dead, failed)

    def _accept(self, process: Process, kind: Kind, payload: bytes, failed: dict[Process, Failed]) -> None:
        if kind is Kind.FAILED:
            failed[process] = msgspec.msgpack.decode(payload, type=Failed)
        elif kind is Kind.MEET:
            self._addresses[process.rank] = msgspec.msgpack.decode(payload, type=str)
            if len(self._addresses) == len(self._specs):
                everyone = pack(Kind.PEERS, [self._addresses[spec.rank] for spec in self._specs])
                for rank in self._ranks:
                    rank.frames.send(everyone)
        elif kind is Kind.READY:
            figures = msgspec.msgpack.decode(payload, type=Figures)
            if process.where:
                figures |= {"host": process.where, "pid": 0}  # no process of this host
            self.figures[process.rank] |= figures
            process.ready = True
            if not self._ranks and all(holder.ready for holder in self._holders):
                self._fork_ranks()
        else:
            result = self._decoder.decode(payload)
            answered = (result.epoch, result.number)
            if not self._expected or self._expected.popleft() != answered:
                self._fail(RankFailure(process.rank, f"answered step {answered} out of turn"))
            self._since = monotonic()
            self._results.append(result)
            self._signal.raise_one()

    def _blame(self, dead: set[Process], failed: dict[Process, Failed]) -> NoReturn:
        """Raise the failure that explains the others.

        A rank that is killed or stopped makes its peers complain of lost connections and missed deadlines, sometimes
        before the kernel tells of the death: so such complaints are the last to be believed.
        """
        deadline = monotonic() + (GRACE_FAR if len(self._forks) > 1 else GRACE)
        while not (killed := [process for process in self._everyone() if (process.status or 0) < 0]):
            if monotonic() > deadline:
                break
            sleep(0.002)
        plain = [process for process, error in failed.items() if error.kind not in COMPLAINTS]
        process = [*killed, *plain, *self._stopped(), *failed, *dead][0]
        if process in failed and process not in killed:
            error = failed[process]
            own = error.kind not in COMPLAINTS
            self._fail(RankFailure(process.rank, f"{error.kind}: {error.text}", error.kind, error.trace, own))
        if process.stopped():
            self._fail(RankFailure(process.rank, "is stopped"))
        cause, lines = process.epitaph()
        own = process.status not in (None, -SIGKILL, -SIGTERM)
        told = f"{cause}; its last lines:\n{lines}" if lines else cause
        self._fail(RankFailure(process.rank, told, detail=lines, own=own))

    def _late(self, rank: int, cause: str) -> NoReturn:
        stopped = self._stopped()
        self._fail(RankFailure(stopped[0].rank, "is stopped") if stopped else RankFailure(rank, cause))

    def _stopped(self) -> list[Process]:
        return [process for process in self._everyone() if process.stopped()]

    def _everyone(self) -> list[Process]:
        return [*self._ranks, *self._holders]

    def _alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, failure: RankFailure) -> NoReturn:
        """The ranks end; what holds their weights may serve the next ones."""
        where = next((each.where for each in self._everyone() if each.rank == failure.rank), "")
        if where:
            failure = failure.on(where)
        self._failure = failure
        self._end(0.0)
        raise failure

    def _end(self, grace: float) -> None:
        self._failure = self._failure or RankFailure(0, "the executor is closed")
        end(self._ranks, grace)
        self._selector.close()
        self._signal.close()


def _leave(holders: Sequence[Process], ranks: Sequence[Process], everything: Sequence[Forks]) -> None:
    """Kill what is left; this may run in any thread, even the fork server's own, so nothing is waited for."""
    for process in (*ranks, *holders):
        process.kill()
    for forks in everything:
        forks.close()
    for process in (*ranks, *holders):
        process.bury(0.0)
