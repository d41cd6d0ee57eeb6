"""Reads a JSON schema and refuses what would not be enforced. Knows JSON Schema, and no grammar.

llguidance leaves keywords that it does not know, and formats named "unknown", without effect; here they are errors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 32
MAX_VALUES = 10_000
MAX_COUNT = 10**6
MAX_OPTIONAL = 1000
"""Properties of one object; the time that a token takes grows with their square, to 5 ms here."""
EXACT = 2**53
"""Above it not every whole number is a float64."""

ONE = {"items", "additionalProperties", "additionalItems"}
MANY = {"anyOf", "oneOf", "allOf", "prefixItems"}
NAMED = {"properties", "patternProperties", "$defs", "definitions"}
NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
ENFORCED = ONE | MANY | NAMED | NUMBERS | COUNTS | {"type", "enum", "const", "required", "pattern", "format", "$ref"}
NOTES = {
    *("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly"),
    *("writeOnly", "contentMediaType", "contentEncoding", "discriminator"),
}
"""Keywords that constrain nothing."""
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
KNOWN = ENFORCED | NOTES
CONSTRAINTS = ENFORCED - {"$defs", "definitions"}
INTERSECTING = {"allOf", "oneOf", "patternProperties"}
"""Keywords for which llguidance intersects schemas or expressions, which may take it any time."""
PLAIN_VALUES = 300
PLAIN_REFERENCES = 20
PLAIN_PATTERN = 200

WRITING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
    "lenient": False,
}
"""JSON as Python's json.dumps writes it: a small model that may emit white space emits it for ever. No \\u escapes, so
that each key has one spelling; otherwise a declared property could come again under another."""


def read_schema(text: str, check_pattern: Callable[[str], None]) -> tuple[dict[str, Any], bool]:
    """The schema with the options of its writing, and whether it is sure to compile in little time.

    Raises ValueError saying where and why it is refused, and what to do.
    """
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if schema is True:
        schema = {}
    plain = _count(schema) <= PLAIN_VALUES
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is an object, not {_short(schema)}")
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a text in it holds half a surrogate pair; remove it") from None
    reader = _Reader(schema, plain, check_pattern)
    try:
        reader.read(schema)
        reader.resolve()
    except ValueError as error:
        raise ValueError(f"{reader.place()}: {error}") from None
    schema.pop("$schema", None)
    return {**schema, "x-guidance": WRITING}, reader.plain


class _Reader:
    """Goes through a document once; ``path`` is where it is."""

    def __init__(self, root: dict[str, Any], plain: bool, check_pattern: Callable[[str], None]) -> None:
        self.plain = plain
        self.path: tuple[str, ...] = ()
        self._check_pattern = check_pattern
        self._root = root
        self._old = re.search(r"draft-0\d|2019-09", str(root.get("$schema"))) is not None
        self._seen: set[int] = set()
        """Of the schemas read, by id."""
        self._references: dict[str, tuple[str, ...]] = {}
        self._unions: list[tuple[dict[str, Any], tuple[str, ...]]] = []

    def place(self) -> str:
        """The JSON pointer of ``path``."""
        return "/".join(["#", *(name.replace("~", "~0").replace("/", "~1") for name in self.path)])

    def read(self, schema: Any) -> None:
        """Check a schema and those inside it."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise ValueError(f"a schema is an object, not {_short(schema)}")
        self._seen.add(id(schema))
        path = self.path
        for name, value in schema.items():
            self.path = (*path, name)
            self._read_keyword(schema, name, value)
        self.path = path
        optional = schema.get("properties", {}).keys() - schema.get("required", ())
        if len(optional) > MAX_OPTIONAL:
            raise ValueError(f"there are {len(optional)} optional properties; at most {MAX_OPTIONAL} are supported")
        constraints = schema.keys() & CONSTRAINTS
        if constraints & INTERSECTING or (constraints & {"anyOf", "$ref"} and len(constraints) > 1):
            self.plain = False

    def resolve(self) -> None:
        """Check, once all schemas are read, that references lead to some, and what unions are made of."""
        for target, path in self._references.items():
            self.path = path
            self._follow({"$ref": target})
        if len(self._references) > PLAIN_REFERENCES:
            self.plain = False
        for schema, path in self._unions:
            self.path = path
            if _tagged([self._follow(branch) for branch in schema["oneOf"]]):  # llguidance does not follow references
                if "anyOf" in schema:
                    raise ValueError("oneOf beside anyOf is not supported; put one of them into allOf")
                schema["anyOf"] = schema.pop("oneOf")

    def _read_keyword(self, schema: dict[str, Any], name: str, value: Any) -> None:
        if name not in KNOWN or (name == "$id" and len(self.path) > 1):
            raise ValueError("this keyword is not supported; leave it out")
        if name in NAMED:
            self._read_all(_kind(value, dict))
            if name == "patternProperties":
                for key in value:
                    self._check_pattern(key)
        elif name in MANY or (name == "items" and isinstance(value, list)):
            self._read_all({str(number): part for number, part in enumerate(_kind(value, list))})
        elif name in ONE:
            self.read(value)
        elif name in NUMBERS:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"a number is wanted, not {_short(value)}")
            _check_value(value)
        elif name in COUNTS:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
                raise ValueError(f"a whole number from 0 to {MAX_COUNT} is wanted, not {_short(value)}")
        elif name in ("enum", "const"):
            _check_value(value)
        elif name == "required":
            for word in _kind(value, list):
                _kind(word, str)
        elif name == "$ref":
            self._references[_kind(value, str)] = self.path
        elif name == "pattern":
            self._check_pattern(_kind(value, str))
            self.plain = self.plain and len(value) <= PLAIN_PATTERN
        elif name == "format" and value not in FORMATS:
            raise ValueError(f"{_short(value)} is not supported; known are {', '.join(FORMATS)}")
        if name == "minProperties" and value > max(1, len(_kind(schema.get("required", []), list))):
            raise ValueError("more than one property is not counted; name those that must be there in required")
        if name == "additionalItems" and not isinstance(schema.get("items"), list):
            raise ValueError("it constrains nothing, as items is no list; leave it out")
        if name == "prefixItems" and (self._old or isinstance(schema.get("items"), list)):
            raise ValueError("it is of JSON Schema 2020-12, where items is no list; use one draft's keywords")
        if name == "oneOf":
            self._unions.append((schema, self.path))

    def _read_all(self, parts: dict[str, Any]) -> None:
        path = self.path
        for name, part in parts.items():
            self.path = (*path, name)
            self.read(part)
        self.path = path

    def _follow(self, branch: Any) -> Any:
        """The schema that a reference leads to; any other schema is its own."""
        if not isinstance(branch, dict) or "$ref" not in branch:
            return branch
        first, *names = unquote(branch["$ref"]).split("/")
        found: Any = self._root if first == "#" else None
        for name in names:
            key = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
            else:
                found = found.get(key) if isinstance(found, dict) else None
        if not isinstance(found, bool) and id(found) not in self._seen:
            raise ValueError(
                f"{_short(branch['$ref'])} is no schema of this document; references are like #/$defs/name"
            )
        return found


def _tagged(branches: list[Any]) -> bool:
    """Do all branches require one property, each with a constant of its own? Then no value fits two of them."""
    if not all(isinstance(branch, dict) and branch.get("type") == "object" for branch in branches):
        return False
    tables = [branch.get("properties", {}) for branch in branches]
    shared = set(tables[0]).intersection(*tables[1:], *(branch.get("required", ()) for branch in branches))
    for name in shared:
        tags = [table[name].get("const") for table in tables if isinstance(table[name], dict)]
        if len({tag for tag in tags if isinstance(tag, str)}) == len(branches):
            return True
    return False


def _count(root: Any) -> int:
    """All values of a document; raises ValueError for one that is too large or nested too deeply."""
    level, total = [root], 0
    for _ in range(MAX_DEPTH + 1):
        total += len(level)
        if total > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} values; simplify it")
        level = [
            part
            for value in level
            if isinstance(value, dict | list)
            for part in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return total
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep; name parts of it in $defs")


def _check_value(value: Any) -> None:
    """Refuse a constant that has no exact spelling here."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_value(part)
    elif isinstance(value, str) and (found := re.search(r"[^\b\t\n\f\r -~\x80-\U0010ffff]", value)):
        raise ValueError(f"the control character U+{ord(found[0]):04X} can't be generated; leave it out")
    elif (isinstance(value, int) and abs(value) > EXACT) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{_short(value)} is beyond the whole numbers that float64 holds, 2^53")


def _kind(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        word = "an object" if kind is dict else "a list" if kind is list else "a text"
        raise ValueError(f"{word} is wanted, not {_short(value)}")
    return value


def _short(value: Any) -> str:
    return json.dumps(value)[:50]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")
