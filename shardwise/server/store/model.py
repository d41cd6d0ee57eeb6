"""What the registry sees of a model that runs, whatever runs it: engines, or the workers of a handler."""

from __future__ import annotations

from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from shardwise.store.stored import StoredModel


class Model(Protocol):
    """One version of one model. For the loop that it is loaded on."""

    stored: StoredModel
    """Its files and settings; the numbers of workers in these may be changed while it runs."""
    progress: str
    """How far it has been loaded, in words; empty when it is."""

    @property
    def failure(self) -> str:
        """Why it can't answer any more, for good; empty while it can."""

    @property
    def num_workers(self) -> int:
        """Workers that can be asked."""

    @property
    def pending(self) -> int:
        """Requests that are accepted and not done."""

    def workers(self) -> list[dict[str, Any]]:
        """Each of them, in the words of TorchServe's describe."""

    def tick(self) -> None:
        """To be called now and then: what takes longer than it may is ended."""

    def abandon(self) -> None:
        """Stop loading, of which `load` hears; harmless when it has loaded."""

    async def load(self, workers: int) -> None:
        """Start so many workers and wait until they are ready; nothing is left where it raises."""

    async def scale(self, workers: int) -> None:
        """Have so many workers, at least one; those that go finish what they have accepted."""

    async def predict(self, request: Request) -> Response:
        """Answer a request. Raises StoreError."""

    async def drain(self, timeout: float) -> None:
        """Refuse what comes and finish what is there, within ``timeout`` seconds."""

    async def close(self) -> None:
        """End all workers; harmless when repeated."""
