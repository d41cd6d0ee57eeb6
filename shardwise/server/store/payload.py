"""The body of a prediction, as TorchServe reads it: raw, or the named parts of a multipart form.

Knows bytes; nothing of what they mean.
"""

from __future__ import annotations

import re

from shardwise.server.store.errors import StoreError

BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
NAME = re.compile(rb'[;\s]name="([^"\r\n]{1,100})"', re.IGNORECASE)
MAX_PARTS = 64


def parts_of(body: bytes, content_type: str) -> dict[str, bytes]:
    """The parts by their names: of a form its own, else one that is called body. StoreError 400 for a broken form."""
    if not content_type.lower().lstrip().startswith("multipart/form-data"):
        return {"body": body}
    found = BOUNDARY.search(content_type)
    if found is None:
        raise StoreError(400, "the form has no boundary in its Content-Type")
    mark = b"\r\n--" + (found[1] or found[2]).encode()
    pieces = (b"\r\n" + body).split(mark)
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise StoreError(400, "the form does not end as it should")
    if len(pieces) > MAX_PARTS + 2:
        raise StoreError(400, f"the form has more than {MAX_PARTS} parts")
    parts: dict[str, bytes] = {}
    for piece in pieces[1:-1]:
        head, gap, content = piece.partition(b"\r\n\r\n")
        name = NAME.search(head)
        if not gap or name is None:
            raise StoreError(400, "a part of the form has no name")
        key = name[1].decode(errors="replace")
        if key in parts:
            raise StoreError(400, f"the form has two parts {key!r}")
        parts[key] = content
    return parts


def one_of(parts: dict[str, bytes]) -> bytes:
    """The one part of a request that has one. StoreError 400 if there are others."""
    for name in parts:
        if name not in ("data", "body") or len(parts) > 1:
            raise StoreError(400, f"the form must have one part, data or body; it has {', '.join(sorted(parts))}"[:300])
    return next(iter(parts.values()), b"")
