"""Two hosts on one machine: network namespaces with a cable between them, and torchrun in each."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import psutil
import pytest

CLONE_NEWNET = 0x40000000
SECRET = "0123456789abcdef" * 3
MASTER_PORT = 29500
Result = TypeVar("Result")


class Host:
    """A namespace with one interface beside loopback."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.address = f"10.77.0.{number + 1}"
        self.interface = f"{name}e"
        self.static = (f"--node-rank={number}", "--master-addr=10.77.0.1", f"--master-port={MASTER_PORT}")
        self.started: list[subprocess.Popen[bytes]] = []

    def inside(self, act: Callable[[], Result]) -> Result:
        """Call ``act`` in a thread of the namespace; a socket that it makes stays there."""
        found: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with open(f"/run/netns/{self.name}") as there:
                    if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                found.append(act())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return found[0]

    def torchrun(self, *command: str, output: Path, flags: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """``torchrun … -m shardwise COMMAND`` on this host, all it says into a file."""
        flags = flags or self.static
        line = [
            *("ip", "netns", "exec", self.name),
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *flags),
            *("-m", "shardwise", *command),
        ]
        env = {**os.environ, "SHARDWISE_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
        with output.open("ab") as file, Path(f"{output}.err").open("ab") as errors:
            self.started.append(subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=file, stderr=errors, env=env))
        return self.started[-1]

    def processes(self) -> list[psutil.Process]:
        """All that run here."""
        told = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True).stdout
        found = []
        for pid in told.split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def ranks(self) -> list[psutil.Process]:
        """Those that were forked from a holder of weights, which was forked from a fork server."""
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                line = [each for each in (process, *process.parents()) if "shardwise.runtime.worker" in each.cmdline()]
                if len(line) == 3:
                    found.append(process)
        return found

    def agent(self) -> psutil.Process:
        """The parent of the fork server."""
        return next(process for process in self.ranks()[0].parents() if "shardwise" in process.cmdline())

    def plug(self, there: bool) -> None:
        """Put the cable in, or pull it."""
        ip("-n", self.name, "link", "set", self.interface, "up" if there else "down")

    def kill(self) -> None:
        """Cut the power."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def listeners(self) -> set[str]:
        """Addresses on which processes of ours listen here; torchrun's own store is not ours."""
        found = set()
        for process in self.processes():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, OSError):
                if "torch.distributed.run" in process.cmdline():
                    continue
                sockets = {os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()}
                for table in ("tcp", "tcp6"):
                    for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
                        fields = line.split()
                        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                            found.add(fields[1].partition(":")[0])
        return found


def until(true: Callable[[], bool], seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """10.77.0.1 and 10.77.0.2. Skips where this user may not make them; afterwards nothing of them is left."""
    mark = uuid4().hex[:8]
    hosts = Host(f"sw{mark}a", 0), Host(f"sw{mark}b", 1)
    if shutil.which("ip") is None:
        pytest.skip("two hosts need the command ip, of iproute2")
    made = []
    try:
        try:
            for host in hosts:
                ip("netns", "add", host.name)
                made.append(host)
            first, second = hosts
            cable = ["link", "add", first.interface, "netns", first.name, "type", "veth"]
            ip(*cable, "peer", "name", second.interface, "netns", second.name)
            for host in hosts:
                ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
                for interface in ("lo", host.interface):
                    ip("-n", host.name, "link", "set", interface, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"two hosts need network namespaces, and root to make them: {error.stderr.decode().strip()}")
        yield hosts
        for host in hosts:
            assert until(lambda host=host: not host.processes(), 30.0), f"{host.name}: {host.processes()}"  # type: ignore[misc]
    finally:
        for host in made:
            host.kill()
            for process in host.started:
                process.wait(30.0)
            ip("netns", "del", host.name)
