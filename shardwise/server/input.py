"""The input of /v1/responses: messages, calls, their results and reasoning as items, made into plain messages.

Knows no model, and nothing of what earlier responses were: all of a conversation comes with each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from shardwise.server.errors import ApiError
from shardwise.server.fields import Body, one_of
from shardwise.server.messages import ROLES, arguments_of, refuse_media

MEDIA = {"input_image": "image_url", "input_audio": "input_audio", "input_file": "file_data"}


class Part(Body):
    """A part of a content: text, or something that this server refuses by name."""

    type: Literal[
        "input_text", "output_text", "text", "refusal", "reasoning_text", "input_image", "input_audio", "input_file"
    ]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    """Of an output that comes back as input; nothing depends on it."""
    image_url: Any = None
    detail: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    input_audio: Any = None


Content = Annotated[str | Annotated[list[Part], Field(fail_fast=True)], one_of("a text or a list of parts")]


class Item(Body):
    """One item; which fields it has depends on its type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: list[Any] | None = None
    encrypted_content: None = None


Inputs = Annotated[list[Item], Field(fail_fast=True, min_length=1)]
NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
ALLOWED = {"reasoning": ("content", "summary", "encrypted_content")}


def plain(instructions: str | None, given: str | Sequence[Item]) -> list[dict[str, Any]]:
    """The messages for a chat template. ApiError 400 names what can't be told to the model."""
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for at, item in enumerate(given):
        _check(item, f"input.{at}")
        _append(messages, item, f"input.{at}")
    return messages


def _append(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """Calls and reasoning belong to the assistant's message around them."""
    if item.type == "message":
        role = ROLES.get(item.role or "", item.role)
        content = _text(item.content or "", f"{where}.content")
        if role == "assistant" and _waits(messages):
            messages[-1]["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif item.type == "function_call_output":
        output = _text(item.output or "", f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    else:
        if not messages or messages[-1]["role"] != "assistant" or item.type == "reasoning":
            messages.append({"role": "assistant", "content": ""})
        if item.type == "reasoning":
            messages[-1]["reasoning_content"] = _text(item.content or "", f"{where}.content")
        else:
            function = {"name": item.name, "arguments": arguments_of(item.arguments or "")}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)


def _waits(messages: list[dict[str, Any]]) -> bool:
    """Is the last message reasoning whose content is still to come?"""
    return (
        bool(messages) and set(messages[-1]) == {"role", "content", "reasoning_content"} and not messages[-1]["content"]
    )


def _check(item: Item, where: str) -> None:
    needed = NEEDED[item.type]
    allowed = {"type", "id", "status", *needed, *ALLOWED.get(item.type, ())}
    for name in needed:
        if getattr(item, name) is None:
            raise ApiError(400, f"{where}.{name}: field required", param=f"{where}.{name}")
    for name in type(item).model_fields:
        if name not in allowed and getattr(item, name) is not None:
            raise ApiError(400, f"{where}.{name}: an item of type {item.type} has none", param=f"{where}.{name}")


def _text(content: str | Sequence[Part], where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for at, part in enumerate(content):
        if part.type in MEDIA:
            refuse_media(f"{where}.{at}.{MEDIA[part.type]}")
        name = "refusal" if part.type == "refusal" else "text"
        for other in ("image_url", "detail", "file_id", "file_data", "file_url", "filename", "input_audio"):
            if getattr(part, other) is not None:
                raise ApiError(400, f"{where}.{at}.{other}: a text has none", param=f"{where}.{at}.{other}")
        found = getattr(part, name)
        if found is None:
            raise ApiError(400, f"{where}.{at}.{name}: field required", param=f"{where}.{at}.{name}")
        texts.append(found)
    return "\n".join(texts)
