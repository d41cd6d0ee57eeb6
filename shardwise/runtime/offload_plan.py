"""What goes where when memory is limited: which layers stay with their rank, and which on the host or on disk.

Arithmetic on the bytes that the headers gave, done once in the front process for all ranks; no torch. How layers come
and go is the business of `offload`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config import BLOCK, EngineConfig
from shardwise.features import Quantization
from shardwise.kernels.build import cache_directory, have_library
from shardwise.models.config import ModelConfig
from shardwise.runtime.disk import check_writable
from shardwise.runtime.draft_plan import DraftPlan
from shardwise.runtime.rank_plan import BYTES, RankPlan, compute_bytes
from shardwise.runtime.spec import Home, Offload

KV_SHARE = 0.5
"""Share of the room for KV cache and layers that the cache may take where not all layers fit."""
READING = 80 * 2**20
"""Bytes that reading takes: a piece of weights (see `weights.load`) as it is stored, cast, rounded and packed."""


@dataclass(frozen=True)
class Budget:
    """What one rank holds whatever becomes of its layers, and the layers; sizes in bytes."""

    limit: int
    ends: int
    """Embedding, head, norms and rope tables."""
    working: int
    """Activations and scores of the largest batch, or what reading takes."""
    kv: int
    """Of one token."""
    models: tuple[RankPlan, ...]
    """Whose layers it holds, first those that are to stay: drafts are made several times as often as verified."""
    under_way: int
    """Layers that are being used and fetched, on a GPU with layers elsewhere: two of each model."""

    @property
    def layers(self) -> int:
        """All of them."""
        return sum(sum(model.layer_bytes) for model in self.models)

    def least(self, tokens: int) -> int:
        """The smallest limit that works with so many tokens of KV cache."""
        return self.ends + self.working + self.kv * tokens + self.under_way

    def tokens(self, wanted: int, longest: int) -> int:
        """Tokens of KV cache, of those wanted: what is beyond the longest sequence makes room for layers."""
        room = self.limit - self.ends - self.working
        one = min(wanted, longest)
        if self.layers + self.kv * one <= room:
            return min(wanted, (room - self.layers) // self.kv)
        return min(one, int((room - self.under_way) * KV_SHARE / self.kv))

    def homes(self, tokens: int, host: int) -> list[Home]:
        """Of each of the ``models``, with so many tokens of KV cache, and so many bytes of ``host`` memory left."""
        left = self.limit - self.least(tokens) + self.under_way
        if left < self.layers:
            left -= self.under_way
        found = []
        for model in self.models:
            start = model.shard.layers.start
            kept, left = _fit(model.layer_bytes, left)
            near, host = _fit(model.layer_bytes[kept:], host)
            found.append(Home(start, start + kept, start + kept + near, start + len(model.layer_bytes)))
        return found


def _fit(sizes: Sequence[int], room: int) -> tuple[int, int]:
    """How many of the first ``sizes`` fit into ``room``, and what room is left."""
    for count, size in enumerate(sizes):
        if size > room:
            return count, room
        room -= size
    return len(sizes), room


def _named(start: int, stop: int) -> str:
    return f"layer {start}" if stop == start + 1 else f"layers {start} to {stop - 1}"


@dataclass(frozen=True)
class OffloadPlan:
    """Where every layer is, in rank order of one replica; replicas are alike."""

    num_blocks: int
    limits: tuple[int, ...]
    target: Offload
    draft: Offload | None
    """Of a draft decoder with weights of its own."""

    def document(self, rank: int, plan: RankPlan) -> dict[str, Any]:
        """JSON-ready: the limit, and runs of layers and bytes in each place, of the model without its draft."""
        home = self.target.homes[rank]
        runs = {"device": (home.start, home.host), "host": (home.host, home.disk), "disk": (home.disk, home.stop)}
        sizes = {name: sum(plan.layer_bytes[a - home.start : b - home.start]) for name, (a, b) in runs.items()}
        return {"limit": self.limits[rank], "layers": {name: list(run) for name, run in runs.items()}, "bytes": sizes}

    def lines(self, ranks: Sequence[RankPlan]) -> list[str]:
        """For people, a line for each rank."""
        found = []
        for number, rank in enumerate(ranks):
            told = self.document(number, rank)
            parts = [
                f"{_named(start, stop)} {place} ({told['bytes'][name] / 1e6:,.1f} MB)"
                for name, place in (("device", "in its memory"), ("host", "on the host"), ("disk", "on disk"))
                for start, stop in [told["layers"][name]]
                if stop > start
            ]
            draft = self.draft.homes[number] if self.draft is not None else None
            if draft is not None:
                kept, away = draft.host - draft.start, draft.stop - draft.host
                parts.append(f"of the draft's layers {kept} in its memory and {away} elsewhere")
            tokens = self.num_blocks * BLOCK
            found.append(f"rank {number}, {told['limit'] / 1e6:,.1f} MB: {', '.join(parts)}, KV of {tokens} tokens")
        return found


def plan_offload(
    engine: EngineConfig,
    device: str,
    config: ModelConfig,
    dtype: str,
    quantize: Quantization | None,
    ranks: Sequence[RankPlan],
    draft: DraftPlan | None,
    longest: int,
    wanted: int,
    local: int,
) -> OffloadPlan | None:
    """Keep within ``engine.max_memory``; None where no limit is given.

    ``wanted`` are tokens of KV cache, ``local`` the ranks on each host, which share what may be taken of its memory.

    Raises ValueError, which names the smallest limit that works, or says what the disk lacks.
    """
    if engine.max_memory is None:
        return None
    model = config, dtype, quantize, ranks
    budgets = [_budget(engine, device, *model, draft, longest, local, rank) for rank in range(len(ranks))]
    least = engine.kv_tokens or BLOCK
    least = -(-least // BLOCK) * BLOCK
    _check(engine, device, budgets, least, local)
    if engine.kv_tokens is None:
        least = max(least, min(budget.tokens(wanted, longest) // BLOCK * BLOCK for budget in budgets))
    share = (engine.max_memory.host or 0) // local if device == "cuda" else 0
    homes = [budget.homes(least, share) for budget in budgets]
    directory = str(Path(engine.offload_dir).absolute() if engine.offload_dir is not None else cache_directory())
    plan = OffloadPlan(
        num_blocks=least // BLOCK,
        limits=tuple(budget.limit for budget in budgets),
        target=Offload(directory, [each[-1] for each in homes]),
        draft=Offload(directory, [each[0] for each in homes]) if len(homes[0]) > 1 else None,
    )
    _check_disk(directory, engine.layout.dp * sum(map(_on_disk, budgets, homes)) * local // engine.layout.world_size)
    return plan


def _budget(
    engine: EngineConfig,
    device: str,
    config: ModelConfig,
    dtype: str,
    quantize: Quantization | None,
    ranks: Sequence[RankPlan],
    draft: DraftPlan | None,
    longest: int,
    local: int,
    rank: int,
) -> Budget:
    memory = engine.max_memory
    assert memory is not None
    limit = memory.of(rank)
    if device == "cpu" and memory.host is not None:
        share = memory.host // local
        limit = share if limit is None else min(limit, share)
    if limit is None:
        raise ValueError(
            "max_memory: cpu limits what GPUs leave to the host: give a limit for each GPU too, as in 10GB,cpu=20GB"
        )
    own = [(config, dtype, quantize, ranks[rank])]
    if draft is not None and draft.layers is None:
        own.insert(0, (draft.config, draft.dtype, draft.quantize, draft.ranks[rank]))
    models = tuple(model for *_, model in own)
    most = [max(model.layer_bytes) for model in models]
    ends = [
        model.weight_bytes - sum(model.layer_bytes) + _rope(config, dtype, longest) for config, dtype, _, model in own
    ]
    steps = [_step(engine, config, dtype, model) for config, dtype, _, model in own]
    if not _is_native(engine, device):
        steps = [
            step + _opened(dtype, rounded, model) for step, (_, dtype, rounded, model) in zip(steps, own, strict=True)
        ]
    both = engine.speculate is not None and engine.speculate.accept == "optimal"  # guesses wait for the verdict
    reading = min(READING, 20 * max(*most, *ends))
    return Budget(
        limit=limit,
        ends=sum(ends),
        working=max(sum(steps) if both else max(steps), reading),
        kv=sum(model.kv_bytes_per_token for model in models),
        models=models,
        under_way=sum(min(2 * size, sum(model.layer_bytes)) for size, model in zip(most, models, strict=True))
        if device == "cuda"
        else 0,
    )


def _rope(config: ModelConfig, dtype: str, longest: int) -> int:
    """Bytes of the table of sines and cosines."""
    return config.rope.dim * min(longest, config.max_positions) * compute_bytes(dtype) if config.rope else 0


def _step(engine: EngineConfig, config: ModelConfig, dtype: str, rank: RankPlan) -> int:
    """Bytes of the activations of the largest batch in one layer, and of scores and noise of the most sampled rows."""
    compute, shard = compute_bytes(dtype), rank.shard
    nodes = max(len(chunks.tree.nodes(rank.tp)) for chunks in shard.sums)
    width = shard.mlp.size
    if config.experts is not None:
        width = min(width, config.intermediate_size * config.experts.chosen)
    heads = (shard.heads.size + 2 * shard.kv_heads.size) * config.head_dim
    rows = engine.max_batch_tokens
    sampled = min(rows, engine.max_num_seqs) if shard.last else 0
    features = (8 + nodes) * config.hidden_size + 3 * heads + 4 * width
    return rows * features * compute + sampled * shard.vocab.size * (2 * compute + 16)


def _is_native(engine: EngineConfig, device: str) -> bool:
    """Will the kernels be those in C, which read weights as they are?"""
    return device == "cpu" and engine.kernels != "torch" and have_library()


def _opened(dtype: str, quantize: Quantization | None, rank: RankPlan) -> int:
    """Bytes of a matrix that torch makes for a product, in the compute dtype; of a rounded one with its scales."""
    compute = compute_bytes(dtype)
    if quantize is not None:
        return rank.largest * compute * (3 if quantize.bits == 8 else 6)
    return rank.largest * compute if BYTES[dtype] < compute else 0


def _check(engine: EngineConfig, device: str, budgets: Sequence[Budget], tokens: int, local: int) -> None:
    needs = [budget.least(tokens) for budget in budgets]
    short = [rank for rank, need in enumerate(needs) if need > budgets[rank].limit]
    if not short:
        return
    rank = max(short, key=needs.__getitem__)
    budget, most = budgets[rank], max(needs)
    parts = {
        "embedding, head and tables": budget.ends,
        f"batches of {engine.max_batch_tokens} tokens (max_batch_tokens, max_num_seqs)": budget.working,
        f"{tokens} tokens of KV cache": budget.kv * tokens,
        "layers under way": budget.under_way,
    }
    told = ", ".join(f"{megabytes(size)} for {what}" for what, size in parts.items() if size)
    memory, valid = engine.max_memory, megabytes(most)
    assert memory is not None
    if device == "cpu" and memory.host is not None:
        valid = f"{f'{valid},' if memory.of(rank) else ''}cpu={megabytes(most * local)}"
    raise ValueError(
        f"max_memory: rank {rank} may hold {megabytes(budget.limit)} and needs {megabytes(needs[rank])} with every "
        f"layer elsewhere: {told}. The smallest max_memory that works is {valid}; smaller batches need less"
    )


def megabytes(size: int) -> str:
    """Rounded up to what `MaxMemory.parse` reads."""
    digits = 0 if size >= 10**8 else 4
    return f"{math.ceil(size / 10 ** (6 - digits)) / 10**digits:.10g}MB"


def _on_disk(budget: Budget, homes: Sequence[Home]) -> int:
    return sum(
        sum(model.layer_bytes[home.disk - home.start :]) for model, home in zip(budget.models, homes, strict=True)
    )


def _check_disk(directory: str, size: int) -> None:
    """ValueError unless so many bytes could be written below ``directory``, which may not exist yet."""
    if size == 0:
        return
    status = os.statvfs(check_writable("offload_dir", directory))
    free = status.f_bavail * status.f_frsize
    if free < size:
        raise ValueError(
            f"offload_dir {directory}: {megabytes(size)} of weights are to lie there and {megabytes(free)} are free; "
            "give a directory on another disk, or a larger max_memory"
        )
