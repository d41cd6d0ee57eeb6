"""Which models and versions are served, by name: registered from the store, found, listed, unregistered.

Knows names; what a version does is its own business. A name of a request is only ever looked up here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.server.store.errors import StoreError, no_model, no_version
from shardwise.server.store.figures import Requests, Tally
from shardwise.server.store.model import Model
from shardwise.server.store.served import Served
from shardwise.store.archive import find_url
from shardwise.store.stored import StoredModel, open_stored

log = logging.getLogger("shardwise")

Make = Callable[[StoredModel, Tally], Model]
"""What runs a stored model."""


@dataclass
class Entry:
    """A model by all its versions."""

    default: str
    """The version that is meant where none is said."""
    versions: dict[str, Served] = field(default_factory=dict)


class Registry:
    """All that is served from one ``store``. For one event loop. ``drain_timeout`` is in seconds."""

    def __init__(self, store: Path, make: Make, *, trust_handlers: bool = False, drain_timeout: float = 30.0) -> None:
        self.entries: dict[str, Entry] = {}
        self.requests = Requests()
        self.starting = False
        """Are models that were there at the start still on their way?"""
        self.draining = False
        self._store = store
        self._make = make
        self._trust_handlers = trust_handlers
        self._drain_timeout = drain_timeout
        self._leaving: set[Served] = set()
        """Versions that are unregistered and not yet gone."""

    def __iter__(self) -> Iterator[Served]:
        """Every version of every model."""
        for entry in list(self.entries.values()):
            yield from list(entry.versions.values())

    async def register(
        self,
        path: Path,
        url: str,
        name: str | None = None,
        given: Mapping[str, Any] | None = None,
        *,
        start: bool = False,
    ) -> Served:
        """Add what lies at ``path``; it has no workers yet. ``given`` are settings that win over the model's own.

        ``start``: as the server starts. Raises ValueError for what is wrong with its files, and StoreError 409 where it
        is registered already.
        """
        trust = self._trust_handlers
        stored = await asyncio.to_thread(open_stored, path, name, trust_handlers=trust)
        try:
            entry = self.entries.get(stored.name)
            if entry is not None and stored.version in entry.versions:
                raise StoreError(409, f"Model version {stored.version} is already registered for model {stored.name}")
            served = Served(url, stored, self._make, start)
            served.reset(**given or {})
            if self.draining:
                raise StoreError(503, "the server is shutting down")
        except BaseException:
            await asyncio.to_thread(stored.close)
            raise
        entry = self.entries.setdefault(stored.name, Entry(stored.version))
        entry.versions[stored.version] = served
        return served

    async def register_url(self, url: str, name: str | None, given: Mapping[str, Any]) -> Served:
        """The same for a name inside the store."""
        return await self.register(await asyncio.to_thread(find_url, self._store, url), url, name, given)

    def find(self, name: str, version: str | None = None) -> Served:
        """A version of a model, its default one where none is said. Raises StoreError 404."""
        entry = self.entries.get(name)
        if entry is None:
            raise no_model(name)
        found = entry.versions.get(entry.default if version is None else version)
        if found is None:
            raise no_version(name, entry.default if version is None else version)
        return found

    def set_default(self, name: str, version: str) -> None:
        """Have a version be the default one. Raises StoreError 404."""
        self.entries[name].default = self.find(name, version).stored.version

    async def unregister(self, name: str, version: str | None = None) -> None:
        """Take a version away; when this returns, its processes are gone. Raises StoreError 404, and 403 for a default
        version that is not the only one."""
        served, entry = self.find(name, version), self.entries[name]
        if served.stored.version == entry.default and len(entry.versions) > 1:
            raise StoreError(
                403,
                f"Cannot remove default version for model {name}: make another one the default first",
                "InvalidModelVersionException",
            )
        del entry.versions[served.stored.version]
        if not entry.versions:
            del self.entries[name]
        self._leaving.add(served)
        closing = asyncio.ensure_future(served.close(self._drain_timeout))
        closing.add_done_callback(lambda _: self._leaving.discard(served))
        await asyncio.shield(closing)  # the caller may go; what was begun is finished all the same

    @property
    def state(self) -> str:
        """ "draining"; "loading" while the first models are; "ok"; or "degraded" when one is not well."""
        if self.draining:
            return "draining"
        if self.starting:
            return "loading"
        return "ok" if self.is_healthy else "degraded"

    @property
    def is_healthy(self) -> bool:
        """Have all models the workers that they are to have?"""
        return not self.starting and all(each.is_healthy for each in self)

    def tick(self) -> None:
        """To be called now and then."""
        for each in (*self, *self._leaving):
            each.tick()

    async def drain(self, timeout: float) -> None:
        """Refuse what comes and finish what is there, within ``timeout`` seconds."""
        self.draining = True
        await asyncio.gather(*(each.drain(timeout) for each in (*self, *self._leaving)))

    def forget_files(self) -> None:
        """Remove what was unpacked: for the end of the process, when ranks end by themselves."""
        for each in (*self, *self._leaving):
            each.stored.close()
