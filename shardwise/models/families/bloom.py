"""BLOOM: ALiBi in place of positions, a norm after the embedding, LayerNorm with bias, q/k/v fused head by head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.models.config import ModelConfig
from shardwise.models.families.family import Family, gguf_names, head, ids, matrix, number, number_format, vector
from shardwise.models.families.plain import affine, plain_config, plain_gguf
from shardwise.models.shard import Shard
from shardwise.parallel.placement import Plan, Run

TRAINED = 2048
"""Positions that BLOOM was trained with; its files don't always say."""
ALIBI = 8.0
KEYS = "hidden_size", "n_head"


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Read a BLOOM config.json."""
    if values.get("apply_residual_connection_post_layernorm"):
        raise ValueError("model config: apply_residual_connection_post_layernorm is not supported")
    hidden = number(values, "hidden_size" if "hidden_size" in values else "n_embed", int)
    return plain_config(
        "bloom",
        KEYS,
        hidden,
        number(values, "num_attention_heads" if "num_attention_heads" in values else "n_head", int),
        stored="hf",
        num_layers=number(values, "num_hidden_layers" if "num_hidden_layers" in values else "n_layer", int),
        intermediate_size=4 * hidden,
        vocab_size=number(values, "vocab_size", int),
        max_positions=number(values, "seq_length", int, TRAINED),
        norm_eps=number(values, "layer_norm_epsilon", float, 1e-5),
        activation="gelu_tanh",
        tied=bool(values.get("tie_word_embeddings", True)),
        dtype=number_format(values),
        bos=values.get("bos_token_id"),
        eos=ids(values.get("eos_token_id")),
        alibi=ALIBI,
    )


def from_gguf(values: Mapping[str, Any]) -> ModelConfig:
    """Read the metadata of a GGUF file of architecture "bloom"."""
    hidden = number(values, "bloom.embedding_length", int)
    return plain_gguf(
        values,
        "bloom",
        KEYS,
        intermediate_size=number(values, "bloom.feed_forward_length", int, 4 * hidden),
        max_positions=number(values, "bloom.context_length", int, TRAINED),
        alibi=ALIBI,
    )


def plan(config: ModelConfig, shard: Shard) -> Plan:
    """q/k/v and the first MLP matrix are column-parallel, the others row-parallel, the ends by vocabulary."""
    hidden, dim, width, vocab = config.hidden_size, config.head_dim, config.intermediate_size, config.vocab_size
    own = shard.heads.scaled(dim)
    fused = _fused(config, shard.heads)
    found: Plan = {}
    if shard.first:
        found["embed.weight"] = (matrix("word_embeddings.weight", (vocab, hidden), shard.vocab),)
        found |= affine("embed_norm", "word_embeddings_layernorm", hidden)
    for index in range(shard.layers.start, shard.layers.stop):
        at, layer = f"layers.{index}.", f"h.{index}."
        qkv, out = layer + "self_attention.query_key_value", layer + "self_attention.dense"
        up, down = layer + "mlp.dense_h_to_4h", layer + "mlp.dense_4h_to_h"
        found |= affine(at + "attention_norm", layer + "input_layernorm", hidden)
        shape = 3 * hidden, hidden
        found[at + "attention.qkv.weight"] = tuple(matrix(qkv + ".weight", shape, rows) for rows in fused)
        found[at + "attention.qkv.bias"] = tuple(vector(qkv + ".bias", 3 * hidden, rows) for rows in fused)
        found[at + "attention.out.weight"] = (matrix(out + ".weight", (hidden, hidden), cols=own),)
        found[at + "attention.out.bias"] = (vector(out + ".bias", hidden),)
        found |= affine(at + "mlp_norm", layer + "post_attention_layernorm", hidden)
        found[at + "mlp.up.weight"] = (matrix(up + ".weight", (width, hidden), shard.mlp),)
        found[at + "mlp.up.bias"] = (vector(up + ".bias", width, shard.mlp),)
        found[at + "mlp.down.weight"] = (matrix(down + ".weight", (hidden, width), cols=shard.mlp),)
        found[at + "mlp.down.bias"] = (vector(down + ".bias", hidden),)
    if shard.last:
        found |= affine("norm", "ln_f", hidden)
        found |= head(config, shard, "word_embeddings.weight")
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
