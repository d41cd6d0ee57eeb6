"""The command line: generate, verify, inspect. Talks to people on a terminal and to machines with --json."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from shardwise.config import DTYPES, EngineConfig, Layout, Speculation
from shardwise.params import SamplingParams
from shardwise.progress import status

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
SpeculateOption = Annotated[str | None, typer.Option(help="draft=MODEL, ngram or self, then ,k=auto and more.")]
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
    context: typer.Context,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; several run together.")] = None,
    model: ModelOption = "smollm2",
    layout: LayoutOption = "1",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate; 0 only scores the prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that hold this probability; 1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this likely relative to the best; 0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens on every layout.")] = None,
    n: Annotated[int, typer.Option(help="Independent continuations of each prompt.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    stop_token_ids: Annotated[list[int] | None, typer.Option("--stop-token-id", help="End at this token.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the model's end tokens.")] = False,
    min_tokens: Annotated[int, typer.Option(help="No end token before so many tokens.")] = 0,
    presence_penalty: Annotated[float, typer.Option(help="Lower the logits of tokens generated before, once.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same for every time that they were generated.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Divide logits of prompt and generated tokens.")] = 1.0,
    logit_bias: Annotated[list[str] | None, typer.Option(help="ID=BIAS, -100 to 100; several times.")] = None,
    allowed_token_ids: Annotated[list[int] | None, typer.Option("--allowed-token-id", help="Only these.")] = None,
    bad_words: Annotated[list[str] | None, typer.Option("--bad-word", help="Never this text; several times.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities of tokens and so many likeliest.")] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="The same for the prompt's tokens.")] = None,
    skip_special_tokens: Annotated[bool, typer.Option(help="Leave special tokens out of the text.")] = True,
    echo: Annotated[bool, typer.Option(help="Begin the text with the prompt.")] = False,
    json_schema: Annotated[Path | None, typer.Option(help="A file: the text is JSON of this schema.")] = None,
    regex: Annotated[str | None, typer.Option(help="The whole text matches this expression.")] = None,
    ebnf: Annotated[Path | None, typer.Option(help="A file: the text obeys this grammar (GBNF or Lark).")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The text is one of these; several times.")] = None,
    json_object: Annotated[bool, typer.Option(help="The text is a JSON object.")] = False,
    generation_config: Annotated[bool, typer.Option(help="Take defaults from generation_config.json.")] = True,
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
    speculate: SpeculateOption = None,
    stream: Annotated[bool, typer.Option(help="Print text as it is generated (one prompt).")] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue prompts, or answer them with --chat."""
    from shardwise.generate import Job, run

    given = {
        name: value
        for name, value in context.params.items()
        if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"  # typer may bring a click of its own
    }
    asked = {item.name: given[item.name] for item in fields(SamplingParams) if item.name in given}
    if logit_bias is not None:
        asked["logit_bias"] = _biases(logit_bias)
    for name, file in (("json_schema", json_schema), ("ebnf", ebnf)):
        if file is not None:
            asked[name] = _text(f"--{name.replace('_', '-')}", file)
    SamplingParams(**asked)
    settings = {item.name: given[item.name] for item in fields(EngineConfig) if item.name in given}
    settings |= {"layout": Layout.parse(layout), "split": _numbers("split", split, float)}
    settings |= {"stages": _numbers("stages", stages, int)}
    settings |= {"speculate": Speculation.parse(speculate) if speculate is not None else None}
    EngineConfig(**settings)
    job = Job(model, settings, asked, generation_config, prompts or [], chat, input, output, stream, as_json)
    failed, total = run(job)
    if failed:
        _fail(f"{failed} of {total} rows failed; the others are done", 1)


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
        with status("verifying") as say:
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
    speculate: SpeculateOption = None,
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
        speculate=Speculation.parse(speculate) if speculate is not None else None,
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


def _text(option: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} {file}: can't be read: {error}") from None


def _biases(pairs: list[str]) -> dict[int, float]:
    found = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            raise ValueError(f"--logit-bias must be ID=BIAS, such as 42=-100, not {pair!r}") from None
    return found


def _fail(text: str, code: int) -> NoReturn:
    print(f"shardwise: {text}", file=sys.stderr)
    sys.exit(code)
