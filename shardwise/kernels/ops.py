"""The dozen operations that models are made of, each written plainly in torch: the twins of the native kernels.

They run on any device, are the truth of the kernel tests and the fallback where there is no compiler. Knows nothing of
models, ranks or requests. Shapes: M rows, K input and N output features, Hq query and Hkv key heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from shardwise.config import BLOCK

LANES = 16
"""Rows of cached values are padded to a multiple of this, so that a vector never straddles two tokens."""


class Program(NamedTuple):
    """In which order a linear sums along K: chunk products, combined by a postfix program (see placement.Tree)."""

    bounds: tuple[int, ...]
    """C + 1 ascending offsets along K; chunk c is columns bounds[c] to bounds[c + 1]."""
    merges: tuple[int, ...]
    """After chunk c is pushed, the top two sums of the stack are added merges[c] times."""

    @property
    def num_nodes(self) -> int:
        """Sums left on the stack in the end."""
        return len(self.merges) - sum(self.merges)

    @classmethod
    def whole(cls, cols: int) -> Program:
        """All of K as a single chunk."""
        return cls((0, cols), (0,))


class Weight(NamedTuple):
    """A matrix [rows, cols] in whatever form the ops that made it like best."""

    data: Tensor
    rows: int
    cols: int


class Ops:
    """The operations in plain torch. Activations have dtype ``compute``: float32, or float64 with float64 weights."""

    name = "torch"

    def __init__(self, compute: torch.dtype) -> None:
        assert compute in (torch.float32, torch.float64)
        self.compute = compute

    def weight(self, rows: int, cols: int, dtype: torch.dtype, device: str | torch.device) -> Weight:
        """A zero matrix of float32, bfloat16, float16 or (with float64 activations only) float64."""
        if (dtype == torch.float64) != (self.compute == torch.float64) or not dtype.is_floating_point:
            raise ValueError(f"weights of {dtype} do not go with activations of {self.compute}")
        return Weight(torch.zeros(rows, cols, dtype=dtype, device=device), rows, cols)

    def write(self, weight: Weight, row: int, part: Tensor) -> None:
        """Store ``part`` [r, cols], any float dtype, on the CPU, as rows ``row`` to ``row + r``."""
        assert part.shape[1] == weight.cols
        assert 0 <= row <= weight.rows - part.shape[0]
        weight.data[row : row + part.shape[0]] = part

    def take(self, weight: Weight, ids: Tensor) -> Tensor:
        """Rows ``ids`` [M] int64 of the weight: [M, cols]."""
        return weight.data[ids].to(self.compute)

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        program: Program,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """``x`` [M, K] times the weight's transpose: (sum + bias) + residual [M, N], or the program's partial sums.

        A program that leaves several nodes takes neither bias [N] nor residual [M, N] and yields [nodes, M, N]. ``out``
        is contiguous memory of the result's shape to write into. A value depends on its row of ``x``, its row of the
        weight and the program, and on nothing else.
        """
        assert x.shape[1] == weight.cols == program.bounds[-1]
        rows = x.shape[0]
        if rows < 4:  # MKL sums 1 to 3 rows in another order than it does more
            x = F.pad(x, (0, 0, 0, 4 - rows))
        stack: list[Tensor] = []
        for start, stop, merges in zip(program.bounds, program.bounds[1:], program.merges, strict=False):
            stack.append(F.linear(x[:, start:stop], weight.data[:, start:stop].to(self.compute))[:rows])
            _merge(stack, merges)
        assert len(stack) == 1 or (bias is None and residual is None)
        result = _close(stack[0], bias, residual) if len(stack) == 1 else torch.stack(stack)
        return result if out is None else out.copy_(result)

    def finish(
        self,
        nodes: Sequence[Tensor],
        merges: Sequence[int],
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Close a tree: the ``nodes`` [M, N] summed by the program ``merges``, (sum + bias) + residual."""
        stack: list[Tensor] = []
        for node, count in zip(nodes, merges, strict=True):
            stack.append(node)
            _merge(stack, count)
        (total,) = stack
        return _close(total, bias, residual)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x`` [M, K] over the root of its mean square, times ``weight`` [K]."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """``x`` [M, K] to mean 0 and variance 1 over K, times ``weight`` plus ``bias`` [K]."""
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def activate(self, kind: str, x: Tensor) -> Tensor:
        """``"silu_mul"``: [M, gate | up] to silu(gate) * up; ``"gelu"`` (erf) and ``"gelu_tanh"`` keep the shape."""
        if kind == "silu_mul":
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up
        return F.gelu(x, approximate={"gelu": "none", "gelu_tanh": "tanh"}[kind])

    def cache(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, device: str | torch.device
    ) -> tuple[Tensor, Tensor]:
        """Zeroed keys [num_blocks, Hkv, D, BLOCK] and values [num_blocks, Hkv, BLOCK, D padded to LANES].

        Token ``slot % BLOCK`` of block ``slot // BLOCK`` is a column of the keys and a row of the values.
        """
        padded = -(-head_dim // LANES) * LANES
        shapes = (num_blocks, num_kv_heads, head_dim, BLOCK), (num_blocks, num_kv_heads, BLOCK, padded)
        if torch.device(device).type == "cpu":  # numpy's zeros take memory only when they are written to
            dtype = np.float32 if self.compute == torch.float32 else np.float64
            keys, values = (torch.from_numpy(np.zeros(shape, dtype)) for shape in shapes)
        else:
            keys, values = (torch.zeros(shape, dtype=self.compute, device=device) for shape in shapes)
        return keys, values

    def rotate_write(
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
        """Split ``qkv`` [M, (Hq + 2 Hkv) D], rotate q and k, store k and v at ``slots`` [M] int32; q [M, Hq, D].

        ``cos`` and ``sin`` [P, R / 2] are indexed by ``positions`` [M] int32 and turn the first R dims of a head, of
        which dim i pairs with dim i + R / 2 (the layout of Hugging Face); None turns nothing.
        """
        num_kv_heads, head_dim = keys.shape[1:3]
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        turned, v = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=1)
        if cos is not None and sin is not None:
            half = cos.shape[1]
            left, right, rest = torch.split(turned, [half, half, head_dim - 2 * half], dim=2)
            c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
            turned = torch.cat((left * c - right * s, right * c + left * s, rest), dim=2)
        q, k = torch.split(turned, [num_heads, num_kv_heads], dim=1)
        block, offset = slots // BLOCK, slots % BLOCK
        keys[block, :, :, offset] = k
        values[block, :, offset, :head_dim] = v
        return q

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        starts: Tensor,
        table: Tensor,
        positions: Tensor,
        groups: Sequence[int],
        scale: float,
    ) -> Tensor:
        """Softmax attention of ``q`` [M, Hq, D] over cached keys and values: [M, Hq, D].

        Rows ``starts[s]`` to ``starts[s + 1]`` ([S + 1] int32) are sequence s, whose blocks are ``table[s]`` ([S, B]
        int32); row r sees keys 0 to ``positions[r]`` ([M] int32) of it. Query heads ``groups[j]`` to ``groups[j + 1]``
        share key head j. A row's value depends on its q and the keys and values that it sees, and on nothing else.
        """
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        sizes = [stop - start for start, stop in zip(groups, groups[1:], strict=False)]
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(q.device)
        ends, lengths = starts.tolist(), (positions + 1).tolist()
        for sequence, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
            blocks = table[sequence, : -(-max(lengths[start:stop], default=0) // BLOCK)]
            k = keys[blocks].permute(1, 2, 0, 3).flatten(2)[owner]  # [Hq, D, tokens]
            v = values[blocks, :, :, : q.shape[2]].transpose(0, 1).flatten(1, 2)[owner]  # [Hq, tokens, D]
            for row in range(start, stop):  # row by row, so that no row's sums can see another's length
                scores = q[row].unsqueeze(1) @ k[..., : lengths[row]] * scale
                out[row] = (scores.softmax(-1) @ v[:, : lengths[row]]).squeeze(1)
        return out

    def gumbel(self, seeds: Sequence[int], positions: Sequence[int], first: int, count: int) -> Tensor:
        """Gumbel noise [R, count] float64 of token ids ``first`` to ``first + count`` at each (seed, position).

        A pure function of (seed, position, id) by integer and basic IEEE operations, so the native kernel and any
        split of the ids give the same bits. Random bits come from splitmix64 (Steele, Lea, Flood 2014).
        """
        pairs = zip(seeds, positions, strict=True)
        keys = torch.tensor([[_signed(stream(seed, position))] for seed, position in pairs], dtype=torch.int64)
        counters = torch.arange(first + 1, first + count + 1, dtype=torch.int64) * _signed(_GOLDEN)
        bits = _mix(keys.view(-1, 1) + counters)
        uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52  # 52 bits and a half: exact, never 0 or 1
        return -_log(-_log(uniform))

    def exp(self, x: Tensor) -> Tensor:
        """e to the ``x`` (float64, at most 0) by basic IEEE operations, so the same bits everywhere; 0 below -708."""
        return _exp(x)


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


def _merge(stack: list[Tensor], count: int) -> None:
    for _ in range(count):
        right = stack.pop()
        stack.append(stack.pop() + right)


def _close(total: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    total = total if bias is None else total + bias
    return total if residual is None else total + residual


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


def _exp(x: Tensor) -> Tensor:
    """exp of float64 in the operations and order of vector.h: 2^n times a Taylor series on +-log(2) / 2."""
    clamped = x.clamp(-708.0, 710.0)
    n = (clamped * math.log2(math.e) + _ROUND) - _ROUND
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    series = torch.full_like(r, 1 / math.factorial(13))
    for power in range(12, -1, -1):
        series = series * r + 1 / math.factorial(power)
    scaled = series * ((n.long() + 1023) << 52).view(torch.float64)
    return torch.where(x < -708.0, 0.0, scaled)


def load_ops(want: str, device: str, compute: torch.dtype) -> tuple[Ops, str]:
    """The operations for ``want`` ("auto", "native" or "torch") on a device, and a sentence on how it was chosen.

    Raises ValueError with the remedy when "native" is wanted and cannot be had.
    """
    from shardwise.kernels.build import BuildError  # the twins work where these cannot
    from shardwise.kernels.native import NativeOps

    if want == "torch":
        return Ops(compute), "torch kernels, as asked"
    if not device.startswith("cpu"):
        if want == "native":
            raise ValueError(f"native kernels run on the CPU, not on {device}: use kernels='torch' or device='cpu'")
        return Ops(compute), f"torch kernels, because the native ones do not run on {device}"
    try:
        ops = NativeOps(compute)
    except BuildError as error:
        if want == "native":
            raise ValueError(str(error)) from error
        return Ops(compute), f"torch kernels, slower and not bit-exact over every layout, because {error}"
    return ops, f"native kernels, {ops.origin}"
