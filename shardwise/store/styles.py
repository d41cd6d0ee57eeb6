"""The shipped handlers, which are settings and not code: what a body asks for, and what its answer begins with.

TorchServe's examples in what a client sees, without their faults: max_new_tokens counts new tokens, a batch is many
requests, no field is ignored. Knows bodies and sampling; nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from shardwise.params import SamplingParams
from shardwise.store.manifest import load
from shardwise.store.settings import HandlerKeys

MAX_PROMPTS = 64
"""Most prompts of one body, unless the server says otherwise."""
OURS = {item.name for item in fields(SamplingParams)} - {"n", "echo", "max_tokens"}
"""Fields of SamplingParams that a request may have under that name."""
REQUEST = sorted(
    OURS | {"prompt", "messages", "max_new_tokens", "max_tokens", "do_sample", "return_full_text", "stream"}
)
TEXT = "send it as text/plain if it is the prompt itself"


class Kind(NamedTuple):
    """What sets a shipped handler apart from the others."""

    full_text: bool
    """Does an answer begin with the prompt?"""
    generation_config: bool
    """Do the model's own defaults hold? (They do where theirs called transformers' generate.)"""
    stream: bool = False
    max_new_tokens: int = 128


KINDS = {
    "gpt_fast": Kind(full_text=False, generation_config=False, stream=True, max_new_tokens=50),
    "tp_llama": Kind(full_text=False, generation_config=False),
    "pippy": Kind(full_text=True, generation_config=True),
    "deepspeed": Kind(full_text=True, generation_config=True),
    "accelerate": Kind(full_text=True, generation_config=True),
}


class Asked(NamedTuple):
    """One text to generate: after a prompt, or as the answer to messages."""

    prompt: str | None
    messages: list[dict[str, Any]] | None
    params: SamplingParams
    opening: str
    """What the answer begins with, before all that is generated."""


class Call(NamedTuple):
    """What one body asks for."""

    asked: tuple[Asked, ...]
    many: bool
    """Was it a list? Then so is the answer."""
    stream: bool


@dataclass(frozen=True)
class Style:
    """A shipped handler with a model's own settings."""

    name: str
    keys: HandlerKeys = field(default_factory=HandlerKeys)

    def __post_init__(self) -> None:
        if self.name not in KINDS:
            raise ValueError(f"style must be one of {', '.join(KINDS)}, not {self.name!r}")
        self._params({}, {})

    @property
    def stream(self) -> bool:
        """Are answers sent in pieces, unless a request says otherwise?"""
        return KINDS[self.name].stream if self.keys.stream is None else self.keys.stream

    @property
    def profile(self) -> bool:
        """Is the time of each request measured for the metrics ts_handler_preprocess and ts_handler_inference?"""
        return self.keys.profile

    @property
    def max_prompt(self) -> int | None:
        """Most tokens of a prompt."""
        return self.keys.max_length

    def check_prompt(self, num_tokens: int) -> None:
        """Raise ValueError for a prompt of more tokens than max_length; it is never cut silently."""
        if self.max_prompt is not None and num_tokens > self.max_prompt:
            raise ValueError(
                f"the prompt has {num_tokens} tokens, more than the {self.max_prompt} of handler.max_length: shorten it"
            )

    def check_tokens(self, num_tokens: int, name: str = "max_tokens") -> None:
        """Raise ValueError for more new tokens than max_new_tokens; ``name`` is the field that asks for them."""
        most = self.keys.max_new_tokens
        if most is not None and num_tokens > most:
            raise ValueError(f"{name} {num_tokens} is more than the {most} of handler.max_new_tokens: ask for less")

    def defaults(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The handler's fields over the model's ``own``, in the names of SamplingParams: for what a request leaves
        open."""
        keys = self.keys
        said: dict[str, Any] = {
            "max_new_tokens": keys.max_new_tokens,
            "seed": keys.manual_seed,
            "do_sample": keys.do_sample,
        }
        said |= {"temperature": keys.temperature, "top_p": keys.top_p, "top_k": keys.top_k}
        return _merge(own, {name: value for name, value in said.items() if value is not None})

    def read(
        self,
        body: bytes,
        content_type: str = "",
        defaults: Mapping[str, Any] | None = None,
        max_prompts: int = MAX_PROMPTS,
    ) -> Call:
        """What a body asks for: a JSON object or list, or text, which is the prompt itself.

        ``defaults`` are the model's own. Raises ValueError, naming the field, for what can't be honoured.
        """
        value = _unwrapped(_value(body, content_type))
        own = (defaults or {}) if KINDS[self.name].generation_config else {}
        dialog = isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value) and value
        many = isinstance(value, list) and not dialog
        items = [_unwrapped(item) for item in value] if many else [value]
        if not 1 <= len(items) <= max_prompts:
            raise ValueError(f"a list must hold 1 to {max_prompts} prompts, not {len(items)}")
        requests = [self._request(item) for item in items]
        streams = {bool(each.pop("stream")) for each in requests if "stream" in each}
        if len(streams) > 1 or (many and True in streams):
            raise ValueError("stream can't be true for a list of prompts: its answer is one JSON list")
        stream = not many and (streams.pop() if streams else self.stream)
        asked = []
        for at, request in enumerate(requests):
            try:
                asked.append(self._asked(request, own))
            except ValueError as error:
                raise ValueError(f"prompt {at}: {error}" if many else str(error)) from None
        return Call(tuple(asked), many, stream)

    def _request(self, item: Any) -> dict[str, Any]:
        """The fields of one item."""
        if isinstance(item, str):
            chat = self.keys.mode == "chat"
            return {"messages": [{"role": "user", "content": item}]} if chat else {"prompt": item}
        if isinstance(item, list):
            return {"messages": item}
        if not isinstance(item, dict):
            raise ValueError("the body must be a JSON object with a prompt, a list of such, or text")
        for name in item:
            if name not in REQUEST:
                raise ValueError(f"unknown field {name!r}; known: {', '.join(REQUEST)}")
        for name in ("stream", "do_sample", "return_full_text"):
            if name in item and not isinstance(item[name], bool):
                raise ValueError(f"{name} must be true or false, not {item[name]!r}")
        return dict(item)

    def _asked(self, request: dict[str, Any], own: Mapping[str, Any]) -> Asked:
        prompt, messages = request.pop("prompt", None), request.pop("messages", None)
        if (prompt is None) == (messages is None):
            raise ValueError("a request needs either prompt or messages")
        if prompt is not None and not isinstance(prompt, str):
            raise ValueError(f"prompt must be a text, not {prompt!r}")
        if prompt is not None and self.keys.mode == "chat":
            prompt, messages = None, [{"role": "user", "content": prompt}]
        if messages is not None and not _is_dialog(messages):
            raise ValueError("messages must be a list of objects with role and content")
        full = request.pop("return_full_text", self.keys.return_full_text)
        full = KINDS[self.name].full_text if full is None else full
        return Asked(prompt, messages, self._params(request, own), prompt if full and prompt is not None else "")

    def _params(self, request: Mapping[str, Any], own: Mapping[str, Any]) -> SamplingParams:
        """A request's fields over the handler's over the model's own."""
        merged = _merge(self.defaults({"max_tokens": KINDS[self.name].max_new_tokens} | dict(own)), request)
        if isinstance(merged["max_tokens"], int):
            self.check_tokens(merged["max_tokens"], "max_new_tokens")
        return SamplingParams(**merged)


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling fields with others over them, in the names of SamplingParams."""
    found, over = dict(under), dict(over)
    if "max_new_tokens" in over:
        if "max_tokens" in over:
            raise ValueError("max_new_tokens and max_tokens say the same thing: leave out one")
        over["max_tokens"] = over.pop("max_new_tokens")
    sample = over.pop("do_sample", None)
    if sample is False:
        if given := [name for name in ("temperature", "top_p", "top_k", "min_p") if over.get(name)]:
            raise ValueError(f"do_sample false is greedy decoding: leave out {given[0]}")
        over["temperature"] = 0.0
    elif sample:
        over.setdefault("temperature", found.get("temperature") or 1.0)
    found |= over
    if not found.get("temperature") and (given := [name for name in ("top_p", "top_k") if over.get(name)]):
        raise ValueError(f"{given[0]} needs do_sample true or a temperature above 0: greedy decoding doesn't use it")
    return found


def _value(body: bytes, content_type: str) -> Any:
    """A body as JSON or, where it isn't, as text."""
    kind = content_type.partition(";")[0].strip().lower()
    looks = body.lstrip()[:1] in (b"{", b"[", b'"')
    if kind == "application/json" or (looks and not kind.startswith("text/")):
        try:
            return load(body)
        except ValueError as error:
            raise ValueError(f"the body {error}; {TEXT}") from None
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise ValueError("the body is neither JSON nor text in UTF-8") from None


def _unwrapped(value: Any) -> Any:
    """A value without what TorchServe would wrap it in."""
    if isinstance(value, dict) and len(value) == 1 and (inner := value.get("data", value.get("body"))) is not None:
        return _value(inner.encode(), "") if isinstance(inner, str) else inner
    return value


def _is_dialog(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(item, dict) and isinstance(item.get("role"), str) and "content" in item for item in messages)
    )


def choose(handler: str | None, named: str | None, sections: Iterable[str], keys: Mapping[str, Any]) -> str:
    """Which shipped handler a folder means, by its own word or by the keys that are there.

    ``handler`` is the manifest's, ``named`` is handler.style, ``sections`` and ``keys`` are those of the yaml.
    """
    if named is not None or handler in KINDS:
        return named or str(handler)
    if "converted_ckpt_dir" in keys:
        return "tp_llama" if {"mode", "tokenizer_path", "model_args_path"} & set(keys) else "gpt_fast"
    return next((name for name in ("pippy", "deepspeed") if name in sections), "accelerate")
