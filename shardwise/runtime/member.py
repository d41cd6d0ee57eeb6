"""A rank of the real model in processes of its own: built and loaded in one, joined to its peers in the next.

Knows devices and transports; nothing of control sockets.
"""

from __future__ import annotations

import os

import msgspec
import torch

from shardwise.config import Layout
from shardwise.kernels.sync import SPIN, SPIN_ALONE, load_sync
from shardwise.parallel.axis import Axis
from shardwise.parallel.seal import Door, own_address, read_secret
from shardwise.parallel.shm import shared_axes
from shardwise.parallel.tcp import TcpTransport, connect
from shardwise.runtime.executor import Figures
from shardwise.runtime.frames import WorkerSpec
from shardwise.runtime.runner import Runner
from shardwise.runtime.spec import RunnerSpec
from shardwise.runtime.worker import Meet
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
        return self._build().read() if self._spec.device is None else {}

    def join(self, shared: int, meet: Meet) -> Figures:
        """See `worker.Member`."""
        spec = self._spec
        torch.set_num_threads(spec.threads)
        device = torch.device("cpu") if spec.device is None else torch.device("cuda", spec.device)
        if spec.device is not None:
            torch.cuda.set_device(device)  # "cuda" without a number now means this one
        for axis, joined in zip(self._axes, self._connect(shared, device, meet), strict=True):
            axis.join(joined.transport)
        return self._build().load() if self._runner is None else self._runner.compile()

    def step(self, step: Step) -> StepResult | None:
        """See `Rank`."""
        assert self._runner is not None
        return self._runner.step(step)

    def close(self) -> None:
        """See `Rank`."""
        assert self._runner is not None
        self._runner.close()

    def _build(self) -> Runner:
        self._runner = Runner(msgspec.msgpack.decode(self._spec.runner, type=RunnerSpec), self._place, *self._axes)
        return self._runner

    def _connect(self, shared: int, device: torch.device, meet: Meet) -> tuple[Axis, Axis]:
        spec = self._spec
        if spec.tp * spec.pp == 1:
            return Axis(), Axis()
        here = here_of(spec)
        address = own_address(spec.front) if spec.hosts else ""  # before gloo's interface is set to be loopback
        tp, pp = self._inside(shared, device, here) if len(here) > 1 else (Axis(), Axis())
        return self._across(device, address, here, meet, tp, pp) if spec.hosts else (tp, pp)

    def _inside(self, shared: int, device: torch.device, here: range) -> tuple[Axis, Axis]:
        """The axes whose ranks are all of this host, on which there is nothing faster; the others are of no use."""
        spec = self._spec
        if spec.transport == "shm":
            sync = load_sync(SPIN if spec.crowded else SPIN_ALONE)
            return shared_axes(shared, spec.rank, spec.tp, spec.pp, sync, spec.slot_bytes, spec.timeout)
        from shardwise.parallel.distributed import distributed_axes, file_meeting

        return distributed_axes(file_meeting(shared), spec.rank, spec.tp, spec.pp, device, spec.timeout, here)

    def _across(
        self, device: torch.device, address: str, here: range, meet: Meet, tp: Axis, pp: Axis
    ) -> tuple[Axis, Axis]:
        """The same, where an axis with ranks on other hosts has a connection to each rank in their place."""
        spec = self._spec
        secret, purpose = read_secret(os.environ), spec.run.encode()
        door = Door(address, secret, purpose)
        try:
            addresses = meet(door.address)
            lines = {
                name: line
                for name, line in {
                    "tp": range(spec.rank - self._place.tp, spec.rank - self._place.tp + spec.tp),
                    "pp": range(self._place.tp, spec.tp * spec.pp, spec.tp),
                }.items()
                if not all(rank in here for rank in line)
            }
            peers = connect(lines, spec.rank, door, addresses, secret, purpose, spec.timeout)
        finally:
            door.close()

        def axis(name: str, inside: Axis) -> Axis:
            if name not in lines:
                return inside
            place = lines[name].index(spec.rank)
            return Axis(place, len(lines[name]), TcpTransport(name, place, peers[name], device, spec.timeout))

        return axis("tp", tp), axis("pp", pp)


def here_of(spec: WorkerSpec) -> range:
    """The ranks of the replica that are on the host of ``spec``'s."""
    if not spec.hosts:
        return range(spec.tp * spec.pp)
    own = spec.hosts[spec.rank]
    first = spec.hosts.index(own)
    return range(first, first + spec.hosts.count(own))
