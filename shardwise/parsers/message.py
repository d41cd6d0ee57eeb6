"""An assistant's message and the pieces in which it comes: plain data that knows no format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one tool call."""

    index: int
    """Which call of the message, from 0; calls come one after another."""
    name: str | None
    """The tool's name with the first piece of the call, None with all others."""
    arguments: str
    """A piece of JSON text."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What became certain of a message with one more piece of text."""

    content: str
    reasoning: str
    tool_calls: list[ToolCallDelta]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call, as the model wrote it."""

    name: str
    arguments: str
    """JSON text; broken where the model broke it."""


@dataclass(slots=True)
class Message:
    """A whole message; None for what it does not have."""

    content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall]


def join(deltas: Iterable[Delta]) -> Message:
    """The message whose pieces these are."""
    content, reasoning = [], []
    names: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        content.append(delta.content)
        reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.name is not None:
                names.append(call.name)
                arguments.append([])
            arguments[call.index].append(call.arguments)
    calls = [ToolCall(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True)]
    return Message("".join(content) or None, "".join(reasoning) or None, calls)
