"""What every route needs, in one place: made once when the server starts, and passed explicitly."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from shardwise.defaults import Defaults
from shardwise.intake import Intake
from shardwise.server.config import ServerConfig
from shardwise.server.service import Service

MAX_COMPILING = 2
"""Requests whose grammars are compiled at once."""


@dataclass(frozen=True)
class Deps:
    """See the file's sentence."""

    config: ServerConfig
    service: Service
    intake: Intake
    defaults: Defaults
    """What the model's generation_config.json says of fields that a request leaves open."""
    model_names: tuple[str, ...]
    """Names that are answered to, never empty; "*" stands for any. The first that is not "*" is told in answers."""
    max_model_len: int
    created: int
    """When the server started, in seconds since 1970."""
    compiling: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_COMPILING))
    """Turns for requests whose grammars may take seconds to compile: the threads left are for all others."""
