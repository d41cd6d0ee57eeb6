"""A stored model: its folder, manifest and settings, and what they say to run: a model, an engine, a server's limits.

Knows what each key becomes; opens no weights and runs nothing. (docs/torchserve.md has the table.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from shardwise.config import EngineConfig
from shardwise.store.archive import CONFIGS, ArchiveError, Folder, check_name, name_of, open_folder
from shardwise.store.manifest import Manifest, read_manifest
from shardwise.store.planning import check_hosts, plan_engine
from shardwise.store.settings import Frontend, HandlerKeys, Settings, read_settings
from shardwise.store.styles import KINDS, Style, choose

HANDLER = "handler.py"
"""What a handler's file is called where no manifest names it."""


@dataclass(frozen=True)
class Limits:
    """What a server that serves the model has to keep to. Times are in seconds; None: not said."""

    min_workers: int
    max_workers: int | None
    queue_requests: int | None
    queue_timeout: float | None
    """How long a request may wait for its turn."""
    response_timeout: float | None
    """How long an answer may take once it has its turn; one that is sent in pieces, from one piece to the next."""
    job_ticket: bool
    """Refuse at once what no worker is free for."""


class Plan(NamedTuple):
    """What is to be opened."""

    model: str
    engine: EngineConfig
    notes: tuple[str, ...]
    """What an operator should be told of it."""


@dataclass(frozen=True)
class StoredModel:
    """A model of a store, read and checked. `close` it when it is no longer served; see `open_stored`."""

    name: str
    manifest: Manifest
    settings: Settings
    style: Style | None
    """The shipped handler; None where the handler is a file of the folder."""
    handler: str | None
    """That file and, after a colon, its function, if it names one."""
    config_file: Path | None
    _folder: Folder = field(repr=False)

    @property
    def version(self) -> str:
        """The manifest's, "1.0" without one."""
        return self.manifest.version

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self._folder.path

    @property
    def custom(self) -> bool:
        """Is it served by its own handler?"""
        return self.style is None

    @property
    def frontend(self) -> Frontend:
        """The settings that all handlers have."""
        return self.settings.frontend

    @property
    def limits(self) -> Limits:
        """What the server has to keep to."""
        said = self.frontend
        return Limits(
            min_workers=said.min_workers,
            max_workers=said.max_workers,
            queue_requests=said.job_queue_size,
            queue_timeout=said.client_timeout / 1000 if said.client_timeout is not None else None,
            response_timeout=said.response_timeout,
            job_ticket=said.use_job_ticket,
        )

    def check_workers(self, workers: int) -> None:
        """Raise ValueError for more workers than there may be."""
        most = self.frontend.max_workers
        if workers < 0 or (most is not None and workers > most):
            raise ValueError(f"{self.name} may have 0 to {most} workers (maxWorkers), not {workers}")

    def plan(self, workers: int | None = None, given: Mapping[str, Any] | None = None) -> Plan:
        """What a shipped handler runs, with so many workers, minWorkers by default, each a replica.

        ``given`` are fields of EngineConfig that the operator has said, which win. Raises ValueError, naming the key,
        for what can't be.
        """
        assert self.style is not None, "a custom handler runs itself"
        workers = self.frontend.min_workers if workers is None else workers
        self.check_workers(workers)
        if workers < 1:
            raise ValueError(f"{self.name} has no workers to plan for (minWorkers {workers})")
        try:
            return Plan(*plan_engine(self._folder, self.manifest, self.settings, self.style, workers, given or {}))
        except ValueError as error:
            raise self.settings.locate(error) from None

    def close(self) -> None:
        """Remove what was unpacked; harmless when repeated."""
        self._folder.close()

    def __enter__(self) -> StoredModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_stored(path: Path, name: str | None = None, *, trust_handlers: bool = False) -> StoredModel:
    """A model's folder or archive, read and checked. Nothing is loaded, and nothing of it is run.

    Raises ValueError, and then nothing is left of it, for what is broken, for a key that can't be honoured, and for a
    handler of its own unless ``trust_handlers``.
    """
    folder = open_folder(path)
    try:
        manifest = read_manifest(folder)
        name = check_name(name or manifest.name or name_of(path))
        config = _config(folder, manifest)
        settings = read_settings(config)
        style, handler = _handler(folder, manifest, settings)
        if handler is not None and not trust_handlers:
            raise ValueError(
                f"{name} has a handler of its own, {handler}, and its code is run only with --trust-handlers; or say "
                f"handler.style: {choose(None, None, settings.sections, _keys(settings))} in its model-config.yaml to "
                "have a shipped handler serve it"
            )
        if handler is not None:
            _check_custom(settings)
        return StoredModel(name, manifest, settings, style, handler, config, folder)
    except BaseException:
        folder.close()
        raise


def _check_custom(settings: Settings) -> None:
    """Raise ValueError for what only shipped handlers can do."""
    try:
        if settings.frontend.continuous_batching:
            raise ValueError("continuousBatching is for shipped handlers; one of a model's own gets whole batches")
        check_hosts(settings.frontend)
    except ValueError as error:
        raise settings.locate(error) from None


def _config(folder: Folder, manifest: Manifest) -> Path | None:
    if manifest.config_file is not None:
        path = folder.file(manifest.config_file)
        if not path.is_file():
            raise ArchiveError(f"{folder.path}: the manifest's configFile {manifest.config_file} isn't there")
        return path
    found = [folder.file(name) for name in CONFIGS if (folder.path / name).is_file()]
    if len(found) > 1:
        raise ArchiveError(f"{folder.path}: holds {' and '.join(CONFIGS)}: leave one")
    return found[0] if found else None


def _handler(folder: Folder, manifest: Manifest, settings: Settings) -> tuple[Style | None, str | None]:
    """Who serves the model: a shipped handler, or a file of the folder."""
    keys = _keys(settings)
    named = keys.get("style")
    if named is None and manifest.handler not in KINDS:
        file = manifest.handler or (HANDLER if (folder.path / HANDLER).is_file() else None)
        if file is not None:
            return None, _check_file(folder, file)
    settings.check_shipped()
    read = settings.shipped("handler", HandlerKeys)
    style = choose(manifest.handler, read.style, settings.sections, keys)
    try:
        return Style(style, read), None
    except ValueError as error:
        section = settings.sections.get("handler", settings.sections)
        raise section.error(str(error).partition(" ")[0], f"handler: {error}") from None


def _check_file(folder: Folder, handler: str) -> str:
    name, _, function = handler.partition(":")
    name = name if name.endswith(".py") else f"{name}.py"
    if not folder.file(name).is_file():
        raise ArchiveError(
            f"{folder.path}: the handler {handler} is neither a file there nor one of the shipped {', '.join(KINDS)}"
        )
    return f"{name}:{function}" if function else name


def _keys(settings: Settings) -> Mapping[str, Any]:
    section = settings.sections.get("handler")
    return section if isinstance(section, Mapping) else {}
