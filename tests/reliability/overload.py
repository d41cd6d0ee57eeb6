"""Ten times as much as a server can do is asked of it: work goes on at its peak, the rest is refused at once.

The peak is that of as many clients as keep the server full, each with one request at a time. Then requests come at
random moments (Poisson) with ten times the rate at which the peak's ended, whatever the server says: nobody waits for
Retry-After, and nobody asks a second time. Afterwards the peak is measured again.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from tests.reliability.clients import Answer, Ask, ask, asks, rights
from tests.reliability.server import serve
from tests.reliability.wire import Exchange, Wire, message

LIMIT = 32
"""Requests that the server takes at once; half of them run."""
CONNECTIONS = 128
"""At most, as of a proxy; a request for which none is free waits at its sender, and its time goes on."""
CLIENTS = 24
"""Those of the peak: half as many again as run, so that there is always one to go on with."""
PATIENCE = 120.0
"""Seconds after which a request hangs."""


async def overload(
    model: str | Path, layout: str, seconds: float, *, longest: int = 40, times: int = 10, seed: int = 0
) -> dict[str, Any]:
    """Tokens per second under ``seconds`` of ``times`` the peak's load, against the peak; memory and refusals.

    Answers have up to ``longest`` tokens.
    """
    with serve(
        model, "--layout", layout, "--max-queue-requests", str(LIMIT), "--max-num-seqs", str(LIMIT // 2)
    ) as process:
        url = process.url()
        what = [each for each in asks(24, longest, seed) if dict(each.fields).get("n", 1) == 1]
        right = await rights(url, what)
        load = Load(url, what, right, seed)
        front, own = psutil.Process(process.popen.pid), psutil.Process()
        first = load.full(seconds / 4)
        before, spent = front.memory_info().rss, [_cpu(front), _cpu(own)]
        began = time.monotonic()
        heavy = load.flood(times * first.rate(_one), seconds)
        took = time.monotonic() - began
        after, spent = front.memory_info().rss, [_cpu(front) - spent[0], _cpu(own) - spent[1]]
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=url) as client:
            await ask(client, Ask("one", (("max_tokens", 1), ("temperature", 0)), stream=False))
        answered = time.monotonic() - began
        second = load.full(seconds / 4)
        peaks = [first.rate(load.tokens), second.rate(load.tokens)]
        peak, under = statistics.mean(peaks), heavy.rate(load.tokens)
        return {
            "layout": layout,
            "peak_tokens_per_s": [round(each, 1) for each in peaks],
            "peak_requests_per_s": round(first.rate(_one), 2),
            "arrivals_per_s": round(len(heavy.exchanges) / (seconds + heavy.ramp), 1),
            "overloaded_tokens_per_s": round(under, 1),
            "goodput": round(under / peak, 3),
            "ended": len(heavy.accepted),
            "refused": dict(Counter(each.status for each in heavy.refused)),
            "refusal_ms": _spread([1000 * (each.ended - each.due) for each in heavy.refused]),
            "sent_late_ms": _spread([1000 * (each.sent - each.due) for each in heavy.exchanges]),
            "retry_after": heavy.truth(),
            "memory_growth_mb": round((after - before) / 2**20, 1),
            "cores": {"front": round(spent[0] / took, 3), "clients": round(spent[1] / took, 3)},
            "first_answer_afterwards_s": round(answered, 2),
            "wrong": load.wrong,
        }


class Run:
    """What came of one load, of which a part is measured: ``seconds`` after ``start`` and ``ramp``."""

    def __init__(self, exchanges: Sequence[Exchange], start: float, ramp: float, seconds: float) -> None:
        self.exchanges = exchanges
        self.ramp = ramp
        self.accepted = [each for each in exchanges if each.whole and each.status == 200]
        self.refused = [each for each in exchanges if each.whole and each.status == 429]
        self._from, self._to = start + ramp, start + ramp + seconds

    def rate(self, worth: Callable[[Exchange], float]) -> float:
        """The worth of accepted requests that comes in a second; each comes evenly while its request is there."""
        total = 0.0
        for each in self.accepted:
            inside = min(each.ended, self._to) - max(each.sent, self._from)
            total += worth(each) * max(0.0, inside) / (each.ended - each.sent)
        return total / (self._to - self._from)

    def truth(self) -> dict[str, Any]:
        """Retry-After against the time in which all was done that had been there at the refusal.

        A claim is true within half of that time, and the second up to which it is rounded.
        """
        starts = [each.sent for each in self.accepted]
        done = list(accumulate((each.ended for each in self.accepted), max))
        claims, times, true = [], [], 0
        for each in self.refused:
            here = bisect_right(starts, each.sent)
            if here and each.sent >= self._from:
                took = done[here - 1] - each.sent
                claim = int(each.header("retry-after") or 0)
                claims.append(claim)
                times.append(took)
                true += took / 2 <= claim <= took * 1.5 + 1
        return {"claimed_s": _spread(claims), "took_s": _spread(times), "true": round(true / max(1, len(claims)), 3)}


class Load:
    """Clients of one server that check what they are told. ``wrong`` are sentences about what must not happen."""

    def __init__(self, url: str, what: Sequence[Ask], right: dict[Ask, Answer], seed: int) -> None:
        place = urlsplit(url)
        self.wrong: list[str] = []
        self._address = place.hostname or "", place.port or 80
        self._asks = [(each, message("/v1/completions", each.body)) for each in what]
        self._right = right
        self._rng = random.Random(seed)

    def tokens(self, exchange: Exchange) -> float:
        """Of the right answer."""
        answer: Answer = self._right[exchange.what]
        return sum(len(tokens) for tokens, _ in answer)

    def full(self, seconds: float) -> Run:
        """Clients with one request at a time, as many as the server takes without ever refusing."""
        return self._run(seconds, None)

    def flood(self, rate: float, seconds: float) -> Run:
        """So many requests a second, at random moments."""
        return self._run(seconds, rate)

    def _run(self, seconds: float, rate: float | None) -> Run:
        wire, ended = Wire(*self._address), []
        most = CLIENTS if rate is None else CONNECTIONS
        start = due = time.monotonic()
        ramp = seconds / 4  # until the queue is as long as it will be
        stop = start + ramp + seconds
        try:
            while due < stop or wire.num_open:
                while due <= min(time.monotonic(), stop) and wire.num_open < most:
                    wire.send(*self._rng.choice(self._asks), due)
                    due += 0.0 if rate is None else self._rng.expovariate(rate)
                ended += wire.wait(due if wire.num_open < most and due < stop else stop + PATIENCE)
                if rate is None:
                    due = time.monotonic()
                if time.monotonic() > stop + PATIENCE:
                    self.wrong.append(f"{wire.num_open} requests hang")
                    break
        finally:
            wire.close()
        ended.sort(key=lambda each: each.sent)
        for each in ended:
            self._check(each, rate is None)
        return Run(ended, start, ramp, seconds)

    def _check(self, each: Exchange, is_peak: bool) -> None:
        if not each.whole:
            self.wrong.append(f"unanswered: {bytes(each.answer[-300:])!r} for {each.what}")
        elif each.status == 429 and not is_peak:
            if int(each.header("retry-after") or 0) < 1:
                self.wrong.append("a refusal without Retry-After")
        elif each.status != 200:
            self.wrong.append(f"status {each.status}: {each.body[:300]!r}")
        elif (found := _answer(each)) != self._right[each.what]:
            self.wrong.append(f"{found} and not {self._right[each.what]} for {each.what}")


def _answer(exchange: Exchange) -> Answer | str:
    """What was answered to a request for one continuation; or a sentence, if it is no answer."""
    if not exchange.what.stream:
        choices = json.loads(exchange.body)["choices"]
        return [(choice["token_ids"], choice["finish_reason"]) for choice in choices]
    tokens, reason = [], None
    *events, last, end = exchange.body.split(b"\n\n")
    for event in events:
        choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
        if reason is not None:
            return "a piece after the end"
        tokens += choice["token_ids"]
        reason = choice["finish_reason"]
    return [(tokens, reason)] if (last, end) == (b"data: [DONE]", b"") else "the stream broke off"


def _one(_: Exchange) -> float:
    return 1.0


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Median and last hundredth."""
    ranked = sorted(values)
    return {name: round(ranked[int(at * len(ranked))], 2) for name, at in (("p50", 0.5), ("p99", 0.99)) if ranked}


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
