"""What a map is told, checked when it is said: the factory's name and settings, where ranks run, their deadlines.

Knows nothing of processes and files, and imports no factory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.config import Layout
from shardwise.features import Compile
from shardwise.runtime.machine import num_cores, visible_gpus

SHARES = ("nothing", "imports", "model")
IN_RANK = "SHARDWISE_MAP_RANK"
"""Environment variable that is set in ranks: a module that maps when it is imported would start ranks for ever."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs: what a factory gets if it has a parameter named ``place``."""

    rank: int
    world: int
    """Ranks in all."""
    device: str
    """"cpu", or "cuda:0" and so on, as torch names it."""
    threads: int
    """That the rank may use; torch has been told, if it was imported. A model to be shared is built with one."""
    by: Compile | None = None
    """What --compile says."""
    compiled: list[Any] = field(default_factory=list, repr=False, compare=False)
    """What `compile` was called with."""

    def compile(self, model: Any) -> Any:
        """``model`` (a torch module or any callable) as --compile asks for it, or as it is where that isn't given.

        A module is itself returned, with its ``forward`` compiled, so that its own methods call that too. Factories are
        to call this for what is worth compiling; without such a call --compile is an error. Raises ValueError for a
        mode or an option that the backend refuses.
        """
        self.compiled.append(model)
        if self.by is None:
            return model
        from shardwise.runtime.compiling import compile_model

        return compile_model(model, self.by)


@dataclass(frozen=True)
class World:
    """Processes that something else has started, torchrun or accelerate: this one's number, and how many there are."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    """On this host."""


@dataclass(frozen=True)
class MapConfig:
    """How to map. Times are in seconds."""

    factory: str
    """"module:name" of a callable that builds the model and returns a callable, item -> output."""
    layout: Layout = field(default_factory=Layout)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The factory's keyword arguments: JSON values."""
    batch_size: int | None = None
    """The callable takes lists of up to so many items and returns as many outputs; None: one item at a time."""
    device: str = "auto"
    threads: int | None = None
    share: str = "imports"
    """What ranks share by being forked from a process that has done it once: nothing, the imports of the factory's
    module, or the built model too (on the CPU only)."""
    startup_timeout: float = 600.0
    """For importing and building, on each rank."""
    item_timeout: float | None = None
    """For one item; a batch has as many times as much as it has items."""
    compile: Compile | None = None
    """What factories compile their models by; see `Place.compile`."""

    def __post_init__(self) -> None:
        module, colon, name = self.factory.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))) or not colon:
            raise ValueError(
                f"the factory must be named module:name, such as shardwise.factories:embeddings, not {self.factory!r}"
            )
        if self.layout.replica_size > 1:
            raise ValueError(
                f"layout {self.layout}: map runs a whole model on each rank, so only dp fits, such as "
                f"dp{self.layout.world_size}; for models cut by tp or pp there is shardwise generate"
            )
        if self.batch_size is not None and not _counts(self.batch_size):
            raise ValueError(f"batch_size must be a whole number of at least 1, not {self.batch_size!r}")
        if self.threads is not None and not _counts(self.threads):
            raise ValueError(f"threads must be a whole number of at least 1, not {self.threads!r}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, not {self.device!r}")
        if self.share not in SHARES:
            raise ValueError(f"share must be one of {', '.join(SHARES)}, not {self.share!r}")
        for name in ("startup_timeout", "item_timeout"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise ValueError(f"{name} must be a number of seconds above 0, not {value!r}")
        try:
            json.dumps(self.settings, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"settings of the factory must be JSON values, which travel to the ranks: {error}"
            ) from None


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def name_of(factory: str | Callable[..., Any]) -> str:
    """The "module:name" of a factory; ValueError, with the remedy, for one that ranks couldn't import by it."""
    if isinstance(factory, str):
        return factory
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", None)
    if module is None or name is None:
        raise ValueError(f"{factory!r} has no name to import it by: give a function, and its arguments as settings")
    if module == "__main__":
        script = Path(getattr(sys.modules["__main__"], "__file__", None) or "a_module.py").stem
        raise ValueError(
            f"{name} is defined in the script that runs, which ranks can't import as __main__: name it "
            f"'{script}:{name}', and call map under if __name__ == '__main__'; or move it to a module of its own"
        )
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not factory:
        raise ValueError(
            f"ranks can't import {name} from {module}: a lambda, a function inside a function or a method has no "
            "place of its own; define it at the top of a module, and give what it needs as settings"
        )
    return f"{module}:{name}"


def read_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE each: a value is JSON, or else text. ValueError names a pair that is none, or a key said twice."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--set must be KEY=VALUE, such as steps=20, not {pair!r}")
        if key in found:
            raise ValueError(f"--set {key} is given twice")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def find_world() -> World | None:
    """The world that torchrun or accelerate has made this process a part of; None where there is none, or only us.

    Raises ValueError for variables that make no sense.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    if not all(os.environ.get(name) for name in names):
        return None
    try:
        rank, size, local = (int(os.environ[name]) for name in names[:3])
        world = World(rank, size, local, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    except ValueError:
        rank, size, local, world = -1, 0, 0, World(0, 1, 0, 1)
    if not (0 <= rank < size and local >= 0):
        told = " ".join(f"{name}={os.environ[name]}" for name in names[:3])
        raise ValueError(f"{told} is no place in a world of processes: unset them, or use torchrun")
    return world if size > 1 else None


def find_places(config: MapConfig, world: World | None) -> list[Place]:
    """The ranks that this process has to run: all of them, or its own of a ``world``.

    Raises ValueError, with the remedy, where they don't fit the host.
    """
    if world is not None and config.layout.world_size not in (1, world.size):
        raise ValueError(
            f"layout {config.layout} in a world of {world.size} processes: leave the layout out, each process is a rank"
        )
    here = world.local_size if world is not None else config.layout.dp
    gpus = visible_gpus()
    if config.device == "cuda" and gpus < here:
        raise ValueError(
            f"{here} ranks need {here} GPUs, one each, and this host has {gpus}: use device cpu or fewer ranks"
        )
    gpu = config.device == "cuda" or (config.device == "auto" and gpus >= here)
    if gpu and config.share == "model":
        raise ValueError("share model: what a GPU holds can't be handed on by forking; use share imports or device cpu")
    threads = config.threads or max(1, num_cores() // here)
    if world is not None:
        return [Place(world.rank, world.size, f"cuda:{world.local_rank}" if gpu else "cpu", threads)]
    return [Place(rank, here, f"cuda:{rank}" if gpu else "cpu", threads) for rank in range(here)]
