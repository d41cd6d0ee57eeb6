"""The table of model families, by the names that checkpoints use for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.features import Quantization
from shardwise.models.config import ModelConfig
from shardwise.models.families.bloom import BLOOM
from shardwise.models.families.family import Family
from shardwise.models.families.gpt2 import GPT2
from shardwise.models.families.llama import LLAMA
from shardwise.models.families.mixtral import MIXTRAL
from shardwise.models.families.opt import OPT
from shardwise.models.families.qwen2 import QWEN2
from shardwise.models.families.qwen3 import QWEN3, QWEN3_MOE
from shardwise.models.shard import Shard
from shardwise.parallel.placement import Plan

FAMILIES = (LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GPT2, OPT, BLOOM)
BY_NAME = {family.name: family for family in FAMILIES}
BY_MODEL_TYPE = {**BY_NAME, "mistral": LLAMA}
"""config.json's model_type → family."""
BY_ARCHITECTURE = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3moe": QWEN3_MOE,
    "gpt2": GPT2,
    "bloom": BLOOM,
}
"""GGUF's general.architecture → family."""


def find(table: Mapping[str, Family], key: str, values: Mapping[str, Any]) -> Family:
    """The family that ``values[key]`` names; ValueError with the supported names for another one."""
    name = values.get(key)
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"model config: {key} {name!r} is not supported; supported: {', '.join(sorted(table))}")
    return table[name]


def find_gguf(metadata: Mapping[str, Any]) -> Family:
    """The family of a GGUF file, where Mixtral is a "llama" with experts; ValueError as for `find`."""
    family = find(BY_ARCHITECTURE, "general.architecture", metadata)
    return MIXTRAL if family is LLAMA and metadata.get("llama.expert_count") else family


def make_plan(config: ModelConfig, shard: Shard, quantize: Quantization | None = None) -> Plan:
    """The parameters of one shard, the checkpoint slices that make them up, and to what those are rounded."""
    plan = BY_NAME[config.family].plan(config, shard)
    if quantize is None:
        return plan
    return {
        name: tuple(
            part if part.cols is None else replace(part, quantize=_rounding(name, quantize)) for part in placements
        )
        for name, placements in plan.items()
    }


def _rounding(parameter: str, quantize: Quantization) -> Quantization | None:
    """Of one matrix: learned positions are added once and routers choose, so both are small and stay as they are.

    Rows of the vocabulary are 8 bits each with a scale in any case, so that a tied head is one with the embedding: a
    fifth of a small model, and measured to cost no perplexity.
    """
    if parameter == "embed.positions" or parameter.endswith(".router.weight"):
        return None
    return Quantization(8) if parameter in ("embed.weight", "head.weight") else quantize
