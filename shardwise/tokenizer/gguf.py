"""The tokenizer that a GGUF file's metadata describes, built as a ``tokenizers`` pipeline.

Knows the ``tokenizer.*`` keys and llama.cpp's meaning of them (src/llama-vocab.cpp), and no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

END_OF_TURN = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "<|END_OF_TURN_TOKEN|>"}
)
"""Control tokens that end a turn, whether or not the file's keys name them."""

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Split(NamedTuple):
    """How byte-level text is cut before merging: expressions, each applied to the pieces of the one before."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token is that token, whatever the merges say."""
    add_bos: bool = False
    """Where the file does not say."""


_GPT2 = Split((_WORDS,))
_DIGITS = Split((r"\p{N}", _WORDS))
_LLAMA3 = Split((_CASELESS.replace("DIGITS", r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = Split((_CASELESS.replace("DIGITS", r"\p{N}"),))
SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Split(_LLAMA3.expressions)),
    "bloom": Split((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "tekken": Split((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}
"""By ``tokenizer.ggml.pre``."""


def describe(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``Tokenizer``. Raises ValueError naming the key that is missing, malformed or not supported."""
    model = _get(metadata, "model", str, "")
    tokens = _list(metadata, "tokens", str)
    kinds = _list(metadata, "token_type", int, [NORMAL] * len(tokens))
    if not tokens or len(kinds) != len(tokens):
        raise ValueError(f"GGUF metadata: {len(tokens)} tokenizer.ggml.tokens with {len(kinds)} token_type")
    if model == "gpt2":
        backend, add_bos = _byte_level(metadata, tokens)
        defaults: dict[str, int] = {}
    elif model == "llama":
        backend, add_bos = _sentence_piece(metadata, tokens, kinds), True
        defaults = {"bos": 1, "eos": 2, "unknown": 0}
    else:
        raise ValueError(f"GGUF metadata: tokenizer.ggml.model {model!r} is not supported; gpt2 and llama are")
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    ids = {}
    for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        number = _get(metadata, f"{name}_token_id", int, defaults.get(name, -1))
        if 0 <= number < len(tokens):  # files write 2**32 - 1 for none
            ids[name] = number
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError("GGUF metadata: tokenizer.chat_template is no text")
    called = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ends = {ids[name] for name in ("eos", "eot", "eom") if name in ids}
    ends |= {at for at, kind in enumerate(kinds) if kind == CONTROL and tokens[at] in END_OF_TURN}
    return {
        "backend": backend,
        "prefix": [ids["bos"]] if _get(metadata, "add_bos_token", bool, add_bos) and "bos" in ids else [],
        "suffix": [ids["eos"]] if _get(metadata, "add_eos_token", bool, False) and "eos" in ids else [],
        "named": {called[name]: tokens[number] for name, number in ids.items() if name in called},
        "eos": sorted(ends),
        "template": template,
    }


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Backend, bool]:
    pre = _get(metadata, "pre", str, "default")
    if pre not in SPLITS:
        raise ValueError(f"GGUF metadata: tokenizer.ggml.pre {pre!r} is not one of {', '.join(SPLITS)}")
    split = SPLITS[pre]
    try:
        merges = [(left, right) for left, right in (merge.split(" ") for merge in _list(metadata, "merges", str))]
    except ValueError:
        raise ValueError("GGUF metadata: tokenizer.ggml.merges must be pairs of tokens") from None
    backend = _bpe(tokens, merges, ignore_merges=split.ignore_merges)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(expression), "isolated") for expression in split.expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _sentence_piece(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> Backend:
    """SentencePiece's BPE: of all neighbours that make a token, those of the best score join first."""
    scores = _list(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise ValueError(f"GGUF metadata: {len(tokens)} tokenizer.ggml.tokens with {len(scores)} scores")
    unknown = _get(metadata, "unknown_token_id", int, 0)
    if not 0 <= unknown < len(tokens):
        raise ValueError(f"GGUF metadata: tokenizer.ggml.unknown_token_id {unknown} is outside the vocabulary")
    normal = {token: at for at, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == NORMAL}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(normal, key=lambda token: -scores[normal[token]])
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    backend = _bpe(tokens, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    prefixed = _get(metadata, "add_space_prefix", bool, True)
    prepend, strip = ([normalizers.Prepend("▁")], [decoders.Strip(" ", 1, 0)]) if prefixed else ([], [])
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _bpe(tokens: Sequence[str], merges: Sequence[tuple[str, str]], **settings: Any) -> Backend:
    vocabulary = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))  # of duplicates the first
    try:
        return Backend(BPE(vocabulary, merges, **settings))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"GGUF metadata: tokens and merges make no vocabulary: {error}") from error


def _get(metadata: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if type(value) is not kind:
        raise ValueError(f"GGUF metadata: tokenizer.ggml.{name} is no {kind.__name__}")
    return value


def _list(metadata: Mapping[str, Any], name: str, kind: type, default: Any = ()) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(values, Sequence) or isinstance(values, str) or not set(map(type, values)) <= {kind}:
        raise ValueError(f"GGUF metadata: tokenizer.ggml.{name} is no list of {kind.__name__}")
    return list(values)
