"""A model with a handler of its own: requests wait here, are given in batches to its workers, and get their answers.

Knows queues and workers; nothing of HTTP, and nothing of what a handler does. One thread does it all.
"""

from __future__ import annotations

import selectors
import sys
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

from shardwise.runtime.executor import Signal
from shardwise.runtime.machine import gpu_names, num_cores
from shardwise.runtime.spawn import ForkServer
from shardwise.store.crew import STOPPED, Crew, Place, Times
from shardwise.store.jobs import Busy, Job, Piece, Queue, Request
from shardwise.store.settings import Frontend
from shardwise.store.stored import StoredModel
from shardwise.store.wire import Answer, Batch, Item

__all__ = ["Busy", "Custom", "HandlerFailure", "Job", "Piece", "Request", "WorkerState"]

COMMAND = (sys.executable, "-m", "shardwise.store.worker")
QUEUE = 100
"""Requests that may wait, unless jobQueueSize says otherwise."""
BATCH_DELAY = 100
"""Milliseconds that a request may wait for others, unless maxBatchDelay says otherwise."""
LOOK = STOPPED / 5
"""Seconds between looks for stopped processes."""


class HandlerFailure(RuntimeError):
    """A handler can't be started: which rank, and why."""


class WorkerState(NamedTuple):
    """A worker as management tells of it."""

    number: int
    pids: list[int]
    state: str
    """ "starting", "ready", "busy", "waiting" (for its next start) or "dead"."""
    gpus: tuple[str, ...]
    cause: str
    """Why it died last, if it has."""


class Custom:
    """The workers of a model with a custom handler. Started by `start`; closed, none of them is left.

    ``observe`` hears of each number that the handler records: (name, unit, value). It and what requests deliver to are
    called from a thread of ours. Raises ValueError for what can't be, before anything is started.
    """

    def __init__(
        self,
        stored: StoredModel,
        *,
        workers: int | None = None,
        observe: Callable[[str, str, float], None] | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        said = stored.frontend
        self.stored = stored
        self._observe = observe or (lambda name, unit, value: None)
        self._command = command
        self._times = Times(said.startup_timeout or 120, said.response_timeout or 120, said.max_retry_timeout or 300)
        self._wanted = said.min_workers if workers is None else workers
        self._gpus = _gpus(said)
        self._check(self._wanted)
        delay = BATCH_DELAY if said.max_batch_delay is None else said.max_batch_delay
        limit = said.client_timeout / 1000 if said.client_timeout is not None else None
        self._queue = Queue(said.batch_size or 1, delay / 1000, limit)
        self._crews: list[Crew] = []
        self._count = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closing = False
        self._wake = Signal()
        self._forks: ForkServer | None = None
        self._thread = threading.Thread(target=self._run, name=f"workers of {stored.name}", daemon=True)

    def start(self) -> None:
        """Start all workers and wait until they are ready. Raises HandlerFailure, and then none is left."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._failures() or self._all_ready())
            failed = "; ".join(self._failures()) or ("it was closed" if self._closing else "")
        if failed:
            self.close()
            raise HandlerFailure(f"{self.stored.name}: the handler {self.stored.handler} can't be started: {failed}")

    def submit(self, request: Request, deliver: Callable[[Piece], None]) -> Job:
        """Accept a request. Raises Busy where it can't wait, ValueError for a body that isn't the JSON it says."""
        request.check()
        said, name = self.stored.frontend, self.stored.name
        job = Job(request, deliver)
        with self._lock:
            if self._closing or self._wanted == 0 or self._dead():
                raise Busy(f"{name} has no workers")
            if said.use_job_ticket and self._idle() <= len(self._queue):
                raise Busy(f"{name} has no free worker (useJobTicket)")
            if len(self._queue) >= (said.job_queue_size or QUEUE):
                raise Busy(f"{len(self._queue)} requests wait for {name} already (jobQueueSize)")
            self._queue.add(job)
            self._wake.raise_one()
        return job

    def scale(self, workers: int) -> None:
        """Have so many workers from now on; those that are too many end when they have nothing to do.

        Dead ones get another chance. Raises ValueError for more than there may be.
        """
        self.stored.check_workers(workers)
        self._check(workers)
        with self._lock:
            self._wanted = workers
            self._crews = [crew for crew in self._crews if crew.state != "dead"]
            for crew in self._crews:
                crew.retiring = False
            self._wake.raise_one()

    @property
    def workers(self) -> list[WorkerState]:
        """All of them, as they are at the moment."""
        with self._lock:
            return [
                WorkerState(each.number, each.pids, each.state, each.place.gpus, each.cause) for each in self._crews
            ]

    @property
    def idle(self) -> int:
        """Workers that are ready and have nothing to do."""
        with self._lock:
            return self._idle()

    @property
    def waiting(self) -> int:
        """Requests that no worker has begun."""
        with self._lock:
            return len(self._queue)

    def stop(self) -> None:
        """Begin to close, without waiting for the end; harmless when repeated."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._wake.raise_one()

    def close(self) -> None:
        """Kill all workers; what is unfinished ends with an error. Harmless when repeated."""
        self.stop()
        if threading.current_thread() is self._thread:
            return
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            self._wake.close()

    def _failures(self) -> list[str]:
        """Of workers that have never been ready."""
        return [crew.cause for crew in self._crews if crew.cause and not crew.ever_ready]

    def _all_ready(self) -> bool:
        return len(self._crews) == self._wanted and all(crew.ever_ready for crew in self._crews)

    def _idle(self) -> int:
        return sum(crew.state == "ready" and not crew.retiring for crew in self._crews)

    def _dead(self) -> bool:
        return bool(self._crews) and all(crew.state == "dead" for crew in self._crews)

    def _check(self, workers: int) -> None:
        said = self.stored.frontend
        asked = said.device_type == "gpu" or said.device_ids is not None
        if asked and (most := len(self._gpus) // said.num_ranks) < workers:
            raise ValueError(
                f"{workers} workers of {said.num_ranks} GPUs each need more than the {len(self._gpus)} there are: "
                f"minWorkers can be {most}, or deviceType cpu"
            )

    def _place(self, number: int) -> Place:
        said = self.stored.frontend
        kind, width = said.parallel_type or "none", said.num_ranks
        ranks = 1 if kind == "custom" else width
        threads = said.torchrun.omp_number_threads or (1 if ranks > 1 else max(1, num_cores() // max(1, self._wanted)))
        gpus = self._gpus[number * width : (number + 1) * width]
        return Place(ranks, threads, gpus if len(gpus) == width else (), kind != "pp")

    def _run(self) -> None:
        """The thread: start workers that are due, give out batches, hear from workers."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake.fileno(), selectors.EVENT_READ, None)
            try:
                while not self._closing:
                    self._turn(selector)
            finally:
                self._end(selector)

    def _turn(self, selector: selectors.BaseSelector) -> None:
        self._settle(selector)
        with self._changed:
            late = [(job, "no worker was free in time (clientTimeoutInMills)") for job in self._queue.expire()]
            if self._dead():
                late += [(job, f"no worker is left: {self._crews[0].cause}") for job in self._queue.clear()]
            ready = [crew for crew in self._crews if crew.state == "ready" and not crew.retiring]
            batches = [(crew, jobs) for crew in ready if (jobs := self._queue.take())]
            dues = self._queue.dues(len(batches) < len(ready))
            self._changed.notify_all()
        for job, why in late:
            job.fail(why, 503)
        for crew, jobs in batches:
            self._give(crew, jobs)
        for crew in self._crews:
            crew.watch(selector)
        dues += [crew.due for crew in self._crews if crew.due is not None]
        for key, _ in selector.select(max(0.0, min([LOOK, *(due - monotonic() for due in dues)]))):
            if key.data is None:
                self._wake.lower_one()
        for crew in list(self._crews):
            crew.hear(selector)

    def _settle(self, selector: selectors.BaseSelector) -> None:
        """As many workers as are wanted, and all of them running that can be.

        Processes are killed and started while nobody has to wait for the lock.
        """
        with self._lock:
            staying = [crew for crew in self._crews if not crew.retiring]
            staying.sort(key=lambda crew: crew.state not in ("ready", "busy"))  # those that can be asked stay
            for crew in staying[self._wanted :]:
                crew.retiring = True
            leaving = [crew for crew in self._crews if crew.retiring and crew.state != "busy"]
        for crew in leaving:
            crew.end(selector, "", 503)
        with self._lock:
            self._crews = [crew for crew in self._crews if crew not in leaving]
            lacking = max(0, self._wanted - sum(not crew.retiring for crew in self._crews))
            used = {crew.number for crew in self._crews}
            for number in [each for each in range(lacking + len(used)) if each not in used][:lacking]:
                self._crews.append(Crew(number, self.stored, self._place(number), self._times, self._observe))
        for crew in self._crews:
            if crew.state == "waiting" and crew.due is not None and monotonic() >= crew.due:
                try:
                    crew.start(self._fork_server(), selector)
                except OSError as error:
                    crew.lose(selector, f"can't be started: {error}")

    def _fork_server(self) -> ForkServer:
        if self._forks is not None and not self._forks.alive:
            self._forks.close()
            self._forks = None
        if self._forks is None:
            self._forks = ForkServer(self._command)
        return self._forks

    def _give(self, crew: Crew, jobs: list[Job]) -> None:
        def deliver(answers: list[Answer], last: bool) -> None:
            for job, answer in zip(jobs, answers, strict=True):
                job.put(Piece(answer.content, answer.content_type, answer.status, last, answer.headers))

        def fail(text: str, status: int) -> None:
            for job in jobs:
                job.fail(text, status)

        self._count += 1
        items = [Item(job.request.id, job.request.data, job.request.headers) for job in jobs]
        crew.give(Batch(self._count, items), deliver, fail)

    def _end(self, selector: selectors.BaseSelector) -> None:
        gone = f"{self.stored.name} is no longer served"
        with self._changed:
            self._closing = True
            crews, self._crews = self._crews, []
            jobs = self._queue.clear()
            self._changed.notify_all()
        for crew in crews:
            crew.end(selector, gone, 503)
        for job in jobs:
            job.fail(gone, 503)
        if self._forks is not None:
            self._forks.close()


def _gpus(said: Frontend) -> tuple[str, ...]:
    """The GPUs that workers may have, by the names that CUDA_VISIBLE_DEVICES has for them."""
    if said.device_type == "cpu":
        return ()
    there = gpu_names()
    if said.device_ids is None:
        return there
    if missing := [each for each in said.device_ids if each >= len(there)]:
        raise ValueError(f"deviceIds: there is no GPU {missing[0]}: {len(there)} can be seen, and the first is 0")
    return tuple(there[each] for each in said.device_ids)
