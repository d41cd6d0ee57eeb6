"""Tool calls apart from content: one reader of calls that are JSON objects, and what each format writes around them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.parsers.marker import SPACE, begun, past_space
from shardwise.parsers.message import ToolCallDelta
from shardwise.parsers.value import Value


@dataclass(frozen=True)
class ToolFormat:
    """What stands around the JSON objects of tool calls. Patterns end with the character that decides."""

    markers: tuple[str, ...]
    """What a tokenizer may hold for special and decoding must keep. The first begins calls."""
    opens: str
    """Characters that may follow the marker and white space."""
    opening: re.Pattern[str]
    """What follows them, to a call's brace; or, as group ``name``, a name, to its arguments."""
    joins: str
    """Characters with which ``joining`` may begin."""
    joining: re.Pattern[str]
    """What may follow a call and white space: to the brace of the next one, or to the end of the calls."""
    at_start: bool = False
    """The text may begin with a call, without a marker; then arguments must be there, as it may be any JSON."""


_W = rf"[{SPACE}]*"
HERMES = ToolFormat(
    markers=("<tool_call>", "</tool_call>"),
    opens="{",
    opening=re.compile(r"\{"),
    joins="<}",
    # models often write a brace too many
    joining=re.compile(rf"[}}{SPACE}]*</tool_call>"),
)
LLAMA3_JSON = ToolFormat(
    markers=("<|python_tag|>",),
    opens="{",
    opening=re.compile(r"\{"),
    joins=";{",
    joining=re.compile(rf";?{_W}\{{"),
    at_start=True,
)
MISTRAL = ToolFormat(
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    opens="[ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_",
    opening=re.compile(
        rf"\[{_W}\{{|(?P<name>[\w.-]+){_W}(?:\[CALL_ID\]{_W}\w*{_W})?(?:\[ARGS\]{_W})?(?=\{{)", re.ASCII
    ),
    joins=",]",
    joining=re.compile(rf",{_W}\{{|\]"),
)

_STRING = r'[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*'
_PAIR = (
    rf'"(?:name"{_W}:{_W}"(?P<name>{_STRING})"'
    rf'|(?!name"{_W}:{_W}")(?P<key>{_STRING})"{_W}:{_W}(?:(?=["{{\[])|(?P<plain>[-+.\w]+)(?=[,}}{SPACE}])))'
)
_FIRST = re.compile(_W + _PAIR)
_NEXT = re.compile(rf"{_W}(?:(?P<close>\}})|,{_W}{_PAIR})")
_LIMIT = 256
"""A name, key, number or marker, with what surrounds it, is no longer: so no text is looked at again and again."""


@dataclass(slots=True)
class _Call:
    """What is known of the call that is being read."""

    name: str = ""
    in_object: bool = True
    """A JSON object; else only its arguments are one."""
    arguments: list[str] | None = None
    """Those that came before the name, or None before any."""
    others: bool = False
    """It has keys that no call has."""
    told: bool = False
    """It is a call for good."""


class Tools:
    """Splits text that comes in pieces into content and tool calls.

    A call begins to be told as soon as its name and the first character of its arguments are known, in whatever order
    they come. From then on it is a call, though its JSON may break later: its arguments go as far as they came, and
    reading goes on behind them. What breaks before is content, every character of it, and reading goes on where it
    broke. Arguments are told exactly as written, except that none and ``null`` are ``{}``. White space beside calls is
    dropped where it would begin or end the content. Whatever the pieces, they join to the same, and any text costs time
    in proportion to its length.
    """

    def __init__(self, form: ToolFormat):
        self._form = form
        self._state: Callable[[], bool] = self._joining if form.at_start else self._prose
        """Takes one step; False if that needs more text."""
        self._text = ""
        self._final = False
        self._place = 0
        """Text before it has been read."""
        self._mark = 0
        """Text from here to ``_place`` belongs to ``_held``."""
        self._held: list[str] = []
        """What has been read of a call that is none as yet."""
        self._space: list[str] = []
        """White space after the content so far."""
        self._adjoins = False
        """A call came after the content so far."""
        self._content: list[str] = []
        self._calls: list[tuple[int, str | None, list[str]]] = []
        self._count = 0
        self._call = _Call()
        self._pair = _FIRST
        self._scan = Value()
        self._scans_arguments = False

    def push(self, text: str, final: bool = False) -> tuple[str, list[ToolCallDelta]]:
        """The next piece of text; returns what is certain now: (content, calls). The last one is ``final``."""
        self._text = self._text[self._place :] + text
        self._place = self._mark = 0
        self._final = final
        while self._state():
            pass
        if self._mark < self._place and not self._call.told:
            self._held.append(self._text[self._mark : self._place])
        if final and not self._adjoins:
            self._content += self._space
        content, self._content = "".join(self._content), []
        calls, self._calls = self._calls, []
        return content, [ToolCallDelta(index, name, "".join(pieces)) for index, name, pieces in calls]

    def _prose(self) -> bool:
        marker = self._form.markers[0]
        at = self._text.find(marker, self._place)
        end = at if at >= 0 else len(self._text)
        if at < 0 and not self._final:
            end -= begun(self._text, marker, self._place)
        self._say(self._text[self._place : end])
        self._place = self._mark = end
        if at < 0:
            return False
        self._place += len(marker)
        self._call = _Call()
        self._state = self._opening
        return True

    def _opening(self) -> bool:
        self._place = past_space(self._text, self._place)
        if self._place < len(self._text) and self._text[self._place] not in self._form.opens:
            return self._break()
        found = self._match(self._form.opening)
        if not found:
            return self._enough() and self._break()
        self._place = found.end()
        if found.lastgroup:
            self._call = _Call(found["name"], in_object=False, arguments=[])
            self._tell()
            self._begin_value(arguments=True)
        else:
            self._begin_object()
        return True

    def _joining(self) -> bool:
        end = past_space(self._text, self._place)
        if self._place < end:
            self._space.append(self._text[self._place : end])
        self._place = self._mark = end
        if end == len(self._text):
            return False
        possible = self._text[end] in self._form.joins
        found = self._match(self._form.joining) if possible else None
        if possible and not found and not self._enough():
            return False
        self._state = self._prose
        if found:
            self._place = found.end()
            if found[0][-1] == "{":
                self._begin_object()
        return True

    def _pairs(self) -> bool:
        found = self._match(self._pair)
        if not found:
            return self._enough() and self._break()
        self._place = found.end()
        self._pair = _NEXT
        if found.lastgroup == "close":
            return self._close()
        if found.lastgroup == "name":
            return bool(self._call.name) or self._take_name(found["name"])
        arguments = found["key"] in ("arguments", "parameters") and self._call.arguments is None
        if arguments:
            self._call.arguments = []
            if self._call.name:
                self._tell()
        elif found["key"] not in ("type", "id"):
            self._call.others = True
        if not found["plain"]:
            self._begin_value(arguments)
        elif arguments:
            self._argue("{}" if found["plain"] == "null" else found["plain"])
        return True

    def _take_name(self, text: str) -> bool:
        try:
            self._call.name = json.loads(f'"{text}"')
            self._call.name.encode()
        except ValueError:  # a wrong escape, or half a character
            return self._break()
        if not self._call.name:
            return self._break()
        if self._call.arguments is not None:
            self._tell()
        return True

    def _value(self) -> bool:
        start = self._place
        self._place = self._scan.scan(self._text, start)
        unfinished = not self._scan.done and not self._scan.broken
        if unfinished and self._final:
            self._place = len(self._text)
        if self._scans_arguments:
            self._argue(self._text[start : self._place])
        if self._scan.done:
            self._state = self._pairs if self._call.in_object else self._prose
            return True
        return (self._final or not unfinished) and self._break()

    def _close(self) -> bool:
        call = self._call
        if not call.told:
            if not call.name or call.others or self._form.at_start:
                return self._break()
            call.arguments = ["{}"]
            self._tell()
        self._state = self._joining
        return True

    def _break(self) -> bool:
        """What has been read goes no further: as a call if it is one, else as content."""
        if self._call.told:
            self._state = self._joining if self._call.in_object else self._prose
        else:
            self._say("".join([*self._held, self._text[self._mark : self._place]]))
            self._held = []
            self._state = self._prose
        return True

    def _begin_object(self) -> None:
        self._call = _Call()
        self._pair = _FIRST
        self._state = self._pairs

    def _begin_value(self, arguments: bool) -> None:
        self._scan = Value()
        self._scans_arguments = arguments
        self._state = self._value

    def _tell(self) -> None:
        self._calls.append((self._count, self._call.name, self._call.arguments or []))
        self._count += 1
        self._call.told = self._adjoins = True
        self._held = []

    def _argue(self, piece: str) -> None:
        if not self._call.told and self._call.arguments is not None:
            self._call.arguments.append(piece)
        elif self._calls:
            self._calls[-1][2].append(piece)
        else:
            self._calls.append((self._count - 1, None, [piece]))

    def _say(self, text: str) -> None:
        body = text.rstrip(SPACE)
        if body:
            self._content += [*self._space, body]
            self._space = []
            self._adjoins = False
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return pattern.match(self._text, self._place, self._place + _LIMIT)

    def _enough(self) -> bool:
        """More text wouldn't make a pattern match."""
        return self._final or len(self._text) - self._place >= _LIMIT
