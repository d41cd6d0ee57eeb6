"""One axis of the mesh as this process sees it: its rank, its size, and collectives made of one primitive, `exchange`.

Knows tensors and the order in which partial sums meet; refuses to know models, processes and how bytes travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwise.parallel.placement import Tree

Shape = Sequence[int]


class Transport(Protocol):
    """How the tensors of one rank reach the other ranks of its axis.

    All ranks make the same calls in the same order. Shapes come from the step plan, so every rank knows them all and
    none is ever sent. A missing peer raises TimeoutError naming the axis and the ranks that did not come; after that
    the transport is of no more use.
    """

    def buffer(self, shape: Shape, dtype: torch.dtype) -> Tensor | None:
        """Memory in which the next `exchange` finds its tensor without a copy; None when any memory is as good."""

    def exchange(self, mine: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """Every rank's tensor, in rank order; ``shapes[r]`` is rank r's, the dtype is one.

        The results are read-only and, like ``mine``, must not be touched any more once the rank makes its next call.
        """

    def send(self, tensor: Tensor) -> None:
        """Hand ``tensor`` to rank + 1; it may be reused at once. Several may be on their way."""

    def recv(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The oldest tensor sent by rank - 1, in memory of its own."""

    def close(self) -> None:
        """Let go of what the transport holds; harmless when repeated."""


class Finish(Protocol):
    """What `Axis.reduce` needs of the kernels."""

    def finish(
        self, nodes: Sequence[Tensor], merges: Sequence[int], bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Add up ``nodes`` [M, N] by the program ``merges``, then add the bias [N] and the residual [M, N]."""


@dataclass
class Axis:
    """A rank's place on one axis. Where it is alone every collective is the identity; else it needs a transport.

    A rank may be built before its peers are there; they ``join`` before the first collective.
    """

    rank: int = 0
    size: int = 1
    transport: Transport | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert self.transport is None or self.size > 1

    def join(self, transport: Transport | None) -> None:
        """The way to the peers, which comes once."""
        assert self.transport is None
        assert (transport is None) == (self.size == 1)
        self.transport = transport

    def buffer(self, shape: Shape, dtype: torch.dtype) -> Tensor | None:
        """Memory for what the next collective will exchange, or None: then let the operation allocate its result."""
        return None if self.transport is None else self.transport.buffer(shape, dtype)

    def reduce(
        self, ops: Finish, nodes: Tensor, tree: Tree, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Finish a sum spread over the ranks: ``(sum + bias) + residual`` [M, N], with the same bits on every rank.

        ``nodes`` [n, M, N] are this rank's own subtrees of ``tree``, in order; [M, N] will do for a single one.
        """
        return self.sum(ops, nodes, tree.counts, tree.finish, bias, residual)

    def sum(
        self,
        ops: Finish,
        nodes: Tensor,
        counts: Sequence[int],
        merges: Sequence[int],
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        """`reduce`, of a tree of which every rank holds so many nodes and which ``merges`` closes."""
        shape = nodes.shape[-2:]
        shares = self._exchange(nodes.view(counts[self.rank], *shape), [(count, *shape) for count in counts])
        return ops.finish([node for share in shares for node in share.unbind()], merges, bias, residual)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Join the ranks' ``x`` [..., sizes[rank]] along the last dim, in rank order: [..., sum(sizes)]."""
        if self.size == 1:
            return x
        return torch.cat(self._exchange(x, [(*x.shape[:-1], size) for size in sizes]), dim=-1)

    def send(self, tensor: Tensor) -> None:
        """Hand ``tensor`` to the next rank of the axis."""
        assert self.transport is not None
        assert self.rank + 1 < self.size, "the last rank has nobody to send to"
        self.transport.send(tensor)

    def recv(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The next tensor from the previous rank of the axis."""
        assert self.transport is not None
        assert self.rank > 0, "the first rank has nobody to receive from"
        return self.transport.recv(shape, dtype)

    def close(self) -> None:
        """Close the transport, if there is one."""
        if self.transport is not None:
            self.transport.close()

    def _exchange(self, mine: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        assert tuple(mine.shape) == tuple(shapes[self.rank]), "a rank's tensor must have the shape the others expect"
        if self.size == 1:
            return [mine]
        assert self.transport is not None
        return self.transport.exchange(mine, shapes)


def missing(axis: str, ranks: Sequence[int]) -> TimeoutError:
    """The error for a call on ``axis`` that waited in vain for ``ranks``."""
    names = ", ".join(map(str, ranks)) or "(all came, too late)"
    return TimeoutError(f"{axis} axis: waited in vain for rank {names}")
