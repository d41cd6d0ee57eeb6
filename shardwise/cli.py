"""The command line, from generate and serve to convert and eval. Talks to people, and with --json to machines."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from shardwise.config import EngineConfig, Layout
from shardwise.convert.command import convert_checkpoint
from shardwise.evaluation import evaluation
from shardwise.mapping.command import map_inputs
from shardwise.options import (
    BatchTokensOption,
    CacheOption,
    ChunkOption,
    CompileModeOption,
    CompileOption,
    CompileOptionsOption,
    ContextOption,
    DeviceOption,
    DtypeOption,
    KernelsOption,
    LayoutOption,
    MemoryOption,
    ModelOption,
    OffloadOption,
    PrefixOption,
    ProfileOption,
    QuantizeOption,
    SequencesOption,
    SpeculateOption,
    SplitOption,
    StagesOption,
    ThreadsOption,
    compilation,
    engine_settings,
    given_in,
    memory,
    numbers,
    quantization,
)
from shardwise.params import SamplingParams
from shardwise.progress import status
from shardwise.recipes.command import recipes
from shardwise.serving import chat, serve
from shardwise.world import find_world

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run one large language model on any layout of devices: any layout, one answer.",
)

SPREAD = ("generate", "serve", "chat", "verify", "eval")
"""Commands whose ranks may be on several hosts."""
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""What happens to output that we are asked for: its reader leaves, or there is no room for it."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]


def main() -> None:
    """Entry point: what went wrong is said in one line on stderr, and the exit code is not 0.

    1: some rows failed, or the disk is full; 2: wrong usage or an impossible request; 3: the model's files are broken;
    4: the port is taken; 5: a rank failed; 130: interrupted.
    """
    from shardwise.runtime.executor import RankFailure
    from shardwise.server.port import PortTaken
    from shardwise.weights.checkpoint import LoadError

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        _lend(sys.argv[1:])
        app()
    except LoadError as error:
        _fail(str(error), 3)
    except ValueError as error:
        _fail(str(error), 2)
    except PortTaken as error:
        _fail(str(error), 4)
    except RankFailure as error:
        _fail(f"{error}\n{error.detail}".rstrip(), 5)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or what is left would fail again at the end
        if error.errno == errno.EPIPE:  # whoever read our output has left
            sys.exit(1)
        _fail(f"the output can't be written: {error.strerror}", 1)


@app.command()
def generate(
    context: typer.Context,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts; several run together. With --config also key=value.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--config", "-c", help="A recipe: one of ours, or a .yaml file.")
    ] = None,
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
    quantize: QuantizeOption = None,
    device: DeviceOption = "auto",
    kernels: KernelsOption = "auto",
    threads: ThreadsOption = None,
    split: SplitOption = None,
    stages: StagesOption = None,
    max_model_len: ContextOption = None,
    kv_tokens: CacheOption = None,
    max_batch_tokens: BatchTokensOption = 512,
    max_chunk: ChunkOption = 512,
    max_num_seqs: SequencesOption = 256,
    prefix_cache: PrefixOption = True,
    speculate: SpeculateOption = None,
    compile: CompileOption = None,
    compile_mode: CompileModeOption = None,
    compile_options: CompileOptionsOption = None,
    max_memory: MemoryOption = None,
    offload_dir: OffloadOption = None,
    profile: ProfileOption = None,
    stream: Annotated[bool, typer.Option(help="Print text as it is generated (one prompt).")] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue prompts, or answer them with --chat."""
    from shardwise.generate import Job, run
    from shardwise.recipes.recipe import Recipe, open_recipe

    given = given_in(context)
    texts = prompts or []
    by, texts = open_recipe(recipe, texts) if recipe is not None else (Recipe(model), texts)
    asked = {item.name: given[item.name] for item in fields(SamplingParams) if item.name in given}
    if logit_bias is not None:
        asked["logit_bias"] = _biases(logit_bias)
    for name, file in (("json_schema", json_schema), ("ebnf", ebnf)):
        if file is not None:
            asked[name] = _text(f"--{name.replace('_', '-')}", file)
    asked = by.sampling | asked
    SamplingParams(**asked)
    said = engine_settings(given, layout, split, stages, speculate)
    settings = by.settings | {name: value for name, value in said.items() if name in given}
    EngineConfig(**settings)
    job = Job(
        given.get("model", by.model),
        settings,
        asked,
        given.get("generation_config", by.generation_config),
        tuple(texts) or (by.prompts if input is None else ()),
        by.opening(given.get("chat")),
        input if input is not None or texts else by.input,
        output if output is not None else by.output,
        stream,
        as_json,
    )
    failed, total = run(job)
    if failed:
        _fail(f"{failed} of {total} rows failed; the others are done", 1)


@app.command()
def verify(
    model: ModelOption = "smollm2",
    layouts: Annotated[str, typer.Option(help="Layouts to compare, separated by commas.")] = "1,tp2,pp2",
    dtype: DtypeOption = "float32",
    quantize: QuantizeOption = None,
    device: DeviceOption = "auto",
    compile: CompileOption = None,
    compile_mode: CompileModeOption = None,
    compile_options: CompileOptionsOption = None,
    max_memory: MemoryOption = None,
    offload_dir: OffloadOption = None,
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
        sizes = numbers("batches", batches, int) or ()
        steps = numbers("chunks", chunks, int) or ()
        with status("verifying") as say:
            how = {"dtype": dtype, "quantize": quantization(quantize), "device": device, "offload_dir": offload_dir}
            parsed = {
                "max_memory": memory(max_memory),
                "compile": compilation(compile, compile_mode, compile_options),
            }
            report = verify_layouts(model, named, sizes, steps, max_tokens, tolerance, say, **how, **parsed)
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
    quantize: QuantizeOption = None,
    device: DeviceOption = "auto",
    split: SplitOption = None,
    stages: StagesOption = None,
    max_model_len: ContextOption = None,
    kv_tokens: CacheOption = None,
    max_batch_tokens: BatchTokensOption = 512,
    max_num_seqs: SequencesOption = 256,
    speculate: SpeculateOption = None,
    max_memory: MemoryOption = None,
    offload_dir: OffloadOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's numbers and what each rank would hold, without reading weights."""
    from shardwise.describe import describe, show

    engine = EngineConfig.read(
        layout,
        dtype=dtype,
        quantize=quantize,
        device=device,
        split=numbers("split", split, float),
        stages=numbers("stages", stages, int),
        max_model_len=max_model_len,
        kv_tokens=kv_tokens,
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
        speculate=speculate,
        max_memory=max_memory,
        offload_dir=offload_dir,
    )
    document = describe(model, engine)
    if as_json:
        print(json.dumps(document))
    else:
        show(document)


app.command("convert")(convert_checkpoint)
app.add_typer(evaluation, name="eval")
app.add_typer(recipes, name="recipes")
app.command()(serve)
app.command()(chat)
app.command("map")(map_inputs)


def _lend(arguments: list[str]) -> None:
    """In a world of torchrun's only the process of rank 0 runs the command; others lend it their host, and exit."""
    world = find_world(os.environ)
    if world is None or not world.rank or arguments[:1] == ["map"]:  # which gives each process its share
        return
    from shardwise.runtime.hosts.agent import attend

    sys.exit(attend(world) if arguments[:1] and arguments[0] in SPREAD and "--help" not in arguments else 0)


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
