"""Messages as OpenAI's API writes them, and the plain ones that chat templates read. Knows no model and no route."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from shardwise.server.document import check_shape
from shardwise.server.errors import ApiError
from shardwise.server.fields import Body, one_of

MEDIA = ("image_url", "input_audio", "audio_url", "video_url", "file")
"""Parts of a message that are no text."""
ROLES = {"developer": "system"}
"""Roles that templates know by another name."""


class Part(Body):
    """A part of a message's content: text, or something that this server refuses by name."""

    type: Literal["text", "refusal", "image_url", "input_audio", "audio_url", "video_url", "file"]
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    file: Any = None


Parts = Annotated[list[Part], Field(fail_fast=True)]


class FunctionCall(Body):
    """What a tool is called with."""

    name: str
    arguments: str
    """JSON text."""


class ToolCall(Body):
    """One call, as an assistant's earlier message told it."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """One message of a conversation; which fields it may have depends on its role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Parts, one_of("a text or a list of parts")] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=1000)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same by another name."""
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1)]


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages for a chat template. ApiError 400 names what can't be told to the model."""
    return [_plain(message, f"messages.{at}") for at, message in enumerate(messages)]


def text_of(parts: Iterable[Part], where: str) -> str:
    """The text of a content's parts, a line each. ApiError 400 for anything but text."""
    texts: list[str] = []
    for at, part in enumerate(parts):
        if part.type in MEDIA:
            refuse_media(f"{where}.{at}.{part.type}")
        if any(getattr(part, name) is not None for name in MEDIA):
            raise ApiError(400, f"{where}.{at}: a part of type {part.type} has no other content", param=f"{where}.{at}")
        found = part.text if part.type == "text" else part.refusal
        if found is None:
            raise ApiError(400, f"{where}.{at}.{part.type}: field required", param=f"{where}.{at}.{part.type}")
        texts.append(found)
    return "\n".join(texts)


def refuse_media(where: str) -> None:
    """Raise the ApiError for content that isn't text."""
    raise ApiError(400, f"{where}: remote media is disabled, and the model reads text only", param=where)


def _plain(message: Message, where: str) -> dict[str, Any]:
    content = message.content
    if content is not None and not isinstance(content, str):
        content = text_of(content, f"{where}.content")
    _check(message, where)
    found: dict[str, Any] = {"role": ROLES.get(message.role, message.role), "content": content or ""}
    if message.refusal is not None and content is None:
        found["content"] = message.refusal
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    given = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    found.update({name: value for name, value in given.items() if value is not None})
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": arguments_of(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return found


def _check(message: Message, where: str) -> None:
    """Refuse fields that a message of this role doesn't have."""
    if message.role != "assistant":
        for name in ("tool_calls", "reasoning_content", "reasoning", "refusal"):
            if getattr(message, name) is not None:
                raise ApiError(400, f"{where}.{name}: only an assistant's message has it", param=f"{where}.{name}")
        if message.content is None:
            raise ApiError(400, f"{where}.content: field required", param=f"{where}.content")
    elif message.content is None and not message.tool_calls and message.refusal is None:
        raise ApiError(400, f"{where}.content: field required, as there are no tool_calls", param=f"{where}.content")
    if (message.tool_call_id is not None) != (message.role == "tool"):
        problem = "field required" if message.role == "tool" else "only a tool's message has it"
        raise ApiError(400, f"{where}.tool_call_id: {problem}", param=f"{where}.tool_call_id")


def arguments_of(text: str) -> Any:
    """Arguments as templates want them, which write them as JSON themselves; what is broken or too deep stays text."""
    try:
        check_shape(text.encode())
        value = json.loads(text or "{}")
    except (ValueError, ApiError):
        return text
    return value if isinstance(value, dict) else text
