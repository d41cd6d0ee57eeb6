"""Checks the sections of a file (`strict_yaml`) against a declared shape. Knows nothing of what is declared.

A shape is a mapping from keys to kinds. A kind is an annotation (str, int, float, bool, None, Any, Literal, unions,
tuple[X, ...], list[X], dict[K, X]), a dataclass, a class that has ``parse`` for a piece of text, Section itself, or a
shape again, which gives the values of the keys that are there.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from shardwise.strict_yaml import Section, Word, resolve

T = TypeVar("T")


def build(section: Section, kind: type[T]) -> T:
    """The dataclass whose fields a section gives; a field's ``metadata`` may name its key where the two differ.

    ValueError, with the line, for unknown keys, missing ones, and values that aren't of their kind or that the
    dataclass refuses.
    """
    names = {item.metadata.get("key", item.name): item for item in fields(kind) if item.init}  # type: ignore[arg-type]
    found = values(section, shape_of(kind))
    for key, item in names.items():
        if key not in found and item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{section.where}: {key} is missing")
    try:
        return kind(**{names[key].name: value for key, value in found.items()})
    except ValueError as error:
        raise located(section, error) from None


def shape_of(kind: type[Any]) -> dict[str, Any]:
    """The keys of a dataclass and their kinds."""
    hints = typing.get_type_hints(kind)
    return {item.metadata.get("key", item.name): hints[item.name] for item in fields(kind) if item.init}


def values(section: Section, shape: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section's keys, as their kinds; ValueError with the line and, for an unknown key, the nearest."""
    for key in section:
        if key not in shape:
            raise section.error(key, f"unknown key {key!r}; {_nearest(key, shape)}")
    found: dict[str, Any] = {}
    for key, value in section.items():
        try:
            found[key] = _convert(value, shape[key])
        except _Unfit as unfit:
            why = str(unfit) or f"{key} must be {_name(shape[key])}, not {_quote(value)}"
            raise section.error(key, why) from None
    return found


def located(section: Section, error: ValueError) -> ValueError:
    """An error about a section's values, with the line of the key that it begins with, if there is one."""
    match = re.match(r"[\w-]+", str(error))
    return section.error(match[0] if match else "", str(error))


class _Unfit(Exception):
    """A value is not of its kind; with the reason, where the kind gave one."""


def _convert(value: Any, kind: Any) -> Any:
    """A value as a kind; ValueError, with its line, for what is wrong within it, or _Unfit."""
    if isinstance(kind, Mapping) or is_dataclass(kind) or kind is Section:
        if isinstance(value, Section):
            if kind is Section:
                return value
            return values(value, kind) if isinstance(kind, Mapping) else build(value, kind)  # type: ignore[arg-type]
        if not hasattr(kind, "parse"):
            raise _Unfit
    origin, inner = get_origin(kind), get_args(kind)
    if len(choices := _choices(kind)) > 1:
        return _first(value, choices)
    if hasattr(kind, "parse"):
        if value is None or isinstance(value, bool | list | Section):
            raise _Unfit
        try:
            return kind.parse(str(value))
        except ValueError as error:
            raise _Unfit(str(error)) from None
    if origin in (tuple, list, Sequence):
        return _items(value, origin, inner)
    if origin in (dict, Mapping):
        if not isinstance(value, Section):
            raise _Unfit
        return {_convert(Word(key), inner[0]): _convert(item, inner[1]) for key, item in value.items()}
    if isinstance(value, Word) and kind is not str:
        value = resolve(value)
    if origin is Literal:
        fits = any(value == choice and type(value) is type(choice) for choice in inner)
    elif kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    elif kind is int:
        fits = isinstance(value, int) and not isinstance(value, bool)
    elif kind is type(None):
        fits = value is None
    else:
        assert kind in (str, bool, Any), f"{kind} is not a kind"
        fits = kind is Any or isinstance(value, kind)
    if not fits:
        raise _Unfit
    return str(value) if kind is str else _plain(value)


def _choices(kind: Any) -> tuple[Any, ...]:
    """The kinds of a union, or the one that it is."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _first(value: Any, kinds: tuple[Any, ...]) -> Any:
    """A value as the first kind that it fits. Words are None before they are text, and text only in the end."""
    reason = ""
    for kind in sorted(kinds, key=lambda kind: (kind is not type(None), kind is str)):
        try:
            return _convert(value, kind)
        except _Unfit as unfit:
            reason = str(unfit) or reason
    raise _Unfit(reason)


def _items(value: Any, origin: Any, inner: tuple[Any, ...]) -> Any:
    if not isinstance(value, list):
        raise _Unfit
    if origin is not tuple or inner[-1] is ...:
        found = [_convert(item, inner[0]) for item in value]
        return tuple(found) if origin is tuple else found
    if len(value) != len(inner):
        raise _Unfit
    return tuple(_convert(item, kind) for item, kind in zip(value, inner, strict=True))


def _plain(value: Any) -> Any:
    """Without the lines."""
    if isinstance(value, Section):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _name(kind: Any) -> str:
    """What a value should be, for people."""
    origin, inner = get_origin(kind), get_args(kind)
    if len(choices := _choices(kind)) > 1:
        *most, last = map(_name, choices)
        return f"{', '.join(most)} or {last}"
    if origin is Literal:
        return ("one of " if len(inner) > 1 else "") + ", ".join(map(str, inner))
    if origin in (tuple, list, Sequence):
        fixed = origin is tuple and inner[-1] is not ...
        return f"a list of {len(inner)}" if fixed else f"a list (each {_name(inner[0])})"
    if hasattr(kind, "parse"):
        return "a text"
    if origin in (dict, Mapping) and inner[1] is not Any:
        return f"a section (each key {_name(inner[0])}, each value {_name(inner[1])})"
    if origin in (dict, Mapping) or kind is Section or isinstance(kind, Mapping) or is_dataclass(kind):
        return "a section of keys"
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
    return names.get(kind, "a value")


def _quote(value: Any) -> str:
    if isinstance(value, Section | list):
        return "a section of keys" if isinstance(value, Section) else "a list"
    words: dict[Any, str] = {None: "null"} if value is None else {True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


def _nearest(key: str, shape: Mapping[str, Any]) -> str:
    """Which key was meant, of those here and of those in the sections within."""
    known = {name: name for name in shape}
    for outer, kinds in shape.items():
        for kind in _choices(kinds):
            inner = kind if isinstance(kind, Mapping) else shape_of(kind) if is_dataclass(kind) else {}  # type: ignore[arg-type]
            known = {name: f"{outer}.{name}" for name in inner} | known
    near = get_close_matches(key, known, 1)
    return f"did you mean {known[near[0]]!r}?" if near else f"known: {', '.join(shape)}"
