"""One of the ranks that test_state_dict starts: loads a net in every way of sharding, and fails by an assertion."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.integrations.state_dict import load_from_full_state_dict


class Net(nn.Module):
    """A tied embedding around an MLP, with a buffer of each kind. ``width`` 9 divides by nothing here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, width)
        self.down = nn.Linear(width, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("turn", torch.arange(6) * 0.1, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.scale * self.head(x + self.down(torch.relu(self.up(x * self.turn))))


TURN = torch.arange(6, dtype=torch.float64) * 0.1


def whole(width: int) -> Net:
    torch.manual_seed(3)
    net = Net(width).double()
    net.turn = TURN.clone()
    return net


def empty(width: int) -> Net:
    """On the meta device but for what no state dict holds."""
    with torch.device("meta"):
        net = Net(width).double()
    net.turn = TURN.clone()
    return net


def locals_of(net: nn.Module) -> Iterable[Tensor]:
    for parameter in net.parameters():
        yield parameter.to_local() if isinstance(parameter, DTensor) else parameter


def tensor_parallel(net: Net) -> Net:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})  # type: ignore[return-value]


def fully_sharded(net: Net) -> Net:
    for part in (net.up, net.down, net):
        fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def main(rank: int, size: int, meeting: str) -> None:
    on_two_axes(size + rank)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    ids = torch.tensor([[1, 5, 10, 0]])
    for shard, width in ((tensor_parallel, 8), (fully_sharded, 9)):
        expected = whole(width)(ids)
        for broadcast in (False, True):
            told: dict[str, Any] = dict(whole(width).state_dict()) if rank == 0 or not broadcast else {}
            told.pop("head.weight", None)  # as checkpoints of tied models are
            net = shard(empty(width))
            left = load_from_full_state_dict(net, told, "cpu", strict=True, broadcast=broadcast)
            assert left == ([], []), left
            assert all(value is None for value in told.values())
            assert sum(isinstance(parameter, DTensor) for parameter in net.parameters()) == (4 if width == 8 else 5)
            for part in locals_of(net):
                assert part.untyped_storage().nbytes() <= max(part.nbytes, 8 * 6 * 6), "a part keeps the whole alive"
            assert torch.allclose(net(ids), expected, rtol=0, atol=1e-12), (shard.__name__, broadcast)
            refused(shard, width, broadcast, rank)
    dist.barrier()
    dist.destroy_process_group()


def on_two_axes(rank: int) -> None:
    """Rank 2 or 3 of four, whose peers do not exist: cutting needs no word from them."""
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = parallelize_module(empty(10), mesh["tensor"], {"up": ColwiseParallel()})
    fully_shard(net, mesh=mesh["data"])
    load_from_full_state_dict(net, dict(whole(10).state_dict()), "cpu", strict=True)
    data, tensor = divmod(rank, 2)
    assert torch.equal(net.up.weight.to_local(), whole(10).up.weight.chunk(2)[tensor].chunk(2)[data])  # type: ignore[operator]
    dist.destroy_process_group()


def refused(shard: Any, width: int, broadcast: bool, rank: int) -> None:
    """On every rank alike, though with broadcast only rank 0 has seen the keys."""
    for change, names in (({"up.bias": None, "new": torch.zeros(1)}, ("up.bias", "new")), ({"up.bias": TURN}, ("up",))):
        told: dict[str, Any] = {**whole(width).state_dict(), **change} if rank == 0 or not broadcast else {}
        before = dict(told)
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            load_from_full_state_dict(shard(empty(width)), told, "cpu", strict=True, broadcast=broadcast)
        said = str(caught.value)
        assert all(name in said for name in names) or (broadcast and rank > 0), said
        assert told == before


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
