"""A whole state dict into a model that you built and sharded yourself. Knows torch, and none of our own models."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


class Loaded(NamedTuple):
    """What a load left over, in the names that torch gives it."""

    missing_keys: list[str]
    """Parameters and buffers of the model that have no value from here; buffers without any value among them."""
    unexpected_keys: list[str]
    """What the state dict held beside them."""


def load_from_full_state_dict(
    model: nn.Module,
    full_state_dict: MutableMapping[str, Any],
    device: torch.device | str,
    *,
    strict: bool = False,
    cpu_offload: bool = False,
    release: bool = True,
    broadcast: bool = False,
) -> Loaded:
    """Give ``model`` the values of a state dict of whole tensors, each rank its own part of them.

    ``model`` may be on the meta device, and its parameters plain (they are loaded whole) or DTensors of any mesh:
    tensor parallel (``parallelize_module``), FSDP2 (``fully_shard``) or both. Values take the parameter's dtype and go
    to ``device``, parameters on to the host with ``cpu_offload``. One tensor is whole on the device at a time, and with
    ``release`` its entry in ``full_state_dict`` becomes None as soon as its part is cut out. What needs neither cut,
    dtype nor device is taken as it is. Parameters that are one, as tied embeddings are, stay one; a key is enough.
    Buffers that no state dict holds (those of rotary embeddings) move to the device; on the meta device they have no
    values, and are among the missing keys.

    Each rank brings the state dict and cuts its part out of its own, without communication; with ``broadcast`` only
    rank 0 of the default process group does, and the others, all of them at once, may bring an empty one.

    Raises ValueError, before anything is changed, for a tensor of another shape or in a format of its own, and with
    ``strict`` for missing and unexpected keys. The semantics are those of torchtune's
    ``load_from_full_model_state_dict``, where ``broadcast`` is called use_distributed_state_dict and ``release``
    release_sd.
    """
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    unassigned = {name: value for name, value in model.named_buffers() if name not in state}
    for name, value in state.items():
        kind = type((value.to_local() if isinstance(value, DTensor) else value).data)
        if kind is not Tensor:
            raise ValueError(f"{name} is a {kind.__name__}, not plain numbers; load the model first, then convert it")
    mine = not broadcast or dist.get_rank() == 0
    given = {name for name, value in full_state_dict.items() if value is not None} if mine else set()
    unexpected = sorted(given - set(state))
    wrong = [name for name in sorted(given & set(state)) if full_state_dict[name].shape != state[name].shape]
    if broadcast:
        given, counts = _agree(sorted(state), given, (len(unexpected), len(wrong)), device)
    else:
        counts = (len(unexpected), len(wrong))
    sources = {id(value): name for name, value in state.items() if name in given}
    missing = [name for name, value in state.items() if id(value) not in sources]
    missing += [name for name, value in unassigned.items() if value.is_meta]
    if counts[1]:
        told = [f"{name} {list(full_state_dict[name].shape)}, not {list(state[name].shape)}" for name in wrong]
        raise ValueError(f"the state dict has tensors of other shapes than the model: {_some(told, counts[1])}")
    if strict and (missing or counts[0]):
        told = [f"lacks {_some(missing, len(missing))}"] if missing else []
        told += [f"holds {_some(unexpected, counts[0])} beside them"] if counts[0] else []
        raise ValueError(f"the state dict isn't the model's: it {' and '.join(told)}; strict=False goes on without")

    parts: dict[int, Tensor] = {}
    for key, name in sorted(sources.items(), key=lambda item: item[1]):
        target = state[name]
        value = full_state_dict[name].to(target.dtype).to(device) if mine else torch.empty(0)
        if broadcast:
            value = value.contiguous() if mine else torch.empty(target.shape, dtype=target.dtype, device=device)
            dist.broadcast(value, src=0)
        part = _part(value.detach(), target)
        if isinstance(target, nn.Parameter):
            part = nn.Parameter(part.cpu() if cpu_offload else part, requires_grad=target.requires_grad)
        parts[key] = part
        if release and mine:
            full_state_dict[name] = None
    if release and mine:
        full_state_dict.update({name: None for name in full_state_dict if name in state})  # the twins of tied ones
    ready = {name: parts[id(value)] for name, value in state.items() if id(value) in parts}
    model.load_state_dict(ready, strict=False, assign=True)  # a meta tensor can't be copied to
    for name, buffer in unassigned.items():
        if not buffer.is_meta:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, buffer.to(device))
    return Loaded(missing, unexpected)


def _part(value: Tensor, target: Tensor) -> Tensor:
    """This rank's part of a whole tensor, which a piece of it would keep alive."""
    part, own = value, value
    if isinstance(target, DTensor):
        part = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        own = part.to_local()
    return part.clone() if own.untyped_storage().nbytes() > own.nbytes else part


def _agree(
    names: Sequence[str], given: set[str], counts: tuple[int, int], device: torch.device | str
) -> tuple[set[str], tuple[int, ...]]:
    """What rank 0 says that it has: of these names, and how many unexpected tensors and such of a wrong shape."""
    said = torch.tensor([*(name in given for name in names), *counts], dtype=torch.int64, device=device)
    dist.broadcast(said, src=0)
    *present, unexpected, wrong = said.tolist()
    return {name for name, here in zip(names, present, strict=True) if here}, (unexpected, wrong)


def _some(told: list[str], count: int) -> str:
    """The first few; only rank 0 knows the names of what it alone has."""
    shown = ", ".join(told[:5]) if told else f"{count} that rank 0 names"
    return f"{shown} and {count - 5} more" if told and count > 5 else shown
