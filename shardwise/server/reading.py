"""What the pieces of one continuation mean: content, reasoning, tool calls with their ids, tokens with their scores.

Knows no route: each tells it in its own shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.engine import Output
from shardwise.parsers import Delta, Parser
from shardwise.schedule.step import Logprob
from shardwise.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for the logarithm of 0, which JSON has no word for."""


@dataclass
class Call:
    """A tool call as far as it is known."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class Reading:
    """One continuation, read piece by piece."""

    def __init__(self, parser: Parser, new_id: Callable[[], str]) -> None:
        self.num_tokens = 0
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[Call] = []
        self.scores: list[Logprob] = []
        self.finish_reason: str | None = None
        self._parser = parser
        self._new_id = new_id

    def push(self, output: Output) -> list[Delta]:
        """The next piece; returns what is certain now, in order. New calls are in ``calls`` then, with their ids."""
        self.num_tokens += len(output.token_ids)
        self.scores += output.logprobs
        deltas = [self._parser.push(output.text)] if output.text else []
        if output.finish_reason is not None:
            deltas.append(self._parser.finish())
            self.finish_reason = output.finish_reason
        for delta in deltas:
            self.content.append(delta.content)
            self.reasoning.append(delta.reasoning)
            for call in delta.tool_calls:
                if call.name is not None:
                    self.calls.append(Call(self._new_id(), call.name))
                self.calls[call.index].arguments.append(call.arguments)
        if self.finish_reason == "stop" and self.calls:
            self.finish_reason = "tool_calls"
        return deltas


def scored(tokenizer: Tokenizer, scores: Sequence[Logprob], num_top: int) -> list[dict[str, Any]]:
    """Tokens and their log-probabilities as OpenAI's chat tells them."""
    return [
        {
            **_score(tokenizer, score.token, score.logprob),
            "top_logprobs": [_score(tokenizer, token, value) for token, value in score.top[:num_top]],
        }
        for score in scores
    ]


def prompt_scored(tokenizer: Tokenizer, scores: Sequence[Logprob], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs: for each token of the prompt, id → log-probability and rank (null below those asked for).

    The first token has none.
    """
    found: list[dict[str, Any] | None] = [None]
    for score in scores:
        ranks = {token: (value, at) for at, (token, value) in enumerate(score.top[:num_top], 1)}
        known: dict[int, tuple[float, int | None]] = {score.token: (score.logprob, None), **ranks}
        found.append(
            {
                str(token): {"logprob": max(value, LOWEST), "rank": rank, "decoded_token": _text(tokenizer, token)}
                for token, (value, rank) in known.items()
            }
        )
    return found


def _score(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelt = tokenizer.spell(token)
    return {"token": spelt.decode(errors="replace"), "logprob": max(logprob, LOWEST), "bytes": list(spelt)}


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.spell(token).decode(errors="replace")
