"""What each rank of a replica will hold of one model, in bytes: arithmetic on numbers that the headers gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.config import EngineConfig
from shardwise.features import Quantization
from shardwise.models.config import ModelConfig
from shardwise.models.families.table import make_plan
from shardwise.models.shard import Shard, make_shard
from shardwise.parallel.placement import Placement, layer_of

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class RankPlan:
    """What one rank will hold."""

    tp: int
    pp: int
    shard: Shard
    parameters: int
    weight_bytes: int
    layer_bytes: tuple[int, ...]
    """Of the above, each of its layers."""
    largest: int
    """Elements of its largest matrix."""
    kv_bytes_per_token: int


def compute_bytes(dtype: str) -> int:
    """Bytes of one activation or cached number beside weights of ``dtype``: float32, or float64 with float64."""
    return max(BYTES[dtype], 4)


def plan_ranks(
    config: ModelConfig,
    engine: EngineConfig,
    dtype: str,
    quantize: Quantization | None,
    stages: Sequence[int] | None,
) -> tuple[RankPlan, ...]:
    """Every rank of a replica in rank order, with weights of ``dtype`` or rounded, and so many layers per stage."""
    layout = engine.layout
    return tuple(
        _plan_rank(config, make_shard(config, layout, tp, pp, engine.split, stages), dtype, quantize, tp, pp)
        for pp in range(layout.pp)
        for tp in range(layout.tp)
    )


def row_bytes(config: ModelConfig, ranks: Sequence[RankPlan], dtype: str) -> int:
    """The most bytes that one row of a batch takes in a rank's share of a sum."""
    nodes = max(len(chunks.tree.nodes(rank.tp)) for rank in ranks for chunks in rank.shard.sums)
    return config.hidden_size * compute_bytes(dtype) * nodes


def _plan_rank(
    config: ModelConfig, shard: Shard, dtype: str, quantize: Quantization | None, tp: int, pp: int
) -> RankPlan:
    plan = make_plan(config, shard, quantize)
    parameters = sum(placement.size for placements in plan.values() for placement in placements)
    sizes = {name: sum(_bytes(part, dtype) for part in placements) for name, placements in plan.items()}
    layers = dict.fromkeys(range(shard.layers.start, shard.layers.stop), 0)
    for name, size in sizes.items():
        if (number := layer_of(name)) is not None:
            layers[number] += size
    compute = compute_bytes(dtype)
    return RankPlan(
        tp=tp,
        pp=pp,
        shard=shard,
        parameters=parameters,
        weight_bytes=sum(sizes.values()),
        layer_bytes=tuple(layers.values()),
        largest=max(sum(part.size for part in placements) for placements in plan.values()),
        kv_bytes_per_token=shard.layers.size * shard.kv_heads.size * 2 * config.head_dim * compute,
    )


def _bytes(part: Placement, dtype: str) -> int:
    if part.cols is None:  # vectors, like the cache, are kept in the compute dtype
        return part.size * compute_bytes(dtype)
    if part.quantize is None:
        return part.size * BYTES[dtype]
    scales = part.rows.size * part.groups.size * BYTES["bfloat16"]
    return part.size + scales if part.quantize.bits == 8 else part.size // 2 + 2 * scales  # and offsets
