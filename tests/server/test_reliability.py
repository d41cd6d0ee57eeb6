"""The trials of tests/reliability, as much of them as fits: kills, stops, drains, overload and many requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.reliability.drains import drain_often
from tests.reliability.faults import torment
from tests.reliability.memory import soak
from tests.reliability.overload import overload
from tests.tiny import save_text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


def check_faults(model: Path, layout: str, kills: int, stops: int) -> None:
    report = asyncio.run(torment(model, layout, kills, stops))
    assert not report.wrong, report
    assert (report.kills, report.stops) == (kills, stops)
    assert report.ended > 12
    assert max(report.recovered) < 10


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_killed_ranks_lose_nothing(model: Path, layout: str) -> None:
    """F1, R28, C81: guards accepted requests, streamed or not, greedy or seeded, and what a fault may leave behind."""
    check_faults(model, layout, 4, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2.pp2", "dp2"])
def test_killed_and_stopped_ranks_lose_nothing(model: Path, layout: str) -> None:
    """F1, F5, R28, R29: the same on every layout, with more faults; docs/reliability.md has the whole."""
    check_faults(model, layout, 8, 1)


@pytest.mark.parametrize("count", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_drains_lose_nothing(model: Path, count: int) -> None:
    """F17, R31: guards what was accepted before a SIGTERM, and what is told to those who come after it."""
    report = asyncio.run(drain_often(model, "1", count))
    assert not report["wrong"], report
    assert report["ended"] >= 8 * count


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_overload(model: Path) -> None:
    """F15, R26: guards against work that is refused only after it has cost much, and against queues without end."""
    report = asyncio.run(overload(model, "tp2", 10.0))
    assert not report["wrong"], report
    assert report["refused"].get(429)
    assert report["memory_growth_mb"] < 64


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_stays_flat(model: Path) -> None:
    """R35, F27: guards against anything kept of requests that are done: in the front, in a rank, in descriptors."""
    report = asyncio.run(soak(model, "tp2", 10_000))
    assert not report["wrong"], report
    assert max(report["bytes_per_request"].values()) < 300, report
