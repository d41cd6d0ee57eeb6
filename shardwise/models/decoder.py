"""One pipeline stage of a decoder-only transformer: embed, layers, head, each absent where another stage has it.

Sees tensors and one mesh axis; knows nothing of requests, scheduling or processes. Its parts are plain objects that are
called: torch's modules cost half a millisecond a step in bookkeeping that nothing here uses.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardwise.kernels.ops import Ops, Part, Weight
from shardwise.models.alibi import slopes
from shardwise.models.batch import KV, Batch
from shardwise.models.config import ModelConfig, mlp_bounds
from shardwise.models.linear import Embedding, Linear, RowLinear
from shardwise.models.moe import Expert, MoE, Partial, partial_program, pieces
from shardwise.models.norm import HeadNorm, Norm
from shardwise.models.rope import RopeTable
from shardwise.models.shard import Shard
from shardwise.parallel.axis import Axis
from shardwise.parallel.placement import Plan, layer_of


class Attention:
    """Grouped-query attention over the paged cache, for this rank's run of heads."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        qkv: Linear,
        out: RowLinear,
        rope: RopeTable | None,
        head_norm: HeadNorm | None,
        slopes: Tensor | None,
    ) -> None:
        self.ops = qkv.ops
        self.qkv = qkv
        self.out = out
        self.head_norm = head_norm
        self.slopes = slopes
        self.window = config.window
        self.cos = rope.cos if rope is not None else None
        self.sin = rope.sin if rope is not None else None
        self.num_heads = shard.heads.size
        self.groups = shard.groups
        self.scale = config.head_dim**-0.5

    def __call__(self, x: Tensor, residual: Tensor, kv: KV, batch: Batch) -> Tensor:
        """[M, hidden] normed, [M, hidden] → [M, hidden] with the residual added; writes the rows' keys and values."""
        qkv = self.qkv(x)
        if self.head_norm is not None:
            qkv = self.head_norm(qkv)
        q = self.ops.rotate_write(
            qkv, self.cos, self.sin, batch.positions, batch.slots, kv.keys, kv.values, self.num_heads
        )
        where = batch.starts, batch.table, batch.positions
        mixed = self.ops.attend(q, kv.keys, kv.values, *where, self.groups, self.scale, self.slopes, self.window)
        return self.out(mixed.flatten(-2), residual)


class MLP:
    """Up, elementwise, down: gated where the activation takes two halves."""

    def __init__(self, up: Linear, down: RowLinear, activation: str) -> None:
        self.ops = up.ops
        self.up = up
        self.down = down
        self.activation = activation

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """[M, hidden] normed, [M, hidden] → [M, hidden] with the residual added."""
        return self.down(self.ops.activate(self.activation, self.up(x)), residual)


class Layer:
    """Attention, then MLP, each on a normed copy and added to the residual stream."""

    def __init__(self, attention_norm: Norm, attention: Attention, mlp_norm: Norm, mlp: MLP | MoE) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x: Tensor, kv: KV, batch: Batch) -> Tensor:
        """[M, hidden] → [M, hidden]."""
        x = self.attention(self.attention_norm(x), x, kv, batch)
        return self.mlp(self.mlp_norm(x), x)


RunLayer: TypeAlias = Callable[[Layer, Tensor, KV, Batch], Tensor]


def run_layer(layer: Layer, x: Tensor, kv: KV, batch: Batch) -> Tensor:
    """As it is."""
    return layer(x, kv, batch)


class Decoder:
    """The layers of one stage by number, and the embedding or the head where the stage has them.

    ``run`` calls a layer, as it is or compiled.
    """

    def __init__(
        self,
        layers: dict[int, Layer],
        rope: RopeTable | None,
        embed: Embedding | None,
        embed_norm: Norm | None,
        norm: Norm | None,
        head: Linear | None,
        run: RunLayer = run_layer,
    ) -> None:
        self.embed = embed
        self.embed_norm = embed_norm
        self.rope = rope
        self.layers = layers
        self.norm = norm
        self.head = head
        self.run = run

    def __call__(self, x: Tensor | None, cache: Sequence[KV], batch: Batch) -> Tensor:
        """Hidden states [M, hidden] from the stage before (None on the first) → those of this stage's last layer."""
        if self.embed is not None:
            x = self.embed(batch.ids, batch.positions)
            if self.embed_norm is not None:
                x = self.embed_norm(x)
        assert x is not None
        for layer, kv in zip(self.layers.values(), cache, strict=True):
            x = self.run(layer, x, kv, batch)
        return x

    def final(self, x: Tensor) -> Tensor:
        """On the last stage: [R, hidden] → the model's last hidden states [R, hidden]."""
        assert self.norm is not None
        return self.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """On the last stage: [R, hidden], not normed → [R, own vocabulary rows], in the compute dtype."""
        assert self.head is not None
        return self.head(self.final(x))

    def first(self, layers: int) -> Decoder:
        """This decoder without the layers from number ``layers`` on; the two share all parts."""
        kept = {index: layer for index, layer in self.layers.items() if index < layers}
        return Decoder(kept, self.rope, self.embed, self.embed_norm, self.norm, self.head, self.run)

    def owner(self, parameter: str) -> tuple[Any, str]:
        """Which part has a parameter of the plan, and as what: a Weight, or a tensor."""
        *path, name = parameter.split(".")
        part_of: Any = self
        for step in path:
            part_of = part_of[int(step)] if step.isdigit() else getattr(part_of, step)
        return part_of, name

    def write(self, parameter: str, row: int, part: Part) -> None:
        """Fill rows ``row`` onwards of a parameter named as in the plan; ``part`` is [rows] or as for `Ops.write`."""
        part_of, name = self.owner(parameter)
        target = getattr(part_of, name)
        if isinstance(target, Weight):
            part_of.ops.write(target, row, part)
        else:
            assert isinstance(part, Tensor)
            target[row : row + part.shape[0]] = part
        if isinstance(part_of, RopeTable):
            part_of.fill()


def build(
    config: ModelConfig,
    shard: Shard,
    plan: Plan,
    axis: Axis,
    ops: Ops,
    dtype: torch.dtype,
    positions: int,
    device: torch.device,
    elsewhere: Container[int] = (),
    run: RunLayer = run_layer,
) -> Decoder:
    """The decoder of one shard with zeroed weights of ``dtype``, to be filled through ``write``.

    Every shape comes from ``plan``; ``positions`` bounds the rope table. Weights of layers that are ``elsewhere`` have
    shapes and no memory (torch's meta device).
    """

    def home(parameter: str) -> torch.device:
        return torch.device("meta") if layer_of(parameter) in elsewhere else device

    def rows(parameter: str) -> int:
        return sum(placement.rows.size for placement in plan[parameter])

    def weight(parameter: str) -> Weight:
        first, cols = plan[parameter][0], plan[parameter][0].cols
        assert cols is not None
        if first.quantize is None:
            return ops.weight(rows(parameter), cols.size, dtype, home(parameter))
        group = first.group
        return ops.quantised(
            rows(parameter), cols.size, first.quantize.bits, group, cols.start % group, home(parameter)
        )

    def bias(path: str) -> Tensor | None:
        name = path + ".bias"
        return torch.zeros(rows(name), dtype=ops.compute, device=home(name)) if name in plan else None

    def linear(path: str) -> Linear:
        return Linear(ops, weight(path + ".weight"), bias(path))

    def norm(path: str) -> Norm:
        return Norm(ops, config.hidden_size, config.norm_eps, path + ".bias" in plan, home(path))

    def mlp(at: str) -> MLP | MoE:
        chunks = shard.mlp_chunks
        if config.experts is None:
            whole = RowLinear(ops, weight(at + "mlp.down.weight"), bias(at + "mlp.down"), chunks, axis)
            return MLP(linear(at + "mlp.up"), whole, config.activation)
        bounds, tree = mlp_bounds(config), chunks.tree
        held = pieces(shard.experts(config.intermediate_size), bounds, config.intermediate_size)
        experts = {}
        for number, run in held.items():
            name = f"{at}mlp.experts.{number}."
            down = Partial(ops, weight(name + "down.weight"), partial_program(tree, run, bounds))
            experts[number] = Expert(linear(name + "up"), down)
        leaves = [node for run in held.values() for node in tree.within(run)]
        merges = tree.program(tree.parts[axis.rank], leaves)
        return MoE(config.experts, linear(at + "mlp.router"), experts, config.activation, chunks, merges, axis)

    def head_norm(path: str) -> HeadNorm | None:
        present = path + ".q" in plan
        return HeadNorm(ops, config.head_dim, config.norm_eps, shard.heads.size, home(path)) if present else None

    rope = RopeTable(config.rope, positions, ops.compute, device) if config.rope is not None else None
    own = slopes(config.num_heads, config.alibi)[shard.heads.start : shard.heads.stop] if config.alibi else None
    lean = torch.tensor(own, dtype=ops.compute, device=device) if own is not None else None
    layers = {}
    for index in range(shard.layers.start, shard.layers.stop):
        at = f"layers.{index}."
        out = RowLinear(ops, weight(at + "attention.out.weight"), bias(at + "attention.out"), shard.head_chunks, axis)
        layers[index] = Layer(
            norm(at + "attention_norm"),
            Attention(
                config, shard, linear(at + "attention.qkv"), out, rope, head_norm(at + "attention.head_norm"), lean
            ),
            norm(at + "mlp_norm"),
            mlp(at),
        )
    embed = embed_norm = head = None
    if shard.first:
        learned = weight("embed.positions") if "embed.positions" in plan else None
        embed = Embedding(ops, weight("embed.weight"), learned, shard, axis)
        embed_norm = norm("embed_norm") if "embed_norm.weight" in plan else None
    if shard.last:
        shared = embed.weight if embed is not None and "head.weight" not in plan else None
        head = Linear(ops, shared or weight("head.weight"), None)
    return Decoder(layers, rope, embed, embed_norm, norm("norm") if shard.last else None, head, run)
