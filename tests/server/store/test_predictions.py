"""Predictions of engine models, as TorchServe's clients ask for them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import httpx
import pytest

from shardwise.params import SamplingParams
from shardwise.runtime.executor import Executor, RankFailure
from shardwise.runtime.launch import RunPlan
from shardwise.server.store.engines import EngineModel
from tests.fakes import ScriptedExecutor
from tests.harness import threaded_llm
from tests.server.dictation import Script
from tests.server.store.conftest import World, begin_threads, save_folder, until, world

ASKED = {"prompt": "Once upon a time", "max_new_tokens": 12}
KEY = "sk-store"


def told(answer: httpx.Response) -> tuple[int, str]:
    """An error's status and type, which must be in TorchServe's shape."""
    document = answer.json()
    assert set(document) == {"code", "type", "message"}
    assert document["code"] == answer.status_code
    return answer.status_code, document["type"]


def scripted(script: Script) -> Any:
    """Ranks that keep to a script."""

    def begin(plan: RunPlan, replica: int) -> Executor:
        return begin_threads(plan, replica, rank=script.rank)

    return begin


def test_a_text_however_it_is_asked_for(tmp_path: Path, tiny_text: Path) -> None:
    """Guards against an answer that is another one than the plain engine's: raw, as JSON, in a form, streamed or not;
    and against figures that miss it."""
    save_folder(tmp_path, "m", tiny_text, "profile: true", parallelType="tp", parallelLevel=2)
    with threaded_llm(tiny_text) as llm:
        expected = llm.generate(ASKED["prompt"], SamplingParams(max_tokens=12))[0].outputs[0].text  # type: ignore[arg-type]
    body = json.dumps(ASKED).encode()

    async def scene() -> None:
        async with world(tmp_path) as found:
            assert await found.text("m", ASKED) == expected
            assert await found.text("m/1.0", ASKED) == expected
            raw = await found.http.put("/predictions/m", content=body)  # which is what `curl -T` sends
            assert raw.text == expected
            form = await found.http.post("/predictions/m", files={"data": body})
            assert (form.status_code, form.text) == (200, expected)
            many = await found.http.post("/predictions/m", json=[ASKED, ASKED])
            assert many.json() == [expected, expected]
            async with found.http.stream("POST", "/predictions/m", json={**ASKED, "stream": True}) as answer:
                assert answer.headers["transfer-encoding"] == "chunked"
                pieces = [piece async for piece in answer.aiter_raw()]
            assert b"".join(pieces).decode() == expected
            assert len(pieces) > 1
            page = (await found.http.get("/metrics")).text
            for line in (
                'ts_inference_requests_total{hostname="',
                "ts_inference_latency_microseconds{",
                "ts_queue_latency_microseconds{",
                "ts_handler_preprocess{",
                "ts_handler_inference{",
                'Requests2XX{Hostname="',
                "QueueTime{",
                "WorkerThreadTime{",
                "WorkerLoadTime{",
                "HandlerTime{",
                "PredictionTime{",
                "MemoryUsed{",
                'shardwise_generation_tokens_total{model_name="m",model_version="1.0"} 84.0',
            ):
                assert f"\n{line}" in page, (line, page)
            requests = next(line for line in page.splitlines() if line.startswith("ts_inference_requests_total"))
            assert requests.endswith('model_name="m",model_version="1.0"} 6.0')

    asyncio.run(scene())


def test_errors_have_torchserves_shape(tmp_path: Path, tiny_text: Path) -> None:
    """R6: guards against errors that TorchServe's clients can't read, a request that is half understood, and a route
    without a key."""
    save_folder(tmp_path, "m", tiny_text)

    async def scene() -> None:
        async with world(tmp_path, api_keys=(KEY,)) as found:
            post = found.http.post
            assert told(await post("/predictions/other", json=ASKED)) == (404, "ModelNotFoundException")
            assert told(await post("/predictions/m/7", json=ASKED)) == (404, "ModelVersionNotFoundException")
            assert told(await post("/nowhere", json=ASKED)) == (404, "ResourceNotFoundException")
            assert told(await found.http.get("/predictions/m")) == (405, "MethodNotAllowedException")
            for body in ({"prompt": "a", "max_tokenz": 1}, {"max_new_tokens": 1}, {"prompt": "a" * 300}):
                assert told(await post("/predictions/m", json=body)) == (400, "BadRequestException")
            deep = b'{"prompt": ' + b"[" * 100
            for content in (b"", b'{"prompt"', b"\xff\xfe", deep):
                assert told(await post("/predictions/m", content=content)) == (400, "BadRequestException")
            assert told(await post("/predictions/m?x=1", json=ASKED)) == (400, "BadRequestException")
            form = {"a": b"x", "b": b"y"}
            assert told(await post("/predictions/m", files=form)) == (400, "BadRequestException")
            bare = {"Authorization": "Bearer other"}
            assert told(await post("/predictions/m", json=ASKED, headers=bare)) == (401, "InvalidKeyException")
            assert told(await found.manage.get("/models", headers=bare)) == (401, "InvalidKeyException")
            assert (await found.http.get("/ping", headers=bare)).status_code == 401
            assert (await found.http.get("/health", headers=bare)).status_code == 200
            assert (await found.http.get("/ping")).json() == {"status": "Healthy"}
            evil = {"Origin": "http://evil.example"}
            assert told(await found.manage.delete("/models/m", headers=evil))[0] == 403
            assert (await found.http.get("/metrics")).text.count("\nRequests4XX{") == 1
            for client in (found.http, found.manage):
                paths = (await client.request("OPTIONS", "/")).json()["paths"]
                assert len(paths) >= 4
                for path, methods in paths.items():
                    for method in methods:
                        bare_answer = await client.request(method, path.replace("{name}", "m"), headers=bare)
                        assert bare_answer.status_code == (200 if path.startswith("/health") else 401), path

    asyncio.run(scene())


def test_openais_routes_find_their_model(tmp_path: Path, tiny_text: Path) -> None:
    """Guards the way from TorchServe to OpenAI's API: each request is answered by the model that it names."""
    save_folder(tmp_path, "one", tiny_text)
    save_folder(tmp_path, "two", tiny_text)

    async def scene() -> None:
        async with world(tmp_path) as found:
            expected = await found.text("one", ASKED)
            asked = {"model": "two", "prompt": ASKED["prompt"], "max_tokens": 12, "temperature": 0}
            answer = (await found.http.post("/v1/completions", json=asked)).json()
            assert (answer["model"], answer["choices"][0]["text"]) == ("two", expected)
            listed = (await found.http.get("/v1/models")).json()["data"]
            assert [each["id"] for each in listed] == ["one", "two"]
            missing = await found.http.post("/v1/completions", json={**asked, "model": "three"})
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
            unnamed = await found.http.post("/tokenize", json={"prompt": "a"})
            assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
            counted = await found.http.post("/tokenize", json={"prompt": "ab", "model": "one"})
            assert counted.json()["count"] == 2

    asyncio.run(scene())


@pytest.mark.parametrize("ticket", [True, False])
def test_a_full_queue_is_told_at_once(tmp_path: Path, tiny_text: Path, ticket: bool) -> None:
    """c22: guards against a request that waits although useJobTicket or jobQueueSize say that it must not, and against
    places that are not given back when a client goes (serve#2814)."""
    queue: dict[str, Any] = {"useJobTicket": True} if ticket else {"jobQueueSize": 1}
    save_folder(tmp_path, "m", tiny_text, batchSize=1, **queue)
    script = Script()
    script.hold_at = 2

    async def scene() -> None:
        async with world(tmp_path, begin=scripted(script)) as found:
            model = found.registry.find("m").model
            assert model is not None
            burst = [asyncio.ensure_future(found.http.post("/predictions/m", json=ASKED)) for _ in range(5)]
            room = 1 if ticket else 2
            await until(lambda: sum(each.done() for each in burst) == 5 - room and script.spoken == 3)
            assert {each.result().status_code for each in burst if each.done()} == {503}
            waiting = [each for each in burst if not each.done()]
            assert model.pending == room
            refused = await found.http.post("/predictions/m", json=ASKED)
            assert told(refused) == (503, "ServiceUnavailableException")
            assert int(refused.headers["retry-after"]) >= 1
            for each in waiting[1:]:
                each.cancel()  # its client goes
            await until(lambda: model.pending == 1)
            script.go.set()
            assert (await waiting[0]).status_code == 200
            assert model.pending == 0
            assert await found.text("m", ASKED)

    try:
        asyncio.run(scene())
    finally:
        script.go.set()


def test_a_model_that_does_not_respond(tmp_path: Path, tiny_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """c16: guards responseTimeout of a request that runs, and clientTimeoutInMills of one that waits, which must not be
    taken for the other; both are told, and what they held is free."""
    save_folder(tmp_path, "m", tiny_text, batchSize=1, responseTimeout=300, clientTimeoutInMills=100_000)
    script = Script()
    script.hold_at = 2

    async def scene() -> None:
        async with world(tmp_path, begin=scripted(script), given={"step_timeout": 600.0}) as found:
            model = found.registry.find("m").model
            assert isinstance(model, EngineModel)
            assert model.deps is not None
            runs = asyncio.ensure_future(found.http.post("/predictions/m", json=ASKED))
            await until(lambda: script.spoken == 3)
            waits = asyncio.ensure_future(found.http.post("/predictions/m", json=ASKED))
            await until(lambda: model.pending == 2)
            model.deps.service.admission._clock = lambda: time.monotonic() + 101
            assert told(await waits) == (503, "ServiceUnavailableException")
            later = SimpleNamespace(monotonic=lambda: time.monotonic() + 301)
            monkeypatch.setattr("shardwise.server.store.answers.time", later)
            late = await runs
            assert told(late) == (500, "InternalServerException")
            assert "responseTimeout" in late.json()["message"]
            assert model.pending == 0
            script.go.set()

    try:
        asyncio.run(scene())
    finally:
        script.go.set()


def test_what_was_accepted_is_finished_at_the_end(tmp_path: Path, tiny_text: Path) -> None:
    """R31: guards against a SIGTERM that loses an accepted prediction, or lets new ones in."""
    save_folder(tmp_path, "m", tiny_text)
    script = Script()
    script.hold_at = 2

    async def scene() -> None:
        async with world(tmp_path, begin=scripted(script)) as found:
            runs = asyncio.ensure_future(found.text("m", ASKED))
            await until(lambda: script.spoken == 3)
            ending = asyncio.ensure_future(drained(found))
            await until(lambda: found.registry.draining)
            refused = await found.http.post("/predictions/m", json=ASKED)
            assert told(refused) == (503, "ServiceUnavailableException")
            script.go.set()
            assert await runs
            await ending

    async def drained(found: World) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait({found.living}, timeout=60)

    try:
        asyncio.run(scene())
    finally:
        script.go.set()


def test_a_client_that_goes_frees_what_it_held(tmp_path: Path, tiny_text: Path) -> None:
    """serve#2814, R24: guards against a stream that goes on for nobody."""
    save_folder(tmp_path, "m", tiny_text)
    script = Script()
    script.hold_at = 4

    async def scene() -> None:
        async with world(tmp_path, begin=scripted(script)) as found:
            model = found.registry.find("m").model
            assert model is not None
            async with found.http.stream("POST", "/predictions/m", json={**ASKED, "stream": True}) as answer:
                assert await answer.aiter_raw().__anext__()
                assert model.pending == 1
            await until(lambda: model.pending == 0)
            script.go.set()
            assert await found.text("m", ASKED)

    try:
        asyncio.run(scene())
    finally:
        script.go.set()


def test_ranks_that_are_gone_for_good_are_told(tmp_path: Path, tiny_text: Path) -> None:
    """§4 29, c16: guards against a request that waits for ranks which never come, and a cause that nobody is told; once
    maxRetryTimeoutInSec is over the model has failed, and others go on."""
    save_folder(tmp_path, "m", tiny_text, maxRetryTimeoutInSec=1)
    save_folder(tmp_path, "good", tiny_text)

    class Broken(ScriptedExecutor):
        """Ranks that load and then run out of memory, as all do that follow them."""

        def collect(self) -> NoReturn:
            raise RankFailure(1, "OutOfMemoryError: /a/path", "OutOfMemoryError", own=True)

        def check(self) -> None:
            if self.steps:
                self.collect()

    def begin(plan: RunPlan, replica: int) -> Executor:
        broken = plan.engine.restart_timeout is not None
        return Broken(lambda request, position: 97) if broken else begin_threads(plan, replica)

    async def scene() -> None:
        async with world(tmp_path, begin=begin) as found:
            lost = await found.http.post("/predictions/m", json=ASKED)
            assert lost.status_code in (503, 507)
            assert lost.json()["message"] == "Worker died: rank 1: OutOfMemoryError"
            await until(lambda: found.registry.find("m").state == "FAILED")
            described = await found.describe("m")
            assert described["failure"].startswith("rank 1: OutOfMemoryError: /a/path")
            assert described["workers"] == []
            assert told(await found.http.post("/predictions/m", json=ASKED)) == (503, "ServiceUnavailableException")
            assert (await found.http.get("/health")).json()["status"] == "degraded"
            assert await found.text("good", ASKED)

    asyncio.run(scene())
