"""SIGTERM under load, again and again: what was accepted is finished, what comes is refused, the exit code is 0."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.reliability.clients import Answer, Ask, Refusal, Unanswered, ask, asks, rights
from tests.reliability.server import serve


async def drain_often(model: str | Path, layout: str, count: int, *, clients: int = 8, seed: int = 0) -> dict[str, Any]:
    """``count`` servers, each drained at a random moment of ``clients`` requests; see what was lost."""
    rng = random.Random(seed)
    what = asks(16, 40, seed)
    right: dict[Ask, Answer] = {}
    wrong: list[str] = []
    ended = refused = unanswered = 0
    for number in range(count):
        with serve(model, "--layout", layout) as process:
            url = process.url()
            right = right or await rights(url, what)
            async with httpx.AsyncClient(base_url=url) as client:
                tasks = {asyncio.ensure_future(ask(client, each)): each for each in rng.choices(what, k=clients)}
                await asyncio.sleep(rng.uniform(0.0, 0.3))
                process.send(signal.SIGTERM)
                tasks |= {asyncio.ensure_future(ask(client, each)): each for each in rng.choices(what, k=2)}
                await asyncio.wait(tasks, timeout=60)
                for task, each in tasks.items():
                    error = task.exception() if task.done() else TimeoutError("it hangs")
                    if isinstance(error, Refusal):
                        refused += 1
                    elif isinstance(error, Unanswered):  # it came when the listener was about to close
                        unanswered += 1
                    elif error is not None:
                        wrong.append(f"drain {number}: {error!r} for {each}")
                    elif task.result() != right[each]:
                        wrong.append(f"drain {number}: {task.result()} and not {right[each]} for {each}")
                    else:
                        ended += 1
            code = await asyncio.to_thread(process.end, 30)
            if code != 0:
                wrong.append(f"drain {number}: exit code {code}")
    return {
        "layout": layout,
        "drains": count,
        "ended": ended,
        "refused": refused,
        "unanswered": unanswered,
        "wrong": wrong,
    }
