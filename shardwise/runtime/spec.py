"""What a rank is told at its start, as plain data for the wire."""

from __future__ import annotations

from typing import Any

import msgspec

from shardwise.config import Quantization
from shardwise.weights.checkpoint import Index


class DraftSpec(msgspec.Struct, frozen=True):
    """The decoder that drafts tokens beside the model."""

    model: dict[str, Any] | None
    """ModelConfig.to_dict() of a model with a KV cache of its own; None: the target itself, in the target's cache."""
    index: Index | None
    """Where that model's tensors lie."""
    dtype: str
    quantize: Quantization | None
    layers: int | None
    """Run only the target's first so many layers, which are there already; None: all, read in ``dtype`` or rounded."""


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
    quantize: Quantization | None
    device: str
    kernels: str
    num_blocks: int
    max_model_len: int
    draft: DraftSpec | None
