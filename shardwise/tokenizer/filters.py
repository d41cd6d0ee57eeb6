"""The filters and tests of chat templates: which of jinja's there are, and our own for those that make much of little.

Each of our own gets the rendering's meter and the environment before the value. Knows nothing of prices.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jinja2 import Environment
from jinja2.exceptions import SecurityError
from jinja2.filters import do_capitalize, do_title, make_attrgetter
from markupsafe import escape

if TYPE_CHECKING:
    from shardwise.tokenizer.meter import Meter

MAX_WIDTH = 64
"""Of an indent, and of a separator in JSON."""
MAX_STRIPPED = 256
"""Different characters to strip."""

LIGHT_FILTERS = ("length", "count", "first", "last", "default", "d", "items")
SHALLOW_FILTERS = ("list", "reverse", "map", "select", "reject", "selectattr", "rejectattr")
DEEP_FILTERS = ("sort", "dictsort", "unique", "min", "max", "int", "float", "abs")
"""Jinja's own filters, by whether they look at one item, at each, or at all that is in each."""
DEEP_TESTS = (
    *("in", "==", "eq", "equalto", "!=", "ne"),
    *(">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le"),
)


def _whole(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"expected a whole number, not {type(value).__name__!r}")
    return value


LIGHT_TESTS: dict[str, Callable[..., bool] | None] = {
    **dict.fromkeys(("defined", "undefined", "none", "string", "mapping", "sequence", "iterable", "number")),
    **dict.fromkeys(("integer", "float", "boolean", "true", "false", "sameas")),
    "odd": lambda value: _whole(value) % 2 == 1,
    "even": lambda value: _whole(value) % 2 == 0,
    "divisibleby": lambda value, by: _whole(value) % _whole(by) == 0,
}
"""None: jinja's own."""


def _width(value: Any) -> None:
    if (len(value) if isinstance(value, str) else value or 0) > MAX_WIDTH:
        raise SecurityError(f"a width of more than {MAX_WIDTH}")


def _tojson(
    meter: Meter,
    environment: Environment,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter escapes for HTML."""
    for width in (indent, *(separators or ())):
        _width(width)
    meter.weigh(value, text=True)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    meter.size(len(text))
    return text


def _trim(meter: Meter, environment: Environment, value: Any, chars: str | None = None) -> str:
    if chars is not None and len(chars) > MAX_STRIPPED:
        raise SecurityError(f"more than {MAX_STRIPPED} characters to strip")
    return meter.text(value).strip(chars)


def _replace(meter: Meter, environment: Environment, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    return meter.replace(meter.text(value), meter.text(old), meter.text(new), -1 if count is None else count)


def _join(meter: Meter, environment: Environment, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return meter.join([meter.text(item) for item in value], meter.text(d))


def _indent(
    meter: Meter, environment: Environment, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    _width(width)
    space = width if isinstance(width, str) else " " * width
    text = meter.text(value)
    lines = (text + "\n" if blank else text).splitlines()
    meter.size(len(text) + len(lines) * len(space))
    rest = [line if not line and not blank else space + line for line in lines[1:]]
    return (space if first else "") + "\n".join([*lines[:1], *rest])


def _format(meter: Meter, environment: Environment, value: Any, *values: Any, **named: Any) -> str:
    return meter.format(meter.text(value), named or values)


OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "tojson": _tojson,
    "trim": _trim,
    "replace": _replace,
    "join": _join,
    "indent": _indent,
    "format": _format,
    "string": lambda meter, environment, value: meter.text(value),
    "safe": lambda meter, environment, value: value,
    "escape": lambda meter, environment, value: str(escape(meter.text(value))),
    "e": lambda meter, environment, value: str(escape(meter.text(value))),
    "upper": lambda meter, environment, value: meter.text(value).upper(),
    "lower": lambda meter, environment, value: meter.text(value).lower(),
    "capitalize": lambda meter, environment, value: do_capitalize(meter.text(value)),
    "title": lambda meter, environment, value: do_title(meter.text(value)),
}
