"""From what a user asks to requests that engines can run: text to tokens, seeds drawn, grammars compiled.

All that takes time before a request runs is done here, in any number of threads at once, apart from the engines' loop.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardwise.params import MAX_SEED, SamplingParams
from shardwise.schedule.sequence import Request
from shardwise.tokenizer import Tokenizer
from shardwise.tokenizer.quoting import encode_chat

if TYPE_CHECKING:
    from shardwise.grammar import Grammars

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Prepared:
    """A request that only waits to be run."""

    text: str
    """The prompt."""
    tokens: tuple[int, ...]
    params: SamplingParams
    parts: tuple[Request, ...]
    """One for each of the n continuations, with consecutive ids; number 0 is the request that n=1 has."""

    @property
    def cost(self) -> int:
        """Tokens that it may need in all, prompts included."""
        return (len(self.tokens) + self.params.max_tokens) * len(self.parts)


class Intake:
    """Prepares requests for one model: its tokenizer, ``vocab_size`` rows of logits, and its own end tokens ``eos``."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.eos = eos
        self._vocab_size = vocab_size
        self._next_id = 0
        self._lock = threading.Lock()

    def encode(self, prompt: Prompt, *, plain: bool = False) -> tuple[str, list[int]]:
        """A prompt's text and tokens; in a ``plain`` one special tokens that are spelled out are text.

        Raises ValueError for unknown ids and for what can't be encoded.
        """
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, plain=plain)
        known = range(self._vocab_size)
        for token in prompt:
            if type(token) is not int or token not in known:  # True is an int too
                raise ValueError(f"the prompt: {token!r} is not a token id from 0 to {known[-1]}")
        return self.tokenizer.decode(prompt, skip_special_tokens=False), list(prompt)

    def encode_chat(self, messages: Messages, **values: Any) -> tuple[str, list[int]]:
        """The text and tokens of a conversation; ``values`` are the chat template's variables.

        Raises ValueError if there is no template, and with its own message if it refuses.
        """
        return encode_chat(self.tokenizer, messages, **values)

    def prepare(
        self,
        text: str,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        salt: bytes = b"",
        want_logits: bool = False,
    ) -> Prepared:
        """The request that continues a prompt. ``salt``: KV is shared only between requests of equal salt.

        Raises ValueError naming the field for a grammar that can't be compiled; that may take up to two seconds.
        """
        tokens = tuple(tokens)
        seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
        matcher = None
        if params.grammar is not None:
            ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos)
            with self._lock:
                grammars = self._grammars
            matcher = grammars.compile(params, ends)
        with self._lock:
            first, self._next_id = self._next_id, self._next_id + params.n
        bad_words = tuple(sorted({way for word in params.bad_words for way in self._spellings(word)}))
        parts = (
            Request(
                first + at,
                tokens,
                params if at == 0 else replace(params, prompt_logprobs=None),
                seed_of(seed, at),
                salt,
                want_logits,
                bad_words,
                matcher if at == 0 or matcher is None else matcher.copy(),
            )
            for at in range(params.n)
        )
        return Prepared(text, tokens, params, tuple(parts))

    def _spellings(self, word: str) -> Iterator[tuple[int, ...]]:
        """The tokens of a word at the start of a text, after a space, and where neither of these is before it.

        Of the last one, a SentencePiece vocabulary shows the tokens only behind something else.
        """
        before = "\n"
        for text in (word, " " + word):
            yield tuple(self.tokenizer.encode(text, add_special_tokens=False))
        head = self.tokenizer.encode(before, add_special_tokens=False)
        line = self.tokenizer.encode(before + word, add_special_tokens=False)
        if line[: len(head)] == head:  # else the two have grown into one token
            yield tuple(line[len(head) :])

    @cached_property
    def _grammars(self) -> Grammars:
        from shardwise.grammar import Grammars  # a large library, and most requests need none

        return Grammars(self.tokenizer, self._vocab_size, self.eos)


def seed_of(seed: int, index: int) -> int:
    """The seed of one of a request's n continuations: the request's own for number 0, a hash for the others."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
