"""The feature × layout matrix: each cell of docs/features.md is a test here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardwise.outputs import RequestOutput
from tests.features import COMPILED, DOCS, FEATURES, LAYOUTS, LIMITS, PROMPT, PROPOSERS, Feature, document
from tests.harness import threaded_llm
from tests.limits import limited, num_away
from tests.tiny import save_text_model

Answers = dict[str, RequestOutput]
Run = Callable[[str, str | None], Answers]


def told(answer: RequestOutput) -> RequestOutput:
    """What must be equal everywhere: all but times and what became of drafts."""
    parts = [replace(part, drafts=None) for part in answer.outputs]
    return replace(answer, outputs=parts, index=0, submitted=0.0, first_token=0.0, finished=0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All features in one batch on a layout, with a proposer or none; each combination runs once."""
    path = tmp_path_factory.mktemp("features")
    model, small = save_text_model(path / "model"), save_text_model(path / "small", seed=9)

    @cache
    def answers(layout: str, proposer: str | None) -> Answers:
        speculate = proposer.replace("draft", f"draft={small}") if proposer else None
        settings: dict[str, Any] = {} if speculate is None else {"speculate": f"{speculate},k=3"}
        if proposer in LIMITS:
            plan = limited(model, layout, path, 0.0, kv_tokens=2048)
            assert num_away(plan) > 0
            settings = {"max_memory": plan.engine.max_memory}
        if proposer in COMPILED:
            settings = {"compile": proposer.removeprefix("compile=")}
        with threaded_llm(model, layout, **settings) as llm:
            found = llm.generate([PROMPT] * len(FEATURES), [item.params() for item in FEATURES])
            if proposer not in (None, *LIMITS, *COMPILED):
                assert llm.drafts is not None
                assert llm.drafts.proposed > 0
        return {item.name: told(answer) for item, answer in zip(FEATURES, found, strict=True)}

    return answers


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RequestOutput, RequestOutput]]:
    """Each feature's answer on one device by itself, and the answer without the feature."""
    model = save_text_model(tmp_path_factory.mktemp("alone"))
    found = {}
    with threaded_llm(model, "1") as llm:
        for item in FEATURES:
            (answer,) = llm.generate(PROMPT, item.params())
            (plain,) = llm.generate(PROMPT, item.params(without=True))
            found[item.name] = told(answer), told(plain)
    return found


@pytest.mark.parametrize("item", FEATURES, ids=lambda item: item.name)
def test_a_field_does_what_it_says(item: Feature, alone: dict[str, tuple[RequestOutput, RequestOutput]]) -> None:
    """Guards against a field that is accepted and has no effect, which no comparison of layouts would show."""
    assert item.sign(*alone[item.name])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("item", FEATURES, ids=lambda item: item.name)
def test_a_field_has_one_answer(
    item: Feature, layout: str, run: Run, alone: dict[str, tuple[RequestOutput, RequestOutput]]
) -> None:
    """Guards each feature on each layout, in a batch with all others: the answer is that of the request alone."""
    assert run(layout, None)[item.name] == alone[item.name][0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_a_proposer_changes_no_answer(
    proposer: str, layout: str, run: Run, alone: dict[str, tuple[RequestOutput, RequestOutput]]
) -> None:
    """Guards each proposer on each layout, with every field and grammar: drafts change no token, text or logprob."""
    assert run(layout, proposer) == {name: answer for name, (answer, _) in alone.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_changes_no_answer(
    limit: str, layout: str, run: Run, alone: dict[str, tuple[RequestOutput, RequestOutput]]
) -> None:
    """Guards layers that come from disk on each layout, with every field and grammar."""
    assert run(layout, limit) == {name: answer for name, (answer, _) in alone.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of inductor's own
@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", COMPILED)
def test_compiling_changes_no_answer(
    how: str, layout: str, run: Run, alone: dict[str, tuple[RequestOutput, RequestOutput]]
) -> None:
    """Guards compiled layers on each layout, with every field and grammar."""
    assert run(layout, how) == {name: answer for name, (answer, _) in alone.items()}


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_optimal_acceptance_is_the_same_on_all_layouts(proposer: str, run: Run) -> None:
    """Guards rejection sampling with every field: its tokens depend on the drafts, and these not on the layout."""
    first = run(LAYOUTS[0], f"{proposer},accept=optimal")
    assert all(run(layout, f"{proposer},accept=optimal") == first for layout in LAYOUTS[1:])


def test_the_table_is_up_to_date() -> None:
    """Guards the docs: the table is written from the tests (`python -m tests.features`)."""
    assert Path(DOCS).read_text(encoding="utf-8") == document()
