"""The plan of one forward pass, as plain data: what the scheduler says and what the ranks answer.

It is also the wire format (msgpack), so it knows no tensor, device or process.
"""

from __future__ import annotations

import msgspec

GRAIN = 2**40
"""Hidden states are summed in units of 1 / GRAIN."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the tokens of one sequence are drawn, and what is told of them; see SamplingParams for the fields."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logits: bool = False
    """Also return the raw logits of each drawn token's row."""
    logprobs: int = -1
    """So many likeliest tokens are reported with each drawn one; -1: nothing is."""
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    num_prompt: int = 0
    """The first tokens of the sequence, which only ``repetition`` counts."""
    biased: list[int] = []
    """Tokens with a bias, ascending."""
    biases: list[float] = []
    """What is added to their logits."""
    optimal: bool = False
    """Accept drafts by rejection sampling, not by equality with what the model draws."""

    @property
    def penalises(self) -> bool:
        """Does it look at the tokens before?"""
        return bool(self.presence or self.frequency) or self.repetition != 1.0


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sequence: positions ``start`` to ``start + len(tokens)``.

    The last ``drafts`` of them are guesses. The last ``drafts + 1`` rows are sampled, unless ``sampling`` is None.
    """

    sequence: int
    start: int
    tokens: list[int]
    blocks: list[int]
    """The sequence's KV blocks in order, at least enough for its new length."""
    sampling: Sampling | None
    """None when the chunk ends before the sequence does: nothing is sampled."""
    drafts: int = 0
    past: bytes = b""
    """The tokens before ``start``, as little-endian int32; given only where ``sampling`` penalises."""
    masks: list[bytes] = []
    """Of each sampled row: bit t % 8 of byte t // 8 tells whether token t may be drawn; those beyond its end may not.

    No masks: all may. An empty one: all may in that row."""
    scored: list[int] = []
    """The tokens known to follow the first rows, whose log-probabilities are wanted: one a row."""
    num_top: int = 0
    """So many likeliest tokens are reported with each scored one."""
    pooled: int = 0
    """The sum of the model's last hidden states, of this chunk's last so many tokens, is wanted; 0: none is."""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass over chunks of distinct sequences."""

    epoch: int
    number: int
    chunks: list[Chunk]
    draft: bool = False
    """The draft model's pass and not the model's own."""

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """A token's log-probability by the raw model, and the likeliest tokens in its place with theirs, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step yielded, chunk by chunk in the step's order."""

    epoch: int
    number: int
    tokens: list[list[int]]
    """The accepted drafts of each chunk and the token after them; empty for a chunk without sampling."""
    logits: list[list[bytes]]
    """Of each of these tokens the row it was drawn from, as raw little-endian bytes; empty where not asked for."""
    logprobs: list[list[Logprob]]
    """Of the scored tokens, then of the drawn ones if their Sampling asks for that."""
    sums: list[bytes] = []
    """Of each chunk, the sum of the pooled hidden states: little-endian int64, one a dimension, in units of 1 / GRAIN.

    Nothing where none was asked for or they are no finite numbers. An empty list stands for nothing everywhere."""
    said: str = ""
    """What people must be told, once."""

    @property
    def pooled(self) -> list[bytes]:
        """``sums``, one for each chunk in any case."""
        return self.sums or [b""] * len(self.tokens)
