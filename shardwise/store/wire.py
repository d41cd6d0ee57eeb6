"""What the front and a custom handler's process say to each other, inside `runtime.frames`. Plain data, no objects."""

from __future__ import annotations

from typing import Any

import msgspec


class Start(msgspec.Struct, frozen=True):
    """What a process is told first."""

    name: str
    folder: str
    handler: str
    """A file of the folder and, after a colon, its function, if it has one."""
    manifest: bytes
    config: bytes
    """Both as JSON objects."""
    batch_size: int
    gpu: int | None
    environment: dict[str, str]
    """What is set before anything of the handler is imported."""


class Item(msgspec.Struct, frozen=True):
    """One request: its data by the names that a handler looks for, "body" for one."""

    id: str
    data: dict[str, Any]
    """Bytes or text."""
    headers: dict[str, str]


class Batch(msgspec.Struct, frozen=True):
    """Requests to handle together."""

    number: int
    items: list[Item]


class Answer(msgspec.Struct, frozen=True):
    """What a handler returned for one request."""

    content: bytes
    content_type: str
    status: int = 200
    headers: dict[str, str] = {}


class Reply(msgspec.Struct, frozen=True):
    """News of a batch: a piece of each answer or, with ``last``, the end of them; or what was raised."""

    number: int
    answers: list[Answer]
    last: bool
    error: str = ""
    status: int = 500
    """Of the error."""
    metrics: list[tuple[str, str, float]] = []
    """(name, unit, value) that the handler recorded since the last one."""
