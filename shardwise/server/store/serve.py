"""The command that serves a model store: what it was asked for is checked, and the ports are ours, before all else.

Knows settings; nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from shardwise.server.config import ServerConfig
from shardwise.server.logs import set_up_logs
from shardwise.server.port import bind, url_of
from shardwise.server.serve import check_server, extra
from shardwise.store.archive import Found, find

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class StoreJob:
    """What the command was asked for."""

    store: Path
    models: tuple[str, ...]
    """As ``find`` knows them; "none" for none."""
    server: ServerConfig
    given: Mapping[str, Any] = field(default_factory=dict)
    """Fields of EngineConfig that win over the models' own."""
    management_host: str = "127.0.0.1"
    management_port: int = 8081
    metrics_port: int | None = None
    """A port of the manager's host for /metrics alone, which the main port has in any case."""
    trust_handlers: bool = False
    generation_config: bool = True
    allow_no_key: bool = False
    log_format: str = "text"
    log_level: str = "info"

    @property
    def manager(self) -> ServerConfig:
        """How the manager's port is served."""
        return replace(self.server, host=self.management_host, port=self.management_port)


def run(job: StoreJob) -> NoReturn:
    """Serve until a signal ends the process. Raises ValueError for what cannot be, and PortTaken."""
    if not 0 <= job.management_port < 2**16 or not 0 <= (job.metrics_port or 0) < 2**16:
        raise ValueError("management_port and metrics_port must be from 0 (any free one) to 65535")
    for config in (job.server, job.manager):
        check_server(config, job.allow_no_key)
    found = models_of(job)
    with ExitStack() as stack:

        def listen(host: str, port: int) -> socket.socket:
            return stack.enter_context(closing(bind(host, port)))

        main = listen(job.server.host, job.server.port)
        manager = listen(job.management_host, job.management_port)
        metrics = None if job.metrics_port is None else listen(job.management_host, job.metrics_port)
        with extra("serve"):
            from shardwise.server.store.life import live  # all of HTTP, which takes long to import
        set_up_logs(job.log_format, job.log_level, job.server.api_keys)
        if not job.server.api_keys:
            log.warning("no API key is asked for: whoever reaches %s may use the models", url_of(main))
        asyncio.run(live(job, found, main, manager, metrics))
    raise AssertionError("the life of a server ends the process")


def models_of(job: StoreJob) -> list[Found]:
    """What is to be served from the start. ValueError for a model that was named and isn't there."""
    names = [name for name in job.models if name != "none"]
    found = find(job.store, names)
    if "none" in job.models and names:
        raise ValueError("models: none goes with no others")
    for each in found:
        if each.error is not None and "all" not in names:
            raise ValueError(f"models: {each.error}")
    return found
