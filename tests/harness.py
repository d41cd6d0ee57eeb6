"""Whole layouts as threads, and the oracle's own generation: what the equivalence tests compare."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from shardwise import reference
from shardwise.config import EngineConfig, Layout
from shardwise.engine import Engine
from shardwise.features import Quantization
from shardwise.kernels.ops import load_ops
from shardwise.llm import LLM
from shardwise.models.families.table import make_plan
from shardwise.models.shard import make_shard
from shardwise.open import make_scheduler
from shardwise.parallel.axis import Axis
from shardwise.parallel.placement import Run
from shardwise.params import SamplingParams
from shardwise.replicas import Replicas
from shardwise.runtime.executor import Executor, Rank
from shardwise.runtime.launch import RunPlan, plan_run, runner_spec
from shardwise.runtime.local import ThreadExecutor
from shardwise.runtime.logits import Row
from shardwise.runtime.runner import Runner
from shardwise.runtime.sampler import Sampler
from shardwise.runtime.source import Source, open_source
from shardwise.schedule.sequence import Request
from shardwise.schedule.speculation import Tally
from shardwise.schedule.step import Logprob, Sampling
from shardwise.weights.checkpoint import Checkpoint
from shardwise.weights.load import load


class NoText:
    """Stands in for a tokenizer where only ids matter."""

    special = frozenset[int]()

    def spell(self, number: int) -> bytes:
        return b""


@dataclass
class Job:
    """A prompt and how to continue it."""

    prompt: list[int]
    params: SamplingParams


@dataclass
class Answer:
    """Tokens and the digest of every logits row that they were drawn from."""

    tokens: list[int]
    digest: str
    reason: str | None
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    drafts: Tally | None = field(default=None, compare=False)
    """What became of its drafts, which may differ where the answer doesn't."""


def plan_of(path: Path, layout: str, **settings: Any) -> RunPlan:
    settings = {"kernels": "native", "device": "cpu", "kv_tokens": 1024, **settings}
    return plan_run(open_source(path), EngineConfig(layout=Layout.parse(layout), **settings))


def start_threads(plan: RunPlan, on_progress: object = None, rank: Callable[..., Rank] = Runner) -> list[Executor]:
    """The replicas of a layout, every rank a thread."""
    layout = plan.engine.layout
    spec = runner_spec(plan)
    patience = (300.0, 300.0) if plan.engine.compile is not None else ()
    return [
        ThreadExecutor(Layout(tp=layout.tp, pp=layout.pp), lambda place, axes: rank(spec, place, *axes), *patience)
        for _ in range(layout.dp)
    ]


@contextmanager
def threads(plan: RunPlan, rank: Callable[..., Rank] = Runner) -> Iterator[list[Executor]]:
    """The same, ended when the block is left."""
    executors = start_threads(plan, rank=rank)
    try:
        yield executors
    finally:
        for executor in executors:
            executor.close()


@contextmanager
def threaded_llm(path: Path, layout: str = "1", **settings: Any) -> Iterator[LLM]:
    """The Python door to a model whose every rank is a thread."""
    settings = {"kernels": "native", "device": "cpu", "kv_tokens": 2048, **settings}
    with patch("shardwise.llm.launch", start_threads):
        llm = LLM(path, layout, **settings)
    with llm:
        yield llm


def run(executors: Sequence[Executor], plan: RunPlan, jobs: Sequence[Job], **settings: Any) -> list[Answer]:
    """Run all jobs together; ``settings`` are the scheduler's."""
    return run_on(replicas_of(executors, plan, **settings), jobs)


def replicas_of(executors: Sequence[Executor], plan: RunPlan, **settings: Any) -> Replicas:
    """The engines of the executors; ``settings`` are their schedulers'."""
    eos = settings.pop("eos", plan.source.eos)
    return Replicas([Engine(each, make_scheduler(plan, eos, **settings), NoText()) for each in executors])  # type: ignore[arg-type]


def run_on(replicas: Replicas, jobs: Sequence[Job], quick: bool = False) -> list[Answer]:
    """Run all jobs together; ``quick`` leaves out the logits, and the schedulers' checks of themselves."""
    answers = [Answer([], "", None) for _ in jobs]
    digests = [hashlib.blake2b(digest_size=8) for _ in jobs]
    for number, job in enumerate(jobs):
        replicas.add(Request(number, tuple(job.prompt), job.params, job.params.seed or 0, want_logits=not quick))
    while replicas.has_work:
        for output in replicas.step():
            answer = answers[output.request_id]
            answer.tokens += output.token_ids
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            answer.reason, answer.drafts = output.finish_reason, output.drafts
            for row in output.logits:
                digests[output.request_id].update(row)
        for engine in () if quick else replicas.engines:
            engine.scheduler.check()
    for answer, digest in zip(answers, digests, strict=True):
        answer.digest = digest.hexdigest()
    return answers


def whole_weights(source: Source, quantize: Quantization | None = None) -> dict[str, Tensor]:
    """Every parameter of the model, as a single rank's plan names them; rounded ones are restored, to float64."""
    plan = make_plan(source.config, make_shard(source.config, Layout()), quantize)
    parts: dict[str, list[Tensor]] = {}

    def keep(name: str, row: int, part: Tensor | tuple[Tensor, Tensor]) -> None:
        if isinstance(part, tuple):
            group = torch.arange(part[0].shape[1]) // plan[name][0].group
            scale, *offset = part[1].double()[..., group]
            part = part[0] * scale + (offset[0] if offset else 0.0)
        parts.setdefault(name, []).append(part)

    checkpoint = Checkpoint(source.index)
    load(checkpoint, plan, keep)
    checkpoint.close()
    return {name: torch.cat(rows) for name, rows in parts.items()}


def oracle(
    source: Source, job: Job, eos: frozenset[int] | None = None, quantize: Quantization | None = None
) -> list[int]:
    """The tokens of one job by the oracle: the whole prompt again for each token."""
    weights = whole_weights(source, quantize)
    eos = source.eos if eos is None else eos
    ops, _ = load_ops("torch", "cpu", weights["embed.weight"].dtype)
    sampler = Sampler(ops, Axis(), [Run(0, source.config.vocab_size)])
    by = job.params
    sampling = Sampling(
        *(by.temperature, by.top_k, by.top_p, by.min_p, by.seed or 0),
        presence=by.presence_penalty,
        frequency=by.frequency_penalty,
        repetition=by.repetition_penalty,
        num_prompt=len(job.prompt),
        biased=[token for token, _ in by.logit_bias],
        biases=[bias for _, bias in by.logit_bias],
    )
    tokens = list(job.prompt)
    while len(tokens) - len(job.prompt) < by.max_tokens:
        row = reference.logits(source.config, weights, tokens)[-1:]
        tokens += sampler.sample(row, [Row(sampling, len(tokens), before=np.array(tokens, np.int32))])
        if tokens[-1] in by.stop_token_ids or (tokens[-1] in eos and not by.ignore_eos):
            break
    return tokens[len(job.prompt) :]
