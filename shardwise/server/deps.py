"""What every route needs, in one place: made once when the server starts, and passed explicitly."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.defaults import Defaults
from shardwise.intake import Intake
from shardwise.server.config import ServerConfig
from shardwise.server.service import Service


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
