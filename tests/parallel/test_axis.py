"""Every transport gives every rank the same bits, and says who did not come."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from shardwise.kernels.build import BuildError
from shardwise.kernels.sync import Sync, load_sync
from shardwise.parallel.axis import Axis
from shardwise.parallel.shm import LINE, MAILS, SharedMemoryTransport, region_bytes
from shardwise.parallel.threads import thread_axes
from shardwise.runtime.frames import WorkerSpec
from shardwise.runtime.processes import ProcessExecutor
from shardwise.schedule.step import Chunk, Step
from tests.parallel import scenarios

NAMES = list(scenarios.ALL)


@pytest.fixture(scope="module")
def sync() -> Sync:
    try:
        return load_sync()
    except BuildError as error:
        pytest.skip(str(error))


def shm_axes(sync: Sync, size: int, slot_bytes: int, timeout: float = 20.0) -> list[Axis]:
    """The shared-memory transport with threads for processes: the waits and the memory are the real ones."""
    memory = torch.zeros(region_bytes(size, slot_bytes) + LINE, dtype=torch.uint8)
    start = -memory.data_ptr() % LINE
    return [
        Axis(rank, size, SharedMemoryTransport("tp", memory, start, rank, size, slot_bytes, timeout, sync))
        for rank in range(size)
    ]


def play(axes: list[Axis], act: Callable[[Axis], None]) -> None:
    """Run ``act`` for every rank at once; the first error is the test's."""
    errors: list[BaseException] = []

    def run(axis: Axis) -> None:
        try:
            act(axis)
        except BaseException as error:
            errors.append(error)
            if not isinstance(axis.transport, SharedMemoryTransport):
                axis.close()

    threads = [threading.Thread(target=run, args=(axis,), daemon=True) for axis in axes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_threads(name: str, size: int) -> None:
    """Guards the transport on which the equivalence suite stands."""
    play([tp for tp, _ in thread_axes(size, 1, timeout=20.0)], scenarios.ALL[name])


@pytest.mark.parametrize("slot_bytes", [LINE, 1 << 16])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_shared_memory(sync: Sync, name: str, size: int, slot_bytes: int) -> None:
    """Guards the two-slot argument, the mailboxes, and tensors many times larger than a slot."""
    play(shm_axes(sync, size, slot_bytes), scenarios.ALL[name])


def test_mixed_calls_in_changing_order(sync: Sync) -> None:
    """Guards against slots that get out of step when whole and piecewise exchanges alternate."""

    def act(axis: Axis) -> None:
        for _ in range(20):
            scenarios.gather(axis)
            scenarios.mail(axis)
            scenarios.exchange(axis)

    play(shm_axes(sync, 2, 128), act)


def test_layout_of_thread_axes() -> None:
    """Guards the numbering: tp varies fastest, and each line is its own."""
    axes = thread_axes(3, 2)
    assert [(tp.rank, pp.rank) for tp, pp in axes] == [(rank % 3, rank // 3) for rank in range(6)]
    assert all((tp.size, pp.size) == (3, 2) for tp, pp in axes)
    for line in range(2):
        play([tp for tp, pp in axes if pp.rank == line], scenarios.gather)
    for line in range(3):
        play([pp for tp, pp in axes if tp.rank == line], scenarios.mail)


def test_alone_is_the_identity() -> None:
    """Guards the single device: no transport, no copy."""
    x = torch.randn(3, 4)
    assert Axis().all_gather(x, [4]) is x
    assert Axis().buffer((1,), torch.float32) is None
    scenarios.reduce(Axis())


def late(axes: list[Axis]) -> str:
    """What rank 0 says when rank 1 does not come."""
    said: list[str] = []
    there = threading.Barrier(len(axes) - 1)

    def act(axis: Axis) -> None:
        if axis.rank != 1:
            there.wait(20.0)
            with pytest.raises(TimeoutError) as caught:
                axis.all_gather(torch.zeros(1), [1] * axis.size)
            said.append(str(caught.value))

    play(axes, act)
    assert said[0] == said[1]
    return said[0]


def test_timeouts_name_the_missing_rank(sync: Sync) -> None:
    """Guards against a hang without a name."""
    assert late([tp for tp, _ in thread_axes(3, 1, timeout=0.5)]) == "tp axis: waited in vain for rank 1"
    assert late(shm_axes(sync, 3, LINE, timeout=0.5)) == "tp axis: waited in vain for rank 1"
    for axes in ([tp for tp, _ in thread_axes(2, 1, timeout=0.1)], shm_axes(sync, 2, LINE, timeout=0.1)):
        with pytest.raises(TimeoutError, match="in vain for rank 0"):
            axes[1].recv((2,), torch.float32)
    full = shm_axes(sync, 2, LINE, timeout=0.1)[0]
    for _ in range(MAILS):
        full.send(torch.zeros(1))
    with pytest.raises(TimeoutError, match="in vain for rank 1"):
        full.send(torch.zeros(1))


def test_threads_that_leave_wake_their_peers() -> None:
    """Guards the thread executor: a rank's exception must not cost its peers the whole timeout."""
    (first, _), (second, _) = thread_axes(2, 1, timeout=60.0)
    first.close()
    first.close()
    with pytest.raises(ConnectionError, match="rank 0 has left"):
        second.all_gather(torch.zeros(1), [1, 1])
    with pytest.raises(ConnectionError, match="rank 0 has left"):
        second.recv((1,), torch.float32)


def test_counters_wrap_around(sync: Sync) -> None:
    """Guards long lives: 2^32 exchanges are a few days of decoding."""
    size, slot_bytes = 2, LINE
    memory = torch.zeros(region_bytes(size, slot_bytes) + LINE, dtype=torch.uint8)
    start = -memory.data_ptr() % LINE
    memory.view(-1)[start : start + LINE * (2 + 3 * size)].view(torch.int32)[LINE // 4 :: LINE // 4] = -3
    axes = []
    for rank in range(size):
        transport = SharedMemoryTransport("tp", memory, start, rank, size, slot_bytes, 20.0, sync)
        transport._round = transport._sent = transport._received = 2**32 - 3
        axes.append(Axis(rank, size, transport))
    for name in NAMES:
        play(axes, scenarios.ALL[name])


@pytest.fixture(scope="module")
def ranks(sync: Sync, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessExecutor]:
    """Four processes, tp2.pp2, with both process transports."""
    runner = msgspec.Raw(msgspec.msgpack.encode(str(tmp_path_factory.mktemp("meetings"))))
    specs = [WorkerSpec(rank=rank, tp=2, pp=2, runner=runner) for rank in range(4)]
    executor = ProcessExecutor(specs, 60.0, [sys.executable, "-m", "tests.parallel.axis_worker"])
    executor.wait_ready()
    yield executor
    executor.close()


def ask(ranks: ProcessExecutor, transport: str, scenario: int) -> str:
    tokens = [("shm", "gloo").index(transport), scenario]
    ranks.submit(Step(0, scenario, [Chunk(0, 0, tokens, [], None)]))
    return ranks.collect().logits[0][0].decode()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("name", NAMES)
def test_processes(ranks: ProcessExecutor, transport: str, name: str) -> None:
    """Guards the transports between real processes, over both axes of a mixed layout."""
    ask(ranks, transport, NAMES.index(name))


def test_gloo_stays_on_loopback(ranks: ProcessExecutor) -> None:
    """R4: guards against activations that anybody on the network could read or write."""
    listening = set()
    for process in ranks._ranks:
        sockets = {str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir() if fd.is_symlink()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if f"socket:[{fields[9]}]" in sockets:
                    listening.add(fields[1].partition(":")[0])
    assert listening == {"0100007F"}, listening


def test_shared_memory_has_no_name(ranks: ProcessExecutor) -> None:
    """Guards against files in /dev/shm that outlive ranks that are killed."""
    ask(ranks, "shm", 0)
    for process in ranks._ranks:
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        assert "/memfd:shardwise (deleted)" in mapped
        assert "/dev/shm/" not in mapped


@pytest.mark.parametrize("name", NAMES)
def test_gloo_joins_again_as_one_line(ranks: ProcessExecutor, name: str) -> None:
    """Guards leaving a group and joining another within one process, and the group that is the whole world."""
    if name == NAMES[0]:
        ask(ranks, "gloo", len(NAMES))
    ask(ranks, "gloo", NAMES.index(name))


def test_gloo_timeout_names_the_missing_rank(ranks: ProcessExecutor) -> None:
    """Guards against gloo's own message, which names a socket; comes last, since it ends the group."""
    assert ask(ranks, "gloo", len(NAMES) + 1).startswith("tp axis: waited in vain for rank 1")
