"""What a finished request is given back as."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.schedule.speculation import Tally
from shardwise.schedule.step import Logprob


@dataclass
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """"stop" (an end token, a stop string or a complete grammar), "length" or "error"."""
    logprobs: list[Logprob] = field(default_factory=list)
    """Of each token, where asked for."""
    logits: list[bytes] = field(default_factory=list, repr=False)
    """Each token's raw logits row, where asked for."""
    error: str = ""
    """A sentence to go with "error"."""
    drafts: Tally | None = None
    """What became of its drafts, with speculation."""


@dataclass
class RequestOutput:
    """A finished request. Times are in seconds on the monotonic clock."""

    index: int
    prompt: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    """Its n continuations."""
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    """Of the prompt's tokens from the second one on, where asked for."""
    submitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def text(self) -> str:
        """Of the first continuation, as are ``token_ids`` and ``finish_reason``."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Of the first continuation, the token that stopped it included."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Of the first continuation."""
        return self.outputs[0].finish_reason
