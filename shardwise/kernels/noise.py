"""Counter-based noise, and exp, by integer and basic IEEE operations in float64: the same bits everywhere.

The twins of sample.c, for `Ops`. Random bits come from splitmix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def gumbel(seeds: Sequence[int], positions: Sequence[int], first: int, count: int) -> Tensor:
    """See `Ops.gumbel`."""
    pairs = zip(seeds, positions, strict=True)
    keys = torch.tensor([[_signed(stream(seed, position))] for seed, position in pairs], dtype=torch.int64)
    counters = torch.arange(first + 1, first + count + 1, dtype=torch.int64) * _signed(_GOLDEN)
    bits = _mix(keys.view(-1, 1) + counters)
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52  # 52 bits and a half: exact, never 0 or 1
    return -_log(-_log(uniform))


def stream(seed: int, position: int) -> int:
    """Where the 64-bit counter of the noise for (seed, position) starts."""
    return _mix_int(_mix_int(seed + _GOLDEN) ^ (position * _STEP & _MASK))


_GOLDEN = 0x9E3779B97F4A7C15
_STEP = 0xD1B54A32D192ED03
_MASK = 2**64 - 1
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LOG = (  # log((1 + s) / (1 - s)) = 2 s + s R(s * s) for |s| < 0.1716, from fdlibm's e_log.c
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
_ROUND = 1.5 * 2.0**52
"""Added and taken away again, it rounds a float64 to the nearest whole number."""


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shift(bits: Tensor, count: int) -> Tensor:
    """Shift right without the sign."""
    return torch.bitwise_and(bits >> count, 2 ** (64 - count) - 1)


def _mix(bits: Tensor) -> Tensor:
    for count, factor in _MIX:
        bits = (bits ^ _shift(bits, count)) * _signed(factor)
    return bits ^ _shift(bits, 31)


def _mix_int(bits: int) -> int:
    bits &= _MASK
    for count, factor in _MIX:
        bits = (bits ^ (bits >> count)) * factor & _MASK
    return bits ^ (bits >> 31)


def _log(x: Tensor) -> Tensor:
    """log of positive normal float64, in the operations and order of sample.c (fdlibm's e_log.c)."""
    bits = x.view(torch.int64) + (0x3FF0000000000000 - 0x3FE6A09E00000000)  # the mantissa falls to [sqrt(1/2), sqrt(2))
    k = (_shift(bits, 52) - 1023).double()
    f = ((bits & 0x000FFFFFFFFFFFFF) + 0x3FE6A09E00000000).view(torch.float64) - 1.0
    s = f / (f + 2.0)
    z = s * s
    series = torch.full_like(z, _LOG[-1])
    for coefficient in _LOG[-2::-1]:
        series = series * z + coefficient
    half = f * f * 0.5
    return k * _LN2_HIGH - ((half - (s * (half + series * z) + k * _LN2_LOW)) - f)


def exp(x: Tensor) -> Tensor:
    """exp of float64 in the operations and order of vector.h: 2^n times a Taylor series on +-log(2) / 2."""
    clamped = x.clamp(-708.0, 710.0)
    n = (clamped * math.log2(math.e) + _ROUND) - _ROUND
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    series = torch.full_like(r, 1 / math.factorial(13))
    for power in range(12, -1, -1):
        series = series * r + 1 / math.factorial(power)
    scaled = series * ((n.long() + 1023) << 52).view(torch.float64)
    return torch.where(x < -708.0, 0.0, scaled)
