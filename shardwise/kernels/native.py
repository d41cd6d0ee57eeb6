"""The operations as C kernels, called through ctypes on the data pointers of CPU tensors.

Only translates: shapes and addresses in, tensors out. What is computed, and in which order, is said in the C files. A
call costs a few microseconds, so whatever does not change from call to call is prepared once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import build
from shardwise.kernels.noise import stream
from shardwise.kernels.ops import Ops, Part, Program, Weight, parts

PANEL = 32
"""Output features per panel of packed weights (PANEL in vector.h)."""
NIBBLES = 8
"""Columns of 4-bit numbers in a word (NIBBLES in linear.c)."""
_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.int8: 4, torch.int32: 5}
_KINDS = {"silu_mul": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
_NO_WINDOW = 2**63 - 1
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "d": ctypes.c_double}
_TYPED = {  # arguments of the functions that exist per type of activation; p: pointer, i: int, l: int64, d: double
    "linear": "ipllpllpplppp",
    "finish": "plplllppp",
    "rms_norm": "pplldp",
    "layer_norm": "ppplldp",
    "head_norm": "ppplllldp",
    "activate": "ipllp",
    "rotate_write": "ppplpplllllppp",
    "attend": "pppplplpplllldplp",
}
_UNTYPED = {"pack": "iplllp", "take": "iplplp", "gumbel": "plllp", "exp": "plp"}


class NativeOps(Ops):
    """The C kernels. Tensors live on the CPU; ``origin`` says where the library came from.

    Raises build.BuildError where there is no library that can be loaded, and none can be compiled.
    """

    name = "native"

    def __init__(self, compute: torch.dtype) -> None:
        super().__init__(compute)
        library, self.origin = build.load()
        suffix = "_f32" if compute == torch.float32 else "_f64"
        typed = {name: _function(library, f"sw_{name}{suffix}", letters) for name, letters in _TYPED.items()}
        self._linear, self._finish, self._attend = typed["linear"], typed["finish"], typed["attend"]
        self._rms_norm, self._layer_norm, self._activate = typed["rms_norm"], typed["layer_norm"], typed["activate"]
        self._rotate_write, self._head_norm = typed["rotate_write"], typed["head_norm"]
        self._pack, self._take, self._gumbel, self._exp = (
            _function(library, f"sw_{name}", letters) for name, letters in _UNTYPED.items()
        )
        self._programs: dict[int, tuple[Program, int, Any]] = {}
        self._groups: dict[tuple[int, ...], Any] = {}
        self._closings: dict[tuple[int, ...], Any] = {}

    def weight(self, rows: int, cols: int, dtype: torch.dtype, device: str | torch.device = "cpu") -> Weight:
        """A zero matrix, in panels [ceil(rows / 32), cols, 32]; surplus rows stay zero."""
        if (dtype == torch.float64) != (self.compute == torch.float64) or not dtype.is_floating_point:
            raise ValueError(f"weights of {dtype} do not go with activations of {self.compute}")
        return Weight(torch.zeros(-(-rows // PANEL), cols, PANEL, dtype=dtype, device=device), rows, cols)

    def quantised(  # noqa: D102
        self, rows: int, cols: int, bits: int, group: int, phase: int, device: str | torch.device = "cpu"
    ) -> Weight:
        panels, width, dtype = -(-rows // PANEL), cols, torch.int8
        if bits == 4:
            width, dtype = -(-cols // NIBBLES), torch.int32
        shape = 1 if bits == 8 else 2, panels, -(-(phase + cols) // group), PANEL
        scales = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        return Weight(torch.zeros(panels, width, PANEL, dtype=dtype, device=device), rows, cols, scales, group, phase)

    def write(self, weight: Weight, row: int, part: Part) -> None:  # noqa: D102
        data = weight.data
        if weight.scales is not None:
            part, scales = parts(weight, part)
            for packed, values in zip(weight.scales, scales, strict=True):
                self._write(packed, weight.num_groups, row, values)
        else:
            assert isinstance(part, Tensor)
            assert part.shape[1] == weight.cols
            part = part.to(data.dtype)
        assert 0 <= row <= weight.rows - part.shape[0]
        self._write(data, weight.cols, row, part)

    def _write(self, data: Tensor, cols: int, row: int, part: Tensor) -> None:
        part = part.contiguous()
        self._pack(_FORMATS[data.dtype], data.data_ptr(), cols, row, part.shape[0], part.data_ptr())

    def take(self, weight: Weight, ids: Tensor) -> Tensor:  # noqa: D102
        data, ids = weight.data, ids.contiguous()
        rows = self._rows(data, weight.cols, ids).to(self.compute)
        if weight.scales is None:
            return rows
        group = (torch.arange(weight.cols) + weight.phase) // weight.group
        scales = [self._rows(each, weight.num_groups, ids).to(self.compute)[:, group] for each in weight.scales]
        return rows * scales[0] if len(scales) == 1 else rows * scales[0] + scales[1]

    def _rows(self, data: Tensor, cols: int, ids: Tensor) -> Tensor:
        out = torch.empty(ids.shape[0], cols, dtype=torch.int8 if data.dtype == torch.int32 else data.dtype)
        self._take(_FORMATS[data.dtype], data.data_ptr(), cols, ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out

    def linear(  # noqa: D102
        self,
        x: Tensor,
        weight: Weight,
        program: Program,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        prepared = self._programs.get(id(program))
        if prepared is None or prepared[0] is not program:
            prepared = self._prepare(program)
        data, outputs, cols, scales, group, phase = weight
        rows = x.shape[0]
        if out is None:
            nodes = prepared[2][1]
            out = x.new_empty(rows, outputs) if nodes == 1 else x.new_empty(nodes, rows, outputs)
        failed = self._linear(
            _FORMATS[data.dtype],
            data.data_ptr(),
            outputs,
            cols,
            None if scales is None else scales.data_ptr(),
            group,
            phase,
            prepared[1],
            _address(x),
            rows,
            None if bias is None else _address(bias),
            None if residual is None else _address(residual),
            out.data_ptr(),
        )
        if failed:
            raise MemoryError(f"no memory to lay out {rows} rows of {cols}")
        return out

    def finish(  # noqa: D102
        self,
        nodes: Sequence[Tensor],
        merges: Sequence[int],
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        rows, outputs = nodes[0].shape
        out = nodes[0].new_empty(rows, outputs)
        prepared = self._closings.get(merges := tuple(merges))
        if prepared is None:
            count = len(merges)
            prepared = (ctypes.c_void_p * count, count, (ctypes.c_int64 * count)(*merges), _depth(merges))
            self._closings[merges] = prepared
        addresses, count, program, depth = prepared
        self._finish(
            addresses(*map(_address, nodes)),
            count,
            program,
            depth,
            rows,
            outputs,
            None if bias is None else _address(bias),
            None if residual is None else _address(residual),
            out.data_ptr(),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: D102
        rows, cols = x.shape
        out = x.new_empty(rows, cols)
        self._rms_norm(_address(x), _address(weight), rows, cols, eps, out.data_ptr())
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:  # noqa: D102
        rows, cols = x.shape
        out = x.new_empty(rows, cols)
        self._layer_norm(_address(x), _address(weight), _address(bias), rows, cols, eps, out.data_ptr())
        return out

    def head_norm(  # noqa: D102
        self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, num_heads: int, eps: float
    ) -> Tensor:
        rows, cols = qkv.shape
        dims = q_weight.shape[0]
        out = qkv.new_empty(rows, cols)
        sizes = rows, num_heads, (cols // dims - num_heads) // 2, dims
        self._head_norm(_address(qkv), _address(q_weight), _address(k_weight), *sizes, eps, out.data_ptr())
        return out

    def activate(self, kind: str, x: Tensor) -> Tensor:  # noqa: D102
        rows, cols = x.shape
        cols = cols // 2 if kind == "silu_mul" else cols
        out = x.new_empty(rows, cols)
        self._activate(_KINDS[kind], _address(x), rows, cols, out.data_ptr())
        return out

    def rotate_write(  # noqa: D102
        self,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        positions: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        num_heads: int,
    ) -> Tensor:
        rows = qkv.shape[0]
        _, num_kv_heads, head_dim, _ = keys.shape
        q = qkv.new_empty(rows, num_heads, head_dim)
        self._rotate_write(
            _address(qkv),
            None if cos is None else _address(cos),
            None if sin is None else _address(sin),
            0 if cos is None else cos.shape[1],
            _address(positions),
            _address(slots),
            rows,
            num_heads,
            num_kv_heads,
            head_dim,
            values.shape[3],
            keys.data_ptr(),
            values.data_ptr(),
            q.data_ptr(),
        )
        return q

    def attend(  # noqa: D102
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        starts: Tensor,
        table: Tensor,
        positions: Tensor,
        groups: Sequence[int],
        scale: float,
        slopes: Tensor | None = None,
        window: int | None = None,
    ) -> Tensor:
        bounds = self._groups.get(groups := tuple(groups))
        if bounds is None:
            bounds = self._groups[groups] = (ctypes.c_int64 * len(groups))(*groups)
        rows, num_heads, head_dim = q.shape
        out = q.new_empty(rows, num_heads, head_dim)
        sequences, width = table.shape
        failed = self._attend(
            _address(q),
            keys.data_ptr(),
            values.data_ptr(),
            _address(starts),
            sequences,
            _address(table),
            width,
            _address(positions),
            bounds,
            num_heads,
            len(groups) - 1,
            head_dim,
            values.shape[3],
            scale,
            None if slopes is None else _address(slopes),
            window or _NO_WINDOW,
            out.data_ptr(),
        )
        if failed:
            raise MemoryError("no memory for the scores of attention")
        return out

    def gumbel(self, seeds: Sequence[int], positions: Sequence[int], first: int, count: int) -> Tensor:  # noqa: D102
        streams = (ctypes.c_uint64 * len(seeds))(*map(stream, seeds, positions))
        out = torch.empty(len(seeds), count, dtype=torch.float64)
        self._gumbel(streams, len(seeds), first, count, out.data_ptr())
        return out

    def exp(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x.contiguous()
        out = torch.empty_like(x)
        self._exp(x.data_ptr(), x.numel(), out.data_ptr())
        return out

    def _prepare(self, program: Program) -> tuple[Program, int, Any]:
        """The program as C's struct program, kept by identity: hashing its numbers would cost more than the call."""
        chunks, nodes = len(program.merges), program.num_nodes
        assert len(program.bounds) == chunks + 1
        numbers = (chunks, nodes, _depth(program.merges), 0, 0, *program.bounds, *program.merges)
        array = (ctypes.c_int64 * len(numbers))(*numbers)
        address = ctypes.addressof(array)
        array[3], array[4] = address + 5 * 8, address + (5 + chunks + 1) * 8
        if len(self._programs) >= 4096:  # programs made anew for every call must not pile up
            self._programs.clear()
        prepared = self._programs[id(program)] = (program, address, array)
        return prepared


def _function(library: ctypes.CDLL, name: str, signature: str) -> Any:
    function = getattr(library, name)
    function.argtypes = [_TYPES[letter] for letter in signature]
    function.restype = ctypes.c_int
    return function


def _address(tensor: Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _depth(merges: Sequence[int]) -> int:
    """The greatest height of the stack while the program runs."""
    height = depth = 0
    for count in merges:
        height += 1
        depth = max(depth, height)
        height -= count
        assert height >= 1
    return depth
