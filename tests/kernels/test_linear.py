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
from shardwise.kernels.native import NativeOps
from shardwise.kernels.ops import Ops, Program
from shardwise.parallel.placement import Run, Tree

from .cases import fma_of, pack
from .conftest import FORMATS, compute_of

Native = Callable[[torch.dtype], NativeOps]
formats = pytest.mark.parametrize("dtype", FORMATS, ids=str)


def chunks(cols: int, count: int) -> tuple[int, ...]:
    return tuple(cols * chunk // count for chunk in range(count + 1))


def whole_tree(cols: int, count: int) -> Program:
    return Program(chunks(cols, count), tuple(Tree((Run(0, count),)).merges(0)))


def by_hand(x: Tensor, matrix: Tensor, program: Program) -> Tensor:
    """The contract, one libm fma at a time."""
    fma = fma_of(x.dtype)
    out = torch.empty(x.shape[0], matrix.shape[0], dtype=x.dtype)
    for r, row in enumerate(x.tolist()):
        for n, weights in enumerate(matrix.to(x.dtype).tolist()):
            stack: list[Tensor] = []
            for (start, stop), merges in zip(pairwise(program.bounds), program.merges, strict=True):
                total = 0.0
                for k in range(start, stop):
                    total = fma(row[k], weights[k], total)
                stack.append(torch.tensor(total, dtype=x.dtype))
                for _ in range(merges):
                    right = stack.pop()
                    stack.append(stack.pop() + right)
            out[r, n] = stack[0]
    return out


@formats
@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13])
def test_sums_as_the_contract_says(native: Native, dtype: torch.dtype, rows: int) -> None:
    """A product that is rounded before it is added (a fused multiply-add the compiler undid), or another order."""
    ops, program = native(compute_of(dtype)), whole_tree(41, 5)
    matrix, x = torch.randn(35, 41).to(dtype), torch.randn(rows, 41, dtype=compute_of(dtype))
    assert torch.equal(ops.linear(x, pack(ops, matrix, dtype), program), by_hand(x, matrix, program))


@formats
def test_row_does_not_feel_the_batch(native: Native, dtype: torch.dtype) -> None:
    """A register block or its tail that sums in an order of its own."""
    ops, program = native(compute_of(dtype)), whole_tree(96, 3)
    weight, x = pack(ops, torch.randn(70, 96), dtype), torch.randn(67, 96, dtype=compute_of(dtype))
    alone = torch.cat([ops.linear(x[r : r + 1], weight, program) for r in range(67)])
    for rows in range(1, 68):
        assert torch.equal(ops.linear(x[:rows], weight, program), alone[:rows]), rows


@formats
def test_output_does_not_feel_the_shard(native: Native, dtype: torch.dtype) -> None:
    """An output whose value depends on its lane, its panel or the width of the last panel."""
    ops, program = native(compute_of(dtype)), whole_tree(64, 2)
    matrix, x = torch.randn(67, 64), torch.randn(5, 64, dtype=compute_of(dtype))
    bias, residual = torch.randn(67, dtype=x.dtype), torch.randn(5, 67, dtype=x.dtype)
    full = ops.linear(x, pack(ops, matrix, dtype), program, bias, residual)
    for cut in range(1, 67):
        halves = [
            ops.linear(x, pack(ops, matrix[part], dtype), program, bias[part], residual[:, part].contiguous())
            for part in (slice(0, cut), slice(cut, 67))
        ]
        assert torch.equal(torch.cat(halves, dim=1), full), cut


@formats
@pytest.mark.parametrize("rows", [1, 40])
def test_threads_do_not_matter(native: Native, dtype: torch.dtype, rows: int) -> None:
    """Work split so that a tile is computed twice, or never, or in a thread's own order."""
    ops, program = native(compute_of(dtype)), whole_tree(512, 8)
    weight, x = pack(ops, torch.randn(330, 512), dtype), torch.randn(rows, 512, dtype=compute_of(dtype))
    alone = ops.linear(x, weight, program)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        assert torch.equal(ops.linear(x, weight, program), alone), threads


@given(
    dtype=st.sampled_from(FORMATS),
    count=st.integers(1, 13),
    ranks=st.integers(1, 5),
    rows=st.sampled_from([1, 3, 14]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_owners_of_chunks_give_one_answer(dtype: torch.dtype, count: int, ranks: int, rows: int, seed: int) -> None:
    """Partial sums that meet in another order, or bias and residual added at another point, than on one rank."""
    try:
        ops = NativeOps(compute_of(dtype))
    except BuildError as error:
        pytest.skip(str(error))
    cuts = sorted(random.Random(seed).choices(range(count + 1), k=ranks - 1))
    parts = tuple(Run(start, stop) for start, stop in pairwise((0, *cuts, count)))
    torch.manual_seed(seed)
    cols = 5 * count + seed % 3
    bounds, matrix, x = chunks(cols, count), torch.randn(40, cols), torch.randn(rows, cols, dtype=ops.compute)
    bias, residual = torch.randn(40, dtype=ops.compute), torch.randn(rows, 40, dtype=ops.compute)
    full = ops.linear(x, pack(ops, matrix, dtype), whole_tree(cols, count), bias, residual)
    tree, nodes = Tree(parts), []
    for rank, part in enumerate(parts):
        if part.size:
            first, last = bounds[part.start], bounds[part.stop]
            program = Program(tuple(at - first for at in bounds[part.start : part.stop + 1]), tuple(tree.merges(rank)))
            mine = ops.linear(x[:, first:last].contiguous(), pack(ops, matrix[:, first:last], dtype), program)
            nodes += mine.unbind() if program.num_nodes > 1 else [mine]
    assert torch.equal(ops.finish(nodes, tree.finish, bias, residual), full)
    twins = Ops(ops.compute)
    assert torch.equal(twins.finish(nodes, tree.finish, bias, residual), full)


@formats
def test_agrees_with_its_twin(native: Native, dtype: torch.dtype) -> None:
    """A weight packed, taken or multiplied wrongly: the twin knows no panels."""
    ops, twins = native(compute_of(dtype)), Ops(compute_of(dtype))
    matrix, x = torch.randn(77, 50), torch.randn(9, 50, dtype=ops.compute)
    weights = [each.weight(77, 50, dtype, "cpu") for each in (ops, twins)]
    for start, stop in ((40, 77), (0, 3), (3, 40)):
        ops.write(weights[0], start, matrix[start:stop])
        twins.write(weights[1], start, matrix[start:stop])
    ids = torch.tensor([76, 0, 31, 32, 31])
    assert torch.equal(ops.take(weights[0], ids), twins.take(weights[1], ids))
    bias, residual = torch.randn(77, dtype=ops.compute), torch.randn(9, 77, dtype=ops.compute)
    for program in (Program.whole(50), Program((0, 20, 33, 50), (0, 0, 1)), Program((0, 7, 50), (0, 1))):
        extra = (bias, residual) if program.num_nodes == 1 else ()
        results = [each.linear(x, weight, program, *extra) for each, weight in zip((ops, twins), weights, strict=True)]
        torch.testing.assert_close(*results, rtol=1e-5 if ops.compute == torch.float32 else 1e-13, atol=1e-5)


def test_writes_into_out_and_takes_no_rows(native: Native) -> None:
    """A result that lands beside the shared memory given for it; an empty batch that crashes."""
    ops = native(torch.float32)
    for each in (ops, Ops(torch.float32)):
        weight, x = pack(each, torch.randn(33, 8), torch.float32), torch.randn(3, 8)
        program, memory = Program((0, 4, 8), (0, 0)), torch.full((2 * 3 * 33 + 2,), 7.0)
        out = memory[1:-1].view(2, 3, 33)
        assert each.linear(x, weight, program, out=out).data_ptr() == out.data_ptr()
        assert torch.equal(out, each.linear(x, weight, program))
        assert memory[0] == memory[-1] == 7.0
        assert each.linear(x[:0], weight, Program.whole(8)).shape == (0, 33)
        assert each.linear(x[:0], weight, program).shape == (2, 0, 33)


def test_one_row_uses_no_others_and_no_surplus_outputs(native: Native) -> None:
    """NaN of a neighbouring row, or of a panel's padding, that spreads."""
    ops = native(torch.float32)
    weight, x = pack(ops, torch.randn(33, 8), torch.float32), torch.randn(7, 8)
    clean = ops.linear(x, weight, Program.whole(8))
    x[3] = torch.nan
    weight.data[1, :, 1:] = torch.nan
    assert torch.equal(ops.linear(x, weight, Program.whole(8))[[0, 1, 2, 4, 5, 6]], clean[[0, 1, 2, 4, 5, 6]])


def test_refuses_weights_that_do_not_fit(native: Native) -> None:
    """float64 weights read as float32, silently."""
    for ops in (native(torch.float32), Ops(torch.float32)):
        with pytest.raises(ValueError, match="float64"):
            ops.weight(4, 4, torch.float64, "cpu")
