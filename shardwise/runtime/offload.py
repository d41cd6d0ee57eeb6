"""Layers whose weights are not in their rank's own memory, and how these are there in time: one layer ahead of its use.

On the CPU the operations read such a layer right from a file that is mapped: prefetching is a word to the kernel, and
what is mapped is dropped again behind the layer. For a GPU layers lie in pinned host memory, or in such a file, and go
through two stretches of its memory in turn, on a stream of their own. Knows layers and bytes; which layers these are is
decided by `offload_plan`, and the arithmetic is the same wherever they are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.kernels.ops import Weight
from shardwise.models.batch import KV, Batch
from shardwise.models.decoder import Decoder, Layer
from shardwise.parallel.placement import Plan, layer_of
from shardwise.runtime.spec import Home

ALIGN = 64
"""Where tensors begin, in bytes: at a vector of any kernel."""


class Store(Protocol):
    """Where the weights of some layers are. Layers are known by their numbers."""

    def enter(self, layer: int) -> None:
        """The layer is about to be used: its weights must be there when it is."""

    def leave(self, layer: int) -> None:
        """The layer has been used, or on a GPU is going to be by what is queued."""

    def loaded(self) -> None:
        """All weights have been written, once."""


class Away(Layer):
    """A layer that tells ``store`` when it is used."""

    def __init__(self, layer: Layer, number: int, store: Store) -> None:
        super().__init__(layer.attention_norm, layer.attention, layer.mlp_norm, layer.mlp)
        self.number = number
        self.store = store

    def __call__(self, x: Tensor, kv: KV, batch: Batch) -> Tensor:
        """See `Layer`."""
        self.store.enter(self.number)
        x = super().__call__(x, kv, batch)
        self.store.leave(self.number)
        return x


class Parcel:
    """The parameters of one layer, end to end in one stretch of memory of ``size`` bytes."""

    def __init__(self, decoder: Decoder, parameters: Sequence[str]) -> None:
        self._owners = [decoder.owner(parameter) for parameter in parameters]
        self.size = sum(_step(part) for owner, name in self._owners for part in _parts(getattr(owner, name)))

    def open(self, memory: Tensor) -> None:
        """Let the parameters be views of ``memory`` [>= size] uint8."""
        at = 0
        for owner, name in self._owners:
            found = getattr(owner, name)
            views = []
            for part in _parts(found):
                views.append(memory[at : at + part.nbytes].view(part.dtype).view(part.shape))
                at += _step(part)
            if isinstance(found, Weight):
                found = found._replace(data=views[0], scales=views[1] if len(views) > 1 else None)
            setattr(owner, name, found if isinstance(found, Weight) else views[0])


def _parts(parameter: Any) -> list[Tensor]:
    if not isinstance(parameter, Weight):
        return [parameter]
    return [parameter.data] if parameter.scales is None else [parameter.data, parameter.scales]


def _step(part: Tensor) -> int:
    return -(-part.nbytes // ALIGN) * ALIGN


class Mapped:
    """Layers in a file without a name, which goes with the last process that has it mapped, however that ends."""

    def __init__(self, parcels: dict[int, Parcel], directory: str) -> None:
        self._spans: dict[int, tuple[int, int]] = {}
        self._next = _rounds(parcels)
        end = 0
        for number, parcel in parcels.items():
            size = -(-parcel.size // mmap.PAGESIZE) * mmap.PAGESIZE
            self._spans[number] = end, size
            end += size
        if not parcels:
            return
        os.makedirs(directory, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, prefix="offload-") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and would be a deadly signal later on
                os.posix_fallocate(file.fileno(), 0, end)
            else:
                file.truncate(end)
            self._map = mmap.mmap(file.fileno(), end)
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.memory = {number: memory[start : start + size] for number, (start, size) in self._spans.items()}
        for number, parcel in parcels.items():
            parcel.open(self.memory[number])

    def enter(self, layer: int) -> None:
        """Have the one after it read from disk meanwhile."""
        self.fetch(self._next[layer])

    def fetch(self, layer: int) -> None:
        """Have it read from disk, as far as it isn't in the page cache."""
        self._map.madvise(mmap.MADV_WILLNEED, *self._spans[layer])

    def leave(self, layer: int) -> None:
        """Its pages no longer count as this process's; they stay in the page cache while there is room."""
        self._map.madvise(mmap.MADV_DONTNEED, *self._spans[layer])

    def loaded(self) -> None:
        """See `Store`. What reading took goes back to the system."""
        for layer in self._spans:
            self.leave(layer)
        with suppress(OSError, AttributeError):  # glibc's; others give it back by themselves
            ctypes.CDLL(None).malloc_trim(0)


class _Slot:
    """A stretch of the device's memory in which layers take turns."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.layer: int | None = None
        self.filled: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.used: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class Staged:
    """Layers that are copied to the device for each use: from pinned host memory, the last ones from a file.

    A copy from pinned memory runs beside the layer before. One from a file keeps this thread busy, but not the device,
    on which that layer is queued by then.
    """

    def __init__(self, parcels: dict[int, Parcel], home: Home, directory: str, device: torch.device) -> None:
        self._parcels = parcels
        self._next = _rounds(parcels)
        gpu = device.type == "cuda"
        self._copies = torch.cuda.Stream(device) if gpu else None  # type: ignore[no-untyped-call]
        self._kept = {
            number: torch.zeros(parcel.size, dtype=torch.uint8, pin_memory=gpu)
            for number, parcel in parcels.items()
            if number < home.disk
        }
        for number, memory in self._kept.items():
            parcels[number].open(memory)
        self._file = Mapped({number: parcel for number, parcel in parcels.items() if number >= home.disk}, directory)
        slots = [_Slot(max(parcel.size for parcel in parcels.values()), device) for _ in list(parcels)[:2]]
        self._slots = {number: slots[at % 2] for at, number in enumerate(parcels)}

    def loaded(self) -> None:
        """See `Store`. From now on the layers are where they take turns."""
        for number, parcel in self._parcels.items():
            parcel.open(self._slots[number].memory)
        self._file.loaded()

    def enter(self, layer: int) -> None:
        """See `Store`. A layer that was not foreseen is fetched now."""
        slot = self._slots[layer]
        self._fetch(layer)
        if slot.filled is not None:
            torch.cuda.current_stream().wait_event(slot.filled)

    def leave(self, layer: int) -> None:
        """See `Store`. The next one is fetched while this one is used."""
        slot = self._slots[layer]
        if slot.used is not None:
            slot.used.record()
        self._fetch(self._next[layer])

    def _fetch(self, layer: int) -> None:
        slot, size = self._slots[layer], self._parcels[layer].size
        if slot.layer == layer:
            return
        slot.layer = layer
        with torch.cuda.stream(self._copies) if self._copies is not None else nullcontext():
            if self._copies is not None and slot.used is not None:
                self._copies.wait_event(slot.used)
            kept = self._kept.get(layer)
            slot.memory[:size].copy_(self._file.memory[layer][:size] if kept is None else kept, non_blocking=True)
            if slot.filled is not None:
                slot.filled.record()
        if kept is None:
            self._file.leave(layer)
        if (following := self._next[layer]) not in self._kept:
            self._file.fetch(following)


def _rounds(parcels: dict[int, Parcel]) -> dict[int, int]:
    """Which layer is used after each; the first one again after the last."""
    numbers = list(parcels)
    return dict(zip(numbers, [*numbers[1:], *numbers[:1]], strict=True))


def put_away(decoder: Decoder, plan: Plan, home: Home, directory: str, device: torch.device) -> Store:
    """Give the layers of ``decoder`` that were built without memory the places that ``home`` says."""
    parcels = {
        number: Parcel(decoder, [parameter for parameter in plan if layer_of(parameter) == number])
        for number in range(home.host, home.stop)
    }
    store = make_store(parcels, home, directory, device)
    for number in parcels:
        decoder.layers[number] = Away(decoder.layers[number], number, store)
    return store


def make_store(parcels: dict[int, Parcel], home: Home, directory: str, device: torch.device) -> Store:
    """What suits the device."""
    return Mapped(parcels, directory) if device.type == "cpu" else Staged(parcels, home, directory, device)
