"""Whose KV a sequence may read: blocks of one salt never serve another, whatever comes and goes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import BLOCK
from shardwise.params import SamplingParams
from shardwise.schedule.scheduler import Scheduler
from shardwise.schedule.sequence import Request
from shardwise.schedule.step import StepResult

KEYS = (b"one", b"two", b"")


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 2), st.integers(1, 70)), min_size=2, max_size=12),
    num_blocks=st.integers(8, 24),
    depth=st.integers(1, 2),
)
def test_keys_never_read_each_others_blocks(actions: list[tuple[bytes, int, int]], num_blocks: int, depth: int) -> None:
    """R22: guards every step's block table: what a sequence reads was computed for it, or for its own key.

    All prompts begin alike, so that blocks would be shared if they could be.
    """
    scheduler = Scheduler(
        num_blocks=num_blocks,
        max_model_len=num_blocks * BLOCK,
        max_batch_tokens=32,
        max_chunk=24,
        max_num_seqs=3,
        num_in_flight=depth,
        prefix_cache=True,
        eos=frozenset(),
        vocab_size=64,
        secret=b"x" * 32,
    )
    salts: dict[int, bytes] = {}
    for number, (salt, kind, length) in enumerate(actions):
        prompt = tuple([1] * min(length, 40) + [kind] * (length - min(length, 40)))
        salts[number] = salt
        scheduler.add(Request(number, prompt, SamplingParams(max_tokens=20), seed=0, salt=salt))
    written: dict[tuple[int, int], bytes] = {}
    """Whose KV lies where: block and slot → salt."""
    while scheduler.has_work:
        steps = []
        while len(steps) < depth and (step := scheduler.schedule()) is not None:
            steps.append(step)
        assert steps
        for step in steps:
            for chunk in step.chunks:
                salt = salts[chunk.sequence]
                for at in range(chunk.start, chunk.start + len(chunk.tokens)):
                    written[chunk.blocks[at // BLOCK], at % BLOCK] = salt
                for at in range(chunk.start + len(chunk.tokens)):
                    assert written[chunk.blocks[at // BLOCK], at % BLOCK] == salt
            tokens = [[at % 3] if chunk.sampling else [] for at, chunk in enumerate(step.chunks)]
            none: list[list[object]] = [[]] * len(tokens)
            scheduler.update(step, StepResult(step.epoch, step.number, tokens, none, none))  # type: ignore[arg-type]
        scheduler.check()
    assert scheduler.pool.num_free == num_blocks
