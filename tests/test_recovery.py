"""Ranks that fail under their requests: nothing accepted is lost, no token differs, and who kills ranks falls alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from shardwise import engine as engine_room
from shardwise.engine import Engine, Output
from shardwise.features import Speculation
from shardwise.params import SamplingParams
from shardwise.replicas import Replicas
from shardwise.runtime.executor import Executor, RankFailure
from shardwise.schedule.sequence import Request
from shardwise.schedule.step import Step, StepResult
from tests.fakes import Letters, ScriptedExecutor, small_scheduler

KILLED = RankFailure(1, "was killed by SIGKILL")
RAISED = RankFailure(1, "ValueError: no", "ValueError", own=True)


def script(request: int, position: int) -> int:
    """Never the same for two requests, nor at two positions of one."""
    return 33 + (request * 7919 + position * 104729) % 5000


class Fragile(ScriptedExecutor):
    """Ranks that fail where ``wound`` says so of the step that is collected; not ready for ``looks`` checks."""

    def __init__(self, wound: Callable[[Step], RankFailure | None], looks: int = 0) -> None:
        super().__init__(script)
        self._wound, self._looks = wound, looks

    @property
    def ready(self) -> bool:  # type: ignore[override]
        return self._looks <= 0

    def check(self) -> None:
        self._looks -= 1

    def collect(self) -> StepResult:
        failure = self._wound(self._due[0])
        if failure is not None:
            self._due.clear()
            raise failure
        return super().collect()


def make(
    wound: Callable[[Step], RankFailure | None],
    restart: Callable[[Executor], Executor] | None = None,
    looks: int = 0,
    **settings: Any,
) -> Engine:
    tight = {"num_blocks": 24, "max_batch_tokens": 32, "max_chunk": 16, "max_num_seqs": 8}
    executor = Fragile(wound)
    again = restart or (lambda failed: failed.close() or Fragile(wound, looks))  # type: ignore[func-returns-value]
    return Engine(executor, small_scheduler(**{**tight, **settings}), Letters(), again)  # type: ignore[arg-type]


def requests(count: int = 12) -> list[Request]:
    rng = random.Random(count)
    return [
        Request(n, tuple(range(40, 40 + rng.randint(1, 60))), SamplingParams(max_tokens=rng.randint(1, 30)), seed=n)
        for n in range(count)
    ]


def run(replicas: Replicas, asked: list[Request]) -> dict[int, tuple[list[int], str | None]]:
    """Tokens and reason of every request; each must end once."""
    found: dict[int, tuple[list[int], str | None]] = {}
    for request in asked:
        replicas.add(request)
    for _ in range(20_000):
        if not replicas.has_work:
            break
        for output in replicas.step():
            tokens, reason = found.setdefault(output.request_id, ([], None))
            assert reason is None, "news after the end"
            found[output.request_id] = tokens + output.token_ids, output.finish_reason
        for engine in replicas.engines:
            engine.scheduler.check()
    assert not replicas.has_work, "no progress"
    assert all(engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks for engine in replicas.engines)
    return found


def right(request: Request) -> tuple[list[int], str]:
    first = len(request.prompt)
    return [script(request.id, first + at) for at in range(request.params.max_tokens)], "length"


@pytest.mark.parametrize("failure", [KILLED, RAISED], ids=["killed", "raised"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("drafts", [None, Speculation("ngram", k=3, min_match=1)], ids=["plain", "ngram"])
def test_every_request_goes_on(failure: RankFailure, depth: int, drafts: Speculation | None) -> None:
    """F1, R28, R40: guards against tokens lost, repeated or changed, whichever steps the ranks fail over."""
    every = 61 if failure.own else 9  # time enough for each request to get a token before it is hit again
    engine = make(
        lambda step: failure if step.number % every == 8 else None,
        looks=2 if failure.own else 0,
        num_in_flight=depth,
        speculation=drafts,
        num_blocks=16,
    )
    asked = requests(40)
    assert run(Replicas([engine]), asked) == {request.id: right(request) for request in asked}
    assert engine.num_failures >= 2
    assert engine.failure is failure


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("failure", [KILLED, RAISED], ids=["killed", "raised"])
def test_a_poisonous_request_falls_alone(failure: RankFailure, depth: int) -> None:
    """R17, F12: guards the batch mates of a request that kills the ranks each time it comes to its 4th token."""
    asked = requests()
    poison = asked[5]
    last = len(poison.prompt) + 3

    def wound(step: Step) -> RankFailure | None:
        struck = any(chunk.sequence == 5 and chunk.start + len(chunk.tokens) > last for chunk in step.chunks)
        return failure if struck else None

    engine = make(wound, num_in_flight=depth)
    found = run(Replicas([engine]), asked)
    tokens, reason = found.pop(5)
    assert (tokens, reason) == (right(poison)[0][:4], "error")
    assert found == {request.id: right(request) for request in asked if request.id != 5}
    assert engine.num_failures == (2 if failure.own else 4)


def test_the_end_of_a_poisonous_request_says_why() -> None:
    """Guards the cause: whoever asked must be told rank and fault."""
    engine = make(lambda step: RAISED)
    engine.add(requests()[0])
    replicas = Replicas([engine])
    replicas._home[0] = engine
    outputs: list[Output] = []
    while replicas.has_work:
        outputs += replicas.step()
    assert [output.finish_reason for output in outputs] == ["error"]
    assert "rank 1: ValueError: no" in outputs[0].error


def test_another_replica_takes_over() -> None:
    """F2: guards against requests that wait for their own replica while another could go on with them."""
    count = 0

    def wound(step: Step) -> RankFailure | None:
        nonlocal count
        count += 1
        return KILLED if count == 6 else None

    restarts: list[Executor] = []

    def never_ready(failed: Executor) -> Executor:
        restarts.append(Fragile(lambda step: None, looks=10**9))
        return restarts[-1]

    first, second = make(wound, never_ready), make(lambda step: None)
    asked = requests()
    assert run(Replicas([first, second]), asked) == {request.id: right(request) for request in asked}
    assert len(restarts) == 1
    assert first.load == second.load == 0


def test_a_lost_engine_leaves_its_requests_to_ranks_that_start() -> None:
    """Guards requests from being forgotten where their engine is given up while the others' ranks are replaced."""
    counts = {"first": 0, "second": 0}

    def wound(name: str, at: int) -> Callable[[Step], RankFailure | None]:
        def of(step: Step) -> RankFailure | None:
            counts[name] += 1
            return KILLED if counts[name] == at else None

        return of

    class Never(Fragile):
        def check(self) -> None:
            self._looks -= 1
            if self._looks < -2:
                raise RankFailure(1, "host 1 is missing", final=True)

        ready = False  # type: ignore[assignment]

    first = make(wound("first", 4), lambda failed: Never(lambda step: None))
    second = make(wound("second", 2), lambda failed: Fragile(lambda step: None, looks=20))
    pair = Replicas([first, second])
    asked = requests()
    assert run(pair, asked) == {request.id: right(request) for request in asked}
    assert first.lost
    assert pair.engines == [second]


def test_ranks_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an endless loop of starts, and against losing what another replica can do."""
    monkeypatch.setattr(engine_room, "PAUSES", (0.0, 0.0, 0.0))
    tries = 0

    def broken(failed: Executor) -> Executor:
        nonlocal tries
        tries += 1
        raise OSError("no memory")

    alone = make(lambda step: KILLED, broken)
    alone.add(requests()[0])
    replicas = Replicas([alone])
    replicas._home[0] = alone
    with pytest.raises(RankFailure, match="can't be started: no memory"):
        run(replicas, [])
    assert tries == 3
    first, second = make(lambda step: KILLED, broken), make(lambda step: None)
    asked = requests()
    pair = Replicas([first, second])
    assert run(pair, asked) == {request.id: right(request) for request in asked}
    assert first.lost
    assert pair.engines == [second]


def test_patience_with_ranks_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards restart_timeout: ranks are started again for so long, however many times that is, and no longer."""
    clock, tries = 0.0, 0
    monkeypatch.setattr(engine_room, "monotonic", lambda: clock)
    monkeypatch.setattr(engine_room, "PAUSES", (0.0, 1.0))

    def broken(failed: Executor) -> Executor:
        raise OSError("no memory")

    engine = Engine(Fragile(lambda step: None), small_scheduler(), Letters(), broken, 10.0)  # type: ignore[arg-type]
    engine.recover(KILLED)
    while not engine.lost:
        with pytest.raises(RankFailure) as failed:
            engine.tend()
        tries += 1
        engine.recover(failed.value)
        clock += 1.0
    assert (tries, clock) == (11, 11.0)


def test_a_request_whose_text_fails_falls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: guards the others against an exception in one request's detokeniser."""
    asked = requests()
    engine = make(lambda step: None)
    spell = Letters.spell
    bad = script(3, len(asked[3].prompt))
    monkeypatch.setattr(Letters, "spell", lambda self, token: 1 // 0 if token == bad else spell(self, token))
    found = run(Replicas([engine]), asked)
    assert found.pop(3) == ([], "error")
    assert found == {request.id: right(request) for request in asked if request.id != 3}


class Angry:
    """A grammar's matcher that raises when it is asked the third time for ``what``."""

    finished, error = False, None

    def __init__(self, what: str) -> None:
        self.what, self.count = what, 0

    def _do(self, what: str) -> None:
        self.count += what == self.what
        if self.count == 3:
            raise ZeroDivisionError("a bug")

    def mask(self) -> bytes:
        self._do("mask")
        return b"\xff" * (0x20000 // 8)

    def advance(self, token: int) -> bool:
        self._do("advance")
        return True

    def rollback(self, count: int) -> None:
        pass


@pytest.mark.parametrize("what", ["mask", "advance"])
@pytest.mark.parametrize("drafts", [None, Speculation("ngram", k=3, min_match=1)], ids=["plain", "ngram"])
def test_a_request_whose_grammar_fails_falls_alone(what: str, drafts: Speculation | None) -> None:
    """R17: guards the others against an exception in one request's grammar, before a step and after it."""
    asked = requests()
    spoilt = Request(3, asked[3].prompt, SamplingParams(max_tokens=20), 0, matcher=Angry(what))
    engine = make(lambda step: None, speculation=drafts)
    found = run(Replicas([engine]), [*asked[:3], spoilt, *asked[4:]])
    tokens, reason = found.pop(3)
    assert reason == "error"
    assert tokens == right(spoilt)[0][: len(tokens)]
    assert found == {request.id: right(request) for request in asked if request.id != 3}
