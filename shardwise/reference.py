"""The oracle: one prompt, no cache, no batch, no parallelism. Every other path must agree with it, token for token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from shardwise.models.alibi import slopes
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

    if "embed_norm.weight" in weights:
        x = norm(x, "embed_norm")

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def rotate(x: Tensor) -> Tensor:  # [heads, tokens, dim]
        if turn is None:
            return x
        half = turn.cos.shape[1]
        left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([left * turn.cos - right * turn.sin, right * turn.cos + left * turn.sin, rest], -1)

    def mlp(x: Tensor, name: str) -> Tensor:
        up = linear(x, name + "up")
        if config.activation == "silu_mul":
            gate, value = up.chunk(2, -1)
            up = F.silu(gate) * value
        elif config.activation == "relu":
            up = F.relu(up)
        else:
            up = F.gelu(up, approximate="tanh" if config.activation == "gelu_tanh" else "none")
        return linear(up, name + "down")

    def mixture(x: Tensor, name: str) -> Tensor:
        assert config.experts is not None
        odds, chosen = linear(x, name + "router").softmax(-1).sort(descending=True, stable=True)
        odds, chosen = odds[:, : config.experts.chosen], chosen[:, : config.experts.chosen]
        odds = odds / odds.sum(-1, keepdim=True) if config.experts.normed else odds
        share = torch.zeros(length, config.experts.count, dtype=dtype).scatter(1, chosen, odds)
        every = range(config.experts.count)
        return sum((share[:, [e]] * mlp(x, f"{name}experts.{e}.") for e in every), torch.zeros_like(x))

    away = torch.arange(length)[None, :] - torch.arange(length)[:, None]  # of key from query
    hidden = (away > 0) | (away <= -(config.window or length))
    lean = torch.tensor(slopes(config.num_heads, config.alibi), dtype=dtype).view(-1, 1, 1) * bool(config.alibi)
    mask = (lean * away).masked_fill(hidden, -torch.inf)
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        heads = linear(norm(x, at + "attention_norm"), at + "attention.qkv").view(length, -1, dim).transpose(0, 1)
        q, k, v = heads.tensor_split([config.num_heads, config.num_heads + config.num_kv_heads])
        if f"{at}attention.head_norm.q" in weights:
            q, k = (
                F.rms_norm(t, (dim,), weights[f"{at}attention.head_norm.{name}"], config.norm_eps)
                for name, t in (("q", q), ("k", k))
            )
        k, v = (t.repeat_interleave(config.group_size, 0) for t in (rotate(k), v))
        mixed = F.scaled_dot_product_attention(rotate(q), k, v, attn_mask=mask)
        x = x + linear(mixed.transpose(0, 1).flatten(1), at + "attention.out")
        x = x + (mixture if config.experts else mlp)(norm(x, at + "mlp_norm"), at + "mlp.")
    return F.linear(norm(x, "norm"), weights.get("head.weight", weights["embed.weight"]))
