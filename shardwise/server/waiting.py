"""What a client waits for: work that ends if the client goes, and a body that is sent as it comes.

Knows ASGI; nothing of what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Streamed(Response):
    """A body that is sent as it comes, until the client goes. Children say what is sent after the head, and its end."""

    def __init__(self, media_type: str, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.background = None
        self.status_code = status
        self.media_type = media_type
        self.init_headers({**(headers or {}), "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The response, as ASGI calls it."""
        try:
            with suppress(ClientGone, OSError):
                await watched(receive, self._whole(send))
        finally:
            await self.close()

    async def send(self, send: Send) -> None:
        """Send the body."""
        raise NotImplementedError

    async def close(self) -> None:
        """Let go of what it comes from; whatever has happened."""
        raise NotImplementedError

    async def _whole(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self.send(send)


async def watched(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, unless the client goes before it is done: then it is cancelled, and ClientGone raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
