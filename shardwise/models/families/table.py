"""The table of model families, by the names that checkpoints use for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.models.config import ModelConfig
from shardwise.models.families.family import Family
from shardwise.models.families.gpt2 import GPT2
from shardwise.models.families.llama import LLAMA
from shardwise.models.shard import Shard
from shardwise.parallel.placement import Plan

BY_MODEL_TYPE = {"llama": LLAMA, "mistral": LLAMA, "gpt2": GPT2}
"""config.json's model_type → family."""
BY_ARCHITECTURE = {"llama": LLAMA, "gpt2": GPT2}
"""GGUF's general.architecture → family."""
BY_NAME = {family.name: family for family in (LLAMA, GPT2)}


def find(table: Mapping[str, Family], key: str, values: Mapping[str, Any]) -> Family:
    """The family that ``values[key]`` names; ValueError with the supported names for another one."""
    name = values.get(key)
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"model config: {key} {name!r} is not supported; supported: {', '.join(sorted(table))}")
    return table[name]


def make_plan(config: ModelConfig, shard: Shard) -> Plan:
    """The parameters of one shard and the checkpoint slices that make them up."""
    return BY_NAME[config.family].plan(config, shard)
