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
from shardwise.features import Quantization
from shardwise.models.config import ModelConfig
from shardwise.models.families.family import Family, ids
from shardwise.models.families.table import BY_MODEL_TYPE, find, find_gguf, make_plan
from shardwise.models.shard import make_shard
from shardwise.weights.checkpoint import DENSE, Index, LoadError
from shardwise.weights.gguf import read_gguf
from shardwise.weights.resolve import Resolved, resolve
from shardwise.weights.safetensors import index_safetensors
from shardwise.weights.stored import FORMATS, OFFSETS, SCALES, stored_shapes

MAX_JSON_BYTES = 10 * 2**20
FLOATS = ("F64", "F32", "F16", "BF16")
METHOD = "shardwise"
"""quant_method of quantization_config in config.json."""


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
    quantization = None
    if resolved.kind == "gguf":
        metadata, stored = read_gguf(path)
        metadata["tensors"] = frozenset(stored.tensors)
        family = find_gguf(metadata)
        config = replace(family.from_gguf(metadata), dtype=_gguf_format(stored))
        names = {name: family.gguf_name(name) or name for name in stored.tensors}
        generation: dict[str, Any] = {}
    else:
        metadata = None
        values = read_json(path / "config.json")
        family = find(BY_MODEL_TYPE, "model_type", values)
        config = family.from_hf(values)
        quantization = stored_quantization(values)
        stored = index_safetensors(path)
        names = {name: family.hf_name(name) for name in stored.tensors}
        file = path / "generation_config.json"
        generation = read_json(file) if file.is_file() else {}
    tensors = {names[name]: info for name, info in stored.tensors.items()}
    if len(tensors) < len(names):
        twice = next(name for name, count in Counter(names.values()).items() if count > 1)
        both = " and ".join(name for name, canonical in names.items() if canonical == twice)
        raise LoadError(f"{path}: tensors {both} are one parameter of this family ({family.name})")
    if "lm_head.weight" in tensors:  # it may differ from the embedding, whatever the configuration says
        config = replace(config, tied=False)
    index = Index(files=stored.files, tensors=tensors, quantization=quantization)
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
    if config.num_layers > len(index.tensors):  # said before a plan is made of so many
        raise LoadError(f"{path}: {len(index.tensors)} tensors can't be the {config.num_layers} layers of num_layers")
    plan = make_plan(config, make_shard(config, Layout()), index.quantization)
    wanted: dict[str, tuple[int, ...]] = {}
    for placement in (placement for placements in plan.values() for placement in placements):
        wanted |= {placement.tensor: placement.shape} if placement.quantize is None else stored_shapes(placement)
    missing = sorted(set(wanted) - set(index.tensors))
    if missing:
        raise LoadError(f"{path}: the checkpoint lacks {_some(missing)}")
    for name, shape in wanted.items():
        found = tuple(index.tensors[name].shape)
        if found != shape:
            raise LoadError(
                f"{path}: tensor {name} has shape {list(found)}, but the configuration asks for {list(shape)}"
            )
        dtype = index.tensors[name].dtype
        if dtype in DENSE and dtype not in FLOATS and name + SCALES not in wanted:
            raise LoadError(f"{path}: tensor {name} is {dtype}, and parameters are {', '.join(FLOATS)}")
    for name, info in index.tensors.items() if index.quantization is not None else ():
        if name.endswith((SCALES, OFFSETS)) and info.dtype != "BF16":
            raise LoadError(f"{path}: tensor {name} is {info.dtype}, not BF16")
        if name + SCALES in wanted and info.dtype != FORMATS[4 if name + OFFSETS in wanted else 8]:
            raise LoadError(f"{path}: tensor {name} is {info.dtype}, which doesn't go with {index.quantization}")
    extra = sorted(name for name in set(index.tensors) - set(wanted) if not family.ignored(name))
    if extra:
        raise LoadError(
            f"{path}: the checkpoint holds {_some(extra)}, of which this family ({family.name}) makes no use: "
            "its answer would not be the model's"
        )


def stored_quantization(values: Mapping[str, Any]) -> Quantization | None:
    """What config.json says of the weights: None, or as `convert` writes it; ValueError for another's format."""
    stored = values.get("quantization_config")
    if stored is None:
        return None
    method = stored.get("quant_method") if isinstance(stored, dict) else stored
    if method != METHOD:
        raise ValueError(
            f"model config: the weights are quantised by {method!r}, which is not read here; take the model as it was "
            "before, with --quantize int8 or int4"
        )
    return Quantization(stored.get("bits"), stored.get("group_size"))


def choose_quantization(asked: Quantization | None, source: Source) -> Quantization | None:
    """The checkpoint's own, or else as asked; ValueError where those are two."""
    stored = source.index.quantization
    if stored is not None and asked not in (None, stored):
        raise ValueError(
            f"quantize: {source.resolved.source} holds weights of {stored}, which can't become {asked}: leave it out, "
            f"or convert the original model with --quantize {asked}"
        )
    return stored or asked


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{len(names)} tensors ({shown}{', …' if len(names) > 5 else ''})" if len(names) > 1 else f"tensor {shown}"
