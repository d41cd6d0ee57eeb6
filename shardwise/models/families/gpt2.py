"""GPT-2: learned positions, LayerNorm with bias, fused q/k/v stored as [input, output], a tied head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.models.config import ModelConfig
from shardwise.models.families.family import Family, gguf_names, head, ids, matrix, number, number_format, vector
from shardwise.models.families.plain import affine, plain_config, plain_gguf
from shardwise.models.shard import Shard
from shardwise.parallel.placement import Placement, Plan, Run

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
KEYS = "n_embd", "n_head"


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Read a GPT-2 config.json."""
    activation = values.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"model config: activation_function {activation!r} is not one of {', '.join(_ACTIVATIONS)}")
    if values.get("scale_attn_by_inverse_layer_idx") or not values.get("scale_attn_weights", True):
        raise ValueError("model config: only attention scaled by 1/sqrt(head size) is supported for this family")
    if values.get("add_cross_attention"):
        raise ValueError("model config: cross attention is not supported")
    hidden = number(values, "n_embd", int)
    return plain_config(
        "gpt2",
        KEYS,
        hidden,
        number(values, "n_head", int),
        stored="hf",
        num_layers=number(values, "n_layer", int),
        intermediate_size=number(values, "n_inner", int, 4 * hidden),
        vocab_size=number(values, "vocab_size", int),
        max_positions=number(values, "n_positions", int),
        norm_eps=number(values, "layer_norm_epsilon", float, 1e-5),
        activation=_ACTIVATIONS[activation],
        tied=bool(values.get("tie_word_embeddings", True)),
        dtype=number_format(values),
        bos=values.get("bos_token_id"),
        eos=ids(values.get("eos_token_id")),
    )


def from_gguf(values: Mapping[str, Any]) -> ModelConfig:
    """Read the metadata of a GGUF file of architecture "gpt2"."""
    return plain_gguf(
        values,
        "gpt2",
        KEYS,
        intermediate_size=number(values, "gpt2.feed_forward_length", int),
        max_positions=number(values, "gpt2.context_length", int),
    )


def plan(config: ModelConfig, shard: Shard) -> Plan:
    """As Llama's, but q, k and v are three runs of one tensor, and matrices may lie transposed on disk."""
    hidden, width, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    own = shard.heads.scaled(config.head_dim)
    whole = Run(0, hidden)
    thirds = [Run(own.start + part * hidden, own.stop + part * hidden) for part in range(3)]

    def linear(name: str, outputs: int, inputs: int, rows: Run | None = None, cols: Run | None = None) -> Placement:
        rows, cols = rows or Run(0, outputs), cols or Run(0, inputs)
        if config.stored == "gguf":
            return Placement(name, (outputs, inputs), rows, cols)
        return Placement(name, (inputs, outputs), rows, cols, transposed=True)

    found: Plan = {}
    if shard.first:
        found["embed.weight"] = (matrix("wte.weight", (vocab, hidden), shard.vocab),)
        found["embed.positions"] = (matrix("wpe.weight", (config.max_positions, hidden)),)
    for index in range(shard.layers.start, shard.layers.stop):
        at, layer = f"layers.{index}.", f"h.{index}."
        found |= affine(at + "attention_norm", layer + "ln_1", hidden) | affine(at + "mlp_norm", layer + "ln_2", hidden)
        fused = layer + "attn.c_attn"
        found[at + "attention.qkv.weight"] = tuple(
            linear(fused + ".weight", 3 * hidden, hidden, rows, whole) for rows in thirds
        )
        found[at + "attention.qkv.bias"] = tuple(vector(fused + ".bias", 3 * hidden, rows) for rows in thirds)
        found[at + "attention.out.weight"] = (linear(layer + "attn.c_proj.weight", hidden, hidden, cols=own),)
        found[at + "attention.out.bias"] = (vector(layer + "attn.c_proj.bias", hidden),)
        found[at + "mlp.up.weight"] = (linear(layer + "mlp.c_fc.weight", width, hidden, rows=shard.mlp),)
        found[at + "mlp.up.bias"] = (vector(layer + "mlp.c_fc.bias", width, shard.mlp),)
        found[at + "mlp.down.weight"] = (linear(layer + "mlp.c_proj.weight", hidden, width, cols=shard.mlp),)
        found[at + "mlp.down.bias"] = (vector(layer + "mlp.c_proj.bias", hidden),)
    if shard.last:
        found |= affine("norm", "ln_f", hidden) | head(config, shard, "wte.weight")
    return found


GGUF_ENDS = {
    "token_embd.weight": "wte.weight",
    "position_embd.weight": "wpe.weight",
    "output_norm.weight": "ln_f.weight",
    "output_norm.bias": "ln_f.bias",
    "output.weight": "lm_head.weight",
}
GGUF_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


GPT2 = Family(
    name="gpt2",
    from_hf=from_hf,
    from_gguf=from_gguf,
    plan=plan,
    hf_name=lambda name: name.removeprefix("transformer."),
    gguf_name=gguf_names(GGUF_ENDS, GGUF_LAYER, "h."),
    ignored=lambda name: re.fullmatch(r"h\.\d+\.attn\.(bias|masked_bias)", name) is not None,
)
