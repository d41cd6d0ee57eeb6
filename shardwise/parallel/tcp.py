"""An axis whose ranks are on several hosts: one proved TCP connection between each two of them.

Knows tensors as bytes, and who is on the line; nothing of hosts or of how addresses become known.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from math import prod
from queue import Queue
from time import monotonic

import torch
from torch import Tensor

from shardwise.parallel.axis import Shape, missing
from shardwise.parallel.seal import LONGEST, Door, Sealed, knock

PENDING = 8
"""Tensors on their way before a sender waits."""
SMALL = 1 << 15
"""Bytes that the kernel takes at once, so that no other thread need wait for it."""


class TcpTransport:
    """One rank's end of an axis. ``peers`` are the connections, by rank on the axis; ``timeout`` is in seconds.

    Tensors of a GPU pass through host memory.
    """

    def __init__(self, name: str, rank: int, peers: Mapping[int, Sealed], device: torch.device, timeout: float) -> None:
        self._name, self._rank, self._peers, self._device = name, rank, dict(sorted(peers.items())), device
        self._queue: Queue[tuple[int, Tensor] | None] = Queue(PENDING)
        self._error: Exception | None = None
        for peer in self._peers.values():
            peer.connection.settimeout(timeout)
        threading.Thread(target=self._send_queued, name=f"{name} axis", daemon=True).start()

    def buffer(self, shape: Shape, dtype: torch.dtype) -> Tensor | None:
        """None: any memory is as good."""

    def exchange(self, mine: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """See `Transport`. Raises ConnectionError when the connection to a peer breaks.

        It can't lock up: each rank sends to the others, and receives from them, in the order of their numbers, so that
        what passes from s to d waits only for what passes between ranks of a lower sum.
        """
        source = _bytes(mine)
        if source.numel():
            for rank in self._peers:
                self._send(rank, source)
        return [
            mine if rank == self._rank else self._receive(rank, shape, mine.dtype) for rank, shape in enumerate(shapes)
        ]

    def send(self, tensor: Tensor) -> None:
        """See `Transport`."""
        if tensor.numel():
            self._send(self._rank + 1, _bytes(tensor))

    def recv(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """See `Transport`."""
        return self._receive(self._rank - 1, shape, dtype)

    def close(self) -> None:
        """See `Transport`."""
        for peer in self._peers.values():
            peer.close()
        if self._queue.empty():
            self._queue.put(None)

    def _send(self, rank: int, data: Tensor) -> None:
        if self._error is not None:
            raise self._error
        if data.numel() <= SMALL and self._queue.unfinished_tasks == 0:
            self._pass_on(rank, data)
        else:
            self._queue.put((rank, data.clone()))

    def _send_queued(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._pass_on(*item)
                except Exception as error:
                    self._error = error
            self._queue.task_done()

    def _pass_on(self, rank: int, data: Tensor) -> None:
        whole = memoryview(data.numpy())  # type: ignore[arg-type]
        try:
            for at in range(0, len(whole), LONGEST):
                self._peers[rank].send(whole[at : at + LONGEST])
        except TimeoutError:
            raise missing(self._name, [rank]) from None
        except OSError as error:
            raise ConnectionError(f"{self._name} axis: lost rank {rank} ({error})") from None

    def _receive(self, rank: int, shape: Shape, dtype: torch.dtype) -> Tensor:
        size = prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)
        try:
            data = self._peers[rank].receive()
            while len(data) < size and len(data) % LONGEST == 0:
                data += self._peers[rank].receive()
        except TimeoutError:
            raise missing(self._name, [rank]) from None
        except OSError as error:
            raise ConnectionError(f"{self._name} axis: lost rank {rank} ({error})") from None
        if len(data) != size:
            raise ConnectionError(f"{self._name} axis: rank {rank} sent {len(data)} bytes, and {size} are due")
        return torch.frombuffer(data, dtype=dtype).view(tuple(shape)).to(self._device)


def connect(
    lines: Mapping[str, Sequence[int]],
    rank: int,
    door: Door,
    addresses: Sequence[str],
    secret: bytes,
    purpose: bytes,
    timeout: float,
) -> dict[str, dict[int, Sealed]]:
    """The connections of ``rank`` to the others of its ``lines`` (axis → ranks), by axis and place on the line.

    The higher rank of each two knocks at the ``addresses`` of the lower one. Raises TimeoutError naming an axis and
    the ranks that did not come, and OSError for those that can't be reached.
    """
    deadline = monotonic() + timeout
    found: dict[str, dict[int, Sealed]] = {name: {} for name in lines}
    for name, line in lines.items():
        for place, peer in enumerate(line):
            if peer < rank:
                try:
                    found[name][place] = knock(addresses[peer], secret, purpose)
                except OSError as error:
                    raise ConnectionError(f"{name} axis: rank {place} can't be reached ({error})") from None
                found[name][place].send(f"{name} {line.index(rank)}".encode())
    due = {(name, place) for name, line in lines.items() for place, peer in enumerate(line) if peer > rank}
    while due:
        peer_of = door.take(deadline - monotonic())
        if peer_of is None:
            name = min(due)[0]
            raise missing(name, sorted(place for axis, place in due if axis == name))
        name, _, place_of = peer_of.receive().decode().partition(" ")
        due.remove((name, int(place_of)))
        found[name][int(place_of)] = peer_of
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
