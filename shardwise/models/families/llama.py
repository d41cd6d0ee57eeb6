"""The Llama family: Llama 2, 3 and 3.x, Code Llama, SmolLM2 and Mistral; and what later families share with it.

Pre-norm decoder with RMSNorm, rotary positions, grouped kv heads and a gated MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.models.config import ModelConfig
from shardwise.models.families.family import (
    Family,
    gguf_names,
    head,
    ids,
    matrix,
    number,
    number_format,
    vector,
    vocabulary,
)
from shardwise.models.families.rotation import rope_from_gguf, rope_from_hf
from shardwise.models.shard import Shard
from shardwise.parallel.placement import Placement, Plan, Run


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Read a Llama or Mistral config.json, of which Mistral's alone has a sliding window."""
    mistral = values.get("model_type") == "mistral"
    values = {**MISTRAL, **values} if mistral else {**values, "sliding_window": None}
    return hf_config(
        values, "llama", attention_bias=bool(values.get("attention_bias")), mlp_bias=bool(values.get("mlp_bias"))
    )


MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
"""What transformers takes where config.json does not say, as in other families' files."""


def hf_config(values: Mapping[str, Any], family: str, width: str = "intermediate_size", **more: Any) -> ModelConfig:
    """The numbers that config.json of every such family has; ``width`` is its key for the features of an MLP."""
    hidden = number(values, "hidden_size", int)
    heads = number(values, "num_attention_heads", int)
    positions = number(values, "max_position_embeddings", int, 2048)
    if values.get("hidden_act", "silu") != "silu":
        raise ValueError(
            f"model config: hidden_act {values['hidden_act']!r} is not supported for this family, only silu"
        )
    head_dim = number(values, "head_dim", int, hidden // max(heads, 1))
    return ModelConfig(
        family=family,
        stored="hf",
        num_layers=number(values, "num_hidden_layers", int),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=number(values, "num_key_value_heads", int, heads),
        head_dim=head_dim,
        intermediate_size=number(values, width, int),
        vocab_size=number(values, "vocab_size", int),
        max_positions=positions,
        norm_eps=number(values, "rms_norm_eps", float, 1e-6),
        activation="silu_mul",
        tied=bool(values.get("tie_word_embeddings", False)),
        dtype=number_format(values),
        rope=rope_from_hf(values, head_dim, positions),
        window=_window(values, positions),
        bos=values.get("bos_token_id"),
        eos=ids(values.get("eos_token_id")),
        **more,
    )


def _window(values: Mapping[str, Any], positions: int) -> int | None:
    """The sliding window, if there is one that hides anything; ValueError where only some layers have it."""
    kinds = values.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ValueError(f"model config: layer_types must be a list of names, not {kinds!r}")
    window = number(values, "sliding_window", int, positions)
    whole = bool(kinds) and all(kind == "full_attention" for kind in kinds)
    if not values.get("use_sliding_window", True) or whole or window >= positions:
        return None
    first = 0 if kinds else number(values, "max_window_layers", int, 0)
    if first >= number(values, "num_hidden_layers", int):
        return None
    if first > 0 or any(kind != "sliding_attention" for kind in kinds):
        raise ValueError(
            f"model config: sliding_window {window} in some layers only (layer_types, max_window_layers) is not "
            "supported; in all layers it is"
        )
    return int(window)


def from_gguf(values: Mapping[str, Any]) -> ModelConfig:
    """Read the metadata of a GGUF file of architecture "llama" without experts."""
    return gguf_config(values, "llama", "llama")


def gguf_config(
    values: Mapping[str, Any], family: str, arch: str, width: str = "feed_forward_length", **more: Any
) -> ModelConfig:
    """The numbers that the metadata of every such architecture has; ``width`` as in `hf_config`."""

    def given(key: str, kind: type[int] | type[float], default: float | None = None) -> Any:
        return number(values, f"{arch}.{key}", kind, default)

    hidden = given("embedding_length", int)
    heads = given("attention.head_count", int)
    head_dim = given("attention.key_length", int, hidden // max(heads, 1))
    if given("attention.value_length", int, head_dim) != head_dim:
        raise ValueError("model config: heads whose keys and values differ in width are not supported")
    positions = given("context_length", int)
    window = given("attention.sliding_window", int, positions)
    return ModelConfig(
        family=family,
        stored="gguf",
        num_layers=given("block_count", int),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=given("attention.head_count_kv", int, heads),
        head_dim=head_dim,
        intermediate_size=given(width, int),
        vocab_size=vocabulary(values, arch),
        max_positions=positions,
        norm_eps=given("attention.layer_norm_rms_epsilon", float),
        activation="silu_mul",
        tied="output.weight" not in values["tensors"],
        dtype="float32",
        rope=rope_from_gguf(values, arch, head_dim, positions),
        window=window if window < positions else None,
        bos=values.get("tokenizer.ggml.bos_token_id"),
        eos=ids(values.get("tokenizer.ggml.eos_token_id")),
        **more,
    )


MLPPlan = Callable[[ModelConfig, Shard, str, str], Plan]
"""The parameters of one layer's MLP, named from its path in the decoder and its path in the checkpoint."""


def mlp_plan(config: ModelConfig, shard: Shard, at: str, layer: str) -> Plan:
    """Gate and up are column-parallel by features, down is row-parallel."""
    hidden, width = config.hidden_size, config.intermediate_size
    found: Plan = {
        at + "mlp.up.weight": (
            matrix(layer + "mlp.gate_proj.weight", (width, hidden), shard.mlp),
            matrix(layer + "mlp.up_proj.weight", (width, hidden), shard.mlp),
        ),
        at + "mlp.down.weight": (matrix(layer + "mlp.down_proj.weight", (hidden, width), cols=shard.mlp),),
    }
    if config.mlp_bias:
        found[at + "mlp.up.bias"] = (
            vector(layer + "mlp.gate_proj.bias", width, shard.mlp),
            vector(layer + "mlp.up_proj.bias", width, shard.mlp),
        )
        found[at + "mlp.down.bias"] = (vector(layer + "mlp.down_proj.bias", hidden),)
    return found


def plan(
    config: ModelConfig, shard: Shard, mlp: MLPPlan = mlp_plan, *, out_bias: bool = True, gguf_pairs: bool = True
) -> Plan:
    """q/k/v are column-parallel by heads, o row-parallel, the ends by vocabulary.

    ``out_bias``: where attention has biases, o has one too. ``gguf_pairs``: GGUF files of this family hold the rotated
    rows in pairs.
    """
    hidden, dim, vocab = config.hidden_size, config.head_dim, config.vocab_size
    q, kv = shard.heads.scaled(dim), shard.kv_heads.scaled(dim)
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    paired = dim if config.stored == "gguf" and gguf_pairs else 0

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
            if out_bias:
                found[at + "attention.out.bias"] = (vector(layer + "self_attn.o_proj.bias", hidden),)
        found[at + "mlp_norm.weight"] = (vector(layer + "post_attention_layernorm.weight", hidden),)
        found |= mlp(config, shard, at, layer)
    if config.rope is not None and config.rope.scaling == "factors":
        found["rope.factors"] = (vector("rope_freqs.weight", config.rope.dim // 2),)
    if shard.last:
        found["norm.weight"] = (vector("model.norm.weight", hidden),)
        found |= head(config, shard, "model.embed_tokens.weight")
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
