"""A map inside a world of processes that torchrun or accelerate has started: each one's part file, and the gathering.

Processes meet over files beside the output and nothing else: rank 0 publishes a run's number, everybody writes a part
of its own and holds a lock while it lives, and rank 0 joins the parts when all are whole. Any file system with locks
will do.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from time import monotonic, sleep

from shardwise.mapping.config import World
from shardwise.mapping.journal import notes_of
from shardwise.runtime.executor import RankFailure

LOOK = 0.05
"""Seconds between looks at the others' files."""


def part_of(output: Path, rank: int, size: int) -> Path:
    """The file of one process's answers."""
    return output.with_name(f"{output.name}.part{rank}of{size}")


class Meeting:
    """A run of the world's processes over ``output``, begun by rank 0; the others wait for it, ``patience`` seconds.

    Raises ValueError for an output that can't be gone on with, and RankFailure if rank 0 doesn't come.
    """

    def __init__(self, output: Path, world: World, overwrite: bool, patience: float) -> None:
        self._output, self._world, self._patience = output, world, patience
        self._since = monotonic()
        self._sign = output.with_name(f"{output.name}.world")
        self._mine: FileIO | None = None
        self.part = part_of(output, world.rank, world.size)
        if not output.absolute().parent.is_dir():
            raise ValueError(f"--output {output}: there is no directory {output.parent}; make it first")
        if world.rank == 0:
            self._clear(overwrite)
            self.run = self._lead()
        else:
            self.run = self._follow()

    def close(self) -> None:
        """Leave; harmless when repeated."""
        if self._mine is not None:
            self._mine.close()
            self._sign.unlink(missing_ok=True)
            self._mine = None

    def gather(self) -> Iterator[bytes]:
        """Wait for all parts, join them in the output, and give its lines back; for rank 0.

        Raises RankFailure for a process that ends before its part is whole.
        """
        counts = [self._wait(rank) for rank in range(self._world.size)]
        if len(set(counts)) > 1:
            raise ValueError(f"the processes had inputs of {counts} lines: give all of them the same")
        parts = [part_of(self._output, rank, self._world.size) for rank in range(self._world.size)]
        whole = self._output.with_name(f"{self._output.name}.gathered")
        with ExitStack() as stack:
            files = [stack.enter_context(part.open("rb")) for part in parts]
            with whole.open("wb") as sink:
                for index in range(counts[0]):
                    line = files[index % len(files)].readline()
                    assert line.startswith(b'{"index": %d, ' % index), "a part is out of order"
                    sink.write(line)
                    yield line
                sink.flush()
                os.fsync(sink.fileno())
        whole.replace(self._output)
        for part in parts:
            part.unlink()
            notes_of(part).unlink()

    def _clear(self, overwrite: bool) -> None:
        """Refuse what can't be gone on with, or remove it."""
        output, size = self._output, self._world.size
        if overwrite:
            for part in self._parts():
                part.unlink(missing_ok=True)
            return
        if output.exists() and output.stat().st_size:
            raise ValueError(f"--output {output} exists: give another name, or --overwrite")
        others = {int(found[1]) for part in self._parts() if (found := re.search(r"\.part\d+of(\d+)", part.name))} - {
            size
        }
        if others:
            raise ValueError(
                f"--output {output} was begun by {others.pop()} processes, and now there are {size}: "
                "start as many to go on, or --overwrite to begin anew"
            )

    def _parts(self) -> list[Path]:
        name = self._output.name + ".part"
        return [path for path in self._output.absolute().parent.iterdir() if path.name.startswith(name)]

    def _lead(self) -> str:
        run = secrets.token_hex(8)
        fresh = self._sign.with_name(f"{self._sign.name}.{run}")
        self._mine = FileIO(fresh, "x")
        fcntl.flock(self._mine, fcntl.LOCK_EX)
        self._mine.write(run.encode())
        fresh.replace(self._sign)
        return run

    def _follow(self) -> str:
        while monotonic() - self._since < self._patience:
            with suppress(FileNotFoundError), FileIO(self._sign) as sign:
                if not _free(sign):
                    return sign.readall().decode()
            sleep(LOOK)
        raise RankFailure(0, f"has not begun within {self._patience:g} s (--startup-timeout)")

    def _wait(self, rank: int) -> int:
        """Until the part is whole; how many lines the input had."""
        notes = notes_of(part_of(self._output, rank, self._world.size))
        while True:
            working = False
            with suppress(FileNotFoundError), FileIO(notes) as file:
                working = not _free(file)
                if not working:
                    _, begun, rest = file.readall().rpartition(b"\nrun %s\n" % self.run.encode())
                    ended = re.search(rb"^end (\d+)\n\Z", rest, re.MULTILINE)
                    if ended is not None:
                        return int(ended[1])
                    if begun:
                        raise RankFailure(rank, "this process of the world has ended before its share was done")
            if monotonic() - self._since > self._patience and not working:
                raise RankFailure(rank, f"this process of the world has not begun within {self._patience:g} s")
            sleep(LOOK)


def _free(file: FileIO) -> bool:
    """Does nobody hold the file's lock?"""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True
