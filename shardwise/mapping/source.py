"""Where a map's items come from: lines of JSON, one at a time, from a file, a pipe or Python values.

Reads no more than it is asked for, so a million lines take the memory of one; knows nothing of what they say.
"""

from __future__ import annotations

import json
import os
import selectors
from collections.abc import Iterable, Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Protocol

PIECE = 1 << 16
BOM = b"\xef\xbb\xbf"


class Source(Protocol):
    """Lines without their ends."""

    ended: bool
    """Set once there is no more."""

    def take(self) -> bytes | None:
        """The next line; None when there is none, yet or ever."""

    def wake(self) -> int | None:
        """A descriptor that is readable when `take` may have something again, for one that can't always answer."""

    def close(self) -> None:
        """Let go of the input; harmless when repeated."""


class Lines:
    """Lines that are there when they are asked for."""

    def __init__(self, lines: Iterator[bytes], file: BufferedReader[FileIO] | None = None) -> None:
        self.ended = False
        self._lines = lines
        self._file = file

    def take(self) -> bytes | None:
        """See `Source`."""
        line = next(self._lines, None)
        self.ended = line is None
        return line

    def wake(self) -> None:
        """See `Source`."""

    def close(self) -> None:
        """See `Source`."""
        if self._file is not None:
            self._file.close()


class Pipe:
    """Lines of a pipe, socket or terminal, whose other end may take its time. The descriptor becomes its own."""

    def __init__(self, fd: int) -> None:
        self.ended = False
        self._fd = fd
        self._read = bytearray()
        self._searched = 0
        self._closed = False
        self._first = True

    def take(self) -> bytes | None:
        """See `Source`."""
        while (end := self._read.find(b"\n", self._searched)) < 0 and not self._closed:
            self._searched = len(self._read)
            with selectors.DefaultSelector() as selector:
                selector.register(self._fd, selectors.EVENT_READ)
                if not selector.select(0):
                    return None
            piece = os.read(self._fd, PIECE)
            self._closed = not piece
            self._read += piece
        if end < 0 and not self._read:
            self.ended = True
            return None
        line = bytes(self._read if end < 0 else self._read[:end])
        del self._read[: len(line) + 1]
        self._searched = 0
        line = line.removeprefix(BOM) if self._first else line
        self._first = False
        return line.removesuffix(b"\r")

    def wake(self) -> int | None:
        """See `Source`."""
        return None if self.ended else self._fd

    def close(self) -> None:
        """See `Source`."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.ended = -1, True


def _lines_of(file: BufferedReader[FileIO]) -> Iterator[bytes]:
    for number, line in enumerate(file):
        yield (line if number else line.removeprefix(BOM)).removesuffix(b"\n").removesuffix(b"\r")


def open_lines(path: Path) -> Source:
    """The lines of a file; "-" is stdin. ValueError if it can't be read."""
    try:
        file = BufferedReader(FileIO(0 if str(path) == "-" else path, closefd=str(path) != "-"))
        if not file.seekable():
            fd = os.dup(file.fileno())
            file.close()
            return Pipe(fd)
    except OSError as error:
        raise ValueError(f"--input {path}: {error.strerror}") from None
    return Lines(_lines_of(file), file)


def encode_values(values: Iterable[Any]) -> Source:
    """Python values as lines; taking one raises ValueError if it is none of JSON's."""
    return Lines(_encoded(values))


def _encoded(values: Iterable[Any]) -> Iterator[bytes]:
    for index, value in enumerate(values):
        try:
            yield json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"item {index} must be a JSON value, since it travels to another process: {error}"
            ) from None
