"""A server process of one model, and its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.server.test_serve import Process, gone
from tests.server.test_serve import serve as serve_as

__all__ = ["Process", "gone", "ranks_of", "serve"]


@contextmanager
def serve(model: str | Path, *arguments: str) -> Iterator[Process]:
    """It listens on a port of its own, and calls its model "m"."""
    with serve_as(Path(model), "--served-model-name", "m", *arguments) as process:
        yield process


def ranks_of(process: Process) -> list[psutil.Process]:
    """Holders of weights, which are children of the fork servers, and the ranks, which are children of holders."""
    front = psutil.Process(process.popen.pid)
    return [rank for forks in front.children() for rank in forks.children(recursive=True)]
