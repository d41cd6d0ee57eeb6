"""One rank at work: holds its part of the weights and of the KV cache, and turns a Step into tokens.

Knows its two axes and nothing of requests, other ranks or how it was started.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch

from shardwise.config import Coordinates, Layout
from shardwise.kernels.ops import load_ops
from shardwise.models.batch import KV
from shardwise.models.config import ModelConfig
from shardwise.models.decoder import build
from shardwise.models.families.table import make_plan
from shardwise.models.shard import make_shard
from shardwise.parallel.axis import Axis
from shardwise.runtime.batch import make_batch
from shardwise.runtime.sampler import Sampler
from shardwise.runtime.spec import RunnerSpec
from shardwise.schedule.step import Step, StepResult
from shardwise.weights.checkpoint import Checkpoint
from shardwise.weights.load import load


class Runner:
    """See the file's sentence. ``tp`` and ``pp`` are this rank's axes; ``coordinates`` its place."""

    def __init__(self, spec: RunnerSpec, coordinates: Coordinates, tp: Axis, pp: Axis) -> None:
        config = ModelConfig.from_dict(spec.model)
        layout = Layout(tp=spec.tp, pp=spec.pp)
        self.shard = make_shard(config, layout, coordinates.tp, coordinates.pp, spec.split, spec.stages)
        self.plan = make_plan(config, self.shard)
        self.index = spec.index
        self.pp = pp
        self.device = torch.device(spec.device)
        dtype = getattr(torch, spec.dtype)
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        self.ops, self.kernels = load_ops(spec.kernels, spec.device, compute)
        self.hidden_size = config.hidden_size
        self.decoder = build(
            config,
            self.shard,
            self.plan,
            tp,
            self.ops,
            dtype,
            min(spec.max_model_len, config.max_positions),
            self.device,
        )
        self.cache = [
            KV(*self.ops.cache(spec.num_blocks, self.shard.kv_heads.size, config.head_dim, self.device))
            for _ in range(self.shard.layers.size)
        ]
        self.sampler = Sampler(self.ops, tp, self.shard.vocabs)
        self.reports = self.shard.last and coordinates.tp == 0

    def load(self) -> dict[str, int | float | str]:
        """Read this rank's slices; figures in bytes and seconds."""
        started = time.monotonic()
        checkpoint = Checkpoint(self.index)
        try:
            load(checkpoint, self.plan, self.decoder.write)
        finally:
            checkpoint.close()
        return {
            "bytes_read": checkpoint.bytes_read,
            "load_s": time.monotonic() - started,
            "peak_bytes": peak_bytes(),
            "kernels": self.kernels,
        }

    @torch.inference_mode()
    def step(self, step: Step) -> StepResult | None:
        """Run this rank's part of a step; the sampling rank returns the result."""
        batch = make_batch(step, self.device)
        rows = batch.ids.shape[0]
        received = None if self.shard.first else self.pp.recv((rows, self.hidden_size), self.ops.compute)
        out = self.decoder(received, self.cache, batch)
        if not self.shard.last:
            self.pp.send(out)
            return None
        sampled = [chunk for chunk in step.chunks if chunk.sampling is not None]
        samplings = [chunk.sampling for chunk in sampled if chunk.sampling is not None]
        tokens = iter(
            self.sampler.sample(out, samplings, [chunk.start + len(chunk.tokens) for chunk in sampled])
            if sampled
            else ()
        )
        kept = [row for row, by in enumerate(samplings) if by.logits]
        logits = iter(self.sampler.gather(out[kept]).cpu() if kept else ())
        if not self.reports:
            return None
        return StepResult(
            epoch=step.epoch,
            number=step.number,
            tokens=[[] if chunk.sampling is None else [next(tokens)] for chunk in step.chunks],
            logits=[
                next(logits).numpy().tobytes() if chunk.sampling is not None and chunk.sampling.logits else b""
                for chunk in step.chunks
            ],
        )


def peak_bytes() -> int:
    """The most memory this process has held so far, 0 where that isn't told. (ru_maxrss would count the parent.)"""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
