"""What a user may ask for, checked when it is said: layouts, engine settings, sampling parameters.

Knows nothing of models, processes or tensors; anyone may import it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

BLOCK = 16
"""Tokens in one KV block. Attention sums run block by block, so the size is part of the answer and not a setting."""

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


class Coordinates(NamedTuple):
    """Where a rank sits in the mesh."""

    dp: int
    tp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """How many replicas (dp), tensor shards (tp) and pipeline stages (pp) run the model."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"layout: {axis.name} must be a whole number of at least 1, not {size!r}")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``"dp2.tp2.pp2"``: any order, a missing axis is 1, and ``"1"`` is a single device.

        Raises ValueError, naming the valid form, for anything else.
        """
        text = text.strip().lower()
        sizes: dict[str, int] = {}
        for part in [] if text == "1" else text.split("."):
            match = re.fullmatch(r"(dp|tp|pp)([0-9]{1,5})", part)
            if match is None or match[1] in sizes:
                raise ValueError(
                    f"layout {text!r}: expected parts such as tp2 or pp2, each axis once, joined by dots "
                    "(dp2.tp2.pp2), or 1 for a single device"
                )
            sizes[match[1]] = int(match[2])
        return cls(**sizes)

    def __str__(self) -> str:
        parts = [f"{axis.name}{getattr(self, axis.name)}" for axis in fields(self) if getattr(self, axis.name) > 1]
        return ".".join(parts) or "1"

    @property
    def replica_size(self) -> int:
        """Ranks in one replica."""
        return self.tp * self.pp

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of global rank ``rank``: tp varies fastest, then pp, then dp."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside layout {self} of {self.world_size} ranks")
        return Coordinates(dp=rank // self.replica_size, tp=rank % self.tp, pp=rank % self.replica_size // self.tp)


@dataclass(frozen=True)
class EngineConfig:
    """How a model is run. Sizes are in tokens; ``None`` means: chosen for the model and the machine."""

    layout: Layout = field(default_factory=Layout)
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    transport: str = "auto"
    threads: int | None = None
    split: tuple[float, ...] | None = None
    stages: tuple[int, ...] | None = None
    max_model_len: int | None = None
    kv_tokens: int | None = None
    max_batch_tokens: int = 512
    max_chunk: int = 512
    max_num_seqs: int = 256
    prefix_cache: bool = True
    start_timeout: float = 300.0
    step_timeout: float = 300.0

    def __post_init__(self) -> None:
        choices = {
            "dtype": DTYPES,
            "device": ("auto", "cpu", "cuda"),
            "kernels": ("auto", "native", "torch"),
            "transport": ("auto", "shm", "gloo", "nccl"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        for name in ("max_batch_tokens", "max_chunk", "max_num_seqs", "threads", "max_model_len", "kv_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        for name in ("start_timeout", "step_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a number of seconds above 0, not {getattr(self, name)!r}")
        if self.kv_tokens is not None and self.kv_tokens < BLOCK:
            raise ValueError(f"kv_tokens must be at least one block of {BLOCK} tokens, not {self.kv_tokens}")
        if self.split is not None and (len(self.split) != self.layout.tp or not all(part > 0 for part in self.split)):
            raise ValueError(f"split must give a weight above 0 to each of the {self.layout.tp} tp ranks")
        if self.stages is not None and (len(self.stages) != self.layout.pp or not all(n > 0 for n in self.stages)):
            raise ValueError(f"stages must give a number of layers above 0 to each of the {self.layout.pp} pp stages")


MAX_SEED = 2**63 - 1
MAX_STOPS = 16


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off; they apply in that order, after the
    temperature. ``seed`` None draws a fresh one, so that two requests differ. ``max_tokens`` counts generated tokens.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _number(self, "max_tokens", 1, 2**31, whole=True)
        _number(self, "temperature", 0, 100)
        _number(self, "top_k", 0, 2**31, whole=True)
        _number(self, "top_p", 0, 1, above=True)
        _number(self, "min_p", 0, 1)
        if self.seed is not None:
            _number(self, "seed", 0, MAX_SEED, whole=True)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        if len(stop) > MAX_STOPS or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be at most {MAX_STOPS} strings, none of them empty")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ValueError(f"stop_token_ids must be token ids of at least 0, not {token!r}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """Build from a mapping of field names; raises ValueError naming an unknown field or a bad value."""
        known = {item.name for item in fields(cls)}
        for name in values:
            if name not in known:
                raise ValueError(f"unknown sampling field {name!r}; known: {', '.join(sorted(known))}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"sampling fields: {error}") from None


def _number(owner: Any, name: str, low: float, high: float, *, whole: bool = False, above: bool = False) -> None:
    """Check that a field is a finite number within [low, high], or (low, high] with ``above``."""
    value = getattr(owner, name)
    kind = "a whole number" if whole else "a number"
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not (low < value if above else low <= value) or value > high:
        bound = f"above {low}" if above else f"of at least {low}"
        raise ValueError(f"{name} must be {kind} {bound} and at most {high}, not {value!r}")
