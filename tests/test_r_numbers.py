"""The requirements, docs/security.md and the tests against each other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "security.md"
LATER: set[int] = set()
"""Of what there isn't yet."""
REQUIRED = set(range(1, 40))


def named() -> dict[int, set[str]]:
    """Which files' tests say that they hold a requirement."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for number in re.findall(r"\bR(\d+)\b", (ast.get_docstring(node) or "").split(":")[0]):
                    found[int(number)].add(str(path.relative_to(TESTS)))
    return found


def test_every_requirement_has_a_test() -> None:
    """Guards against a requirement that nothing tries: each number stands before the colon of a test's docstring."""
    assert REQUIRED - LATER - named().keys() == set()


def test_the_page_tells_of_them_all() -> None:
    """Guards readers of docs/security.md from rows that are missing, and from tests that are not what it says."""
    rows = re.findall(r"^\| R(\d+) \|.*\| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == sorted(REQUIRED)
    holders = named()
    for number, files in rows:
        if int(number) in LATER:
            assert files == "–"
            continue
        told = re.findall(r"`([^`]+)`", files)
        assert told, number
        for file in told:
            assert file in holders[int(number)], f"R{number} is not named by {file}"


def test_the_page_names_real_options() -> None:
    """Guards operators from options that there aren't."""
    flags = (TESTS.parent / "docs" / "server-flags.md").read_text()
    for option in set(re.findall(r"--[a-z][a-z-]+", PAGE.read_text())):
        assert f"`{option}`" in flags, option
