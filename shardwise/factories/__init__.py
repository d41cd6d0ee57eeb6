"""Ready factories for `shardwise map`. Their libraries are extras, imported when a factory is asked for."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.factories.images import text_to_image
    from shardwise.factories.texts import classification, embeddings

__all__ = ["classification", "embeddings", "text_to_image"]


def __getattr__(name: str) -> Any:
    """The factory; ValueError names the extra that it needs, if that isn't installed."""
    if name == "text_to_image":
        need("images", "diffusers", "transformers", "PIL")
        from shardwise.factories import images

        return images.text_to_image
    if name in __all__:
        need("texts", "transformers")
        from shardwise.factories import texts

        return getattr(texts, name)
    raise AttributeError(f"module 'shardwise.factories' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def need(extra: str, *modules: str) -> None:
    """Raises ValueError, which says how to get it, if one of the modules isn't installed."""
    for module in modules:
        if find_spec(module) is None:
            raise ValueError(f"this factory needs {module}: pip install 'shardwise[{extra}]'")
