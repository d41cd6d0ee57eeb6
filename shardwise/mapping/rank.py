"""A rank of a map, and the process it is forked from: imports the factory, builds the model, answers items.

Runs what the operator has named and nothing else: items are JSON, and only ever arguments. No torch of its own.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from shardwise.mapping.config import IN_RANK, Place
from shardwise.mapping.wire import Answer, Order, Post, Work, encode, failure
from shardwise.runtime import forkserver
from shardwise.runtime.frames import Frames, Kind, pack
from shardwise.runtime.worker import live

Factory = Callable[..., Any]
GRAPHS = "torch._dynamo.convert_frame"
"""torch's logger of what is compiled."""


def main() -> None:
    """Be the fork server of a map's holders; see `forkserver`."""
    os.environ[IN_RANK] = "1"
    os.environ.setdefault(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
    )  # else asking for GPUs would spoil forked processes' CUDA

    def hold(control: int, unused: int, forks: int) -> NoReturn:
        os.close(unused)
        live(control, lambda frames: _hold(frames, forks))

    forkserver.main(hold)


def _hold(frames: Frames, forks: int) -> None:
    """The holder's life: do what ranks share, then fork them as often as it is asked for."""
    start = frames.read()
    if start is None:
        return
    order = msgspec.msgpack.decode(start[1], type=Order)
    settings: dict[str, Any] = json.loads(order.settings)
    factory: Factory | None = None
    call: Callable[..., Any] | None = None
    if order.share != "nothing":
        factory = find(order.factory)
        check_settings(order.factory, factory, settings)
        _must_be_alone(f"importing {order.factory}", "nothing")
    if order.share == "model":
        assert factory is not None
        call = build(order.factory, factory, settings, Place(0, 1, "cpu", 1, order.compile))
        _must_be_alone(f"building {order.factory}", "imports")
    frames.send(pack(Kind.READY))

    def work(control: int, unused: int, unasked: int) -> NoReturn:
        os.close(unused)
        os.close(unasked)

        def answer(frames: Frames) -> None:
            post = frames.read()
            if post is None:
                return
            at = msgspec.msgpack.decode(post[1], type=Post)
            place = Place(at.rank, at.world, at.device, at.threads, order.compile)
            made = factory
            if made is None:
                made = find(order.factory)
                check_settings(order.factory, made, settings)
            if (torch := sys.modules.get("torch")) is not None:
                torch.set_num_threads(place.threads)  # it was imported where there was to be one
            with heard(GRAPHS if order.compile is not None else None) as news:
                serve(frames, call or build(order.factory, made, settings, place), order.lists, place.device, news)

        live(control, answer)

    forkserver.serve(forks, work)


def _must_be_alone(deed: str, remedy: str) -> None:
    """Threads don't survive a fork, and what they held stays locked for ever."""
    tasks = Path("/proc/self/task")
    count = len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()
    if count > 1:
        raise ValueError(f"{deed} has started threads, which ranks can't share: give share {remedy}")


def find(name: str) -> Factory:
    """The callable "module:name" itself. ValueError if there is none; what its module raises, if that fails."""
    module, _, attribute = name.partition(":")
    try:
        found = pkgutil.resolve_name(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(
                f"there is no module {error.name!r}: run where it lies, or put its directory on PYTHONPATH"
            ) from None
        raise ValueError(
            f"{module} can't be imported, it needs the module {error.name!r}: install that first"
        ) from None
    except AttributeError:
        if module not in sys.modules:  # it failed by itself
            raise
        offered = [each for each in dir(sys.modules[module]) if each[0] != "_"]
        raise ValueError(f"{module} has no {attribute!r}{_nearest(attribute, offered)}") from None
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__}: a factory is called, and returns what answers items")
    return found  # type: ignore[no-any-return]


def check_settings(name: str, factory: Factory, settings: Mapping[str, Any]) -> None:
    """Raises ValueError for a setting that the factory hasn't, with the nearest one, and for one that it lacks."""
    parameters = inspect.signature(factory).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    offered = [each.name for each in named if each.name != "place"]
    if not any(each.kind is each.VAR_KEYWORD for each in parameters) or "place" in settings:
        for key in settings:
            if key not in offered:
                has = f"; it has {', '.join(offered)}" if offered else "; it has none"
                raise ValueError(f"--set {key}: {name} has no such setting{_nearest(key, offered) or has}")
    lacking = [each.name for each in named if each.default is each.empty and each.name not in (*settings, "place")]
    if lacking:
        raise ValueError(f"{name} needs --set {lacking[0]}=… ({', '.join(lacking)} without a default)")


def _nearest(word: str, offered: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, offered, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def build(name: str, factory: Factory, settings: Mapping[str, Any], place: Place) -> Callable[..., Any]:
    """The callable that answers items."""
    takes = _takes(factory, "place")
    call = factory(**settings, **({"place": place} if takes else {}))
    if place.by is not None and not place.compiled:
        how = (
            "never calls place.compile(model)" if takes else "has no parameter place, to call place.compile(model) with"
        )
        raise ValueError(f"--compile {place.by.backend}: {name} {how}: leave --compile out, or see docs/map.md")
    if not callable(call):
        raise ValueError(
            f"{name} returned a {type(call).__name__}: return what is called with an item, such as a function"
        )
    return call  # type: ignore[no-any-return]


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in one
        return False


@contextmanager
def heard(logger: str | None) -> Iterator[list[str]]:
    """What is logged there meanwhile of functions that torch makes no more graphs of."""
    found: list[str] = []
    if logger is None:
        yield found
        return

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            what, *more = record.getMessage().splitlines()
            if "recompile_limit" in what and not found:
                of = " ".join(line.strip() for line in more[:1])
                found.append(f"{what}, {of}: what takes one more graph runs uncompiled (leave dynamic on?)")

    ear = Ear()
    logging.getLogger(logger).addHandler(ear)
    try:
        yield found
    finally:
        logging.getLogger(logger).removeHandler(ear)


def serve(frames: Frames, call: Callable[..., Any], lists: bool, device: str, news: Sequence[str] = ()) -> None:
    """A rank's life: items. The first of ``news`` goes along with the answers of its time."""
    frames.send(pack(Kind.READY))
    caller = Caller(call, lists, device)
    works = msgspec.msgpack.Decoder(Work)
    told = False
    while (frame := frames.read()) is not None and frame[0] is Kind.STEP:
        answers = caller.answer(works.decode(frame[1]))
        if news and not told:
            told = True
            answers[0] = msgspec.structs.replace(answers[0], said=news[0])
        frames.send(pack(Kind.RESULT, answers))


class Caller:
    """Calls the model with items; it gets their indexes too if it has a parameter ``index``.

    With ``lists`` it is called with lists, of items and of indexes; if that raises, with each item alone, so that one
    item costs no other.
    """

    def __init__(self, call: Callable[..., Any], lists: bool, device: str) -> None:
        self._call = call
        self._lists = lists
        self._device = device
        self._indexed = _takes(call, "index")

    def answer(self, work: Work) -> list[Answer]:
        """Of each item, in order."""
        answers: dict[int, Answer] = {}
        items: list[tuple[int, Any]] = []
        for index, line in zip(work.indexes, work.lines, strict=True):
            try:
                items.append((index, json.loads(line.decode(), parse_constant=_refuse)))
            except (ValueError, RecursionError) as error:
                answers[index] = failure("ValueError", f"not valid JSON: {error}")
        answers |= self._each(items)
        return [answers[index] for index in work.indexes]

    def _each(self, items: list[tuple[int, Any]]) -> dict[int, Answer]:
        if self._lists and len(items) > 1:
            try:
                return dict(zip((index for index, _ in items), self._run_list(items), strict=True))
            except Exception:
                self._survive()
        act = self._run_one if self._lists else self._run
        return {index: self._try(act, item, index) for index, item in items}

    def _run(self, item: Any, index: int) -> Answer:
        return encode(self._with_index(item, index))

    def _run_one(self, item: Any, index: int) -> Answer:
        return self._run_list([(index, item)])[0]

    def _run_list(self, items: list[tuple[int, Any]]) -> list[Answer]:
        outputs = self._with_index([item for _, item in items], [index for index, _ in items])
        if not isinstance(outputs, list | tuple) or len(outputs) != len(items):
            got = f"{len(outputs)} outputs" if isinstance(outputs, list | tuple) else f"a {type(outputs).__name__}"
            raise TypeError(f"for a list of {len(items)} items the callable returned {got}: return a list of as many")
        return [self._try(encode, output) for output in outputs]

    def _with_index(self, item: Any, index: Any) -> Any:
        return self._call(item, index=index) if self._indexed else self._call(item)

    def _try(self, act: Callable[..., Answer], *arguments: Any) -> Answer:
        try:
            return act(*arguments)
        except (Exception, SystemExit) as error:
            self._survive()
            return failure(type(error).__name__, str(error))

    def _survive(self) -> None:
        """After some errors a GPU answers nothing any more; this raises then, and the rank is replaced."""
        if self._device != "cpu" and (torch := sys.modules.get("torch")) is not None:
            torch.cuda.synchronize()


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


if __name__ == "__main__":
    main()
