"""The command as an operator meets it: real processes, real ports, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest

from tests.server.conftest import wait_for
from tests.tiny import save_text_model

KEY = "sk-of-the-tests"
KEYED = {"Authorization": f"Bearer {KEY}"}


Started = TypeVar("Started", bound="Process")


class Process:
    """``shardwise serve`` on a free port, and what it logs."""

    what = "--model"
    """What is served: the option that names it."""

    def __init__(self, model: Path, *arguments: str, **environment: str) -> None:
        self.model = model.name
        command = [sys.executable, "-m", "shardwise", "serve", self.what, str(model), "--port", "0", "--device", "cpu"]
        self.popen = subprocess.Popen(
            [*command, "--threads", "1", "--kv-tokens", "8192", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, name="log")
        self._reader.start()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        """Wait for this in the log."""
        wait_for(lambda: re.search(pattern, self.log) is not None or self.popen.poll() is not None, seconds)
        found = re.search(pattern, self.log)
        assert found is not None, (self.popen.poll(), self.log)
        return found

    def url(self, ready: bool = True) -> str:
        return self.wait(r"ready at (\S+)" if ready else r"(http://\S+) answers when")[1]

    def family(self) -> list[psutil.Process]:
        """This process and all that hang on it."""
        front = psutil.Process(self.popen.pid)
        return [front, *front.children(recursive=True)]

    def send(self, number: int) -> None:
        self.popen.send_signal(number)

    def end(self, seconds: float) -> int:
        """Wait for its end; the exit code."""
        code = self.popen.wait(seconds)
        self._reader.join(10)
        assert not self._reader.is_alive(), "something still holds its stderr"
        assert self.popen.stderr is not None
        self.popen.stderr.close()
        return code

    def _read(self) -> None:
        assert self.popen.stderr is not None
        self.lines.extend(self.popen.stderr)


def gone(family: list[psutil.Process], seconds: float) -> None:
    """None of them may be left after so long, nor any shared memory with their number in its name."""
    wait_for(lambda: not any(map(_lives, family)), seconds)
    left = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    assert not [name for name in left if any(str(process.pid) in name for process in family)]


def _lives(process: psutil.Process) -> bool:
    """A zombie doesn't: it only waits for whoever adopted it to take notice, which may take seconds."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def serve(model: Path, *arguments: str, **environment: str) -> Iterator[Process]:
    with kept(Process(model, *arguments, **environment)) as process:
        yield process


@contextmanager
def kept(process: Started) -> Iterator[Started]:
    """A server that is gone afterwards, with all its family."""
    family: list[psutil.Process] = []
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            family = process.family()
            process.popen.kill()
            process.end(20)
        gone(family, 20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Process]:
    with serve(model, "--layout", "tp2", "--write-timeout", "2", SHARDWISE_API_KEY=KEY) as process:
        process.url()
        yield process


def body(process: Process, **more: Any) -> dict[str, Any]:
    return {"model": process.model, "prompt": "one two", "max_tokens": 100, "ignore_eos": True, "seed": 1, **more}


class Reading:
    """A streamed completion, read by a thread of its own to its end."""

    def __init__(self, process: Process, **more: Any) -> None:
        self.url = f"{process.url()}/v1/completions"
        self.body = body(process, stream=True, **more)
        self.events: list[str] = []
        self.status = 0
        self.error: Exception | None = None
        self.ended = 0.0
        self._thread = threading.Thread(target=self._read, name="reading")
        self._thread.start()
        wait_for(lambda: len(self.events) > 1 or not self._thread.is_alive(), 60)
        assert len(self.events) > 1, (self.status, self.events, self.error)

    def result(self, seconds: float = 60) -> list[dict[str, Any]]:
        """All pieces; the stream must have come to its end."""
        self._thread.join(seconds)
        assert not self._thread.is_alive()
        assert self.error is None, self.error
        assert self.events[-1] == "[DONE]"
        return [json.loads(event) for event in self.events[:-1]]

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self.url, json=self.body, headers=KEYED, timeout=60) as answer:
                self.status = answer.status_code
                self.events.extend(line[6:] for line in answer.iter_lines() if line.startswith("data: "))
        except Exception as error:
            self.error = error
        self.ended = time.monotonic()


def texts_of(pieces: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each continuation."""
    found: dict[int, str] = {}
    for choice in (choice for piece in pieces for choice in piece["choices"]):
        found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def reasons_of(pieces: list[dict[str, Any]]) -> list[str]:
    return [choice["finish_reason"] for piece in pieces for choice in piece["choices"] if choice["finish_reason"]]


def test_one_listener_on_loopback(server: Process) -> None:
    """R3: guards against a second door: one listening socket, on 127.0.0.1, and none of the ranks has any."""
    family = server.family()
    assert len(family) >= 3
    listening = [
        connection.laddr
        for process in family
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    url = httpx.URL(server.url())
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", url.port)]


def test_the_key_stays_with_the_front(server: Process) -> None:
    """R6: guards the API key of the environment: it is asked for, and neither ranks nor logs get to know it."""
    url = server.url()
    assert httpx.get(f"{url}/health", timeout=20).json()["status"] == "ok"
    for path in ("/v1/models", "/metrics", "/openapi.json", "/docs"):
        assert httpx.get(url + path, timeout=20).status_code == 401
    assert httpx.get(f"{url}/v1/models", headers=KEYED, timeout=20).json()["data"][0]["id"] == server.model
    assert all("SHARDWISE_API_KEY" not in process.environ() for process in server.family()[1:])
    assert KEY not in server.log


def test_prompts_are_not_logged(server: Process) -> None:
    """R39: guards people's words from the log; it has a line for the request all the same."""
    answer = httpx.post(
        f"{server.url()}/v1/completions", json=body(server, prompt="my own words"), headers=KEYED, timeout=20
    )
    assert answer.status_code == 200
    server.wait(answer.headers["x-request-id"], 5)
    assert "my own words" not in server.log
    assert answer.json()["choices"][0]["text"][:5] not in server.log


def test_the_front_has_no_torch(server: Process) -> None:
    """Guards the front process, which must outlive ranks: their library is not mapped into it."""
    maps = Path(f"/proc/{server.popen.pid}/maps")
    if not maps.exists():
        pytest.skip("this system does not tell what a process has mapped")
    assert "libtorch" not in maps.read_text()


def test_strangers_are_refused(server: Process) -> None:
    """R37: guards against DNS rebinding and against pages of other origins, whatever the method."""
    url = server.url()
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
        for method in ("GET", "POST", "OPTIONS"):
            answer = httpx.request(method, f"{url}/v1/models", headers={**KEYED, **headers}, timeout=20)
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers


def is_quiet(url: str) -> bool:
    """Is nothing queued or running?"""
    state = httpx.get(f"{url}/health", timeout=20).json()
    return bool(state["queue"]["open"] == state["replicas"][0]["running"] == 0)


def test_a_disconnect_frees_the_request(server: Process) -> None:
    """C71, R24: guards against work for clients that have gone, streamed or not."""
    url = server.url()

    def counts() -> tuple[float, float]:
        """Continuations whose client had gone, and all tokens that were generated."""
        page = httpx.get(f"{url}/metrics", headers=KEYED, timeout=20).text
        gone = re.search(r'shardwise_request_finished_total{finished_reason="disconnect",.*} (.*)', page)
        made = re.search(r"shardwise_generation_tokens_total{.*} (.*)", page)
        assert made is not None
        return float(gone[1]) if gone else 0, float(made[1])

    for stream in (True, False):
        before = counts()
        with closing(socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=20)) as client:
            data = json.dumps(body(server, stream=stream, n=64, max_tokens=240)).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            client.sendall(head.encode() + data)
            wait_for(lambda: httpx.get(f"{url}/health", timeout=20).json()["replicas"][0]["running"] > 0, 20)
        wait_for(lambda: is_quiet(url), 20)
        gone, made = (after - old for after, old in zip(counts(), before, strict=True))
        assert gone >= 32  # however late the machine is
        assert made < 64 * 240 / 2


def test_a_reader_that_takes_nothing(server: Process) -> None:
    """R25: guards memory and other streams from a client that asks for much and reads nothing: it is cut off."""
    url = server.url()
    front = psutil.Process(server.popen.pid)
    expected = texts_of(Reading(server).result())
    before = front.memory_info().rss
    data = json.dumps(body(server, stream=True, n=64, max_tokens=240, logprobs=5)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", httpx.URL(url).port or 0))
        client.sendall(head.encode() + data)
        wait_for(lambda: httpx.get(f"{url}/health", timeout=20).json()["queue"]["open"] > 0, 20)
        assert texts_of(Reading(server).result()) == expected
        wait_for(lambda: httpx.get(f"{url}/health", timeout=20).json()["queue"]["open"] == 0, 30)
        wait_for(lambda: not any(each.raddr == client.getsockname() for each in front.net_connections("inet")), 30)
    assert front.memory_info().rss - before < 32 * 2**20


def test_a_storm_of_resets_leaves_nothing(server: Process) -> None:
    """C72: guards against requests that live on after 200 clients reset their connections at once."""
    url = server.url()
    data = json.dumps(body(server, max_tokens=240)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    crowd = [socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=20) for _ in range(200)]
    for client in crowd:
        client.sendall(head.encode() + data)
    for client in crowd:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
        client.close()

    def quiet() -> bool:
        page = httpx.get(f"{url}/metrics", headers=KEYED, timeout=20).text
        is_free = re.search(r'shardwise_kv_cache_usage_perc{model_name=".*} 0\.0\n', page)
        return is_quiet(url) and is_free is not None

    wait_for(quiet, 20)
    assert httpx.post(f"{url}/v1/completions", json=body(server), headers=KEYED, timeout=30).status_code == 200


def test_a_chat_in_a_pipe(server: Process) -> None:
    """Guards ``shardwise chat`` against a server: the answer and nothing else on stdout."""
    command = [
        sys.executable,
        "-m",
        "shardwise",
        "chat",
        "--url",
        f"{server.url()}/v1",
        "--max-tokens",
        "8",
        "--seed",
        "1",
    ]
    environment = {**os.environ, "SHARDWISE_API_KEY": KEY}
    done = subprocess.run(command, input="hello\n", capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_bodies_of_errors_tell_nothing(server: Process) -> None:
    """R18: guards against paths, addresses and tracebacks in what is answered to odd requests."""
    url = server.url()
    odd: list[Any] = [[], 1, None, "a", {}, {"model": 1}, {"model": server.model, "prompt": {"a": 1}}]
    odd += [{"model": "../../etc/passwd", "prompt": "a"}, {"model": server.model, "prompt": [10**9]}]
    odd += [{"model": server.model, "prompt": "a", "guided_regex": "(("}, {"model": server.model, "prompt": "\ud800"}]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/tokenize"):
        for each in odd:
            answer = httpx.post(
                url + path, content=json.dumps(each), headers={**KEYED, "Content-Type": "application/json"}
            )
            assert 400 <= answer.status_code < 500, (path, each, answer.text)
            assert not re.search(r"Traceback|0x[0-9a-f]{6}|/home|/tmp|/usr|site-packages|\.py\b", answer.text), (
                answer.text
            )
    assert httpx.get(f"{url}/health", timeout=20).status_code == 200


def test_a_taken_port_is_told_at_once(model: Path) -> None:
    """R32, C78, F19: guards against loading a model for a port that is taken: exit code 4 at once, naming the port."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        took = 9.0
        for _ in range(3):  # the best of three: this machine has other work too
            began = time.monotonic()
            with serve(model, "--port", port) as process:
                assert process.end(20) == 4
            took = min(took, time.monotonic() - began)
            assert f"port {port}" in process.log
            assert len(process.log.splitlines()) == 1
            if took < 2:
                break
        assert took < 2


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--host", "0.0.0.0"], "--allow-no-key"),
        (["--api-key", ""], "api_key"),
        (["--tool-parser", "nonsense"], "tool_parser"),
        (["--max-body", "0"], "max_body"),
        (["--log-format", "xml"], "log format"),
        (["--layout", "tp3.pp9"], "pp"),
    ],
)
def test_wrong_usage_is_told_in_one_line(model: Path, arguments: list[str], word: str) -> None:
    """Guards exit code 2, and the refusal to listen for everyone without a key."""
    with serve(model, *arguments) as process:
        assert process.end(20) == 2
    assert word in process.log.splitlines()[-1]
    assert "Traceback" not in process.log


def test_a_missing_package_is_named(model: Path) -> None:
    """Guards a plain installation, which has no HTTP: one line says what to install."""
    code = "import sys; sys.modules['uvicorn'] = None; from shardwise.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--model", str(model), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "shardwise[serve]" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_interrupt_while_loading(model: Path) -> None:
    """C80, R31: guards against a Ctrl-C that hangs or leaves ranks behind; until then the port answers 503."""
    with serve(model, "--layout", "tp2") as process:
        url = process.url(ready=False)
        answer = httpx.get(f"{url}/health", timeout=20)
        assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
        assert httpx.get(f"{url}/health/live", timeout=20).status_code == 200
        answer = httpx.get(f"{url}/v1/models", timeout=20)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        wait_for(lambda: len(process.family()) > 1, 20)
        family = process.family()
        process.send(signal.SIGINT)
        assert process.end(20) == 130
        gone(family, 20)


@pytest.mark.parametrize("after", [0.05, 0.4, 1.5])
def test_an_interrupt_at_any_time(model: Path, after: float) -> None:
    """C80: guards the time before signals are looked after: it ends in any case."""
    with serve(model) as process:
        time.sleep(after)  # the time is what is varied here
        family = process.family()
        process.send(signal.SIGINT)
        assert process.end(20) != 0
        gone(family, 20)


def test_a_drain_finishes_what_was_accepted(model: Path) -> None:
    """R31, F17: guards accepted requests from SIGTERM: they end as ever, new ones are told to go elsewhere, exit 0."""
    with serve(model, "--max-num-seqs", "1", SHARDWISE_API_KEY=KEY) as process:
        url = process.url()
        expected = Reading(process, n=12, max_tokens=240).result()
        reading = Reading(process, n=12, max_tokens=240)
        family = process.family()
        with httpx.Client(timeout=20) as idle:
            idle.get(f"{url}/health")
            process.send(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{url}/health", timeout=20).status_code == 503, 20)
            assert httpx.get(f"{url}/health", timeout=20).json()["status"] == "draining"
            assert httpx.get(f"{url}/health/live", timeout=20).status_code == 200
            for client in (idle, httpx):
                answer = client.post(f"{url}/v1/completions", json=body(process), headers=KEYED)
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.headers["connection"] == "close"
        assert not reading.ended, "the test came too late"
        pieces = reading.result()
        assert reasons_of(pieces) == ["length"] * 12
        assert texts_of(pieces) == texts_of(expected)
        assert process.end(10) == 0
        assert time.monotonic() - reading.ended < 5
        gone(family, 10)


def test_a_drain_comes_to_an_end(model: Path) -> None:
    """R31: guards against a drain without end: after its time the rest is told "abort" and [DONE], exit 0."""
    with serve(model, "--drain-timeout", "0.3", "--max-num-seqs", "1", SHARDWISE_API_KEY=KEY) as process:
        reading = Reading(process, n=32, max_tokens=240)
        family = process.family()
        began = time.monotonic()
        process.send(signal.SIGTERM)
        reasons = reasons_of(reading.result(10))
        assert len(reasons) == 32
        assert "abort" in reasons
        assert set(reasons) <= {"abort", "length"}
        assert process.end(10) == 0
        assert time.monotonic() - began > 0.3
        gone(family, 10)


def test_a_second_signal_ends_at_once(model: Path) -> None:
    """R31: guards the operator's way out of a drain: at most two seconds, and nothing is left."""
    with serve(model, "--max-num-seqs", "1", SHARDWISE_API_KEY=KEY) as process:
        reading = Reading(process, n=32, max_tokens=240)
        family = process.family()
        process.send(signal.SIGTERM)
        wait_for(lambda: "SIGTERM" in process.log, 20)
        assert not reading.ended
        began = time.monotonic()
        process.send(signal.SIGTERM)
        assert process.end(10) == 143
        gone(family, 10)
        assert time.monotonic() - began < 10
        with pytest.raises(AssertionError):
            reading.result(10)


def test_a_kill_of_the_front_leaves_nothing(model: Path) -> None:
    """R30, C79: guards against ranks, ports and memory that outlast the front process."""
    with serve(model, "--layout", "tp2", SHARDWISE_API_KEY=KEY) as process:
        url = httpx.URL(process.url())
        reading = Reading(process, n=8, max_tokens=240)
        family = process.family()
        process.send(signal.SIGKILL)
        process.end(20)
        gone(family, 10)
        with closing(socket.create_server(("127.0.0.1", url.port or 0))):
            pass
        with pytest.raises(AssertionError):
            reading.result(10)


@pytest.mark.slow
def test_ranks_that_are_gone_for_good(tmp_path: Path) -> None:
    """R28: guards against a server that lives on without any ranks to be had: clients are told, exit code 5."""
    model = save_text_model(tmp_path / "tiny")
    with serve(model, "--max-num-seqs", "1", SHARDWISE_API_KEY=KEY) as process:
        reading = Reading(process, n=32, max_tokens=240)
        family = process.family()
        for file in model.glob("*.safetensors"):
            file.unlink()
        for process_of_ranks in reversed(family[1:]):  # a holder that is left would have the weights still
            with suppress(psutil.NoSuchProcess):
                process_of_ranks.kill()
        assert process.end(60) == 5
        with pytest.raises(json.JSONDecodeError):
            json.loads(reading.events[-1])
        assert json.loads(reading.events[-2])["error"]["type"] == "service_unavailable_error"
        gone(family, 10)
