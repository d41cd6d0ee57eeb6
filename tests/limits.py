"""Limits of memory that are too tight for all layers, found through what refusals say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.features import MaxMemory
from shardwise.runtime.launch import RunPlan
from tests.harness import plan_of


def smallest(path: Path, layout: str, rank: int | None = None, **settings: Any) -> int:
    """The limit that a refusal says would do for all ranks, or that one rank needs, in bytes."""
    limits = MaxMemory(1) if rank is None else MaxMemory(10**9, ((rank, 1),))
    with pytest.raises(ValueError, match="max_memory: rank") as refusal:
        plan_of(path, layout, max_memory=limits, **settings)
    found = re.search(r"needs (\S+) with .* that works is (\S+);", str(refusal.value))
    assert found is not None
    limit = MaxMemory.parse(found[2 if rank is None else 1]).every
    assert limit is not None
    return limit


def limited(path: Path, layout: str, directory: Path, share: float = 0.5, **settings: Any) -> RunPlan:
    """The plan where each rank has room for a ``share`` of its layers, and somewhat more."""
    free = plan_of(path, layout, **settings)
    drafts = free.draft.ranks if free.draft is not None else free.ranks
    pairs = zip(free.ranks, drafts, strict=True)
    room = [int(share * sum(max(rank.layer_bytes, draft.layer_bytes))) for rank, draft in pairs]
    limits = tuple((rank, smallest(path, layout, rank, **settings) + size) for rank, size in enumerate(room))
    return plan_of(path, layout, max_memory=MaxMemory(None, limits), offload_dir=str(directory), **settings)


def num_away(plan: RunPlan) -> int:
    """Layers of the model, counted on each rank, that don't stay there."""
    assert plan.offload is not None
    return sum(home.stop - home.host for home in plan.offload.target.homes)
