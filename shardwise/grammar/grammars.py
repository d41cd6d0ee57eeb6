"""The grammars of one model: its vocabulary as a trie, and a request's field compiled into a matcher.

llguidance does the parsing. It is imported when the first grammar comes, and so is the trie built.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from shardwise.grammar.lark import write
from shardwise.grammar.matcher import DEAD_END, Matcher, sentence
from shardwise.grammar.trial import attempt
from shardwise.params import SamplingParams
from shardwise.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_TRIED = 1024
"""Grammars remembered as harmless; 32 bytes each."""
MAX_SAID = 400
"""Characters of an error, which may quote names of any length."""
MAX_LEXER_STATES = 100_000
"""Of one request; about 0.3 kB each."""


class Grammars:
    """Compiles grammars for one model, in any number of threads at once.

    ``vocab_size`` is the model's, which may be more or less than the tokenizer's; ``ends`` are the model's own end
    tokens, which are never part of a text. Requests share nothing that one could use up for another.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._never = tokenizer.special | ends
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(2)
        """Of trials at once."""
        self._trie: LLTokenizer | None = None
        self._tried: OrderedDict[bytes, None] = OrderedDict()

    def compile(self, params: SamplingParams, ends: frozenset[int]) -> Matcher:
        """The matcher of the field that constrains the text; ``ends`` may follow a complete one.

        Takes a few milliseconds, up to two seconds for what is large or intricate. Raises ValueError, naming the field,
        for a grammar that is wrong, unsupported, too large or too intricate, or that allows no text.
        """
        name = params.grammar
        assert name is not None
        try:
            source = write(params)
            trie = self._vocabulary()
            from llguidance import LLMatcher, LLParserLimits

            limits: dict[str, Any] = {
                "max_items_in_row": source.max_items,
                "max_lexer_states": MAX_LEXER_STATES,
                "verbose_errors": False,
            }
            if not source.plain:
                self._try(source.lark, limits)

            def make() -> LLMatcher:
                return LLMatcher(trie, source.lark, log_level=0, limits=LLParserLimits(**limits))

            inner = make()
            problems = [inner.get_error()] if inner.is_error() else inner.get_grammar_warnings()
            if problems:
                raise ValueError(sentence(problems[0]))
            # In the engines' loop, where one may be wanted anew, there is time for plain ones only.
            matcher = Matcher(make if source.plain else inner.deep_copy, self._vocab_size, ends)
            if matcher.error is not None:
                raise ValueError(matcher.error if matcher.error != DEAD_END else f"it allows no text: {DEAD_END}")
        except ValueError as error:
            said = str(error)
            raise ValueError(f"{name}: {said if len(said) <= MAX_SAID else said[:MAX_SAID] + ' …'}") from None
        return matcher

    def _try(self, lark: str, limits: dict[str, Any]) -> None:
        digest = sha256(lark.encode()).digest()
        with self._lock:
            known = digest in self._tried
        if not known:
            with self._places:
                attempt(lark, limits)
        with self._lock:
            self._tried[digest] = None
            self._tried.move_to_end(digest)
            if len(self._tried) > MAX_TRIED:
                self._tried.popitem(last=False)

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._trie is None:
                try:
                    import llguidance
                except ImportError as error:
                    raise ValueError("it needs the package llguidance; pip install llguidance") from error
                self._trie = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Words(self)))
            return self._trie

    def spellings(self) -> list[bytes]:
        """What each token adds to a text; nothing for those that no text holds."""
        size = min(self._vocab_size, self._tokenizer.vocab_size)
        spelt = [b"" if token in self._never else self._tokenizer.spell(token) for token in range(size)]
        return spelt + [b""] * (self._vocab_size - size)


class _Words:
    """A vocabulary as llguidance reads it: with an end token of its own, which no model has."""

    bos_token_id = None

    def __init__(self, grammars: Grammars) -> None:
        spelt = grammars.spellings()
        self.tokens = [*spelt, b"<end>"]
        self.eos_token_id = len(spelt)
        self.special_token_ids = [len(spelt)]

    def __call__(self, text: str | bytes) -> list[int]:
        """Never asked for: which tokens spell a text is left to the model."""
        return []
