"""What a model's generation_config.json does to requests that leave fields open: applied or listed, never silent."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from shardwise.defaults import HARMLESS, NEUTRAL, model_defaults
from shardwise.llm import LLM
from shardwise.params import SamplingParams
from shardwise.rows import submit_row
from tests.cases import LAYOUTS, by
from tests.harness import threaded_llm
from tests.tiny import save_text_model

ODD: dict[str, Any] = {"do_sample": True, "temperature": 0.1, "top_k": 1, "max_new_tokens": 6, "num_beams": 4}
EVERY: dict[str, Any] = {
    "do_sample": True,
    "temperature": 1.7,
    "top_k": 40,
    "top_p": 0.8,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": -2.0,
    "frequency_penalty": -0.5,
    "max_new_tokens": 9,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("plain"))


def with_defaults(plain: Path, path: Path, values: dict[str, Any]) -> Path:
    shutil.copytree(plain, path)
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("layout", [*LAYOUTS, "dp2"])
def test_an_odd_file_is_applied_and_explicit_fields_win(plain: Path, tmp_path: Path, layout: str) -> None:
    """C21: what holds is known (LLM.defaults); params and the fields of a row win over it; it can be left aside."""
    asked = SamplingParams(max_tokens=8, temperature=2.0, seed=5, ignore_eos=True)
    with threaded_llm(plain, layout) as llm:
        assert llm.defaults == ({}, [])
        greedy, warm = llm.generate(["odd"] * 2, [SamplingParams(max_tokens=6), asked])
    odd = with_defaults(plain, tmp_path / "odd", {**ODD, "eos_token_id": [258, 77]})
    with threaded_llm(odd, layout) as llm:
        assert llm.defaults == ({"temperature": 0.1, "top_k": 1, "max_tokens": 6}, ["num_beams=4"])
        assert llm.generate("odd")[0].token_ids == greedy.token_ids
        assert llm.generate("odd", asked)[0].token_ids == warm.token_ids
        row = {"prompt": "odd", "temperature": 2.0, "top_k": 0, "max_tokens": 8}
        number = submit_row(llm, row, {"seed": 5, "ignore_eos": True}, 0)
        assert llm.result(number).token_ids == warm.token_ids
    with threaded_llm(odd, layout, generation_config=False) as llm:
        assert llm.defaults == ({}, [])
        assert llm.eos == {258, 77}  # a fact about the model, and not a default


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_field_is_honoured(plain: Path, tmp_path: Path, layout: str) -> None:
    """C22: a request without params is the one with all the file's values, and each of these values matters."""
    fields = {name: value for name, value in EVERY.items() if name not in ("do_sample", "max_new_tokens")}
    explicit = SamplingParams(max_tokens=9, seed=3, **fields)
    with threaded_llm(with_defaults(plain, tmp_path / "every", EVERY), layout) as llm:
        assert llm.defaults.left_out == []
        assert by(llm.defaults.fields, seed=3) == explicit
        seeds = range(3, 9)
        whole = [llm.result(submit_row(llm, {"prompt": "ab ab ab", "seed": seed}, {}, 0)).token_ids for seed in seeds]
        assert whole == tokens(llm, [by(llm.defaults.fields, seed=seed) for seed in seeds])
        for name in fields:
            less = {**fields, name: getattr(SamplingParams(), name)}
            assert tokens(llm, [SamplingParams(max_tokens=9, seed=seed, **less) for seed in seeds]) != whole, name


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [result.token_ids for result in llm.generate(["ab ab ab"] * len(params), params)]


def test_what_is_not_applied_is_listed() -> None:
    """C22: of all fields that transformers knows, and of unknown ones, each is applied, listed, or changes no token."""
    names = sorted({*vars(GenerationConfig()), "seed", "stop", "n", "min_tokens", "logit_bias", "chat_format"})
    for name in names:
        value = EVERY.get(name, 7)
        found = model_defaults({"do_sample": True, name: value})
        applied = {"max_new_tokens": "max_tokens"}.get(name, name)
        if name in EVERY:
            assert name == "do_sample" or found.fields[applied] == value
            assert found.left_out == []
        elif HARMLESS.fullmatch(name):
            assert found == ({"temperature": 1.0}, []), name
        else:
            assert found == ({"temperature": 1.0}, [f"{name}=7"]), name
    for name, values in NEUTRAL.items():
        for value in values:
            assert model_defaults({name: value}) == ({}, [])
    assert model_defaults({"temperature": 0.6, "top_p": 1.0, "top_k": 50}) == ({}, ["temperature=0.6"])
    assert not HARMLESS.fullmatch("forced_eos_token_id")
    assert not HARMLESS.fullmatch("watermarking_config")


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", "hot"), ("top_p", 1.5), ("max_new_tokens", 2.5), ("top_k", -1)]
)
def test_a_bad_value_is_refused(name: str, value: Any) -> None:
    """C22: a value that no request could have is an error with the file, the field and the remedy."""
    with pytest.raises(ValueError, match=rf"generation_config.json: {applied(name)} .*generation_config off"):
        model_defaults({"do_sample": True, name: value})


def applied(name: str) -> str:
    return {"max_new_tokens": "max_tokens"}.get(name, name)


def test_the_command_says_what_it_applies(plain: Path, tmp_path: Path) -> None:
    """C21: on stderr, what the file changes and what it asks in vain; nothing with --no-generation-config."""
    odd = with_defaults(plain, tmp_path / "odd", ODD)
    command = [sys.executable, "-m", "shardwise", "generate", "odd", "--model", str(odd), "--json"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    first, second = said.stderr.splitlines()
    assert first == "shardwise: defaults from generation_config.json: temperature 0.1, top_k 1, max_tokens 6"
    assert second == "shardwise: generation_config.json asks for what is not applied: num_beams=4"
    aside = subprocess.run(
        [*command, "--no-generation-config", "--max-tokens", "6"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert aside.stderr == ""
    assert json.loads(aside.stdout)["outputs"] == json.loads(said.stdout)["outputs"]
