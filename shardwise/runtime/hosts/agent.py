"""A host's agent: forks processes for the front on another host, carries their bytes, and ends with them.

It is the process that torchrun calls LOCAL_RANK 0 there. Knows no steps and no models. The host's other processes of
the world compute nothing and end at once with 0, which torchrun takes for done: ranks are forked from the agent's
weights, and are not torchrun's to watch.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from time import monotonic, sleep

import msgspec

from shardwise import __version__
from shardwise.parallel.seal import Sealed, join_address, knock, read_secret
from shardwise.runtime.hosts.link import (
    PURPOSE,
    Bye,
    Data,
    Ended,
    Fork,
    Hello,
    Kill,
    Link,
    Message,
    Met,
    Refuse,
    Stopped,
)
from shardwise.runtime.hosts.store import GONE, store_command
from shardwise.runtime.processes import COMMAND
from shardwise.runtime.spawn import ForkServer, Process, environment
from shardwise.world import World

LOOK = 0.5
"""Seconds between looks at processes that are stopped, and at a front that isn't there."""
PIECE = 1 << 18


class Agent:
    """Serves one connection to the front, from its building until ``done``; ``close`` then leaves no process."""

    def __init__(self, sealed: Sealed, command: Sequence[str] = COMMAND) -> None:
        self.done = threading.Event()
        self.why = ""
        self.status: int | None = None
        """What to exit with when the front goes, if it has said."""
        self._forks = ForkServer(command)
        self._processes: dict[int, Process] = {}
        self._inboxes: dict[int, SimpleQueue[bytes | None]] = {}
        """What is on its way to each process; None is the end."""
        self._meetings: dict[int, tuple[ExitStack, int]] = {}
        self._sleepers: list[int] = []
        self._lock = threading.Lock()
        self._link = Link(sealed, self._heed, self._lost)

    def run(self) -> None:
        """Until the front is done, or lost, or nothing can be forked here any more."""
        while not self.done.wait(LOOK):
            with self._lock:
                everyone = list(self._processes.items())
            sleepers = [number for number, process in everyone if process.stopped()]
            if sleepers != self._sleepers:
                self._sleepers = sleepers
                self._link.tell(Stopped(sleepers))
            if not self._forks.alive:
                self.why = "the fork server has ended"
                return

    def close(self) -> None:
        """End everything; harmless when repeated."""
        self._link.close()
        with self._lock:
            processes, self._processes = list(self._processes.values()), {}
            meetings, self._meetings = list(self._meetings.values()), {}
        for process in processes:
            process.kill()
        self._forks.close()
        for stack, _ in meetings:
            stack.close()

    def _lost(self, link: Link, why: str) -> None:
        self.why = self.why or why
        self.done.set()

    def _heed(self, message: Message) -> None:
        if isinstance(message, Fork):
            self.status = None
            self._fork(message)
        elif isinstance(message, Data):
            inbox = self._inboxes.get(message.number)
            if inbox is not None:
                inbox.put(message.data)
        elif isinstance(message, Kill):
            process = self._processes.get(message.number)
            if process is not None:
                process.kill()
        elif isinstance(message, Met):
            with self._lock:
                meeting = self._meetings.pop(message.meeting, None)
            if meeting is not None:
                meeting[0].close()
        elif isinstance(message, Bye):
            self.status = 0
        elif isinstance(message, Refuse):
            self.status, self.why = 2, message.why
            self.done.set()

    def _fork(self, order: Fork) -> None:
        holder = self._processes.get(order.holder)
        try:
            if order.holder and holder is None:
                raise ProcessLookupError("the holder of its weights is gone")
            with self._lock:
                if order.meeting not in self._meetings:
                    stack = ExitStack()
                    self._meetings[order.meeting] = stack, stack.enter_context(self._forks.meeting())
                meeting = self._meetings[order.meeting][1]
            process = self._forks.fork(order.rank, order.threads, meeting, holder)
        except OSError as error:
            self._link.tell(Ended(order.number, 1, str(error).encode()))
            return
        process.frames.connection.setblocking(True)
        inbox: SimpleQueue[bytes | None] = SimpleQueue()
        with self._lock:
            self._processes[order.number], self._inboxes[order.number] = process, inbox
        threading.Thread(target=self._feed, args=(process, inbox), name="from front", daemon=True).start()
        threading.Thread(target=self._carry, args=(order.number, process), name="to front", daemon=True).start()

    def _feed(self, process: Process, inbox: SimpleQueue[bytes | None]) -> None:
        """What the front writes to a process, which may take its time, or hang until it is killed."""
        with suppress(OSError):
            while (data := inbox.get()) is not None:
                process.frames.connection.sendall(data)

    def _carry(self, number: int, process: Process) -> None:
        """What a process writes, to the front; and then how it ended."""
        with suppress(OSError):
            while data := process.frames.connection.recv(PIECE):
                self._link.tell(Data(number, data))
        process.kill()  # whoever has closed its end is of no use any more
        process.gone.wait()
        process.epitaph()  # waits for its last lines
        with self._lock:
            self._processes.pop(number, None)
            self._inboxes.pop(number).put(None)
        with suppress(OSError):
            process.frames.connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that writes to it
        process.bury(0.0)
        self._link.tell(Ended(number, process.status or 0, process.output.tail))


def attend(world: World, command: Sequence[str] = COMMAND) -> int:
    """Lend this host to the front until it is done; what to exit with. ``command`` is the fork server's.

    5: the front can't be found, or has gone. Raises ValueError for a missing or a wrong secret, and for a host that
    doesn't fit.
    """
    if world.local_rank or not world.host:
        return 0
    secret = read_secret(os.environ)
    finder, tried = Finder(world), ""
    try:
        while (address := finder.address()) is not None:
            try:
                sealed = knock(address, secret, PURPOSE)
            except PermissionError as error:
                raise ValueError(f"the front does not know us: {error}") from None
            except OSError as error:
                if address != tried:
                    print(f"shardwise: host {world.host}: nobody at {address} yet ({error})", file=sys.stderr)
                tried = address
                finder.missed()
                continue
            sealed.send(msgspec.msgpack.encode(Hello(world.host, socket.gethostname(), world.local_size, __version__)))
            agent = Agent(sealed, command)
            try:
                agent.run()
            finally:
                agent.close()
            if agent.status == 2:
                raise ValueError(agent.why)
            if agent.status is not None:
                return agent.status
            print(f"shardwise: host {world.host}: the front is lost ({agent.why}); looking for it", file=sys.stderr)
            finder.missed()
    finally:
        finder.close()
    print(f"shardwise: host {world.host}: the front can't be found: {finder.why}", file=sys.stderr)
    return 5


class Finder:
    """Where the front is, as torchrun's store says; or at the master's port, where torchrun keeps no store there."""

    def __init__(self, world: World) -> None:
        self.why = f"nobody answers at {world.master} port {world.port}"
        self._found = threading.Event()
        self._address: str | None = None
        self._since: float | None = None
        self._watch: subprocess.Popen[bytes] | None = None
        if not world.store:
            self._address = join_address(world.master, world.port)
            self._found.set()
            return
        self._watch = subprocess.Popen(
            store_command(world),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
        )
        threading.Thread(target=self._read, name="store", daemon=True).start()

    def address(self) -> str | None:
        """The front's, when it is known; None when it can't be found any more."""
        self._found.wait()
        if self._watch is None and self._since is not None and monotonic() - self._since > GONE:
            return None
        return self._address

    def missed(self) -> None:
        """It wasn't there: wait a moment."""
        now = monotonic()
        if self._since is None or now - self._since > 2 * GONE:  # it has been there meanwhile
            self._since = now
        sleep(LOOK)

    def close(self) -> None:
        """Look no more."""
        if self._watch is not None:
            self._watch.kill()
            self._watch.wait()

    def _read(self) -> None:
        assert self._watch is not None
        assert self._watch.stdout is not None
        assert self._watch.stderr is not None
        for line in self._watch.stdout:
            self._address = line.decode().strip()
            self._found.set()
        self.why = self._watch.stderr.read().decode(errors="replace").strip()[-400:]
        self._address = None
        self._found.set()
