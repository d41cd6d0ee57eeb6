"""An axis whose ranks are processes of one host: tensors meet in one anonymous shared file, passed by descriptor.

Knows addresses and counters; nothing of processes' lives or of what the tensors mean.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from shardwise.parallel.axis import Axis, Shape, missing

LINE = 64
"""Bytes of a cache line: words that different ranks write lie apart by as much."""
MAILS = 4
"""Tensors that may lie between two neighbouring ranks before a sender has to wait."""


class Sync(Protocol):
    """What the transport needs of the kernels: waits on 32-bit words given by address, False after the timeout."""

    def barrier(self, count: int, generation: int, size: int, timeout: float) -> bool:
        """Wait for ``size`` callers."""

    def wait(self, word: int, at_least: int, timeout: float) -> bool:
        """Wait until the word has reached ``at_least``, modulo 2^32."""

    def post(self, word: int, value: int) -> None:
        """Store the value, modulo 2^32, publish what was written before it, and wake who waits."""


class SharedMemoryTransport:
    """One rank's end of an axis that lives in ``memory``, `region_bytes` bytes at ``start``, all zero at first.

    Two slots per rank used in turn make one barrier per exchange enough. A rank writes its slot of exchange k again
    only for exchange k + 2, and so after it has passed the barrier of exchange k + 1. No rank reaches that barrier
    before its next call, and by the contract of `exchange` it has then done with the tensors of exchange k.
    ``slot_bytes`` bounds what travels at once; a larger tensor goes in pieces. ``timeout`` is in seconds.
    """

    def __init__(
        self, name: str, memory: Tensor, start: int, rank: int, size: int, slot_bytes: int, timeout: float, sync: Sync
    ) -> None:
        assert slot_bytes % LINE == 0
        self._name, self._rank, self._size, self._slot_bytes, self._timeout = name, rank, size, slot_bytes, timeout
        self._sync = sync
        self._memory = memory[start : start + region_bytes(size, slot_bytes)]
        base = self._memory.data_ptr()
        self._count, self._generation = base, base + LINE
        self._arrivals = self._memory[2 * LINE : (2 + size) * LINE].view(torch.int32)[:: LINE // 4].numpy()
        self._counters = base + (2 + size) * LINE
        self._slots = (2 + size + 2 * size) * LINE
        self._view = lru_cache(maxsize=256)(self._map)  # decoding asks for the same few again and again
        self._round = self._sent = self._received = 0

    def buffer(self, shape: Shape, dtype: torch.dtype) -> Tensor | None:
        """A view of this rank's next slot, where it is large enough."""
        if prod(shape) * dtype.itemsize > self._slot_bytes:
            return None
        return self._view(self._slot(self._rank, self._round + 1), tuple(shape), dtype)

    def exchange(self, mine: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """See `Transport`."""
        dtype = mine.dtype
        longest = max(prod(shape) for shape in shapes) * dtype.itemsize
        if longest > self._slot_bytes:
            return self._exchange_pieces(mine, shapes, longest)
        self._round += 1
        place = self._view(self._slot(self._rank, self._round), mine.shape, dtype)
        if mine.data_ptr() != place.data_ptr():
            place.copy_(mine)
        self._meet()
        return [
            place if rank == self._rank else self._view(self._slot(rank, self._round), tuple(shape), dtype)
            for rank, shape in enumerate(shapes)
        ]

    def send(self, tensor: Tensor) -> None:
        """See `Transport`. Waits only while `MAILS` pieces lie unread."""
        sent, taken = self._mail_words(self._rank)
        for piece in self._pieces(tensor):
            if not self._sync.wait(taken, self._sent + 1 - MAILS, self._timeout):
                raise missing(self._name, [self._rank + 1])
            self._view(self._mail(self._rank, self._sent), piece.shape, torch.uint8).copy_(piece)
            self._sent += 1
            self._sync.post(sent, self._sent)

    def recv(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """See `Transport`."""
        sent, taken = self._mail_words(self._rank - 1)
        tensor = torch.empty(tuple(shape), dtype=dtype)
        for piece in self._pieces(tensor):
            if not self._sync.wait(sent, self._received + 1, self._timeout):
                raise missing(self._name, [self._rank - 1])
            piece.copy_(self._view(self._mail(self._rank - 1, self._received), piece.shape, torch.uint8))
            self._received += 1
            self._sync.post(taken, self._received)
        return tensor

    def close(self) -> None:
        """See `Transport`. The memory goes with the last tensor that looks at it."""
        self._view.cache_clear()

    def _exchange_pieces(self, mine: Tensor, shapes: Sequence[Shape], longest: int) -> list[Tensor]:
        results = [torch.empty(tuple(shape), dtype=mine.dtype) for shape in shapes]
        targets = [_bytes(result) for result in results]
        source = _bytes(mine)
        for start in range(0, longest, self._slot_bytes):
            self._round += 1
            stop = start + self._slot_bytes
            place = self._view(self._slot(self._rank, self._round), source[start:stop].shape, torch.uint8)
            if place.data_ptr() != source.data_ptr():  # `mine` may be the buffer of this very round
                place.copy_(source[start:stop])
            self._meet()
            for rank, target in enumerate(targets):
                piece = target[start:stop]
                piece.copy_(self._view(self._slot(rank, self._round), piece.shape, torch.uint8))
        return results

    def _pieces(self, tensor: Tensor) -> list[Tensor]:
        flat = _bytes(tensor)
        return [flat[start : start + self._slot_bytes] for start in range(0, flat.numel(), self._slot_bytes)]

    def _meet(self) -> None:
        self._arrivals[self._rank] = _wrapped(self._round)
        if not self._sync.barrier(self._count, self._generation, self._size, self._timeout):
            late = [rank for rank in range(self._size) if _wrapped(int(self._arrivals[rank]) - self._round) < 0]
            raise missing(self._name, late)

    def _slot(self, rank: int, turn: int) -> int:
        return self._slots + (2 * rank + turn % 2) * self._slot_bytes

    def _mail(self, sender: int, number: int) -> int:
        return self._slots + (2 * self._size + MAILS * sender + number % MAILS) * self._slot_bytes

    def _mail_words(self, sender: int) -> tuple[int, int]:
        """Addresses of the counters of pieces sent and of pieces taken, from ``sender`` to its next."""
        word = self._counters + 2 * sender * LINE
        return word, word + LINE

    def _map(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = prod(shape) * dtype.itemsize
        return self._memory[offset : offset + size].view(dtype).view(shape)


def region_bytes(size: int, slot_bytes: int) -> int:
    """Bytes of one axis: two words of the barrier; per rank its arrival, two counters, two slots and its mailbox."""
    return (2 + 3 * size) * LINE + (2 + MAILS) * size * slot_bytes


def shared_axes(
    fd: int, rank: int, tp: int, pp: int, sync: Sync, slot_bytes: int = 16 << 20, timeout: float = 60.0
) -> tuple[Axis, Axis]:
    """The (tp, pp) axes of ``rank`` (tp varies fastest) over the empty file ``fd`` that the replica's ranks share.

    Untouched pages cost no memory, so ``slot_bytes`` may be generous.
    """
    slot_bytes = -(-slot_bytes // LINE) * LINE
    stage, shard = region_bytes(tp, slot_bytes), region_bytes(pp, slot_bytes)
    os.ftruncate(fd, pp * stage + tp * shard)  # every rank sets the same size: whoever comes first makes the file
    memory = torch.frombuffer(mmap.mmap(fd, pp * stage + tp * shard), dtype=torch.uint8)

    def axis(name: str, start: int, place: int, size: int) -> Axis:
        if size == 1:
            return Axis()
        return Axis(place, size, SharedMemoryTransport(name, memory, start, place, size, slot_bytes, timeout, sync))

    return (
        axis("tp", rank // tp * stage, rank % tp, tp),
        axis("pp", pp * stage + rank % tp * shard, rank // tp, pp),
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _wrapped(number: int) -> int:
    """``number`` as a signed 32-bit word: counters wrap around."""
    return (number + 2**31) % 2**32 - 2**31
