"""Processes that others are forked from: the fork server, which has imported all that ranks need, and the holders.

A holder is forked from the fork server, reads the weights of one rank, and the rank is forked from it: so it shares
them, and the next one has them at once when it dies. Both compute nothing and have a single thread, which is what makes
forking safe. Knows descriptors and pids; nothing of steps. See `spawn` for the other end.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import gc
import os
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import NoReturn

MESSAGE = struct.Struct("<iii")
"""What both ends write: a `Word` and its two numbers."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Environment variables for whatever counts its own threads."""
PR_SET_PDEATHSIG = 1


class Word(IntEnum):
    """FORK goes to the process that forks, with four descriptors; the others come from it."""

    FORK = 1
    """(threads, 0), and the new process's control socket, the replica's shared file, the pipe for what it prints, and
    the socket on which it may be asked for processes in turn."""
    FORKED = 2
    """(pid, 0), and a pidfd where there are such."""
    FAILED = 3
    """(errno, 0): no process could be made."""
    EXITED = 4
    """(pid, exit code, or minus the signal)."""


Work = Callable[[int, int, int], NoReturn]
"""What a forked process does with its control socket, the shared file, and the socket on which it may have to fork."""


def main(work: Work) -> None:
    """Be the fork server until the front goes; argv holds the socket's descriptor and the front's pid."""
    descriptor, front = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # how to end is the front's decision; it will tell, kill, or die
    die_with(front)
    faulthandler.enable()
    serve(descriptor, work)


def serve(descriptor: int, work: Work) -> None:
    """Fork processes on demand, until the other end of the socket goes."""
    server = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    read, write = os.pipe()
    for fd in (read, write):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()  # what is there stays; collections in the forked must not copy its pages
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        selector.register(read, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if read in ready:
                os.read(read, 1024)
                _reap(server)
            if server in ready:
                data, fds, _, _ = socket.recv_fds(server, MESSAGE.size, 4)
                if len(fds) < 4:
                    return
                _, threads, _ = MESSAGE.unpack(data)
                control, shared, output, forks = fds
                if _fork(server) == 0:
                    selector.close()
                    server.close()
                    _begin(threads, output, (read, write))
                    work(control, shared, forks)
                for fd in fds:
                    os.close(fd)


def _fork(server: socket.socket) -> int:
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        server.sendall(MESSAGE.pack(Word.FAILED, error.errno or errno.EAGAIN, 0))
        return -1
    if pid == 0:
        die_with(parent)
        return 0
    pidfds = []
    with suppress(OSError, AttributeError):
        pidfds.append(os.pidfd_open(pid))
    socket.send_fds(server, [MESSAGE.pack(Word.FORKED, pid, 0)], pidfds)
    for fd in pidfds:
        os.close(fd)
    return pid


def _begin(threads: int, output: int, wakers: tuple[int, int]) -> None:
    """What a rank sets right before it is anything of its own."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd in wakers:
        os.close(fd)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for name in THREADS:
        os.environ[name] = str(threads)


def _reap(server: socket.socket) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with suppress(BrokenPipeError, ConnectionResetError):
                server.sendall(MESSAGE.pack(Word.EXITED, pid, os.waitstatus_to_exitcode(status)))


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, where it can; elsewhere a socket's end tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)
