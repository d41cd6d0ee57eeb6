"""Safetensors files: checked headers, and which shard of a directory holds which tensor.

Knows the container; names and numbers mean nothing to it, and it never opens a pickle.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec

from shardwise.weights.checkpoint import (
    DENSE,
    MAX_DIM,
    MAX_HEADER,
    Index,
    LoadError,
    TensorInfo,
    cell,
    open_regular,
    read_into,
)


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=MAX_DIM)]], msgspec.Meta(max_length=8)]
    data_offsets: tuple[int, int]


class _ShardMap(msgspec.Struct):
    weight_map: dict[str, str]


def index_safetensors(directory: Path) -> Index:
    """Index the tensors named by ``model.safetensors.index.json``, or else those of the only ``.safetensors`` file.

    The index wins: files that it does not name are not opened, and tensors that it does not place in a shard are left
    out. Headers are checked completely: known formats, sizes that fit shapes, tensors that cover the file exactly.
    Raises LoadError naming the file, the tensor and the reason.
    """
    index_file = directory / "model.safetensors.index.json"
    if index_file.exists():
        text, _ = _read(index_file, 0, MAX_HEADER)
        with _decoding(f"{index_file}: the index"):
            placed = msgspec.json.decode(text, type=_ShardMap).weight_map
        files = sorted(set(placed.values()))
        for file in files:
            if file != os.path.basename(file) or not file.endswith(".safetensors"):
                raise LoadError(f"{index_file}: {file!r} is not the name of a .safetensors file beside it")
        missing = [file for file in files if not (directory / file).exists()]
        if missing:
            raise LoadError(f"{directory}: files named by the index are missing: {', '.join(missing)}; download them")
    else:
        files, placed = [_only_file(directory).name], None
    index = Index([str(directory / file) for file in files], {})
    shards = [_read_header(path, number) for number, path in enumerate(index.files)]
    if placed is None:
        index.tensors = shards[0]
    else:
        numbers = {file: number for number, file in enumerate(files)}
        for name, file in placed.items():
            info = shards[numbers[file]].get(name)
            if info is None:
                raise LoadError(f"{directory / file}: tensor {name!r}: the index places it here, but the file lacks it")
            index.tensors[name] = info
    return index


def _only_file(directory: Path) -> Path:
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if "model.safetensors" in found or len(found) == 1:
        return directory / ("model.safetensors" if "model.safetensors" in found else found[0])
    if found:
        raise LoadError(f"{directory}: {len(found)} .safetensors files without model.safetensors.index.json; add it")
    pickled = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in directory.glob(pattern))
    if pickled:
        raise LoadError(
            f"{directory}: only pickled weights ({pickled[0]}), which can run code and are never opened here; write "
            f"them as safetensors first: shardwise convert {directory} NEW"
        )
    raise LoadError(f"{directory}: holds no .safetensors file")


def _read_header(path: str, number: int) -> dict[str, TensorInfo]:
    """Parse and check the header of one safetensors file: 8 bytes of length, JSON, then the tensors' bytes."""
    prefix, size = _read(path, 0, 8)
    length = int.from_bytes(prefix, "little")
    if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
        raise LoadError(f"{path}: truncated or no safetensors file: a header of {length} bytes in a file of {size}")
    header, _ = _read(path, 8, length)
    with _decoding(f"{path}: the header"):
        fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    fields.pop("__metadata__", None)
    tensors: dict[str, TensorInfo] = {}
    runs: list[tuple[int, int, str]] = []
    for name, raw in fields.items():
        where = f"{path}: tensor {name[:200]!r}"
        with _decoding(where):
            entry = msgspec.json.decode(raw, type=_Entry)
        if entry.dtype not in DENSE:
            raise LoadError(f"{where}: format {entry.dtype[:20]!r} is not one of {', '.join(DENSE)}")
        start, stop = entry.data_offsets
        need = math.prod(entry.shape) * cell(entry.dtype)[1]
        if stop - start != need:
            raise LoadError(f"{where}: bytes {start} to {stop}, but {entry.dtype} {entry.shape} takes {need}")
        runs.append((start, stop, where))
        tensors[name] = TensorInfo(number, 8 + length + start, entry.shape, entry.dtype)
    end = 0
    for start, stop, where in sorted(runs):
        if start != end:
            raise LoadError(f"{where}: starts at byte {start} of the data instead of {end}")
        end = stop
        if 8 + length + end > size:
            raise LoadError(f"{where}: ends beyond the file's {size} bytes; truncated, download it again")
    if 8 + length + end < size:
        raise LoadError(f"{path}: {size - 8 - length - end} bytes too long for its header; damaged, download it again")
    return tensors


def _read(path: str | os.PathLike[str], offset: int, limit: int) -> tuple[bytearray, int]:
    """Up to ``limit`` bytes of a file from ``offset`` on, and the file's size."""
    descriptor, size = open_regular(path)
    try:
        data = bytearray(max(min(size - offset, limit), 0))
        read_into(descriptor, memoryview(data), offset)
        return data, size
    except OSError as error:
        raise LoadError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


@contextmanager
def _decoding(what: str) -> Iterator[None]:
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LoadError(f"{what} is not valid JSON of its kind: {error}") from error
