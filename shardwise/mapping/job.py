"""A map from its inputs to its answers, in order: ties source, team and journal together. `map` is Python's door."""

from __future__ import annotations

import json
import os
import re
import selectors
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from shardwise.config import Layout
from shardwise.features import Compile
from shardwise.mapping.config import IN_RANK, MapConfig, Place, find_places, find_world, name_of
from shardwise.mapping.journal import Journal
from shardwise.mapping.source import Source, encode_values
from shardwise.mapping.team import POLITE, Item, Team
from shardwise.mapping.world import Meeting
from shardwise.runtime.backends import check_backend
from shardwise.runtime.executor import RankFailure

__all__ = ["Job", "Mapped", "Place", "Results", "map"]


@dataclass(frozen=True)
class Mapped:
    """What became of an input."""

    index: int
    output: Any = None
    error: dict[str, str] | None = None
    """Its exception's "type" and "message", where it failed."""


class Job:
    """One process's work for a map. Ranks start with the first item that isn't done yet.

    Raises ValueError, with the remedy, for what can't be, before anything starts.
    """

    def __init__(self, config: MapConfig, source: Source, output: Path | None = None, overwrite: bool = False) -> None:
        if os.environ.get(IN_RANK):
            raise ValueError("map is called in a rank of a map: call it under if __name__ == '__main__', not on import")
        self.restarts = 0
        """Ranks that were replaced."""
        self.failed = 0
        """Items that failed, of all in the output once it is whole."""
        self.count = 0
        """Items seen."""
        self._config, self._source = config, source
        self.world = find_world()
        self._places = find_places(config, self.world)
        self._meeting: Meeting | None = None
        head = {"factory": config.factory, "settings": dict(config.settings)}
        if config.compile is not None:
            head["compile"] = str(config.compile)
            check_backend(config.compile, self._places[0].device.partition(":")[0], processes=True)
        if self.world is None:
            self.journal = Journal(output, head, overwrite)
            return
        if output is None:
            raise ValueError(
                f"this is one of {self.world.size} processes (WORLD_SIZE), which gather their answers in a file: "
                "give a file on a disk that all of them see as --input and --output"
            )
        rank, size = self.world.rank, self.world.size
        self._meeting = Meeting(output, self.world, overwrite, config.startup_timeout)
        try:
            self.journal = Journal(self._meeting.part, head, False, rank, size, self._meeting.run)
        except BaseException:
            self._meeting.close()
            raise

    def lines(self, on_progress: Callable[[int], None] | None = None) -> Generator[bytes, None, None]:
        """Do it; the output's new lines, in order. In a world rank 0 yields all lines at the end, and the others none.

        ``on_progress`` hears how many items are done, in this process. Raises RankFailure when no rank can be had.
        """
        try:
            for line in self._work(on_progress):
                if self.world is None:
                    yield line
            self.journal.end(self.count)
            self.journal.close()
            self.failed = self.journal.failed
            if self._meeting is None:
                self.journal.forget()
            elif self.world is not None and self.world.rank == 0:
                self.failed = 0
                for line in self._meeting.gather():
                    self.failed += re.match(rb'\{"index": \d+, "error": ', line) is not None
                    yield line
        finally:
            self.close()

    def close(self) -> None:
        """Let go of input and output; harmless when repeated."""
        self._source.close()
        self.journal.close()
        if self._meeting is not None:
            self._meeting.close()

    def _work(self, on_progress: Callable[[int], None] | None) -> Iterator[bytes]:
        items = self._first()
        if not items:
            return
        done = 0
        team = Team(self._config, self._places)
        grace = 0.0

        def take(count: int) -> list[Item]:
            while len(items) < count and (item := self._next()) is not None:
                items.append(item)
            taken, items[:] = items[:count], items[count:]
            return taken

        try:
            while items or not self._source.ended or not team.idle:
                team.fill(take)
                hungry = team.hungry and self.journal.room(self.count)
                for item, answer in team.turn(self._source.wake() if hungry else None):
                    yield from self.journal.write(item.index, item.line, answer.body)
                    done += 1
                    if on_progress is not None:
                        on_progress(self.journal.resumed + done)
            grace = POLITE
        except (KeyboardInterrupt, SystemExit):
            with suppress(RankFailure, ValueError):  # what ranks have answered shall not be lost
                for item, answer in team.turn(timeout=0.0):
                    for _ in self.journal.write(item.index, item.line, answer.body):
                        pass
            raise
        finally:
            self.restarts = team.restarts
            team.close(grace)

    def _first(self) -> list[Item]:
        """The first item to do, once there is one; none if all are done."""
        while (item := self._next()) is None:
            wake = self._source.wake()
            if self._source.ended or wake is None:
                return []
            with selectors.DefaultSelector() as selector:
                selector.register(wake, selectors.EVENT_READ)
                selector.select()
        return [item]

    def _next(self) -> Item | None:
        """The next item of this process that isn't done, if it may be begun now."""
        while self.journal.room(self.count) and (line := self._source.take()) is not None:
            index, self.count = self.count, self.count + 1
            own = self.world is None or index % self.world.size == self.world.rank
            if own and not self.journal.knows(index, line):
                return Item(index, line)
        return None


class Results(Iterator[Mapped]):
    """What became of the inputs, in their order, as it comes; leaving it early ends the ranks."""

    def __init__(self, job: Job) -> None:
        self._job, self._lines = job, self._run(job)

    def _run(self, job: Job) -> Generator[bytes, None, None]:
        if job.world is None:
            yield from job.journal.kept()
        yield from job.lines()

    def __next__(self) -> Mapped:
        return Mapped(**json.loads(next(self._lines)))

    def close(self) -> None:
        """End the ranks; what is in the output stays, and the same call goes on from there. Harmless when repeated."""
        self._lines.close()
        self._job.close()  # the lines don't, if none was asked for

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def map(
    factory: str | Callable[..., Any],
    inputs: Iterable[Any],
    layout: str | Layout = "1",
    *,
    settings: Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Results:
    """Run ``factory(**settings)(item)`` for each of the inputs, on as many ranks as ``layout`` (dpN) has.

    ``factory`` is "module:name" or a function at the top of a module; it is called once on each rank, in a process of
    its own, and gets a `Place` if it has a parameter ``place``. Inputs and outputs are JSON values. Each input is
    answered once: by an output, or by the exception that it raised. A rank that dies is replaced and costs no item; an
    item that two ranks crash over is given up. With an ``output`` file answers are kept in it too, and the same call
    goes on after an interruption. Inside torchrun or accelerate launch the world's processes are the ranks, ``output``
    is needed, and the process of rank 0 is given all answers, the others none.

    ``options`` are the other fields of `MapConfig`: batch_size, device, threads, share, startup_timeout, item_timeout,
    compile (which may be text too, see Compile.parse).
    Raises ValueError, with the remedy, for what can't be; RankFailure, while it runs, when no rank can be had.
    """
    parsed = layout if isinstance(layout, Layout) else Layout.parse(layout)
    if isinstance(options.get("compile"), str):
        options["compile"] = Compile.parse(options["compile"])
    config = MapConfig(name_of(factory), parsed, dict(settings or {}), **options)
    return Results(Job(config, encode_values(inputs), Path(output) if output is not None else None, overwrite))
