"""What one answer costs: every linear of SmolLM2-135M's step, summed in the model's fixed trees or as a single chunk.

    python -m bench.one_answer [--threads 2] [--rows 1,8,32] [--json]

Trees, single chunks and torch's F.linear (which keeps no promise) take turns within one run; only linears are timed,
with the model's real weights in the model's order, so that each comes from memory as it does in a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from bench.machine import machine
from bench.models import DEFAULT_CACHE, make
from shardwise.config import Layout
from shardwise.kernels.ops import Program, load_ops
from shardwise.models.decoder import build
from shardwise.models.families.table import make_plan
from shardwise.models.linear import Linear, RowLinear
from shardwise.models.shard import make_shard
from shardwise.parallel.axis import Axis
from shardwise.runtime.source import open_source
from shardwise.weights.checkpoint import Checkpoint
from shardwise.weights.load import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rows", default="1,8,32", help="rows of the batch")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where the models are kept")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    paths = make(args.cache)
    found = []
    for dtype in args.dtypes.split(","):
        layers = linears(paths[dtype], getattr(torch, dtype))
        found += [{"dtype": dtype, **compare(layers, int(rows), args.rounds)} for rows in args.rows.split(",")]
    document = {"machine": machine(), "threads": args.threads, "rounds": args.rounds, "rows": found}
    print(json.dumps(document)) if args.json else show(document)


def linears(path: Path, dtype: torch.dtype) -> list[tuple[Linear | RowLinear, torch.Tensor]]:
    """Every linear of the model with its weights, and a torch matrix of the same shape, in the order of a step."""
    source = open_source(path)
    config = source.config
    shard = make_shard(config, Layout())
    plan = make_plan(config, shard)
    ops, how = load_ops("native", "cpu", torch.float32)
    print(f"{dtype}: {how}", file=sys.stderr)
    decoder = build(config, shard, plan, Axis(), ops, dtype, 16, torch.device("cpu"))
    checkpoint = Checkpoint(source.index)
    load(checkpoint, plan, decoder.write)
    checkpoint.close()
    found: list[Linear | RowLinear] = []
    for layer in decoder.layers.values():
        found += [layer.attention.qkv, layer.attention.out, layer.mlp.up, layer.mlp.down]
    assert decoder.head is not None
    found.append(decoder.head)
    return [(linear, torch.randn(linear.weight.rows, linear.weight.cols).to(dtype)) for linear in found]


def compare(layers: list[tuple[Linear | RowLinear, torch.Tensor]], rows: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of all linears of one step, medians; the cost and its least and most over the rounds, in percent."""
    ops, dtype = layers[0][0].ops, layers[0][1].dtype
    widths = {linear.weight.cols for linear, _ in layers}
    xs = {width: torch.randn(rows, width) for width in widths}
    plain = {width: x.to(dtype) for width, x in xs.items()}
    whole = {width: Program.whole(width) for width in widths}

    def trees() -> None:
        for linear, _ in layers:
            ops.linear(xs[linear.weight.cols], linear.weight, linear.program)

    def single() -> None:
        for linear, _ in layers:
            ops.linear(xs[linear.weight.cols], linear.weight, whole[linear.weight.cols])

    def torches() -> None:
        for linear, weight in layers:
            F.linear(plain[linear.weight.cols], weight)

    took: dict[Callable[[], None], list[float]] = {trees: [], single: [], torches: []}
    for number in range(rounds + 1):
        order = list(took) if number % 2 else list(took)[::-1]  # so that neither always runs in the other's wake
        for run in order:
            began = time.perf_counter()
            run()
            if number:
                took[run].append(time.perf_counter() - began)
    tree, chunk, other = (statistics.median(times) for times in took.values())
    costs = sorted(a / b - 1 for a, b in zip(took[trees], took[single], strict=True))
    size = sum(weight.numel() * weight.element_size() for _, weight in layers)
    return {
        "rows": rows,
        "trees_ms": round(tree * 1e3, 3),
        "single_ms": round(chunk * 1e3, 3),
        "torch_ms": round(other * 1e3, 3),
        "cost_percent": round((tree / chunk - 1) * 100, 2),
        "cost_quartiles": [round(costs[len(costs) * part // 4] * 100, 2) for part in (1, 3)],
        "weights_gb_s": round(size / tree / 1e9, 2),
        "times_torch": round(other / tree, 2),
    }


def show(document: dict[str, Any]) -> None:
    """Print for people."""
    print(f"all linears of one step of SmolLM2-135M, {document['threads']} threads, {document['rounds']} rounds")
    print(f"{'format':>9} rows  trees ms  single ms  torch ms  cost % (quartiles)       GB/s  times torch")
    for row in document["rows"]:
        low, high = row["cost_quartiles"]
        print(
            f"{row['dtype']:>9} {row['rows']:>4} {row['trees_ms']:>9.2f} {row['single_ms']:>10.2f} "
            f"{row['torch_ms']:>9.2f} {row['cost_percent']:>7.1f} ({low:.1f} to {high:.1f}) "
            f"{row['weights_gb_s']:>10.1f} {row['times_torch']:>12.2f}"
        )
    print(document["machine"])


if __name__ == "__main__":
    main()
