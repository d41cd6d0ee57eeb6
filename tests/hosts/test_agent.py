"""Ranks behind an agent: started, answered, killed, lost with their host and had again; real processes, without torch.

The agent is a thread of the test's own process here. See `test_torchrun` for hosts of their own.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from shardwise.config import Layout
from shardwise.parallel.seal import knock
from shardwise.runtime import launch
from shardwise.runtime.executor import RankFailure
from shardwise.runtime.frames import WorkerSpec
from shardwise.runtime.hosts import agent as agents
from shardwise.runtime.hosts import link
from shardwise.runtime.hosts.agent import Agent, attend
from shardwise.runtime.hosts.front import Distant, Hosts
from shardwise.runtime.processes import ProcessExecutor
from shardwise.runtime.spawn import ForkServer, Process
from shardwise.world import World
from tests.runtime.fake_worker import COMMAND, specs, step
from tests.runtime.test_executor import MARK, marked, until

SECRET = "s" * 40
PATIENCE = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def world(port: int, rank: int = 0, local_size: int = 2, size: int = 4) -> World:
    return World(rank, size, rank % local_size, local_size, "127.0.0.1", port, "test", store=False)


def specs_of_hosts(load: dict[int, str] | None = None) -> list[WorkerSpec]:
    """Two ranks on each of two hosts."""
    return [
        msgspec.structs.replace(spec, host=spec.rank // 2, hosts=[0, 0, 1, 1]) for spec in specs(4, load=load, tp=2)
    ]


class Stage:
    """A front of two hosts, whose other one has its agent in a thread of ours."""

    def __init__(self) -> None:
        self.port = free_port()
        self.hosts = Hosts(world(self.port))
        self.hosts.enter()
        self.status: list[int | str] = []
        self.threads: list[threading.Thread] = []
        self.executors: list[ProcessExecutor] = []

    def attend(self, **changes: Any) -> None:
        """Start the other host's agent."""

        def run() -> None:
            try:
                self.status.append(attend(world(self.port, 2, **changes), COMMAND))
            except ValueError as error:
                self.status.append(str(error))

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def start(
        self, load: dict[int, str] | None = None, former: ProcessExecutor | None = None, start_timeout: float = PATIENCE
    ) -> ProcessExecutor:
        executor = ProcessExecutor(
            specs_of_hosts(load),
            PATIENCE,
            start_timeout=start_timeout,
            former=former,
            forks=[lambda: ForkServer(COMMAND), lambda: self.hosts.lease(1)],
        )
        self.executors.append(executor)
        return executor

    def close(self) -> None:
        for executor in self.executors:
            executor.close()
        self.hosts.leave()
        self.hosts.close()
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """Afterwards no process and no descriptor is left."""
    mark = uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("SHARDWISE_SECRET", SECRET)
    monkeypatch.setattr(agents, "LOOK", 0.05)
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    stage = Stage()
    yield stage
    stage.close()
    gc.collect()
    assert until(lambda: marked(mark) in ([], [os.getpid()]), PATIENCE), "processes are left"
    assert until(lambda: set(os.listdir("/proc/self/fd")) <= before, PATIENCE), "descriptors are left"


def answers(executor: ProcessExecutor, *numbers: int) -> None:
    for number in numbers:
        executor.submit(step(number))
    for number in numbers:
        assert executor.collect().tokens == [[number * 10]]


def failure_of(executor: ProcessExecutor, rank: int | None = None) -> str:
    """What an idle executor fails of, on the other host."""
    found: list[RankFailure] = []

    def fails() -> bool:
        try:
            executor.check()
        except RankFailure as failure:
            found.append(failure)
        return bool(found)

    assert until(fails, PATIENCE)
    assert "on host 1 (" in str(found[0])
    assert found[0].rank == (found[0].rank if rank is None else rank)
    return str(found[0])


def test_ranks_of_two_hosts(stage: Stage) -> None:
    """Guards ranks on two hosts: they start, answer in order, and the agent goes when its front does."""
    stage.attend()
    executor = stage.start()
    executor.wait_ready()
    answers(executor, 1, 2, 3)
    assert [figures.get("host", "") for figures in executor.figures] == [
        "",
        "",
        *[f"host 1 ({socket.gethostname()})"] * 2,
    ]
    assert [bool(figures["pid"]) for figures in executor.figures] == [True, True, False, False]
    executor.submit(step(4, {2: "logits"}))  # some MB on the way back
    executor.submit(step(5, padding=200_000))
    assert len(executor.collect().logits[0][0]) == 3 << 20
    assert executor.collect().tokens == [[50]]
    stage.close()
    assert stage.status == [0]


@pytest.mark.parametrize(("deed", "told"), [("raise", "ValueError: this does not fit"), ("exit", "out of luck")])
def test_a_far_rank_that_fails_says_why(stage: Stage, deed: str, told: str) -> None:
    """Guards the cause of a failure on another host: host, rank, exception or last lines reach the front."""
    stage.attend()
    executor = stage.start()
    executor.wait_ready()
    executor.submit(step(1, {2: deed}))
    with pytest.raises(
        RankFailure, match=rf"rank 2: on host 1 \(.*\): .*{told}|rank 2: on host 1 [^§]*{told}"
    ) as failed:
        executor.collect()
    assert failed.value.own


def test_a_far_rank_is_killed_and_replaced(stage: Stage) -> None:
    """Guards recovery: the next ranks are forked from holders that have lived on, on both hosts."""
    stage.attend()
    executor = stage.start()
    executor.wait_ready()
    holders = list(executor._holders)
    executor._ranks[3].kill()
    assert "was killed by SIGKILL" in failure_of(executor, 3)
    following = stage.start(former=executor)
    following.wait_ready()
    answers(following, 7, 8)
    assert following._holders == holders, "weights were read again"


@pytest.mark.parametrize("what", ["no descriptors", "a holder dies"])
def test_a_takeover_that_fails(stage: Stage, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Guards against a failed start of the next ranks that sends the agents home: the one after it finds them.

    And against a holder that has just died ending the front: it is a rank's failure.
    """
    stage.attend()
    executor = stage.start()
    executor.wait_ready()
    stage.hosts.leave()  # as after a launch: agents stay for as long as there are ranks
    monkeypatch.setattr(stage.hosts, "leave", lambda: None)
    executor._ranks[0].kill()
    with pytest.raises(RankFailure, match="rank 0: was killed"):
        until(lambda: executor.check() is not None, PATIENCE)
    fork, tries = ForkServer.fork, []

    def fails(self: ForkServer, rank: int, threads: int, meeting: int, holder: Process | None = None) -> Process:
        tries.append(rank)
        if len(tries) > 1:
            return fork(self, rank, threads, meeting, holder)
        assert holder is not None
        if what == "no descriptors":
            raise OSError(errno.EMFILE, "Too many open files")
        holder.kill()
        assert holder.gone.wait(PATIENCE)
        raise BrokenPipeError("it is gone")

    monkeypatch.setattr(ForkServer, "fork", fails)
    told = "Too many open files" if what == "no descriptors" else "was killed by SIGKILL"
    with pytest.raises(RankFailure, match=f"rank 0: .*{told}"):
        stage.start(former=executor)
    following = stage.start(former=executor)
    following.wait_ready()
    answers(following, 7)
    kept = [new is old for new, old in zip(following._holders, executor._holders, strict=True)]
    assert kept == [what == "no descriptors", True, True, True], "weights were read again"
    assert not stage.status, "the agent has left"
    following.close()
    stage.hosts.close()
    assert until(lambda: stage.status == [0], PATIENCE)


def test_a_far_rank_that_is_stopped(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a rank that another host's operator has stopped: the front is told, and fences it."""
    monkeypatch.setattr("shardwise.runtime.processes.STOPPED", 0.2)
    agents_of: list[Agent] = []
    monkeypatch.setattr(agents, "Agent", lambda *given: agents_of.append(Agent(*given)) or agents_of[0])
    stage.attend()
    executor = stage.start()
    executor.wait_ready()
    (agent,) = agents_of
    rank = executor._ranks[3]
    assert isinstance(rank, Distant)
    pid = agent._processes[rank.number].pid
    assert pid
    os.kill(pid, signal.SIGSTOP)

    assert "stopped" in failure_of(executor)


def test_a_far_rank_that_takes_nothing(stage: Stage) -> None:
    """Guards a host from a rank of it that hangs with more unread than a socket holds: it is killed, and replaced."""
    stage.attend()
    executor = stage.start()
    executor.wait_ready()
    executor._step_timeout = 1.0
    for number in range(4):
        executor.submit(step(number, {2: "hang"}, padding=400_000))
    with pytest.raises(RankFailure, match="gave no result"):
        executor.collect()
    following = stage.start(former=executor)
    following.wait_ready()
    answers(following, 7)


def test_a_host_is_lost_and_returns(stage: Stage) -> None:
    """Guards the loss of a host: the failure names it, what is asked of it waits, and its return is enough to go on."""
    sealed = []

    def lend() -> Agent:
        connection = knock(f"127.0.0.1 {stage.port}", SECRET.encode(), link.PURPOSE)
        connection.send(msgspec.msgpack.encode(link.Hello(1, "box", 2, agents.__version__)))
        sealed.append(connection)
        return Agent(connection, COMMAND)

    agent = lend()
    executor = stage.start()
    executor.wait_ready()
    answers(executor, 1)
    executor.submit(step(2, {2: "hang"}))
    agent.close()
    with pytest.raises(RankFailure, match=r"rank [23]: on host 1 \(box\): the host is lost: the peer has ended"):
        executor.collect()
    following = stage.start(former=executor)
    following.check()
    assert not following.ready
    assert following._holders[0] is executor._holders[0], "what this host has read is kept"
    agent = lend()
    following.wait_ready()
    answers(following, 3)
    following.close()
    agent.close()


def test_one_launch_after_the_other(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards scripts that make a second LLM: the other hosts stay until the process ends, and that is a good end."""
    monkeypatch.setattr(launch, "COMMAND", COMMAND)
    monkeypatch.setattr(launch, "worker_specs", lambda plan, replica: specs_of_hosts())
    stage.port = free_port()
    stage.attend()
    layout = Layout(tp=2, pp=2)
    engine = SimpleNamespace(layout=layout, isolate=False, step_timeout=PATIENCE, start_timeout=PATIENCE)
    plan: Any = SimpleNamespace(engine=engine, world=world(stage.port))
    for number in range(2):
        (executor,) = launch.launch(plan)
        assert isinstance(executor, ProcessExecutor)
        answers(executor, number)
        executor.close()
    assert not stage.status, "the agent has left"
    launch._other_hosts(plan.world).close()
    assert until(lambda: stage.status == [0], PATIENCE)


def test_a_host_that_does_not_come(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards operators from a start that waits in silence: after its time it says which host is missing, for good."""
    executor = stage.start(start_timeout=0.3)
    with pytest.raises(RankFailure, match=r"rank 2: .*not ready within 0.3 s: host 1 is missing") as failed:
        executor.wait_ready()
    assert failed.value.final
    assert isinstance(executor._ranks or executor._holders[2], Distant)


def test_a_false_secret_keeps_a_host_out(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """R5: guards against an agent with another secret, and its operator and the front's from not knowing why."""
    monkeypatch.setenv("SHARDWISE_SECRET", "t" * 40)
    stage.attend()
    for thread in stage.threads:
        thread.join(PATIENCE)
    assert len(stage.status) == 1
    assert "is it the same on every host?" in str(stage.status[0])
    executor = stage.start(start_timeout=0.3)
    with pytest.raises(RankFailure, match=r"host 1 is missing.*127\.0\.0\.1 came without the right secret"):
        executor.wait_ready()


def test_a_host_that_does_not_fit(stage: Stage) -> None:
    """Guards against torchruns that were told different numbers: the odd one hears what to change."""
    stage.attend(size=12, local_size=2)
    executor = stage.start()
    executor.wait_ready()
    stage.attend(local_size=1, size=4)
    assert until(lambda: bool(stage.status), PATIENCE)
    assert "give each torchrun the same --nnodes" in str(stage.status[0])


def test_silence_is_an_end(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a host that is cut off without a word, as by a pulled cable: it is lost after some seconds."""
    monkeypatch.setattr(link, "SILENCE", 0.5)
    executor = stage.start()
    connection = knock(f"127.0.0.1 {stage.port}", SECRET.encode(), link.PURPOSE)
    try:
        connection.send(msgspec.msgpack.encode(link.Hello(1, "mute", 2, agents.__version__)))
        with pytest.raises(RankFailure, match=r"on host 1 \(mute\): the host is lost: nothing was heard for 0.5 s"):
            executor.wait_ready()
    finally:
        connection.close()
