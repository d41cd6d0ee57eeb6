"""The handler in a real TorchServe, over HTTP, with ranks and workers that are killed: one Java, a tiny text model."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise.params import SamplingParams
from tests.harness import threaded_llm
from tests.integrations.torchserve import TorchServe, ranks_of, save_folder, save_long_model, torchserve
from tests.server.conftest import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("java") is None, reason="TorchServe is a Java program, and there is no Java"),
]
FRONTEND = """\
minWorkers: 1
maxWorkers: 1
batchSize: 4
maxBatchDelay: 300
responseTimeout: 200
startupTimeout: 200
deviceType: cpu
"""
HANDLER = """\
handler:
  model: {model}
  threads: 1
  kv_tokens: 8192
  ignore_eos: true
"""
PROMPTS = ["once", "upon a time", "there was", "a town by the sea"]
LONG = {"prompt": "a long story", "max_new_tokens": 600, "temperature": 0.8, "seed": 7}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_long_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def right(model: Path) -> dict[str, str]:
    """The plain engine's texts, on one device."""
    by = [SamplingParams(max_tokens=40, ignore_eos=True)] * len(PROMPTS)
    long = SamplingParams(max_tokens=LONG["max_new_tokens"], temperature=0.8, seed=7, ignore_eos=True)  # type: ignore[arg-type]
    with threaded_llm(model, kv_tokens=8192) as llm:
        found = llm.generate([*PROMPTS, "a long story"], [*by, long])
    return {output.prompt: output.text for output in found}


@pytest.fixture(scope="module")
def serve(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchServe]:
    folder = tmp_path_factory.mktemp("ts")
    handler = HANDLER.format(model=model)
    save_folder(folder / "store", "plain", FRONTEND + handler + "  layout: tp2\n  max_new_tokens: 40\n")
    save_folder(folder / "store", "streamed", FRONTEND + handler + "  layout: tp2\n  stream: true\n")
    torchrun = "parallelType: tp\ntorchrun:\n  nproc-per-node: 2\n"
    save_folder(folder / "store", "launched", FRONTEND + torchrun + handler)
    custom = "asyncCommunication: true\nparallelType: custom\nparallelLevel: 2\n"
    custom += FRONTEND.replace("batchSize: 4", "batchSize: 1")
    save_folder(folder / "store", "joined", custom + handler + "  layout: tp2\n  stream: true\n")
    save_folder(folder / "store", "wrong", FRONTEND + handler + "  layuot: tp2\n")
    with torchserve(folder) as running:
        for name in ("plain", "streamed"):
            answer = running.register(name)
            assert answer.status_code == 200, answer.text + running.log.read_text()[-4000:]
        yield running


def at_once(serve: TorchServe, bodies: list[Any], model: str = "plain") -> list[tuple[int, str]]:
    """Statuses and texts of requests that are made together."""
    found: list[tuple[int, str]] = [(0, "")] * len(bodies)

    def ask(at: int) -> None:
        answer = serve.predict(model, bodies[at])
        found[at] = answer.status_code, answer.text

    threads = [threading.Thread(target=ask, args=[at]) for at in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


def test_a_batch_has_the_plain_engines_texts(serve: TorchServe, right: dict[str, str]) -> None:
    """Guards the answers: those of one device, whoever is in the batch, with the error of a bad one its own."""
    found = at_once(serve, [{"prompt": prompt} for prompt in PROMPTS])
    assert found == [(200, right[prompt]) for prompt in PROMPTS]
    bad, good = at_once(serve, [{"prompt": "once", "max_new_tokens": 41}, {"prompt": "once", "max_new_tokens": 5}])
    assert bad[0] == 400
    assert json.loads(bad[1])["message"].startswith("max_new_tokens 41 is more than the 40")
    assert good[0] == 200
    assert good[1]
    assert right["once"].startswith(good[1])
    assert serve.inference.post("/predictions/plain", content=b"once").text == right["once"]


def test_pieces_join_to_the_text(serve: TorchServe, right: dict[str, str]) -> None:
    """b20: guards streaming: a chunk for each piece, and together the text."""
    with serve.inference.stream("POST", "/predictions/streamed", json=LONG) as answer:
        pieces = list(answer.iter_raw())
        assert answer.headers["transfer-encoding"] == "chunked"
    assert len(pieces) > 100
    assert b"".join(pieces).decode() == right["a long story"]


def test_a_killed_rank_costs_nothing(serve: TorchServe, right: dict[str, str]) -> None:
    """Guards what TorchServe alone can't do: a rank dies under a request, and the same worker answers it right."""
    worker = serve.worker("streamed")
    before = ranks_of(worker)
    with serve.inference.stream("POST", "/predictions/streamed", json=LONG) as answer:
        chunks = answer.iter_raw()
        text = next(chunks)
        before[-1].kill()
        text += b"".join(chunks)
    assert text.decode() == right["a long story"]
    assert serve.worker("streamed") == worker
    assert not {rank.pid for rank in before} & {rank.pid for rank in ranks_of(worker)}


def test_a_killed_worker_leaves_no_rank(serve: TorchServe, right: dict[str, str]) -> None:
    """Guards against ranks that outlive their worker: all are gone, and TorchServe's next worker has its own."""
    worker = serve.worker("plain")
    children = worker.children(recursive=True)
    assert len(children) == 5
    worker.kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    wait_for(lambda: serve.predict("plain", {"prompt": "once"}).text == right["once"], 120)
    assert serve.worker("plain").pid != worker.pid


def test_requests_join_those_that_run(serve: TorchServe, right: dict[str, str]) -> None:
    """c25: guards asynchronous workers, which TorchServe gives several GPUs: several requests at once, over a death."""
    answer = serve.register("joined")
    assert answer.status_code == 200, serve.log.read_text()[-4000:]
    ranks = ranks_of(serve.worker("joined"))
    with serve.inference.stream("POST", "/predictions/joined", json=LONG) as answer:
        chunks = answer.iter_raw()
        text = next(chunks)
        found = at_once(serve, [{"prompt": prompt, "max_new_tokens": 40} for prompt in PROMPTS], "joined")
        ranks[0].kill()
        text += b"".join(chunks)
    assert found == [(200, right[prompt]) for prompt in PROMPTS]
    assert text.decode() == right["a long story"]
    assert serve.management.delete("/models/joined").status_code == 200


def test_torchrun_may_launch_the_workers(serve: TorchServe, right: dict[str, str]) -> None:
    """c14: guards a group of torchrun's: its first hosts the layout, the other is idle, and both end when told."""
    answer = serve.register("launched")
    assert answer.status_code == 200, serve.log.read_text()[-4000:]
    answer = serve.predict("launched", {"prompt": "once", "max_new_tokens": 40})
    assert (answer.status_code, answer.text) == (200, right["once"])
    group = serve.worker("launched").parent()
    assert group is not None
    first, other = sorted(group.children(), key=lambda each: len(each.children(recursive=True)), reverse=True)
    assert (len(ranks_of(first)), other.children()) == (2, [])
    everyone = [group, *group.children(recursive=True)]
    assert serve.management.delete("/models/launched").status_code == 200
    _, alive = psutil.wait_procs(everyone, timeout=30)
    assert not alive


def test_a_mistyped_key_is_told(serve: TorchServe) -> None:
    """c18: guards against settings that are silently dropped: nothing is registered, and the log names the line."""
    assert serve.register("wrong").status_code >= 400
    assert "model-config.yaml:13: unknown key 'layuot'; did you mean 'layout'?" in serve.log.read_text()
