"""`shardwise map`: its options, its progress for people and its document for machines."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.config import Layout
from shardwise.mapping.config import MapConfig, read_settings
from shardwise.mapping.source import open_lines
from shardwise.options import (
    CompileModeOption,
    CompileOption,
    CompileOptionsOption,
    DeviceOption,
    LayoutOption,
    compilation,
)
from shardwise.progress import bar, say

if TYPE_CHECKING:
    from shardwise.mapping.job import Job

STREAM = Path("-")


def map_inputs(
    factory: Annotated[
        str, typer.Argument(help="module:name of a callable that builds the model and returns a callable.")
    ],
    input: Annotated[Path, typer.Option(help="A JSON value a line; - is stdin.")] = STREAM,
    output: Annotated[Path, typer.Option(help="A JSON line for each input line, in order; - is stdout.")] = STREAM,
    layout: LayoutOption = "1",
    pairs: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE for the factory; several times.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Call with lists of up to so many items.")] = None,
    device: DeviceOption = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads per rank; default: the cores, shared evenly.")] = None,
    share: Annotated[str, typer.Option(help="What ranks share by forking: nothing, imports or model.")] = "imports",
    compile: CompileOption = None,
    compile_mode: CompileModeOption = None,
    compile_options: CompileOptionsOption = None,
    startup_timeout: Annotated[float, typer.Option(help="Seconds to import and to build the model.")] = 600.0,
    item_timeout: Annotated[float | None, typer.Option(help="Seconds for one item; then it has failed.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin the output anew.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as one JSON document on stdout.")] = False,
) -> None:
    """Run any model over a file of inputs, whole on each of several ranks; said again, it goes on where it was."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a factory may lie where the command is run
    config = MapConfig(
        *(factory, Layout.parse(layout), read_settings(pairs or []), batch_size, device, threads, share),
        *(startup_timeout, item_timeout, compilation(compile, compile_mode, compile_options)),
    )
    file = _file(output)
    if as_json and output == STREAM:
        raise ValueError("--json prints its document on stdout: give the answers a file with --output")
    if input == STREAM and sys.stdin is not None and sys.stdin.isatty():
        raise ValueError("nothing to do: give --input FILE.jsonl, or pipe lines in")
    if file is not None and input.exists() and file.exists() and os.path.samefile(input, file):
        raise ValueError(f"--output {output} is the input itself: give another name")
    began = monotonic()
    from shardwise.mapping.job import Job

    job = Job(config, open_lines(input), file, overwrite)
    resumed = job.journal.resumed
    if resumed:
        print(f"shardwise: going on with {output}: {resumed} items are done", file=sys.stderr)
    try:
        with (
            _progress(job, input) as advance,
            _sink(output if file is None else None) as write,
            closing(job.lines(advance)) as lines,
        ):
            for line in lines:
                write(line)
    except (KeyboardInterrupt, SystemExit):
        if file is not None:
            print(
                f"shardwise: what is done is in {output} and its journal; the same command goes on from there",
                file=sys.stderr,
            )
        raise
    if job.world is not None and job.world.rank > 0:
        return
    done = {"items": job.count, "failed": job.failed, "resumed": resumed, "restarts": job.restarts}
    if as_json:
        size = job.world.size if job.world is not None else config.layout.dp
        where = {"factory": factory, "layout": str(Layout(dp=size)), "output": str(output)}
        print(json.dumps({**where, **done, "seconds": round(monotonic() - began, 3)}))
    say(f"{job.count} items · {job.failed} failed · {monotonic() - began:.1f} s")
    if job.failed:
        print(f"shardwise: {job.failed} of {job.count} items failed; the others are done", file=sys.stderr)
        sys.exit(1)


def _file(output: Path) -> Path | None:
    """The output, if it is a file that can be gone on with; not stdout, a pipe or a device."""
    if output == STREAM or (output.exists() and not stat.S_ISREG(output.stat().st_mode) and not output.is_dir()):
        return None
    return output


@contextmanager
def _sink(output: Path | None) -> Iterator[Callable[[bytes], object]]:
    """Where lines go that are in no file yet."""
    if output is None:
        yield lambda line: None
        return
    with open(sys.stdout.fileno() if output == STREAM else output, "wb", 0, closefd=output != STREAM) as file:

        def write(line: bytes) -> None:
            view = memoryview(line)
            while view:
                view = view[file.write(view) :]

        yield write


@contextmanager
def _progress(job: Job, input: Path) -> Iterator[Callable[[int], None] | None]:
    """A bar on a terminal, over what is left to do."""
    if not sys.stderr.isatty() or (job.world is not None and job.world.rank > 0):
        yield None
        return
    total = None
    if input.is_file():
        with input.open("rb") as file:
            total = sum(1 for _ in file)
    with bar(total, "mapping") as advance:
        for _ in range(job.journal.resumed):
            advance()
        yield lambda done: advance()
