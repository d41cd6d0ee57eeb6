"""A model's chat template, which is a stranger's program: run in jinja's sandbox, with the names that templates expect.

Knows messages and text, no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 8 * 2**20
"""Longest text that a template may write."""


class Template:
    """A compiled template. Raises ValueError for one that is malformed."""

    def __init__(self, source: str):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        for name in ("lipsum", "cycler", "joiner"):  # no template needs them, and they lead out of sandboxes
            del environment.globals[name]
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"the model's chat template can't be compiled: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """The text of a chat. Raises ValueError with the template's own message if it refuses or fails."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(messages=messages, tools=None, documents=None, **values):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARS:
                    raise ValueError(f"more than {MAX_CHARS} characters")
        except Exception as error:  # a stranger's program may raise anything
            raise ValueError(f"chat template: {error}") from error
        return "".join(pieces)


class _Generation(Extension):
    """``{% generation %}`` marks what to train on; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        """Parse the block to its body."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
