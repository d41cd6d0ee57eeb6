"""Clients that check what they are told: an accepted request must end once, with the tokens of a calm server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = (
    "one",
    "two",
    "a cat",
    "sat",
    "on the mat",
    "and then",
    "it rained",
    "all day",
    "in the old town",
    "by the sea",
)
TIMEOUT = httpx.Timeout(120.0)


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: str
    fields: tuple[tuple[str, Any], ...]
    stream: bool

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": "m",
            "prompt": self.prompt,
            "stream": self.stream,
            "return_token_ids": True,
            "ignore_eos": True,
            **dict(self.fields),
        }


def asks(count: int, longest: int, seed: int) -> list[Ask]:
    """Different requests: short and long, greedy and seeded, streamed and not; ``longest`` answers in tokens."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        prompt = " ".join(rng.choices(WORDS, k=rng.choice((1, 3, 8, 14))))
        fields: dict[str, Any] = {"max_tokens": rng.randint(1, longest), "temperature": 0}
        if number % 2:
            fields |= {"temperature": 0.8, "seed": number, "top_p": 0.95}
        if number % 5 == 4:
            fields |= {"n": 2, "frequency_penalty": 0.5}
        found.append(Ask(prompt, tuple(fields.items()), stream=number % 3 != 0))
    return found


@dataclass
class Tally:
    """What clients have seen."""

    ended: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Sentences about whatever must not happen."""
    tokens: int = 0
    longest_pause: float = 0.0


class Refusal(Exception):
    """A 429 or 503, as it may be; ``wait`` are the seconds that it asks for."""

    def __init__(self, status: int, wait: int) -> None:
        self.status, self.wait = status, wait


class Unanswered(Exception):
    """The connection ended before there was an answer: the request was not accepted."""


Answer = list[tuple[list[int], str | None]]
"""Of each continuation, its tokens and finish reason."""


async def ask(client: httpx.AsyncClient, what: Ask, tally: Tally | None = None) -> Answer:
    """Send one request. Raises Refusal, Unanswered, and AssertionError for what breaks the protocol."""
    request = client.build_request("POST", "/v1/completions", json=what.body, timeout=TIMEOUT)
    try:
        response = await client.send(request, stream=True)
    except httpx.TransportError as error:
        raise Unanswered(repr(error)) from error
    async with aclosing(response):
        if response.status_code in (429, 503):
            await response.aread()
            wait = int(response.headers["Retry-After"])
            assert wait >= 1, "a refusal without Retry-After"
            raise Refusal(response.status_code, wait)
        if response.status_code != 200:
            raise AssertionError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
        if what.stream:
            return await _streamed(response, dict(what.fields).get("n", 1), tally)
        choices = json.loads(await response.aread())["choices"]
        return [(choice["token_ids"], choice["finish_reason"]) for choice in choices]


async def _streamed(response: httpx.Response, n: int, tally: Tally | None) -> Answer:
    parts: list[tuple[list[int], str | None]] = [([], None)] * n
    done, last = False, time.monotonic()
    async for line in response.aiter_lines():
        if not line:
            continue
        now = time.monotonic()
        if tally is not None:
            tally.longest_pause = max(tally.longest_pause, now - last)
        last = now
        assert not done, "something after [DONE]"
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            done = True
            continue
        document = json.loads(line[6:])
        assert "error" not in document, document
        for choice in document["choices"]:
            tokens, reason = parts[choice["index"]]
            assert reason is None, "a piece after the end"
            parts[choice["index"]] = tokens + choice["token_ids"], choice["finish_reason"]
    assert done, "the stream broke off"
    return parts


class Load:
    """Clients in the background, each with one request at a time, from ``start`` to ``stop``."""

    def __init__(self, url: str, what: list[Ask], right: dict[Ask, Answer], count: int, seed: int = 0) -> None:
        self.tally = Tally()
        self._what, self._right = what, right
        self._client = httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=None))
        self._rng = random.Random(seed)
        self._stopping = False
        self._count = count
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.ensure_future(self._run()) for _ in range(self._count)]

    async def stop(self) -> Tally:
        """Let every request end, within two minutes."""
        self._stopping = True
        done, left = await asyncio.wait(self._tasks, timeout=120)
        self.tally.wrong += [f"{len(left)} requests hang"] * bool(left)
        self.tally.wrong += [repr(task.exception()) for task in done if task.exception() is not None]
        for task in left:
            task.cancel()
        await self._client.aclose()
        return self.tally

    async def _run(self) -> None:
        while not self._stopping:
            what = self._rng.choice(self._what)
            try:
                found = await ask(self._client, what, self.tally)
            except Refusal as refusal:
                self.tally.refused[refusal.status] += 1
                await asyncio.sleep(refusal.wait)
                continue
            except (AssertionError, Unanswered, httpx.HTTPError, KeyError, ValueError) as error:
                self.tally.wrong.append(f"{type(error).__name__}: {error} for {what}")
                continue
            self.tally.ended += 1
            self.tally.tokens += sum(len(tokens) for tokens, _ in found)
            if found != self._right[what]:
                self.tally.wrong.append(f"{found} and not {self._right[what]} for {what}")


async def rights(url: str, what: list[Ask]) -> dict[Ask, Answer]:
    """The answers of a calm server, one request after another."""
    async with httpx.AsyncClient(base_url=url) as client:
        return {each: await ask(client, each) for each in what}
