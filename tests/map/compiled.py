"""Factories of torch models that are compiled, or not, and items that grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.mapping.config import Place


def build(place: Place) -> Callable[[int], Any]:
    """An item is a length; its output the sum of a layer over a row of so many ones."""
    import torch

    class Layer(torch.nn.Module):
        """Its generate is as a model's: it calls the module many times, on rows that grow."""

        def forward(self, x: Any) -> Any:
            return (x * 2 + 1).sum()

        def generate(self, length: int) -> list[float]:
            return [self(torch.ones(size)).item() for size in range(2, length)]

    model = place.compile(Layer())
    return model.generate  # type: ignore[no-any-return]


def forgetful(place: Place) -> Callable[[Any], Any]:
    """Never compiles."""
    return lambda item: item


def placeless() -> Callable[[Any], Any]:
    """Couldn't."""
    return lambda item: item
