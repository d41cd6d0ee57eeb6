"""YAML that people write, read safely: text in, a Section that knows its lines out. What its keys mean is for `shapes`.

Only the parser's events are used, so nothing is ever constructed from a file, and plain words mean what YAML 1.2 says:
``1e-5`` is a number and ``no`` is a word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 2**17
MAX_DEPTH = 16

WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
WHOLE = re.compile(r"[-+]?[0-9]{1,30}|0o[0-7]{1,30}|0x[0-9a-fA-F]{1,30}")
NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


class Section(dict[str, Any]):
    """A mapping of a file, which knows where it stands, and where each of its keys does, as ``FILE:LINE``."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self._lines: dict[str, str] = {}

    def put(self, key: str, value: Any, where: str) -> None:
        """Set a value that stands at ``where``."""
        self[key] = value
        self._lines[key] = where

    def at(self, key: str) -> str:
        """Where a key stands; the section itself, if the key isn't there."""
        return self._lines.get(key, self.where)

    def error(self, key: str, text: str) -> ValueError:
        """An error to raise about a key."""
        return ValueError(f"{self.at(key)}: {text}")


class Word(str):
    """Text said outside of a file, where no quotes tell numbers from text: its kind says what it is."""

    __slots__ = ()


def read_file(path: Path) -> Section:
    """The mapping in a file; ValueError, with the line, for what isn't one, can't be read or is too large."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not text in UTF-8") from None
    return read(text, path)


def read(text: str, path: str | Path) -> Section:
    """The mapping in a text that came from ``path``; ValueError with the line, as ``read_file``."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"{path}: is larger than {MAX_BYTES} bytes")
    found = _parse(text, lambda line: f"{path}:{line + 1}")
    if found is None:
        return Section(f"{path}:1")
    if not isinstance(found, Section):
        raise ValueError(f"{path}:1: must be a mapping of keys to values")
    return found


def override(section: Section, assignments: Iterable[str]) -> None:
    """Set values by ``key=value``, with dots for keys within sections.

    A value is a word, or YAML in brackets or quotes. Its key and its kind are checked when those of the section are.
    ValueError if an assignment is none.
    """
    for assignment in assignments:
        path, given, text = assignment.partition("=")
        *outer, last = path.split(".")
        where = f"argument {assignment!r}"
        if not given or not all(part.strip() for part in (*outer, last)):
            raise ValueError(f"{where}: must be key=value, or section.key=value")
        within = section
        for key in outer:
            if not isinstance(within.get(key), Section):
                within.put(key, Section(where), where)
            within = within[key]
        within.put(last, _said(text, where), where)


def _said(text: str, where: str) -> Any:
    return _parse(text, lambda line: where) if text[:1] in ("[", "{", '"', "'") else Word(text)


Place = Callable[[int], str]
"""Where a line stands, of those that are counted from 0."""


def _parse(text: str, place: Place) -> Any:
    try:
        return _document(yaml.parse(text, yaml.SafeLoader), place)
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{place(mark.line if mark else 0)}: is not valid YAML: {what}") from None


def _document(events: Iterator[Any], place: Place) -> Any:
    found: list[Any] = []
    for event in events:
        where = place(event.start_mark.line)
        if isinstance(event, yaml.NodeEvent):
            if found:
                raise ValueError(f"{where}: a second document; give one")
            found.append(_value(event, events, place, 1))
    return found[0] if found else None


def _value(event: Any, events: Iterator[Any], place: Place, depth: int) -> Any:
    where = place(event.start_mark.line)
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        raise ValueError(f"{where}: anchors and aliases are not read; write the value out")
    if event.tag is not None:
        raise ValueError(f"{where}: tags such as {event.tag} are not read; leave it out")
    if isinstance(event, yaml.ScalarEvent):
        return resolve(event.value) if event.style is None else event.value
    if depth > MAX_DEPTH:
        raise ValueError(f"{where}: is nested more than {MAX_DEPTH} deep")
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(inner := next(events), yaml.SequenceEndEvent):
            items.append(_value(inner, events, place, depth + 1))
        return items
    section = Section(where)
    while not isinstance(key := next(events), yaml.MappingEndEvent):
        at = place(key.start_mark.line)
        _value(key, events, place, depth + 1)
        if not isinstance(key, yaml.ScalarEvent):
            raise ValueError(f"{at}: a key must be a word")
        if key.value in section:
            raise ValueError(f"{at}: {key.value!r} is given twice, first at {section.at(key.value)}")
        section.put(key.value, _value(next(events), events, place, depth + 1), at)
    return section


def resolve(text: str) -> Any:
    """A plain word as YAML 1.2's core schema reads it."""
    if text in WORDS:
        return WORDS[text]
    if WHOLE.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    return float(text) if len(text) < 100 and NUMBER.fullmatch(text) else str(text)
