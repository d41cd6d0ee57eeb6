"""From a conversation to a prompt: what the chat template is given, and how the text that it writes will be read.

Knows neither the fields nor the answers of a route.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardwise.parsers import make_parser
from shardwise.parsers.reasoning import OPEN
from shardwise.server.config import ServerConfig
from shardwise.server.deps import Deps
from shardwise.server.errors import ApiError
from shardwise.server.reading import Reading
from shardwise.server.tools import Offer, new_call_id
from shardwise.tokenizer import Tokenizer
from shardwise.tokenizer.quoting import Quoting, encode_chat


@dataclass(frozen=True)
class Conversation:
    """All that a prompt is made of. ``where`` names the field that the messages came in."""

    messages: Sequence[Mapping[str, Any]]
    offer: Offer
    where: str = "messages"
    values: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template."""
    template: str | None = None
    """Instead of the model's own."""
    begins_answer: bool = True
    """The prompt ends with the beginning of an assistant's message."""
    continues: bool = False
    """The prompt ends with the last message's text, which the model goes on with."""

    def write(self, deps: Deps) -> tuple[str, list[int]]:
        """Text and tokens of the prompt; to be called in a thread. ApiError 400 names what doesn't fit the template."""
        try:
            tools = self.offer.plain()
            for name in [*self.values, *(["tools"] if self.offer.callable else [])]:
                if self.template is None and not deps.intake.tokenizer.template_reads(name):
                    raise ApiError(400, f"{name}: the model's chat template makes nothing of it", param=name)
            given = {**self.values, "tools": tools, "template": self.template}
            if self.continues:
                return self._continue(deps.intake.tokenizer, given)
            given["add_generation_prompt"] = self.begins_answer
            return encode_chat(deps.intake.tokenizer, self.messages, **given)
        except ValueError as error:
            raise ApiError(400, str(error), param=self.where) from None

    def _continue(self, tokenizer: Tokenizer, given: Mapping[str, Any]) -> tuple[str, list[int]]:
        mark, quoting = secrets.token_hex(16), Quoting(tokenizer)
        *before, last = self.messages
        marked = quoting.quote([*before, {**last, "content": last["content"] + mark}])
        values = {name: value if name == "template" else quoting.quote(value) for name, value in given.items()}
        text, *rest = tokenizer.chat(marked, add_generation_prompt=False, **values).split(mark)
        if len(rest) != 1:
            raise ApiError(
                400,
                f"continue_final_message: the chat template writes the last message {len(rest)} times",
                param="continue_final_message",
            )
        return quoting.encode(text)


def check_values(config: ServerConfig, values: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """Variables that a request sets for the template. ApiError 400 for one that it may not set."""
    for name in values or {}:
        if name not in config.chat_template_kwargs:
            said = name if len(name) <= 100 else name[:100] + " …"
            known = ", ".join(config.chat_template_kwargs) or "none"
            raise ApiError(400, f"{where}: {said!r} may not be set; these may: {known}", param=where)
    return dict(values or {})


def reader(config: ServerConfig, offer: Offer, constrained: bool, prompt: str) -> Callable[[], Reading]:
    """Makes a reading for each continuation of ``prompt``.

    A text that a grammar constrains from its first character on holds no reasoning.
    """
    reasoning = None if constrained else config.reasoning_parser
    tools = config.tool_parser if offer.callable else None
    opened = prompt.rstrip().endswith(OPEN)
    return lambda: Reading(
        make_parser(reasoning, tools, reasoning_opened=opened), partial(new_call_id, config.tool_parser)
    )
