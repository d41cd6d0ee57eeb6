"""The command that serves: what it was asked for is checked, and the port is ours, before anything that takes time.

Knows settings; nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from shardwise.config import EngineConfig
from shardwise.parsers import REASONING_FORMATS, TOOL_FORMATS
from shardwise.server.config import ServerConfig
from shardwise.server.logs import set_up_logs
from shardwise.server.port import bind, is_loopback, url_of

KEY = re.compile(r"[!-~]+")

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Job:
    """What the command was asked for."""

    model: str
    engine: EngineConfig
    server: ServerConfig
    generation_config: bool = True
    allow_no_key: bool = False
    """Let anyone in who can reach an address that is not only this machine's."""
    log_format: str = "text"
    log_level: str = "info"


def run(job: Job) -> NoReturn:
    """Serve until a signal, or the death of the engines, ends the process.

    Raises ValueError for what cannot be, PortTaken, LoadError for broken files and RankFailure if a rank doesn't start.
    """
    check_server(job.server, job.allow_no_key)
    sock = bind(job.server.host, job.server.port)
    try:
        with extra("serve"):
            from shardwise.server.life import live  # all of HTTP, which takes long to import
        set_up_logs(job.log_format, job.log_level, job.server.api_keys)
        if not job.server.api_keys:
            log.warning("no API key is asked for: whoever reaches %s may use the model", url_of(sock))
        asyncio.run(live(job, sock))
    finally:
        sock.close()


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Imports that need one of our extras: ValueError says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("shardwise"):
            raise
        raise ValueError(f"the server needs {error.name}: pip install 'shardwise[{name}]'") from None


def check_server(server: ServerConfig, allow_no_key: bool) -> None:
    """Raise ValueError for what cannot be served so, with the remedy."""
    if not all(KEY.fullmatch(key) for key in server.api_keys):
        raise ValueError("api_key must be printable ASCII characters without spaces, at least one")
    if not server.api_keys and not allow_no_key and not is_loopback(server.host):
        raise ValueError(
            f"host {server.host} can be reached from elsewhere, and no API key is asked for: give --api-key, or set "
            "SHARDWISE_API_KEY, or say --allow-no-key if everyone may use the model"
        )
    for name, formats in (("tool_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
        if getattr(server, name) not in (None, *formats):
            raise ValueError(f"{name} must be one of {', '.join(formats)}, not {getattr(server, name)!r}")
