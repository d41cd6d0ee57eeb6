"""`shardwise generate` once its options are read: rows in, text or documents out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.llm import LLM
from shardwise.outputs import RequestOutput
from shardwise.progress import bar, say, status
from shardwise.rows import Row, as_message, document, read_rows, submit_row, timings_of


@dataclass(frozen=True)
class Job:
    """What the command line asks for."""

    model: str
    settings: dict[str, Any]
    """Fields of EngineConfig."""
    asked: dict[str, Any]
    """The sampling fields that were given; rows and the model's defaults fill in the rest."""
    generation_config: bool
    prompts: tuple[str, ...]
    """Those that were given as such; others come from a file."""
    opening: Sequence[Mapping[str, Any]] | None
    """Messages before each prompt, which is a user's then; None: prompts are texts to continue."""
    input: Path | None
    output: Path | None
    stream: bool
    as_json: bool


def run(job: Job) -> tuple[int, int]:
    """Do it; how many rows failed, and of how many. Raises ValueError for what can't be done at all."""
    rows = _rows(job)
    _check(job)
    with status("starting") as tell:
        llm = LLM(job.model, on_progress=tell, generation_config=job.generation_config, **job.settings)
    with llm:
        _introduce(llm, job)
        numbers = list(_submit(llm, job, rows))
        if job.stream:
            assert isinstance(numbers[0], int)
            error = ""
            for piece in llm.pieces(numbers[0]):
                print(piece.text, end="", flush=True)
                error = error or piece.error
            print()
            if error:
                raise ValueError(error)
            return 0, 1
        return _finish(llm, job, numbers)


def _rows(job: Job) -> Iterable[Row]:
    if job.input is not None and job.prompts:
        raise ValueError("give prompts or --input, not both")
    if job.input is None and not job.prompts:
        raise ValueError("nothing to do: give a prompt or --input FILE.jsonl")
    rows = read_rows(job.input) if job.input is not None else ({"prompt": text} for text in job.prompts)
    return (as_message(row, job.opening) for row in rows)


def _check(job: Job) -> None:
    output = job.output
    if output is not None and (job.as_json or job.stream):
        raise ValueError("--output writes JSON lines; leave out --json and --stream")
    if output is not None and not output.absolute().parent.is_dir():
        raise ValueError(f"--output {output}: there is no directory {output.parent}; make it first")
    if output is not None and (output.is_file() or output.is_dir() or not output.exists()):  # no pipe and no device
        _check_file(output, job.input)
    if job.stream and (job.as_json or job.input is not None or len(job.prompts) != 1 or job.asked.get("n", 1) != 1):
        raise ValueError("--stream prints one prompt's text; give exactly one prompt, without --json and --n")


def _check_file(output: Path, input: Path | None) -> None:
    """ValueError for an output that is the input, or that can't be written; nothing is left of the attempt."""
    fresh = not output.exists()
    if input is not None and not fresh and output.samefile(input):
        raise ValueError(f"--output {output} is the input itself: give another name")
    try:
        output.open("ab").close()
    except OSError as error:
        raise ValueError(f"--output {output}: {error.strerror}") from None
    if fresh:
        output.resolve().unlink()


def _introduce(llm: LLM, job: Job) -> None:
    kernels = str(llm.figures[0][0]["kernels"])
    if llm.plan.engine.kernels == "auto" and kernels.startswith("torch"):
        print(f"shardwise: {kernels}", file=sys.stderr)
    plan = llm.plan
    weights = plan.quantize or plan.dtype
    by = plan.engine.compile
    compiled = f", {llm.compile_s:.1f} s of them for {by.backend}" if by is not None and llm.compile_s else ""
    say(f"{llm.source.resolved.source} · layout {plan.engine.layout} · {weights} · {llm.load_s:.1f} s{compiled}")
    for line in plan.places():
        print(f"shardwise: {line}", file=sys.stderr)
    if llm.defaults.fields:
        pairs = ", ".join(f"{name} {value}" for name, value in llm.defaults.fields.items())
        print(f"shardwise: defaults from generation_config.json: {pairs}", file=sys.stderr)
    if llm.defaults.left_out:
        left_out = ", ".join(llm.defaults.left_out)
        print(f"shardwise: generation_config.json asks for what is not applied: {left_out}", file=sys.stderr)


def _submit(llm: LLM, job: Job, rows: Iterable[Row]) -> Iterator[int | str]:
    """Each row's number, or what is wrong with it."""
    for index, row in enumerate(rows):
        try:
            yield submit_row(llm, row, job.asked, index)
        except ValueError as error:
            if job.input is None and not job.as_json:
                raise
            yield str(error)


@contextmanager
def _sink(path: Path | None, documents: list[dict[str, Any]]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Where documents go as they come: to the file, or into the list."""
    if path is None:
        yield documents.append
        return
    with path.open("w", encoding="utf-8") as file:
        yield lambda entry: print(json.dumps(entry, ensure_ascii=False), file=file, flush=True)


def _finish(llm: LLM, job: Job, numbers: list[int | str]) -> tuple[int, int]:
    done: list[RequestOutput] = []
    documents: list[dict[str, Any]] = []
    errors: list[str] = []
    with _sink(job.output, documents) as write, bar(len(numbers)) as advance:
        for index, number in enumerate(numbers):
            if isinstance(number, int):
                result = llm.result(number)
                done.append(result)
                errors += [part.error for part in result.outputs if part.error][:1]
                write(document(result))
            else:
                errors.append(number)
                write({"index": index, "error": number})
            advance()
    timings: dict[str, Any] = timings_of(llm.load_s, done)
    if llm.compile_s is not None:
        timings["compile_s"] = round(llm.compile_s, 4)
    drafts = llm.drafts
    if job.as_json:
        whole = {"model": llm.source.resolved.source, "layout": str(llm.plan.engine.layout), "outputs": documents}
        told = {"drafts": drafts.document()} if drafts is not None else {}
        print(json.dumps({**whole, "timings": timings, **told}, ensure_ascii=False))
    for entry in documents if not job.as_json else ():
        _print(entry, len(documents))
    accepted = f" · {drafts.rate:.0%} of {drafts.proposed} drafts accepted" if drafts is not None else ""
    say(f"{timings['generated_tokens']} tokens · {timings['decode_tokens_per_s']:.1f} tokens/s{accepted}")
    if errors and job.input is None:
        raise ValueError(errors[0])
    return len(errors), len(numbers)


def _print(entry: dict[str, Any], count: int) -> None:
    parts = entry.get("outputs", [entry])
    for part in parts:
        if count > 1 or len(parts) > 1:
            print(f"── {entry['index']}" + (f".{part['index']}" if len(parts) > 1 else ""))
        if "text" in part:
            print(part["text"])
        if part.get("error"):
            print(f"error: {part['error']}")
