"""Any layout, one answer: the heart of the suite. Tiny models, whole layouts as threads, native kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config import EngineConfig, Layout
from shardwise.describe import describe
from shardwise.features import Quantization, Speculation
from shardwise.params import SamplingParams
from shardwise.runtime.source import Source, open_source
from tests.harness import Answer, Job, oracle, plan_of, run, threads
from tests.tiny import LLAMAS, save_gpt2, save_llama, save_other

MODELS = [*LLAMAS, "gpt2"]
LAYOUTS = ["1", "tp2", "tp3", "tp4", "pp2", "pp3", "tp2.pp2", "tp3.pp3", "dp2", "dp2.tp2", "dp2.tp2.pp2"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    paths = {name: save_llama(root / name, name) for name in LLAMAS}
    return {**paths, "gpt2": save_gpt2(root / "gpt2")}


def jobs_for(source: Source, max_tokens: int = 12) -> list[Job]:
    """Prompts of 1 to 50 tokens, of which two begin alike, each with another way of sampling."""
    vocab = source.config.vocab_size
    prompts = [[(7 * index + 3 * length) % vocab for index in range(length)] for length in (1, 2, 15, 16, 17, 33, 50)]
    prompts.append([*prompts[-1][:32], 5, 6])
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 1.5, "seed": 8, "top_k": 5},
        {"temperature": 1.0, "seed": 9, "top_p": 0.7},
        {"temperature": 1.2, "seed": 10, "min_p": 0.2},
        {"temperature": 2.0, "seed": 11, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"ignore_eos": True},
        {"temperature": 0.8, "seed": 7, "stop_token_ids": (4, 9)},
    ]
    return [
        Job(prompt, SamplingParams(max_tokens=max_tokens, **way)) for prompt, way in zip(prompts, ways, strict=True)
    ]


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_gives_the_oracles_tokens(models: dict[str, Path], name: str, kernels: str) -> None:
    """Guards against a wrong slice, head map, tree, position or sample in any layout: float64 against the oracle."""
    source = open_source(models[name])
    jobs = jobs_for(source)
    expected = [oracle(source, job) for job in jobs]
    hashes = set()
    for layout in LAYOUTS:
        plan = plan_of(models[name], layout, kernels=kernels)
        with threads(plan) as executors:
            answers = run(executors, plan, jobs)
        assert [answer.tokens for answer in answers] == expected, layout
        hashes.add(tuple(answer.digest for answer in answers))
    if kernels == "native":
        assert len(hashes) == 1


WAYS: list[dict[str, Any]] = [
    {"max_num_seqs": 1},
    {"max_num_seqs": 3},
    {"max_chunk": 1},
    {"max_chunk": 7},
    {"max_chunk": 16, "max_batch_tokens": 20},
    {"num_blocks": 5},
    {"num_blocks": 5, "max_chunk": 3, "max_num_seqs": 4},
    {"prefix_cache": False},
]
"""Batches, chunks, forced preemption and no prefix cache, as settings of the scheduler."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", ["groups", "gpt2"])
def test_one_hash_of_logits(models: dict[str, Path], name: str, dtype: str) -> None:
    """Guards the promise itself: bit-equal logits for every layout, batch, chunk, cache hit and preemption (C88)."""
    first: list[Answer] | None = None
    for layout in ["1", "tp2", "tp3", "pp2", "tp2.pp2", "dp2"]:
        plan = plan_of(models[name], layout, dtype=dtype)
        jobs = jobs_for(plan.source, 8)
        with threads(plan) as executors:
            for way in [{}, *WAYS]:
                answers = run(executors, plan, jobs, **way)
                first = first or answers
                assert answers == first, (layout, way)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "opt", "bloom"])
def test_one_hash_of_other_families(tmp_path: Path, name: str, dtype: str) -> None:
    """Guards the promise where it is new: slopes, windows and norms by head, and the tree in which chosen experts meet.

    With preemption, drafts of the model's own first layers, and shares of 3 to 1, which cut experts in two.
    """
    path = save_other(tmp_path / name, name)
    jobs = jobs_for(open_source(path), 6)
    first: list[Answer] | None = None
    for layout, settings in [
        ("1", {}),
        ("tp2", {"split": (3.0, 1.0)}),
        ("tp3.pp2", {}),
        ("tp2.pp3", {"speculate": Speculation("self", k=2, layers=1)}),
    ]:
        plan = plan_of(path, layout, dtype=dtype, **settings)
        with threads(plan) as executors:
            for way in ({}, {"num_blocks": 5, "max_chunk": 7, "max_num_seqs": 4}):
                answers = run(executors, plan, jobs, **way)
                first = first or answers
                assert answers == first, (layout, way)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_units_of_placement(tmp_path: Path, name: str) -> None:
    """Guards what a rank holds: whole experts in a row, cut only at its ends, and each feature on one rank alone."""
    path = save_other(tmp_path / name, name)
    config = open_source(path).config
    assert config.experts is not None
    width = config.intermediate_size
    for layout in ("tp2", "tp3", "tp5"):
        held = [rank.shard.experts(width) for rank in plan_of(path, layout).ranks]
        found = [(expert, feature) for own in held for expert, run in own.items() for feature in range(*run)]
        assert found == [(expert, feature) for expert in range(config.experts.count) for feature in range(width)]
        assert all(run.size == width for own in held for run in list(own.values())[1:-1])
        assert max(map(len, held)) <= -(-config.experts.count // len(held)) + 1
        shown = describe(str(path), EngineConfig(layout=Layout.parse(layout), device="cpu"))["ranks"]
        assert [rank["experts"] for rank in shown] == list(map(list, held))


@pytest.mark.parametrize("quantize", ["int8", "int4", "int4,group=24", "int8,group=16"])
@pytest.mark.parametrize("name", ["groups", "gpt2", "mixtral"])
def test_one_hash_of_logits_of_rounded_weights(
    models: dict[str, Path], tmp_path: Path, name: str, quantize: str
) -> None:
    """Guards scales: of the whole row or group of the model's matrix, also where ranks begin in the middle of one."""
    first: list[Answer] | None = None
    path = models[name] if name in models else save_other(tmp_path / name, name)
    layouts: list[tuple[str, dict[str, Any]]] = [
        *((layout, {}) for layout in ("1", "tp2", "tp3", "pp2", "tp2.pp2")),
        ("tp2", {"split": (3.0, 1.0)}),
        ("pp2", {"stages": (1, 2)}),
    ]
    for layout, settings in layouts:
        plan = plan_of(path, layout, dtype="float32", quantize=Quantization.parse(quantize), **settings)
        jobs = jobs_for(plan.source, 8)
        with threads(plan) as executors:
            for way in ({}, {"max_num_seqs": 3, "max_chunk": 7}) if layout in ("1", "tp2") else ({},):
                answers = run(executors, plan, jobs, **way)
                first = first or answers
                assert answers == first, (layout, settings, way)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("quantize", ["int8", "int4,group=24"])
@pytest.mark.parametrize("name", ["groups", "gpt2", "few_kv"])
def test_rounded_weights_are_the_restored_ones(models: dict[str, Path], name: str, quantize: str, kernels: str) -> None:
    """Guards against a scale, an offset or a number of another place: the oracle runs on the restored weights."""
    source = open_source(models[name])
    jobs = jobs_for(source, 8)
    rounding = Quantization.parse(quantize)
    expected = [oracle(source, job, quantize=rounding) for job in jobs]
    for layout in ("1", "tp3.pp2"):
        plan = plan_of(models[name], layout, quantize=rounding, kernels=kernels)
        with threads(plan) as executors:
            assert [answer.tokens for answer in run(executors, plan, jobs)] == expected, layout


def test_uneven_shares_and_stages(models: dict[str, Path]) -> None:
    """Guards --split and --stages: unequal devices change who computes, never what."""
    jobs = jobs_for(open_source(models["few_kv"]), 8)
    answers = []
    for layout, settings in [
        ("1", {}),
        ("tp2", {"split": (3.0, 1.0)}),
        ("tp3", {"split": (1.0, 5.0, 1.0)}),
        ("pp2", {"stages": (1, 3)}),
        ("tp2.pp3", {"stages": (2, 1, 1), "split": (1.0, 3.0)}),
    ]:
        plan = plan_of(models["few_kv"], layout, **settings)
        with threads(plan) as executors:
            answers.append(run(executors, plan, jobs))
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("layout", ["tp3", "tp4", "tp7"])
def test_more_ranks_than_kv_heads(models: dict[str, Path], layout: str) -> None:
    """C51: tp above the number of kv heads replicates them, also where the runs of heads straddle groups."""
    for name in ("few_kv", "one_kv"):
        source = open_source(models[name])
        jobs = jobs_for(source, 6)
        plan = plan_of(models[name], layout)
        assert max(rank.shard.kv_heads.size for rank in plan.ranks) <= source.config.num_kv_heads
        with threads(plan) as executors:
            assert [answer.tokens for answer in run(executors, plan, jobs)] == [oracle(source, job) for job in jobs]


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2.pp2"])
def test_tied_head(models: dict[str, Path], layout: str) -> None:
    """C50: a head tied to the embedding is right where the two live on different ranks and where they share memory."""
    source = open_source(models["few_kv"])
    assert source.config.tied
    jobs = jobs_for(source, 4)
    plan = plan_of(models["few_kv"], layout)
    with threads(plan) as executors:
        assert [answer.tokens for answer in run(executors, plan, jobs)] == [oracle(source, job) for job in jobs]


def test_head_dim_is_its_own_number(models: dict[str, Path]) -> None:
    """C55: head_dim x heads need not be the hidden size, and the cache is sized by head_dim."""
    plan = plan_of(models["few_kv"], "tp2")
    config = plan.source.config
    assert config.head_dim * config.num_heads != config.hidden_size
    kv = sum(rank.kv_bytes_per_token for rank in plan.ranks)
    assert kv == config.num_layers * config.num_kv_heads * 2 * config.head_dim * 8


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tp10", ["tp can be 1 to 9", "nearest layout that works is tp9"]),
        ("pp4", ["pp can be 1 to 3", "nearest layout that works is pp3"]),
        ("tp30.pp9", ["nearest layout that works is tp9.pp3"]),
    ],
)
def test_impossible_layout_names_the_nearest(models: dict[str, Path], layout: str, words: list[str]) -> None:
    """C60: one line with what, why, the valid values and an alternative, before any weight is read."""
    with pytest.raises(ValueError, match="layout") as caught:
        plan_of(models["groups"], layout)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_stages_must_add_up(models: dict[str, Path]) -> None:
    """C60: stages that lose or invent layers are refused with the sum that is needed."""
    with pytest.raises(ValueError, match="add up to 3"):
        plan_of(models["groups"], "pp2", stages=(1, 1))


def test_eos_list_and_union(models: dict[str, Path], tmp_path: Path) -> None:
    """C58: generation stops on any id of the union of config.json's and generation_config.json's end tokens."""
    path = save_llama(tmp_path / "model", "even", seed=3)
    (path / "generation_config.json").write_text('{"eos_token_id": [11, 12]}')
    source = open_source(path)
    assert source.eos == {2, 11, 12}
    job = Job([5, 6, 7], SamplingParams(max_tokens=200, temperature=3.0, seed=1))
    plan = plan_of(path, "1")
    with threads(plan) as executors:
        (answer,) = run(executors, plan, [job])
        (longer,) = run(executors, plan, [Job(job.prompt, SamplingParams(200, 3.0, seed=1, ignore_eos=True))])
    assert answer.reason == "stop"
    assert answer.tokens[-1] in source.eos
    assert longer.reason == "length"
    assert longer.tokens[: len(answer.tokens)] == answer.tokens


def test_seed_is_the_requests_own(models: dict[str, Path]) -> None:
    """C14, C16: a seeded request draws the same tokens alone, beside unseeded mates, and on every layout."""
    seeded = Job([3, 1, 4], SamplingParams(max_tokens=10, temperature=1.0, seed=42, ignore_eos=True))
    mates = [Job([9, 2, 6, number], SamplingParams(max_tokens=7, temperature=1.0)) for number in range(4)]
    found = set()
    for layout in ("1", "tp2", "pp2"):
        plan = plan_of(models["even"], layout)
        with threads(plan) as executors:
            found |= {tuple(run(executors, plan, [seeded])[0].tokens)}
            found |= {tuple(run(executors, plan, [*mates, seeded])[-1].tokens)}
    assert len(found) == 1


def test_tiny_temperatures_are_greedy(models: dict[str, Path]) -> None:
    """C1, C2: a temperature near 0, or a top_p near 0, gives the greedy tokens and never NaN."""
    plan = plan_of(models["even"], "tp2", dtype="float32")
    ways: list[dict[str, Any]] = [{"temperature": 10.0**-power} for power in range(4, 8)]
    ways += [{"temperature": 1.0, "top_p": 1e-4}, {"temperature": 1.0, "top_k": 1}]
    with threads(plan) as executors:
        greedy = run(executors, plan, [Job([5, 3], SamplingParams(max_tokens=8))])[0]
        for way in ways:
            assert run(executors, plan, [Job([5, 3], SamplingParams(max_tokens=8, seed=1, **way))])[0] == greedy


def test_layouts_use_every_rank(models: dict[str, Path]) -> None:
    """Guards the plan: shards of a layout cover every head, feature, row and layer once (kv heads at least once)."""
    config = open_source(models["groups"]).config
    for layout in (Layout(tp=2), Layout(tp=3), Layout(tp=2, pp=2), Layout(tp=9, pp=3)):
        ranks = plan_of(models["groups"], str(layout)).ranks
        for stage in range(layout.pp):
            own = [rank.shard for rank in ranks if rank.pp == stage]
            for name, size in (("heads", config.num_heads), ("mlp", config.intermediate_size)):
                runs = [getattr(shard, name) for shard in own]
                assert [run.start for run in runs] == [0, *[run.stop for run in runs[:-1]]]
                assert runs[-1].stop == size
        layers = [shard.layers for shard in (rank.shard for rank in ranks if rank.tp == 0)]
        assert [index for run in layers for index in range(*run)] == list(range(config.num_layers))


def test_not_a_number_is_an_error(tmp_path: Path) -> None:
    """Guards against a model with broken weights that answers with token 0 for ever."""
    from safetensors.torch import load_file, save_file

    path = save_llama(tmp_path / "broken", "even")
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, path / "model.safetensors")
    plan = plan_of(path, "tp2")
    with threads(plan) as executors, pytest.raises(RuntimeError, match="not numbers"):
        run(executors, plan, [Job([1, 2], SamplingParams(max_tokens=2))])
