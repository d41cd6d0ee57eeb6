"""Each field that constrains a text, checked and written as one Lark grammar in llguidance's dialect."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from shardwise.grammar.gbnf import is_gbnf, read_gbnf
from shardwise.grammar.schema import read_schema
from shardwise.params import SamplingParams

MAX_BYTES = 2**20
MAX_GRAMMAR_BYTES = 2**16
"""Of a regular expression or a grammar."""
MAX_PLAIN = 2000
"""Characters of a regular expression that need no trial: its engine is linear, and lazy."""
MAX_REPEATS = 1000
OPTIONS = '\n%llguidance {"no_forcing": true}\n'
"""The model chooses among all tokens that spell the text, and is not held to the tokenizer's own way."""


@dataclass(frozen=True)
class Source:
    """A grammar to compile."""

    lark: str
    plain: bool
    """It is sure to compile in little time and memory."""
    max_items: int = 5000
    """Of the parser at one place of the text: about four for each optional property that may come next there."""


def write(params: SamplingParams) -> Source:
    """The grammar of the field that is set. Raises ValueError saying what is wrong with it."""
    if params.json_object:
        return _json('{"type": "object"}')
    if params.json_schema is not None:
        return _json(_sized(params.json_schema, MAX_BYTES))
    if params.choice:
        _sized("".join(params.choice), MAX_BYTES)
        return Source(f"start: CHOICE\nCHOICE: {' | '.join(map(quote, params.choice))}" + OPTIONS, plain=True)
    if params.regex is not None:
        text = _sized(params.regex, MAX_GRAMMAR_BYTES)
        check_pattern(text)
        pattern = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], text, flags=re.DOTALL)
        return Source(f"start: /{pattern}/" + OPTIONS, plain=len(text) <= MAX_PLAIN)
    assert params.ebnf is not None
    text = _sized(params.ebnf, MAX_GRAMMAR_BYTES)
    lark = read_gbnf(text) if is_gbnf(text) else _read_lark(text)
    return Source(lark + OPTIONS, plain=False, max_items=500)  # in ambiguous ones a token takes their square


def check_pattern(text: str) -> None:
    """Refuse a regular expression that repeats too often or ends in half an escape."""
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise ValueError("the expression ends in a lone backslash; write \\\\ for a backslash")
    for low, high in re.findall(r"\\.|\{(\d+)(?:,(\d*))?\}", text, re.DOTALL):
        _check_repeats(low, high)


def quote(text: str) -> str:
    """A text as a Lark literal, which is JSON's with escapes for all that is not printable ASCII."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _check_repeats(*counts: str) -> None:
    for count in counts:
        if len(count) > 9 or int(count or 0) > MAX_REPEATS:
            raise ValueError(f"it repeats something {count} times; at most {MAX_REPEATS} are supported")


def _sized(text: str, most: int) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"it holds half a surrogate pair at character {error.start}; remove it") from None
    if size > most:
        raise ValueError(f"it has {size} bytes; at most {most} are supported")
    return text


def _json(text: str) -> Source:
    schema, plain = read_schema(text, check_pattern)
    return Source(f"start: %json {json.dumps(schema)}" + OPTIONS, plain)


_LARK = re.compile(
    r"""(?:\#|//)[^\n]* | "(?:\\.|[^"\\\n])*"? | /(?:\\.|[^/\\])+/? |
    (?P<token><[^<>\s]+>) | (?P<directive>%(?:json|llguidance)\b) | (?P<reference>@[\w{-]) |
    (?P<option>\b(?:max_tokens|temperature|stop)\b) (?=\s*[=,\]]) |
    (?:\{|~) \s* (?P<low>\d*) \s* (?:(?:,|\.\.) \s* (?P<high>\d*))?""",
    re.VERBOSE | re.DOTALL,
)
"""What is passed over, read, refused or checked of a Lark grammar. It takes time in the text's length alone; what is
left open is for llguidance to refuse."""


def _read_lark(text: str) -> str:
    """The grammar with its JSON schemas as they are enforced.

    Refuses what llguidance's dialect has beyond a language of texts, and what would go round our own checks.
    """
    parts, at = [], 0
    while found := _LARK.search(text, at):
        parts.append(text[at : found.end()])
        at = found.end()
        if found["directive"] == "%json":
            schema, at = _read_inner(text, at)
            parts.append(f" {schema}")
        elif found["token"] or found["reference"] or found["directive"] or found["option"]:
            raise ValueError(
                f"{found[0].strip()[:50]!r} in line {_line(text, found.start())} is not supported: a grammar describes "
                "the characters of a text; leave it out"
            )
        if found[0].startswith("/"):
            check_pattern(found[0][1:].removesuffix("/"))
        _check_repeats(found["low"] or "", found["high"] or "")
    return "".join([*parts, text[at:]])


def _read_inner(text: str, at: int) -> tuple[str, int]:
    """The schema behind a %json, and where it ends."""
    at = re.compile(r"\s*").match(text, at).end()  # type: ignore[union-attr]
    try:
        _, end = json.JSONDecoder().raw_decode(text, at)
        schema, _ = read_schema(text[at:end], check_pattern)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema in line {_line(text, at)}: {error}") from None
    return json.dumps(schema), end


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1
