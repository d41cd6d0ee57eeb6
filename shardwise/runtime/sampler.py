"""Counter-based Gumbel-max sampling on vocabulary shards.

The sample is argmax(filtered logits / temperature + noise), lowest id on ties, in float64. The noise is a hash of
(seed, position, token id) and nothing else, so neither layout nor batch mates nor a restart can change it. Rows without
a filter exchange one (score, id) pair per rank; rows with top_k, top_p or min_p gather their logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.kernels.ops import Ops
from shardwise.parallel.axis import Axis
from shardwise.parallel.placement import Run
from shardwise.schedule.step import Sampling

CANDIDATES = 1024
"""Likeliest tokens looked at first for top_p; more only when they don't hold enough probability."""

BROKEN = "logits are not numbers (NaN): the weights or the number format are broken"


class Sampler:
    """Draws tokens from logits whose vocabulary is cut over an axis; every rank of the axis gets the same ids."""

    def __init__(self, ops: Ops, axis: Axis, vocabs: Sequence[Run]) -> None:
        self.ops = ops
        self.axis = axis
        self.sizes = [run.size for run in vocabs]
        self.first = vocabs[axis.rank].start

    def gather(self, logits: Tensor) -> Tensor:
        """[R, own rows] → [R, vocabulary]."""
        return self.axis.all_gather(logits, self.sizes)

    def sample(self, logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
        """One token per row of ``logits`` [R, own rows]; ``positions[r]`` is where the drawn token will stand.

        Raises FloatingPointError if a row's best score is not a number.
        """
        filtered = [row for row, by in enumerate(samplings) if by.top_k or by.top_p < 1.0 or by.min_p]
        plain = [row for row in range(len(samplings)) if row not in set(filtered)]
        tokens = [0] * len(samplings)
        if plain:
            rows = logits if not filtered else logits[plain]
            drawn = self._sample_plain(rows, [samplings[r] for r in plain], [positions[r] for r in plain])
            for row, token in zip(plain, drawn, strict=True):
                tokens[row] = token
        if filtered:
            for row, whole in zip(filtered, self.gather(logits[filtered]), strict=True):
                tokens[row] = self._sample_filtered(whole.double(), samplings[row], positions[row])
        return tokens

    def _sample_plain(self, logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
        noisy = [row for row, by in enumerate(samplings) if by.temperature > 0]
        scores = logits
        if noisy:
            scores = logits.to(torch.float64, copy=True)
            heat = torch.tensor([samplings[row].temperature for row in noisy], dtype=torch.float64)
            noise = self.ops.gumbel(
                [samplings[row].seed for row in noisy], [positions[row] for row in noisy], self.first, logits.shape[1]
            )
            scores[noisy] = scores[noisy] / heat.to(scores.device)[:, None] + noise.to(scores.device)
        top = scores.max(dim=1)  # the first of equals
        best = torch.stack([top.values.double(), (top.indices + self.first).double()], dim=1)
        if self.axis.size > 1:
            best = self.axis.all_gather(best, [2] * self.axis.size).view(len(samplings), self.axis.size, 2)
            owner = best[:, :, 0].argmax(dim=1)  # the first of equals again: ranks hold ascending ids
            best = best[torch.arange(len(samplings)), owner]
        if bool(best[:, 0].isnan().any()):
            raise FloatingPointError(BROKEN)
        return [int(token) for token in best[:, 1].tolist()]

    def _sample_filtered(self, logits: Tensor, by: Sampling, position: int) -> int:
        """Sample one whole row of float64 logits."""
        if bool(logits.isnan().any()):
            raise FloatingPointError(BROKEN)
        if by.temperature == 0:
            return int(logits.argmax())
        scaled = (logits - logits.max()) / by.temperature
        kept = self._filter(scaled, by)
        noise = self.ops.gumbel([by.seed], [position], 0, logits.shape[0])[0].to(logits.device)
        return int(kept[(scaled + noise)[kept].argmax()])

    def _filter(self, scaled: Tensor, by: Sampling) -> Tensor:
        """Ascending ids that survive top_k, then top_p, then min_p; at least one. ``scaled`` [V] has maximum 0.

        Of equal scores the lower ids are kept first. top_p keeps the smallest set of the likeliest tokens, within the
        top_k, whose probability reaches it.
        """
        count = min(by.top_k or scaled.shape[0], scaled.shape[0])
        if by.top_p < 1.0:
            odds = self.ops.exp(scaled)
            total = None if by.top_k else odds.cumsum(0)[-1]  # cumsum adds in one fixed order
            size = min(count, CANDIDATES)
            while True:
                order = _likeliest(scaled, size)
                mass = odds[order].cumsum(0)
                whole = mass[-1] if size == count else total
                if whole is not None and (size == count or bool(mass[-1] >= by.top_p * whole)):
                    break
                size = min(count, 4 * size)
            needed = int((mass < by.top_p * whole).sum()) + 1
            order = order[:needed]
        elif count < scaled.shape[0]:
            order = _likeliest(scaled, count)
        else:
            order = torch.arange(scaled.shape[0], device=scaled.device)
        if by.min_p > 0:
            order = order[self.ops.exp(scaled[order].contiguous()) >= by.min_p]
        return order.sort().values


def _likeliest(scores: Tensor, count: int) -> Tensor:
    """Ids of the ``count`` highest scores, highest first, the lower id first among equals."""
    least = scores.topk(count).values[-1]
    ids = (scores >= least).nonzero()[:, 0]
    return ids[scores[ids].sort(descending=True, stable=True).indices][:count]
