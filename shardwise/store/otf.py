"""TorchServe's frame of a response, read: for handlers that send pieces of answers by its own function.

That one writes to ``context.cl_socket``, which is `Socket` here. Knows that format and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from shardwise.store.handler import TEXT
from shardwise.store.wire import Answer


class Socket:
    """Takes frames of TorchServe's ``create_predict_response`` and hands on the answers in them."""

    def __init__(self, send: Callable[[list[Answer]], None], num_requests: int) -> None:
        self._send = send
        self._num_requests = num_requests

    def sendall(self, message: bytes) -> None:
        """One frame, of all requests of the batch; ValueError for one of fewer or more."""
        answers = read(bytes(message))
        if len(answers) != self._num_requests:
            raise ValueError(f"for {self._num_requests} requests the handler sent {len(answers)} pieces")
        self._send(answers)


def read(message: bytes) -> list[Answer]:
    """The answers in a frame: big-endian lengths before each text, and -1 after the last answer.

    Raises ValueError for what is no such frame.
    """
    at = 0

    def number() -> int:
        nonlocal at
        (found,) = struct.unpack_from("!i", message, at)
        at += 4
        return int(found)

    def content(length: int) -> bytes:
        nonlocal at
        at += length
        if length < 0 or at > len(message):
            raise ValueError("a frame of TorchServe's is cut short")
        return message[at - length : at]

    def text() -> str:
        return content(number()).decode()

    try:
        number()
        text()
        answers = []
        while (length := number()) >= 0:
            content(length)  # the request's id; answers come in the order of the batch
            kind, status, _ = text(), number(), text()
            headers = {text(): text() for _ in range(number())}
            answers.append(Answer(content(number()), kind or TEXT, status, headers))
    except struct.error:
        raise ValueError("a frame of TorchServe's is cut short") from None
    return answers
