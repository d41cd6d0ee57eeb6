"""Thousands of requests of every kind: memory of each process, descriptors, threads and KV blocks stay as they are."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.reliability.server import Process, ranks_of, serve

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}


def body(number: int, rng: random.Random) -> dict[str, Any]:
    """One of ten kinds of requests, two of which are refused.

    Prompts are of few words: tokenizers remembers 10,000, some 650 bytes each, and that would take long to fill.
    """
    made: dict[str, Any] = {
        "model": "m",
        "prompt": f"request {rng.randrange(500)} of many",
        "max_tokens": rng.randint(1, 12),
    }
    return (
        made
        | [
            {},
            {"temperature": 0.8, "seed": number, "n": 2},
            {"logprobs": 3, "echo": True},
            {"prompt": list(range(5, 5 + rng.randint(1, 200)))},
            {"guided_json": SCHEMA, "max_tokens": 20},
            {"guided_regex": f"[a-c]{{1,{1 + number % 7}}}"},
            {"temperature": -1},
            {"prompt": [10**9]},
            {"stop": ["e", "a"], "frequency_penalty": 0.5},
            {"stream": True},
        ][number % 10]
    )


async def soak(model: str | Path, layout: str, count: int, *, clients: int = 16, seed: int = 0) -> dict[str, Any]:
    """``count`` requests; bytes a request that each process has grown over the last three quarters of them."""
    rng = random.Random(seed)
    wrong: list[str] = []
    statuses: dict[int, int] = {}
    with serve(model, "--layout", layout) as process:
        url = process.url()
        numbers = iter(range(count))
        samples: list[tuple[int, dict[str, int]]] = []
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:

            async def work() -> None:
                for number in numbers:
                    if number % (count // 40 or 1) == 0:
                        samples.append((number, memories(process)))
                    status = await _send(client, number, rng)
                    statuses[status] = statuses.get(status, 0) + 1

            await asyncio.gather(*(work() for _ in range(clients)))
            health = (await client.get("/health")).json()
        samples.append((count, memories(process)))
        if health["queue"]["open"] or any(replica["running"] for replica in health["replicas"]):
            wrong.append(f"requests are left: {health}")
        if set(statuses) - {0, 200, 400}:
            wrong.append(f"statuses: {statuses}")
        front = psutil.Process(process.popen.pid)
        held = {"descriptors": front.num_fds(), "threads": front.num_threads()}
    late = [sample for sample in samples if sample[0] >= count / 4]
    slopes = {name: round(slope([(n, sizes[name]) for n, sizes in late]), 1) for name in late[0][1]}
    front = [round(sizes["front"] / 2**20, 1) for _, sizes in samples][:: len(samples) // 10 or 1]
    found = {"layout": layout, "requests": count, "bytes_per_request": slopes, "front_mb": front, "statuses": statuses}
    return {**found, **held, "wrong": wrong}


async def _send(client: httpx.AsyncClient, number: int, rng: random.Random) -> int:
    """Its status; 0 for one whose client leaves in the middle."""
    asked = body(number, rng)
    if not asked.get("stream"):
        return (await client.post("/v1/completions", json=asked)).status_code
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        async for _ in response.aiter_lines():
            if number % 20 == 9:
                return 0
        return response.status_code


def memories(process: Process) -> dict[str, int]:
    """Bytes that the front and each rank hold for themselves, swapped ones included."""
    found = {"front": psutil.Process(process.popen.pid)}
    found |= {f"rank {number}": rank for number, rank in enumerate(ranks_of(process))}
    return {name: _private(each.pid) for name, each in found.items()}


def _private(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))


def slope(points: list[tuple[int, int]]) -> float:
    """Of the line through the points, by Theil and Sen: the median over all pairs."""
    slopes = sorted(
        (b[1] - a[1]) / (b[0] - a[0]) for at, a in enumerate(points) for b in points[at + 1 :] if b[0] > a[0]
    )
    return slopes[len(slopes) // 2] if slopes else 0.0
