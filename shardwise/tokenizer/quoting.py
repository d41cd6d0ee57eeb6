"""A chat's prompt in which special tokens that users spell out are text: only the template writes real ones.

Each such spelling is broken by marks before the template sees it, and tokenised as text where the mark is found again.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.tokenizer.tokenizer import Tokenizer


class Quoting:
    """For one prompt: ``quote`` all that users say, render, then ``encode``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._mark = f"\ufdd0{secrets.randbelow(10**12):012}\ufdd1"  # nothing that a template would change
        self._special = tokenizer.special_pattern

    def quote(self, value: Any) -> Any:
        """Plain data with every spelling of a special token broken."""
        if self._special is None:
            return value
        if isinstance(value, str):
            return self._special.sub(lambda found: self._mark.join(found[0]), value)
        if isinstance(value, Mapping):
            return {self.quote(name): self.quote(item) for name, item in value.items()}
        if isinstance(value, Sequence):
            return [self.quote(item) for item in value]
        return value

    def encode(self, text: str) -> tuple[str, list[int]]:
        """A rendered text without its marks, and its tokens. Raises ValueError for what can't be encoded."""
        if self._special is None:
            return text, self._tokenizer.encode(text, add_special_tokens=False)
        bare = text.replace(self._mark, "")
        written = [found.span() for found in self._special.finditer(text)]
        ids: list[int] = []
        start = at = 0
        for begin, end in [*written, (len(text), len(text))]:
            if self._mark in text[at:begin]:
                ids += self._tokenizer.encode(text[start:at], add_special_tokens=False)
                ids += self._tokenizer.encode(text[at:begin].replace(self._mark, ""), False, plain=True)
                start = begin
            at = end
        ids += self._tokenizer.encode(text[start:], add_special_tokens=False)
        control = self._tokenizer.control
        if sum(token in control for token in ids) > len(written):  # it was spelt in letters that are taken for others
            raise ValueError("the prompt holds a special token in other letters; remove what looks like one")
        return bare, ids


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, template: str | None = None, **values: Any
) -> tuple[str, list[int]]:
    """The text and tokens of a conversation; ``values`` are the chat template's variables.

    Raises ValueError if there is no template, and with its own message if it refuses.
    """
    quoting = Quoting(tokenizer)
    given = {name: quoting.quote(value) for name, value in values.items()}
    return quoting.encode(tokenizer.chat(quoting.quote(messages), template=template, **given))


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of the texts at each place; in time that does not grow with their number."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_branch(tree))


def _branch(node: dict[str, Any]) -> str:
    stem = ""
    while len(node) == 1 and "" not in node:
        ((char, node),) = node.items()
        stem += re.escape(char)
    parts = [re.escape(char) + _branch(inner) for char, inner in sorted(node.items()) if char]
    return stem + (f"(?:{'|'.join(parts)}){'?' if '' in node else ''}" if parts else "")
