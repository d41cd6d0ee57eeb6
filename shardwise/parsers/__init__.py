"""What generated text means: reasoning, content and tool calls, told apart while the text comes."""

from shardwise.parsers.message import Delta, Message, ToolCall, ToolCallDelta, join
from shardwise.parsers.parser import REASONING_FORMATS, TOOL_FORMATS, Parser, make_parser, parse

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "Delta",
    "Message",
    "Parser",
    "ToolCall",
    "ToolCallDelta",
    "join",
    "make_parser",
    "parse",
]
