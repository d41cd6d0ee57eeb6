"""The Llama family: Llama 2, 3 and 3.x, SmolLM2, and Mistral without a sliding window.

Pre-norm decoder with RMSNorm, rotary positions, grouped kv heads and a gated MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.models.config import ModelConfig, Rope
from shardwise.models.families.family import Family, gguf_names, ids, matrix, number, number_format, vector
from shardwise.models.shard import Shard
from shardwise.parallel.placement import Placement, Plan, Run


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Read a Llama or Mistral config.json."""
    hidden = number(values, "hidden_size", int)
    heads = number(values, "num_attention_heads", int)
    positions = number(values, "max_position_embeddings", int, 2048)
    window = values.get("sliding_window")
    if window is not None and window < positions:
        raise ValueError(f"model config: sliding_window {window} is not supported, only attention over all tokens")
    if values.get("hidden_act", "silu") != "silu":
        raise ValueError(
            f"model config: hidden_act {values['hidden_act']!r} is not supported for this family, only silu"
        )
    head_dim = number(values, "head_dim", int, hidden // heads)
    return ModelConfig(
        family="llama",
        stored="hf",
        num_layers=number(values, "num_hidden_layers", int),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=number(values, "num_key_value_heads", int, heads),
        head_dim=head_dim,
        intermediate_size=number(values, "intermediate_size", int),
        vocab_size=number(values, "vocab_size", int),
        max_positions=positions,
        norm_eps=number(values, "rms_norm_eps", float, 1e-6),
        activation="silu_mul",
        tied=bool(values.get("tie_word_embeddings", False)),
        dtype=number_format(values),
        rope=_rope_hf(values, head_dim, positions),
        attention_bias=bool(values.get("attention_bias", False)),
        mlp_bias=bool(values.get("mlp_bias", False)),
        bos=values.get("bos_token_id"),
        eos=ids(values.get("eos_token_id")),
    )


def _rope_hf(values: Mapping[str, Any], head_dim: int, positions: int) -> Rope:
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(
            f"model config: rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn"
        )
    theta = number({**values, **scaling}, "rope_theta", float, 10000.0)
    original = number(scaling, "original_max_position_embeddings", int, positions)
    factor = number(scaling, "factor", float, 1.0)
    attention = scaling.get("attention_factor")
    return Rope(
        theta=theta,
        dim=head_dim,
        scaling=kind,
        factor=factor,
        original_positions=original,
        low_freq_factor=number(scaling, "low_freq_factor", float, 0.0),
        high_freq_factor=number(scaling, "high_freq_factor", float, 0.0),
        beta_fast=number(scaling, "beta_fast", float, 32.0),
        beta_slow=number(scaling, "beta_slow", float, 1.0),
        attention_factor=number(scaling, "attention_factor", float, 0.0) if attention is not None else 0.0,
        truncate=bool(scaling.get("truncate", True)),
    )


def from_gguf(values: Mapping[str, Any]) -> ModelConfig:
    """Read the metadata of a GGUF file of architecture "llama"."""
    hidden = number(values, "llama.embedding_length", int)
    heads = number(values, "llama.attention.head_count", int)
    head_dim = number(values, "llama.attention.key_length", int, hidden // heads)
    if number(values, "llama.attention.value_length", int, head_dim) != head_dim:
        raise ValueError("model config: heads whose keys and values differ in width are not supported")
    if values.get("llama.expert_count"):
        raise ValueError("model config: this GGUF file holds a mixture of experts, which is not supported yet")
    positions = number(values, "llama.context_length", int)
    scaling = values.get("llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn"):
        raise ValueError(f"model config: rope scaling {scaling!r} is not supported in GGUF files")
    rope = Rope(
        theta=number(values, "llama.rope.freq_base", float, 10000.0),
        dim=number(values, "llama.rope.dimension_count", int, head_dim),
        scaling="factors" if "rope_freqs.weight" in values["tensors"] else {"none": "default"}.get(scaling, scaling),
        factor=number(values, "llama.rope.scaling.factor", float, 1.0),
        original_positions=number(values, "llama.rope.scaling.original_context_length", int, positions),
        attention_factor=0.0,
    )
    return ModelConfig(
        family="llama",
        stored="gguf",
        num_layers=number(values, "llama.block_count", int),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=number(values, "llama.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        intermediate_size=number(values, "llama.feed_forward_length", int),
        vocab_size=number(values, "llama.vocab_size", int, len(values.get("tokenizer.ggml.tokens", ()))),
        max_positions=positions,
        norm_eps=number(values, "llama.attention.layer_norm_rms_epsilon", float),
        activation="silu_mul",
        tied="output.weight" not in values["tensors"],
        dtype="float32",
        rope=rope,
        bos=values.get("tokenizer.ggml.bos_token_id"),
        eos=ids(values.get("tokenizer.ggml.eos_token_id")),
    )


def plan(config: ModelConfig, shard: Shard) -> Plan:
    """q/k/v and gate/up are column-parallel by heads and features, o and down row-parallel, the ends by vocabulary."""
    hidden, dim, width, vocab = config.hidden_size, config.head_dim, config.intermediate_size, config.vocab_size
    q, kv = shard.heads.scaled(dim), shard.kv_heads.scaled(dim)
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    paired = dim if config.stored == "gguf" else 0

    def rotated(name: str, size: int, run: Run, bias: bool = False) -> Placement:
        shape, cols = ((size,), None) if bias else ((size, hidden), Run(0, hidden))
        return Placement(name, shape, run, cols, paired=paired)

    found: Plan = {}
    if shard.first:
        found["embed.weight"] = (matrix("model.embed_tokens.weight", (vocab, hidden), shard.vocab),)
    for index in range(shard.layers.start, shard.layers.stop):
        at, layer = f"layers.{index}.", f"model.layers.{index}."
        found[at + "attention_norm.weight"] = (vector(layer + "input_layernorm.weight", hidden),)
        found[at + "attention.qkv.weight"] = (
            rotated(layer + "self_attn.q_proj.weight", q_size, q),
            rotated(layer + "self_attn.k_proj.weight", kv_size, kv),
            matrix(layer + "self_attn.v_proj.weight", (kv_size, hidden), kv),
        )
        found[at + "attention.out.weight"] = (matrix(layer + "self_attn.o_proj.weight", (hidden, q_size), cols=q),)
        if config.attention_bias:
            found[at + "attention.qkv.bias"] = (
                rotated(layer + "self_attn.q_proj.bias", q_size, q, bias=True),
                rotated(layer + "self_attn.k_proj.bias", kv_size, kv, bias=True),
                vector(layer + "self_attn.v_proj.bias", kv_size, kv),
            )
            found[at + "attention.out.bias"] = (vector(layer + "self_attn.o_proj.bias", hidden),)
        found[at + "mlp_norm.weight"] = (vector(layer + "post_attention_layernorm.weight", hidden),)
        found[at + "mlp.up.weight"] = (
            matrix(layer + "mlp.gate_proj.weight", (width, hidden), shard.mlp),
            matrix(layer + "mlp.up_proj.weight", (width, hidden), shard.mlp),
        )
        found[at + "mlp.down.weight"] = (matrix(layer + "mlp.down_proj.weight", (hidden, width), cols=shard.mlp),)
        if config.mlp_bias:
            found[at + "mlp.up.bias"] = (
                vector(layer + "mlp.gate_proj.bias", width, shard.mlp),
                vector(layer + "mlp.up_proj.bias", width, shard.mlp),
            )
            found[at + "mlp.down.bias"] = (vector(layer + "mlp.down_proj.bias", hidden),)
    if config.rope is not None and config.rope.scaling == "factors":
        found["rope.factors"] = (vector("rope_freqs.weight", config.rope.dim // 2),)
    if shard.last:
        found["norm.weight"] = (vector("model.norm.weight", hidden),)
        head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
        if not (config.tied and shard.first):
            found["head.weight"] = (matrix(head, (vocab, hidden), shard.vocab),)
    return found


GGUF_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


LLAMA = Family(
    name="llama",
    from_hf=from_hf,
    from_gguf=from_gguf,
    plan=plan,
    hf_name=lambda name: name,
    gguf_name=gguf_names(GGUF_ENDS, GGUF_LAYER, "model.layers."),
    ignored=lambda name: name.endswith("rotary_emb.inv_freq"),
)
