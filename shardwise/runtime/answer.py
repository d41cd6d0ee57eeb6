"""From the logits of a step to what the front process is told: tokens, accepted drafts, log-probabilities, raw rows.

Every rank of the last stage computes the same answer; knows neither the model nor how the logits came.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from shardwise.runtime.logits import Row
from shardwise.runtime.sampler import Sampler
from shardwise.schedule.step import Chunk, Logprob, Step, StepResult


def answer(
    step: Step, logits: Tensor, sampler: Sampler, drafter: Sampler | None = None, guesses: Tensor | None = None
) -> StepResult:
    """The result of a step whose wanted rows (see `make_batch`) have ``logits`` [R, own vocabulary rows].

    ``guesses`` are the draft model's logits for all sampled rows of the chunks that accept drafts by rejection
    sampling, and ``drafter`` samples from it.
    """
    places = list(_places(step.chunks))
    plain = [(at, chunk) for (_, at), chunk in zip(places, step.chunks, strict=True) if _is_plain(chunk)]
    wanted = [row for at, _ in plain for row in at]
    rows = [row for _, chunk in plain for row in _rows(chunk)]
    drawn = iter(sampler.sample(_pick(logits, wanted), rows) if rows else ())
    sizes = [chunk.drafts + 1 for chunk in step.chunks if _is_judged(chunk)]
    guessed = iter(torch.split(guesses, sizes)) if guesses is not None else None

    tokens: list[list[int]] = []
    for (_, at), chunk in zip(places, step.chunks, strict=True):
        drafts = chunk.tokens[len(chunk.tokens) - chunk.drafts :]
        if chunk.sampling is None:
            tokens.append([])
        elif _is_judged(chunk):
            theirs = next(guessed)[:-1] if guessed is not None else None
            tokens.append(sampler.accept(logits[at.start : at.stop], _rows(chunk), drafts, drafter, theirs))
        else:
            own = [next(drawn) for _ in at]
            taken = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, own, strict=False)))
            tokens.append(own[: taken + 1])

    told = [
        [*chunk.scored, *(emitted if chunk.sampling is not None and chunk.sampling.logprobs >= 0 else ())]
        for chunk, emitted in zip(step.chunks, tokens, strict=True)
    ]
    return StepResult(
        epoch=step.epoch,
        number=step.number,
        tokens=tokens,
        logits=_raw(step.chunks, places, tokens, logits, sampler),
        logprobs=_logprobs(step.chunks, places, told, logits, sampler),
    )


def _places(chunks: Iterable[Chunk]) -> Iterator[tuple[range, range]]:
    """Of each chunk, which rows of the logits are scored and which sampled."""
    first = 0
    for chunk in chunks:
        middle = first + len(chunk.scored)
        last = middle + (chunk.drafts + 1 if chunk.sampling is not None else 0)
        yield range(first, middle), range(middle, last)
        first = last


def _is_judged(chunk: Chunk) -> bool:
    return chunk.sampling is not None and chunk.sampling.optimal and chunk.drafts > 0


def _is_plain(chunk: Chunk) -> bool:
    return chunk.sampling is not None and not _is_judged(chunk)


def _rows(chunk: Chunk) -> list[Row]:
    assert chunk.sampling is not None
    first = len(chunk.tokens) - chunk.drafts
    line = None
    if chunk.sampling.penalises:
        line = np.concatenate([np.frombuffer(chunk.past, np.int32), np.array(chunk.tokens, np.int32)])
    return [
        Row(
            chunk.sampling,
            chunk.start + first + at,
            chunk.masks[at] if chunk.masks else b"",
            line[: chunk.start + first + at] if line is not None else None,
        )
        for at in range(chunk.drafts + 1)
    ]


def _pick(logits: Tensor, rows: Sequence[int]) -> Tensor:
    return logits if len(rows) == logits.shape[0] else logits[list(rows)]


def _raw(
    chunks: Sequence[Chunk],
    places: Sequence[tuple[range, range]],
    tokens: Sequence[Sequence[int]],
    logits: Tensor,
    sampler: Sampler,
) -> list[list[bytes]]:
    """The whole row of each token, for the chunks that want it."""
    kept = [
        at[: len(emitted)] if chunk.sampling is not None and chunk.sampling.logits else ()
        for chunk, (_, at), emitted in zip(chunks, places, tokens, strict=True)
    ]
    rows = [row for part in kept for row in part]
    whole = iter(sampler.gather(_pick(logits, rows)).cpu() if rows else ())
    return [[next(whole).numpy().tobytes() for _ in part] for part in kept]


def _logprobs(
    chunks: Sequence[Chunk],
    places: Sequence[tuple[range, range]],
    told: Sequence[Sequence[int]],
    logits: Tensor,
    sampler: Sampler,
) -> list[list[Logprob]]:
    """Of the tokens ``told`` of each chunk: those scored, then those drawn."""
    rows: list[int] = []
    tops: list[int] = []
    for chunk, (scored, sampled), tokens in zip(chunks, places, told, strict=True):
        drawn = len(tokens) - len(scored)
        rows += [*scored, *sampled[:drawn]]
        tops += [chunk.num_top] * len(scored) + [chunk.sampling.logprobs if chunk.sampling is not None else 0] * drawn
    found = iter(sampler.logprobs(_pick(logits, rows), [t for tokens in told for t in tokens], tops) if rows else ())
    return [[next(found) for _ in tokens] for tokens in told]
