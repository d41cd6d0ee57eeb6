"""The formats by name, and the parser made of them: reasoning first, then tool calls in what is left."""

from __future__ import annotations

from shardwise.parsers.formats import TOOLS
from shardwise.parsers.message import Delta, Message, join
from shardwise.parsers.reasoning import CLOSE, OPEN, Reasoning
from shardwise.parsers.tools import Tools

_REASONING = {"deepseek_r1": True, "qwen3": False}
"""Whether a model of the kind reasons even where neither prompt nor text has an opening tag."""

TOOL_FORMATS = tuple(TOOLS)
REASONING_FORMATS = tuple(_REASONING)


class Parser:
    """Tells reasoning, content and tool calls apart while the text of one message comes; ``make_parser`` makes it.

    However the text is cut, the deltas join to the same message, and all of them together cost time in proportion to
    its length. No text is an error: what is no call is content.
    """

    def __init__(self, reasoning: Reasoning | None, tools: Tools | None, markers: tuple[str, ...]):
        self.markers = markers
        """What decoding must keep of the text even where a tokenizer holds it for special."""
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> Delta:
        """The next piece of generated text; returns what is certain now."""
        return self._push(text, final=False)

    def finish(self) -> Delta:
        """What was held back, as no more text will come."""
        return self._push("", final=True)

    def _push(self, text: str, final: bool) -> Delta:
        reasoning, content = self._reasoning.push(text, final) if self._reasoning else ("", text)
        content, calls = self._tools.push(content, final) if self._tools else (content, [])
        return Delta(content, reasoning, calls)


def make_parser(reasoning: str | None, tools: str | None, *, reasoning_opened: bool = False) -> Parser:
    """A parser for one message. ``reasoning`` is one of ``REASONING_FORMATS``, ``tools`` one of ``TOOL_FORMATS``.

    ``reasoning_opened`` says that the prompt ends with the opening tag; "deepseek_r1" always takes it so, as these
    models reason even where their template has no tag. None leaves the text of that kind in the content. Raises
    ValueError for an unknown name.
    """
    if reasoning is not None and reasoning not in _REASONING:
        raise ValueError(f"unknown reasoning format {reasoning!r}: choose from {', '.join(REASONING_FORMATS)}")
    if tools is not None and tools not in TOOLS:
        raise ValueError(f"unknown tool format {tools!r}: choose from {', '.join(TOOL_FORMATS)}")
    return Parser(
        Reasoning(reasoning_opened or _REASONING[reasoning]) if reasoning else None,
        Tools(TOOLS[tools]) if tools else None,
        ((OPEN, CLOSE) if reasoning else ()) + (TOOLS[tools].markers if tools else ()),
    )


def parse(text: str, reasoning: str | None, tools: str | None, *, reasoning_opened: bool = False) -> Message:
    """The message that a whole text is; see ``make_parser``."""
    parser = make_parser(reasoning, tools, reasoning_opened=reasoning_opened)
    return join([parser.push(text), parser.finish()])
