"""OPT: learned positions that begin at row 2, LayerNorm, ReLU, biases everywhere, a tied head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.models.config import ModelConfig
from shardwise.models.families.family import Family, head, ids, matrix, number, number_format, vector
from shardwise.models.families.plain import affine, plain_config
from shardwise.models.shard import Shard
from shardwise.parallel.placement import Placement, Plan, Run

OFFSET = 2
"""Rows of the table of positions that no position uses."""


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Read an OPT config.json; ValueError for OPT-350m's norms after the sums, and for Galactica."""
    hidden, heads = number(values, "hidden_size", int), number(values, "num_attention_heads", int)
    narrow = number(values, "word_embed_proj_dim", int, hidden)
    if not values.get("do_layer_norm_before", True) or values.get("_remove_final_layer_norm") or narrow != hidden:
        raise ValueError(
            "model config: norms after the sums (do_layer_norm_before false, as in opt-350m), no last norm, or an "
            f"embedding of {narrow} for a width of {hidden} are not supported; every other OPT is"
        )
    if not (values.get("enable_bias", True) and values.get("layer_norm_elementwise_affine", True)):
        raise ValueError(
            "model config: enable_bias and layer_norm_elementwise_affine must be on; Galactica is not supported"
        )
    activation = values.get("activation_function", "relu")
    if activation not in ("relu", "gelu"):
        raise ValueError(f"model config: activation_function {activation!r} is not one of relu, gelu")
    return plain_config(
        "opt",
        ("hidden_size", "num_attention_heads"),
        hidden,
        heads,
        stored="hf",
        num_layers=number(values, "num_hidden_layers", int),
        intermediate_size=number(values, "ffn_dim", int),
        vocab_size=number(values, "vocab_size", int),
        max_positions=number(values, "max_position_embeddings", int, 2048),
        norm_eps=1e-5,
        activation=activation,
        tied=bool(values.get("tie_word_embeddings", True)),
        dtype=number_format(values),
        bos=values.get("bos_token_id"),
        eos=ids(values.get("eos_token_id")),
    )


def plan(config: ModelConfig, shard: Shard) -> Plan:
    """q/k/v and the first MLP matrix are column-parallel, the others row-parallel, the ends by vocabulary."""
    hidden, width, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    heads, positions = shard.heads.scaled(config.head_dim), config.max_positions + OFFSET
    found: Plan = {}

    def pair(name: str, stored: str, outputs: int, inputs: int, rows: Run) -> None:
        own = matrix(stored + ".weight", (outputs, inputs), rows), vector(stored + ".bias", outputs, rows)
        for kind, placement in zip(("weight", "bias"), own, strict=True):
            found[f"{name}.{kind}"] = (*found.get(f"{name}.{kind}", ()), placement)

    def closing(name: str, stored: str, inputs: int, cols: Run) -> None:
        found[name + ".weight"] = (matrix(stored + ".weight", (hidden, inputs), cols=cols),)
        found[name + ".bias"] = (vector(stored + ".bias", hidden),)

    if shard.first:
        found["embed.weight"] = (matrix("decoder.embed_tokens.weight", (vocab, hidden), shard.vocab),)
        used = Run(OFFSET, positions), Run(0, hidden)
        found["embed.positions"] = (Placement("decoder.embed_positions.weight", (positions, hidden), *used),)
    for index in range(shard.layers.start, shard.layers.stop):
        at, layer = f"layers.{index}.", f"decoder.layers.{index}."
        found |= affine(at + "attention_norm", layer + "self_attn_layer_norm", hidden)
        for name in ("q", "k", "v"):
            pair(at + "attention.qkv", f"{layer}self_attn.{name}_proj", hidden, hidden, heads)
        closing(at + "attention.out", layer + "self_attn.out_proj", hidden, heads)
        found |= affine(at + "mlp_norm", layer + "final_layer_norm", hidden)
        pair(at + "mlp.up", layer + "fc1", width, hidden, shard.mlp)
        closing(at + "mlp.down", layer + "fc2", width, shard.mlp)
    if shard.last:
        found |= affine("norm", "decoder.final_layer_norm", hidden)
        found |= head(config, shard, "decoder.embed_tokens.weight")
    return found


OPT = Family(name="opt", from_hf=from_hf, plan=plan, hf_name=lambda name: name.removeprefix("model."))
