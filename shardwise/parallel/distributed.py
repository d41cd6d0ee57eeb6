"""An axis over torch.distributed: gloo between CPUs, NCCL between GPUs.

Knows process groups and what is safe to ask of them; nothing of models or of how the ranks were started.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.axis import Axis, Shape

PENDING = 8
"""Tensors on their way to the next rank before a sender waits for the oldest."""


class DistributedTransport:
    """One rank's end of an axis of the world ranks ``ranks``.

    Everything travels as bytes of a length both sides know: gloo ends the process, without an exception, when a message
    is longer than the memory that waits for it.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None, ranks: Sequence[int], device: torch.device) -> None:
        self._name, self._group, self._ranks, self._device = name, group, list(ranks), device
        self._rank = self._ranks.index(dist.get_rank())
        self._pending: deque[Any] = deque()

    def buffer(self, shape: Shape, dtype: torch.dtype) -> Tensor | None:
        """None: any memory is as good."""

    def exchange(self, mine: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """See `Transport`. One all-gather, the shorter tensors padded: a message per rank would be as many round trips.

        Raises ConnectionError when the connection to a peer breaks.
        """
        sizes = [prod(shape) * mine.dtype.itemsize for shape in shapes]
        longest = -(-max(sizes) // 16) * 16
        source = _bytes(mine)
        if source.numel() < longest:
            source = torch.cat([source, source.new_zeros(longest - source.numel())])
        gathered = torch.empty(len(sizes), longest, dtype=torch.uint8, device=self._device)
        with self._named():
            if longest:
                dist.all_gather(list(gathered), source, group=self._group)
        return [
            row[:size].view(mine.dtype).view(tuple(shape))
            for row, size, shape in zip(gathered, sizes, shapes, strict=True)
        ]

    def send(self, tensor: Tensor) -> None:
        """See `Transport`."""
        if tensor.numel() == 0:
            return
        copy = _bytes(tensor).clone()
        with self._named():
            if len(self._pending) >= PENDING:
                self._pending.popleft()[0].wait()
            work = dist.isend(copy, self._ranks[self._rank + 1], group=self._group)
        self._pending.append((work, copy))  # the bytes must live as long as the work

    def recv(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """See `Transport`."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        if tensor.numel():
            with self._named():
                dist.recv(_bytes(tensor), self._ranks[self._rank - 1], group=self._group)
        return tensor

    def close(self) -> None:
        """See `Transport`. The groups of a process end together."""
        self._pending.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            others = ", ".join(str(rank) for rank in range(len(self._ranks)) if rank != self._rank)
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise TimeoutError(f"{self._name} axis: waited in vain for rank {others} ({error})") from None
            raise ConnectionError(f"{self._name} axis: lost rank {others} ({error})") from None


def distributed_axes(
    meeting: str,
    rank: int,
    tp: int,
    pp: int,
    device: torch.device,
    timeout: float = 60.0,
    here: range | None = None,
    interface: str | None = None,
) -> tuple[Axis, Axis]:
    """Join the process group of a replica of ``tp * pp`` ranks (tp varies fastest) and return this rank's axes.

    If only the ranks ``here`` are of this host, these make the group; an axis with others on it is as one of size 1.

    NCCL for a CUDA ``device``, gloo otherwise; ``timeout`` in seconds bounds every call. ``meeting`` is a rendezvous
    URL of torch.distributed; see `file_meeting`. All sockets stay on ``interface``, by default the loopback one, since
    whoever can reach them can write into the model's activations.
    """
    name = interface or loopback()
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
    limit, here = timedelta(seconds=timeout), here or range(tp * pp)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=meeting,
        rank=here.index(rank),
        world_size=len(here),
        timeout=limit,
        device_id=device if on_gpu else None,
    )
    stages = [range(stage * tp, (stage + 1) * tp) for stage in range(pp)]
    shards = [range(shard, tp * pp, tp) for shard in range(tp)]

    def axis(name: str, lines: list[range]) -> Axis:
        own = Axis()
        for line in lines:  # every rank of the group has to make every group within
            if len(line) == 1 or not all(peer in here for peer in line):
                continue
            numbers = [here.index(peer) for peer in line]
            group = None if len(line) == len(here) else dist.new_group(numbers, timeout=limit)
            if rank in line:
                own = Axis(line.index(rank), len(line), DistributedTransport(name, group, numbers, device))
        return own

    return axis("tp", stages), axis("pp", shards)


def file_meeting(fd: int) -> str:
    """Rendezvous in the empty anonymous file ``fd`` that all ranks hold: no port to find, nothing left on disk."""
    return f"file:///proc/self/fd/{fd}"


def loopback() -> str:
    """Name of the loopback interface."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
