"""What a rank is told at its start, as plain data for the wire."""

from __future__ import annotations

from typing import Any

import msgspec

from shardwise.features import Compile, Quantization
from shardwise.weights.checkpoint import Index


class Home(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank's layers of a model are, by their numbers from ``start`` up to ``stop``."""

    start: int
    host: int
    """Layers below this stay with the rank; from here on in the host's memory, which only GPUs tell from theirs."""
    disk: int
    """From here on in a file."""
    stop: int


class Offload(msgspec.Struct, frozen=True):
    """A model of which not all layers stay with their ranks."""

    directory: str
    """Of the files, which have no names."""
    homes: list[Home]
    """Of each rank of a replica."""

    def away(self, rank: int) -> range:
        """The layers that don't stay with it."""
        return range(self.homes[rank].host, self.homes[rank].stop)


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
    offload: Offload | None = None
    """Where its own layers are; None: with their ranks."""


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
    offload: Offload | None = None
    """Where the layers are; None: with their ranks."""
    compile: Compile | None = None
    profile: str | None = None
    """How the paths of the ranks' traces begin, if there are to be any."""
