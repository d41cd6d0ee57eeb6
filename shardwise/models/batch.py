"""The tensors of one forward pass, passed explicitly: nothing about requests or scheduling."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """M rows (new tokens) of S sequences. int32 unless said otherwise."""

    ids: Tensor
    """[M] int64 token ids."""
    positions: Tensor
    """[M] position of each row in its sequence."""
    slots: Tensor
    """[M] where each row's key and value go: block * BLOCK + offset."""
    starts: Tensor
    """[S + 1] first row of each sequence, and M."""
    table: Tensor
    """[S, B] KV blocks of each sequence; entries past its length are 0."""
    sample_rows: Tensor
    """[R] int64 rows whose logits are wanted."""


class KV(NamedTuple):
    """One layer's paged cache; shapes as in kernels.Ops.cache."""

    keys: Tensor
    values: Tensor
