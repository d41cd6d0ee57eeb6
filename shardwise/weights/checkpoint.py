"""What tensors a checkpoint holds, and exact reads of slices of them into private memory.

Knows bytes on disk and how they spell numbers; it knows no container, model, rank or torch.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.features import Quantization

MAX_HEADER = 100_000_000
"""Bytes a header or an index file may have (safetensors' own limit)."""
MAX_DIM = 2**40
"""Above any real dimension, and far enough below 2**63 for arithmetic on sizes."""

DENSE = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "U64": "<u8", "I32": "<i4", "U32": "<u4",
    "I16": "<i2", "U16": "<u2", "I8": "<i1", "U8": "<u1", "BOOL": "<u1",
}  # fmt: skip
"""numpy's names of the plain formats; BF16 comes as its raw 16 bits."""

BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54), "TQ2_0": (256, 66),
}  # fmt: skip
"""Numbers and bytes in one block of each quantised GGML format that ``gguf`` can dequantise."""

DEQUANTISE_BYTES = 1 << 18
"""Quantised bytes worked on at once: the temporaries stay within a core's cache."""

Span: TypeAlias = tuple[int, int]


class LoadError(ValueError):
    """A checkpoint that cannot be read; says which file, which tensor and why."""


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """Where one tensor lies: row-major ``shape`` from byte ``offset`` of ``Index.files[file]``."""

    file: int
    offset: int
    shape: list[int]
    dtype: str
    """A key of DENSE or BLOCKS."""


class Index(msgspec.Struct):
    """All tensors of a checkpoint: plain data, built once and sent to every rank."""

    files: list[str]
    tensors: dict[str, TensorInfo]
    quantization: Quantization | None = None
    """How the matrices that come with scales were rounded."""


def cell(dtype: str) -> tuple[int, int]:
    """Numbers and bytes in the smallest piece of a format that can be read: (1, item size) for the plain ones."""
    return BLOCKS.get(dtype) or (1, np.dtype(DENSE[dtype]).itemsize)


def open_regular(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Open a regular file for reading: (descriptor, size in bytes). Raises LoadError naming the file."""
    try:  # non-blocking, for a pipe of that name would hang the open
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        info = os.fstat(descriptor)
    except OSError as error:
        raise LoadError(f"{os.fspath(path)}: cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise LoadError(f"{os.fspath(path)}: is not a regular file")
    return descriptor, info.st_size


def read_into(descriptor: int, target: memoryview, offset: int) -> None:
    """Fill ``target`` from byte ``offset`` on. Raises OSError, also where the file ends too early."""
    while target:
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise OSError(0, f"the file ends at byte {offset}; it was cut short after it was opened")
        target, offset = target[count:], offset + count


class Checkpoint:
    """Reads slices of tensors; files are opened when first needed. Not for use by two threads at once."""

    def __init__(self, index: Index):
        self.index = index
        self.bytes_read = 0
        """Bytes of tensor data read from disk so far."""
        self._descriptors: dict[int, int] = {}

    def read(self, name: str, *spans: Span | None) -> npt.NDArray[Any]:
        """Read the box of tensor ``name`` that ``spans`` (start, stop) cut out, one per dimension; None or absent: all.

        Returns a new C-contiguous array of the box's shape in the stored format (DENSE; BF16 as uint16 bits), or
        float32 for a quantised format. Only the bytes asked for are read, up to whole blocks of a quantised format;
        where at least three quarters of each row are asked for, whole rows are. Raises LoadError.
        """
        info = self.index.tensors.get(name)
        if info is None:
            raise LoadError(f"tensor {name!r} is not in {', '.join(self.index.files)}")
        assert len(spans) <= len(info.shape)
        box = [span or (0, size) for span, size in itertools.zip_longest(spans, info.shape)]
        assert all(0 <= start <= stop <= size for (start, stop), size in zip(box, info.shape, strict=True))
        shape = [stop - start for start, stop in box]
        if info.dtype in DENSE:
            data = self._gather(name, info, box)
            return data.view(DENSE[info.dtype]).reshape(shape)
        numbers, _ = cell(info.dtype)
        start, stop = box[-1]
        first, last = start // numbers, -(-stop // numbers)
        data = self._gather(name, info, [*box[:-1], (first, last)])
        whole = _dequantise(data, info.dtype).reshape(*shape[:-1], (last - first) * numbers)
        return np.ascontiguousarray(whole[..., start - first * numbers : stop - first * numbers])

    def close(self) -> None:
        """Close the files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _gather(self, name: str, info: TensorInfo, box: Sequence[Span]) -> npt.NDArray[np.uint8]:
        """The bytes of a box, whose last span counts cells, as one flat array."""
        numbers, size = cell(info.dtype)
        dims = [*info.shape[:-1], info.shape[-1] // numbers] if info.shape else []
        strides = [size * math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
        cut = max((axis for axis, span in enumerate(box) if span != (0, dims[axis])), default=-1)
        counts = [stop - start for start, stop in box]
        if cut >= 1 and 3 * dims[cut] <= 4 * counts[cut] and 0 not in counts:
            start, stop = box[cut]
            wide = self._gather(name, info, [*box[:cut], (0, dims[cut]), *box[cut + 1 :]])
            return np.ascontiguousarray(wide.reshape(-1, dims[cut], strides[cut])[:, start:stop]).reshape(-1)
        data = np.empty(math.prod(counts) * size, np.uint8)
        run = math.prod(counts[max(cut, 0) :]) * size
        starts = itertools.product(*(range(*box[axis]) for axis in range(cut)))
        base = info.offset + (box[cut][0] * strides[cut] if cut >= 0 else 0)
        target = data.data
        try:
            descriptor = self._open(info.file)
            for place, indices in enumerate(starts if data.size else ()):
                offset = base + sum(index * stride for index, stride in zip(indices, strides, strict=False))
                read_into(descriptor, target[place * run : (place + 1) * run], offset)
        except OSError as error:
            raise LoadError(f"{self.index.files[info.file]}: tensor {name!r}: {error.strerror}") from error
        self.bytes_read += data.size
        return data

    def _open(self, file: int) -> int:
        if file not in self._descriptors:
            self._descriptors[file], _ = open_regular(self.index.files[file])
        return self._descriptors[file]


def _dequantise(data: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    """Numbers of flat quantised blocks, through the ``gguf`` package."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    numbers, size = BLOCKS[dtype]
    out = np.empty(data.size // size * numbers, np.float32)
    step = DEQUANTISE_BYTES // size
    for block in range(0, data.size // size, step):
        part = data[block * size : (block + step) * size]
        # one long row: gguf walks its input in groups of 16 rows, each a dozen numpy calls
        out[block * numbers : (block + step) * numbers] = dequantize(part[None], GGMLQuantizationType[dtype])[0]
    return out
