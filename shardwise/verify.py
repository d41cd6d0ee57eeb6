"""The promise, proved on the machine at hand: one hash of all logits for any layout, batch, chunk or cache hit."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shardwise.config import BLOCK, EngineConfig, Layout
from shardwise.engine import Engine
from shardwise.features import Speculation
from shardwise.open import make_scheduler, open_tokenizer
from shardwise.params import SamplingParams
from shardwise.replicas import Replicas
from shardwise.runtime.executor import Executor
from shardwise.runtime.launch import RunPlan, hosts_of, launch, plan_run, relaunch
from shardwise.runtime.source import Source, open_source
from shardwise.schedule.sequence import Request
from shardwise.tokenizer import Tokenizer

LENGTHS = (1, 2, 5, 15, 16, 17, 31, 47, 64, 90, 129, 200)
TEXT = (
    "A lighthouse keeper once kept two logs. In the first he wrote the weather, hour by hour: wind from the west, "
    "rain before dawn, a slow swell that broke over the lower steps. In the second he wrote what he thought about "
    "while he watched the weather, and that log was much longer. He wondered why gulls stand on one leg, how far "
    "1,000 candles can be seen, and whether the ships that passed at night knew his name. One winter the lamp "
    "failed. He climbed the 217 steps with a new wick, counted them aloud, and found the number was one short; so "
    'he climbed down and counted again. "Steps do not vanish," he wrote, "but people do miscount in the dark." '
    "When spring came the supply boat brought flour, oil, 3 letters and a dog. The dog slept beside the second "
    "log, and the keeper began to write about the dog instead."
)


@dataclass
class Cell:
    """One way of running the prompts."""

    layout: str
    how: str
    hash: str
    agreement: float
    """Share of generated tokens that equal the first cell's."""
    difference: float
    """Largest difference of a logit from the first cell's, over the tokens that agree; inf where one isn't finite."""


@dataclass
class Report:
    """Cells and the verdict."""

    title: str
    tolerance: float | None = None
    cells: list[Cell] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """One hash and the same tokens everywhere; with a tolerance: the same tokens, logits within it."""
        same = all(cell.agreement == 1.0 for cell in self.cells)
        if self.tolerance is not None:
            return same and all(cell.difference <= self.tolerance for cell in self.cells)
        return same and len({cell.hash for cell in self.cells}) == 1

    def document(self) -> dict[str, Any]:
        """JSON-ready; a difference that isn't finite is null."""
        hashes = sorted({cell.hash for cell in self.cells})
        finite = [cell.difference if np.isfinite(cell.difference) else None for cell in self.cells]
        cells = [{**vars(cell), "difference": gap} for cell, gap in zip(self.cells, finite, strict=True)]
        return {"title": self.title, "ok": self.ok, "hashes": hashes, "cells": cells}

    def show(self) -> None:
        """Print for people."""
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=escape(self.title))
        for column in ("layout", "run", "logits", "tokens", "largest difference"):
            table.add_column(column)
        for cell in self.cells:
            table.add_row(cell.layout, cell.how, cell.hash, f"{cell.agreement:.1%}", f"{cell.difference:g}")
        console = Console()
        console.print(table)
        console.print("one answer" if self.ok else "[bold red]the answers differ[/]")


@dataclass
class Run:
    """One pass over all prompts."""

    tokens: list[list[int]]
    logits: list[list[bytes]]

    def digest(self) -> str:
        """A short hash of every logit of every token."""
        digest = hashlib.blake2b(digest_size=8)
        for rows in self.logits:
            for row in rows:
                digest.update(row)
        return digest.hexdigest()


def verify_layouts(
    model: str,
    layouts: Sequence[Layout],
    batches: Sequence[int],
    chunks: Sequence[int],
    max_tokens: int,
    tolerance: float | None,
    say: Callable[[str], None],
    **settings: Any,
) -> Report:
    """Run the same prompts, greedy and sampled in turn, in every way on every layout.

    Besides each batch and chunk size, a layout is run with drafts, with its prefix cache warm, with a KV pool so small
    that sequences are preempted, and with ranks that are killed in the middle. ``settings`` are fields of EngineConfig.
    Raises ValueError before any weight is read.
    """
    for name, least in (("batches", min(batches)), ("chunks", min(chunks)), ("max-tokens", max_tokens)):
        if least < 1:
            raise ValueError(f"--{name} must be at least 1, not {least}")
    source = open_source(model)
    tokenizer = open_tokenizer(source)
    plans = [plan_run(source, EngineConfig(layout=layout, **settings), whole=False) for layout in layouts]
    room = plans[0].max_model_len - max_tokens
    if room < 1:
        raise ValueError(
            f"--max-tokens {max_tokens} leaves no room for a prompt in a context of {plans[0].max_model_len}"
        )
    prompts = _prompts(tokenizer, room)
    report = Report(f"{source.resolved.source} · {plans[0].quantize or plans[0].dtype}", tolerance)
    first: Run | None = None
    width = np.dtype(np.float64 if plans[0].dtype == "float64" else np.float32)
    with hosts_of(plans[0]) as hosts:
        for plan in plans:
            name = str(plan.engine.layout)
            say(f"layout {name}: starting")
            executors = launch(plan, say, hosts)
            try:
                for how, run in _runs(plan, source, tokenizer, executors, prompts, batches, chunks, max_tokens):
                    say(f"layout {name}: {how}")
                    first = first or run
                    report.cells.append(Cell(name, how, run.digest(), *_compare(first, run, width)))
            finally:
                for executor in executors:
                    executor.close()
    return report


@dataclass
class KernelReport:
    """What the self-check of the kernels found."""

    kernels: str
    findings: list[tuple[str, str, bool]]

    @property
    def ok(self) -> bool:
        """Does every property hold?"""
        return all(holds for *_, holds in self.findings)

    def document(self) -> dict[str, Any]:
        """JSON-ready."""
        rows = [{"kernel": kernel, "property": what, "holds": holds} for kernel, what, holds in self.findings]
        return {"kernels": self.kernels, "ok": self.ok, "findings": rows}

    def show(self) -> None:
        """Print for people."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self.kernels)
        for column in ("kernel", "property", ""):
            table.add_column(column)
        for kernel, what, holds in self.findings:
            table.add_row(kernel, what, "holds" if holds else "[bold red]broken[/]")
        console = Console()
        console.print(table)
        console.print(
            "one answer on this machine"
            if self.ok
            else "[bold red]one answer is off on this machine[/]: layouts may differ in the last bits"
        )


def verify_kernels(want: str = "auto") -> KernelReport:
    """Check this machine's kernels ("auto", "native" or "torch") in every number format."""
    import torch

    from shardwise.kernels.check import check_kernels
    from shardwise.kernels.ops import load_ops

    findings: list[tuple[str, str, bool]] = []
    how = ""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        ops, how = load_ops(want, "cpu", torch.float64 if dtype == torch.float64 else torch.float32)
        findings += [(found.kernel, found.property, found.holds) for found in check_kernels(ops, dtype)]
    return KernelReport(how, findings)


def _prompts(tokenizer: Tokenizer, longest: int) -> list[list[int]]:
    tokens = tokenizer.encode(TEXT)
    return [tokens[:length] for length in LENGTHS if length <= min(longest, len(tokens))]


def _runs(
    plan: RunPlan,
    source: Source,
    tokenizer: Tokenizer,
    executors: list[Executor],
    prompts: list[list[int]],
    batches: Sequence[int],
    chunks: Sequence[int],
    max_tokens: int,
) -> Iterator[tuple[str, Run]]:
    """Every way of running the prompts on ranks that are up: a name, and what came of it."""
    ways: list[tuple[str, dict[str, Any]]] = [
        (f"batch {batch}, chunk {chunk}", {"max_num_seqs": batch, "max_chunk": chunk, "prefix_cache": False})
        for batch in batches
        for chunk in chunks
    ]
    longest = max(map(len, prompts)) + max_tokens
    tiny = -(-longest // BLOCK) + 1
    ways.append(("preemption", {"num_blocks": tiny, "prefix_cache": False}))
    ways.append(("drafts by ngram", {"speculation": Speculation("ngram", k=4), "prefix_cache": False}))
    ways.append(("cold prefix cache", {"prefix_cache": True}))
    for how, settings in ways:
        schedulers = [make_scheduler(plan, source.eos | tokenizer.eos, **settings) for _ in executors]
        engines = [Engine(*pair, tokenizer) for pair in zip(executors, schedulers, strict=True)]
        yield how, _run(Replicas(engines), prompts, max_tokens)
    yield "warm prefix cache", _run(Replicas(engines), prompts, max_tokens)
    pids = [[figures["pid"] for figures in each.figures if figures.get("pid")] for each in executors]
    victims = [own[-1] for own in pids if own]  # of this host
    if victims:  # the ranks are processes
        for at, engine in enumerate(engines):
            engine.restart = partial(relaunch, plan, at)
        yield "killed ranks", _run(Replicas(engines), prompts, max_tokens, victims)
        executors[:] = [engine.executor for engine in engines]


def _run(replicas: Replicas, prompts: list[list[int]], max_tokens: int, victims: Sequence[Any] = ()) -> Run:
    """``victims`` are killed when some tokens have come."""
    greedy = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    sampled = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.8, seed=7)
    for number, prompt in enumerate(prompts):
        params = sampled if number % 2 else greedy
        replicas.add(Request(number, tuple(prompt), params, params.seed or 0, want_logits=True))
    run = Run([[] for _ in prompts], [[] for _ in prompts])
    while replicas.has_work:
        outputs = replicas.step()
        if outputs and victims:
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            victims = ()
        for output in outputs:
            run.tokens[output.request_id] += output.token_ids
            run.logits[output.request_id] += output.logits
    return run


def _compare(first: Run, run: Run, width: np.dtype[Any]) -> tuple[float, float]:
    """Share of equal tokens, and the largest difference of logits up to and including the first token that differs."""
    equal = total = 0
    difference = 0.0
    for mine, theirs, rows, others in zip(run.tokens, first.tokens, run.logits, first.logits, strict=True):
        total += len(theirs)
        for a, b, row, other in zip(mine, theirs, rows, others, strict=False):
            if row != other:
                with np.errstate(invalid="ignore"):
                    gap = np.abs(np.frombuffer(row, width) - np.frombuffer(other, width)).max()
                difference = max(difference, float(gap) if np.isfinite(gap) else np.inf)
            if a != b:
                break
            equal += 1
    return equal / total, difference
