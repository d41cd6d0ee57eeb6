"""The oracle: one prompt, no cache, no batch, no parallelism. Every other path must agree with it, token for token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from shardwise.models.config import ModelConfig
from shardwise.models.rope import RopeTable


def logits(config: ModelConfig, weights: Mapping[str, Tensor], tokens: list[int]) -> Tensor:
    """Logits [tokens, vocabulary] of a prompt; ``weights`` are a single rank's parameters, named as in its plan."""
    dtype = weights["embed.weight"].dtype
    length, dim = len(tokens), config.head_dim
    x = weights["embed.weight"][tokens]
    if "embed.positions" in weights:
        x = x + weights["embed.positions"][:length]
    turn = None
    if config.rope is not None:
        turn = RopeTable(config.rope, length, dtype, torch.device("cpu"))
        turn.factors.copy_(weights.get("rope.factors", turn.factors))
        turn.fill()

    def norm(x: Tensor, name: str) -> Tensor:
        if f"{name}.bias" in weights:
            return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], config.norm_eps)
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config.norm_eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def rotate(x: Tensor) -> Tensor:  # [heads, tokens, dim]
        if turn is None:
            return x
        half = turn.cos.shape[1]
        left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([left * turn.cos - right * turn.sin, right * turn.cos + left * turn.sin, rest], -1)

    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        heads = linear(norm(x, at + "attention_norm"), at + "attention.qkv").view(length, -1, dim).transpose(0, 1)
        q, k, v = heads.tensor_split([config.num_heads, config.num_heads + config.num_kv_heads])
        k, v = (t.repeat_interleave(config.group_size, 0) for t in (rotate(k), v))
        mixed = F.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        x = x + linear(mixed.transpose(0, 1).flatten(1), at + "attention.out")
        up = linear(norm(x, at + "mlp_norm"), at + "mlp.up")
        if config.activation == "silu_mul":
            gate, value = up.chunk(2, -1)
            up = F.silu(gate) * value
        else:
            up = F.gelu(up, approximate="tanh" if config.activation == "gelu_tanh" else "none")
        x = x + linear(up, at + "mlp.down")
    return F.linear(norm(x, "norm"), weights.get("head.weight", weights["embed.weight"]))
