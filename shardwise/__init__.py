"""One large language model on any number of devices: any layout, one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.config import EngineConfig, Layout, Speculation
from shardwise.params import SamplingParams

if TYPE_CHECKING:
    from shardwise.engine import Output
    from shardwise.llm import LLM
    from shardwise.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Layout",
    "Output",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import the engine when it is first asked for: ranks and ``--help`` start without it."""
    if name in __all__:
        from shardwise import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
