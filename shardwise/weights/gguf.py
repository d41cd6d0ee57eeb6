"""The header of a GGUF file: its metadata and where its tensors lie, read as if the file were hostile.

Knows the container (versions 2 and 3, little endian); what keys and tensor names mean is other rooms' business.
"""

from __future__ import annotations

import math
import os
import struct
from typing import Any, NoReturn

import numpy as np

from shardwise.weights.checkpoint import (
    MAX_DIM,
    MAX_HEADER,
    Index,
    LoadError,
    TensorInfo,
    cell,
    open_regular,
    read_into,
)

MAX_ITEMS = 1 << 21
"""Array items in one header: four times the largest vocabulary with its merges, scores and types."""
MAX_TENSORS = 1 << 17
MAX_KEYS = 1 << 14
WINDOW = 1 << 20
"""Bytes by which the header is read on."""

# wire number -> numpy's name; 7 is bool, 8 string, 9 array
SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
BOOL, STRING, ARRAY = 7, 8, 9

TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip


def read_gguf(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Index]:
    """Read a GGUF file's metadata (numbers, booleans, strings and flat lists of them) and the index of its tensors.

    Shapes are row-major: GGUF's own order reversed. Raises LoadError naming the file, the key or tensor and the reason,
    for anything out of order; nothing is allocated by a number in the file that the file's size does not bear out.
    """
    descriptor, size = open_regular(path)
    try:
        header = _Header(os.fspath(path), descriptor, size)
        return header.parse()
    finally:
        os.close(descriptor)


class _Header:
    """A cursor over the first bytes of the file, which are read window by window."""

    def __init__(self, path: str, descriptor: int, size: int):
        self.path = path
        self.descriptor = descriptor
        self.size = size
        self.data = bytearray()
        self.position = 0
        self.items = MAX_ITEMS
        self.subject = "header"

    def fail(self, reason: str) -> NoReturn:
        raise LoadError(f"{self.path}: {self.subject}: {reason}")

    def ensure(self, end: int) -> None:
        """Have the bytes up to ``end`` in memory."""
        if end <= len(self.data):
            return
        if end > self.size:
            self.fail(f"truncated: needs byte {end} of a file of {self.size}")
        if end > MAX_HEADER:
            self.fail(f"the header exceeds {MAX_HEADER} bytes")
        have = len(self.data)
        self.data += bytes(min(max(end - have, WINDOW), self.size - have))
        try:
            with memoryview(self.data) as view:
                read_into(self.descriptor, view[have:], have)
        except OSError as error:
            self.fail(str(error.strerror))

    def take(self, form: str) -> Any:
        start = self.position
        self.position += struct.calcsize(form)
        self.ensure(self.position)
        return struct.unpack_from(form, self.data, start)[0]

    def strings(self, count: int) -> list[str]:
        """``count`` strings, each a length in 8 bytes and UTF-8."""
        length_at = struct.Struct("<Q").unpack_from
        position, found = self.position, []
        for _ in range(count):
            start = position + 8
            if start > len(self.data):
                self.ensure(start)
            (length,) = length_at(self.data, position)
            position = start + length
            if position > len(self.data):
                self.ensure(position)
            try:
                found.append(self.data[start:position].decode())
            except UnicodeDecodeError:
                self.fail("a string is not valid UTF-8")
        self.position = position
        return found

    def numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype("<u1" if kind == BOOL else SCALARS[kind])
        start = self.position
        self.position += count * dtype.itemsize
        self.ensure(self.position)
        found = np.frombuffer(bytes(self.data[start : self.position]), dtype)
        if kind != BOOL:
            return list(found.tolist())
        if count and found.max() > 1:
            self.fail("a boolean is neither 0 nor 1")
        return list(found.astype(bool).tolist())

    def values(self, kind: int, count: int) -> list[Any]:
        if kind == STRING:
            return self.strings(count)
        if kind != BOOL and kind not in SCALARS:
            self.fail("arrays within arrays are not supported" if kind == ARRAY else f"unknown value type {kind}")
        return self.numbers(kind, count)

    def metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number in range(count):
            self.subject = f"metadata key number {number}"
            (key,) = self.strings(1)
            self.subject = f"metadata key {key[:200]!r}"
            if key in found:
                self.fail("appears twice")
            kind = self.take("<I")
            if kind == ARRAY:
                kind, length = self.take("<I"), self.take("<Q")
                self.items -= length
                if self.items < 0:
                    self.fail(f"an array of {length} items is more than a header may hold")
                found[key] = self.values(kind, length)
            else:
                (found[key],) = self.values(kind, 1)
        return found

    def parse(self) -> tuple[dict[str, Any], Index]:
        self.ensure(min(self.size, 24))
        if self.data[:4] != b"GGUF":
            self.fail("no GGUF file (it does not begin with the letters GGUF)")
        self.position = 4
        version = self.take("<I")
        if version not in (2, 3):
            form = "in big-endian order" if version & 0xFFFF == 0 else f"version {version}"
            self.fail(f"GGUF {form} is not supported; convert the model anew")
        num_tensors, num_keys = self.take("<Q"), self.take("<Q")
        if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
            self.fail(f"{num_tensors} tensors and {num_keys} keys are more than a header may hold")
        metadata = self.metadata(num_keys)
        self.subject = "metadata key 'split.count'"
        parts = metadata.get("split.count", 0)
        if parts not in (0, 1):
            self.fail(f"one of {parts} parts of a model; join them: llama-gguf-split --merge FIRST.gguf WHOLE.gguf")
        return metadata, Index([self.path], self.tensors(num_tensors, metadata.get("general.alignment", 32)))

    def tensors(self, count: int, alignment: Any) -> dict[str, TensorInfo]:
        self.subject = "metadata key 'general.alignment'"
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            self.fail(f"{alignment!r} is not a power of two")
        raw: dict[str, tuple[int, list[int], str]] = {}
        for number in range(count):
            self.subject = f"tensor number {number}"
            (name,) = self.strings(1)
            self.subject = f"tensor {name[:200]!r}"
            if name in raw:
                self.fail("appears twice")
            num_dims = self.take("<I")
            if not 1 <= num_dims <= 4:
                self.fail(f"{num_dims} dimensions")
            shape = [self.take("<Q") for _ in range(num_dims)][::-1]
            kind, offset = self.take("<I"), self.take("<Q")
            if kind not in TENSOR_TYPES:
                self.fail(f"tensor type {kind} is not one of {', '.join(TENSOR_TYPES.values())}")
            block = cell(TENSOR_TYPES[kind])[0]
            if not all(1 <= size <= MAX_DIM for size in shape) or shape[-1] % block:
                self.fail(f"shape {shape} does not suit {TENSOR_TYPES[kind]}, whose rows are multiples of {block}")
            if offset % alignment:
                self.fail(f"offset {offset} is no multiple of the alignment {alignment}")
            raw[name] = (offset, shape, TENSOR_TYPES[kind])
        base = -(-self.position // alignment) * alignment
        end = 0
        for name, (offset, shape, dtype) in sorted(raw.items(), key=lambda item: item[1][0]):
            self.subject = f"tensor {name[:200]!r}"
            if offset < end:
                self.fail(f"offset {offset} lies within another tensor")
            block, size = cell(dtype)
            end = offset + math.prod(shape) // block * size
            if base + end > self.size:
                self.fail(f"ends at byte {base + end} of a file of {self.size}; truncated, download it again")
        return {name: TensorInfo(0, base + offset, shape, dtype) for name, (offset, shape, dtype) in raw.items()}
