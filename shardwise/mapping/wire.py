"""What the front and the ranks of a map say to each other, inside `runtime.frames`: items and outputs are JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from shardwise.features import Compile


class Order(msgspec.Struct, frozen=True):
    """What the holder is told: the factory, and what to do once for all ranks."""

    factory: str
    settings: bytes
    """A JSON object."""
    share: str
    lists: bool
    """Does the callable take lists?"""
    compile: Compile | None = None


class Post(msgspec.Struct, frozen=True):
    """What a rank is told: the fields of its `Place`."""

    rank: int
    world: int
    device: str
    threads: int


class Work(msgspec.Struct, frozen=True):
    """Items for a rank, each a line of JSON."""

    indexes: list[int]
    lines: list[bytes]


class Answer(msgspec.Struct, frozen=True):
    """What became of an item: the members of its output line besides the index, as JSON without braces."""

    body: bytes
    failed: bool = False
    said: str = ""
    """What people must be told."""


def encode(output: Any) -> Answer:
    """The answer with this output. Raises TypeError or ValueError, with the remedy, for what JSON can't hold."""
    try:
        text = json.dumps(output, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise TypeError(
            f"the output can't be written as JSON ({error}): return numbers, text, lists and dicts of them (a tensor's "
            ".tolist()), and write bytes and images to a file whose path you return"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"the output can't be written as JSON ({error}): return None in place of nan and infinity"
        ) from None
    return Answer(b'"output": ' + _utf8(text))


def failure(kind: str, message: str) -> Answer:
    """The answer of an item that failed."""
    return Answer(b'"error": ' + _utf8(json.dumps({"type": kind, "message": message}, ensure_ascii=False)), failed=True)


def _utf8(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # half a surrogate pair: \ud800 is how JSON writes it too
