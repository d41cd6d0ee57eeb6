"""Which contiguous run of units each rank owns, and the fixed tree in which partial sums meet: arithmetic only.

Units may be heads, MLP slices, vocabulary rows or layers; this file does not know which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.features import Quantization


class Run(NamedTuple):
    """The half-open range [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Units in the run."""
        return self.stop - self.start

    def scaled(self, factor: int) -> Run:
        """The same run counted in units ``factor`` times smaller."""
        return Run(self.start * factor, self.stop * factor)


def split(count: int, parts: int, weights: Sequence[float] | None = None) -> list[Run]:
    """Cut ``count`` units into ``parts`` contiguous runs, as even as can be or in proportion to ``weights``.

    Without weights the first ``count % parts`` runs are one longer. With weights every run still gets at least one
    unit where ``count >= parts``.
    """
    if weights is None:
        sizes = [count // parts + (index < count % parts) for index in range(parts)]
    else:
        assert len(weights) == parts
        sizes = [1 if count >= parts else 0] * parts
        for _ in range(count - sum(sizes)):  # the unit goes where it is missed most
            wanted = [weight / sum(weights) * count - size for weight, size in zip(weights, sizes, strict=True)]
            sizes[max(range(parts), key=lambda index: wanted[index])] += 1
    starts = [sum(sizes[:index]) for index in range(parts)]
    return [Run(start, start + size) for start, size in zip(starts, sizes, strict=True)]


@dataclass(frozen=True)
class Tree:
    """A sum over ``parts[-1].stop`` chunks whose order no layout can change.

    Chunk numbers form one binary tree: a node [a, b) is the sum of its left half [a, a + ceil(n/2)) and the rest. The
    ranks own the contiguous runs ``parts``. Each adds up the subtrees that it owns whole (its nodes); the nodes of all
    ranks, in order, then finish the tree. An addition program is a postfix list: after pushing item i, add the top two
    of the stack ``merges[i]`` times.
    """

    parts: tuple[Run, ...]

    def nodes(self, rank: int) -> list[Run]:
        """The largest subtrees within the rank's run, left to right."""
        return self.within(self.parts[rank])

    def within(self, run: Run) -> list[Run]:
        """The largest subtrees within any run of chunks, left to right."""
        found: list[Run] = []
        self._walk(Run(0, self.parts[-1].stop), run, found)
        return found

    def merges(self, rank: int) -> list[int]:
        """The rank's own program: additions after each of its chunks; ``len(nodes(rank))`` sums remain."""
        return self.program(self.parts[rank])

    def program(self, run: Run, leaves: Sequence[Run] | None = None) -> list[int]:
        """Additions after each of the run's chunks, or of its ``leaves`` (subtrees that fill it, in order).

        ``len(within(run))`` sums remain.
        """
        leaves = leaves or [Run(chunk, chunk + 1) for chunk in range(run.start, run.stop)]
        found: list[int] = []
        for node in self.within(run):
            found += _postfix(node, [leaf for leaf in leaves if node.start <= leaf.start < node.stop])
        return found

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many nodes each rank holds."""
        return tuple(len(self.nodes(rank)) for rank in range(len(self.parts)))

    @cached_property
    def finish(self) -> tuple[int, ...]:
        """The closing program over the nodes of all ranks in order; one sum remains."""
        nodes = [node for rank in range(len(self.parts)) for node in self.nodes(rank)]
        return tuple(_postfix(Run(0, self.parts[-1].stop), nodes))

    def _walk(self, node: Run, own: Run, found: list[Run]) -> None:
        if own.start <= node.start and node.stop <= own.stop:
            found.append(node)
        elif node.start < own.stop and own.start < node.stop:
            for half in _halves(node):
                self._walk(half, own, found)


def _halves(node: Run) -> tuple[Run, Run]:
    middle = node.start + (node.size + 1) // 2
    return Run(node.start, middle), Run(middle, node.stop)


def _postfix(root: Run, leaves: Sequence[Run]) -> list[int]:
    """Additions after each leaf so that the leaves, in order, sum to ``root`` along the tree."""
    merges = [0] * len(leaves)
    index = {leaf: place for place, leaf in enumerate(leaves)}

    def visit(node: Run) -> int:
        """Place of the node's last leaf; counts the addition that completes the node there."""
        if node in index:
            return index[node]
        left, right = _halves(node)
        visit(left)
        last = visit(right)
        merges[last] += 1
        return last

    visit(root)
    return merges


@dataclass(frozen=True)
class Placement:
    """The slice of one checkpoint tensor that a rank owns; loader, checks and memory plan all derive from it.

    A matrix is [rows = output features, cols = input features]; a vector has rows only.
    """

    tensor: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """The whole tensor's expected shape, as stored."""
    rows: Run
    cols: Run | None = None
    transposed: bool = False
    """Stored as [input, output], as GPT-2 does."""
    index: int | None = None
    """Which matrix of a stack [matrices, output, input]."""
    paired: int = 0
    """If not 0: each group of this many rows is stored (pair, half) where the model wants (half, pair): GGUF's rope."""
    quantize: Quantization | None = None
    """How a matrix's numbers are rounded as they are read; groups are counted along the whole matrix."""

    @property
    def width(self) -> int:
        """Input features of the whole matrix."""
        return self.shape[0] if self.transposed else self.shape[-1]

    @property
    def group(self) -> int:
        """Input features that share a scale."""
        assert self.quantize is not None
        return min(self.quantize.group or self.width, self.width)

    @property
    def groups(self) -> Run:
        """The groups that the columns meet; a group may be cut by them."""
        assert self.cols is not None
        return Run(self.cols.start // self.group, -(-self.cols.stop // self.group))

    @property
    def size(self) -> int:
        """Elements owned."""
        return self.rows.size * (1 if self.cols is None else self.cols.size)


Plan = dict[str, tuple[Placement, ...]]
"""Parameter path in the decoder → the slices that, stacked by rows, make it up."""


def layer_of(parameter: str) -> int | None:
    """The number of the layer that a parameter of a plan is in; None: it is at an end of the model."""
    kind, _, rest = parameter.partition(".")
    return int(rest.partition(".")[0]) if kind == "layers" else None
