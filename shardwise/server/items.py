"""The output of /v1/responses: items that grow piece by piece, and the events that tell of each step.

Knows no request; whoever reads only the items has the same answer as whoever reads the events.
"""

from __future__ import annotations

import secrets
from typing import Any

from shardwise.parsers import Delta
from shardwise.server.reading import Reading

Event = dict[str, Any]
Scores = list[dict[str, Any]]


class Items:
    """Reasoning, messages and function calls, in the order in which they came."""

    def __init__(self, reading: Reading) -> None:
        self.items: list[dict[str, Any]] = []
        self._reading = reading
        self._calls = 0
        """Of the reading's calls, so many have an item."""
        self._open: dict[str, Any] | None = None
        """The last item, while more may come to it."""
        self._text: list[str] = []
        """Of that item."""
        self._scores: Scores = []
        """Of tokens whose text is still held back."""

    def push(self, delta: Delta, scores: Scores) -> list[Event]:
        """One more piece, with the scores of its tokens."""
        events: list[Event] = []
        self._scores += scores
        if delta.reasoning:
            events += self._add("reasoning", delta.reasoning)
        if delta.content:
            events += self._add("message", delta.content)
        for piece in delta.tool_calls:
            if piece.name is not None:
                events += self.finish()
                call = self._reading.calls[piece.index]
                events += self._begin({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""})
            if piece.arguments:
                events += self._tell("response.function_call_arguments.delta", piece.arguments)
        return events

    def finish(self, status: str = "completed") -> list[Event]:
        """Nothing more comes to the last item."""
        item = self._open
        if item is None:
            return []
        text, self._text, self._open = "".join(self._text), [], None
        item["status"] = status
        place = self._place(item)
        events: list[Event] = []
        if item["type"] == "function_call":
            item["arguments"] = text
            events.append({"type": "response.function_call_arguments.done", **place, "arguments": text})
            del events[-1]["content_index"]
        else:
            (part,) = item["content"]
            part["text"] = text
            done = {"type": f"response.{part['type']}.done", **place, "text": text}
            if item["type"] == "message":
                done["logprobs"] = part["logprobs"]
            events.append(done)
            events.append({"type": "response.content_part.done", **place, "part": part})
        events.append({"type": "response.output_item.done", "output_index": place["output_index"], "item": item})
        return events

    def _add(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        part = "output_text" if kind == "message" else "reasoning_text"
        if self._open is None or self._open["type"] != kind:
            events += self.finish()
            if kind == "message":
                item: dict[str, Any] = {"type": kind, "role": "assistant", "content": []}
                events += self._begin(item, {"type": part, "text": "", "annotations": [], "logprobs": []})
            else:
                events += self._begin({"type": kind, "summary": [], "content": []}, {"type": part, "text": ""})
        return events + self._tell(f"response.{part}.delta", text)

    def _begin(self, item: dict[str, Any], part: dict[str, Any] | None = None) -> list[Event]:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[item["type"]]
        self._open = {"id": f"{prefix}_{secrets.token_hex(12)}", **item, "status": "in_progress"}
        self.items.append(self._open)
        index = len(self.items) - 1
        events: list[Event] = [
            {"type": "response.output_item.added", "output_index": index, "item": {**self._open, **_copies(item)}}
        ]
        if part is not None:
            self._open["content"] = [part]
            events.append(
                {"type": "response.content_part.added", **self._place(self._open), "part": {**part, **_copies(part)}}
            )
        return events

    def _tell(self, kind: str, text: str) -> list[Event]:
        assert self._open is not None
        self._text.append(text)
        event: Event = {"type": kind, **self._place(self._open), "delta": text}
        if self._open["type"] == "function_call":
            del event["content_index"]
        elif self._open["type"] == "message":
            event["logprobs"] = _last(self._scores, len(text.encode()))
            self._open["content"][0]["logprobs"] += event["logprobs"]
        self._scores = []
        return [event]

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}


def _last(scores: Scores, size: int) -> Scores:
    """Those of the last ``size`` bytes; before them stand marks that are no text."""
    at = len(scores)
    while at and size > 0:
        at -= 1
        size -= len(scores[at]["bytes"])
    return scores[at:]


def _copies(item: dict[str, Any]) -> dict[str, Any]:
    """Copies of its lists, as they are now: the item itself goes on growing."""
    return {name: list(value) for name, value in item.items() if isinstance(value, list)}
