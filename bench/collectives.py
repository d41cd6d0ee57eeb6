"""Times what two ranks say to each other, over shared memory and over gloo, and one step's way from the front and back.

All that is compared takes turns within one run; numbers are medians in microseconds, as rank 0 sees them.

    python -m bench.collectives [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from bench.machine import machine
from shardwise.kernels.ops import load_ops
from shardwise.kernels.sync import load_sync
from shardwise.parallel.axis import Axis
from shardwise.parallel.distributed import distributed_axes
from shardwise.parallel.placement import Run, Tree
from shardwise.parallel.shm import shared_axes
from shardwise.runtime.executor import Figures
from shardwise.runtime.frames import WorkerSpec
from shardwise.runtime.processes import ProcessExecutor
from shardwise.runtime.worker import main as rank_main
from shardwise.schedule.step import Step, StepResult

ROUNDS, CALLS = 15, 40
SHAPES = ((1, 576), (32, 576), (512, 576))
TREE = Tree((Run(0, 1), Run(1, 2)))


class Meter:
    """A rank: measures when it loads, answers empty steps afterwards."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.meeting = msgspec.msgpack.decode(spec.runner, type=str)
        self.rank = spec.rank

    def load(self) -> Figures:
        return {}

    def join(self, shared: int, meet: object) -> Figures:
        torch.set_num_threads(1)
        self.shm, _ = shared_axes(shared, self.rank, 2, 1, load_sync())
        self.gloo, _ = distributed_axes(self.meeting, self.rank, 2, 1, torch.device("cpu"))
        self.ops, _ = load_ops("auto", "cpu", torch.float32)
        figures: Figures = {}
        for shape in SHAPES:
            x = torch.randn(shape)
            y, copy = x.clone(), torch.empty(shape)
            calls: dict[str, Callable[[], object]] = {
                "copy": lambda x=x, copy=copy: copy.copy_(x),
                "shm exchange": lambda x=x: self.exchange(self.shm, x),
                "shm reduce": lambda x=x: self.reduce(self.shm, x),
                "shm send + recv": lambda x=x: self.echo(self.shm, x),
                "gloo exchange": lambda x=x: self.exchange(self.gloo, x),
                "gloo reduce": lambda x=x: self.reduce(self.gloo, x),
                "gloo all_reduce": lambda y=y: dist.all_reduce(y.mul_(0.5)),
            }
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(ROUNDS):
                for name, call in calls.items():
                    call()
                    start = time.perf_counter()
                    for _ in range(CALLS):
                        call()
                    times[name].append((time.perf_counter() - start) / CALLS)
            for name, values in times.items():
                figures[f"{name} {shape[0]}x{shape[1]}"] = statistics.median(values) * 1e6
        return figures

    def exchange(self, axis: Axis, x: Tensor) -> list[Tensor]:
        """As after a kernel that wrote its sums where they are exchanged: nothing is copied by shared memory."""
        assert axis.transport is not None
        buffer = axis.buffer(x.shape, x.dtype)
        return axis.transport.exchange(x if buffer is None else buffer, [x.shape, x.shape])

    def reduce(self, axis: Axis, x: Tensor) -> Tensor:
        buffer = axis.buffer(x.shape, x.dtype)
        return axis.reduce(self.ops, x if buffer is None else buffer, TREE)

    def echo(self, axis: Axis, x: Tensor) -> None:
        """One way between stages: rank 0 sends, rank 1 receives; back pressure keeps them together."""
        if axis.rank == 0:
            axis.send(x)
        else:
            axis.recv(x.shape, x.dtype)

    def close(self) -> None:
        pass

    def step(self, step: Step) -> StepResult | None:
        return StepResult(step.epoch, step.number, [], []) if self.rank == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        runner = msgspec.Raw(msgspec.msgpack.encode(f"file://{directory}/meeting"))
        specs = [WorkerSpec(rank=rank, tp=2, pp=1, runner=runner) for rank in range(2)]
        executor = ProcessExecutor(specs, 60.0, [sys.executable, "-m", "bench.collectives"])
        try:
            executor.wait_ready()
            times = []
            for number in range(1000):
                start = time.perf_counter()
                executor.submit(Step(0, number, []))
                executor.collect()
                times.append(time.perf_counter() - start)
        finally:
            executor.close()
    figures = {**executor.figures[0], "step, front to rank and back": statistics.median(times) * 1e6}
    if asked.json:
        print(json.dumps({"machine": machine(), "microseconds": figures}))
        return
    print(machine())
    for name, value in figures.items():
        print(f"{name:>32} {value:9.1f} us")


if __name__ == "__main__":
    rank_main(Meter) if len(sys.argv) == 3 and sys.argv[1].isdigit() else main()
