"""The plan of one forward pass, as plain data: what the scheduler says and what the ranks answer.

It is also the wire format (msgpack), so it knows no tensor, device or process.
"""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next token of one sequence is drawn; see SamplingParams for the fields."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logits: bool = False
    """Also return the raw logits of each sampled row."""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sequence: positions ``start`` to ``start + len(tokens)``."""

    sequence: int
    start: int
    tokens: list[int]
    blocks: list[int]
    """The sequence's KV blocks in order, at least enough for its new length."""
    sampling: Sampling | None
    """None when the chunk ends before the sequence does: nothing is sampled."""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass over chunks of distinct sequences."""

    epoch: int
    number: int
    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step yielded, chunk by chunk in the step's order."""

    epoch: int
    number: int
    tokens: list[list[int]]
    """Sampled tokens per chunk; empty for a chunk without sampling."""
    logits: list[bytes]
    """Per chunk the sampled row's logits as raw little-endian bytes; empty where not asked for."""
