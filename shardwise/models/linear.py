"""The two linear layers in which tensor parallelism shows, and the two vocabulary ends. Formats and layouts come in."""

from __future__ import annotations

from torch import Tensor

from shardwise.kernels.ops import Ops, Program, Weight
from shardwise.models.shard import Chunks, Shard
from shardwise.parallel.axis import Axis
from shardwise.parallel.placement import Run, Tree


class Linear:
    """This rank's run of output features (column-parallel): each is a whole sum, so nothing is exchanged."""

    bias: Tensor | None

    def __init__(self, ops: Ops, weight: Weight, bias: Tensor | None) -> None:
        self.ops = ops
        self.weight = weight
        self.bias = bias
        self.program = Program.whole(weight.cols)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] → [M, own rows]."""
        return self.ops.linear(x, self.weight, self.program, self.bias)


class RowLinear:
    """This rank's run of input features (row-parallel): partial sums meet in the model's fixed tree."""

    def __init__(self, ops: Ops, weight: Weight, bias: Tensor | None, chunks: Chunks, axis: Axis) -> None:
        self.ops = ops
        self.weight = weight
        self.bias = bias
        self.program = Program(chunks.bounds, tuple(chunks.tree.merges(axis.rank)))
        self.tree = chunks.tree
        self.axis = axis

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """[M, own K], [M, N] → [M, N]: (the sum over all ranks + bias) + residual, the same on every rank."""
        if self.axis.size == 1:
            return self.ops.linear(x, self.weight, self.program, self.bias, residual)
        count = self.program.num_nodes
        shape = (count, x.shape[0], self.weight.rows) if count > 1 else (x.shape[0], self.weight.rows)
        nodes = self.ops.linear(x, self.weight, self.program, out=self.axis.buffer(shape, x.dtype))
        return self.axis.reduce(self.ops, nodes, self.tree, self.bias, residual)


class Embedding:
    """Vocabulary-parallel lookup: the owner of an id contributes its row, the others zeros."""

    def __init__(self, ops: Ops, weight: Weight, positions: Weight | None, shard: Shard, axis: Axis) -> None:
        self.ops = ops
        self.weight = weight
        self.positions = positions
        self.own = shard.vocab
        self.tree = Tree(tuple(Run(rank, rank + 1) for rank in range(axis.size)))
        self.axis = axis

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[M] int64, [M] int32 → [M, hidden]."""
        if self.axis.size == 1:
            x = self.ops.take(self.weight, ids) + 0.0  # as the sum over ranks would: it turns -0 into 0
        else:
            local = ids - self.own.start
            outside = (local < 0) | (local >= self.own.size)
            rows = self.ops.take(self.weight, local.masked_fill(outside, 0))
            x = self.axis.reduce(self.ops, rows.masked_fill_(outside[:, None], 0.0), self.tree)
        return x if self.positions is None else x + self.ops.take(self.positions, positions.long())
