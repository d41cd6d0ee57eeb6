"""The numbers of a decoder, and which layouts they allow.

A field is a number, a name or an absence; files, tensors and processes are unknown here.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.config import Layout

MOST = 4096
"""Layers, or heads, of any real model and more: plans hold something for each before a file is looked into."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base frequency, rotated width and the scaling of the frequencies."""

    theta: float
    dim: int
    """Leading dimensions of a head that are rotated; even."""
    scaling: str = "default"
    """"default", "linear", "llama3", "yarn", or "factors" (a tensor divides the frequencies)."""
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow", "attention_factor"):
            if not 1e-6 <= getattr(self, name) < math.inf:
                raise ValueError(f"model config: {name} of the rope scaling can't be {getattr(self, name)!r}")
        if not 1 < self.theta < math.inf:
            raise ValueError(f"model config: rope_theta must be a number above 1, not {self.theta!r}")
        if self.scaling in ("llama3", "yarn") and not 0 < self.original_positions < 2**31:
            raise ValueError(f"model config: a rope scaled from {self.original_positions} positions is not possible")
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.scaling == "llama3" and not 0 < low < high < math.inf:
            raise ValueError(f"model config: low_freq_factor {low} must be above 0 and below high_freq_factor {high}")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of each MLP."""

    count: int
    chosen: int
    """Experts that work on a token."""
    normed: bool
    """The weights of a token's chosen experts add up to 1, instead of those of all."""

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.count <= 4096:
            raise ValueError(f"model config: {self.chosen} of {self.count} experts can't be chosen")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, as its family's file read it from config.json or GGUF metadata."""

    family: str
    stored: str
    """Whose conventions the weights follow on disk: "hf" or "gguf"."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Features of an MLP, or of each expert."""
    vocab_size: int
    max_positions: int
    norm_eps: float
    activation: str
    """An elementwise kernel: "silu_mul" (gated), "gelu_tanh", "gelu" or "relu"."""
    tied: bool
    """The head is the embedding."""
    dtype: str
    """The checkpoint's own number format, or float32 for a quantised one."""
    rope: Rope | None = None
    """None: positions are learned, or felt through ALiBi."""
    alibi: float = 0.0
    """The largest exponent of the slopes with which attention falls with distance; 0: it does not."""
    window: int | None = None
    """Keys that a token sees, itself included; None: all."""
    experts: Experts | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        for name in (*sizes, "vocab_size", "max_positions"):
            value = getattr(self, name)
            most = MOST if name in ("num_layers", "num_heads") else 2**31 - 1
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
                raise ValueError(f"model config: {name} must be a whole number from 1 to {most}, not {value!r}")
        if self.experts is not None and self.num_layers * self.experts.count > 16 * MOST:
            raise ValueError(f"model config: {self.experts.count} experts in {self.num_layers} layers are too many")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"model config: {self.num_heads} heads can't share {self.num_kv_heads} kv heads evenly")
        if self.window is not None and self.window < 1:
            raise ValueError(f"model config: a sliding window of {self.window} tokens hides a token from itself")
        if self.rope is not None and (self.rope.dim % 2 or not 0 < self.rope.dim <= self.head_dim):
            raise ValueError(
                f"model config: a rope must turn an even number of dimensions of a head of {self.head_dim}, "
                f"not {self.rope.dim}"
            )
        if self.bos is not None and (not isinstance(self.bos, int) or not abs(self.bos) < 2**63):
            raise ValueError(f"model config: bos_token_id must be a token id, not {self.bos!r}")

    @property
    def group_size(self) -> int:
        """Query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_parameters(self) -> int:
        """Elements of one layer's attention matrices."""
        return self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Elements of one layer's MLP matrices, or of its experts'."""
        return (3 if self.activation.endswith("_mul") else 2) * self.hidden_size * self.mlp_width

    @property
    def mlp_width(self) -> int:
        """Features of the MLP, or of all experts side by side."""
        return self.intermediate_size * (self.experts.count if self.experts else 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the wire; ``from_dict`` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Inverse of ``to_dict``."""
        rope, experts = values["rope"], values["experts"]
        parts = {"rope": Rope(**rope) if rope else None, "experts": Experts(**experts) if experts else None}
        return cls(**{**values, **parts, "eos": tuple(values["eos"])})

    def check(self, layout: Layout, stages: tuple[int, ...] | None = None) -> None:
        """Raise ValueError (what, why, the valid values, the nearest layout that works) for an impossible layout."""
        most = {"tp": max_tp(self), "pp": self.num_layers}
        reasons = {
            "tp": f"a rank needs at least one of the {len(head_bounds(self)) - 1} runs of attention heads, one of the "
            f"{len(mlp_bounds(self)) - 1} MLP slices and one of the {self.vocab_size} vocabulary rows",
            "pp": f"a stage needs at least one of the {self.num_layers} layers",
        }
        for axis, limit in most.items():
            if getattr(layout, axis) > limit:
                nearest = Layout(layout.dp, min(layout.tp, most["tp"]), min(layout.pp, most["pp"]))
                raise ValueError(
                    f"layout {layout}: {axis}{getattr(layout, axis)} is too many for this model: {reasons[axis]}; "
                    f"{axis} can be 1 to {limit}; the nearest layout that works is {nearest}"
                )
        if stages is not None and sum(stages) != self.num_layers:
            raise ValueError(
                f"stages {','.join(map(str, stages))} hold {sum(stages)} layers, but the model has {self.num_layers}: "
                f"give {layout.pp} numbers that add up to {self.num_layers}"
            )


MAX_HEAD_CHUNKS = 32
MLP_CHUNKS = 24
"""24 slices divide evenly among 2, 3, 4, 6, 8, 12 and 24 ranks."""
MLP_ALIGN = 32
"""Slices start at multiples of this where the width allows, so that a quantisation group never straddles two ranks."""


def head_bounds(config: ModelConfig) -> list[int]:
    """Boundaries, in query heads, of the chunks over which the attention output sums; fixed by the model alone.

    A chunk is one head in models of up to MAX_HEAD_CHUNKS heads, else a run of heads that stays within its kv group.
    """
    per_group = max(1, min(config.group_size, MAX_HEAD_CHUNKS // config.num_kv_heads))
    if config.num_heads <= MAX_HEAD_CHUNKS:
        per_group = config.group_size
    inner = even_bounds(config.group_size, per_group)
    starts = [group * config.group_size + bound for group in range(config.num_kv_heads) for bound in inner[:-1]]
    return [*starts, config.num_heads]


def mlp_bounds(config: ModelConfig) -> list[int]:
    """Boundaries, in intermediate features, of the chunks over which the MLP output sums; fixed by the model alone.

    A mixture counts the features of all experts in a row. Each is cut into as many chunks as make 24 or more of all, so
    that a run of chunks is a run of experts and, at its ends, of parts of experts.
    """
    width, count = config.intermediate_size, config.experts.count if config.experts else 1
    chunks = -(-MLP_CHUNKS // count)
    unit = MLP_ALIGN if width % MLP_ALIGN == 0 and width >= MLP_ALIGN * chunks else 1
    inner = [bound * unit for bound in even_bounds(width // unit, min(chunks, width // unit))]
    return [expert * width + bound for expert in range(count) for bound in inner[:-1]] + [count * width]


def even_bounds(count: int, parts: int) -> list[int]:
    """``parts + 1`` ascending boundaries that cut ``count`` as evenly as can be, longer runs first."""
    return [index * (count // parts) + min(index, count % parts) for index in range(parts + 1)]


def max_tp(config: ModelConfig) -> int:
    """The largest tp in which every rank has a head, an MLP slice and a vocabulary row."""
    return min(len(head_bounds(config)) - 1, len(mlp_bounds(config)) - 1, config.vocab_size)
