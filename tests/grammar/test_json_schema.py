"""Whatever a model draws, the text is JSON that the schema allows; what would not be enforced is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema.validators import validator_for

from shardwise.grammar import Grammars
from tests.grammar.schemas import REFUSED, SCHEMAS
from tests.grammar.vocabulary import accepts, allowed, byte_level, grammars, sentence_piece, start, walk

TOKENIZER = byte_level()


@pytest.fixture(scope="module")
def owner() -> Grammars:
    return grammars(TOKENIZER)


def check(text: str, schema: Any) -> None:
    value = json.loads(text)
    kind = validator_for(schema) if isinstance(schema, dict) else validator_for({})
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(value)


def test_there_are_two_hundred() -> None:
    """Guards against schemas that get lost: each one is a case that a keyword once may have been forgotten in."""
    assert len(SCHEMAS) == 200
    assert len({json.dumps(schema) for schema in SCHEMAS}) == 200


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_any_walk_is_valid(owner: Grammars, number: int) -> None:
    """Guards against text that the schema forbids, whichever allowed tokens a model takes, and against dead ends."""
    schema = SCHEMAS[number]
    for seed in range(4):
        matcher = start("json_schema", json.dumps(schema), owner)
        tokens = list(walk(matcher, TOKENIZER, random.Random(1000 * number + seed)))
        check(TOKENIZER.continuation(tokens), schema)
        assert matcher.finished
        assert matcher.error is None


@pytest.mark.parametrize("number", range(0, len(SCHEMAS), 8))
def test_walks_over_words_with_spaces(number: int) -> None:
    """Guards against the space that a SentencePiece vocabulary sets before words: it is part of what is matched."""
    tokenizer = sentence_piece()
    matcher = start("json_schema", json.dumps(SCHEMAS[number]), grammars(tokenizer), tokenizer.eos)
    text = tokenizer.continuation(list(walk(matcher, tokenizer, random.Random(number))))
    check(text, SCHEMAS[number])
    assert not text.startswith(" ")


@pytest.mark.parametrize(("schema", "word"), REFUSED, ids=range(len(REFUSED)))
def test_refused(owner: Grammars, schema: Any, word: str) -> None:
    """C75: guards against constraints that are dropped without a word, and against faults that end a server."""
    with pytest.raises(ValueError, match=r"^json_schema: .") as caught:
        start("json_schema", schema if isinstance(schema, str) else json.dumps(schema), owner)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_written_as_json_dumps_writes(owner: Grammars) -> None:
    """Guards against white space for ever, which small models fall into where it is allowed."""
    value = {"a": [1, 2, {"b": "c"}], "d": None}
    schema = {"const": value}
    assert accepts(start("json_schema", schema, owner), json.dumps(value))
    for text in (json.dumps(value, indent=1), json.dumps(value, separators=(",", ":")), " " + json.dumps(value)):
        assert not accepts(start("json_schema", schema, owner), text)
    matcher = start("json_object", True, owner)
    assert not any(TOKENIZER.spell(token).isspace() for token in allowed(matcher))


def test_a_key_has_one_spelling(owner: Grammars) -> None:
    """Guards against a declared property that comes again, of another type, under an escaped name."""
    matcher = start("json_schema", {"type": "object", "properties": {"é": {"type": "integer"}}}, owner)
    assert accepts(matcher, '{"é": 1}')
    for key in ("é", "\\u00e9", "\\u00E9"):
        assert not accepts(matcher, f'{{"{key}": "x"}}')
        assert not accepts(matcher, f'{{"é": 1, "{key}": "x"}}')


def test_json_object(owner: Grammars) -> None:
    """Guards against a JSON mode that takes other values, or stops inside one."""
    matcher = start("json_object", True, owner)
    for text in ("{}", '{"a": {"b": [1, "x", null]}, "": -1.5e3}'):
        assert accepts(matcher, text)
    for text in ("[]", "1", '"a"', "null", "", '{"a": 1', "{} "):
        assert not accepts(matcher, text)
    for seed in range(20):
        drawn = list(walk(start("json_object", True, owner), TOKENIZER, random.Random(seed)))
        assert isinstance(json.loads(TOKENIZER.continuation(drawn)), dict)
