"""What each rank reads and holds: a random Llama checkpoint of more than 1 GB, loaded on one rank, tp2 and pp2.

    python -m bench.load [--limit 0.6] [--json]

Writes the checkpoint (deleted afterwards), loads it in a fresh process per layout, and compares every rank with the
single one: bytes read, and peak resident memory above that of a rank of the same layout that holds next to nothing.
Exits with 1 if a rank of several needs more than the limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bench.engines import ROOT
from bench.machine import machine

LARGE = {"layers": 10, "hidden": 2048, "heads": 16, "kv_heads": 8, "width": 5632, "vocab": 32000}
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "width": 64, "vocab": 64}
LAYERS_PER_FILE = 2

Tensors = Iterator[tuple[str, tuple[int, ...]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="1,tp2,pp2", help="the first is the one to compare with")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="stored and held")
    parser.add_argument("--directory", type=Path, help="where to write (1.2 GB, or 2.4 as float32)")
    parser.add_argument("--limit", type=float, default=0.6, help="largest share of the single rank's figures")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "LAYOUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure, args.dtype)))
        return
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="shardwise-load-") as scratch:
        large, small = Path(scratch) / "large", Path(scratch) / "small"
        size = write_checkpoint(large, args.dtype, **LARGE)
        write_checkpoint(small, args.dtype, **SMALL)
        rows = []
        for layout in args.layouts.split(","):
            loaded, empty = (_in_fresh_process(path, layout, args.dtype) for path in (large, small))
            for rank, (figures, base) in enumerate(zip(loaded, empty, strict=True)):
                row = {"layout": layout, "rank": rank, "bytes_read": figures["bytes_read"]}
                row |= {"peak_bytes": figures["peak_bytes"], "empty_peak_bytes": base["peak_bytes"]}
                row |= {"held_bytes": figures["peak_bytes"] - base["peak_bytes"], "load_s": figures["load_s"]}
                rows.append(row)
    for row in rows:
        row["read_share"] = round(row["bytes_read"] / rows[0]["bytes_read"], 4)
        row["held_share"] = round(row["held_bytes"] / rows[0]["held_bytes"], 4)
        row["peak_share"] = round(row["peak_bytes"] / rows[0]["peak_bytes"], 4)
    divided = [row for row in rows if row["layout"] != rows[0]["layout"]]
    ok = all(max(row["read_share"], row["held_share"]) <= args.limit for row in divided)
    document = {"machine": machine(), "checkpoint_bytes": size, "dtype": args.dtype, "limit": args.limit, "ok": ok}
    document["rows"] = rows
    print(json.dumps(document)) if args.json else show(document)
    sys.exit(0 if ok else 1)


def measure(model: str, layout: str, dtype: str) -> list[dict[str, Any]]:
    """Each rank's figures after loading ``model``."""
    from shardwise.config import EngineConfig, Layout
    from shardwise.runtime.launch import launch, plan_run
    from shardwise.runtime.source import open_source

    engine = EngineConfig(layout=Layout.parse(layout), dtype=dtype, device="cpu", threads=1, kv_tokens=16)
    executors = launch(plan_run(open_source(model), engine))
    for executor in executors:
        executor.close()
    return [dict(figures) for executor in executors for figures in executor.figures]


def _in_fresh_process(model: Path, layout: str, dtype: str) -> list[dict[str, Any]]:
    """``measure`` where no earlier peak can show."""
    print(f"loading {model.name} on layout {layout}", file=sys.stderr)
    command = [sys.executable, "-m", "bench.load", "--measure", str(model), layout, "--dtype", dtype]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    figures: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return figures


def write_checkpoint(path: Path, dtype: str, **size: int) -> int:
    """A Llama in several safetensors files with an index, of random numbers that repeat; returns its tensors' bytes."""
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": size["layers"],
        "hidden_size": size["hidden"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
        "intermediate_size": size["width"],
        "vocab_size": size["vocab"],
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
    numbers = np.random.default_rng(0).standard_normal(2**20, dtype=np.float32) * np.float32(0.02)
    block = numbers.tobytes() if dtype == "float32" else (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    width = 4 if dtype == "float32" else 2
    groups = [list(_ends(size))]
    starts = range(0, size["layers"], LAYERS_PER_FILE)
    groups += [[t for n in range(start, start + LAYERS_PER_FILE) for t in _layer(n, size)] for start in starts]
    weight_map, total = {}, 0
    for number, tensors in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        header, end = {}, 0
        for tensor, shape in tensors:
            start, end = end, end + int(np.prod(shape)) * width
            kind = "F32" if dtype == "float32" else "BF16"
            header[tensor] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
            weight_map[tensor] = name
        with (path / name).open("wb") as file:
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            file.write(len(text).to_bytes(8, "little") + text)
            _fill(file, block, end)
        total += end
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _ends(size: dict[str, int]) -> Tensors:
    yield "model.embed_tokens.weight", (size["vocab"], size["hidden"])
    yield "lm_head.weight", (size["vocab"], size["hidden"])
    yield "model.norm.weight", (size["hidden"],)


def _layer(number: int, size: dict[str, int]) -> Tensors:
    hidden, width = size["hidden"], size["width"]
    kv = hidden // size["heads"] * size["kv_heads"]
    at = f"model.layers.{number}."
    for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
        yield f"{at}self_attn.{name}_proj.weight", (rows, hidden)
    yield f"{at}mlp.gate_proj.weight", (width, hidden)
    yield f"{at}mlp.up_proj.weight", (width, hidden)
    yield f"{at}mlp.down_proj.weight", (hidden, width)
    yield f"{at}input_layernorm.weight", (hidden,)
    yield f"{at}post_attention_layernorm.weight", (hidden,)


def _fill(file: BinaryIO, block: bytes, size: int) -> None:
    for _ in range(size // len(block)):
        file.write(block)
    file.write(block[: size % len(block)])


def show(document: dict[str, Any]) -> None:
    """Print for people."""
    print(f"checkpoint of {document['checkpoint_bytes'] / 1e9:.2f} GB in {document['dtype']}; MB = 10^6 bytes")
    print("layout rank   read MB  share   peak MB  empty MB   held MB  share  (peak's share)  load s")
    for row in document["rows"]:
        read, peak, empty, held = (
            row[name] / 1e6 for name in ("bytes_read", "peak_bytes", "empty_peak_bytes", "held_bytes")
        )
        print(
            f"{row['layout']:>6} {row['rank']:>4} {read:>9.1f} {row['read_share']:>6.1%} {peak:>9.1f} {empty:>9.1f} "
            f"{held:>9.1f} {row['held_share']:>6.1%} {row['peak_share']:>15.1%} {row['load_s']:>7.2f}"
        )
    limit = f"{document['limit']:.0%} of the first layout's rank"
    print(f"{'within' if document['ok'] else 'OVER'} the limit of {limit}")
    print(document["machine"])


if __name__ == "__main__":
    main()
