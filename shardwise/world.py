"""The world of processes that torchrun has started: this one's place in it, and which host holds which rank.

Knows environment variables; nothing of what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.config import Layout


@dataclass(frozen=True)
class World:
    """``size`` processes on ``hosts`` hosts, ``local_size`` on each; this one is ``rank``, ``local_rank`` on ``host``.

    ``master`` and ``port`` are torchrun's MASTER_ADDR and MASTER_PORT.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    master: str
    port: int
    run: str
    """torchrun's --rdzv-id."""
    store: bool
    """Does torchrun keep its store at the master's port? Else the port is free, for the process of rank 0."""

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return self.size // self.local_size

    @property
    def host(self) -> int:
        """This process's, counted from 0."""
        return self.host_of(self.rank)

    def host_of(self, rank: int) -> int:
        """Where a rank of a layout runs."""
        return rank // self.local_size

    @property
    def layout(self) -> Layout:
        """What is meant when no layout is given: shards within a host, stages across."""
        return Layout(tp=self.local_size, pp=self.hosts)


def find_world(environ: Mapping[str, str]) -> World | None:
    """The world that this process is a part of; None where there is none, or only us.

    Raises ValueError for variables that make no sense, and for hosts with different numbers of processes.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    if not all(environ.get(name) for name in (*names, "MASTER_ADDR")):
        return None
    told = " ".join(f"{name}={environ[name]}" for name in names)
    try:
        rank, size, local_rank, local_size, port = (int(environ[name]) for name in names)
        hosts = int(environ.get("GROUP_WORLD_SIZE") or size // local_size)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{told} is no place in a world of processes: unset them, or use torchrun") from None
    if size == 1:
        return None
    if not (0 <= rank < size and 0 <= local_rank < local_size):
        raise ValueError(f"{told} is no place in a world of processes: unset them, or use torchrun")
    if hosts * local_size != size or rank % local_size != local_rank:
        raise ValueError(
            f"{told} on {hosts} hosts: every host must have the same number of processes; "
            "give each torchrun the same --nproc-per-node"
        )
    store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    run = environ.get("TORCHELASTIC_RUN_ID", "none")
    return World(rank, size, local_rank, local_size, environ["MASTER_ADDR"], port, run, store)
