from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.kernels.compiled import CompiledOps
from shardwise.kernels.native import NativeOps
from shardwise.kernels.ops import Ops, Program

from .cases import pack

HEADS, KEY_HEADS, DIMS = 4, 2, 6
WIDTH = HEADS * DIMS


def layer(ops: Ops, x: Tensor, parts: dict[str, Tensor], keys: Tensor, values: Tensor) -> Tensor:
    qkv_weight, out_weight, up_weight = (parts["weights"][name] for name in ("qkv", "out", "up"))  # type: ignore[index]
    rows = torch.arange(x.shape[0], dtype=torch.int32)
    qkv = ops.linear(ops.rms_norm(x, parts["norm"], 1e-5), qkv_weight, Program.whole(WIDTH))
    qkv = ops.head_norm(qkv, parts["norm"][:DIMS], parts["norm"][DIMS : 2 * DIMS], HEADS, 1e-5)
    q = ops.rotate_write(qkv, parts["cos"], parts["sin"], rows, rows, keys, values, HEADS)
    starts, table = torch.tensor([0, x.shape[0]], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    how = (0, 2, 4), DIMS**-0.5, parts["norm"][:HEADS].contiguous(), 3
    mixed = ops.attend(q, keys, values, starts, table, rows, *how).flatten(1)
    nodes = ops.linear(mixed, out_weight, Program((0, 12, WIDTH), (0, 0)))
    x = ops.finish(nodes.unbind(), (0, 1), parts["norm"], x)
    return ops.activate(
        "silu_mul", ops.linear(ops.layer_norm(x, parts["norm"], parts["norm"], 1e-5), up_weight, Program.whole(WIDTH))
    )


@pytest.mark.parametrize("which", [0, 1], ids=["native", "torch"])
def test_a_layer_is_traced_whole(pair: tuple[NativeOps, Ops], which: int) -> None:
    """A fake of the wrong shape, a hidden write to the cache, a call that breaks the graph."""
    plain = pair[which]
    ops, compute = CompiledOps(plain), plain.compute
    shapes = {"qkv": (HEADS + 2 * KEY_HEADS) * DIMS, "out": WIDTH, "up": 20}
    weights = {name: pack(plain, torch.randn(rows, WIDTH), compute) for name, rows in shapes.items()}
    cos, sin = torch.randn(2, 16, DIMS // 2, dtype=compute).unbind()
    parts = {"weights": weights, "norm": torch.randn(WIDTH, dtype=compute), "cos": cos, "sin": sin}
    x = torch.randn(5, WIDTH, dtype=compute)
    expected_cache, cache = plain.cache(1, KEY_HEADS, DIMS, "cpu"), plain.cache(1, KEY_HEADS, DIMS, "cpu")
    expected = layer(plain, x, parts, *expected_cache)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(ops, x, parts, *cache), expected)
    assert torch.equal(cache[0], expected_cache[0])
    assert torch.equal(cache[1], expected_cache[1])
    assert torch.equal(ops.take(weights["up"], torch.tensor([19, 3])), plain.take(weights["up"], torch.tensor([19, 3])))


@pytest.mark.parametrize("which", [0, 1], ids=["native", "torch"])
def test_fakes_match(pair: tuple[NativeOps, Ops], which: int) -> None:
    """A schema that hides a mutation or an alias, or a fake with other strides than the kernel's."""
    plain = pair[which]
    ops, weight, x = (
        CompiledOps(plain),
        pack(plain, torch.randn(7, 8), plain.compute),
        torch.randn(1, 8).to(plain.compute),
    )
    tests = ("test_schema", "test_faketensor")
    keys, values = plain.cache(1, 1, 2, "cpu")
    one, two = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    for op, arguments in (
        (ops._take, (*weight, torch.tensor([1, 6]))),
        (ops._linear, (x, *weight, [0, 8], [0], x[0, :7].contiguous(), x[:, :7].contiguous())),
        (ops._linear, (x, *weight, [0, 4, 8], [0, 0], None, None)),
        (ops._finish, ([x, x], [0, 1], None, x)),
        (ops._rms_norm, (x, x[0], 1e-5)),
        (ops._layer_norm, (x, x[0], x[0], 1e-5)),
        (ops._activate, ("silu_mul", x)),
        (ops._activate, ("gelu", x)),
        (ops._rotate_write, (x, None, None, one, one, keys, values, 2)),
        (ops._attend, (x.view(1, 4, 2), keys, values, two, one.view(1, 1), one, [0, 4], 1.0)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=tests)
