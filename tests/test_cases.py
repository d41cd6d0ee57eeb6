"""The cases of ../shared/cases.md about sampling and its validation, on whole layouts of threads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.llm import LLM
from shardwise.outputs import RequestOutput
from shardwise.params import SamplingParams
from tests.cases import LAYOUTS, ask, by, check_idle, check_refused, told
from tests.harness import threaded_llm
from tests.tiny import save_text_model

VOCAB = 290
END, ALSO_END = 258, 2
"""The tokenizer's end token and the generation config's."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(model: Path) -> Iterator[LLM]:
    with threaded_llm(model) as llm:
        yield llm


@pytest.fixture(scope="module", params=[*LAYOUTS, "dp2"])
def shared(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with threaded_llm(model, request.param) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    check_idle(shared)


def test_tiny_temperatures_and_nuclei_are_greedy(llm: LLM) -> None:
    """C1, C2: a temperature or top_p near 0 gives the greedy tokens, numbers stay finite, and the engine lives on."""
    ways: list[dict[str, Any]] = [{"temperature": 10.0**-power} for power in (3, 4, 5, 6, 7, 30, 300)]
    ways += [{"temperature": 1.0, "top_p": 1e-4}, {"temperature": 1e-4, "top_p": 1e-4}, {"temperature": 5e-324}]
    ways += [{"temperature": 1.0, "top_p": 5e-324}, {"temperature": 1.0, "min_p": 1.0}]
    plain = {"max_tokens": 8, "ignore_eos": True, "logprobs": 1}
    greedy, *others = llm.generate(["warm"] * (len(ways) + 1), [by(plain), *(by(plain, seed=1, **way) for way in ways)])
    assert all(math.isfinite(item.logprob) and item.top[0][0] == item.token for item in greedy.outputs[0].logprobs)
    for way, other in zip(ways, others, strict=True):
        assert other.outputs == greedy.outputs, way
    assert ask(llm, "warm", by(plain)).outputs == greedy.outputs


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1, "top_k": 5},
    {"temperature": 1.0, "seed": 2},
    {"temperature": 1.0, "seed": 3, "top_k": 10**6},
    {"temperature": 1.5, "seed": 4, "top_p": 0.5},
    {"temperature": 1.5, "seed": 5, "min_p": 0.3},
    {"temperature": 2.0, "seed": 6, "top_k": VOCAB, "top_p": 0.9, "min_p": 0.01, "logprobs": 5},
    {"presence_penalty": 2.0, "frequency_penalty": 1.0, "logprobs": 0},
    {"temperature": 0.7, "seed": 7, "repetition_penalty": 1.5, "logit_bias": {70: 3, 289: -100}},
    {"temperature": 1.0, "seed": 8, "allowed_token_ids": (65, 66, 67, 289), "prompt_logprobs": 3},
    {"temperature": 1.0, "seed": 9, "bad_words": ("a", "bc"), "min_tokens": 8, "n": 3},
    {"temperature": 1.0, "seed": 10, "stop_token_ids": tuple(range(60)), "echo": True},
    {"temperature": 1.0, "seed": 11, "stop": ("e", "o\n")},
]


def mixed(llm: LLM, together: bool) -> list[RequestOutput]:
    prompts = [f"{number} of a mixed batch" for number in range(len(MIXED))]
    params = [by({"max_tokens": 8}, **way) for way in MIXED]
    if together:
        return [replace(told(result), index=0) for result in llm.generate(prompts, params)]
    return [told(ask(llm, prompt, each)) for prompt, each in zip(prompts, params, strict=True)]


def test_each_request_of_a_mixed_batch_is_as_alone(llm: LLM, one: LLM) -> None:
    """C4: requests with and without each filter, penalty, bias and mask run in one batch, each as if it were alone."""
    assert mixed(llm, together=True) == mixed(one, together=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "settings",
    [{"max_num_seqs": 3}, {"max_chunk": 3, "kv_tokens": 80}, {"max_batch_tokens": 5, "prefix_cache": False}],
    ids=str,
)
def test_a_mixed_batch_in_tight_places(model: Path, one: LLM, settings: dict[str, Any], layout: str) -> None:
    """C4: the same where requests wait, are cut into chunks, or are preempted and begun again."""
    with threaded_llm(model, layout, **settings) as llm:
        assert mixed(llm, together=True) == mixed(one, together=False)
        check_idle(llm)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tiny_temperatures_in_narrow_formats(model: Path, dtype: str, layout: str) -> None:
    """C1: no format of the weights makes a temperature near 0 anything but greedy."""
    with threaded_llm(model, layout, dtype=dtype) as llm:
        ways = [{"temperature": heat, "seed": 5} for heat in (0.0, 1e-3, 1e-5, 1e-7)]
        greedy, *others = llm.generate(["cold"] * 4, [by(way, max_tokens=6, logprobs=1) for way in ways])
        assert all(other.outputs == greedy.outputs for other in others)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logprobs": 10**6}, ["logprobs", "at most 20"]),
        ({"prompt_logprobs": 21}, ["prompt_logprobs", "at most 20"]),
        ({"logprobs": -1}, ["logprobs", "-1"]),
        ({"prompt_logprobs": -1}, ["prompt_logprobs", "-1"]),
        ({"logit_bias": {"999999": 5}}, ["logit_bias", "999999", "0 to 289"]),
        ({"logit_bias": {"-1": 5}}, ["logit_bias", "-1"]),
        ({"logit_bias": {-1: 5}}, ["logit_bias", "-1"]),
        ({"logit_bias": {VOCAB: 5}}, ["logit_bias", "290"]),
        ({"logit_bias": {"7": math.nan}}, ["logit_bias", "7"]),
        ({"stop_token_ids": [10**6], "min_tokens": 1}, ["stop_token_ids", "1000000"]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids", "-1"]),
        ({"allowed_token_ids": [5, 10**6]}, ["allowed_token_ids", "1000000"]),
        ({"allowed_token_ids": [-1]}, ["allowed_token_ids", "-1"]),
        ({"allowed_token_ids": []}, ["allowed_token_ids", "empty"]),
        ({"allowed_token_ids": [END], "min_tokens": 1}, ["allowed_token_ids", "min_tokens"]),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_bad_numbers_are_refused(llm: LLM, one: LLM, fields: dict[str, Any], words: list[str]) -> None:
    """C5, C6, C7, C9: a count or token id out of range is refused by name before anything runs; neighbours go on."""
    check_refused(llm, one, "x", fields, *words)


@pytest.mark.parametrize("token", [-1, VOCAB, 10**6, 2**40, 1.5, "a", None, True])
def test_prompts_of_impossible_ids_are_refused(llm: LLM, one: LLM, token: Any) -> None:
    """C7, C9 for the prompt: an id outside the vocabulary is named, whatever its size, and nothing starts."""
    check_refused(llm, one, [5, token], {}, "the prompt", repr(token))


def test_the_last_ids_count(llm: LLM) -> None:
    """C6, C7: the vocabulary's last id, which the last rank holds, can be biased, allowed, drawn and stopped at."""
    last = VOCAB - 1
    result = ask(llm, [last, 5], SamplingParams(logit_bias={last: 100}, max_tokens=3, logprobs=20, prompt_logprobs=20))
    assert result.token_ids == [last] * 3
    assert [item.token for item in result.outputs[0].logprobs] == [last] * 3
    for way in ({"allowed_token_ids": (last,)}, {"logit_bias": {last: 100}}):
        stopped = ask(llm, "x", by({"stop_token_ids": (last,), "temperature": 1.0}, **way))
        assert (stopped.token_ids, stopped.finish_reason) == ([last], "stop")


def test_penalties_count_what_they_say(llm: LLM) -> None:
    """C13: presence and frequency count generated tokens only, repetition the prompt's too, each by its formula.

    The right token of every step is worked out here, from the raw logits that come along.
    """
    token = 88
    ways = [(0.0, 0.0, 1.0), (2.0, 0.0, 1.0), (0.0, 2.0, 1.0), (2.0, 2.0, 1.0), (0.0, 0.0, 10.0), (-2.0, -0.5, 3.0)]
    firsts = []
    for presence, frequency, repetition in ways:
        params = SamplingParams(
            max_tokens=8,
            ignore_eos=True,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
            logit_bias={token: 8},
        )
        prompt = [token] * 20 + [9]
        result = llm.result(llm.submit(prompt, params, want_logits=True))
        line = list(prompt)
        for drawn, raw in zip(result.token_ids, result.outputs[0].logits, strict=True):
            scores = np.frombuffer(raw, np.float32).astype(np.float64)
            scores[token] += 8
            for seen in set(line):
                scores[seen] = scores[seen] / repetition if scores[seen] > 0 else scores[seen] * repetition
            for seen in set(line[len(prompt) :]):
                scores[seen] -= presence + frequency * line[len(prompt) :].count(seen)
            assert drawn == scores.argmax(), (presence, frequency, repetition)
            line.append(drawn)
        firsts.append(result.token_ids[0])
    assert firsts[:4] == [token] * 4  # twenty times in the prompt, and no presence or frequency yet
    assert firsts[4] != token


SEEDED = SamplingParams(max_tokens=10, temperature=1.0, seed=42, ignore_eos=True)


def test_a_seed_is_the_requests_own(llm: LLM, one: LLM) -> None:
    """C14, C16: a seeded request draws the same tokens alone, beside unseeded mates, each time, on every layout."""
    expected = ask(one, "seeded", SEEDED).token_ids
    unseeded = SamplingParams(max_tokens=10, temperature=1.0, ignore_eos=True)
    mates = set()
    for _ in range(4):
        first, seeded, second = llm.generate(["seeded", "seeded", "another"], [unseeded, SEEDED, unseeded])
        assert seeded.token_ids == expected
        mates |= {tuple(first.token_ids), tuple(second.token_ids)}
    assert len(mates) == 8
    assert ask(llm, "seeded", SEEDED).token_ids == expected
    assert (
        len(
            {
                tuple(ask(llm, "seeded", by({"max_tokens": 6, "temperature": 1.0, "seed": 43 + i})).token_ids)
                for i in range(3)
            }
        )
        == 3
    )


def test_no_end_before_min_tokens(llm: LLM) -> None:
    """C19: however likely the end tokens are, exactly min_tokens others come first, then the likeliest end token."""
    wish = {END: 100, ALSO_END: 90}
    first = ask(llm, "go", SamplingParams(min_tokens=4, max_tokens=20, logit_bias=wish))
    assert len(first.token_ids) == 5
    assert not {END, ALSO_END} & set(first.token_ids[:4])
    assert (first.token_ids[4], first.finish_reason) == (END, "stop")
    other = ask(llm, "go", SamplingParams(min_tokens=4, max_tokens=20, logit_bias={END: 90, ALSO_END: 100}))
    assert other.token_ids == [*first.token_ids[:4], ALSO_END]
    named = SamplingParams(
        min_tokens=3, max_tokens=20, logit_bias={END: 80, ALSO_END: 90, 70: 100}, stop_token_ids=(70,)
    )
    assert ask(llm, "go", named).token_ids == [*first.token_ids[:3], 70]
    full = ask(llm, "go", SamplingParams(min_tokens=6, max_tokens=6, logit_bias=wish))
    assert (len(full.token_ids), full.finish_reason) == (6, "length")
    assert full.token_ids[:4] == first.token_ids[:4]
    at_once = ask(llm, "go", SamplingParams(logit_bias=wish))
    assert (at_once.token_ids, at_once.text, at_once.finish_reason) == ([END], "", "stop")


def test_ignored_ends_are_tokens_like_others(llm: LLM) -> None:
    """C19: with ignore_eos an end token is drawn and goes on, also before min_tokens, and a stop id still ends."""
    wish = {END: 100}
    free = ask(llm, "go", SamplingParams(max_tokens=5, min_tokens=2, logit_bias=wish, ignore_eos=True))
    assert (free.token_ids, free.text, free.finish_reason) == ([END] * 5, "", "length")
    named = ask(llm, "go", SamplingParams(max_tokens=5, logit_bias=wish, ignore_eos=True, stop_token_ids=(END,)))
    assert (named.token_ids, named.finish_reason) == ([END], "stop")


@pytest.mark.parametrize("way", [{}, {"logit_bias": {9: 50}}, {"temperature": 1.0, "seed": 3}])
def test_a_dead_end_is_the_requests_own(llm: LLM, one: LLM, way: dict[str, Any]) -> None:
    """C7: where bad words and allowed ids leave nothing to draw, a request ends with an error, its mates go on."""
    alone = ask(one, "mate", SEEDED)
    fields = {"allowed_token_ids": (64, 65), "bad_words": ("aa", "bb", "bab"), "max_tokens": 20, **way}
    stuck, mate = llm.generate(["!", "mate"], [SamplingParams(**fields), SEEDED])
    (part,) = stuck.outputs
    assert part.finish_reason == "error"
    assert "allowed_token_ids, bad_words" in part.error
    assert part.text in ("aba", "ba")
    assert mate.token_ids == alone.token_ids
