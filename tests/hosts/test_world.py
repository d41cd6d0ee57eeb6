"""A place in torchrun's world, and which layouts fill one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import EngineConfig, Layout
from shardwise.engine import Engine
from shardwise.llm import LLM
from shardwise.replicas import Replicas
from shardwise.runtime.executor import RankFailure
from shardwise.runtime.hosts import front
from shardwise.runtime.hosts.front import Hosts
from shardwise.runtime.launch import begin_replica, plan_run, worker_specs
from shardwise.runtime.source import open_source
from shardwise.world import World, find_world
from tests.fakes import Letters, small_scheduler
from tests.tiny import save_text_model


def environ(rank: int = 0, size: int = 4, local: int = 2, **more: str) -> dict[str, str]:
    """As torchrun sets it."""
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    fixed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GROUP_WORLD_SIZE": str(size // local)}
    return {name: str(number) for name, number in numbers.items()} | fixed | more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ().items():
        monkeypatch.setenv(name, value)


def test_places() -> None:
    """Guards who is the front, who an agent, and what is meant without a layout."""
    found = find_world(environ(3, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="job"))
    assert found is not None
    assert (found.host, found.hosts, found.local_rank, found.store, found.run) == (1, 2, 1, True, "job")
    assert found.layout == Layout(tp=2, pp=2)
    assert [found.host_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert find_world({}) is None
    assert find_world(environ(0, 1, 1)) is None
    one = find_world(environ(0, 4, 4))
    assert one is not None
    assert str(one.layout) == "tp4"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"RANK": "x"}, "no place in a world"),
        ({"RANK": "4"}, "no place in a world"),
        ({"LOCAL_WORLD_SIZE": "0"}, "no place in a world"),
        ({"GROUP_WORLD_SIZE": "3"}, "the same --nproc-per-node"),
        ({"LOCAL_RANK": "1"}, "the same --nproc-per-node"),
    ],
)
def test_odd_places(changes: dict[str, str], told: str) -> None:
    """Guards against variables of another's that would make a wrong layout."""
    with pytest.raises(ValueError, match=told):
        find_world(environ() | changes)


@pytest.mark.parametrize(("master", "refused"), [("127.0.0.1", False), ("localhost", False), ("first-host", True)])
def test_an_address_that_others_cannot_reach(monkeypatch: pytest.MonkeyPatch, master: str, refused: bool) -> None:
    """Guards operators from hosts that never meet, where the first one's name is an address of itself alone."""
    monkeypatch.setenv("SHARDWISE_SECRET", "s" * 40)
    monkeypatch.setattr(front, "own_address", lambda towards: "127.0.0.1")
    world = World(0, 4, 0, 2, master, 0, "test", store=False)
    if refused:
        with pytest.raises(ValueError, match=r"--master-addr or --local-addr .* GLOO_SOCKET_IFNAME"):
            Hosts(world)
        return
    Hosts(world).close()


@pytest.mark.usefixtures("two_hosts")
def test_layouts_fill_the_hosts(model: Path) -> None:
    """Guards against idle hosts: a layout of another size is refused before weights are read, with those that fit."""
    source = open_source(model)
    with pytest.raises(ValueError, match=r"has 1 ranks, and torchrun started 4 .* are tp2\.pp2, dp2\.tp2, pp4"):
        plan_run(source, EngineConfig())
    with pytest.raises(ValueError, match="has 6 ranks"):
        plan_run(source, EngineConfig(layout=Layout(tp=3, pp=2)), whole=False)
    assert plan_run(source, EngineConfig(), whole=False).world is not None
    plan = plan_run(source, EngineConfig(layout=Layout(dp=2, tp=2), device="cpu"))
    with pytest.raises(ValueError, match="can't be added on several hosts"):
        begin_replica(plan, 2)


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize(
    ("layout", "hosts"), [("tp2.pp2", [[0, 0, 1, 1]]), ("tp4", [[0, 0, 1, 1]]), ("dp2.tp2", [[], []])]
)
def test_ranks_know_their_hosts(model: Path, layout: str, hosts: list[list[int]]) -> None:
    """Guards who shares memory with whom, and how many threads a rank takes of its host."""
    plan = plan_run(open_source(model), EngineConfig(layout=Layout.parse(layout), device="cpu"))
    assert plan.local_size == 2
    for replica, want in enumerate(hosts):
        specs = worker_specs(plan, replica)
        assert [spec.hosts for spec in specs] == [want] * len(specs)
        assert [spec.host for spec in specs] == (want or [0] * len(specs))
        assert all(spec.front == ("127.0.0.1" if want else "") for spec in specs)
    assert len({worker_specs(plan, replica)[0].run for replica in range(len(hosts))}) == len(hosts)


@pytest.mark.usefixtures("two_hosts")
def test_a_script_runs_on_the_first_process_only(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards scripts that make an LLM under torchrun: in the other processes that call is where they end."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as left:
        LLM(model, "tp2.pp2", device="cpu")
    assert left.value.code == 0


class Absent:
    """Ranks on a host that stays away."""

    ready = False

    def __init__(self) -> None:
        self.figures: list[Any] = []

    def check(self) -> None:
        raise RankFailure(1, "was not ready within 300 s: host 1 is missing", final=True)

    def waitables(self) -> list[int]:
        return []


def test_a_host_that_stays_away_is_final() -> None:
    """Guards requests from five times the start timeout: ranks whose host stays away are not started again."""
    engine = Engine(Absent(), small_scheduler(), Letters(), lambda failed: failed)  # type: ignore[arg-type]
    with pytest.raises(RankFailure, match="host 1 is missing"):
        Replicas([engine]).step()
    assert engine.lost


def test_other_processes_lend_their_host() -> None:
    """Guards against as many servers as torchrun starts: only rank 0 runs a command, and a missing secret is told."""
    for rank, arguments, code, told in (
        (1, ["serve"], 0, ""),
        (3, ["serve"], 0, ""),
        (2, ["inspect", "nothing"], 0, ""),
        (2, ["serve", "--help"], 0, ""),
        (2, ["serve"], 2, "neither is set"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "shardwise", *arguments],
            env={**environ(rank), "PATH": "", "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert told in done.stderr
