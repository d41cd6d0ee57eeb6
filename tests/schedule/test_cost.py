"""The cost of steps: learnt from little, followed through change, unmoved by noise."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.schedule.cost import Cost


def at(cost: Cost, rows: int) -> float:
    return cost.expected.fixed + cost.expected.row * rows


@pytest.mark.parametrize(("fixed", "row"), [(1.0, 0.001), (0.01, 0.0005), (20.0, 4.0), (0.001, 0.001)])
def test_learns_a_line(fixed: float, row: float) -> None:
    """Guards the model of costs: in any unit of time, with noise, foretelling sizes that were and were not seen."""
    source = random.Random(0)
    cost = Cost()
    for step in range(60):
        rows = (1, 4, 2, 6)[step % 4]
        cost.observe(rows, (fixed + row * rows) * math.exp(source.gauss(0, 0.1)))
    for rows in (1, 4, 9):
        assert at(cost, rows) == pytest.approx(fixed + row * rows, rel=0.2)
    low, high = cost.plausible
    assert low.row / low.fixed <= row / fixed * 1.5
    assert high.row / high.fixed >= row / fixed / 1.5


@given(st.integers(1, 4000), st.floats(1e-6, 1e3), st.integers(1, 40))
def test_one_size_only(rows: int, seconds: float, count: int) -> None:
    """Guards against a slope out of nothing: it stays between that of a flat and that of a proportional cost."""
    cost = Cost()
    for _ in range(count):
        cost.observe(rows, seconds)
    assert at(cost, rows) == pytest.approx(seconds)
    assert cost.expected.fixed > 0
    assert cost.expected.row > 0
    assert at(cost, 4 * rows) <= 4.001 * seconds
    low, high = cost.plausible
    assert low.row / low.fixed < 0.001
    assert high.row / high.fixed > 1


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 1e4)), min_size=1, max_size=60))
def test_any_durations(steps: list[tuple[int, float]]) -> None:
    """Guards against zero, negative, infinite or undefined costs, whatever durations come in."""
    cost = Cost()
    for rows, seconds in steps:
        cost.observe(rows, seconds)
        for line in (cost.expected, *cost.plausible):
            assert 0 < line.fixed < math.inf
            assert 0 < line.row < math.inf


def test_slow_steps_that_come_alone() -> None:
    """Guards against a neighbour's bursts: of ten times as slow steps one in ten changes next to nothing."""
    source = random.Random(1)
    cost = Cost()
    for step in range(200):
        rows = (1, 4)[step % 2]
        cost.observe(rows, (1 + 0.1 * rows) * (10 if source.random() < 0.1 else 1))
        if step > 20:
            assert at(cost, 1) == pytest.approx(1.1, rel=0.1)
            assert at(cost, 4) == pytest.approx(1.4, rel=0.1)


def test_the_first_step_is_not_typical() -> None:
    """Guards the start: caches and kernels warm up in the first step, which must not be believed for long."""
    cost = Cost()
    cost.observe(4, 50.0)
    for rows in (1, 4, 1, 4):
        cost.observe(rows, 1 + 0.1 * rows)
    assert at(cost, 1) == pytest.approx(1.1, rel=0.15)
    assert at(cost, 4) == pytest.approx(1.4, rel=0.15)


def test_all_costs_change_together() -> None:
    """Guards against yesterday's speed: a machine three times as slow is followed within some steps, and what is known
    of the sizes that are not in use is not lost with it."""
    cost = Cost()
    for step in range(40):
        rows = (1, 4)[step % 2]
        cost.observe(rows, 1 + 0.5 * rows)
    for _ in range(1000):
        cost.observe(4, 3 * (1 + 0.5 * 4))
    assert at(cost, 4) == pytest.approx(9, rel=0.05)
    assert at(cost, 1) == pytest.approx(4.5, rel=0.15)
    for _ in range(10):
        cost.observe(4, 3.0)
    assert at(cost, 4) == pytest.approx(3, rel=0.05)


def test_a_wrong_ratio_is_unlearnt() -> None:
    """Guards against certainty for ever: when rows become cheap, a few dozen steps of several sizes show it."""
    cost = Cost()
    for step in range(200):
        rows = (1, 4)[step % 2]
        cost.observe(rows, 0.5 + 0.5 * rows)
    for step in range(40):
        rows = (1, 4)[step % 2]
        cost.observe(rows, 1 + 0.001 * rows)
    assert cost.expected.row / cost.expected.fixed < 0.05
