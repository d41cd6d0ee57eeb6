"""Which tokens may come next in one sequence: allowed ids, no end before min_tokens, bad words, a grammar.

Knows token ids and bit masks; what a grammar is, its matcher knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Matcher(Protocol):
    """A grammar's place in one sequence."""

    @property
    def finished(self) -> bool:
        """May nothing but an end token follow?"""

    @property
    def error(self) -> str | None:
        """Why it can't go on, if so."""

    def mask(self) -> bytes:
        """Bit t % 8 of byte t // 8: may token t come next? End tokens may where the text is complete."""

    def advance(self, token: int) -> bool:
        """Take a token; False, and nothing has changed, if it is not allowed."""

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` tokens."""


class Constraint:
    """The masks of one sequence. ``allowed`` None means all tokens below ``vocab_size``.

    ``ends`` may not be drawn before the sequence has ``min_len`` tokens, prompt included. No ``bad_words`` (token ids)
    is ever completed. ``matcher`` is at the end of the sequence's tokens and stays there between calls.
    """

    def __init__(
        self,
        vocab_size: int,
        ends: frozenset[int],
        min_len: int,
        allowed: Iterable[int] | None,
        bad_words: Iterable[Sequence[int]],
        matcher: Matcher | None,
    ) -> None:
        self._width = -(-vocab_size // 8)
        self._ends = ends
        self._min_len = min_len
        self._end_bits = _bits(ends)
        everything = (1 << vocab_size) - 1
        words = [list(word) for word in bad_words]
        self._always = everything if allowed is None else _bits(allowed)
        self._always &= ~_bits(word[0] for word in words if len(word) == 1)
        self._words = [word for word in words if len(word) > 1]
        self._everything = everything
        self._matcher = matcher
        self._next: int | None = None
        """The mask after the sequence's last token, if it has been asked for."""

    def advance(self, token: int) -> None:
        """The sequence has grown by ``token``, which the masks allowed."""
        self._next = None
        if self._matcher is not None:
            taken = self._matcher.advance(token)
            assert taken or self._matcher.error, f"token {token} was drawn against the grammar"

    def ended(self, tokens: Sequence[int]) -> tuple[str, str] | None:
        """Why nothing can follow ``tokens``: a finish reason ("stop" or "error") and, for an error, a sentence."""
        if self._matcher is not None and self._matcher.error:
            return "error", self._matcher.error
        if self._matcher is not None and self._matcher.finished:
            return "stop", ""
        if not self._first(tokens):
            return "error", "no token satisfies allowed_token_ids, bad_words, min_tokens and the grammar together"
        return None

    def masks(self, tokens: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
        """A mask for each row after ``tokens``, then after each of ``drafts`` up to the first that may not stand.

        Hence one mask more than there are drafts worth verifying. After a draft with which the sequence would end,
        the last of them then, anything may come: it will be left out.
        """
        before = list(tokens)
        masks = [self._first(before)]
        taken = 0
        for token in drafts:
            if not masks[-1] >> token & 1:
                break
            if token in self._ends:
                masks.append(self._everything)
                break
            if self._matcher is not None and not self._matcher.advance(token):
                break
            taken += 1
            before.append(token)
            mask = self._mask(before)
            masks.append(mask or self._everything)
            if not mask:  # a grammar that is complete
                break
        if self._matcher is not None and taken:
            self._matcher.rollback(taken)
        return [b"" if mask == self._everything else mask.to_bytes(self._width, "little") for mask in masks]

    def _first(self, tokens: Sequence[int]) -> int:
        if self._next is None:
            self._next = self._mask(tokens)
        return self._next

    def _mask(self, before: Sequence[int]) -> int:
        mask = self._always
        if self._matcher is not None:
            mask &= int.from_bytes(self._matcher.mask(), "little")
        if len(before) < self._min_len:
            mask &= ~self._end_bits
        for word in self._words:
            if list(before[1 - len(word) :]) == word[:-1]:
                mask &= ~(1 << word[-1])
        return mask


def _bits(tokens: Iterable[int]) -> int:
    found = list(tokens)
    bits = bytearray(max(found, default=0) // 8 + 1)
    for token in found:
        bits[token >> 3] |= 1 << (token & 7)
    return int.from_bytes(bits, "little")
