"""What the server counts, and the page on which Prometheus reads it.

Counting is a few additions per piece; all else is read from the engines when the page is asked for. Labels come from
the server's own settings and code, never from requests.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shardwise.engine import Engine, Output

if TYPE_CHECKING:
    from shardwise.server.service import Service, Stream

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Upper ends of buckets, in seconds."""
STATES = ("ok", "recovering", "draining", "dead")


class _Histogram:
    """Durations in seconds, sorted into buckets."""

    def __init__(self, ends: Sequence[float]) -> None:
        self._ends = ends
        self._counts = [0] * (len(ends) + 1)
        self._sum = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a duration, or several that are equal."""
        self._counts[bisect_left(self._ends, seconds)] += times
        self._sum += seconds * times

    def family(self, name: str, text: str, model: str) -> Metric:
        """As it is told."""
        names = [*(str(end) for end in self._ends), "+Inf"]
        found = HistogramMetricFamily(name, text, labels=["model_name"])
        found.add_metric([model], list(zip(names, accumulate(self._counts), strict=True)), self._sum)
        return found


@dataclass
class _Open:
    """What is remembered of a request until it ends."""

    pieces_at: dict[int, float]
    """When the last tokens of each unfinished continuation came, from the first on."""
    num_left: int
    """Unfinished continuations."""
    heard: bool = False
    """Has anything come of it?"""


class Metrics:
    """The counts of one server. ``model_name`` is the name that it tells ("*": none); methods are for one thread."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = "unknown" if model_name == "*" else model_name
        self._clock = clock
        self._open: dict[Stream, _Open] = {}
        self._queued = _Histogram(LONG)
        self._first = _Histogram(LONG)
        self._between = _Histogram(SHORT)
        self._whole = _Histogram(LONG)
        self._num_prompt = self._num_generated = 0
        self._finished = Counter[str]({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self._refused = Counter[int]()
        self._engines: list[Engine] = []
        """Every engine that there ever was, by the number that its replica keeps."""
        self._process = ProcessCollector(registry=None)

    def began(self, stream: Stream) -> None:
        """A request was accepted."""
        self._open[stream] = _Open({}, len(stream.prepared.parts))

    def piece(self, stream: Stream, output: Output) -> None:
        """Something has come of it."""
        known = self._open.get(stream)
        if known is None:
            return
        now = self._clock()
        ticket, number = stream.ticket, output.request_id
        if not known.heard:
            known.heard = True
            self._num_prompt += len(stream.prepared.tokens)
        if output.token_ids:
            count = len(output.token_ids)
            self._num_generated += count
            before = known.pieces_at.get(number)
            if before is not None:
                self._between.add((now - before) / count, count)
            elif not known.pieces_at:
                self._first.add(now - ticket.entered)
            known.pieces_at[number] = now
        if output.finish_reason is not None:
            self._finished[output.finish_reason] += 1
            known.num_left -= 1

    def ended(self, stream: Stream) -> None:
        """It is over: done, cut, or no longer wanted."""
        known = self._open.pop(stream, None)
        if known is None:
            return
        ticket = stream.ticket
        if ticket.started is not None:
            self._queued.add(ticket.started - ticket.entered)
        if not known.num_left:
            self._whole.add(self._clock() - ticket.entered)
        else:
            reason = "disconnect" if stream.cut_by is None else stream.cut_by.reason
            self._finished[reason] += known.num_left

    def refused(self, status: int) -> None:
        """A request was not accepted, with this HTTP status."""
        self._refused[status] += 1

    def render(self, service: Service) -> bytes:
        """The page, in Prometheus's text format."""
        return generate_latest(_Page(self, service))

    def forget(self, engine: Engine) -> None:
        """It has been retired, and nothing is told of it any more."""
        if engine in self._engines:
            self._engines.remove(engine)

    def families(self, service: Service) -> Iterator[Metric]:
        """All figures as they are now."""
        model = self._model
        for engine in service.replicas.engines:
            if engine not in self._engines:
                self._engines.append(engine)
        schedulers = [engine.scheduler for engine in self._engines]
        running = [scheduler.num_running for scheduler in schedulers]

        def one(name: str, text: str, value: float, *, counter: bool = False) -> Metric:
            family = (CounterMetricFamily if counter else GaugeMetricFamily)(name, text, labels=["model_name"])
            family.add_metric([model], value)
            return family

        def each(name: str, text: str, values: Sequence[float], *, counter: bool = False) -> Metric:
            labels = ["model_name", "replica"]
            family = (CounterMetricFamily if counter else GaugeMetricFamily)(name, text, labels=labels)
            for replica, value in enumerate(values):
                family.add_metric([model, str(replica)], value)
            return family

        yield one(
            "shardwise_num_requests_waiting", "Continuations in a queue.", max(0, service.num_open - sum(running))
        )
        yield each("shardwise_num_requests_running", "Continuations that hold KV blocks.", running)
        yield self._queued.family("shardwise_request_queue_time_seconds", "From acceptance to the engine.", model)
        yield self._first.family("shardwise_time_to_first_token_seconds", "From acceptance to the first token.", model)
        yield self._between.family("shardwise_inter_token_latency_seconds", "Between tokens of a continuation.", model)
        yield self._whole.family("shardwise_e2e_request_latency_seconds", "From acceptance to the end.", model)
        yield one("shardwise_prompt_tokens", "Tokens of prompts that were read.", self._num_prompt, counter=True)
        yield one("shardwise_generation_tokens", "Tokens that were generated.", self._num_generated, counter=True)
        yield self._counts("shardwise_request_finished", "Ended continuations.", "finished_reason", self._finished)
        yield self._counts("shardwise_request_refused", "Requests that were not accepted.", "status", self._refused)
        pools = [scheduler.pool for scheduler in schedulers]
        usage = [1 - pool.num_free / pool.num_blocks for pool in pools]
        yield each("shardwise_kv_cache_usage_perc", "Part of the KV blocks in use; 1 is all.", usage)
        queried, hits = [pool.num_queried for pool in pools], [pool.num_hits for pool in pools]
        yield each("shardwise_prefix_cache_queries", "Tokens looked for in the prefix cache.", queried, counter=True)
        yield each("shardwise_prefix_cache_hits", "Tokens found in the prefix cache.", hits, counter=True)
        if all(scheduler.drafts is not None for scheduler in schedulers):
            tallies = [scheduler.drafts.speculator.tally for scheduler in schedulers if scheduler.drafts is not None]
            drafted, accepted = [tally.proposed for tally in tallies], [tally.accepted for tally in tallies]
            yield each("shardwise_spec_decode_num_draft_tokens", "Drafts verified.", drafted, counter=True)
            yield each("shardwise_spec_decode_num_accepted_tokens", "Drafts accepted.", accepted, counter=True)
        preempted = [scheduler.num_preempted for scheduler in schedulers]
        yield each("shardwise_num_preemptions", "Sequences that lost their KV to others.", preempted, counter=True)
        failures = [engine.num_failures for engine in self._engines]
        yield each("shardwise_replica_failures", "Times that the replica's ranks failed.", failures, counter=True)
        alive = tuple(service.replicas.engines)
        ready = [engine in alive and engine.ready for engine in self._engines]
        yield each("shardwise_replica_ready", "Has the replica ranks to run on?", ready)
        yield self._memory()
        state = GaugeMetricFamily("shardwise_state", "1 for the state that the server is in.", labels=["state"])
        for name in STATES:
            state.add_metric([name], service.state == name)
        yield state
        yield from self._process.collect()

    def _counts(self, name: str, text: str, label: str, counts: Counter[str] | Counter[int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for value, count in dict(counts).items():
            family.add_metric([self._model, str(value)], count)
        return family

    def _memory(self) -> Metric:
        labels = ["replica", "rank", "stage"]
        family = GaugeMetricFamily("shardwise_rank_resident_memory_bytes", "Of the rank's process.", labels=labels)
        for replica, engine in enumerate(self._engines):
            for rank, figures in enumerate(engine.executor.figures):
                # Ranks within this process tell no pid; those that start tell nothing yet.
                size = resident_bytes(figures.get("pid", os.getpid())) if figures else None
                if size is not None:
                    family.add_metric([str(replica), str(rank), str(figures.get("stage", 0))], size)
        return family


class _Page(Collector):
    """What is read when the page is asked for."""

    def __init__(self, metrics: Metrics, service: Service) -> None:
        self._metrics, self._service = metrics, service

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        return self._metrics.families(self._service)


def resident_bytes(pid: object) -> int | None:
    """Memory that a process holds now; None if there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), None)
