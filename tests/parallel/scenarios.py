"""What every transport has to get right, as one rank sees it: threads and processes run the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.kernels.ops import Ops
from shardwise.parallel.axis import Axis
from shardwise.parallel.placement import Tree, split

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def data(shape: Sequence[int], dtype: torch.dtype, *key: int) -> Tensor:
    """Numbers that every rank can work out for any other."""
    generator = torch.Generator().manual_seed(hash(key))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul_(100).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def exchange(axis: Axis) -> None:
    """Ragged shapes, empty ones among them, through many rounds; half of them through the transport's own buffer."""
    assert axis.transport is not None
    for turn in range(12):
        dtype = DTYPES[turn % len(DTYPES)]
        shapes = [((turn + rank) % 3, 1 + turn, 2 + rank) for rank in range(axis.size)]
        mine = data(shapes[axis.rank], dtype, turn, axis.rank)
        buffer = axis.buffer(mine.shape, dtype) if turn % 2 else None
        if buffer is not None:
            assert same(buffer.copy_(mine), mine)
            mine = buffer
        got = axis.transport.exchange(mine, shapes)
        for rank, tensor in enumerate(got):
            assert same(tensor, data(shapes[rank], dtype, turn, rank)), (turn, rank)


def gather(axis: Axis) -> None:
    """Columns of unequal numbers join in rank order, for rows or for a single vector."""
    sizes = [5 + 3 * rank for rank in range(axis.size)]
    for rows in ((), (1,), (4,), (2, 3)):
        parts = [data((*rows, size), torch.float32, len(rows), rank) for rank, size in enumerate(sizes)]
        assert same(axis.all_gather(parts[axis.rank], sizes), torch.cat(parts, dim=-1))


def reduce(axis: Axis) -> None:
    """The tree's sum has the bits that a single rank gets, whoever owns how many of its chunks."""
    ops = Ops(torch.float32)
    for chunks, rows in ((9, 1), (12, 7), (axis.size, 3), (5, 40), (2, 3)):
        every = data((chunks, rows, 33), torch.float32, chunks)
        bias, residual = data((33,), torch.float32, 1), data((rows, 33), torch.float32, 2)
        alone = Tree(tuple(split(chunks, 1)))
        want = ops.finish([_sum(ops, every, alone, 0)[0]], alone.finish, bias, residual)
        assert same(Axis().reduce(ops, _sum(ops, every, alone, 0), alone, bias, residual), want)
        for weights in (None, [1.0 + rank for rank in range(axis.size)]):
            tree = Tree(tuple(split(chunks, axis.size, weights)))
            nodes = _sum(ops, every, tree, axis.rank)
            buffer = axis.buffer(nodes.shape, nodes.dtype)
            if buffer is not None:
                nodes = buffer.copy_(nodes)
            assert same(axis.reduce(ops, nodes, tree, bias, residual), want), (chunks, rows, weights)


def _sum(ops: Ops, chunks: Tensor, tree: Tree, rank: int) -> Tensor:
    """A rank's nodes, as its linear kernel would give them."""
    start, merges = tree.parts[rank].start, tree.merges(rank)
    nodes = [
        ops.finish(list(chunks[node.start : node.stop]), merges[node.start - start : node.stop - start])
        for node in tree.nodes(rank)
    ]
    return torch.stack(nodes) if nodes else chunks[:0]


def mail(axis: Axis) -> None:
    """A pipeline: more tensors than the way holds, of changing sizes, in order; the sender's memory is free at once."""
    for number in range(24):
        shape = (number % 4, 7 + number)
        want = data(shape, torch.float32, number)
        if axis.rank > 0:
            assert same(axis.recv(shape, torch.float32), want), number
        if axis.rank + 1 < axis.size:
            axis.send(want)
            want.zero_()


ALL: dict[str, Callable[[Axis], None]] = {"exchange": exchange, "gather": gather, "reduce": reduce, "mail": mail}
