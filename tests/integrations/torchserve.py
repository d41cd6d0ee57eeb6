"""A real TorchServe for tests: started on ports of its own, asked over HTTP, and ended with all that it has started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.server.conftest import wait_for
from tests.tiny import save_text_model

START = 60.0
"""Seconds for Java to listen."""


class TorchServe:
    """A running TorchServe: its model store, and clients of its two doors."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], ports: list[int]) -> None:
        self.store = folder / "store"
        self.process = process
        self.log = folder / "out"
        self.inference = httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=120)
        self.management = httpx.Client(base_url=f"http://127.0.0.1:{ports[1]}", timeout=200)

    def predict(self, model: str, body: Any) -> httpx.Response:
        return self.inference.post(f"/predictions/{model}", json=body)

    def register(self, model: str) -> httpx.Response:
        return self.management.post("/models", params={"url": model, "initial_workers": 1, "synchronous": True})

    def worker(self, model: str) -> psutil.Process:
        """The process that runs the handler, once there is one that is ready."""
        deadline = time.monotonic() + 120
        while True:
            workers = self.management.get(f"/models/{model}").json()[0]["workers"]
            if [each["status"] for each in workers] == ["READY"]:
                with suppress(psutil.NoSuchProcess):
                    return psutil.Process(workers[0]["pid"])
            assert time.monotonic() < deadline, workers
            time.sleep(0.05)


def ranks_of(worker: psutil.Process) -> list[psutil.Process]:
    """Its ranks: children of those that hold weights, which are children of what they were forked from."""
    return [rank for server in worker.children() for holder in server.children() for rank in holder.children()]


def save_long_model(path: Path) -> Path:
    """The tiny text model, with a context that is long enough for something to happen meanwhile."""
    save_text_model(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return path


def save_folder(store: Path, name: str, config: str) -> None:
    """A model folder, as torch-model-archiver --archive-format no-archive makes one."""
    folder = store / name
    (folder / "MAR-INF").mkdir(parents=True)
    model = {"modelName": name, "modelVersion": "1.0", "handler": "shardwise.integrations.torchserve"}
    manifest = {"runtime": "python", "model": {**model, "configFile": "model-config.yaml"}, "archiverVersion": "0.12.0"}
    (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
    (folder / "model-config.yaml").write_text(config)


@contextmanager
def torchserve(folder: Path) -> Iterator[TorchServe]:
    """One over the models in ``folder / "store"``, none of which is loaded yet."""
    ports = free_ports(5)
    names = ["inference_address", "management_address", "metrics_address"]
    lines = [f"{name}=http://127.0.0.1:{port}" for name, port in zip(names, ports, strict=False)]
    lines += [f"grpc_inference_port={ports[3]}", f"grpc_management_port={ports[4]}"]
    lines += ["vmargs=-Xmx256m -XX:ActiveProcessorCount=2", "enable_envvars_config=false"]
    (folder / "config.properties").write_text("\n".join(lines))
    (folder / "temp").mkdir()
    own = {"TMPDIR": folder / "temp", "TEMP": folder / "temp", "LOG_LOCATION": folder / "logs"}
    own |= {"METRICS_LOCATION": folder / "logs", "PYTHONPATH": Path(__file__).parents[2]}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for torchrun
    arguments = ["--start", "--foreground", "--ncs", "--model-store", str(folder / "store")]
    arguments += ["--ts-config", str(folder / "config.properties"), "--disable-token-auth", "--enable-model-api"]
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", "from ts.model_server import start; start()", *arguments],
            cwd=folder,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, **{name: str(value) for name, value in own.items()}, "PATH": path},
        )
    running = TorchServe(folder, process, ports)
    started: list[psutil.Process] = []
    try:
        wait_for(lambda: _answers(running) or process.poll() is not None, START)
        assert process.poll() is None, running.log.read_text()
        yield running
    finally:
        own_process = psutil.Process(process.pid)
        started = own_process.children(recursive=True)
        for each in own_process.children():
            each.send_signal(signal.SIGTERM)  # Java, which ends its workers
        _, alive = psutil.wait_procs(started, timeout=30)
        for each in alive:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.kill()
        process.wait(20)
        running.inference.close()
        running.management.close()
    assert not alive, "TorchServe did not end what it has started"


def _answers(running: TorchServe) -> bool:
    try:
        return running.inference.get("/ping", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def free_ports(count: int) -> list[int]:
    """Of this host, as far as is known."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
