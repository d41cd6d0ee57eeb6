"""The slopes of ALiBi (Press, Smith, Lewis, 2108.12409): by how much each head's scores fall with distance."""

from __future__ import annotations


def slopes(num_heads: int, alibi: float) -> list[float]:
    """2^(-alibi i / n) for head i of n, counted from 1, where n is a power of two.

    Else those of the greatest power of two below, and then every other one of the next power's, as in the paper's code.
    """
    whole = 1 << num_heads.bit_length() - 1
    first = [2.0 ** (-alibi * (head + 1) / whole) for head in range(whole)]
    return first + [2.0 ** (-alibi * (2 * head + 1) / (2 * whole)) for head in range(num_heads - whole)]
