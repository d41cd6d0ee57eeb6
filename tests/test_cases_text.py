"""The cases of ../shared/cases.md about stop strings, text and streams, on whole layouts of threads.

The ids are forced, byte by byte, so that it is known where characters and stop strings fall apart into tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.llm import LLM
from shardwise.params import SamplingParams
from tests.cases import LAYOUTS, ask, by, check_idle, in_order, streamed
from tests.harness import threaded_llm
from tests.tiny import save_text_model

END = 258
PROMPT = "?"
FREE = SamplingParams(max_tokens=24, temperature=1.5, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[*LAYOUTS, "dp2"])
def shared(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with threaded_llm(model, request.param) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    check_idle(shared)


def written(llm: LLM, text: str) -> dict[str, Any]:
    """Fields that make the model write ``text``, a token for each byte."""
    return in_order(llm.tokenizer.encode(text))


@pytest.mark.parametrize(
    ("text", "stop", "shown", "tokens"),
    [
        ("abcDEFGHIJklm", ("DEFGHIJ",), "abc", 10),
        ("DEFGHIJklm", ("DEFGHIJ",), "", 7),
        ("abcDEFGHIJ", ("DEFGHIJ",), "abc", 10),
        ("abcDEFGxyz", ("DEFGHIJ",), "abcDEFGxyz", 10),
        ("abcDEFG", ("DEFGHIJ",), "abcDEFG", 7),
        ("abcDEFGHIJ", ("GHI", "DEFGHIJ", "J"), "abcDEF", 9),
        ("abcDEFGHIJ", ("FG", "DEFG"), "abc", 7),
        ("a🙂bc", ("🙂b",), "a", 6),
        ("aé🙂c", ("\N{LATIN SMALL LETTER E WITH ACUTE}",), "a", 3),
        ("abc", ("zzz",), "abc", 3),
    ],
)
def test_a_stop_string_over_several_tokens(llm: LLM, text: str, stop: tuple[str, ...], shown: str, tokens: int) -> None:
    """C23, C32: no letter of a stop string leaks, what only began like one comes, and streams give the same."""
    params = by(written(llm, text), stop=stop)
    whole = ask(llm, PROMPT, params)
    assert whole.text == shown
    assert whole.token_ids == llm.tokenizer.encode(text)[:tokens]
    assert whole.finish_reason == ("length" if shown == text else "stop")
    pieces = streamed(llm, PROMPT, params)
    assert pieces.whole() == (whole.text, whole.token_ids, whole.finish_reason)
    seen = ""
    for piece in pieces.pieces:
        seen += piece.text
        assert shown.startswith(seen)


@pytest.mark.parametrize(("stop", "longest"), [("STUX", 4), ("never", 4), ("🙂x", 5), ("bUV🙂c!", 9)])
def test_pieces_keep_text_ids_and_logprobs_together(llm: LLM, stop: str, longest: int) -> None:
    """C24: held-back text holds back its ids and log-probabilities too; joined, all three are those of the whole."""
    params = by(written(llm, "aSTbUV🙂cd"), stop=(stop,), logprobs=2)
    (whole,) = ask(llm, PROMPT, params).outputs
    pieces = streamed(llm, PROMPT, params).pieces
    text, ids = "", list[int]()
    for piece in pieces:
        text += piece.text
        ids += piece.token_ids
        assert [item.token for item in piece.logprobs] == piece.token_ids
        assert text == llm.tokenizer.continuation(ids)  # at each moment the text is that of the ids so far
    assert text == whole.text == "aSTbUV🙂cd"
    assert ids == whole.token_ids
    assert [item for piece in pieces for item in piece.logprobs] == whole.logprobs
    assert max(len(piece.token_ids) for piece in pieces) == longest  # the emoji's four, and what is held with them


def test_a_stop_cuts_text_and_not_ids(llm: LLM) -> None:
    """C24: where a stop string ends the text, the ids and log-probabilities of all tokens up to it are there."""
    params = by(written(llm, "abSTUVcd"), stop=("STUV",), logprobs=0)
    pieces = streamed(llm, PROMPT, params)
    assert pieces.whole() == ("ab", llm.tokenizer.encode("abSTUV"), "stop")
    assert [item.token for piece in pieces.pieces for item in piece.logprobs] == llm.tokenizer.encode("abSTUV")
    assert [piece.text for piece in pieces.pieces if piece.token_ids] == ["a", "b", ""]


@pytest.mark.parametrize("text", ["🙂ď", "aďb", "日é", "ÿ"])
def test_characters_come_whole(llm: LLM, text: str) -> None:
    """C26: a character of several tokens comes in one piece, and U+FFFD never stands for the half of one."""
    pieces = streamed(llm, PROMPT, by(written(llm, text)))
    assert pieces.whole() == (text, llm.tokenizer.encode(text), "length")
    assert [piece.text for piece in pieces.pieces if piece.text] == list(text)


def test_bytes_that_are_no_character(llm: LLM) -> None:
    """C26: U+FFFD stands where the model really wrote bytes of no character, and text goes on after it."""
    smile, letter = llm.tokenizer.encode("🙂"), llm.tokenizer.encode("x")
    ids = [*smile[:2], *letter]
    result = ask(llm, PROMPT, by(in_order(ids)))
    assert (result.text, result.token_ids) == ("\ufffdx", ids)
    assert streamed(llm, PROMPT, by(in_order(ids))).whole() == (result.text, ids, "length")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_max_tokens_inside_a_character(llm: LLM, count: int) -> None:
    """C28: exactly max_tokens even inside a character; the bytes left over become one U+FFFD, streamed or not."""
    ids = llm.tokenizer.encode("a🙂")[:count]
    params = by(in_order(ids), max_tokens=count)
    text = "a" + {1: "", 5: "🙂"}.get(count, "\ufffd")
    result = ask(llm, PROMPT, params)
    assert (result.text, result.token_ids, result.finish_reason) == (text, ids, "length")
    assert streamed(llm, PROMPT, params).whole() == (text, ids, "length")


@pytest.mark.parametrize("way", [{"max_tokens": 3}, {"stop": ("c",)}, {"stop_token_ids": (65,)}, {"max_tokens": 1}])
def test_the_last_piece_is_told_with_its_reason(llm: LLM, way: dict[str, Any]) -> None:
    """C30: there is a last piece, the only one with a reason, and what it carries and what came before is the whole."""
    params = by({**written(llm, "xyzAbcd"), **way})
    whole = ask(llm, PROMPT, params)
    pieces = streamed(llm, PROMPT, params)
    assert pieces.whole() == (whole.text, whole.token_ids, whole.finish_reason)
    assert whole.finish_reason == ("length" if "max_tokens" in way else "stop")


def test_tokens_are_counted_for_every_request(llm: LLM) -> None:
    """C31: prompt and generated tokens can be counted, streamed or not: several continuations, none, stops and ends."""
    prompt = "count me"
    ways: list[tuple[dict[str, Any], list[int]]] = [
        ({"max_tokens": 5, "ignore_eos": True}, [5]),
        ({"max_tokens": 4, "ignore_eos": True, "n": 3, "temperature": 1.0, "seed": 1}, [4, 4, 4]),
        ({"max_tokens": 0}, [0]),
        ({"max_tokens": 0, "prompt_logprobs": 0, "echo": True}, [0]),
        ({"logit_bias": {END: 100}}, [1]),
        ({"logit_bias": {70: 100}, "stop_token_ids": (70,)}, [1]),
        ({"logit_bias": {70: 100}, "stop": ("gg",)}, [2]),
    ]
    for fields, counts in ways:
        params = SamplingParams(**fields)
        result = ask(llm, prompt, params)
        assert result.prompt_token_ids == llm.tokenizer.encode(prompt)
        assert [len(part.token_ids) for part in result.outputs] == counts, fields
        pieces = streamed(llm, prompt, params)
        for part in result.outputs:
            assert pieces.whole(part.index) == (part.text, part.token_ids, part.finish_reason), fields


def test_a_stop_that_never_comes_changes_nothing(llm: LLM) -> None:
    """C32: with stop strings that never occur the text is all of the text that comes without them."""
    free = ask(llm, "tell", FREE)
    assert "zzz" not in free.text
    for stop in (("zzz",), ("zzz", free.text[-1] + "zzz"), (free.text + "z",)):
        params = SamplingParams(max_tokens=24, temperature=1.5, seed=4, ignore_eos=True, stop=stop)
        assert ask(llm, "tell", params).outputs == free.outputs
        assert streamed(llm, "tell", params).whole() == (free.text, free.token_ids, "length")


def test_stops_at_each_place_of_a_text(llm: LLM) -> None:
    """C23: wherever two letters of a sampled text first stand, as a stop string they cut it just there."""
    free = ask(llm, "tell", FREE).text
    places = range(0, len(free) - 1, 3)
    stops = [free[place : place + 2] for place in places]
    params = [SamplingParams(max_tokens=24, temperature=1.5, seed=4, ignore_eos=True, stop=(stop,)) for stop in stops]
    for stop, result in zip(stops, llm.generate(["tell"] * len(stops), params), strict=True):
        assert (result.text, result.finish_reason) == (free[: free.index(stop)], "stop")
