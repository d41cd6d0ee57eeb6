"""BLOOM: ALiBi in place of positions, a norm after the embedding, LayerNorm with bias, q/k/v fused head by head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.models.config import ModelConfig
from shardwise.models.families.family import Family, gguf_names, ids, matrix, number, number_format, vector
from shardwise.models.shard import Shard
from shardwise.parallel.placement import Plan, Run

TRAINED = 2048
"""Positions that BLOOM was trained with; its files don't always say."""


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Read a BLOOM config.json."""
    if values.get("apply_residual_connection_post_layernorm"):
        raise ValueError("model config: apply_residual_connection_post_layernorm is not supported")
    hidden = number(values, "hidden_size" if "hidden_size" in values else "n_embed", int)
    return _config(
        stored="hf",
        num_layers=number(values, "num_hidden_layers" if "num_hidden_layers" in values else "n_layer", int),
        hidden_size=hidden,
        num_heads=number(values, "num_attention_heads" if "num_attention_heads" in values else "n_head", int),
        intermediate_size=4 * hidden,
        vocab_size=number(values, "vocab_size", int),
        max_positions=number(values, "seq_length", int, TRAINED),
        norm_eps=number(values, "layer_norm_epsilon", float, 1e-5),
        tied=bool(values.get("tie_word_embeddings", True)),
        dtype=number_format(values),
        bos=values.get("bos_token_id"),
        eos=ids(values.get("eos_token_id")),
    )


def from_gguf(values: Mapping[str, Any]) -> ModelConfig:
    """Read the metadata of a GGUF file of architecture "bloom"."""
    hidden = number(values, "bloom.embedding_length", int)
    return _config(
        stored="gguf",
        num_layers=number(values, "bloom.block_count", int),
        hidden_size=hidden,
        num_heads=number(values, "bloom.attention.head_count", int),
        intermediate_size=number(values, "bloom.feed_forward_length", int, 4 * hidden),
        vocab_size=number(values, "bloom.vocab_size", int, len(values.get("tokenizer.ggml.tokens", ()))),
        max_positions=number(values, "bloom.context_length", int, TRAINED),
        norm_eps=number(values, "bloom.attention.layer_norm_epsilon", float),
        tied="output.weight" not in values["tensors"],
        dtype="float32",
        bos=values.get("tokenizer.ggml.bos_token_id"),
        eos=ids(values.get("tokenizer.ggml.eos_token_id")),
    )


def _config(hidden_size: int, num_heads: int, **numbers: Any) -> ModelConfig:
    if num_heads < 1 or hidden_size % num_heads:
        raise ValueError(f"model config: hidden_size {hidden_size} must be a multiple of n_head {num_heads}")
    return ModelConfig(
        family="bloom",
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        activation="gelu_tanh",
        alibi=8.0,
        attention_bias=True,
        mlp_bias=True,
        **numbers,
    )


def plan(config: ModelConfig, shard: Shard) -> Plan:
    """q/k/v and the first MLP matrix are column-parallel, the others row-parallel, the ends by vocabulary."""
    hidden, dim, width, vocab = config.hidden_size, config.head_dim, config.intermediate_size, config.vocab_size
    own = shard.heads.scaled(dim)
    fused = _fused(config, shard.heads)
    found: Plan = {}

    def norm(name: str, stored: str) -> None:
        for kind in ("weight", "bias"):
            found[f"{name}.{kind}"] = (vector(f"{stored}.{kind}", hidden),)

    if shard.first:
        found["embed.weight"] = (matrix("word_embeddings.weight", (vocab, hidden), shard.vocab),)
        norm("embed_norm", "word_embeddings_layernorm")
    for index in range(shard.layers.start, shard.layers.stop):
        at, layer = f"layers.{index}.", f"h.{index}."
        qkv, out = layer + "self_attention.query_key_value", layer + "self_attention.dense"
        up, down = layer + "mlp.dense_h_to_4h", layer + "mlp.dense_4h_to_h"
        norm(at + "attention_norm", layer + "input_layernorm")
        shape = 3 * hidden, hidden
        found[at + "attention.qkv.weight"] = tuple(matrix(qkv + ".weight", shape, rows) for rows in fused)
        found[at + "attention.qkv.bias"] = tuple(vector(qkv + ".bias", 3 * hidden, rows) for rows in fused)
        found[at + "attention.out.weight"] = (matrix(out + ".weight", (hidden, hidden), cols=own),)
        found[at + "attention.out.bias"] = (vector(out + ".bias", hidden),)
        norm(at + "mlp_norm", layer + "post_attention_layernorm")
        found[at + "mlp.up.weight"] = (matrix(up + ".weight", (width, hidden), shard.mlp),)
        found[at + "mlp.up.bias"] = (vector(up + ".bias", width, shard.mlp),)
        found[at + "mlp.down.weight"] = (matrix(down + ".weight", (hidden, width), cols=shard.mlp),)
        found[at + "mlp.down.bias"] = (vector(down + ".bias", hidden),)
    if shard.last:
        norm("norm", "ln_f")
        head = "word_embeddings.weight" if config.tied else "lm_head.weight"
        if not (config.tied and shard.first):
            found["head.weight"] = (matrix(head, (vocab, hidden), shard.vocab),)
    return found


def _fused(config: ModelConfig, heads: Run) -> list[Run]:
    """The rows of q, k and v of some heads: [head, 3, dim] on Hugging Face, [3, head, dim] in GGUF files."""
    dim = config.head_dim
    if config.stored == "gguf":
        starts = [(part * config.num_heads + heads.start) * dim for part in range(3)]
        return [Run(start, start + heads.size * dim) for start in starts]
    starts = [(3 * head + part) * dim for part in range(3) for head in range(heads.start, heads.stop)]
    return [Run(start, start + dim) for start in starts]


GGUF_ENDS = {
    "token_embd.weight": "word_embeddings.weight",
    "token_embd_norm.weight": "word_embeddings_layernorm.weight",
    "token_embd_norm.bias": "word_embeddings_layernorm.bias",
    "output_norm.weight": "ln_f.weight",
    "output_norm.bias": "ln_f.bias",
    "output.weight": "lm_head.weight",
}
GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}


BLOOM = Family(
    name="bloom",
    from_hf=from_hf,
    from_gguf=from_gguf,
    plan=plan,
    hf_name=lambda name: name.removeprefix("transformer."),
    gguf_name=gguf_names(GGUF_ENDS, GGUF_LAYER, "h."),
)
