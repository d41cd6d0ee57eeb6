"""Embeddings: against the oracle's hidden states, to the same bits on every layout, and as the route tells them."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import torch
from torch import Tensor

from shardwise import reference
from shardwise.engine import Engine, Output
from shardwise.intake import Intake
from shardwise.open import make_scheduler
from shardwise.params import SamplingParams
from shardwise.replicas import Replicas
from shardwise.runtime.executor import RankFailure
from shardwise.runtime.launch import launch
from shardwise.runtime.runner import Runner
from shardwise.runtime.source import open_source
from shardwise.schedule.scheduler import Scheduler
from shardwise.schedule.sequence import Request
from shardwise.schedule.step import Step
from shardwise.server import completions, embeddings
from shardwise.server.deps import Deps
from tests import tiny
from tests.harness import NoText, plan_of, replicas_of, threads, whole_weights
from tests.server.conftest import client, deps_on, held, serving

LENGTHS = 1, 16, 17, 50, 90
PROMPTS = [tuple((7 * at + 3 * length) % 67 for at in range(length)) for length in LENGTHS]
LAYOUTS = [f"tp{tp}.pp{pp}" for tp in (1, 2, 3) for pp in (1, 2, 3)] + ["dp2"]
KINDS = "mean", "last"
Found = dict[tuple[int, str], list[float]]
"""Number of the prompt, kind → vector."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float64, with 8 heads, 2 of keys and values, 4 layers and 40 dimensions."""
    return tiny.save_llama(tmp_path_factory.mktemp("few"), "few_kv")


@pytest.fixture(scope="module")
def truth(model: Path) -> Found:
    """Pooled by the oracle: with the identity for a head, its logits are the last hidden states."""
    source = open_source(model)
    weights = whole_weights(source)
    weights["head.weight"] = torch.eye(weights["norm.weight"].shape[0], dtype=torch.float64)
    found: Found = {}
    for number, prompt in enumerate(PROMPTS):
        states: Tensor = reference.logits(source.config, weights, list(prompt))
        found[number, "mean"] = states.mean(0).tolist()
        found[number, "last"] = states[-1].tolist()
    return found


def embed(replicas: Replicas, *, beside: int = 0) -> Found:
    """All prompts in both ways at once, with so many requests beside them that generate."""
    keys = {}
    number = 0
    for at, prompt in enumerate(PROMPTS):
        for kind in KINDS:
            keys[number] = at, kind
            replicas.add(Request(number, prompt, SamplingParams(max_tokens=0), 0, pooling=kind))
            number += 1
    for at in range(beside):
        by = SamplingParams(max_tokens=12, ignore_eos=True, prompt_logprobs=at % 2 or None)
        replicas.add(Request(number + at, PROMPTS[at % len(PROMPTS)], by, at))
    found: Found = {}
    while replicas.has_work:
        for output in replicas.step():
            if output.request_id in keys and output.finish_reason is not None:
                assert (output.finish_reason, output.token_ids) == ("length", [])
                found[keys[output.request_id]] = output.embedding
            else:
                assert output.embedding == []
        for engine in replicas.engines:
            engine.scheduler.check()
    assert len(found) == len(keys)
    return found


def digest(found: Found) -> list[tuple[tuple[int, str], list[str]]]:
    """To the last bit."""
    return [(key, [value.hex() for value in values]) for key, values in sorted(found.items())]


def assert_close(found: Found, truth: Found) -> None:
    for key, values in truth.items():
        assert found[key] == pytest.approx(values, abs=1e-9), key


@pytest.fixture(scope="module")
def bits(model: Path, truth: Found) -> list[tuple[tuple[int, str], list[str]]]:
    """Of a single rank, each prompt whole."""
    plan = plan_of(model, "1")
    with threads(plan) as executors:
        found = embed(replicas_of(executors, plan, prefix_cache=False, eos=frozenset()))
    assert_close(found, truth)
    return digest(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_answer_on_every_layout(model: Path, bits: object, layout: str) -> None:
    """Guards against sums that have an order: chunks, steps in flight, batches and prefix hits change no bit."""
    plan = plan_of(model, layout)
    with threads(plan) as executors:
        for chunk, beside in ((1, 0), (7, 3), (512, 5)):
            replicas = replicas_of(executors, plan, max_chunk=chunk, max_batch_tokens=max(16, chunk), eos=frozenset())
            assert digest(embed(replicas, beside=beside)) == bits, (chunk, "cold")
            assert digest(embed(replicas, beside=beside)) == bits, (chunk, "warm")


@pytest.mark.parametrize("layout", ["dp4", "pp2"])
def test_processes(model: Path, bits: object, layout: str) -> None:
    """C89: with ranks as processes too, four replicas start, answer, and have the same bits."""
    plan = plan_of(model, layout)
    replicas = replicas_of(launch(plan), plan, max_chunk=7, eos=frozenset())
    try:
        assert digest(embed(replicas, beside=3)) == bits
    finally:
        replicas.close()


@pytest.mark.parametrize("layout", ["1", "tp2.pp2"])
def test_preemption(model: Path, bits: object, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against rows that are summed twice, or never, when a prompt is computed again in other chunks."""
    plan = plan_of(model, layout)
    schedule: Callable[[Scheduler], Step | None] = Scheduler.schedule
    halves: list[int] = []

    def harsh(self: Scheduler) -> Step | None:
        half = [each for each in self._running if not each.in_flight and 0 < each.pooled < len(each.tokens)]
        if half and len(halves) < 6:
            halves.append(half[-1].pooled)
            self._preempt(half[-1])
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", harsh)
    with threads(plan) as executors:
        for cached in (False, True):
            halves.clear()
            settings = {"max_chunk": 7, "max_batch_tokens": 24, "prefix_cache": cached, "max_num_seqs": 4}
            assert digest(embed(replicas_of(executors, plan, eos=frozenset(), **settings), beside=3)) == bits
            assert len(halves) >= 3


@pytest.mark.parametrize("layout", ["1", "pp2"])
def test_ranks_that_fail(model: Path, bits: object, layout: str) -> None:
    """R28: after a failure of the ranks half-way through a prompt, what is summed counts once and no step is missed."""
    plan = plan_of(model, layout)
    with threads(plan) as executors:
        (executor,) = executors
        scheduler = make_scheduler(plan, frozenset(), max_chunk=7, max_batch_tokens=16)
        engine = Engine(executor, scheduler, NoText(), lambda failed: failed)  # type: ignore[arg-type]
        replicas = Replicas([engine])
        collect = engine.collect
        calls = itertools.count(1)

        def failing() -> list[Output]:
            if next(calls) not in (4, 11):
                return collect()
            for _ in range(engine.in_flight):
                executor.collect()
            raise RankFailure(0, "was killed by SIGKILL")

        engine.collect = failing  # type: ignore[method-assign]
        assert digest(embed(replicas)) == bits
        assert engine.num_failures == 2


def test_broken_states(model: Path) -> None:
    """R17: hidden states that are no numbers end their own request with an error, and no other."""
    plan = plan_of(model, "1")
    with threads(plan, rank=Broken) as executors:
        (engine,) = replicas_of(executors, plan, eos=frozenset()).engines
        for number, prompt in enumerate(PROMPTS):
            engine.add(Request(number, prompt, SamplingParams(max_tokens=0), 0, pooling="mean"))
        outputs = {}
        while engine.has_work:
            outputs.update({output.request_id: output for output in engine.step()})
    broken = outputs.pop(BROKEN)
    assert (broken.finish_reason, broken.embedding) == ("error", [])
    assert "finite" in broken.error
    assert {(output.finish_reason, len(output.embedding)) for output in outputs.values()} == {("length", 40)}


BROKEN = 2


class Broken(Runner):
    """Its hidden states are NaN for one of the prompts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        final = self.model.decoder.final
        self.model.decoder.final = lambda x: final(x) * (math.nan if len(x) == LENGTHS[BROKEN] else 1)  # type: ignore[method-assign]


# The route


@pytest.fixture(scope="module", params=["1", "tp2", "pp2"])
def http(request: pytest.FixtureRequest, text_model: Path) -> Iterator[httpx.Client]:
    with (
        deps_on(text_model, request.param, served_model_names=("tiny",), max_prompts=8) as deps,
        serving(deps, embeddings.router, completions.router) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def ask(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/embeddings", json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = json.loads(answer.text)
    return found


def vectors(http: httpx.Client, **body: Any) -> list[list[float]]:
    return [each["embedding"] for each in ask(http, **body)["data"]]


@torch.no_grad()
def test_against_transformers(http: httpx.Client, text_model: Path) -> None:
    """Guards against vectors that aren't the model's: transformers' last hidden states, pooled and scaled."""
    from transformers import AutoModel

    whole = AutoModel.from_pretrained(text_model, dtype=torch.float32).eval()
    prompts = [[5, 6, 7], [200], list(range(100))]
    for pooling in KINDS:
        states = [whole(torch.tensor([prompt])).last_hidden_state[0].double() for prompt in prompts]
        pooled = [each.mean(0) if pooling == "mean" else each[-1] for each in states]
        raw = vectors(http, input=prompts, pooling=pooling, normalize=False)
        unit = vectors(http, input=prompts, pooling=pooling)
        for state, one, other in zip(pooled, raw, unit, strict=True):
            assert one == pytest.approx(state.tolist(), abs=1e-4)
            assert other == pytest.approx((state / state.norm()).tolist(), abs=1e-4)
            assert math.fsum(value * value for value in other) == pytest.approx(1, abs=1e-12)


def test_forms_of_input_and_output(http: httpx.Client) -> None:
    """Guards against an input read otherwise than the others, and bytes that aren't the numbers."""
    answer = ask(http, input=["abc", "x"])
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert [(each["object"], each["index"]) for each in answer["data"]] == [("embedding", 0), ("embedding", 1)]
    first, second = vectors(http, input=["abc", "x"])
    assert len(first) == 48
    assert vectors(http, input="abc", encoding_format="float", dimensions=48, user="me", pooling="mean") == [first]
    (ids,) = [[64 + at for at in range(3)]]
    assert vectors(http, input=ids) == vectors(http, input=[ids])
    assert vectors(http, input=["x", "abc"]) == [second, first]
    (coded,) = vectors(http, input="abc", encoding_format="base64")
    assert isinstance(coded, str)
    assert list(struct.unpack("<48f", base64.b64decode(coded))) == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("input", {}),
        ("input", {"input": ""}),
        ("input", {"input": []}),
        ("input", {"input": [[]]}),
        ("input", {"input": ["x", ""]}),
        ("input", {"input": [290]}),
        ("input", {"input": "x" * 257}),
        ("input", {"input": ["x"] * 9}),
        ("input", {"input": 5}),
        ("dimensions", {"input": "x", "dimensions": 47}),
        ("dimensions", {"input": "x", "dimensions": 0}),
        ("encoding_format", {"input": "x", "encoding_format": "hex"}),
        ("pooling", {"input": "x", "pooling": "cls"}),
        ("normalize", {"input": "x", "normalize": 1}),
        ("nonsense", {"input": "x", "nonsense": 1}),
        ("temperature", {"input": "x", "temperature": 0}),
    ],
)
def test_what_is_refused(http: httpx.Client, param: str, body: dict[str, Any]) -> None:
    """C34, R11: empty, too many, too long and unknown inputs, and fields of no meaning here, are 400 and named."""
    answer = http.post("/v1/embeddings", json={"model": "tiny", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert vectors(http, input="x" * 256)


def test_four_replicas(text_model: Path, http: httpx.Client) -> None:
    """C89: embeddings with four replicas hung; here they have the bits that other layouts give."""
    texts = [f"text number {number}" for number in range(7)]
    expected = vectors(http, input=texts)
    settings = {"served_model_names": ("tiny",)}
    with (
        deps_on(text_model, "dp4", **settings) as deps,
        serving(deps, embeddings.router) as url,
        httpx.Client(base_url=url, timeout=60) as other,
    ):
        assert vectors(other, input=texts) == expected
        assert [vectors(other, input=text) for text in texts] == [[vector] for vector in expected]


def test_beside_completions(http: httpx.Client) -> None:
    """Guards against a cached prefix of a completion that a mean jumps over."""
    text = "a prefix that fills more than one block of the cache"
    (alone,) = vectors(http, input=text)
    told = http.post("/v1/completions", json={"model": "tiny", "prompt": text, "max_tokens": 2})
    assert told.status_code == 200
    assert vectors(http, input=[text, text]) == [alone, alone]
    assert vectors(http, input=text, pooling="last") == vectors(http, input=text, pooling="last")


def test_a_drain_that_runs_out(text_model: Path) -> None:
    """Guards against empty vectors, told as if all were well, of requests that the end of a drain has cut off."""

    async def scene(deps: Deps) -> None:
        async with client(deps) as http, held(deps):
            bodies: list[dict[str, Any]] = [{"input": "hi"}, {"input": ["hi", "there"], "encoding_format": "base64"}]
            asked = [asyncio.ensure_future(http.post("/v1/embeddings", json={"model": "tiny", **b})) for b in bodies]
            while deps.service.num_open < 3:
                await asyncio.sleep(0.01)
            await deps.service.drain(0.01)
            for answer in await asyncio.gather(*asked):
                assert answer.status_code == 503, answer.text
                assert int(answer.headers["retry-after"]) >= 1

    with deps_on(text_model, served_model_names=("tiny",)) as deps:
        asyncio.run(scene(deps))


def test_more_inputs_than_there_is_room_for(text_model: Path) -> None:
    """Guards against inputs that are tokenised, and then refused for their number."""
    with (
        deps_on(text_model, max_queue_requests=2, served_model_names=("tiny",)) as deps,
        serving(deps, embeddings.router) as url,
        httpx.Client(base_url=url, timeout=60) as http,
        patch.object(Intake, "encode", side_effect=AssertionError),
    ):
        assert http.post("/v1/embeddings", json={"model": "tiny", "input": ["x"] * 3}).status_code == 400
