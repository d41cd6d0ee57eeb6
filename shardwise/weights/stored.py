"""Which tensors of a checkpoint hold a quantised matrix, and of which shapes: arithmetic, no torch.

A matrix T is T [output, input] int8, or [output, ceil(input / 2)] uint8 of two 4-bit numbers each, whatever way it lay
before; beside it are T.scales [output, groups] bfloat16 and, with 4 bits, T.offsets.
"""

from __future__ import annotations

from shardwise.parallel.placement import Placement

SCALES, OFFSETS = ".scales", ".offsets"
FORMATS = {8: "I8", 4: "U8"}
"""Bits → format of the tensor of numbers."""


def stored_shapes(placement: Placement) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors that hold the matrix of ``placement``, by name."""
    assert placement.quantize is not None
    name, bits = placement.tensor, placement.quantize.bits
    rows = placement.shape[1] if placement.transposed else placement.shape[-2]
    groups = -(-placement.width // placement.group)
    numbers: dict[str, tuple[int, ...]] = {name: (rows, placement.width if bits == 8 else -(-placement.width // 2))}
    return numbers | {name + kind: (rows, groups) for kind in ((SCALES,) if bits == 8 else (SCALES, OFFSETS))}
