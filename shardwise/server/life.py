"""The life of a server process that has its port: a listener, a model, requests, and a good end whatever brings it.

Knows the order of things and what signals mean; nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from shardwise.open import Opened, open_model
from shardwise.server.admission import Admission
from shardwise.server.app import create_app
from shardwise.server.config import ServerConfig
from shardwise.server.deps import Deps
from shardwise.server.errors import ApiError
from shardwise.server.guard import OPEN, Guard
from shardwise.server.listener import Listener
from shardwise.server.metrics import Metrics
from shardwise.server.port import url_of
from shardwise.server.serve import Job
from shardwise.server.service import Service

GRACE = 2.0
"""Seconds for what is left to say once all requests are done."""
DEAD = 5
"""The exit code when ranks are gone for good."""

log = logging.getLogger("shardwise")


async def live(job: Job, sock: socket.socket, leave: Callable[[int], NoReturn] = os._exit) -> NoReturn:
    """Serve on ``sock`` until a signal, or the death of the engines, ends the process by ``leave`` and an exit code.

    Nobody waits for the ranks then: they end with this process, as they would if it were killed. Raises ValueError,
    LoadError and RankFailure where the model can't be loaded.
    """
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, stopped, number)
    door = Door(job.server)
    listener = Listener(door, job.server, sock)
    await listener.start()
    log.info("loading %s; %s answers when it is ready", job.model, url_of(sock))
    loading: asyncio.Future[Opened] = loop.create_future()
    threading.Thread(target=_load, args=(job, loop, loading), name="loading", daemon=True).start()
    await first(loading, stopped)
    if not loading.done():
        log.info("interrupted while loading")
        leave(128 + stopped.result())
    try:
        opened = loading.result()
        deps = make_deps(job, opened)
        app = create_app(deps)
        async with app.router.lifespan_context(app):
            door.app = app
            _tell(job, opened, deps, url_of(sock))
            code = await _run(job, deps.service, listener, stopped)
            if opened.plan.world is not None:  # other hosts don't end with this process: they look for the next front
                await deps.service.stop()
            leave(code)
    finally:
        await listener.close(GRACE)


async def _run(job: Job, service: Service, listener: Listener, stopped: asyncio.Future[int]) -> int:
    """Until the end, whatever brings it; the exit code."""
    dead = asyncio.ensure_future(service.dead.wait())
    await first(dead, stopped)
    if stopped.done():
        log.info("%s: finishing what was accepted", signal.Signals(stopped.result()).name)
        listener.finish()
        await service.drain(job.server.drain_timeout)
    dead.cancel()
    await listener.close(GRACE)
    return 0 if service.failure is None else DEAD


class Door:
    """The application that connections are given to: until there is a model, one that only knows its health."""

    def __init__(self, config: ServerConfig) -> None:
        self.app: ASGIApp = Guard(_loading, config, lambda: False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        await self.app(scope, receive, send)


async def _loading(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] not in OPEN:
        raise ApiError(503, "the model is being loaded", retry_after=2)
    alive = scope["path"] == "/health/live"
    await JSONResponse({"status": "loading"}, 200 if alive else 503)(scope, receive, send)


async def first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def stop(stopped: asyncio.Future[int], number: int) -> None:
    """A signal has come."""
    if stopped.done():
        os._exit(128 + number)  # the second signal: at once; ranks end with this process
    stopped.set_result(number)


def _load(job: Job, loop: asyncio.AbstractEventLoop, loading: asyncio.Future[Opened]) -> None:
    try:
        opened = open_model(job.model, job.engine, generation_config=job.generation_config, on_progress=log.info)
    except BaseException as error:
        loop.call_soon_threadsafe(loading.set_exception, error)
    else:
        loop.call_soon_threadsafe(loading.set_result, opened)


def make_deps(job: Job, opened: Opened) -> Deps:
    """What the routes over a model need. Nothing is started."""
    server = job.server
    path = Path(os.path.abspath(job.model))
    names = server.served_model_names or (path.name if path.exists() else job.model,)  # a path is nobody's business
    told = next((name for name in names if name != "*"), "*")
    admission = Admission(
        server.max_queue_requests,
        server.queue_tokens(opened.plan.engine.max_num_seqs * len(opened.replicas.engines), opened.plan.max_model_len),
        server.queue_timeout,
        num_keys=max(1, len(server.api_keys)),
    )
    service = Service(opened.replicas, admission, Metrics(told))
    return Deps(
        config=server,
        service=service,
        intake=opened.intake,
        defaults=opened.defaults,
        model_names=names,
        max_model_len=opened.plan.max_model_len,
        created=int(time.time()),
    )


def _tell(job: Job, opened: Opened, deps: Deps, url: str) -> None:
    """What an operator wants to know of a server that has just become ready."""
    fields, left_out = opened.defaults
    if fields:
        log.info("defaults from generation_config.json", extra={"fields": fields})
    if left_out:
        log.warning("generation_config.json: left out, since they are not supported: %s", ", ".join(left_out))
    ready = {"model": ", ".join(deps.model_names), "layout": str(job.engine.layout), "load_s": round(opened.load_s, 2)}
    if opened.compile_s is not None:
        ready["compile_s"] = round(opened.compile_s, 2)
    log.info("ready at %s", url, extra={"fields": ready})
