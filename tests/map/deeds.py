"""Factories without torch whose items do what they say; what they did is counted in files, since ranks come and go."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.mapping.config import Place

FACTORY = "tests.map.deeds:build"


def note(folder: str, name: str) -> int:
    """Count one more; how many there are now."""
    path = Path(folder) / name
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"!")
    os.close(fd)
    return path.stat().st_size


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def build(folder: str, place: Place, factor: int = 2, deed: str = "") -> Callable[..., Any]:
    if note(folder, f"built{place.rank}") > 1 and deed == "never again":
        raise RuntimeError("no memory left")
    do(deed, folder)

    def call(item: Any, index: int) -> Any:
        times = note(folder, f"item{index}")
        if isinstance(item, dict):
            if not item.get("once") or times == 1:
                do(item["do"], folder)
            return {**item, "done": 1}
        return [item * factor, place.rank, os.getpid()]

    return call


def do(deed: str, folder: str) -> None:
    if deed == "raise":
        raise RuntimeError("this can't be")
    if deed == "refuse":
        raise ValueError("--set deed: not like that")
    if deed == "leave":
        raise SystemExit(3)
    if deed == "abort":
        os.abort()
    elif deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "kill holder":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(30)
    elif deed == "kill server":
        os.kill(parent_of(os.getppid()), signal.SIGKILL)
        time.sleep(30)
    elif deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif deed == "hang":
        threading.Event().wait(30)
    elif deed == "nap":
        time.sleep(0.05)
    elif deed == "wait":
        deadline = time.monotonic() + 30
        while not (Path(folder) / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
    elif deed == "meet":
        deadline = time.monotonic() + 60
        met = note(folder, "met")
        while met < 3:
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {met} of 3 have come")
            time.sleep(0.005)
            met = (Path(folder) / "met").stat().st_size
    elif deed == "print":
        print("chatter " * 10_000)


def lists(folder: str) -> Callable[[list[Any], list[int]], list[Any]]:
    def call(items: list[Any], index: list[int]) -> Any:
        for each in index:
            note(folder, f"item{each}")
        for item in items:
            if isinstance(item, dict):
                do(item["do"], folder)
        return "none" if "odd" in items else [[item, len(items)] for item in items]

    return call


def threaded(folder: str) -> Callable[[Any], Any]:
    """Starts a thread, as a model's pool would."""
    threading.Thread(target=threading.Event().wait, args=(30,), daemon=True).start()
    return lambda item: [item, threading.active_count()]


def outputs() -> Callable[[str], Any]:
    found: dict[str, Any] = {
        "set": {1},
        "nan": float("nan"),
        "bytes": b"x",
        "half": "\ud800",
        "large": 2**70,
        "text": "na\u00efve \u2603\n",
        "none": None,
    }
    return lambda item: found[item]


def nothing() -> int:
    return 7


class Model:
    """Its method is no factory."""

    def build(self) -> None:
        """Never called."""
