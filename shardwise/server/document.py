"""A JSON body is refused here for its shape alone, before it is turned into objects that may be far larger than it.

Knows nothing of what the fields mean.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from shardwise.server.errors import ApiError

MAX_DEPTH = 64
MAX_VALUES = 2**18
"""Commas and brackets outside of strings: what bounds the memory that a body takes when it is read."""
OTHERS = bytes(set(range(256)) - set(b'"[]{},'))
"""Bytes that tell nothing of the shape, once escapes are gone."""
PIECE = 2**13
"""Bytes that are looked at together."""
LONE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of a character, perhaps."""


def check_document(body: bytes) -> None:
    """Raise ApiError 400 unless the body is one JSON document, in UTF-8, that says one thing to every reader.

    Depth and size are bounded; duplicate names, NaN, infinities and halves of characters are refused.
    """
    check_shape(body)
    try:
        text = body.decode("utf-8")
        document = json.loads(text, object_pairs_hook=_object, parse_constant=_number, parse_float=_number)
        if LONE.search(body):
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the body holds half of a surrogate pair") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):  # an integer of thousands of digits
        raise ApiError(400, "the body holds a number that is too long") from None


def check_shape(body: bytes) -> None:
    """Raise ApiError 400 for what is too deep or has too many values.

    In linear time and little memory whatever the bytes are; up to where the body ceases to be JSON, it is exact.
    """
    skeleton = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, OTHERS)
    num_values = depth = 0
    inside = False
    for at in range(0, len(skeleton), PIECE):
        parts = skeleton[at : at + PIECE].split(b'"')
        outside = b"".join(parts[inside::2])
        inside ^= len(parts) % 2 == 0
        num_values += len(outside) - outside.count(b"]") - outside.count(b"}")
        if num_values > MAX_VALUES:
            raise ApiError(400, f"the body holds more than {MAX_VALUES} values")
        for letter in outside.translate(None, b","):
            depth += 1 if letter in b"[{" else -1
            if depth > MAX_DEPTH:
                raise ApiError(400, f"the body is nested more than {MAX_DEPTH} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ApiError(400, "the body names a field twice")
    return found


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ApiError(400, "the body holds a number that is not finite")
    return value
