"""The cases of ../shared/cases.md about log-probabilities, on layouts of threads, against the oracle in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from shardwise import reference
from shardwise.llm import LLM
from shardwise.params import SamplingParams
from shardwise.runtime.source import open_source
from shardwise.schedule.blocks import BlockPool
from shardwise.schedule.sequence import Sequence
from shardwise.schedule.step import Logprob
from tests.cases import LAYOUTS, ask, by, check_idle, streamed
from tests.harness import threaded_llm, whole_weights
from tests.tiny import save_text_model

LONG = "A prompt of more than three blocks, which chunks of seven cut."
OTHER = LONG[:40] + "its own end"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def weights(model: Path) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in whole_weights(open_source(model)).items()}


@pytest.fixture(scope="module", params=[*LAYOUTS, "dp2"])
def shared(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with threaded_llm(model, request.param, dtype="float64") as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    check_idle(shared)


def check_true(
    llm: LLM, weights: dict[str, Tensor], tokens: list[int], start: int, found: list[Logprob], top: int
) -> None:
    """``found`` are those of ``tokens[start:]``, by the oracle: their own, and the likeliest in order."""
    assert [item.token for item in found] == tokens[start : start + len(found)]
    rows = reference.logits(llm.source.config, weights, tokens)[start - 1 :].log_softmax(-1)
    for row, item in zip(rows, found, strict=False):
        best = row.sort(descending=True, stable=True)
        assert item.logprob == pytest.approx(row[item.token].item(), abs=1e-9)
        assert [token for token, _ in item.top] == best.indices[:top].tolist()
        assert [logprob for _, logprob in item.top] == pytest.approx(best.values[:top].tolist(), abs=1e-9)


WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_p": 0.3},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.0, "min_p": 0.9},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 5.0},
    {"logit_bias": {65: 100}, "max_tokens": 2},
    {"allowed_token_ids": (66, 289), "bad_words": ("zq",)},
]


def test_logprobs_are_those_of_the_raw_model(llm: LLM, weights: dict[str, Tensor]) -> None:
    """C11: whatever filters, penalties, biases and masks do to the choice, what is reported is the model's own."""
    params = [by({"max_tokens": 5, "seed": 3, "logprobs": 20, "ignore_eos": True, **way}) for way in WAYS]
    results = llm.generate(["raw"] * len(params), params)
    assert len({result.outputs[0].token_ids[0] for result in results}) > 2
    first = results[0].outputs[0].logprobs[0]
    for result in results:
        (part,) = result.outputs
        assert len(part.logprobs) == len(part.token_ids)
        assert part.logprobs[0].top == first.top
        line = [*result.prompt_token_ids, *part.token_ids]
        check_true(llm, weights, line, len(result.prompt_token_ids), part.logprobs, 20)


def test_prompt_logprobs_of_one_prompt_do_not_depend_on_its_sampling(llm: LLM) -> None:
    """C11: the same prompt has the same log-probabilities at every temperature."""
    params = [by({"max_tokens": 1, "seed": 3, "prompt_logprobs": 2, **way}, max_tokens=1) for way in WAYS]
    results = llm.generate([LONG] * len(params), params)
    assert all(result.prompt_logprobs == results[0].prompt_logprobs for result in results)


def test_prompt_logprobs_with_a_prefix_cache(llm: LLM, weights: dict[str, Tensor]) -> None:
    """C63: the same long prompt twice, its blocks cached: the same whole array, bit for bit, and the oracle's."""
    plain = SamplingParams(max_tokens=3, ignore_eos=True)
    scored = by({"max_tokens": 3, "ignore_eos": True, "prompt_logprobs": 3, "logprobs": 3})
    cached = ask(llm, LONG, plain)
    assert max(len_cached(llm, cached.prompt_token_ids)) >= 48
    first = ask(llm, LONG, scored)
    check_true(llm, weights, first.prompt_token_ids, 1, first.prompt_logprobs, 3)
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids) - 1
    assert first.outputs[0].token_ids == cached.outputs[0].token_ids
    again, beside, other = llm.generate([LONG, LONG, OTHER], [scored, plain, scored])
    assert (again.prompt_logprobs, again.outputs) == (first.prompt_logprobs, first.outputs)
    assert beside.prompt_logprobs == []
    check_true(llm, weights, other.prompt_token_ids, 1, other.prompt_logprobs, 3)
    assert other.prompt_logprobs[:38] == first.prompt_logprobs[:38]
    pieces = streamed(llm, LONG, scored).pieces
    assert [item for piece in pieces for item in piece.prompt_logprobs] == first.prompt_logprobs


def len_cached(llm: LLM, tokens: list[int]) -> list[int]:
    return [engine.scheduler.cached_tokens(tuple(tokens)) for engine in llm._replicas.engines]


def test_prompt_logprobs_without_tokens(llm: LLM, weights: dict[str, Tensor]) -> None:
    """C63: a prompt can be scored and nothing generated, a single token has nothing to score, n scores it once."""
    scored = SamplingParams(max_tokens=0, prompt_logprobs=1)
    result, single, empty = llm.generate([LONG, [5], "x"], [scored, scored, SamplingParams(max_tokens=0)])
    check_true(llm, weights, result.prompt_token_ids, 1, result.prompt_logprobs, 1)
    for each in (result, single, empty):
        assert (each.token_ids, each.text, each.finish_reason) == ([], "", "length")
    assert (single.prompt_logprobs, empty.prompt_logprobs) == ([], [])
    several = ask(llm, LONG, by({"n": 3, "temperature": 1.0, "seed": 1, "max_tokens": 2, "prompt_logprobs": 1}))
    assert several.prompt_logprobs == result.prompt_logprobs


HARD: list[tuple[dict[str, Any], bool]] = [
    ({"max_chunk": 7}, False),
    ({"max_chunk": 16, "max_batch_tokens": 20}, False),
    ({"prefix_cache": False}, False),
    ({"kv_tokens": 96, "max_chunk": 1}, True),
    ({"kv_tokens": 96, "max_chunk": 2, "prefix_cache": False}, True),
]
"""Settings, and whether a long prompt is preempted under them."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompt_logprobs_come_what_may(model: Path, layout: str) -> None:
    """C63: chunks, preemption and recomputation neither lose, repeat nor change a log-probability of the prompt."""
    prompts = ["another" * 2, LONG, OTHER]
    params = [by({"ignore_eos": True, "prompt_logprobs": 2, "logprobs": 2, "max_tokens": n}) for n in (24, 4, 4)]
    with threaded_llm(model, layout, dtype="float64") as llm:
        easy = llm.generate(prompts, params)
    for settings, scarce in HARD:
        preempted: list[int] = []  # what was scored of them
        with threaded_llm(model, layout, dtype="float64", **settings) as llm:
            pool = llm._replicas.engines[0].scheduler.pool

            def release(sequence: Sequence, pool: BlockPool = pool, seen: list[int] = preempted) -> None:
                seen += [sequence.scored] if sequence.finish_reason is None else []
                BlockPool.release(pool, sequence)

            with patch.object(pool, "release", release):
                hard = llm.generate(prompts, params)
        assert bool(preempted) == scarce
        if layout in ("1", "tp2") and settings.get("max_chunk") == 1:  # stages always hold some of a prompt's chunks
            assert any(0 < scored < len(LONG) - 1 for scored in preempted)
        for result, expected in zip(hard, easy, strict=True):
            assert result.prompt_logprobs == expected.prompt_logprobs, settings
            assert result.outputs == expected.outputs, settings


def test_logprobs_count_from_none_to_twenty(llm: LLM) -> None:
    """C5 beside it: 0 reports the drawn tokens alone, 20 the most likely too, and None nothing."""
    fields = {"max_tokens": 3, "ignore_eos": True}
    none, own, most = llm.generate(["n"] * 3, [by(fields), by(fields, logprobs=0), by(fields, logprobs=20)])
    assert none.outputs[0].logprobs == []
    assert [len(item.top) for item in own.outputs[0].logprobs] == [0] * 3
    assert [len(item.top) for item in most.outputs[0].logprobs] == [20] * 3
    assert [item.logprob for item in own.outputs[0].logprobs] == [item.logprob for item in most.outputs[0].logprobs]


def test_equal_logits_are_listed_by_id(tmp_path: Path) -> None:
    """C11: of equally likely tokens the lowest ids are listed, however the vocabulary is cut."""
    from safetensors.torch import load_file, save_file

    path = save_text_model(tmp_path / "flat")
    stored = load_file(path / "model.safetensors")
    stored["lm_head.weight"][::2] = stored["lm_head.weight"][0]
    save_file({name: tensor.clone() for name, tensor in stored.items()}, path / "model.safetensors")
    found = []
    for layout in LAYOUTS:
        with threaded_llm(path, layout) as llm:
            result = ask(llm, "flat", SamplingParams(max_tokens=2, logprobs=20, prompt_logprobs=20, ignore_eos=True))
            found.append((result.prompt_logprobs, result.outputs))
    assert all(each == found[0] for each in found)
    tied = 0
    for item in found[0][0]:
        values = [logprob for _, logprob in item.top]
        ties = [token for token, logprob in item.top if values.count(logprob) > 1]
        assert ties == sorted(ties)
        tied += len(ties)
    assert tied
