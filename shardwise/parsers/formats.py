"""What the formats of tool calls write around the JSON objects that are calls."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

from shardwise.parsers.marker import SPACE


@dataclass(frozen=True)
class ToolFormat:
    """What stands around the JSON objects of tool calls. Patterns end with the character that decides."""

    markers: tuple[str, ...]
    """What a tokenizer may hold for special and decoding must keep. The first begins calls."""
    opening: re.Pattern[str]
    """What follows the marker: to a call's brace; or, as group ``name``, a name, to its arguments."""
    opens: str
    """Characters with which that may begin after white space."""
    joining: re.Pattern[str]
    """What may follow a call: to the brace of the next one, or to the end of the calls."""
    joins: str
    """Characters with which that may begin after white space."""
    at_start: bool = False
    """The text may begin with a call, without a marker; then it needs arguments, as it may be any JSON."""


_W = rf"[{SPACE}]*"
_BRACE = re.compile(rf"{_W}\{{")
_ID_AND_ARGS = rf"(?:\[CALL_ID\]{_W}\w*{_W})?(?:\[ARGS\]{_W})?"
TOOLS = {
    "hermes": ToolFormat(
        markers=("<tool_call>", "</tool_call>"),
        opening=_BRACE,
        opens="{",
        joining=re.compile(rf"[}}{SPACE}]*</tool_call>"),  # models often write a brace too many
        joins="<}",
    ),
    "llama3_json": ToolFormat(
        markers=("<|python_tag|>",),
        opening=_BRACE,
        opens="{",
        joining=re.compile(rf"{_W};?{_W}\{{"),
        joins=";{",
        at_start=True,
    ),
    "mistral": ToolFormat(
        markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        opening=re.compile(rf"{_W}(?:\[{_W}\{{|(?P<name>[\w.-]+){_W}{_ID_AND_ARGS}(?=\{{))", re.ASCII),
        opens="[_-." + string.ascii_letters + string.digits,
        joining=re.compile(rf"{_W}(?:,{_W}\{{|\])"),
        joins=",]",
    ),
}
"""By name: Hermes and Qwen, Llama 3.1 and 3.2, and Mistral's list and its newer ``name[ARGS]{…}``."""
