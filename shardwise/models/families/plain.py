"""What GPT-2, OPT and BLOOM have in common: keys and values for every head, LayerNorm, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.models.config import ModelConfig
from shardwise.models.families.family import ids, number, vector, vocabulary
from shardwise.parallel.placement import Plan


def plain_config(family: str, keys: tuple[str, str], hidden_size: int, num_heads: int, **numbers: Any) -> ModelConfig:
    """Of a family with keys and values for every head, and biases everywhere.

    ``keys`` are its names for the width and the heads, for the ValueError where those don't go together.
    """
    if num_heads < 1 or hidden_size % num_heads:
        raise ValueError(f"model config: {keys[0]} {hidden_size} must be a multiple of {keys[1]} {num_heads}")
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        attention_bias=True,
        mlp_bias=True,
        **numbers,
    )


def plain_gguf(values: Mapping[str, Any], arch: str, keys: tuple[str, str], **numbers: Any) -> ModelConfig:
    """As `plain_config`, from a GGUF file's metadata; all of these activate by gelu_tanh."""
    hidden = number(values, f"{arch}.embedding_length", int)
    return plain_config(
        arch,
        keys,
        hidden,
        number(values, f"{arch}.attention.head_count", int),
        stored="gguf",
        num_layers=number(values, f"{arch}.block_count", int),
        vocab_size=vocabulary(values, arch),
        norm_eps=number(values, f"{arch}.attention.layer_norm_epsilon", float),
        activation="gelu_tanh",
        tied="output.weight" not in values["tensors"],
        dtype="float32",
        bos=values.get("tokenizer.ggml.bos_token_id"),
        eos=ids(values.get("tokenizer.ggml.eos_token_id")),
        **numbers,
    )


def affine(name: str, stored: str, size: int) -> Plan:
    """The weight and the bias of a LayerNorm."""
    return {f"{name}.{kind}": (vector(f"{stored}.{kind}", size),) for kind in ("weight", "bias")}
