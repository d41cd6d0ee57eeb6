"""Rotary position tables with the field's frequency scalings.

Frequencies and angles are rounded to float32 as Hugging Face transformers rounds them, since that is what models were
trained and tested with; sine and cosine are then exact to the compute dtype. The table has the same bits on every rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.models.config import Rope

PIECE = 4096
"""Positions whose angles are worked out at once, in float64: a table may be as large as the memory for its own."""


class RopeTable:
    """cos and sin, each [positions, dim / 2] in the compute dtype, shared by all layers of a stage."""

    factors: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, rope: Rope, positions: int, compute: torch.dtype, device: torch.device) -> None:
        self.rope = rope
        self.factors = torch.ones(rope.dim // 2)
        empty = torch.empty(positions, rope.dim // 2, dtype=compute, device=device)
        self.cos = empty
        self.sin = torch.empty_like(empty)
        self.fill()

    def fill(self) -> None:
        """(Re)compute the table, after ``factors`` was loaded for instance."""
        frequencies, scale = inverse_frequencies(self.rope)
        import numpy as np

        for start in range(0, self.cos.shape[0], PIECE):
            cos, sin = self.cos[start : start + PIECE], self.sin[start : start + PIECE]
            positions = torch.arange(start, start + cos.shape[0], dtype=torch.float32)
            angles = positions[:, None] * (frequencies / self.factors)
            wide = angles.double().numpy()  # numpy: one thread and one code path for every element, whatever the shape
            cos.copy_(torch.from_numpy(np.cos(wide)) * scale)
            sin.copy_(torch.from_numpy(np.sin(wide)) * scale)


def inverse_frequencies(rope: Rope) -> tuple[Tensor, float]:
    """Float32 [dim / 2] angle per position, and the factor on cos and sin.

    Formulas: Su et al. 2104.09864 (default), Chen et al. 2306.15595 (linear), Llama 3.1's release (llama3), Peng et al.
    2309.00071 (yarn).
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).to(torch.float32) / rope.dim
    base = 1.0 / (rope.theta**exponents)
    if rope.scaling in ("default", "factors"):
        return base, 1.0
    if rope.scaling == "linear":
        return base / rope.factor, 1.0
    if rope.scaling == "llama3":
        return _llama3(rope, base), 1.0
    assert rope.scaling == "yarn"
    return _yarn(rope, base)


def _llama3(rope: Rope, base: Tensor) -> Tensor:
    """Long waves are slowed by the factor, short ones kept, and those between blended."""
    wavelength = 2 * math.pi / base
    slow = rope.original_positions / rope.low_freq_factor
    fast = rope.original_positions / rope.high_freq_factor
    scaled = torch.where(wavelength > slow, base / rope.factor, base)
    blend = (rope.original_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smoothed = (1 - blend) * scaled / rope.factor + blend * scaled
    between = ~(wavelength < fast) & ~(wavelength > slow)
    return torch.where(between, smoothed, scaled)


def _yarn(rope: Rope, base: Tensor) -> tuple[Tensor, float]:
    """Dimensions that turn often enough are kept, slow ones interpolated, with a ramp between."""

    def dimension(rotations: float) -> float:
        return rope.dim * math.log(rope.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return base / rope.factor * (1 - kept) + base * kept, rope.attention_factor
