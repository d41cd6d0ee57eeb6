"""The loop that every peer runs: a line of JSON in, a line of JSON out. Needs nothing but the standard library.

Request: ``{"prompts": [[ids], ...], "new": N}``, all prompts of one length, greedy, end tokens ignored. Answer:
``{"ttft_s", "decode_s", "tokens", "ids"}``: seconds until every sequence has its first token, seconds from there to the
last token, tokens made in ``decode_s``, and the generated ids.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Answer = Callable[..., dict[str, Any]]


def serve(answer: Answer, version: str) -> None:
    """Say that we are ready, then answer until stdin ends; between requests the process sleeps in a read."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not end up among the answers
    print(json.dumps({"version": version}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=out, flush=True)


class Clock:
    """Times the steps of one request: call it once after each."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.moments: list[float] = []

    def __call__(self) -> None:
        self.moments.append(time.perf_counter())

    def answer(self, ids: list[list[int]]) -> dict[str, Any]:
        """The answer to a request whose sequences all went in step."""
        first, last = self.moments[0], self.moments[-1]
        tokens = sum(len(row) for row in ids) - len(ids)
        return {"ttft_s": first - self.began, "decode_s": last - first, "tokens": tokens, "ids": ids}
