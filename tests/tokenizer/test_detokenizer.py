"""Incremental text against decoding everything at once."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.tokenizer import Detokenizer, Tokenizer
from shardwise.tokenizer.spelling import byte_alphabet
from tests.tokenizer.test_tokenizer import CORPUS, byte_level, gguf_metadata, sentence_piece_metadata

TOKENIZERS = {
    "byte-level": Tokenizer.from_gguf(gguf_metadata(byte_level(), "gpt-2")),
    "sentence-piece": Tokenizer.from_gguf(sentence_piece_metadata()),
    "no prefix": Tokenizer.from_gguf(sentence_piece_metadata(**{"tokenizer.ggml.add_space_prefix": False})),
}
each = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def pieces(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    detokenizer = Detokenizer(tokenizer, stop)
    found = []
    for number in ids:
        found.append(detokenizer.push(number))
        if detokenizer.stopped:
            break
    found.append(detokenizer.finish())
    return found, detokenizer.stopped


def cut(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """The text before the stop string that is complete first, letter by letter."""
    for end in range(1, len(text) + 1):
        done = [word for word in stop if text[:end].endswith(word)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    texts = st.one_of(st.sampled_from(CORPUS), st.text(max_size=20))
    encoded = texts.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    anything = st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=20)
    return st.lists(st.one_of(encoded, anything), max_size=4).map(
        lambda parts: [number for part in parts for number in part]
    )


@each
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_make_the_whole(tokenizer, data):
    """C26, C32: text lost, doubled or garbled between tokens, for any ids and any place to break off (C28)."""
    ids = data.draw(ids_of(tokenizer))
    stop = ("zzzzzz",) if data.draw(st.booleans()) else ()
    assert "".join(pieces(tokenizer, ids, stop)[0]) == tokenizer.continuation(ids)


@each
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_stops_cut_alike_however_the_text_falls_into_tokens(tokenizer, data):
    """C23: a stop string across tokens leaks its beginning, is missed, or depends on where tokens end."""
    letters = st.text(alphabet="ab é", min_size=1, max_size=5)
    text = data.draw(st.text(alphabet="ab é", max_size=30))
    stop = tuple(data.draw(st.lists(letters, min_size=1, max_size=4)))
    whole = tokenizer.encode(text, add_special_tokens=False)
    # the same text, one letter a token
    single = [number for char in text for number in tokenizer.encode(char, add_special_tokens=False)]
    for ids in (whole, single):
        found, stopped = pieces(tokenizer, ids, stop)
        assert ("".join(found), stopped) == cut(tokenizer.continuation(ids), stop)


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=40))
def test_any_bytes_are_read_as_the_library_reads_them(raw):
    """The count of U+FFFD for broken bytes is a matter of convention; ours is the library's."""
    backend = byte_level()
    tokenizer = Tokenizer(backend)
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    ids = [backend.token_to_id(letters[byte]) for byte in raw]
    assert tokenizer.decode(ids) == backend.decode(ids) == raw.decode(errors="replace")
    assert "".join(pieces(tokenizer, ids)[0]) == tokenizer.continuation(ids)


def letters(text: str) -> tuple[Tokenizer, list[int]]:
    tokenizer = TOKENIZERS["byte-level"]
    alphabet = {byte: letter for letter, byte in byte_alphabet().items()}
    return tokenizer, [tokenizer._backend.token_to_id(alphabet[byte]) for byte in text.encode()]


def test_a_character_comes_whole():
    """C26: the four bytes of an emoji are four tokens, and only the last brings it."""
    assert pieces(*letters("a😀b"))[0] == ["a", "", "", "", "😀", "b", ""]


def test_an_incomplete_character_is_one_mark_at_the_end():
    """C28: max_tokens may cut within a character."""
    tokenizer, ids = letters("a😀")
    assert pieces(tokenizer, ids[:-1])[0] == ["a", "", "", "", "�"]


def test_text_is_held_no_longer_than_a_stop_may_still_come():
    """Streaming must not lag by the length of the longest stop string, only by what matches."""
    assert pieces(*letters("xDEFDEFGHIJy"), ("DEFGHIJ",)) == (["x", "", "", "", "DEF", *[""] * 7], True)
    assert pieces(*letters("xDEz"), ("DEFGHIJ",)) == (["x", "", "", "DEz", ""], False)
    assert pieces(*letters("xDE"), ("DEFGHIJ",)) == (["x", "", "", "DE"], False)


def test_nothing_comes_after_a_stop():
    """Tokens already in flight when a stop string completes."""
    tokenizer, ids = letters("ab.cd")
    detokenizer = Detokenizer(tokenizer, (".",))
    assert [detokenizer.push(number) for number in ids] == ["a", "b", "", "", ""]
    assert detokenizer.stopped
    assert detokenizer.finish() == ""


def test_time_is_linear_in_tokens_and_in_stops():
    """A hostile stop string (all of one letter) or a long output made quadratic."""
    tokenizer, ids = letters("a" * 20_000 + "b")
    start = time.thread_time()
    found, stopped = pieces(tokenizer, ids, ("a" * 10_000 + "c", "a" * 15_000 + "b"))
    assert time.thread_time() - start < 5
    assert stopped
    assert "".join(found) == "a" * 5_000


def test_searches_are_prepared_once():
    """Guards the engines' loop: the continuations of a request share what is made of its stop strings."""
    tokenizer = TOKENIZERS["byte-level"]
    made = [Detokenizer(tokenizer, ("abab", "b" * at))._stops for at in (5, 5, 7)]
    assert made[0][0]._border is made[1][0]._border is made[2][0]._border == [0, 0, 1, 2]
    assert made[0][1]._border is made[1][1]._border
    assert made[0][1]._border != made[2][1]._border


def test_the_alphabet_is_the_librarys():
    """One wrong letter garbles one byte in all texts."""
    backend = byte_level()
    vocabulary = json.loads(backend.to_str())["model"]["vocab"]
    assert set(byte_alphabet()) <= set(vocabulary)
    assert sorted(byte_alphabet().values()) == list(range(256))
