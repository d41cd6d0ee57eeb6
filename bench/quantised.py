"""Quantised linears beside bfloat16 ones, in turns, each on as many copies as it takes to come from memory.

python -m bench.quantised [--threads 2] [--rows 1,8,32] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from typing import Any

import torch

from bench.kernels import SHAPES, program
from shardwise.kernels.native import NativeOps
from shardwise.kernels.ops import Weight

COLD = 96 * 2**20
"""Bytes of copies: three times the caches."""
TURNS = 40


def weights(ops: NativeOps, kind: str, outputs: int, cols: int) -> tuple[list[Weight], int]:
    """Copies of one matrix of random numbers, and the bytes that a call reads."""
    made = [_weight(ops, kind, outputs, cols)]
    size = outputs * cols * (2 if kind == "bfloat16" else 1) if kind != "int4" else outputs * cols // 2
    size += 0 if (scales := made[0].scales) is None else scales.nbytes
    made += [_weight(ops, kind, outputs, cols) for _ in range(max(1, COLD // size))]
    return made, size


def _weight(ops: NativeOps, kind: str, outputs: int, cols: int) -> Weight:
    if kind == "bfloat16":
        weight = ops.weight(outputs, cols, torch.bfloat16)
        weight.data.normal_()
        return weight
    bits = int(kind[3:])
    weight = ops.quantised(outputs, cols, bits, cols if bits == 8 else 32, 0)
    weight.data.random_()
    assert weight.scales is not None
    weight.scales.normal_()
    return weight


def measure(rows: int) -> list[dict[str, Any]]:
    """A row per shape: microseconds and GB/s of each format, and how many times bfloat16's speed."""
    ops, found = NativeOps(torch.float32), []
    for outputs, cols, chunks in SHAPES:
        order, x = program(cols, chunks), torch.randn(rows, cols)
        made = {kind: weights(ops, kind, outputs, cols) for kind in ("bfloat16", "int8", "int4")}
        turns = {kind: itertools.cycle(copies) for kind, (copies, _) in made.items()}
        times: dict[str, list[float]] = {kind: [] for kind in made}
        for _, kind in itertools.product(range(TURNS), made):
            batch = [next(turns[kind]) for _ in range(4)]
            start = time.perf_counter()
            for weight in batch:
                ops.linear(x, weight, order)
            times[kind].append((time.perf_counter() - start) / 4)
        took = {kind: statistics.median(each) for kind, each in times.items()}
        row: dict[str, Any] = {"outputs": outputs, "cols": cols, "rows": rows}
        for kind, seconds in took.items():
            row[kind] = {
                "us": seconds * 1e6,
                "gb_s": made[kind][1] / seconds / 1e9,
                "times": took["bfloat16"] / seconds,
            }
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    found = [row for rows in asked.rows.split(",") for row in measure(int(rows))]
    if asked.json:
        print(json.dumps({"threads": asked.threads, "linear": found}))
        return
    for row in found:
        kinds = " · ".join(
            f"{kind} {row[kind]['us']:.0f} us {row[kind]['gb_s']:.1f} GB/s ×{row[kind]['times']:.2f}"
            for kind in ("bfloat16", "int8", "int4")
        )
        print(f"{row['outputs']:>6} x {row['cols']:<5} {row['rows']:>4} rows: {kinds}")


if __name__ == "__main__":
    main()
