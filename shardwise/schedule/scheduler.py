"""Who computes how many tokens next.

Knows neither ranks nor text: it emits Steps, takes StepResults, and owns the truth about every request in between.
"""

from __future__ import annotations

from bisect import insort

from shardwise.config import BLOCK
from shardwise.schedule.blocks import BlockPool
from shardwise.schedule.sequence import Request, Sequence
from shardwise.schedule.step import Chunk, Step, StepResult


class Scheduler:
    """``add`` requests; then ``schedule`` until None, and ``update`` with each result in the order of the steps.

    Sizes are in tokens but for ``num_blocks`` (KV blocks) and ``num_in_flight``, the steps that the ranks can work on
    at once: their pipeline stages. ``eos`` ends a sequence unless it ignores that. ``secret`` keys the prefix cache.

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
    ) -> None:
        assert min(num_blocks, max_model_len, max_batch_tokens, max_chunk, max_num_seqs, num_in_flight, vocab_size) >= 1
        self.epoch = 0
        self.pool = BlockPool(num_blocks, secret, prefix_cache)
        self._max_model_len = max_model_len
        self._max_batch_tokens = max_batch_tokens
        self._max_chunk = max_chunk
        # A step's share of the sequences then never exceeds its rows.
        self._max_num_seqs = min(max_num_seqs, max_batch_tokens * num_in_flight)
        self._num_in_flight = num_in_flight
        self._eos = eos
        self._vocab_size = vocab_size
        self._num_added = 0
        self._num_steps = 0
        self._sequences: dict[int, Sequence] = {}  # unfinished, by request id
        self._waiting: list[Sequence] = []  # both lines in the order of arrival
        self._running: list[Sequence] = []
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

    def add(self, request: Request) -> None:
        """Put a request in the line. ValueError with the remedy if it can never run."""
        self._validate(request)
        params = request.params
        self._sequences[request.id] = sequence = Sequence(
            request,
            arrival=self._num_added,
            max_len=self._max_len(request),
            stops=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos),
        )
        self._num_added += 1
        self._waiting.append(sequence)

    def schedule(self) -> Step | None:
        """The next step, or None if nothing can run before a result comes (or nothing is left to run).

        Decodes go first, then chunks of prompts, then new sequences. When several steps may be in flight, a step leaves
        to the others their share of the sequences, and takes the least recently served. A sequence whose next token is
        still to be sampled waits for that; the chunks of a long prompt follow each other through the stages.
        """
        if len(self._steps) >= self._num_in_flight:
            return None
        number = self._num_steps
        chunks: list[Chunk] = []
        taken: list[Sequence] = []
        budget = self._max_batch_tokens

        def take(sequence: Sequence) -> int:
            start = sequence.computed + sequence.in_flight
            count = min(sequence.num_left, self._max_chunk, budget)
            sampling = sequence.sampling if count == sequence.num_left else None
            tokens = sequence.tokens[start : start + count]
            sequence.in_flight += count
            sequence.served = number
            chunks.append(Chunk(sequence.request.id, start, tokens, sequence.blocks.copy(), sampling))
            taken.append(sequence)
            return len(tokens)

        ready = [sequence for sequence in self._running if sequence.num_left]
        num_flying = len(self._running) - len(ready)
        share = self._share(len(self._running), num_flying)
        if len(ready) > share:
            ready.sort(key=lambda sequence: sequence.served)
        longer: list[Sequence] = []
        for sequence in ready:
            if len(taken) + len(longer) == share:
                break
            if sequence.num_left > 1:
                longer.append(sequence)
            elif self._make_room(sequence):
                budget -= take(sequence)
        for sequence in longer:
            if budget and sequence.blocks:  # else preempted by one of the decodes
                budget -= take(sequence)

        share = self._share(min(len(self._running) + len(self._waiting), self._max_num_seqs), num_flying)
        while self._waiting and budget and len(taken) < share and len(self._running) < self._max_num_seqs:
            # A block to spare for each running sequence keeps the newcomer from being preempted at once.
            if not self.pool.admit(self._waiting[0], spare=len(self._running)):
                break
            sequence = self._waiting.pop(0)
            insort(self._running, sequence, key=_arrival)
            budget -= take(sequence)

        if not taken:
            return None
        self._num_steps += 1
        self._steps[number] = taken
        return Step(self.epoch, number, chunks)

    def update(self, step: Step, result: StepResult) -> list[tuple[Sequence, list[int]]]:
        """Apply a result: the sequences that it gave tokens to, each with its new tokens.

        A token that ends its sequence is kept. What concerns an earlier epoch or a finished sequence is ignored.
        """
        assert (step.epoch, step.number) == (result.epoch, result.number), (step.number, result)
        if step.epoch != self.epoch:
            return []
        assert next(iter(self._steps), None) == step.number, "results come in the order of the steps"
        news: list[tuple[Sequence, list[int]]] = []
        for sequence, chunk, tokens in zip(self._steps.pop(step.number), step.chunks, result.tokens, strict=True):
            if sequence.finish_reason is not None:
                continue
            assert bool(tokens) == (chunk.sampling is not None), (chunk, tokens)
            sequence.in_flight -= len(chunk.tokens)
            sequence.computed += len(chunk.tokens)
            self.pool.commit(sequence)
            if tokens:
                news.append((sequence, sequence.extend(tokens)))
            if sequence.finish_reason is not None:
                self._remove(sequence)
        return news

    def finish(self, sequence_id: int, reason: str) -> Sequence | None:
        """End a sequence and free its blocks at once; None if there is no such unfinished sequence.

        This holds in flight too: ranks run steps in order, so a later step may have the blocks. The late result of the
        earlier one is ignored, and its KV never becomes reusable.
        """
        assert reason in ("stop", "length", "abort"), reason
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            sequence.finish_reason = reason
            self._remove(sequence)
        return sequence

    def reset(self) -> None:
        """All KV is gone, and with it the steps in flight: begin a new epoch with the tokens that are known."""
        self.epoch += 1
        self._steps.clear()
        self.pool.clear()
        self._running = []
        self._waiting = sorted(self._sequences.values(), key=_arrival)
        for sequence in self._waiting:
            sequence.forget()

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
            assert 0 <= sequence.computed < len(sequence.tokens) < sequence.max_len, sequence
            assert 0 <= sequence.in_flight <= len(sequence.tokens) - sequence.computed, sequence
            assert sequence.computed + sequence.in_flight <= len(sequence.blocks) * BLOCK, sequence
        for sequence in self._waiting:
            assert not sequence.blocks
            assert sequence.computed == sequence.in_flight == sequence.committed == 0, sequence
        self.pool.check(self._running)

    def _share(self, num_sequences: int, num_flying: int) -> int:
        """The most sequences for one step: an even part of all, and of those not in flight for the steps still free."""
        num_open = self._num_in_flight - len(self._steps)
        return min(-(-num_sequences // self._num_in_flight), -(-(num_sequences - num_flying) // num_open))

    def _max_len(self, request: Request) -> int:
        return min(len(request.prompt) + request.params.max_tokens, self._max_model_len)

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt until a sequence has room for its tokens; False if it must wait for those in flight."""
        while not self.pool.grow(sequence):
            latest = next(other for other in reversed(self._running) if not other.in_flight)
            if latest is sequence:
                return False
            self._running.remove(latest)
            self.pool.release(latest)
            insort(self._waiting, latest, key=_arrival)
        return True

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.id]
        (self._running if sequence.blocks else self._waiting).remove(sequence)
        self.pool.release(sequence)

    def _validate(self, request: Request) -> None:
        prompt, params, room = request.prompt, request.params, self._max_model_len
        if request.id in self._sequences:
            raise ValueError(f"request id {request.id} is in use: choose another, or wait until that request is done")
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        if len(prompt) >= room:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of {room}: "
                f"shorten it to at most {room - 1} tokens, or raise max_model_len if the model allows it"
            )
        named = {"the prompt": prompt, "stop_token_ids": params.stop_token_ids}
        for name, tokens in named.items():
            if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocab_size):
                wrong = next(token for token in tokens if not 0 <= token < self._vocab_size)
                raise ValueError(f"{name}: token id {wrong} is outside the vocabulary: 0 to {self._vocab_size - 1}")
        needed = -(-(self._max_len(request) - 1) // BLOCK)  # the last token is never fed back
        if needed > self.pool.num_blocks:
            most = self.pool.num_blocks * BLOCK
            raise ValueError(
                f"a prompt of {len(prompt)} tokens with max_tokens {params.max_tokens} needs {needed} KV blocks of "
                f"{BLOCK} tokens, and there are {self.pool.num_blocks}: lower max_tokens or shorten the prompt to "
                f"{most + 1} tokens together, or raise kv_tokens to at least {needed * BLOCK}"
            )


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
