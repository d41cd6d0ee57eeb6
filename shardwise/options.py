"""Options that several commands have, and how what was said of them becomes settings. Knows nothing of what is run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Annotated, Any

import typer

from shardwise.config import EngineConfig, Layout
from shardwise.features import DTYPES, Compile, MaxMemory, Quantization, Speculation, read_options
from shardwise.world import find_world

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
MemoryOption = Annotated[str | None, typer.Option(help="Most memory of a rank, 10GB or 0=10GB,1=6GB,cpu=20GB.")]
OffloadOption = Annotated[str | None, typer.Option(help="Directory for weights beyond that; default: the cache's.")]
CompileOption = Annotated[
    str | None, typer.Option(help="Backend of torch.compile: inductor, torch_tensorrt, openvino, …")
]
CompileModeOption = Annotated[str | None, typer.Option(help="The backend's mode, such as max-autotune.")]
CompileOptionsOption = Annotated[str | None, typer.Option(help="The backend's options as a JSON object; dynamic too.")]
ProfileOption = Annotated[str | None, typer.Option(help="Directory for a trace of each rank's first steps.")]
PrefixOption = Annotated[bool, typer.Option(help="Reuse the KV cache of equal beginnings.")]


def given_in(context: typer.Context) -> dict[str, Any]:
    """What was said, by the names of the parameters; to start under torchrun says a layout, if nothing else does."""
    given = {
        name: value
        for name, value in context.params.items()
        if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"  # typer may bring a click of its own
    }
    world = find_world(os.environ)
    if world is not None and "layout" in context.params and not {"layout", "recipe"} & given.keys():
        given["layout"] = str(world.layout)
    return given


def engine_settings(
    given: dict[str, Any], layout: str, split: str | None, stages: str | None, speculate: str | None
) -> dict[str, Any]:
    """Fields of EngineConfig."""
    settings = {item.name: given[item.name] for item in fields(EngineConfig) if item.name in given}
    if "quantize" in given:
        settings["quantize"] = quantization(given["quantize"])
    if {"compile", "compile_mode", "compile_options"} & given.keys():
        settings["compile"] = compilation(*map(given.get, ("compile", "compile_mode", "compile_options")))
    if "max_memory" in given:
        settings["max_memory"] = memory(given["max_memory"])
    if "device_ids" in given:
        settings["device_ids"] = numbers("device-ids", given["device_ids"], int)
    settings |= {"layout": Layout.parse(given.get("layout", layout)), "split": numbers("split", split, float)}
    settings |= {"stages": numbers("stages", stages, int)}
    return settings | {"speculate": Speculation.parse(speculate) if speculate is not None else None}


def quantization(text: str | None) -> Quantization | None:
    """What --quantize asks for."""
    return Quantization.parse(text) if text is not None else None


def compilation(backend: str | None, mode: str | None, options: str | None) -> Compile | None:
    """What --compile, --compile-mode and --compile-options ask for together."""
    if backend is None:
        if mode is not None or options is not None:
            raise ValueError("--compile-mode and --compile-options are for --compile BACKEND, such as inductor")
        return None
    found = Compile.parse(backend)
    if (mode is not None and found.mode is not None) or (options is not None and found.options):
        raise ValueError(f"--compile {backend} says already what --compile-mode or --compile-options say")
    found = replace(found, mode=mode) if mode is not None else found
    return replace(found, options=read_options(options)) if options is not None else found


def memory(text: str | None) -> MaxMemory | None:
    """What --max-memory asks for."""
    return MaxMemory.parse(text) if text is not None else None


def numbers(name: str, text: str | None, kind: Callable[[str], Any]) -> tuple[Any, ...] | None:
    """The numbers in an option's text; ValueError, which names the option, if there is anything else."""
    if text is None:
        return None
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--{name} must be numbers separated by commas, not {text!r}") from None
