"""The life of a store's server that has its ports: listeners first, then models side by side, and a good end.

Knows the order of things; nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from starlette.types import ASGIApp

from shardwise.server.app import tick
from shardwise.server.config import ServerConfig
from shardwise.server.life import GRACE, first, stop
from shardwise.server.listener import Listener
from shardwise.server.port import url_of
from shardwise.server.store.app import inference_app, management_app, metrics_app
from shardwise.server.store.engines import EngineModel
from shardwise.server.store.errors import StoreError
from shardwise.server.store.figures import Tally
from shardwise.server.store.handlers import HandlerModel
from shardwise.server.store.model import Model
from shardwise.server.store.registry import Registry
from shardwise.server.store.serve import StoreJob
from shardwise.store.archive import Found
from shardwise.store.stored import StoredModel

log = logging.getLogger("shardwise")


async def live(
    job: StoreJob,
    found: Sequence[Found],
    main: socket.socket,
    manager: socket.socket,
    metrics: socket.socket | None = None,
    leave: Callable[[int], NoReturn] = os._exit,
) -> NoReturn:
    """Serve on the sockets until a signal ends the process by ``leave`` and an exit code; ranks end with the process.

    ``found`` is what is served from the start. Raises ValueError for one that was named and whose files are wrong.
    """
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, stopped, number)
    registry = registry_of(job)
    registry.starting = True
    listeners = [Listener(app, config, sock) for app, config, sock in _doors(job, registry, main, manager, metrics)]
    ticking = asyncio.create_task(tick(registry.tick))
    try:
        for listener in listeners:
            await listener.start()
        log.info(
            "loading models; %s answers when they are ready, models are managed at %s", url_of(main), url_of(manager)
        )
        loading = asyncio.ensure_future(load(job, registry, found))
        await first(loading, stopped)
        if loading.done():
            loading.result()
            _tell(registry, main)
            await first(stopped)
        loading.cancel()
        log.info("%s: finishing what was accepted", signal.Signals(stopped.result()).name)
        for listener in listeners:
            listener.finish()
        await registry.drain(job.server.drain_timeout)
        await asyncio.gather(*(listener.close(GRACE) for listener in listeners))
        registry.forget_files()
        leave(0)
    finally:
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking
        for listener in listeners:
            await listener.close(GRACE)
        registry.forget_files()


async def load(job: StoreJob, registry: Registry, found: Sequence[Found]) -> None:
    """Register what was found and have its workers, all models side by side; returns when each is ready or has failed.

    A model is called as NAME=… says, else as its manifest does, else as its file. Raises ValueError for one that was
    named and whose files are wrong; of "all" such is told to the log.
    """
    renamed = {name.partition("=")[0] for name in job.models if "=" in name}
    works = []
    for each in found:
        try:
            if each.path is None:
                raise ValueError(each.error)
            name = each.name if each.name in renamed else None
            served = await registry.register(each.path, each.path.name, name, start=True)
            limits = served.stored.limits
            works.append(served.scale(limits.min_workers, limits.max_workers))
        except (ValueError, StoreError) as error:
            if "all" not in job.models:
                raise ValueError(str(error)) from None
            log.error("%s is not served: %s", each.name, error)
    for work in works:
        await work
    registry.starting = False


def registry_of(job: StoreJob) -> Registry:
    """The registry that a job asks for."""
    return Registry(
        job.store, partial(_make, job), trust_handlers=job.trust_handlers, drain_timeout=job.server.drain_timeout
    )


def _make(job: StoreJob, stored: StoredModel, tally: Tally) -> Model:
    if stored.custom:
        return HandlerModel(stored, job.server, tally)
    return EngineModel(stored, job.server, tally, job.given, generation_config=job.generation_config)


def _doors(
    job: StoreJob,
    registry: Registry,
    main: socket.socket,
    manager: socket.socket,
    metrics: socket.socket | None,
) -> list[tuple[ASGIApp, ServerConfig, socket.socket]]:
    doors = [
        (inference_app(registry, job.server), job.server, main),
        (management_app(registry, job.manager), job.manager, manager),
    ]
    if metrics is not None:
        doors.append((metrics_app(registry, job.manager), job.manager, metrics))
    return doors


def _tell(registry: Registry, main: socket.socket) -> None:
    ready = [f"{each.stored.name}/{each.stored.version}" for each in registry if each.state == "READY"]
    failed = [f"{each.stored.name}/{each.stored.version}" for each in registry if each.state == "FAILED"]
    fields = {"models": ", ".join(ready), "failed": ", ".join(failed) or None}
    log.info("ready at %s", url_of(main), extra={"fields": fields})
