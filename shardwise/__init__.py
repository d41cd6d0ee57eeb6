"""One large language model on any number of devices: any layout, one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.config import EngineConfig, Layout
from shardwise.features import Speculation
from shardwise.params import SamplingParams

if TYPE_CHECKING:
    from shardwise.engine import Output
    from shardwise.integrations.state_dict import load_from_full_state_dict
    from shardwise.llm import LLM
    from shardwise.mapping.config import Place
    from shardwise.mapping.job import Mapped, map
    from shardwise.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Layout",
    "Mapped",
    "Output",
    "Place",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
    "__version__",
    "load_from_full_state_dict",
    "map",
]
_MAPPING = ("Mapped", "Place", "map")


def __getattr__(name: str) -> Any:
    """Import the engine when it is first asked for: ranks and ``--help`` start without it."""
    if name in _MAPPING:
        from shardwise.mapping import job

        return getattr(job, name)
    if name == "load_from_full_state_dict":
        from shardwise.integrations import state_dict

        return state_dict.load_from_full_state_dict
    if name in __all__:
        from shardwise import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
