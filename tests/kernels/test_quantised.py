from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.kernels.build import BuildError
from shardwise.kernels.check import check_kernels
from shardwise.kernels.native import NativeOps
from shardwise.kernels.ops import Ops, Program
from shardwise.parallel.placement import Run, Tree
from shardwise.weights.quantise import quantise, restore

from .cases import fma_of, pack_whole

Native = Callable[[torch.dtype], NativeOps]
computes = pytest.mark.parametrize("compute", [torch.float32, torch.float64], ids=str)
kinds = pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 24), (4, 32), (4, 11), (4, None)])


def chunks(cols: int, count: int) -> tuple[int, ...]:
    return tuple(cols * chunk // count for chunk in range(count + 1))


def whole_tree(cols: int, count: int) -> Program:
    return Program(chunks(cols, count), tuple(Tree((Run(0, count),)).merges(0)))


def rounded(rows: int, cols: int, bits: int, group: int | None) -> tuple[Tensor, Tensor, int]:
    group = min(group or cols, cols)
    return *quantise(torch.randn(rows, cols) + 0.3, bits, group), group


def by_hand(x: Tensor, numbers: Tensor, scales: Tensor, group: int, program: Program) -> Tensor:
    """The contract, one libm fma at a time."""
    fma = fma_of(x.dtype)
    out = torch.empty(x.shape[0], numbers.shape[0], dtype=x.dtype)
    for r, n in ((r, n) for r in range(x.shape[0]) for n in range(numbers.shape[0])):
        stack: list[Tensor] = []
        for (start, stop), merges in zip(pairwise(program.bounds), program.merges, strict=True):
            total, k = 0.0, start
            while k < stop:
                at, end = k // group, min((k // group + 1) * group, stop)
                part, seen = 0.0, torch.zeros((), dtype=x.dtype)
                for i in range(k, end):
                    part, seen = fma(float(x[r, i]), float(numbers[n, i]), part), seen + x[r, i]
                total = fma(float(scales[0, n, at]), part, total)
                total = fma(float(scales[1, n, at]), float(seen), total) if len(scales) > 1 else total
                k = end
            stack.append(torch.tensor(total, dtype=x.dtype))
            for _ in range(merges):
                right = stack.pop()
                stack.append(stack.pop() + right)
        out[r, n] = stack[0]
    return out


@computes
@kinds
@pytest.mark.parametrize("rows", [1, 2, 5, 13])
def test_sums_as_the_contract_says(native: Native, compute: torch.dtype, bits: int, group: int, rows: int) -> None:
    """A part of a group summed in another order, a scale or an offset of another group, a nibble of another column."""
    ops, program = native(compute), whole_tree(41, 3)
    numbers, scales, size = rounded(35, 41, bits, group)
    x = torch.randn(rows, 41, dtype=compute)
    found = ops.linear(x, pack_whole(ops, numbers, scales, size), program)
    assert torch.equal(found, by_hand(x, numbers, scales, size, program))


@computes
@kinds
def test_row_does_not_feel_the_batch(native: Native, compute: torch.dtype, bits: int, group: int) -> None:
    """A register block, a pair of panels or a tail that sums in an order of its own."""
    ops, program = native(compute), whole_tree(75, 3)
    weight = pack_whole(ops, *rounded(102, 75, bits, group))
    x = torch.randn(30, 75, dtype=compute)
    alone = torch.cat([ops.linear(x[r : r + 1], weight, program) for r in range(30)])
    for rows in range(1, 31):
        assert torch.equal(ops.linear(x[:rows], weight, program), alone[:rows]), rows


@computes
@kinds
def test_output_does_not_feel_the_shard(native: Native, compute: torch.dtype, bits: int, group: int) -> None:
    """An output whose value depends on its lane, its panel, the panel's neighbour or the number of panels."""
    ops, program = native(compute), whole_tree(64, 2)
    quantised = rounded(100, 64, bits, group)
    bias = torch.randn(100, dtype=compute)
    for rows in (1, 5):
        x, residual = torch.randn(rows, 64, dtype=compute), torch.randn(rows, 100, dtype=compute)
        full = ops.linear(x, pack_whole(ops, *quantised), program, bias, residual)
        for cut in (1, 16, 31, 32, 33, 63, 64, 65, 96, 99):
            halves = [
                ops.linear(
                    x, pack_whole(ops, *quantised, rows=part), program, bias[part], residual[:, part].contiguous()
                )
                for part in (slice(0, cut), slice(cut, 100))
            ]
            assert torch.equal(torch.cat(halves, dim=1), full), cut


@kinds
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_threads_do_not_matter(native: Native, bits: int, group: int, rows: int) -> None:
    """A tile that two threads or none compute; sums of x that a thread reads before another has written them."""
    ops, program = native(torch.float32), whole_tree(512, 8)
    weight, x = pack_whole(ops, *rounded(1060, 512, bits, group)), torch.randn(rows, 512)
    alone = ops.linear(x, weight, program)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        for _ in range(5):
            assert torch.equal(ops.linear(x, weight, program), alone), threads


@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([8, 13, 32, 1000]),
    single=st.booleans(),
    count=st.integers(1, 13),
    ranks=st.integers(1, 5),
    rows=st.sampled_from([1, 3, 14]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_owners_of_chunks_give_one_answer(
    bits: int, group: int, single: bool, count: int, ranks: int, rows: int, seed: int
) -> None:
    """A group that a rank's columns cut, and that then has another scale or another order than on one rank."""
    compute = torch.float32 if single else torch.float64
    try:
        ops = NativeOps(compute)
    except BuildError as error:
        pytest.skip(str(error))
    cuts = sorted(random.Random(seed).choices(range(count + 1), k=ranks - 1))
    parts = tuple(Run(start, stop) for start, stop in pairwise((0, *cuts, count)))
    torch.manual_seed(seed)
    cols = 9 * count + seed % 3
    quantised = rounded(40, cols, bits, group)
    bounds, x = chunks(cols, count), torch.randn(rows, cols, dtype=compute)
    full = ops.linear(x, pack_whole(ops, *quantised), whole_tree(cols, count))
    tree, nodes = Tree(parts), []
    for rank, part in enumerate(parts):
        if part.size:
            own = slice(bounds[part.start], bounds[part.stop])
            program = Program(
                tuple(at - own.start for at in bounds[part.start : part.stop + 1]), tuple(tree.merges(rank))
            )
            mine = ops.linear(x[:, own].contiguous(), pack_whole(ops, *quantised, cols=own), program)
            nodes += mine.unbind() if program.num_nodes > 1 else [mine]
    assert torch.equal(ops.finish(nodes, tree.finish), full)


@computes
@kinds
def test_agrees_with_its_twin(native: Native, compute: torch.dtype, bits: int, group: int) -> None:
    """A weight packed, taken or multiplied wrongly: the twin has no panels, and multiplies what is restored."""
    ops, twins = native(compute), Ops(compute)
    numbers, scales, size = rounded(77, 53, bits, group)
    own = slice(5, 53)
    weights = []
    for each in (ops, twins):
        weight = each.quantised(77, 48, bits, size, 5 % size, "cpu")
        met = scales[:, :, 5 // size :]
        for start, stop in ((40, 77), (0, 3), (3, 40)):
            each.write(weight, start, (numbers[start:stop, own], met[:, start:stop]))
        weights.append(weight)
    ids = torch.tensor([76, 0, 31, 32, 31])
    exact = restore(numbers, scales, size)[:, own].to(compute)
    for each, weight in zip((ops, twins), weights, strict=True):
        torch.testing.assert_close(each.take(weight, ids), exact[ids], rtol=1e-6, atol=1e-7)
    assert torch.equal(ops.take(weights[0], ids), twins.take(weights[1], ids))
    x = torch.randn(9, 48, dtype=compute)
    for program in (Program.whole(48), Program((0, 20, 33, 48), (0, 0, 1)), Program((0, 7, 48), (0, 1))):
        results = [each.linear(x, weight, program) for each, weight in zip((ops, twins), weights, strict=True)]
        torch.testing.assert_close(*results, rtol=1e-5 if compute == torch.float32 else 1e-13, atol=1e-5)
    torch.testing.assert_close(results[1], F_linear(x, exact), rtol=1e-4, atol=1e-5)


def F_linear(x: Tensor, weight: Tensor) -> Tensor:  # noqa: N802
    return torch.nn.functional.linear(x, weight)


@kinds
def test_rounding_is_to_the_nearest_and_stays_in_its_group(bits: int, group: int) -> None:
    """Numbers that are off by more than half a step, or a group whose scale heeds what is outside it."""
    matrix = torch.randn(6, 100) * torch.logspace(-6, 2, 6)[:, None]
    size = min(group or 100, 100)
    numbers, scales = quantise(matrix, bits, size)
    step = scales[0].float().repeat_interleave(size, 1)[:, :100]
    off = (restore(numbers, scales, size) - matrix).abs()
    assert bool((off <= 0.57 * step + 2**-8 * matrix.abs()).all())
    alone = [quantise(matrix[:, at : at + size], bits, size) for at in range(0, 100, size)]
    assert torch.equal(torch.cat([each[0] for each in alone], 1), numbers)
    assert torch.equal(torch.cat([each[1] for each in alone], 2), scales)
    assert torch.equal(quantise(matrix[2:4], bits, size)[0], numbers[2:4])


@pytest.mark.parametrize("bits", [4, 8])
def test_constant_groups_and_broken_numbers(bits: int) -> None:
    """0 / 0 in a group that is all alike; a weight that isn't a number and hides."""
    flat = torch.stack((torch.zeros(40), torch.full((40,), -1.5)))
    assert torch.equal(restore(*quantise(flat, bits, 16), 16)[0], flat[0])
    torch.testing.assert_close(restore(*quantise(flat, bits, 16), 16), flat, rtol=1e-2, atol=0)
    for broken in (torch.nan, torch.inf):
        flat[1, 17] = broken
        bad = restore(*quantise(flat, bits, 16), 16)
        assert bool(bad[1, 16:32].isnan().all())
        assert bool(bad[1, :16].isfinite().all())


@computes
def test_self_check_covers_quantised_weights(native: Native, compute: torch.dtype) -> None:
    """`verify --kernels` that passes over a format."""
    named = {found.kernel: found.holds for found in check_kernels(native(compute), compute)}
    assert named["linear int8"]
    assert named["linear int4"]
