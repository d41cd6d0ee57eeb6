"""One rank's part of one model: its decoder, its KV cache, and the checkpoint slices that fill it.

Knows nothing of steps, sampling or other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.config import BLOCK, Coordinates, Layout
from shardwise.kernels.ops import Ops
from shardwise.models.batch import KV, Batch
from shardwise.models.config import ModelConfig
from shardwise.models.decoder import Decoder, build, run_layer
from shardwise.models.families.table import make_plan
from shardwise.models.shard import Shard, make_shard
from shardwise.parallel.axis import Axis
from shardwise.parallel.placement import Plan
from shardwise.runtime.compiling import CompiledLayers
from shardwise.runtime.offload import Store, put_away
from shardwise.runtime.spec import RunnerSpec
from shardwise.weights.checkpoint import Checkpoint, Index
from shardwise.weights.load import load


@dataclass(frozen=True)
class Part:
    """See the file's sentence. Weights are zero until ``load``."""

    config: ModelConfig
    shard: Shard
    decoder: Decoder
    cache: Sequence[KV]
    """Of each of the decoder's layers, in order."""
    plan: Plan
    """The parameters that ``load`` reads, and from where in ``index``."""
    index: Index
    store: Store | None = None
    """Where the weights of layers are that aren't with this rank."""
    compiled: CompiledLayers | None = None
    """What runs the layers, if they are compiled."""

    @property
    def hidden_size(self) -> int:
        """Width of what stages send each other."""
        return self.config.hidden_size

    def load(self) -> int:
        """Read this rank's slices; the bytes read. Raises LoadError."""
        checkpoint = Checkpoint(self.index)
        try:
            load(checkpoint, self.plan, self.decoder.write)
        finally:
            checkpoint.close()
        if self.store is not None:
            self.store.loaded()
        return checkpoint.bytes_read

    def __call__(self, received: Tensor | None, batch: Batch) -> Tensor:
        """As `Decoder`: [M, hidden] (None on the first stage) → [M, hidden]."""
        with self.compiled.numbers_are_constants if self.compiled is not None else nullcontext():
            return self.decoder(received, self.cache, batch)

    def warm(self) -> None:
        """Compile before the first batch, where anything is compiled; see `CompiledLayers.warm`."""
        if self.compiled is not None:
            self.compiled.warm(self.decoder, self.cache, self.hidden_size)

    def logits(self, x: Tensor, batch: Batch) -> Tensor:
        """On the last stage: [M, hidden] → [R, own vocabulary rows] for ``batch.sample_rows``."""
        return self.decoder.logits(x[batch.sample_rows])

    def first(self, layers: int) -> Part:
        """The part of the model without the layers from number ``layers`` on; it shares all with this one."""
        decoder = self.decoder.first(layers)
        cache = self.cache[: len(decoder.layers)]
        return Part(self.config, self.shard, decoder, cache, {}, self.index, compiled=self.compiled)


def make_part(
    spec: RunnerSpec, coordinates: Coordinates, tp: Axis, ops: Ops, cache: Sequence[KV] | None = None
) -> Part:
    """The part of ``spec``'s model at one place of the mesh, writing to ``cache`` or else to one of its own."""
    config = ModelConfig.from_dict(spec.model)
    shard = make_shard(config, Layout(tp=spec.tp, pp=spec.pp), coordinates.tp, coordinates.pp, spec.split, spec.stages)
    plan = make_plan(config, shard, spec.quantize)
    device = torch.device(spec.device)
    positions = min(spec.max_model_len, config.max_positions, spec.num_blocks * BLOCK)
    offload, rank = spec.offload, coordinates.pp * spec.tp + coordinates.tp
    away = offload.away(rank) if offload is not None else ()
    compiled = CompiledLayers(spec.compile) if spec.compile is not None else None
    dtype, run = getattr(torch, spec.dtype), compiled or run_layer
    decoder = build(config, shard, plan, tp, ops, dtype, positions, device, away, run)
    store = put_away(decoder, plan, offload.homes[rank], offload.directory, device) if offload is not None else None
    if cache is None:
        size = spec.num_blocks, shard.kv_heads.size, config.head_dim
        cache = [KV(*ops.cache(*size, device)) for _ in range(shard.layers.size)]
    return Part(config, shard, decoder, cache, plan, spec.index, store, compiled)
