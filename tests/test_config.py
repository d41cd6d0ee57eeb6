"""Layouts, engine settings and sampling parameters are checked when they are said."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config import EngineConfig, Layout
from shardwise.features import Speculation
from shardwise.params import SamplingParams


@pytest.mark.parametrize(
    ("text", "dp", "tp", "pp", "canonical"),
    [
        ("1", 1, 1, 1, "1"),
        ("tp2", 1, 2, 1, "tp2"),
        ("pp3.tp2", 1, 2, 3, "tp2.pp3"),
        ("dp2.tp2.pp2", 2, 2, 2, "dp2.tp2.pp2"),
        ("tp1", 1, 1, 1, "1"),
        (" TP4 ", 1, 4, 1, "tp4"),
    ],
)
def test_layout_parses(text: str, dp: int, tp: int, pp: int, canonical: str) -> None:
    """Guards the spelling users learn: any order, missing axes are 1, and the canonical form reads back."""
    layout = Layout.parse(text)
    assert (layout.dp, layout.tp, layout.pp) == (dp, tp, pp)
    assert str(layout) == canonical
    assert Layout.parse(canonical) == layout


@pytest.mark.parametrize("text", ["", "2", "tp", "tp0", "tp-1", "tp2.tp2", "ep2", "tp2,pp2", "tp2.5", "tp2..pp2"])
def test_bad_layout_names_the_form(text: str) -> None:
    """Guards against an opaque error, or a silent guess, for a misspelt layout (C60)."""
    with pytest.raises(ValueError, match="layout"):
        Layout.parse(text)


def test_coordinates_cover_the_mesh_once() -> None:
    """Guards against two ranks in one place; a replica's ranks must be consecutive."""
    layout = Layout(dp=2, tp=3, pp=2)
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert all(place.dp == rank // layout.replica_size for rank, place in enumerate(places))
    with pytest.raises(ValueError, match="outside"):
        layout.coordinates(layout.world_size)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 2**40),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.5),
        ("min_p", float("inf")),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop", (3,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("ignore_eos", 1),
        ("stop", 5),
        ("n", 0),
        ("n", 129),
        ("min_tokens", -1),
        ("min_tokens", 200),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-320),
        ("n", 10**400),
        ("temperature", 10**400),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {-1: 5}),
        ("logit_bias", {3: 101}),
        ("logit_bias", {3: "much"}),
        ("logit_bias", [3]),
        ("logit_bias", dict.fromkeys(range(1025), 1)),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (-4,)),
        ("bad_words", ("",)),
        ("bad_words", 7),
        ("logprobs", 21),
        ("logprobs", 10**6),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", 1.0),
        ("echo", "yes"),
        ("skip_special_tokens", 0),
        ("json_schema", 7),
        ("json_schema", ""),
        ("regex", b"x"),
        ("regex", ""),
        ("ebnf", ["x"]),
        ("choice", ("a", "")),
        ("json_object", 1),
    ],
)
def test_bad_sampling_field_is_named(name: str, value: Any) -> None:
    """Guards against a request that is accepted and then kills or changes its run (C2, C5, C6, C7, C9, C37)."""
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_one_grammar_at_a_time() -> None:
    """Guards against two grammars of which one is quietly left out."""
    with pytest.raises(ValueError, match="regex and json_object"):
        SamplingParams(regex="a+", json_object=True)
    assert SamplingParams(choice=("a", "b")).grammar == "choice"
    assert SamplingParams(json_schema={"type": "object"}).json_schema == '{"type": "object"}'  # type: ignore[arg-type]
    assert SamplingParams().grammar is None


def test_logit_bias_takes_the_keys_of_json() -> None:
    """Guards the OpenAI form: JSON has only texts as keys, and the order of keys means nothing."""
    assert SamplingParams(logit_bias={"7": -1, "3": 2}).logit_bias == ((3, 2.0), (7, -1.0))  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("magic", "draft, ngram, self"),
        ("draft", "model"),
        ("ngram=x", "model"),
        ("ngram,k=0", "k"),
        ("ngram,k=99", "k"),
        ("ngram,k=x", "k"),
        ("ngram,k=2,k=3", "k=3"),
        ("ngram,speed=9", "speed=9"),
        ("draft=x,accept=all", "accept"),
        ("ngram,layers=3", "layers"),
        ("self,layers=3,dtype=bfloat16", "layers"),
        ("self,dtype=int3", "dtype"),
        ("ngram,min_match=5", "min_match"),
    ],
)
def test_bad_speculation_names_the_part(text: str, match: str) -> None:
    """Guards against a misspelt proposer, or a setting of another one, that is quietly left out."""
    with pytest.raises(ValueError, match=match):
        Speculation.parse(text)


def test_speculation_parses() -> None:
    """Guards the spelling users learn."""
    assert Speculation.parse("draft=/models/a=b,k=auto") == Speculation("draft", model="/models/a=b")
    assert Speculation.parse("self,layers=8,accept=optimal,k=4") == Speculation("self", None, 4, "optimal", 8)


def test_unknown_sampling_field_is_refused() -> None:
    """Guards against a misspelt field being ignored."""
    with pytest.raises(ValueError, match="temprature"):
        SamplingParams.from_dict({"temprature": 1})


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "int3"},
        {"device": "tpu"},
        {"kernels": "cuda"},
        {"max_chunk": 0},
        {"max_batch_tokens": -5},
        {"kv_tokens": 3},
        {"threads": 0},
        {"start_timeout": 0},
        {"layout": Layout(tp=2), "split": (1.0,)},
        {"layout": Layout(tp=2), "split": (1.0, 0.0)},
        {"layout": Layout(pp=2), "stages": (3,)},
        {"layout": Layout(pp=2), "stages": (1.5, 0.5)},
        {"layout": Layout(pp=2), "stages": 2},
        {"layout": Layout(tp=2), "split": (float("inf"), 1)},
        {"layout": Layout(tp=2), "split": (float("nan"), 1)},
        {"layout": Layout(tp=2), "split": ("a", 1)},
        {"split": 3},
        {"device_ids": ("a",)},
        {"device_ids": 0},
    ],
)
def test_bad_engine_setting_is_named(settings: dict[str, Any]) -> None:
    """Guards against a bad setting that is found only after the weights are read."""
    name = next(key for key in settings if key != "layout")
    with pytest.raises(ValueError, match=name):
        EngineConfig(**settings)
