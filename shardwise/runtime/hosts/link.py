"""What the front and a host's agent say to each other, over one proved connection on which silence is an end.

Plain data; knows processes by number, and not what passes between them and the front.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

import msgspec

from shardwise.parallel.seal import Sealed

PURPOSE = b"agent"
"""Of the connection, as both ends prove it."""
BEAT = 1.0
"""Seconds after which an end with nothing to say says so."""
SILENCE = 8.0
"""Seconds of silence that end a connection."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An agent's first word."""

    host: int
    name: str
    processes: int
    version: str


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The front's answer to an agent that doesn't fit."""

    why: str


class Fork(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Fork process ``number``: from the process ``holder``, or from the fork server where that is 0."""

    number: int
    rank: int
    threads: int
    meeting: int
    """Processes of one meeting are handed one empty file."""
    holder: int


class Met(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """All of a meeting have been forked."""

    meeting: int


class Data(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Bytes to a process, or from it."""

    number: int
    data: bytes


class Kill(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Kill a process; it may be gone."""

    number: int


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """A process is gone, after all of its bytes."""

    number: int
    status: int
    last: bytes
    """Of what it printed."""


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Which processes are stopped, when that has changed."""

    numbers: list[int]


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Still here."""


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The front needs nothing now: should it go, all is done; it may still ask for more."""


Message = Hello | Refuse | Fork | Met | Data | Kill | Ended | Stopped | Beat | Bye


class Link:
    """Both directions of a connection, by a thread each: ``heed`` hears every message, then ``lost`` why it ended."""

    def __init__(self, sealed: Sealed, heed: Callable[[Message], None], lost: Callable[[Link, str], None]) -> None:
        self._sealed, self._heed, self._lost = sealed, heed, lost
        self._queue: SimpleQueue[Message | threading.Event | None] = SimpleQueue()
        self._why = ""
        """Why it has ended."""
        sealed.connection.settimeout(SILENCE)
        for work in (self._read, self._write):
            threading.Thread(target=work, name="link", daemon=True).start()

    def tell(self, message: Message) -> None:
        """Send it, after what was told before; from any thread, and in vain once the connection is lost."""
        self._queue.put(message)

    def flush(self, patience: float) -> None:
        """Wait until all is sent, or the seconds are over."""
        sent = threading.Event()
        self._queue.put(sent)
        sent.wait(patience)

    def close(self) -> None:
        """End it; harmless when repeated."""
        self._queue.put(None)
        self._sealed.close()

    def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(Message)
        try:
            while True:
                message: Message = decoder.decode(self._sealed.receive())
                if not isinstance(message, Beat):
                    self._heed(message)
        except TimeoutError:
            self._why = f"nothing was heard for {SILENCE:g} s"
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._why = self._why or str(error)
        finally:
            self.close()
            self._lost(self, self._why)

    def _write(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        try:
            while True:
                try:
                    message = self._queue.get(timeout=BEAT)
                except Empty:
                    message = Beat()
                if message is None:
                    break
                if isinstance(message, threading.Event):
                    message.set()
                    continue
                self._sealed.send(encoder.encode(message))
        except TimeoutError:
            self._why = f"nothing was taken for {SILENCE:g} s"
        except OSError:
            pass  # what has come can still be read, and then why it has ended
        with suppress(OSError):
            self._sealed.connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads, which closes it
