"""An axis whose ranks are threads of one process: how whole layouts run in milliseconds, for tests above all.

Knows barriers and queues; nothing of processes or of what the tensors mean.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from shardwise.parallel.axis import Axis, Shape, missing


class Meeting:
    """What the ranks of one axis share."""

    def __init__(self, name: str, size: int, timeout: float) -> None:
        self.name, self.size, self.timeout = name, size, timeout
        self.barrier = threading.Barrier(size)
        self.boxes: list[list[Tensor]] = [[torch.empty(0)] * size for _ in range(2)]
        self.arrived = [0] * size
        self.left: set[int] = set()
        self.mail: list[SimpleQueue[Tensor | None]] = [SimpleQueue() for _ in range(size - 1)]


class ThreadTransport:
    """One rank's end of a `Meeting`.

    Two rows of boxes used in turn make one barrier enough: a rank fills row k again only in round k + 2, so after the
    barrier of round k + 1, which every reader of round k reaches only when it is done reading.
    """

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank, self._round = meeting, rank, 0

    def buffer(self, shape: Shape, dtype: torch.dtype) -> Tensor | None:
        """None: any memory is as good."""

    def exchange(self, mine: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """See `Transport`. Raises ConnectionError at once when a peer has closed its end."""
        meeting = self._meeting
        self._round += 1
        box = meeting.boxes[self._round % 2]
        box[self._rank] = mine.clone()
        meeting.arrived[self._rank] = self._round
        try:
            meeting.barrier.wait(meeting.timeout)
        except threading.BrokenBarrierError:
            late = [rank for rank, last in enumerate(meeting.arrived) if last < self._round]
            raise self._gone() or missing(meeting.name, late) from None
        return list(box)

    def send(self, tensor: Tensor) -> None:
        """See `Transport`."""
        self._meeting.mail[self._rank].put(tensor.clone())

    def recv(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """See `Transport`."""
        meeting, sender = self._meeting, self._rank - 1
        try:
            tensor = meeting.mail[sender].get(timeout=meeting.timeout)
        except Empty:
            raise missing(meeting.name, [sender]) from None
        if tensor is None:
            raise self._gone() or AssertionError("only a rank that leaves sends None")
        assert tuple(tensor.shape) == tuple(shape)
        assert tensor.dtype == dtype
        return tensor

    def close(self) -> None:
        """Leave: peers that wait, or ever will, raise ConnectionError instead of waiting out their time."""
        meeting = self._meeting
        meeting.left.add(self._rank)
        meeting.barrier.abort()
        if self._rank + 1 < meeting.size:
            meeting.mail[self._rank].put(None)

    def _gone(self) -> ConnectionError | None:
        left = sorted(self._meeting.left)
        return (
            ConnectionError(f"{self._meeting.name} axis: rank {', '.join(map(str, left))} has left") if left else None
        )


def thread_axes(tp: int, pp: int, timeout: float = 60.0) -> list[tuple[Axis, Axis]]:
    """The (tp, pp) axes of every rank of a replica, in rank order: tp varies fastest. ``timeout`` is in seconds."""

    def line(name: str, size: int) -> list[Axis]:
        if size == 1:
            return [Axis()]
        meeting = Meeting(name, size, timeout)
        return [Axis(rank, size, ThreadTransport(meeting, rank)) for rank in range(size)]

    stages = [line("tp", tp) for _ in range(pp)]
    shards = [line("pp", pp) for _ in range(tp)]
    return [(stages[rank // tp][rank % tp], shards[rank % tp][rank // tp]) for rank in range(tp * pp)]
