"""A rank's two processes: the holder of its weights, and the rank that is forked from it and steps until told to stop.

Knows control sockets; what is computed is a `Member`'s business. No torch.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import NoReturn, Protocol

import msgspec

from shardwise.runtime import forkserver
from shardwise.runtime.executor import Figures
from shardwise.runtime.frames import Failed, Frames, Kind, WorkerSpec, pack
from shardwise.schedule.step import Step, StepResult

Meet = Callable[[str], list[str]]
"""See `Member.join`."""


class Member(Protocol):
    """A rank's work in processes of its own."""

    def load(self) -> Figures:
        """Read the weights, where they can be handed on to forked processes; in one that computes nothing."""

    def join(self, shared: int, meet: Meet) -> Figures:
        """Be ready to step, in the process that will: meet the other ranks over the empty file ``shared``.

        Ranks of other hosts don't share it; ``meet`` tells all where this one can be reached, and answers the same of
        all, in rank order.
        """

    def step(self, step: Step) -> StepResult | None:
        """See `Rank`."""

    def close(self) -> None:
        """See `Rank`."""


def main(make: Callable[[WorkerSpec], Member]) -> None:
    """Be the fork server of ranks that ``make`` makes; see `forkserver`."""

    def hold(control: int, unused: int, forks: int) -> NoReturn:
        os.close(unused)
        live(control, lambda frames: _hold(frames, forks, make))

    forkserver.main(hold)


def _hold(frames: Frames, forks: int, make: Callable[[WorkerSpec], Member]) -> None:
    """A holder's life: hear the spec, read the weights, and fork the rank as often as it is asked for."""
    start = frames.read()
    if start is None:
        return
    member = make(msgspec.msgpack.decode(start[1], type=WorkerSpec))
    frames.send(pack(Kind.READY, member.load()))

    def work(control: int, shared: int, unused: int) -> NoReturn:
        os.close(unused)
        live(control, lambda frames: _serve(frames, member.join(shared, partial(_meet, frames)), member))

    forkserver.serve(forks, work)


def _meet(frames: Frames, address: str) -> list[str]:
    frames.send(pack(Kind.MEET, address))
    answer = frames.read()
    if answer is None or answer[0] is not Kind.PEERS:
        raise ConnectionError("the front has let go of this rank")
    return msgspec.msgpack.decode(answer[1], type=list[str])


def _serve(frames: Frames, figures: Figures, member: Member) -> None:
    """A rank's life: steps."""
    frames.send(pack(Kind.READY, {**figures, "pid": os.getpid()}))
    steps = msgspec.msgpack.Decoder(Step)
    while (frame := frames.read()) is not None and frame[0] is Kind.STEP:
        result = member.step(steps.decode(frame[1]))
        if result is not None:
            frames.send(pack(Kind.RESULT, result))
    member.close()


def live(control: int, life: Callable[[Frames], None]) -> NoReturn:
    """Live with the front at the other end of the ``control`` socket, and tell it of an exception that ends that."""
    frames = Frames(socket.socket(fileno=control))
    code = 0
    try:
        life(frames)
    except BaseException as error:
        code = 1
        trace = traceback.format_exc()
        print(trace, file=sys.stderr)
        text = str(error) or ("out of memory" if isinstance(error, MemoryError) else "")
        frames.send(pack(Kind.FAILED, Failed(type(error).__name__, text, trace)))
    sys.stderr.flush()
    os._exit(code)  # nothing is left to save, and destructors of a broken process group may wait for dead peers


if __name__ == "__main__":
    from shardwise.runtime.member import ModelMember  # torch and all that ranks need, imported once for all of them

    main(ModelMember)
