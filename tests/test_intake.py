"""From a wish to requests: what their continuations share, and how bad words are spelt."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from shardwise.intake import Intake
from shardwise.params import SamplingParams
from shardwise.tokenizer import Tokenizer
from tests.grammar.vocabulary import byte_level

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", *map(chr, range(97, 123)), "▁b", "ba", "bad", "▁bad", "▁a"]
NAMES = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]


def llama() -> Tokenizer:
    """A SentencePiece vocabulary as Llama 2 has it: "bad" is one token, and three with the space before."""
    scores = {"▁b": -1.0, "ba": -2.0, "bad": -3.0, "▁bad": -0.5, "▁a": -1.5}
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": NAMES,
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(WORDS),
            "tokenizer.ggml.scores": [scores.get(name, -100.0) for name in NAMES],
        }
    )


def spelt(tokenizer: Tokenizer, word: str) -> set[tuple[str, ...]]:
    """What is ruled out for a bad word."""
    intake = Intake(tokenizer, tokenizer.vocab_size, tokenizer.eos)
    (request,) = intake.prepare("x", [1], SamplingParams(bad_words=(word,))).parts
    backend: Backend = tokenizer._backend
    return {tuple(str(backend.id_to_token(token)) for token in way) for way in request.bad_words}


def test_continuations_share_their_prompt() -> None:
    """Guards the memory: each of 128 continuations kept a copy of a prompt that came as a list."""
    tokenizer = byte_level()
    prepared = Intake(tokenizer, tokenizer.vocab_size, tokenizer.eos).prepare("x", [1, 2, 3], SamplingParams(n=5))
    assert prepared.tokens == (1, 2, 3)
    assert all(request.prompt is prepared.tokens for request in prepared.parts)


def test_a_bad_word_after_a_line_break() -> None:
    """Guards bad_words where a vocabulary sets a space before a text: the word without one is another token."""
    tokenizer = llama()
    assert [NAMES[token] for token in tokenizer.encode("a\nbad", add_special_tokens=False)][-2:] == ["<0x0A>", "bad"]
    assert {("bad",), ("▁b", "a", "d")} <= spelt(tokenizer, "bad")
    assert ("</s>",) in spelt(tokenizer, "</s>")


def test_a_bad_word_that_grows_into_the_line_break() -> None:
    """Guards against a wrong cut where the line break and the word are one token: only what is sure is ruled out."""
    letters = {"Ċ": 0, "x": 1, "Ġ": 2, "ĊĊ": 3}
    backend = Backend(models.BPE(vocab=letters, merges=[("Ċ", "Ċ")]))
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(backend)
    assert spelt(tokenizer, "\nx") == {("Ċ", "x"), ("Ġ", "Ċ", "x")}
    assert spelt(tokenizer, "x") == {("x",), ("Ġ", "x")}
