"""Rejection sampling of drafts (Leviathan et al. 2211.17192, Chen et al. 2302.01318): the arithmetic of one draft.

A draft d drawn from q is accepted with probability min(1, p(d) / q(d)); if it is not, the token comes from the
normalised (p - q)+. Either way it is distributed as p. Knows nothing of how p and q came about.
"""

from __future__ import annotations

from torch import Tensor

from shardwise.kernels.noise import stream
from shardwise.kernels.ops import Ops

ACCEPTS, RESIDUALS = 2**32, 2**33
"""Added to a position, which is below 2^32, they give the random numbers of a decision, and of what takes the draft's
place, streams of their own: the noise of the position itself chose the draft."""

NOISE_BOUND = 40.0
"""Above any Gumbel noise, whose largest value is 53 log 2."""


def acceptance(p: Tensor, q: Tensor | None, draft: int) -> float:
    """With what probability ``draft`` is accepted, for ``p`` and ``q`` [V] float64; q None is certain of the draft.

    A draft that q has no probability for (q was computed anew, and rounded otherwise) is accepted if p has any.
    """
    wanted, guessed = float(p[draft]), 1.0 if q is None else float(q[draft])
    if guessed == 0:
        return float(wanted > 0)
    return min(1.0, wanted / guessed)


def residual(p: Tensor, q: Tensor | None, draft: int) -> Tensor:
    """Probabilities [V] float64 of the token in the place of a rejected ``draft``; p itself if p and q are equal."""
    rest = p.clone() if q is None else (p - q).clamp(min=0.0)
    rest[draft] = 0.0
    total = rest.cumsum(0)[-1]  # cumsum adds in one fixed order
    return rest / total if total > 0 else p


def decide(p: Tensor, q: Tensor | None, draft: int, seed: int, position: int) -> bool:
    """Whether ``draft`` is accepted at ``position``: a pure function of its arguments."""
    uniform = ((stream(seed, position + ACCEPTS) >> 12) + 0.5) * 2.0**-52
    return uniform < acceptance(p, q, draft)


def replace(ops: Ops, p: Tensor, q: Tensor | None, draft: int, seed: int, position: int) -> int:
    """The token in the place of a rejected ``draft``: Gumbel-max over the residual, as weights times e^noise."""
    rest = residual(p, q, draft)
    noise = ops.gumbel([seed], [position + RESIDUALS], 0, rest.shape[0])[0].to(rest.device)
    return int((rest * ops.exp(noise - NOISE_BOUND)).argmax())
