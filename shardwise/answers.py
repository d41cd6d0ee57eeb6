"""Where a chat's answers come from: a server that speaks OpenAI's chat completions, or a model loaded here.

Knows neither terminals nor commands.
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.parse
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.config import BLOCK
from shardwise.params import SamplingParams
from shardwise.progress import say, status

if TYPE_CHECKING:
    from shardwise.llm import LLM

Messages = Sequence[Mapping[str, str]]
CONNECT, PATIENCE = 10.0, 600.0
"""Seconds in which a server must let us in, and the most between two pieces of an answer."""
LOST = (http.client.HTTPException, OSError)
"""How a connection ends before its time."""


class NoAnswer(Exception):
    """There is none, or not all of it: a sentence for people."""


@dataclass(frozen=True)
class Piece:
    """Some text of an answer."""

    text: str = ""
    reasoning: str = ""
    """What the model thinks before it answers, where the server tells it apart."""
    finish_reason: str | None = None


class Source(Protocol):
    """Something that answers. Closing an answer stops it."""

    name: str
    """Of the model."""
    can_interrupt: bool
    """May KeyboardInterrupt be raised while it works? Else it is to be stopped between two pieces."""

    def answer(self, messages: Messages, params: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """The pieces of the next message, by the sampling fields of SamplingParams. Raises NoAnswer."""

    def close(self) -> None:
        """It is no longer needed."""


class Server:
    """The server at ``url``, such as http://127.0.0.1:8000/v1, asked for ``model``, or for the first that it has.

    Raises ValueError with the remedy if it can't be asked at all.
    """

    can_interrupt = True

    def __init__(self, url: str, api_key: str = "", model: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"url must be like http://127.0.0.1:8000/v1, not {url!r}")
        if not re.fullmatch(r"[!-~]*", api_key):
            raise ValueError("the API key must be printable ASCII characters without spaces")
        try:
            self._address = parts.hostname, parts.port
        except ValueError:
            raise ValueError(f"url {url!r}: the port must be a number up to 65535") from None
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._url, self._path = url, parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        try:
            known = [str(each["id"]) for each in self._document("GET", "/models")["data"]]
        except NoAnswer as error:
            raise ValueError(str(error)) from None
        except (LookupError, TypeError):
            raise ValueError(f"{url} is no OpenAI-compatible server: its /models makes no sense") from None
        if model is None and not known:
            raise ValueError(f"{url} names no model: give --model")
        self.name = known[0] if model is None else model

    def answer(self, messages: Messages, params: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """See `Source`."""
        body = {**params, "model": self.name, "messages": [dict(message) for message in messages], "stream": True}
        connection = self._ask("POST", "/chat/completions", body)
        finished = False
        try:
            for data in events(self._begin(connection)):
                if data == b"[DONE]":
                    return
                piece = _piece(data)
                finished = finished or piece.finish_reason is not None
                yield piece
        except LOST as error:
            raise NoAnswer(f"the connection was lost: {_text(error)}") from None
        finally:
            connection.close()
        if not finished:
            raise NoAnswer("the connection was lost before the end of the answer")

    def close(self) -> None:
        """See `Source`."""

    def _document(self, method: str, route: str) -> Any:
        connection = self._ask(method, route)
        try:
            return json.loads(self._begin(connection).read())
        except LOST as error:
            raise NoAnswer(f"the connection was lost: {_text(error)}") from None
        except ValueError:
            raise NoAnswer(f"{self._url} is no OpenAI-compatible server: {route} is not JSON") from None
        finally:
            connection.close()

    def _ask(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> http.client.HTTPConnection:
        """A connection with a request on its way."""
        connection = self._connect(*self._address, timeout=CONNECT)
        try:
            connection.connect()
            assert connection.sock is not None
            connection.sock.settimeout(PATIENCE)
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + route, data, self._headers)
        except LOST as error:
            connection.close()
            raise NoAnswer(f"can't reach {self._url}: {_text(error)}; is the server running?") from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _begin(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        """The response, its body still to be read. Raises NoAnswer for an error."""
        response = connection.getresponse()
        if response.status == 200:
            return response
        try:
            text = str(json.loads(response.read())["error"]["message"])
        except (ValueError, LookupError, TypeError):
            text = response.reason or "no reason given"
        wait = response.getheader("Retry-After")
        raise NoAnswer(f"{text} (status {response.status}{f', try again in {wait} s' if wait else ''})")


class Local:
    """A model loaded in this process. ``settings`` are the fields of EngineConfig."""

    can_interrupt = False

    def __init__(self, model: str, settings: Mapping[str, Any], generation_config: bool = True) -> None:
        from shardwise.llm import LLM

        with status("starting") as tell:
            self._llm: LLM = LLM(model, on_progress=tell, generation_config=generation_config, **settings)
        self.name = str(self._llm.source.resolved.source)
        for line in self._llm.plan.places():
            say(line)

    def answer(self, messages: Messages, params: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """See `Source`."""
        llm = self._llm
        try:
            fields = {**llm.defaults.fields, **params}
            if "max_tokens" not in fields:
                room = min(llm.plan.max_model_len, llm.plan.num_blocks * BLOCK + 1)
                fields["max_tokens"] = max(1, room - len(llm.intake.encode_chat(messages)[1]))
            number = llm.submit(None, SamplingParams(**fields), messages)
        except ValueError as error:
            raise NoAnswer(str(error)) from None
        for output in llm.pieces(number):
            yield Piece(output.text, finish_reason=output.finish_reason)
            if output.error:
                raise NoAnswer(output.error)

    def close(self) -> None:
        """See `Source`."""
        self._llm.close()


def events(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The data of each server-sent event."""
    data: list[bytes] = []
    for line in lines:
        text = line.rstrip(b"\r\n")
        if text.startswith(b"data:"):
            data.append(text[5:].removeprefix(b" "))
        elif not text and data:
            yield b"\n".join(data)
            data = []


def _piece(data: bytes) -> Piece:
    try:
        document = json.loads(data)
        if "error" in document:
            raise NoAnswer(str(document["error"]["message"]))
        if not document["choices"]:
            return Piece()  # the usage
        choice = document["choices"][0]
        delta = choice.get("delta") or {}
        return Piece(
            delta.get("content") or "",
            delta.get("reasoning_content") or delta.get("reasoning") or "",
            choice.get("finish_reason"),
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        raise NoAnswer("the server's answer makes no sense") from None


def _text(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
