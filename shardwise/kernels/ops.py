"""The dozen operations that models are made of, each written plainly in torch: the twins of the native kernels.

They run on any device, are the truth of the kernel tests and the fallback where there is no compiler. Knows nothing of
models, ranks or requests. Shapes: M rows, K input and N output features, Hq query and Hkv key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from shardwise.config import BLOCK
from shardwise.kernels import noise

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
    scales: Tensor | None = None
    """Of whole numbers; with 4 bits, offsets follow."""
    group: int = 0
    """Columns that share a scale; they are counted along the whole matrix, of which this may be a slice."""
    phase: int = 0
    """Columns of the first group that come before this slice."""

    @property
    def num_groups(self) -> int:
        """Groups that the slice meets."""
        return -(-(self.phase + self.cols) // self.group)


Part: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""Rows of a weight: floats, or whole numbers and their scales (see ``Ops.write``)."""


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

    def quantised(self, rows: int, cols: int, bits: int, group: int, phase: int, device: str | torch.device) -> Weight:
        """A zero matrix of whole numbers: scale * number with 8 ``bits``, scale * number + offset with 4.

        A scale and an offset hold for a row of a ``group`` of columns of the whole matrix; this slice of it begins
        ``phase`` columns into its first group.
        """
        width, dtype = (cols, torch.int8) if bits == 8 else (-(-cols // 2), torch.uint8)
        shape = 1 if bits == 8 else 2, rows, -(-(phase + cols) // group)
        scales = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        return Weight(torch.zeros(rows, width, dtype=dtype, device=device), rows, cols, scales, group, phase)

    def write(self, weight: Weight, row: int, part: Part) -> None:
        """Store ``part``, on the CPU, as rows ``row`` to ``row + r``.

        It is [r, cols] of any float dtype; for a quantised weight numbers [r, cols] int8 and scales [1, r, groups]
        bfloat16, or scales and offsets [2, r, groups].
        """
        if weight.scales is not None:
            part, scales = parts(weight, part)
            weight.scales[:, row : row + scales.shape[1]] = scales
            if weight.data.dtype == torch.uint8:
                pairs = F.pad(part, (0, weight.cols % 2)).view(torch.uint8).view(part.shape[0], -1, 2)
                part = (pairs[..., 0] & 15) | (pairs[..., 1] << 4)
        assert isinstance(part, Tensor)
        assert part.shape[1] == weight.data.shape[1]
        assert 0 <= row <= weight.rows - part.shape[0]
        weight.data[row : row + part.shape[0]] = part

    def take(self, weight: Weight, ids: Tensor) -> Tensor:
        """Rows ``ids`` [M] int64 of the weight: [M, cols]."""
        scales = None if weight.scales is None else weight.scales[:, ids]
        return self._open(weight._replace(data=weight.data[ids], scales=scales), 0, weight.cols)

    def _open(self, weight: Weight, start: int, stop: int) -> Tensor:
        """Columns of a weight in the compute dtype."""
        numbers = weight.data
        if weight.scales is None:
            return numbers[:, start:stop].to(self.compute)
        if numbers.dtype == torch.uint8:
            numbers = torch.stack((numbers << 4, numbers), -1).flatten(1).view(torch.int8) >> 4
        group = (torch.arange(start, stop, device=numbers.device) + weight.phase) // weight.group
        scales = weight.scales.to(self.compute)[..., group]
        scaled = numbers[:, start:stop].to(self.compute) * scales[0]
        return scaled if len(scales) == 1 else scaled + scales[1]

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
            stack.append(F.linear(x[:, start:stop], self._open(weight, start, stop))[:rows])
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

    def head_norm(self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, num_heads: int, eps: float) -> Tensor:
        """``qkv`` [M, (Hq + 2 Hkv) D] with each q and k head normed as by ``rms_norm`` with its weight [D]."""
        heads = qkv.view(qkv.shape[0], -1, q_weight.shape[0])
        num_kv_heads = (heads.shape[1] - num_heads) // 2
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        normed = self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps), v
        return torch.cat(normed, dim=1).flatten(1)

    def activate(self, kind: str, x: Tensor) -> Tensor:
        """``"silu_mul"``: [M, gate | up] to silu(gate) * up. ``"gelu"`` (erf), ``"gelu_tanh"`` and ``"relu"``
        keep the shape.
        """
        if kind == "silu_mul":
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up
        if kind == "relu":
            return F.relu(x)
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
        slopes: Tensor | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Softmax attention of ``q`` [M, Hq, D] over cached keys and values: [M, Hq, D].

        Rows ``starts[s]`` to ``starts[s + 1]`` ([S + 1] int32) are sequence s, whose blocks are ``table[s]`` ([S, B]
        int32); row r sees keys 0 to ``positions[r]`` ([M] int32) of it. Query heads ``groups[j]`` to ``groups[j + 1]``
        share key head j. ``slopes`` [Hq] add slope * (key position - row's position) to a head's scores (ALiBi, Press
        et al. 2108.12409); of a ``window`` only the last so many keys are seen. A row's value depends on its q and the
        keys and values that it sees, and on nothing else.
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
                if slopes is not None:
                    away = torch.arange(1 - lengths[row], 1, dtype=q.dtype, device=q.device)
                    scores = scores + slopes.view(-1, 1, 1) * away
                if window is not None and window < lengths[row]:
                    scores[..., : lengths[row] - window] = -torch.inf
                out[row] = (scores.softmax(-1) @ v[:, : lengths[row]]).squeeze(1)
        return out

    def gumbel(self, seeds: Sequence[int], positions: Sequence[int], first: int, count: int) -> Tensor:
        """Gumbel noise [R, count] float64 of token ids ``first`` to ``first + count`` at each (seed, position).

        A pure function of (seed, position, id) by integer and basic IEEE operations, so the native kernel and any
        split of the ids give the same bits.
        """
        return noise.gumbel(seeds, positions, first, count)

    def exp(self, x: Tensor) -> Tensor:
        """e to the ``x`` (float64, at most 0) by basic IEEE operations, so the same bits everywhere; 0 below -708."""
        return noise.exp(x)


def parts(weight: Weight, part: Part) -> tuple[Tensor, Tensor]:
    """Numbers and scales for a quantised weight."""
    assert weight.scales is not None
    assert isinstance(part, tuple)
    numbers, scales = part
    assert numbers.dtype == torch.int8
    assert scales.dtype == torch.bfloat16
    assert numbers.shape[1] == weight.cols
    assert scales.shape == (weight.scales.shape[0], numbers.shape[0], weight.num_groups)
    return numbers, scales


def _merge(stack: list[Tensor], count: int) -> None:
    for _ in range(count):
        right = stack.pop()
        stack.append(stack.pop() + right)


def _close(total: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    total = total if bias is None else total + bias
    return total if residual is None else total + residual


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
