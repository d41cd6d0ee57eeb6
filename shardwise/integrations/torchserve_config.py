"""What model-config.yaml may say to the handler that runs inside a real TorchServe. Knows no engine and no TorchServe.

All other sections are TorchServe's own business; of them only the device and the launcher are looked at.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config import EngineConfig, Layout
from shardwise.params import SamplingParams
from shardwise.shapes import located, values
from shardwise.strict_yaml import Section, read_file

UNTOLD = ("n", "logprobs", "prompt_logprobs")
"""Sampling fields that the answer, a plain text, has no place for."""
OTHER_WAYS = ("continuousBatching", "sequenceBatching")
OWN: dict[str, Any] = {"model": str, "max_new_tokens": int, "stream": bool, "generation_config": bool}


@dataclass(frozen=True)
class HandlerConfig:
    """The handler section, checked."""

    model: str
    engine: EngineConfig
    sampling: dict[str, Any]
    """Sampling fields of requests that don't say otherwise."""
    max_new_tokens: int | None
    """How many tokens a request gets, unless it asks for fewer; None leaves that to it."""
    stream: bool
    generation_config: bool
    asynchronous: bool
    """Does TorchServe bring requests while others run?"""
    one_gpu: bool
    """Is a GPU given by its number? With a ``parallelType`` all of a worker's are, as CUDA_VISIBLE_DEVICES."""


def read_handler_config(path: Path, environ: Mapping[str, str]) -> HandlerConfig:
    """The handler section of the model-config.yaml at ``path``; a relative model that stands beside it is meant there.

    ``environ`` tells whether torchrun has launched this worker. Raises ValueError, with the file's line, for unknown
    keys and for values that can't be.
    """
    whole = read_file(path)
    for key in OTHER_WAYS:
        if whole.get(key) is True:
            raise whole.error(
                key, f"{key} is another way of calling handlers: say asyncCommunication, which is as good"
            )
    asynchronous = whole.get("asyncCommunication") is True
    if asynchronous and whole.get("batchSize", 1) != 1:
        raise whole.error(
            "batchSize",
            "batchSize must be 1 with asyncCommunication, or TorchServe fails; requests run together anyway",
        )
    section = whole.get("handler")
    if not isinstance(section, Section):
        raise whole.error("handler", "handler must be a section that names at least a model")
    engine = typing.get_type_hints(EngineConfig)
    sampling = {**typing.get_type_hints(SamplingParams), "logit_bias": dict[int, float]}
    for name in ("max_tokens", *UNTOLD):
        del sampling[name]
    found = values(section, {**OWN, **engine, **sampling})
    if "model" not in found:
        raise ValueError(f"{section.where}: model is missing: an alias, a folder, a .gguf file or a hub id")
    most = found.get("max_new_tokens")
    chosen = {name: found[name] for name in sampling if name in found}
    settings = {name: found[name] for name in engine if name in found}
    if whole.get("deviceType") == "cpu":
        settings.setdefault("device", "cpu")
    try:
        settings["layout"] = _layout(whole, settings.get("layout"), environ)
        config = EngineConfig(**{"isolate": True, **settings})
        SamplingParams(**chosen)
    except ValueError as error:
        raise located(section, error) from None
    if most is not None and most < 1:
        raise section.error("max_new_tokens", f"max_new_tokens must be at least 1, not {most}")
    beside = path.parent / found["model"]
    return HandlerConfig(
        model=str(beside if beside.exists() else found["model"]),
        engine=config,
        sampling=chosen,
        max_new_tokens=most,
        stream=found.get("stream", False),
        generation_config=found.get("generation_config", True),
        asynchronous=asynchronous,
        one_gpu=whole.get("parallelType") in (None, "none"),
    )


def _layout(whole: Section, given: Layout | None, environ: Mapping[str, str]) -> Layout:
    """The layout asked for; of a torchrun group, if none is, its processes along the axis of ``parallelType``."""
    world = environ.get("WORLD_SIZE")
    if world is None:
        return given or Layout()
    if environ.get("LOCAL_WORLD_SIZE", world) != world:
        raise ValueError("torchrun: the group must be on one host; a layout over hosts is started by shardwise itself")
    kind = whole.get("parallelType")
    if given is None and kind not in ("tp", "pp"):
        raise ValueError(f"layout is missing: parallelType {kind} doesn't tell how {world} ranks are to share a model")
    layout = given or Layout.parse(f"{kind}{world}")
    if layout.world_size != int(world):
        raise ValueError(f"layout {layout} has {layout.world_size} ranks, and torchrun was told to start {world}")
    return layout
