"""Compiled layers: one answer with and without, few graphs for all batches, and what a backend is told."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise import LLM, SamplingParams
from shardwise.features import Compile, Quantization, Speculation
from shardwise.runtime.compiling import LIMIT
from tests.backends import Recorder
from tests.harness import Job, plan_of, run, threads
from tests.test_equivalence import jobs_for
from tests.tiny import save_llama, save_other, save_text_model


def test_few_graphs_for_all_batches(tmp_path: Path, recorder: Recorder) -> None:
    """Guards against a graph for each batch, and against other bits: of one row, one sequence, many, with drafts."""
    by = Compile("record", options={"depth": 3, "names": ["a", "b"], "whole": True})
    path = save_llama(tmp_path / "model", "groups")
    settings = {"dtype": "float32", "quantize": Quantization(4, 16)}
    plain = plan_of(path, "1", **settings)
    plan = plan_of(path, "tp2", compile=by, speculate=Speculation("self", k=2, layers=1), **settings)
    jobs = jobs_for(plan.source, 6)
    with threads(plain) as executors:
        expected = run(executors, plain, jobs)
    with threads(plan) as executors:
        before = recorder.records()
        for way in ({}, {"max_num_seqs": 1}, {"max_chunk": 7, "max_num_seqs": 3}):
            assert run(executors, plan, jobs, **way) == expected
        assert all(figures["compile_s"] for figures in executors[0].figures)
    assert recorder.records() == before  # all were made before the first step
    assert [each["told"] for each in before] == [{"options": repr(dict(by.options))}] * 3 * 2
    assert all(each["open"] for each in before)


def test_a_graph_for_each_size_is_bounded_and_said(
    tmp_path: Path, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """a11: guards against endless compilation with dynamic off, and against a silent way without graphs."""
    path = save_llama(tmp_path / "model", "groups")
    by = Compile("record", mode="deep", options={"dynamic": False})
    plain, plan = plan_of(path, "1"), plan_of(path, "1", compile=by)
    jobs = jobs_for(plan.source, 6)
    with threads(plain) as executors:
        expected = run(executors, plain, jobs)
    with threads(plan) as executors, caplog.at_level(logging.WARNING, "shardwise"):
        assert run(executors, plan, jobs, max_chunk=7, max_num_seqs=3) == expected
        assert run(executors, plan, jobs) == expected
    assert len(recorder.records()) == LIMIT
    assert all(each["told"] == {"mode": "'deep'"} for each in recorder.records())
    assert not any(each["open"] for each in recorder.records())
    assert sum("layers run uncompiled" in record.message for record in caplog.records) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "backend", "settings"),
    [
        (layout, backend, {"quantize": quantize, "speculate": drafts})
        for layout in ("1", "tp2", "pp2", "tp2.pp2")
        for backend, quantize, drafts in (
            ("eager", None, None),
            ("aot_eager", None, Speculation("self", k=2, dtype="bfloat16")),
            ("inductor", Quantization(8), Speculation("ngram", k=3)),
            ("inductor", Quantization(4, 16), Speculation("self", k=2, layers=1)),
        )
    ],
)
@pytest.mark.usefixtures("recorder")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of inductor's own
def test_one_answer_with_and_without(tmp_path: Path, layout: str, backend: str, settings: dict[str, Any]) -> None:
    """b16, b19: guards the promise: the bits of an uncompiled single device, in tp, pp, with drafts and quantised."""
    path = save_llama(tmp_path / "model", "groups")
    first = {key: value for key, value in settings.items() if key == "quantize"}
    plain = plan_of(path, "1", dtype="float32", **first)
    jobs = jobs_for(plain.source, 8)
    plan = plan_of(path, layout, dtype="float32", compile=Compile(backend), **settings)
    with threads(plain) as executors:
        expected = run(executors, plain, jobs)
    with threads(plan) as executors:
        assert all("compile_s" in figures for each in executors for figures in each.figures)
        assert run(executors, plan, jobs) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("name", ["mixtral", "qwen3", "bloom", "opt", "mistral"])
def test_other_families(tmp_path: Path, name: str) -> None:
    """Guards what they have of their own: experts, norms by head, slopes, biases, windows."""
    path = save_other(tmp_path / "model", name)
    plain, plan = plan_of(path, "1", dtype="float32"), plan_of(path, "tp2", dtype="float32", compile=Compile("eager"))
    jobs = jobs_for(plain.source, 6)
    with threads(plain) as executors:
        expected = run(executors, plain, jobs)
    with threads(plan) as executors:
        assert run(executors, plan, jobs) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("recorder")
def test_a_context_shorter_than_the_batches_that_compile(tmp_path: Path) -> None:
    """Guards against positions beyond the tables of a short context, which native kernels would read."""
    path = save_llama(tmp_path / "model", "groups")
    job = Job([5, 6], SamplingParams(max_tokens=1))
    answers = []
    for by in (None, Compile("eager")):
        plan = plan_of(path, "1", max_model_len=3, compile=by)
        with threads(plan) as executors:
            answers.append(run(executors, plan, [job]))
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_the_torch_twins_are_traced(tmp_path: Path, recorder: Recorder) -> None:
    """Guards what a GPU runs: all but attention is laid open to the compiler, and a few graphs still do."""
    path = save_llama(tmp_path / "model", "groups")
    plain, plan = (plan_of(path, "tp2", kernels="torch", compile=by) for by in (None, Compile("record")))
    jobs = jobs_for(plain.source, 6)
    with threads(plain) as executors:
        expected = run(executors, plain, jobs)
    with threads(plan) as executors:
        assert run(executors, plan, jobs) == expected
    assert len(recorder.records()) == 2 * 5


@pytest.mark.slow
def test_in_real_ranks(tmp_path: Path, recorder: Recorder) -> None:
    """Guards the way to processes: each rank compiles by what was said, also the one that follows a dead one."""
    path = save_text_model(tmp_path / "model")
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(path, "1", device="cpu") as llm:
        expected = llm.generate(["Hello", "a"], params)
    with LLM(path, "tp2", device="cpu", compile='record,options={"depth": 3}') as llm:
        assert [each.token_ids for each in llm.generate(["Hello", "a"], params)] == [
            each.token_ids for each in expected
        ]
        pids = {figures["pid"] for figures in llm.figures[0]}
        assert llm.compile_s is not None
        assert {each["pid"] for each in recorder.records()} == pids
        os.kill(int(llm.figures[0][0]["pid"]), 9)
        assert [each.token_ids for each in llm.generate(["Hello", "a"], params)] == [
            each.token_ids for each in expected
        ]
    assert len({each["pid"] for each in recorder.records()}) == 4
    assert all(each["told"] == {"options": "{'depth': 3}"} for each in recorder.records())


START = """
import sys
from torch._dynamo.utils import counters
from shardwise import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", compile=sys.argv[2]) as llm:
    llm.generate(["Hello", "a"], SamplingParams(max_tokens=4))
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_start_compiles_nothing_anew(tmp_path: Path) -> None:
    """b5: guards starts after the first from its minutes: inductor finds on disk what it has made, and looks for it
    unless it is told not to."""
    path = save_text_model(tmp_path / "model")
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    found = []
    for how in ("inductor", "inductor", 'inductor,options={"fx_graph_cache": false}'):
        done = subprocess.run(
            [sys.executable, "-c", START, str(path), how],
            check=True,
            timeout=250,
            capture_output=True,
            text=True,
            env={**environment, "XDG_CACHE_HOME": str(tmp_path / "home")},
        )
        found.append([int(number) for number in done.stdout.split()])
    assert found[0][0] > 0
    assert found[1][0] == 0
    assert found[1][1] == sum(found[0])
    assert found[2] == [0, 0]
    assert (tmp_path / "home" / "shardwise" / "inductor").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_the_command_tells_what_it_took(tmp_path: Path, recorder: Recorder) -> None:
    """g2: guards the figure beside the time to load, of a real command with its three flags."""
    path = save_text_model(tmp_path / "model")
    flags = ["--compile", "record", "--compile-mode", "deep", "--compile-options", '{"dynamic": null}']
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "generate", "Hello", "--model", str(path), "--json", *flags],
        check=True,
        timeout=250,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(recorder.folder), os.environ.get("PYTHONPATH", "")])},
    )
    timings = json.loads(done.stdout)["timings"]
    assert 0 < timings["compile_s"] <= timings["load_s"]
    assert all(each["told"] == {"mode": "'deep'"} for each in recorder.records())
