"""A folder of safetensors files with an index, written piece by piece to places that are known before the first byte.

Knows the container; where tensors come from and what they mean is not its business.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SHARD_BYTES = 5 * 10**9
FORMATS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


class Output(NamedTuple):
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: all but the first dimension."""
        return prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """Tensors that are made together and stay in one file, and how they come: some rows of each at a time, in order."""

    outputs: tuple[Output, ...]
    pieces: Callable[[], Iterator[Sequence[Tensor]]]

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(output.shape[0] * output.row_bytes for output in self.outputs)


def write_checkpoint(
    directory: Path, entries: Sequence[Entry], advance: Callable[[int], None], shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write ``entries`` into files of at most ``shard_bytes`` (or one entry), and the index; the files' paths.

    ``advance`` hears of bytes written. Memory holds one piece at a time. Raises OSError.
    """
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(other.size for other in shards[-1]) + entry.size > shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    placed: dict[str, str] = {}
    paths = []
    for number, shard in enumerate(shards, 1):
        path = directory / f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(path, shard, advance)
        placed |= {output.name: path.name for entry in shard for output in entry.outputs}
        paths.append(path)
    index = {"metadata": {"total_size": sum(entry.size for entry in entries)}, "weight_map": placed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return paths


def _write_file(path: Path, entries: Sequence[Entry], advance: Callable[[int], None]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for output in (output for entry in entries for output in entry.outputs):
        starts[output.name], end = end, end + output.shape[0] * output.row_bytes
        where = [starts[output.name], end]
        header[output.name] = {"dtype": FORMATS[output.dtype], "shape": output.shape, "data_offsets": where}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.flush()
        for entry in entries:
            rows = [0] * len(entry.outputs)
            for piece in entry.pieces():
                for at, (output, tensor) in enumerate(zip(entry.outputs, piece, strict=True)):
                    assert tensor.dtype == output.dtype
                    assert tensor.shape[1:] == output.shape[1:]
                    place = 8 + len(text) + starts[output.name] + rows[at] * output.row_bytes
                    _write_at(file.fileno(), tensor, place)
                    rows[at] += tensor.shape[0]
                    advance(tensor.nbytes)
            assert rows == [output.shape[0] for output in entry.outputs]
        os.fsync(file.fileno())


def _write_at(descriptor: int, tensor: Tensor, place: int) -> None:
    left = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    while left:
        written = os.pwrite(descriptor, left, place)
        left, place = left[written:], place + written
