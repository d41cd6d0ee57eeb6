"""What an actor of Ray's needs that hosts a layout: its settings, checked where they are said, and its resources.

The actor forks its ranks itself, so all of them are on its host and use what Ray gives to it. Knows nothing of Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.config import EngineConfig, Layout


def engine_config(layout: str | Layout, device: str, threads: int, settings: Mapping[str, Any]) -> EngineConfig:
    """How an actor runs its model; ``settings`` are the other fields of EngineConfig, as LLM takes them.

    Raises ValueError for what can't be.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, for Ray to find a place, not {device!r}")
    return EngineConfig.read(layout, device=device, threads=threads, isolate=True, **settings)


def resources(engine: EngineConfig) -> dict[str, int]:
    """The CPUs of an actor, ``threads`` a rank, and its GPUs, one a rank if they are asked for; by Ray's names."""
    ranks = engine.layout.world_size
    return {"CPU": ranks * (engine.threads or 1), **({"GPU": ranks} if engine.device == "cuda" else {})}
