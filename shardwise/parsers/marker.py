"""What stands around markers in text that comes in pieces: white space, and an end that may be the beginning of one."""

from __future__ import annotations

SPACE = " \t\r\n"
"""White space around markers and in JSON."""


def begun(text: str, marker: str, place: int = 0) -> int:
    """How many characters at the end of ``text[place:]`` are the beginning of ``marker``, short of all of it.

    A marker's first character must not occur in it again.
    """
    at = text.rfind(marker[0], max(place, len(text) - len(marker) + 1))
    return len(text) - at if at >= 0 and marker.startswith(text[at:]) else 0
