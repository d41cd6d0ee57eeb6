"""One model's tokenizer: encoding, decoding and chat, from a Hugging Face directory or GGUF metadata.

Knows no request and no model; which ids end a request is for others to combine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from shardwise.tokenizer.spelling import Spelling

if TYPE_CHECKING:
    from shardwise.tokenizer.template import Template

MAX_JSON_BYTES = 100 * 2**20


class Tokenizer:
    """Never changed once it is made, so that any number of threads may use it at once."""

    def __init__(
        self,
        backend: Backend,
        *,
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        named: Mapping[str, str] | None = None,
        eos: Sequence[int] = (),
        template: str | None = None,
    ):
        """Wrap ``backend``. Its post-processor goes unused: ``prefix`` and ``suffix`` are the ids it would add.

        ``named`` are the texts of ``bos_token``, ``eos_token`` and so on, for templates too; the id of ``eos_token``
        joins ``eos``.
        """
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._spelling = Spelling(backend)
        self._bytes: dict[int, bytes] = {}
        self._prefix = list(prefix)
        self._suffix = list(suffix)
        self._named = dict(named or {})
        self._source = template
        self.vocab_size: int = max([backend.get_vocab_size() - 1, *added]) + 1
        """One above the highest token id."""
        self.special = frozenset(number for number, token in added.items() if token.special)
        """Ids that decoding skips by default."""
        ids = {name: backend.token_to_id(text) for name, text in self._named.items()}
        self.control = self.special - {ids.get("unk_token")}
        """Special tokens that tell the model something; the one for unknown letters is part of any text."""
        self.bos: int | None = ids.get("bos_token")
        end: int | None = ids.get("eos_token")
        self.eos = frozenset(eos if end is None else [*eos, end])
        """Ids after which the model has finished."""

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json and the files beside it; without one, have transformers convert what there is.

        Raises ValueError naming the file and the remedy. No code of the directory is run.
        """
        directory = Path(path)
        config = _read_json(directory / "tokenizer_config.json")
        names = {**_read_json(directory / "special_tokens_map.json"), **config}
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in names.items()}
        named = {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}
        file = directory / "tokenizer.json"
        backend = _open_backend(file) if file.exists() else _convert(directory)
        _add_missing(backend, directory, config, named)
        bare = backend.encode("a", add_special_tokens=False).ids
        full = backend.encode("a").ids
        start = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
        prefix, suffix = full[:start], full[start + len(bare) :]
        return cls(backend, prefix=prefix, suffix=suffix, named=named, template=_find_template(directory, config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build what the ``tokenizer.*`` keys of a GGUF file describe. Raises ValueError naming the key."""
        from shardwise.tokenizer.gguf import describe

        return cls(**describe(metadata))

    def encode(self, text: str, add_special_tokens: bool = True, *, plain: bool = False) -> list[int]:
        """Token ids of ``text``; special tokens spelled out in it are recognised, or are text if ``plain``.

        With ``add_special_tokens`` it is put between the tokens that the tokenizer adds, see ``wrap``. Raises
        ValueError for text that is not valid Unicode, and for special tokens that can't be text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text holds half a surrogate pair at character {error.start}; remove it") from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if plain and not self.special.isdisjoint(ids):
            ids = self._plain.encode(text, add_special_tokens=False).ids
            for number in self.control.intersection(ids):  # such as of Unigram vocabularies
                spelt = self.spell(number).decode(errors="replace")
                raise ValueError(f"the prompt holds {spelt!r}, which this tokenizer has no other token for; remove it")
        return self.wrap(ids) if add_special_tokens else ids

    def wrap(self, ids: list[int]) -> list[int]:
        """A prompt of these tokens, between those that the tokenizer adds: never empty, if need be the first of a text.

        Raises ValueError where there is no such token.
        """
        ids = [*self._prefix, *ids, *self._suffix]
        if ids:
            return ids
        if self.bos is None:
            raise ValueError("the prompt is empty and this model has no beginning-of-text token; give some text")
        return [self.bos]

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Finds special tokens that are spelled out in a text; None if there are none."""
        from shardwise.tokenizer.quoting import any_of

        added = self._backend.get_added_tokens_decoder()
        texts = {added[token].content for token in self.special}
        texts |= {self.spell(token).decode(errors="replace") for token in self.special}
        return any_of(texts - {""}) if texts - {""} else None

    @cached_property
    def _plain(self) -> Backend:
        """A second one that splits no special tokens off; rarely needed, and that setting is not for shared ones."""
        backend = Backend.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """``ids`` as a whole text, without the space that a SentencePiece vocabulary sets before its first word.

        Bytes that form no character become U+FFFD; ids outside the vocabulary add nothing.
        """
        text = self.continuation(ids, skip_special_tokens)
        return text[1:] if self._spelling.strips and text.startswith(" ") else text

    def continuation(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """What ``ids`` add to a text that they go on from; otherwise as ``decode``."""
        skip = self.special if skip_special_tokens else ()
        return b"".join([self.spell(number) for number in ids if number not in skip]).decode(errors="replace")

    def spell(self, number: int) -> bytes:
        """What one token adds to the bytes of a text."""
        found = self._bytes.get(number)
        if found is None:
            token = self._backend.id_to_token(number)
            found = self._bytes[number] = b"" if token is None else self._spelling.bytes(token)
        return found

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template: str | None = None,
        **values: Any,
    ) -> str:
        """Render messages (``role``, ``content``) with the model's template or another; ``values`` are its variables.

        Raises ValueError if there is none, and with the template's own message if it refuses.
        """
        chosen = self._template if template is None else _compile(template)
        return chosen.render(messages, **{**self._named, **values}, add_generation_prompt=add_generation_prompt)

    def template_reads(self, variable: str) -> bool:
        """Does the model's chat template make anything of a variable? Raises ValueError if there is none."""
        return variable in self._template.variables

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a rendered chat. Its template writes all special tokens: those in messages are text."""
        from shardwise.tokenizer.quoting import encode_chat

        return encode_chat(self, messages, add_generation_prompt=add_generation_prompt)[1]

    @cached_property
    def _template(self) -> Template:
        if self._source is None:
            raise ValueError("this model has no chat template; give a plain prompt instead")
        return _compile(self._source)


def _compile(source: str) -> Template:
    from shardwise.tokenizer.template import Template  # jinja2 is no small import, and completions need none

    return Template(source)


def _open_backend(file: Path) -> Backend:
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"larger than {MAX_JSON_BYTES} bytes")
        return Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{file}: no tokenizer that can be used: {error}") from error


def _convert(directory: Path) -> Backend:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(f"{directory} has no tokenizer.json; add it, or pip install transformers") from error
    try:
        slow = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
        return slow.backend_tokenizer
    except Exception as error:  # whatever conversion stumbles on
        raise ValueError(f"{directory} has no tokenizer.json, and transformers can't make one: {error}") from error


def _add_missing(backend: Backend, directory: Path, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Declare the tokens that only tokenizer_config.json knows of, as transformers does."""
    known = backend.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder", {})
    for number in sorted(int(key) for key in listed):
        token = listed[str(number)]
        if number not in known:
            traits = {name: token[name] for name in ("lstrip", "rstrip", "normalized", "single_word") if name in token}
            backend.add_tokens([AddedToken(token["content"], special=token.get("special", False), **traits)])
            if backend.token_to_id(token["content"]) != number:
                raise ValueError(
                    f"{directory}: tokenizer_config.json gives {token['content']!r} the id {number}, tokenizer.json "
                    f"{backend.token_to_id(token['content'])}; the two files are not of one model"
                )
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [text for text in named.values() if text not in added and backend.token_to_id(text) is not None]
    backend.add_special_tokens(missing)


def _find_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, else tokenizer_config.json's, which may be a list of named ones."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return _read_text(file)
    found = _read_json(directory / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found


def _read_text(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"larger than {MAX_JSON_BYTES} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: can't be read: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        values = json.loads(_read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file}: not a JSON object")
    return values
