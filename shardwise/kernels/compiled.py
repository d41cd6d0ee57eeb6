"""The operations as torch.compile and torch.export can trace them: custom ops with fakes, opaque to a compiler.

The native kernels are opaque as a whole, so a compiled graph has their very bits. Of the torch twins only attention is,
whose loops depend on the batch: a compiler may fuse the others, which is what it is for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.ops import Ops, Program, Weight

DEFINING = threading.Lock()
"""torch's registry of operations is one for the process, and ranks may be threads of it."""


class CompiledOps(Ops):
    """``ops`` behind custom ops ``torch.ops.shardwise_<name>_<compute>.*``; methods and contracts are those of `Ops`.

    Only while something is traced: else all goes straight to ``ops``, since dispatch would cost more than the small
    kernels do. What happens before a model runs (weight, write, cache) and after it (gumbel, exp) is never traced.
    """

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops.compute)
        self.name, self._ops, self._program = ops.name, ops, lru_cache(Program)
        self.weight, self.quantised, self.write = ops.weight, ops.quantised, ops.write  # type: ignore[method-assign]
        self.cache = ops.cache  # type: ignore[method-assign]
        self.gumbel, self.exp = ops.gumbel, ops.exp  # type: ignore[method-assign]
        with DEFINING:
            self._define_all()

    def _define_all(self) -> None:
        ops = self._ops
        weight = "Tensor data, int rows, int cols, Tensor? scales, int group, int phase"
        close = "Tensor? bias, Tensor? residual"
        self._take = self._define("take", f"({weight}, Tensor ids) -> Tensor", self._take_now, self._fake_take)
        schema = f"(Tensor x, {weight}, int[] bounds, int[] merges, {close}) -> Tensor"
        self._linear = self._define("linear", schema, self._linear_now, _fake_linear)
        schema = f"(Tensor[] nodes, int[] merges, {close}) -> Tensor"
        self._finish = self._define("finish", schema, ops.finish, lambda nodes, *_: torch.empty_like(nodes[0]))
        schema = "(Tensor x, Tensor weight, float eps) -> Tensor"
        self._rms_norm = self._define("rms_norm", schema, ops.rms_norm, _fake_same)
        schema = "(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor"
        self._layer_norm = self._define("layer_norm", schema, ops.layer_norm, _fake_same)
        schema = "(Tensor qkv, Tensor q_weight, Tensor k_weight, int num_heads, float eps) -> Tensor"
        self._head_norm = self._define("head_norm", schema, ops.head_norm, _fake_same)
        self._activate = self._define("activate", "(str kind, Tensor x) -> Tensor", ops.activate, _fake_activate)
        schema = (
            "(Tensor qkv, Tensor? cos, Tensor? sin, Tensor positions, Tensor slots, Tensor(a!) keys, "
            "Tensor(b!) values, int num_heads) -> Tensor"
        )
        self._rotate_write = self._define("rotate_write", schema, self._rotate_write_now, _fake_rotate_write)
        schema = (
            "(Tensor q, Tensor keys, Tensor values, Tensor starts, Tensor table, Tensor positions, int[] groups, "
            "float scale, Tensor? slopes=None, int? window=None) -> Tensor"
        )
        unsafe = (torch.Tag.cudagraph_unsafe,)  # the twin reads lengths back to the host
        self._attend = self._define("attend", schema, ops.attend, _fake_same, unsafe)

    def _define(
        self,
        name: str,
        schema: str,
        now: Callable[..., Tensor],
        fake: Callable[..., Tensor],
        tags: Sequence[torch.Tag] = (),
    ) -> Any:
        """The operation of this name, which the process has once: graphs that were made with it go on using it."""
        space = f"shardwise_{self.name}_{str(self.compute).removeprefix('torch.')}"
        if not hasattr(getattr(torch.ops, space), name):
            mutates = [part.split()[-1] for part in schema.split(",") if "!)" in part]
            made = torch.library.custom_op(
                f"{space}::{name}", lambda *args: now(*args), mutates_args=mutates, schema=schema, tags=tags
            )
            made.register_fake(fake)
        return getattr(getattr(torch.ops, space), name)

    @property
    def _opaque(self) -> bool:
        return self.name == "native" and torch.compiler.is_compiling()

    def _take_now(self, *args: Any) -> Tensor:
        *weight, ids = args
        return self._ops.take(Weight(*weight), ids)

    def _fake_take(self, data: Tensor, rows: int, cols: int, *args: Any) -> Tensor:
        return data.new_empty(args[-1].shape[0], cols, dtype=self.compute)

    def _linear_now(self, x: Tensor, *args: Any) -> Tensor:
        *weight, bounds, merges, bias, residual = args
        program = self._program(tuple(bounds), tuple(merges))
        return self._ops.linear(x, Weight(*weight), program, bias, residual)

    def _rotate_write_now(self, *args: Any) -> Tensor:
        q = self._ops.rotate_write(*args)
        # The twin returns a part of its input, which a custom op may not.
        return q.clone(memory_format=torch.contiguous_format) if self.name == "torch" else q

    def take(self, weight: Weight, ids: Tensor) -> Tensor:  # noqa: D102
        return self._take(*weight, ids) if self._opaque else self._ops.take(weight, ids)

    def linear(  # noqa: D102
        self,
        x: Tensor,
        weight: Weight,
        program: Program,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if not self._opaque:
            return self._ops.linear(x, weight, program, bias, residual, out)
        result: Tensor = self._linear(x, *weight, *program, bias, residual)
        return result if out is None else out.copy_(result)

    def finish(  # noqa: D102
        self,
        nodes: Sequence[Tensor],
        merges: Sequence[int],
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        return (self._finish if self._opaque else self._ops.finish)(nodes, merges, bias, residual)

    def rms_norm(self, *args: Any) -> Tensor:  # noqa: D102
        return (self._rms_norm if self._opaque else self._ops.rms_norm)(*args)

    def layer_norm(self, *args: Any) -> Tensor:  # noqa: D102
        return (self._layer_norm if self._opaque else self._ops.layer_norm)(*args)

    def head_norm(self, *args: Any) -> Tensor:  # noqa: D102
        return (self._head_norm if self._opaque else self._ops.head_norm)(*args)

    def activate(self, *args: Any) -> Tensor:  # noqa: D102
        return (self._activate if self._opaque else self._ops.activate)(*args)

    def rotate_write(self, *args: Any) -> Tensor:  # noqa: D102
        return (self._rotate_write if self._opaque else self._ops.rotate_write)(*args)

    def attend(self, *args: Any) -> Tensor:  # noqa: D102
        traced = torch.compiler.is_compiling()
        return (self._attend if traced else self._ops.attend)(*args)


def _fake_same(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_linear(x: Tensor, data: Tensor, rows: int, *args: Any) -> Tensor:
    *_, bounds, merges, _, _ = args
    nodes = Program(tuple(bounds), tuple(merges)).num_nodes
    return x.new_empty(*([nodes] if nodes > 1 else []), x.shape[0], rows)


def _fake_activate(kind: str, x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2 if kind == "silu_mul" else x.shape[1])


def _fake_rotate_write(qkv: Tensor, cos: Any, sin: Any, positions: Any, slots: Any, keys: Tensor, *rest: Any) -> Tensor:
    return qkv.new_empty(qkv.shape[0], rest[-1], keys.shape[2])
