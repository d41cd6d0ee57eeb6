"""Reasoning apart from the answer: ``<think>…</think>`` at the beginning of the text, both told exactly as written."""

from __future__ import annotations

import re

from shardwise.parsers.marker import SPACE, begun

OPEN, CLOSE = "<think>", "</think>"
_START = re.compile(rf"[{SPACE}]{{0,32}}{OPEN}")
_LONGEST_START = 32 + len(OPEN)


class Reasoning:
    """Splits text that comes in pieces into reasoning and the rest.

    Reasoning begins with ``<think>``, before which only a little white space may stand; if the prompt ``opened`` it
    already, it begins at once, and a tag that the model writes all the same is dropped. It ends with the first
    ``</think>`` or with the text. Any other tag is text like any other.
    """

    def __init__(self, opened: bool):
        self._opened = opened
        self._inside = self._after = False
        self._held = ""

    def push(self, text: str, final: bool = False) -> tuple[str, str]:
        """The next piece of text; returns what is certain now: (reasoning, rest). The last one is ``final``."""
        if self._after:
            return "", text
        text, self._held = self._held + text, ""
        if not self._inside:
            start = _START.match(text)
            if start:
                text = text[start.end() :]
            elif not final and len(text) < _LONGEST_START and OPEN.startswith(text.lstrip(SPACE)):
                self._held = text
                return "", ""
            elif not self._opened:
                self._after = True
                return "", text
            self._inside = True
        reasoning, tag, rest = text.partition(CLOSE)
        if tag:
            self._after = True
        elif not final:
            keep = len(text) - begun(text, CLOSE)
            reasoning, self._held = text[:keep], text[keep:]
        return reasoning, rest
