"""Counter-based Gumbel-max sampling on vocabulary shards.

The sample is argmax(processed logits / temperature + noise) among the tokens that the filters keep, lowest id on ties, in
float64. The noise is a hash of (seed, position, token id) and nothing else, so neither layout nor batch mates nor a
restart can change it. Ranks exchange a (score, id) pair for each row, and before that the best scores of rows with
top_k or min_p; only rows with top_p but no top_k gather their scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from shardwise.kernels.ops import Ops
from shardwise.parallel.axis import Axis
from shardwise.parallel.placement import Run
from shardwise.runtime.filters import needed, threshold
from shardwise.runtime.logits import Row, check, process
from shardwise.runtime.logprobs import logprobs
from shardwise.runtime.rejection import decide, replace
from shardwise.schedule.step import Logprob

COLDEST = 1e-100
"""Lower temperatures are taken as this one: finite logits stay finite, and far below it only the best can win."""


class Sampler:
    """Draws tokens from logits whose vocabulary is cut over an axis; every rank of the axis gets the same ids.

    Logits become scores as `process` says, are divided by the temperature, and filtered by top_k, top_p and min_p in
    that order (transformers'). At temperature 0 the best score wins, which no filter can remove. Only ids below
    ``num_tokens`` are ever drawn; None: all. Methods raise FloatingPointError if a row's best score is not a finite number:
    the model is broken or all tokens are forbidden.
    """

    def __init__(self, ops: Ops, axis: Axis, vocabs: Sequence[Run], num_tokens: int | None = None) -> None:
        self.ops = ops
        self.axis = axis
        self.sizes = [run.size for run in vocabs]
        self.first = vocabs[axis.rank].start
        self.count = (vocabs[-1].stop if num_tokens is None else num_tokens) - self.first

    def gather(self, logits: Tensor) -> Tensor:
        """[R, own rows] → [R, vocabulary]."""
        return self.axis.all_gather(logits, self.sizes)

    def sample(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        """One token per row of ``logits`` [R, own rows]."""
        scores = self._scores(logits, rows)
        noisy = [number for number, row in enumerate(rows) if row.by.temperature > 0]
        if noisy:
            seeds, positions = [rows[number].by.seed for number in noisy], [rows[number].position for number in noisy]
            noise = self.ops.gumbel(seeds, positions, self.first, scores.shape[1])
            scores.index_add_(0, torch.tensor(noisy, device=scores.device), noise.to(scores.device))
        top = scores.max(dim=1)  # the first of equals
        best = torch.stack([top.values.double(), (top.indices + self.first).double()], dim=1)
        if self.axis.size > 1:
            best = self.axis.all_gather(best, [2] * self.axis.size).view(len(rows), self.axis.size, 2)
            owner = best[:, :, 0].argmax(dim=1)  # the first of equals again: ranks hold ascending ids
            best = best[torch.arange(len(rows)), owner]
        check(best[:, 0])
        return [int(token) for token in best[:, 1].tolist()]

    def probabilities(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """With which probabilities `sample` draws: [R, vocabulary] float64, the same bits on every rank and any cut."""
        scores = self.gather(self._scores(logits, rows)).double()
        best = scores.max(dim=1, keepdim=True)
        check(best.values)
        odds = self.ops.exp(scores - best.values)
        for number, row in enumerate(rows):
            if row.by.temperature == 0:
                odds[number] = 0.0
                odds[number, best.indices[number]] = 1.0
        return odds / odds.cumsum(1)[:, -1:]  # cumsum adds in one fixed order

    def accept(self, logits: Tensor, rows: Sequence[Row], drafts: Sequence[int], guess: Tensor | None) -> list[int]:
        """The accepted ones of k ``drafts`` and one token more, by rejection sampling; ``logits`` [k + 1, own rows].

        ``guess`` [k, draft vocabulary] are the probabilities that the drafts were drawn with: `probabilities` of the
        drafter's own sampler and logits, for ``rows[:k]``. None if each draft was certain. The tokens are distributed as
        the model's own, but are not those that `sample` draws; at temperature 0 they are.
        """
        assert len(rows) == len(drafts) + 1
        by = rows[0].by
        if by.temperature == 0 or not drafts:
            drawn = self.sample(logits, rows)
            agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, drawn, strict=False)))
            return drawn[: agreed + 1]
        wanted = self.probabilities(logits[:-1], rows[:-1])
        if guess is not None:  # a drafter's vocabulary may be padded otherwise
            guess = torch.nn.functional.pad(guess, (0, wanted.shape[1] - guess.shape[1]))
        for number, draft in enumerate(drafts):
            case = wanted[number], None if guess is None else guess[number], draft, by.seed, rows[number].position
            if not decide(*case):
                return [*drafts[:number], replace(self.ops, *case)]
        return [*drafts, *self.sample(logits[-1:], rows[-1:])]

    def logprobs(self, logits: Tensor, tokens: Sequence[int], nums_top: Sequence[int]) -> list[Logprob]:
        """By the raw model, for ``logits`` [R, own rows]: of one token a row and of its ``nums_top`` likeliest."""
        return logprobs(self.ops, self.axis, self.sizes, logits, tokens, nums_top)

    def _scores(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """[R, own rows]: processed, divided by the temperature, and minus infinity where a filter says no.

        A new float64 tensor, but ``logits`` itself if the rows are greedy and ask for nothing.
        """
        scores = process(logits, rows, self.first, self.count)
        if all(row.by.temperature == 0 for row in rows):
            return scores
        scores = logits.to(torch.float64, copy=True) if scores is logits else scores
        heat = [max(row.by.temperature, COLDEST) if row.by.temperature else 1.0 for row in rows]
        scores /= torch.tensor(heat, dtype=torch.float64, device=scores.device)[:, None]
        hot = [number for number, row in enumerate(rows) if row.by.temperature > 0]
        few = [number for number in hot if ...]
        return scores
