"""The page for Prometheus, of a service whose ranks are scripted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shardwise.engine import Engine
from shardwise.features import Speculation
from shardwise.intake import Prepared
from shardwise.params import SamplingParams
from shardwise.replicas import Replicas
from shardwise.schedule.sequence import Request
from shardwise.server.admission import Admission, Refused
from shardwise.server.metrics import Metrics, resident_bytes
from shardwise.server.service import Service, Stream
from tests.fakes import Letters, ScriptedExecutor, small_scheduler

PROMPT = tuple(range(65, 105))
"""Two whole blocks, and some."""
Page = dict[tuple[str, ...], float]


def scripted(request: int, position: int) -> int:
    """Any prompt of PROMPT's length goes on with "hello" and an end token."""
    return ord("hello\0"[position - len(PROMPT)])


def repeating(request: int, position: int) -> int:
    """It goes on with the prompt's end, again and again, which ngram foresees."""
    return PROMPT[-4 + position % 4]


def engine_of(script: Callable[[int, int], int], fail_at: int | None = None, **settings: Any) -> Engine:
    executor = ScriptedExecutor(script, fail_at)
    executor.figures = [{"bytes_read": 1}]
    again = ScriptedExecutor(script)
    again.figures = executor.figures
    return Engine(executor, small_scheduler(**{"num_blocks": 64, **settings}), Letters(), lambda _: again)  # type: ignore[arg-type]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """A service, and requests for it."""

    def __init__(self, *engines: Engine) -> None:
        self.clock = Clock()
        self.metrics = Metrics("m", self.clock)
        self.service = Service(Replicas(engines), Admission(100, 100_000, 5.0, self.clock), self.metrics)
        self.number = 0

    def submit(self, n: int = 1, key: str = "", priority: int = 0, **params: Any) -> Stream:
        asked = SamplingParams(**{"max_tokens": 20, "n": n, **params})
        parts = tuple(Request(self.number + at, PROMPT, asked, seed=0) for at in range(n))
        self.number += n
        return self.service.submit(Prepared("", PROMPT, asked, parts), key=key, priority=priority)

    def page(self) -> Page:
        """Samples by their name and label values; of histograms the sum and the count only."""
        text = self.metrics.render(self.service).decode()
        return {
            (sample.name, *(value for name, value in sorted(sample.labels.items()) if value != "m")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }


def running(world: World, act: Callable[[], Coroutine[Any, Any, None]], *, started: bool = True) -> None:
    """Do something with the service on an event loop, within a time limit."""

    async def whole() -> None:
        if started:
            world.service.start()
        try:
            await asyncio.wait_for(act(), 30)
        finally:
            await world.service.stop()

    asyncio.run(whole())


def test_values_of_a_run() -> None:
    """Guards the figures: each is what really happened, and gauges are back at nothing when nobody is there."""
    world = World(engine_of(scripted))

    async def act() -> None:
        for n in (1, 2):
            texts = [output.text async for output in world.submit(n)]
            assert sorted("".join(texts)) == sorted("hello" * n)
        world.metrics.refused(429)
        world.metrics.refused(429)
        page = world.page()
        told = {name.removeprefix("shardwise_"): value for (name, *labels), value in page.items() if not labels}
        assert told["prompt_tokens_total"] == 2 * len(PROMPT)
        assert told["generation_tokens_total"] == 18
        assert told["time_to_first_token_seconds_count"] == 2
        assert told["inter_token_latency_seconds_count"] == 15
        assert told["e2e_request_latency_seconds_count"] == 2
        assert told["request_queue_time_seconds_count"] == 2
        assert told["num_requests_waiting"] == 0
        assert page["shardwise_request_finished_total", "stop"] == 3
        assert page["shardwise_request_refused_total", "429"] == 2
        assert page["shardwise_num_requests_running", "0"] == 0
        assert page["shardwise_kv_cache_usage_perc", "0"] == 0
        assert page["shardwise_prefix_cache_queries_total", "0"] == 3 * len(PROMPT)
        assert page["shardwise_prefix_cache_hits_total", "0"] == 64
        assert page["shardwise_num_preemptions_total", "0"] == 0
        assert page["shardwise_replica_failures_total", "0"] == 0
        assert page["shardwise_replica_ready", "0"] == 1
        assert page["shardwise_state", "ok"] == 1
        assert page["shardwise_state", "draining"] == 0
        assert page["shardwise_rank_resident_memory_bytes", "0", "0", "0"] > 2**20
        assert page[("process_open_fds",)] > 3
        await world.service.drain(1)
        assert world.page()["shardwise_state", "draining"] == 1

    running(world, act)


def test_durations() -> None:
    """Guards what is measured from where to where, on a clock that is turned by hand."""
    world = World(engine_of(scripted))

    async def act() -> None:
        stream = world.submit()
        world.clock.now += 3
        pieces = stream.__aiter__()
        world.service.start()
        async for _ in pieces:
            break
        first = world.page()[("shardwise_time_to_first_token_seconds_sum",)]
        assert first == 3
        async for _ in pieces:
            pass
        page = world.page()
        assert page[("shardwise_e2e_request_latency_seconds_sum",)] == 3
        assert page[("shardwise_request_queue_time_seconds_sum",)] == 0
        assert page[("shardwise_inter_token_latency_seconds_sum",)] == 0

    running(world, act, started=False)


def test_ends_before_their_time() -> None:
    """C71: guards the count of requests that were left, waited too long or were cut: each continuation has one end."""
    world = World(engine_of(scripted))

    async def act() -> None:
        streams = [world.submit(n) for n in (8, 2, 1)]  # the service doesn't run: 8 are sent, 3 wait
        page = world.page()
        assert page[("shardwise_num_requests_waiting",)] == 11
        streams[1].close()
        streams[1].close()
        world.clock.now += 6
        world.service.tick()
        streams[0].close()
        page = world.page()
        assert page["shardwise_request_finished_total", "disconnect"] == 10
        assert page["shardwise_request_finished_total", "queue_timeout"] == 1
        assert page[("shardwise_num_requests_waiting",)] == 0
        assert page[("shardwise_prompt_tokens_total",)] == 0
        assert page[("shardwise_e2e_request_latency_seconds_count",)] == 0
        assert not world.metrics._open

    running(world, act, started=False)


def test_restarts_and_replicas() -> None:
    """R28: guards the counts per replica: the one that failed is told apart, and is ready again."""
    world = World(engine_of(scripted, fail_at=0), engine_of(scripted))

    async def act() -> None:
        for _ in range(2):
            assert [output.finish_reason async for output in world.submit()][-1] == "stop"
        page = world.page()
        assert [page["shardwise_replica_failures_total", replica] for replica in "01"] == [1, 0]
        assert [page["shardwise_replica_ready", replica] for replica in "01"] in ([0, 1], [1, 1])
        gone = world.service.replicas.engines.pop(0)
        page = world.page()
        assert [page["shardwise_replica_failures_total", replica] for replica in "01"] == [1, 0]
        assert [page["shardwise_replica_ready", replica] for replica in "01"] == [0, 1]
        world.service.replicas.engines.insert(0, gone)

    running(world, act)


def test_speculation() -> None:
    """Guards the acceptance: drafts and what became of them are told where there is speculation, and only there."""
    plain, world = World(engine_of(scripted)), World(engine_of(repeating, speculation=Speculation.parse("ngram,k=4")))
    assert not any("spec_decode" in name for name, *_ in plain.page())
    asyncio.run(plain.service.stop())

    async def act() -> None:
        async for _ in world.submit(max_tokens=100):
            pass
        tally = world.service.replicas.engines[0].scheduler.drafts.speculator.tally  # type: ignore[union-attr]
        page = world.page()
        assert page["shardwise_spec_decode_num_draft_tokens_total", "0"] == tally.proposed > 0
        assert page["shardwise_spec_decode_num_accepted_tokens_total", "0"] == tally.accepted > 0

    running(world, act)


def test_r39_labels_are_bounded() -> None:
    """R39: guards the number of series against strings and numbers that clients choose."""
    world = World(engine_of(scripted))

    async def act() -> None:
        async for _ in world.submit():
            pass
        world.submit().close()
        world.metrics.refused(429)
        before = set(world.page())
        for number in range(100):
            stream = world.submit(key=f"key-{number}", priority=number, stop=(f"stop {number}",), seed=number)
            if number % 2:
                stream.close()
            else:
                async for _ in stream:
                    pass
        with pytest.raises(Refused):
            world.submit(max_tokens=200_000)
        world.metrics.refused(429)
        assert set(world.page()) == before

    running(world, act)


def test_memory_of_processes() -> None:
    """Guards the reading of /proc: this process has a size, one that is gone has none."""
    assert resident_bytes(os.getpid()) > 2**20  # type: ignore[operator]
    assert resident_bytes(2**30) is None
    assert resident_bytes("nonsense") is None
