"""A rank without torch that misbehaves on command: its runner spec says how it loads, a step's tokens what it does.

Run with an argument that starts with "front", this file is a front process of two such ranks instead, to be killed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

import msgspec

from shardwise.runtime.executor import Figures
from shardwise.runtime.frames import WorkerSpec
from shardwise.runtime.processes import ProcessExecutor
from shardwise.runtime.worker import main
from shardwise.schedule.step import Chunk, Step, StepResult

COMMAND = [sys.executable, "-m", "tests.runtime.fake_worker"]
DEEDS = (
    "answer",
    "hang",
    "raise",
    "exit",
    "abort",
    "segfault",
    "chat",
    "logits",
    "lie",
    "lose a peer",
    "leave a child",
)


class Deeds(msgspec.Struct):
    """What each rank does when it loads; the others answer."""

    load: dict[int, str] = {}


def specs(size: int, load: dict[int, str] | None = None, tp: int = 1) -> list[WorkerSpec]:
    runner = msgspec.Raw(msgspec.msgpack.encode(Deeds(load or {})))
    return [WorkerSpec(rank=rank, tp=tp, pp=size // tp, runner=runner, threads=3) for rank in range(size)]


def step(number: int, deeds: dict[int, str] | None = None, padding: int = 0) -> Step:
    """A step in which each rank does its deed."""
    tokens = [number, *[DEEDS.index((deeds or {}).get(rank, "answer")) for rank in range(8)], *[0] * padding]
    return Step(1, number, [Chunk(0, 0, tokens, [], None)])


class FakeRank:
    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec

    def load(self) -> Figures:
        deeds = msgspec.msgpack.decode(self.spec.runner, type=Deeds)
        self.do(deeds.load.get(self.spec.rank, "answer"))
        modules = "torch" in sys.modules
        return {"threads": os.environ["OMP_NUM_THREADS"], "torch": int(modules)}

    def join(self, shared: int, meet: object) -> Figures:
        return {}

    def close(self) -> None:
        pass

    def step(self, step: Step) -> StepResult | None:
        number, *deeds = step.chunks[0].tokens
        deed = DEEDS[deeds[self.spec.rank]]
        self.do(deed)
        if self.spec.rank != self.spec.tp * (self.spec.pp - 1):
            return None
        logits = bytes(3 << 20) if deed == "logits" else b""
        return StepResult(step.epoch, step.number + (deed == "lie"), [[number * 10]], [[logits]], [[]])

    def do(self, deed: str) -> None:
        if deed == "hang":
            threading.Event().wait(60)
        elif deed == "raise":
            raise ValueError("this does not fit: use less")
        elif deed == "exit":
            print("out of luck", file=sys.stderr)
            os._exit(7)
        elif deed == "abort":
            os.abort()
        elif deed == "segfault":
            ctypes.memset(8, 0, 1)
        elif deed == "chat":
            print("chatter " * 100_000)
        elif deed == "leave a child":
            if os.fork():
                os._exit(7)
            time.sleep(0.3)
            os._exit(0)
        elif deed == "lose a peer":
            raise ConnectionError("tp axis: rank 1 has left")


def front(load: str) -> None:
    """Say the ranks' process ids when they are ready, then work for ever."""
    executor = ProcessExecutor(specs(2, {1: load}), command=COMMAND)
    print("started", flush=True)
    executor.wait_ready()
    print("ready", flush=True)
    number = 0
    while True:
        executor.submit(step(number))
        executor.collect()
        number += 1


if __name__ == "__main__":
    if sys.argv[1] == "front":
        front(sys.argv[2])
    main(FakeRank)
