"""The process of a custom handler: imports the file that the operator trusts, and hands it batches.

The one place that runs code of a model's folder; see `custom` for the other end. No torch of its own.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any, NoReturn

import msgspec

from shardwise.runtime import forkserver
from shardwise.runtime.frames import Frames, Kind, pack
from shardwise.runtime.worker import live
from shardwise.store.handler import Context, plain
from shardwise.store.manifest import load
from shardwise.store.otf import Socket
from shardwise.store.wire import Answer, Batch, Item, Reply, Start

Entry = Callable[[Any, Context], Any]


def main() -> None:
    """Be the fork server of a model's processes; see `forkserver`."""

    def work(control: int, unused: int, unasked: int) -> NoReturn:
        os.close(unused)
        os.close(unasked)
        live(control, serve)

    forkserver.main(work)


def serve(frames: Frames) -> None:
    """A process's life: the handler, then batches."""
    frame = frames.read()
    if frame is None:
        return
    start = msgspec.msgpack.decode(frame[1], type=Start)
    os.environ.update(start.environment)
    os.chdir(start.folder)
    sys.path.insert(0, start.folder)
    context = Context(
        start.name,
        {"model_dir": start.folder, "gpu_id": start.gpu, "batch_size": start.batch_size, "server_name": "shardwise"},
        json.loads(start.manifest),
        json.loads(start.config),
    )
    entry = find(start, context)
    frames.send(pack(Kind.READY))
    batches = msgspec.msgpack.Decoder(Batch)
    while (frame := frames.read()) is not None and frame[0] is Kind.STEP:
        answer(batches.decode(frame[1]), entry, context, frames)


def find(start: Start, context: Context) -> Entry:
    """The handler's function or its only class's ``handle``, initialized. Raises whatever keeps it from being."""
    name, _, function = start.handler.partition(":")
    module = _import(Path(start.folder, name))
    entry = getattr(module, function or "handle", None)
    if callable(entry):
        entry(None, context)
        return entry  # type: ignore[no-any-return]
    if function:
        raise ValueError(f"{name} has no function {function!r}")
    classes: list[Any] = [each for each in vars(module).values() if inspect.isclass(each)]
    classes = [each for each in classes if each.__module__ == module.__name__ and hasattr(each, "handle")]
    if len(classes) != 1:
        named = ", ".join(each.__name__ for each in classes) or "none"
        raise ValueError(f"{name} must hold one class with a method handle, or a function handle; it holds {named}")
    made = classes[0]()
    made.initialize(context)
    return made.handle  # type: ignore[no-any-return]


def _import(path: Path) -> ModuleType:
    name = path.stem if path.stem not in sys.modules else f"{path.stem} of the model"  # it may be called json.py
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        needed = (error.name or "").partition(".")[0]
        remedy = f"pip install {needed}"
        if needed == "ts":
            remedy = (
                "it is written for TorchServe's own classes, so either pip install torchserve, or take Handler from "
                "shardwise.store.handler in place of BaseHandler"
            )
        raise ModuleNotFoundError(f"{path.name} needs the module {error.name!r}: {remedy}", name=error.name) from None
    return module


def answer(batch: Batch, entry: Entry, context: Context, frames: Frames) -> None:
    """Have a batch handled and tell what came of it."""

    def reply(answers: list[Answer], last: bool, error: str = "", status: int = 500) -> None:
        recorded, context.metrics.recorded = context.metrics.recorded, []
        frames.send(pack(Kind.RESULT, Reply(batch.number, answers, last, plain(error), status, recorded)))

    began = monotonic()
    context.begin([item.id for item in batch.items], [item.headers for item in batch.items])
    context.send = lambda answers: reply(answers, False)
    context.cl_socket = Socket(context.send, len(batch.items))
    try:
        outputs = entry([_data(item) for item in batch.items], context)
        if inspect.isgenerator(outputs):
            for piece in outputs:
                reply(context.answers(piece), False)
            outputs = [""] * len(batch.items)
        answers = context.answers(outputs)
        context.metrics.add_time("PredictionTime", (monotonic() - began) * 1e3)
        reply(answers, True)
    except MemoryError:
        reply([], True, "the handler ran out of memory", 507)
    except Exception as error:
        code, told = getattr(error, "error_code", 500), getattr(error, "message", None)  # ts's PredictionException
        memory = type(error).__name__ == "OutOfMemoryError"
        text = str(told or error) or type(error).__name__
        status = 507 if memory else code if isinstance(code, int) and 400 <= code <= 599 else 500
        reply([], True, f"{type(error).__name__}: {text}", status)


def _data(item: Item) -> dict[str, Any]:
    """A request as TorchServe gives it to handlers: JSON is read, all else left as it came."""
    kind = next((value for name, value in item.headers.items() if name.lower() == "content-type"), "")
    found: dict[str, Any] = dict(item.data)
    if kind.partition(";")[0].strip().lower() == "application/json" and isinstance(found.get("body"), bytes):
        found["body"] = load(found["body"])
    return found


if __name__ == "__main__":
    main()
