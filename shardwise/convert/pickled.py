"""PyTorch's pickled checkpoints, read as slices: the only file of the project that opens any, and `convert` alone asks.

torch.load's restricted unpickler (weights_only) builds tensors and plain containers and calls nothing else that a file
names; bytes are mapped, not read. That this holds rests on PyTorch: who converts a file trusts that, and is told so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from shardwise.weights.checkpoint import Index, LoadError, Span, TensorInfo

SUFFIXES = (".bin", ".pth", ".pt")
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def find_pickled(path: Path) -> list[Path]:
    """Pickled weights at ``path``, a file or a directory that holds nothing better; none where it does."""
    if path.is_file():
        return [path] if path.suffix in SUFFIXES else []
    if not path.is_dir() or any(path.glob("*.safetensors")) or any(path.glob("*.gguf")):
        return []
    patterns = ("pytorch_model*.bin", "consolidated.*.pth", "model.pth", "*.bin", "*.pth", "*.pt")
    found = (sorted(file for file in path.glob(pattern) if file.is_file()) for pattern in patterns)
    return next((files for files in found if files), [])


def open_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, mapped; LoadError for what isn't a dictionary of plain tensors of floats."""
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # unpicklers raise whatever they like
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LoadError(
            f"{path}: can't be opened with weights_only and mmap: {reason}; it must be what torch.save has written of "
            "a dictionary of tensors since PyTorch 1.6"
        ) from None
    for key in ("model", "state_dict"):  # of training recipes, which keep other things beside it
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not loaded:
        raise LoadError(f"{path}: holds no dictionary of tensors")
    for name, tensor in loaded.items():
        plain = isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if not plain or tensor.is_quantized:
            raise LoadError(f"{path}: {str(name)[:200]!r} is no plain tensor")
        if name.endswith((".scales", ".scales_and_zeros")):
            raise LoadError(f"{path}: quantised already ({name}); convert the original and --quantize")
    return loaded


class Lazy(Protocol):
    """A tensor whose rows are made when they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start to stop."""


class Plain(NamedTuple):
    """As it is in the file, or some rows of it."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:  # noqa: D102
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:  # noqa: D102
        return self.tensor.dtype

    def rows(self, start: int, stop: int) -> Tensor:  # noqa: D102
        return self.tensor[start:stop]


class Joined(NamedTuple):
    """Parts side by side, along rows (dim 0) or columns (dim 1)."""

    parts: Sequence[Tensor]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:  # noqa: D102
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:  # noqa: D102
        return self.parts[0].dtype

    def rows(self, start: int, stop: int) -> Tensor:  # noqa: D102
        if self.dim == 1:
            return torch.cat([part[start:stop] for part in self.parts], 1)
        found, base = [], 0
        for part in self.parts:
            size = part.shape[0]
            found.append(part[min(max(start - base, 0), size) : min(max(stop - base, 0), size)])
            base += size
        return torch.cat(found)


class Halved(NamedTuple):
    """Rows of each head, which the file has in pairs that rope turns together, as Hugging Face has them: two halves."""

    source: Lazy
    head_dim: int

    @property
    def shape(self) -> tuple[int, ...]:  # noqa: D102
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:  # noqa: D102
        return self.source.dtype

    def rows(self, start: int, stop: int) -> Tensor:  # noqa: D102
        first, last = start // self.head_dim * self.head_dim, -(-stop // self.head_dim) * self.head_dim
        paired = self.source.rows(first, last)
        heads = paired.view(-1, self.head_dim // 2, 2, *paired.shape[1:]).transpose(1, 2)
        return heads.reshape(paired.shape)[start - first : stop - first]


class LazyCheckpoint:
    """Lazy tensors by name, read as a `Checkpoint` is."""

    def __init__(self, where: str, tensors: Mapping[str, Lazy]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype not in NAMES:
                raise LoadError(f"{where}: tensor {name} is {tensor.dtype}, not one of {', '.join(map(str, NAMES))}")
        self._tensors = tensors
        infos = {name: TensorInfo(0, 0, list(lazy.shape), NAMES[lazy.dtype]) for name, lazy in tensors.items()}
        self.index = Index([where], infos)

    def read(self, name: str, *spans: Span | None) -> np.ndarray[Any, Any]:
        """See `Checkpoint.read`."""
        lazy = self._tensors[name]
        start, stop = spans[0] if spans and spans[0] is not None else (0, lazy.shape[0])
        part = lazy.rows(start, stop)
        if len(spans) > 1 and spans[1] is not None:
            part = part[:, spans[1][0] : spans[1][1]]
        part = part.contiguous()
        return (part.view(torch.uint16) if part.dtype == torch.bfloat16 else part).numpy()

    def close(self) -> None:
        """Files stay mapped as long as tensors live."""
