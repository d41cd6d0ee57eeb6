"""A map inside a world that something else has started: every process a rank, one file of answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwise.mapping import world
from shardwise.mapping.config import MapConfig, World, find_places, find_world
from shardwise.mapping.journal import Journal
from shardwise.mapping.world import Meeting, part_of
from shardwise.runtime.executor import RankFailure
from tests.map.deeds import FACTORY
from tests.map.test_command import MAP, ROOT, rows, wait_for


def start(folder: Path, rank: int, size: int, *more: str) -> subprocess.Popen[str]:
    """One process of a world, as a launcher starts it."""
    world = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    files = ["--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")]
    return subprocess.Popen(
        [*MAP, FACTORY, *files, "--set", f"folder={folder}", *more],
        env={**os.environ, **{name: str(value) for name, value in world.items()}},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ends(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Each one's exit code and what it has said."""
    told = [process.communicate(timeout=120) for process in processes]
    return [(process.returncode, *words) for process, words in zip(processes, told, strict=True)]


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("out"))


def test_two_processes_share_the_items(tmp_path: Path) -> None:
    """Guards the promise in a world: each item once, on the process whose it is, in one file in order; no part is left.

    A failed item is told by rank 0 alone: a launcher ends all processes when one ends badly.
    """
    (tmp_path / "in.jsonl").write_text('0\n1\n{"do": "raise"}\n3\n4\n5\n6\n{"do": "error", "error": {}}\n')
    found = ends([start(tmp_path, rank, 2, "--json") for rank in (1, 0)])
    assert found[0] == (0, "", "")
    assert (found[1][0], found[1][2]) == (1, "shardwise: 1 of 8 items failed; the others are done\n")
    document = json.loads(found[1][1])
    assert (document["layout"], document["items"], document["failed"]) == ("dp2", 8, 1)
    answers = rows(tmp_path / "out.jsonl")
    assert [row["index"] for row in answers] == list(range(8))
    assert [row["output"][:2] for row in answers[:7] if "output" in row] == [
        [2 * at, at % 2] for at in (0, 1, 3, 4, 5, 6)
    ]
    assert all((tmp_path / f"item{index}").stat().st_size == 1 for index in range(8))
    assert leftovers(tmp_path) == ["out.jsonl"]
    (refused,) = ends([start(tmp_path, 0, 2)])
    assert refused[0] == 2
    assert "exists" in refused[2]


def test_a_dead_process_of_the_world(tmp_path: Path) -> None:
    """Guards rank 0 from waiting for ever for a process that was killed, and what was done from being done again.

    A world of another size can't go on with the parts, and says so.
    """
    (tmp_path / "in.jsonl").write_text('0\n1\n2\n{"do": "wait"}\n4\n')
    first = [start(tmp_path, rank, 2) for rank in (0, 1)]
    wait_for(lambda: (tmp_path / "item3").exists())
    first[1].send_signal(signal.SIGKILL)
    found = ends(first)
    assert found[0][0] == 5
    assert "rank 1: this process of the world has ended before its share was done" in found[0][2]
    (other,) = ends([start(tmp_path, 0, 3)])
    assert other[0] == 2
    assert "was begun by 2 processes" in other[2]
    (tmp_path / "go").touch()
    assert [code for code, _, _ in ends([start(tmp_path, rank, 2) for rank in (0, 1)])] == [0, 0]
    assert [row["index"] for row in rows(tmp_path / "out.jsonl")] == list(range(5))
    assert [(tmp_path / f"item{index}").stat().st_size for index in range(5)] == [1, 1, 1, 2, 1]
    assert leftovers(tmp_path) == ["out.jsonl"]


def test_a_world_without_rank_0(tmp_path: Path) -> None:
    """Guards processes from waiting for ever for one that was never started."""
    (tmp_path / "in.jsonl").write_text("0\n")
    (found,) = ends([start(tmp_path, 1, 2, "--startup-timeout", "0.5")])
    assert found[0] == 5
    assert "rank 0: has not begun within 0.5 s" in found[2]
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("resumed", [False, True])
def test_whom_rank_0_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool) -> None:
    """Guards rank 0 from waiting for ever for a process that doesn't begin, when going on too; not for one at work."""
    meeting = Meeting(tmp_path / "out.jsonl", World(0, 2, 0, 2), overwrite=False, patience=0.0)
    for rank, run in [(0, meeting.run), *([(1, "an earlier one")] if resumed else [])]:
        part = Journal(part_of(tmp_path / "out.jsonl", rank, 2), {}, first=rank, step=2, run=run)
        if rank == 0:
            part.end(0)
        part.close()
    monkeypatch.setattr(world, "sleep", lambda _: pytest.fail("waits for what doesn't come"))
    with pytest.raises(RankFailure, match="rank 1: this process of the world has not begun within 0 s"):
        list(meeting.gather())
    late = Journal(part_of(tmp_path / "out.jsonl", 1, 2), {}, first=1, step=2, run=meeting.run)

    def end(_: float) -> None:
        late.end(0)
        late.close()

    monkeypatch.setattr(world, "sleep", end)
    assert list(meeting.gather()) == []
    assert leftovers(tmp_path) == ["out.jsonl", "out.jsonl.world"]
    meeting.close()
    assert leftovers(tmp_path) == ["out.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_real_launchers(tmp_path: Path, launcher: str) -> None:
    """a1: guards the way in which these set their processes up, which is theirs to change."""
    (tmp_path / "in.jsonl").write_text("".join(f"{index}\n" for index in range(9)))
    commands = {
        "torchrun": ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"],
        "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"],
    }
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    if launcher == "accelerate":
        commands[launcher] += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [sys.executable, "-m", *commands[launcher], "-m", "shardwise", "map", FACTORY, *files]
    done = subprocess.run(
        [*command, "--set", f"folder={tmp_path}"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "out.jsonl")
    assert [row["output"][:2] for row in found] == [[2 * index, index % 2] for index in range(9)]


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """a2: guards ranks' numbers, devices and threads, and variables that make no sense from being believed."""
    config = MapConfig("a:b", device="cpu", threads=3)
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "x")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    world = find_world()
    assert world == World(5, 8, 1, 4)
    (place,) = find_places(config, world)
    assert (place.rank, place.world, place.device, place.threads) == (5, 8, "cpu", 3)
    with pytest.raises(ValueError, match="leave the layout out"):
        find_places(MapConfig("a:b", config.layout.parse("dp2")), world)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_places(MapConfig("a:b"), None)[0].device == "cpu"
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(ValueError, match="RANK=8 WORLD_SIZE=8"):
        find_world()
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ValueError, match="no place in a world"):
        find_world()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert find_world() is None
