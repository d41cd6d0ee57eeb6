"""Kill and stop random ranks of a server under load, and see that nothing accepted is lost and no token differs."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.reliability.clients import Load, asks, rights
from tests.reliability.server import Process, ranks_of, serve

POOL = min(32, (os.cpu_count() or 1) + 4)
"""Threads that the front may start for what takes time, and then keeps."""
LATEST = 60.0
"""Seconds after which a server that has not recovered never will."""


@dataclass
class Report:
    """What a run found; times in seconds."""

    layout: str
    kills: int = 0
    stops: int = 0
    detected: list[float] = field(default_factory=list)
    """From each fault until health was not 200 any more (0.0: back before the next look)."""
    recovered: list[float] = field(default_factory=list)
    """From each kill, and from the end of each stop's patience, until health was 200 again."""
    ended: int = 0
    tokens: int = 0
    longest_pause: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        figures = asdict(self)
        for name in ("detected", "recovered"):
            values = sorted(figures.pop(name))
            if values:
                figures[f"{name}_p50"] = round(statistics.median(values), 3)
                figures[f"{name}_p99"] = round(values[min(len(values) - 1, int(0.99 * len(values)))], 3)
        return figures


async def torment(
    model: str | Path, layout: str, kills: int, stops: int, *, clients: int = 12, longest: int = 60, seed: int = 0
) -> Report:
    """A server on ``layout`` with ``clients`` under ``kills`` SIGKILLs and ``stops`` SIGSTOPs of random ranks."""
    rng = random.Random(seed)
    report = Report(layout)
    with serve(model, "--layout", layout) as process:
        url = process.url()
        what = asks(24, longest, seed)
        right = await rights(url, what)
        warm = Load(url, what, right, clients, seed)  # pools have grown then
        warm.start()
        await asyncio.sleep(2.0)
        assert not (await warm.stop()).wrong
        before = _holdings(process)
        load = Load(url, what, right, clients, seed)
        load.start()
        faults = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
        rng.shuffle(faults)
        async with httpx.AsyncClient(base_url=url) as client:
            for fault in faults:
                await asyncio.sleep(rng.uniform(0.1, 1.0))  # some while things are calm, some right after a recovery
                await _strike(process, client, fault, rng, report)
        tally = await load.stop()
        report.ended, report.tokens, report.longest_pause = tally.ended, tally.tokens, round(tally.longest_pause, 2)
        report.wrong += tally.wrong
        report.wrong += await _leftovers(process, url, before)
    return report


async def _strike(
    process: Process, client: httpx.AsyncClient, fault: signal.Signals, rng: random.Random, report: Report
) -> None:
    while not (victims := ranks_of(process)):
        await asyncio.sleep(0.01)
    victim = rng.choice(victims)
    failures = await _failures(client)
    started = time.monotonic()
    os.kill(victim.pid, fault)
    seen = None
    while await _failures(client) == failures:
        seen = seen or await _down(client, started)
        if time.monotonic() - started > LATEST:
            report.wrong.append(f"{fault.name} of rank {victim.pid} went unnoticed")
            return
        await asyncio.sleep(0.005)
    noticed = time.monotonic()
    while (await client.get("/health")).status_code != 200:
        if time.monotonic() - started > LATEST:
            report.wrong.append(f"no recovery after {fault.name}")
            return
        await asyncio.sleep(0.005)
    if fault is signal.SIGKILL:
        report.kills += 1
        report.detected.append(noticed - started)
        report.recovered.append(time.monotonic() - started)
    else:
        report.stops += 1
        report.recovered.append(time.monotonic() - noticed)


async def _down(client: httpx.AsyncClient, started: float) -> float | None:
    return time.monotonic() - started if (await client.get("/health")).status_code != 200 else None


async def _failures(client: httpx.AsyncClient) -> int:
    replicas = (await client.get("/health")).json()["replicas"]
    return sum(replica["failures"] for replica in replicas)


def _holdings(process: Process) -> dict[str, int]:
    front = psutil.Process(process.popen.pid)
    return {"descriptors": front.num_fds(), "threads": front.num_threads(), "processes": len(process.family())}


async def _leftovers(process: Process, url: str, before: dict[str, int]) -> list[str]:
    """What has not gone back to where it was, a few seconds after the last request."""
    deadline = time.monotonic() + 10
    while True:
        async with httpx.AsyncClient(base_url=url) as client:
            health = (await client.get("/health")).json()
        after = _holdings(process)
        room = {"threads": POOL}
        wrong = [
            f"{name}: {after[name]} and not {count}"
            for name, count in before.items()
            if after[name] > count + room.get(name, 0)
        ]
        if health["queue"]["open"] or any(replica["running"] or replica["waiting"] for replica in health["replicas"]):
            wrong.append(f"requests are left: {health}")
        if not wrong or time.monotonic() > deadline:
            return wrong
        await asyncio.sleep(0.2)
