"""Barrier, wait and post on 32-bit words in memory that processes share, by address: shm.c for Python.

Knows neither what the words count nor who maps the memory. torch is not imported.
"""

from __future__ import annotations

import ctypes

from shardwise.kernels import build

SPIN = 100
"""Looks at a word before a wait sleeps, where processes share cores: more would keep off the one that is waited for."""
SPIN_ALONE = 4000
"""The same where each process has cores of its own: some tens of microseconds, less than it takes to be woken."""


class Sync:
    """The three calls. Words are 4-byte aligned, start at 0 and count upwards modulo 2^32. A wait drops the GIL."""

    def __init__(self, library: ctypes.CDLL, spin: int = SPIN) -> None:
        word, number, seconds = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_double
        self._spin = spin
        self._barrier, self._wait, self._post = library.sw_barrier, library.sw_wait, library.sw_post
        self._barrier.argtypes = [word, word, number, number, seconds]
        self._wait.argtypes = [word, number, number, seconds]
        self._post.argtypes = [word, number]
        self._post.restype = None

    def barrier(self, count: int, generation: int, size: int, timeout: float) -> bool:
        """Wait for ``size`` callers on two words, given by address; False, and broken for good, after ``timeout`` s."""
        return bool(self._barrier(count, generation, size, self._spin, timeout) == 0)

    def wait(self, word: int, at_least: int, timeout: float) -> bool:
        """Wait until the word has reached ``at_least`` (taken modulo 2^32); False after ``timeout`` s."""
        return bool(self._wait(word, at_least & 0xFFFFFFFF, self._spin, timeout) == 0)

    def post(self, word: int, value: int) -> None:
        """Store ``value`` (modulo 2^32), publish all that was written before it, and wake who waits."""
        self._post(word, value & 0xFFFFFFFF)


def load_sync(spin: int = SPIN) -> Sync:
    """The calls out of the kernel library. Raises build.BuildError where it can't be loaded."""
    return Sync(build.load()[0], spin)
