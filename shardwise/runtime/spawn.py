"""Rank processes: forked, listened to, killed and reaped. Knows descriptors and signals; nothing of steps or models.

Nothing of a rank can outlast the front process: the kernel kills it with its parent, its control socket is a pair
without a name, and the memory that ranks share is a file without one.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import msgspec

from shardwise.runtime.frames import Frames, Kind, WorkerSpec, pack

DEBUG = "SHARDWISE_DEBUG"
"""Environment variable: when set, what ranks write to stderr is passed on."""
LAST_WORDS = 0.05
"""Seconds for what a dead rank wrote to arrive."""
TAIL = 4096
"""Bytes kept of a rank's stderr."""


@dataclass
class Process:
    """A rank as the front sees it."""

    popen: subprocess.Popen[bytes]
    frames: Frames
    stderr: int
    pidfd: int
    tail: bytes = b""
    silent: threading.Event = field(default_factory=threading.Event)
    ready: bool = False
    stopped_since: float | None = None
    buried: bool = False

    def bury(self) -> None:
        """Reap the killed process and let go of it; harmless when repeated."""
        self.popen.wait()
        if not self.buried:
            self.buried = True
            self.frames.connection.close()
            if self.pidfd >= 0:
                os.close(self.pidfd)

    def stopped(self) -> bool:
        """Whether the kernel says, where it can be asked, that the process is stopped."""
        try:
            return Path(f"/proc/{self.popen.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"Tt"
        except OSError:
            return False

    def epitaph(self) -> tuple[str, str]:
        """How the process ended, in words, and its last lines."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(LAST_WORDS)
        code = self.popen.returncode
        if code is None:
            cause = "closed its connection"
        elif code >= 0:
            cause = f"exited with code {code}"
        else:
            cause = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                cause += ", probably because memory ran out (the kernel's log, dmesg, tells)"
        self.silent.wait(LAST_WORDS)
        lines = self.tail.decode(errors="replace").strip().splitlines()[-12:]
        return cause, "\n".join(lines)


class Keeper(threading.Thread):
    """Forks the ranks, then reads their stderr to its end.

    The kernel's parent-death signal follows the thread that forked, not the process: were a rank forked by a thread of
    some pool, it would be killed when the pool lets go of the thread. This one ends after its ranks.
    """

    def __init__(self, command: Sequence[str], specs: Sequence[WorkerSpec]) -> None:
        super().__init__(name="keeper of ranks", daemon=True)
        self.processes: list[Process] = []
        self.begun = threading.Event()
        self.cancelled = False
        self._error: Exception | None = None
        self._command, self._specs = command, specs

    def fork(self) -> None:
        """Start every rank. Raises OSError when the system can't; those that run already wait for `end`."""
        self.start()
        self.begun.wait()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """What the thread does; see `fork`."""
        try:
            self._fork()
        except Exception as error:
            self._error = error
        self.begun.set()
        with selectors.DefaultSelector() as selector:
            for process in self.processes:
                selector.register(process.stderr, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    self._hear(key.data, selector)

    def _fork(self) -> None:
        shared = _anonymous_file()
        try:
            for spec in self._specs:
                if self.cancelled:
                    return
                self.processes.append(_spawn(self._command, spec.threads, shared))
                start = msgspec.structs.replace(spec, shared=shared)
                self.processes[-1].frames.send(pack(Kind.START, start))
        finally:
            os.close(shared)

    def _hear(self, process: Process, selector: selectors.BaseSelector) -> None:
        data = os.read(process.stderr, 1 << 16)
        process.tail = (process.tail + data)[-TAIL:]
        if not data:
            selector.unregister(process.stderr)
            os.close(process.stderr)
            process.silent.set()
        elif os.environ.get(DEBUG):
            os.write(2, data)


def end(keeper: Keeper, grace: float) -> None:
    """End every rank, by itself within ``grace`` seconds or else by SIGKILL; harmless when repeated."""
    keeper.cancelled = True
    if keeper.ident is not None:
        keeper.begun.wait()
    deadline = monotonic() + grace
    if grace:
        for process in keeper.processes:
            if not process.buried:
                process.frames.send(pack(Kind.QUIT))
        for process in keeper.processes:
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, deadline - monotonic()))
    for process in keeper.processes:
        process.popen.kill()  # all of them before the first is waited for
    for process in keeper.processes:
        process.bury()
    if keeper.ident is not None and threading.current_thread() is not keeper:
        keeper.join(1.0)


def _spawn(command: Sequence[str], threads: int, shared: int) -> Process:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    try:
        popen = subprocess.Popen(
            [*command, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            pass_fds=(theirs.fileno(), shared),
            env=_environment(threads),
            start_new_session=True,  # a terminal's Ctrl-C and Ctrl-Z are for the front
        )
    except BaseException:
        ours.close()
        os.close(read)
        raise
    finally:
        theirs.close()
        os.close(write)
    ours.setblocking(False)
    pidfd = -1  # where there is none, the end of the control socket tells of a death
    if sys.platform == "linux":
        with suppress(OSError):
            pidfd = os.pidfd_open(popen.pid)
    return Process(popen, Frames(ours), read, pidfd)


def _environment(threads: int) -> dict[str, str]:
    """The front's, with this many threads for whatever counts its own, and the very import path of the front."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    pools = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return {**os.environ, **pools, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def _anonymous_file() -> int:
    """A descriptor of an empty file that has no name and goes with its last user."""
    if sys.platform == "linux":
        return os.memfd_create("shardwise")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
