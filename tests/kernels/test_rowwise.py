from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from shardwise.kernels.native import NativeOps
from shardwise.kernels.ops import Ops

Pair = tuple[NativeOps, Ops]
WIDTHS = (1, 31, 32, 33, 576, 577)


def close(ops: Ops, got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 2e-6 if ops.compute == torch.float32 else 1e-13
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", WIDTHS)
def test_norms(pair: Pair, width: int) -> None:
    """A tail of columns left out, eps at the wrong place, a variance taken about 0."""
    for ops in pair:
        x = torch.randn(5, width, dtype=ops.compute) * 3 + 2
        weight, bias = torch.randn(2, width, dtype=ops.compute)
        wide = x.double()
        close(ops, ops.rms_norm(x, weight, 1e-2), wide / (wide.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight)
        want = F.layer_norm(wide, (width,), weight.double(), bias.double(), 1e-2)
        close(ops, ops.layer_norm(x, weight, bias, 1e-2), want)


@pytest.mark.parametrize("width", WIDTHS)
def test_row_does_not_feel_the_batch(pair: Pair, width: int) -> None:
    """Rows that are shared out or vectorised so that their order of sums changes."""
    ops = pair[0]
    x, (weight, bias) = torch.randn(67, width, dtype=ops.compute), torch.randn(2, width, dtype=ops.compute)
    full = ops.rms_norm(x, weight, 1e-5), ops.layer_norm(x, weight, bias, 1e-5)
    for threads, rows in ((1, 1), (1, 3), (2, 67)):
        torch.set_num_threads(threads)
        assert torch.equal(ops.rms_norm(x[:rows], weight, 1e-5), full[0][:rows])
        assert torch.equal(ops.layer_norm(x[:rows], weight, bias, 1e-5), full[1][:rows])


def test_norm_of_far_away_rows(pair: Pair) -> None:
    """A variance that drowns in the mean, or squares that overflow where torch's do not."""
    for ops in pair:
        x = torch.randn(3, 300, dtype=ops.compute)
        ones = torch.ones(300, dtype=ops.compute)
        far = (x * 0.5 + 1000).double()
        got = ops.layer_norm(far.to(ops.compute), ones, ones * 0, 1e-5).double()
        want = F.layer_norm(far.to(ops.compute).double(), (300,), eps=1e-5)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        assert ops.rms_norm(x * 1e15, ones, 1e-5).isfinite().all()


def test_norms_of_heads(pair: Pair) -> None:
    """A head normed with the other's weight, values normed too, or a head that feels the ones beside it."""
    for ops in pair:
        for heads, key_heads, dims in ((5, 2, 33), (1, 1, 6), (8, 8, 64)):
            qkv = torch.randn(7, (heads + 2 * key_heads) * dims, dtype=ops.compute)
            q, k = torch.randn(2, dims, dtype=ops.compute).unbind()
            whole = ops.head_norm(qkv, q, k, heads, 1e-3).view(7, -1, dims)
            each = qkv.view(7, -1, dims).unbind(1)
            for head, x in enumerate(each):
                want = ops.rms_norm(x.contiguous(), q if head < heads else k, 1e-3) if head < heads + key_heads else x
                close(ops, whole[:, head], want)
            assert torch.equal(ops.head_norm(qkv[:1].clone(), q, k, heads, 1e-3).view(-1, dims), whole[0])


@pytest.mark.parametrize("kind", ["silu_mul", "gelu", "gelu_tanh", "relu"])
def test_activations(pair: Pair, kind: str) -> None:
    """A wrong formula, gate and up exchanged, or an exponential that is inexact far from 0."""
    for ops in pair:
        x = torch.linspace(-30, 30, 2402, dtype=ops.compute).view(2, 1201).repeat(1, 2)
        got, want = ops.activate(kind, x), Ops(torch.float64).activate(kind, x.double())
        close(ops, got, want)
        extreme = torch.tensor([[200.0, -200.0, 1e30, -1e30, 0.0, -0.0]], dtype=ops.compute).repeat(1, 2)
        torch.testing.assert_close(ops.activate(kind, extreme), Ops(ops.compute).activate(kind, extreme))


@pytest.mark.parametrize("kind", ["silu_mul", "gelu", "gelu_tanh", "relu"])
def test_activation_does_not_feel_its_place(pair: Pair, kind: str) -> None:
    """A vectorised body and a scalar tail that round differently: a shard would change the answer."""
    ops = pair[0]
    x, parts = torch.randn(3, 2, 83, dtype=ops.compute) * 5, 2 if kind == "silu_mul" else 1
    full = ops.activate(kind, x[:, :parts].reshape(3, -1).contiguous())
    for start, stop in ((0, 1), (1, 83), (7, 40), (82, 83)):
        piece = x[:, :parts, start:stop].reshape(3, -1).contiguous()
        assert torch.equal(ops.activate(kind, piece), full[:, start:stop])


@pytest.mark.parametrize("half", [None, 1, 5, 16])
def test_rotate_write_has_the_bits_of_its_twin(pair: Pair, half: int | None) -> None:
    """A dim paired with the wrong one, dims past the rotary ones lost, k or v in another token's place."""
    rows, heads, key_heads, dims = 37, 5, 2, 33
    results = []
    for ops in pair:
        torch.manual_seed(1)
        qkv = torch.randn(rows, (heads + 2 * key_heads) * dims, dtype=ops.compute)
        cos, sin = (None, None) if half is None else torch.randn(2, 50, half, dtype=ops.compute).unbind()
        keys, values = ops.cache(4, key_heads, dims, "cpu")
        positions, slots = torch.randperm(50).int()[:rows], torch.randperm(64).int()[:rows]
        before = qkv.clone()
        q = ops.rotate_write(qkv, cos, sin, positions, slots, keys, values, heads)
        assert q.shape == (rows, heads, dims)
        assert torch.equal(qkv, before)
        results.append((q, keys, values[..., :dims]))
    for mine, twin in zip(*results, strict=True):
        assert torch.equal(mine, twin)


def test_no_rows(pair: Pair) -> None:
    """An empty batch that crashes or grows."""
    for ops in pair:
        x, weight, none = ops.take(ops.weight(4, 6, ops.compute, "cpu"), torch.zeros(0, dtype=torch.int64)), None, None
        weight = torch.ones(6, dtype=ops.compute)
        assert ops.rms_norm(x, weight, 1e-5).shape == ops.layer_norm(x, weight, weight, 1e-5).shape == (0, 6)
        assert ops.activate("silu_mul", x).shape == (0, 3)
        keys, values = ops.cache(1, 1, 2, "cpu")
        none = torch.zeros(0, dtype=torch.int32)
        assert ops.rotate_write(x, None, None, none, none, keys, values, 1).shape == (0, 1, 2)
        assert ops.finish([x, x], (0, 1)).shape == (0, 6)
