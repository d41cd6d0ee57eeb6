"""What a rank is told at its start, as plain data for the wire."""

from __future__ import annotations

from typing import Any

import msgspec

from shardwise.weights.checkpoint import Index


class RunnerSpec(msgspec.Struct, frozen=True):
    """All a rank needs to know, as plain data; the same for every rank of a replica."""

    model: dict[str, Any]
    """ModelConfig.to_dict()."""
    index: Index
    tp: int
    pp: int
    split: list[float] | None
    stages: list[int] | None
    dtype: str
    device: str
    kernels: str
    num_blocks: int
    max_model_len: int
