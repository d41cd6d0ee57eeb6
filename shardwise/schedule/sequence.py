"""What was asked and how far it has come, in plain numbers.

Knows no policy: who runs when is the scheduler's business, and which block is whose the pool's.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from shardwise.params import SamplingParams
from shardwise.schedule.step import Sampling


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it."""

    id: int
    """Chosen by the caller; no two unfinished requests share one."""
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    """The seed in force: the user's, or a fresh one. ``params.seed`` is not read here."""
    salt: bytes = b""
    """Cached KV is shared only between requests of equal salt."""
    want_logits: bool = False
    """Return the raw logits of each sampled row."""


@dataclass(eq=False)
class Sequence:
    """A request on its way. Its state is ``computed``, ``in_flight`` and ``blocks``; there are no phases."""

    request: Request
    arrival: int
    """Place in the order of arrival; it is kept through preemption and reset."""
    max_len: int
    """The number of tokens, prompt included, at which it ends with "length"."""
    stops: frozenset[int]
    """Tokens that end it with "stop"."""
    tokens: list[int] = field(init=False)
    """Prompt and generated tokens."""
    sampling: Sampling = field(init=False)
    computed: int = 0
    """Tokens whose KV exists."""
    in_flight: int = 0
    """Tokens handed to a step whose result is due."""
    blocks: list[int] = field(default_factory=list)
    """KV blocks in order: held while running, empty while waiting."""
    committed: int = 0
    """Leading blocks that other sequences may reuse."""
    digests: list[bytes] = field(default_factory=list)
    """The pool's memory of the digest chain of ``tokens``, from its root, as far as it was needed."""
    served: int = -1
    """Number of the last step that it had a part in."""
    finish_reason: str | None = None
    """None while unfinished, then "stop", "length" or "abort"."""

    def __post_init__(self) -> None:
        params = self.request.params
        self.tokens = list(self.request.prompt)
        self.sampling = Sampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self.request.seed,
            logits=self.request.want_logits,
        )

    @property
    def num_left(self) -> int:
        """Tokens not yet computed nor handed to a step: 1 for one that only decodes."""
        return len(self.tokens) - self.computed - self.in_flight

    @property
    def num_generated(self) -> int:
        """Generated tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def generated(self) -> list[int]:
        """The generated tokens, including the one that stopped it."""
        return self.tokens[len(self.request.prompt) :]

    def extend(self, tokens: Items[int]) -> list[int]:
        """Append sampled tokens up to the one that ends the sequence; returns those appended."""
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            if token in self.stops:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.max_len:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return list(tokens[:count])
        return list(tokens)

    def forget(self) -> None:
        """Its KV is gone: everything is to be computed again, from the tokens it has."""
        self.computed = self.in_flight = self.committed = 0
        self.blocks = []
