"""Ten times as many clients as a server can take: work goes on at its peak, the others are refused at once."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.reliability.clients import Load, Refusal, Tally, ask, asks, rights
from tests.reliability.server import serve

LIMIT = 32
"""Requests that the server takes at once."""


async def overload(model: str | Path, layout: str, seconds: float, *, times: int = 10, seed: int = 0) -> dict[str, Any]:
    """Tokens per second with as many clients as the server takes, then with ``times`` as many; memory and refusals."""
    with serve(model, "--layout", layout, "--max-queue-requests", str(LIMIT), "--max-num-seqs", "16") as process:
        url = process.url()
        what = [each for each in asks(24, 40, seed) if dict(each.fields).get("n", 1) == 1]
        right = await rights(url, what)
        peak, _ = await _run(url, what, right, LIMIT // 2, seconds / 2)
        front = psutil.Process(process.popen.pid)
        before = front.memory_info().rss
        probes: list[float] = []
        probing = asyncio.ensure_future(_probe(url, what, probes))
        heavy, tally = await _run(url, what, right, LIMIT * times, seconds)
        probing.cancel()
        after = front.memory_info().rss
        started = time.monotonic()
        async with httpx.AsyncClient(base_url=url) as client:
            await ask(client, what[0])
        return {
            "layout": layout,
            "peak_tokens_per_s": round(peak, 1),
            "overloaded_tokens_per_s": round(heavy, 1),
            "goodput": round(heavy / peak, 3),
            "ended": tally.ended,
            "refused": dict(tally.refused),
            "refusal_ms_p50": round(1000 * statistics.median(probes), 1) if probes else None,
            "refusal_ms_p99": round(1000 * sorted(probes)[int(0.99 * len(probes))], 1) if probes else None,
            "memory_growth_mb": round((after - before) / 2**20, 1),
            "first_answer_afterwards_s": round(time.monotonic() - started, 2),
            "wrong": tally.wrong,
        }


async def _run(url: str, what: Any, right: Any, clients: int, seconds: float) -> tuple[float, Tally]:
    load = Load(url, what, right, clients)
    load.start()
    await asyncio.sleep(seconds / 4)  # until the queue is as long as it will be
    tokens, started = load.tally.tokens, time.monotonic()
    await asyncio.sleep(seconds)
    rate = (load.tally.tokens - tokens) / (time.monotonic() - started)
    return rate, await load.stop()


async def _probe(url: str, what: Any, times: list[float]) -> None:
    """How long a refusal takes, for a client that is alone on its connection."""
    async with httpx.AsyncClient(base_url=url) as client:
        while True:
            started = time.monotonic()
            try:
                await ask(client, what[0])
            except Refusal:
                times.append(time.monotonic() - started)
            await asyncio.sleep(0.05)
