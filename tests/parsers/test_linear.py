"""R16: no text is expensive, whole or token by token."""

from __future__ import annotations

import time

import pytest

from shardwise.parsers import TOOL_FORMATS, parse
from shardwise.parsers.formats import TOOLS
from shardwise.parsers.reasoning import Reasoning
from shardwise.parsers.tools import Tools

CALL = {
    "hermes": '<tool_call>{"name":"f","arguments":',
    "llama3_json": '{"name":"f","parameters":',
    "mistral": '[TOOL_CALLS][{"name":"f","arguments":',
}


def texts(form: str) -> list[tuple[str, str]]:
    """Beginnings, and what is repeated behind them without end."""
    call, marker = CALL[form], TOOLS[form].markers[0]
    return [
        ("", marker[:-1]),
        ("", marker),
        ("", marker + '{"'),
        ("", marker + '{"a":["'),
        ("", marker + " " * 40),
        ("", marker[0]),
        ("", " "),
        ("", ";"),
        ("", "{"),
        ("", '{"a":'),
        (call, "{"),
        (call + "{", "[]"),
        (call + "{", '"",'),
        (call + "{", '"<",[],'),
        (call + '{"', "\\"),
        (call + '{"', '\\"'),
        (call + '{"', "é"),
        (call + "{}", ";"),
        (call + "{},", '"":0,'),
        (call + "{},", '"":{},'),
        (call + "{},", " "),
        (call[:-12] + '"x":"', "y"),
        ("{" if form == "llama3_json" else marker + "{", '"arguments":["x'),
    ]


def seconds(form: str, text: str) -> float:
    """Processor time for a whole text, the least of three."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        parse(text, "qwen3", form)
        times.append(time.thread_time() - start)
    return min(times)


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_time_grows_with_the_text_alone(form: str) -> None:
    """R16: guards against time with the square of the text: fourfold text would cost sixteenfold time."""
    for head, unit in texts(form):
        small, large = (head + unit * (size // len(unit)) for size in (1 << 15, 1 << 17))
        least = 1e-3  # shorter times are the clock's own
        ratio = seconds(form, large) / max(least, seconds(form, small))
        assert ratio < 10, (head, unit, ratio)


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_half_a_megabyte(form: str) -> None:
    """R16: guards the figure: 520 kB that do their worst took 32 ms of one core, and hardly take ten times that."""
    assert max(seconds(form, head + unit * (520_000 // len(unit))) for head, unit in texts(form)) < 0.3


@pytest.mark.parametrize("form", TOOL_FORMATS)
@pytest.mark.parametrize("opened", [False, True])
def test_little_text_waits_to_be_read(form: str, opened: bool) -> None:
    """R16: guards against text that is copied or read again with every piece: what a piece is joined to stays short."""
    for head, unit in texts(form):
        text = head + unit * (4000 // len(unit))
        for begin in ("", "</think>"):
            reasoning, tools = Reasoning(opened), Tools(TOOLS[form])
            for char in begin + text:
                tools.push(reasoning.push(char)[1])
                assert len(reasoning._held) < 40
                assert len(tools._text) - tools._place < 256
