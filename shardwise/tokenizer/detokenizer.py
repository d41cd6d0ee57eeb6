"""Text of a request as its tokens come, without a character that may still change or belong to a stop string.

Knows a tokenizer's bytes; what happens to a request that has stopped is others' business.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache

from shardwise.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """Incremental decoding of the tokens that continue a prompt, up to the first stop string.

    The pieces of ``push`` and ``finish`` in a row are ``tokenizer.continuation(ids)`` cut before the stop string that
    is complete first (the longest of several that end together), however the text falls into tokens. Each token costs
    time in proportion to its own text alone.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), skip_special_tokens: bool = True):
        self.stopped = False
        """A stop string is complete; nothing more will come."""
        self.received = 0
        """Characters that the tokens so far have begun, and of these how many have been returned."""
        self.released = 0
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = [_Stop(text) for text in stop]
        self._held = ""
        self._decoded = 0

    def push(self, token: int) -> str:
        """Take the next token; return the text that is now certain."""
        if self.stopped or token in self._skipped:
            return ""
        text = self._decoder.decode(self._tokenizer.spell(token))
        self._decoded += len(text)
        self.received = self._decoded + bool(self._decoder.getstate()[0])  # half a character counts as one
        return self._release(text)

    def finish(self) -> str:
        """The rest of the text when no token will follow; an incomplete character becomes U+FFFD, as in ``decode``."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        text = self._certain(text)
        self.released += len(text)
        return text

    def _certain(self, text: str) -> str:
        if not self._stops:
            return text
        known = len(self._held)
        self._held += text
        for place, char in enumerate(text, known + 1):
            complete = [len(stop.text) for stop in self._stops if stop.push(char)]
            if complete:
                self.stopped = True
                text, self._held = self._held[: place - max(complete)], ""
                return text
        keep = len(self._held) - max(stop.matched for stop in self._stops)
        text, self._held = self._held[:keep], self._held[keep:]
        return text


class _Stop:
    """A search for one string, letter by letter (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str):
        self.text = text
        self.matched = 0
        """Letters of ``text`` with which what was pushed ends, as many as possible."""
        self._border = _borders(text)

    def push(self, char: str) -> bool:
        """Is the string complete with this letter?"""
        self.matched = _advance(self.text, self._border, self.matched, char)
        return self.matched == len(self.text)


@lru_cache(maxsize=64)  # the continuations of a request have the same strings
def _borders(text: str) -> list[int]:
    """For each prefix: the longest shorter prefix that it ends with."""
    border = [0] * len(text)
    for place in range(1, len(text)):
        border[place] = _advance(text, border, border[place - 1], text[place])
    return border


def _advance(text: str, border: Sequence[int], matched: int, char: str) -> int:
    while matched and text[matched] != char:
        matched = border[matched - 1]
    return matched + (text[matched] == char)
