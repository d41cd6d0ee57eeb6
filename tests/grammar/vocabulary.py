"""Small tokenizers, and a model that knows nothing: it draws any token that a mask allows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from shardwise.grammar import Grammars, Matcher
from shardwise.params import SamplingParams
from shardwise.tokenizer import Tokenizer
from shardwise.tokenizer.spelling import byte_alphabet

PIECES = [
    '{"',
    '": ',
    '": "',
    '", "',
    '"}',
    '"]',
    ", ",
    "[]",
    "{}",
    "}}",
    "true",
    "false",
    "null",
    "12",
    "00",
    " a",
    "é",
]
END = 258


def byte_level(pieces: list[str] = PIECES) -> Tokenizer:
    """256 bytes, <pad> 256, <s> 257, </s> 258 as tests/tiny.py has them, and some longer pieces."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    vocabulary = {letter: index for index, letter in enumerate(sorted(letters.values()))}
    vocabulary |= {"<pad>": 256, "<s>": 257, "</s>": 258}
    for piece in pieces:
        vocabulary["".join(letters[byte] for byte in piece.encode())] = len(vocabulary)
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    return Tokenizer(backend, eos=[END])


def sentence_piece() -> Tokenizer:
    """<unk> 0, <s> 1, </s> 2, the 256 bytes from 3, then words with and without the space before."""
    words = ["▁", *map(chr, range(33, 127)), "▁Hello", "▁{", '{"', '":', '▁"', "▁1", "é", "▁a"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Backend(
        models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[], byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, eos=[2])


def grammars(tokenizer: Tokenizer, vocab_size: int | None = None) -> Grammars:
    return Grammars(tokenizer, vocab_size or tokenizer.vocab_size, tokenizer.eos)


def start(field: str, value: Any, owner: Grammars | None = None, ends: frozenset[int] = frozenset({END})) -> Matcher:
    """The matcher of one field, by default on the byte-level vocabulary."""
    return (owner or grammars(byte_level())).compile(SamplingParams(**{field: value}), ends)


def allowed(matcher: Matcher) -> list[int]:
    """The tokens of the mask."""
    bits: list[int] = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little").nonzero()[0].tolist()
    return bits


def byte_tokens(text: str) -> list[int]:
    """A text as the single bytes of the byte-level vocabulary."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    order = {letter: index for index, letter in enumerate(sorted(letters.values()))}
    return [order[letters[byte]] for byte in text.encode()]


def accepts(matcher: Matcher, text: str) -> bool:
    """Is the whole text in the language? The matcher is back at its start afterwards."""
    tokens = byte_tokens(text)
    taken = 0
    while taken < len(tokens) and matcher.advance(tokens[taken]):
        taken += 1
    complete = taken == len(tokens) and END in allowed(matcher)
    matcher.rollback(taken)
    return complete


CLOSING = ['"', '"}', '"]', "}", "}}", "]", '", ', '": "', '": ', ", ", ",", "null"]


def walk(matcher: Matcher, tokenizer: Tokenizer, rng: random.Random, patience: int = 40) -> Iterator[int]:
    """Draw tokens until an end, which comes quite soon; after ``patience`` of them by turns close and spell letters."""
    by_text = {tokenizer.spell(token): token for token in range(tokenizer.vocab_size)}
    closing = [by_text[piece.encode()] for piece in CLOSING if piece.encode() in by_text]
    letters = [by_text[bytes([byte])] for byte in range(32, 127)]
    for count in range(40 * patience):
        tokens = allowed(matcher)
        assert tokens, matcher.error
        able = set(tokens)
        ends = sorted(able & tokenizer.eos)
        if ends and (matcher.finished or count > patience or rng.random() < 0.3):
            tokens = ends
        elif count > patience and rng.random() < 0.5:
            tokens = [token for token in closing if token in able][:1] or tokens
        elif count > patience:
            tokens = [token for token in letters if token in able] or tokens
        token = rng.choice(tokens)
        assert matcher.advance(token)
        if token in tokenizer.eos:
            return
        yield token
    raise AssertionError("the text does not come to an end")
