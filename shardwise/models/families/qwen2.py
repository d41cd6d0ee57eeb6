"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.models.config import ModelConfig
from shardwise.models.families import llama
from shardwise.models.shard import Shard
from shardwise.parallel.placement import Plan


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen2 config.json."""
    return llama.hf_config({**DEFAULTS, **values}, "qwen2", attention_bias=True)


DEFAULTS = {
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
"""What transformers takes of all Qwen models where config.json does not say."""


def from_gguf(values: Mapping[str, Any]) -> ModelConfig:
    """Read the metadata of a GGUF file of architecture "qwen2"."""
    return llama.gguf_config(values, "qwen2", "qwen2", attention_bias=True)


def plan(config: ModelConfig, shard: Shard) -> Plan:
    """As Llama's; the output projection has no bias, and GGUF files hold rotated rows as Hugging Face does."""
    return llama.plan(config, shard, out_bias=False, gguf_pairs=False)


QWEN2 = replace(llama.LLAMA, name="qwen2", from_hf=from_hf, from_gguf=from_gguf, plan=plan)
