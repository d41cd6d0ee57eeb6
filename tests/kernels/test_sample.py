from __future__ import annotations

import math

import pytest
import torch

from shardwise.kernels.native import NativeOps
from shardwise.kernels.noise import stream
from shardwise.kernels.ops import Ops

Pair = tuple[NativeOps, Ops]
SEEDS, POSITIONS = [0, 1, 2**63 - 1, 12345], [0, 7, 2**31, 1]


def test_noise_has_the_bits_of_its_twin(pair: Pair) -> None:
    """A contracted product, a library's log, or a hash that differs: ranks would draw different tokens."""
    native, twin = (ops.gumbel(SEEDS, POSITIONS, 1000, 3001) for ops in pair)
    assert native.dtype == torch.float64
    assert torch.equal(native, twin)
    assert native.isfinite().all()


@pytest.mark.parametrize("which", [0, 1], ids=["native", "torch"])
def test_noise_does_not_feel_the_shard(pair: Pair, which: int) -> None:
    """Noise that depends on where a rank's vocabulary starts, or on who else is sampled."""
    ops = pair[which]
    full = ops.gumbel(SEEDS, POSITIONS, 0, 2500)
    for first, count in ((0, 1), (1, 1024), (1023, 3), (700, 1800)):
        assert torch.equal(ops.gumbel(SEEDS, POSITIONS, first, count), full[:, first : first + count])
    for row in range(len(SEEDS)):
        assert torch.equal(ops.gumbel(SEEDS[row : row + 1], POSITIONS[row : row + 1], 0, 2500)[0], full[row])
    torch.set_num_threads(3)
    assert torch.equal(ops.gumbel(SEEDS, POSITIONS, 0, 2500), full)
    assert ops.gumbel([], [], 0, 10).shape == (0, 10)


def test_noise_follows_the_gumbel_law(pair: Pair) -> None:
    """A biased uniform or a wrong log: sampled text would not follow the model's probabilities."""
    noise = pair[0].gumbel([3, 4], [5, 5], 0, 200_000).flatten()
    count = noise.numel()
    assert abs(noise.mean() - 0.5772156649) < 5 * math.pi / math.sqrt(6 * count)
    assert abs(noise.var() - math.pi**2 / 6) < 0.03
    law = torch.exp(-torch.exp(-noise.sort().values))
    distance = (law - (torch.arange(count) + 0.5) / count).abs().max()
    assert distance < 1.95 / math.sqrt(count)  # Kolmogorov-Smirnov at 0.1 %


def test_noise_is_independent_along_every_axis(pair: Pair) -> None:
    """Streams that overlap or resemble each other: the next token would repeat the last one's luck."""
    size = 20_000
    base = pair[0].gumbel([11], [100], 0, size + 1)[0]
    others = [pair[0].gumbel([seed], [position], 0, size)[0] for seed, position in ((12, 100), (11, 101), (100, 11))]
    for other in (base[1:], *others):
        correlation = torch.corrcoef(torch.stack([base[:size], other]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(size)
    winners = pair[0].gumbel(range(4000), [9] * 4000, 0, 8).argmax(1).bincount(minlength=8)
    assert (winners - 500).abs().max() < 5 * math.sqrt(500)
    starts = {stream(seed, position) for seed in range(100) for position in range(100)}
    assert len(starts) == 10_000


def test_log_and_exp_are_accurate(pair: Pair) -> None:
    """Polynomials cut short: probabilities would be off by more than rounding."""
    for ops in pair:
        x = -torch.cat([torch.rand(5000, dtype=torch.float64) * 700, torch.rand(5000, dtype=torch.float64)])
        assert ((ops.exp(x) / x.exp() - 1).abs() < 4e-16).all()
        edges = ops.exp(torch.tensor([0.0, -0.0, -math.inf, -709.0, -1e300, math.nan], dtype=torch.float64))
        assert edges[:5].tolist() == [1, 1, 0, 0, 0]
        assert edges[5].isnan()
    noise = pair[1].gumbel([1], [1], 0, 5000)[0]
    again = -torch.log(torch.exp(-noise))
    torch.testing.assert_close(again, noise, rtol=1e-12, atol=1e-12)


def test_exp_has_the_bits_of_its_twin(pair: Pair) -> None:
    """A weight of the sampler that differs between ranks or with its place in the row."""
    x = -torch.rand(3, 1001, dtype=torch.float64) * 750
    native, twin = (ops.exp(x) for ops in pair)
    assert torch.equal(native, twin)
    assert torch.equal(pair[0].exp(x[:, 5:77]), native[:, 5:77])
