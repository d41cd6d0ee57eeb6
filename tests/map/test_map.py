"""`shardwise.map` on real ranks: every item once, in order, whatever happens to ranks."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import shardwise
from shardwise.mapping import team
from shardwise.runtime.executor import RankFailure
from tests.map.deeds import FACTORY, Model, build


def mapped(
    folder: Path, inputs: Any, layout: str = "dp2", settings: Any = None, **options: Any
) -> list[shardwise.Mapped]:
    settings = {"folder": str(folder), **(settings or {})}
    with shardwise.map(options.pop("factory", FACTORY), inputs, layout, settings=settings, **options) as results:
        return list(results)


def times(folder: Path, index: int) -> int:
    """How often the item was begun."""
    return (folder / f"item{index}").stat().st_size


def mishap(deed: str, once: bool = True) -> dict[str, Any]:
    return {"do": deed, "once": once}


def test_every_item_once_and_in_order(tmp_path: Path) -> None:
    """Guards the promise itself: uneven items on three ranks (no count divides), shared out as ranks get free."""
    inputs: list[Any] = [mishap("nap") if index % 5 == 0 else index for index in range(23)]
    inputs[:3] = [mishap("meet")] * 3  # until each rank has one
    found = mapped(tmp_path, inputs, "dp3", {"factor": 3})
    assert [(each.index, each.error) for each in found] == [(index, None) for index in range(23)]
    assert all(times(tmp_path, index) == 1 for index in range(23))
    plain = [each for each in found if each.index % 5 and each.index > 2]
    assert [each.output[0] for each in plain] == [3 * each.index for each in plain]
    assert os.getpid() not in {each.output[2] for each in plain}
    assert [(tmp_path / f"built{rank}").stat().st_size for rank in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("deed", ["kill", "abort", "kill the only one", "stop", "kill holder", "kill server"])
def test_a_dead_rank_costs_no_item(tmp_path: Path, deed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards items from being lost, doubled or failed by a stop or a death, of a rank or of what it was forked from."""
    monkeypatch.setattr(team, "STOPPED", 0.2)
    inputs = [0, mishap("kill" if deed == "kill the only one" else deed), 2, 3, 4, 5, 6]
    found = mapped(tmp_path, inputs, "1" if deed == "kill the only one" else "dp2")
    assert [each.error for each in found] == [None] * 7
    assert [each.output[0] for each in found if each.index != 1] == [0, 4, 6, 8, 10, 12]
    assert times(tmp_path, 1) == 2


@pytest.mark.parametrize("size", [None, 3])
def test_a_poisonous_item_falls_alone(tmp_path: Path, size: int | None) -> None:
    """F12: guards the others from an item that crashes every rank, and the ranks from crashing over it for ever."""
    inputs: list[Any] = [0, 1, 2, 3, mishap("abort", once=False), 5, 6, 7]
    factory = "tests.map.deeds:lists" if size else FACTORY
    found = mapped(tmp_path, inputs, batch_size=size, factory=factory)
    assert [each.index for each in found if each.error] == [4]
    assert found[4].error == {"type": "RankFailure", "message": "2 ranks died of it; the last was killed by SIGABRT"}
    assert times(tmp_path, 4) == 2
    assert [each.output[0] for each in found if not each.error] == (
        [0, 1, 2, 3, 5, 6, 7] if size else [0, 2, 4, 6, 10, 12, 14]
    )


def test_an_item_that_takes_too_long(tmp_path: Path) -> None:
    """Guards a run from an item that never ends."""
    found = mapped(tmp_path, [1, mishap("hang"), 3], item_timeout=1.0)
    assert [each.error for each in found] == [
        *(None, {"type": "TimeoutError", "message": "took more than 1 s (--item-timeout)"}, None)
    ]


def test_errors_of_items(tmp_path: Path) -> None:
    """Guards neighbours from an item's exception, exit or flood of output."""
    found = mapped(tmp_path, [mishap(deed) for deed in ("raise", "leave", "print", "refuse")])
    assert [each.error and each.error["type"] for each in found] == ["RuntimeError", "SystemExit", None, "ValueError"]
    assert found[0].error == {"type": "RuntimeError", "message": "this can't be"}


def test_lists(tmp_path: Path) -> None:
    """Guards batches: no more than asked for, an error is the guilty item's alone, and a wrong count is told."""
    inputs = [0, 1, mishap("raise", once=False), 3, "odd", 5, 6]
    found = mapped(tmp_path, inputs, "1", factory="tests.map.deeds:lists", batch_size=4)
    assert [each.error and each.error["type"] for each in found] == [
        None,
        None,
        "RuntimeError",
        None,
        "TypeError",
        None,
        None,
    ]
    assert found[0].output == [0, 1]  # again, alone, since its batch had failed
    assert found[4].error is not None
    assert "list of 1 items the callable returned a str" in found[4].error["message"]
    full = mapped(tmp_path, list(range(6)), "1", factory="tests.map.deeds:lists", batch_size=4)
    assert [each.output[1] for each in full] == [4, 4, 4, 4, 2, 2]


def test_outputs_are_json(tmp_path: Path) -> None:
    """Guards files from what is no JSON: the error tells the remedy; odd text and large numbers come back whole."""
    names = ["set", "nan", "bytes", "half", "large", "text", "none"]
    with shardwise.map("tests.map.deeds:outputs", names) as results:
        found = list(results)
    assert [each.output for each in found[3:]] == ["\ud800", 2**70, "na\u00efve \u2603\n", None]
    errors = [each.error["message"] for each in found[:3] if each.error]
    assert ".tolist()" in errors[0]
    assert "return None in place of nan" in errors[1]
    assert "write bytes and images to a file" in errors[2]


def test_inputs_are_taken_as_they_are_needed(tmp_path: Path) -> None:
    """Guards memory: of an endless input no more is read than ranks can work on; leaving ends the ranks."""
    taken = 0

    def endless() -> Iterator[int]:
        nonlocal taken
        while True:
            taken += 1
            yield taken

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with shardwise.map(build, endless(), "dp2", settings={"folder": str(tmp_path)}) as results:
        for index in range(30):
            assert next(results).output[0] == 2 * (index + 1)
            begun = sum(1 for _ in tmp_path.glob("item*"))  # one rank may be ahead of the other, whose answer is next
            assert taken - begun < 10
        ours = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        assert len(ours) == 4  # the fork server, the holder and two ranks
    _, alive = psutil.wait_procs(ours, timeout=10)
    assert not alive


def test_nothing_to_do_starts_nothing(tmp_path: Path) -> None:
    """Guards against building a model for no item."""
    assert mapped(tmp_path, []) == []
    assert not list(tmp_path.iterdir())


def test_an_output_file_goes_on(tmp_path: Path) -> None:
    """Guards `output`: the call's results are all of them, what is done isn't done again, and the file is the same."""
    output = tmp_path / "out.jsonl"
    with shardwise.map(build, range(9), "dp2", settings={"folder": str(tmp_path)}, output=output) as results:
        for _ in range(4):
            next(results)
    found = mapped(tmp_path, range(9), output=output)
    assert [each.output[0] for each in found] == list(range(0, 18, 2))
    assert all(times(tmp_path, index) == 1 for index in range(4))
    assert len(output.read_text().splitlines()) == 9
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == ["out.jsonl"]


def test_a_map_that_is_left_at_once(tmp_path: Path) -> None:
    """Guards an output's name from a call that did nothing, and what is done from one that only looked at it."""
    output = tmp_path / "out.jsonl"
    with shardwise.map(build, [1, 2], settings={"folder": str(tmp_path)}, output=output) as results:
        pass
    assert not list(tmp_path.iterdir())
    with shardwise.map(build, [1, 2], settings={"folder": str(tmp_path), "factor": 3}, output=output) as results:
        assert next(results).output[0] == 3
    with shardwise.map(build, [1, 2], settings={"folder": str(tmp_path), "factor": 3}, output=output) as results:
        assert next(results).output[0] == 3
    again = mapped(tmp_path, [1, 2], "1", {"factor": 3}, output=output)
    assert [each.output[0] for each in again] == [3, 6]
    assert times(tmp_path, 0) == 1


@pytest.mark.parametrize("share", ["nothing", "imports", "model"])
def test_what_ranks_share(tmp_path: Path, share: str) -> None:
    """Guards the three ways to start: a shared model is built once for all ranks, and also for one that is replaced."""
    found = mapped(tmp_path, [1, mishap("kill"), 3], share=share)
    assert [each.error for each in found] == [None] * 3
    built = sum((tmp_path / f"built{rank}").stat().st_size for rank in range(2) if (tmp_path / f"built{rank}").exists())
    assert (built == 1) if share == "model" else (built >= 3)


def test_threads_are_not_forked(tmp_path: Path) -> None:
    """Guards ranks from locks that nobody will open: a model that has threads isn't shared, and the remedy works."""
    factory = "tests.map.deeds:threaded"
    with pytest.raises(ValueError, match=r"started threads.*give share imports"):
        mapped(tmp_path, [1], factory=factory, share="model")
    assert [each.output for each in mapped(tmp_path, [1], "1", factory=factory)] == [[1, 2]]


@pytest.mark.parametrize(
    ("deed", "kind", "words"),
    [
        ("raise", RankFailure, r"building tests.map.deeds:build: RuntimeError: this can't be"),
        ("refuse", ValueError, "--set deed: not like that"),
        ("abort", RankFailure, "killed by SIGABRT"),
        ("kill", RankFailure, "killed by SIGKILL"),
        ("hang", RankFailure, "was not ready within 0.5 s"),
    ],
)
def test_a_factory_that_fails(tmp_path: Path, deed: str, kind: type[Exception], words: str) -> None:
    """Guards users from waiting for a model that can't be built, and from a cause without a trace."""
    timeout = 0.5 if deed == "hang" else 60
    with pytest.raises(kind, match=words) as caught:
        mapped(tmp_path, [1], settings={"deed": deed}, startup_timeout=timeout)
    if deed == "raise":
        assert "in do" in caught.value.detail  # type: ignore[attr-defined]


def test_a_rank_that_can_not_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a run from one device that is gone: the others go on, and without others the cause is told."""
    told: list[str] = []

    def tell(text: str, file: object) -> None:
        told.append(text)
        (tmp_path / "go").touch()

    monkeypatch.setattr(team, "print", tell, raising=False)
    found = mapped(tmp_path, [0, mishap("kill"), mishap("wait"), 3], settings={"deed": "never again"})
    assert [each.error for each in found] == [None] * 4
    assert len(told) == 1
    assert "can't be started again (no memory left); the others go on" in told[0]
    with pytest.raises(RankFailure, match="RuntimeError: no memory left"):
        mapped(tmp_path, [0, 1], "1", {"deed": "never again"})


@pytest.mark.parametrize(
    ("factory", "settings", "words"),
    [
        ("tests.map.nowhere:build", {}, "no module 'tests.map.nowhere'"),
        ("tests.map.deeds:biuld", {}, "did you mean 'build'"),
        ("tests.map.deeds:FACTORY", {}, "is a str: a factory is called"),
        ("tests.map.deeds:nothing", {}, "returned a int: return what is called with an item"),
        (FACTORY, {"folder": "x", "factr": 1}, "--set factr: .* no such setting; did you mean 'factor'"),
        (FACTORY, {"folder": "x", "zzz": 1}, "it has folder, factor, deed"),
        (FACTORY, {"folder": "x", "place": 1}, "--set place"),
        (FACTORY, {}, "needs --set folder="),
    ],
)
def test_a_factory_that_is_not_meant_so(factory: str, settings: dict[str, Any], words: str) -> None:
    """Guards users from typing errors: each is named, with what was likely meant."""
    with pytest.raises(ValueError, match=words):
        list(shardwise.map(factory, [1], settings=settings))


@pytest.mark.parametrize(
    "factory", [lambda: 1, functools.partial(build, "x"), Model().build, (lambda: Model.build)().__get__(1)]
)
def test_what_ranks_can_not_import_is_refused(factory: Any) -> None:
    """R1: guards against the wish for a pickle: a factory travels by its name, or not at all."""
    with pytest.raises(ValueError, match="as settings"):
        shardwise.map(factory, [1])


def test_a_factory_of_the_script_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards beginners: the very words that work are told."""

    def main() -> None: ...

    main.__module__ = "__main__"
    monkeypatch.setattr(
        "sys.modules", {**__import__("sys").modules, "__main__": type("m", (), {"__file__": "/x/job.py"})}
    )
    with pytest.raises(ValueError, match=r"name it 'job:.*main', and call map under if __name__"):
        shardwise.map(main, [1])


def test_a_module_that_maps_on_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against ranks that start ranks for ever."""
    monkeypatch.setenv("SHARDWISE_MAP_RANK", "1")
    with pytest.raises(ValueError, match="under if __name__"):
        shardwise.map(build, [1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "dp2.tp2"}, "only dp fits, such as dp4"),
        ({"batch_size": 0}, "batch_size"),
        ({"threads": True}, "threads"),
        ({"share": "all"}, "share must be one of"),
        ({"device": "tpu"}, "device must be"),
        ({"device": "cuda", "layout": "dp64"}, "64 ranks need 64 GPUs"),
        ({"item_timeout": 0}, "item_timeout"),
        ({"settings": {"x": {1}}}, "settings of the factory must be JSON"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, Any], words: str) -> None:
    """Guards against a refusal that comes after the model is built."""
    began = time.monotonic()
    with pytest.raises(ValueError, match=words):
        shardwise.map(FACTORY, [1], **options)
    assert time.monotonic() - began < 5


def test_work_goes_to_whoever_is_free(tmp_path: Path) -> None:
    """Guards against shares dealt out beforehand: while one rank waits on one item the other does all the rest."""
    inputs = [mishap("wait"), *range(1, 12)]
    with shardwise.map(build, inputs, "dp2", settings={"folder": str(tmp_path)}) as results:

        def open_the_gate() -> None:
            deadline = time.monotonic() + 30
            while not (tmp_path / "item11").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            (tmp_path / "go").touch()

        gate = threading.Thread(target=open_the_gate)
        gate.start()
        found = list(results)
        gate.join()
    assert len(Counter(each.output[2] for each in found[1:])) == 1
