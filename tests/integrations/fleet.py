"""What the tests of Ray do in a process of their own, a local cluster's: each prints what it found as a JSON line.

python -m tests.integrations.fleet {serve | data} MODEL FOLDER
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16))

import httpx
import psutil
import ray
from ray import serve

from shardwise.integrations import ray_serve
from shardwise.integrations.ray_data import generate_dataset
from shardwise.integrations.ray_serve import build_app
from tests.integrations.torchserve import free_ports, ranks_of

SETTINGS: dict[str, Any] = {"kv_tokens": 8192, "start_timeout": 120}
PROMPTS = ["once", "upon a time", "there was", "a town by the sea"]
LONG = {"prompt": "a long story", "max_tokens": 600, "temperature": 0.8, "seed": 7, "ignore_eos": True}
SHORT = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
QUICK = {"upscale_delay_s": 0.5, "downscale_delay_s": 1, "look_back_period_s": 2, "metrics_interval_s": 0.5}


@contextmanager
def cluster(folder: str) -> Iterator[None]:
    """A local Ray of eight CPUs and five GPUs, as it counts them."""
    ray.init(
        num_cpus=8,
        num_gpus=5,
        include_dashboard=False,
        object_store_memory=2**27,
        _temp_dir=folder,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


def until(condition: Callable[[], Any], what: str) -> Any:
    """What it gives, once that is something."""
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.1)
    return found


def replicas() -> list[psutil.Process]:
    """The processes of Serve's replicas whose ranks are there, as long as they have any."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if each.name().startswith("ray::ServeRepl") and len(ranks_of(each)) == 2:
                found.append(each)
    return found


class Load(threading.Thread):
    """A client that asks the same four things again and again, until it is told to stop."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.found: set[tuple[str, int, str]] = set()
        """(prompt, status, text)"""
        self.count = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=100) as client:
            while not self.stopped.is_set():
                for prompt in PROMPTS:
                    answer = client.post("/v1/completions", json={"model": "model", "prompt": prompt, **SHORT})
                    text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
                    self.found.add((prompt, answer.status_code, text))
                    self.count += 1


def streamed(url: str, act: Callable[[], None]) -> str:
    """The long text, with something done after its first piece."""
    text = ""
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={"model": "model", **LONG, "stream": True}, timeout=100
    ) as r:
        for line in r.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                if act is not None:
                    act()
                    act = None  # type: ignore[assignment]
    return text


def run_serve(model: str) -> dict[str, Any]:
    """A fleet that grows and shrinks under load, loses a rank and then a replica."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/llm"
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    limits: dict[str, Any] = {"min_replicas": 1, "max_replicas": 2, "target_requests": 2, "scaling": QUICK}
    serve.run(build_app(model, "tp2", **limits, **SETTINGS), name="llm", route_prefix="/llm")
    found: dict[str, Any] = {"models": httpx.get(f"{url}/v1/models").json()["data"][0]["id"]}
    found["plain"] = streamed(url, lambda: None)

    clients = [Load(url) for _ in range(8)]
    for client in clients:
        client.start()
    until(lambda: len(replicas()) == 2, "a second replica")
    for client in clients[1:]:
        client.stopped.set()
    until(lambda: len(replicas()) == 1, "one replica")
    clients[0].stopped.set()
    for client in clients:
        client.join(120)
    found["load"] = sorted(set().union(*(client.found for client in clients)))
    found["count"] = sum(client.count for client in clients)

    (replica,) = replicas()
    before = ranks_of(replica)
    found["after a rank"] = streamed(url, before[-1].kill)
    (same,) = until(replicas, "ranks")
    found["same replica"] = same.pid == replica.pid
    found["new ranks"] = not set(before) & set(ranks_of(same))

    below = same.children(recursive=True)
    same.kill()
    _, alive = psutil.wait_procs(below, timeout=60)
    found["outlived"] = len(alive)
    until(lambda: [each for each in replicas() if each.pid != same.pid], "another replica")
    found["after a replica"] = until(lambda: _asked(url), "an answer")
    found["devices"] = devices(url.replace("/llm", "/devices"))
    below = replicas()[0].children(recursive=True)
    serve.shutdown()
    _, alive = psutil.wait_procs(below, timeout=60)
    found["left"] = len(alive)
    return found


class Devices:
    """In a replica's place: answers with the GPUs that Ray has given it."""

    def __init__(self, job: object) -> None:
        self.given = os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def __serve_build_asgi_app__(self) -> Any:
        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            while scope["type"] == "lifespan":
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": self.given.encode()})

        return app


def devices(url: str) -> list[str]:
    """What two replicas are given that ask for two GPUs each."""
    with patch.object(ray_serve, "Replica", Devices):
        app = build_app("m", "tp2", device="cuda", min_replicas=2, max_replicas=2)
    serve.run(app, name="devices", route_prefix="/devices")
    seen: set[str] = set()
    until(lambda: seen.add(httpx.get(url).text) or len(seen) == 2, "two answers")  # type: ignore[func-returns-value]
    return sorted(seen)


def _asked(url: str) -> str:
    answer = httpx.post(f"{url}/v1/completions", json={"model": "model", **LONG}, timeout=100)
    return str(answer.json()["choices"][0]["text"]) if answer.status_code == 200 else ""


def run_data(model: str) -> dict[str, Any]:
    """A data set of good rows and bad ones, on two actors, in several blocks."""
    rows = [{"id": n, "prompt": prompt, "seed": None} for n, prompt in enumerate([*PROMPTS * 5, "", None])]
    rows += [{"id": 100, "prompt": "once", "seed": -1}, {"id": 101, "prompt": "x" * 5000, "seed": 3}]
    dataset = ray.data.from_items(rows).repartition(6)
    by = {**SHORT, "temperature": 0.8, "seed": 5}
    options: dict[str, Any] = {"fields": ["seed"], "sampling": by, "concurrency": 2, "batch_size": None}
    found = generate_dataset(dataset, model, "tp2", **options, **SETTINGS).take_all()
    every = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs([each for each in every if "shardwise.runtime.worker" in line(each)], timeout=60)
    assert not alive
    return {"rows": sorted(found, key=lambda row: row["id"])}


def line(process: psutil.Process) -> list[str]:
    """What it was started with; nothing if it has gone."""
    with suppress(psutil.Error):
        return process.cmdline()
    return []


if __name__ == "__main__":
    what, model, folder = sys.argv[1:]
    with cluster(folder):
        result = {"serve": run_serve, "data": run_data}[what](model)
    print(json.dumps(result))
