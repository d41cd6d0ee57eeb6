"""`shardwise generate` in this process: what becomes of errors, and of files that can't be its output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from shardwise import generate
from shardwise.generate import Job, run
from shardwise.llm import LLM
from shardwise.outputs import RequestOutput
from tests.harness import start_threads
from tests.tiny import ALPHABET, save_text_model

NOWHERE = {"regex": "aab", "allowed_token_ids": (ALPHABET.index("a"),)}
"""Nothing can follow its second token."""
WORDS = "no token satisfies"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("generate") / "model")


@pytest.fixture(autouse=True)
def as_threads() -> Iterator[None]:
    with patch("shardwise.llm.launch", start_threads):
        yield


def job(model: Path | str, **fields: Any) -> Job:
    settings = {"kernels": "native", "device": "cpu", "kv_tokens": 2048}
    common: dict[str, Any] = {"asked": {}, "opening": None, "output": None, "stream": False, "as_json": False}
    given = {"prompts": ("hi",), "input": None, **common, **fields}
    return Job(str(model), settings, generation_config=False, **given)


def test_a_stream_tells_its_error(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards scripts from half an answer with exit code 0."""
    with pytest.raises(ValueError, match=WORDS):
        run(job(model, asked=NOWHERE, stream=True))
    assert capsys.readouterr().out == "aa\n"


@pytest.mark.parametrize("into_a_file", [False, True])
def test_a_prompt_that_fails_is_told(model: Path, tmp_path: Path, into_a_file: bool) -> None:
    """Guards the reason of a prompt's failure from being lost where documents go to a file."""
    output = tmp_path / "out.jsonl" if into_a_file else None
    with pytest.raises(ValueError, match=WORDS):
        run(job(model, asked=NOWHERE, output=output))
    if output is not None:
        assert WORDS in json.loads(output.read_text())["error"]


def test_a_part_that_fails_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the reason where another than the first of n continuations has failed."""
    real = LLM.result

    def spoilt(llm: LLM, number: int) -> RequestOutput:
        result = real(llm, number)
        result.outputs[1].error = "it went wrong"
        return result

    monkeypatch.setattr(LLM, "result", spoilt)
    with pytest.raises(ValueError, match="it went wrong"):
        run(job(model, asked={"n": 2, "max_tokens": 2}))


def test_an_output_that_can_not_be_one_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the input from being written over, and people from a refusal after minutes of loading."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(generate, "LLM", load)
    source, link, nowhere = tmp_path / "in.jsonl", tmp_path / "link.jsonl", Path("/proc/self/out.jsonl")
    source.write_text('{"prompt": "hi"}\n')
    link.symlink_to(source)
    for output, words in ((source, "is the input itself"), (link, "is the input itself"), (tmp_path, "directory")):
        with pytest.raises(ValueError, match=words):
            run(job("m", prompts=(), input=source, output=output))
    with pytest.raises(ValueError, match=f"--output {nowhere}: "):  # which nobody may write to, not even root
        run(job("m", output=nowhere))
    assert source.read_text() == '{"prompt": "hi"}\n'
    with pytest.raises(AssertionError, match="loaded"):
        run(job("m", output=tmp_path / "new.jsonl"))
    assert not (tmp_path / "new.jsonl").exists()
