"""What a store's server counts under TorchServe's names, and the page that tells these beside our own figures.

Labels are names and versions that the operator has registered, and names that his handlers give to metrics: never
anything of a request.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_CUSTOM = 100
"""Metrics that a custom handler may make up; more are left out."""
SPOILT = re.compile(r"^[^A-Za-z_]|[^A-Za-z0-9_]")
"""What Prometheus takes in no name."""
GIGA = 2**30


@dataclass
class Tally:
    """What is counted for one version of one model. Totals are in microseconds, what is ``last`` in milliseconds."""

    name: str
    version: str
    num_requests: int = 0
    latency: float = 0.0
    queued: float = 0.0
    last: dict[str, float] = field(default_factory=dict)
    """The newest value of each gauge, by its name."""
    load_s: dict[str, float] = field(default_factory=dict)
    """Seconds that each worker took to load, by its number."""

    def done(self, whole: float, queued: float) -> None:
        """A prediction was answered after so many seconds, of which it waited some for its turn."""
        self.latency += whole * 1e6
        self.queued += queued * 1e6
        self.last["QueueTime"] = queued * 1e3

    def observe(self, name: str, unit: str, value: float) -> None:
        """Something that a handler has measured itself; times become milliseconds."""
        known = SPOILT.sub("_", name)[:100]
        if known in self.last or len(self.last) < MAX_CUSTOM:
            self.last[known] = value * 1e3 if unit == "s" else value


class Requests:
    """ASGI in front of everything: counts answers by the hundred of their status, as TorchServe does for its host."""

    def __init__(self) -> None:
        self.counts = {2: 0, 4: 0, 5: 0}

    def counted(self, app: ASGIApp) -> ASGIApp:
        """The app, with its answers counted."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            async def tell(message: Message) -> None:
                if message["type"] == "http.response.start" and message["status"] // 100 in self.counts:
                    self.counts[message["status"] // 100] += 1
                await send(message)

            await app(scope, receive, tell)

        return call


HOST_GAUGES = ("QueueTime", "WorkerThreadTime")
"""TorchServe tells these of the host; here they say of which model they are, as well."""


class Page(Collector):
    """All figures: TorchServe's of ``tallies``, the host's, and ours of each model, with its name and version."""

    def __init__(
        self, requests: Requests, tallies: Iterable[Tally], ours: Iterable[tuple[Tally, Iterable[Metric]]]
    ) -> None:
        self._requests = requests
        self._tallies = list(tallies)
        self._ours = list(ours)
        self._host = {"Level": "Host", "Hostname": socket.gethostname()}

    def render(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client: each name once, whatever many models have it."""
        found: dict[str, Metric] = {}
        for metric in self._all():
            if metric.name in found:
                found[metric.name].samples += metric.samples
            else:
                found[metric.name] = metric
        yield from found.values()
        yield from ProcessCollector(registry=None).collect()

    def _all(self) -> Iterator[Metric]:
        for hundred, count in self._requests.counts.items():
            yield _one(f"Requests{hundred}XX", "Answers with such a status.", self._host, count)
        for tally in self._tallies:
            yield from self._torchserve(tally)
        yield from self._machine()
        for tally, metrics in self._ours:
            labels = {"model_name": tally.name, "model_version": tally.version}
            for metric in metrics:
                if not metric.name.startswith("process"):
                    metric.samples = [each._replace(labels={**each.labels, **labels}) for each in metric.samples]
                    yield metric

    def _torchserve(self, tally: Tally) -> Iterator[Metric]:
        labels = {"model_name": tally.name, "model_version": tally.version, "hostname": self._host["Hostname"]}
        yield _one("ts_inference_requests_total", "Predictions asked for.", labels, tally.num_requests)
        yield _one("ts_inference_latency_microseconds", "Time that all of them took.", labels, tally.latency)
        yield _one("ts_queue_latency_microseconds", "Time that all of them waited.", labels, tally.queued)
        for number, seconds in tally.load_s.items():
            worker = {"WorkerName": f"W-{tally.name}_{tally.version}-{number}", **self._host}
            yield _one("WorkerLoadTime", "Milliseconds to load a worker.", worker, seconds * 1e3)
        for name, value in dict(tally.last).items():
            level = "Host" if name in HOST_GAUGES else "Model"
            model = {"ModelName": tally.name, "ModelVersion": tally.version, "Level": level}
            yield _one(name, "The newest value.", {**self._host, **model}, value)

    def _machine(self) -> Iterator[Metric]:
        """What TorchServe tells of the machine, where the system says it."""
        memory = {
            line.split(":")[0]: int(line.split()[1]) * 1024
            for line in _lines("/proc/meminfo")
            if line.startswith(("MemTotal:", "MemAvailable:"))
        }
        if len(memory) == 2:
            total, free = memory["MemTotal"], memory["MemAvailable"]
            yield _one("MemoryUsed", "Megabytes.", self._host, (total - free) / 2**20)
            yield _one("MemoryAvailable", "Megabytes.", self._host, free / 2**20)
            yield _one("MemoryUtilization", "Percent.", self._host, 100 * (1 - free / total))
        disk = shutil.disk_usage("/")
        yield _one("DiskUsage", "Gigabytes.", self._host, disk.used / GIGA)
        yield _one("DiskAvailable", "Gigabytes.", self._host, disk.free / GIGA)
        yield _one("DiskUtilization", "Percent.", self._host, 100 * disk.used / disk.total)
        load = min(100.0, 100 * os.getloadavg()[0] / (os.cpu_count() or 1))
        yield _one("CPUUtilization", "Percent, from the load of the last minute.", self._host, load)


def _one(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    metric = Metric(name, text, "unknown")  # as counters their names would get an ending that TorchServe's haven't
    metric.add_sample(name, labels, value)
    return metric


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
