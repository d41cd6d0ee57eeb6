"""Servers for tests: engines whose ranks are threads, and an app over them in this process or behind a socket."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse

from shardwise.defaults import model_defaults
from shardwise.engine import Engine
from shardwise.intake import Intake
from shardwise.open import make_scheduler, open_tokenizer
from shardwise.replicas import Replicas
from shardwise.runtime.executor import Executor
from shardwise.server.admission import Admission
from shardwise.server.config import ServerConfig
from shardwise.server.deps import Deps
from shardwise.server.errors import ApiError
from shardwise.server.metrics import Metrics
from shardwise.server.service import Service
from tests import tiny
from tests.harness import plan_of, start_threads

Router = Callable[[Deps], APIRouter]
BASE = "http://127.0.0.1:8000"
SERVER = {field.name for field in fields(ServerConfig)}


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model that reads and writes bytes, float32."""
    return tiny.save_text_model(tmp_path_factory.mktemp("text"))


@contextmanager
def deps_on(
    path: Path, layout: str = "1", start: Callable[..., list[Executor]] = start_threads, **settings: Any
) -> Iterator[Deps]:
    """What routes need, of a model whose ranks are threads. ``settings`` are ServerConfig's or EngineConfig's.

    The service isn't started: the app's start does that, and its end ends the ranks.
    """
    config = ServerConfig(**{name: value for name, value in settings.items() if name in SERVER})
    plan = plan_of(path, layout, **{"kv_tokens": 4096, **{k: v for k, v in settings.items() if k not in SERVER}})
    tokenizer = open_tokenizer(plan.source)
    eos = plan.source.eos | tokenizer.eos
    one = replace(plan, engine=replace(plan.engine, layout=replace(plan.engine.layout, dp=1)))
    engines = [
        Engine(executor, make_scheduler(plan, eos), tokenizer, lambda failed: start(one)[0]) for executor in start(plan)
    ]
    admission = Admission(config.max_queue_requests, config.max_queue_tokens, config.queue_timeout)
    names = config.served_model_names or (path.name,)
    replicas = Replicas(engines)
    try:
        yield Deps(
            config=config,
            service=Service(replicas, admission, Metrics(names[0])),
            intake=Intake(tokenizer, plan.source.config.vocab_size, eos),
            defaults=model_defaults(plan.source.generation),
            model_names=names,
            max_model_len=plan.max_model_len,
            created=int(time.time()),
        )
    finally:
        replicas.close()


def app_of(deps: Deps, *routers: Router) -> Any:
    """The whole app; or one of the given routers alone, with the errors' shape and the service's start and end."""
    if not routers:
        from shardwise.server.app import create_app

        return create_app(deps)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        deps.service.start()
        yield
        await deps.service.stop()

    app = FastAPI(lifespan=lifespan)
    for router in routers:
        app.include_router(router(deps))

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.document(), error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"] if part != "body")
        return JSONResponse(ApiError(400, first["msg"], param=name or None).document(), 400)

    return app


@asynccontextmanager
async def client(deps: Deps, *routers: Router) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app (see `app_of`) in this process, for the loop that it is opened on."""
    app = app_of(deps, *routers)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with _lifespan(app), httpx.AsyncClient(transport=transport, base_url=BASE, timeout=60) as found:
        yield found


@asynccontextmanager
async def held(deps: Deps) -> AsyncIterator[None]:
    """The engines take no step, and no request, meanwhile."""
    go = threading.Event()
    holding = asyncio.ensure_future(deps.service.change(lambda _: go.wait(60)))
    await asyncio.sleep(0)  # it begins, and is before all that comes
    try:
        yield
    finally:
        go.set()
        await holding


@asynccontextmanager
async def _lifespan(app: Any) -> AsyncIterator[None]:
    """Start and end an app of any make, as a server would."""
    server = uvicorn.Config(app, lifespan="on", log_level="warning")
    server.load()
    span = server.lifespan_class(server)
    await span.startup()
    assert not span.should_exit, "the app did not start"
    try:
        yield
    finally:
        await span.shutdown()


@contextmanager
def serving(deps: Deps, *routers: Router) -> Iterator[str]:
    """The app (see `app_of`) behind a socket of this host; yields its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app_of(deps, *routers),
            log_level="warning",
            lifespan="on",
            ws="none",
            timeout_keep_alive=600,  # a client may reuse a connection in the very moment in which it is closed as idle
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="uvicorn")
        thread.start()
        try:
            wait_for(lambda: server.started or not thread.is_alive(), 60)
            assert server.started
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def client_of(url: str) -> httpx.Client:
    """A client for many threads.

    It keeps every connection: httpx closes surplus and old ones that are idle, and one that another thread has just
    been given is still idle to it.
    """
    every = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
    return httpx.Client(base_url=url, timeout=60, limits=every)


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until it holds; AssertionError if that takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)
