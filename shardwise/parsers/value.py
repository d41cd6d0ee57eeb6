"""Where a JSON value ends in text that comes in pieces: brackets and strings are followed, grammar is not checked."""

from __future__ import annotations

import re
from itertools import islice

_SIGNS = re.compile(r"[][{}<]")
_KINDS = bytes.maketrans(b"[{]}<", b"\2\2\0\0\3")
_NO_SIGN = bytes(set(range(256)) - set(b"[]{}<"))
_WINDOW = 4096


class Value:
    """A search for the end of the value that begins with ``first``, which is a bracket or a quote.

    Brackets of either kind count alike, so what is taken of a broken value may be more or less than was meant; ``<``
    outside strings, which JSON never has and tags begin with, breaks it off. A backslash escapes everywhere. Time is in
    proportion to the text, whatever it is, and Python looks one by one at brackets only.
    """

    def __init__(self, first: str) -> None:
        self.done = False
        """The value is complete."""
        self.broken = False
        """It never will be."""
        self._string = first == '"'
        self._begun = False
        self._quoted = False
        self._depth = 0

    def scan(self, text: str, place: int) -> int:
        """Go on at ``text[place]``; returns where the value ends, or how far it is known to go.

        That may be one character short of the end of the text, where a backslash waits for what it escapes.
        """
        window = 32  # most values are short, and what lies behind them should not be looked at
        while place < len(text) and not self.done and not self.broken:
            piece = text[place : place + window]
            if (len(piece) - len(piece.rstrip("\\"))) % 2:
                piece = piece[:-1]
            if not piece:
                break
            plain = piece.replace("\\\\", "__").replace('\\"', "__")
            place += self._in_string(plain) if self._string else self._in_brackets(plain)
            window = min(2 * window, _WINDOW)
        return place

    def _in_string(self, text: str) -> int:
        end = text.find('"', 0 if self._begun else 1) + 1
        self._begun = True
        self.done = end > 0
        return end or len(text)

    def _in_brackets(self, text: str) -> int:
        parts = text.split('"')
        outside = "".join(parts[self._quoted :: 2])
        kinds = outside.encode("latin-1", "replace").translate(_KINDS, _NO_SIGN)
        closing = kinds.count(0)
        if closing < self._depth and 3 not in kinds:
            self._depth += len(kinds) - 2 * closing
        else:
            for number, kind in enumerate(kinds):
                self._depth += kind - 1
                if kind == 3 or not self._depth:
                    self.broken, self.done = kind == 3, kind != 3
                    parts[1 - self._quoted :: 2] = [" " * len(part) for part in parts[1 - self._quoted :: 2]]
                    sign = next(islice(_SIGNS.finditer('"'.join(parts)), number, None))
                    return sign.start() + self.done
        self._quoted ^= len(parts) % 2 == 0
        return len(text)
