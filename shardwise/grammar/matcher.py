"""How far one sequence has come in its grammar, and what may come next. Knows no grammar's language."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

DEAD_END = "no token of the vocabulary continues the text"


class Matcher:
    """The state of one sequence, used by one thread at a time.

    Whether the text may end is decided here and not by llguidance: where it is complete, any of ``ends`` may follow,
    and nowhere else. An end token is never read as text, though it may have a spelling.
    """

    def __init__(self, start: Callable[[], LLMatcher], vocab_size: int, ends: frozenset[int]) -> None:
        """``start`` gives one at the start of a text. Copies of one share what they have learnt, and its limits."""
        self._start = start
        self._inner = start()
        self._vocab_size = vocab_size
        self._ends = ends
        self._end_bits = sum(1 << token for token in ends if token < vocab_size)
        self._text_bits = ((1 << vocab_size) - 1) & ~self._end_bits
        self._taken: list[int] = []
        self._next: int | None = None
        """Bit t: token t may come next. None until asked for."""

    def mask(self) -> bytes:
        """Bit t % 8 of byte t // 8 tells whether token t may come next; no bit at all is set once there is an error."""
        return self._allowed().to_bytes((self._vocab_size + 7) // 8, "little")

    def advance(self, token: int) -> bool:
        """Take a token; False if the grammar does not allow it, and then nothing has changed.

        False for a token that the mask allows is an error: reading it went beyond a limit.
        """
        if self._over or token in self._ends:
            allowed = token in self._ends and (self._over or self._inner.is_accepting())
        else:
            known = 0 <= token < self._vocab_size
            # At a limit it is found invalid, without an error: what the mask allows must yield one.
            fits = known and (self._inner.validate_tokens([token]) == 1 or bool(self._allowed() >> token & 1))
            allowed = fits and self._inner.consume_token(token)
        if allowed:
            self._taken.append(token)
        if allowed or self._inner.is_error():
            self._next = None
        return allowed

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` tokens; after an error, the others are read anew as if these had never been."""
        assert 0 <= count <= len(self._taken)
        kept = len(self._taken) - count
        taken_back = [token for token in self._taken[kept:] if token not in self._ends]
        del self._taken[kept:]
        self._next = None
        if self._inner.is_error():  # of which llguidance has no way back
            fresh = Matcher(self._start, self._vocab_size, self._ends)
            for token in self._taken:
                fresh.mask()  # its work is limited too: each must come in its place
                fresh.advance(token)
            fresh.mask()
            self._inner = fresh._inner
        elif taken_back:
            self._inner.rollback(len(taken_back))

    @property
    def finished(self) -> bool:
        """Nothing but an end token may follow."""
        return self._over or (not self._allowed() & self._text_bits and self._inner.is_accepting())

    @property
    def error(self) -> str | None:
        """Why the text can't go on, in one sentence: it grew too ambiguous for the parser, or nothing fits."""
        if self._over or self._allowed() & self._text_bits or self._inner.is_accepting():
            return None
        return sentence(self._inner.get_error()) if self._inner.is_error() else DEAD_END

    def copy(self) -> Matcher:
        """Another sequence at this point of the text."""
        other = copy(self)
        other._inner = self._inner.deep_copy()
        other._taken = self._taken.copy()
        return other

    @property
    def _over(self) -> bool:
        return bool(self._taken) and self._taken[-1] in self._ends

    def _allowed(self) -> int:
        if self._next is None:
            if self._over:
                self._next = self._end_bits
            else:
                text = int.from_bytes(self._inner.compute_bitmask(), "little") & self._text_bits
                self._next = text | (self._end_bits if self._inner.is_accepting() else 0)
        return self._next


def sentence(text: str) -> str:
    """What an error of llguidance says, without its backtraces, states and pictures."""
    if text.startswith("panic"):
        return "llguidance can't compile it; write it another way"
    if text.startswith("NoExtension"):
        return DEAD_END
    said = re.search(r"^error: (.+)$", text, re.MULTILINE)  # of a regular expression, below a picture of it
    first = said[1] if said else re.split(r"<\w+/?>|\n", text, maxsplit=1)[0].strip()
    first = re.sub(r"^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: |invalid regex .* \(in \w+\): )", "", first)
    return re.sub(r"^(?:at )?(\d+)\(\d+\): ", r"line \1: ", first)
