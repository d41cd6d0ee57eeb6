"""Draft decoders on every layout: the right logits, from the right cache, or a refusal that names the remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from shardwise import reference
from shardwise.config import BLOCK, Coordinates, EngineConfig, Layout
from shardwise.describe import describe, show
from shardwise.features import Speculation
from shardwise.kernels.ops import load_ops
from shardwise.parallel.axis import Axis
from shardwise.runtime import launch
from shardwise.runtime.batch import make_batch
from shardwise.runtime.drafter import Drafter
from shardwise.runtime.launch import RunPlan, plan_run, runner_spec, worker_specs
from shardwise.runtime.local import ThreadExecutor
from shardwise.runtime.part import make_part
from shardwise.runtime.source import open_source
from shardwise.runtime.spec import RunnerSpec
from shardwise.schedule.step import Chunk, Sampling, Step, StepResult
from shardwise.weights.checkpoint import LoadError
from tests.harness import plan_of, whole_weights
from tests.tiny import save_gpt2, save_llama

LAYOUTS = ["1", "tp2", "pp2", "tp2.pp2", "tp3", "pp3"]
PROMPTS = [[5, 17, 90, 3], [(7 * index) % 96 for index in range(37)], [8]]
BLOCKS = [[4], [2, 7, 1], [5]]
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)


class DraftRank:
    """A rank that answers every step with whole rows of logits, the draft's for a draft step."""

    def __init__(self, spec: RunnerSpec, place: Coordinates, tp: Axis, pp: Axis) -> None:
        self.compute = torch.float64 if spec.dtype == "float64" else torch.float32
        ops, _ = load_ops(spec.kernels, spec.device, self.compute)
        self.tp, self.pp = tp, pp
        self.target = make_part(spec, place, tp, ops)
        self.drafter = Drafter(spec, place, tp, ops, self.target)

    def load(self) -> dict[str, int | float | str]:
        return {"target": self.target.load(), "draft": self.drafter.load()}

    def close(self) -> None:
        pass

    @torch.inference_mode()
    def step(self, step: Step) -> StepResult | None:
        part = self.drafter.part if step.draft else self.target
        batch = make_batch(step.chunks, torch.device("cpu"))
        received = None
        if not part.shard.first:
            received = self.pp.recv((batch.ids.shape[0], part.hidden_size), self.compute)
        out = self.drafter(received, batch) if step.draft else self.target(received, batch)
        if not part.shard.last:
            self.pp.send(out)
            return None
        rows = self.tp.all_gather(part.logits(out, batch), [run.size for run in part.shard.vocabs])
        if self.tp.rank:
            return None
        return StepResult(step.epoch, step.number, [], [[row.numpy().tobytes() for row in rows]], [])


class Ranks:
    """The ranks of a plan as threads, which say the logits of a step."""

    def __init__(self, plan: RunPlan, executor: ThreadExecutor) -> None:
        self.figures = executor.figures
        self._executor = executor
        self._dtype = torch.float64 if plan.dtype == "float64" else torch.float32

    def logits(
        self, *, draft: bool, start: int = 0, stop: int = 1000, prompts: Sequence[list[int]] = PROMPTS
    ) -> Tensor:
        """[prompts that have such tokens, vocabulary]: of the last of the tokens ``start`` to ``stop`` of each."""
        chunks = [
            Chunk(number, start, prompt[start:stop], blocks, GREEDY)
            for number, (prompt, blocks) in enumerate(zip(prompts, BLOCKS, strict=False))
            if prompt[start:stop]
        ]
        self._executor.submit(Step(0, 0, chunks, draft=draft))
        (rows,) = self._executor.collect().logits
        return torch.stack([torch.frombuffer(bytearray(row), dtype=self._dtype) for row in rows])


@contextmanager
def ranks_of(plan: RunPlan) -> Iterator[Ranks]:
    spec = msgspec.msgpack.decode(msgspec.msgpack.encode(runner_spec(plan)), type=RunnerSpec)
    layout = plan.engine.layout
    executor = ThreadExecutor(Layout(tp=layout.tp, pp=layout.pp), lambda place, axes: DraftRank(spec, place, *axes))
    try:
        yield Ranks(plan, executor)
    finally:
        executor.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    paths = {name: save_llama(root / name, name) for name in ("even", "groups", "few_kv")}
    paths["alike"] = save_llama(root / "alike", "groups", seed=1)
    single = save_llama(root / "single", "groups", dtype=torch.float32)
    return {**paths, "single": single, "gpt2": save_gpt2(root / "gpt2", layers=2, vocab=101)}


def planned(models: dict[str, Path], target: str, layout: str, speculate: str, **settings: Any) -> RunPlan:
    """A plan whose ``speculate`` may name a model of the fixture."""
    by = Speculation.parse(speculate)
    by = replace(by, model=str(models.get(by.model, by.model))) if by.model else by
    return plan_of(models[target], layout, speculate=by, **settings)


def truth(path: Path, prompts: Sequence[list[int]] = PROMPTS, layers: int | None = None) -> Tensor:
    """The oracle's last row for each prompt, by the whole model or by its first layers."""
    source = open_source(path)
    config = replace(source.config, num_layers=layers or source.config.num_layers)
    weights = whole_weights(source)
    return torch.stack([reference.logits(config, weights, prompt)[-1] for prompt in prompts])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_draft_like_the_target_is_the_target(models: dict[str, Path], layout: str) -> None:
    """Guards against a draft with another slice, stage or cache than its layout asks for: bit-equal, chunk by chunk."""
    with ranks_of(planned(models, "groups", layout, "draft=groups")) as ranks:
        for start, stop in ((0, 1), (1, 20), (20, 36), (36, 37)):
            target = ranks.logits(draft=False, start=start, stop=stop)
            assert torch.equal(ranks.logits(draft=True, start=start, stop=stop), target)
        assert all(figures["target"] == figures["draft"] > 0 for figures in ranks.figures)


@pytest.mark.parametrize("draft", ["alike", "even", "gpt2"])
@pytest.mark.parametrize("layout", ["1", "tp2", "tp2.pp2", "tp3"])
def test_draft_and_target_keep_apart(models: dict[str, Path], layout: str, draft: str) -> None:
    """Guards against a draft model that writes to the target's cache, or is built with the target's numbers."""
    prompts = [[token % 96 for token in prompt] for prompt in PROMPTS]
    plan = planned(models, "groups", layout, f"draft={draft}")
    with ranks_of(plan) as ranks:
        ranks.logits(draft=False, stop=1, prompts=prompts)
        ranks.logits(draft=True, stop=1, prompts=prompts)
        both = [ranks.logits(draft=kind, start=1, prompts=prompts) for kind in (False, True)]
    for rows, name in zip(both, ("groups", draft), strict=True):
        torch.testing.assert_close(rows, truth(models[name], prompts)[:2], rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", ["1", "tp2", "tp3"])
def test_vocabularies_of_two_lengths(models: dict[str, Path], layout: str) -> None:
    """Guards padded vocabularies: an id that only the target knows is not looked up in the draft."""
    plan = planned(models, "groups", layout, "draft=even")  # 101 ids, 96 of them in the draft
    assert plan.draft is not None
    assert plan.draft.num_ids == 96
    strange = [[100, 5, 96], [95, 99]]
    with ranks_of(plan) as ranks:
        rows = ranks.logits(draft=True, prompts=strange)
    known = truth(models["even"], [[0, 5, 0], [95, 0]])
    torch.testing.assert_close(rows, known, rtol=0, atol=1e-10)

    larger = planned(models, "even", layout, "draft=groups")  # the sampler leaves out what only the draft knows
    assert larger.draft is not None
    assert larger.draft.num_ids == 96


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_early_exit_is_the_truncated_model(models: dict[str, Path], layers: int) -> None:
    """Guards early exit: the oracle on fewer layers, bit-equal in every layout, also where a stage has none of them."""
    prompts = [[token % 67 for token in prompt] for prompt in PROMPTS]
    found = []
    for layout in [*LAYOUTS, "pp4", "tp2.pp3"]:
        plan = planned(models, "few_kv", layout, f"self,layers={layers}")
        with ranks_of(plan) as ranks:
            ranks.logits(draft=False, stop=20, prompts=prompts)  # the target's cache is as good as its own
            found.append(ranks.logits(draft=True, start=20, prompts=prompts))
            assert all(figures["draft"] == 0 for figures in ranks.figures)
            target = ranks.logits(draft=False, start=20, prompts=prompts)
            torch.testing.assert_close(target, truth(models["few_kv"], prompts)[1:2], rtol=0, atol=1e-10)
    torch.testing.assert_close(found[0], truth(models["few_kv"], prompts, layers)[1:2], rtol=0, atol=1e-10)
    assert all(torch.equal(rows, found[0]) for rows in found)


@pytest.mark.parametrize("layout", ["1", "tp2", "pp2", "tp2.pp2", "tp3"])
def test_rounded_weights_are_the_narrow_model(models: dict[str, Path], layout: str) -> None:
    """Guards self in bfloat16: an engine of that dtype, bit for bit; and the target rewrites what it left behind."""
    plan = planned(models, "single", layout, "self")
    assert plan.draft is not None
    assert (plan.draft.dtype, plan.draft.layers) == ("bfloat16", None)
    with ranks_of(plan) as ranks:
        exact = ranks.logits(draft=False)
        beside = ranks.logits(draft=True, start=36)
        drafted = ranks.logits(draft=True)
        later = ranks.logits(draft=True, start=36)
        assert torch.equal(ranks.logits(draft=False), exact)
        assert torch.equal(ranks.logits(draft=True, start=36), beside)  # it reads what the target wrote
        assert not torch.equal(later, beside)
    with ranks_of(planned(models, "single", layout, "self,layers=1", dtype="bfloat16")) as ranks:
        assert torch.equal(ranks.logits(draft=False), drafted)
        assert torch.equal(ranks.logits(draft=False, start=36), later)
    assert not torch.equal(exact, drafted)


def test_plain_self_by_dtype(models: dict[str, Path]) -> None:
    """Guards what ``self`` means: bfloat16 where weights run as float32, elsewhere half of the layers."""
    for dtype, expected in (
        ("float32", ("bfloat16", None)),
        ("bfloat16", ("bfloat16", 2)),
        ("float16", ("float16", 2)),
        ("float64", ("float64", 2)),
    ):
        draft = planned(models, "few_kv", "1", "self", dtype=dtype).draft
        assert draft is not None
        assert (draft.dtype, draft.layers) == expected
        assert draft.shared
        assert draft.source is None


@pytest.mark.parametrize(
    ("target", "engine", "asked", "found"),
    [
        ("few_kv", "auto", "", "float64"),
        ("few_kv", "float32", "", "float32"),
        ("few_kv", "bfloat16", "", "bfloat16"),
        ("few_kv", "bfloat16", ",dtype=float32", "float32"),
        ("single", "auto", "", "float32"),
        ("single", "auto", ",dtype=float16", "float16"),
    ],
)
def test_dtype_of_a_draft_model(models: dict[str, Path], target: str, engine: str, asked: str, found: str) -> None:
    """Guards the draft's dtype: as asked, else the engine's, else its checkpoint's, with the target's activations."""
    draft = planned(models, target, "1", f"draft=few_kv{asked}", dtype=engine).draft
    assert draft is not None
    assert draft.dtype == found
    assert not draft.shared


def test_ngram_needs_no_draft(models: dict[str, Path]) -> None:
    """Guards the wire and the memory of runs that have no draft decoder."""
    plan = planned(models, "even", "1", "ngram")
    assert plan.draft is None
    assert runner_spec(plan).draft is None


def test_memory_counts_the_draft(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a cache planned as if the draft weighed nothing; its figures are what its ranks read."""
    monkeypatch.setattr(launch, "available_memory", lambda: 600_000)
    size = {kind: planned(models, "single", "1", kind, kv_tokens=None) for kind in ("ngram", "self", "self,layers=1")}
    size["draft"] = planned(models, "single", "1", "draft=single", kv_tokens=None)
    assert size["draft"].num_blocks < size["self"].num_blocks < size["ngram"].num_blocks
    assert size["self,layers=1"].num_blocks == size["ngram"].num_blocks
    draft, rounded = size["draft"].draft, size["self"].draft
    assert draft is not None
    assert rounded is not None
    assert [(rank.weight_bytes > 0, rank.kv_bytes_per_token) for rank in rounded.ranks] == [(True, 0)]
    own = size["draft"].ranks[0]
    assert [(rank.weight_bytes, rank.kv_bytes_per_token) for rank in draft.ranks] == [
        (own.weight_bytes, own.kv_bytes_per_token)
    ]
    free = 600_000 - 2 * own.weight_bytes
    assert size["draft"].num_blocks == -(-int(free / 2 / (2 * own.kv_bytes_per_token)) // BLOCK)
    with ranks_of(planned(models, "single", "1", "draft=single")) as ranks:
        assert ranks.figures[0]["draft"] == draft.ranks[0].weight_bytes


def test_slots_hold_the_wider_of_the_two(models: dict[str, Path]) -> None:
    """Guards shared memory that is cut for the target when the draft's rows are the longer ones."""

    def slot(target: str, speculate: str) -> int:
        return worker_specs(planned(models, target, "tp2", speculate), 0)[0].slot_bytes

    assert (
        slot("even", "draft=groups") == slot("groups", "draft=even") == slot("groups", "ngram") > slot("even", "ngram")
    )


def test_a_draft_of_shorter_context(models: dict[str, Path], tmp_path: Path) -> None:
    """Guards the positions that a draft can see: no further than its own context, nor than the run's."""
    path = save_llama(tmp_path / "short", "groups")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    for longest, expected in ((None, 128), (100, 100), (200, 128)):
        plan = planned(models, "groups", "1", f"draft={path}", max_model_len=longest)
        assert plan.draft is not None
        assert plan.draft.max_len == expected
    shared = planned(models, "groups", "1", "self", max_model_len=100).draft
    assert shared is not None
    assert shared.max_len == 100


def test_shares_and_stages(models: dict[str, Path]) -> None:
    """Guards --split and --stages beside a draft: shares hold for both, stages count the target's layers only."""
    settings: dict[str, Any] = {"split": (1.0, 3.0), "stages": (1, 3)}
    prompts = [[token % 67 for token in prompt] for prompt in PROMPTS]
    with ranks_of(planned(models, "few_kv", "tp2.pp2", "draft=gpt2", **settings)) as ranks:
        rows = ranks.logits(draft=True, prompts=prompts)
    torch.testing.assert_close(rows[:, :67], truth(models["gpt2"], prompts)[:, :67], rtol=0, atol=1e-10)
    with ranks_of(planned(models, "few_kv", "tp2.pp2", "self,layers=2", **settings)) as ranks:
        rows = ranks.logits(draft=True, prompts=prompts)
    torch.testing.assert_close(rows, truth(models["few_kv"], prompts, 2), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("target", "layout", "speculate", "settings", "words"),
    [
        ("groups", "pp3", "draft=gpt2", {}, ["draft", "gpt2", "2 layers", "pp can be 1 to 2", "works is pp2", "ngram"]),
        ("groups", "tp6", "draft=even", {}, ["draft", "even", "tp can be 1 to 4", "works is tp4"]),
        ("groups", "1", "draft=even,dtype=float32", {}, ["float32", "model of dtype float64", "dtype can be float64,"]),
        ("single", "1", "draft=even,dtype=float64", {}, ["can be float32, bfloat16, float16, or be left out"]),
        ("groups", "1", "self,layers=3", {}, ["layers=3", "3 layers", "can be 1 to 2"]),
        ("groups", "1", "self,layers=9", {}, ["layers=9", "can be 1 to 2"]),
        ("groups", "1", "self,dtype=bfloat16", {}, ["float64 weights", "use layers"]),
        ("single", "1", "self,dtype=float32", {}, ["is float32", "dtype can be bfloat16, float16"]),
        ("single", "1", "self,dtype=float64", {}, ["is float32", "dtype can be bfloat16, float16"]),
        ("single", "1", "self,dtype=float16", {"dtype": "bfloat16"}, ["is bfloat16", "use layers"]),
    ],
)
def test_refusals(
    models: dict[str, Path], target: str, layout: str, speculate: str, settings: dict[str, Any], words: list[str]
) -> None:
    """Guards what can't be drafted with: one line before any weight is read, with the reason and what would do."""
    with pytest.raises(ValueError, match=r"^speculate: ") as caught:
        planned(models, target, layout, speculate, **settings)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_of_one_layer(tmp_path: Path) -> None:
    """Guards early exit where there is nothing to leave out."""
    path = save_gpt2(tmp_path / "one", layers=1)
    with pytest.raises(ValueError, match=r"single layer: use ngram"):
        plan_of(path, "1", speculate=Speculation.parse("self"))
    draft = plan_of(path, "1", speculate=Speculation.parse("self"), dtype="float32").draft
    assert draft is not None
    assert draft.dtype == "bfloat16"


def test_a_draft_that_cannot_be_opened(models: dict[str, Path], tmp_path: Path) -> None:
    """Guards the message for a mistyped or broken draft: it must not read as if the model itself were at fault."""
    with pytest.raises(ValueError, match=r"^speculate: the draft: model 'nowhere': no such file"):
        planned(models, "even", "1", "draft=nowhere")
    broken = save_llama(tmp_path / "broken", "even")
    (broken / "model.safetensors").write_bytes(b"short")
    with pytest.raises(LoadError, match=r"^speculate: the draft: .*model\.safetensors"):
        planned(models, "even", "1", f"draft={broken}")


def test_description_tells_of_the_draft(models: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Guards figures that leave out what the draft takes, on paper and as JSON."""
    path = str(models["groups"])
    engine = EngineConfig(Layout(pp=3), device="cpu", speculate=Speculation("self", layers=1))
    document = json.loads(json.dumps(describe(path, engine)))
    assert [rank["layers"] for rank in document["draft"]["ranks"]] == [[0, 1], [1, 1], [1, 1]]
    show(document)
    engine = replace(engine, speculate=Speculation("draft", model=path))
    document = describe(path, engine)
    plan = plan_run(open_source(path), engine)
    assert [rank["weight_bytes"] for rank in document["draft"]["ranks"]] == [rank.weight_bytes for rank in plan.ranks]
    show(document)
    out = capsys.readouterr().out
    assert "draft: the model itself" in out
    assert "draft: directory" in out
    assert describe(path, replace(engine, speculate=None))["draft"] is None
