"""SIGTERM under load, again and again: what was accepted is finished, what comes is refused, the exit code is 0."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import httpx

from tests.reliability.clients import Answer, Ask, Refusal, Unanswered, ask, asks, rights
from tests.reliability.server import Process, serve

PATIENCE = 60.0
"""Seconds in which a drain must be over."""
PAUSE = 0.005
"""Seconds, at most, between two requests of those who come while the server drains."""


@dataclass
class Drained:
    """What became of requests."""

    ended: int = 0
    refused: int = 0
    """With 503 and Retry-After."""
    not_connected: int = 0
    """They came when nobody listened any more."""
    wrong: list[str] = field(default_factory=list)
    """Sentences about whatever must not happen: a connection that was made and ended without an answer, too."""
    exits: list[float] = field(default_factory=list)
    """Seconds from the last answer, or from the signal where that came later, to the exit."""

    def document(self) -> dict[str, Any]:
        """As JSON would have it."""
        exits = sorted(self.exits)
        return {
            "ended": self.ended,
            "refused": self.refused,
            "not_connected": self.not_connected,
            "exit_p50": round(statistics.median(exits), 3),
            "exit_p99": round(exits[min(len(exits) - 1, int(0.99 * len(exits)))], 3),
            "wrong": self.wrong,
        }


class Crowd:
    """Clients of one server, and when the last of them had its answer."""

    def __init__(self, found: Drained, right: dict[Ask, Answer], name: str) -> None:
        self.last = 0.0
        self._found, self._right, self._name = found, right, name

    async def ask(self, client: httpx.AsyncClient, what: Ask) -> bool:
        """One request; False if there was nobody to connect to."""
        try:
            answer = await ask(client, what)
        except Refusal as refusal:
            self.last = monotonic()
            self._found.refused += 1
            if refusal.status != 503:
                self._wrong(f"status {refusal.status}")
        except Unanswered as error:
            if isinstance(error.__cause__, httpx.ConnectError):
                self._found.not_connected += 1
                return False
            self._wrong(f"{error} for {what}")
        except (AssertionError, httpx.HTTPError, KeyError, ValueError) as error:
            self._wrong(f"{error!r} for {what}")
        else:
            self.last = monotonic()
            self._found.ended += 1
            if answer != self._right[what]:
                self._wrong(f"{answer} and not {self._right[what]} for {what}")
        return True

    async def come(self, client: httpx.AsyncClient, what: list[Ask], rng: random.Random) -> None:
        """One request after another, until there is nobody to connect to."""
        while await self.ask(client, rng.choice(what)):
            await asyncio.sleep(rng.uniform(0.0, PAUSE))

    def _wrong(self, sentence: str) -> None:
        self._found.wrong.append(f"{self._name}: {sentence}")


async def drain_often(model: str | Path, layout: str, count: int, *, clients: int = 8, seed: int = 0) -> dict[str, Any]:
    """``count`` servers, each drained at a random moment of ``clients`` requests; see what was lost.

    From the signal on two more clients ask again and again, one over new connections, one over those that are there.
    """
    rng = random.Random(seed)
    what = asks(16, 40, seed)
    right: dict[Ask, Answer] = {}
    found = Drained()
    fresh = httpx.Limits(max_keepalive_connections=0)
    for number in range(count):
        with serve(model, "--layout", layout) as process:
            url = process.url()
            right = right or await rights(url, what)
            crowd, order = Crowd(found, right, f"drain {number}"), random.Random(number)
            async with httpx.AsyncClient(base_url=url) as kept, httpx.AsyncClient(base_url=url, limits=fresh) as new:
                tasks = [asyncio.ensure_future(crowd.ask(kept, each)) for each in rng.choices(what, k=clients)]
                await asyncio.sleep(rng.uniform(0.0, 0.3))
                ended = asyncio.ensure_future(asyncio.to_thread(_end_of, process))
                signalled = monotonic()
                process.send(signal.SIGTERM)
                more = [asyncio.ensure_future(crowd.come(client, what, order)) for client in (kept, new)]
                _, late = await asyncio.wait([*tasks, *more], timeout=PATIENCE)
                found.wrong += [f"drain {number}: {len(late)} requests hang"] * bool(late)
                for task in late:
                    task.cancel()
            end = await asyncio.wait_for(ended, PATIENCE)
            code = await asyncio.to_thread(process.end, 30)
            found.exits.append(end - max(signalled, crowd.last))
            if code != 0:
                found.wrong.append(f"drain {number}: exit code {code}")
    return {"layout": layout, "drains": count, **found.document()}


def _end_of(process: Process) -> float:
    """When it ended, waiting for that."""
    os.waitid(os.P_PID, process.popen.pid, os.WEXITED | os.WNOWAIT)
    return monotonic()
