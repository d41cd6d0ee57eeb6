"""Reads llama.cpp's GBNF and writes it as Lark. Knows both notations, and nothing of how they are matched.

The format is described in llama.cpp's grammars/README.md. A rule that does not lead back to itself becomes one
expression, which is matched exactly; in rules that do, the parts between are read as long as they go, as in Lark.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

MAX_DEPTH = 24
MAX_REPEATS = 1000

_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*) | (?P<rule>[A-Za-z0-9_-]+)\s*::= | (?P<name>[A-Za-z0-9_-]+) |
    "(?P<text>(?:\\.|[^"\\\n])*)" | \[(?P<chars>(?:\\.|[^\]\\\n])+)\] |
    (?P<repeat>[*+?]|\{\s*\d{1,9}\s*(?:,\s*(?:\d{1,9})?\s*)?\}) | (?P<mark>[.()|])""",
    re.VERBOSE,
)
_CHAR = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([nrt\"\\\[\]/-]))|([^\\])", re.DOTALL)


@dataclass
class _Node:
    """A part of a rule: a leaf (Lark text), a name, or parts in a row, as alternatives, or repeated."""

    kind: str
    text: str = ""
    parts: list[_Node] = field(default_factory=list)

    def names(self) -> set[str]:
        return {self.text} if self.kind == "name" else {name for part in self.parts for name in part.names()}


def is_gbnf(text: str) -> bool:
    """Is it GBNF, rather than Lark?"""
    return re.search(r"^[ \t]*[A-Za-z0-9_-]+\s*::=", text, re.MULTILINE) is not None


def read_gbnf(text: str) -> str:
    """The same grammar in Lark. Raises ValueError with the line of what can't be read."""
    rules = _parse(text)
    if "root" not in rules:
        raise ValueError("there is no rule named root; add one, for the whole text")
    for name, node in rules.items():
        for other in (other for other in node.names() if other not in rules):
            raise ValueError(f"the rule {name!r} names {other!r}, which is no rule; add it")
    return _Writer(rules).write()


def _parse(text: str) -> dict[str, _Node]:
    rules: dict[str, _Node] = {}
    groups: list[_Node] = []  # open ones, from a rule inward
    at = 0
    try:
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise ValueError(f"can't read {text[at : at + 20]!r}")
            if found["rule"]:
                groups = [_begin(rules, found["rule"], groups)]
            elif not found["skip"]:
                _read(found, groups)
            at = found.end()
    except ValueError as error:
        line = text.count("\n", 0, at) + 1
        raise ValueError(f"line {line}: {error}") from None
    if len(groups) > 1:
        raise ValueError("a parenthesis is open at the end")
    return rules


def _begin(rules: dict[str, _Node], name: str, groups: list[_Node]) -> _Node:
    if len(groups) > 1:
        raise ValueError("the rule before has an open parenthesis")
    if name in rules:
        raise ValueError(f"there is a rule {name!r} already")
    rules[name] = _alternatives()
    return rules[name]


def _read(found: re.Match[str], groups: list[_Node]) -> None:
    if not groups:
        raise ValueError("a grammar begins with a rule, like root ::= ...")
    row = groups[-1].parts[-1].parts
    if found["mark"] == "|":
        groups[-1].parts.append(_Node("row"))
    elif found["mark"] == "(":
        row.append(_alternatives())
        groups.append(row[-1])
        if len(groups) > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} open parentheses; name parts as rules")
    elif found["mark"] == ")":
        if len(groups) == 1:
            raise ValueError("no parenthesis is open here")
        groups.pop()
    elif found["repeat"]:
        if not row or row[-1].kind == "repeat":
            raise ValueError(f"there is nothing before {found['repeat']!r} to repeat")
        row[-1] = _repeat(row[-1], found["repeat"])
    else:
        row.append(_leaf(found))


def _alternatives() -> _Node:
    return _Node("any", parts=[_Node("row")])


def _repeat(node: _Node, times: str) -> _Node:
    counts = [int(count) for count in re.findall(r"\d+", times)]
    if max(counts, default=0) > MAX_REPEATS:
        raise ValueError(f"{times} repeats too often; at most {MAX_REPEATS} are supported")
    return _Node("repeat", "".join(times.split()), [node])


def _leaf(found: re.Match[str]) -> _Node:
    if found["name"]:
        return _Node("name", found["name"])
    if found["mark"] == ".":
        return _Node("leaf", "/(?s:.)/")
    if found["text"] is not None:
        text = "".join(map(chr, _points(found["text"])))
        return _Node("leaf", json.dumps(text).replace("\x7f", "\\u007f"))
    chars = found["chars"]
    negated = chars.startswith("^")
    points = [(chr(point), f"\\u{{{point:x}}}") for point in _points(chars[negated:])]
    if not points:
        raise ValueError(f"[{chars}] holds no character")
    raw = re.findall(_CHAR, chars[negated:])
    body = ""
    for place, (char, spelt) in enumerate(points):
        dash = char == "-" and raw[place][4] == "-" and 0 < place < len(points) - 1
        body += "-" if dash else spelt
    return _Node("leaf", f"/[{'^' * negated}{body}]/")


def _points(text: str) -> list[int]:
    """The code points of an escaped text."""
    points: list[int] = []
    at = 0
    while at < len(text):
        found = _CHAR.match(text, at)
        if found is None:
            raise ValueError(f"unknown escape {text[at : at + 2]!r}")
        at = found.end()
        digits = found[1] or found[2] or found[3]
        named = {"n": "\n", "r": "\r", "t": "\t"}
        point = int(digits, 16) if digits else ord(found[5] or named.get(found[4], found[4]))
        if point > 0x10FFFF or 0xD800 <= point < 0xE000:
            raise ValueError(f"{found[0]} is no character")
        points.append(point)
    return points


class _Writer:
    def __init__(self, rules: dict[str, _Node]) -> None:
        self._rules = rules
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._regular = _find_regular(rules)
        self._extra: list[str] = []

    def write(self) -> str:
        """Terminals (upper case) for the rules that are regular, rules (lower case) for the others."""
        lines = [f"start: {self._name('root')}"]
        for name, node in self._rules.items():
            body = self._terminal(node) if name in self._regular else self._rule(node)
            lines.append(f"{self._name(name)}: {body}")
        return "\n".join(lines + self._extra)

    def _name(self, name: str) -> str:
        return f"{'T' if name in self._regular else 'r'}{self._numbers[name]}"

    def _is_regular(self, node: _Node) -> bool:
        return node.names() <= self._regular

    def _terminal(self, node: _Node) -> str:
        return self._text(node, [self._terminal(part) for part in node.parts])

    def _rule(self, node: _Node) -> str:
        """What leads back to a rule stays as it is; each run of other parts becomes one terminal."""
        if node.kind == "name":
            return self._name(node.text)
        texts: list[str] = []
        run: list[_Node] = []
        for part in [*node.parts, None]:
            if part is not None and self._is_regular(part) and (part.parts or part.kind in ("leaf", "name")):
                run.append(part)
                continue
            if run:
                texts.append(self._extra_terminal(_Node(node.kind if node.kind != "repeat" else "row", parts=run)))
                run = []
            if part is not None:
                texts.append(self._rule(part))
        return self._text(node, texts)

    def _extra_terminal(self, node: _Node) -> str:
        name = f"X{len(self._extra)}"
        self._extra.append(f"{name}: {self._terminal(node)}")
        return name

    def _text(self, node: _Node, parts: list[str]) -> str:
        if node.kind == "leaf":
            return node.text
        if node.kind == "name":
            return self._name(node.text)
        if node.kind == "row":
            return " ".join(parts) if parts else '""'
        return f"({' | '.join(parts)})" + (node.text if node.kind == "repeat" else "")


def _find_regular(rules: dict[str, _Node]) -> set[str]:
    """The rules from which no way leads to a circle."""
    waiting = {name: set(node.names()) for name, node in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, others in waiting.items():
        for other in others:
            users[other].append(name)
    ready = [name for name, others in waiting.items() if not others]
    regular: set[str] = set()
    while ready:
        done = ready.pop()
        regular.add(done)
        for user in users[done]:
            waiting[user].discard(done)
            if not waiting[user]:
                ready.append(user)
    return regular
