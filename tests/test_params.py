"""Fields of a request that are hostile or misshapen: refused when they are said, in a message that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from shardwise.params import MAX_TEXT, SamplingParams


def deep(levels: int) -> dict[str, Any]:
    """Objects within objects."""
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"properties": found}
    return found


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_texts_have_a_longest(name: str) -> None:
    """Guards the engines' loop against searches for strings of megabytes, each prepared for every continuation."""
    most = "x" * MAX_TEXT
    assert getattr(SamplingParams.from_dict({name: [most]}), name) == (most,)
    with pytest.raises(
        ValueError, match=rf"^{name} must be strings of at most {MAX_TEXT} characters, not one of 1001$"
    ):
        SamplingParams.from_dict({name: ["ok", most + "y"]})


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_half_a_character_is_no_text(name: str) -> None:
    """Guards against a text that no tokenizer reads and no output holds, told without the field or not at all."""
    with pytest.raises(ValueError, match=rf"^{name}: .* holds half a surrogate pair"):
        SamplingParams.from_dict({name: ["\U0001f600", "a\ud83d"]})


@pytest.mark.parametrize("name", ["stop", "bad_words", "choice", "stop_token_ids", "allowed_token_ids"])
def test_a_mapping_is_no_list(name: str) -> None:
    """Guards against an object whose keys are taken for the texts or ids of a list."""
    with pytest.raises(ValueError, match=rf"^{name} must be a list, not "):
        SamplingParams.from_dict({name: {"x": 1} if "ids" not in name else {1: 1}})


@pytest.mark.parametrize("key", ["9" * 5000, "\uff17", "\u0667", " 7", "", "-7", "7\n", "9999999999"])
def test_a_bias_is_for_an_id_in_plain_digits(key: str) -> None:
    """Guards against a limit of the language told instead of the field, and digits of other scripts read as an id."""
    with pytest.raises(ValueError, match=r"^logit_bias must map token ids"):
        SamplingParams(logit_bias={key: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize("schema", [{"enum": {1}}, {"enum": [b"x"]}, MappingProxyType({}), deep(100_000)])
def test_a_schema_that_is_no_json(schema: Mapping[str, Any]) -> None:
    """Guards against another error than ValueError for an object that JSON can't hold."""
    with pytest.raises(ValueError, match=r"^json_schema can't be written as JSON: "):
        SamplingParams(json_schema=schema)  # type: ignore[arg-type]
