"""The scheduler against scripted ranks that keep an exact model of KV memory and of a deterministic language model."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import BLOCK
from shardwise.features import Speculation
from shardwise.params import SamplingParams
from shardwise.schedule.scheduler import Scheduler
from shardwise.schedule.sequence import Request
from shardwise.schedule.step import Chunk, Step, StepResult

SPECULATIONS = [
    Speculation.parse(text)
    for text in (
        *("ngram", "ngram,k=3", "draft=x", "draft=x,k=2", "draft=x,k=5", "self", "self,k=3"),
        *("ngram,k=3,min_match=1,accept=optimal", "draft=x,k=5,accept=optimal"),
    )
]
VOCAB = 60
EOS = frozenset({58, 59})
PRIME = 2**61 - 1


def make(**changes: Any) -> Scheduler:
    sizes: dict[str, Any] = {
        "num_blocks": 64,
        "max_model_len": 512,
        "max_batch_tokens": 64,
        "max_chunk": 64,
        "max_num_seqs": 16,
        "num_in_flight": 1,
        "prefix_cache": True,
        "eos": EOS,
        "vocab_size": VOCAB,
        "secret": b"secret",
    }
    return Scheduler(**(sizes | changes))


def ask(number: int, prompt: Iterable[int], max_tokens: int = 8, salt: bytes = b"", **params: Any) -> Request:
    return Request(number, tuple(prompt), SamplingParams(max_tokens=max_tokens, **params), seed=number, salt=salt)


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + place) % 50 for place in range(length)]


class Script:
    """What a request yields when it runs alone. ``states[p]`` stands for the KV at p: a hash of all tokens up to p."""

    def __init__(self, request: Request, max_model_len: int) -> None:
        params = request.params
        self.salt = request.salt
        self.tokens: list[int] = []
        self._state = int.from_bytes(b"root" + request.salt, "big")
        for token in request.prompt:
            self._push(token)
        self.reason = ""
        while not self.reason:
            token = (self._state * 31 + request.seed) % PRIME % VOCAB
            self._push(token)
            if token in params.stop_token_ids or (token in EOS and not params.ignore_eos):
                self.reason = "stop"
            elif len(self.tokens) in (len(request.prompt) + params.max_tokens, max_model_len):
                self.reason = "length"

    def _push(self, token: int) -> None:
        self._state = (self._state * 6364136223846793005 + token + 1) % PRIME
        self.tokens.append(token)


def states_of(salt: bytes, tokens: list[int]) -> list[int]:
    """What the KV memory of a line of tokens holds: at each place a hash of all tokens up to there."""
    state = int.from_bytes(b"root" + salt, "big")
    found = []
    for token in tokens:
        state = (state * 6364136223846793005 + token + 1) % PRIME
        found.append(state)
    return found


ROUGH = 1 << 80
"""Added to a state that a draft pass has left in the model's own memory."""


@dataclass
class Ranks:
    """Runs steps in order on a simulated KV memory, and asserts that each chunk finds exactly its own past there.

    ``guess`` says of each draft whether it is right; ``shared``: the draft writes to the model's memory.
    """

    max_model_len: int = 512
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    drafted: dict[tuple[int, int], int] = field(default_factory=dict)
    scripts: dict[int, Script] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    queue: deque[tuple[Step, StepResult]] = field(default_factory=deque)
    steps: list[Step] = field(default_factory=list)
    guess: Callable[[], bool] = lambda: True
    shared: bool = False

    def expect(self, request: Request) -> None:
        self.scripts[request.id] = Script(request, self.max_model_len)
        self.known[request.id] = len(request.prompt)
        self.drafts[request.id] = []

    def submit(self, step: Step) -> None:
        assert len({chunk.sequence for chunk in step.chunks}) == len(step.chunks) > 0
        writer: dict[tuple[int, int], int] = {}
        memory = self.drafted if step.draft and not self.shared else self.memory
        for chunk in step.chunks:
            states, slots = self._states(step, chunk), self._slots(chunk)
            assert chunk.tokens
            for position in range(chunk.start, len(slots)):
                state = states[position]
                assert writer.setdefault(slots[position], state) == state, "two write one slot"
                memory[slots[position]] = state + ROUGH * (step.draft and self.shared)
        answers: list[list[int]] = []
        for chunk in step.chunks:  # rows of a step run together: all have written before any reads
            states, slots = self._states(step, chunk), self._slots(chunk)
            found = [memory[slot] for slot in slots]
            if step.draft and self.shared:
                found = [state % ROUGH for state in found]
            assert found == states[: len(slots)], "not its own past"
            answers.append(self._draft(chunk) if step.draft else self._answer(chunk))
        self.steps.append(step)
        nothing: list[list[Any]] = [[]] * len(answers)
        self.queue.append((step, StepResult(step.epoch, step.number, answers, nothing, nothing)))

    def _states(self, step: Step, chunk: Chunk) -> list[int]:
        """The states of the chunk's whole line, and a check that its tokens are those of the line."""
        script = self.scripts[chunk.sequence]
        known, end = self.known[chunk.sequence], chunk.start + len(chunk.tokens)
        if step.draft and chunk.sampling is not None:  # after a preemption the drafts begin anew
            del self.drafts[chunk.sequence][end - known :]
        line = script.tokens[:known]
        line += self.drafts[chunk.sequence] if step.draft else chunk.tokens[len(chunk.tokens) - chunk.drafts :]
        assert chunk.tokens == line[chunk.start : end]
        assert (chunk.sampling is not None) == (end == len(line))
        return states_of(script.salt, line)

    def _draft(self, chunk: Chunk) -> list[int]:
        if chunk.sampling is None:
            return []
        script, drafts = self.scripts[chunk.sequence], self.drafts[chunk.sequence]
        place = self.known[chunk.sequence] + len(drafts)
        right = self.guess() and place < len(script.tokens)
        drafts.append(script.tokens[place] if right else 57)
        return drafts[-1:]

    def _answer(self, chunk: Chunk) -> list[int]:
        if chunk.sampling is None:
            return []
        script, known = self.scripts[chunk.sequence], self.known[chunk.sequence]
        drafts = chunk.tokens[len(chunk.tokens) - chunk.drafts :]
        true = script.tokens[known : known + len(drafts)]
        right = next((at for at, pair in enumerate(zip(drafts, true, strict=False)) if len(set(pair)) > 1), len(true))
        answer = script.tokens[known : known + right + 1]
        self.known[chunk.sequence] += len(answer)
        self.drafts[chunk.sequence] = []
        return answer

    def die(self) -> list[tuple[Step, StepResult]]:
        """Lose all memory; returns the results that were due."""
        late = list(self.queue)
        for step, result in late:
            for chunk, tokens in zip(step.chunks, result.tokens, strict=True):
                self.known[chunk.sequence] -= 0 if step.draft else len(tokens)
        self.drafts = {number: [] for number in self.drafts}
        self.memory.clear()
        self.drafted.clear()
        self.queue.clear()
        return late

    @staticmethod
    def _slots(chunk: Chunk) -> list[tuple[int, int]]:
        return [(chunk.blocks[at // BLOCK], at % BLOCK) for at in range(chunk.start + len(chunk.tokens))]


class Run:
    """A scheduler and its ranks, driven as an engine would: ``got`` holds what each request received."""

    def __init__(self, scheduler: Scheduler, max_model_len: int = 512) -> None:
        self.scheduler = scheduler
        self.ranks = Ranks(max_model_len)
        self.got: dict[int, list[int]] = {}
        self.reasons: dict[int, str | None] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.ranks.expect(request)
            self.got[request.id] = list(request.prompt)
            self.reasons[request.id] = None

    def schedule(self) -> Step | None:
        step = self.scheduler.schedule()
        if step is not None:
            self.ranks.submit(step)
        self.scheduler.check()
        return step

    def collect(self) -> None:
        step, result = self.ranks.queue.popleft()
        self.scheduler.observe(step, 1.0 + step.num_tokens * (0.1 if step.draft else 0.2))
        for sequence, tokens, *_ in self.scheduler.update(step, result):
            self.got[sequence.request.id] += tokens
            assert sequence.tokens == self.got[sequence.request.id]
            assert sequence.generated == sequence.tokens[-sequence.num_generated :]
            self.reasons[sequence.request.id] = sequence.finish_reason
        self.scheduler.check()

    def abort(self, number: int) -> None:
        if self.scheduler.finish(number, "abort") is not None:
            self.reasons[number] = "abort"
        self.scheduler.check()

    def round(self) -> list[Step]:
        """Fill the pipeline, then take one result."""
        steps: list[Step] = []
        while (step := self.schedule()) is not None:
            steps.append(step)
        self.collect()
        return steps

    def drain(self, limit: int = 5000) -> None:
        """Run until there is no work, then check that everyone got what it gets alone and nothing is held."""
        while self.scheduler.has_work:
            self.round()
            limit -= 1
            assert limit, "no end"
        for number, reason in self.reasons.items():
            script = self.ranks.scripts[number]
            if reason == "abort":
                assert self.got[number] == script.tokens[: len(self.got[number])]
            else:
                assert (self.got[number], reason) == (script.tokens, script.reason)
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)


def sizes(step: Step | None) -> dict[int, int]:
    assert step is not None
    return {chunk.sequence: len(chunk.tokens) for chunk in step.chunks}


# Budgets and chunks


def test_prompts_are_chunked_within_the_budget_behind_decodes() -> None:
    """Guards against decodes that starve behind a long prompt, and against chunks over the limits."""
    run = Run(make(max_batch_tokens=20, max_chunk=12))
    run.add(ask(0, prompt(5), ignore_eos=True))
    assert sizes(run.schedule()) == {0: 5}
    run.collect()
    run.add(ask(1, prompt(30, 10)), ask(2, prompt(30, 20)))
    seen: list[dict[int, int]] = []
    for _ in range(4):
        seen.append(sizes(run.schedule()))
        run.collect()
    assert seen == [{0: 1, 1: 12, 2: 7}, {0: 1, 1: 12, 2: 7}, {0: 1, 1: 6, 2: 12}, {0: 1, 1: 1, 2: 4}]
    run.drain()


def test_only_the_last_chunk_samples_with_the_requests_own_settings() -> None:
    """Guards against sampling in the middle of a prompt, and against a seed or setting lost on the way."""
    scheduler = make(max_chunk=8)
    params = SamplingParams(max_tokens=3, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=1)
    scheduler.add(Request(0, tuple(prompt(10)), params, seed=77, want_logits=True))
    first = scheduler.schedule()
    assert first is not None
    assert first.chunks[0].sampling is None
    assert scheduler.update(first, StepResult(0, 0, [[]], [[]], [[]])) == []
    second = scheduler.schedule()
    assert second is not None
    chunk = second.chunks[0]
    assert (chunk.start, chunk.tokens) == (8, [8, 9])
    assert chunk.sampling is not None
    fields = [getattr(chunk.sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "logits")]
    assert fields == [0.7, 5, 0.9, 0.1, 77, True]


def test_max_num_seqs_and_order_of_arrival() -> None:
    """Guards the limit, and that nobody overtakes in the waiting line."""
    run = Run(make(max_num_seqs=2))
    run.add(*(ask(number, prompt(5, number), max_tokens=3, ignore_eos=True) for number in range(5)))
    assert sizes(run.schedule()) == {0: 5, 1: 5}
    assert (run.scheduler.num_running, run.scheduler.num_waiting) == (2, 3)
    run.collect()
    run.drain()
    first_seen = list(dict.fromkeys(chunk.sequence for step in run.ranks.steps for chunk in step.chunks))
    assert first_seen == [0, 1, 2, 3, 4]


def test_more_sequences_than_rows_do_not_starve_the_late() -> None:
    """Guards against running sequences that get no row because earlier ones take the whole budget."""
    run = Run(make(max_batch_tokens=3, max_num_seqs=8))
    run.add(*(ask(number, prompt(2, number), max_tokens=20, ignore_eos=True) for number in range(8)))
    run.round()
    while run.scheduler.has_work:
        running = run.scheduler.num_running
        (step,) = run.round()
        assert running <= len(step.chunks) <= 3
    run.drain()


@pytest.mark.parametrize("text", ["ngram,k=3,min_match=1", "draft=x,k=3", "self,k=2"])
@pytest.mark.parametrize("depth", [1, 2])
def test_by_rejection_all_drafts_are_verified_however_many_run(text: str, depth: int) -> None:
    """Guards accept=optimal, whose tokens depend on drafts: none may be left out because a step is full.

    A first token has no drafts: whether there is one token left of a prompt at some step depends on the others.
    """
    speculation = Speculation.parse(f"{text},accept=optimal")
    asked = [
        ask(number, prompt(9 + number, number) * 2, 30, ignore_eos=True, temperature=float(number != 4))
        for number in range(12)
    ]

    def verified(requests: list[Request], **sizes: Any) -> dict[int, list[tuple[int, list[int]]]]:
        run = Run(make(speculation=speculation, num_in_flight=depth, **sizes))
        run.ranks.shared = text.startswith("self")
        run.add(*requests)
        run.drain()
        assert all(step.num_tokens <= sizes.get("max_batch_tokens", 64) for step in run.ranks.steps)
        found: dict[int, list[tuple[int, list[int]]]] = {request.id: [] for request in requests if request.id != 4}
        for step in run.ranks.steps:
            for chunk in step.chunks if not step.draft else ():
                if chunk.sampling is not None and chunk.sequence != 4:
                    known = chunk.start + len(chunk.tokens) - chunk.drafts
                    found[chunk.sequence].append((known, chunk.tokens[len(chunk.tokens) - chunk.drafts :]))
        return found

    alone = {number: rounds for request in asked for number, rounds in verified([request]).items()}
    assert sum(len(drafts) for rounds in alone.values() for _, drafts in rounds) > 50
    assert all(not rounds[0][1] for rounds in alone.values())
    for sizes in ({"max_batch_tokens": 13}, {"max_batch_tokens": 5}, {"max_chunk": 17, "max_batch_tokens": 18}):
        assert verified(asked, **sizes) == alone


# Prefix cache


def test_a_prefix_hit_lets_computed_jump() -> None:
    """Guards the use of cached KV across requests, and that a salt keeps them apart (C66)."""
    run = Run(make())
    run.add(ask(0, prompt(40)))
    run.drain()
    assert run.scheduler.cached_tokens(tuple(prompt(40))) == 32
    assert run.scheduler.cached_tokens(tuple(prompt(40)), b"other") == 0
    run.add(ask(1, [*prompt(40), 7]), ask(2, prompt(40), salt=b"other"))
    step = run.schedule()
    assert step is not None
    assert {chunk.sequence: chunk.start for chunk in step.chunks} == {1: 32, 2: 0}
    run.collect()
    run.drain()


def test_generated_tokens_are_reused_too() -> None:
    """Guards the second turn of a conversation: the first answer's KV is part of its prompt's past."""
    run = Run(make())
    run.add(ask(0, prompt(10), max_tokens=30, ignore_eos=True))
    run.drain()
    run.add(ask(1, [*run.got[0], 3]))
    assert sizes(run.schedule()) == {1: 9}
    run.collect()
    run.drain()


def test_colliding_digests_change_no_token() -> None:
    """Guards C65 in the whole: a hash of four values, many alike prompts, and everyone still finds its own past."""
    run = Run(make(num_blocks=20))
    run.scheduler.pool._hash = lambda data: bytes([sum(data) % 4])
    for number in range(12):
        run.add(ask(number, [*prompt(16, number % 2), *prompt(20, number % 3)], max_tokens=12))
        run.round()
    run.drain()


# Several steps in flight


def test_a_sequence_in_flight_is_left_alone_and_one_alone_never_waits() -> None:
    """Guards against computing a token whose input is not known yet, and against waiting for company."""
    run = Run(make(num_in_flight=4, max_chunk=20))
    run.add(ask(0, prompt(20), ignore_eos=True))
    while run.scheduler.has_work:
        (step,) = run.round()
        assert len(step.chunks) == 1
    run.drain()


def test_the_chunks_of_a_long_prompt_fill_the_pipeline() -> None:
    """Guards the stages from idling while a single prompt is read: its chunks need no result of each other."""
    run = Run(make(num_in_flight=3, max_chunk=8, max_model_len=256))
    run.add(ask(0, prompt(60), ignore_eos=True))
    steps = [run.schedule() for _ in range(4)]
    assert [(step.chunks[0].start, len(step.chunks[0].tokens)) for step in steps if step] == [(0, 8), (8, 8), (16, 8)]
    assert all(step.chunks[0].sampling is None for step in steps if step)
    run.drain()


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("count", [2, 5, 9])
def test_work_spreads_over_the_steps_in_flight(depth: int, count: int) -> None:
    """Guards pipeline stages from idling: every step takes its even share, and as many are in flight as can be."""
    run = Run(make(num_in_flight=depth))
    run.add(*(ask(number, prompt(6, number), max_tokens=40, ignore_eos=True) for number in range(count)))
    while run.scheduler.has_work:
        while run.schedule() is not None:
            pass
        alive = run.scheduler.num_running
        if alive == count:
            assert len(run.ranks.queue) == min(depth, count)
            assert max(len(step.chunks) for step, _ in run.ranks.queue) <= -(-count // depth)
        run.collect()
    run.drain()


def test_a_lone_step_and_a_crowd_even_out() -> None:
    """Guards balance: whoever comes while one sequence is in flight does not pile up in the other step."""
    run = Run(make(num_in_flight=2))
    run.add(ask(0, prompt(6), max_tokens=40, ignore_eos=True))
    run.schedule()
    run.add(*(ask(number, prompt(6, number), max_tokens=40, ignore_eos=True) for number in range(1, 8)))
    for _ in range(6):
        run.round()
    for _ in range(6):
        (step,) = run.round()
        assert len(step.chunks) == 4
    run.drain()


def test_a_driver_that_never_fills_the_pipeline_starves_nobody() -> None:
    """Guards fairness: the share of a step goes to the least recently served, a long prompt among them."""
    run = Run(make(num_in_flight=2, max_chunk=4))
    run.add(*(ask(number, prompt(3, number), max_tokens=60, ignore_eos=True) for number in range(4)))
    run.add(ask(4, prompt(60, 30), max_tokens=4, ignore_eos=True))
    served: list[set[int]] = []
    while run.scheduler.has_work:
        step = run.schedule()
        served.append(set(sizes(step)))
        run.collect()
    joined = next(place for place, who in enumerate(served) if 4 in who)
    for place in range(joined, joined + 20):
        assert 4 in served[place] | served[place + 1]
    run.drain()


# Preemption


def test_the_latest_gives_way_and_keeps_its_tokens() -> None:
    """Guards preemption: the earliest goes on, the latest recomputes what it had and repeats no token."""
    run = Run(make(num_blocks=5, prefix_cache=False))
    run.add(ask(0, prompt(30), max_tokens=40, ignore_eos=True), ask(1, prompt(30, 9), max_tokens=40, ignore_eos=True))
    run.round()
    assert run.scheduler.num_running == 2
    while run.scheduler.num_running == 2:
        (step,) = run.round()
    assert sizes(step) == {0: 1}
    assert (run.scheduler.num_waiting, len(run.got[0])) == (1, 50)
    kept = len(run.got[1])
    assert kept == 33
    run.drain()
    restart = [chunk for step in run.ranks.steps for chunk in step.chunks if chunk.sequence == 1 and chunk.start == 0]
    assert [len(chunk.tokens) for chunk in restart] == [30, kept]


def test_a_newcomer_leaves_blocks_for_those_who_run() -> None:
    """Guards against admitting what is preempted a few tokens later, and then admitted again."""
    run = Run(make(num_blocks=3))
    run.add(ask(0, prompt(30), max_tokens=10, ignore_eos=True), ask(1, prompt(16, 9), max_tokens=10, ignore_eos=True))
    run.round()
    assert (run.scheduler.num_running, run.scheduler.num_waiting) == (1, 1)
    run.drain()
    assert sum(step.num_tokens for step in run.ranks.steps) == 30 + 9 + 16 + 9


def test_the_preempted_goes_to_the_head_of_the_line() -> None:
    """Guards the order of arrival through preemption."""
    run = Run(make(num_blocks=5, max_num_seqs=3))
    run.add(*(ask(number, prompt(20, number), max_tokens=40, ignore_eos=True) for number in range(4)))
    finished: list[int] = []
    while run.scheduler.has_work:
        run.round()
        finished += [number for number, reason in run.reasons.items() if reason and number not in finished]
    assert finished == [0, 1, 2, 3]
    run.drain()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_progress_when_many_decodes_fill_a_tiny_pool(depth: int) -> None:
    """Guards C62: a saturated pool preempts and goes on; in every round someone computes."""
    run = Run(make(num_blocks=6, num_in_flight=depth))
    run.add(*(ask(number, prompt(14, number), max_tokens=60, ignore_eos=True) for number in range(10)))
    run.drain(limit=1500)


# Refusals


def test_too_big_a_request_is_refused_at_once_and_the_next_served() -> None:
    """Guards C61: what can never fit must not wait at the head of the line for ever."""
    run = Run(make(num_blocks=4))
    with pytest.raises(ValueError, match=r"kv_tokens to at least 96"):
        run.add(ask(0, prompt(60), max_tokens=30))
    run.add(ask(1, prompt(5)))
    run.drain()
    run.add(ask(2, prompt(60), max_tokens=5, ignore_eos=True))  # the last of 65 tokens needs no KV
    run.drain()


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (ask(0, []), "empty"),
        (ask(0, prompt(100)), "at most 99 tokens"),
        (ask(0, [1, 60, 2]), "token id 60 is outside the vocabulary"),
        (ask(0, [1, -1]), "token id -1 is outside"),
        (ask(0, [1], stop_token_ids=(3, 10**6)), "stop_token_ids: token id 1000000"),
        (ask(9, [1]), "id 9 is in use"),
        (ask(0, prompt(90), max_tokens=99, min_tokens=11), "leaves room for 10 .* fewer than min_tokens 11: lower"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(request_: Request, match: str) -> None:
    """Guards C7, C34, C42, C74: a bad request is told why, and the neighbours don't feel it."""
    run = Run(make(max_model_len=100), max_model_len=100)
    run.add(ask(9, prompt(5)))
    with pytest.raises(ValueError, match=match):
        run.scheduler.add(request_)
    run.drain()


# Endings


def test_ends_by_stop_tokens_length_and_context() -> None:
    """Guards every way to end; C37: a huge max_tokens ends at the context."""
    run = Run(make(max_model_len=200), max_model_len=200)
    third = Script(ask(2, prompt(5), ignore_eos=True), 200).tokens[7]
    run.add(
        ask(0, prompt(5), max_tokens=150),
        ask(1, prompt(5), max_tokens=7, ignore_eos=True),
        ask(2, prompt(5), stop_token_ids=(third,), ignore_eos=True),
        ask(3, prompt(199), max_tokens=10**9),
        ask(4, prompt(5), max_tokens=10**9, ignore_eos=True),
    )
    run.drain()
    assert run.reasons == {0: "stop", 1: "length", 2: "stop", 3: "length", 4: "length"}
    assert run.got[0][-1] in EOS
    assert (len(run.got[1]), run.got[2][-1], len(run.got[3]), len(run.got[4])) == (12, third, 200, 200)


def test_several_tokens_per_step_end_at_the_first_that_stops() -> None:
    """Guards the list of tokens per chunk: nothing after the end is kept."""
    scheduler = make()
    scheduler.add(ask(0, [1, 2], max_tokens=9))
    step = scheduler.schedule()
    assert step is not None
    ((sequence, tokens, *_),) = scheduler.update(step, StepResult(0, 0, [[4, 5, 58, 6]], [[]], [[]]))
    assert (tokens, sequence.tokens, sequence.finish_reason) == ([4, 5, 58], [1, 2, 4, 5, 58], "stop")
    assert not scheduler.has_work


def test_finish_in_flight_frees_at_once_and_caches_nothing_late() -> None:
    """Guards against late results: reusing KV that a later step has overwritten, or reviving the aborted."""
    run = Run(make(num_blocks=2, num_in_flight=2))
    run.add(ask(0, prompt(30), max_tokens=3))
    run.schedule()
    run.abort(0)
    assert run.scheduler.pool.num_free == 2
    assert run.scheduler.has_work
    run.add(ask(1, prompt(30, 20), max_tokens=3, ignore_eos=True))
    assert sizes(run.schedule()) == {1: 30}
    run.collect()
    assert run.scheduler.cached_tokens(tuple(prompt(30))) == 0
    assert run.got[0] == prompt(30)
    run.drain()
    assert run.scheduler.cached_tokens(tuple(prompt(30, 20))) == 16


def test_a_late_result_never_reaches_a_new_request_of_the_same_id() -> None:
    """Guards the reuse of an id after an abort in flight."""
    scheduler = make(num_in_flight=2)
    scheduler.add(ask(0, prompt(5)))
    old = scheduler.schedule()
    scheduler.finish(0, "abort")
    scheduler.add(ask(0, prompt(9, 30)))
    new = scheduler.schedule()
    assert old is not None
    assert new is not None
    assert scheduler.update(old, StepResult(0, 0, [[7]], [[]], [[]])) == []
    ((sequence, tokens, *_),) = scheduler.update(new, StepResult(0, 1, [[8]], [[]], [[]]))
    assert (sequence.tokens, tokens) == ([*prompt(9, 30), 8], [8])
    scheduler.check()


def test_finish_of_the_unknown_and_the_waiting() -> None:
    """Guards C72: an abort before admission, twice, or of nobody leaves nothing behind."""
    scheduler = make(max_num_seqs=1)
    for number in range(3):
        scheduler.add(ask(number, prompt(5)))
    scheduler.schedule()
    for number in (2, 2, 7, 0, 1):
        scheduler.finish(number, "abort")
        scheduler.check()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.pool.num_free) == (0, 0, 64)


def test_reset_begins_again_with_the_tokens_that_are_known() -> None:
    """Guards recovery: order kept, late results of the dead dropped, no token lost or doubled."""
    run = Run(make(num_in_flight=2, max_num_seqs=3))
    run.add(*(ask(number, prompt(20, number), max_tokens=30, ignore_eos=True) for number in range(5)))
    for _ in range(9):
        run.round()
    while run.schedule() is not None:
        pass
    late = run.ranks.die()
    assert late
    run.scheduler.reset()
    run.scheduler.check()
    assert (run.scheduler.epoch, run.scheduler.num_running, run.scheduler.num_waiting) == (1, 0, 5)
    assert run.scheduler.pool.num_free == 64
    for step, result in late:
        assert run.scheduler.update(step, result) == []
    step = run.schedule()
    assert step is not None
    assert (step.epoch, step.chunks[0].sequence, step.chunks[0].start) == (1, 0, 0)
    run.drain()


def test_results_must_match_their_step() -> None:
    """Guards against an executor that answers out of order."""
    scheduler = make(num_in_flight=2)
    scheduler.add(ask(0, prompt(5)))
    scheduler.add(ask(1, prompt(5)))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    with pytest.raises(AssertionError):
        scheduler.update(first, StepResult(0, 1, [[1]], [[]], [[]]))
    with pytest.raises(AssertionError):
        scheduler.update(second, StepResult(0, 1, [[1]], [[]], [[]]))


# Everything at once

SIZES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(1, 12),
        "max_model_len": st.integers(2, 120),
        "max_batch_tokens": st.integers(1, 48),
        "max_chunk": st.integers(1, 48),
        "max_num_seqs": st.integers(1, 8),
        "num_in_flight": st.integers(1, 4),
        "prefix_cache": st.booleans(),
    }
)
ASKED = st.tuples(
    st.integers(0, 60),  # tokens of a common prefix
    st.lists(st.integers(0, 2), max_size=30),  # tokens of its own
    st.integers(1, 60),
    st.booleans(),
    st.sampled_from([b"", b"", b"salt"]),
    st.sampled_from([(), (3,), (5, 40)]),
)
ACTIONS = st.lists(st.sampled_from(["add"] * 4 + ["round"] * 6 + ["schedule", "collect"] * 3 + ["abort", "die"]))


@settings(max_examples=250, deadline=None)
@given(
    sizes=SIZES,
    asked=st.lists(ASKED, min_size=1, max_size=14),
    actions=ACTIONS,
    weak=st.booleans(),
    draws=st.randoms(use_true_random=False),
    speculation=st.sampled_from([None, *SPECULATIONS]),
    skill=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_everyone_gets_what_it_gets_alone(
    sizes: dict[str, Any],
    asked: list[Any],
    actions: list[str],
    weak: bool,
    draws: random.Random,
    speculation: Speculation | None,
    skill: float,
) -> None:
    """Guards the promise: no batch mate, budget, hit, preemption, draft, abort or death changes a token; all end."""
    scheduler = make(**sizes, speculation=speculation, max_draft_len=60)
    if weak:
        scheduler.pool._hash = lambda data: bytes([sum(data) % 5])
    run = Run(scheduler, sizes["max_model_len"])
    run.ranks.guess = lambda: draws.random() < skill
    run.ranks.shared = speculation is not None and speculation.kind == "self"
    late: list[tuple[Step, StepResult]] = []
    requests = deque(
        ask(
            *(number, [*prompt(common), *own], most, salt),
            ignore_eos=ignore,
            stop_token_ids=stops,
            temperature=float(number % 3 > 0),
        )
        for number, (common, own, most, ignore, salt, stops) in enumerate(asked)
    )

    def add() -> None:
        request = requests.popleft()
        length = len(request.prompt)
        last = min(length + request.params.max_tokens, sizes["max_model_len"]) - 1
        fits = 0 < length < sizes["max_model_len"] and last <= sizes["num_blocks"] * BLOCK
        if fits:
            run.add(request)
        else:
            with pytest.raises(ValueError, match="token"):
                run.add(request)

    for action in actions:
        if action == "add" and requests:
            add()
        elif action == "round":
            while run.schedule() is not None:
                pass
            if run.ranks.queue:
                run.collect()
            else:
                assert not scheduler.has_work, "stuck with nothing in flight"
        elif action == "schedule":
            run.schedule()
        elif action == "collect" and run.ranks.queue:
            run.collect()
        elif action == "abort" and run.got:
            run.abort(draws.choice(list(run.got)))
        elif action == "die":
            late += run.ranks.die()
            scheduler.reset()
            scheduler.check()
        elif late:
            assert scheduler.update(*late.pop(0)) == []
    while requests:
        add()
    run.drain()


def test_the_plan_is_deterministic() -> None:
    """Guards reproducible runs: equal calls give equal steps, block numbers included."""
    plans: list[list[bytes]] = []
    for _ in range(2):
        run = Run(make(num_blocks=9, num_in_flight=2, max_batch_tokens=30))
        run.add(*(ask(number, prompt(11 + number, number % 3), max_tokens=50) for number in range(12)))
        sent: list[bytes] = []
        while run.scheduler.has_work:
            sent += map(msgspec.msgpack.encode, run.round())
        assert sent == list(map(msgspec.msgpack.encode, run.ranks.steps)), "a step changed after it was sent"
        plans.append(sent)
    assert plans[0] == plans[1]
