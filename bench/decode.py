"""Latency and throughput on SmolLM2-135M: shardwise on several layouts, transformers and llama.cpp, by turns.

    python -m bench.decode --llama-python X/bin/python

makes the models on first use (bench/models.py) and prints medians, ratios and the machine's ceilings; --json prints one
document instead. llama.cpp needs an environment of its own, built for the machine at hand:

    python -m venv X && CMAKE_ARGS=-DGGML_NATIVE=ON X/bin/pip install --no-binary llama-cpp-python llama-cpp-python

Leave the machine alone meanwhile: two busy cores are what is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.engines import Engine, prompts
from bench.machine import machine
from bench.models import DEFAULT_CACHE, make

OURS = "shardwise"
ENGINES = ("transformers", "llama.cpp", "llama.cpp BF16", OURS, "shardwise tp2", "shardwise pp2", "shardwise one-chunk")
GGUF = {
    ("llama.cpp", "float32"): "F32.gguf",
    ("llama.cpp", "bfloat16"): "F16.gguf",
    ("llama.cpp BF16", "bfloat16"): "BF16.gguf",  # faster than F16 where the CPU has bfloat16 instructions
}
WIDTH = {"float32": 4, "bfloat16": 2}
SETTLE_S = 0.05
"""Pause before each request, in which the threads of the engine before stop spinning."""


class Work(NamedTuple):
    """One row of the table: ``batch`` prompts of ``prompt`` tokens, ``new`` tokens generated for each."""

    batch: int
    prompt: int
    new: int

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.prompt} + {self.new}" if self.new > 1 else f"prefill {self.prompt}"


@dataclass
class Samples:
    """What one engine did with one work, round by round."""

    ttft_s: list[float] = field(default_factory=list)
    tokens_s: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)

    def speed(self, work: Work) -> list[float]:
        """Tokens per second, decoded, or prefilled where nothing is decoded."""
        return self.tokens_s if work.new > 1 else [work.batch * work.prompt / seconds for seconds in self.ttft_s]


def main() -> None:
    args = _arguments()
    paths = make(args.cache)
    works = [Work(batch, args.prompt, args.new) for batch in args.batches]
    works += [Work(1, args.prefill, 1)] if args.prefill else []
    document: dict[str, Any] = {"machine": machine(), "rounds": args.rounds, "threads": args.threads}
    document |= {"engines": {}, "rows": [], "ceilings": {}}
    ceiling = Engine("ceiling", sys.executable, "ceiling", f"--threads={args.threads}")
    ceilings: list[dict[str, Any]] = []
    try:
        for dtype in args.dtypes:
            document["rows"] += _bench(dtype, works, args, paths, ceiling, ceilings, document["engines"])
    finally:
        ceiling.close()
    read = statistics.median(sample["read_gb_s"] for sample in ceilings)
    products = {
        name: statistics.median(sample["gflops"][name] for sample in ceilings) for name in ceilings[0]["gflops"]
    }
    document["ceilings"] = {"read_gb_s": round(read, 2), "torch_gflops": {k: round(v, 1) for k, v in products.items()}}
    for row in document["rows"]:
        if "read_gb_s" in row:
            row["of_read_bandwidth"] = round(row["read_gb_s"] / read, 3)
    print(json.dumps(document)) if args.json else _show(document)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = {"type": lambda text: text.split(",")}
    parser.add_argument("--llama-python", help="interpreter that has llama_cpp; without it llama.cpp is left out")
    parser.add_argument("--engines", default=list(ENGINES), help=f"some of: {', '.join(ENGINES)}", **listed)
    parser.add_argument("--dtypes", default=list(WIDTH), help="float32, bfloat16", **listed)
    parser.add_argument("--batches", default=[1, 8, 32], type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens generated for each")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prefill row's prompt; 0 leaves it out")
    parser.add_argument("--rounds", type=int, default=7, help="after one to warm up")
    parser.add_argument("--threads", type=int, default=2, help="threads of each engine, over all its ranks")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where the models are kept")
    parser.add_argument("--transformers-args", default="", help="more arguments for bench/peers/hugging_face.py")
    parser.add_argument("--llama-args", default="", help="more arguments for bench/peers/llama_cpp.py")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    unknown = set(args.engines) - set(ENGINES) or set(args.dtypes) - set(WIDTH)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if args.llama_python is None:
        args.engines = [name for name in args.engines if not name.startswith("llama.cpp")]
    return args


def _start(name: str, dtype: str, args: argparse.Namespace, paths: dict[str, Path]) -> Engine:
    """One engine at its best settings (bench/README.md says what else was tried)."""
    threads = f"--threads={args.threads}"
    if name == "transformers":
        more = args.transformers_args.split()
        return Engine(name, sys.executable, "hugging_face", str(paths[dtype]), f"--dtype={dtype}", threads, *more)
    if name.startswith("llama.cpp"):
        file = str(paths[GGUF[name, dtype]])
        return Engine(name, args.llama_python, "llama_cpp", file, threads, *args.llama_args.split())
    variant = name.removeprefix(OURS).strip()
    own = [str(paths[dtype]), f"--dtype={dtype}"]
    if variant == "one-chunk":
        return Engine(name, sys.executable, "own", *own, threads, "--one-chunk")
    if variant:
        return Engine(name, sys.executable, "own", *own, f"--threads={args.threads // 2}", f"--layout={variant}")
    return Engine(name, sys.executable, "own", *own, threads)


def _bench(
    dtype: str,
    works: list[Work],
    args: argparse.Namespace,
    paths: dict[str, Path],
    ceiling: Engine,
    ceilings: list[dict[str, Any]],
    versions: dict[str, str],
) -> list[dict[str, Any]]:
    """All works in one number format: rounds of A B C …, each engine asleep while another is asked."""
    engines: list[Engine] = []
    rows: list[dict[str, Any]] = []
    names = [name for name in args.engines if not name.startswith("llama.cpp") or (name, dtype) in GGUF]
    try:
        for name in names:
            print(f"{dtype}: starting {name}", file=sys.stderr)
            engines.append(_start(name, dtype, args, paths))
            versions[f"{name} {dtype}"] = engines[-1].version
        for work in works:
            asked = prompts(paths[dtype] / "tokenizer.json", work.batch, work.prompt)
            samples = {name: Samples() for name in names}
            for number in range(args.rounds + 1):
                print(f"{dtype}: {work}, round {number} of {args.rounds}", file=sys.stderr)
                if number:
                    ceilings.append(ceiling.ask())
                for engine in engines:
                    time.sleep(SETTLE_S)
                    answer = engine.ask(prompts=asked, new=work.new)
                    mine = samples[engine.name]
                    mine.ids = answer["ids"]
                    assert [len(row) for row in mine.ids] == [work.new] * work.batch, engine.name
                    if number:  # the first round warms caches up
                        mine.ttft_s.append(answer["ttft_s"])
                        mine.tokens_s.append(answer["tokens"] / answer["decode_s"] if work.new > 1 else 0.0)
            rows += _rows(dtype, work, samples, (paths[dtype] / "model.safetensors").stat().st_size)
    finally:
        for engine in engines:
            engine.close()
    return rows


def _rows(dtype: str, work: Work, samples: dict[str, Samples], weight_bytes: int) -> list[dict[str, Any]]:
    """Medians, and our speed over the other's: the ratio of medians, and the least and most of any round."""
    ours = samples.get(OURS)
    rows = []
    for name, mine in samples.items():
        speed = mine.speed(work)
        row: dict[str, Any] = {"dtype": dtype, **work._asdict(), "engine": name}
        row["tokens_s"] = round(statistics.median(speed), 2)
        row["ttft_ms"] = round(statistics.median(mine.ttft_s) * 1e3, 1)
        row["rounds"] = [round(value, 2) for value in speed]
        if work.new > 1:
            row["read_gb_s"] = round(weight_bytes * row["tokens_s"] / work.batch / 1e9, 2)
        if ours is not None and name != OURS:
            ratios = [a / b for a, b in zip(ours.speed(work), speed, strict=True)]
            ratio = statistics.median(ours.speed(work)) / statistics.median(speed)
            row["ratio"] = [round(value, 3) for value in (ratio, min(ratios), max(ratios))]
            row["same_ids"] = round(_agreement(ours.ids, mine.ids), 3)
        rows.append(row)
    return rows


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of tokens before the first that differs, over all sequences."""
    same = total = 0
    for mine, other in zip(ours, theirs, strict=True):
        differing = (place for place, pair in enumerate(zip(mine, other, strict=True)) if pair[0] != pair[1])
        same += next(differing, len(mine))
        total += len(mine)
    return same / total


def _show(document: dict[str, Any]) -> None:
    """Print for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"SmolLM2-135M, medians of {document['rounds']} rounds; ratio = shardwise / engine")
    for column in (
        "format",
        "work",
        "engine",
        "tokens/s",
        "first token, ms",
        "GB/s",
        "of ceiling",
        "ratio",
        "same ids",
    ):
        table.add_column(column, justify="left" if column in ("format", "work", "engine") else "right")
    before = None
    for row in document["rows"]:
        work = Work(row["batch"], row["prompt"], row["new"])
        if before not in (None, (row["dtype"], work)):
            table.add_section()
        before = (row["dtype"], work)
        ratio = "{:.2f} ({:.2f}–{:.2f})".format(*row["ratio"]) if "ratio" in row else ""
        read = f"{row['read_gb_s']:.1f}" if "read_gb_s" in row else ""
        share = f"{row['of_read_bandwidth']:.0%}" if "of_read_bandwidth" in row else ""
        same = f"{row['same_ids']:.1%}" if "same_ids" in row else ""
        speed, first = f"{row['tokens_s']:.1f}", f"{row['ttft_ms']:.1f}"
        table.add_row(row["dtype"], str(work), row["engine"], speed, first, read, share, ratio, same)
    console = Console(width=150 if not sys.stdout.isatty() else None)
    console.print(table)
    console.print(document["machine"], highlight=False)
    ceilings = document["ceilings"]
    products = ", ".join(f"{name} {value:g}" for name, value in ceilings["torch_gflops"].items())
    console.print(
        f"ceilings, {document['threads']} threads, same run: reads {ceilings['read_gb_s']:g} GB/s; "
        f"torch matmul GFLOP/s: {products}",
        highlight=False,
    )
    for name, version in document["engines"].items():
        console.print(f"{name}: {version}", highlight=False)


if __name__ == "__main__":
    main()
