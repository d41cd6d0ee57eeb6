"""docs/seeds.md: what the four systems do that this one grew from, each with an answer here and a test of it."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "seeds.md"
REQUIRED = {
    "a": {*range(1, 16)} - {10},
    "b": {*range(1, 32)} - {30},
    "g": {*range(1, 12)} - {7, 10},
    "c": {*range(1, 35)} - {24, 26, 28, 29, 31, 32},
    "d": {*range(1, 19)} - {17},
    "": {*range(1, 41)},
}
"""What has to be there, or done better, for the four systems to be called implemented; all other rows are extra."""
ROW = re.compile(r"^\| ([abcdg]?\d+) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
ROWS = [match.groups() for match in ROW.finditer(PAGE.read_text(encoding="utf-8"))]


@cache
def functions(path: Path) -> set[str]:
    """The functions that a file of tests defines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_row_is_there_once() -> None:
    """Guards the claim that all four are implemented: a row that must be there is, and none is told twice."""
    told = [row[0] for row in ROWS]
    assert len(told) == len(set(told))
    wanted = {f"{system}{number}" for system, numbers in REQUIRED.items() for number in numbers}
    assert not wanted - set(told)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_is_done_and_guarded(row: tuple[str, str, str, str]) -> None:
    """Guards readers from a row that is promised and not done, and from tests, modules and files that don't exist."""
    name, asked, here, guards = row
    assert "not yet" not in (here + guards).lower(), f"{name} ({asked}): {here} · {guards}"
    tests = TEST.findall(guards)
    assert tests, f"{name}: nothing guards it"
    for file, function in tests:
        path = ROOT / "tests" / file
        assert path.is_file(), f"{name}: there is no tests/{file}"
        assert function.startswith("test_")
        assert function in functions(path), f"{name}: {file} has no {function}"
    for dotted in re.findall(r"`(shardwise(?:\.\w+)+)", here):
        assert exists(dotted), f"{name}: there is no {dotted}"
    for file in re.findall(r"`((?:examples|bench|docs|shardwise)/[\w./-]+)`", here):
        assert (ROOT / file).exists(), f"{name}: there is no {file}"


def exists(dotted: str) -> bool:
    """Whether it is a module, or a name in one; modules that want an extra are only looked for."""
    parent, _, last = dotted.rpartition(".")
    try:
        if importlib.util.find_spec(dotted) is not None:
            return True
    except ModuleNotFoundError:
        pass
    spec = importlib.util.find_spec(parent)
    if spec is None or spec.origin is None:
        return False
    return bool(re.search(rf"\b{last}\b", Path(spec.origin).read_text(encoding="utf-8")))
