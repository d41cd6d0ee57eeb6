"""A model's chat template, which is a stranger's program: run in a sandbox, with the names that templates expect.

Knows messages and text, no tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser

from shardwise.tokenizer.meter import MAX_CHARS, Meter
from shardwise.tokenizer.sandbox import METER, Sandbox

MAX_SAID = 500
"""Characters of a template's own message."""


class Template:
    """A compiled template. Raises ValueError for one that is malformed, or does what no chat template needs."""

    def __init__(self, source: str):
        sandbox = Sandbox(
            {"raise_exception": _raise_exception, "strftime_now": _strftime_now}, [loopcontrols, _Generation]
        )
        try:
            tree = sandbox.parse(source)
            self.variables = frozenset(find_undeclared_variables(tree))
            """What it reads of what it is given."""
            self._template = sandbox.from_string(tree)
        except Exception as error:  # Python's own compiler has its limits too
            raise ValueError(f"the chat template can't be compiled: {_said(error)}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """The text of a chat. Raises ValueError with the template's own message if it refuses or fails.

        It is given copies of the messages and ``values``, all of which must be plain data.
        """
        pieces: list[str] = []
        size = 0
        try:
            given = {"tools": None, "documents": None, **values, "messages": messages}
            copies = {name: _plain(value) for name, value in given.items()}
            for piece in self._template.generate({**copies, METER: Meter()}):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARS:
                    raise ValueError(f"more than {MAX_CHARS} characters")
        except Exception as error:  # a stranger's program may raise anything
            raise ValueError(f"chat template: {_said(error)}") from error
        return "".join(pieces)


class _Generation(Extension):
    """``{% generation %}`` marks what to train on; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        """Parse the block to its body."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 100 or re.search(r"%[^a-zA-Z%]", form):
        raise ValueError("strftime_now takes a short format without widths")
    return datetime.now().strftime(form)


def _said(error: Exception) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= MAX_SAID else said[:MAX_SAID] + " …"


def _plain(value: Any) -> Any:
    """A copy that nothing but a template has hold of."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__!r} is not plain data")
