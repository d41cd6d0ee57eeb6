"""How agents find the front: it leaves its address in the store that torchrun keeps for its workers.

Run in a process of its own, since it takes torch, and since a client of that store may hang when the network does. The
store is open to whoever reaches it: what is found there is believed only after a proof.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic, sleep

from shardwise.runtime.forkserver import die_with
from shardwise.world import World

LOOK = 0.5
"""Seconds between looks."""
GONE, REFUSED = 60.0, 10.0
"""Seconds after which a store that can't be reached is gone, and with it the front; and one whose port is closed."""
CALL = timedelta(seconds=10)


def store_command(world: World) -> Sequence[str]:
    """The command line of this module, to which an address may be added."""
    where = [str(os.getpid()), world.master, str(world.port), f"shardwise/{world.run}/front"]
    return [sys.executable, "-m", "shardwise.runtime.hosts.store", *where]


def main(parent: int, host: str, port: int, key: str, address: str | None) -> None:
    """Set the key to the ``address``; without one, print a line for each value that it takes until the store goes."""
    die_with(parent)
    from torch.distributed import DistError
    from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

    last, reached = b"", monotonic()
    store: TCPStore | None = None
    while True:
        try:
            if store is None:
                store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CALL)
            if address is not None:
                store.set(key, address)
                return
            if store.check([key]) and (value := store.get(key)) != last:
                last = value
                print(value.decode(), flush=True)
            reached = monotonic()
        except (DistError, RuntimeError) as error:
            store = None
            if monotonic() - reached > (REFUSED if _refuses(host, port) else GONE):
                sys.exit(f"torchrun's store at {host}:{port} can't be reached ({str(error).splitlines()[0]})")
        sleep(LOOK)


def _refuses(host: str, port: int) -> bool:
    """Is the host there, and nothing at the port? (A cable that is out is something else.)"""
    try:
        socket.create_connection((host, port), timeout=LOOK).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


if __name__ == "__main__":
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # its complaints of a lost store are ours to tell
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5] if len(sys.argv) > 5 else None)
