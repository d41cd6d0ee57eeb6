"""A disk that is full: it is said in one line, and no half file passes for a whole one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import save_text_model

LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
"""No file may grow beyond this any more, as if the disk were full."""
FULL = Path("/dev/full")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


@pytest.mark.skipif(not FULL.exists(), reason="this system has no full disk to offer")
@pytest.mark.parametrize("output", ["file", "stdout"])
def test_results_that_cannot_be_written(model: Path, output: str) -> None:
    """R33: guards against a traceback, and against exit code 0, where results are lost."""
    command = [sys.executable, "-m", "shardwise", "generate", "--model", str(model), "--device", "cpu", "--max-tokens"]
    more = ["--output", str(FULL)] if output == "file" else []
    with FULL.open("w") as full:
        done = subprocess.run([*command, "3", "hi", *more], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "shardwise: the output can't be written: No space left on device"


def test_kernels_without_room(tmp_path: Path) -> None:
    """R33: guards against half a library in the cache, which the next start would load, and against not starting."""
    done = python(
        "import os, torch\n"
        f"os.environ['XDG_CACHE_HOME'] = {str(tmp_path)!r}\n"
        "from shardwise.kernels import build\n"
        "from shardwise.kernels.ops import load_ops\n"
        "build.LEVELS = {}\n"
        f"{LIMIT}"
        "print(load_ops('auto', 'cpu', torch.float32)[1])\n"
    )
    assert done.returncode == 0, done.stderr
    assert "torch kernels" in done.stdout
    assert "failed" in done.stdout or "cannot be compiled" in done.stdout
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_a_conversation_without_room(tmp_path: Path) -> None:
    """R33: guards a saved conversation from the attempt to save it again."""
    file = tmp_path / "talk.json"
    code = (
        "from pathlib import Path\n"
        "from shardwise.conversation import Conversation\n"
        f"file = Path({str(file)!r})\n"
        "talk = Conversation()\n"
        "talk.ask('one')\n"
        "talk.keep('two')\n"
        "talk.save(file)\n"
        f"{LIMIT}"
        "talk.ask('three')\n"
        "talk.keep('four' * 1000)\n"
        "try:\n"
        "    talk.save(file)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    done = python(code)
    assert "can't be written: File too large" in done.stdout, done.stderr
    assert [each.name for each in tmp_path.iterdir()] == [file.name]
    assert len(json.loads(file.read_text())["messages"]) == 2
