"""How a model is run, checked when it is said: layouts, quantisation, speculation, engine settings.

Knows nothing of models, processes or tensors; anyone may import it.
"""

from __future__ import annotations

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
class Quantization:
    """Whole numbers of 8 or 4 ``bits`` in place of a matrix's own, which share a scale in runs of ``group`` inputs.

    A group of None is a whole row, that is one scale for each output.
    """

    bits: int
    group: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"quantize: bits must be 8 or 4, not {self.bits!r}")
        group = self.group
        if group is not None and (not isinstance(group, int) or isinstance(group, bool) or not 8 <= group <= 2**20):
            raise ValueError(f"quantize: group must be a whole number from 8 to {2**20}, not {group!r}")

    @classmethod
    def parse(cls, text: str) -> Quantization:
        """Read ``"int8"``, of whole rows, ``"int4"``, in groups of 32, or either with another ``,group=G``.

        Raises ValueError naming the part that is wrong.
        """
        kind, *rest = (part.strip() for part in text.split(","))
        bits = {"int8": 8, "int4": 4}.get(kind)
        sizes = [part.removeprefix("group=") for part in rest if re.fullmatch(r"group=[0-9]{1,9}", part)]
        if bits is None or len(rest) > 1 or len(sizes) < len(rest):
            raise ValueError(f"quantize: {text!r} is not int8 or int4, either with ,group=G such as int4,group=64")
        return cls(bits, int(sizes[0]) if sizes else 32 if bits == 4 else None)

    def __str__(self) -> str:
        return f"int{self.bits}" + (f",group={self.group}" if self.group is not None else "")


SPECULATORS = ("draft", "ngram", "self")
ACCEPTS = ("coupled", "optimal")
MAX_DRAFTS = 16


@dataclass(frozen=True)
class Speculation:
    """Where drafts of tokens come from, which the model then verifies several at a time.

    ``kind`` is "draft" (a smaller ``model`` of the same vocabulary), "ngram" (what followed the last few tokens when
    they stood in the text before: prompt lookup) or "self": the model's own first ``layers``, or its own weights
    rounded to ``dtype`` or to whole numbers (``quantize``). ``k`` is the number of drafts of each round; None adapts it
    to what is accepted, down to none.

    ``accept`` "coupled" takes a draft exactly when it is the token that the model draws there, so tokens are those of a
    run without speculation (Daliri, Musco and Suresh, 2024). "optimal" is rejection sampling (Leviathan et al. 2023,
    Chen et al. 2023): more drafts are taken, the tokens are other ones, of exactly the same distribution.
    """

    kind: str
    model: str | None = None
    k: int | None = None
    accept: str = "coupled"
    layers: int | None = None
    dtype: str | None = None
    quantize: Quantization | None = None
    min_match: int = 2
    """Shortest run of last tokens that "ngram" looks up, and the longest, which is tried first."""
    max_match: int = 4

    def __post_init__(self) -> None:
        if self.kind not in SPECULATORS:
            raise ValueError(f"speculate: the proposer must be one of {', '.join(SPECULATORS)}, not {self.kind!r}")
        if (self.model is not None) != (self.kind == "draft"):
            raise ValueError("speculate: a draft needs its model, as in draft=MODEL, and only a draft has one")
        if self.accept not in ACCEPTS:
            raise ValueError(f"speculate: accept must be one of {', '.join(ACCEPTS)}, not {self.accept!r}")
        for name, most in (("k", MAX_DRAFTS), ("layers", 2**16), ("min_match", 16), ("max_match", 16)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most):
                raise ValueError(f"speculate: {name} must be a whole number from 1 to {most}, not {value!r}")
        if self.min_match > self.max_match:
            raise ValueError(f"speculate: min_match {self.min_match} is more than max_match {self.max_match}")
        if self.layers is not None and (self.kind != "self" or self.dtype is not None or self.quantize is not None):
            raise ValueError("speculate: layers is for self, and is given in place of dtype or quantize")
        if self.quantize is not None and (self.kind == "ngram" or (self.kind == "self" and self.dtype is not None)):
            raise ValueError("speculate: quantize is for draft, or for self in place of dtype")
        if self.dtype is not None and (self.kind == "ngram" or self.dtype not in DTYPES[1:]):
            raise ValueError(f"speculate: dtype is for draft and self, one of {', '.join(DTYPES[1:])}")

    @classmethod
    def parse(cls, text: str) -> Speculation:
        """Read ``"draft=MODEL,k=4"``, ``"ngram"`` or ``"self,layers=8,accept=optimal"``; ``k=auto`` is the default.

        Raises ValueError naming the part that is wrong.
        """
        first, *rest = text.split(",")
        kind, given, model = first.partition("=")
        values: dict[str, Any] = {"kind": kind.strip(), "model": model if given else None}
        for part in rest:
            name, given, value = (piece.strip() for piece in part.partition("="))
            names = ("k", "accept", "layers", "dtype", "quantize", "group", "min_match", "max_match")
            if name not in names or not given or name in values or (name == "group" and "quantize" not in values):
                raise ValueError(
                    f"speculate: {part.strip()!r} is not one of {', '.join(names)} (group after quantize), each once "
                    "and as name=value; for example draft=MODEL,k=auto or ngram or self,layers=8 or self,quantize=int4"
                )
            number = name not in ("accept", "dtype", "quantize")
            if number and not (value.isdecimal() or (name == "k" and value == "auto")):
                raise ValueError(f"speculate: {name} must be a whole number, not {value!r}")
            values[name] = None if value == "auto" else int(value) if number else value
        if "quantize" in values:
            group = f",group={values.pop('group')}" if "group" in values else ""
            values["quantize"] = Quantization.parse(values["quantize"] + group)
        return cls(**values)


@dataclass(frozen=True)
class EngineConfig:
    """How a model is run. Sizes are in tokens; ``None`` means: chosen for the model and the machine."""

    layout: Layout = field(default_factory=Layout)
    dtype: str = "auto"
    quantize: Quantization | None = None
    """None: as the checkpoint is."""
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
    speculate: Speculation | None = None
    isolate: bool = False
    """Run even a single rank on the CPU in a process of its own, which can die without harm."""
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
