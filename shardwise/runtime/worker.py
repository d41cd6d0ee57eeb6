"""A rank's process: hears its spec, joins its axes, builds its work, and steps until told to stop or left alone.

Knows the control socket and how to die; what is computed is the builder's business. torch is imported only for it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from shardwise.config import Layout
from shardwise.runtime.executor import Rank
from shardwise.runtime.frames import Failed, Frames, Kind, WorkerSpec, pack
from shardwise.schedule.step import Step

if TYPE_CHECKING:
    from shardwise.parallel.axis import Axis

PR_SET_PDEATHSIG = 1


def build(spec: WorkerSpec) -> Rank:
    """The rank's work on the real model, joined to its peers."""
    from shardwise.runtime.runner import Runner
    from shardwise.runtime.spec import RunnerSpec

    tp, pp = connect(spec)
    place = Layout(tp=spec.tp, pp=spec.pp).coordinates(spec.rank)
    return Runner(msgspec.msgpack.decode(spec.runner, type=RunnerSpec), place, tp, pp)


def connect(spec: WorkerSpec) -> tuple[Axis, Axis]:
    """Set up torch for this rank and join its (tp, pp) axes."""
    import torch

    from shardwise.parallel.axis import Axis

    torch.set_num_threads(spec.threads)
    device = torch.device("cpu") if spec.device is None else torch.device("cuda", spec.device)
    if spec.device is not None:
        torch.cuda.set_device(device)  # "cuda" without a number now means this one
    if spec.tp * spec.pp == 1:
        return Axis(), Axis()
    if spec.transport == "shm":
        from shardwise.kernels.sync import SPIN, SPIN_ALONE, load_sync
        from shardwise.parallel.shm import shared_axes

        sync = load_sync(SPIN if spec.crowded else SPIN_ALONE)
        return shared_axes(spec.shared, spec.rank, spec.tp, spec.pp, sync, spec.slot_bytes, spec.timeout)
    from shardwise.parallel.distributed import distributed_axes, file_meeting

    return distributed_axes(file_meeting(spec.shared), spec.rank, spec.tp, spec.pp, device, spec.timeout)


def main(builder: Callable[[WorkerSpec], Rank] = build) -> None:
    """Run the rank of this process; argv holds the control socket's descriptor and the front's process id."""
    descriptor, front = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # how to end is the front's decision; it will tell, kill, or die
    _die_with(front)
    faulthandler.enable()
    os.set_inheritable(descriptor, False)  # no compiler or other child of this rank shall hold it open
    frames = Frames(socket.socket(fileno=descriptor))
    code = 0
    try:
        _serve(frames, builder)
    except BaseException as error:
        code = 1
        trace = traceback.format_exc()
        print(trace, file=sys.stderr)
        frames.send(pack(Kind.FAILED, Failed(type(error).__name__, str(error), trace)))
    sys.stderr.flush()
    os._exit(code)  # nothing is left to save, and destructors of a broken process group may wait for dead peers


def _serve(frames: Frames, builder: Callable[[WorkerSpec], Rank]) -> None:
    start = frames.read()
    if start is None:
        return
    rank = builder(msgspec.msgpack.decode(start[1], type=WorkerSpec))
    frames.send(pack(Kind.READY, rank.load() or {}))
    steps = msgspec.msgpack.Decoder(Step)
    while (frame := frames.read()) is not None and frame[0] is Kind.STEP:
        result = rank.step(steps.decode(frame[1]))
        if result is not None:
            frames.send(pack(Kind.RESULT, result))


def _die_with(front: int) -> None:
    """Have the kernel kill this process when the front dies, where it can; elsewhere the control socket's end tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != front:  # it died before the kernel knew
        os._exit(1)


if __name__ == "__main__":
    main()
