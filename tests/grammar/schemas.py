"""Two hundred JSON schemas that must be honoured, and those that must be refused, by the keyword they are about."""

from __future__ import annotations

from typing import Any

NULL, BOOL, INT, NUM, STR = ({"type": name} for name in ("null", "boolean", "integer", "number", "string"))
ANY: dict[str, Any] = {}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}


def obj(properties: dict[str, Any], *required: str, **extra: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties, **extra}
    return {**schema, "required": list(required)} if required else schema


def only(properties: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """All of them, and nothing else."""
    return obj(properties, *properties, additionalProperties=False, **extra)


def text(**extra: Any) -> dict[str, Any]:
    return {"type": "string", **extra}


def number(**extra: Any) -> dict[str, Any]:
    return {"type": "number", **extra}


def whole(**extra: Any) -> dict[str, Any]:
    return {"type": "integer", **extra}


def array(items: Any = None, **extra: Any) -> dict[str, Any]:
    return {"type": "array", **({} if items is None else {"items": items}), **extra}


def ref(name: str, **extra: Any) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}", **extra}


TYPES: list[Any] = [
    *(ANY, True, NULL, BOOL, INT, NUM, STR, array(), {"type": "object"}),
    *({"type": kinds} for kinds in (["string", "null"], ["integer", "boolean"], ["array", "null"], ["object", "null"])),
    {"type": ["number", "string", "boolean", "null"]},
    {"type": ["string"], "description": "one type in a list"},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "integer", "title": "t", "default": 3},
    {**DRAFT_7, "type": "boolean", "examples": [True], "$comment": "c"},
    {"$id": "https://example.com/schema", "type": "null", "deprecated": True, "readOnly": True},
]
VALUES: list[Any] = [
    *({"const": value} for value in (None, True, False, 0, 1, -7, 1.5, -0.25, 1e20, 2**53, "", "a", "naïve", "😀")),
    *({"const": value} for value in ('a\nb\t\\"/', "</s>", "日本", [], [1, [2, "x"]], {}, {"b": 1, "a": [None]})),
    *({"enum": values} for values in ([1, 2, 3], ["a", "ab", "abc"], [None, False, 0, ""], [[1], {"a": 1}, "a"])),
    *({"enum": values} for values in ([1.25, "1.25"], ["red", "green", "blue"], ["é", "e", "ê"], [True])),
    {"type": "string", "enum": ["a", 1, None]},
    {"type": ["string", "null"], "enum": ["x", None]},
    {"type": "integer", "enum": [1, 2, 5], "minimum": 2},
    {"enum": [f"option {index}" for index in range(300)]},
]
NUMBERS: list[Any] = [
    *(whole(minimum=low) for low in (0, -5, 999)),
    *(whole(maximum=high) for high in (0, -1, 255)),
    *(whole(minimum=low, maximum=high) for low, high in ((0, 0), (1, 12), (-3, 3), (18, 120), (98, 1002), (-20, -7))),
    *(whole(exclusiveMinimum=0), whole(exclusiveMaximum=10), whole(exclusiveMinimum=1, exclusiveMaximum=4)),
    *(whole(minimum=1, exclusiveMaximum=3), whole(multipleOf=3), whole(multipleOf=10, minimum=5, maximum=60)),
    *(number(minimum=0), number(maximum=1), number(minimum=0, maximum=1), number(minimum=-1.5, maximum=2.25)),
    *(number(exclusiveMinimum=0), number(exclusiveMinimum=0, exclusiveMaximum=1), number(minimum=0.1, maximum=0.3)),
    *(number(multipleOf=0.5), number(multipleOf=0.25, minimum=0, maximum=3), number(minimum=1000000.5)),
]
STRINGS: list[Any] = [
    *(text(minLength=low) for low in (1, 5)),
    *(text(maxLength=high) for high in (0, 1, 10)),
    *(text(minLength=low, maxLength=high) for low, high in ((1, 1), (2, 4), (8, 64))),
    *(text(pattern=pattern) for pattern in ("^a+$", "^[A-Z]{2}-[0-9]{4}$", "b", "^x|y$", r"^\d{3}$", r"^\w+$", "^$")),
    *(text(pattern=pattern) for pattern in ("^(yes|no)$", '^[^"]*$', "^é+$", r"^\$[0-9]+\.[0-9]{2}$", "^a.c$", "/")),
    *(
        text(pattern=pattern)
        for pattern in (r"^[\w.+-]+@[a-z]+\.[a-z]{2,3}$", r"^\s\S$", r"^\[\]\{\}$", "^(?:ab){1,3}$")
    ),
    *(text(pattern="^a+$", minLength=2, maxLength=4), text(pattern="^[a-z]*$", maxLength=5)),
    *(text(format=name) for name in ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6")),
    *(text(format=name) for name in ("uuid", "uri")),
    {"minLength": 3, "description": "of strings only"},
    {"type": ["string", "integer"], "maxLength": 2, "maximum": 9},
]
OBJECTS: list[Any] = [
    *(obj({"a": INT}), obj({"a": INT}, "a"), obj({"a": STR, "b": BOOL}, "b"), obj({}, "z"), only({"a": NULL})),
    *(only({}), only({"name": STR, "age": whole(minimum=0)}), obj({"a": INT}, additionalProperties=STR)),
    *(obj({}, additionalProperties=INT), obj({}, additionalProperties=array(INT)), obj({"a": True, "b": ANY}, "a")),
    *(only({"ключ": STR, "日本": INT}), only({"": INT}), only({'a"b\\c': BOOL}), only({"a b/c~d": NULL})),
    obj({"a": INT, "b": INT, "c": INT}, "c", "a"),
    obj({"naïve": INT, "new\nline": INT}, additionalProperties=STR),
    only({"type": STR, "properties": INT, "$ref": BOOL, "const": NULL}),
    obj({"a": INT}, "b", additionalProperties=BOOL),
    obj({"a": False, "b": INT}, additionalProperties=False),
    only({f"field_{index}": [STR, INT, BOOL, NULL][index % 4] for index in range(40)}),
    obj({f"field_{index}": INT for index in range(60)}, additionalProperties=False),
    *(obj({}, minProperties=1), obj({}, maxProperties=2), obj({}, maxProperties=0), obj({}, "a", minProperties=1)),
    obj({"a": INT, "b": INT}, "a", "b", minProperties=2, maxProperties=3),
    {"type": "object", "patternProperties": {"^x_": INT}},
    {"type": "object", "patternProperties": {"^x_": INT, "^y_": STR}, "additionalProperties": False},
    obj({"foo": whole(maximum=9)}, patternProperties={"^f": whole(minimum=5)}),
    {"properties": {"a": INT}, "required": ["a"]},
    only({"a": only({"b": only({"c": only({"d": array(only({"e": STR}))})})})}),
    only({"when": text(format="date"), "who": text(format="email"), "tags": array(STR, maxItems=3)}),
    only({"point": array(prefixItems=[NUM, NUM], minItems=2, maxItems=2), "label": text(maxLength=12)}),
]
ARRAYS: list[Any] = [
    *(array(INT), array(array(BOOL)), array(STR, minItems=1), array(INT, maxItems=0), array(INT, maxItems=2)),
    *(array(INT, minItems=2, maxItems=4), array(minItems=1, maxItems=1), array(NULL, minItems=12, maxItems=12)),
    *(array(prefixItems=[INT, STR]), array(prefixItems=[INT, STR], minItems=2), array(False), array(True, maxItems=3)),
    array(False, prefixItems=[INT, STR]),
    array(BOOL, prefixItems=[NULL], minItems=3),
    array([INT, STR], additionalItems=False, minItems=1, **DRAFT_7),
    array([INT], additionalItems=NULL, **DRAFT_7),
    array(only({"id": INT, "name": text(maxLength=5)}), minItems=1, maxItems=3),
    array({"enum": ["a", "b"]}, minItems=1),
    array({"type": ["integer", "null"]}, maxItems=5),
    {"items": INT, "description": "of arrays only"},
]
COMBINED: list[Any] = [
    {"anyOf": [STR, INT]},
    {"anyOf": [STR, NULL], "default": None},
    {"anyOf": [text(maxLength=2), text(minLength=4)]},
    {"anyOf": [only({"a": INT}), only({"b": STR}), array(INT)]},
    {"anyOf": [{"const": 1}, {"enum": ["x", "y"]}, {"type": "boolean"}]},
    {"type": "object", "anyOf": [obj({"a": INT}, "a"), obj({"b": INT}, "b")]},
    {"oneOf": [STR, INT, NULL]},
    {"oneOf": [{"const": "a"}, {"const": "b"}]},
    {"oneOf": [only({"kind": {"const": "a"}, "x": INT}), only({"kind": {"const": "b"}, "y": STR})]},
    {
        "oneOf": [ref("cat"), ref("dog")],
        "discriminator": {"propertyName": "kind"},
        "$defs": {name: only({"kind": {"const": name}, "age": INT}) for name in ("cat", "dog")},
    },
    {"allOf": [obj({"a": INT}, "a"), obj({"b": STR}, "b")]},
    {"allOf": [whole(minimum=3), {"maximum": 5}]},
    {"allOf": [{"type": ["string", "null"]}, {"type": ["string", "integer"]}, {"maxLength": 3}]},
    {"allOf": [{"anyOf": [INT, STR]}, {"enum": [1, "a", None]}]},
    {"allOf": [ref("base")], "properties": {"b": BOOL}, "required": ["b"], "$defs": {"base": obj({"a": INT}, "a")}},
    {"$ref": "#/$defs/base", "required": ["b"], "$defs": {"base": obj({"a": INT, "b": INT}, "a")}},
    {"type": "array", "items": {"anyOf": [whole(maximum=9), text(pattern="^[a-z]$")]}, "maxItems": 4},
]
REFERENCES: list[Any] = [
    {**ref("a"), "$defs": {"a": STR}},
    {"$ref": "#/definitions/a%20b~1c", "definitions": {"a b/c": BOOL}},
    obj({"a": {"$ref": "#/properties/b"}, "b": BOOL}, "a"),
    {**ref("a"), "$defs": {"a": ref("b"), "b": ref("c"), "c": NULL}},
    array(
        ref("item"),
        maxItems=3,
        **{
            "$defs": {
                "item": only({"n": INT, "next": {"anyOf": [NULL, ref("leaf")]}}),
                "leaf": only({"v": text(maxLength=4)}),
            }
        },
    ),
    {**ref("tree"), "$defs": {"tree": only({"value": INT, "children": array(ref("tree"), maxItems=2)})}},
    {**ref("list"), "$defs": {"list": only({"head": INT, "tail": {"anyOf": [NULL, ref("list")]}})}},
    only({"value": INT, "self": {"anyOf": [NULL, {"$ref": "#"}]}}),
    {**ref("even"), "$defs": {"even": array(ref("odd"), maxItems=1), "odd": obj({"e": ref("even")})}},
    {
        **ref("expr"),
        "$defs": {
            "expr": {"anyOf": [INT, ref("sum")]},
            "sum": only({"op": {"enum": ["+", "-"]}, "left": ref("expr"), "right": ref("expr")}),
        },
    },
    {
        **ref("json"),
        "$defs": {
            "json": {"anyOf": [NULL, BOOL, NUM, STR, array(ref("json")), obj({}, additionalProperties=ref("json"))]}
        },
    },
]
SCHEMAS: list[Any] = [*TYPES, *VALUES, *NUMBERS, *STRINGS, *OBJECTS, *ARRAYS, *COMBINED, *REFERENCES]

DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"type": "array", "items": DEEP}

REFUSED: list[tuple[Any, str]] = [
    ("{", "not valid JSON"),
    ('{"const": NaN}', "NaN"),
    ("[" * 5000, "not valid JSON"),
    ("[]", "a schema is an object"),
    ("false", "a schema is an object"),
    ('"string"', "a schema is an object"),
    ({"type": "strnig"}, "strnig"),
    ({"type": "string", "maxlength": 3}, "#/maxlength: this keyword is not supported"),
    ({"properties": {"a": {"nullable": True}}}, "#/properties/a/nullable"),
    ({"x-guidance": {"lenient": True}}, "x-guidance"),
    *(({name: ANY}, name) for name in ("not", "if", "then", "else", "contains", "propertyNames", "dependentSchemas")),
    *(({name: ANY}, name) for name in ("unevaluatedItems", "unevaluatedProperties", "dependencies")),
    *(({name: "#a"}, name) for name in ("$dynamicRef", "$recursiveRef", "$anchor", "id")),
    (array(INT, uniqueItems=True), "uniqueItems"),
    ({"dependentRequired": {"a": ["b"]}, **DRAFT_7}, "dependentRequired"),
    (text(format="regex"), "regex"),
    (text(format="unknown"), "unknown"),
    (text(pattern="(?=a)b"), "look-around"),
    (text(pattern="a$b"), "lookarounds"),
    (text(pattern="("), "unclosed group"),
    (text(pattern="a\\"), "backslash"),
    (text(pattern="a{2000}"), "2000"),
    ({"patternProperties": {"a{1,2000}": INT}}, "2000"),
    ({"type": "object", "patternProperties": {"^a": INT, "b": STR}}, "disjoint"),
    (text(minLength=-1), "minLength"),
    (text(maxLength=2.5), "maxLength"),
    (array(maxItems=10**9), "maxItems"),
    (text(minLength=3, maxLength=2), "minLength"),
    (number(exclusiveMinimum=True, minimum=3), "exclusiveMinimum"),
    (number(minimum="3"), "minimum"),
    (whole(minimum=2**53 + 1), "2^53"),
    ({"enum": [[{"a": -(2**60)}]]}, "2^53"),
    ('{"const": 1e999}', "2^53"),
    ({"type": "object", "required": "a"}, "required"),
    ({"type": "object", "required": [1]}, "required"),
    ({"properties": []}, "#/properties: an object is wanted"),
    ({"anyOf": ANY}, "#/anyOf: a list is wanted"),
    ({"anyOf": []}, "empty"),
    ({"enum": []}, "empty"),
    ({"enum": "a"}, "enum"),
    ({"oneOf": [NUM, INT]}, "oneOf"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    (obj({"a": INT}, maxProperties=1, minProperties=1), "Properties"),
    (array(INT, additionalItems=STR), "additionalItems"),
    (array([INT], prefixItems=[STR]), "prefixItems"),
    (array(INT, prefixItems=[STR], **DRAFT_7), "prefixItems"),
    ({"allOf": [INT, STR]}, "nsatisfiable"),
    ({"type": "string", "const": 1}, "nsatisfiable"),
    ({"const": "a\x01"}, "U+0001"),
    ({"$ref": "#"}, "allows no text"),
    ({"$ref": "#/$defs/missing"}, "#/$defs/missing"),
    ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
    ({"$ref": 3}, "#/$ref"),
    ({"$ref": "#/$defs/a%2520b", "$defs": {"a b": INT}}, "%2520"),
    ({"$ref": "#/anyOf/7", "anyOf": [INT]}, "#/anyOf/7"),
    ({"items": {"properties": {"a/b~c": {"type": "string", "not": INT}}}}, "#/items/properties/a~1b~0c/not"),
    ({"$ref": "#/examples/0", "examples": [INT]}, "#/examples/0"),
    (DEEP, "32 levels"),
    ({"enum": list(range(10_000))}, "10000 values"),
    (obj({f"p{index}": INT for index in range(1001)}), "1001 optional properties"),
    ({"description": "x" * 2**20}, "bytes"),
    ('{"const": "\\ud800"}', "surrogate"),
]
