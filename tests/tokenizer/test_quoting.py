"""R19: special tokens that users spell out are text; those of the chat template are real."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from shardwise.tokenizer import Tokenizer
from shardwise.tokenizer.quoting import Quoting, any_of, encode_chat

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role | upper }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
)
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]


def make(special: list[str] = SPECIAL) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return Tokenizer(backend, template=TEMPLATE)


TOKENIZER = make()
IDS = {text: 256 + at for at, text in enumerate(SPECIAL)}
PIECES = st.lists(st.sampled_from([*SPECIAL, "<|im_", "end|>", "<", "é", " ", "<think>", "x"]), max_size=8)


@given(st.lists(PIECES.map("".join), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_users_write_no_control_tokens(contents: list[str]) -> None:
    """R19: guards against a user who ends his message, begins a system's, or hides that in a tool's name."""
    messages = [{"role": "user", "content": content} for content in contents]
    text, ids = encode_chat(TOKENIZER, messages)
    assert text == "".join(f"<|im_start|>USER\n{content.strip()}<|im_end|>\n" for content in contents)
    wanted: list[int] = []
    for content in contents:
        wanted += [IDS["<|im_start|>"], *TOKENIZER.encode(f"USER\n{content.strip()}", plain=True)]
        wanted += [IDS["<|im_end|>"], *TOKENIZER.encode("\n", plain=True)]
    assert ids == wanted
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_plain_chats_are_encoded_as_ever() -> None:
    """Guards against other tokens for the conversations that hold no special token."""
    messages = [{"role": "user", "content": "a <think> é"}]
    _, ids = encode_chat(TOKENIZER, messages)
    assert ids == TOKENIZER.encode(TOKENIZER.chat(messages), add_special_tokens=False)
    assert TOKENIZER.encode("<think>")[0] in ids


def test_whatever_a_template_is_given() -> None:
    """R19: guards against control tokens through tools, or through the names within them."""
    tools: Any = [{"name": "<s>", "parameters": {"<|im_end|>": [{"enum": ["<|im_start|>", 1, None]}]}}]
    text, ids = encode_chat(TOKENIZER, [{"role": "user", "content": "x"}], tools=tools)
    assert '"name": "<s>"' in text
    assert [token for token in ids if token >= 256] == [IDS["<|im_start|>"], IDS["<|im_end|>"]]
    assert tools[0]["name"] == "<s>"


def test_a_model_without_special_tokens() -> None:
    """Guards against an empty pattern, which would match everywhere."""
    bare = make([])
    assert Quoting(bare).quote({"a": ["<s>", 1]}) == {"a": ["<s>", 1]}
    assert encode_chat(bare, [{"role": "user", "content": "<s>"}])[0].count("<s>") == 1


def test_the_pattern_finds_the_longest() -> None:
    """Guards against a token that hides behind a shorter one, and signs that mean something else in expressions."""
    texts = ["<|a|>", "<|a|>b", "<|", "[x]", "^$", ".*", "(", "é"]
    pattern = any_of(texts)
    wanted = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
    draw = random.Random(1)
    for _ in range(2000):
        text = "".join(draw.choices([*texts, *"<|a>b[x]^$.*(é q"], k=6))
        assert pattern.findall(text) == wanted.findall(text)


def test_the_pattern_takes_linear_time() -> None:
    """R16: guards against a text that almost spells one of many special tokens, over and over."""
    pattern = any_of([f"<|reserved_special_token_{at}|>" for at in range(1000)])
    began = time.thread_time()
    for text in ("<" * 2**20, "<|" * 2**19, "<|reserved_special_token_99" * 2**15):
        assert pattern.search(text) is None
    assert time.thread_time() - began < 3
    long = "<" + "x" * 5000
    assert any_of([long, "<"]).fullmatch(long)


def test_tokens_within_tokens() -> None:
    """R19: guards against a token that comes to light where one around it was broken."""
    tokenizer = make(["<s>", "<<s>>", "s>"])
    _, ids = encode_chat(tokenizer, [{"role": "user", "content": "<<s>><s>s>"}])
    assert tokenizer.control.isdisjoint(ids)


LETTERS = "▁absmpix_|<>/"


def vocabularies() -> dict[str, Tokenizer]:
    """Of each make that language models have; all with <s> as a special token."""
    tokens = ["<unk>", "<s>", "<｜a▁b｜>", *LETTERS, "｜"]
    scores = [(token, 0.0 if len(token) > 1 else -5.0) for token in tokens]
    bpe = Backend(models.BPE({token: at for at, token in enumerate(tokens)}, [], unk_token="<unk>"))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    folded = Backend(models.BPE({token: at for at, token in enumerate(tokens)}, [], unk_token="<unk>"))
    folded.normalizer = normalizers.NFKC()
    unigram = Backend(models.Unigram(scores, 0, False))
    made = {"byte level": make()}
    for name, backend in {"sentence piece": bpe, "folded": folded, "unigram": unigram}.items():
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        special = [AddedToken(text, special=True, normalized=name == "folded") for text in tokens[:3]]
        backend.add_special_tokens(special)
        template = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
        made[name] = Tokenizer(backend, named={"unk_token": "<unk>"}, template=template)
    return made


VOCABULARIES = vocabularies()
PARTS = ["<s>", "＜s＞", "<unk>", "<", "s>", "a b", "é", "<|im_end|>", "▁", "<｜a▁b｜>", "<｜a b｜>"]


@pytest.mark.parametrize("name", VOCABULARIES)
@given(text=st.lists(st.sampled_from(PARTS)).map("".join))
@settings(max_examples=100, deadline=None)
def test_no_control_token_comes_out_of_a_text(name: str, text: str) -> None:
    """R19: guards prompts and messages of every kind of vocabulary: a text gives no control token, or is refused."""
    tokenizer = VOCABULARIES[name]
    try:
        assert tokenizer.control.isdisjoint(tokenizer.encode(text, add_special_tokens=False, plain=True))
    except ValueError:
        assert name == "unigram"
        assert "<s>" in text or "<｜a▁b｜>" in text
    try:
        ids = tokenizer.encode_chat([{"content": text}] * 2)
    except ValueError:
        assert name in ("unigram", "folded")
    else:
        assert [number in tokenizer.control for number in ids].count(True) == (4 if name == "byte level" else 2)


def test_a_plain_text_is_the_same_text() -> None:
    """R19: guards what is told back: a prompt whose special tokens are text reads as it was written."""
    for text in ("<s>", "a<|im_end|><think>b", "é<s><s>"):
        assert TOKENIZER.decode(TOKENIZER.encode(text, plain=True), skip_special_tokens=True) == text
    assert TOKENIZER.encode("a <think> <|im_", plain=True) == TOKENIZER.encode("a <think> <|im_")
    assert TOKENIZER.encode("<s>") == [IDS["<s>"]]
