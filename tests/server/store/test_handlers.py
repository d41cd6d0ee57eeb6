"""Custom handlers behind a store's server: the operator's word, pieces, failures, workers that come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.server.store.conftest import until, world
from tests.server.store.test_predictions import told

HANDLER = """
import os
from shardwise.store.handler import Handler, send_intermediate_predict_response


class Upper(Handler):
    def initialize(self, context):
        super().initialize(context)
        self.key = os.environ.get("SHARDWISE_API_KEY")

    def inference(self, texts):
        self.context.metrics.add_time("UpperTime", 2.5)
        if texts == ["die"]:
            os._exit(3)
        if texts == ["slow"]:
            import time
            time.sleep(600)
        if texts == ["whisper"]:
            for piece in ("whis", "per"):
                send_intermediate_predict_response([piece], self.context.request_ids, "", 200, self.context)
            return [""]
        if texts[0].startswith("status"):
            self.context.set_response_status(int(texts[0][6:]), "", 0)
            self.context.set_response_header(0, "X-Own", "yes")
            return [{"own": True}]
        if texts == ["odd pieces"]:
            self.context.set_response_header(0, "X-Own", "yes")
            self.context.get_response_headers(0)["X-Own"] = "\\u20ac"
            send_intermediate_predict_response(["a"], self.context.request_ids, "", 200, self.context)
            return ["b"]
        if texts[0].startswith("raise"):
            error = RuntimeError("unlucky")
            error.error_code = int(texts[0][5:])
            raise error
        if texts[0].startswith("header"):
            return [str(self.context.get_request_header(0, "authorization"))]
        return [text.upper() for text in texts]
"""


def save_handler(store: Path, *lines: str) -> Path:
    folder = store / "upper"
    folder.mkdir(parents=True)
    (folder / "handler.py").write_text(HANDLER)
    (folder / "model-config.yaml").write_text("\n".join(["deviceType: cpu", *lines]) + "\n")
    return folder


def test_a_handler_answers(tmp_path: Path) -> None:
    """Guards custom handlers: raw bodies and forms, pieces as they are sent, its own metrics, no key of ours in its
    hands, workers that are added and taken away, and none of them left when it is unregistered."""
    save_handler(tmp_path)

    async def scene() -> None:
        async with world(tmp_path, trust_handlers=True, api_keys=("sk-secret",)) as found:
            post = found.http.post
            answer = await post("/predictions/upper", content=b"hello")
            assert (answer.status_code, answer.text) == (200, "HELLO")
            assert (await post("/predictions/upper", files={"data": b"hello"})).text == "HELLO"
            assert (await post("/predictions/upper", content=b"header")).text == "None"
            async with found.http.stream("POST", "/predictions/upper", content=b"whisper") as stream:
                assert stream.headers["transfer-encoding"] == "chunked"
                assert [piece async for piece in stream.aiter_raw()] == [b"whis", b"per"]
            page = (await found.http.get("/metrics")).text
            for name in ("UpperTime", "QueueTime", "HandlerTime", "PredictionTime", "WorkerThreadTime"):
                assert f'\n{name}{{Hostname="' in page
            openai = await post("/v1/completions", json={"model": "upper", "prompt": "a"})
            assert (openai.status_code, openai.json()["error"]["param"]) == (400, "model")
            scaled = await found.manage.put("/models/upper?min_worker=2&synchronous=true")
            assert scaled.json()["status"] == "Workers scaled to 2 for model: upper"
            pids = [pid for each in (await found.describe("upper"))["workers"] for pid in each["pids"]]
            assert len(pids) == 2
            assert all(psutil.pid_exists(pid) for pid in pids)
            texts = await asyncio.gather(*(post("/predictions/upper", content=b"x%d" % at) for at in range(8)))
            assert [each.text for each in texts] == [f"X{at}" for at in range(8)]
            assert (await found.manage.delete("/models/upper")).status_code == 200
            assert not any(map(psutil.pid_exists, pids))

    asyncio.run(scene())


def test_statuses_are_the_handlers_own(tmp_path: Path) -> None:
    """Guards the statuses that a handler sets, whose answers are its own, and those that it raises, which are errors in
    TorchServe's shape, against being taken for each other or for a fault of the server."""
    save_handler(tmp_path)

    async def scene() -> None:
        async with world(tmp_path, trust_handlers=True) as found:
            for status in (201, 404, 418, 429, 502):
                answer = await found.http.post("/predictions/upper", content=b"status%d" % status)
                assert (answer.status_code, answer.json()) == (status, {"own": True})
                assert (answer.headers["x-own"], answer.headers["content-type"]) == ("yes", "application/json")
            for status in (204, 304):
                answer = await found.http.post("/predictions/upper", content=b"status%d" % status)
                assert (answer.status_code, answer.content, answer.headers["x-own"]) == (status, b"", "yes")
            for status, kind in (
                (418, "BadRequestException"),
                (429, "ServiceUnavailableException"),
                (502, "InternalServerException"),
            ):
                assert told(await found.http.post("/predictions/upper", content=b"raise%d" % status)) == (status, kind)

    asyncio.run(scene())


def test_an_answer_that_can_not_be_sent_is_let_go(tmp_path: Path) -> None:
    """Guards against a request that is open for ever, for which scaling and unregistering wait, and against an error
    that has no shape."""
    save_handler(tmp_path)

    async def scene() -> None:
        async with world(tmp_path, trust_handlers=True) as found:
            model = found.registry.find("upper").model
            assert model is not None
            odd = await found.http.post("/predictions/upper", content=b"odd pieces")
            assert told(odd) == (500, "InternalServerException")
            assert model.pending == 0
            await found.manage.put("/models/upper?min_worker=0&max_worker=0&synchronous=true")
            assert (await found.manage.delete("/models/upper")).status_code == 200

    asyncio.run(scene())


def test_a_request_that_takes_too_long_while_its_model_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the server's limit of a request's time where its model is to have no workers any more."""
    save_handler(tmp_path)

    async def scene() -> None:
        async with world(tmp_path, trust_handlers=True, request_timeout=300.0) as found:
            slow = asyncio.ensure_future(found.http.post("/predictions/upper", content=b"slow"))
            served = found.registry.find("upper")
            await until(lambda: served.model is not None and served.model.pending == 1)
            await found.manage.put("/models/upper?min_worker=0&max_worker=0")
            await until(lambda: served.state == "STOPPED")
            later = SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() + 301})
            monkeypatch.setattr("shardwise.server.store.handlers.time", later)
            assert told(await slow) == (408, "RequestTimeoutException")

    asyncio.run(scene())


def test_a_worker_that_dies_is_told_and_replaced(tmp_path: Path) -> None:
    """c16, §4 29: guards against a request that hangs when its handler dies or sleeps, and against a model that stays
    dead."""
    save_handler(tmp_path, "responseTimeout: 2")

    async def scene() -> None:
        async with world(tmp_path, trust_handlers=True) as found:
            post = found.http.post
            for body in (b"die", b"slow"):
                died = await post("/predictions/upper", content=body)
                assert told(died) == (500, "InternalServerException")
                assert died.json()["message"]

                async def answers() -> bool:
                    again = await post("/predictions/upper", content=b"hello")
                    return (again.status_code, again.text) == (200, "HELLO")

                await until(answers)
            pid = (await found.describe("upper"))["workers"][0]["pid"]
            os.kill(pid, signal.SIGKILL)
            await until(answers)

    asyncio.run(scene())


def test_handlers_need_the_operators_word(tmp_path: Path) -> None:
    """Guards against code from a model's folder that is run unasked."""
    folder = save_handler(tmp_path)
    (folder / "handler.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")

    async def scene() -> None:
        async with world(tmp_path, "upper"):
            pass

    with pytest.raises(ValueError, match="--trust-handlers"):
        asyncio.run(scene())
    assert not (tmp_path / "ran").exists()
