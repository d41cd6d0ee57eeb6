"""One version's workers as they are asked for, one change after another, while its model fails or is slow."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest

from shardwise.runtime.executor import RankFailure
from shardwise.server.store.figures import Tally
from shardwise.server.store.registry import Registry
from shardwise.server.store.served import Served
from shardwise.store.stored import StoredModel, open_stored
from tests.store.folders import make_folder, make_zip


class Scripted:
    """A model without processes: ``num`` workers, a ``gate`` to wait at while it is scaled, and what it fails with."""

    made: ClassVar[list[Scripted]]
    progress = ""
    pending = 0

    def __init__(self, stored: StoredModel, tally: Tally) -> None:
        self.stored, self.num_workers, self.failure = stored, 0, ""
        self.scaled: list[int] = []
        self.gate, self.done = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.done.set()
        self.refuses = self.closed = False
        self.ticks = 0
        self.made.append(self)

    def workers(self) -> list[dict[str, Any]]:
        return [{}] * self.num_workers

    def tick(self) -> None:
        self.ticks += 1

    def abandon(self) -> None:
        pass

    async def load(self, workers: int) -> None:
        self.num_workers = workers

    async def scale(self, workers: int) -> None:
        await self.gate.wait()
        self.scaled.append(workers)
        if self.failure or self.refuses:
            raise RankFailure(0, self.failure or "no memory for more", "", own=True)
        self.num_workers = workers

    async def predict(self, request: Any) -> Any:
        raise NotImplementedError

    async def drain(self, timeout: float) -> None:
        await self.done.wait()

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def served(tmp_path: Path) -> Served:
    Scripted.made = []
    return Served("m", open_stored(make_folder(tmp_path / "m", "maxWorkers: 3\n", "gpt_fast")), Scripted)


def test_a_failed_model_that_was_replaced(served: Served) -> None:
    """Guards against a model that has failed while it was scaled, and whose end then takes the one that replaced it."""

    async def scene() -> None:
        await served.scale(1, None)
        (failed,) = Scripted.made
        failed.gate.clear()
        first, second = served.scale(2, None), served.scale(1, 2)
        await asyncio.sleep(0)
        failed.failure = "ranks died for good"
        served.tick()
        failed.gate.set()
        assert "ranks died" in await first
        assert await second == ""
        await served.scale(1, 2)  # whatever was begun before it has ended
        assert (served.state, served.failure, served.is_healthy) == ("READY", "", True)
        assert served.model is Scripted.made[1]
        assert [each.closed for each in Scripted.made] == [True, False]

    asyncio.run(scene())


def test_a_failure_is_told_once(served: Served) -> None:
    """Guards against a failure that is told again of a change that has gone well, and a number of workers that is not
    looked at because as many are there, dead ones among them."""

    async def scene() -> None:
        await served.scale(2, 2)
        (model,) = Scripted.made
        model.refuses = True
        assert "no memory for more" in await served.scale(3, 3)
        assert (served.state, model.num_workers) == ("READY", 2)
        model.refuses = False
        assert await served.scale(2, 2) == ""
        assert served.failure == ""
        assert model.scaled == [3, 2]

    asyncio.run(scene())


def test_the_models_own_most_workers(served: Served) -> None:
    """Guards maxWorkers of the yaml against being forgotten once fewer, or more, are asked for."""

    async def scene() -> None:
        await served.scale(1, 1)
        for least, most in ((4, 4), (4, None), (1, 4)):
            with pytest.raises(ValueError, match="0 to 3 workers"):
                served.scale(least, most)
        await served.scale(3, None)
        assert Scripted.made[0].num_workers == 3

    asyncio.run(scene())


def test_a_model_that_stops_is_looked_after(served: Served) -> None:
    """Guards against requests that nobody looks after, or waits for, once their model is to have no workers."""

    async def scene() -> None:
        await served.scale(1, 1)
        (model,) = Scripted.made
        model.done.clear()
        stopping = asyncio.ensure_future(served.scale(0, 0))
        while served.state != "STOPPED":
            await asyncio.sleep(0)
        served.tick()
        assert model.ticks == 1
        closing = asyncio.ensure_future(served.drain(60.0))
        await rounds()
        assert not any((closing.done(), stopping.done(), model.closed))
        model.done.set()
        await asyncio.gather(stopping, closing)
        assert model.closed

    asyncio.run(scene())


def test_the_end_waits_for_what_is_unregistered(tmp_path: Path) -> None:
    """Guards against an accepted request that is lost, or runs for ever, and against unpacked files that are left,
    where the server ends while a model is being unregistered."""
    Scripted.made = []
    make_zip(tmp_path / "m.mar", make_folder(tmp_path / "m", "", "gpt_fast"))

    async def scene() -> None:
        registry = Registry(tmp_path, Scripted)
        served = await registry.register_url("m.mar", None, {})
        await served.scale(1, 1)
        (model,) = Scripted.made
        model.done.clear()
        leaving = asyncio.ensure_future(registry.unregister("m"))
        await rounds()
        assert not registry.entries
        registry.tick()
        assert model.ticks == 1
        draining = asyncio.ensure_future(registry.drain(60.0))
        await rounds()
        assert not draining.done()
        registry.forget_files()
        assert not served.stored.folder.exists()
        model.done.set()
        await asyncio.gather(leaving, draining)
        assert model.closed

    asyncio.run(scene())


async def rounds() -> None:
    """Let everybody come to where they wait."""
    for _ in range(10):
        await asyncio.sleep(0)
