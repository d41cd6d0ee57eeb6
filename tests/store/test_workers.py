"""Workers of custom handlers: which of them go, which GPUs they may see, and what one of them does wrong."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.runtime.spawn import Process
from shardwise.store.custom import Custom, Piece
from shardwise.store.stored import open_stored
from tests.store.folders import make_folder
from tests.store.test_custom import ECHO, PATIENCE, Asked, serving, until


def test_dead_workers_are_those_that_go(tmp_path: Path) -> None:
    """Guards against a healthy worker that goes in place of a dead one, and a dead one that gets no other chance."""
    never = tmp_path / "never"
    code = f"""
        import os
        def handle(requests, context):
            if requests is None and os.path.exists({str(never)!r}):
                raise RuntimeError("never again")
            return [str(os.getpid()) for _ in requests] if requests else None
    """
    with serving(tmp_path, "minWorkers: 2\nmaxRetryTimeoutInSec: 1", code) as custom:

        def states() -> list[str]:
            return [each.state for each in custom.workers]

        dying, healthy = custom.workers
        never.touch()
        os.kill(dying.pids[0], signal.SIGKILL)
        until(lambda: "dead" in states())
        custom.scale(1)
        until(lambda: states() == ["ready"])
        assert custom.workers[0].pids == healthy.pids
        custom.scale(2)
        until(lambda: "dead" in states())
        never.unlink()
        custom.scale(2)
        until(lambda: states() == ["ready", "ready"])
        assert custom.workers[0].pids == healthy.pids


def test_nobody_waits_while_processes_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an event loop that stands still for as long as a process takes to be gone."""
    held, go = threading.Event(), threading.Event()
    bury = Process.bury

    def slow(process: Process, patience: float) -> None:
        held.set()
        assert go.wait(PATIENCE)
        bury(process, patience)

    with serving(tmp_path, "minWorkers: 2") as custom:
        monkeypatch.setattr(Process, "bury", slow)
        try:
            custom.scale(1)
            assert held.wait(PATIENCE)
            assert len(custom.workers) == 2  # which needs the lock that the thread must not keep
            custom.stop()
        finally:
            go.set()


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Custom]:
    code = """
        import struct
        def handle(requests, context):
            if requests is None:
                return
            text = bytes(requests[0]["body"]).decode()
            what, _, rest = text.partition(" ")
            context.set_response_header(0, "X-Own", " caf\u00e9 ")
            context.metrics.add_metric("half of \\ud800", 1.0)
            if what == "status":
                context.set_response_status(int(rest), "", 0)
            if what == "header":
                context.set_response_header(0, *rest.split(":", 1))
            if what == "type":
                context.set_response_content_type(0, rest)
            if what == "half":
                raise ValueError("\\ud800")
            if what == "frame":
                context.cl_socket.sendall(struct.pack("!iii", 200, 0, -1))
            return [text]
    """
    with serving(tmp_path_factory.mktemp("odd"), "", code) as custom:
        yield custom


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("status 99", "ValueError: the status of an answer must be from 200 to 599, not 99"),
        ("status 700", "ValueError: the status of an answer must be from 200 to 599, not 700"),
        ("header X-A:\u20ac", "ValueError: '\u20ac' can't be the value of a header: it must be one line of Latin-1"),
        ("header X-A:a\r\nX-B: c", "ValueError: 'a\\r\\nX-B: c' can't be the value of a header"),
        ("header a b:c", "ValueError: 'a b' can't be a header of an answer"),
        ("header Content-Length:1", "ValueError: 'Content-Length' can't be a header of an answer"),
        ("type \u20ac", "ValueError: '\u20ac' can't be the value of a header"),
        ("half", "ValueError: ?"),
        ("frame", "ValueError: for 1 requests the handler sent 0 pieces"),
    ],
)
def test_what_a_handler_does_wrong_is_its_error(odd: Custom, text: str, error: str) -> None:
    """Guards against a status, header, text or frame that breaks the answer, the connection or the worker."""
    pids = odd.workers[0].pids
    piece = Asked(odd, text).one()
    assert (piece.status, piece.failed) == (500, True)
    assert piece.content.decode().startswith(error)
    assert Asked(odd, "a").one() == Piece(b"a", "text/plain; charset=utf-8", 200, True, {"X-Own": "caf\u00e9"})
    assert odd.workers[0].pids == pids


@pytest.mark.parametrize(
    ("visible", "yaml", "gpus"),
    [
        (None, "minWorkers: 2", ["0", "1"]),
        ("2,1", "minWorkers: 2", ["2", "1"]),
        ("2, GPU-8a", "deviceIds: [1, 0]\nminWorkers: 2", ["GPU-8a", "2"]),
        ("0,3,1", "deviceType: gpu", ["0"]),
        ("", "", []),
        ("-1", "", []),
        ("", "deviceType: gpu", "0 there are"),
        ("2,1", "deviceIds: [2]", "there is no GPU 2: 2 can be seen"),
        (None, "deviceIds: [1]\nminWorkers: 2", "1 there are"),
    ],
)
def test_gpus_that_the_server_may_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, yaml: str, gpus: list[str] | str
) -> None:
    """Guards GPUs that the server was kept from, by CUDA_VISIBLE_DEVICES, against its workers; and workers that are to
    have a GPU against being started without."""
    monkeypatch.setattr("shardwise.runtime.machine.num_gpus", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with open_stored(make_folder(tmp_path / "m", yaml, "handler.py", ECHO), trust_handlers=True) as stored:
        if isinstance(gpus, str):
            with pytest.raises(ValueError, match=gpus):
                Custom(stored)
        else:
            custom = Custom(stored)
            found = [custom._place(number).gpus for number in range(stored.limits.min_workers)]
            assert [name for each in found for name in each] == gpus
