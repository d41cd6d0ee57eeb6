"""The tools that a request offers: checked, told to the template, and where that is asked for, made into a grammar.

The grammar writes calls in the model's own format, so that its parser reads them back. Knows no route.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from shardwise.grammar.lark import quote
from shardwise.parsers import TOOL_FORMATS
from shardwise.server.errors import ApiError
from shardwise.server.fields import Body

MAX_TOOLS = 128
NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
NOTHING = {"properties": {}, "additionalProperties": False}
"""The arguments of a function that names none."""
LETTERS = string.ascii_letters + string.digits


class Function(Body):
    """What a tool is called, and the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Arguments always fit the schema."""


class Tool(Body):
    """A tool, which is a function."""

    type: Literal["function"]
    function: Function


class Named(Body):
    """A function's name."""

    name: str


class NamedChoice(Body):
    """The function that has to be called."""

    type: Literal["function"]
    function: Named


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]
Choice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(frozen=True)
class Shape:
    """How a format writes calls: a marker, what follows it, and what stands between calls."""

    marker: str
    key: str
    """What the arguments are called."""
    begin: str
    end: str
    """Around all calls, or around each if the marker comes again with each."""
    between: str
    each: bool = False
    """A marker comes with each call."""
    bare: bool = False
    """At the beginning of a text there is no marker."""


SHAPES = {
    "hermes": Shape("<tool_call>", "arguments", "\n", "\n</tool_call>", "\n", each=True),
    "llama3_json": Shape("<|python_tag|>", "parameters", "", "", "; ", bare=True),
    "mistral": Shape("[TOOL_CALLS]", "arguments", "[", "]", ", "),
}


@dataclass(frozen=True)
class CallGrammar:
    """A grammar of texts with good calls."""

    lark: str
    free: bool
    """Any text may come before calls, or instead of them."""


@dataclass(frozen=True)
class Offer:
    """Tools, and whether they may ("auto"), must ("required") or must not ("none") be called, or which one must."""

    tools: Sequence[Tool]
    choice: str
    named: str | None
    parallel: bool
    """Several may be called in one message."""

    @property
    def callable(self) -> bool:
        """May the answer hold calls?"""
        return bool(self.tools) and self.choice != "none"

    @property
    def forced(self) -> bool:
        """Does the answer consist of calls alone?"""
        return self.choice == "required"

    def plain(self) -> list[dict[str, Any]] | None:
        """For the chat template."""
        found = [tool.model_dump(exclude_none=True) for tool in self.tools]
        for tool in found:
            tool["function"].setdefault("parameters", {"type": "object", "properties": {}})
        return found or None

    def grammar(self, form: str, content: str | None) -> CallGrammar | None:
        """What constrains the text to good calls; None if nothing does.

        ``content`` is the JSON schema of a text that may come instead of calls; None for any text.
        """
        if not self.callable:
            return None
        strict = any(tool.function.strict for tool in self.tools)
        if not self.forced and not strict and content is None:
            return None
        shape = SHAPES[form]
        tools = [tool.function for tool in self.tools if self.named in (None, tool.function.name)]
        rules = [f"one: {' | '.join(f'call{at}' for at in range(len(tools)))}"]
        for at, function in enumerate(tools):
            head = f'{{"name": {json.dumps(function.name)}, "{shape.key}": '
            wanted = self.forced or function.strict or not strict
            known = NOTHING if function.parameters is None else function.parameters
            schema = {"type": "object", **(known if wanted else {})}
            rules += [f'call{at}: {quote(head)} args{at} "}}"', f"args{at}: %json {json.dumps(schema)}"]
        lark = "\n".join([*self._start(shape, content), *rules])
        return CallGrammar(lark, free=not self.forced and content is None)

    def _start(self, shape: Shape, content: str | None) -> list[str]:
        marker, begin, end, between = map(quote, (shape.marker, shape.begin, shape.end, shape.between))
        many = self.parallel and self.named is None
        free = not self.forced and content is None
        again = f"{between} {marker} {begin} one {end}" if shape.each else f"{between} one"
        if not many or (free and shape.each):
            calls = f"calls: {begin} one {end}"
        elif shape.each:
            calls = f"calls: {begin} one {end} ({again})*"
        else:
            calls = f"calls: {begin} one ({again})* {end}"
        if self.forced:
            return ["start: calls" if shape.bare else f"start: {marker} calls", calls]
        if content is not None:  # without a marker, the beginning of a call would hide that of the content
            return [f"start: content | {marker} calls", calls, f"content: %json {content}"]
        found, repeated = re.escape(shape.marker), "+" if many and shape.each else ""
        first = r"[^{ \t\r\n](?s:.*)" if shape.bare else "(?s:.*)"
        return [
            f"start: TEXT? | (before calls){repeated} TEXT?{' | calls' if shape.bare else ''}",
            calls,
            f"before[lazy]: /({first})?{found}/",
            f"TEXT: /{first}/ & ~/(?s:.*){found}(?s:.*)/ & /(?s:.+)/",
        ]


def make_offer(
    tools: Sequence[Tool] | None, choice: Choice | None, parallel: bool | None, form: str | None, named_by: str
) -> Offer:
    """The offer of a request. ApiError 400 for one that can't be met.

    ``form`` is the format in which the model calls tools, if the server knows it; ``named_by`` is the field that a name
    to call comes in.
    """
    tools = tools or ()
    names = [tool.function.name for tool in tools]
    named = choice.function.name if isinstance(choice, NamedChoice) else None
    for at, tool in enumerate(tools):
        if tool.function.name in names[:at]:
            raise ApiError(400, f"tools.{at}: there is a function of that name before it", param=f"tools.{at}")
        if (tool.function.parameters or {}).get("type", "object") != "object":
            where = f"tools.{at}.function.parameters"
            raise ApiError(400, f"{where}: the arguments of a function are an object", param=where)
    word = ("auto" if tools else "none") if choice is None else choice if isinstance(choice, str) else "required"
    if not tools and word != "none":
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if named is not None and named not in names:
        raise ApiError(400, f"{named_by}: there is no tool of that name", param=named_by)
    if word != "none" and form is None:
        raise ApiError(
            400,
            "tools: this server does not know how the model calls tools; start it with --tool-parser "
            f"{'|'.join(TOOL_FORMATS)}, or set tool_choice to none",
            param="tools",
        )
    return Offer(tools, word, named, parallel is not False)


def new_call_id(form: str | None) -> str:
    """An id that no other call has. Mistral's templates take none but nine letters and digits."""
    if form == "mistral":
        return "".join(secrets.choice(LETTERS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
