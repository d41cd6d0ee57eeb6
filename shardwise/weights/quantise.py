"""Rounding matrices to whole numbers that share scales, and how checkpoints hold those: arithmetic on rows of groups.

A row is rounded by its own numbers alone, a group at a time, so any slice of whole groups comes out alike. Scales and
offsets are bfloat16 and chosen before the numbers, which make up for their rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def quantise(part: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Round ``part`` [r, K], any float dtype, whose first column begins a group: numbers [r, K] int8, and scales.

    8 bits: scale * number, -127 to 127, scales [1, r, groups] bfloat16 such that the largest fits. 4 bits: scale *
    number + offset, -8 to 7, scales and offsets [2, r, groups], which span the group from its least to its largest.
    """
    rows, cols = part.shape
    part = part.float()
    if cols % group:  # the last column once more changes no least and no largest
        part = F.pad(part[None], (0, -cols % group), mode="replicate")[0]
    grouped = part.view(rows, -1, group)
    least, largest = grouped.aminmax(dim=2)
    if bits == 8:
        scale = (torch.maximum(largest, -least) / 127).bfloat16()
        numbers, scales, limits = grouped / scale.float()[..., None], scale[None], (-127, 127)
    else:
        scale = ((largest - least) / 15).bfloat16()
        offset = (least + 8 * scale.float()).bfloat16()
        numbers = (grouped - offset.float()[..., None]) / scale.float()[..., None]
        scales, limits = torch.stack((scale, offset)), (-8, 7)
    # 0 / 0 is where a group is all alike; where the scale isn't a number, its products show it
    whole = numbers.nan_to_num_(0.0).round_().clamp_(*limits).to(torch.int8)
    return whole.flatten(1)[:, :cols], scales


def restore(numbers: Tensor, scales: Tensor, group: int, phase: int = 0) -> Tensor:
    """Floats [r, K] float32 of what `quantise` gave, from ``phase`` columns into the first group on."""
    at = (torch.arange(numbers.shape[1]) + phase) // group
    opened = scales.float()[..., at]
    scaled = numbers * opened[0]
    return scaled if len(opened) == 1 else scaled + opened[1]


def pack(numbers: Tensor) -> Tensor:
    """4-bit numbers [r, K] int8 as checkpoints hold them: [r, ceil(K / 2)] uint8, the first in the low bits, plus 8."""
    pairs = (F.pad(numbers, (0, numbers.shape[1] % 2)) + 8).view(torch.uint8).view(numbers.shape[0], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack(packed: Tensor) -> Tensor:
    """Inverse of `pack`; an odd last number comes with one more."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1).view(torch.int8) - 8
