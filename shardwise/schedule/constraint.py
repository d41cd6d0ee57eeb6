"""Which tokens may come next in one sequence: allowed ids, no end before min_tokens, bad words, a grammar.

Knows token ids and bit masks; what a grammar is, its matcher knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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
        """Take back the last ``count`` tokens; after an error, the others are read anew as if these had never been."""


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
        bad_words: Collection[tuple[int, ...]],
        matcher: Matcher | None,
    ) -> None:
        self._width = -(-vocab_size // 8)
        self._ends = ends
        self._min_len = min_len
        self._end_bits = _bits(ends)
        everything = (1 << vocab_size) - 1
        self._always = everything if allowed is None else _bits(allowed)
        self._always &= ~_bits(word[0] for word in bad_words if len(word) == 1)
        self._words: dict[int, list[tuple[int, ...]]] = {}
        """Bad words of several tokens, by the last but one."""
        for word in bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(word)
        self._everything = everything
        self._matcher = matcher
        self._after: dict[tuple[int, ...], int] = {}
        """The masks that were asked for, by the drafts since the sequence's last token."""
        self._ahead, self._has_read = True, False
        """May drafts be read, and has the matcher read any? What it reads counts towards its limits."""

    def advance(self, token: int) -> None:
        """The sequence has grown by ``token``, which the masks allowed."""
        self._after.clear()
        if self._matcher is not None:
            taken = self._matcher.advance(token) or (self._restored() and self._matcher.advance(token))
            assert taken or self._matcher.error, f"token {token} was drawn against the grammar"

    def ended(self, tokens: Sequence[int]) -> tuple[str, str] | None:
        """Why nothing can follow ``tokens``: a finish reason ("stop" or "error") and, for an error, a sentence."""
        if self._matcher is not None and self._matcher.error:
            self._restored()
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
        read = 0
        for token in drafts if self._ahead else ():
            if not masks[-1] >> token & 1:
                break
            if token in self._ends:
                masks.append(self._everything)
                break
            before.append(token)
            path = tuple(before[len(tokens) :])
            if path not in self._after:
                while read < len(path) and (self._matcher is None or self._matcher.advance(path[read])):
                    read += 1
                mask = self._mask(before) if read == len(path) else 0
                if not mask and self._matcher is not None and self._matcher.error:
                    self._matcher.rollback(read)
                    self._ahead, read = False, 0
                    break
                self._after[path] = mask
            masks.append(self._after[path] or self._everything)
            if not self._after[path]:  # a grammar that is complete
                break
        if self._matcher is not None and read:
            self._has_read = True
            self._matcher.rollback(read)
        return [b"" if mask == self._everything else mask.to_bytes(self._width, "little") for mask in masks]

    def _first(self, tokens: Sequence[int]) -> int:
        if () not in self._after:
            self._after[()] = self._mask(tokens)
        return self._after[()]

    def _restored(self) -> bool:
        """After an error: have the matcher forget what drafts have cost, once, and let it read no more of them."""
        assert self._matcher is not None
        if not (self._ahead and self._has_read):
            return False
        self._ahead = False
        self._matcher.rollback(0)
        return True

    def _mask(self, before: Sequence[int]) -> int:
        mask = self._always
        if self._matcher is not None:
            mask &= int.from_bytes(self._matcher.mask(), "little")
        if len(before) < self._min_len:
            mask &= ~self._end_bits
        for word in self._words.get(before[-1], ()):
            if len(word) <= len(before) + 1 and tuple(before[1 - len(word) :]) == word[:-1]:
                mask &= ~(1 << word[-1])
        return mask


def _bits(tokens: Iterable[int]) -> int:
    found = list(tokens)
    bits = bytearray(max(found, default=0) // 8 + 1)
    for token in found:
        bits[token >> 3] |= 1 << (token & 7)
    return int.from_bytes(bits, "little")
