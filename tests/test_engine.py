"""The loop of one replica and the choice among several, with scripted ranks: no torch, no processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardwise.engine import Engine, Output
from shardwise.features import Speculation
from shardwise.params import SamplingParams
from shardwise.replicas import Replicas
from shardwise.runtime.executor import RankFailure
from shardwise.schedule.sequence import Request
from tests.fakes import Letters, ScriptedExecutor, small_scheduler

PROMPT = (80, 81, 82)


def spelled(text: str) -> Callable[[int, int], int]:
    """A script that continues any prompt of PROMPT's length with ``text`` and then end tokens."""
    return lambda request, position: ord((text + "\0" * 100)[position - len(PROMPT)])


def make(script: Callable[[int, int], int], **settings: Any) -> Engine:
    fail_at = settings.pop("fail_at", None)
    return Engine(ScriptedExecutor(script, fail_at), small_scheduler(**settings), Letters())  # type: ignore[arg-type]


def ask(number: int = 0, prompt: tuple[int, ...] = PROMPT, **params: Any) -> Request:
    return Request(number, prompt, SamplingParams(**{"max_tokens": 50, **params}), seed=0)


def drain(engine: Engine | Replicas) -> dict[int, list[Output]]:
    found: dict[int, list[Output]] = {}
    for _ in range(1000):
        if not engine.has_work:
            return found
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    raise AssertionError("no progress")


def text_of(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs)


def test_text_ends_at_the_end_token() -> None:
    """Guards the end of a request: the end token is reported, its text is not, and nothing follows it."""
    engine = make(spelled("hello"))
    engine.add(ask())
    outputs = drain(engine)[0]
    assert text_of(outputs) == "hello"
    assert [token for output in outputs for token in output.token_ids] == [*map(ord, "hello"), 0]
    assert [output.finish_reason for output in outputs] == [None] * 5 + ["stop"]
    assert not engine.in_flight


@pytest.mark.parametrize("depth", [1, 3])
def test_stop_strings_are_held_back(depth: int) -> None:
    """C23, C24: what may become a stop string is held back, and let go when it does not; ids stay complete."""
    engine = make(spelled("say ST or STOP now"), num_in_flight=depth)
    engine.add(ask(stop=("STOP", "never")))
    outputs = drain(engine)[0]
    assert text_of(outputs) == "say ST or "
    shown = ""
    for output in outputs:
        shown += output.text
        assert "say ST or ".startswith(shown)
    assert outputs[-1].finish_reason == "stop"
    assert [token for output in outputs for token in output.token_ids] == [*map(ord, "say ST or STOP")]
    engine.scheduler.check()


def test_a_stop_string_within_accepted_drafts_ends_text_and_ids() -> None:
    """C23, C24: a step may bring many tokens at once; none after the one that completes the stop string is reported."""
    engine = make(spelled("abcdabcdabcdabcd" * 3), speculation=Speculation("ngram", k=8))
    engine.add(ask(stop=("dabcda",)))
    outputs = drain(engine)[0]
    assert any(chunk.drafts for step in engine.executor.steps for chunk in step.chunks)  # type: ignore[attr-defined]
    assert text_of(outputs) == "abc"
    assert [token for output in outputs for token in output.token_ids] == [*map(ord, "abcdabcda")]
    assert outputs[-1].finish_reason == "stop"
    engine.scheduler.check()


@pytest.mark.parametrize("drafts", [0, 3])
def test_tokens_come_with_the_piece_that_holds_their_text(drafts: int) -> None:
    """C24: each piece's text is that of its ids, while part of the text is held back for a stop string."""
    speculation = Speculation("ngram", k=drafts) if drafts else None
    engine = make(spelled("STO STO STO STO end"), speculation=speculation)
    engine.add(ask(stop=("STOP",)))
    outputs = drain(engine)[0]
    assert text_of(outputs) == "STO STO STO STO end"
    for output in outputs[:-1]:
        assert output.text == "".join(map(chr, output.token_ids))


def test_held_text_comes_with_the_end() -> None:
    """Guards against losing the last characters when a request ends while they are held back."""
    engine = make(spelled("it is ST"))
    engine.add(ask(stop=("STOP",)))
    assert text_of(drain(engine)[0]) == "it is ST"
    engine.add(ask(1, stop=("STOP",), max_tokens=7))
    outputs = drain(engine)[1]
    assert text_of(outputs) == "it is S"
    assert outputs[-1].finish_reason == "length"


def test_abort_at_any_time() -> None:
    """Guards against news of an aborted request, blocks it keeps, or a step whose late result upsets the loop."""
    engine = make(spelled("x" * 60), num_in_flight=2)
    for number in range(4):
        engine.add(ask(number))
    engine.fill()
    engine.abort(1)
    engine.abort(1)
    engine.abort(77)
    found = drain(engine)
    assert set(found) == {0, 2, 3}
    assert all(outputs[-1].finish_reason == "length" for outputs in found.values())
    engine.abort(0)
    assert engine.load == 0


def test_a_refused_request_leaves_no_trace() -> None:
    """Guards against a request that was refused and still counts as work."""
    engine = make(spelled("x"))
    with pytest.raises(ValueError, match="empty"):
        engine.add(ask(prompt=()))
    assert not engine.has_work
    assert engine.load == 0


def test_a_failed_rank_is_raised() -> None:
    """Guards against a dead rank that is taken for a slow one."""
    engine = make(spelled("hello"), fail_at=2)
    engine.add(ask())
    with pytest.raises(RankFailure, match="rank 0: was killed"):
        drain(engine)


def test_replicas_share_the_load() -> None:
    """Guards data parallelism: each request runs once, on the replica with least to do, and all replicas work."""
    engines = [make(spelled("abc" * number)) for number in (3, 3, 3)]
    replicas = Replicas(engines)
    for number in range(9):
        replicas.add(ask(number, (80 + number, 1, 2)))
    assert len({engine.load for engine in engines}) == 1
    found = drain(replicas)
    assert sorted(found) == list(range(9))
    assert all(text_of(outputs) == "abcabcabc" for outputs in found.values())
    replicas.close()
    assert all(engine.executor.closed for engine in engines)  # type: ignore[attr-defined]


def test_a_prefix_draws_its_request() -> None:
    """Guards prefix-aware routing: a long cached beginning outweighs a little more load elsewhere."""
    engines = [make(lambda request, position: 65), make(lambda request, position: 65)]
    replicas = Replicas(engines)
    long = tuple(range(80, 180))
    replicas.add(ask(0, (1, 2, 3), max_tokens=1))
    replicas.add(ask(1, long, max_tokens=2))
    home = engines[1]
    drain(replicas)
    replicas.add(ask(2, (*long, 7), max_tokens=2))
    assert home.load > 0
    drain(replicas)
    replicas.close()
