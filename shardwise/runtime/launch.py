"""From a model and its settings to running ranks: every choice made and every refusal spoken before a weight is read.

Front side, no torch: the in-process executor, which needs it, is imported when it is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from shardwise.config import BLOCK, EngineConfig
from shardwise.features import Quantization
from shardwise.kernels.build import have_library
from shardwise.parallel.seal import own_address
from shardwise.runtime.backends import check_backend
from shardwise.runtime.disk import check_writable
from shardwise.runtime.draft_plan import DraftPlan, plan_draft
from shardwise.runtime.executor import Executor
from shardwise.runtime.forks import Forks
from shardwise.runtime.frames import WorkerSpec
from shardwise.runtime.hosts.agent import attend
from shardwise.runtime.hosts.fit import check_world
from shardwise.runtime.hosts.front import Hosts
from shardwise.runtime.machine import VISIBLE, available_memory, num_cores, visible_gpus
from shardwise.runtime.offload_plan import OffloadPlan, plan_offload
from shardwise.runtime.processes import COMMAND, ProcessExecutor
from shardwise.runtime.rank_plan import RankPlan, plan_ranks, row_bytes
from shardwise.runtime.source import Source, choose_quantization
from shardwise.runtime.spawn import ForkServer
from shardwise.runtime.spec import RunnerSpec
from shardwise.world import World, find_world

DEFAULT_KV_TOKENS = 32768
"""Tokens of KV cache per replica unless the model's context is longer or memory is short."""
MAX_SLOT_BYTES = 64 * 2**20
"""Largest shared-memory slot of a rank; what is longer travels in pieces."""
TRACE_SECONDS = 60.0
"""Seconds that a rank gets to write its trace."""
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
    offload: OffloadPlan | None = None
    """Where layers are, if memory is limited; None: with their ranks."""
    world: World | None = None
    """The hosts that the ranks are on, where torchrun has started more than one."""

    def places(self) -> list[str]:
        """For people, where each rank's layers are, if memory is limited."""
        return self.offload.lines(self.ranks) if self.offload is not None else []

    @property
    def local_size(self) -> int:
        """Most ranks on a host."""
        size = self.engine.layout.world_size
        return min(size, self.world.local_size) if self.world is not None else size


def launch(
    plan: RunPlan, on_progress: Callable[[str], None] | None = None, hosts: Hosts | None = None
) -> list[Executor]:
    """Start the ranks of every replica, replicas side by side; raises RankFailure, and then none is left running.

    A single rank on the CPU runs within this process, unless it is to be isolated. In a world of several hosts the
    process of rank 0 is the front; the others lend it their host until it ends, and never return.
    """
    layout, world = plan.engine.layout, plan.world
    if world is not None and world.rank:
        sys.exit(attend(world))
    if layout.world_size == 1 and not plan.engine.isolate:
        return [_in_process(plan)]
    executors: list[ProcessExecutor] = []
    with ExitStack() as stack:
        if hosts is None and world is not None and layout.world_size > world.local_size:
            hosts = stack.enter_context(hosts_of(plan))
        try:
            executors.extend(_start(plan, replica, hosts=hosts) for replica in range(layout.dp))
            for replica, executor in enumerate(executors):
                executor.wait_ready(_teller(on_progress, replica, layout.dp))
        except BaseException:
            for executor in executors:
                executor.kill()
            raise
    return list(executors)


@contextmanager
def hosts_of(plan: RunPlan) -> Iterator[Hosts | None]:
    """The other hosts of a plan, which may come from now on; None where there are none."""
    hosts = _other_hosts(plan.world) if plan.world is not None and not plan.world.rank else None
    if hosts is not None:
        hosts.enter()
    try:
        yield hosts
    finally:
        if hosts is not None:
            hosts.leave()


_other_hosts = cache(Hosts)
"""Those of a world, for all launches of this process: torchrun starts their agents once."""


def begin_replica(plan: RunPlan, replica: int) -> Executor:
    """Start the ranks of one replica, as processes that may not be ready yet, whatever else of the plan runs.

    They are of this host. Raises ValueError where torchrun has given every rank its place.
    """
    if plan.world is not None:
        raise ValueError(
            "replicas can't be added on several hosts: torchrun has started as many processes as there are"
        )
    return _start(plan, replica)


def relaunch(plan: RunPlan, replica: int, failed: Executor) -> Executor:
    """The executor that follows one that has failed. Its ranks may not be ready yet."""
    if not isinstance(failed, ProcessExecutor):
        return failed  # a step raised, and that left this process's rank as it was
    return _start(plan, replica, failed)


def _start(
    plan: RunPlan, replica: int, former: ProcessExecutor | None = None, hosts: Hosts | None = None
) -> ProcessExecutor:
    engine = plan.engine
    return ProcessExecutor(
        worker_specs(plan, replica),
        engine.step_timeout,
        start_timeout=engine.start_timeout,
        former=former,
        forks=[_forks(number, hosts) for number in _hosts_of(plan, replica)],
    )


def _hosts_of(plan: RunPlan, replica: int) -> list[int]:
    """The hosts that a replica is on, in the order of its ranks."""
    size = plan.engine.layout.replica_size
    return sorted({plan.world.host_of(replica * size + rank) if plan.world is not None else 0 for rank in range(size)})


def _forks(number: int, hosts: Hosts | None) -> Callable[[], Forks]:
    def start() -> Forks:
        if number == 0:
            return ForkServer(COMMAND)
        assert hosts is not None, "what forks on another host serves all ranks that come after"
        return hosts.lease(number)

    return start


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
    runner = msgspec.Raw(msgspec.msgpack.encode(runner_spec(plan, replica)))
    row = row_bytes(plan.source.config, plan.ranks, plan.dtype)
    if plan.draft is not None:
        row = max(row, row_bytes(plan.draft.config, plan.draft.ranks, plan.draft.dtype))
    slot = min(engine.max_batch_tokens * row, MAX_SLOT_BYTES)
    first, world = replica * layout.replica_size, plan.world
    numbers = _hosts_of(plan, replica)
    hosts = [numbers.index(world.host_of(first + rank)) if world else 0 for rank in range(layout.replica_size)]
    far = world is not None and len(numbers) > 1
    return [
        WorkerSpec(
            rank=rank,
            tp=layout.tp,
            pp=layout.pp,
            runner=runner,
            transport=transport,
            device=_gpu(plan, first + rank) if plan.device == "cuda" else None,
            threads=plan.threads,
            crowded=plan.threads * plan.local_size > num_cores(),
            slot_bytes=-(-slot // 64) * 64,
            timeout=0.9 * engine.step_timeout,  # sooner than the front's, since a peer can name who is missing
            grace=TRACE_SECONDS if engine.profile is not None else 1.0,
            host=hosts[rank],
            hosts=hosts if far else [],
            front=own_address(world.master) if world is not None and far else "",
            run=f"{world.run}, replica {replica}" if world is not None else "",
        )
        for rank in range(layout.replica_size)
    ]


def _gpu(plan: RunPlan, rank: int) -> int:
    """The number of a rank's GPU on its host, of all ranks of the layout."""
    at = rank % plan.local_size
    return plan.engine.device_ids[at] if plan.engine.device_ids is not None else at


def plan_run(source: Source, engine: EngineConfig, whole: bool = True) -> RunPlan:
    """Decide dtype, device, context length, cache size, threads and draft.

    On several hosts the layout has to fill all of them, unless it need not be the ``whole``. Raises ValueError, with
    the remedy, for what can't be, and LoadError for a draft model with broken files.
    """
    config, layout = source.config, engine.layout
    config.check(layout, engine.stages)
    world = find_world(os.environ)
    world = world if world is not None and world.hosts > 1 else None
    if world is not None:
        check_world(world, config, layout, whole)
    local, hosts = layout.world_size, 1
    if world is not None:
        local = min(layout.world_size, world.local_size)
        hosts = -(-layout.world_size // local)
    longest = engine.max_model_len or config.max_positions
    if longest > config.max_positions:
        raise ValueError(f"max_model_len {longest} is more than the {config.max_positions} positions the model knows")
    device = _device(engine, local)
    if engine.profile is not None:
        check_writable("profile", engine.profile)
    if engine.compile is not None:
        check_backend(engine.compile, device, processes=layout.world_size > 1 or engine.isolate)
    dtype = config.dtype if engine.dtype == "auto" else engine.dtype
    quantize = choose_quantization(engine.quantize, source)
    ranks = plan_ranks(config, engine, dtype, quantize, engine.stages)
    draft = plan_draft(source, engine, dtype, quantize, longest)
    held = (*ranks, *(draft.ranks if draft is not None else ()))
    per_token = -(-sum(rank.kv_bytes_per_token for rank in held) * layout.dp // hosts)
    wanted = engine.kv_tokens or max(min(DEFAULT_KV_TOKENS, 4 * longest), longest)
    if engine.kv_tokens is None and device == "cpu" and engine.max_memory is None:
        free = available_memory() - sum(rank.weight_bytes for rank in held) * layout.dp // hosts
        wanted = min(wanted, max(int(free * MEMORY_SHARE / per_token), BLOCK))
    offload = plan_offload(engine, device, config, dtype, quantize, ranks, draft, longest, wanted, local)
    num_blocks = offload.num_blocks if offload is not None else -(-wanted // BLOCK)
    return RunPlan(
        source=source,
        engine=engine,
        dtype=dtype,
        quantize=quantize,
        device=device,
        max_model_len=longest,
        num_blocks=num_blocks,
        threads=engine.threads or max(1, num_cores() // local),
        ranks=ranks,
        draft=draft,
        offload=offload,
        world=world,
    )


def _device(engine: EngineConfig, local: int) -> str:
    """CUDA where there are enough GPUs for the ``local`` ranks, or as asked; ranks report a broken driver themselves.

    What this host has, the others are taken to have too.
    """
    there = range(visible_gpus())
    if (ids := engine.device_ids) is not None and (missing := sorted({*ids} - {*there})):
        seen = f" that CUDA_VISIBLE_DEVICES={shown!r} shows" if (shown := os.environ.get(VISIBLE)) is not None else ""
        raise ValueError(f"device_ids: this host has no GPU {missing[0]}{seen}; it has {[*there] or 'none'}")
    gpus = len(there if ids is None else ids)
    if (engine.device == "cuda" or ids is not None) and gpus < local:
        raise ValueError(
            f"layout {engine.layout} needs {local} GPUs on this host, one a rank, and there are {gpus}: "
            "use device cpu or a smaller layout"
        )
    if engine.device != "auto":
        return engine.device
    return "cuda" if gpus >= local else "cpu"


def _transport(device: str) -> str:
    """The fastest way between ranks of one host: shared memory needs the compiled waits, gloo works everywhere."""
    if device == "cuda":
        return "nccl"
    return "shm" if have_library() else "gloo"


def runner_spec(plan: RunPlan, replica: int = 0) -> RunnerSpec:
    """What every rank of a replica is told about the model."""
    engine, offload = plan.engine, plan.offload
    draft = plan.draft.spec() if plan.draft is not None else None
    if draft is not None and offload is not None:
        draft = msgspec.structs.replace(draft, offload=offload.draft)
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
        draft=draft,
        offload=offload.target if offload is not None else None,
        compile=engine.compile,
        profile=str(Path(engine.profile).absolute() / f"dp{replica}") if engine.profile is not None else None,
    )
