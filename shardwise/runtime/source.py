"""From a model argument to its numbers and its tensors by canonical name, every one of them accounted for.

Reads headers and JSON only, in the front process: no weights, no torch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from shardwise.config import Layout
from shardwise.models.config import ModelConfig
from shardwise.models.families.family import Family, ids
from shardwise.models.families.table import BY_ARCHITECTURE, BY_MODEL_TYPE, find
from shardwise.models.shard import make_shard
from shardwise.weights.checkpoint import Index, LoadError
from shardwise.weights.gguf import read_gguf
from shardwise.weights.resolve import Resolved, resolve
from shardwise.weights.safetensors import index_safetensors

MAX_JSON_BYTES = 10 * 2**20


@dataclass(frozen=True)
class Source:
    """A model on disk, checked against its own numbers."""

    resolved: Resolved
    config: ModelConfig
    index: Index
    eos: frozenset[int]
    """What config.json and generation_config.json, or the GGUF metadata, name; the tokenizer may add more."""
    metadata: Mapping[str, Any] | None
    """GGUF metadata, which holds the tokenizer; None for a Hugging Face directory."""
    generation: Mapping[str, Any]
    """generation_config.json; empty where there is none."""


def open_source(model: str | Path) -> Source:
    """Resolve ``model`` (alias, directory, .gguf file or hub id) and read its headers.

    Raises LoadError for broken or incomplete files, ValueError for a model that can't be found or isn't supported.
    """
    resolved = resolve(str(model))
    path = Path(resolved.path)
    if resolved.kind == "gguf":
        metadata, stored = read_gguf(path)
        metadata["tensors"] = frozenset(stored.tensors)
        family = find(BY_ARCHITECTURE, "general.architecture", metadata)
        config = replace(family.from_gguf(metadata), dtype=_gguf_format(stored))
        names = {name: family.gguf_name(name) or name for name in stored.tensors}
        generation: dict[str, Any] = {}
    else:
        metadata = None
        values = read_json(path / "config.json")
        family = find(BY_MODEL_TYPE, "model_type", values)
        config = family.from_hf(values)
        stored = index_safetensors(path)
        names = {name: family.hf_name(name) for name in stored.tensors}
        file = path / "generation_config.json"
        generation = read_json(file) if file.is_file() else {}
    index = Index(files=stored.files, tensors={names[name]: info for name, info in stored.tensors.items()})
    account(config, family, index, path)
    eos = frozenset(config.eos + ids(generation.get("eos_token_id")))
    return Source(resolved, config, index, eos, metadata, generation)


def _gguf_format(index: Index) -> str:
    """The number format of most of a GGUF file's numbers, float32 where those are quantised."""
    sizes: Counter[str] = Counter()
    for info in index.tensors.values():
        sizes[info.dtype] += prod(info.shape)
    return {"F16": "float16", "BF16": "bfloat16"}.get(sizes.most_common(1)[0][0], "float32") if sizes else "float32"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size; LoadError naming the file otherwise."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise LoadError(f"{path}: larger than {MAX_JSON_BYTES} bytes, which no configuration is")
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise LoadError(f"{path}: can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise LoadError(f"{path}: expected a JSON object")
    return values


def account(config: ModelConfig, family: Family, index: Index, path: Path) -> None:
    """LoadError unless every parameter has its tensor, of the right shape, and no tensor is left over."""
    plan = family.plan(config, make_shard(config, Layout()))
    wanted = {placement.tensor: placement.shape for placements in plan.values() for placement in placements}
    missing = sorted(set(wanted) - set(index.tensors))
    if missing:
        raise LoadError(f"{path}: the checkpoint lacks {_some(missing)}")
    for name, shape in wanted.items():
        found = tuple(index.tensors[name].shape)
        if found != shape:
            raise LoadError(
                f"{path}: tensor {name} has shape {list(found)}, but the configuration asks for {list(shape)}"
            )
    tied = {"lm_head.weight"} if config.tied else set()  # some checkpoints store the tied head as well
    extra = sorted(name for name in set(index.tensors) - set(wanted) - tied if not family.ignored(name))
    if extra:
        raise LoadError(
            f"{path}: the checkpoint holds {_some(extra)}, of which this family ({family.name}) makes no use: "
            "its answer would not be the model's"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{len(names)} tensors ({shown}{', …' if len(names) > 5 else ''})" if len(names) > 1 else f"tensor {shown}"
