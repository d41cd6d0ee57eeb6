"""Where processes are forked, on this host or another: the seam between an executor and hosts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from shardwise.runtime.spawn import Process


class Forks(Protocol):
    """One host, as an executor sees it."""

    alive: bool
    """Can processes still be had?"""

    @property
    def absent(self) -> str:
        """A sentence where the host isn't there, and what is asked of it waits."""

    def fork(self, rank: int, threads: int, meeting: int, holder: Process | None = None) -> Process:
        """Ask for a process, forked from the ``holder`` or else from a fork server; see `ForkServer`."""

    def meeting(self) -> AbstractContextManager[int]:
        """A new empty file for processes that are to meet, or what stands for it: `fork` takes it meanwhile."""

    def close(self) -> None:
        """End what is left of the processes; harmless when repeated."""
