"""Times the kernels: linear beside reading its weights and F.linear, attention, and what a call costs.

Everything that is compared is timed in turns within one run, because the machine drifts; numbers are medians.

    python bench/kernels.py [--threads 1] [--dtype float32] [--rows 1,8,32,128,512] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from shardwise.kernels.native import NativeOps
from shardwise.kernels.ops import Program
from shardwise.parallel.placement import Run, Tree

SHAPES = ((576, 576, 9), (960, 576, 1), (3072, 576, 1), (576, 1536, 24), (49152, 576, 1))
"""Output features, input features and chunks of SmolLM2-135M's linears."""
REPEATS = 7


def program(cols: int, chunks: int) -> Program:
    """``cols`` cut into equal chunks, summed by one whole tree."""
    merges = Tree((Run(0, chunks),)).merges(0)
    return Program(tuple(cols * chunk // chunks for chunk in range(chunks + 1)), tuple(merges))


def medians(calls: dict[str, Callable[[], Any]], seconds: float = 0.03) -> dict[str, float]:
    """Median seconds per call, the calls taking turns, each for about ``seconds``."""
    counts, times = {}, {name: [] for name in calls}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        counts[name] = max(1, int(seconds / (time.perf_counter() - start)))
    for _, (name, call) in itertools.product(range(REPEATS), calls.items()):
        start = time.perf_counter()
        for _ in range(counts[name]):
            call()
        times[name].append((time.perf_counter() - start) / counts[name])
    return {name: statistics.median(values) for name, values in times.items()}


def linears(dtype: torch.dtype, all_rows: list[int]) -> list[dict[str, Any]]:
    """Every shape and number of rows, on as many copies of the weight as it takes to come from memory."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    ops, found = NativeOps(compute), []
    for outputs, cols, chunks in SHAPES:
        size = outputs * cols * dtype.itemsize
        copies = max(2, (192 << 20) // size)
        matrix = torch.randn(outputs, cols)
        packed = [ops.weight(outputs, cols, dtype) for _ in range(copies)]
        for weight in packed:
            ops.write(weight, 0, matrix)
        plain = [matrix.to(dtype).clone() for _ in range(copies)]
        words = [weight.data.view(-1).view(torch.int64) for weight in packed]
        order = program(cols, chunks)
        for rows in all_rows:
            x = torch.randn(rows, cols, dtype=compute)
            y = x.to(dtype)
            turn, turn_torch, turn_read = (itertools.cycle(each) for each in (packed, plain, words))
            calls = {
                "native": lambda x=x, turn=turn, order=order: ops.linear(x, next(turn), order),
                "torch": lambda y=y, turn=turn_torch: F.linear(y, next(turn)),
            }
            if rows == 1:
                calls["read"] = lambda turn=turn_read: next(turn).sum()
            took = medians(calls)
            found.append(
                {
                    "outputs": outputs,
                    "cols": cols,
                    "chunks": chunks,
                    "rows": rows,
                    "us": took["native"] * 1e6,
                    "gb_s": size / took["native"] / 1e9,
                    "read_gb_s": size / took["read"] / 1e9 if rows == 1 else None,
                    "gflop_s": 2 * rows * outputs * cols / took["native"] / 1e9,
                    "times_torch": took["torch"] / took["native"],
                }
            )
    return found


def attention(compute: torch.dtype) -> list[dict[str, Any]]:
    """SmolLM2's 9 query and 3 key heads of 64: a batch decoding at 400 tokens, and prefills of one prompt."""
    ops, found = NativeOps(compute), []
    for sequences, rows, length in ((1, 1, 400), (32, 1, 400), (1, 512, 512), (1, 128, 2048), (1, 1, 8192)):
        blocks = -(-length // 16)
        keys, values = ops.cache(sequences * blocks, 3, 64, "cpu")
        keys.normal_()
        values.normal_()
        table = torch.randperm(sequences * blocks).view(sequences, blocks).int()
        starts = torch.arange(0, sequences * rows + 1, rows, dtype=torch.int32)
        positions = torch.arange(length - rows, length, dtype=torch.int32).repeat(sequences)
        q = torch.randn(sequences * rows, 9, 64, dtype=compute)
        call = lambda: ops.attend(q, keys, values, starts, table, positions, (0, 3, 6, 9), 0.125)  # noqa: E731, B023
        took = medians({"native": call})["native"]
        seen = int((positions + 1).sum())
        found.append(
            {
                "sequences": sequences,
                "rows": rows,
                "length": length,
                "us": took * 1e6,
                "kv_gb_s": 2 * sequences * length * 3 * 64 * compute.itemsize / took / 1e9,
                "gflop_s": 4 * seen * 9 * 64 / took / 1e9,
            }
        )
    return found


def small(compute: torch.dtype) -> dict[str, float]:
    """Microseconds of the small operations at SmolLM2's width, and of a linear that computes next to nothing."""
    ops = NativeOps(compute)
    tiny, x = ops.weight(32, 16, compute), torch.randn(1, 576, dtype=compute)
    keys, values = ops.cache(4, 3, 64, "cpu")
    one, angles = torch.zeros(1, dtype=torch.int32), torch.rand(64, 32, dtype=compute)
    x16, gate, qkv, weight = (
        x[:, :16].contiguous(),
        x.new_ones(1, 3072),
        x.new_ones(1, 960),
        torch.rand(576).to(compute),
    )
    order, logits = Program.whole(16), -torch.rand(49152, dtype=torch.float64)
    starts, q, table = torch.tensor([0, 1], dtype=torch.int32), x.new_ones(1, 9, 64), one.view(1, 1)
    took = medians(
        {
            "linear 32x16 (the cost of a call)": lambda: ops.linear(x16, tiny, order),
            "rms_norm 576": lambda: ops.rms_norm(x, weight, 1e-5),
            "silu_mul 1536": lambda: ops.activate("silu_mul", gate),
            "rotate_write": lambda: ops.rotate_write(qkv, angles, angles, one, one, keys, values, 9),
            "attend 1 token": lambda: ops.attend(q, keys, values, starts, table, one, (0, 3, 6, 9), 0.125),
            "finish of 4 nodes": lambda: ops.finish((x, x, x, x), (0, 1, 0, 2), None, x),
            "gumbel 49152": lambda: ops.gumbel([7], [7], 0, 49152),
            "exp 49152": lambda: ops.exp(logits),
        }
    )
    return {name: value * 1e6 for name, value in took.items()}


def show(rows: list[dict[str, Any]]) -> None:
    """One line per row, numbers to three figures."""
    print("  ".join(f"{name:>11}" for name in rows[0]))
    for row in rows:
        print(
            "  ".join(
                f"{'' if x is None else format(x, '.3g' if isinstance(x, float) else ''):>11}" for x in row.values()
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--rows", default="1,8,32,128,512")
    parser.add_argument("--only", choices=("linear", "attend", "small"))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    dtype = getattr(torch, asked.dtype)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    results: dict[str, Any] = {"threads": asked.threads, "dtype": asked.dtype}
    if asked.only in (None, "linear"):
        results["linear"] = linears(dtype, [int(rows) for rows in asked.rows.split(",")])
    if asked.only in (None, "attend"):
        results["attend"] = attention(compute)
    if asked.only in (None, "small"):
        results["small"] = [small(compute)]
    if asked.json:
        print(json.dumps(results))
        return
    print(f"{asked.threads} threads, {asked.dtype} weights")
    for name in ("linear", "attend"):
        if name in results:
            show(results[name])
    for name, value in results.get("small", [{}])[0].items():
        print(f"{name:>36} {value:8.2f} us")


if __name__ == "__main__":
    main()
