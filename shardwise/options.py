"""Options that several commands have, and how what was said of them becomes settings. Knows nothing of what is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import typer

from shardwise.config import DTYPES, EngineConfig, Layout, Quantization, Speculation

ModelOption = Annotated[str, typer.Option("--model", "-m", help="Alias, Hugging Face directory, .gguf file or hub id.")]
LayoutOption = Annotated[str, typer.Option("--layout", "-l", help="Such as tp2, pp2 or dp2.tp2.pp2; 1 is one device.")]
DtypeOption = Annotated[str, typer.Option(help=f"Number format of the weights: {', '.join(DTYPES)}.")]
QuantizeOption = Annotated[str | None, typer.Option(help="Round weights to int8 or int4, ,group=G if you like.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
KernelsOption = Annotated[str, typer.Option(help="auto, native or torch.")]
SpeculateOption = Annotated[str | None, typer.Option(help="draft=MODEL, ngram or self, then ,k=auto and more.")]
SplitOption = Annotated[str | None, typer.Option(help="Shares of the tp ranks, such as 3,1.")]
StagesOption = Annotated[str | None, typer.Option(help="Layers of the pp stages, such as 12,18.")]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads per rank; default: the cores, shared evenly.")]
ContextOption = Annotated[int | None, typer.Option(help="Longest context in tokens.")]
CacheOption = Annotated[int | None, typer.Option(help="KV cache of a replica, in tokens.")]
BatchTokensOption = Annotated[int, typer.Option(help="Most new tokens in one step.")]
ChunkOption = Annotated[int, typer.Option(help="Most new tokens of one sequence in one step.")]
SequencesOption = Annotated[int, typer.Option(help="Most sequences running at once.")]
PrefixOption = Annotated[bool, typer.Option(help="Reuse the KV cache of equal beginnings.")]


def given_in(context: typer.Context) -> dict[str, Any]:
    """What was said, by the names of the parameters."""
    return {
        name: value
        for name, value in context.params.items()
        if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"  # typer may bring a click of its own
    }


def engine_settings(
    given: dict[str, Any], layout: str, split: str | None, stages: str | None, speculate: str | None
) -> dict[str, Any]:
    """Fields of EngineConfig."""
    settings = {item.name: given[item.name] for item in fields(EngineConfig) if item.name in given}
    if "quantize" in given:
        settings["quantize"] = quantization(given["quantize"])
    settings |= {"layout": Layout.parse(layout), "split": numbers("split", split, float)}
    settings |= {"stages": numbers("stages", stages, int)}
    return settings | {"speculate": Speculation.parse(speculate) if speculate is not None else None}


def quantization(text: str | None) -> Quantization | None:
    """What --quantize asks for."""
    return Quantization.parse(text) if text is not None else None


def numbers(name: str, text: str | None, kind: Callable[[str], Any]) -> tuple[Any, ...] | None:
    """The numbers in an option's text; ValueError, which names the option, if there is anything else."""
    if text is None:
        return None
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--{name} must be numbers separated by commas, not {text!r}") from None
