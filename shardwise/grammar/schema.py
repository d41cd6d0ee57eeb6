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
    reader = _Reader(schema, check_pattern)
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a text in it holds half a surrogate pair; remove it") from None
    reader.read(schema, "#")
    reader.resolve()
    schema.pop("$schema", None)
    return {**schema, "x-guidance": WRITING}, reader.plain


class _Reader:
    def __init__(self, root: Any, check_pattern: Callable[[str], None]) -> None:
        self.plain = _count(root) <= PLAIN_VALUES
        self._check_pattern = check_pattern
        self._old = isinstance(root, dict) and re.search(r"draft-0\d|2019-09", str(root.get("$schema"))) is not None
        self._schemas: dict[str, Any] = {}
        self._references: dict[str, str] = {}
        self._unions: list[tuple[dict[str, Any], str]] = []

    def read(self, schema: Any, at: str) -> None:
        """Check a schema and those inside it; ``at`` is its JSON pointer."""
        self._schemas[at] = schema
        if isinstance(schema, bool) and at != "#":
            return
        if not isinstance(schema, dict):
            raise ValueError(f"{at} must be a schema, that is an object, not {json.dumps(schema)[:50]}")
        for name, value in schema.items():
            self._read_keyword(schema, name, value, f"{at}/{_escape(name)}")
        optional = schema.get("properties", {}).keys() - schema.get("required", ())
        if len(optional) > MAX_OPTIONAL:
            raise ValueError(f"{at} has {len(optional)} optional properties; at most {MAX_OPTIONAL} are supported")
        constraints = schema.keys() & ENFORCED - {"$defs", "definitions"}
        if constraints & INTERSECTING or (constraints & {"anyOf", "$ref"} and len(constraints) > 1):
            self.plain = False

    def resolve(self) -> None:
        """Check, once all schemas are known, that references lead to some, and what unions are made of."""
        for at, target in self._references.items():
            if target not in self._schemas:
                raise ValueError(f"{at}: {target!r} is no schema of this document; references are like #/$defs/name")
        if len(set(self._references.values())) > PLAIN_REFERENCES:
            self.plain = False
        for schema, at in self._unions:
            branches = [self._follow(branch) for branch in schema["oneOf"]]
            if _tagged(branches):  # llguidance does not look behind references
                if "anyOf" in schema:
                    raise ValueError(f"{at}: oneOf beside anyOf is not supported; put one of them into allOf")
                schema["anyOf"] = schema.pop("oneOf")

    def _read_keyword(self, schema: dict[str, Any], name: str, value: Any, at: str) -> None:
        if name not in ENFORCED | NOTES or (name == "$id" and at != "#/$id"):
            raise ValueError(f"{at}: the keyword {name!r} is not supported; leave it out")
        if name in NAMED:
            for key, part in _kind(value, dict, at).items():
                self.read(part, f"{at}/{_escape(key)}")
                if name == "patternProperties":
                    self._check_pattern(key)
        elif name in MANY or (name == "items" and isinstance(value, list)):
            for number, part in enumerate(_kind(value, list, at)):
                self.read(part, f"{at}/{number}")
        elif name in ONE:
            self.read(value, at)
        elif name in NUMBERS:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{at} must be a number, not {json.dumps(value)[:50]}")
            _check_value(value, at)
        elif name in COUNTS:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
                raise ValueError(f"{at} must be a whole number from 0 to {MAX_COUNT}, not {json.dumps(value)[:50]}")
        elif name in ("enum", "const"):
            _check_value(value, at)
        elif name == "required":
            for word in _kind(value, list, at):
                _kind(word, str, at)
        elif name == "$ref":
            self._references[at] = unquote(_kind(value, str, at))
        elif name == "pattern":
            self._check_pattern(_kind(value, str, at))
            self.plain = self.plain and len(value) <= PLAIN_PATTERN
        elif name == "format" and value not in FORMATS:
            raise ValueError(f"{at} {json.dumps(value)[:50]} is not supported; known are {', '.join(FORMATS)}")
        if name == "minProperties" and value > max(1, len(_kind(schema.get("required", []), list, at))):
            raise ValueError(f"{at}: more than one property is not counted; name those that must be there in required")
        if name == "additionalItems" and not isinstance(schema.get("items"), list):
            raise ValueError(f"{at} constrains nothing, as items is no list; leave it out")
        if name == "prefixItems" and (self._old or isinstance(schema.get("items"), list)):
            raise ValueError(f"{at} is of JSON Schema 2020-12, where items is no list; use one draft's keywords")
        if name == "oneOf":
            self._unions.append((schema, at))

    def _follow(self, branch: Any) -> Any:
        return self._schemas[unquote(branch["$ref"])] if isinstance(branch, dict) and "$ref" in branch else branch


def _tagged(branches: list[Any]) -> bool:
    """Do all branches require one property, each with a constant of its own? Then no value fits two of them."""
    if not all(isinstance(branch, dict) and branch.get("properties") for branch in branches):
        return False
    for name in branches[0]["properties"]:
        tags = [branch["properties"].get(name) for branch in branches]
        words = [tag.get("const") for tag in tags if isinstance(tag, dict) and isinstance(tag.get("const"), str)]
        if len(set(words)) == len(branches) and all(name in branch.get("required", ()) for branch in branches):
            return all(branch.get("type") == "object" for branch in branches)
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


def _check_value(value: Any, at: str) -> None:
    """Refuse a constant that has no exact spelling here."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_value(part, at)
    elif isinstance(value, str) and (found := re.search(r"[^\b\t\n\f\r -~\x80-\U0010ffff]", value)):
        raise ValueError(f"{at}: the control character U+{ord(found[0]):04X} can't be generated; leave it out")
    elif (isinstance(value, int) and abs(value) > EXACT) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{at}: {str(value)[:50]} is beyond the whole numbers that float64 holds, 2^53")


def _kind(value: Any, kind: type, at: str) -> Any:
    if not isinstance(value, kind):
        word = "an object" if kind is dict else "a list" if kind is list else "a text"
        raise ValueError(f"{at} must be {word}, not {json.dumps(value)[:50]}")
    return value


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")
