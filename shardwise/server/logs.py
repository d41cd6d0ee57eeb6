"""How log lines look: one line each, for people or as JSON, whatever strings of strangers are in them.

Knows nothing of what is logged. Prompts and answers are nobody's to log, unless the operator asks for it.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
HIDDEN = "[key]"
PLAIN = re.compile(r"[^\s\"'=]+")
"""A value that needs no quotes."""
LONGEST = 8192
"""Characters of one string."""

_access = logging.getLogger("shardwise.access")


def log_access(fields: Mapping[str, Any]) -> None:
    """One line for an answered request: ``request_id``, ``method``, ``route``, ``status``, ``seconds`` and, where they
    are known, ``prompt_tokens``, ``generated_tokens``, ``first_token_s``, ``reason`` and ``key``, the key's number.

    None stands for unknown, and isn't written. The text of a prompt may only be among them where the operator has
    turned that on.
    """
    _access.info("request", extra={"fields": fields})


def set_up_logs(
    form: str = "text", level: str = "info", keys: Iterable[str] = (), stream: TextIO | None = None
) -> None:
    """Write shardwise's logs from ``level`` on, and warnings of all others, to ``stream`` (stderr) in one of FORMATS.

    ``keys`` are hidden wherever they turn up. uvicorn's own access lines are off: a request has one line, and it is
    ours (let uvicorn not set up logs itself: log_config=None). Raises ValueError for unknown formats and levels.
    """
    if form not in FORMATS:
        raise ValueError(f"log format must be one of {', '.join(FORMATS)}, not {form!r}")
    if level not in LEVELS:
        raise ValueError(f"log level must be one of {', '.join(LEVELS)}, not {level!r}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter((JsonLines if form == "json" else TextLines)(keys))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("shardwise").setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = name != "uvicorn.access"
        logger.setLevel(logging.NOTSET)
    logging.captureWarnings(True)


def escape(text: str) -> str:
    """The text in printable characters of one line: all others (line ends, terminal codes, marks that turn the reading
    direction) are written as Python writes them. So no string can look like a line of its own.
    """
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}… ({len(text)} characters)"
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(
        "\\\\" if letter == "\\" else letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


class _Lines(logging.Formatter):
    """What both formats share: the keys that must not be told, and the time."""

    def __init__(self, keys: Iterable[str]) -> None:
        super().__init__()
        longest_first = sorted(filter(None, keys), key=len, reverse=True)
        self._keys = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def hide(self, value: Any) -> Any:
        """A field's value, as it may be told."""
        if isinstance(value, float):
            return round(value, 6) if math.isfinite(value) else str(value)
        if value is None or isinstance(value, bool | int):
            return value
        text = value if isinstance(value, str) else str(value)
        return self._keys.sub(HIDDEN, text) if self._keys is not None else text

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """The fields that came with a line."""
        found: Mapping[str, Any] = getattr(record, "fields", {})
        return {name: self.hide(value) for name, value in found.items() if value is not None}

    def trace(self, record: logging.LogRecord) -> str:
        """The traceback that came with it, in lines; of a long one its end."""
        return str(self.hide(self.formatException(record.exc_info)))[-LONGEST:] if record.exc_info else ""

    def moment(self, record: logging.LogRecord) -> str:
        """When it was said, in UTC."""
        return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"


class TextLines(_Lines):
    """``2026-01-31T12:00:00.000Z INFO message name=value``; a traceback follows in lines that begin with ``|``."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging."""
        parts = [self.moment(record), record.levelname, escape(self.hide(record.getMessage()))]
        for name, value in self.fields(record).items():
            text = escape(str(value))
            parts.append(
                f"{name}={text}" if PLAIN.fullmatch(text) else f'{name}="{text.replace(chr(34), chr(92) + chr(34))}"'
            )
        trace = [f"| {escape(line)}" for line in self.trace(record).split("\n") if line]
        return "\n".join([" ".join(parts), *trace])


class JsonLines(_Lines):
    """One JSON object a line, all ASCII: time, level, logger, message, the fields, and ``trace`` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging."""
        document = {"time": self.moment(record), "level": record.levelname.lower(), "logger": record.name}
        document["message"] = self.hide(record.getMessage())
        document |= {name: value for name, value in self.fields(record).items() if name not in document}
        if record.exc_info:
            document["trace"] = self.trace(record)
        return json.dumps({name: _cut(value) for name, value in document.items()})


def _cut(value: Any) -> Any:
    return f"{value[:LONGEST]}… ({len(value)} characters)" if isinstance(value, str) and len(value) > LONGEST else value
