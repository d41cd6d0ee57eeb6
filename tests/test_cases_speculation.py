"""The cases of ../shared/cases.md about drafts: they change when tokens come, and never which."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

from shardwise.llm import LLM
from shardwise.outputs import CompletionOutput
from shardwise.params import SamplingParams
from tests.cases import LAYOUTS, ask, by, check_idle, streamed
from tests.harness import threaded_llm
from tests.tiny import save_text_model

PROPOSERS = (
    "ngram,k=4",
    "ngram,min_match=1",
    "draft=SELF,k=3",
    "draft=OTHER,k=3",
    "draft=OTHER",
    "self,layers=2,k=2",
    "self,dtype=bfloat16",
)
"""SELF drafts with the model itself, so that all is taken, and OTHER with another one, so that hardly anything is."""
PROMPTS = ["one two three one two three one two", "x", "ababababababababababab"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"SELF": save_text_model(root / "model"), "OTHER": save_text_model(root / "other", seed=9)}


@pytest.fixture(scope="module")
def one(models: dict[str, Path]) -> Iterator[LLM]:
    with threaded_llm(models["SELF"]) as llm:
        yield llm


def speculating(models: dict[str, Path], layout: str, proposer: str, **settings: Any) -> Any:
    for name, path in models.items():
        proposer = proposer.replace(name, str(path))
    return threaded_llm(models["SELF"], layout, speculate=proposer, **settings)


def parts(llm: LLM, prompts: list[str], params: SamplingParams) -> list[CompletionOutput]:
    """Every continuation, without what became of its drafts."""
    found = [part for result in llm.generate(prompts, params) for part in result.outputs]
    for part in found:
        part.drafts = None
    return found


GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1)
SEEDED = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1, temperature=0.8, top_k=40, seed=42)


@pytest.mark.parametrize("layout", [*LAYOUTS, "dp2"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_drafts_change_no_token(models: dict[str, Path], one: LLM, proposer: str, layout: str) -> None:
    """C67, C17: greedy and seeded tokens, texts and log-probabilities are those of plain decoding, time after time."""
    greedy, seeded = parts(one, PROMPTS, GREEDY), parts(one, PROMPTS, SEEDED)
    with speculating(models, layout, proposer) as llm:
        assert parts(llm, PROMPTS, GREEDY) == greedy
        for _ in range(2):
            assert parts(llm, PROMPTS, SEEDED) == seeded
        assert streamed(llm, PROMPTS[0], GREEDY).whole() == (greedy[0].text, greedy[0].token_ids, "length")
        check_idle(llm)
        assert llm.drafts is not None
        assert llm.drafts.proposed > 0 or ",k=" not in proposer  # without k, none need be worth their time
        if proposer == "draft=SELF,k=3":
            assert llm.drafts.accepted == llm.drafts.proposed


@pytest.mark.parametrize("layout", [*LAYOUTS, "dp2"])
@pytest.mark.parametrize("proposer", ["ngram,k=4", "draft=OTHER,k=3", "self,dtype=bfloat16,k=3"])
def test_rejection_sampling_has_seeds_too(models: dict[str, Path], one: LLM, proposer: str, layout: str) -> None:
    """C67, C17: with accept=optimal greedy tokens are those of plain decoding, and a seed gives the same each time."""
    greedy = parts(one, PROMPTS, GREEDY)
    with speculating(models, "1", f"{proposer},accept=optimal") as llm:
        seeded = parts(llm, PROMPTS, SEEDED)
    with speculating(models, layout, f"{proposer},accept=optimal") as llm:
        assert parts(llm, PROMPTS, GREEDY) == greedy
        for _ in range(2):
            assert parts(llm, PROMPTS, SEEDED) == seeded
        other = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, top_k=40, seed=43)
        assert ask(llm, PROMPTS[0], other).token_ids != seeded[0].token_ids


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("proposer", ["ngram,k=2", "self,dtype=bfloat16,k=4,accept=optimal"])
def test_ranks_agree_without_a_seed(models: dict[str, Path], proposer: str, layout: str) -> None:
    """C18: 200 unseeded tokens with drafts come to an end, and every rank's KV is that of the tokens that came.

    For the whole text, read again as a prompt, has the very same log-probabilities.
    """
    params = SamplingParams(max_tokens=200, temperature=1.0, ignore_eos=True, logprobs=2)
    with speculating(models, layout, proposer) as llm:
        first, second = llm.generate(["agree", "agree"], params)
        assert first.token_ids != second.token_ids
        for result in (first, second):
            assert len(result.token_ids) == 200
            again = ask(llm, [*result.prompt_token_ids, *result.token_ids], by({"max_tokens": 0, "prompt_logprobs": 2}))
            assert again.prompt_logprobs[len(result.prompt_token_ids) - 1 :] == result.outputs[0].logprobs


SCHEMA = {
    "type": "array",
    "minItems": 3,
    "maxItems": 4,
    "items": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    },
}
JSON = SamplingParams(max_tokens=240, temperature=1.0, seed=8, json_schema=SCHEMA)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("proposer", ["ngram,k=4", "ngram,k=2,accept=optimal", "self,dtype=bfloat16,k=3"])
def test_drafts_leave_json_valid(models: dict[str, Path], one: LLM, proposer: str, layout: str) -> None:
    """C70: with a schema the text is JSON of it, whole, and if coupled that of plain decoding, drafts taken or not."""
    prompts = ['[{"colour": "red", "count": 1}, {"colour": "red", "count": 1}]: ', "?"]
    plain = parts(one, prompts, JSON)
    with speculating(models, layout, proposer) as llm:
        found = parts(llm, prompts, JSON)
        assert llm.drafts is not None
        assert llm.drafts.accepted > 0
    for part in found:
        assert part.finish_reason == "stop"
        validate(json.loads(part.text), SCHEMA)
    if "optimal" not in proposer:
        assert found == plain
