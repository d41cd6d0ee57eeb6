"""What the front process and a rank say to each other, cut into frames. Plain data: no torch, no pickle."""

from __future__ import annotations

import selectors
import socket
import struct
from enum import IntEnum
from typing import Any

import msgspec

HEAD = struct.Struct("<IB")
"""Before each msgpack payload: its length in bytes and its kind."""
PIECE = 1 << 20


class Kind(IntEnum):
    """START, STEP, PEERS and QUIT go to the rank; READY, RESULT, FAILED and MEET come from it."""

    START = 1
    STEP = 2
    QUIT = 3
    READY = 4
    RESULT = 5
    FAILED = 6
    MEET = 7
    """Where ranks on other hosts can reach this one."""
    PEERS = 8
    """The same of all ranks, in rank order."""


class WorkerSpec(msgspec.Struct, frozen=True):
    """What one rank is told first. ``runner`` is for whoever builds the rank's work; all else is about processes."""

    rank: int
    """Within the replica of ``tp * pp`` ranks; tp varies fastest."""
    tp: int
    pp: int
    runner: msgspec.Raw
    transport: str = "shm"
    """"shm", "gloo" or "nccl"."""
    device: int | None = None
    """The GPU's number, or None for the CPU."""
    threads: int = 1
    crowded: bool = True
    """Do the ranks of this host have more threads than it has cores?"""
    slot_bytes: int = 16 << 20
    timeout: float = 60.0
    """Seconds that a collective may take."""
    grace: float = 1.0
    """Seconds that it gets to end by itself."""
    host: int = 0
    """Where it runs, counted among the hosts of the replica."""
    hosts: list[int] = []
    """The same of each rank of the replica; empty when there is one host."""
    front: str = ""
    """Where the front's host can be reached, when there are several."""
    run: str = ""
    """A random name of these ranks, by which they know each other among those of several hosts."""


class Failed(msgspec.Struct, frozen=True):
    """The exception that ended a rank."""

    kind: str
    text: str
    trace: str


def pack(kind: Kind, content: Any = None) -> bytes:
    """One frame."""
    payload = msgspec.msgpack.encode(content)
    return HEAD.pack(len(payload), kind) + payload


class Frames:
    """Both directions of a stream socket, which may block (a rank's end) or not (the front's)."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unsent = bytearray()
        self._received = bytearray()

    def send(self, frame: bytes = b"") -> None:
        """Send the frame, after what is still unsent, as far as the socket takes it.

        A peer that is gone is no error here: it shows at the reading end.
        """
        self.unsent += frame
        try:
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            pass

    def receive(self) -> bool | None:
        """Read what has come; None when that is nothing yet, False at the end of the stream."""
        try:
            data = self.connection.recv(PIECE)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return False
        self._received += data
        return bool(data)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have ``selector``, where the connection is registered, wake for what comes, and for room for the unsent."""
        key, wanted = selector.get_key(self.connection), selectors.EVENT_READ
        if self.unsent:
            wanted |= selectors.EVENT_WRITE
        if key.events != wanted:
            selector.modify(self.connection, wanted, key.data)

    def exchange(self) -> bool:
        """Send what is unsent and read all that has come, without blocking; is the other end still there?"""
        self.send()
        while came := self.receive():
            pass
        return came is None

    def take(self) -> tuple[Kind, bytes] | None:
        """The oldest whole frame received and not taken yet."""
        if len(self._received) < HEAD.size:
            return None
        length, kind = HEAD.unpack_from(self._received)
        end = HEAD.size + length
        if len(self._received) < end:
            return None
        payload = bytes(self._received[HEAD.size : end])
        del self._received[:end]
        return Kind(kind), payload

    def read(self) -> tuple[Kind, bytes] | None:
        """The next frame, or None at the end of the stream; for a socket that blocks."""
        while (frame := self.take()) is None:
            if not self.receive():
                return None
        return frame
