"""Management of a store's models while they are asked: register, scale, describe, list, unregister, set default."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from shardwise.server.store.engines import EngineModel
from tests.server.dictation import Script
from tests.server.store.conftest import save_folder, until, world
from tests.server.store.test_predictions import ASKED, scripted, told


def save_archive(path: Path, folder: Path, name: str, version: str) -> Path:
    """A .mar of a folder, as torch-model-archiver writes one."""
    manifest = {"runtime": "python", "model": {"modelName": name, "modelVersion": version, "handler": "gpt_fast"}}
    with zipfile.ZipFile(path, "w") as archive:
        for file in folder.iterdir():
            archive.write(file, file.name)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
    return path


def status(answer: httpx.Response, code: int = 200) -> str:
    assert answer.status_code == code, answer.text
    return str(answer.json()["status"])


def test_versions_come_and_go(tmp_path: Path, tiny_text: Path) -> None:
    """Guards the life of a model that is managed: an archive's second version beside a folder's first, the default
    between them, and that nothing is left of what is unregistered, its unpacked files among it."""
    store = tmp_path / "store"
    save_folder(store, "m", tiny_text)
    save_archive(store / "m2.mar", save_folder(tmp_path, "other", tiny_text, "max_new_tokens: 3"), "m", "2.0")

    async def scene() -> None:
        async with world(store, "m") as found:
            manage = found.manage
            long = await found.text("m", {"prompt": "Once"})
            answer = await manage.post("/models?url=m2.mar&initial_workers=1&synchronous=true")
            assert status(answer) == 'Model "m" Version: 2.0 registered with 1 initial workers'
            second = found.registry.find("m", "2.0")
            assert isinstance(second.model, EngineModel)
            assert second.model.deps is not None
            unpacked, memory = second.stored.folder, weakref.ref(second.model.deps.intake)
            named = {"model": "m", "prompt": "Once", "max_tokens": 1}
            assert unpacked.is_dir()
            short = await found.text("m/2.0", {"prompt": "Once"})
            assert long.startswith(short)
            assert len(long) > len(short)
            assert await found.text("m", {"prompt": "Once"}) == long
            assert told(await manage.post("/models?url=m2.mar")) == (409, "ConflictStatusException")
            versions = (await manage.get("/models/m/all")).json()
            assert [(each["modelVersion"], each["status"]) for each in versions] == [("1.0", "READY"), ("2.0", "READY")]
            assert told(await manage.delete("/models/m")) == (403, "InvalidModelVersionException")
            assert status(await manage.put("/models/m/2.0/set-default")).endswith('for model "m" to "2.0"')
            assert await found.text("m", {"prompt": "Once"}) == short
            assert (await found.http.post("/v1/completions", json=named)).status_code == 200
            assert told(await manage.put("/models/m/3/set-default")) == (404, "ModelVersionNotFoundException")
            assert status(await manage.delete("/models/m/1.0")) == 'Model "m" unregistered'
            assert told(await found.http.post("/predictions/m/1.0", json=ASKED))[0] == 404
            assert await found.text("m", {"prompt": "Once"}) == short
            assert status(await manage.delete("/models/m")) == 'Model "m" unregistered'
            assert not unpacked.exists()
            await until(lambda: gc.collect() >= 0 and memory() is None)
            assert (await manage.get("/models")).json() == {"models": []}
            assert 'model_name="m"' not in (await found.http.get("/metrics")).text

    asyncio.run(scene())


def test_a_list_in_pages(tmp_path: Path, tiny_text: Path) -> None:
    """Guards against a page that repeats or leaves out a model."""
    for name in ("a", "b", "c"):
        save_folder(tmp_path, name, tiny_text, minWorkers=0)

    async def scene() -> None:
        async with world(tmp_path) as found:
            names, token = [], ""
            while True:
                page = (await found.manage.get(f"/models?limit=2{token}")).json()
                names += [each["modelName"] for each in page["models"]]
                if "nextPageToken" not in page:
                    break
                token = f"&next_page_token={page['nextPageToken']}"
            assert names == ["a", "b", "c"]
            missing = await found.http.post("/predictions/a", json=ASKED)
            assert told(missing) == (503, "ServiceUnavailableException")
            assert "scale workers API" in missing.json()["message"]
            assert (await found.http.get("/ping")).status_code == 200  # none is what they are to have

    asyncio.run(scene())


def test_scaling_loses_nothing(tmp_path: Path, tiny_text: Path) -> None:
    """Guards against a request that is lost or answered otherwise while workers come and go, from none to three, and
    back."""
    save_folder(tmp_path, "m", tiny_text, minWorkers=0, maxWorkers=3)

    async def scene() -> None:
        async with world(tmp_path) as found:
            manage = found.manage
            asked = {"prompt": "Once", "max_new_tokens": 40}
            assert status(await manage.put("/models/m?min_worker=1", timeout=60), 202) == "Processing worker updates..."
            await until(lambda: found.registry.find("m").state == "READY")
            expected = await found.text("m", asked)
            stop, texts = asyncio.Event(), []

            async def ask() -> None:
                while not stop.is_set():
                    texts.append(await found.text("m", asked))

            asking = [asyncio.ensure_future(ask()) for _ in range(4)]
            for workers in (3, 1, 2):
                answer = await manage.put(f"/models/m/1.0?min_worker={workers}&synchronous=true")
                assert status(answer) == f"Workers scaled to {workers} for model: m, version: 1.0"
                described = await found.describe("m")
                assert [each["status"] for each in described["workers"]] == ["READY"] * workers
                before = len(texts)
                await until(lambda before=before: len(texts) > before + 4)
            stop.set()
            await asyncio.gather(*asking)
            assert set(texts) == {expected}
            page = (await found.http.get("/metrics")).text
            assert page.count("\nWorkerLoadTime{") == 2
            assert page.count("\nshardwise_replica_ready{") == 2
            assert status(await manage.put("/models/m?min_worker=0&max_worker=0&synchronous=true")).startswith(
                "Workers scaled to 0"
            )
            assert told(await found.http.post("/predictions/m", json=asked))[0] == 503
            assert (await found.describe("m"))["status"] == "STOPPED"

    asyncio.run(scene())


REFUSED = (
    ("POST", "/models"),
    ("POST", "/models?url=https://example.org/m.mar"),
    ("POST", "/models?url=../secret"),
    ("POST", "/models?url=/etc"),
    ("POST", "/models?url=missing"),
    ("POST", "/models?url=m&model_name=other&handler=h:f"),
    ("POST", "/models?url=m&model_name=other&initial_workers=many"),
    ("POST", "/models?url=m&model_name=other&initial_workers=5"),
    ("POST", "/models?url=m&model_name=other&synchronous=1"),
    ("POST", "/models?url=m&model_name=other&batch_size=0"),
    ("POST", "/models?url=m&model_name=../other"),
    ("POST", "/models?url=m&url=m"),
    ("POST", "/models?url=" + "x" * 300),
    ("PUT", "/models/m?min_worker=2&max_worker=1"),
    ("PUT", "/models/m?min_worker=5"),
    ("PUT", "/models/m?min_worker=1&max_worker=5"),
    ("PUT", "/models/m?min_worker=1&timeout=5"),
    ("PUT", "/models/m?min_worker=1&synchronous=perhaps"),
    ("GET", "/models?limit=0"),
    ("GET", "/models/m?customized=true"),
    ("DELETE", "/models/m?now=true"),
)


def test_what_is_refused(tmp_path: Path, tiny_text: Path) -> None:
    """R21: guards against a parameter that is ignored, a model from elsewhere than the store, and an odd number; none
    of them changes anything."""
    store = tmp_path / "store"
    save_folder(store, "m", tiny_text, minWorkers=0, maxWorkers=4)
    save_folder(tmp_path, "secret", tiny_text)

    async def scene() -> None:
        async with world(store) as found:
            before = await found.describe("m")
            for method, path in REFUSED:
                assert told(await found.manage.request(method, path)) == (400, "BadRequestException"), path
            assert list(found.registry.entries) == ["m"]
            assert await found.describe("m") == before
            taken = await found.manage.post("/models", json={"url": "m", "model_name": "other", "batch_size": 4})
            assert "registered with 0 initial workers" in status(taken)
            assert (await found.describe("other"))["batchSize"] == 4

    asyncio.run(scene())


def test_a_model_that_can_not_be_loaded_tells_why(tmp_path: Path, tiny_text: Path) -> None:
    """Guards against a failure that takes the others with it, or is nowhere to be read; the model loads once mended."""
    save_folder(tmp_path, "good", tiny_text)
    broken = tmp_path / "weights"
    broken.mkdir()
    for file in tiny_text.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = next(broken.glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    save_folder(tmp_path / "store", "bad", broken)
    save_folder(tmp_path / "store", "good", tiny_text)
    (save_folder(tmp_path / "store", "typo", tiny_text) / "model-config.yaml").write_text("minWorkerz: 1\n")

    async def scene() -> None:
        async with world(tmp_path / "store") as found:
            assert sorted(found.registry.entries) == ["bad", "good"]
            described = await found.describe("bad")
            assert described["status"] == "FAILED"
            assert weights.name in described["failure"]
            assert told(await found.http.post("/predictions/bad", json=ASKED)) == (503, "ServiceUnavailableException")
            assert await found.text("good", ASKED)
            assert (await found.http.get("/ping")).json() == {"status": "Unhealthy"}
            health = await found.http.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "degraded")
            typo = await found.manage.post("/models?url=typo")
            assert told(typo)[0] == 400
            assert "minWorkerz" in typo.json()["message"]
            failed = await found.manage.put("/models/bad?min_worker=1&synchronous=true")
            assert told(failed) == (500, "InternalServerException")
            assert weights.name in failed.json()["message"]
            weights.write_bytes(whole)
            assert status(await found.manage.put("/models/bad?min_worker=1&synchronous=true"))
            assert await found.text("bad", ASKED)

    asyncio.run(scene())


def test_names_of_models(tmp_path: Path, tiny_text: Path) -> None:
    """Guards the order of a model's names: NAME=…, its manifest's, its file's; archives of one name are versions."""
    folder = save_folder(tmp_path / "source", "f", tiny_text, minWorkers=0)
    store = tmp_path / "store"
    save_folder(store, "folder", tiny_text, minWorkers=0)
    save_archive(store / "a.mar", folder, "m", "1.0")
    save_archive(store / "b.mar", folder, "m", "2.0")

    async def names(*models: str) -> list[tuple[str, list[str]]]:
        async with world(store, *models) as found:
            return [(name, sorted(entry.versions)) for name, entry in sorted(found.registry.entries.items())]

    assert asyncio.run(names()) == [("folder", ["1.0"]), ("m", ["1.0", "2.0"])]
    assert asyncio.run(names("other=b.mar", "a")) == [("m", ["1.0"]), ("other", ["2.0"])]


def test_named_models_must_be_there(tmp_path: Path, tiny_text: Path) -> None:
    """Guards against a server that starts without a model that it was told to serve."""
    (save_folder(tmp_path, "typo", tiny_text) / "model-config.yaml").write_text("minWorkerz: 1\n")

    async def scene(*models: str) -> None:
        async with world(tmp_path, *models):
            pass

    with pytest.raises(ValueError, match="minWorkers"):
        asyncio.run(scene("typo"))
    with pytest.raises(ValueError, match="missing"):
        asyncio.run(scene("missing"))


def test_progress_is_seen_and_can_be_given_up(tmp_path: Path, tiny_text: Path) -> None:
    """Guards against a describe that says nothing while a model loads, and one that can't be unregistered then."""
    save_folder(tmp_path, "m", tiny_text, minWorkers=0)
    closed = []

    class Slow:
        """Ranks that are never ready."""

        ready = False
        figures: list[Any] = []  # noqa: RUF012

        def waitables(self) -> list[int]:
            return []

        def check(self) -> None:
            pass

        def close(self) -> None:
            closed.append(self)

    async def scene() -> None:
        async with world(tmp_path, begin=lambda plan, at: Slow()) as found:
            status(await found.manage.put("/models/m?min_worker=2"), 202)

            async def told_so() -> bool:
                return (await found.describe("m")).get("progress") == "0 of 2 workers are ready"

            await until(told_so)
            described = await found.describe("m")
            assert described["status"] == "LOADING"
            refused = await found.http.post("/predictions/m", json=ASKED)
            assert "is being loaded" in refused.json()["message"]
            assert status(await found.manage.delete("/models/m"))
            assert len(closed) == 2

    asyncio.run(scene())


def test_unregistering_waits_for_what_was_accepted(tmp_path: Path, tiny_text: Path) -> None:
    """Guards against an accepted prediction that is lost with its model."""
    save_folder(tmp_path, "m", tiny_text)
    script = Script()
    script.hold_at = 2

    async def scene() -> None:
        async with world(tmp_path, begin=scripted(script)) as found:
            runs = asyncio.ensure_future(found.text("m", ASKED))
            await until(lambda: script.spoken == 3)
            ending = asyncio.ensure_future(found.manage.delete("/models/m"))
            await until(lambda: not found.registry.entries)
            assert told(await found.http.post("/predictions/m", json=ASKED))[0] == 404
            assert not ending.done()
            script.go.set()
            assert await runs
            assert status(await ending) == 'Model "m" unregistered'

    try:
        asyncio.run(scene())
    finally:
        script.go.set()
