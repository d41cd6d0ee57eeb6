"""The other hosts as the front sees them: each is a fork server at the far end of a connection, which may come later.

What an executor asks of a host that isn't there waits for it; when a host is lost all of its processes are. Knows
processes and their bytes; nothing of steps.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from signal import SIGKILL

import msgspec

from shardwise import __version__
from shardwise.parallel.seal import Door, Sealed, is_loopback, own_address, read_secret
from shardwise.runtime.forks import Forks
from shardwise.runtime.frames import Frames
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
from shardwise.runtime.hosts.store import store_command
from shardwise.runtime.spawn import Output, Process, Source, environment
from shardwise.world import World

PIECE = 1 << 20
LOOK = 60.0
"""Seconds between looks whether the door is still open, which wakes us when it closes."""
POLITE = 2.0
"""Seconds for the last word to leave."""


class Distant(Process):
    """A process on another host."""

    def __init__(self, number: int, rank: int, host: Host) -> None:
        ours, self.relay = socket.socketpair()
        ours.setblocking(False)
        super().__init__(rank, Frames(ours), Output(-1), Source(self.relay))
        self.pid = self.number = number  # no number of this host's: it is never to be signalled
        self.host = host
        self.lost = ""
        self.sleeps = False

    @property
    def where(self) -> str:
        """See `Process`."""
        return self.host.where

    def kill(self) -> None:
        """See `Process`."""
        self.host.kill(self)

    def stopped(self) -> bool:
        """See `Process`."""
        return self.sleeps

    def epitaph(self) -> tuple[str, str]:
        """See `Process`."""
        cause, lines = super().epitaph()
        return (f"the host is lost: {self.lost}" if self.lost else cause), lines

    def gone_for(self, status: int, last: bytes = b"", lost: str = "") -> None:
        """It is gone."""
        self.lost = lost
        self.output.tail = last
        self.output.silent.set()
        with suppress(OSError):
            self.relay.shutdown(socket.SHUT_RDWR)  # wakes who reads from it, and closes it
        self.ended(status)


class Host:
    """One of the other hosts. It is there while an agent's connection is."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = ""
        self.lost = "it has never been here"
        self._link: Link | None = None
        self._waiting: list[Message] = []
        """For an agent that isn't there."""
        self._processes: dict[int, Distant] = {}
        self._numbers, self._meetings = count(1), count(1)
        self._lock = threading.RLock()

    @property
    def where(self) -> str:
        """Its number and name."""
        return f"host {self.number}" + (f" ({self.name})" if self.name else "")

    @property
    def absent(self) -> bool:
        """Is no agent there?"""
        return self._link is None

    def join(self, sealed: Sealed, name: str) -> None:
        """Its agent has come. One that was there before is as good as lost."""
        with self._lock:
            former = self._link
            self._link = None
        if former is not None:
            former.close()
            self._lose("another agent has come in its place")
        with self._lock:
            self.name = name
            self._link = Link(sealed, self._heed, self._lost)
            for message in self._waiting:
                self._link.tell(message)
            self._waiting.clear()

    def rest(self) -> None:
        """Tell its agent that all is done, unless more comes."""
        with self._lock:
            link = self._link
            self._waiting.clear()
        if link is not None:
            link.tell(Bye())
            link.flush(POLITE)

    def close(self) -> None:
        """Let go of its agent."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def fork(self, rank: int, threads: int, meeting: int, holder: Process | None = None) -> Process:
        """See `Forks`."""
        with self._lock:
            process = Distant(next(self._numbers), rank, self)
            self._processes[process.number] = process
            source = holder.number if isinstance(holder, Distant) else 0
            self._tell(Fork(process.number, rank, threads, meeting, source))
        threading.Thread(target=self._carry, args=(process,), name=f"to {self.where}", daemon=True).start()
        return process

    @contextmanager
    def meeting(self) -> Iterator[int]:
        """See `Forks`."""
        number = next(self._meetings)
        try:
            yield number
        finally:
            self._tell(Met(number))

    def kill(self, process: Distant) -> None:
        """Have it killed, or forget it where it has not been forked yet."""
        with self._lock:
            if self._link is not None and process.status is None:
                self._link.tell(Kill(process.number))
                return
            self._waiting = [each for each in self._waiting if getattr(each, "number", 0) != process.number]
            known = self._processes.pop(process.number, None)
        if known is not None:
            known.gone_for(-SIGKILL)

    def _tell(self, message: Message) -> None:
        with self._lock:
            if self._link is not None:
                self._link.tell(message)
            else:
                self._waiting.append(message)

    def _carry(self, process: Distant) -> None:
        """What the front writes to a process, to its host; when the front lets go of it, so does the host."""
        with suppress(OSError):
            while data := process.relay.recv(PIECE):
                self._tell(Data(process.number, data))
        process.relay.close()
        if process.status is None:
            self.kill(process)

    def _heed(self, message: Message) -> None:
        with self._lock:
            number = getattr(message, "number", 0)
            process = self._processes.get(number)
            if isinstance(message, Ended):
                self._processes.pop(number, None)
            elif isinstance(message, Stopped):
                for each in self._processes.values():
                    each.sleeps = each.number in message.numbers
        if process is not None:
            if isinstance(message, Data):
                with suppress(OSError):
                    process.relay.sendall(message.data)
            elif isinstance(message, Ended):
                process.gone_for(message.status, message.last)

    def _lost(self, link: Link, why: str) -> None:
        with self._lock:
            if self._link is not link:
                return
            self._link = None
        self._lose(why)

    def _lose(self, why: str) -> None:
        with self._lock:
            self.lost = why
            lost, self._processes = self._processes, {}
            self._waiting.clear()
        for process in lost.values():
            process.gone_for(-SIGKILL, lost=why)


class Lease:
    """A host as one executor has it; see `Forks`."""

    def __init__(self, host: Host, door: Door, give_back: Callable[[], None]) -> None:
        self.alive = True
        self.fork, self.meeting = host.fork, host.meeting
        self._host, self._door = host, door
        self._give_back: Callable[[], None] | None = give_back

    @property
    def absent(self) -> str:
        """See `Forks`."""
        if not self._host.absent:
            return ""
        refused = f"; {self._door.refused} came without the right secret" if self._door.refused else ""
        return f"{self._host.where} is missing ({self._host.lost}{refused})"

    def close(self) -> None:
        """See `Forks`."""
        self.alive = False
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Hosts:
    """All the other hosts of a ``world``: lets their agents in, and tells them with the last lease that all is done.

    They stay for more until this process ends: torchrun has started them once.

    Raises ValueError for a missing secret, or an address that isn't ours, or that others can't reach.
    """

    def __init__(self, world: World) -> None:
        secret = read_secret(os.environ)
        self.world = world
        self.address = own_address(world.master)
        if is_loopback(self.address) and not is_loopback(world.master):
            raise ValueError(
                f"the way to {world.master}, the first host, is {self.address} here, where no other host can come: "
                "give torchrun --master-addr or --local-addr its address in their network, or set GLOO_SOCKET_IFNAME "
                "to its interface there"
            )
        self._hosts = [Host(number) for number in range(1, world.hosts)]
        self._users = 0
        self._closed = False
        self._lock = threading.Lock()
        try:
            self._door = Door(self.address, secret, PURPOSE, 0 if world.store else world.port)
        except OSError as error:
            raise ValueError(f"can't listen on {self.address} for the other hosts: {error}") from None
        threading.Thread(target=self._welcome, name="hosts", daemon=True).start()
        if world.store:
            threading.Thread(target=self._publish, name="hosts: address", daemon=True).start()

    def lease(self, number: int) -> Forks:
        """One of the hosts, for an executor."""
        self.enter()
        return Lease(self._hosts[number - 1], self._door, self.leave)

    def enter(self) -> None:
        """Be a user until ``leave``."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """One user less; with the last one all is done, unless more comes."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        for host in self._hosts:
            host.rest()

    def close(self) -> None:
        """Let go of all agents, as the end of this process does."""
        self._closed = True
        self._door.close()
        for host in self._hosts:
            host.close()

    def _welcome(self) -> None:
        hello = msgspec.msgpack.Decoder(Hello)
        while not self._closed:
            sealed = self._door.take(LOOK)
            if sealed is None:
                continue
            try:
                sealed.connection.settimeout(POLITE)
                said = hello.decode(sealed.receive())
                why = self._misfit(said)
                if why:
                    sealed.send(msgspec.msgpack.encode(Refuse(why)))
                    sealed.close()
                else:
                    self._hosts[said.host - 1].join(sealed, said.name)
            except (OSError, msgspec.MsgspecError):
                sealed.close()

    def _misfit(self, hello: Hello) -> str:
        if hello.version != __version__:
            return f"{hello.name} has shardwise {hello.version}, and the first host {__version__}: install the same"
        if not 1 <= hello.host < self.world.hosts or hello.processes != self.world.local_size:
            return (
                f"{hello.name} is host {hello.host} with {hello.processes} processes, and there are hosts 0 to "
                f"{self.world.hosts - 1} of {self.world.local_size}: give each torchrun the same --nnodes and "
                "--nproc-per-node, and its own --node-rank"
            )
        return ""

    def _publish(self) -> None:
        done = subprocess.run(
            [*store_command(self.world), self._door.address],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
        )
        if done.returncode:
            print(f"shardwise: {done.stderr.decode(errors='replace').strip()[-400:]}", file=sys.stderr)
