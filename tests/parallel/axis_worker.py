"""A rank that plays the scenarios over shared memory and gloo; a step's tokens say which."""

from __future__ import annotations

import time

import msgspec
import torch

from shardwise.kernels.sync import load_sync
from shardwise.parallel.axis import Axis
from shardwise.parallel.distributed import distributed_axes
from shardwise.parallel.shm import shared_axes
from shardwise.runtime.executor import Figures
from shardwise.runtime.frames import WorkerSpec
from shardwise.runtime.worker import main
from shardwise.schedule.step import Step, StepResult
from tests.parallel import scenarios


class Player:
    def __init__(self, spec: WorkerSpec) -> None:
        torch.set_num_threads(1)
        self.spec = spec
        self.meetings = msgspec.msgpack.decode(spec.runner, type=str)
        self.rounds = 0
        self.axes: dict[str, tuple[Axis, Axis]] = {}

    def load(self) -> Figures:
        return {"rank": self.spec.rank}

    def join(self, shared: int, meet: object) -> Figures:
        spec = self.spec
        self.axes["shm"] = shared_axes(shared, spec.rank, spec.tp, spec.pp, load_sync(), slot_bytes=256, timeout=20)
        self.gloo(spec.tp, spec.pp, 20.0)
        return {}

    def gloo(self, tp: int, pp: int, timeout: float) -> None:
        """Leave the group there is, once every rank is done with it, and join another."""
        if "gloo" in self.axes:
            for axis in self.axes["shm"]:
                axis.all_gather(torch.zeros(1), [1] * axis.size)
            self.axes["gloo"][0].close()
        self.rounds += 1
        meeting = f"file://{self.meetings}/{self.rounds}"
        rank = self.spec.rank
        self.axes["gloo"] = distributed_axes(meeting, rank, tp, pp, torch.device("cpu"), timeout)

    def close(self) -> None:
        pass

    def step(self, step: Step) -> StepResult | None:
        transport, scenario = ("shm", "gloo")[step.chunks[0].tokens[0]], step.chunks[0].tokens[1]
        said = b""
        if scenario < len(scenarios.ALL):
            for axis in self.axes[transport]:
                if axis.size > 1:
                    list(scenarios.ALL.values())[scenario](axis)
        elif scenario == len(scenarios.ALL):  # leave the group and make one line of all
            self.gloo(self.spec.tp * self.spec.pp, 1, 20.0)
        else:
            said = self.wait_in_vain(transport)
        sampler = self.spec.tp * (self.spec.pp - 1)
        return StepResult(step.epoch, step.number, [[]], [[said]], [[]]) if self.spec.rank == sampler else None

    def wait_in_vain(self, transport: str) -> bytes:
        if transport == "gloo":
            self.gloo(self.spec.tp, self.spec.pp, 0.5)
        tp, _ = self.axes[transport]
        if tp.rank != 0:
            return b""
        started = time.monotonic()
        try:
            tp.all_gather(torch.zeros(3), [3] * tp.size)
        except TimeoutError as error:
            assert time.monotonic() - started < 5
            return str(error).encode()
        return b"nothing"


if __name__ == "__main__":
    main(Player)
