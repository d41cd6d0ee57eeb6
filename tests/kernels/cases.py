"""Inputs that several kernel tests share."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.config import BLOCK
from shardwise.kernels.ops import Ops, Weight


def fma_of(dtype: torch.dtype) -> Callable[[float, float, float], float]:
    """The C library's fused multiply-add of these numbers."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    fma, number = (libm.fmaf, ctypes.c_float) if dtype == torch.float32 else (libm.fma, ctypes.c_double)
    fma.argtypes, fma.restype = [number] * 3, number
    return fma


def pack(ops: Ops, matrix: Tensor, dtype: torch.dtype) -> Weight:
    weight = ops.weight(matrix.shape[0], matrix.shape[1], dtype, "cpu")
    ops.write(weight, 0, matrix)
    return weight


def pack_whole(
    ops: Ops, numbers: Tensor, scales: Tensor, group: int, rows: slice = slice(None), cols: slice = slice(None)
) -> Weight:
    """A slice of quantised [N, K] numbers, 8 bits if they have no offsets, with the scales of the groups it meets."""
    start, stop, _ = cols.indices(numbers.shape[1])
    part = numbers[rows, start:stop]
    own = scales[:, rows, start // group : -(-stop // group)]
    weight = ops.quantised(*part.shape, 12 - 4 * scales.shape[0], group, start % group, "cpu")
    ops.write(weight, 0, (part, own))
    return weight


@dataclass
class Context:
    """Sequences of given lengths whose last rows attend; what no token ever filled is NaN."""

    q: Tensor
    keys: Tensor
    values: Tensor
    starts: Tensor
    table: Tensor
    positions: Tensor
    groups: tuple[int, ...]
    slopes: Tensor | None = None
    window: int | None = None

    def attend(self, ops: Ops) -> Tensor:
        scale = self.q.shape[2] ** -0.5
        where = self.starts, self.table, self.positions
        return ops.attend(self.q, self.keys, self.values, *where, self.groups, scale, self.slopes, self.window)


def context(
    ops: Ops, groups: Sequence[int], head_dim: int, lengths: Sequence[int], rows: Sequence[int], wide: int = 0
) -> Context:
    """Sequences of ``lengths`` keys, in blocks strewn over the cache, whose last ``rows`` rows are the queries."""
    generator = torch.Generator().manual_seed(7)
    heads, key_heads = groups[-1], len(groups) - 1
    num_blocks = [-(-length // BLOCK) for length in lengths]
    keys, values = ops.cache(sum(num_blocks) + 1, key_heads, head_dim, "cpu")
    keys.fill_(torch.nan)
    values.fill_(torch.nan)
    strewn = torch.randperm(sum(num_blocks) + 1, generator=generator).int()
    table = torch.full((len(lengths), max(num_blocks) + wide), -1, dtype=torch.int32)
    queries, positions, starts, used = [], [], [0], 0
    for index, (length, count) in enumerate(zip(lengths, rows, strict=True)):
        blocks = strewn[used : used + num_blocks[index]]
        used += num_blocks[index]
        table[index, : len(blocks)] = blocks
        place = torch.arange(length, dtype=torch.int32)
        slots = blocks[place.long() // BLOCK] * BLOCK + place % BLOCK
        qkv = torch.randn(length, (heads + 2 * key_heads) * head_dim, generator=generator, dtype=torch.float64)
        q = ops.rotate_write(qkv.to(ops.compute), None, None, place, slots, keys, values, heads)
        queries.append(q[length - count :])
        positions.append(place[length - count :])
        starts.append(starts[-1] + count)
    return Context(
        torch.cat(queries),
        keys,
        values,
        torch.tensor(starts, dtype=torch.int32),
        table,
        torch.cat(positions),
        tuple(groups),
    )
