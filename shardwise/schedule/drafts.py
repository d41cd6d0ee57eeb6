"""Collects drafts for the sequences that decode: looked up at once, or pass by pass on the ranks.

How many pay is the speculator's to say; who runs when, the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.features import MAX_DRAFTS
from shardwise.schedule.blocks import BlockPool
from shardwise.schedule.sequence import Sequence
from shardwise.schedule.speculation import Speculator
from shardwise.schedule.step import Chunk, Step


class Drafts:
    """One engine's drafts in the making. They are kept in `Sequence`: ``drafts``, ``wanted`` and ``drafted``.

    Limits are in tokens: of a pass, of one sequence in it, and of a sequence; ``num_ids`` is how many ids the draft
    model knows.
    """

    def __init__(
        self, speculator: Speculator, pool: BlockPool, max_batch_tokens: int, max_chunk: int, max_len: int, num_ids: int
    ) -> None:
        self.speculator = speculator
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._max_chunk = max_chunk
        self._max_len = max_len
        self._num_ids = num_ids

    def collect(self, decodes: Iterable[Sequence], share: int) -> list[Chunk]:
        """Chunks of a draft pass for at most ``share`` of the sequences; none when all have the drafts they want."""
        # Of one in flight the prompt is under way. The first token of an optimal one has no drafts: whether its
        # prompt's last chunk is a single token depends on who else is there.
        able = [each for each in decodes if not each.in_flight and (each.num_generated or not each.optimal)]
        chunks: list[Chunk] = []
        budget = self._max_batch_tokens
        for sequence in able:
            if sequence.wanted is None:
                self._decide(sequence, min(len(able), share))
            if sequence.wanted is None or len(sequence.drafts) >= sequence.wanted or len(chunks) == share or not budget:
                continue
            chunk = self._chunk(sequence, budget)
            if chunk is None:
                sequence.wanted = len(sequence.drafts)
                continue
            chunks.append(chunk)
            sequence.in_flight += 1
            budget -= len(chunk.tokens)
        return chunks

    def add(self, sequence: Sequence, chunk: Chunk, tokens: list[int]) -> None:
        """The result of a draft pass: its KV exists, and a draft has come unless the chunk ended before the text."""
        sequence.in_flight -= 1
        sequence.drafted = chunk.start + len(chunk.tokens)
        if tokens:
            self._keep(sequence, [*sequence.drafts, *tokens])
        if not self.speculator.shares_kv:
            self._pool.mark(sequence)

    def settle(self, sequence: Sequence, chunk: Chunk, accepted: int) -> None:
        """The result of a verification, or of a step that sampled without drafts."""
        if len(chunk.tokens) == chunk.drafts + 1:
            assert sequence.drafting is not None
            self.speculator.record(sequence.drafting, chunk.drafts, accepted)
        sequence.drafts, sequence.wanted = [], None

    def observe(self, step: Step, seconds: float) -> None:
        """What a step took, if it is one of decodes or drafts and not of prompts."""
        short = all(len(chunk.tokens) - chunk.drafts <= 2 for chunk in step.chunks)  # 2: a draft catches up
        if short and all(chunk.sampling is not None for chunk in step.chunks):
            self.speculator.observe(step.draft, len(step.chunks), step.num_tokens, seconds)

    def _decide(self, sequence: Sequence, num_sequences: int) -> None:
        drafting, speculator = sequence.drafting, self.speculator
        assert drafting is not None
        room = min(sequence.max_len, self._max_len) - len(sequence.tokens) - 1
        sequence.wanted = speculator.length(drafting, num_sequences, min(MAX_DRAFTS, self._max_chunk - 1, room))
        if not speculator.on_ranks:
            self._keep(sequence, speculator.propose(drafting, sequence.tokens, sequence.wanted))
            sequence.wanted = 0

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk | None:
        """Its part of a draft pass; None if no block is free, or the draft model knows no token that may come."""
        if not self._pool.grow(sequence, len(sequence.drafts)):
            return None
        start = max(sequence.drafted, sequence.computed if self.speculator.shares_kv else 0)
        count = min(len(sequence.tokens) + len(sequence.drafts) - start, self._max_chunk, budget)
        chunk = sequence.chunk(start, count, draft=True)
        masks = [mask for mask in chunk.masks if mask]
        return chunk if not masks or any(masks[0][: self._num_ids // 8]) else None

    def _keep(self, sequence: Sequence, drafts: list[int]) -> None:
        """Its drafts are now ``drafts``, up to an end token.

        That is drawn all the same and need not be verified, but rejection sampling must judge it: to leave out a draft
        for what it is would bend the distribution.
        """
        end = next((at for at, token in enumerate(drafts) if token in sequence.stops), len(drafts))
        kept = drafts[: end + sequence.optimal]
        if sequence.constraint is not None and kept:
            kept = kept[: len(sequence.masks(kept)) - 1]
        if end < len(drafts) or len(kept) < len(drafts):
            sequence.wanted = len(kept)
        sequence.drafts = kept
        sequence.drafted = min(sequence.drafted, len(sequence.tokens) + len(kept))
