"""How a vocabulary spells bytes: the decoder of a tokenizer as a function of one token.

The library's decoders work on whole lists of tokens; for text that comes token by token they would have to run again
and again. Both kinds that decoders of language models come in, byte-level and SentencePiece, are local: a text's bytes
are its tokens' bytes in a row.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer as Backend


class Spelling:
    """``bytes`` of a token's text; ``strips``: a text loses one space at its start."""

    def __init__(self, backend: Backend):
        self.strips = False
        self._alphabet: dict[str, int] = {}
        self._fallback = False
        self._replace: list[tuple[str, str]] = []
        decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
        for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
            match step:
                case {"type": "ByteLevel"}:
                    self._alphabet = byte_alphabet()
                case {"type": "ByteFallback"}:
                    self._fallback = True
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    self._replace.append((old, new))
                case {"type": "Metaspace", "replacement": old}:
                    self._replace.append((old, " "))
                    self.strips = step.get("prepend_scheme", "always") != "never"
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                    self.strips = True
                case {"type": "Fuse"}:
                    pass
                case _:
                    raise ValueError(
                        f"the tokenizer's decoder has a step {step}, which is not supported; byte-level and "
                        "SentencePiece vocabularies are"
                    )

    def bytes(self, token: str) -> bytes:
        """The bytes for which a token's text stands."""
        for old, new in self._replace:
            token = token.replace(old, new)
        if self._fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        if self._alphabet and all(char in self._alphabet for char in token):
            return bytes([self._alphabet[char] for char in token])
        return token.encode()


def byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable Latin-1 stands for itself, the rest for U+0100 onwards in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(rest)}
