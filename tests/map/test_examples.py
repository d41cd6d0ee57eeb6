"""The data-parallel examples, run as their first lines say, on the CPU with two processes; one for hosts, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.map.pipelines import save_pipeline
from tests.map.test_command import wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = ["GPT2 is a model developed by OpenAI", "The lighthouse keeper wrote", "One, two,", "Dear diary,"]


def save_gpt2(path: Path) -> Path:
    """A tiny random GPT-2 that reads and writes bytes."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from tests.tiny import ALPHABET, save_text_model

    torch.manual_seed(0)
    save_text_model(path)
    config = GPT2Config(
        n_embd=32, n_head=2, n_layer=2, vocab_size=290, n_positions=128, eos_token_id=258, bos_token_id=257
    )
    GPT2LMHeadModel(config).save_pretrained(path)
    assert len(ALPHABET) == 256
    return path


def run(*command: str | Path, folder: Path) -> list[str]:
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_gpt2(tmp_path: Path) -> None:
    """a1 to a7: guards the example: every prompt is answered, not each rank's first alone, and in order."""
    model = save_gpt2(tmp_path / "model")
    found = run(sys.executable, EXAMPLES / "data_parallel_gpt2.py", model, folder=tmp_path)
    assert [line[3:].startswith(prompt) for line, prompt in zip(found, PROMPTS, strict=True)] == [True] * 4
    assert [line[0] for line in found] == ["0", "1", "2", "3"]
    assert all(len(line) > len(prompt) + 20 for line, prompt in zip(found, PROMPTS, strict=True))


@pytest.mark.slow
def test_gpt2_under_torchrun(tmp_path: Path) -> None:
    """a1: guards the same script, and the same texts, where torchrun starts the processes."""
    model = save_gpt2(tmp_path / "model")
    example = EXAMPLES / "data_parallel_gpt2.py"
    alone = run(sys.executable, example, model, folder=tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert run(*launcher, example, model, folder=tmp_path) == alone
    rows = [json.loads(line) for line in (tmp_path / "gpt2.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2, 3]


@pytest.mark.slow
def test_stable_diffusion(tmp_path: Path) -> None:
    """a6, a8: guards the example: an image for each prompt, named by the prompt's number and not by the rank's."""
    model = save_pipeline(tmp_path / "model")
    found = run(sys.executable, EXAMPLES / "data_parallel_stable_diffusion.py", model, "pictures", folder=tmp_path)
    assert [line.rpartition(": ")[2] for line in found] == [f"pictures/{index:06d}.png" for index in range(3)]
    assert all((tmp_path / f"pictures/{index:06d}.png").stat().st_size for index in range(3))


def test_two_hosts_that_are_ended(tmp_path: Path) -> None:
    """Guards a machine from namespaces, ranks and a secret that stay when the example is ended before its time."""
    stub, begun, done = tmp_path / "ip", tmp_path / "begun", tmp_path / "done"
    stub.write_text(
        f"""#!/bin/sh
case "$*" in
"netns exec"*) echo $$ >>{begun}; exec sleep 300 ;;
"netns pids"*) cat {begun} ;;
*) echo "$@" >>{done} ;;
esac
"""
    )
    stub.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([EXAMPLES / "many_hosts.sh"], env=env)
    wait_for(lambda: begun.exists() and len(begun.read_text().splitlines()) == 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    assert done.read_text().count("netns del") == 2
    pids = [int(line) for line in begun.read_text().splitlines()]
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun", "done", "ip"]
