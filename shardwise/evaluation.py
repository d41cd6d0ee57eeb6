"""How well a model on a layout foresees a text: `shardwise eval perplexity`. Knows only Python's door to the model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.config import EngineConfig
from shardwise.options import (
    DeviceOption,
    DtypeOption,
    KernelsOption,
    LayoutOption,
    MemoryOption,
    ModelOption,
    OffloadOption,
    QuantizeOption,
    SplitOption,
    StagesOption,
    ThreadsOption,
    engine_settings,
    given_in,
)
from shardwise.progress import bar, say, status

evaluation = typer.Typer(no_args_is_help=True, help="Measure how good a model's answers are, not how fast.")


@evaluation.callback()
def measure() -> None:
    """Measure how good a model's answers are, not how fast."""


@evaluation.command()
def perplexity(
    context: typer.Context,
    model: ModelOption = "smollm2",
    text: Annotated[Path | None, typer.Option(help="A file of text; default: a fixed one of a few pages.")] = None,
    window: Annotated[int, typer.Option(help="Tokens that are scored together, each by those before it.")] = 512,
    layout: LayoutOption = "1",
    dtype: DtypeOption = "auto",
    quantize: QuantizeOption = None,
    device: DeviceOption = "auto",
    kernels: KernelsOption = "auto",
    threads: ThreadsOption = None,
    split: SplitOption = None,
    stages: StagesOption = None,
    max_memory: MemoryOption = None,
    offload_dir: OffloadOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Perplexity: e to the mean surprise at the tokens of a text, but for the first of each window."""
    from shardwise.llm import LLM
    from shardwise.passage import PASSAGE

    settings = engine_settings(given_in(context), layout, split, stages, None)
    EngineConfig(**settings)
    if window < 2:
        raise ValueError(f"--window must be at least 2, for a token to have one before it, not {window}")
    try:
        body = PASSAGE if text is None else text.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"--text {text}: can't be read: {error}") from None
    with status("starting") as tell:
        llm = LLM(model, on_progress=tell, generation_config=False, **settings)
    for line in llm.plan.places():
        say(line)
    with llm:
        surprise, count = score(llm, body, window)
        done: dict[str, Any] = {
            "model": llm.source.resolved.source,
            "layout": str(llm.plan.engine.layout),
            "dtype": llm.plan.dtype,
            "quantize": str(llm.plan.quantize) if llm.plan.quantize is not None else None,
            "window": window,
            "tokens": count,
            "surprise": surprise / count,
            "perplexity": math.exp(surprise / count),
        }
    if as_json:
        print(json.dumps(done))
    else:
        print(f"{done['perplexity']:.4f} over {count} tokens · {done['quantize'] or done['dtype']} · {done['model']}")


def score(llm: Any, text: str, window: int) -> tuple[float, int]:
    """The surprise in nats at the tokens of ``text``, and how many were scored. ValueError for too short a text."""
    from shardwise.params import SamplingParams

    tokens = llm.tokenizer.encode(text)
    window = min(window, llm.plan.max_model_len)
    pieces = [tokens[start : start + window] for start in range(0, len(tokens), window)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    if not pieces:
        raise ValueError("the text has fewer than two tokens, so there is none to foresee")
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    numbers = [llm.submit(piece, params, index=index) for index, piece in enumerate(pieces)]
    found: list[float] = []
    with bar(len(numbers), "scoring") as advance:
        for number in numbers:
            found += [told.logprob for told in llm.result(number).prompt_logprobs]
            advance()
    return -math.fsum(found), len(found)
