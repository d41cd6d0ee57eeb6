"""The life of a server within this process: how it ends, with ranks that are only played."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import httpx
import pytest

from shardwise.config import EngineConfig
from shardwise.runtime.executor import RankFailure
from shardwise.server import life
from shardwise.server.config import ServerConfig
from shardwise.server.deps import Deps
from shardwise.server.port import bind, url_of
from shardwise.server.serve import Job
from tests.server.stage import KEYED, Stage


class Left(Exception):
    """The process would have ended, with this code."""


def leave(code: int) -> NoReturn:
    raise Left(code)


async def lived(stage: Stage, monkeypatch: pytest.MonkeyPatch, scene: Any) -> int:
    """Play a scene on the server's address beside its life; the exit code."""

    def opened(*_: object, **__: object) -> Any:
        plan = SimpleNamespace(max_model_len=64, world=None, engine=EngineConfig())
        return SimpleNamespace(
            replicas=stage.service.replicas,
            intake=stage.deps.intake,
            defaults=stage.deps.defaults,
            plan=plan,
            load_s=0.0,
            compile_s=None,
        )

    monkeypatch.setattr(life, "open_model", opened)
    job = Job("tiny", EngineConfig(isolate=True), stage.deps.config)
    with closing(bind("127.0.0.1", 0)) as sock:
        async with httpx.AsyncClient(base_url=url_of(sock), headers=KEYED, timeout=10) as http:
            living = asyncio.ensure_future(life.live(job, sock, leave))
            while (await http.get("/health")).status_code != 200:
                await asyncio.sleep(0.01)
            await scene(http)
            with pytest.raises(Left) as left:
                await asyncio.wait_for(living, 10)
    return int(left.value.args[0])


def test_the_dead_leave_with_a_code_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """R28, F6: guards against a server that lives on with no ranks to be had, or ends as if all were well."""
    stage = Stage(1, restarts=False)

    async def scene(_: httpx.AsyncClient) -> None:
        stage.ranks[0].failure = RankFailure(0, "exited with code 1", own=True)

    assert asyncio.run(lived(stage, monkeypatch, scene)) == life.DEAD


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_no_failure(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """R31: guards the exit code of a drain."""

    async def scene(_: httpx.AsyncClient) -> None:
        os.kill(os.getpid(), number)

    assert asyncio.run(lived(Stage(), monkeypatch, scene)) == 0


def test_what_fails_while_loading_is_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """F6: guards against a server that waits for ever for a model that can't be loaded."""
    job = Job(str(tmp_path), EngineConfig(isolate=True), Stage().deps.config)
    with closing(bind("127.0.0.1", 0)) as sock, pytest.raises(ValueError, match="no model directory"):
        asyncio.run(life.live(job, sock, leave))


@pytest.mark.parametrize("path", [".", "./", "{}", "{}/"])
def test_a_model_in_the_directory_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Guards against a model without a name, where its path has none at its end."""
    monkeypatch.chdir(tmp_path)
    assert deps_of(path.format(tmp_path), ServerConfig()).model_names == (tmp_path.name,)
    assert deps_of("owner/tiny", ServerConfig()).model_names == ("owner/tiny",)


@pytest.mark.parametrize("keys", [(), ("sk-one",), ("sk-one", "sk-two", "sk-three")])
def test_the_queue_holds_what_can_run(keys: tuple[str, ...]) -> None:
    """Guards against a queue that is full of eight chats that say no max_tokens, where the context is long."""
    most = deps_of("tiny", ServerConfig(api_keys=keys)).service.admission.largest
    assert most[1] >= 2 * 256 * 131_072
    said = deps_of("tiny", ServerConfig(api_keys=keys[:1], max_queue_tokens=1000))
    assert said.service.admission.largest[1] == 1000


def deps_of(model: str, config: ServerConfig) -> Deps:
    """What routes would need, of two replicas of 256 sequences and a long context."""
    plan = SimpleNamespace(max_model_len=131_072, engine=EngineConfig())
    stage = Stage(2)
    opened: Any = SimpleNamespace(replicas=stage.service.replicas, intake=None, defaults=None, plan=plan)
    return life.make_deps(Job(model, EngineConfig(), config), opened)
