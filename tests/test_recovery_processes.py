"""Real ranks that are killed, stopped or out of memory under an LLM: the tokens are those of a run without faults."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shardwise import LLM, SamplingParams
from shardwise.runtime import processes
from shardwise.runtime.processes import ProcessExecutor
from tests.tiny import save_text_model

PROMPTS = ["once", "upon a time", "there was", "a town by the sea where it rained all day"]
BY = [SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.9 * (n % 2), seed=n) for n in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["1", "tp2", "pp2", "dp2"])
def llm(request: pytest.FixtureRequest, model: Path) -> Iterator[LLM]:
    with LLM(model, request.param, threads=1, kv_tokens=2048, isolate=True) as llm:
        yield llm


def executors(llm: LLM) -> list[ProcessExecutor]:
    """With their ranks up and their pids known, whatever came before."""
    deadline = time.monotonic() + 20
    while not all(
        engine.ready and all(process.pid for process in engine.executor._everyone())  # type: ignore[attr-defined]
        for engine in llm._replicas.engines
    ):
        assert time.monotonic() < deadline
        llm._replicas.step()
    return [engine.executor for engine in llm._replicas.engines]  # type: ignore[misc]


def failures(llm: LLM, expected: int) -> int:
    """How often replicas have failed, once that is as often as expected: a death may be felt after the last answer."""
    deadline = time.monotonic() + 20
    while (found := sum(engine.num_failures for engine in llm._replicas.engines)) < expected:
        assert time.monotonic() < deadline, (found, expected)
        llm._replicas.step()
        time.sleep(0.005)
    return found


def with_fault(llm: LLM, after: int, fault: object) -> list[list[int]]:
    """The tokens of all prompts, with ``fault()`` once the first has so many."""
    numbers = [llm.submit(prompt, by) for prompt, by in zip(PROMPTS, BY, strict=True)]
    tokens: list[int] = []
    for piece in llm.pieces(numbers[0]):
        struck = len(tokens) < after <= len(tokens) + len(piece.token_ids)
        tokens += piece.token_ids
        if struck:
            fault()  # type: ignore[operator]
    return [tokens, *(llm.result(number).token_ids for number in numbers[1:])]


@pytest.mark.parametrize("victim", ["rank", "holder", "fork server"])
def test_a_killed_process_costs_no_token(llm: LLM, victim: str) -> None:
    """F1, F4, C79, C81: a rank, the holder of its weights, or what both are forked from dies under four requests."""
    right = [output.token_ids for output in llm.generate(PROMPTS, BY)]
    before = failures(llm, 0)

    def kill() -> None:
        for executor in executors(llm):
            rank, holder = executor._ranks[-1], executor._holders[-1]
            pid = {"rank": rank.pid, "holder": holder.pid, "fork server": psutil.Process(holder.pid).ppid()}[victim]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    assert with_fault(llm, 7, kill) == right
    expected = before + len(llm._replicas.engines)
    assert failures(llm, expected) == expected
    assert [output.token_ids for output in llm.generate(PROMPTS, BY)] == right


def test_weights_outlive_ranks(llm: LLM) -> None:
    """Guards the quick recovery: the next rank is forked from the process that holds the weights already."""
    holders = [[holder.pid for holder in executor._holders] for executor in executors(llm)]
    ranks = [[rank.pid for rank in executor._ranks] for executor in executors(llm)]

    def kill() -> None:
        for pid in (pid for pids in ranks for pid in pids):
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    before = failures(llm, 0)
    with_fault(llm, 5, kill)
    failures(llm, before + len(ranks))
    assert [[holder.pid for holder in executor._holders] for executor in executors(llm)] == holders
    assert not {rank.pid for executor in executors(llm) for rank in executor._ranks} & {pid for p in ranks for pid in p}


def test_a_stopped_rank_is_replaced(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """F5, R29: a rank that hangs in a SIGSTOP is fenced; one that is let go in time is not."""
    monkeypatch.setattr(processes, "STOPPED", 0.3)
    right = [output.token_ids for output in llm.generate(PROMPTS, BY)]
    before = failures(llm, 0)

    def pause() -> None:
        pid = executors(llm)[0]._ranks[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGCONT)

    assert with_fault(llm, 5, pause) == right
    assert failures(llm, before) == before

    def stop() -> None:
        pid = executors(llm)[0]._ranks[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

    assert with_fault(llm, 5, stop) == right
    assert failures(llm, before + 1) == before + 1


def test_ranks_without_memory(llm: LLM) -> None:
    """F14: an allocation that fails in a rank costs no token, and is told as what it is."""
    right = [output.token_ids for output in llm.generate(PROMPTS, BY)]
    before = failures(llm, 0)

    def starve() -> None:
        pid = executors(llm)[0]._ranks[-1].pid
        assert pid is not None
        resource.prlimit(pid, resource.RLIMIT_AS, (2**20, 2**20))  # any allocation fails; the next rank is free again

    assert with_fault(llm, 3, starve) == right
    if sum(engine.num_failures for engine in llm._replicas.engines) == before:
        long = SamplingParams(max_tokens=1)
        assert llm.generate("x" * 200, long)[0].finish_reason == "length"  # needs more than there was in stock
    assert sum(engine.num_failures for engine in llm._replicas.engines) == before + 1
    assert any("MemoryError: out of memory" in str(engine.failure) for engine in llm._replicas.engines)
