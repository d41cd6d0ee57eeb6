"""What a model family says of itself: how to read its numbers, what its tensors are called and who owns which slice."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.models.config import ModelConfig
from shardwise.models.shard import Shard
from shardwise.parallel.placement import Placement, Plan, Run


def no_gguf(values: Mapping[str, Any]) -> ModelConfig:
    """Of a family that GGUF has no architecture for: the table never leads here."""
    raise ValueError("model config: this family has no GGUF files; give its Hugging Face directory")


@dataclass(frozen=True)
class Family:
    """One row of the table in ``families.table``."""

    name: str
    from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    """config.json → numbers; ValueError for a feature that would change the answer and is not built."""
    plan: Callable[[ModelConfig, Shard], Plan]
    """Every parameter of the decoder's part → the slices that make it up."""
    hf_name: Callable[[str], str]
    """A tensor's canonical name, for checkpoints that were saved with or without a prefix."""
    from_gguf: Callable[[Mapping[str, Any]], ModelConfig] = no_gguf
    """GGUF metadata → numbers."""
    gguf_name: Callable[[str], str | None] = lambda name: None
    """GGUF tensor name → canonical name, None if unknown."""
    ignored: Callable[[str], bool] = lambda name: False
    """Canonical names that carry no weights of their own, such as masks and rope tables."""


def number(values: Mapping[str, Any], key: str, kind: type[int] | type[float], default: float | None = None) -> Any:
    """A finite number from an untrusted mapping; ValueError naming the key when it is missing or of another type."""
    value = values.get(key)
    if value is None:
        value = default
    if (
        isinstance(value, bool)
        or not isinstance(value, int if kind is int else int | float)
        or not abs(value) <= sys.float_info.max  # neither is NaN
    ):
        raise ValueError(
            f"model config: {key} must be {'a whole number' if kind is int else 'a number'}, not {value!r}"
        )
    return kind(value)


def vocabulary(values: Mapping[str, Any], arch: str) -> int:
    """Rows of the vocabulary that GGUF metadata names, or else its tokens; ValueError for neither."""
    tokens = values.get("tokenizer.ggml.tokens")
    rows: int = number(values, f"{arch}.vocab_size", int, len(tokens) if isinstance(tokens, list) else None)
    return rows


def ids(value: Any) -> tuple[int, ...]:
    """One token id, a list of them or None, as a tuple."""
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**63 for token in found):
        raise ValueError(f"model config: eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(found)


def number_format(values: Mapping[str, Any]) -> str:
    """The dtype that config.json names, float32 where it is silent."""
    name = str(values.get("dtype") or values.get("torch_dtype") or "float32")
    return name if name in ("float32", "float16", "bfloat16", "float64") else "float32"


def vector(tensor: str, size: int, rows: Run | None = None) -> Placement:
    """A norm's weight or a bias: whole, or this rank's rows."""
    return Placement(tensor, (size,), rows or Run(0, size))


def matrix(tensor: str, shape: tuple[int, int], rows: Run | None = None, cols: Run | None = None) -> Placement:
    """A matrix stored as [output, input]: all of it, or the given rows or columns."""
    return Placement(tensor, shape, rows or Run(0, shape[0]), cols or Run(0, shape[1]))


def head(config: ModelConfig, shard: Shard, embedding: str) -> Plan:
    """The head on the last stage; nothing where it is the embedding, which this rank has."""
    if config.tied and shard.first:
        return {}
    stored = embedding if config.tied else "lm_head.weight"
    return {"head.weight": (matrix(stored, (config.vocab_size, config.hidden_size), shard.vocab),)}


def gguf_names(ends: Mapping[str, str], layer: Mapping[str, str], prefix: str) -> Callable[[str], str | None]:
    """A family's ``gguf_name``: ``ends`` maps whole names, ``layer`` the part between "blk.3." and ".weight".

    ``prefix`` is what stands before a layer's number in the canonical name.
    """

    def canonical(name: str) -> str | None:
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if match is None or match[2] not in layer:
            return ends.get(name)
        return f"{prefix}{match[1]}.{layer[match[2]]}.{match[3]}"

    return canonical
