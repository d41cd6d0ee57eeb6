"""The command line: generate, verify, inspect. Talks to people on a terminal and to machines with --json."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from shardwise.config import DTYPES, EngineConfig, Layout
from shardwise.params import SamplingParams
from shardwise.rows import document, read_rows, submit_row, timings_of

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run one large language model on any layout of devices: any layout, one answer.",
)

ModelOption = Annotated[str, typer.Option("--model", "-m", help="Alias, Hugging Face directory, .gguf file or hub id.")]
LayoutOption = Annotated[str, typer.Option("--layout", "-l", help="Such as tp2, pp2 or dp2.tp2.pp2; 1 is one device.")]
DtypeOption = Annotated[str, typer.Option(help=f"Number format of the weights: {', '.join(DTYPES)}.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
KernelsOption = Annotated[str, typer.Option(help="auto, native or torch.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]
SplitOption = Annotated[str | None, typer.Option(help="Shares of the tp ranks, such as 3,1.")]
StagesOption = Annotated[str | None, typer.Option(help="Layers of the pp stages, such as 12,18.")]


def main() -> None:
    """Entry point: what went wrong is said in one line on stderr, and the exit code is not 0.

    1: some rows failed; 2: wrong usage or an impossible request; 3: the model's files are broken; 5: a rank failed;
    130: interrupted.
    """
    from shardwise.runtime.executor import RankFailure
    from shardwise.weights.checkpoint import LoadError

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app()
    except LoadError as error:
        _fail(str(error), 3)
    except ValueError as error:
        _fail(str(error), 2)
    except RankFailure as error:
        _fail(f"{error}\n{error.detail}".rstrip(), 5)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read our output has left
        sys.exit(1)


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; several run together.")] = None,
    model: ModelOption = "smollm2",
    layout: LayoutOption = "1",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that hold this probability; 1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this likely relative to the best; 0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens on every layout.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="End at this token id; several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the model's end tokens.")] = False,
    chat: Annotated[bool, typer.Option(help="Each prompt is a user's message, put through the chat template.")] = False,
    input: Annotated[Path | None, typer.Option(help="JSON lines with prompt or messages, and sampling fields.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON lines, one per input line, in order.")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    kernels: KernelsOption = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads per rank; default: the cores, shared evenly.")] = None,
    split: SplitOption = None,
    stages: StagesOption = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest context in tokens.")] = None,
    kv_tokens: Annotated[int | None, typer.Option(help="KV cache of a replica, in tokens.")] = None,
    max_batch_tokens: Annotated[int, typer.Option(help="Most new tokens in one step.")] = 512,
    max_chunk: Annotated[int, typer.Option(help="Most new tokens of one sequence in one step.")] = 512,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences running at once.")] = 256,
    prefix_cache: Annotated[bool, typer.Option(help="Reuse the KV cache of equal beginnings.")] = True,
    stream: Annotated[bool, typer.Option(help="Print text as it is generated (one prompt).")] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue prompts, or answer them with --chat."""
    base: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": tuple(stop or ()),
        "stop_token_ids": tuple(stop_token_id or ()),
        "ignore_eos": ignore_eos,
    }
    SamplingParams(**base)
    rows: Iterator[dict[str, Any] | str]
    if input is not None:
        if prompts:
            raise ValueError("give prompts or --input, not both")
        rows = read_rows(input)
    elif prompts:
        key = "messages" if chat else "prompt"
        rows = iter([{key: [{"role": "user", "content": text}] if chat else text} for text in prompts])
    else:
        raise ValueError("nothing to do: give a prompt or --input FILE.jsonl")
    if output is not None and (as_json or stream):
        raise ValueError("--output writes JSON lines; leave out --json and --stream")
    if output is not None and not output.absolute().parent.is_dir():
        raise ValueError(f"--output {output}: there is no directory {output.parent}; make it first")
    if stream and (as_json or input is not None or len(prompts or ()) != 1):
        raise ValueError("--stream prints one prompt's text; give exactly one prompt, without --json")
    settings: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "kernels": kernels,
        "threads": threads,
        "split": _numbers("split", split, float),
        "stages": _numbers("stages", stages, int),
        "max_model_len": max_model_len,
        "kv_tokens": kv_tokens,
        "max_batch_tokens": max_batch_tokens,
        "max_chunk": max_chunk,
        "max_num_seqs": max_num_seqs,
        "prefix_cache": prefix_cache,
    }
    EngineConfig(layout=Layout.parse(layout), **settings)
    with _status("starting") as say:
        from shardwise.llm import LLM

        llm = LLM(model, layout, on_progress=say, **settings)
    with llm:
        chosen = llm.figures[0][0]["kernels"]
        if kernels == "auto" and str(chosen).startswith("torch"):
            print(f"shardwise: {chosen}", file=sys.stderr)
        _say(f"{llm.source.resolved.source} · layout {llm.plan.engine.layout} · {llm.plan.dtype} · {llm.load_s:.1f} s")
        numbers: list[int | str] = []
        for index, row in enumerate(rows):
            try:
                numbers.append(submit_row(llm, row, base, index))
            except ValueError as error:
                if input is None and not as_json:
                    raise
                numbers.append(str(error))
        if stream:
            assert isinstance(numbers[0], int)
            for piece in llm.pieces(numbers[0]):
                print(piece.text, end="", flush=True)
            print()
            return
        done = []
        failed = 0
        sink = output.open("w", encoding="utf-8") if output is not None else None
        documents = []
        try:
            with _progress(len(numbers)) as advance:
                for index, number in enumerate(numbers):
                    if isinstance(number, int):
                        result = llm.result(number)
                        done.append(result)
                        entry = document(result)
                    else:
                        failed += 1
                        entry = {"index": index, "error": number}
                    advance()
                    if sink is not None:
                        print(json.dumps(entry, ensure_ascii=False), file=sink, flush=True)
                    else:
                        documents.append(entry)
        finally:
            if sink is not None:
                sink.close()
        timings = timings_of(llm.load_s, done)
        if as_json:
            whole = {"model": llm.source.resolved.source, "layout": str(llm.plan.engine.layout), "outputs": documents}
            print(json.dumps({**whole, "timings": timings}, ensure_ascii=False))
        elif sink is None:
            for entry in documents:
                if len(documents) > 1:
                    print(f"── {entry['index']}")
                print(entry.get("text", f"error: {entry.get('error')}"))
        _say(f"{timings['generated_tokens']} tokens · {timings['decode_tokens_per_s']:.1f} tokens/s")
    if failed:
        if input is None:
            raise ValueError(next(number for number in numbers if isinstance(number, str)))
        _fail(f"{failed} of {len(numbers)} rows failed; the others are done", 1)


@app.command()
def verify(
    model: ModelOption = "smollm2",
    layouts: Annotated[str, typer.Option(help="Layouts to compare, separated by commas.")] = "1,tp2,pp2",
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    batches: Annotated[str, typer.Option(help="How many prompts run together.")] = "1,4,12",
    chunks: Annotated[str, typer.Option(help="Prefill chunk sizes, in tokens.")] = "1,7,64,512",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 16,
    tolerance: Annotated[float | None, typer.Option(help="Allow this largest difference of a logit.")] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Check only the kernels, on this machine.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Prove that every layout, batch size and chunk size gives one answer: one hash of all logits."""
    from shardwise.verify import KernelReport, Report, verify_kernels, verify_layouts

    report: Report | KernelReport
    if kernels:
        report = verify_kernels()
    else:
        named = [Layout.parse(text) for text in layouts.split(",")]
        sizes = _numbers("batches", batches, int) or ()
        steps = _numbers("chunks", chunks, int) or ()
        with _status("verifying") as say:
            report = verify_layouts(model, named, sizes, steps, max_tokens, tolerance, say, dtype=dtype, device=device)
    if as_json:
        print(json.dumps(report.document()))
    else:
        report.show()
    sys.exit(0 if report.ok else 1)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="Alias, Hugging Face directory, .gguf file or hub id.")],
    layout: LayoutOption = "1",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    split: SplitOption = None,
    stages: StagesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's numbers and what each rank would hold, without reading weights."""
    from shardwise.describe import describe, show

    engine = EngineConfig(
        layout=Layout.parse(layout),
        dtype=dtype,
        device=device,
        split=_numbers("split", split, float),
        stages=_numbers("stages", stages, int),
    )
    document = describe(model, engine)
    if as_json:
        print(json.dumps(document))
    else:
        show(document)


def _numbers(name: str, text: str | None, kind: Callable[[str], Any]) -> tuple[Any, ...] | None:
    if text is None:
        return None
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--{name} must be numbers separated by commas, not {text!r}") from None


def _say(text: str) -> None:
    """A remark for people; quiet in a pipe."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


@contextmanager
def _status(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner whose text can be changed; quiet in a pipe."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar over the prompts; quiet in a pipe and for a single one."""
    if not sys.stderr.isatty() or total < 2:
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress(transient=True) as progress:
        task = progress.add_task("generating", total=total)
        yield lambda: progress.advance(task)


def _fail(text: str, code: int) -> NoReturn:
    print(f"shardwise: {text}", file=sys.stderr)
    sys.exit(code)
