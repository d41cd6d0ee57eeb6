"""Cases of ../shared/cases.md that are about processes: commands, ports, kills, interrupts, each on 1, tp2 and pp2."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import psutil
import pytest

from tests.reliability.server import ranks_of
from tests.server.conftest import wait_for
from tests.server.test_serve import KEY, Process, Reading, gone, serve, texts_of

LAYOUTS = ["1", "tp2", "pp2"]
WINDOW = 2.0
"""Seconds over which the time on processors is taken."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_rows_of_a_batch(text_model: Path, tmp_path: Path, layout: str) -> None:
    """C44: guards a batch against its bad lines: an error row for each, the others done, and exit code 1."""
    rows = [
        '{"prompt": "first", "max_tokens": 3}',
        "{bad json",
        "[1, 2]",
        "7",
        "",
        json.dumps({"prompt": "x" * 400}),
        '{"prompt": "x", "stream": true}',
        '{"prompt": "x", "url": "/v1/nonsense"}',
        '{"prompt": "x", "custom_id": "same"}',
        '{"prompt": "x", "custom_id": "same"}',
        '{"prompt": "x", "guided_regex": "a"}',
        '{"prompt": "x", "regex": "("}',
        '{"prompt": "\\ud800"}',
        "[" * 5000,
        '{"prompt": "last", "max_tokens": 4, "seed": 1, "temperature": 1}',
    ]
    words = {1: "JSON", 2: "object", 3: "object", 4: "JSON", 5: "context", 6: "stream", 7: "url", 8: "custom_id"}
    words |= {9: "custom_id", 10: "guided_regex", 11: "regex", 12: "surrogate", 13: "JSON"}
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(rows) + "\n")
    command = ["generate", "--input", str(source), "--output", str(sink), "--model", str(text_model)]
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *command, "--layout", layout], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert f"{len(words)} of {len(rows)} rows failed" in done.stderr
    found = [json.loads(line) for line in sink.read_text().splitlines()]
    assert [row["index"] for row in found] == list(range(len(rows)))
    for at, row in enumerate(found):
        if at in words:
            assert words[at] in row["error"], row
        else:
            assert "error" not in row
    assert [len(found[at]["token_ids"]) for at in (0, 14)] == [3, 4]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_taken_port(text_model: Path, layout: str) -> None:
    """C78: guards against loading for a port that is taken, on any layout: it is told first."""
    with ExitStack() as stack:
        taken = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        process = stack.enter_context(serve(text_model, "--layout", layout, "--port", str(taken.getsockname()[1])))
        assert process.end(20) == 4
    (line,) = process.log.splitlines()  # nothing of loading; test_serve looks at the time
    assert "port" in line


def test_servers_beside_each_other(text_model: Path) -> None:
    """C78: guards against servers of one host that meet on a port, a segment or a name of their ranks."""
    with ExitStack() as stack:
        started = [stack.enter_context(serve(text_model, "--layout", layout)) for layout in ("tp2", "pp2", "tp2")]
        urls = [process.url() for process in started]
        assert len(set(urls)) == len(urls)
        body = {"model": started[0].model, "prompt": "beside", "max_tokens": 30, "seed": 1, "ignore_eos": True}
        texts = [httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"] for url in urls]
        assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_interrupt_while_loading(text_model: Path, layout: str) -> None:
    """C80: guards against a Ctrl-C during the load, and a second one, that hang or leave something."""
    rng = random.Random(layout)
    for twice in (False, True):
        with serve(text_model, "--layout", layout) as process:
            process.url(ready=False)
            time.sleep(rng.uniform(0, 0.5))  # the time is what is varied here
            family = process.family()
            process.send(signal.SIGINT)
            if twice:
                process.popen.poll()
                process.send(signal.SIGINT)
            assert process.end(20) in (0, 130)  # 0 where it was ready before: then it is a drain
            gone(family, 20)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kills(text_model: Path, layout: str) -> None:
    """C79, C81, C90: guards against a health that hides a dead rank, tokens that change, idle processes that spin, and
    ranks that outlive the front."""
    with serve(text_model, "--layout", layout, SHARDWISE_API_KEY=KEY) as process:
        url = process.url()
        asked = {"n": 4, "max_tokens": 200}
        right = texts_of(Reading(process, **asked).result())
        for at in range(len(ranks_of(process))):
            reading = Reading(process, **asked)
            kill(url, ranks_of(process)[at])
            assert texts_of(reading.result()) == right
            wait_for(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 200)
        wait_for(lambda: idle(process))
        reading = Reading(process, **asked)
        family = process.family()
        process.send(signal.SIGKILL)
        process.end(20)
        gone(family, 20)
        with pytest.raises(AssertionError):
            reading.result(10)


def kill(url: str, rank: psutil.Process) -> None:
    """Kill a rank; the health must tell of it at once, and be 200 only while there are ranks."""
    with httpx.Client(base_url=url, timeout=20) as client:
        before = client.get("/health").json()["replicas"][0]["failures"]
        os.kill(rank.pid, signal.SIGKILL)
        began = time.monotonic()
        while True:
            answer = client.get("/health")
            (replica,) = answer.json()["replicas"]
            assert (answer.status_code == 200) == replica["ready"]
            if replica["failures"] > before:
                break
            assert time.monotonic() - began < 20  # the step that is lost would be due in 300 s
    assert replica["failures"] == before + 1
    assert replica["last_failure"]["kind"] == "lost"


def idle(process: Process) -> bool:
    """Does the whole family take less than a twentieth of a core?"""

    def spent() -> dict[int, float]:
        found = {}
        for each in process.family():
            try:
                times = each.cpu_times()
            except psutil.NoSuchProcess:
                continue
            found[each.pid] = times.user + times.system
        return found

    first = spent()
    time.sleep(WINDOW)  # the time is what is measured over
    last = spent()
    return set(first) == set(last) and sum(last.values()) - sum(first.values()) < WINDOW / 20
