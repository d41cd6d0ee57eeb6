"""load_from_full_state_dict on models that are plain, tensor parallel, fully sharded or both."""

from __future__ import annotations

import subprocess
import sys
import weakref
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
from shardwise import load_from_full_state_dict
from tests.integrations.state_dict_ranks import TURN, Net, empty, whole

IDS = torch.tensor([[1, 5, 10, 0]])


def test_a_plain_model() -> None:
    """Guards plain parameters, the dtype of the model, tied parameters that stay one, and requires_grad as it was."""
    told = dict(whole(9).float().state_dict())
    net = empty(9)
    net.up.bias.requires_grad_(False)
    assert load_from_full_state_dict(net, told, "cpu", strict=True) == ([], [])
    assert net.up.weight.dtype == torch.float64
    assert torch.allclose(net(IDS), whole(9)(IDS), rtol=0, atol=1e-5)
    assert net.head.weight is net.embed.weight
    assert [net.up.bias.requires_grad, net.up.weight.requires_grad] == [False, True]
    assert shardwise.load_from_full_state_dict is load_from_full_state_dict


def test_it_frees_as_it_goes() -> None:
    """Guards the memory of loading: a cast tensor's original is gone with its entry, and without release all stay."""
    source = whole(9).float().state_dict()
    kept = dict(source)
    load_from_full_state_dict(empty(9), kept, "cpu", release=False)
    assert all(torch.equal(kept[name], source[name]) for name in source)
    told = {name: value.clone() for name, value in source.items()}
    alive = [weakref.ref(value) for value in told.values()]
    del kept, source
    net = empty(9)
    load_from_full_state_dict(net, told, "cpu")
    assert [ref() for ref in alive] == [None] * len(alive)
    assert set(told.values()) == {None}
    view = torch.zeros(100, 9, 6, dtype=torch.float64)  # as a slice of a mapped file is
    load_from_full_state_dict(net, {"up.weight": view[7]}, "cpu")
    assert net.up.weight.untyped_storage().nbytes() == 8 * 9 * 6


def test_keys_that_do_not_match() -> None:
    """Guards strict, and that without it the rest is loaded: unexpected keys crashed torchtune's loader."""
    told = {**whole(9).state_dict(), "new": torch.zeros(2)}
    del told["up.bias"]
    before = dict(told)
    with pytest.raises(ValueError, match=r"lacks up\.bias and holds new"):
        load_from_full_state_dict(empty(9), told, "cpu", strict=True)
    assert told == before
    net = empty(9)
    assert load_from_full_state_dict(net, told, "cpu") == (["up.bias"], ["new"])
    assert net.up.bias.is_meta
    assert torch.equal(net.up.weight, whole(9).up.weight)
    with pytest.raises(ValueError, match=r"up\.weight \[9, 6\], not \[8, 6\]"):
        load_from_full_state_dict(empty(8), dict(whole(9).state_dict()), "cpu")


def test_buffers_that_no_state_dict_holds() -> None:
    """Guards rotary embeddings: a buffer without values is missing by name and never silently left on meta."""
    with torch.device("meta"):
        net = Net(9).double()
    with pytest.raises(ValueError, match="lacks turn"):
        load_from_full_state_dict(net, dict(whole(9).state_dict()), "cpu", strict=True)
    assert load_from_full_state_dict(net, dict(whole(9).state_dict()), "cpu") == (["turn"], [])
    net = empty(9)
    load_from_full_state_dict(net, dict(whole(9).state_dict()), "cpu", cpu_offload=True)
    assert torch.equal(net.turn, TURN)
    assert torch.equal(net.scale, torch.tensor(2.0, dtype=torch.float64))


def test_a_format_of_its_own_is_refused() -> None:
    """Guards against quietly replacing a quantised parameter by plain numbers."""

    class Packed(torch.Tensor):
        pass

    net = nn.Linear(2, 2)
    net.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(Packed))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight is a Packed"):
        load_from_full_state_dict(net, {}, "cpu")


def test_sharded_models_on_two_processes(tmp_path: Path) -> None:
    """Guards DTensor parameters, tensor parallel and fully sharded: each rank loads its part of its own state dict or
    of rank 0's, computes the whole model's answer with it, keeps no whole tensor alive, and refuses the same keys as
    the others. And a mesh of two axes, where a part is a slice of a slice in a dimension that neither divides evenly.
    """
    command = [sys.executable, "-m", "tests.integrations.state_dict_ranks"]
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            arguments = [*command, str(rank), "2", str(tmp_path / "meeting")]
            ranks.append(stack.enter_context(subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)))
            stack.callback(ranks[-1].kill)
        for each in ranks:
            _, said = each.communicate(timeout=120)
            assert each.returncode == 0, said
