from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

from shardwise.kernels.build import BuildError
from shardwise.kernels.sync import Sync, load_sync


@pytest.fixture(scope="module")
def sync() -> Sync:
    try:
        return load_sync()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def words() -> Iterator[list[int]]:
    memory = (ctypes.c_uint32 * 64)()
    yield [ctypes.addressof(memory) + 16 * 4 * index for index in range(4)]
    del memory


def read(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value


def test_barrier_holds_everyone_back(sync: Sync, words: list[int]) -> None:
    """A rank that leaves before the last has come, or a round that overtakes the one before."""
    size, rounds, arrived, early = 4, 300, [0] * 300, []

    def rank() -> None:
        for index in range(rounds):
            arrived[index] += 1  # under the GIL
            assert sync.barrier(words[0], words[1], size, 20)
            if arrived[index] != size:
                early.append(index)

    threads = [threading.Thread(target=rank) for _ in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert early == []
    assert read(words[1]) == rounds


def test_wait_gives_up_in_time(sync: Sync, words: list[int]) -> None:
    """A dead peer that is waited for without end, or a sleep that returns at once."""
    for call in (lambda: sync.wait(words[0], 1, 0.1), lambda: sync.barrier(words[1], words[2], 2, 0.1)):
        start = time.monotonic()
        assert not call()
        assert 0.09 < time.monotonic() - start < 5


def test_wait_wakes_and_compares_around_the_end(sync: Sync, words: list[int]) -> None:
    """A sleeper that is not woken; counters that stop working after 2^32 steps."""
    assert sync.wait(words[0], 0, 0)
    thread = threading.Thread(target=sync.wait, args=(words[0], 5, 20))
    thread.start()
    sync.post(words[0], 4)
    thread.join(0.1)
    assert thread.is_alive()
    sync.post(words[0], 5)
    thread.join(10)
    assert not thread.is_alive()
    sync.post(words[1], 2**32 - 1)
    assert sync.wait(words[1], 2**32 - 2, 0)
    assert not sync.wait(words[1], 2**32 + 1, 0.01)
    sync.post(words[1], 2**32 + 1)
    assert sync.wait(words[1], 2**32 - 1, 0)


RANK = """
import ctypes, mmap, sys
from shardwise.kernels.sync import load_sync
assert "torch" not in sys.modules
rank, size, rounds, file = map(int, sys.argv[1:])
memory = mmap.mmap(file, 4096)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
numbers = (ctypes.c_uint32 * size).from_buffer(memory, 1024)
sync = load_sync()
for index in range(rounds):
    numbers[rank] = index * 7 + rank
    assert sync.barrier(base, base + 64, size, 30)
    assert list(numbers) == [index * 7 + other for other in range(size)], (index, list(numbers))
    assert sync.barrier(base, base + 64, size, 30)
    if rank == 0:
        numbers[0] = index + 1
        sync.post(base + 128, index + 1)
    else:
        assert sync.wait(base + 128, index + 1, 30)
        assert numbers[0] == index + 1
    assert sync.barrier(base, base + 64, size, 30)
"""


def test_processes_meet_in_shared_memory(sync: Sync) -> None:
    """A futex that is private to one process, or writes that a peer does not see after the barrier."""
    with tempfile.TemporaryFile() as file:
        os.truncate(file.fileno(), 4096)
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), "3", "200", str(file.fileno())],
                pass_fds=[file.fileno()],
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]
        for rank in ranks:
            _, errors = rank.communicate(timeout=60)
            assert rank.returncode == 0, errors
