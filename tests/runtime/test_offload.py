"""Layers that don't stay with their ranks: one answer, places that are planned within the limit, and nothing left."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from shardwise import LLM, SamplingParams
from shardwise.config import BLOCK, EngineConfig, Layout
from shardwise.features import Compile, MaxMemory, Quantization, Speculation
from shardwise.runtime import offload
from shardwise.runtime.executor import Executor
from shardwise.runtime.launch import RunPlan
from shardwise.runtime.offload_plan import plan_offload
from shardwise.runtime.processes import ProcessExecutor
from shardwise.runtime.spec import Home, Offload
from tests.harness import Answer, plan_of, replicas_of, run_on, threaded_llm, threads
from tests.limits import limited, num_away, smallest
from tests.test_cli import shardwise
from tests.test_equivalence import jobs_for
from tests.tiny import LLAMAS, save_gpt2, save_llama, save_other, save_text_model

SMALL = {"dtype": "float32", "max_batch_tokens": 64, "max_chunk": 64, "max_num_seqs": 8}
"""Batches whose working space doesn't dwarf the weights of a tiny model."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    small = {"heads": 4, "kv": 2, "dim": 6, "hidden": 24, "width": 40, "vocab": 101, "layers": 2}
    return {
        "groups": save_llama(root / "groups", "groups"),
        "few_kv": save_llama(root / "few_kv", "few_kv"),
        "small": save_llama(root / "small", small, seed=5),
        "mixtral": save_other(root / "mixtral", "mixtral"),
        "gpt2": save_gpt2(root / "gpt2"),
        "text": save_text_model(root / "text"),
    }


@pytest.mark.parametrize(
    ("given", "every", "ranks", "host"),
    [
        ("10GB", 10**10, (), None),
        (" 1.5GiB , cpu=20MB", 3 * 2**29, (), 20 * 10**6),
        ("0=10MB,1=6MiB,cpu=1GB", None, ((0, 10**7), (1, 6 * 2**20)), 10**9),
        ("8MB,1=6MB", 8 * 10**6, ((1, 6 * 10**6),), None),
        ('{"0": "10GB", "cpu": "20GB"}', None, ((0, 10**10),), 2 * 10**10),
        ({0: "10GB", 1: 5000, "cpu": "1MB"}, None, ((0, 10**10), (1, 5000)), 10**6),
    ],
)
def test_parse(given: Any, every: int | None, ranks: Any, host: int | None) -> None:
    """A size that comes out as another, or accelerate's mapping read as something else."""
    assert MaxMemory.parse(given) == MaxMemory(every, ranks, host)


@pytest.mark.parametrize(
    "given",
    [
        *("", "10", "10gb", "10 Gb", "1=", "cpu", "gpu=1GB", "disk=1GB", "-1=1GB", "1GB,2GB", "0=1GB,0=2GB", "0GB"),
        *("1e3GB", "1GB,", "{", "{}", '{"0": true}', '{"0": ["1GB"]}', '{"0": "1GB", "0": "2GB"}', '{"a": "1GB"}'),
        *({}, {"0": 1.5}, {"0": 0}, {"0": None}, {"": "1GB", "x": 1}),
    ],
)
def test_parse_refuses(given: Any) -> None:
    """Input that is ignored or guessed at."""
    with pytest.raises(ValueError, match="max_memory"):
        MaxMemory.parse(given)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_memory": MaxMemory.parse("0=1GB")}, "rank 1 of layout tp2 has no limit.*10GB,0=6GB"),
        ({"max_memory": MaxMemory.parse("1GB,2=1GB")}, "no rank 2 in layout tp2"),
        ({"offload_dir": "/tmp"}, "both or neither"),
        ({"max_memory": MaxMemory(10**9), "compile": Compile()}, "compile with max_memory"),
    ],
)
def test_settings_refused(settings: dict[str, Any], words: str) -> None:
    """A limit for nobody, or one that a rank escapes; a directory that nothing would be written to."""
    with pytest.raises(ValueError, match=words):
        EngineConfig(layout=Layout(tp=2), **settings)


def answers_of(plan: RunPlan, *ways: dict[str, Any]) -> list[list[Answer]]:
    jobs = jobs_for(plan.source, 6)
    found = []
    with threads(plan) as executors:
        for way in ways or ({},):
            replicas = replicas_of(executors, plan, **way)
            found += [run_on(replicas, jobs), run_on(replicas, jobs)]  # the second time with a warm prefix cache
    return found


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        *(("groups", None), ("groups", "int8"), ("groups", "int4,group=16")),
        *(("mixtral", None), ("mixtral", "int4,group=16"), ("gpt2", None)),
    ],
)
def test_one_answer(models: dict[str, Path], tmp_path: Path, name: str, quantize: str | None) -> None:
    """A layer that is read before it is there, at another's place, or in a layout that the file hasn't: one hash of
    logits with and without limits, over layouts, uneven splits, chunks, preemption and cache hits. And a file that is
    seen by others, or outlives its ranks."""
    rounding = Quantization.parse(quantize) if quantize is not None else None
    settings: dict[str, Any] = {**SMALL, "quantize": rounding}
    (first, _) = answers_of(plan_of(models[name], "1", **settings))
    few = {"num_blocks": 5, "max_chunk": 7, "max_num_seqs": 4}
    cells: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("tp2", {"split": (3.0, 1.0)}, {}),
        ("tp2.pp2", {}, few),
        ("1", {}, few),
        ("pp2", {"stages": (1, 2)}, {}),
        ("dp2", {}, {}),
    ]
    for layout, more, way in cells if (name, quantize) == ("groups", None) else cells[:2]:
        plan = limited(models[name], layout, tmp_path, **settings, **more)
        assert num_away(plan) > 0
        assert answers_of(plan, way) == [first, first], layout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "proposer",
    ["self,layers=2,k=2", "self,dtype=bfloat16,k=2", "self,quantize=int4,group=16,k=2", "draft=SMALL,k=2", "ngram,k=3"],
)
def test_one_answer_with_drafts(models: dict[str, Path], tmp_path: Path, proposer: str) -> None:
    """A draft whose layers are the model's and are fetched by two, or one with places of its own that gets those of
    the model."""
    by = Speculation.parse(proposer.replace("SMALL", str(models["small"])))
    (first, _) = answers_of(plan_of(models["groups"], "1", **SMALL))
    for layout, share in (("1", 0.6), ("tp2.pp2", 0.0)):
        plan = limited(models["groups"], layout, tmp_path, share, **SMALL, speculate=by)
        assert num_away(plan) > 0
        assert answers_of(plan) == [first, first], (layout, share)
    assert not list(tmp_path.iterdir())


def test_one_answer_through_two_stretches(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does, on the CPU: a layer that takes another's turn, or is copied before it is complete; a draft that
    leaves off in the middle and begins anew. With none, one and more layers on the host, and odd and even numbers."""
    monkeypatch.setattr(offload, "make_store", offload.Staged)
    settings: dict[str, Any] = {**SMALL, "quantize": Quantization(4, 16)}
    (first, _) = answers_of(plan_of(models["few_kv"], "1", **settings))
    for layout, kept, near in (("1", 0, 1), ("1", 1, 4), ("tp2", 1, 0), ("tp2.pp2", 0, 1), ("tp2.pp2", 1, 4)):
        by = Speculation.parse("self,layers=2,k=2") if near else None
        plan = plan_of(models["few_kv"], layout, **settings, speculate=by, max_memory=MaxMemory(10**9))
        assert plan.offload is not None
        homes = []
        for home in plan.offload.target.homes:
            host = min(home.start + kept, home.stop)
            homes.append(Home(home.start, host, min(host + near, home.stop), home.stop))
        moved = replace(plan.offload, target=Offload(str(tmp_path), homes))
        assert answers_of(replace(plan, offload=moved)) == [first, first], (layout, kept, near)
    assert not list(tmp_path.iterdir())


def test_layers_are_fetched_one_ahead(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is read from disk only when it is used, or that stays mapped once it has been."""
    told: list[tuple[str, int]] = []
    for name in ("fetch", "leave"):
        real = getattr(offload.Mapped, name)
        monkeypatch.setattr(
            offload.Mapped,
            name,
            lambda self, layer, real=real, name=name: told.append((name, layer)) or real(self, layer),
        )
    plan = limited(models["few_kv"], "1", tmp_path, **SMALL)
    away = [layer for home in plan.offload.target.homes for layer in range(home.host, home.stop)]  # type: ignore[union-attr]
    assert 1 < len(away) < 4
    with threads(plan) as executors:
        told.clear()
        run_on(replicas_of(executors, plan), jobs_for(plan.source, 2)[:1])
    following = dict(zip(away, [*away[1:], away[0]], strict=True))
    once = [deed for layer in away for deed in (("fetch", following[layer]), ("leave", layer))]
    assert len(told) % len(once) == 0
    assert told == once * (len(told) // len(once))
    assert told


@pytest.mark.parametrize("layout", ["1", "tp2", "pp2", "dp2.tp2"])
def test_the_smallest_limit_works(models: dict[str, Path], tmp_path: Path, layout: str) -> None:
    """A remedy that is none: with what the refusal names everything can be, with less nothing."""
    for settings in (SMALL, {**SMALL, "kv_tokens": None}):
        least = smallest(models["groups"], layout, **settings)
        plan = plan_of(models["groups"], layout, max_memory=MaxMemory(least), offload_dir=str(tmp_path), **settings)
        assert plan.offload is not None
        assert any(home.host == home.start for home in plan.offload.target.homes)
        assert plan.num_blocks == (settings.get("kv_tokens", 1024) or BLOCK) // BLOCK
        with pytest.raises(ValueError, match="smallest max_memory that works"):
            plan_of(models["groups"], layout, max_memory=MaxMemory(least - 100), **settings)


def test_torch_opens_matrices(models: dict[str, Path]) -> None:
    """Memory that is forgotten: torch's twins make a matrix anew in the format of activations for each product."""
    for dtype, rounded, size in (("float32", None, 0), ("bfloat16", None, 4), ("float32", Quantization(8), 12)):
        settings: dict[str, Any] = {"dtype": dtype, "quantize": rounded, "max_batch_tokens": 512, "max_num_seqs": 8}
        least = [smallest(models["few_kv"], "1", kernels=kernels, **settings) for kernels in ("native", "torch")]
        assert least[1] - least[0] == pytest.approx(2 * 71 * 40 * size, abs=200)


def test_cpu_limits_all_ranks_together(models: dict[str, Path], tmp_path: Path) -> None:
    """A limit of the host that is taken as each rank's, or a remedy that leaves it out."""
    least = smallest(models["groups"], "tp2", **SMALL)
    for memory in (MaxMemory(host=2 * least + 1000), MaxMemory(10**9, host=2 * least + 1000)):
        plan = plan_of(models["groups"], "tp2", max_memory=memory, offload_dir=str(tmp_path), **SMALL)
        assert plan.offload is not None
        assert plan.offload.limits == (least + 500, least + 500)
        assert num_away(plan) >= 3
    with pytest.raises(ValueError, match=r"that works is cpu=\S+MB;"):
        plan_of(models["groups"], "tp2", max_memory=MaxMemory(host=2 * least - 1000), **SMALL)
    with pytest.raises(ValueError, match=r"that works is \S+MB,cpu=\S+MB;"):
        plan_of(models["groups"], "tp2", max_memory=MaxMemory(10**9, host=1000), **SMALL)


def test_cache_makes_room_for_layers(models: dict[str, Path], tmp_path: Path) -> None:
    """A cache for many sequences that drives layers to the disk, or one that is cut though there is room."""
    settings = {**SMALL, "kv_tokens": None}
    free = plan_of(models["groups"], "1", **settings)
    (rank,) = free.ranks
    longest = free.max_model_len
    base = smallest(models["groups"], "1", **settings) - BLOCK * rank.kv_bytes_per_token + rank.weight_bytes

    def planned(tokens: int) -> RunPlan:
        limit = MaxMemory(base + tokens * rank.kv_bytes_per_token)
        return plan_of(models["groups"], "1", max_memory=limit, offload_dir=str(tmp_path), **settings)

    assert planned(100 * longest).num_blocks == free.num_blocks
    assert num_away(planned(longest)) == 0
    assert longest // BLOCK <= planned(longest).num_blocks < free.num_blocks
    tight = planned(-longest)
    assert num_away(tight) > 0
    assert 1 <= tight.num_blocks < longest // BLOCK


@pytest.mark.parametrize("draft", [None, "self,dtype=bfloat16", "self,layers=1"])
def test_places_are_within_the_limits(models: dict[str, Path], tmp_path: Path, draft: str | None) -> None:
    """Bytes that are counted twice or not at all; a host's memory that is given out to more than it holds."""
    speculate = Speculation.parse(draft) if draft is not None else None
    free = plan_of(models["few_kv"], "tp2", **SMALL, speculate=speculate)
    own = free.draft.ranks if free.draft is not None and free.draft.layers is None else None
    for device, host in (("cpu", None), ("cuda", None), ("cuda", 60_000), ("cuda", 10**9)):
        seen = set()
        for limit in range(200_000, 1_600_000, 20_000):
            engine = replace(free.engine, max_memory=MaxMemory(limit, host=host), offload_dir=str(tmp_path))
            sizes = engine, device, free.source.config, "float32", None, free.ranks, free.draft, 256, 1024, 2
            try:
                plan = plan_offload(*sizes)
            except ValueError as error:
                assert "smallest" in str(error)  # noqa: PT017
                assert not seen, "a larger limit that does not work"
                continue
            assert plan is not None
            for number, rank in enumerate(free.ranks):
                kept = near = largest = 0
                for places, ranks in ((plan.target, free.ranks), (plan.draft, own)):
                    if places is None or ranks is None:
                        continue
                    home, layers = places.homes[number], ranks[number].layer_bytes
                    assert home.start <= home.host <= home.disk <= home.stop
                    assert (home.start, home.stop - home.start) == (rank.shard.layers.start, len(layers))
                    kept += sum(layers[: home.host - home.start])
                    near += sum(layers[home.host - home.start : home.disk - home.start])
                    if device == "cuda" and home.host < home.stop:
                        largest += min(len(layers), 2) * max(layers)
                ends = rank.weight_bytes - sum(rank.layer_bytes)
                cache = rank.kv_bytes_per_token * plan.num_blocks * BLOCK
                assert kept + largest + ends + cache <= limit
                assert near <= (host or 0) // 2
                assert device == "cuda" or near == 0
            drafts = plan.draft.homes if plan.draft is not None else []
            seen.add(tuple(home.host for home in (*plan.target.homes, *drafts)))
        assert len(seen) > 2, device
    engine = replace(free.engine, max_memory=MaxMemory(host=10**9))
    with pytest.raises(ValueError, match="a limit for each GPU too"):
        plan_offload(engine, "cuda", free.source.config, "float32", None, free.ranks, free.draft, 256, 1024, 2)


@pytest.mark.parametrize("quantize", [None, "int8", "int4,group=16"])
def test_planned_bytes_are_those_of_layers(models: dict[str, Path], tmp_path: Path, quantize: str | None) -> None:
    """A limit that is kept on paper only: a layer takes in the file what the plan counts, but for padding."""
    rounding = Quantization.parse(quantize) if quantize is not None else None
    plan = limited(models["groups"], "tp2", tmp_path, 0.0, **SMALL, quantize=rounding, kernels="torch")
    found: dict[int, int] = {}
    real = offload.make_store

    def keep(parcels: dict[int, offload.Parcel], *rest: Any) -> offload.Store:
        found.update({number: max(parcel.size, found.get(number, 0)) for number, parcel in parcels.items()})
        return real(parcels, *rest)

    with patch.object(offload, "make_store", keep), threads(plan):
        pass
    assert sorted(found) == [0, 1, 2]
    for number, size in enumerate(plan.ranks[0].layer_bytes):
        assert size == pytest.approx(found[number], abs=12 * offload.ALIGN)


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_disk_without_room(models: dict[str, Path], tmp_path: Path, fault: str) -> None:
    """Weights that are read before it is found that there is nowhere to put them; a rank that dies of SIGBUS."""
    plan = limited(models["groups"], "tp2", tmp_path, **SMALL)
    settings = {**SMALL, "max_memory": plan.engine.max_memory}
    status = os.statvfs(tmp_path)
    full = os.statvfs_result((status.f_bsize, 512, status.f_blocks, 2, 2, *tuple(status)[5:]))
    faults = {"full": patch("os.statvfs", lambda path: full), "read-only": patch("os.access", lambda *_: False)}
    with faults[fault], pytest.raises(ValueError, match=f"offload_dir {tmp_path}/new"):
        plan_of(models["groups"], "tp2", offload_dir=str(tmp_path / "new" / "one"), **settings)
    assert not list(tmp_path.iterdir())


def test_the_doors(models: dict[str, Path], tmp_path: Path) -> None:
    """An option that one of the doors drops, or places that nobody is told."""
    by = SamplingParams(max_tokens=8, ignore_eos=True)
    few = ["--max-batch-tokens", "64", "--max-chunk", "64", "--max-num-seqs", "8", "--kv-tokens", "256"]
    small = {"max_batch_tokens": 64, "max_chunk": 64, "max_num_seqs": 8, "kv_tokens": 256}
    size = smallest(models["text"], "1", **small) + 60_000
    limit = f"{size / 1e6}MB"
    with threaded_llm(models["text"]) as plain:
        (expected,) = plain.generate("count to ten", by)
    both = smallest(models["text"], "tp2", **small)
    with threaded_llm(models["text"], "tp2", max_memory={"0": f"{both / 1e6}MB", "1": both}, **small) as llm:
        assert llm.generate("count to ten", by)[0].token_ids == expected.token_ids
        assert num_away(llm.plan) > 0
    shown = shardwise("inspect", models["text"], "--max-memory", limit, *few[:2], *few[4:], "--json")
    document = json.loads(shown.stdout)
    memory = document["ranks"][0]["memory"]
    assert memory["limit"] == size
    assert memory["layers"]["device"][0] == 0
    assert memory["layers"]["disk"][1] == 4
    assert memory["bytes"]["disk"] > 0
    command = ["generate", "count to ten", "--model", models["text"], "--max-tokens", "8", "--ignore-eos", "--json"]
    done = shardwise(*command, "--max-memory", limit, "--offload-dir", tmp_path, *few)
    assert json.loads(done.stdout)["outputs"][0]["token_ids"] == expected.token_ids
    assert document["places"][0] in done.stderr
    assert "on disk" in done.stderr
    assert not list(tmp_path.iterdir())


def executor_of(llm: LLM) -> ProcessExecutor:
    """With its ranks up and their pids known."""
    deadline = time.monotonic() + 60
    (engine,) = llm._replicas.engines
    while not engine.ready or not all(process.pid for process in everyone(engine.executor)):
        assert time.monotonic() < deadline
        llm._replicas.step()
    assert isinstance(engine.executor, ProcessExecutor)
    return engine.executor


def everyone(executor: Executor) -> Sequence[Any]:
    assert isinstance(executor, ProcessExecutor)
    return [*executor._ranks, *executor._holders]


PROMPTS = ["once", "upon a time", "there was a town by the sea"]
BY = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9 * (n % 2), seed=n) for n in range(3)]


def test_a_killed_rank_finds_its_layers(models: dict[str, Path], tmp_path: Path) -> None:
    """A mapping that the next rank does not have, or that goes with the rank that was killed: the holder keeps it."""
    settings: dict[str, Any] = {"max_batch_tokens": 64, "max_chunk": 64, "max_num_seqs": 8, "kv_tokens": 1024}
    with threaded_llm(models["text"]) as plain:
        right = [output.token_ids for output in plain.generate(PROMPTS, BY)]
    limit = smallest(models["text"], "tp2", **settings)
    with LLM(
        models["text"],
        "tp2",
        threads=1,
        device="cpu",
        max_memory=MaxMemory(limit),
        offload_dir=str(tmp_path),
        **settings,
    ) as llm:
        holders = [holder.pid for holder in executor_of(llm)._holders]
        numbers = [llm.submit(prompt, by) for prompt, by in zip(PROMPTS, BY, strict=True)]
        tokens: list[int] = []
        for piece in llm.pieces(numbers[0]):
            struck = len(tokens) < 7 <= len(tokens) + len(piece.token_ids)
            tokens += piece.token_ids
            if struck:
                os.kill(executor_of(llm)._ranks[-1].pid or 0, signal.SIGKILL)
        assert [tokens, *(llm.result(number).token_ids for number in numbers[1:])] == right
        assert [holder.pid for holder in executor_of(llm)._holders] == holders
        assert not list(tmp_path.iterdir())


LARGE = {"heads": 16, "kv": 4, "dim": 64, "hidden": 1024, "width": 2816, "vocab": 290, "layers": 6}
"""270 MB of layers in float32."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", "tp2"])
def test_private_memory_is_bounded(models: dict[str, Path], tmp_path: Path, layout: str) -> None:
    """A limit that is not kept: what a rank has to itself, beyond what a rank of a tiny model has, is within it."""
    with patch.dict(LLAMAS, {"text": LARGE}):
        large = save_text_model(tmp_path / "large")
    size = (large / "model.safetensors").stat().st_size
    assert size > 250e6
    limit = 150_000_000 if layout == "1" else 110_000_000
    base, tokens = private(models["text"], layout)
    whole, expected = private(large, layout)
    capped, found = private(large, layout, max_memory=MaxMemory(limit), offload_dir=str(tmp_path))
    assert found == expected != tokens
    assert max(whole) - min(base) > limit, "the model has become so small that the test can't fail"
    assert max(capped) - min(base) < limit
    assert {path.name for path in tmp_path.iterdir()} == {"large"}


def private(path: Path, layout: str, **settings: Any) -> tuple[list[int], list[list[int]]]:
    """Anonymous bytes of every process of a rank after some work, and the tokens."""
    few: dict[str, Any] = {"max_batch_tokens": 128, "max_num_seqs": 8, "kv_tokens": 2048, "threads": 1, "device": "cpu"}
    with LLM(path, layout, isolate=True, **few, **settings) as llm:
        tokens = [output.token_ids for output in llm.generate(PROMPTS, BY)]
        return [anonymous(process.pid) for process in everyone(executor_of(llm))], tokens


def anonymous(pid: int) -> int:
    found = re.search(r"Anonymous:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    assert found is not None
    return int(found[1]) * 1024
