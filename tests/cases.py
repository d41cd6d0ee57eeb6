"""What the tests of ../shared/cases.md share: the layouts, ids that come in a given order, streams, neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from shardwise.engine import Output
from shardwise.llm import LLM, Prompt
from shardwise.outputs import RequestOutput
from shardwise.params import SamplingParams

LAYOUTS = ("1", "tp2", "pp2", "tp2.pp2")
STEP = 6.5
"""Between the biases of two tokens in a row: more than the text model's logits lie apart."""


def in_order(ids: Iterable[int]) -> dict[str, Any]:
    """Fields that make a model generate exactly these ids, at most 13 different ones, none of them in the prompt.

    The first has the highest bias; once it is there the penalty divides its score by ten, and the next one's is higher.
    """
    line = list(ids)
    assert len(set(line)) == len(line) <= 13
    biases = {token: 100 - STEP * place for place, token in enumerate(line)}
    return {"logit_bias": biases, "repetition_penalty": 10.0, "max_tokens": len(line)}


def by(fields: Mapping[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(**{**fields, **more})


@dataclass
class Streamed:
    """The pieces of a request, and what they amount to for each of its continuations."""

    pieces: list[Output]

    def whole(self, index: int = 0) -> tuple[str, list[int], str | None]:
        own = [piece for piece in self.pieces if piece.index == index]
        assert [piece.finish_reason for piece in own[:-1]] == [None] * (len(own) - 1)
        ids = [token for piece in own for token in piece.token_ids]
        return "".join(piece.text for piece in own), ids, own[-1].finish_reason


def streamed(llm: LLM, prompt: Prompt, params: SamplingParams) -> Streamed:
    return Streamed(list(llm.stream(prompt, params)))


def ask(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    (result,) = llm.generate(prompt, params)
    return result


def told(result: RequestOutput) -> RequestOutput:
    """A result without its times, to be compared."""
    return replace(result, submitted=0.0, first_token=0.0, finished=0.0)


NEIGHBOUR = SamplingParams(max_tokens=6, temperature=1.0, seed=11, ignore_eos=True, logprobs=2)


def check_refused(llm: LLM, one: LLM, prompt: Prompt, fields: Mapping[str, Any], *words: str) -> None:
    """The request is refused with all ``words``, and neither the one before it nor the one after it feels that."""
    alone = told(ask(one, "neighbour", NEIGHBOUR))
    number = llm.submit("neighbour", NEIGHBOUR)
    result, pieces = llm._open[number], llm.pieces(number)
    next(pieces)
    with pytest.raises(ValueError, match=r"\w") as caught:
        llm.submit(prompt, SamplingParams.from_dict(fields))
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)
    for _ in pieces:
        pass
    assert told(result) == alone
    assert told(ask(llm, "neighbour", NEIGHBOUR)) == alone
    check_idle(llm)


def check_idle(llm: LLM) -> None:
    """Nothing of any request is left, but for cached blocks."""
    assert not llm._replicas.has_work
    assert not any((llm._open, llm._inbox, llm._parts))
    for engine in llm._replicas.engines:
        assert engine.load == 0
        assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
        engine.scheduler.check()
