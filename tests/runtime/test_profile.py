"""Traces of ranks: one file each, in which steps, kernels and exchanges have their names; the tokens are the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardwise import LLM, SamplingParams
from shardwise.runtime import profile
from tests.test_cli import shardwise
from tests.tiny import save_text_model

PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


def run(model: Path, layout: str, traces: Path | None, **settings: object) -> list[list[int]]:
    told = {"profile": str(traces)} if traces is not None else {}
    with LLM(model, layout=layout, threads=1, kv_tokens=2048, **told, **settings) as llm:
        return [each.outputs[0].token_ids for each in llm.generate(["one", "two"], PARAMS)]


def names(path: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}


@pytest.mark.parametrize("layout", ["1", "tp2.pp2", "dp2"])
def test_each_rank_has_its_trace(model: Path, tmp_path: Path, layout: str) -> None:
    """Guards against traces that are missing, cut off when ranks end, or of torch's own operations alone."""
    assert run(model, layout, tmp_path / "traces") == run(model, layout, None)
    files = {path.name: names(path) for path in (tmp_path / "traces").iterdir()}
    dp, tp, pp = {"1": (1, 1, 1), "tp2.pp2": (1, 2, 2), "dp2": (2, 1, 1)}[layout]
    assert set(files) == {f"dp{d}.pp{p}.tp{t}.json" for d in range(dp) for p in range(pp) for t in range(tp)}
    for found in files.values():
        assert {"ops.linear", "ops.rms_norm"} <= found
        assert any(re.fullmatch(r"step \d+: \d+ tokens", name) for name in found)
        assert tp == 1 or "tp.reduce" in found
        assert any(name in found for name in ("pp.send", "pp.recv")) == (pp > 1)


def test_the_first_steps_of_many(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory, and whoever opens the trace: a long run makes no longer one. An earlier trace is replaced."""
    monkeypatch.setattr(profile, "STEPS", 3)
    for _ in range(2):
        run(model, "1", tmp_path, speculate="ngram")
        (file,) = tmp_path.iterdir()
        assert sum(name.startswith("step ") for name in names(file)) == 3


def test_generate_profile(model: Path, tmp_path: Path) -> None:
    """Guards the option; and a directory that can't be written to is refused before weights are read."""
    shardwise("generate", "-m", model, "hello", "--max-tokens", "2", "--profile", tmp_path / "traces")
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["dp0.pp0.tp0.json"]
    (tmp_path / "file").touch()
    done = shardwise("generate", "-m", model, "hello", "--profile", tmp_path / "file" / "traces", code=2)
    assert "nothing can be written there" in done.stderr
