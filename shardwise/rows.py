"""Rows of a batch job: JSON lines in, documents out. A bad row is an error of its own and never of its neighbours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.intake import Messages, Prompt
from shardwise.llm import LLM
from shardwise.outputs import CompletionOutput, RequestOutput
from shardwise.params import SamplingParams
from shardwise.schedule.step import Logprob

Row = dict[str, Any] | str
"""A line's object, or what is wrong with the line."""
LEAST = -9999.0
"""Stands for minus infinity, which JSON has not, as in OpenAI's answers."""


def read_rows(path: Path) -> Iterator[Row]:
    """Each line of a JSON lines file; ValueError if the file can't be read."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"--input {path}: {error.strerror}") from None
    return map(_read_line, lines)


def _read_line(line: bytes) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not valid JSON: {error}"
    return row if isinstance(row, dict) else "a row must be a JSON object"


def as_message(row: Row, opening: Messages | None) -> Row:
    """The row with its prompt as a user's message after those of ``opening``, unless that is None.

    A row with messages of its own stays as it is, and so does one that is wrong.
    """
    if opening is None or isinstance(row, str) or row.get("prompt") is None or "messages" in row:
        return row
    if not isinstance(row["prompt"], str):
        return "prompt must be a string to be put through the chat template"
    asked = {"role": "user", "content": row["prompt"]}
    return {**{name: value for name, value in row.items() if name != "prompt"}, "messages": [*opening, asked]}


def read_row(row: Row, defaults: Mapping[str, Any]) -> tuple[Prompt | None, Messages | None, SamplingParams]:
    """What one row asks for: ``prompt`` (text or token ids) or ``messages``, and sampling fields.

    Its fields win over ``defaults``. ValueError says what is wrong with the row.
    """
    if isinstance(row, str):
        raise ValueError(row)
    fields = {**defaults, **row}
    prompt, messages = fields.pop("prompt", None), fields.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise ValueError("a row needs either prompt or messages")
    if messages is None and not isinstance(prompt, str) and not _are_ids(prompt):
        raise ValueError("prompt must be a string or a list of token ids")
    if messages is not None:
        _check_messages(messages)
    return prompt, messages, SamplingParams.from_dict(fields)


def submit_row(llm: LLM, row: Row, defaults: Mapping[str, Any], index: int) -> int:
    """Hand one row to the model, with the fields of ``defaults`` before the model's own.

    Returns the request's number; ValueError says what is wrong with the row.
    """
    prompt, messages, params = read_row(row, {**llm.defaults.fields, **defaults})
    return llm.submit(prompt, params, messages, index=index)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _check_messages(messages: Any) -> None:
    """Raises ValueError for what no chat is made of; other keys are the template's business."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one object with role and content")
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{at}] must be an object with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ValueError(f"messages[{at}].role must be a string such as user, not {role!r}")
        parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
        if not (isinstance(content, str) or parts or (content is None and message.get("tool_calls"))):
            raise ValueError(f"messages[{at}].content must be a string or a list of parts, or null beside tool_calls")


def document(result: RequestOutput) -> dict[str, Any]:
    """A finished request as JSON-ready data; ``outputs`` lists the n continuations where there are several."""
    whole = {"index": result.index, "prompt": result.prompt, **_part(result.outputs[0])}
    whole["prompt_token_ids"] = result.prompt_token_ids
    if result.prompt_logprobs:
        whole["prompt_logprobs"] = [None, *map(_logprob, result.prompt_logprobs)]  # the first token has none
    if len(result.outputs) > 1:
        whole["outputs"] = [{"index": part.index, **_part(part)} for part in result.outputs]
    return whole


def _part(part: CompletionOutput) -> dict[str, Any]:
    found: dict[str, Any] = {"text": part.text, "token_ids": part.token_ids, "finish_reason": part.finish_reason}
    if part.error:
        found["error"] = part.error
    if part.logprobs:
        found["logprobs"] = [_logprob(item) for item in part.logprobs]
    if part.drafts is not None:
        found["drafts"] = part.drafts.document()
    return found


def _logprob(item: Logprob) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": max(logprob, LEAST)} for token, logprob in item.top]
    return {"token_id": item.token, "logprob": max(item.logprob, LEAST), "top": top}


def timings_of(load_s: float, results: Sequence[RequestOutput]) -> dict[str, float | int]:
    """Seconds to load, to the first token of all and over all; decoding counts every token after a prompt's first."""
    generated = sum(len(part.token_ids) for result in results for part in result.outputs)
    last = max((result.finished for result in results), default=0.0)
    began = min((result.submitted for result in results), default=0.0)
    first = min((result.first_token for result in results if result.first_token), default=began)
    decoded = sum(max(len(part.token_ids) - 1, 0) for result in results for part in result.outputs)
    return {
        "load_s": round(load_s, 4),
        "ttft_s": round(first - began, 4),
        "total_s": round(last - began, 4),
        "prompt_tokens": sum(len(result.prompt_token_ids) for result in results),
        "generated_tokens": generated,
        "decode_tokens_per_s": round(decoded / (last - first), 3) if last > first else 0.0,
    }
