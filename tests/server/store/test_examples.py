"""The serving examples, run as their first lines say, on the CPU with two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(example: str, model: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, EXAMPLES / example, model],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=240,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_speculative_serving(tiny_text: Path) -> None:
    """Guards the example: the answer comes in pieces, and drafts were made and verified."""
    lines = run("speculative_serving.py", tiny_text)
    pieces = next(int(line.split()[0]) for line in lines if line.endswith(" pieces"))
    assert pieces > 1
    drafted = [line for line in lines if line.startswith("shardwise_spec_decode_num_draft_tokens_total{")]
    assert float(drafted[0].rpartition(" ")[2]) > 0


@pytest.mark.slow
def test_pipeline_serving(tiny_text: Path) -> None:
    """Guards the example: every prompt is answered in order, and the second worker has stages of its own."""
    lines = run("pipeline_serving.py", tiny_text)
    prompts = ("The lighthouse keeper wrote:", "Once upon a time", "Dear diary,")
    for line, prompt in zip(lines, prompts, strict=False):
        assert line[1:].startswith(prompt)
        assert len(line) > len(prompt) + 4
    assert lines[3] == "Workers scaled to 2 for model: opt"
    assert lines[4:] == [f"worker {at} is READY, a process for each stage: 2" for at in range(2)]
