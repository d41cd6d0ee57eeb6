"""What /v1/responses writes otherwise than the chat route: tools without a wrapping, the text's format, reasoning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from shardwise.server.fields import Body, Schema
from shardwise.server.tools import NAME, Function, Tool

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class FlatTool(Body):
    """A function, as this route writes it."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """The same as other routes write it."""
        values = self.model_dump(exclude={"type"}, exclude_none=True)
        return Tool(type="function", function=Function.model_validate(values))


class FlatChoice(Body):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class Format(Body):
    """What constrains the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None
    """Accepted; the schema always holds."""


class TextOptions(Body):
    """How the text is to be."""

    format: Format | None = None
    verbosity: None = None


class Reasoning(Body):
    """How the model is to think."""

    effort: Effort | None = None
    """Told to the chat template, if it makes something of it."""
    summary: None = None
    generate_summary: None = None
