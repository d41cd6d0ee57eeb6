"""One layout over two hosts under torchrun: the same answer, flags, ranks and hosts that die, and nothing left."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardwise.llm import LLM
from shardwise.params import SamplingParams
from tests.hosts.namespaces import Host, two_hosts, until
from tests.tiny import save_text_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPT = "any layout"
PATIENCE = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as made:
        yield made


def alone(model: Path, max_tokens: int) -> list[int]:
    """The tokens of a single rank."""
    with LLM(model) as llm:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return llm.generate(PROMPT, params)[0].outputs[0].token_ids


def told(path: Path) -> str:
    """What a host's processes said."""
    return path.read_text() + Path(f"{path}.err").read_text()


def start(
    hosts: tuple[Host, Host], tmp_path: Path, *command: str, **flags: tuple[str, ...]
) -> list[subprocess.Popen[bytes]]:
    return [
        host.torchrun(*command, output=tmp_path / f"host{host.number}", flags=flags.get(f"host{host.number}", ()))
        for host in hosts
    ]


def finish(processes: list[subprocess.Popen[bytes]], tmp_path: Path) -> str:
    """What the front wrote on stdout; both torchruns must have ended well."""
    for process in processes:
        process.wait(PATIENCE)
    assert [process.returncode for process in processes] == [0, 0], told(tmp_path / "host0") + told(tmp_path / "host1")
    return (tmp_path / "host0").read_text()


def test_one_answer_over_hosts(hosts: tuple[Host, Host], model: Path, tmp_path: Path) -> None:
    """Guards the promise over hosts: one hash with shards within and stages across, shards across, and replicas.

    Each layout loses a rank in the middle of it. The agents serve all of the launches.
    """
    layouts = "1,tp2.pp2,tp4,dp2.tp2"
    command = ["verify", "-m", str(model), "--layouts", layouts, "--batches", "4", "--chunks", "7", "--json"]
    report = json.loads(finish(start(hosts, tmp_path, *command, "--max-tokens", "8"), tmp_path))
    assert report["ok"]
    assert len(report["hashes"]) == 1
    ways = {(cell["layout"], cell["run"] if "run" in cell else cell["how"]) for cell in report["cells"]}
    assert {(layout, "killed ranks") for layout in layouts.split(",")[1:]} <= ways


def test_flags_of_a_rendezvous(hosts: tuple[Host, Host], model: Path, tmp_path: Path) -> None:
    """Guards the flags of torchrun's own rendezvous, and the layout that is meant when none is given."""
    shared = ("--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400", "--rdzv-id=of-ours")
    flags = {
        f"host{host.number}": (
            *shared,
            f"--rdzv-conf=is_host={'false' if host.number else 'true'},join_timeout=200",
            f"--local-addr={host.address}",
        )
        for host in hosts
    }
    command = ["generate", "-m", str(model), "--max-tokens", "8", "--ignore-eos", "--json", PROMPT]
    answer = json.loads(finish(start(hosts, tmp_path, *command, **flags), tmp_path))
    assert answer["layout"] == "tp2.pp2"
    assert answer["outputs"][0]["token_ids"] == alone(model, 8)


def test_a_layout_that_does_not_fill_the_hosts(hosts: tuple[Host, Host], model: Path, tmp_path: Path) -> None:
    """Guards against ranks that would idle: another number of ranks is refused at once, with the nearest that fit."""
    processes = start(hosts, tmp_path, "generate", "-m", str(model), "--layout", "tp3", PROMPT)
    processes[0].wait(PATIENCE)
    assert processes[0].returncode != 0
    assert "layout tp3 has 3 ranks, and torchrun started 4 processes" in told(tmp_path / "host0")
    assert "tp2.pp2" in told(tmp_path / "host0")
    processes[1].wait(PATIENCE)
    assert "can't be found" in told(tmp_path / "host1")


@contextmanager
def stream(host: Host, port: int, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """The texts of a streamed completion."""

    def ask() -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    connection = host.inside(ask)
    response = connection.getresponse()
    try:
        assert response.status == 200, response.read()
        yield pieces(response)
    finally:
        response.close()
        connection.close()


def health(host: Host, port: int) -> int:
    def ask() -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    return host.inside(ask)


def pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """The texts of a stream."""
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            yield event["choices"][0]["text"]
            if event["choices"][0]["finish_reason"] is not None:
                return


def test_a_rank_and_a_host_are_lost(hosts: tuple[Host, Host], model: Path, tmp_path: Path) -> None:
    """R5: guards against tokens that are lost with a rank of another host, its agent, the network, or the host.

    And against listeners elsewhere than at the first host's address, or of ranks that have met.
    """
    port = 8123
    command = ["serve", "-m", str(model), "--served-model-name", "tiny", "--port", str(port), "--transport", "gloo"]
    again = (*hosts[1].static, "--max-restarts=3")
    processes = start(hosts, tmp_path, *command, host1=again)
    assert until(lambda: health(hosts[0], port) == 200, PATIENCE), told(tmp_path / "host0") + told(tmp_path / "host1")
    assert hosts[0].listeners() == {"0100007F", "01004D0A"}, "the port of HTTP, and one for the agents"
    assert hosts[1].listeners() == {"0100007F"}, "gloo, within the host"
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True}
    with LLM(model) as llm:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        want = llm.generate(PROMPT, params)[0].outputs[0].text

    with stream(hosts[0], port, body) as texts:
        text = next(texts)
        hosts[1].ranks()[-1].kill()
        assert text + "".join(texts) == want

    with stream(hosts[0], port, body) as texts:  # torchrun starts another agent
        text = next(texts)
        hosts[1].agent().kill()
        assert text + "".join(texts) == want

    with stream(hosts[0], port, body) as texts:  # the cable is out for a while
        text = next(texts)
        hosts[1].plug(False)
        assert until(lambda: health(hosts[0], port) == 503, PATIENCE)
        hosts[1].plug(True)
        assert text + "".join(texts) == want

    with stream(hosts[0], port, body) as texts:  # somebody starts the host again
        text = next(texts)
        hosts[1].kill()
        processes[1].wait(PATIENCE)
        assert until(lambda: health(hosts[0], port) == 503, PATIENCE)
        processes[1] = hosts[1].torchrun(*command, output=tmp_path / "host1")
        assert text + "".join(texts) == want
    assert until(lambda: health(hosts[0], port) == 200, PATIENCE)

    processes[0].send_signal(signal.SIGTERM)  # which torchrun hands on
    for process in processes:
        process.wait(PATIENCE)
    assert "SIGTERM: finishing what was accepted" in told(tmp_path / "host0")
    assert processes[1].returncode == 0, "the agent was told that all is done"


def test_a_host_that_stays_away(hosts: tuple[Host, Host], model: Path, tmp_path: Path) -> None:
    """Guards operators from a layout that waits for ever: after its time a start says which host is missing."""
    process = hosts[0].torchrun("serve", "-m", str(model), "--start-timeout", "5", output=tmp_path / "host0")
    other = hosts[1].torchrun("inspect", str(model), output=tmp_path / "host1")  # torchrun is there, the agent is not
    process.wait(PATIENCE)
    assert "host 1 is missing (it has never been here)" in told(tmp_path / "host0")
    assert process.returncode != 0
    other.wait(PATIENCE)


def test_the_example(model: Path) -> None:
    """Guards the example: two hosts on one machine give the answer of one, and nothing of them is left."""
    with two_hosts():  # or skipped
        pass
    script = Path(__file__).parents[2] / "examples" / "many_hosts.sh"
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([script, str(model)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = (data.decode(errors="replace") for data in run.communicate(timeout=PATIENCE))
    assert run.returncode == 0, errors
    with LLM(model) as llm:
        params = SamplingParams(max_tokens=24)
        want = llm.generate("The lighthouse keeper", params)[0].outputs[0].text
    assert want.strip() in output
    assert not any(name.startswith(f"sw{run.pid}") for name in os.listdir("/run/netns"))
