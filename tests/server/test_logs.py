"""Log lines, with the worst strings that a stranger could have put into them."""

from __future__ import annotations

import io
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.engine import Engine, Output
from shardwise.schedule.sequence import News
from shardwise.server.logs import FORMATS, LONGEST, escape, log_access, set_up_logs
from tests.server.conftest import client_of, deps_on, serving, wait_for

NASTY = "a\r\n2026-01-01T00:00:00.000Z INFO forged\x1b[2J\x07\u2028\u202eb\x85\ud800"
NAMES = ("", "shardwise", "shardwise.access", "uvicorn", "uvicorn.error", "uvicorn.access", "py.warnings")
FIGURES = ("prompt_tokens", "generated_tokens", "reason")
Write = Callable[..., Callable[[], list[str]]]

log = logging.getLogger("shardwise")


@pytest.fixture
def write() -> Iterator[Write]:
    """Sets up logs, and returns what gives the lines since; all loggers are as before in the end."""
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]

    def set_up(form: str, **settings: Any) -> Callable[[], list[str]]:
        stream = io.StringIO()
        set_up_logs(form, stream=stream, **settings)

        def lines() -> list[str]:
            text = stream.getvalue()
            stream.seek(0)
            stream.truncate()
            assert not text or text.endswith("\n")
            return text.split("\n")[:-1]

        return lines

    yield set_up
    logging.captureWarnings(False)
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(), value=st.text())
def test_r39_one_line_each(write: Write, text: str, value: str) -> None:
    """R39: guards against forged lines and terminal codes: whatever is logged stays in one printable line."""
    for form in FORMATS:
        lines = write(form)
        log.warning("the name is %s", text + NASTY, extra={"fields": {"field": value + NASTY}})
        (line,) = lines()
        assert line.isprintable()
        if form == "json":
            document = json.loads(line)
            assert line.isascii()
            assert document["message"] == f"the name is {text}{NASTY}"
            assert document["field"] == value + NASTY
        else:
            assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING the name is ", line)


def test_r39_tracebacks(write: Write) -> None:
    """R39: guards the lines of a traceback: none of them can pass for a line of its own."""
    for form in FORMATS:
        lines = write(form)
        try:
            raise ValueError(NASTY)
        except ValueError:
            log.exception("it failed")
        first, *rest = lines()
        if form == "json":
            assert not rest
            assert json.loads(first)["trace"].endswith(f"ValueError: {NASTY}")
        else:
            assert first.endswith("ERROR it failed")
            assert all(line.startswith("| ") and line.isprintable() for line in rest)
            assert any("ValueError: a" in line for line in rest)


@pytest.mark.parametrize("form", FORMATS)
def test_r6_keys_are_hidden(write: Write, form: str) -> None:
    """R6: guards API keys, wherever a string brings them: in messages, in fields, in tracebacks."""
    lines = write(form, keys=("sk-secret", "sk-secret-longer"))
    try:
        raise ValueError("Bearer sk-secret-longer")
    except ValueError:
        log.exception("got %s", "sk-secret", extra={"fields": {"header": "xsk-secretx"}})
    text = "\n".join(lines())
    assert "secret" not in text
    assert text.count("[key]") >= 3


def test_access_line(write: Write) -> None:
    """R39: guards the line of a request: its figures are there, nothing else is, and unknown ones are left out."""
    fields = {"request_id": "r-1", "route": "/v1/x y", "status": 200, "seconds": 0.12345678, "reason": None}
    lines = write("json")
    log_access({**fields, "first_token_s": float("nan")})
    document = json.loads(lines()[0])
    assert document.pop("time")
    assert document == {
        "level": "info",
        "logger": "shardwise.access",
        "message": "request",
        "request_id": "r-1",
        "route": "/v1/x y",
        "status": 200,
        "seconds": 0.123457,
        "first_token_s": "nan",
    }
    lines = write("text")
    log_access({**fields, "key": 'a"b'})
    assert lines()[0].endswith(r'INFO request request_id=r-1 route="/v1/x y" status=200 seconds=0.123457 key="a\"b"')


def test_levels_and_others(write: Write) -> None:
    """Guards which lines are written: ours from the level on, warnings of others, none of uvicorn's access lines."""
    lines = write("text", level="info")
    log.debug("no")
    log.info("one")
    logging.getLogger("uvicorn.error").info("no")
    logging.getLogger("uvicorn.error").warning("two")
    logging.getLogger("asyncio").error("three")
    logging.getLogger("uvicorn.access").info("no")
    assert [line.split()[-1] for line in lines()] == ["one", "two", "three"]
    lines = write("text", level="warning")
    log_access({"request_id": "r"})
    assert lines() == []
    with pytest.raises(ValueError, match="log format must be one of text, json, not 'xml'"):
        set_up_logs("xml")
    with pytest.raises(ValueError, match=r"log level must be one of .*, not 'loud'"):
        set_up_logs(level="loud")


def test_long_strings_are_cut(write: Write) -> None:
    """R39: guards the log against one request that fills the disk."""
    for form in FORMATS:
        lines = write(form)
        log.info("x" * 10**6, extra={"fields": {"y": "y" * 10**6}})
        (line,) = lines()
        assert len(line) < 2 * LONGEST + 300
        assert "1000000 characters" in line


def test_escape() -> None:
    """R39: guards the escapes: plain text of any language is as it was, and nothing else can look like an escape."""
    assert escape("grüße, 世界") == "grüße, 世界"
    assert escape("a\nb\\n\x1b[0m") == r"a\nb\\n\x1b[0m"


def test_what_requests_came_to(text_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """R39: guards the figures in a request's line, also where a stream that began well ends in an error."""
    caplog.set_level(logging.INFO, "shardwise.access")
    plain: Callable[[Engine, News], Output] = Engine._text_of
    go = threading.Event()

    def poisoned(self: Engine, news: News) -> Output:
        if news.sequence.num_generated > 3 and news.sequence.request.prompt[0] == 33:
            raise RuntimeError("poison")
        if news.sequence.num_generated > 3 and news.sequence.request.prompt[0] == 34:
            assert go.wait(60)  # until it is known that the client has gone
        return plain(self, news)

    def line(number: str) -> dict[str, Any]:
        told = (getattr(record, "fields", {}) for record in list(caplog.records))
        return next((fields for fields in told if fields.get("request_id") == number), {})

    letters = list(range(40, 90))  # whole at once
    body = {"model": "tiny", "max_tokens": 200, "ignore_eos": True, "stream": True, "allowed_token_ids": letters}
    with (
        deps_on(text_model, served_model_names=("tiny",)) as deps,
        serving(deps) as url,
        client_of(url) as http,
        patch.object(Engine, "_text_of", poisoned),
    ):

        def send(number: str, **more: Any) -> AbstractContextManager[httpx.Response]:
            return http.stream("POST", "/v1/completions", json={**body, **more}, headers={"X-Request-Id": number})

        asked: list[tuple[str, dict[str, Any]]] = [
            ("whole", {"stream": False, "prompt": [[5, 6], [7]], "max_tokens": 4, "n": 2}),
            ("poison", {"prompt": [33, 34]}),
            ("refused", {"prompt": [5], "nonsense": 1}),
        ]
        for number, more in asked:
            with send(number, **more) as answer:
                answer.read()
        with send("gone", prompt=[34, 5, 6], n=8) as answer:
            next(answer.iter_lines())
        numbers = "whole", "poison", "refused", "gone"
        wait_for(lambda: all(map(line, numbers)))
        go.set()
        whole, poison, refused, gone = map(line, numbers)
    assert [whole[name] for name in FIGURES] == [3, 16, "length"]
    assert 0 < whole["first_token_s"] < whole["seconds"]
    assert (poison["status"], poison["prompt_tokens"], poison["reason"]) == (200, 2, "error")
    assert poison["generated_tokens"] >= 3
    assert refused["status"] == 400
    assert not {*FIGURES, "first_token_s"} & set(refused)
    assert (gone["prompt_tokens"], gone["reason"]) == (3, "disconnect")
    assert 0 < gone["generated_tokens"] < 8 * 200
