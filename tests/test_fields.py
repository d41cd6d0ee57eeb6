"""Fields of a request whose meaning has corners: n, echo, allowed ids, bad words, filters. On layouts of threads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from shardwise.intake import seed_of
from shardwise.llm import LLM
from shardwise.params import SamplingParams
from shardwise.tokenizer import Tokenizer
from tests.cases import LAYOUTS, ask, by, check_idle, streamed
from tests.harness import threaded_llm
from tests.tiny import ALPHABET, save_text_model

HOT: dict[str, Any] = {"max_tokens": 10, "temperature": 1.5, "seed": 21, "ignore_eos": True}
WORD, SPACED, OTHER = 259, 260, 261
"""Tokens of the words model: "cat" and " cat", which are one token each, and "dog"."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def words_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text model with a tokenizer that knows some words."""
    path = tmp_path_factory.mktemp("words") / "model"
    shutil.copytree(model, path)
    stored = json.loads((path / "tokenizer.json").read_text())
    specials = {"<pad>": 256, "<s>": 257, "</s>": 258}
    words = {"cat": WORD, "Ġcat": SPACED, "dog": OTHER, "ca": 262, "do": 263}
    stored["model"]["vocab"] |= specials | words
    stored["model"]["merges"] = [["c", "a"], ["ca", "t"], ["d", "o"], ["do", "g"], ["Ġ", "cat"]]
    (path / "tokenizer.json").write_text(json.dumps(stored))
    return path


@pytest.fixture(scope="module")
def one(model: Path) -> Iterator[LLM]:
    with threaded_llm(model) as llm:
        yield llm


@pytest.fixture(scope="module", params=[*LAYOUTS, "dp2"])
def shared(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with threaded_llm(model, request.param) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    check_idle(shared)


def test_continuations_are_distinct_and_repeat(llm: LLM, one: LLM) -> None:
    """Guards n: number 0 is the request alone, each other has its own seed, all repeat, on every layout."""
    result = ask(llm, "many", by(HOT, n=5))
    assert [part.index for part in result.outputs] == [0, 1, 2, 3, 4]
    lines = [part.token_ids for part in result.outputs]
    assert len({tuple(line) for line in lines}) == 5
    assert lines[0] == ask(llm, "many", by(HOT)).token_ids
    assert [part.token_ids for part in ask(llm, "many", by(HOT, n=3)).outputs] == lines[:3]
    assert [part.token_ids for part in ask(one, "many", by(HOT, n=5)).outputs] == lines
    for index in (1, 4):
        assert ask(one, "many", by({**HOT, "seed": seed_of(21, index)})).token_ids == lines[index]
    pieces = streamed(llm, "many", by(HOT, n=5))
    assert [pieces.whole(index)[1] for index in range(5)] == lines
    free = ask(llm, "many", by({**HOT, "seed": None}, n=4))
    assert len({tuple(part.token_ids) for part in free.outputs}) == 4
    greedy = ask(llm, "many", SamplingParams(max_tokens=4, n=3))
    assert greedy.outputs[1].token_ids == greedy.outputs[2].token_ids == greedy.token_ids


def test_continuations_end_one_by_one(llm: LLM) -> None:
    """Guards n where continuations end at different times, by themselves or because nobody listens any more."""
    params = by({**HOT, "max_tokens": 30}, n=6, stop_token_ids=tuple(range(0, 290, 9)))
    result = ask(llm, "ends", params)
    assert len({len(part.token_ids) for part in result.outputs}) > 1
    assert {part.finish_reason for part in result.outputs} <= {"stop", "length"}
    pieces = streamed(llm, "ends", params)
    for part in result.outputs:
        assert pieces.whole(part.index) == (part.text, part.token_ids, part.finish_reason)
    stream = llm.stream("ends", params)
    while next(stream).finish_reason is None:
        pass
    stream.close()  # type: ignore[attr-defined]
    check_idle(llm)


def test_continuations_have_grammars_of_their_own(llm: LLM, one: LLM) -> None:
    """Guards n with a grammar: each continuation goes its own way through it."""
    params = by({**HOT, "regex": "[a-z]{4}(x|yy)"}, n=4)
    texts = [part.text for part in ask(llm, "!", params).outputs]
    assert len(set(texts)) == 4
    assert all(text[:4].isalpha() and text[4:] in ("x", "yy") for text in texts)
    assert [part.text for part in ask(one, "!", params).outputs] == texts


def test_echo_begins_with_the_prompt(llm: LLM) -> None:
    """Guards echo: prompt and answer joined, once in each continuation, first in a stream, and no stop in it."""
    prompt = "écho 🙂"
    plain = ask(llm, prompt, by(HOT, n=2))
    echoed = ask(llm, prompt, by(HOT, n=2, echo=True, logprobs=0))
    for part, with_prompt in zip(plain.outputs, echoed.outputs, strict=True):
        assert with_prompt.text == prompt + part.text
        assert with_prompt.token_ids == part.token_ids
        assert len(with_prompt.logprobs) == len(part.token_ids)
    pieces = streamed(llm, prompt, by(HOT, n=2, echo=True))
    assert pieces.whole(1)[0] == echoed.outputs[1].text
    assert [(piece.text, piece.token_ids) for piece in pieces.pieces[:2]] == [(prompt, [])] * 2
    stopped = ask(llm, prompt, by(HOT, echo=True, stop=("cho",)))
    assert (stopped.text, stopped.finish_reason) == (echoed.text, "length")
    ids = [257, *llm.tokenizer.encode("hi"), 258]
    assert ask(llm, ids, SamplingParams(max_tokens=0, echo=True)).text == "<s>hi</s>"
    (chat,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1, echo=True))
    assert chat.text.startswith("<s>user: hi</s><s>assistant:")


def test_only_allowed_ids(llm: LLM, one: LLM) -> None:
    """Guards allowed_token_ids: nothing else comes, in any part of a cut vocabulary, and an end only where named."""
    for allowed in ((0, 144, 145, 289), (7,), (146, 258)):
        params = by({**HOT, "ignore_eos": False, "allowed_token_ids": allowed})
        result = ask(llm, "allowed", params)
        assert set(result.token_ids) <= set(allowed)
        assert result.token_ids == ask(one, "allowed", params).token_ids
        assert (result.finish_reason == "stop") == (258 in result.token_ids)
    twice = by({**HOT, "allowed_token_ids": [9, 9, 8]})
    assert set(ask(llm, "allowed", twice).token_ids) == {8, 9}


def test_filters_keep_what_they_say(llm: LLM) -> None:
    """Guards top_k, top_p and min_p through the door: each token is one that the raw logits let stay."""
    heat = 0.5
    ways: list[dict[str, Any]] = [
        {"top_k": 3},
        {"top_p": 0.2},
        {"min_p": 0.5},
        {"top_k": 9, "top_p": 0.7, "min_p": 0.2},
    ]
    params = [by({**HOT, "temperature": heat, "max_tokens": 16}, **way) for way in ways]
    numbers = [llm.submit("filters", each, want_logits=True) for each in params]
    for way, number in zip(ways, numbers, strict=True):
        (part,) = llm.result(number).outputs
        places = set()
        for token, raw in zip(part.token_ids, part.logits, strict=True):
            logits = np.frombuffer(raw, np.float32).astype(np.float64)
            odds = np.sort(np.exp((logits - logits.max()) / heat))[::-1][: way.get("top_k", 290)]
            place = int((logits > logits[token]).sum())
            assert odds[:place].sum() < way.get("top_p", 1.0) * odds.sum(), way
            assert place < len(odds), way
            assert odds[place] >= way.get("min_p", 0.0), way
            places.add(place)
        assert len(places) > 1, way


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_words_of_one_token(words_model: Path, layout: str) -> None:
    """Guards bad_words: a word is barred as it is spelt at a start and after a space, and nothing else is."""
    wish = {WORD: 100, SPACED: 90, OTHER: 80}
    with threaded_llm(words_model, layout) as llm:
        assert llm.tokenizer.encode("cat cat dog") == [WORD, SPACED, ALPHABET.index("Ġ"), OTHER]

        def first(*words: str) -> int:
            return ask(llm, "?", SamplingParams(max_tokens=1, logit_bias=wish, bad_words=words)).token_ids[0]

        assert first() == WORD
        assert first("cat") == OTHER
        assert first(" cat") == WORD  # as it is written with its space, and with two
        assert first("dog") == WORD
        assert first("cat", "dog") not in wish


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_words_of_several_tokens(model: Path, words_model: Path, layout: str) -> None:
    """Guards bad_words: of several tokens only the last is barred, after the others, the prompt's end among them."""
    x, y, z = (ALPHABET.index(letter) for letter in "xyz")
    params = by({**HOT, "max_tokens": 80, "allowed_token_ids": (x, y, z)})
    with threaded_llm(model, layout) as llm:
        free = ask(llm, "x", params).text
        assert "xz" in free
        assert "yyx" in free
        barred = ask(llm, "x", by(vars(params), bad_words=("xz", "yyx"))).text
        assert "xz" not in "x" + barred
        assert "yyx" not in barred
        assert {"xx", "xy", "yx", "yy", "yz", "zy"} <= {barred[at : at + 2] for at in range(80)}
    with threaded_llm(words_model, layout) as llm:
        wish = SamplingParams(max_tokens=2, logit_bias={SPACED: 100, OTHER: 90}, bad_words=("cat cat",))
        assert ask(llm, "?", wish).token_ids == [SPACED, OTHER]  # " cat cat" is barred too
        assert ask(llm, "a cat", by(vars(wish), max_tokens=1)).token_ids == [OTHER]


def test_words_are_encoded_by_many_threads_at_once(words_model: Path) -> None:
    """C41: 64 threads that encode prompts and bad words at once get what one gets, and no error."""
    tokenizer = Tokenizer.from_directory(words_model)
    texts = [f"cat {number} dog" * 20 for number in range(64)]
    expected = [(tokenizer.encode(text), tokenizer.encode(" " + text, add_special_tokens=False)) for text in texts]
    barrier = Barrier(64)

    def work(text: str) -> tuple[list[int], list[int]]:
        barrier.wait(60)
        for _ in range(20):
            found = tokenizer.encode(text), tokenizer.encode(" " + text, add_special_tokens=False)
            assert tokenizer.decode(found[0]) == text
        return found

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(work, texts)) == expected


def test_too_many_tokens_end_at_the_context(llm: LLM) -> None:
    """C37: a huge max_tokens is no error: the text ends with "length" where the context does."""
    result = ask(llm, "x" * 240, SamplingParams(max_tokens=10**9, ignore_eos=True))
    assert (len(result.token_ids), result.finish_reason) == (16, "length")
