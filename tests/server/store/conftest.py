"""A whole store's server within this process: real sockets, engines whose ranks are threads."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import httpx
import pytest

from shardwise.runtime.executor import Executor
from shardwise.runtime.launch import RunPlan
from shardwise.server.config import ServerConfig
from shardwise.server.port import bind, url_of
from shardwise.server.store import life
from shardwise.server.store.engines import EngineModel
from shardwise.server.store.registry import Registry
from shardwise.server.store.serve import StoreJob, models_of
from tests import tiny
from tests.harness import start_threads

WAIT = 60.0
"""Seconds after which something that should come has failed to."""


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model that reads and writes bytes, float32."""
    return tiny.save_text_model(tmp_path_factory.mktemp("weights") / "tiny")


def save_folder(store: Path, name: str, weights: Path, handler: str = "", **frontend: Any) -> Path:
    """A GPT-fast folder of a model: ``handler`` are lines of its section, ``frontend`` keys of all handlers."""
    folder = store / name
    folder.mkdir(parents=True)
    lines = [f"{key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in frontend.items()]
    lines += ["deviceType: cpu", "handler:", f"  converted_ckpt_dir: {weights}", "  stream: false"]
    lines += [f"  {line}" for line in handler.splitlines()]
    (folder / "model-config.yaml").write_text("\n".join(lines) + "\n")
    return folder


def begin_threads(plan: RunPlan, replica: int, **how: Any) -> Executor:
    """One replica whose ranks are threads; ``how`` is for `start_threads`."""
    engine = plan.engine
    return start_threads(replace(plan, engine=replace(engine, layout=replace(engine.layout, dp=1))), **how)[0]


class Left(Exception):
    """The process would have ended, with this code."""


@dataclass
class World:
    """A server: a client of its main port, one of the manager's, and its inside."""

    http: httpx.AsyncClient
    manage: httpx.AsyncClient
    registry: Registry
    living: asyncio.Future[Any]

    async def text(self, model: str, body: Any, **more: Any) -> str:
        answer = await self.http.post(f"/predictions/{model}", json=body, **more)
        assert answer.status_code == 200, answer.text
        return answer.text

    async def describe(self, model: str) -> dict[str, Any]:
        answer = await self.manage.get(f"/models/{model}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()[0]
        return found


async def until(condition: Any) -> None:
    """Wait until it holds; it may be a coroutine's making."""
    deadline = time.monotonic() + WAIT
    while True:
        found = condition()
        if await found if asyncio.iscoroutine(found) else found:
            return
        assert time.monotonic() < deadline, "it does not come to hold"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def world(store: Path, *models: str, begin: Any = begin_threads, **settings: Any) -> AsyncIterator[World]:
    """A server of a store; ``settings`` are ServerConfig's, and those of StoreJob that are named so there."""
    own = {name: settings.pop(name) for name in ("trust_handlers", "given") if name in settings}
    config = ServerConfig(**{"port": 0, "drain_timeout": 10.0, **settings})
    job = StoreJob(store, models or ("all",), config, management_port=0, **own)
    headers = {"Authorization": f"Bearer {config.api_keys[0]}"} if config.api_keys else {}
    made: list[Registry] = []
    ready = asyncio.Event()

    def registry_of(job: StoreJob) -> Registry:
        made.append(real(job))
        return made[0]

    def leave(code: int) -> NoReturn:
        raise Left(code)

    real = life.registry_of
    with (
        closing(bind("127.0.0.1", 0)) as main,
        closing(bind("127.0.0.1", 0)) as manager,
        patch.object(life, "registry_of", registry_of),
        patch.object(life, "_tell", lambda *_: ready.set()),
        patch.object(life, "EngineModel", partial(EngineModel, begin=begin)),
    ):
        living = asyncio.ensure_future(life.live(job, models_of(job), main, manager, leave=leave))
        async with (
            httpx.AsyncClient(base_url=url_of(main), headers=headers, timeout=WAIT) as http,
            httpx.AsyncClient(base_url=url_of(manager), headers=headers, timeout=WAIT) as manage,
        ):
            try:
                await until(lambda: living.done() or ready.is_set())
                if living.done():
                    living.result()
                yield World(http, manage, made[0], living)
            finally:
                if not living.done():
                    os.kill(os.getpid(), signal.SIGTERM)
                code = (await asyncio.wait_for(asyncio.gather(living, return_exceptions=True), WAIT))[0]
                for served in made[0]:
                    await served.close(0.0)  # what the end of the process would do
        assert isinstance(code, Left), code
        assert code.args == (0,)
