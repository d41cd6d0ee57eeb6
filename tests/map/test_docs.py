"""What docs/map.md says, tried: its Python, its commands, its names."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from shardwise import factories
from shardwise.cli import app
from tests.tiny import save_text_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "map.md").read_text()
COMMANDS = re.findall(r"```sh\n(.*?)\n```", PAGE, re.DOTALL)
WORDS = ["one", "three", "seventeen"]


def shell(command: str, folder: Path) -> str:
    """Run it as a reader would, with the environment's programs."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, text=True, timeout=200, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader has done what the page says."""
    (factory,) = re.findall(r"```python\n(# sizes.py.*?)```", PAGE, re.DOTALL)
    (tmp_path / "sizes.py").write_text(factory)
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(word) + "\n" for word in WORDS))
    return tmp_path


def test_the_page_has_the_commands_that_are_tried() -> None:
    """Guards commands from being added to the page and not to these tests."""
    marks = ["--set unit=8", "< words.jsonl", "torchrun", "factories:embeddings"]
    assert len(COMMANDS) == len(marks)
    assert all(mark in command for mark, command in zip(marks, COMMANDS, strict=True))


def test_the_commands_of_the_page_run(folder: Path) -> None:
    """Guards readers from a quickstart that fails."""
    shell(COMMANDS[0], folder)
    rows = [json.loads(line) for line in (folder / "sizes.jsonl").read_text().splitlines()]
    assert rows == [{"index": at, "output": {"size": 8 * len(word)}} for at, word in enumerate(WORDS)]
    shell(COMMANDS[1], folder)
    assert len((folder / "sizes.txt").read_text().splitlines()) == 3
    (source,) = re.findall(r"```python\n(import shardwise.*?)```", PAGE, re.DOTALL)
    (folder / "run.py").write_text(source)
    assert shell(f"{sys.executable} run.py", folder) == "0 {'size': 24} None\n1 {'size': 40} None\n"


@pytest.mark.slow
def test_the_long_commands_of_the_page_run(folder: Path) -> None:
    """Guards the same for what imports torch."""
    shell(COMMANDS[2], folder)
    assert len((folder / "sizes.jsonl").read_text().splitlines()) == 3
    save_text_model(folder / "MODEL")
    shell(COMMANDS[3], folder)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert {len(row["output"]["embedding"]) for row in rows} == {48}


def test_the_names_of_the_page_are_real() -> None:
    """Guards readers from an option or a factory that there isn't."""
    options = {name for each in get_command(app).commands["map"].params for name in each.opts}  # type: ignore[attr-defined]
    told = set(re.findall(r"--[a-z][a-z-]+", PAGE)) - {"--standalone", "--nproc-per-node"}
    assert told <= options
    assert set(re.findall(r"shardwise\.factories:(\w+)", PAGE)) == set(factories.__all__)
    assert all(inspect.isfunction(getattr(factories, name)) for name in factories.__all__)
