"""Fleets on a local Ray, in processes of their own: Serve under load and faults, Data with bad rows, the examples."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise.params import SamplingParams
from tests.harness import threaded_llm
from tests.integrations.torchserve import free_ports, save_long_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
PROMPTS = ["once", "upon a time", "there was", "a town by the sea"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_long_model(tmp_path_factory.mktemp("ray") / "model")


@pytest.fixture
def short(tmp_path: Path) -> Iterator[Path]:
    """A folder with a short name, for Ray's sockets have long ones."""
    path = Path(tempfile.mkdtemp(prefix="ray"))
    yield path
    shutil.rmtree(path)


def texts(model: Path, prompts: list[str], **fields: Any) -> list[str]:
    """The plain engine's, on one device."""
    with threaded_llm(model, kv_tokens=8192) as llm:
        return [output.text for output in llm.generate(prompts, SamplingParams(ignore_eos=True, **fields))]


def run(folder: Path, *command: str | Path) -> str:
    """What a command prints. Whatever it has started is gone when it is: Ray's own processes too."""
    own = {"RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    own |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT), "SHARDWISE_TEST": secrets.token_hex(8)}
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        done = subprocess.run(
            [sys.executable, *map(str, command)], cwd=folder, stdout=out, stderr=err, timeout=800, env=os.environ | own
        )
    assert done.returncode == 0, (folder / "err").read_text()[-8000:]
    left = [each for each in psutil.process_iter() if _has(each, own["SHARDWISE_TEST"])]
    _, alive = psutil.wait_procs(left, timeout=60)
    for each in alive:
        each.kill()
    assert not alive
    return (folder / "out").read_text()


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("SHARDWISE_TEST") == mark
    except psutil.Error:
        return False


def test_serve(model: Path, short: Path) -> None:
    """Guards a fleet on Ray Serve: every answer is the plain engine's while it grows, shrinks and loses processes.

    No request fails when replicas come and go under load; a rank that dies costs nothing; a replica that dies takes its
    ranks with it, and is followed by another; nothing is left in the end. Each is given GPUs of its own, where it asks.
    """
    found = json.loads(run(short, "-m", "tests.integrations.fleet", "serve", model, short).splitlines()[-1])
    (long,) = texts(model, ["a long story"], max_tokens=600, temperature=0.8, seed=7)
    assert found["models"] == "model"
    assert found["plain"] == long
    right = zip(PROMPTS, texts(model, PROMPTS, max_tokens=40), strict=True)
    assert sorted(map(tuple, found["load"])) == sorted((prompt, 200, text) for prompt, text in right)
    assert found["count"] > 50
    assert found["after a rank"] == long
    assert (found["same replica"], found["new ranks"]) == (True, True)
    assert (found["outlived"], found["left"]) == (0, 0)
    assert found["after a replica"] == long
    assert found["devices"] == ["0,1", "2,3"]


def test_data(model: Path, short: Path) -> None:
    """Guards offline inference on Ray Data: rows keep their columns and get the plain engine's tokens.

    Bad rows are error rows, and the job is done in spite of them; no rank outlives its actor.
    """
    rows = json.loads(run(short, "-m", "tests.integrations.fleet", "data", model, short).splitlines()[-1])["rows"]
    right = texts(model, PROMPTS, max_tokens=40, temperature=0.8, seed=5)
    good, bad = [row for row in rows if row["error"] is None], [row for row in rows if row["error"] is not None]
    assert [(row["id"], row["prompt"], row["text"]) for row in good] == list(
        zip(range(20), PROMPTS * 5, right * 5, strict=True)
    )
    assert all(len(row["token_ids"]) == 40 and row["finish_reason"] == "length" for row in good)
    assert [row["id"] for row in bad] == [20, 21, 100, 101]
    assert all(row["text"] is row["token_ids"] is row["finish_reason"] is None for row in bad)
    words = ("empty", "needs either", "seed must be", "5000")
    assert all(word in row["error"] for word, row in zip(words, bad, strict=True))


def test_serve_example(model: Path, short: Path) -> None:
    """Guards the example: it answers over HTTP, from two ranks, and ends all that it has started."""
    (port,) = free_ports(1)
    found = run(short, ROOT / "examples" / "ray_serve.py", model, "tp2", str(port))
    assert found.strip()


def test_data_example(model: Path, short: Path) -> None:
    """Guards the example: a text for each row but the bad one, in order."""
    lines = run(short, ROOT / "examples" / "ray_data.py", model, "tp2").splitlines()
    assert [line[0] for line in lines[-4:]] == ["0", "1", "2", "3"]
    assert [" error: " in line for line in lines[-4:]] == [False, False, False, True]
