"""How config.json and GGUF metadata spell rotary positions; what would turn them otherwise is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardwise.models.config import Rope
from shardwise.models.families.family import number

ORIGINAL = "original_max_position_embeddings"
READ = {
    *("rope_type", "type", "rope_theta", "factor", ORIGINAL, "partial_rotary_factor", "attention_factor", "truncate"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("finetuned", "max_position_embeddings"),  # these two change nothing
}
"""Keys of rope_scaling, which newer files call rope_parameters."""
READ_GGUF = {
    "type",
    "factor",
    "original_context_length",
    "finetuned",
    "attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
}
"""What follows rope.scaling. in the keys of GGUF metadata."""


def rope_from_hf(values: Mapping[str, Any], head_dim: int, positions: int) -> Rope:
    """As transformers reads config.json, where the original context at the top level comes before that of the scaling.

    Raises ValueError for what it does not read, and for a scaling that lacks a number.
    """
    scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise ValueError(f"model config: rope_scaling must be an object with a rope_type, not {scaling!r}")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(
            f"model config: rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn"
        )
    both = {**values, **scaling}
    unread = sorted(key for key, value in scaling.items() if value is not None and key not in READ)
    if number(both, "partial_rotary_factor", float, 1.0) != 1:
        unread.append("partial_rotary_factor")
    if unread:
        raise ValueError(f"model config: {', '.join(unread)} of rope scaling {kind!r} is not supported for this family")
    theta = number(both, "rope_theta", float, 10000.0)
    if kind == "default":
        return Rope(theta, head_dim)
    original = number(values if values.get(ORIGINAL) is not None else scaling, ORIGINAL, int, positions)
    if kind == "yarn" and scaling.get("factor", 0) is None:
        factor = positions / max(original, 1)
    else:
        factor = number(scaling, "factor", float)
    if kind == "linear":
        return Rope(theta, head_dim, kind, factor)
    if kind == "llama3":
        low, high = (number(scaling, f"{name}_freq_factor", float) for name in ("low", "high"))
        return Rope(theta, head_dim, kind, factor, original, low, high)
    wide, narrow = (number(scaling, name, float, 0.0) for name in ("mscale", "mscale_all_dim"))
    if min(wide, narrow) < 0:
        raise ValueError(f"model config: mscale {wide} and mscale_all_dim {narrow} can't be below 0")
    found = magnitude(factor, wide) / magnitude(factor, narrow) if wide and narrow else magnitude(factor)
    return Rope(
        theta,
        head_dim,
        kind,
        factor,
        original,
        beta_fast=number(scaling, "beta_fast", float, 0.0) or 32.0,
        beta_slow=number(scaling, "beta_slow", float, 0.0) or 1.0,
        attention_factor=number(scaling, "attention_factor", float, found),
        truncate=bool(scaling.get("truncate", True)),
    )


def rope_from_gguf(values: Mapping[str, Any], arch: str, head_dim: int, positions: int) -> Rope:
    """As llama.cpp reads GGUF metadata, where a factor without a type is linear, and a factor of 0 is none.

    Raises ValueError for what it does not read.
    """
    at = f"{arch}.rope.scaling."
    kind = values.get(at + "type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"model config: rope scaling {kind!r} is not supported in GGUF files")
    unread = sorted(key for key in values if key.startswith(at) and key.removeprefix(at) not in READ_GGUF)
    if number(values, at + "attn_factor", float, 1.0) != 1:
        unread.append(at + "attn_factor")
    if unread:
        raise ValueError(f"model config: {', '.join(unread)} is not supported in GGUF files")
    dim = number(values, f"{arch}.rope.dimension_count", int, head_dim)
    if arch == "llama" and dim != head_dim:  # rows are stored in pairs, over the whole head
        raise ValueError(f"model config: {arch}.rope.dimension_count {dim} must be the size of a head, {head_dim}")
    factor = number(values, at + "factor", float, number(values, f"{arch}.rope.scale_linear", float, 1.0)) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1):
        kind, factor = "default", 1.0
    if "rope_freqs.weight" in values["tensors"]:
        if kind != "default":
            raise ValueError(f"model config: rope_freqs.weight with rope scaling {kind!r} is not supported")
        kind = "factors"
    return Rope(
        theta=number(values, f"{arch}.rope.freq_base", float, 10000.0),
        dim=dim,
        scaling=kind,
        factor=factor,
        original_positions=number(values, at + "original_context_length", int, positions),
        beta_fast=number(values, at + "yarn_beta_fast", float, 32.0),
        beta_slow=number(values, at + "yarn_beta_slow", float, 1.0),
        attention_factor=magnitude(factor) if kind == "yarn" else 1.0,
    )


def magnitude(factor: float, by: float = 1.0) -> float:
    """Yarn's factor on cos and sin where none is given."""
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0
