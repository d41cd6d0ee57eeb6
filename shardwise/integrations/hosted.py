"""A model's engines in a process of somebody else's: stepped all the time, asked from any thread or event loop.

Knows requests as rows; nothing of who asks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from shardwise.config import EngineConfig
from shardwise.engine import Output
from shardwise.intake import Prepared
from shardwise.open import open_model
from shardwise.rows import read_row
from shardwise.runtime.executor import Executor
from shardwise.runtime.launch import launch
from shardwise.server.admission import Admission
from shardwise.server.metrics import Metrics
from shardwise.server.service import Service

UNBOUNDED = 2**40
"""Requests and tokens that may wait: whoever hosts us bounds its own queue."""

T = TypeVar("T")

log = logging.getLogger("shardwise")


class Hosted:
    """A model on a layout. ``close`` it to end its ranks, which else end with the process.

    ``start`` starts its ranks. Raises what open_model raises.
    """

    def __init__(
        self,
        model: str,
        engine: EngineConfig,
        *,
        generation_config: bool = True,
        start: Callable[..., list[Executor]] = launch,
    ) -> None:
        options: dict[str, Any] = {"generation_config": generation_config, "start": start}
        self._opened = open_model(model, engine, on_progress=log.info, **options)
        admission = Admission(UNBOUNDED, UNBOUNDED, queue_timeout=UNBOUNDED)
        self._service = Service(self._opened.replicas, admission, Metrics(model))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()
        self.begin(self._start()).result()

    @property
    def dead(self) -> bool:
        """Are there no ranks left, and none to be had?"""
        return self._service.failure is not None

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run something that uses `pieces`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def pieces(self, row: Mapping[str, Any], defaults: Mapping[str, Any]) -> AsyncGenerator[Output, None]:
        """The pieces of a row's continuation as they come; ``defaults`` are fields that it leaves open.

        Raises ValueError for what can't be run, Refused, and Cut where it can't go on. Leaving early aborts it.
        """
        prepared = await asyncio.to_thread(self._prepare, dict(row), defaults)
        stream = self._service.submit(prepared)
        try:
            if prepared.params.echo:
                yield Output(prepared.parts[0].id, prepared.text, [], [], None)
            async for piece in stream:
                yield piece
        finally:
            stream.close()

    def close(self) -> None:
        """End all ranks."""
        self.begin(self._service.stop()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._service.start()

    def _prepare(self, row: dict[str, Any], defaults: Mapping[str, Any]) -> Prepared:
        intake = self._opened.intake
        prompt, messages, params = read_row(row, {**self._opened.defaults.fields, **defaults})
        if messages is not None and params.max_tokens == 0:
            raise ValueError("max_tokens must be at least 1 for a chat")
        text, tokens = intake.encode(prompt) if prompt is not None else intake.encode_chat(messages or [])
        prepared = intake.prepare(text, tokens, params)
        self._service.vet(prepared)
        return prepared
