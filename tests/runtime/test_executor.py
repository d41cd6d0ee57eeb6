"""Ranks start, answer in order, and never outlive or silently fail the front; with real processes, without torch."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from msgspec.structs import replace

from shardwise.config import Coordinates, Layout
from shardwise.parallel.axis import Axis
from shardwise.runtime import processes, spawn
from shardwise.runtime.executor import Executor, RankFailure
from shardwise.runtime.local import InProcessExecutor, ThreadExecutor
from shardwise.runtime.processes import ProcessExecutor
from shardwise.runtime.spawn import Process
from shardwise.schedule.step import Step, StepResult
from tests.runtime.fake_worker import COMMAND, specs, step

MARK = "SHARDWISE_TEST_MARK"
FORKED = Process.forked


def start(
    size: int = 2, load: dict[int, str] | None = None, tp: int = 1, step_timeout: float = 20.0
) -> ProcessExecutor:
    return ProcessExecutor(specs(size, load, tp), step_timeout, COMMAND)


def marked(mark: str) -> list[int]:
    """Live processes whose environment has the mark."""
    found = []
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdigit() and mark.encode() in (directory / "environ").read_bytes():
                found.append(int(directory.name))  # of a zombie nothing can be read
        except OSError:
            pass
    return found


def until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def pids(executor: ProcessExecutor) -> list[int]:
    """Of the ranks, or while there are none of those that read their weights, as soon as all are forked."""
    processes = executor._ranks or executor._holders
    assert until(lambda: all(process.pid for process in processes), 20.0)
    return [process.pid for process in processes if process.pid]


@pytest.fixture(autouse=True)
def _nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every test: no process, descriptor or thread more than before."""
    mark = uuid4().hex
    monkeypatch.setenv(MARK, mark)
    gc.collect()
    descriptors, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    gc.collect()
    assert until(lambda: marked(mark) in ([], [os.getpid()]), 20.0), "processes are left"
    assert until(lambda: threading.active_count() <= threads, 20.0), threading.enumerate()
    assert set(os.listdir("/proc/self/fd")) <= descriptors


def test_results_come_in_order_with_several_in_flight() -> None:
    """Guards the pipeline: submit does not wait, collect keeps the order; figures and progress arrive."""
    told: list[tuple[int, int]] = []
    executor = start(4, tp=2)
    executor.wait_ready(lambda ready, size: told.append((ready, size)))
    assert told[-1] == (4, 4)
    assert told == sorted(told)
    assert [figures["pid"] for figures in executor.figures] == pids(executor)
    assert {figures["threads"] for figures in executor.figures} == {"3"}
    assert {figures["torch"] for figures in executor.figures} == {0}
    for number in range(50):
        executor.submit(step(number))
    assert [executor.collect().tokens for _ in range(50)] == [[[number * 10]] for number in range(50)]
    executor.close()
    executor.close()
    with pytest.raises(RankFailure, match="closed"):
        executor.submit(step(0))


def test_large_frames_both_ways_do_not_deadlock() -> None:
    """Guards against a front that writes a step while the rank writes a result, both sockets full."""
    executor = start()
    executor.wait_ready()
    for number in range(6):
        executor.submit(step(number, {1: "logits"}, padding=1 << 20))
    results = [executor.collect() for _ in range(6)]
    assert [(result.number, len(result.logits[0][0])) for result in results] == [(n, 3 << 20) for n in range(6)]
    executor.close()


def test_waitables_tell_of_results_and_of_deaths() -> None:
    """Guards the loop over several replicas: one selector must hear of everything, and of nothing else."""
    executor = start()
    executor.wait_ready()
    waitables = executor.waitables()
    assert select.select(waitables, [], [], 0.05)[0] == []
    executor.submit(step(1))
    executor.submit(step(2))
    for _ in range(2):
        assert select.select(waitables, [], [], 5.0)[0]
        executor.collect()
    assert select.select(waitables, [], [], 0.05)[0] == []
    os.kill(pids(executor)[0], signal.SIGKILL)
    assert select.select(waitables, [], [], 5.0)[0]
    with pytest.raises(RankFailure, match="rank 0: was killed by SIGKILL"):
        executor.collect()


@pytest.mark.parametrize("pidfd", [True, False])
@pytest.mark.parametrize("moment", ["start", "idle", "step"])
def test_a_killed_rank_is_named_at_once(moment: str, pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1, F6: guards against hangs after a kill -9, with pidfds and where there are none."""
    if not pidfd:
        monkeypatch.setattr(Process, "forked", lambda self, pid, fd: os.close(fd) or FORKED(self, pid, -1))
    executor = start(load={1: "hang"} if moment == "start" else {})
    if moment != "start":
        executor.wait_ready()
    if moment == "step":
        executor.submit(step(1, {0: "hang", 1: "hang"}))
    started = time.monotonic()
    os.kill(pids(executor)[1], signal.SIGKILL)
    if moment == "idle":
        assert select.select(executor.waitables(), [], [], 5.0)[0]
    with pytest.raises(RankFailure, match=r"rank 1: was killed by SIGKILL, probably because memory ran out") as caught:
        executor.wait_ready() if moment == "start" else executor.collect()
    assert time.monotonic() - started < 5  # far below the deadline of a step
    assert caught.value.rank == 1
    gone = lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids(executor))  # noqa: E731
    assert until(gone, 20.0 if moment == "start" else 0.0), "its peers must be gone by then"
    with pytest.raises(RankFailure, match="rank 1"):
        executor.submit(step(2))
    executor.close()


@pytest.mark.parametrize("moment", ["start", "step"])
@pytest.mark.parametrize(
    ("deed", "cause"),
    [
        ("raise", r"^rank 1: ValueError: this does not fit: use less$"),
        ("exit", r"^rank 1: exited with code 7; its last lines:\nout of luck$"),
        ("abort", r"^rank 1: was killed by SIGABRT; its last lines:\nFatal Python error: Aborted"),
        ("segfault", r"^rank 1: was killed by SIGSEGV; its last lines:\nFatal Python error: Segmentation fault"),
    ],
)
def test_every_end_is_told_by_its_cause(deed: str, cause: str, moment: str) -> None:
    """F7: guards against native aborts and exits that leave a waiting front, and against causes that get lost."""
    executor = start(load={1: deed} if moment == "start" else {})

    def work() -> None:
        executor.wait_ready()
        executor.submit(step(1, {1: deed}))
        executor.collect()

    with pytest.raises(RankFailure, match=cause) as caught:
        work()
    assert caught.value.kind == ("ValueError" if deed == "raise" else "")
    assert caught.value.detail


def test_a_rank_that_leaves_a_child_of_its_own() -> None:
    """Guards against a death that goes unseen because a grandchild holds the dead rank's socket open."""
    executor = start()
    executor.wait_ready()
    executor.submit(step(1, {1: "leave a child"}))
    with pytest.raises(RankFailure, match="rank 1: exited with code 7"):
        executor.collect()


def test_the_killed_rank_is_blamed_and_not_who_complains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the diagnosis: peers of a dead rank report lost connections, perhaps before its death is seen."""
    monkeypatch.setattr(processes, "GRACE", 20.0)
    executor = start()
    executor.wait_ready()
    executor.submit(step(1, {0: "lose a peer", 1: "hang"}))
    assert executor._ranks[0].gone.wait(20.0)
    threading.Timer(0.01, os.kill, (pids(executor)[1], signal.SIGKILL)).start()
    with pytest.raises(RankFailure, match="rank 1: was killed by SIGKILL"):
        executor.collect()


def test_a_rank_that_never_gets_ready() -> None:
    """C89: guards against a start that hangs without saying for whom."""
    executor = ProcessExecutor(specs(3, {0: "hang", 2: "hang"}), command=COMMAND, start_timeout=0.6)
    with pytest.raises(RankFailure, match=r"rank 0: was not ready within 0.6 s \(nor were 2\)"):
        executor.wait_ready()


def test_a_stopped_rank() -> None:
    """F5: guards against a SIGSTOP that hangs the replica; the stopped rank is named, not the one that waits for it."""
    executor = start(step_timeout=0.3)
    executor.wait_ready()
    os.kill(pids(executor)[0], signal.SIGSTOP)
    executor.submit(step(1, {1: "hang"}))
    with pytest.raises(RankFailure, match="rank 0: is stopped"):
        executor.collect()


def test_a_rank_that_stops_while_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """R29: guards the idle replica: a short stop is forgiven, a long one is not."""
    monkeypatch.setattr(processes, "STOPPED", 0.05)
    executor = start()
    executor.wait_ready()
    executor.check()
    for sent in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(pids(executor)[0], sent)
        executor.check()
    assert until(lambda: not executor._ranks[0].stopped(), 20.0)
    executor.check()
    os.kill(pids(executor)[0], signal.SIGSTOP)

    def fenced() -> bool:
        try:
            executor.check()
        except RankFailure as failure:
            return "rank 0: has been stopped" in str(failure)
        return False

    assert until(fenced, 20.0)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_hanging_rank(elsewhere: bool) -> None:
    """Guards the step deadline, for a front that waits in collect and for one that waits in a selector."""
    executor = start(step_timeout=0.2)
    executor.wait_ready()
    executor.submit(step(1, {1: "hang"}))
    assert select.select(executor.waitables(), [], [], 0.0)[0] == []
    with pytest.raises(RankFailure, match=r"rank 1: gave no result within 0\.2 s"):
        until(lambda: executor.check() is not None, 20.0) if elsewhere else executor.collect()


def test_a_result_fetched_late_is_no_failure() -> None:
    """Guards against a deadline that runs while the front is busy elsewhere and the result is there."""
    executor = start(step_timeout=0.2)
    executor.wait_ready()
    executor.submit(step(1))
    assert select.select(executor.waitables(), [], [], 5.0)[0]
    time.sleep(0.25)
    assert executor.collect().tokens == [[10]]
    executor.close()


def test_an_answer_out_of_turn() -> None:
    """Guards against a result that belongs to another step: wrong tokens would go to some request."""
    executor = start()
    executor.wait_ready()
    executor.submit(step(1, {1: "lie"}))
    with pytest.raises(RankFailure, match=r"rank 1: answered step \(1, 2\) out of turn"):
        executor.collect()


def test_output_of_ranks_never_blocks_them(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a full pipe; and what ranks print is shown on demand only, never on the front's stdout."""
    for shown in (False, True):
        if shown:
            monkeypatch.setenv(spawn.DEBUG, "1")
        executor = start()
        executor.wait_ready()
        for number in range(2):
            executor.submit(step(number, {0: "chat", 1: "chat"}))
            executor.collect()
        executor.close()
        said = capfd.readouterr()
        assert not said.out
        assert ("chatter" in said.err) == shown


def test_ranks_leave_signals_to_the_front() -> None:
    """C80, R31: guards against a Ctrl-C or a drain's SIGTERM that kills the ranks under the requests in flight."""
    executor = start()
    executor.wait_ready()
    for pid in pids(executor):
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    executor.submit(step(1))
    assert executor.collect().tokens == [[10]]
    executor.close()


def test_ranks_outlive_the_thread_that_started_them() -> None:
    """Guards against the parent-death signal, which the kernel ties to a thread: pools end theirs."""
    made: list[ProcessExecutor] = []
    thread = threading.Thread(target=lambda: made.append(start()))
    thread.start()
    thread.join()
    made[0].wait_ready()
    made[0].submit(step(1))
    assert made[0].collect().tokens == [[10]]
    made[0].close()


def test_close_kills_what_does_not_listen() -> None:
    """Guards against a close that waits for a busy rank."""
    executor = ProcessExecutor([replace(spec, grace=0.2) for spec in specs(2)], 20.0, COMMAND)
    executor.wait_ready()
    executor.submit(step(1, {0: "hang"}))
    executor.close()


def test_a_forgotten_executor_ends_its_ranks() -> None:
    """Guards against ranks that stay because nobody closed."""
    executor = start()
    executor.wait_ready()
    del executor
    gc.collect()
    assert until(lambda: marked(os.environ[MARK]) in ([], [os.getpid()]), 20.0)


def test_a_command_that_cannot_start() -> None:
    """Guards the half-started replica."""
    with pytest.raises(FileNotFoundError):
        ProcessExecutor(specs(2), 1.0, ["/nonexistent/python"])


def run_front(load: str = "answer") -> tuple[subprocess.Popen[str], str]:
    """A front process of two ranks, started, and the mark of its ranks."""
    mark = uuid4().hex
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(Path(__file__).parents[2])}
    front = subprocess.Popen(
        [*COMMAND, "front", load], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    return front, mark


def line(front: subprocess.Popen[str]) -> str:
    assert front.stdout is not None
    assert select.select([front.stdout], [], [], 20.0)[0]
    return front.stdout.readline().strip()


@pytest.mark.parametrize("moment", ["started", "ready"])
def test_ranks_die_with_the_front(moment: str) -> None:
    """F3, C79: guards against orphans that hold memory after a kill -9 of the front, while loading or at work."""
    front, mark = run_front("hang" if moment == "started" else "answer")
    assert line(front) == "started"
    if moment == "ready":
        assert line(front) == "ready"
    assert until(
        lambda: len(marked(mark)) == (4 if moment == "started" else 6), 20.0
    )  # the fork server, holders, ranks
    front.kill()
    front.communicate(timeout=10)
    assert until(lambda: not marked(mark), 20.0)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("delay", [0.0, 0.03, 0.1, 0.3])
def test_interrupt_at_any_moment(delay: float, twice: bool) -> None:
    """C80: guards against a Ctrl-C during the load that hangs or leaves processes."""
    front, mark = run_front("hang")
    assert until(lambda: len(marked(mark)) >= 1, 20.0)
    if delay:
        assert line(front) == "started"
        time.sleep(delay)
    front.send_signal(signal.SIGINT)
    if twice:
        time.sleep(0.01)
        front.send_signal(signal.SIGINT)
    front.communicate(timeout=20)
    assert front.returncode != 0
    assert until(lambda: not marked(mark), 20.0)


class Echo:
    """A rank that sends each step's number down its axes and answers with what arrives."""

    def __init__(self, place: Coordinates, axes: tuple[Axis, Axis]) -> None:
        import torch

        self.torch, self.place, (self.tp, self.pp) = torch, place, axes

    def load(self) -> None:
        pass

    def close(self) -> None:
        pass

    def step(self, step: Step) -> StepResult | None:
        number = self.torch.tensor([step.number])
        if step.number == 13 and self.place.tp == 1:
            raise ValueError("unlucky")
        if step.number == 14 and self.place.tp == 1:
            return None
        if step.number == 15:
            raise KeyboardInterrupt
        if self.pp.rank > 0:
            number = self.pp.recv((1,), self.torch.int64)
        if self.pp.rank + 1 < self.pp.size:
            self.pp.send(number)
        every = self.tp.all_gather(number, [1] * self.tp.size)
        last = self.pp.rank == self.pp.size - 1 and self.tp.rank == 0
        return StepResult(step.epoch, step.number, [every.tolist()], [], []) if last else None


def local(kind: str) -> tuple[Executor, int]:
    if kind == "thread":
        return ThreadExecutor(Layout(tp=2, pp=2), Echo, step_timeout=0.3), 2
    return InProcessExecutor(Echo), 1


@pytest.mark.parametrize("kind", ["thread", "in process"])
def test_local_executors(kind: str) -> None:
    """Guards the executors without processes: order, several in flight, waitables."""
    executor, width = local(kind)
    for number in range(5):
        executor.submit(step(number))
    for number in range(5):
        assert select.select(executor.waitables(), [], [], 5.0)[0]
        assert executor.collect().tokens == [[number] * width]
    assert select.select(executor.waitables(), [], [], 0.0)[0] == []
    executor.check()
    executor.close()
    executor.close()


def test_an_interrupted_step() -> None:
    """C80: guards against a Ctrl-C during a step that leaves the rank of this process of no use for ever."""
    executor, _ = local("in process")
    for use in (lambda: executor.submit(step(1)), executor.collect, executor.check):
        for number in (15, 16, 17):
            executor.submit(step(number))
        with pytest.raises(KeyboardInterrupt):
            executor.collect()
        assert select.select(executor.waitables(), [], [], 0.0)[0] == []
        with pytest.raises(RankFailure, match="interrupted"):
            use()
        executor.submit(step(18))
        assert executor.collect().tokens == [[18]]
    executor.close()


def test_a_thread_that_raises() -> None:
    """Guards the cause: the rank that raised is named, not the peers it left waiting, and at once."""
    executor, _ = local("thread")
    started = time.monotonic()
    executor.submit(step(13))
    with pytest.raises(RankFailure, match=r"rank [13]: ValueError: unlucky"):
        executor.collect()
    assert time.monotonic() - started < 5
    with pytest.raises(RankFailure, match="unlucky"):
        executor.submit(step(1))


def test_a_thread_that_stays_away() -> None:
    """Guards the deadline of collectives between threads."""
    executor, _ = local("thread")
    executor.submit(step(14))
    with pytest.raises(RankFailure, match=r"in vain|no result"):
        executor.collect()


def test_a_thread_that_cannot_load() -> None:
    """Guards the start: an exception in the builder comes out of the constructor."""

    def broken(place: Coordinates, axes: tuple[Axis, Axis]) -> Echo:
        raise ValueError("no weights")

    with pytest.raises(RankFailure, match="rank 0: ValueError: no weights"):
        ThreadExecutor(Layout(), broken)
