"""A model to convert, whatever its files: its numbers, its config.json, its tensors by the names of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.convert.gguf import config_json, write_tokenizer
from shardwise.convert.names import arrange, from_params, kind_of, merge
from shardwise.convert.pickled import LazyCheckpoint, find_pickled, open_pickled
from shardwise.models.config import ModelConfig
from shardwise.models.families.table import BY_MODEL_TYPE, find
from shardwise.runtime.source import account, open_source, read_json, stored_quantization
from shardwise.weights.checkpoint import Checkpoint, LoadError

KEPT = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "generation_config.json", "chat_template.jinja", "chat_template.json"),
)
"""Files that go along as they are."""


@dataclass(frozen=True)
class Given:
    """See the file's sentence."""

    what: str
    config: ModelConfig
    values: dict[str, Any]
    """config.json."""
    checkpoint: Checkpoint | LazyCheckpoint
    tokenizer: Callable[[Path], None]
    """Puts the tokenizer's files into a directory."""


def open_given(model: str, trust: Callable[[str], None]) -> Given:
    """Find ``model`` and read its headers; ``trust`` is told what is trusted, before a pickled file is opened.

    Raises LoadError for broken files, ValueError for a model that can't be found, or that can't be converted.
    """
    path = Path(model).expanduser()
    files = find_pickled(path)
    if files:
        return _pickled(path if path.is_dir() else path.parent, files, trust)
    source = open_source(model)
    if source.index.quantization is not None:
        raise ValueError(f"convert: {source.resolved.source} is {source.index.quantization} already; give the original")
    path, what = Path(source.resolved.path), source.resolved.source
    if source.metadata is None:
        values = read_json(path / "config.json")
        return Given(what, source.config, values, Checkpoint(source.index), lambda to: _copy(path, to))
    metadata = source.metadata
    values = config_json(source.config)
    return Given(what, source.config, values, Checkpoint(source.index), lambda to: write_tokenizer(to, metadata))


def _pickled(path: Path, files: Sequence[Path], trust: Callable[[str], None]) -> Given:
    config, params = path / "config.json", path / "params.json"
    if not config.is_file() and not params.is_file():
        raise LoadError(f"{path}: holds neither config.json nor params.json, so the numbers of the model aren't known")
    trust(
        f"opening {files[0].name}{f' and {len(files) - 1} more' if files[1:] else ''} "
        "with torch.load(weights_only=True): that no code in them can run is PyTorch's word, not ours"
    )
    opened = [open_pickled(file) for file in files]
    kind = kind_of([name for tensors in opened for name in tensors])
    tensors = merge(str(path), opened, kind)
    values = read_json(config) if config.is_file() else from_params(str(path), read_json(params), tensors)
    if stored_quantization(values) is not None:
        raise LoadError(f"{path}: config.json says quantised by shardwise, but the weights are pickled")
    family = find(BY_MODEL_TYPE, "model_type", values)
    if kind != "Hugging Face" and family.name != "llama":
        raise LoadError(f"{path}: tensors are named by {kind} for a Llama, but config.json says {family.name}")
    numbers = family.from_hf(values)
    tensors = arrange(tensors, kind, numbers.num_heads, numbers.num_kv_heads, numbers.head_dim)
    named = ((family.hf_name(name), tensor) for name, tensor in tensors.items())
    tensors = {name: tensor for name, tensor in named if not family.ignored(name)}  # such as masks, which are no floats
    checkpoint = LazyCheckpoint(str(path), tensors)
    account(numbers, family, checkpoint.index, path)
    what = f"directory {path} ({kind} checkpoint of {len(files)} pickled files)"
    return Given(what, numbers, values, checkpoint, lambda to: _copy(path, to))


def _copy(path: Path, to: Path) -> None:
    for name in KEPT:
        if (path / name).is_file():
            (to / name).write_bytes((path / name).read_bytes())
