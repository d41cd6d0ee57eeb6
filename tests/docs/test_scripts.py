"""Commands that pages tell of and don't run themselves: the scripts, and the benches with little to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, commands_of
from tests.docs.parsing import check
from tests.server.dictation import save_chat_model

BENCHES = sorted(path for path in (ROOT / "bench").glob("*.py") if "add_argument" in path.read_text(encoding="utf-8"))
SMALL = {
    "kernels": ("--only", "small", "--rows", "1", "--json"),
    "speculate": (
        *("--model", "MODEL", "--dtypes", "float32", "--proposers", "ngram", "--batches", "1", "--rounds", "1"),
        *("--new", "8", "--json"),
    ),
}
"""Benches that can also be run in seconds."""


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_bench_is_on_its_page() -> None:
    """Guards readers from a bench that nothing tells of."""
    page = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    told = {name for pair in re.findall(r"bench[./](\w+)(?:\.py)?`|bench[./](\w+)", page) for name in pair if name}
    assert {path.stem for path in BENCHES} <= told


@pytest.mark.slow
@pytest.mark.parametrize("bench", BENCHES, ids=lambda path: path.stem)
def test_benches_start(bench: Path, tmp_path: Path) -> None:
    """Guards figures that nobody could measure again: each bench still imports what it needs; two of them are run."""
    assert "--json" in run(sys.executable, "-m", f"bench.{bench.stem}", "--help", folder=tmp_path)
    if bench.stem in SMALL:
        save_chat_model(tmp_path / "MODEL")  # whose context is long enough
        assert json.loads(run(sys.executable, "-m", f"bench.{bench.stem}", *SMALL[bench.stem], folder=tmp_path))


def test_scripts_are_shell_and_tell_of_real_commands() -> None:
    """Guards the four scripts: bash reads them, and the commands that the demo tells of are there."""
    for script in ("env", "demo", "check", "test"):
        run("bash", "-n", ROOT / "scripts" / script, folder=ROOT)
    told = re.findall(r"^\s*\.venv/bin/(shardwise .*)$", (ROOT / "scripts" / "demo").read_text(), re.MULTILINE)
    assert len(told) == 4
    for command in told:
        check(commands_of(command.replace("…", "x").replace("$question", "x"))[0])


@pytest.mark.slow
def test_the_demo_answers(tmp_path: Path) -> None:
    """Guards the first command of README. Where .venv is up to date it fetches nothing."""
    sources = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt", "scripts/env"))
    wanted = subprocess.run(["cksum"], input=sources, capture_output=True, check=True).stdout.decode().strip()
    stamp = ROOT / ".venv" / ".made-for"
    if not stamp.exists() or stamp.read_text().strip() != wanted:
        pytest.skip("scripts/env would fetch packages: .venv is another one's, or out of date")
    assert "shardwise verify" in run(ROOT / "scripts" / "demo", "Say hello.", folder=tmp_path)
