"""`shardwise convert`: its options, its progress for people and its document for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from shardwise.features import DTYPES
from shardwise.options import QuantizeOption, quantization
from shardwise.progress import say


def convert_checkpoint(
    source: Annotated[str, typer.Argument(help="Alias, directory, .gguf or pickled file, or hub id.")],
    output: Annotated[Path, typer.Argument(help="Directory to make.")],
    dtype: Annotated[
        str | None, typer.Option(help=f"Of floats: {', '.join(DTYPES[1:])}; default: as they are.")
    ] = None,
    quantize: QuantizeOption = None,
    shard_bytes: Annotated[int, typer.Option(help="Most bytes in a file.")] = 5 * 10**9,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Write a model as indexed safetensors, quantised if you like; the only command that opens .bin, .pth and .pt."""
    if dtype is not None and dtype not in DTYPES[1:]:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES[1:])}, not {dtype!r}")
    if shard_bytes < 1:
        raise ValueError(f"--shard-bytes must be at least 1, not {shard_bytes}")
    rounding = quantization(quantize)
    from shardwise.convert.job import Job, convert  # torch

    with _progress() as progress:
        job = Job(source, output, dtype, rounding, shard_bytes)
        done = convert(job, lambda text: print(f"shardwise: {text}", file=sys.stderr), progress)
    if as_json:
        print(json.dumps(done))
    else:
        print(f"{done['output']}: {done['tensors']} tensors, {done['bytes'] / 2**20:,.1f} MiB")
        say(f"from {done['source']}")


@contextmanager
def _progress() -> Iterator[Callable[[int], Callable[[int], None]]]:
    """A bar of bytes, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda total: lambda written: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("converting"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def begin(total: int) -> Callable[[int], None]:
            task = bar.add_task("converting", total=total)
            return lambda written: bar.advance(task, written)

        yield begin
