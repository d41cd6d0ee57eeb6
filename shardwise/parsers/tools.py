"""Tool calls apart from content: one reader of calls that are JSON objects, whatever a format writes around them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.parsers.formats import ToolFormat
from shardwise.parsers.marker import SPACE, begun
from shardwise.parsers.message import ToolCallDelta
from shardwise.parsers.value import Value

_W = rf"[{SPACE}]*"
_STRING = r'[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*'
_VALUE = rf'(?:(?P<plain>[-+.\w]+(?=[,}}{SPACE}])|\{{{_W}\}})|(?=["{{\[]))'
_NAME = rf'name"{_W}:{_W}"'
_PAIR = rf'{_W}"(?:{_NAME}(?P<name>{_STRING})"|(?!{_NAME})(?P<key>{_STRING})"{_W}:{_W}{_VALUE})'
_FIRST = re.compile(_PAIR)
_NEXT = re.compile(rf"{_W}(?:(?P<close>\}})|,{_PAIR})")
_LIMIT = 256
"""No pattern matches more, so that no text is looked at again and again; a longer name or key is none."""
_MOST = 1000
"""So many calls, broken ones and needless keys included, are read in one message; what follows is content."""


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


class Tools:
    """Splits text that comes in pieces into content and tool calls.

    A call begins to be told as soon as its name and the first character of its arguments are known, in whatever order
    they come. From then on it is a call, though its JSON may break later: its arguments go as far as they came, and
    reading goes on behind them. What breaks before is content, every character of it, and reading goes on where it
    broke. Arguments are told exactly as written, except that none and ``null`` are ``{}``. White space at the end of
    the content is dropped if a call follows it. Whatever the pieces, they join to the same, and any text costs time in
    proportion to its length.
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
        """Text before it has gone its way."""
        self._start = -1
        """Where what may be a call begins, if one is being read."""
        self._held: list[str] = []
        """What has been read of it in earlier pieces."""
        self._told = False
        """What is being read is a call for good."""
        self._call = _Call()
        self._pair = _FIRST
        self._scan = Value("")
        self._scans_arguments = False

        self._space: list[str] = []
        """White space after the content so far."""
        self._adjoins = False
        """A call came after the content so far."""
        self._content: list[str] = []
        self._calls: list[tuple[int, str | None, list[str]]] = []
        self._count = 0
        self._tries = 0

    def push(self, text: str, final: bool = False) -> tuple[str, list[ToolCallDelta]]:
        """The next piece of text; returns what is certain now: (content, calls). The last one is ``final``."""
        self._text = self._text[self._place :] + text
        self._place = self._mark = 0
        if self._start > 0:
            self._start = 0
        self._final = final
        while self._state():
            pass
        if self._start >= 0:
            self._say(self._text[self._mark : self._start])
            self._held.append(self._text[self._start : self._place])
        elif not self._told:
            self._say(self._text[self._mark : self._place])
        if final and not self._adjoins:
            self._content += self._space
        content, self._content = "".join(self._content), []
        calls, self._calls = self._calls, []
        return content, [ToolCallDelta(index, name, "".join(pieces)) for index, name, pieces in calls]

    def _prose(self) -> bool:
        marker = self._form.markers[0]
        at = self._text.find(marker, self._place) if self._tries < _MOST else -1
        if at < 0:
            waiting = 0 if self._final else begun(self._text, marker, self._place)
            self._place = len(self._text) - waiting
            return False
        self._tries += 1
        self._start, self._place = at, at + len(marker)
        self._state = self._opening
        return True

    def _opening(self) -> bool:
        found = self._match(self._form.opening)
        if not found:
            return not self._may_begin(self._form.opens) and self._break()
        self._place = found.end()
        if found.lastgroup:
            self._call = _Call(found["name"], in_object=False)
            self._tell()
            self._begin_value(arguments=True)
        else:
            self._begin_object()
        return True

    def _joining(self) -> bool:
        found = self._match(self._form.joining)
        if not found and self._may_begin(self._form.joins):
            return False
        self._state = self._prose
        if found:
            self._place = found.end()
            if self._text[self._place - 1] != "{":
                self._mark = self._place
            elif self._tries < _MOST:
                self._tries += 1
                self._start = found.start()
                self._begin_object()
        return True

    def _pairs(self) -> bool:
        found = self._match(self._pair)
        if not found:
            return self._enough() and self._break()
        self._place = found.end()
        self._pair = _NEXT
        call = self._call
        if found.lastgroup == "close":
            return self._close()
        if found.lastgroup == "name":
            return bool(call.name) or self._take_name(found["name"])
        arguments = found["key"] in ("arguments", "parameters") and call.arguments is None
        if arguments:
            call.arguments = []
            if call.name:
                self._tell()
        else:
            call.others |= found["key"] not in ("type", "id")
            self._tries += 1
            if self._tries > _MOST:
                return self._break()
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
        if self._scans_arguments and start < self._place:
            self._argue(self._text[start : self._place])
        if not self._scan.done:
            return (self._final or not unfinished) and self._break()
        if self._call.in_object:
            self._state = self._pairs
            return True
        return self._end()

    def _close(self) -> bool:
        if not self._told:
            if not self._call.name or self._call.others or self._form.at_start:
                return self._break()
            self._call.arguments = ["{}"]
            self._tell()
        return self._end()

    def _break(self) -> bool:
        """What has been read goes no further: as a call if it is one, else as content."""
        if self._told:
            return self._end()
        if self._held:
            self._say("".join(self._held))
            self._held = []
        self._start = -1
        self._state = self._prose
        return True

    def _end(self) -> bool:
        """The call ends here."""
        self._told = False
        self._mark = self._place
        self._state = self._joining if self._call.in_object else self._prose
        return True

    def _begin_object(self) -> None:
        self._call = _Call()
        self._pair = _FIRST
        self._state = self._pairs

    def _begin_value(self, arguments: bool) -> None:
        self._scan = Value(self._text[self._place])
        self._scans_arguments = arguments
        self._state = self._value

    def _tell(self) -> None:
        """What is being read is a call."""
        self._say(self._text[self._mark : self._start])
        self._start = -1
        self._held = []
        self._told = self._adjoins = True
        self._calls.append((self._count, self._call.name, self._call.arguments or []))
        self._count += 1

    def _argue(self, piece: str) -> None:
        if not self._told and self._call.arguments is not None:
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

    def _may_begin(self, firsts: str) -> bool:
        """With more text, a pattern that begins so may match."""
        rest = self._text[self._place : self._place + _LIMIT].lstrip(SPACE)
        return not self._enough() and (not rest or rest[0] in firsts)

    def _enough(self) -> bool:
        """More text would not make a pattern match."""
        return self._final or len(self._text) - self._place >= _LIMIT
