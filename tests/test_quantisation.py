"""Quantised weights from the doors: what is asked for is parsed, planned, read in pieces, drafted with, measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import reference
from shardwise.config import Coordinates
from shardwise.evaluation import score
from shardwise.features import Quantization, Speculation
from shardwise.kernels.ops import Ops, Weight
from shardwise.parallel.axis import Axis
from shardwise.params import SamplingParams
from shardwise.passage import PASSAGE
from shardwise.runtime.launch import runner_spec
from shardwise.runtime.part import make_part
from shardwise.runtime.source import open_source
from shardwise.weights import load as loading
from tests.harness import Answer, plan_of, run, threaded_llm, threads, whole_weights
from tests.test_cli import shardwise
from tests.test_equivalence import jobs_for
from tests.tiny import save_gpt2, save_llama, save_text_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    small = {"heads": 4, "kv": 2, "dim": 6, "hidden": 24, "width": 40, "vocab": 101, "layers": 2}
    return {
        "groups": save_llama(root / "groups", "groups"),
        "small": save_llama(root / "small", small, seed=5),
        "gpt2": save_gpt2(root / "gpt2"),
        "text": save_text_model(root / "text"),
    }


@pytest.mark.parametrize(
    ("text", "bits", "group"),
    [("int8", 8, None), ("int4", 4, 32), (" int4 , group=128", 4, 128), ("int8,group=64", 8, 64)],
)
def test_parse(text: str, bits: int, group: int | None) -> None:
    """A default that moves, or a spelling that comes back as another."""
    found = Quantization.parse(text)
    assert (found.bits, found.group) == (bits, group)
    assert Quantization.parse(str(found)) == found


@pytest.mark.parametrize(
    "text", ["", "int2", "int4,32", "int4,group=", "int4,group=4", "int4,group=-8", "int8,group=8,group=8", "4"]
)
def test_parse_refuses(text: str) -> None:
    """Input that is ignored: every part of it is understood or refused by name."""
    with pytest.raises(ValueError, match="quantize"):
        Quantization.parse(text)


def answers(path: Path, layout: str, **settings: Any) -> list[Answer]:
    plan = plan_of(path, layout, dtype="float32", **settings)
    with threads(plan) as executors:
        return run(executors, plan, jobs_for(plan.source, 8))


@pytest.mark.parametrize(
    "proposer", ["self,quantize=int8,k=3", "self,quantize=int4,group=16,k=2", "draft=SMALL,quantize=int4,k=3"]
)
def test_drafts_of_rounded_weights_are_exact(models: dict[str, Path], proposer: str) -> None:
    """Drafts that change an answer, or rounded weights that are another model's: of the model's own most are taken."""
    by = Speculation.parse(proposer.replace("SMALL", str(models["small"])))
    for quantize in (None, Quantization(8)):
        if by.kind == "self" and quantize is not None and by.quantize is not None and by.quantize.bits == 8:
            continue
        plain = answers(models["groups"], "1", quantize=quantize)
        for layout in ("1", "tp2", "tp2.pp2"):
            drafted = answers(models["groups"], layout, quantize=quantize, speculate=by)
            assert drafted == plain, (layout, quantize)
            tallies = [answer.drafts for answer in drafted if answer.drafts is not None]
            if proposer.startswith("self,quantize=int8"):
                assert sum(each.accepted for each in tallies) > 0.6 * sum(each.proposed for each in tallies)


@pytest.mark.parametrize(
    ("settings", "speculate", "words"),
    [
        ({"quantize": Quantization(8)}, "self,quantize=int8", "quantize can be int4"),
        ({"quantize": Quantization(4, 32)}, "self,quantize=int4", "layers"),
        ({"quantize": Quantization(8)}, "self,dtype=bfloat16", "is int8"),
        ({}, "ngram,quantize=int8", "for draft, or for self"),
        ({}, "self,layers=1,quantize=int8", "in place of"),
        ({}, "self,dtype=bfloat16,quantize=int8", "in place of dtype"),
        ({}, "self,group=32", "group"),
        ({}, "self,quantize=int5", "int5"),
    ],
)
def test_drafts_that_cannot_be(models: dict[str, Path], settings: dict[str, Any], speculate: str, words: str) -> None:
    """A draft that costs what the model does, or an option that is quietly dropped."""
    with pytest.raises(ValueError, match=words):
        plan_of(models["groups"], "1", dtype="float32", speculate=Speculation.parse(speculate), **settings)


def test_self_of_a_quantised_model_stops_early(models: dict[str, Path]) -> None:
    """A draft of float weights beside a quantised model: plain `self` then runs its first half."""
    plan = plan_of(models["groups"], "1", quantize=Quantization(8), speculate=Speculation("self"))
    assert plan.draft is not None
    assert plan.draft.layers == plan.source.config.num_layers // 2


@pytest.mark.parametrize("quantize", ["int8", "int4,group=24"])
@pytest.mark.parametrize("name", ["groups", "gpt2"])
def test_pieces_do_not_matter(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, quantize: str
) -> None:
    """A scale of a piece instead of a row; more than a piece in memory at once."""
    source, rounding = open_source(models[name]), Quantization.parse(quantize)
    whole = whole_weights(source, rounding)
    monkeypatch.setattr(loading, "PIECE", 1000)
    sizes = []
    real = loading.quantise
    monkeypatch.setattr(loading, "quantise", lambda part, *by: sizes.append(part.numel()) or real(part, *by))
    pieces = whole_weights(source, rounding)
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(whole[key], pieces[key]) for key in whole)
    assert max(sizes) <= 250


@pytest.mark.parametrize("quantize", [None, "int8", "int4,group=16"])
def test_planned_bytes_are_those_held(models: dict[str, Path], quantize: str | None) -> None:
    """A memory plan that counts quantised weights as floats, or forgets their scales."""
    rounding = Quantization.parse(quantize) if quantize is not None else None
    plan = plan_of(models["groups"], "tp2", dtype="float32", quantize=rounding)
    for rank in plan.ranks:
        part = make_part(runner_spec(plan), Coordinates(0, rank.tp, 0), Axis(rank.tp, 2), Ops(torch.float32))
        held = {id(tensor): tensor.nbytes for tensor in tensors_of(part.decoder)}
        assert rank.weight_bytes == pytest.approx(sum(held.values()), rel=0.02)


def tensors_of(part: Any) -> list[torch.Tensor]:
    """All parameters within a decoder; a tied one several times."""
    if isinstance(part, torch.Tensor):
        return [part]
    if isinstance(part, Weight):
        return [part.data] if part.scales is None else [part.data, part.scales]
    if isinstance(part, dict | list | tuple):
        return [tensor for item in (part.values() if isinstance(part, dict) else part) for tensor in tensors_of(item)]
    if type(part).__module__.startswith("shardwise.models.") and type(part).__name__ != "RopeTable":
        return [
            tensor
            for name, item in vars(part).items()
            if name not in ("ops", "axis", "cos", "sin")
            for tensor in tensors_of(item)
        ]
    return []


def test_the_doors(models: dict[str, Path]) -> None:
    """An option that one of the doors drops: Python and the command run the same weights, which aren't the floats."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with threaded_llm(models["text"], quantize="int4,group=16") as llm, threaded_llm(models["text"], "tp2") as plain:
        assert llm.plan.quantize == Quantization(4, 16)
        (rounded,), (floats,) = llm.generate("count to ten", params), plain.generate("count to ten", params)
    command = ["generate", "count to ten", "--model", models["text"], "--max-tokens", "8", "--ignore-eos", "--json"]
    done = json.loads(shardwise(*command, "--quantize", "int4,group=16", "--layout", "tp2").stdout)
    assert done["outputs"][0]["token_ids"] == rounded.token_ids != floats.token_ids
    shown = json.loads(shardwise("inspect", models["text"], "--quantize", "int4,group=16", "--json").stdout)
    assert shown["quantize"] == "int4,group=16"


def test_perplexity_is_that_of_the_reference(models: dict[str, Path], tmp_path: Path) -> None:
    """A token that is scored twice, or by what comes after it; windows that are cut at another place."""
    source = open_source(models["text"])
    text = PASSAGE[:331]
    with threaded_llm(models["text"], "tp2.pp2") as llm:
        surprise, count = score(llm, text, 100)
        tokens = llm.tokenizer.encode(text)
        with pytest.raises(ValueError, match="fewer than two"):
            score(llm, "a", 100)
    weights = {name: tensor.double() for name, tensor in whole_weights(source).items()}
    expected = 0.0
    for start in range(0, len(tokens), 100):
        window = tokens[start : start + 100]
        odds = reference.logits(source.config, weights, window).log_softmax(-1)
        expected -= sum(float(odds[at, token]) for at, token in enumerate(window[1:]))
    assert count == len(tokens) - 4
    assert surprise == pytest.approx(expected, rel=1e-5)
    (tmp_path / "text.txt").write_text(text)
    command = ["eval", "perplexity", "--model", models["text"], "--text", tmp_path / "text.txt", "--window", "100"]
    done = json.loads(shardwise(*command, "--quantize", "int8", "--json").stdout)
    assert done["tokens"] == count
    assert done["quantize"] == "int8"
    assert done["perplexity"] == pytest.approx(math.exp(expected / count), rel=0.05)
    assert "can't be read" in shardwise("eval", "perplexity", "--text", tmp_path / "none", code=2).stderr


def test_convert_from_the_command_line(models: dict[str, Path], tmp_path: Path) -> None:
    """The command's own contract: one document, a folder that the other commands take, and a refusal in one line."""
    to = tmp_path / "int8"
    done = json.loads(shardwise("convert", models["text"], to, "--quantize", "int8", "--json").stdout)
    assert done["output"] == str(to)
    assert done["files"] == ["model-00001-of-00001.safetensors"]
    assert (to / "tokenizer.json").is_file()
    with threaded_llm(to, "tp2") as llm, threaded_llm(models["text"], quantize="int8") as loaded:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        assert llm.generate("hello", params)[0].token_ids == loaded.generate("hello", params)[0].token_ids
    refused = shardwise("convert", models["text"], to, code=2).stderr
    assert "is there already" in refused
    assert len(refused.splitlines()) == 1
