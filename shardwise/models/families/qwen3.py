"""Qwen3: Llama with a norm within each query and key head; and Qwen3-MoE, the same with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from shardwise.models.config import Experts, ModelConfig
from shardwise.models.families import llama
from shardwise.models.families.family import gguf_names, number, vector
from shardwise.models.families.mixtral import Spelling, experts_plan, gguf_experts
from shardwise.models.families.qwen2 import DEFAULTS
from shardwise.models.shard import Shard
from shardwise.parallel.placement import Plan


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen3 config.json."""
    values = {**DEFAULTS, **values}
    if values.get("head_dim") is None:
        values["head_dim"] = 128  # as transformers does
    return llama.hf_config(values, "qwen3", attention_bias=bool(values.get("attention_bias")))


def from_gguf(values: Mapping[str, Any]) -> ModelConfig:
    """Read the metadata of a GGUF file of architecture "qwen3"."""
    return llama.gguf_config(values, "qwen3", "qwen3")


def moe_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen3-MoE config.json."""
    if number(values, "decoder_sparse_step", int, 1) != 1 or values.get("mlp_only_layers"):
        raise ValueError(
            "model config: experts in some layers only (decoder_sparse_step, mlp_only_layers) are not supported"
        )
    name = "num_experts" if "num_experts" in values else "num_local_experts"  # as newer transformers write it
    count, chosen = number(values, name, int), number(values, "num_experts_per_tok", int)
    experts = Experts(count, chosen, normed=bool(values.get("norm_topk_prob")))
    bias = bool(values.get("attention_bias"))
    values = {**DEFAULTS, "num_key_value_heads": 4, **values, "max_window_layers": 0}  # a window is in all layers here
    return llama.hf_config(values, "qwen3_moe", "moe_intermediate_size", experts=experts, attention_bias=bias)


def moe_from_gguf(values: Mapping[str, Any]) -> ModelConfig:
    """Read the metadata of a GGUF file of architecture "qwen3moe"."""
    width, experts = "expert_feed_forward_length", gguf_experts(values, "qwen3moe")
    return llama.gguf_config(values, "qwen3_moe", "qwen3moe", width, experts=experts)


def plan(config: ModelConfig, shard: Shard, mlp: llama.MLPPlan = llama.mlp_plan) -> Plan:
    """As Llama's, with the norms of heads; GGUF files hold rotated rows as Hugging Face does."""
    found = llama.plan(config, shard, mlp, gguf_pairs=False)
    for index in range(shard.layers.start, shard.layers.stop):
        for name in ("q", "k"):
            stored = vector(f"model.layers.{index}.self_attn.{name}_norm.weight", config.head_dim)
            found[f"layers.{index}.attention.head_norm.{name}"] = (stored,)
    return found


def moe_plan(config: ModelConfig, shard: Shard) -> Plan:
    """As Qwen3's, with experts."""
    return plan(config, shard, partial(experts_plan, SPELLING))


SPELLING = Spelling("mlp", "gate_proj", "up_proj", "down_proj")
GGUF_LAYER = {**llama.GGUF_LAYER, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GGUF_MOE_LAYER = SPELLING.gguf(GGUF_LAYER)


QWEN3 = replace(
    llama.LLAMA,
    name="qwen3",
    from_hf=from_hf,
    from_gguf=from_gguf,
    plan=plan,
    gguf_name=gguf_names(llama.GGUF_ENDS, GGUF_LAYER, "model.layers."),
)
QWEN3_MOE = replace(
    llama.LLAMA,
    name="qwen3_moe",
    from_hf=moe_from_hf,
    from_gguf=moe_from_gguf,
    plan=moe_plan,
    gguf_name=gguf_names(llama.GGUF_ENDS, GGUF_MOE_LAYER, "model.layers."),
)
