"""One rank at work: holds its part of the weights and of the KV cache, and turns a Step into tokens.

Knows its two axes and nothing of requests, other ranks or how it was started.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from shardwise.config import Coordinates
from shardwise.kernels.compiled import CompiledOps
from shardwise.kernels.ops import load_ops
from shardwise.parallel.axis import Axis
from shardwise.parallel.traced import TracedAxis
from shardwise.runtime.answer import answer
from shardwise.runtime.batch import make_batch
from shardwise.runtime.compiling import LIMIT
from shardwise.runtime.drafter import Drafter
from shardwise.runtime.executor import Figures
from shardwise.runtime.part import Part, make_part
from shardwise.runtime.pooling import pool
from shardwise.runtime.profile import Profile, labelled
from shardwise.runtime.sampler import Sampler
from shardwise.runtime.spec import RunnerSpec
from shardwise.schedule.step import Chunk, Step, StepResult


class Runner:
    """See the file's sentence. ``tp`` and ``pp`` are this rank's axes; ``coordinates`` its place."""

    def __init__(self, spec: RunnerSpec, coordinates: Coordinates, tp: Axis, pp: Axis) -> None:
        compute = torch.float64 if spec.dtype == "float64" else torch.float32
        self.ops, self.kernels = load_ops(spec.kernels, spec.device, compute)
        self.device = torch.device(spec.device)
        self.profile: Profile | None = None
        if spec.profile is not None:
            path = Path(f"{spec.profile}.pp{coordinates.pp}.tp{coordinates.tp}.json")
            self.profile = Profile(path, self.device)
            self.ops, tp, pp = labelled(self.ops, "ops"), labelled(tp, "tp"), labelled(pp, "pp")
        self.pp = pp
        ops, axis = self.ops, tp
        if spec.compile is not None:
            ops, axis = CompiledOps(self.ops), TracedAxis(tp, self.ops)
        self.model = make_part(spec, coordinates, axis, ops)
        self.sampler = Sampler(self.ops, tp, self.model.shard.vocabs)
        self.drafter: Drafter | None = None
        self.draft_sampler: Sampler | None = None
        if spec.draft is not None:
            self.drafter = Drafter(spec, coordinates, axis, ops, self.model)
            self.draft_sampler = Sampler(self.ops, tp, self.drafter.vocabs, num_tokens=self.model.config.vocab_size)
        self.reports = self.model.shard.last and coordinates.tp == 0
        parts = [self.model, *([self.drafter.part] if self.drafter is not None else [])]
        self.compiled = [part for part in parts if part.compiled is not None]
        self._told = False

    def load(self) -> Figures:
        """Read this rank's slices, and compile what is to be; for where the other ranks are there already."""
        return {**self.read(), **self.compile()}

    def read(self) -> Figures:
        """Read this rank's slices; figures in bytes and seconds."""
        started = time.monotonic()
        return {
            "bytes_read": self.model.load() + (self.drafter.load() if self.drafter is not None else 0),
            "load_s": time.monotonic() - started,
            "peak_bytes": peak_bytes(),
            "kernels": self.kernels,
            "stage": self.pp.rank,
        }

    @torch.inference_mode()
    def compile(self) -> Figures:
        """Compile the layers, if that is asked for, all ranks together; seconds."""
        started = time.monotonic()
        for part in self.compiled:
            part.warm()
        return {"compile_s": time.monotonic() - started} if self.compiled else {}

    def step(self, step: Step) -> StepResult | None:
        """Run this rank's part of a step; the sampling rank returns the result."""
        if self.profile is None:
            return self._step(step)
        with self.profile.step(step):
            return self._step(step)

    def close(self) -> None:
        """The last step is done."""
        if self.profile is not None:
            self.profile.close()

    @torch.inference_mode()
    def _step(self, step: Step) -> StepResult | None:
        if step.draft:
            assert self.drafter is not None
            assert self.draft_sampler is not None
            drafted = self._forward(self.drafter, step.chunks)
            found = answer(step, drafted[1], self.draft_sampler) if drafted is not None else None
            return found if self.reports else None
        # What the draft thought of its drafts is computed again, to the same bits, rather than kept: a rank holds no
        # state but weights and KV. This comes first, since a draft that shares the cache leaves rough values there.
        judged = [c for c in step.chunks if c.drafts and c.sampling is not None and c.sampling.optimal]
        guessed = self._forward(self.drafter, judged) if self.drafter is not None and judged else None
        out = self._forward(self.model, step.chunks)
        if out is None:
            return None
        x, logits = out
        found = answer(step, logits, self.sampler, self.draft_sampler, guessed[1] if guessed is not None else None)
        if not self.reports:
            return None
        return replace(found, sums=pool(step.chunks, x, self.model.decoder.final), said=self._news())

    def _news(self) -> str:
        """What people must be told, once."""
        if self._told or not any(part.compiled is not None and part.compiled.full for part in self.compiled):
            return ""
        self._told = True
        return (
            f"compile: batches of more than {LIMIT} kinds have come, each of which takes a graph of its own; layers "
            "run uncompiled from here on (a few graphs are enough where dynamic is left on)"
        )

    def _forward(self, part: Part | Drafter, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor] | None:
        """One pass over the stages: on the last one hidden states [M, hidden] and logits [R, own vocabulary rows]."""
        batch = make_batch(chunks, self.device)
        shape = (batch.ids.shape[0], part.hidden_size)
        x = part(None if self.model.shard.first else self.pp.recv(shape, self.ops.compute), batch)
        if self.model.shard.last:
            return x, part.logits(x, batch)
        self.pp.send(x)
        return None


def peak_bytes() -> int:
    """The most memory this process has held so far, 0 where that isn't told. (ru_maxrss would count the parent.)"""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
