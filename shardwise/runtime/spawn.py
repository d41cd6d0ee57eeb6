"""Processes of ranks as the front sees them: forked, listened to, killed. Knows no steps and no models.

Nothing of a rank can outlast the front process: the kernel kills each process with the one that forked it (the fork
server, then a holder of weights, then the rank), sockets are pairs without names, and the memory that ranks share is a
file without one.
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
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from shardwise.runtime.forkserver import MESSAGE, THREADS, Word
from shardwise.runtime.frames import Frames, Kind, pack

DEBUG = "SHARDWISE_DEBUG"
"""Environment variable: when set, what ranks write to stderr is passed on."""
LAST_WORDS = 0.05
"""Seconds for what a dead rank wrote to arrive."""
DEATH = 0.5
"""Seconds for how it died to arrive, on a busy machine."""
BURIAL = 5.0
"""Seconds for a killed process to be gone; it takes that long only where it hangs in the kernel."""
TAIL = 4096
"""Bytes kept of a rank's stderr."""


@dataclass(eq=False)
class Output:
    """What a process prints: the pipe's reading end, and the last of it."""

    fd: int
    tail: bytes = b""
    silent: threading.Event = field(default_factory=threading.Event)
    """Set when no more will come."""


class Source:
    """A process that forks others: the socket on which it is asked, who was asked for, and who came."""

    def __init__(self, socket: socket.socket) -> None:
        self.socket = socket
        self.asked: deque[Process] = deque()
        self.forked: dict[int, Process] = {}


class Process:
    """A rank, or the holder of its weights, as the front sees it. ``source`` is what may be forked from it."""

    def __init__(self, rank: int, frames: Frames, output: Output, source: Source) -> None:
        self.rank = rank
        self.frames = frames
        self.output = output
        self.source = source
        self.pid: int | None = None
        """None until it is forked."""
        self.status: int | None = None
        """Exit code, or minus the signal, once it is gone."""
        self.gone = threading.Event()
        self.ready = False
        self.stopped_since: float | None = None
        """Since when it has been found stopped at each look; see `overslept`."""
        self._pidfd = -1
        self.buried = False
        self._lock = threading.Lock()

    @property
    def where(self) -> str:
        """Its host, where that is another one than the front's."""
        return ""

    def forked(self, pid: int, pidfd: int) -> None:
        """It lives, as ``pid``."""
        with self._lock:
            self.pid, self._pidfd = pid, pidfd
            unwanted = self.buried
        if unwanted:
            self.kill()
            self.bury(0.0)

    def ended(self, status: int) -> None:
        """It is gone; whoever reads its frames finds their end."""
        self.status = status
        self.gone.set()
        with suppress(OSError):
            self.frames.connection.shutdown(socket.SHUT_RD)

    def kill(self) -> None:
        """Kill it, whatever it does."""
        with self._lock, suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            elif self.pid is not None and self.status is None:
                os.kill(self.pid, signal.SIGKILL)

    def bury(self, patience: float) -> None:
        """Wait for the end of the killed process, up to so many seconds, and let go of it; harmless when repeated."""
        if self.pid is not None:
            self.gone.wait(patience)
        with self._lock:
            self.buried = True
            self.frames.connection.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._pidfd = -1

    def stopped(self) -> bool:
        """Whether the kernel says, where it can be asked, that the process is stopped."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"Tt"
        except OSError:
            return False

    def overslept(self, seconds: float) -> bool:
        """Was it stopped at every look for longer than that? (A short stop, by a debugger, is no fault.)"""
        if not self.stopped():
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = monotonic()
        return self.stopped_since is not None and monotonic() - self.stopped_since > seconds

    def epitaph(self) -> tuple[str, str]:
        """How the process ended, in words, and its last lines."""
        self.gone.wait(DEATH)
        code = self.status
        if code is None:
            cause = "closed its connection"
        elif code >= 0:
            cause = f"exited with code {code}"
        else:
            cause = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                cause += ", probably because memory ran out (the kernel's log, dmesg, tells)"
        self.output.silent.wait(LAST_WORDS)
        lines = self.output.tail.decode(errors="replace").strip().splitlines()[-24:]
        return cause, "\n".join(lines)


class ForkServer(threading.Thread):
    """Starts a fork server, asks it for ranks, hears from it of their ends, and reads what they print.

    The kernel's parent-death signal follows the thread that forked, not the process: were the server started by a
    thread of some pool, it would be killed when the pool lets go of the thread. This one ends after it.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Start it. Raises OSError where the system can't."""
        super().__init__(name="fork server", daemon=True)
        self.alive = True
        self._command = command
        self._begun = threading.Event()
        self._error: OSError | None = None
        ours, self._theirs = socket.socketpair()
        self._source = Source(ours)
        self._server: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.start()
        self._begun.wait()
        if self._error is not None:
            self.join()
            raise self._error

    def close(self) -> None:
        """End the server, and with it what is left of its ranks; harmless when repeated."""
        if self._server is not None:
            self._server.kill()
        if threading.current_thread() is not self:
            self.join(BURIAL)

    @property
    def absent(self) -> str:
        """See `forks.Forks`."""
        return ""

    @contextmanager
    def meeting(self) -> Iterator[int]:
        """A descriptor of an empty file that has no name and goes with its last user."""
        if sys.platform == "linux":
            fd = os.memfd_create("shardwise")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        try:
            yield fd
        finally:
            os.close(fd)

    def fork(self, rank: int, threads: int, meeting: int, holder: Process | None = None) -> Process:
        """Ask the fork server, or the ``holder``, for a process that is handed the file ``meeting``.

        ``rank`` is whose it is, ``threads`` how many it may use. Raises OSError if there is nobody to ask.
        """
        ours, theirs = socket.socketpair()
        asking, asked = socket.socketpair()
        read, write = os.pipe()
        ours.setblocking(False)
        process = Process(rank, Frames(ours), Output(read), Source(asking))
        source = holder.source if holder is not None else self._source
        try:
            with self._lock:
                if not self.alive:
                    raise BrokenPipeError("the fork server has ended")
                fds = [theirs.fileno(), meeting, write, asked.fileno()]
                source.asked.append(process)
                socket.send_fds(source.socket, [MESSAGE.pack(Word.FORK, threads, 0)], fds)
        except OSError:
            with suppress(ValueError):
                source.asked.remove(process)
            ours.close()
            asking.close()
            os.close(read)
            raise
        finally:
            theirs.close()
            asked.close()
            os.close(write)
        return process

    def run(self) -> None:
        """What the thread does."""
        read, write = os.pipe()
        own = Output(read)
        try:
            self._server = subprocess.Popen(
                [*self._command, str(self._theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                pass_fds=(self._theirs.fileno(),),
                env=environment(),
                start_new_session=True,  # a terminal's Ctrl-C and Ctrl-Z are for the front
            )
        except OSError as error:
            self._error = error
        self._theirs.close()
        os.close(write)
        self._begun.set()
        with selectors.DefaultSelector() as selector:
            selector.register(self._source.socket, selectors.EVENT_READ, self._source)
            selector.register(read, selectors.EVENT_READ, own)
            while selector.get_map():
                for key, _ in selector.select():
                    if isinstance(key.data, Output):
                        _hear(key.data, selector)
                    elif not self._heed(key.data, selector):
                        selector.unregister(key.data.socket)
                        self._bereave(key.data, own)

    def _heed(self, source: Source, selector: selectors.BaseSelector) -> bool:
        """Take one message of a process that forks; False at its end."""
        try:
            data, fds, _, _ = socket.recv_fds(source.socket, MESSAGE.size, 1)
        except OSError:
            return False
        if not data:
            return False
        word, number, status = MESSAGE.unpack(data)
        if word == Word.EXITED:
            source.forked.pop(number).ended(status)
            return True
        process = source.asked.popleft()
        selector.register(process.output.fd, selectors.EVENT_READ, process.output)
        if word == Word.FORKED:
            source.forked[number] = process
            selector.register(process.source.socket, selectors.EVENT_READ, process.source)
            process.forked(number, *(fds or [-1]))
        else:
            process.output.tail = f"no process can be made: {os.strerror(number)}".encode()
            process.source.socket.close()
            process.ended(1)
        return True

    def _bereave(self, source: Source, own: Output) -> None:
        """A process that forks is gone, and with it those that it has forked; for a rank, which never does, nothing."""
        status = -signal.SIGKILL
        if source is self._source:
            with self._lock:
                self.alive = False
            status = self._server.wait() if self._server is not None else 1
            own.silent.wait(LAST_WORDS)
        source.socket.close()
        for process in source.forked.values():
            process.ended(-signal.SIGKILL)
        while source.asked:
            process = source.asked.popleft()
            process.output.tail = own.tail
            process.output.silent.set()
            os.close(process.output.fd)
            process.source.socket.close()
            process.ended(status)


def end(processes: Sequence[Process], grace: float) -> None:
    """End every rank, by itself within ``grace`` seconds or else by SIGKILL; harmless when repeated."""
    deadline = monotonic() + grace
    if grace:
        for process in processes:
            if not process.buried:
                process.frames.send(pack(Kind.QUIT))
        for process in processes:
            if process.pid is not None:
                process.gone.wait(max(0.0, deadline - monotonic()))
    for process in processes:
        process.kill()  # all of them before the first is waited for
    for process in processes:
        process.bury(BURIAL)


def _hear(output: Output, selector: selectors.BaseSelector) -> None:
    data = os.read(output.fd, 1 << 16)
    output.tail = (output.tail + data)[-TAIL:]
    if not data:
        selector.unregister(output.fd)
        os.close(output.fd)
        output.silent.set()
    elif os.environ.get(DEBUG):
        os.write(2, data)


def environment() -> dict[str, str]:
    """The front's, with the very import path of the front; a process that computes nothing needs one thread."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    pools = dict.fromkeys(THREADS, "1")
    return {**os.environ, **pools, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
