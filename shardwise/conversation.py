"""What was said in a chat, and by which sampling fields: questions and answers by turns, which files can hold.

Knows neither terminals nor models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.params import SamplingParams

PARAMS = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words", "skip_special_tokens"),
)
"""Sampling fields that may be set for a chat."""


class Conversation:
    """One conversation. Its methods raise ValueError with a sentence for people."""

    def __init__(self, system: str = "", params: Mapping[str, Any] | None = None) -> None:
        self.system = system
        """Who the model is told to be; empty: nobody."""
        self.params = checked(params or {})
        self.messages: list[dict[str, str]] = []
        """Questions and answers by turns."""
        self._unanswered: str | None = None
        """The last question, if it had no answer."""
        self._files: set[Path] = set()
        """Those that it was written to, or came from."""

    def ask(self, question: str) -> list[dict[str, str]]:
        """The messages that a model gets for this question, which has no answer yet."""
        self._unanswered = question
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages, {"role": "user", "content": question}]

    def keep(self, answer: str) -> None:
        """The answer to the last question; empty where none has come."""
        if answer:
            assert self._unanswered is not None, "nothing was asked"
            self.messages += [
                {"role": "user", "content": self._unanswered},
                {"role": "assistant", "content": answer},
            ]
            self._unanswered = None

    def clear(self) -> None:
        """Forget all that was said."""
        self.messages, self._unanswered = [], None

    def undo(self) -> str:
        """Forget the last question and its answer; returns the question."""
        question = self._unanswered
        if question is None:
            if not self.messages:
                raise ValueError("nothing was asked yet")
            question = self.messages[-2]["content"]
            del self.messages[-2:]
        self._unanswered = None
        return question

    def set_params(self, text: str) -> None:
        """Set sampling fields by ``name=value``, several with spaces between; ``name=`` takes one back."""
        params = dict(self.params)
        for pair in text.split():
            name, equals, value = pair.partition("=")
            if not equals:
                raise ValueError(f"/params takes name=value, such as temperature=0.7, not {pair!r}")
            params.pop(name, None)
            if value:
                params[name] = _value(value)
        self.params = checked(params)

    def save(self, path: Path) -> None:
        """Write it to a file, whole or not at all. Only files of its own are written over."""
        document = {"system": self.system, "params": self.params, "messages": self.messages}
        draft = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            if path.exists() and path not in self._files:
                raise ValueError(f"{path} exists already; choose another name")
            try:
                draft.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(f"{path}: can't be written: {error.strerror}") from None
        self._files.add(path)

    def load(self, path: Path) -> None:
        """Become what a file holds: a saved conversation, or a bare list of messages."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: can't be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not valid JSON: {error}") from None
        try:
            self.system, self.params, self.messages = _read(document)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        self._unanswered = None
        self._files.add(path)


def checked(params: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling fields that may be used together; ValueError says which may not."""
    for name in params:
        if name not in PARAMS:
            raise ValueError(f"{name!r} can't be set; these can: {', '.join(PARAMS)}")
    SamplingParams(**{"max_tokens": 2**31, **params})
    return dict(params)


def _read(document: Any) -> tuple[str, dict[str, Any], list[dict[str, str]]]:
    """System message, sampling fields and messages of a file's document."""
    if isinstance(document, list):
        document = {"messages": document}
    if not isinstance(document, dict) or not document.keys() <= {"system", "params", "messages"}:
        raise ValueError("not a conversation: it needs messages, and may have system and params")
    system, params, found = document.get("system", ""), document.get("params", {}), document.get("messages")
    if not isinstance(system, str) or not isinstance(params, dict):
        raise ValueError("system must be text, and params an object")
    if not isinstance(found, list) or not all(
        isinstance(each, dict) and each.keys() == {"role", "content"} and isinstance(each["content"], str)
        for each in found
    ):
        raise ValueError("messages must be a list of objects with role and content, both text")
    if found and found[0]["role"] == "system":
        system, found = found[0]["content"], found[1:]
    if len(found) % 2 or any(each["role"] != ("user", "assistant")[at % 2] for at, each in enumerate(found)):
        raise ValueError("the messages must be user's and assistant's by turns, after one of system at most")
    return system, checked(params), found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
