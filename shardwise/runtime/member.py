"""A rank of the real model in processes of its own: built and loaded in one, joined to its peers in the next.

Knows devices and transports; nothing of control sockets.
"""

from __future__ import annotations

import msgspec
import torch

from shardwise.config import Layout
from shardwise.kernels.sync import SPIN, SPIN_ALONE, load_sync
from shardwise.parallel.axis import Axis
from shardwise.parallel.shm import shared_axes
from shardwise.runtime.executor import Figures
from shardwise.runtime.frames import WorkerSpec
from shardwise.runtime.runner import Runner
from shardwise.runtime.spec import RunnerSpec
from shardwise.schedule.step import Step, StepResult


class ModelMember:
    """See `worker.Member`. What a GPU holds can't be handed on: there everything is done by ``join``."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        place = Layout(tp=spec.tp, pp=spec.pp).coordinates(spec.rank)
        self._place = place
        self._axes = Axis(place.tp, spec.tp), Axis(place.pp, spec.pp)
        self._runner: Runner | None = None

    def load(self) -> Figures:
        """See `worker.Member`."""
        torch.set_num_threads(1)  # the pool of more would not outlive the fork
        return self._build() if self._spec.device is None else {}

    def join(self, shared: int) -> Figures:
        """See `worker.Member`."""
        spec = self._spec
        torch.set_num_threads(spec.threads)
        device = torch.device("cpu") if spec.device is None else torch.device("cuda", spec.device)
        if spec.device is not None:
            torch.cuda.set_device(device)  # "cuda" without a number now means this one
        for axis, joined in zip(self._axes, self._connect(shared, device), strict=True):
            axis.join(joined.transport)
        return self._build() if self._runner is None else {}

    def step(self, step: Step) -> StepResult | None:
        """See `Rank`."""
        assert self._runner is not None
        return self._runner.step(step)

    def _build(self) -> Figures:
        self._runner = Runner(msgspec.msgpack.decode(self._spec.runner, type=RunnerSpec), self._place, *self._axes)
        return self._runner.load()

    def _connect(self, shared: int, device: torch.device) -> tuple[Axis, Axis]:
        spec = self._spec
        if spec.tp * spec.pp == 1:
            return Axis(), Axis()
        if spec.transport == "shm":
            sync = load_sync(SPIN if spec.crowded else SPIN_ALONE)
            return shared_axes(shared, spec.rank, spec.tp, spec.pp, sync, spec.slot_bytes, spec.timeout)
        from shardwise.parallel.distributed import distributed_axes, file_meeting

        return distributed_axes(file_meeting(shared), spec.rank, spec.tp, spec.pp, device, spec.timeout)
