"""The self-check of the promise: does each kernel give a row the same bits, whatever else is computed beside it?

Needs no model: random numbers in shapes that divide by nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.config import BLOCK
from shardwise.kernels.ops import Ops, Program, Weight

ROWS = (1, 2, 3, 4, 5, 7, 8, 12, 13, 31, 67)
K, N = 3 * 37, 83
BOUNDS = (0, 37, 74, 111)


class Finding(NamedTuple):
    """One property of one kernel."""

    kernel: str
    property: str
    holds: bool


def check_kernels(ops: Ops, dtype: torch.dtype) -> list[Finding]:
    """Try every property on the CPU with weights of ``dtype``; a finding each."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(ops.compute)

    checks = (_linear, _quantised, _rowwise, _attend)
    return [Finding(*found) for check in checks for found in check(ops, dtype, random)]


Random = Callable[..., Tensor]
Found = Iterator[tuple[str, str, bool]]


def _linear(ops: Ops, dtype: torch.dtype, random: Random) -> Found:
    full = random(N, K)

    def weight(rows: slice, cols: slice) -> Weight:
        part = full[rows, cols]
        made = ops.weight(part.shape[0], part.shape[1], dtype, "cpu")
        ops.write(made, 0, part)
        return made

    yield from _sums(f"linear {str(dtype).removeprefix('torch.')}", ops, random, weight)


def _quantised(ops: Ops, dtype: torch.dtype, random: Random) -> Found:
    """With groups that the chunks, and the shards, cut."""
    for bits, group in ((8, K), (4, 32)):
        limit = 2 ** (bits - 1)
        numbers = (random(N, K) * limit / 3).round().clamp(-limit + 1, limit - 1).to(torch.int8)
        scales = random(8 // bits, N, -(-K // group)).bfloat16()

        def weight(rows: slice, cols: slice, bits: int = bits, group: int = group) -> Weight:
            start, stop, _ = cols.indices(K)
            part = numbers[rows, start:stop]  # noqa: B023
            made = ops.quantised(part.shape[0], part.shape[1], bits, group, start % group, "cpu")
            ops.write(made, 0, (part, scales[:, rows, start // group : -(-stop // group)]))  # noqa: B023
            return made

        yield from _sums(f"linear int{bits}", ops, random, weight)


def _sums(name: str, ops: Ops, random: Random, weight: Callable[[slice, slice], Weight]) -> Found:
    program = Program(BOUNDS, (0, 1, 1))

    def linear(x: Tensor, rows: slice = slice(None), cols: slice = slice(None), by: Program = program) -> Tensor:
        return ops.linear(x[:, cols].contiguous(), weight(rows, cols), by)

    x = random(max(ROWS), K)
    whole = linear(x)
    yield name, "a row does not feel the batch", all(torch.equal(linear(x[:m]), whole[:m]) for m in ROWS)
    pieces = torch.cat([linear(x, rows=slice(start, stop)) for start, stop in ((0, 1), (1, 40), (40, N))], dim=1)
    yield name, "outputs do not feel the shard", torch.equal(pieces, whole)
    left = linear(x, cols=slice(0, BOUNDS[2]), by=Program(BOUNDS[:3], (0, 1)))
    right = linear(x, cols=slice(BOUNDS[2], K), by=Program((0, K - BOUNDS[2]), (0,)))
    yield name, "partial sums meet as on one rank", torch.equal(ops.finish([left, right], (0, 1)), whole)


def _rowwise(ops: Ops, dtype: torch.dtype, random: Random) -> Found:
    x, weight, bias = random(max(ROWS), 2 * K), random(2 * K), random(2 * K)
    kernels: dict[str, Callable[[Tensor], Tensor]] = {
        "rms_norm": lambda rows: ops.rms_norm(rows, weight, 1e-5),
        "layer_norm": lambda rows: ops.layer_norm(rows, weight, bias, 1e-5),
        "silu_mul": lambda rows: ops.activate("silu_mul", rows),
        "gelu_tanh": lambda rows: ops.activate("gelu_tanh", rows),
        "gelu": lambda rows: ops.activate("gelu", rows),
        "relu": lambda rows: ops.activate("relu", rows),
        "head_norm": lambda rows: ops.head_norm(rows, weight[:37], bias[:37], 2, 1e-5),
    }
    for name, kernel in kernels.items():
        whole = kernel(x)
        yield name, "a row does not feel the batch", all(torch.equal(kernel(x[:m]), whole[:m]) for m in ROWS)
        if "norm" not in name:
            halves = torch.cat([x[:, :50], x[:, K : K + 50]], 1) if name == "silu_mul" else x[:, :50].contiguous()
            yield name, "features do not feel the shard", torch.equal(kernel(halves), whole[:, :50])


def _attend(ops: Ops, dtype: torch.dtype, random: Random) -> Found:
    length, dim, heads, kv = 5 * BLOCK + 3, 10, 6, 2
    qkv = random(length, (heads + 2 * kv) * dim)
    angles = random(length, dim // 2)
    every = torch.arange(length, dtype=torch.int32)
    blocks = torch.tensor([[3, 1, 4, 0, 5, 2]], dtype=torch.int32)
    slots = blocks[0, every // BLOCK] * BLOCK + every % BLOCK

    def attend(bounds: list[int]) -> Tensor:
        keys, values = ops.cache(6, kv, dim, "cpu")
        keys.fill_(torch.nan)  # what a step must never read
        values.fill_(torch.nan)
        found = []
        for start, stop in zip(bounds, bounds[1:], strict=False):
            rows = slice(start, stop)
            q = ops.rotate_write(
                qkv[rows].clone(), angles.cos(), angles.sin(), every[rows], slots[rows], keys, values, heads
            )
            starts = torch.tensor([0, stop - start], dtype=torch.int32)
            found.append(ops.attend(q, keys, values, starts, blocks, every[rows], (0, 3, heads), dim**-0.5))
        return torch.cat(found)

    whole = attend([0, length])
    yield "attend", "a row does not feel its chunk", torch.equal(attend([0, 1, 8, 24, 25, 70, length]), whole)
    yield "attend", "what a row may not see does not matter", bool(whole.isfinite().all())
