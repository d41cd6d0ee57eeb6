"""Root-mean-square and layer normalisation, over the whole hidden width or within each head: every rank can."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.kernels.ops import Ops


class Norm:
    """LayerNorm with a bias, RMSNorm without. Weights are kept in the compute dtype."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, ops: Ops, size: int, eps: float, bias: bool, device: torch.device) -> None:
        self.ops = ops
        self.eps = eps
        self.weight = torch.zeros(size, dtype=ops.compute, device=device)
        self.bias = torch.zeros(size, dtype=ops.compute, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[M, hidden] → [M, hidden]."""
        if self.bias is None:
            return self.ops.rms_norm(x, self.weight, self.eps)
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


class HeadNorm:
    """RMSNorm within each query and each key head, before they are turned by their positions."""

    q: Tensor
    k: Tensor

    def __init__(self, ops: Ops, head_dim: int, eps: float, num_heads: int, device: torch.device) -> None:
        self.ops = ops
        self.eps = eps
        self.num_heads = num_heads
        self.q, self.k = torch.zeros(2, head_dim, dtype=ops.compute, device=device).unbind()

    def __call__(self, qkv: Tensor) -> Tensor:
        """[M, (heads + 2 kv heads) head_dim] → the same, values as they were."""
        return self.ops.head_norm(qkv, self.q, self.k, self.num_heads, self.eps)
