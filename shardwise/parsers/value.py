"""Where a JSON value ends in text that comes in pieces: brackets and strings are followed, grammar is not checked."""

from __future__ import annotations

import re
from itertools import islice

_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_STRINGS = re.compile(_STRING, re.DOTALL)
_BRACKETS_AND_STRINGS = re.compile(rf"[][{{}}]|{_STRING}", re.DOTALL)
_QUOTED = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_OUTSIDE = re.compile(rf'[^"<]*(?:{_STRING}[^"<]*)*', re.DOTALL)
"""Text with whole strings, up to a string that does not end or to ``<``."""

_STEP = bytes.maketrans(b"[{]}", b"\2\2\0\0")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_WINDOW = 4096


class Value:
    """A search for the end of one value that begins with a bracket or a quote.

    Brackets of either kind count alike, so what is returned of a broken value may be more or less than was meant;
    ``<`` outside strings, which JSON never has and tags begin with, breaks it off. Any text costs time in proportion
    to its length, 16 MB/s at worst: the work on single characters is left to regular expressions without backtracking
    and to ``bytes``.
    """

    def __init__(self) -> None:
        self.done = False
        """The value is complete."""
        self.broken = False
        """It will never be."""
        self._depth = 0
        self._quoted = False

    def scan(self, text: str, place: int) -> int:
        """Go on at ``text[place]``; returns where the value ends, or how far it is known to go.

        That may be one character short of the end of the text, where a backslash waits for what it escapes.
        """
        window = 32  # most values are short, and what lies behind them should not be looked at
        while place < len(text):
            end, window = place + window, min(2 * window, _WINDOW)
            if self._quoted:
                place = _end(_QUOTED, text, place, end)
                if place == len(text) - 1 and text[place] == "\\":
                    break
                if place < len(text) and text[place] == '"':
                    place += 1
                    self._quoted = False
                    if not self._depth:
                        self.done = True
                        break
            elif text[place] == '"':
                place += 1
                self._quoted = True
            elif text[place] == "<":
                self.broken = True
                break
            else:
                place = self._follow(text, place, _end(_OUTSIDE, text, place, end))
                if self.done:
                    break
        return place

    def _follow(self, text: str, place: int, stop: int) -> int:
        """Follow the brackets of a text with whole strings only; returns the end of the value, or else ``stop``."""
        bare = _STRINGS.sub("", text[place:stop])
        steps = bare.encode("latin-1", "replace").translate(_STEP, _NO_BRACKET)
        closing = steps.count(0)
        if closing < self._depth:
            self._depth += len(steps) - 2 * closing
            return stop
        depth = self._depth
        for number, step in enumerate(steps):
            depth += step - 1
            if not depth:
                self.done = True
                tokens = _BRACKETS_AND_STRINGS.finditer(text, place, stop)
                ends = (token.end() for token in tokens if text[token.start()] != '"')
                return next(islice(ends, number, None))
        self._depth = depth
        return stop


def _end(pattern: re.Pattern[str], text: str, place: int, stop: int) -> int:
    found = pattern.match(text, place, stop)
    assert found, "these patterns match no text, too"
    return found.end()
