"""What one rendering of a chat template may still do: every piece of work is paid for in steps before it is done.

Knows values, and nothing of programs.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, KeysView, ValuesView
from typing import Any, cast

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined

MAX_STEPS = 200_000
"""Of one rendering: in all about a quarter of a second of a template that does its worst."""
MAX_CHARS = 8 * 2**20
"""Of any text that a template makes."""
CHARS, ITEMS = 9, 4
"""Powers of two: so many characters, or items of a list, are handled for one step."""
_FORMAT = re.compile(r"%(?:%|[-+ #0]*\d{0,3}(?:\.\d{1,3})?[a-zA-Z])")


class Meter:
    """What one rendering may still do."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_STEPS

    def take(self, steps: int) -> None:
        """Pay. Raises SecurityError if there is not so much."""
        self.left -= steps
        if self.left < 0 or steps < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps; send less, or give the model another template")

    def weigh(self, value: Any, *, text: bool = False) -> None:
        """Pay for all that a value holds, however deep; for its ``text``, it must be plain data too."""
        waiting = [value]
        while waiting:
            item = waiting.pop()
            self.take(1)
            if isinstance(item, str):
                self.take(len(item) >> CHARS)
            elif isinstance(item, dict):
                waiting += item.keys()
                waiting += item.values()
            elif isinstance(item, list | tuple | KeysView | ItemsView | ValuesView):
                waiting += item
            elif text and not isinstance(item, int | float | range | Undefined | None):
                raise SecurityError(f"{type(item).__name__!r} can't be written as text")

    def size(self, chars: int) -> None:
        """Pay for a text that is about to be made."""
        if chars > MAX_CHARS:
            raise SecurityError(f"a text of more than {MAX_CHARS} characters")
        self.take(1 + (chars >> CHARS))

    def text(self, value: Any) -> str:
        """What a value is written as."""
        if type(value) is not str:
            self.weigh(value, text=True)
            value = str(value)
        self.size(len(value))
        return cast(str, value)

    def join(self, texts: list[str], between: str = "") -> str:
        """One text of several."""
        self.size(sum(map(len, texts)) + len(between) * len(texts))
        return between.join(texts)

    def replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        """As str.replace."""
        times = text.count(old) if count < 0 else min(count, text.count(old))
        self.size(len(text) + times * len(new))
        return text.replace(old, new, count)

    def format(self, form: str, values: Any) -> str:
        """As ``form % values``, of plain fields at most 999 wide."""
        found = _FORMAT.findall(form)
        if len(found) < form.replace("%%", "").count("%") or "*" in form:
            raise SecurityError("a field of a format is not supported")
        self.weigh(values, text=True)
        for value in values if isinstance(values, tuple) else (values,):
            self.size(len(str(value)))
        self.size(len(form) + 2000 * len(found))
        return str(form % values)
