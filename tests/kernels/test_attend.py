from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardwise.kernels.native import NativeOps
from shardwise.kernels.ops import Ops

from .cases import Context, context

GROUPS = {"9/3": (0, 3, 6, 9), "ragged": (0, 1, 3), "one": (0, 20), "many": (0, 1, 2, 3, 4), "seven": (0, 7)}
LENGTHS, ROWS = (40, 17, 100, 1, 16), (40, 1, 3, 1, 5)
Pair = tuple[NativeOps, Ops]


def dense(case: Context) -> Tensor:
    """Softmax attention in float64, one row and head at a time, from the definition."""
    out = torch.empty(case.q.shape, dtype=torch.float64)
    starts, (_, heads, dims) = case.starts.tolist(), case.q.shape
    for sequence in range(len(starts) - 1):
        for row in range(starts[sequence], starts[sequence + 1]):
            seen = int(case.positions[row]) + 1
            first = max(seen - (case.window or seen), 0)
            blocks = case.table[sequence, : -(-seen // 16)].long()
            for head in range(heads):
                j = next(j for j in range(len(case.groups)) if case.groups[j + 1] > head)
                k = case.keys[blocks, j].transpose(0, 1).reshape(dims, -1)[:, :seen].double()
                v = case.values[blocks, j].reshape(-1, case.values.shape[3])[:seen, :dims].double()
                scores = case.q[row, head].double() @ k * dims**-0.5
                if case.slopes is not None:
                    scores += float(case.slopes[head]) * torch.arange(1.0 - seen, 1.0, dtype=torch.float64)
                out[row, head] = scores[first:].softmax(0) @ v[first:]
    return out


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("dims", [6, 10, 64, 80, 128, 256])
def test_is_attention(pair: Pair, groups: tuple[int, ...], dims: int) -> None:
    """A head read from another group, a key past the position, a tail of dims left out."""
    for ops in pair:
        case = context(ops, groups, dims, LENGTHS, ROWS)
        tolerance = 2e-6 if ops.compute == torch.float32 else 1e-13
        torch.testing.assert_close(case.attend(ops).double(), dense(case), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 16, 23, 1000])
@pytest.mark.parametrize("sloped", [False, True])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_slopes_and_windows(pair: Pair, groups: tuple[int, ...], sloped: bool, window: int | None) -> None:
    """A head that falls with another's slope, distances from the wrong end, a window one key too wide or narrow."""
    for ops in pair:
        case = context(ops, groups, 10, LENGTHS, ROWS)
        slopes = torch.linspace(0.01, 1, groups[-1], dtype=ops.compute) if sloped else None
        case = replace(case, slopes=slopes, window=window)
        tolerance = 2e-6 if ops.compute == torch.float32 else 1e-13
        torch.testing.assert_close(case.attend(ops).double(), dense(case), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("slope", "window"), [(None, None), (0.3, 20)])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_row_does_not_feel_the_batch(
    pair: Pair, groups: tuple[int, ...], slope: float | None, window: int | None
) -> None:
    """A tile of rows, or another sequence, that changes the order of a row's sums."""
    for ops in pair:
        slopes = None if slope is None else torch.full((groups[-1],), slope, dtype=ops.compute)
        case = replace(context(ops, groups, 24, LENGTHS, ROWS), slopes=slopes, window=window)
        full, starts = case.attend(ops), case.starts.tolist()
        for sequence in range(len(LENGTHS)):
            for row in range(starts[sequence], starts[sequence + 1]):
                alone = replace(
                    case,
                    q=case.q[row : row + 1],
                    starts=torch.tensor([0, 1], dtype=torch.int32),
                    table=case.table[sequence : sequence + 1],
                    positions=case.positions[row : row + 1],
                )
                assert torch.equal(alone.attend(ops)[0], full[row]), (ops.name, sequence, row)


def test_heads_do_not_feel_the_shard(pair: Pair) -> None:
    """A rank with fewer key heads, or with part of a group, that gets other bits."""
    ops = pair[0]
    case = context(ops, (0, 3, 6, 9), 10, LENGTHS, ROWS)
    full = case.attend(ops)
    for first, last, groups in ((0, 1, (0, 3)), (1, 3, (0, 3, 6))):
        q = case.q[:, 3 * first : 3 * last].contiguous()
        keys, values = case.keys[:, first:last].contiguous(), case.values[:, first:last].contiguous()
        part = replace(case, q=q, keys=keys, values=values, groups=groups)
        assert torch.equal(part.attend(ops), full[:, 3 * first : 3 * last])
    keys, values = case.keys[:, :2].contiguous(), case.values[:, :2].contiguous()
    ragged = replace(case, q=case.q[:, 2:5].contiguous(), keys=keys, values=values, groups=(0, 1, 3))
    assert torch.equal(ragged.attend(ops), full[:, 2:5])


def test_width_of_the_table_and_threads_do_not_matter(pair: Pair) -> None:
    """Blocks that are looked up though no row sees them (their number may be -1), or work shared out wrongly."""
    ops = pair[0]
    case = context(ops, (0, 3, 6, 9), 64, (200, 90, 33), (64, 1, 20))
    full = case.attend(ops)
    for wide, threads in ((0, 2), (5, 1), (3, 3)):
        torch.set_num_threads(threads)
        assert torch.equal(context(ops, (0, 3, 6, 9), 64, (200, 90, 33), (64, 1, 20), wide).attend(ops), full)


def test_rows_need_not_come_in_order(pair: Pair) -> None:
    """A tile that assumes that positions ascend and sums too little or too much."""
    ops = pair[0]
    case = context(ops, (0, 2), 16, (70,), (70,))
    order = torch.randperm(70)
    mixed = replace(case, q=case.q[order].contiguous(), positions=case.positions[order].contiguous())
    assert torch.equal(mixed.attend(ops), case.attend(ops)[order])


def test_no_rows(pair: Pair) -> None:
    """An empty batch, or a sequence without rows in it, that crashes."""
    for ops in pair:
        case = context(ops, (0, 2), 16, (20,), (20,))
        starts = torch.zeros(2, dtype=torch.int32)
        assert replace(case, q=case.q[:0], positions=case.positions[:0], starts=starts).attend(ops).shape == (0, 2, 16)
        table, starts = case.table.repeat(2, 1), torch.tensor([0, 0, 20], dtype=torch.int32)
        assert torch.equal(replace(case, table=table, starts=starts).attend(ops), case.attend(ops))


def test_large_scores(pair: Pair) -> None:
    """An exponential that overflows because the maximum was not taken out, or NaN that is swallowed."""
    for ops in pair:
        case = context(ops, (0, 2), 16, (20,), (20,))
        case.q *= 1e4
        assert case.attend(ops).isfinite().all()
        case.q[5, 0, 3] = torch.nan
        broken = case.attend(ops).isnan().any(2)
        assert broken.nonzero().tolist() == [[5, 0]]
