"""Handlers of a model's own, in processes of their own."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardwise.store.custom import Busy, Custom, HandlerFailure, Job, Piece, Request
from shardwise.store.stored import open_stored
from tests.store.folders import make_folder

PATIENCE = 60.0
ECHO = """
    import json, os, time
    from pathlib import Path
    from shardwise.store.handler import Handler, send_intermediate_predict_response

    class Echo(Handler):
        def initialize(self, context):
            super().initialize(context)
            print("noise on stdout", flush=True)
            self.rank = os.environ.get("RANK")

        def handle(self, requests, context):
            texts = self.preprocess(requests)
            context.metrics.add_time("Echo", len(texts))
            for text in texts:
                if text.startswith("file "):
                    path = Path(text[5:])
                    path.write_text(str(os.getpid()))
                    while path.exists():
                        time.sleep(0.01)
                if text == "die":
                    os._exit(3)
                if text == "raise":
                    raise RuntimeError("no such luck")
                if text == "memory":
                    raise MemoryError
            if texts == ["pieces"]:
                return (["%d." % n] for n in range(3))
            if texts == ["send"]:
                send_intermediate_predict_response(["a"], context.request_ids, "", 200, context)
                return ["b"]
            if texts == ["wrong"]:
                return "wrong"
            if texts == ["json"]:
                context.set_response_status(418, "", 0)
                context.set_response_header(0, "X-Own", context.get_request_header(0, "x-given"))
                return [{"config": context.model_yaml_config["own"], "cwd": os.getcwd(),
                         "gpu": context.system_properties["gpu_id"], "name": context.manifest["model"]["modelName"]}]
            return ["%s of %d" % (text, len(texts)) for text in texts]
"""


class Asked:
    """A request and its pieces."""

    def __init__(self, custom: Custom, text: str, **headers: str) -> None:
        self.pieces: queue.Queue[Piece] = queue.Queue()
        self.job: Job = custom.submit(Request({"body": text.encode()}, headers, text), self.pieces.put)

    def all(self) -> list[Piece]:
        found = [self.pieces.get(timeout=PATIENCE)]
        while not found[-1].last:
            found.append(self.pieces.get(timeout=PATIENCE))
        return found

    def one(self) -> Piece:
        (piece,) = self.all()
        return piece

    def text(self) -> str:
        return "".join(piece.content.decode() for piece in self.all())


def until(fact: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not fact():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.01)


@contextmanager
def serving(path: Path, yaml: str = "", code: str = ECHO, **settings: Any) -> Iterator[Custom]:
    folder = make_folder(path / "m", yaml, "handler.py", code)
    with open_stored(folder, trust_handlers=True) as stored:
        custom = Custom(stored, **settings)
        try:
            custom.start()
            yield custom
        finally:
            custom.close()


def test_one_worker(tmp_path: Path) -> None:
    """Guards requirement 31: answers and their pieces, statuses, headers, metrics, what raises or dies, and noise."""
    seen: list[tuple[str, str, float]] = []
    with serving(tmp_path, "own: 7", observe=lambda *each: seen.append(each)) as custom:
        assert Asked(custom, "a").one() == Piece(b"a of 1", "text/plain; charset=utf-8", 200, True, {})
        assert seen[0] == ("Echo", "ms", 1.0)
        assert [name for name, _, _ in seen[1:]] == ["PredictionTime", "WorkerThreadTime"]
        assert all(unit == "ms" and 0.0 <= value < 1000 * PATIENCE for _, unit, value in seen[1:])
        assert [piece.content for piece in Asked(custom, "pieces").all()] == [b"0.", b"1.", b"2.", b""]
        assert [piece.content for piece in Asked(custom, "send").all()] == [b"a", b"b"]
        found = Asked(custom, "json", **{"X-Given": "yes"}).one()
        assert (found.status, found.headers, found.content_type) == (418, {"X-Own": "yes"}, "application/json")
        own = {"config": 7, "cwd": str(tmp_path / "m"), "gpu": None, "name": "m"}
        assert json.loads(found.content) == own
        for text, status, error in [
            ("raise", 500, "RuntimeError: no such luck"),
            ("memory", 507, "the handler ran out of memory"),
            ("wrong", 500, "TypeError: for 1 requests the handler returned a str: return a list of as many"),
            ("die", 500, "the worker process exited with code 3"),
        ]:
            piece = Asked(custom, text).one()
            assert (piece.status, piece.content.decode().splitlines()[0]) == (status, error)
        assert Asked(custom, "b").text() == "b of 1"
        (worker,) = custom.workers
        assert "exited with code 3" in worker.cause
        with pytest.raises(ValueError, match="the body is not valid JSON"):
            Asked(custom, "{", **{"Content-Type": "application/json"})
        pid = worker.pids[0]
        assert Path(f"/proc/{pid}").exists()
    until(lambda: not Path(f"/proc/{pid}").exists())
    with pytest.raises(Busy, match="no workers"):
        Asked(custom, "a")


def test_batches(tmp_path: Path) -> None:
    """Guards batchSize and maxBatchDelay: a full batch goes at once, and one that isn't waits no longer than that."""
    with serving(tmp_path, "batchSize: 3\nmaxBatchDelay: 300000") as custom:
        asked = [Asked(custom, text) for text in ("a", "b", "c")]
        assert [each.text() for each in asked] == ["a of 3", "b of 3", "c of 3"]
        gone = Asked(custom, "gone")
        gone.job.cancel()
        assert custom.waiting == 0
        asked = [Asked(custom, text) for text in ("d", "raise", "f")]
        assert {each.one().status for each in asked} == {500}
        assert gone.pieces.empty()
    with serving(tmp_path, "batchSize: 3\nmaxBatchDelay: 1") as custom:
        assert Asked(custom, "alone").text() == "alone of 1"


def test_queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards useJobTicket, jobQueueSize and clientTimeoutInMills; and what is unfinished when a model is closed."""
    busy = tmp_path / "busy"
    with serving(tmp_path, "useJobTicket: true") as custom:
        held = Asked(custom, f"file {busy}")
        until(busy.exists)
        with pytest.raises(Busy, match="useJobTicket"):
            Asked(custom, "a")
        assert (custom.idle, custom.waiting) == (0, 0)
        busy.unlink()
        assert held.one().status == 200
    with serving(tmp_path, "clientTimeoutInMills: 600000") as custom, monkeypatch.context() as patch:
        held = Asked(custom, f"file {busy}")
        until(busy.exists)
        waiting = [Asked(custom, text) for text in "ab"]
        assert custom.waiting == 2
        patch.setattr("shardwise.store.jobs.monotonic", lambda: time.monotonic() + 601)
        assert [each.one().status for each in waiting] == [503, 503]
        busy.unlink()
        assert held.one().status == 200
    with serving(tmp_path, "jobQueueSize: 2") as custom:
        held = [Asked(custom, f"file {busy}"), *(Asked(custom, text) for text in "a")]
        until(busy.exists)
        held.append(Asked(custom, "b"))
        with pytest.raises(Busy, match="2 requests wait for m already"):
            Asked(custom, "c")
        (worker,) = custom.workers
        assert worker.state == "busy"
    assert [each.one().status for each in held] == [503, 503, 503]
    assert not Path(f"/proc/{worker.pids[0]}").exists()


def test_a_worker_that_hangs_or_is_killed(tmp_path: Path) -> None:
    """Guards c16: responseTimeout kills a worker, another one comes, and no request waits for a dead one."""
    busy = tmp_path / "busy"
    with serving(tmp_path, "responseTimeout: 1") as custom:
        piece = Asked(custom, f"file {busy}").one()
        assert (piece.status, piece.content) == (500, b"the worker gave no answer within 1 s (responseTimeout)")
        busy.unlink()
        until(lambda: Asked(custom, "a").one().status == 200)
    with serving(tmp_path) as custom:
        held = Asked(custom, f"file {busy}")
        until(lambda: busy.exists() and busy.read_text())
        os.kill(int(busy.read_text()), signal.SIGKILL)
        assert "was killed by SIGKILL" in held.one().content.decode()
        busy.unlink()
        assert Asked(custom, "a").text() == "a of 1"


def test_workers_come_and_go(tmp_path: Path) -> None:
    """Guards scaling: as many as are wanted, side by side, not more than maxWorkers, and no batch cut off."""
    first, second = tmp_path / "first", tmp_path / "second"
    with serving(tmp_path, "minWorkers: 1\nmaxWorkers: 2") as custom:
        with pytest.raises(ValueError, match="0 to 2 workers"):
            custom.scale(3)
        custom.scale(2)
        asked = [Asked(custom, f"file {path}") for path in (first, second)]
        until(lambda: first.exists() and second.exists() and first.read_text() and second.read_text())
        assert first.read_text() != second.read_text()
        custom.scale(0)
        with pytest.raises(Busy, match="no workers"):
            Asked(custom, "a")
        for path in (first, second):
            path.unlink()
        assert [each.one().status for each in asked] == [200, 200]
        until(lambda: not custom.workers)
        custom.scale(1)
        assert Asked(custom, "a").text() == "a of 1"


def test_workers_that_cannot_start(tmp_path: Path) -> None:
    """Guards against a model that is said to be served when its handler can't be, and against endless starts."""
    cases = {
        "import ts.torch_handler.nothing_like_it": "needs the module 'ts.torch_handler.nothing_like_it'",
        "x = 1": "must hold one class with a method handle, or a function handle; it holds none",
        "class A:\n  def handle(self): 1\nclass B(A): pass": "it holds A, B",
        "class A:\n  def handle(self): 1\n  def initialize(self, context): raise OSError('no weights')": "no weights",
        "import os\nos._exit(7)": "exited with code 7",
    }
    for code, error in cases.items():
        with pytest.raises(HandlerFailure, match=error), serving(tmp_path, "", code):
            raise AssertionError("it can't be served")
    slow = "import time\ntime.sleep(1000)"
    with (
        pytest.raises(HandlerFailure, match=r"was not ready within 1 s \(startupTimeout\)"),
        serving(tmp_path, "startupTimeout: 1", slow),
    ):
        raise AssertionError("it can't be served")
    count = tmp_path / "count"
    code = f"""
        import os
        def handle(requests, context):
            if requests is None and os.path.exists({str(count)!r}):
                raise RuntimeError("never again")
            open({str(count)!r}, "a").close()
            return os._exit(1) if requests else None
    """
    with serving(tmp_path, "maxRetryTimeoutInSec: 1", code) as custom:
        assert Asked(custom, "a").one().status == 500
        until(lambda: custom.workers[0].state == "dead")
        with pytest.raises(Busy, match="no workers"):
            Asked(custom, "a")
        count.unlink()
        custom.scale(1)
        until(lambda: [each.state for each in custom.workers] == ["ready"])


RANKS = """
    import os, time
    def handle(requests, context):
        rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
        assert os.environ["LOCAL_RANK"] == rank and os.environ["MASTER_ADDR"] == "127.0.0.1"
        if requests is None:
            return
        text = bytes(requests[0]["body"]).decode()
        if text == "raise " + rank:
            raise RuntimeError("on %s" % rank)
        while text == "raise 1":
            time.sleep(0.01)
        return ["%s of %s: %s" % (rank, world, text)]
"""


@pytest.mark.parametrize(("kind", "heard"), [("tp", True), ("pp", False)])
def test_ranks(tmp_path: Path, kind: str, heard: bool) -> None:
    """Guards c1, c14 and the gap of TorchServe's core: each rank has its place, the first answers, all are heard."""
    with serving(tmp_path, f"parallelType: {kind}\ntorchrun:\n  nproc-per-node: 2\n", RANKS) as custom:
        assert Asked(custom, "a").text() == "0 of 2: a"
        assert len(custom.workers[0].pids) == 2
        assert Asked(custom, "raise 0").text() == "rank 0: RuntimeError: on 0"
        if heard:  # rank 0 hangs, as in a collective
            assert Asked(custom, "raise 1").text() == "rank 1: RuntimeError: on 1"
        assert Asked(custom, "b").text() == "0 of 2: b"


def test_custom_is_one_process(tmp_path: Path) -> None:
    """Guards c11: parallelType custom is one process, which gets all GPUs of the worker."""
    with serving(tmp_path, "parallelType: custom\nparallelLevel: 2\nown: 1") as custom:
        assert Asked(custom, "a").text() == "a of 1"
        assert len(custom.workers[0].pids) == 1


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards c13: each worker has its own run of the GPUs, and there are no more workers than runs."""
    code = """
        import os
        def handle(requests, context):
            return [[os.environ["CUDA_VISIBLE_DEVICES"], context.system_properties["gpu_id"]]] if requests else None
    """
    yaml = "deviceType: gpu\nparallelType: custom\nparallelLevel: 2\nminWorkers: 2"
    with pytest.raises(ValueError, match="minWorkers can be 0, or deviceType cpu"), serving(tmp_path, yaml, code):
        raise AssertionError("it can't be served")
    with pytest.raises(ValueError, match="there is no GPU 2: 0 can be seen"), serving(tmp_path, "deviceIds: [2]", code):
        raise AssertionError("it can't be served")
    monkeypatch.setattr("shardwise.runtime.machine.num_gpus", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
    with serving(tmp_path, yaml, code) as custom:
        assert [worker.gpus for worker in custom.workers] == [("2", "3"), ("5", "7")]
        assert Asked(custom, "a").text() in ('["2,3", 0]', '["5,7", 0]')
        with pytest.raises(ValueError, match="3 workers of 2 GPUs"):
            custom.scale(3)


def test_the_handler_of_the_docs(tmp_path: Path) -> None:
    """Guards the handler that docs/torchserve.md shows."""
    page = (Path(__file__).parents[2] / "docs" / "torchserve.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    with serving(tmp_path, "batchSize: 2\nmaxBatchDelay: 300000", code) as custom:
        asked = [Asked(custom, text) for text in ("a", "b")]
        assert [each.text() for each in asked] == ["A", "B"]


def test_one_place_runs_code_of_a_folder() -> None:
    """R1: guards against a second place that executes a file of a model; the one needs --trust-handlers."""
    root = Path(__file__).parents[2] / "shardwise"
    found = [path for path in root.rglob("*.py") if "exec_module" in path.read_text()]
    assert [str(path.relative_to(root)) for path in found] == ["store/worker.py"]


def test_nothing_outlives_the_front(tmp_path: Path) -> None:
    """F3: guards against processes that are left of a model that was never closed."""
    folder = make_folder(tmp_path / "m", "", "handler.py", ECHO)
    code = f"""
        import os
        from pathlib import Path
        from shardwise.store.custom import Custom
        from shardwise.store.stored import open_stored
        custom = Custom(open_stored(Path({str(folder)!r}), trust_handlers=True))
        custom.start()
        print(custom.workers[0].pids[0], flush=True)
        os._exit(0)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    pid = int(subprocess.run(command, check=True, timeout=PATIENCE, stdout=subprocess.PIPE).stdout)
    until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.slow
def test_ranks_with_gloo(tmp_path: Path) -> None:
    """Guards c1, c33: what a handler does with torch.distributed, as TorchServe's only distributed test does it."""
    code = """
        import torch
        import torch.distributed as dist
        from shardwise.store.handler import Handler

        class Sums(Handler):
            def initialize(self, context):
                dist.init_process_group("gloo")

            def inference(self, data):
                found = torch.tensor([int(each) for each in data])
                dist.all_reduce(found)
                if data == ["13"] and dist.get_rank() == 1:
                    raise RuntimeError("unlucky")
                if data == ["13"]:
                    dist.all_reduce(found)
                return found.tolist()
    """
    with serving(tmp_path, "parallelType: tp\ntorchrun:\n  nproc-per-node: 2\n", code) as custom:
        assert Asked(custom, "42").text() == "84"
        assert Asked(custom, "13").text() == "rank 1: RuntimeError: unlucky"
        until(lambda: Asked(custom, "1").text() == "2")


@pytest.mark.slow
def test_handlers_of_torchserve(tmp_path: Path) -> None:
    """Guards handlers that are written for TorchServe's own classes, timer and function for pieces."""
    pytest.importorskip("ts")
    code = """
        from ts.handler_utils.timer import timed
        from ts.handler_utils.utils import send_intermediate_predict_response
        from ts.torch_handler.base_handler import BaseHandler

        class Theirs(BaseHandler):
            def initialize(self, ctx):
                self.context = ctx
                self.initialized = True

            @timed
            def preprocess(self, requests):
                return [bytes(request["body"]).decode() for request in requests]

            def inference(self, data):
                send_intermediate_predict_response(
                    ["<" for _ in data], self.context.request_ids, "Intermediate", 200, self.context
                )
                return data

            def postprocess(self, data):
                return data
    """
    seen: list[tuple[str, str, float]] = []
    with serving(tmp_path, "handler:\n  profile: true", code, observe=lambda *each: seen.append(each)) as custom:
        pieces = Asked(custom, "a").all()
        assert [piece.content for piece in pieces] == [b"<", b"a"]
        assert pieces[-1].headers == {}
    assert [name for name, _, _ in seen][:3] == ["ts_handler_preprocess", "HandlerTime", "PredictionTime"]
