"""What a custom handler may build on, in the words of TorchServe's BaseHandler: copy such a handler, change one import.

    from shardwise.store.handler import Handler

    class Upper(Handler):
        def inference(self, data):
            return [text.upper() for text in data]

Runs in the handler's own process. Knows no sockets: whoever calls it gives the context.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from shardwise.store.wire import Answer

TEXT = "text/plain; charset=utf-8"
MORE = "ts_stream_next"
"""The header by which TorchServe's front knows that an answer goes on, which ours is told otherwise."""
FRAMING = ("content-length", "transfer-encoding", "connection")
"""Headers that whoever sends the answer sets."""
TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
VALUE = re.compile(r"[^\r\n\f\v\0\u0100-\U0010ffff]*")


class Handler:
    """Prepares a batch of requests, infers, and makes an answer of each. Override what differs."""

    def initialize(self, context: Context) -> None:
        """Load what is needed, once; an exception here means that the model can't be served."""
        self.context = context

    def preprocess(self, requests: Sequence[Mapping[str, Any]]) -> Any:
        """What `inference` takes, of a list of {"data" or "body": …}; here, their contents, bytes as text."""
        found = [request.get("data") or request.get("body") for request in requests]
        return [bytes(each).decode() if isinstance(each, bytes | bytearray) else each for each in found]

    def inference(self, data: Any) -> Any:
        """What `postprocess` takes."""
        return data

    def postprocess(self, data: Any) -> Any:
        """A list with one answer per request: text, bytes, or what JSON can hold."""
        return list(data)

    def handle(self, requests: Sequence[Mapping[str, Any]], context: Context) -> Any:
        """The answers to a batch; a generator yields such lists, pieces of the answers, which are sent as they come."""
        began = monotonic()
        self.context = context
        answers = self.postprocess(self.inference(self.preprocess(requests)))
        context.metrics.add_time("HandlerTime", (monotonic() - began) * 1e3)
        return answers


class Metrics:
    """Where a handler records numbers; they come out of the server's metrics."""

    def __init__(self) -> None:
        self.recorded: list[tuple[str, str, float]] = []

    def add_metric(self, name: str, value: float, unit: str = "", *_: Any, **__: Any) -> None:
        """Record a number; dimensions are not kept."""
        self.recorded.append((plain(str(name)), plain(str(unit)), float(value)))

    def add_time(self, name: str, value: float, idx: Any = None, unit: str = "ms", *_: Any, **__: Any) -> None:
        """Record a time."""
        self.add_metric(name, value, unit)

    def add_counter(self, name: str, value: float, *_: Any, **__: Any) -> None:
        """Record a count."""
        self.add_metric(name, value, "count")

    def add_size(self, name: str, value: float, idx: Any = None, unit: str = "MB", *_: Any, **__: Any) -> None:
        """Record a size."""
        self.add_metric(name, value, unit)

    def add_percent(self, name: str, value: float, *_: Any, **__: Any) -> None:
        """Record a percentage."""
        self.add_metric(name, value, "percent")

    def add_error(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        """Count an error."""
        self.add_metric(name, 1.0, "error")


@dataclass
class Context:
    """What a handler is told of its model and, while it handles a batch, of the requests."""

    model_name: str
    system_properties: dict[str, Any]
    """model_dir, gpu_id (None on the CPU) and batch_size, among others."""
    manifest: dict[str, Any]
    model_yaml_config: dict[str, Any]
    metrics: Metrics = field(default_factory=Metrics)
    request_ids: dict[int, str] = field(default_factory=dict)
    send: Callable[[list[Answer]], None] | None = None
    """Sends a piece of each answer."""
    cl_socket: Any = None
    """What TorchServe's own function for pieces writes to."""
    stopping_criteria: None = None
    _requests: list[dict[str, str]] = field(default_factory=list)
    _answers: list[Answer] = field(default_factory=list)

    def begin(self, ids: Sequence[str], headers: Sequence[dict[str, str]]) -> None:
        """A new batch."""
        self.request_ids = dict(enumerate(ids))
        self._requests = [{name.lower(): value for name, value in each.items()} for each in headers]
        self._answers = [Answer(b"", "") for _ in ids]

    def get_request_id(self, idx: int = 0) -> str | None:
        """The id of a request of the batch."""
        return self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> str | None:
        """A header of a request, whatever its case."""
        return self._requests[idx].get(key.lower())

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        """All headers of a request."""
        return dict(self._requests[idx])

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Of one answer; ValueError for what can't stand in a header."""
        self._set(idx, content_type=_value(value))

    def get_response_content_type(self, idx: int) -> str:
        """As it was set; empty if it wasn't."""
        return self._answers[idx].content_type

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Of one answer; the phrase is HTTP's own. ValueError for what isn't the status of a whole answer."""
        if not 200 <= int(code) <= 599:
            raise ValueError(f"the status of an answer must be from 200 to 599, not {code}")
        self._set(idx, status=int(code))

    def get_response_status(self, idx: int) -> tuple[int, str]:
        """As it was set."""
        return self._answers[idx].status, ""

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        """Of all answers of the batch."""
        for idx in range(len(self._answers)):
            self.set_response_status(code, phrase, idx)

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Of one answer; ValueError for what can't be a header, and for one that says how the answer is sent."""
        if not TOKEN.fullmatch(str(key)) or str(key).lower() in FRAMING:
            raise ValueError(f"{key!r} can't be a header of an answer")
        if key != MORE:
            self._set(idx, headers={**self._answers[idx].headers, str(key): _value(value)})

    def get_response_headers(self, idx: int) -> dict[str, str]:
        """As they were set."""
        return self._answers[idx].headers

    def answers(self, outputs: Any) -> list[Answer]:
        """What a handler returned, ready to be sent. Raises TypeError for what is not one answer per request."""
        if not isinstance(outputs, list | tuple) or len(outputs) != len(self._answers):
            got = f"{len(outputs)} answers" if isinstance(outputs, list | tuple) else f"a {type(outputs).__name__}"
            raise TypeError(f"for {len(self._answers)} requests the handler returned {got}: return a list of as many")
        return [self._answer(given, output) for given, output in zip(self._answers, outputs, strict=True)]

    def _answer(self, given: Answer, output: Any) -> Answer:
        if hasattr(output, "tolist"):  # tensors and arrays
            output = output.tolist()
        if isinstance(output, bytes | bytearray):
            content, kind = bytes(output), "application/octet-stream"
        elif isinstance(output, str):
            content, kind = output.encode(errors="replace"), TEXT
        else:
            content, kind = json.dumps(output).encode(), "application/json"
        return Answer(content, given.content_type or kind, given.status, given.headers)

    def _set(self, idx: int, **changes: Any) -> None:
        old = self._answers[idx]
        self._answers[idx] = Answer(
            old.content,
            changes.get("content_type", old.content_type),
            changes.get("status", old.status),
            changes.get("headers", old.headers),
        )


def plain(text: str) -> str:
    """The text without halves of surrogate pairs, which can't be sent."""
    return text.encode(errors="replace").decode()


def _value(value: Any) -> str:
    """A header's value: Latin-1, and of one line."""
    text = "" if value is None else str(value).strip(" \t")
    if not VALUE.fullmatch(text):
        raise ValueError(f"{text!r} can't be the value of a header: it must be one line of Latin-1")
    return text


def send_intermediate_predict_response(
    ret: Sequence[Any], req_id_map: Mapping[int, str], message: str, code: int, context: Context
) -> None:
    """Send a piece of each answer now, as TorchServe's function of that name; the rest is what the handler returns."""
    if context.send is not None:
        context.send(context.answers(list(ret)))
