"""From a model's name and settings to engines that are ready, alike for Python's door, the command and the server.

Knows what belongs together; not what is asked of it afterwards.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.config import EngineConfig
from shardwise.defaults import Defaults, model_defaults
from shardwise.engine import Engine
from shardwise.intake import Intake
from shardwise.replicas import Replicas
from shardwise.runtime.executor import Executor, Figures
from shardwise.runtime.launch import RunPlan, launch, plan_run, relaunch
from shardwise.runtime.source import Source, open_source
from shardwise.schedule.scheduler import Scheduler
from shardwise.tokenizer import Tokenizer


class Opened(NamedTuple):
    """A model on a layout, ready to run."""

    source: Source
    tokenizer: Tokenizer
    eos: frozenset[int]
    """The model's own end tokens."""
    defaults: Defaults
    """What holds for fields that a request leaves open."""
    plan: RunPlan
    intake: Intake
    replicas: Replicas
    figures: list[list[Figures]]
    """What the ranks of each replica said of themselves when they were ready."""
    load_s: float

    @property
    def compile_s(self) -> float | None:
        """Of ``load_s``, what torch.compile took on the slowest rank; None where nothing was compiled."""
        found = [float(rank["compile_s"]) for replica in self.figures for rank in replica if "compile_s" in rank]
        return max(found) if found else None


def open_model(
    model: str | Path,
    config: EngineConfig,
    *,
    generation_config: bool = True,
    on_progress: Callable[[str], None] | None = None,
    start: Callable[[RunPlan, Callable[[str], None] | None], list[Executor]] = launch,
) -> Opened:
    """Load a model, by ``start``; ``generation_config`` False leaves aside what generation_config.json says.

    Raises ValueError, before any weight is read, for what cannot be done, LoadError for broken files and RankFailure
    if a rank does not start.
    """
    started = time.monotonic()
    source = open_source(model)
    tokenizer = open_tokenizer(source)
    eos = source.eos | tokenizer.eos
    defaults = model_defaults(source.generation if generation_config else {})
    plan = plan_run(source, config)
    if plan.draft is not None and plan.draft.source is not None:
        check_vocabulary(tokenizer, open_tokenizer(plan.draft.source))
    if on_progress is not None:
        for line in plan.places():
            on_progress(line)
    executors = start(plan, on_progress)
    engines = [
        Engine(executor, make_scheduler(plan, eos), tokenizer, partial(relaunch, plan, at), config.restart_timeout)
        for at, executor in enumerate(executors)
    ]
    intake = Intake(tokenizer, source.config.vocab_size, eos)
    figures = [executor.figures for executor in executors]
    load_s = time.monotonic() - started
    return Opened(source, tokenizer, eos, defaults, plan, intake, Replicas(engines), figures, load_s)


def one_more(opened: Opened, executor: Executor, at: int) -> Engine:
    """An engine of the same plan on ranks that were started later, as replica number ``at``."""
    scheduler = make_scheduler(opened.plan, opened.eos)
    patience = opened.plan.engine.restart_timeout
    return Engine(executor, scheduler, opened.tokenizer, partial(relaunch, opened.plan, at), patience)


def check_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """ValueError unless a draft model means the same as the target by the ids they share; special tokens may differ."""
    special = target.special | draft.special
    for token in range(min(target.vocab_size, draft.vocab_size)):
        if token not in special and target.spell(token) != draft.spell(token):
            raise ValueError(
                f"speculate: the draft model has another vocabulary: token {token} is {draft.spell(token)!r} there and "
                f"{target.spell(token)!r} here; choose a draft of the same family, or speculate with ngram or self"
            )


def open_tokenizer(source: Source) -> Tokenizer:
    """The tokenizer that came with the model."""
    if source.metadata is not None:
        return Tokenizer.from_gguf(source.metadata)
    return Tokenizer.from_directory(Path(source.resolved.path))


def make_scheduler(plan: RunPlan, eos: frozenset[int], **settings: Any) -> Scheduler:
    """A scheduler for one replica of ``plan``; ``settings`` replace the plan's own."""
    engine = plan.engine
    chosen = {
        "num_blocks": plan.num_blocks,
        "max_model_len": plan.max_model_len,
        "max_batch_tokens": engine.max_batch_tokens,
        "max_chunk": engine.max_chunk,
        "max_num_seqs": engine.max_num_seqs,
        "num_in_flight": engine.layout.pp,
        "prefix_cache": engine.prefix_cache,
        "eos": eos,
        "vocab_size": plan.source.config.vocab_size,
        "secret": secrets.token_bytes(32),
        "speculation": engine.speculate,
        "max_draft_len": plan.draft.max_len if plan.draft is not None else None,
        "num_draft_ids": plan.draft.num_ids if plan.draft is not None else None,
    }
    return Scheduler(**{**chosen, **settings})
