"""R15, R16: what a grammar may cost. Whether one is refused or compiled is llguidance's part; that it ends is ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.grammar import Grammars, trial
from shardwise.grammar import grammars as module
from tests.grammar.vocabulary import allowed, byte_level, grammars, start

OWNER = grammars(byte_level())


def chain(count: int, **beside: Any) -> dict[str, Any]:
    """References that lead to one another; with something beside them each is an intersection."""
    step = {
        f"a{at}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{at + 1}", **beside}}}
        for at in range(count)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**step, f"a{count}": {"type": "null"}}}


def doubling(count: int) -> dict[str, Any]:
    both = {
        f"a{at}": {
            "type": "object",
            "properties": {side: {"$ref": f"#/$defs/a{at + 1}", "type": ["object", "null"]} for side in "lr"},
        }
        for at in range(count)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**both, f"a{count}": {"type": "null"}}}


HEAVY: list[tuple[str, Any]] = [
    ("regex", "(a+)+$"),
    ("regex", "((((a{1000}){1000}){1000}){1000})"),
    ("regex", "(?s).*a.{1000}"),
    ("regex", "|".join(f"(.*{7919 * at % 100003}.*)" for at in range(2000))),
    ("regex", "(" * 5000 + "a" + ")" * 5000),
    ("json_schema", {"enum": [f"value {7919 * at % 100003}" for at in range(9990)]}),
    ("json_schema", {"enum": ["x" * 900_000]}),
    ("json_schema", {"type": "object", "properties": {f"{at}" + "x" * 900: {"type": "string"} for at in range(990)}}),
    ("json_schema", {"type": "string", "pattern": "x" * 60_000}),
    ("json_schema", {"type": "string", "pattern": "^(a|b)*a(a|b){900}$", "maxLength": 1000}),
    ("json_schema", chain(200, type="object")),
    ("json_schema", {"type": "integer", "multipleOf": 987654321}),
    ("ebnf", "root ::= r0\n" + "\n".join(f"r{at} ::= r{at + 1} r{at + 1}" for at in range(40)) + '\nr40 ::= "a"'),
    ("ebnf", "start: r0\n" + "\n".join(f"r{at}: r{at + 1}" for at in range(3500)) + '\nr3500: "a"'),
    ("ebnf", "start: A\nA: /(a|b)*a(a|b){50}/ & ~/(a|b)*b(a|b){60}/"),
    ("choice", [f"{at}" + "x" * 900 for at in range(1024)]),
]


@pytest.mark.parametrize(("field", "value"), HEAVY, ids=range(len(HEAVY)))
def test_heavy_grammars_come_to_an_end(field: str, value: Any) -> None:
    """Guards the server: minutes of compilation and overflown stacks must happen elsewhere, and be refused."""
    try:
        matcher = start(field, value, OWNER)
    except ValueError as error:
        refusal = str(error)
        matcher = None
    if matcher is None:
        assert refusal.startswith(f"{field}: ")
        assert len(refusal) < 600
        return
    for _ in range(20):
        assert matcher.error is None
        if matcher.finished:
            return
        assert matcher.advance(allowed(matcher)[-1])


def test_time_stack_and_memory_are_limited() -> None:
    """Guards the three limits themselves: without them one of these would run for minutes, crash or fill the memory."""
    seconds = {"type": "object", "patternProperties": {f"^a{at}b.*": {"type": "null"} for at in range(450)}}
    for value in (doubling(25), seconds, chain(1500), chain(650)):  # the last fits the stacks of most threads, just
        with pytest.raises(ValueError, match="too large or too intricate"):
            start("json_schema", json.dumps(value), OWNER)
    room = str(Path(trial.__file__).parent)
    code = f"import sys; sys.path.append({room!r}); import trial; trial._limit(); bytearray(2**{{}})"
    for power, fits in ((26, True), (29, False)):
        done = subprocess.run([sys.executable, "-c", code.format(power)], capture_output=True, timeout=60)
        assert (done.returncode == 0) == fits
        assert (b"MemoryError" in done.stderr) != fits


def test_a_trial_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a process for every request, and against remembering grammars without bound."""
    tried: list[str] = []
    monkeypatch.setattr(module, "attempt", lambda lark, limits: tried.append(lark))
    monkeypatch.setattr(module, "MAX_TRIED", 3)
    owner = Grammars(byte_level(), 300, frozenset({258}))
    for letter in "aabcda":
        start("ebnf", f'root ::= "{letter}"', owner)
    assert len(tried) == 5  # the first was forgotten
    assert len(owner._tried) == 3
    start("json_object", True, owner)
    start("regex", "a*", owner)
    assert len(tried) == 5


def test_a_refused_grammar_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a grammar that a second request may compile because the first was refused."""

    def refuse(lark: str, limits: object) -> None:
        raise ValueError("too large")

    monkeypatch.setattr(module, "attempt", refuse)
    owner = grammars(byte_level())
    for _ in range(2):
        with pytest.raises(ValueError, match="ebnf: too large"):
            start("ebnf", 'root ::= "a"', owner)
