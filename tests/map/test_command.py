"""`shardwise map` as a person and as a script meet it: files, pipes, Ctrl-C, exit codes, one line of error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.map.deeds import FACTORY

ROOT = Path(__file__).parents[2]
MAP = [sys.executable, "-m", "shardwise", "map"]


def run(*arguments: str | Path, code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"stdin": subprocess.DEVNULL, "timeout": 120, "text": True, "cwd": ROOT, **options}
    done = subprocess.run([*MAP, *map(str, arguments)], capture_output=True, check=False, **options)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for(ready: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_rows_in_rows_out(tmp_path: Path) -> None:
    """C44: one line for each line, bad ones too; the exit code says partial, and the document counts."""
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = ["1", "{not json", '{"do": "raise"}', "", "NaN", '"x"', "[" * 100_000, "\xff", '"last"']
    source.write_bytes("\n".join(lines).encode("latin-1"))
    common = [FACTORY, "--input", source, "--output", sink, "--layout", "dp2", "--set", f"folder={tmp_path}"]
    done = run(*common, "--set", "factor=2", "--json", code=1)
    assert done.stderr == "shardwise: 6 of 9 items failed; the others are done\n"
    document = json.loads(done.stdout)
    assert document.pop("seconds") > 0
    counts = {"items": 9, "failed": 6, "resumed": 0, "restarts": 0}
    assert document == {"factory": FACTORY, "layout": "dp2", "output": str(sink), **counts}
    found = rows(sink)
    assert [row["index"] for row in found] == list(range(9))
    assert [row["output"][0] if "output" in row else row["error"]["type"] for row in found] == [
        *(2, "ValueError", "RuntimeError", "ValueError", "ValueError", "xx", "ValueError", "ValueError", "lastlast")
    ]
    assert set(found[1]) == {"index", "error"}
    assert not (tmp_path / "out.jsonl.journal").exists()
    again = run(*common, code=2)
    assert "exists" in again.stderr
    assert "--overwrite" in again.stderr
    source.write_text("5\n")
    assert run(*common, "--overwrite").stderr == ""  # a pipe stays quiet
    assert [row["output"][0] for row in rows(sink)] == [10]


def test_a_pipe_is_answered_line_by_line(tmp_path: Path) -> None:
    """Guards filters: a line's answer doesn't wait for the next line, and only answers are on stdout."""
    command = [*MAP, FACTORY, "--set", f"folder={tmp_path}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for index in range(3):
            process.stdin.write(b"%d\n" % index)
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["output"][0] == 2 * index
        process.stdin.close()
        assert process.stdout.read() == b""
        assert process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interruption_is_gone_on_from(tmp_path: Path, number: signal.Signals) -> None:
    """Guards work from Ctrl-C, TERM and a kill: what was done, also ahead of its turn, is on disk and stays."""
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f"{index}\n" if index % 8 != 2 else '{"do": "wait"}\n' for index in range(40)))
    notes = tmp_path / "out.jsonl.journal"
    command = [*MAP, FACTORY, "--input", source, "--output", sink, "--layout", "dp2", "--set", f"folder={tmp_path}"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: all((tmp_path / f"item{index}").exists() for index in (2, 10)))  # both ranks wait now
        wait_for(lambda: ' 9 "output"' in notes.read_text())  # and 3 to 9 are done
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    if number is not signal.SIGKILL:
        assert f"what is done is in {sink} and its journal; the same command goes on from there" in stderr
        assert "Traceback" not in stderr
    assert len(rows(sink)) == 2
    (tmp_path / "go").touch()
    done = run(*command[4:])
    assert done.stderr == f"shardwise: going on with {sink}: 9 items are done\n"
    assert [row["index"] for row in rows(sink)] == list(range(40))
    assert [(tmp_path / f"item{index}").stat().st_size for index in range(11)] == [1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nameless"], "module:name"),
        ([FACTORY, "--layout", "tp2"], "only dp fits"),
        ([FACTORY, "--json"], "--output"),
        ([FACTORY, "--set", "folder"], "KEY=VALUE"),
        ([FACTORY, "--set", "a=1", "--set", "a=2"], "given twice"),
        ([FACTORY, "--input", "in.jsonl", "--output", "in.jsonl"], "is the input itself"),
        ([FACTORY, "--input", "nowhere.jsonl"], "nowhere.jsonl"),
        ([FACTORY, "--input", "in.jsonl", "--output", "out", "--set", "foldr=1"], "did you mean 'folder'"),
    ],
)
def test_wrong_usage_is_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    """Guards users from tracebacks, from ignored options, and from files that a corrected command would trip over."""
    (tmp_path / "in.jsonl").write_text("1\n")
    done = run(*arguments, code=2, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full disk to offer")
def test_a_full_disk_is_said(tmp_path: Path) -> None:
    """R33: guards against a traceback, and against exit code 0, where answers are lost."""
    source = tmp_path / "in.jsonl"
    source.write_text("1\n2\n")
    done = run(FACTORY, "--set", f"folder={tmp_path}", "--input", source, "--output", "/dev/full", code=1)
    assert done.stderr == "shardwise: the output can't be written: No space left on device\n"


def test_a_factory_beside_the_command(tmp_path: Path) -> None:
    """Guards the quick start: a module in the working directory is found, as it is by python -m."""
    (tmp_path / "mine.py").write_text("def build(word='a'):\n    return lambda item: word + item\n")
    script = Path(sys.executable).with_name("shardwise")
    done = subprocess.run(
        [script, "map", "mine:build", "--set", "word=hi "], input='"you"', text=True, capture_output=True, cwd=tmp_path,
        timeout=120, env={**os.environ, "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ('{"index": 0, "output": "hi you"}\n', "")
