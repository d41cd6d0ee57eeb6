"""The output file and the journal beside it: answers in input order, and all that going on after an interruption needs.

The output holds the first answers, in order. The journal says, in the order in which items were done, which input each
had (a digest) and holds the answers that have come before their turn; it goes when all is done. Both may end anywhere,
even within a line: what is whole counts. Knows nothing of ranks.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from array import array
from collections.abc import Iterator, Mapping
from io import BufferedReader, FileIO
from pathlib import Path
from time import monotonic, sleep
from typing import Any

AHEAD = 1 << 16
"""Items that may be done before their turn: while one takes long, the others wait at that distance."""
PATIENCE = 1.0
"""Seconds that a lock is waited for."""


class Journal:
    """Answers of the items ``first``, ``first + step`` and so on.

    Without a ``path`` nothing outlasts it. ``head`` says what is being done: a journal of something else is refused.
    ``run`` is noted, for whoever must know which run of several processes a part belongs to.
    Raises ValueError with the remedy for an output that can't be gone on with.
    """

    def __init__(
        self,
        path: Path | None,
        head: Mapping[str, Any],
        overwrite: bool = False,
        first: int = 0,
        step: int = 1,
        run: str = "",
    ) -> None:
        self.next = first
        """The first item whose answer isn't in order yet."""
        self.resumed = 0
        """Items found done."""
        self.failed = 0
        """Of those in order, these failed."""
        self._first, self._step = first, step
        self._digests = array("Q")
        self._ahead: dict[int, tuple[int, int]] = {}
        self._lasting = path is not None
        self._fresh = False
        """Begun anew, with nothing done by now."""
        self._output: FileIO | None = None
        if path is None:
            self._journal: FileIO = _anonymous()
            self._size = 0
            return
        self.path, self.notes = path, notes_of(path)
        if not path.absolute().parent.is_dir():
            raise ValueError(f"--output {path}: there is no directory {path.parent}; make it first")
        if path.exists() and path.stat().st_size and not self.notes.exists() and not overwrite:
            raise ValueError(
                f"--output {path} exists, and no {self.notes.name} to go on with: give another name, or --overwrite"
            )
        self._journal = _open(self.notes)
        try:
            _lock(self._journal, path)
            overwrite = overwrite or not path.exists()  # whoever removes the output wants it anew
            self._output = _open(path)
            if overwrite:
                self._journal.truncate(0)
                self._output.truncate(0)
            self._recover(json.dumps(dict(head), sort_keys=True).encode(), run)
            if run:
                self._note(b"run %s\n" % run.encode())
        except BaseException:
            self.close()
            raise

    def knows(self, index: int, line: bytes) -> bool:
        """Is the item with this input done? ValueError if it was done with another one."""
        position = (index - self._first) // self._step
        if position >= len(self._digests) or not self._digests[position]:
            return False
        if self._digests[position] != _digest(line):
            raise ValueError(
                f"line {index + 1} of the input is not the one that {self.path} was made from: "
                "give the same input to go on, or --overwrite to begin anew"
            )
        return True

    def room(self, index: int) -> bool:
        """May the item be begun?"""
        return index - self.next < AHEAD * self._step

    def write(self, index: int, line: bytes, body: bytes) -> Iterator[bytes]:
        """Keep an item's answer; the output's new lines, in order, with their ends."""
        digest = _digest(line)
        if index != self.next:
            head = b"%d %d " % (digest, index)
            place = self._size + len(head), len(body)
            self._note(head + body + b"\n")
            self._ahead[index] = place
            return
        put = self._put(index, body)
        if self._lasting:
            self._note(b"%d %d\n" % (digest, index))
        yield put
        yield from self._catch_up()

    def end(self, count: int) -> None:
        """All ``count`` items are done, by whomever. ValueError if the output was made from more."""
        if self._ahead or self.next >= max(count, self._first) + self._step:
            raise ValueError(
                f"the input has only {count} lines, fewer than {self.path} was made from: "
                "give the same input to go on, or --overwrite to begin anew"
            )
        assert self.next >= count, "an item was lost"
        self._fresh = False
        if self._output is not None:
            os.fsync(self._output.fileno())
            self._note(b"end %d\n" % count)

    def kept(self) -> Iterator[bytes]:
        """The lines that are in the output already."""
        if self._output is not None:
            with self.path.open("rb") as file:
                for _ in range(self._first, self.next, self._step):
                    yield file.readline()

    def _note(self, line: bytes) -> None:
        _write(self._journal, line)
        self._size += len(line)

    def forget(self) -> None:
        """The output is whole and needs no journal any more."""
        if self._lasting:
            self.notes.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the files; harmless when repeated. Those of a run that came to nothing are removed."""
        if self._fresh and self.next == self._first and not self._ahead:
            self.path.unlink(missing_ok=True)
            self.notes.unlink(missing_ok=True)
        self._fresh = False
        for file in (self._output, self._journal):
            if file is not None:
                file.close()

    def _put(self, index: int, body: bytes) -> bytes:
        line = b'{"index": %d, %s}\n' % (index, body)
        if self._output is not None:
            _write(self._output, line)
        self.failed += body.startswith(b'"error"')
        self.next += self._step
        return line

    def _catch_up(self) -> Iterator[bytes]:
        """What was ahead and has its turn now."""
        while (found := self._ahead.pop(self.next, None)) is not None:
            yield self._put(self.next, os.pread(self._journal.fileno(), found[1], found[0]))
        if not self._ahead and not self._lasting and self._size:
            self._journal.truncate(0)
            self._journal.seek(0)
            self._size = 0

    def _recover(self, head: bytes, run: str) -> None:
        """Read both files as far as they are whole and agree; cut off the rest."""
        output = self._output
        assert output is not None
        end = 0
        with open(self._journal.fileno(), "rb", closefd=False) as file:
            for line in _whole(file):
                if end == 0 and line != head + b"\n":
                    raise ValueError(
                        f"--output {self.path} was begun otherwise: {line.decode(errors='replace').strip()}, "
                        f"and now it is {head.decode()}; do the same to go on, or --overwrite to begin anew"
                    )
                if end and not line.startswith((b"end ", b"run ")):
                    self._read_note(line, end)
                end += len(line)
        self._journal.truncate(end)
        self._size = end
        if end == 0:
            if os.fstat(output.fileno()).st_size:
                raise ValueError(f"--output {self.path} exists, and {self.notes} is empty: --overwrite begins anew")
            self._fresh = not run
            self._note(head + b"\n")
            return
        end = 0
        with open(output.fileno(), "rb", closefd=False) as file:
            for position, line in enumerate(_whole(file)):
                start = b'{"index": %d, ' % self.next
                if not (position < len(self._digests) and self._digests[position] and line.startswith(start)):
                    break
                self.failed += line.startswith(start + b'"error"')
                self._ahead.pop(self.next, None)
                self.next += self._step
                end += len(line)
        output.truncate(end)
        for position, digest in enumerate(self._digests):  # said to be done, yet the answer was never written
            index = self._first + position * self._step
            if digest and index >= self.next and index not in self._ahead:
                self._digests[position] = 0
        self.resumed = (self.next - self._first) // self._step + len(self._ahead)
        for _ in self._catch_up():
            pass

    def _read_note(self, line: bytes, start: int) -> None:
        try:
            digest, index, *body = line[:-1].split(b" ", 2)
            position = (int(index) - self._first) // self._step
            self._digests.extend([0] * (position + 1 - len(self._digests)))
            self._digests[position] = int(digest)
        except (ValueError, IndexError, OverflowError):
            raise ValueError(f"{self.notes} is damaged: --overwrite begins anew") from None
        if body:
            self._ahead[int(index)] = start + len(line) - 1 - len(body[0]), len(body[0])


def notes_of(path: Path) -> Path:
    """The journal of an output."""
    return path.with_name(path.name + ".journal")


def _digest(line: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(line, digest_size=8).digest(), "little") or 1


def _anonymous() -> FileIO:
    fd, name = tempfile.mkstemp()
    os.unlink(name)
    return FileIO(fd, "r+b")


def _lock(journal: FileIO, path: Path) -> None:
    """Only one process may write; whoever only looks whether it is there holds the lock for a moment."""
    deadline = monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if monotonic() > deadline:
                told = f"--output {path} is being written by another process: wait for it, or give another name"
                raise ValueError(told) from None
            sleep(0.02)


def _open(path: Path) -> FileIO:
    """For reading from the start and writing at the end."""
    try:
        return FileIO(path, "a+")
    except OSError as error:
        raise ValueError(f"--output {path}: {error.strerror}") from None


def _whole(file: BufferedReader) -> Iterator[bytes]:
    """The lines that have an end."""
    file.seek(0)
    for line in file:
        if line.endswith(b"\n"):
            yield line


def _write(file: FileIO, data: bytes) -> None:
    """Write it all, or raise OSError; nothing stays in a buffer."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
