"""The fields of routes whose answers may call tools, and what tools make of the text: its grammar, special marks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import PrivateAttr

from shardwise.params import SamplingParams
from shardwise.parsers import make_parser
from shardwise.server.deps import Deps
from shardwise.server.errors import ApiError
from shardwise.server.fields import SamplingFields
from shardwise.server.tools import CallGrammar, Offer

Constraints = Sequence[tuple[str, str, Any]]
"""Each a field of SamplingParams, the name that it has in the route, and its value."""


class CallingFields(SamplingFields):
    """What such a route is told besides its messages and tools."""

    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, of those that the server lets requests set."""
    _calls: CallGrammar | None = PrivateAttr(None)
    """What constrains tool calls, if anything does."""

    def sampling(self, deps: Deps, offer: Offer, *, scores: bool) -> SamplingParams:
        """What is asked of each continuation, with ``scores`` its log-probabilities too.

        ApiError 400 names a field that can't be honoured.
        """
        self._calls = _call_grammar(deps, offer, self.wanted())
        return self.params(
            deps,
            max_tokens=deps.max_model_len,
            logprobs=(self.top_logprobs or 0) if scores else None,
            skip_special_tokens=_skips_special(deps, offer, self.skip_special_tokens),
        )

    @property
    def constrained(self) -> bool:
        """Does a grammar hold from the first character on? (Known once ``sampling`` has been called.)"""
        return not self._calls.free if self._calls is not None else bool(self.wanted())

    def constraints(self) -> Constraints:
        """What constrains the text."""
        return self.wanted() if self._calls is None else [("ebnf", "tools", self._calls.lark)]

    def wanted(self) -> Constraints:
        """What constrains a text that calls no tools."""
        return super().constraints()


def _call_grammar(deps: Deps, offer: Offer, constraints: Constraints) -> CallGrammar | None:
    """The grammar of an answer that may or must call tools, where one is needed.

    ApiError 400 for other ``constraints`` that leave no room for calls.
    """
    if not offer.callable:
        return None
    assert deps.config.tool_parser is not None
    content = None
    for kind, name, value in constraints:
        if offer.forced or kind not in ("json_schema", "json_object"):
            raise ApiError(400, f"{name} leaves no room for tool calls: set tool_choice to none", param=name)
        schema = {"type": "object"} if kind == "json_object" else value
        try:
            content = json.dumps(json.loads(schema) if isinstance(schema, str) else schema)
        except (ValueError, RecursionError):
            raise ApiError(400, f"{name} is not valid JSON", param=name) from None
    return offer.grammar(deps.config.tool_parser, content)


def _skips_special(deps: Deps, offer: Offer, asked: bool | None) -> bool | None:
    """What skip_special_tokens has to be: False where tool calls or reasoning are written with special tokens."""
    parser = make_parser(deps.config.reasoning_parser, deps.config.tool_parser if offer.callable else None)
    tokenizer = deps.intake.tokenizer
    if not any(tokenizer.special.intersection(tokenizer.encode(mark, False)) for mark in parser.markers):
        return asked
    if asked:
        raise ApiError(
            400,
            "skip_special_tokens: this model writes tool calls or reasoning with special tokens; leave it out",
            param="skip_special_tokens",
        )
    return False
