"""A mixture of experts in place of an MLP: routing alike on every rank, and this rank's run of (expert, chunk) units.

Knows nothing of how many ranks there are: the units of all experts in a row are the chunks of one wide MLP, and a
token's sum runs along their fixed tree, in which experts that were not chosen are absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.kernels.ops import Ops, Program, Weight
from shardwise.models.config import Experts
from shardwise.models.linear import Linear
from shardwise.models.shard import Chunks
from shardwise.parallel.axis import Axis
from shardwise.parallel.placement import Run, Tree

FEW = 64
"""Batches up to so many rows keep whole sums: adding rows that are absent is then cheaper than telling them apart."""


class Partial:
    """Input features of one expert: the sums of the subtrees that they fill, which are added to nobody's yet."""

    def __init__(self, ops: Ops, weight: Weight, program: Program) -> None:
        self.ops = ops
        self.weight = weight
        self.program = program

    def __call__(self, x: Tensor) -> Tensor:
        """[r, own K] → [nodes, r, N]."""
        return self.ops.linear(x, self.weight, self.program).view(-1, x.shape[0], self.weight.rows)


class Expert(NamedTuple):
    """This rank's features of one expert."""

    up: Linear
    down: Partial


class Sum(NamedTuple):
    """A node of the tree for those rows of the batch that have anything in it."""

    rows: Tensor
    """[r] int64, ascending."""
    values: Tensor
    """[r, N]."""


class MoE:
    """Each token's chosen experts, weighted, in place of an `MLP`.

    ``chunks`` are those of all experts in a row; ``merges`` adds up what this rank's ``own`` experts leave, in order.
    """

    def __init__(
        self,
        experts: Experts,
        router: Linear,
        own: dict[int, Expert],
        activation: str,
        chunks: Chunks,
        merges: Sequence[int],
        axis: Axis,
    ) -> None:
        self.ops = router.ops
        self.config = experts
        self.router = router
        self.experts = own
        self.activation = activation
        self.tree = chunks.tree
        self.merges = merges
        self.axis = axis

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """[M, hidden] normed, [M, hidden] → [M, hidden] with the residual added."""
        chosen, weights = self.route(x)
        order = chosen.flatten().argsort(stable=True)
        rows, scales = order // self.config.chosen, weights.flatten()[order, None]
        ends = chosen.flatten().bincount(minlength=self.config.count).cumsum(0).tolist()
        every = torch.arange(x.shape[0], device=x.device)
        stack: list[Sum | None] = []
        merges = iter(self.merges)
        for number, expert in self.experts.items():
            start, stop = ends[number - 1] if number else 0, ends[number]
            own = rows[start:stop]
            sums = self._one(expert, x, own, scales[start:stop]) if stop > start else None
            own = every if sums is not None and sums.shape[1] == x.shape[0] else own
            for node in range(expert.down.program.num_nodes):
                stack.append(None if sums is None else Sum(own, sums[node]))
                for _ in range(next(merges)):
                    right = stack.pop()
                    stack.append(join(stack.pop(), right))
        nodes = self._lay_out(stack, x)
        return self.axis.reduce(self.ops, nodes, self.tree, None, residual)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[M, hidden] → the chosen experts [M, chosen] int64, best first and of equals the lowest, and their weights.

        All sums are of whole columns, so that a row's weights can't feel the batch.
        """
        scores = self.router(x).double()
        best, chosen = scores.sort(dim=1, descending=True, stable=True)
        odds = self.ops.exp(best - best[:, :1])
        count = self.config.chosen
        kept = odds[:, :count]
        weights = kept / _total(kept if self.config.normed else odds)
        return chosen[:, :count].contiguous(), weights.to(x.dtype)

    def _one(self, expert: Expert, x: Tensor, rows: Tensor, scales: Tensor) -> Tensor:
        """[nodes, r, N] of one expert for its rows, or for all M of a few: the weights come in before the sums."""
        if rows.shape[0] == x.shape[0]:
            return expert.down(self.ops.activate(self.activation, expert.up(x)) * scales)
        sums = expert.down(self.ops.activate(self.activation, expert.up(x[rows])) * scales)
        if x.shape[0] > FEW:
            return sums
        whole = sums.new_full((sums.shape[0], *x.shape), -0.0)
        whole[:, rows] = sums
        return whole

    def _lay_out(self, sums: Sequence[Sum | None], x: Tensor) -> Tensor:
        """[nodes, M, N] for the other ranks, in which an absent sum is -0: the one number that changes no other."""
        shape = len(sums), *x.shape
        nodes = self.axis.buffer(shape, x.dtype)
        nodes = x.new_empty(shape) if nodes is None else nodes
        for node, found in zip(nodes, sums, strict=True):
            if found is not None and found.rows.shape[0] == x.shape[0]:
                node.copy_(found.values)
                continue
            node.fill_(-0.0)
            if found is not None:
                node[found.rows] = found.values
        return nodes


def join(left: Sum | None, right: Sum | None) -> Sum | None:
    """left + right where a row is in both, and whichever is there elsewhere."""
    if left is None or right is None:
        return left or right
    if left.rows is right.rows:
        return Sum(left.rows, left.values + right.values)
    rows = torch.unique(torch.cat((left.rows, right.rows)))
    values = left.values.new_full((rows.shape[0], left.values.shape[1]), -0.0)
    values[torch.searchsorted(rows, left.rows)] = left.values
    at = torch.searchsorted(rows, right.rows)
    values[at] = values[at] + right.values
    return Sum(rows, values)


def pieces(own: dict[int, Run], bounds: Sequence[int], width: int) -> dict[int, Run]:
    """Which chunks, of those that ``bounds`` cut all experts' features into, each expert's ``own`` features are."""
    place = {bound: chunk for chunk, bound in enumerate(bounds)}
    return {
        expert: Run(place[expert * width + run.start], place[expert * width + run.stop]) for expert, run in own.items()
    }


def partial_program(tree: Tree, chunks: Run, bounds: Sequence[int]) -> Program:
    """How a run of chunks, whose first feature is the weight's first, sums to its subtrees of ``tree``."""
    start = bounds[chunks.start]
    offsets = tuple(bound - start for bound in bounds[chunks.start : chunks.stop + 1])
    return Program(offsets, tuple(tree.program(chunks)))


def _total(columns: Tensor) -> Tensor:
    """[M, n] → [M, 1], summed by halves."""
    while columns.shape[1] > 1:
        half = (columns.shape[1] + 1) // 2
        left, right = columns[:, :half], columns[:, half:]
        columns = torch.cat((left[:, : right.shape[1]] + right, left[:, right.shape[1] :]), dim=1)
    return columns
