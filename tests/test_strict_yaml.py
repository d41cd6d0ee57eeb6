"""YAML that people write: what it means, where it is wrong, and what is never done with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from shardwise.config import Layout
from shardwise.shapes import build, located, shape_of, values
from shardwise.strict_yaml import MAX_BYTES, Section, override, read, read_file


@dataclass(frozen=True)
class Launch:
    processes: int = field(metadata={"key": "nproc-per-node"})
    backend: Literal["c10d", "static"] = field(default="c10d", metadata={"key": "rdzv-backend"})


@dataclass(frozen=True)
class Whole:
    name: str
    layout: Layout = field(default_factory=Layout)
    rate: float = 0.0
    stop: str | tuple[str, ...] = ()
    pair: tuple[int, float] | None = None
    on: bool = False
    launch: Launch | None = None
    biases: dict[int, float] = field(default_factory=dict)
    free: dict[str, Any] = field(default_factory=dict)
    rest: Section | None = None

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate must not be below 0, not {self.rate}")


GOOD = """
name: "7"
layout: tp2
rate: 1e-3
stop: [a, 'no', no]
pair: [3, .5]
on: True
launch:
  nproc-per-node: 0x10
  rdzv-backend: static
biases: {12: -1, 0: 2.5}
free: {a: [1, {b: null, c: ~}], d: .inf}
rest: {x: 1}
"""


def parsed(text: str, *assignments: str) -> Whole:
    section = read(text, "f.yaml")
    override(section, assignments)
    return build(section, Whole)


def test_a_good_file() -> None:
    """Guards what values mean: YAML 1.2's words and numbers, every kind, keys with hyphens, a section as it is."""
    found = parsed(GOOD)
    assert (found.name, found.layout, found.rate, found.stop) == ("7", Layout(tp=2), 0.001, ("a", "no", "no"))
    assert (found.pair, found.on, found.launch) == ((3, 0.5), True, Launch(16, "static"))
    assert (found.biases, found.free) == ({12: -1, 0: 2.5}, {"a": [1, {"b": None, "c": None}], "d": float("inf")})
    assert isinstance(found.rest, Section)
    assert found.rest.at("x") == "f.yaml:13"
    assert parsed("name: a\nlayout: 1").layout == Layout()
    assert read("", "f.yaml") == read("# nothing\n", "f.yaml") == {}


def test_words_outside_of_a_file() -> None:
    """Guards assignments: a word is what its kind makes of it, brackets and quotes are YAML, dots make sections."""
    found = parsed("name: a", "name=7", "rate=1e-3", "on=true", "launch.nproc-per-node=2", "stop=[x, y]", "pair=null")
    assert (found.name, found.rate, found.on, found.launch) == ("7", 0.001, True, Launch(2))
    assert (found.stop, found.pair) == (("x", "y"), None)
    assert parsed("name: a", "name='b'", "stop=a, b: c", "free.x=3") == Whole("b", stop="a, b: c", free={"x": 3})
    assert parsed(GOOD, "launch.nproc-per-node=4").launch == Launch(4, "static")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("name: a\nlaoyut: tp2", "f.yaml:2: unknown key 'laoyut'; did you mean 'layout'?"),
        ("name: a\nlaunch:\n  nproc_per_node: 2", "f.yaml:3: unknown key 'nproc_per_node'; did you mean 'nproc-per"),
        ("name: a\nzzz: 1", "f.yaml:2: unknown key 'zzz'; known: name, layout, "),
        ("rate: 1", "f.yaml:1: name is missing"),
        ("name: a\nlaunch: {}", "f.yaml:2: nproc-per-node is missing"),
        ("name: 7", "f.yaml:1: name must be a text, not 7"),
        ("name: a\nrate: '1'", "f.yaml:2: rate must be a number, not '1'"),
        ("name: a\nrate: true", "f.yaml:2: rate must be a number, not true"),
        ("name: a\non: 1", "f.yaml:2: on must be true or false, not 1"),
        ("name: a\non: yes", "f.yaml:2: on must be true or false, not 'yes'"),
        ("name: a\non:", "f.yaml:2: on must be true or false, not null"),
        ("name: a\nlaunch: {nproc-per-node: 2.0}", "f.yaml:2: nproc-per-node must be a whole number, not 2.0"),
        ("name: a\nlaunch:\n  rdzv-backend: etcd", "f.yaml:3: rdzv-backend must be one of c10d, static, not 'etcd'"),
        ("name: a\npair: [1]", "f.yaml:2: pair must be a list of 2 or null, not a list"),
        ("name: a\nstop: [1]", "f.yaml:2: stop must be a text or a list (each a text), not a list"),
        ("name: a\nbiases: {x: 1}", "f.yaml:2: biases must be a section (each key a whole number, each value a n"),
        ("name: a\nlayout: tp0", "f.yaml:2: layout: tp must be a whole number of at least 1"),
        ("name: a\nlayout: [tp2]", "f.yaml:2: layout must be a text, not a list"),
        ("name: a\n\nrate: -1", "f.yaml:3: rate must not be below 0, not -1"),
        ("name: a\nname: b", "f.yaml:2: 'name' is given twice, first at f.yaml:1"),
        ("name: a\nfree:\n  x: {y: 1, y: 2}", "f.yaml:3: 'y' is given twice"),
        ("name: &x a", "f.yaml:1: anchors and aliases are not read"),
        ("name: *x", "f.yaml:1: anchors and aliases are not read"),
        ("name: !!python/object/apply:os.system [id]", "f.yaml:1: tags such as tag:yaml.org,2002:python/object"),
        ("!!map {name: a}", "f.yaml:1: tags such as tag:yaml.org,2002:map are not read"),
        ("- name", "f.yaml:1: must be a mapping"),
        ("name", "f.yaml:1: must be a mapping"),
        ("? [a]\n: b", "f.yaml:1: a key must be a word"),
        ("name: a\n---\nname: b", "f.yaml:3: a second document"),
        ("name: [a", "f.yaml:1: is not valid YAML: expected ',' or ']'"),
        ("name: a\n\tb: c", "f.yaml:2: is not valid YAML"),
        ("name: \x00", "f.yaml:1: is not valid YAML"),
        ("free: " + "[" * 10_000, "f.yaml:1: is nested more than 16 deep"),
        ("free: " + "{a: " * 10_000, "f.yaml:1: is nested more than 16 deep"),
        ("name: " + "a" * MAX_BYTES, "f.yaml: is larger than"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, error: str) -> None:
    """Guards the line and the remedy of every mistake, and against whatever could make a file run, grow or recurse."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parsed(text)
    assert str(caught.value).startswith(error)


@pytest.mark.parametrize(
    ("assignment", "error"),
    [
        ("launch.nproc=2", "argument 'launch.nproc=2': unknown key 'nproc'; known: nproc-per-node, rdzv-backend"),
        (
            "launch.nproc-node=2",
            "argument 'launch.nproc-node=2': unknown key 'nproc-node'; did you mean 'nproc-per-node'?",
        ),
        (
            "nproc-per-node=2",
            "argument 'nproc-per-node=2': unknown key 'nproc-per-node'; did you mean 'launch.nproc-per",
        ),
        ("rate=fast", "argument 'rate=fast': rate must be a number, not 'fast'"),
        ("rate=-1", "argument 'rate=-1': rate must not be below 0"),
        ("rate", "argument 'rate': must be key=value"),
        ("launch.=2", "argument 'launch.=2': must be key=value"),
        ("stop=[a", "argument 'stop=[a': is not valid YAML"),
        ("free={a: 1, a: 2}", "argument 'free={a: 1, a: 2}': 'a' is given twice"),
        ("name.x=1", "argument 'name.x=1': name must be a text, not a section of keys"),
    ],
)
def test_assignments_that_are_refused(assignment: str, error: str) -> None:
    """Guards assignments being checked as strictly as the file."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parsed("name: a", assignment)
    assert str(caught.value).startswith(error)


def test_shapes_within_shapes() -> None:
    """Guards values that are given in part, and the search for a key that belongs into another section."""
    shape = {"model": str, "launch": shape_of(Launch)}
    assert values(read("launch: {rdzv-backend: static}", "f.yaml"), shape) == {"launch": {"rdzv-backend": "static"}}
    with pytest.raises(
        ValueError, match=r"f.yaml:1: unknown key 'nproc_per_node'; did you mean 'launch.nproc-per-node'"
    ):
        values(read("nproc_per_node: 1", "f.yaml"), shape)
    section = read("a: 1\nb-c: 2", "f.yaml")
    assert str(located(section, ValueError("b-c is odd"))) == "f.yaml:2: b-c is odd"
    assert str(located(section, ValueError("all is odd"))) == "f.yaml:1: all is odd"


def test_files(tmp_path: Path) -> None:
    """Guards the sentence about a file that is not there, no text or too large; and a byte order mark."""
    path = tmp_path / "f.yaml"
    with pytest.raises(ValueError, match="can't be read: No such file"):
        read_file(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not text in UTF-8"):
        read_file(path)
    path.write_bytes(b"a: 1\n" + b"#" * MAX_BYTES)
    with pytest.raises(ValueError, match="larger than"):
        read_file(path)
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_file(path) == {"a": 1}
