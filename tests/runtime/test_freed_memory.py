"""What becomes of KV that nobody owns any more: nothing that is computed may depend on it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config import BLOCK, Coordinates
from shardwise.parallel.axis import Axis
from shardwise.params import SamplingParams
from shardwise.runtime.executor import RankFailure
from shardwise.runtime.runner import Runner
from shardwise.runtime.spec import RunnerSpec
from shardwise.schedule.blocks import BlockPool
from shardwise.schedule.sequence import Request
from tests.harness import plan_of, replicas_of, threads
from tests.tiny import save_llama

NUM_BLOCKS = 14


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"), "groups")


def requests(count: int) -> Iterator[Request]:
    """More than there is room for, many of which begin alike; every third wants its prompt's scores too."""
    draw = random.Random(23)
    for number in range(count):
        first = draw.randrange(3)
        prompt = [first] * draw.choice((1, 15, 16, 17, 40)) + [
            draw.randrange(100) for _ in range(draw.randrange(1, 20))
        ]
        wish: dict[str, Any] = {"prompt_logprobs": 1} if number % 3 == 0 else {}
        params = SamplingParams(max_tokens=draw.randrange(1, 24), temperature=draw.choice((0.0, 1.0)), **wish)
        yield Request(number, tuple(prompt), params, seed=number, want_logits=True)


def answers(path: Path, layout: str, kernels: str, poison: str, count: int) -> tuple[list[Any], int]:
    """All that is told of each request, logits included, and how many blocks were given out.

    ``poison`` is "no", "free" (what nobody owns) or "all" (what is in use too).
    """
    plan = plan_of(path, layout, kernels=kernels, kv_tokens=NUM_BLOCKS * BLOCK, max_num_seqs=5, max_chunk=24)
    runners: list[Runner] = []

    def rank(spec: RunnerSpec, place: Coordinates, tp: Axis, pp: Axis) -> Runner:
        runners.append(Runner(spec, place, tp, pp))
        return runners[-1]

    def spoil(blocks: list[int]) -> None:
        for runner in runners if poison != "no" else ():
            for kv in runner.model.cache:
                kv.keys[blocks] = torch.nan
                kv.values[blocks] = torch.nan

    told: list[list[Any]] = [[] for _ in range(count)]
    taken = 0
    with threads(plan, rank) as executors:
        replicas = replicas_of(executors, plan, eos=frozenset(), num_in_flight=1)
        (engine,) = replicas.engines
        pool: BlockPool = engine.scheduler.pool
        plain = pool._take

        def take() -> int:
            nonlocal taken
            taken += 1
            block = plain()
            spoil([block])  # also what was cached until now
            return block

        pool._take = take  # type: ignore[method-assign]
        spoil(list(range(NUM_BLOCKS)))
        for request in requests(count):
            replicas.add(request)
        while replicas.has_work:
            for out in replicas.step():
                told[out.request_id] += [out.token_ids, out.logits, out.logprobs, out.prompt_logprobs]
            assert not engine.in_flight
            spoil(pool._free if poison == "free" else list(range(NUM_BLOCKS)))
        pool.check([])
    return told, taken


@pytest.mark.parametrize(
    ("layout", "kernels", "count"), [("1", "native", 150), ("1", "torch", 40), ("tp2", "native", 40)]
)
def test_freed_blocks_are_never_read(model: Path, layout: str, kernels: str, count: int) -> None:
    """R23: guards against a request that reads what another has left: all blocks hold NaN when they are given out, and
    again once they are free, and neither a token nor a bit of any logit changes."""
    clean, taken = answers(model, layout, kernels, "no", count)
    poisoned, again = answers(model, layout, kernels, "free", count)
    assert poisoned == clean
    assert taken == again > count


def test_the_poison_is_one(model: Path) -> None:
    """Guards the test above: in blocks that are in use it is noticed."""
    with pytest.raises(RankFailure, match="not numbers"):
        answers(model, "1", "native", "all", 10)


@pytest.mark.slow
def test_freed_blocks_are_never_read_in_ten_thousand(model: Path) -> None:
    """R23: the same, until 10,000 blocks have been given out."""
    clean, taken = answers(model, "1", "native", "no", 4200)
    assert taken > 10_000
    assert answers(model, "1", "native", "free", 4200)[0] == clean
