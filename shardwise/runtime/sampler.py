"""Counter-based Gumbel-max sampling on vocabulary shards.

The sample is argmax(processed logits / temperature + noise) among the tokens that the filters keep, lowest id on ties,
in float64. The noise is a hash of (seed, position, token id) and nothing else, so neither layout nor batch mates nor a
restart can change it. Ranks exchange a (score, id) pair for each row, and before that the best scores of rows with
top_k or min_p; only rows with top_p but no top_k gather their scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.kernels.ops import Ops
from shardwise.parallel.axis import Axis
from shardwise.parallel.placement import Run
from shardwise.runtime.filters import ALL, keep, needed
from shardwise.runtime.logits import Row, check, process
from shardwise.runtime.logprobs import logprobs
from shardwise.runtime.rejection import decide, replace
from shardwise.schedule.step import Logprob

COLDEST = 1e-100
"""Lower temperatures are taken as this one: finite logits stay finite, and far below it only the best can win."""


class Sampler:
    """Draws tokens from logits whose vocabulary is cut over an axis; every rank of the axis gets the same ids.

    Logits become scores as `process` says, are divided by the temperature, and filtered by top_k, top_p and min_p in
    that order, which is transformers'. At temperature 0 the best score wins, which no filter can remove. Only ids below
    ``num_tokens`` are ever drawn; None: all. Methods raise FloatingPointError if a row's best score is not a finite
    number: the model is broken or all tokens are forbidden.
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

    def accept(
        self,
        logits: Tensor,
        rows: Sequence[Row],
        drafts: Sequence[int],
        drafter: Sampler | None = None,
        guesses: Tensor | None = None,
    ) -> list[int]:
        """The accepted ones of k ``drafts`` and one token more, by rejection sampling; ``logits`` [k + 1, own rows].

        The drafts were drawn by ``drafter`` from ``guesses`` [k, its own rows], raw logits, for ``rows[:k]``; without
        these each draft counts as certain. Tokens are distributed as those of `sample`, but are not the same ones;
        at temperature 0 they are.
        """
        assert len(rows) == len(drafts) + 1
        wanted = self.probabilities(logits[:-1], rows[:-1])
        guessed: Sequence[Tensor | None] = [None] * len(drafts)
        if drafter is not None and guesses is not None:
            given = drafter.probabilities(guesses, rows[:-1])
            guessed = pad(given, (0, wanted.shape[1] - given.shape[1])).unbind()  # vocabularies may be padded otherwise
        for number, (p, q, draft, row) in enumerate(zip(wanted, guessed, drafts, rows, strict=False)):
            if not decide(p, q, draft, row.by.seed, row.position):
                return [*drafts[:number], replace(self.ops, p, q, draft, row.by.seed, row.position)]
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
        if scores is logits:
            scores = logits.to(torch.float64, copy=True)
        heat = [max(row.by.temperature, COLDEST) if row.by.temperature else 1.0 for row in rows]
        scores /= torch.tensor(heat, dtype=torch.float64, device=scores.device)[:, None]
        counts = [needed(row.by) for row in rows]
        for group in (
            [number for number, count in enumerate(counts) if 0 < count < ALL],
            [number for number, count in enumerate(counts) if count == ALL],
        ):
            if group:
                self._filter(scores, group, rows, max(counts[number] for number in group))
        return scores

    def _filter(self, scores: Tensor, group: Sequence[int], rows: Sequence[Row], count: int) -> None:
        """Make minus infinity what the filters of a ``group`` of rows remove; ``count`` is the most that they need."""
        sizes = [min(count, size) for size in self.sizes]
        own, rank = scores[group], self.axis.rank
        best = own.topk(sizes[rank]).values if count < own.shape[1] else own
        for number, known in zip(group, self.axis.all_gather(best, sizes), strict=True):
            kept = keep(self.ops, scores[number], known, sum(sizes[:rank]), rows[number].by)
            scores[number].masked_fill_(~kept, -math.inf)
