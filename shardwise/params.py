"""What one request may ask for, checked when it is said.

Knows nothing of models, processes or tensors; anyone may import it. What depends on the model (its vocabulary, its
context) is checked where the request is added.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

MAX_SEED = 2**63 - 1
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_TEXT = 1000
"""Characters of a stop string or a bad word."""
MAX_LOGPROBS = 20
MAX_N = 128
LEAST_PENALTY = 0.01
"""Of the repetition penalty: far below it, dividing by it would make infinities of logits."""
GRAMMARS = ("json_schema", "regex", "ebnf", "choice", "json_object")
"""The fields that constrain the text; at most one of them may be set."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens, what it reports of them, and what its text must be.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off; they apply in that order, after the
    temperature. ``seed`` None draws a fresh one, so that two requests differ. ``max_tokens`` counts generated tokens;
    0 generates none, for the log-probabilities of a prompt.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    """Independent continuations. Number 0 has the tokens that the request has alone; each has a seed of its own."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """No end token before so many tokens. (Stop strings still end the text.)"""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that was generated before; the prompt does not count."""
    frequency_penalty: float = 0.0
    """As ``presence_penalty``, once for every time that the token was generated."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of the tokens of the prompt and the generated ones."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """Token id → what to add to its logit, -100 to 100; kept as pairs in ascending order of ids."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may be generated (name the end token too, where it may end); None allows all."""
    bad_words: tuple[str, ...] = ()
    """Texts that must not be generated, as the tokenizer writes them: first, after a space and after a line break."""
    logprobs: int | None = None
    """Report each generated token's log-probability, and those of so many likeliest tokens; of the raw model."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text; some formats of tool calls are written with them."""
    echo: bool = False
    """The text begins with the prompt."""
    json_schema: str | None = None
    """The text is JSON that this schema (an object, or its JSON) allows."""
    regex: str | None = None
    """The whole text matches this expression."""
    ebnf: str | None = None
    """The text is in the language of this grammar: llama.cpp's GBNF, or Lark."""
    choice: tuple[str, ...] = ()
    """The text is one of these."""
    json_object: bool = False
    """The text is a JSON object."""

    def __post_init__(self) -> None:
        _number(self, "max_tokens", 0, 2**31, whole=True)
        _number(self, "temperature", 0, 100)
        _number(self, "top_k", 0, 2**31, whole=True)
        _number(self, "top_p", 0, 1, above=True)
        _number(self, "min_p", 0, 1)
        _number(self, "n", 1, MAX_N, whole=True)
        _number(self, "min_tokens", 0, 2**31, whole=True)
        _number(self, "presence_penalty", -2, 2)
        _number(self, "frequency_penalty", -2, 2)
        _number(self, "repetition_penalty", LEAST_PENALTY, 10)
        for name, most in (("seed", MAX_SEED), ("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS)):
            if getattr(self, name) is not None:
                _number(self, name, 0, most, whole=True)
        for name in ("ignore_eos", "skip_special_tokens", "echo", "json_object"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        self._check_texts()
        self._check_ids()
        self._check_grammar()

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as it is kept."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    @property
    def grammar(self) -> str | None:
        """The name of the field that constrains the text, if one is set."""
        return next((name for name in GRAMMARS if getattr(self, name) not in (None, (), False)), None)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping of field names; raises ValueError naming an unknown field or a bad value."""
        known = {item.name for item in fields(cls)}
        for name in values:
            if name not in known:
                raise ValueError(f"unknown sampling field {name!r}; known: {', '.join(sorted(known))}")
        return cls(**values)

    def _check_texts(self) -> None:
        for name, most in (("stop", MAX_STOPS), ("bad_words", MAX_BIASES), ("choice", MAX_BIASES)):
            given = getattr(self, name)
            texts = (given,) if isinstance(given, str) else _items(name, given)
            object.__setattr__(self, name, texts)
            if len(texts) > most or not all(isinstance(text, str) and text for text in texts):
                raise ValueError(f"{name} must be at most {most} strings, none of them empty")
            for text in texts if name != "choice" else ():
                if len(text) > MAX_TEXT:
                    raise ValueError(f"{name} must be strings of at most {MAX_TEXT} characters, not one of {len(text)}")
                if re.search("[\ud800-\udfff]", text):
                    raise ValueError(f"{name}: {text!r} holds half a surrogate pair; remove it")

    def _check_ids(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            if getattr(self, name) is None and name == "allowed_token_ids":
                continue
            ids = _items(name, getattr(self, name))
            object.__setattr__(self, name, ids)
            for token in ids:
                if not _is_id(token):
                    raise ValueError(f"{name} must be token ids of at least 0, not {token!r}")
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids is empty: name at least one token, or leave it out to allow all")
        given = self.logit_bias
        pairs = given.items() if isinstance(given, Mapping) else _items("logit_bias", given)
        biases: dict[int, float] = {}
        for pair in pairs:
            token, bias = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
            if isinstance(token, str) and re.fullmatch("[0-9]{1,10}", token):  # JSON has no other keys
                token = int(token)
            if not _is_id(token):
                raise ValueError(f"logit_bias must map token ids of at least 0 to numbers; {pair!r} does not")
            if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
                raise ValueError(f"logit_bias of token {token} must be a number from -100 to 100, not {bias!r}")
            biases[token] = float(bias)
        if len(biases) > MAX_BIASES:
            raise ValueError(f"logit_bias may hold at most {MAX_BIASES} tokens, not {len(biases)}")
        object.__setattr__(self, "logit_bias", tuple(sorted(biases.items())))

    def _check_grammar(self) -> None:
        schema: Any = self.json_schema
        if isinstance(schema, Mapping | bool):
            try:
                object.__setattr__(self, "json_schema", json.dumps(schema))
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"json_schema can't be written as JSON: {error}") from None
        for name in ("json_schema", "regex", "ebnf"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name} must be a text that is not empty, not {value!r}")
        named = [name for name in GRAMMARS if getattr(self, name) not in (None, (), False)]
        if len(named) > 1:
            raise ValueError(f"only one of {', '.join(GRAMMARS)} may be set, not {' and '.join(named)}")


def _items(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list, not {value!r}")
    return tuple(value)


def _is_id(token: Any) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31


def _number(owner: Any, name: str, low: float, high: float, *, whole: bool = False, above: bool = False) -> None:
    """Check that a field is a number within [low, high], or (low, high] with ``above``."""
    value = getattr(owner, name)
    kind = "a whole number" if whole else "a number"
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not fits or not (low < value if above else low <= value) or not value <= high:  # NaN is no number of any range
        bound = f"above {low}" if above else f"of at least {low}"
        raise ValueError(f"{name} must be {kind} {bound} and at most {high}, not {value!r}")
