"""An axis whose sums torch.compile takes into its graphs, as one operation that is opaque to it.

A graph holds tensors and numbers, so the operation is told its axis by number, as torch's own collectives in graphs are
told their group by name. The alternative, to break graphs at every sum, would cut each layer into pieces that are
looked up, guarded and called one by one. Each sum takes the result of the one before, so no compiler can change their
order. Knows nothing of what is summed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from shardwise.parallel.axis import Axis, Finish, Shape
from shardwise.parallel.placement import Tree

AXES: WeakValueDictionary[int, TracedAxis] = WeakValueDictionary()
"""By number. State of the process, as torch's registry of operations is: a compiled graph can be handed nothing else.
A rank's only axis is always number 0, so that graphs kept on disk fit the next start."""
LOCK = threading.Lock()


class TracedAxis(Axis):
    """``axis``, whose sums are finished by ``ops``."""

    def __init__(self, axis: Axis, ops: Finish) -> None:
        super().__init__(axis.rank, axis.size)
        self._axis, self._ops = axis, ops
        _define()
        with LOCK:
            self.number = next(number for number in count() if number not in AXES)
            AXES[self.number] = self

    def buffer(self, shape: Shape, dtype: torch.dtype) -> Tensor | None:
        """See `Axis`."""
        return None if torch.compiler.is_compiling() else self._axis.buffer(shape, dtype)

    def reduce(
        self, ops: Finish, nodes: Tensor, tree: Tree, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """See `Axis`."""
        if not torch.compiler.is_compiling():
            return self._axis.reduce(ops, nodes, tree, bias, residual)
        found: Tensor = torch.ops.shardwise.sum(nodes, bias, residual, tree.counts, tree.finish, self.number)
        return found

    def run(
        self,
        nodes: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        counts: Sequence[int],
        merges: Sequence[int],
    ) -> Tensor:
        """The sum, when a graph has come to it."""
        return self._axis.sum(self._ops, nodes, counts, merges, bias, residual)


def _define() -> None:
    with LOCK:
        if hasattr(torch.ops.shardwise, "sum"):
            return
        schema = "(Tensor nodes, Tensor? bias, Tensor? residual, int[] counts, int[] merges, int axis) -> Tensor"
        made = torch.library.custom_op(
            "shardwise::sum",
            lambda *given: AXES[given[5]].run(*given[:5]),
            mutates_args=(),
            schema=schema,
            tags=(torch.Tag.cudagraph_unsafe,),  # ranks meet on the host
        )
        made.register_fake(lambda nodes, *_: nodes.new_empty(nodes.shape[-2:]))
