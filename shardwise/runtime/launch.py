"""From a model and its settings to running ranks: every choice made and every refusal spoken before a weight is read.

Front side, no torch: the in-process executor, which needs it, is imported when it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shardwise.config import BLOCK, EngineConfig, Quantization
from shardwise.kernels.build import BuildError, library
from shardwise.runtime.draft_plan import DraftPlan, plan_draft
from shardwise.runtime.executor import Executor
from shardwise.runtime.frames import WorkerSpec
from shardwise.runtime.processes import ProcessExecutor
from shardwise.runtime.rank_plan import RankPlan, plan_ranks, row_bytes
from shardwise.runtime.source import Source, choose_quantization
from shardwise.runtime.spec import RunnerSpec

DEFAULT_KV_TOKENS = 32768
"""Tokens of KV cache per replica unless the model's context is longer or memory is short."""
MAX_SLOT_BYTES = 64 * 2**20
"""Largest shared-memory slot of a rank; what is longer travels in pieces."""
MEMORY_SHARE = 0.5
"""Share of the host's available memory that the default KV caches of all ranks may take."""


@dataclass(frozen=True)
class RunPlan:
    """A model on a layout with everything decided."""

    source: Source
    engine: EngineConfig
    dtype: str
    quantize: Quantization | None
    device: str
    max_model_len: int
    num_blocks: int
    threads: int
    ranks: tuple[RankPlan, ...]
    """The ranks of one replica, in rank order."""
    draft: DraftPlan | None = None
    """The decoder that drafts tokens beside the model, if one does."""


def launch(plan: RunPlan, on_progress: Callable[[str], None] | None = None) -> list[Executor]:
    """Start the ranks of every replica, replicas side by side; raises RankFailure, and then none is left running.

    A single rank on the CPU runs within this process, unless it is to be isolated.
    """
    layout = plan.engine.layout
    if layout.world_size == 1 and not plan.engine.isolate:
        return [_in_process(plan)]
    executors: list[ProcessExecutor] = []
    try:
        executors.extend(_start(plan, replica) for replica in range(layout.dp))
        for replica, executor in enumerate(executors):
            executor.wait_ready(_teller(on_progress, replica, layout.dp))
    except BaseException:
        for executor in executors:
            executor.kill()
        raise
    return list(executors)


def relaunch(plan: RunPlan, replica: int, failed: Executor) -> Executor:
    """The executor that follows one that has failed. Its ranks may not be ready yet."""
    if not isinstance(failed, ProcessExecutor):
        return failed  # a step raised, and that left this process's rank as it was
    return _start(plan, replica, failed)


def _start(plan: RunPlan, replica: int, former: ProcessExecutor | None = None) -> ProcessExecutor:
    engine = plan.engine
    return ProcessExecutor(
        worker_specs(plan, replica), engine.step_timeout, start_timeout=engine.start_timeout, former=former
    )


def _teller(on_progress: Callable[[str], None] | None, replica: int, replicas: int) -> Callable[[int, int], None]:
    of = f" of replica {replica + 1} of {replicas}" if replicas > 1 else ""
    return lambda ready, size: on_progress(f"{ready} of {size} ranks{of} are ready") if on_progress else None


def _in_process(plan: RunPlan) -> Executor:
    import torch

    from shardwise.runtime.local import InProcessExecutor
    from shardwise.runtime.runner import Runner

    torch.set_num_threads(plan.threads)
    return InProcessExecutor(lambda place, axes: Runner(runner_spec(plan), place, *axes))


def worker_specs(plan: RunPlan, replica: int) -> list[WorkerSpec]:
    """What each rank of a replica is told."""
    engine, layout = plan.engine, plan.engine.layout
    transport = engine.transport if engine.transport != "auto" else _transport(plan.device)
    runner = msgspec.Raw(msgspec.msgpack.encode(runner_spec(plan)))
    row = row_bytes(plan.source.config, plan.ranks, plan.dtype)
    if plan.draft is not None:
        row = max(row, row_bytes(plan.draft.config, plan.draft.ranks, plan.draft.dtype))
    slot = min(engine.max_batch_tokens * row, MAX_SLOT_BYTES)
    return [
        WorkerSpec(
            rank=rank,
            tp=layout.tp,
            pp=layout.pp,
            runner=runner,
            transport=transport,
            device=replica * layout.replica_size + rank if plan.device == "cuda" else None,
            threads=plan.threads,
            crowded=plan.threads * layout.world_size > num_cores(),
            slot_bytes=-(-slot // 64) * 64,
            timeout=0.9 * engine.step_timeout,  # sooner than the front's, since a peer can name who is missing
        )
        for rank in range(layout.replica_size)
    ]


def plan_run(source: Source, engine: EngineConfig) -> RunPlan:
    """Decide dtype, device, context length, cache size, threads and draft.

    Raises ValueError, with the remedy, for what can't be, and LoadError for a draft model with broken files.
    """
    config, layout = source.config, engine.layout
    config.check(layout, engine.stages)
    longest = engine.max_model_len or config.max_positions
    if longest > config.max_positions:
        raise ValueError(f"max_model_len {longest} is more than the {config.max_positions} positions the model knows")
    device = _device(engine)
    dtype = config.dtype if engine.dtype == "auto" else engine.dtype
    quantize = choose_quantization(engine.quantize, source)
    ranks = plan_ranks(config, engine, dtype, quantize, engine.stages)
    draft = plan_draft(source, engine, dtype, quantize, longest)
    held = (*ranks, *(draft.ranks if draft is not None else ()))
    per_token = sum(rank.kv_bytes_per_token for rank in held) * layout.dp
    wanted = engine.kv_tokens or max(min(DEFAULT_KV_TOKENS, 4 * longest), longest)
    if engine.kv_tokens is None and device == "cpu":
        free = available_memory() - sum(rank.weight_bytes for rank in held) * layout.dp
        wanted = min(wanted, max(int(free * MEMORY_SHARE / per_token), BLOCK))
    num_blocks = -(-wanted // BLOCK)
    return RunPlan(
        source=source,
        engine=engine,
        dtype=dtype,
        quantize=quantize,
        device=device,
        max_model_len=longest,
        num_blocks=num_blocks,
        threads=engine.threads or max(1, num_cores() // layout.world_size),
        ranks=ranks,
        draft=draft,
    )


def _device(engine: EngineConfig) -> str:
    """CUDA where there are enough GPUs for the layout, or as asked; the ranks themselves report a broken driver."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if engine.device == "cuda" and gpus < engine.layout.world_size:
        raise ValueError(
            f"layout {engine.layout} needs {engine.layout.world_size} GPUs, one a rank, and this host has {gpus}: "
            "use device cpu or a smaller layout"
        )
    if engine.device != "auto":
        return engine.device
    return "cuda" if gpus >= engine.layout.world_size else "cpu"


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Bytes that new processes could use without swapping, as the kernel estimates; a guess elsewhere than on Linux."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // 2


def _transport(device: str) -> str:
    """The fastest way between ranks of one host: shared memory needs the compiled waits, gloo works everywhere."""
    if device == "cuda":
        return "nccl"
    try:
        library()
    except BuildError:
        return "gloo"
    return "shm"


def runner_spec(plan: RunPlan) -> RunnerSpec:
    """What every rank of a replica is told about the model."""
    engine = plan.engine
    return RunnerSpec(
        model=plan.source.config.to_dict(),
        index=plan.source.index,
        tp=engine.layout.tp,
        pp=engine.layout.pp,
        split=list(engine.split) if engine.split else None,
        stages=list(engine.stages) if engine.stages else None,
        dtype=plan.dtype,
        quantize=plan.quantize,
        device=plan.device,
        kernels=engine.kernels,
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        draft=plan.draft.spec() if plan.draft is not None else None,
    )
