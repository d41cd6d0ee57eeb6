"""The trials of tests/reliability, as much of them as fits: kills, stops, drains, overload and many requests."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.reliability.drains import drain_often
from tests.reliability.faults import torment
from tests.reliability.memory import soak
from tests.reliability.overload import overload
from tests.reliability.wire import Exchange, Wire
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
    assert report["ended"] + report["refused"] > 8 * count  # whoever comes after the signal is refused
    assert report["ended"] > count


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_overload(model: Path) -> None:
    """F15, R26: guards against work that is refused only after it has cost much, and against queues without end."""
    report = asyncio.run(overload(model, "tp2", 10.0))
    assert not report["wrong"], report
    assert report["refused"].get(429)
    assert report["ended"] > 32, report
    assert report["memory_growth_mb"] < 64


def test_answers_on_the_wire() -> None:
    """Guards the overload's clients: answers in pieces, with a length and without, and one that breaks off."""
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n4\r\n two\r\n0\r\n\r\n"
    sized = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nfull"
    for data, status, wait, body in ((chunked, 200, None, b"one two"), (sized, 429, "7", b"full")):
        exchange = Exchange("what", 0.0, 0.0)
        assert [exchange.take(data[at : at + 1]) for at in range(len(data))] == [False] * (len(data) - 1) + [True]
        assert (exchange.status, exchange.header("retry-after"), exchange.body) == (status, wait, body)
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(Wire(*listener.getsockname())) as wire:
        wire.send("first", b"x", 0.0)
        peer, _ = listener.accept()
        with peer:
            for part in (sized[:50], sized[50:]):
                assert not wire.wait(0.0)
                peer.sendall(part)
            (first,) = _ended(wire)
            wire.send("second", b"y", 0.0)  # on the same line
            assert peer.recv(8) == b"xy"
            peer.sendall(sized[:-1])
        (second,) = _ended(wire)
        assert (first.what, first.whole, second.what, second.whole) == ("first", True, "second", False)
        assert wire.num_open == 0


def _ended(wire: Wire) -> list[Exchange]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if found := wire.wait(deadline):
            return found
    raise AssertionError("nothing has ended")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_stays_flat(model: Path) -> None:
    """R35, F27: guards against anything kept of requests that are done: in the front, in a rank, in descriptors."""
    report = asyncio.run(soak(model, "tp2", 10_000))
    assert not report["wrong"], report
    assert max(report["bytes_per_request"].values()) < 300, report
