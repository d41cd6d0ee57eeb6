"""What one rank owns of a model: runs of heads, MLP features, vocabulary rows and layers. Arithmetic, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.config import Layout
from shardwise.models.config import ModelConfig, head_bounds, mlp_bounds
from shardwise.parallel.placement import Run, Tree, split


@dataclass(frozen=True)
class Chunks:
    """A rank's share of a row-parallel sum: its chunk boundaries along its own inputs, and the tree over all ranks."""

    bounds: tuple[int, ...]
    tree: Tree


@dataclass(frozen=True)
class Shard:
    """The part of the model at one place of the (tp, pp) mesh."""

    tp: int
    layers: Run
    first: bool
    last: bool
    heads: Run
    kv_heads: Run
    groups: tuple[int, ...]
    """Local query heads groups[j] to groups[j+1] read local kv head j."""
    mlp: Run
    """MLP features; of a mixture, those of all experts in a row."""
    vocabs: tuple[Run, ...]
    """Vocabulary rows of every tp rank."""
    head_chunks: Chunks
    mlp_chunks: Chunks

    @property
    def sums(self) -> tuple[Chunks, Chunks]:
        """Its two kinds of row-parallel sum."""
        return self.head_chunks, self.mlp_chunks

    def experts(self, width: int) -> dict[int, Run]:
        """Of a mixture of experts with ``width`` features each: those that it holds, and which features of each."""
        first, last = self.mlp.start // width, (self.mlp.stop - 1) // width
        return {
            expert: Run(max(self.mlp.start - expert * width, 0), min(self.mlp.stop - expert * width, width))
            for expert in range(first, last + 1)
        }

    @property
    def vocab(self) -> Run:
        """This rank's vocabulary rows."""
        return self.vocabs[self.tp]


def make_shard(
    config: ModelConfig,
    layout: Layout,
    tp: int = 0,
    pp: int = 0,
    weights: Sequence[float] | None = None,
    stages: Sequence[int] | None = None,
) -> Shard:
    """The shard at tensor rank ``tp`` of stage ``pp``; ``layout`` must have passed ``config.check``.

    ``weights`` are the relative shares of the tp ranks; ``stages`` the layers per stage.
    """
    size = config.group_size
    bounds = head_bounds(config)
    chunks = len(bounds) - 1
    if layout.tp <= config.num_kv_heads:  # whole kv groups: no kv head is held twice
        per_group = chunks // config.num_kv_heads
        head_parts = [run.scaled(per_group) for run in split(config.num_kv_heads, layout.tp, weights)]
    else:
        head_parts = split(chunks, layout.tp, weights)
    heads = Run(bounds[head_parts[tp].start], bounds[head_parts[tp].stop])
    kv_heads = Run(heads.start // size, (heads.stop - 1) // size + 1)
    cuts = [min(max(kv * size, heads.start), heads.stop) - heads.start for kv in range(kv_heads.start, kv_heads.stop)]

    widths = mlp_bounds(config)
    mlp_parts = split(len(widths) - 1, layout.tp, weights)
    mlp = Run(widths[mlp_parts[tp].start], widths[mlp_parts[tp].stop])

    counts = stages or stage_layers(config, layout.pp)
    first_layer = sum(counts[:pp])
    return Shard(
        tp=tp,
        layers=Run(first_layer, first_layer + counts[pp]),
        first=pp == 0,
        last=pp == layout.pp - 1,
        heads=heads,
        kv_heads=kv_heads,
        groups=(*cuts, heads.size),
        mlp=mlp,
        vocabs=tuple(split(config.vocab_size, layout.tp, weights)),
        head_chunks=_chunks(bounds, head_parts, tp, config.head_dim),
        mlp_chunks=_chunks(widths, mlp_parts, tp, 1),
    )


def _chunks(bounds: Sequence[int], parts: list[Run], rank: int, unit: int) -> Chunks:
    own = parts[rank]
    start = bounds[own.start]
    local = tuple((bound - start) * unit for bound in bounds[own.start : own.stop + 1])
    return Chunks(local, Tree(tuple(parts)))


def stage_layers(config: ModelConfig, stages: int) -> list[int]:
    """Layers per pipeline stage, so that the largest stage holds as few parameters as can be.

    The first stage also counts the embedding and the last the head.
    """
    layer = config.attention_parameters + config.mlp_parameters
    ends = config.hidden_size * config.vocab_size
    load = [0.0] * stages
    load[0] += ends
    load[-1] += ends if stages > 1 or not config.tied else 0
    counts = [1] * stages
    for _ in range(config.num_layers - stages):
        lightest = min(range(stages), key=lambda stage: load[stage] + layer * counts[stage])
        counts[lightest] += 1
    return counts
