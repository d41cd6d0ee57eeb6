"""What the machine can do: bytes read per second and torch's matrix product, with the same number of threads."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.peers.protocol import serve

READ_BYTES = 2**29
SIDE = 1536


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    big = torch.ones(READ_BYTES // 4)
    squares = {name: torch.ones(SIDE, SIDE, dtype=getattr(torch, name)) for name in ("float32", "bfloat16")}

    def answer() -> dict[str, Any]:
        work = 2 * SIDE**3 / 1e9
        return {
            "read_gb_s": READ_BYTES / 1e9 / _best(big.max),
            "gflops": {name: work / _best(lambda square=square: square @ square) for name, square in squares.items()},
        }

    serve(answer, f"torch {torch.__version__}, {args.threads} threads")


def _best(work: Callable[[], object], times: int = 4) -> float:
    """Shortest of a few runs, in seconds."""
    shortest = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


if __name__ == "__main__":
    main()
