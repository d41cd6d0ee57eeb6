"""What one text can ask of a run: rounded weights, limits of memory, drafts, compilation; checked when it is said.

Knows nothing of models, processes or tensors; anyone may import it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


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


UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20}


@dataclass(frozen=True)
class MaxMemory:
    """The most bytes that ranks may hold: on their devices, ``every`` rank or as ``ranks`` says, and on the host.

    What is held are weights, KV cache and working space; a process has some hundred MB of code and libraries besides.
    On the CPU a rank's device is its own memory.
    """

    every: int | None = None
    """Of each rank that ``ranks`` doesn't name; None: as much as there is, or every rank is named."""
    ranks: tuple[tuple[int, int], ...] = ()
    """(rank of a replica, bytes)."""
    host: int | None = None
    """Of all ranks together; None: nothing of what is too much for GPUs, and no limit on the CPU beyond each rank's."""

    def __post_init__(self) -> None:
        for name, size in (("each rank", self.every), ("cpu", self.host), *((f"rank {at}", n) for at, n in self.ranks)):
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < 2**60):
                raise ValueError(f"max_memory: of {name} must be a whole number of bytes of at least 1, not {size!r}")
        if self.every is None and self.host is None and not self.ranks:
            raise ValueError("max_memory: no limit is given; for example 10GB or 10GB,cpu=20GB or 0=10GB,1=6GB")

    @classmethod
    def parse(cls, given: str | Mapping[Any, Any]) -> MaxMemory:
        """Read ``"10GB"`` (each rank), ``"0=10GB,1=6GB,cpu=20GiB"`` or accelerate's ``{"0": "10GB", "cpu": "20GB"}``.

        The last one as JSON or as a mapping; numbers in it are bytes. Raises ValueError naming the part that is wrong.
        """
        pairs: list[tuple[str, Any]] = []
        if isinstance(given, str) and given.lstrip().startswith("{"):
            try:
                pairs = json.loads(given, object_pairs_hook=list)
            except ValueError as error:
                raise ValueError(f"max_memory: {given!r} is not JSON: {error}") from None
        elif isinstance(given, str):
            for part in given.split(","):
                name, equals, size = part.rpartition("=")
                pairs.append((name.strip() if equals else "", size))
        else:
            pairs = [(str(name), size) for name, size in given.items()]
        sizes: dict[str, int] = {}
        for name, size in pairs:
            if name not in ("", "cpu") and not re.fullmatch("0|[1-9][0-9]{0,4}", name):
                raise ValueError(
                    f"max_memory: {name!r} is neither the number of a rank nor cpu; for example 10GB,cpu=20GB or "
                    "0=10GB,1=6GB (what fits nowhere is always on disk)"
                )
            if name in sizes:
                raise ValueError(f"max_memory: {name or 'each rank'} is given twice")
            sizes[name] = _bytes(name, size)
        every, host = sizes.pop("", None), sizes.pop("cpu", None)
        return cls(every, tuple((int(name), size) for name, size in sizes.items()), host)

    def of(self, rank: int) -> int | None:
        """Of one rank's device."""
        return dict(self.ranks).get(rank, self.every)


def _bytes(name: str, size: Any) -> int:
    if isinstance(size, int):
        return size
    match = (
        re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]+)\s*", size) if isinstance(size, str) else None
    )
    if match is None or match[2] not in UNITS:
        of = f"of {'rank ' if name != 'cpu' else ''}{name} " if name else ""
        raise ValueError(f"max_memory: {size!r} {of}is no size such as 10GB; units are {', '.join(UNITS)}")
    return int(float(match[1]) * UNITS[match[2]])


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


MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""What inductor knows as modes; another backend may have others."""


@dataclass(frozen=True)
class Compile:
    """What torch.compile is told: a ``backend`` that torch knows by name, and either a ``mode`` or ``options`` for it.

    Options are JSON values. "dynamic" among them is torch.compile's own argument and not passed on; it is true unless
    given, since nearly every batch has another shape.
    """

    backend: str = "inductor"
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.backend, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", self.backend):
            raise ValueError(
                f"compile: {self.backend!r} is no backend's name, such as inductor, torch_tensorrt or openvino"
            )
        if self.mode is not None and not (isinstance(self.mode, str) and self.mode):
            raise ValueError(f"compile: mode must be a name such as max-autotune, not {self.mode!r}")
        if self.backend == "inductor" and self.mode not in (None, *MODES):
            raise ValueError(f"compile: the mode of inductor must be one of {', '.join(MODES)}, not {self.mode!r}")
        if not isinstance(self.options, Mapping) or not all(isinstance(name, str) for name in self.options):
            raise ValueError(f"compile: options must be a JSON object, not {self.options!r}")
        try:
            json.dumps(dict(self.options), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"compile: options must be JSON values, which travel to the ranks: {error}") from None
        if self.mode is not None and self.passed:
            raise ValueError(
                "compile: give a mode or options, not both: a mode is a set of options (only dynamic goes with it)"
            )
        if self.dynamic not in (True, False, None):
            raise ValueError(f"compile: the option dynamic must be true, false or null, not {self.dynamic!r}")

    @property
    def dynamic(self) -> bool | None:
        """Are graphs made for all sizes at once? None: when a second size comes."""
        found: bool | None = self.options.get("dynamic", True)
        return found

    @property
    def passed(self) -> dict[str, Any]:
        """The options that the backend gets."""
        return {name: value for name, value in self.options.items() if name != "dynamic"}

    @classmethod
    def parse(cls, text: str) -> Compile:
        """Read ``"inductor"``, ``"inductor,mode=max-autotune"`` or ``'openvino,options={"device": "CPU"}'``.

        Options are a JSON object and come last. Raises ValueError naming the part that is wrong.
        """
        head, given, options = text.partition(",options=")
        backend, *rest = (part.strip() for part in head.split(","))
        if len(rest) > 1 or not all(part.startswith("mode=") for part in rest):
            raise ValueError(
                f"compile: {text!r} is not BACKEND, BACKEND,mode=MODE or BACKEND,options={{...}} with a JSON object"
            )
        mode = rest[0].removeprefix("mode=").strip() if rest else None
        return cls(backend, mode, read_options(options) if given else {})

    def __str__(self) -> str:
        mode = f",mode={self.mode}" if self.mode is not None else ""
        return self.backend + mode + (f",options={json.dumps(dict(self.options))}" if self.options else "")


def read_options(text: str) -> dict[str, Any]:
    """The JSON object of compile options; ValueError for anything else, or for a name given twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name is given twice")
        return found

    try:
        found = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"compile: options {text!r} are not a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"compile: options {text!r} are not a JSON object")
    return found
