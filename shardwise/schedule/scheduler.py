"""Who computes how many tokens next.

Knows neither ranks nor text: it emits Steps, takes StepResults, and owns the truth about every request in between.
"""

from __future__ import annotations

from bisect import insort

from shardwise.config import BLOCK
from shardwise.features import Speculation
from shardwise.schedule.blocks import BlockPool
from shardwise.schedule.drafts import Drafts
from shardwise.schedule.gate import Gate
from shardwise.schedule.sequence import News, Request, Sequence
from shardwise.schedule.speculation import Speculator
from shardwise.schedule.step import Chunk, Step, StepResult

SUSPECT, GUILTY = 2, 4
"""Strikes with which a sequence runs alone, and with which it has failed."""


class Scheduler:
    """``add`` requests; then ``schedule`` until None, and ``update`` with each result in the order of the steps.

    Sizes are in tokens but for ``num_blocks`` (KV blocks) and ``num_in_flight``, the steps that the ranks can work on
    at once: their pipeline stages. ``eos`` ends a sequence unless it ignores that. ``secret`` keys the prefix cache.
    ``speculation`` says where drafts come from; no draft is made beyond ``max_draft_len`` tokens of a sequence,
    nor of a token from ``num_draft_ids`` on.

    Why there is no deadlock: a sequence is admitted with blocks for all its tokens and later needs one at a time. A
    sequence short of a block takes those of the latest arrived that is not in flight, never of an earlier one; and no
    request is accepted that doesn't fit alone. So when nothing is in flight the earliest sequence can always go on, and
    when something is, its result comes.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        max_model_len: int,
        max_batch_tokens: int,
        max_chunk: int,
        max_num_seqs: int,
        num_in_flight: int,
        prefix_cache: bool,
        eos: frozenset[int],
        vocab_size: int,
        secret: bytes,
        speculation: Speculation | None = None,
        max_draft_len: int | None = None,
        num_draft_ids: int | None = None,
    ) -> None:
        assert min(num_blocks, max_model_len, max_batch_tokens, max_chunk, max_num_seqs, num_in_flight, vocab_size) >= 1
        self.epoch = 0
        self.pool = BlockPool(num_blocks, secret, prefix_cache)
        self._max_batch_tokens = max_batch_tokens
        self._max_chunk = max_chunk
        # A step's share of the sequences then never exceeds its rows.
        self._max_num_seqs = min(max_num_seqs, max_batch_tokens * num_in_flight)
        self._num_in_flight = num_in_flight
        optimal = speculation is not None and speculation.accept == "optimal"
        self._gate = Gate(max_model_len, num_blocks, vocab_size, eos, optimal)
        self.drafts: Drafts | None = None
        if speculation is not None:
            limits = max_batch_tokens, max_chunk, max_draft_len or max_model_len, num_draft_ids or vocab_size
            self.drafts = Drafts(Speculator(speculation), self.pool, *limits)
        self.num_preempted = 0
        """Times that a sequence lost its blocks to another."""
        self._num_added = 0
        self._num_steps = 0
        self._sequences: dict[int, Sequence] = {}  # unfinished, by request id
        self._waiting: list[Sequence] = []  # both lines in the order of arrival
        self._running: list[Sequence] = []
        self._suspects: list[Sequence] = []  # those that must run alone; some may have been cleared
        self._steps: dict[int, list[Sequence]] = {}  # in flight, by number

    @property
    def has_work(self) -> bool:
        """Is any request unfinished or any step in flight?"""
        return bool(self._sequences or self._steps)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold none."""
        return len(self._waiting)

    def cached_tokens(self, prompt: tuple[int, ...], salt: bytes = b"") -> int:
        """Tokens of a prompt that need not be computed if it is admitted now."""
        return len(self.pool.find(list(prompt), salt, [])) * BLOCK

    def vet(self, request: Request) -> None:
        """ValueError with the remedy if a request can never run. May be called in any thread."""
        self._gate.admit(request)

    def add(self, request: Request) -> None:
        """Put a request in the line. ValueError with the remedy if it can never run."""
        if request.id in self._sequences:
            raise ValueError(f"request id {request.id} is in use: choose another, or wait until that request is done")
        self.adopt(self._gate.admit(request))

    def schedule(self) -> Step | None:
        """The next step, or None if nothing can run before a result comes (or nothing is left to run).

        Drafts go first, until all sequences that decode have theirs; then decodes, which verify them, then chunks of
        prompts, then new sequences. When several steps may be in flight, a step leaves to the others their share of the
        sequences, and takes the least recently served. A sequence whose next token is still to be sampled waits for
        that; the chunks of a long prompt follow each other through the stages.
        """
        if len(self._steps) >= self._num_in_flight:
            return None
        self._suspects = [each for each in self._suspects if each.strikes >= SUSPECT and each.finish_reason is None]
        if self._suspects:
            return self._alone(self._suspects[0]) if not self._steps else None
        ready = [sequence for sequence in self._running if sequence.num_left]
        num_flying = len(self._running) - len(ready)
        share = self._share(len(self._running), num_flying)
        if len(ready) > share:
            ready.sort(key=lambda sequence: sequence.served)
        elif self._gate.optimal:  # those that waited come first
            ready.sort(key=lambda sequence: sequence.served if sequence.num_left == 1 else self._num_steps)
        decodes = [sequence for sequence in ready if sequence.num_left == 1]
        if self.drafts is not None:
            chunks = self.drafts.collect(decodes, share)
            if chunks:
                return self._emit(chunks, draft=True)

        chunks = []
        budget = self._max_batch_tokens
        longer: list[Sequence] = []
        for sequence in ready:
            if len(chunks) + len(longer) == share:
                break
            if sequence.num_left > 1:
                longer.append(sequence)
                continue
            others = 0 if sequence.optimal else max(0, min(share, len(decodes)) - len(chunks) - 1)
            least = 1 + len(sequence.drafts) if sequence.optimal and chunks else 1  # its tokens depend on its drafts
            if budget - others >= least and self._make_room(sequence):
                budget -= self._take(chunks, sequence, budget - others)
        for sequence in longer:
            if budget and sequence.blocks:  # else preempted by one of the decodes
                budget -= self._take(chunks, sequence, budget)

        share = self._share(min(len(self._running) + len(self._waiting), self._max_num_seqs), num_flying)
        while self._waiting and budget and len(chunks) < share and len(self._running) < self._max_num_seqs:
            # A block to spare for each running sequence keeps the newcomer from being preempted at once.
            if not self.pool.admit(self._waiting[0], spare=len(self._running)):
                break
            sequence = self._waiting.pop(0)
            insort(self._running, sequence, key=_arrival)
            budget -= self._take(chunks, sequence, budget)
        return self._emit(chunks) if chunks else None

    def _take(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        """Add what a sequence can compute within ``budget`` rows; returns the rows."""
        start = sequence.computed + sequence.in_flight
        count = min(sequence.num_left, self._max_chunk, budget)
        most = min(self._max_chunk, budget) - count
        drafts = sequence.drafts[:most]
        while drafts and not self.pool.grow(sequence, len(drafts)):
            drafts.pop()  # nobody is preempted for a guess
        chunk = sequence.chunk(start, count, drafts)
        sequence.in_flight += count
        chunks.append(chunk)
        return len(chunk.tokens)

    def _alone(self, sequence: Sequence) -> Step:
        """A step of one sequence: a fault in it can only be its own. Whoever is in the way is preempted."""
        if not sequence.blocks:
            while len(self._running) == self._max_num_seqs or not self.pool.admit(sequence, spare=0):
                self._preempt(self._running[-1])
            self._waiting.remove(sequence)
            insort(self._running, sequence, key=_arrival)
        chunks: list[Chunk] = []
        self._take(chunks, sequence, self._max_batch_tokens)
        return self._emit(chunks)

    def _emit(self, chunks: list[Chunk], draft: bool = False) -> Step:
        number = self._num_steps
        self._num_steps += 1
        self._steps[number] = taken = [self._sequences[chunk.sequence] for chunk in chunks]
        for sequence in taken:
            sequence.served = number
        return Step(self.epoch, number, chunks, draft)

    def update(self, step: Step, result: StepResult) -> list[News]:
        """Apply a result: the sequences that it gave tokens or scores to, or ended.

        A token that ends its sequence is kept. What concerns an earlier epoch or a finished sequence is ignored.
        """
        assert (step.epoch, step.number) == (result.epoch, result.number), (step.number, result)
        if step.epoch != self.epoch:
            return []
        assert next(iter(self._steps), None) == step.number, "results come in the order of the steps"
        news: list[News] = []
        rows = zip(step.chunks, result.tokens, result.logits, result.logprobs, result.pooled, strict=True)
        for sequence, (chunk, tokens, logits, logprobs, sums) in zip(self._steps.pop(step.number), rows, strict=True):
            assert bool(tokens) == (chunk.sampling is not None), (chunk, tokens)
            if sequence.finish_reason is not None:
                continue
            if step.draft:
                assert self.drafts is not None
                self.drafts.add(sequence, chunk, tokens)
                continue
            scores = logprobs[: len(chunk.scored)][max(0, sequence.scored - chunk.start) :]
            sequence.scored += len(scores)
            sequence.pool(chunk, sums)
            known = len(chunk.tokens) - chunk.drafts
            sequence.in_flight -= known
            sequence.computed += known + max(0, len(tokens) - 1)
            taken = sequence.extend(tokens)
            sequence.computed = min(sequence.computed, len(sequence.tokens))
            sequence.drafted = min(sequence.drafted, sequence.computed)
            if sequence.computed >= sequence.struck:
                sequence.strikes = 0
            if sequence.finish_reason is None and sequence.computed == sequence.max_len:
                sequence.finish_reason = "length"
            self.pool.commit(sequence)
            if tokens and self.drafts is not None:
                self.drafts.settle(sequence, chunk, len(tokens) - 1)
            if taken or scores or sequence.finish_reason is not None:
                drawn = logprobs[len(chunk.scored) :][: len(taken)]
                news.append(News(sequence, taken, logits[: len(taken)], drawn, scores))
            if sequence.finish_reason is not None:
                self._remove(sequence)
        return news

    def observe(self, step: Step, seconds: float) -> None:
        """Learn what a step cost, for the number of drafts that pays."""
        if self.drafts is not None:
            self.drafts.observe(step, seconds)

    def finish(self, sequence_id: int, reason: str) -> Sequence | None:
        """End a sequence and free its blocks at once; None if there is no such unfinished sequence.

        This holds in flight too: ranks run steps in order, so a later step may have the blocks. The late result of the
        earlier one is ignored, and its KV never becomes reusable.
        """
        assert reason in ("stop", "length", "abort", "error"), reason
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            sequence.finish_reason = reason
            self._remove(sequence)
        return sequence

    def reset(self, strikes: int = 0) -> list[Sequence]:
        """All KV is gone, and with it the steps in flight: begin a new epoch with the tokens that are known.

        Each sequence that was in flight gets ``strikes``, which it loses when it comes past where it was. With SUSPECT
        of them it runs alone, so that one that kills ranks does not take others along; with GUILTY it ends here, with
        "error". Returns those.
        """
        self.epoch += 1
        for sequence in {sequence for taken in self._steps.values() for sequence in taken}:
            sequence.strike(strikes)
        self._steps.clear()
        self.pool.clear()
        self._running = []
        self._waiting = sorted(self._sequences.values(), key=_arrival)
        for sequence in self._waiting:
            sequence.forget()
        self._suspects = [sequence for sequence in self._waiting if sequence.strikes >= SUSPECT]
        guilty = [sequence for sequence in self._suspects if sequence.strikes >= GUILTY]
        for sequence in guilty:
            self.finish(sequence.request.id, "error")
        return guilty

    def release(self, sequence_id: int) -> Sequence:
        """Let go of an unfinished sequence that holds no blocks, for another scheduler of the same plan to adopt."""
        sequence = self._sequences[sequence_id]
        assert not sequence.blocks
        self._remove(sequence)
        self._suspects = [each for each in self._suspects if each is not sequence]
        return sequence

    def adopt(self, sequence: Sequence) -> None:
        """Put a sequence in the line, as the latest to arrive."""
        sequence.arrival = self._num_added
        sequence.digests = []  # they are of its former scheduler's secret
        if self.drafts is not None:
            sequence.drafting = self.drafts.speculator.begin()
        self._sequences[sequence.request.id] = sequence
        self._num_added += 1
        self._waiting.append(sequence)
        if sequence.strikes >= SUSPECT:
            self._suspects.append(sequence)

    def check(self) -> None:
        """Assert every invariant, those of the pool included."""
        for line in (self._running, self._waiting):
            assert line == sorted(line, key=_arrival)
        everyone = [*self._running, *self._waiting]
        assert {sequence.request.id: sequence for sequence in everyone} == self._sequences
        assert len(everyone) == len(self._sequences)
        assert len(self._running) <= self._max_num_seqs
        assert len(self._steps) <= self._num_in_flight
        flying = [sequence for taken in self._steps.values() for sequence in taken if sequence.finish_reason is None]
        assert set(flying) == {sequence for sequence in self._running if sequence.in_flight}
        for sequence in self._running:
            assert sequence.blocks
            assert 0 <= sequence.computed < len(sequence.tokens) <= sequence.max_len, sequence
            assert 0 <= sequence.in_flight <= len(sequence.tokens) - sequence.computed, sequence
            assert sequence.computed + sequence.in_flight <= len(sequence.blocks) * BLOCK, sequence
            assert sequence.drafted <= len(sequence.tokens) + len(sequence.drafts), sequence
        for sequence in self._waiting:
            assert not sequence.blocks
            assert sequence.computed == sequence.in_flight == sequence.committed == 0, sequence
        self.pool.check(self._running)

    def _share(self, num_sequences: int, num_flying: int) -> int:
        """The most sequences for one step: an even part of all, and of those not in flight for the steps still free."""
        num_open = self._num_in_flight - len(self._steps)
        return min(-(-num_sequences // self._num_in_flight), -(-(num_sequences - num_flying) // num_open))

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt until a sequence has room for its tokens; False if it must wait for those in flight."""
        while not self.pool.grow(sequence):
            latest = next(other for other in reversed(self._running) if not other.in_flight)
            if latest is sequence:
                return False
            self._preempt(latest)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preempted += 1
        self._running.remove(sequence)
        self.pool.release(sequence)
        insort(self._waiting, sequence, key=_arrival)

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.id]
        (self._running if sequence.blocks else self._waiting).remove(sequence)
        self.pool.release(sequence)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
