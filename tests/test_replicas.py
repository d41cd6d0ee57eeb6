"""Engines that come and go. What becomes of their requests is in test_recovery.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from shardwise.replicas import Replicas
from shardwise.runtime.executor import RankFailure


def engine(**more: Any) -> Any:
    executor = SimpleNamespace(close=lambda: None)
    made = SimpleNamespace(has_work=False, in_flight=False, ready=True, lost=False, load=0, executor=executor, **more)

    def recover(failure: RankFailure) -> list[Any]:
        made.lost = True
        return []

    made.recover = recover
    return made


def die() -> NoReturn:
    raise RankFailure(0, "gone", "", own=True)


def test_engines_leave_when_they_have_no_work() -> None:
    """Guards against an engine that goes with its work, and one that is asked to go and gets no chance to."""
    first, second, third = (engine() for _ in range(3))
    replicas = Replicas([first, second, third])
    third.has_work = True
    assert replicas.retire([second, third], 1) == ([second], [third])
    assert replicas.engines == [first, third]
    third.has_work = False
    assert replicas.retire([third], 1) == ([third], [])
    assert replicas.engines == [first]


@pytest.mark.parametrize("leaves", [False, True])
def test_engines_that_are_lost_make_up_for_those_that_leave(leaves: bool) -> None:
    """Guards against no engine at all, where one is lost while another is to go."""
    first, second = engine(), engine()
    replicas = Replicas([first, second])
    second.has_work = True
    assert replicas.retire([second], 1) == ([], [second])
    replicas._guard(second if leaves else first, die)
    second.has_work = False
    assert replicas.retire([second], 1) == ([second] if leaves else [], [])
    assert replicas.engines == [first if leaves else second]
    assert not replicas._retiring
