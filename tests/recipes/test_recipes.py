"""Recipes: what they may say, what the shipped ones need, and that they are the flags' very settings."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise import generate
from shardwise.cli import app
from shardwise.config import BLOCK, EngineConfig, Layout
from shardwise.features import Quantization, Speculation
from shardwise.params import SamplingParams
from shardwise.recipes.recipe import Recipe, open_recipe
from shardwise.recipes.shipped import names, shipped, title
from shardwise.runtime import draft_plan
from shardwise.runtime.launch import plan_run
from shardwise.runtime.rank_plan import plan_ranks
from tests.recipes.published import PUBLISHED, published_source

USERS = "Tell me a joke."
TUNED = {"max_tokens": 200, "temperature": 0.6, "top_k": 300, "seed": 1234}


def write(path: Path, text: str) -> str:
    file = path / "recipe.yaml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize("model", list(PUBLISHED))
def test_published_numbers(model: str) -> None:
    """Guards what the tests below know of models without weights: the parameters are as many as the page says."""
    (rank,) = plan_ranks(published_source(model).config, EngineConfig(), "bfloat16", None, None)
    assert rank.parameters == PUBLISHED[model][0]


@pytest.mark.parametrize("name", names())
def test_a_shipped_recipe_fits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards every shipped recipe, without weights: its layout is one that the model and its draft can have, and its
    second line says what a rank then holds.
    """
    recipe, _ = open_recipe(name)
    monkeypatch.setattr(draft_plan, "open_source", published_source)
    plan = plan_run(published_source(recipe.model), EngineConfig(**recipe.settings))
    ranks = list(zip(plan.ranks, plan.draft.ranks, strict=True)) if plan.draft else [(each,) for each in plan.ranks]
    weights = max(sum(part.weight_bytes for part in rank) for rank in ranks)
    cache = max(sum(part.kv_bytes_per_token for part in rank) for rank in ranks) * plan.num_blocks * BLOCK
    told = f"# A rank holds at most {weights / 1e9:.1f} GB of weights and {cache / 1e9:.1f} GB of KV cache."
    assert shipped(name).read_text().splitlines()[1] == told
    assert recipe.prompts == (USERS,)
    assert recipe.sampling.items() <= TUNED.items() or name.startswith("qwen3")
    assert 10 < len(title(name)) < 120


def test_what_is_shipped() -> None:
    """Guards the list: who looks for a model of this table finds its layout."""
    layouts = {name: str(open_recipe(name)[0].settings["layout"]) for name in names()}
    assert layouts == {
        "llama3-8b": "1",
        "llama3-70b": "tp8",
        "llama3.1-8b": "1",
        "llama3.1-70b": "tp8",
        "llama3.1-70b-speculative": "tp8",
        "llama3.1-405b-two-hosts": "tp8.pp2",
        "llama3.3-70b": "tp8",
        "mixtral-8x7b": "tp8",
        "qwen3-8b": "1",
        "qwen3-32b": "tp4",
        "qwen3-30b-a3b": "tp4",
        "smollm2": "tp2",
    }
    assert open_recipe("llama3.1-70b-speculative")[0].settings["speculate"].model == "meta-llama/Llama-3.1-8B-Instruct"


def test_a_recipe_says_what_the_flags_say(tmp_path: Path) -> None:
    """Guards every kind of key, assignments among the arguments, and texts left as prompts."""
    file = write(
        tmp_path,
        "model: m\nlayout: tp2.pp2\nquantize: int4\nspeculate: ngram,k=3\nsplit: [3, 1]\nstages: [4, 2]\nthreads: 1\n"
        "generation_config: false\nsampling:\n  stop: ['.', 'no']\n  logit_bias: {5: -100}\n"
        "  json_schema: {type: object}\n"
        "messages:\n- {role: system, content: Be brief.}\n- {role: user, content: Hi}\n",
    )
    recipe, texts = open_recipe(file, ["sampling.n=2", "a prompt", "threads=2", "1=2"])
    assert texts == ["a prompt", "1=2"]
    assert recipe == Recipe(
        "m",
        {
            "layout": Layout(tp=2, pp=2),
            "quantize": Quantization(4, 32),
            "speculate": Speculation("ngram", k=3),
            "split": (3, 1),
            "stages": (4, 2),
            "threads": 2,
        },
        {"stop": (".", "no"), "logit_bias": {5: -100}, "json_schema": {"type": "object"}, "n": 2},
        False,
        ("Hi",),
        ({"role": "system", "content": "Be brief."},),
    )
    assert recipe.opening(None) == recipe.opening(True) == recipe.before
    with pytest.raises(ValueError, match="--no-chat would leave out"):
        recipe.opening(False)


@pytest.mark.parametrize(
    ("said", "prompts", "openings"),
    [
        ("prompt: Hi", ("Hi",), [None, (), None]),
        ("prompt: {user: Hi}", ("Hi",), [(), (), None]),
        ("prompt: {system: null, user: {text: Hi}}", ("Hi",), [(), (), None]),
        ("input: rows.jsonl", (), [None, (), None]),
    ],
)
def test_prompts(tmp_path: Path, said: str, prompts: tuple[str, ...], openings: list[Any]) -> None:
    """Guards torchtune's forms of a prompt (d12) and the plain ones."""
    recipe, _ = open_recipe(write(tmp_path, f"model: m\n{said}\noutput: out.jsonl"))
    assert recipe.prompts == prompts
    assert [recipe.opening(chat) for chat in (None, True, False)] == openings
    assert recipe.input == (None if prompts else Path("rows.jsonl"))
    assert recipe.output == Path("out.jsonl")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("layout: tp2", r"recipe.yaml:1: model is missing"),
        ("model: m\nlayuot: tp2", r"recipe.yaml:2: unknown key 'layuot'; did you mean 'layout'\?"),
        ("model: m\ntemperature: 1", r"recipe.yaml:2: unknown key 'temperature'; did you mean 'sampling.temperature"),
        ("max_new_tokens: 200", r"recipe.yaml:1: unknown key 'max_new_tokens'; did you mean 'sampling.max_tokens'\?"),
        ("model: m\nlayout: tp2\nsplit: [1, 2, 3]", r"recipe.yaml:3: split must give a weight above 0 to each"),
        ("model: m\nsampling:\n  top_p: 2", r"recipe.yaml:3: top_p must be a number above 0 and at most 1"),
        ("model: m\nsampling:\n  regex: a\n  choice: [b]", r"recipe.yaml:3: only one of json_schema"),
        ("model: m\nspeculate: draft", r"recipe.yaml:2: speculate: a draft needs its model"),
        ("model: m\nprompt: {user: a, image: b}", r"recipe.yaml:2: unknown key 'image'"),
        ("model: m\nprompt: {system: a}", r"recipe.yaml:2: user is missing"),
        ("model: m\nprompt: a\ninput: b", r"recipe.yaml:3: give only one of prompt and input"),
        ("model: m\nmessages: [{role: assistant, content: a}]", r"recipe.yaml:2: messages must end with one of role"),
        ("model: m\nmessages: [{role: robot, content: a}]", r"recipe.yaml:2: role must be one of system, user"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_line(tmp_path: Path, text: str, error: str) -> None:
    """Guards strict validation: nothing is ignored, and the nearest key is named."""
    with pytest.raises(ValueError, match=error):
        open_recipe(write(tmp_path, text))


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_every_field_is_a_key(tmp_path: Path, kind: type[Any]) -> None:
    """Guards fields that come later: each is a key whose values can be checked."""
    inner = "" if kind is EngineConfig else "sampling:\n  "
    for item in fields(kind):
        with pytest.raises(ValueError, match=rf"recipe.yaml:\d: {item.name} must be"):
            open_recipe(write(tmp_path, f"model: m\n{inner}{item.name}: [[[]]]"))


def job_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> generate.Job:
    """What `shardwise generate` would run."""
    jobs: list[generate.Job] = []

    def run(job: generate.Job) -> tuple[int, int]:
        jobs.append(job)
        return 0, 1

    monkeypatch.setattr(generate, "run", run)
    done = CliRunner().invoke(app, ["generate", *arguments])
    if done.exception is not None:
        raise done.exception
    return jobs[0]


def test_generate_takes_a_recipe_as_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards `--config`: a recipe makes the very job that its flags make; flags win over it, and prompts and --input
    take the place of its prompt.
    """
    text = (
        "model: m\nlayout: tp2\ndtype: float32\nspeculate: ngram\nsampling: {max_tokens: 5, seed: 7}\noutput: o.jsonl\n"
    )
    flags = ["--model", "m", "--layout", "tp2", "--dtype", "float32", "--speculate", "ngram", "--max-tokens", "5"]
    flags += ["--seed", "7", "--output", "o.jsonl"]
    file = write(tmp_path, text + "prompt: Hi\n")

    def same(by: generate.Job, flags: generate.Job) -> bool:
        default = EngineConfig(**flags.settings) == EngineConfig(**by.settings)
        return default and {**vars(by), "settings": 0} == {**vars(flags), "settings": 0}

    assert same(job_of(monkeypatch, "--config", file), job_of(monkeypatch, *flags, "Hi"))
    assert same(job_of(monkeypatch, "--config", file, "Yo", "Hey"), job_of(monkeypatch, *flags, "Yo", "Hey"))
    by_input = job_of(monkeypatch, "--config", file, "--input", "i.jsonl")
    assert same(by_input, job_of(monkeypatch, *flags, "--input", "i.jsonl"))
    over = ["--model", "other", "--layout", "1", "--max-tokens", "6", "--no-generation-config", "--chat"]
    job = job_of(monkeypatch, "--config", file, "dtype=auto", "sampling.n=2", *over)
    assert (job.model, EngineConfig(**job.settings)) == ("other", EngineConfig(speculate=Speculation("ngram")))
    assert (job.asked, job.generation_config) == ({"max_tokens": 6, "seed": 7, "n": 2}, False)
    assert (job.prompts, job.opening) == (("Hi",), ())
    file = write(tmp_path, text + "input: i.jsonl\n")
    assert same(job_of(monkeypatch, "--config", file), by_input)
    assert job_of(monkeypatch, "--config", file, "Yo").input is None
    assert job_of(monkeypatch, "a=b").prompts == ("a=b",)
    for wrong, error in (
        (["--config", file, "sampling.tempreature=1"], "argument .*did you mean 'temperature'"),
        (["--config", "llama3.1-80b"], "did you mean 'llama3.1-8b'"),
        (["--config", file, "--stages", "1,2"], "stages must give"),
    ):
        with pytest.raises(ValueError, match=error):
            job_of(monkeypatch, *wrong)


def test_recipes_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards list, show and copy; a copy never writes over a file, and is the recipe that it was copied from."""
    monkeypatch.chdir(tmp_path)
    invoke = CliRunner().invoke
    listed = invoke(app, ["recipes", "list"]).stdout.splitlines()
    assert [line.split()[0] for line in listed] == names()
    told = json.loads(invoke(app, ["recipes", "list", "--json"]).stdout)["recipes"]
    assert told[-1] == {"name": "smollm2", "title": title("smollm2"), "model": "smollm2", "layout": "tp2"}
    text = shipped("smollm2").read_text()
    assert invoke(app, ["recipes", "show", "smollm2"]).stdout == text
    assert re.search("did you mean 'smollm2'", str(invoke(app, ["recipes", "show", "smollm"]).exception))
    (tmp_path / "dir").mkdir()
    for arguments, file in (([], "smollm2.yaml"), (["a.yaml"], "a.yaml"), (["dir"], "dir/smollm2.yaml")):
        assert invoke(app, ["recipes", "copy", "smollm2", *arguments]).stdout == f"{file}\n"
        assert (tmp_path / file).read_text() == text
        (tmp_path / file).write_text("mine")
        assert "is left as it is" in str(invoke(app, ["recipes", "copy", "smollm2", *arguments]).exception)
        assert (tmp_path / file).read_text() == "mine"
    assert "can't be written" in str(invoke(app, ["recipes", "copy", "smollm2", "none/a.yaml"]).exception)
