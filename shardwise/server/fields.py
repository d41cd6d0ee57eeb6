"""The fields that requests of several routes share: their names and types, and the SamplingParams that they ask for.

A field that isn't declared is refused. Ranges are SamplingParams' own business; knows nothing of prompts and answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, WrapValidator
from pydantic_core import PydanticCustomError

from shardwise.params import SamplingParams
from shardwise.server.deps import Deps
from shardwise.server.errors import ApiError

TEMPERATURE = 1.0
"""OpenAI's default, where neither the request nor the model's generation_config.json says anything."""
PLAIN = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("prompt_logprobs", "skip_special_tokens"),
)
"""Fields that have the same name and meaning in SamplingParams."""
KNOWN = frozenset(field.name for field in fields(SamplingParams))


def one_of(kinds: str) -> WrapValidator:
    """For a field of several types: one sentence about the field, instead of an error for each type and each item.

    Where what is wrong is a field of an object within it, that one is named.
    """

    def check(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError as error:
            found = max(error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"]))
            where = found["loc"][1:]  # without the type that it was tried as
            if any(isinstance(part, str) for part in where):
                told = PydanticCustomError(found["type"], found["msg"])
                raise ValidationError.from_exception_data("", [{"type": told, "loc": where, "input": None}]) from None
            raise PydanticCustomError("kinds", "Input should be {kinds}", {"kinds": kinds}) from None

    return WrapValidator(check)


def only(value: bool) -> tuple[AfterValidator, WithJsonSchema]:
    """For a switch that has one position here."""

    def check(given: bool) -> bool:
        if given is not value:
            raise PydanticCustomError("only", "Input should be {value}", {"value": str(value).lower()})
        return given

    return AfterValidator(check), WithJsonSchema({"type": "boolean", "const": value})


No = Annotated[bool, only(False)[0], only(False)[1]]
Yes = Annotated[bool, only(True)[0], only(True)[1]]
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]
Schema = Annotated[dict[str, Any] | bool | str, one_of("a JSON schema, or its text")]


class Body(BaseModel):
    """A JSON object with the declared fields only, of exactly the declared types; null is as good as left out."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Fields(Body):
    """What every route that runs the model is told."""

    NAMES: ClassVar[dict[str, str]] = {}
    """Fields of SamplingParams, and "prompt", that are named otherwise in this route: theirs → ours."""

    model: str
    """One of the served names."""
    user: str | None = None
    """Accepted; nothing depends on it."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    """Of the requests of one API key the lowest goes first; 0 unless said otherwise."""

    @property
    def limit(self) -> int | None:
        """The most tokens that the request asks for, if it says so."""
        return None

    def constraints(self) -> Sequence[tuple[str, str, Any]]:
        """What constrains the text: the field of SamplingParams, the name it has here, the value."""
        return ()

    def refusal(self, error: ValueError) -> ApiError:
        """A 400 with the text of ``error``, and the field that it begins with, by the name that it has here."""
        text = str(error)
        named = self._named()
        word = re.match(r"\w*", text)[0]  # type: ignore[index]
        if word in KNOWN:
            name = named.get(word, word)
            return ApiError(400, name + text[len(word) :], param=name)
        return ApiError(400, text, param=named.get("prompt", "prompt") if re.match("(the|a) prompt", text) else None)

    def _named(self) -> dict[str, str]:
        return self.NAMES


class StreamOptions(Body):
    """How a stream is told."""

    include_usage: bool | None = None
    """End with an event that has no choices but the usage."""
    continuous_usage_stats: bool | None = None
    """Tell the usage so far with every event."""
    include_obfuscation: No | None = None


class JsonSchema(Body):
    """OpenAI's wrapping of a JSON schema."""

    name: str
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None
    """Accepted; the schema always holds."""


class ResponseFormat(Body):
    """OpenAI's way to constrain the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's way to constrain the text: exactly one of these."""

    json_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: Yes | None = None


class SamplingFields(Fields):
    """What may be asked of the tokens of an answer, by the names of OpenAI's API and of vLLM's extensions to it."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 are off."""
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: Annotated[str | Texts, one_of("a text or a list of texts")] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], one_of("an object of token ids and numbers")] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Texts | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    """Accepted; nothing is stored."""
    store: No | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    """Accepted; nothing depends on it."""
    prompt_cache_key: str | None = None
    """Accepted; equal prompts share their cache without it."""

    @property
    def limit(self) -> int | None:
        """The most tokens that the request asks for, if it says so."""
        return self.max_tokens

    def params(self, deps: Deps, *, max_tokens: int, **more: Any) -> SamplingParams:
        """What is asked for; ApiError 400 with the field's name for what can't be.

        ``max_tokens`` holds where neither the request nor the model's generation_config.json says how many; ``more``
        are fields that the route has by another name, None if it leaves them open. Call it before anything costly.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only for stream=true", param="stream_options")
        plain = {name: getattr(self, name) for name in PLAIN}
        if plain["top_k"] == -1:
            plain["top_k"] = 0
        constraints = self.constraints()
        if len(constraints) > 1:
            names = " and ".join(name for _, name, _ in constraints)
            raise ApiError(400, f"only one field may constrain the text, not {names}", param=constraints[1][1])
        asked = {**plain, "max_tokens": self.limit, **{field: value for field, _, value in constraints}, **more}
        defaults = {"temperature": TEMPERATURE, "max_tokens": max_tokens, **deps.defaults.fields}
        try:
            params = SamplingParams(
                **{**defaults, **{name: value for name, value in asked.items() if value is not None}}
            )
        except ValueError as error:
            raise self.refusal(error) from None
        self._check(params.n, deps.config.max_n, "n")
        self._check(params.logprobs, deps.config.max_logprobs, "logprobs")
        self._check(params.prompt_logprobs, deps.config.max_logprobs, "prompt_logprobs")
        return params

    def constraints(self) -> Sequence[tuple[str, str, Any]]:
        """What constrains the text: the field of SamplingParams, the name it has here, the value."""
        found = [
            ("json_schema", "guided_json", self.guided_json),
            ("regex", "guided_regex", self.guided_regex),
            ("choice", "guided_choice", self.guided_choice),
            ("ebnf", "guided_grammar", self.guided_grammar),
        ]
        outputs = self.structured_outputs
        if outputs is not None:
            inner = [
                ("json_schema", "structured_outputs.json", outputs.json_),
                ("regex", "structured_outputs.regex", outputs.regex),
                ("choice", "structured_outputs.choice", outputs.choice),
                ("ebnf", "structured_outputs.grammar", outputs.grammar),
                ("json_object", "structured_outputs.json_object", outputs.json_object),
            ]
            if all(value is None for _, _, value in inner):
                raise ApiError(400, "structured_outputs names no constraint", param="structured_outputs")
            found += inner
        if self.response_format is not None:
            found += constraints_of(self.response_format)
        return [each for each in found if each[2] is not None]

    def _named(self) -> dict[str, str]:
        return {**self.NAMES, **{field: name for field, name, _ in self.constraints()}}

    def _check(self, value: int | None, most: int, name: str) -> None:
        if value is not None and value > most:
            raise self.refusal(ValueError(f"{name} must be at most {most} on this server, not {value}"))


def constraints_of(asked: ResponseFormat) -> list[tuple[str, str, Any]]:
    """What a response_format says, as `SamplingFields.constraints` does. Raises ApiError if it is half said."""
    schema = asked.json_schema
    if (schema is not None) != (asked.type == "json_schema"):
        raise ApiError(
            400, "response_format.json_schema goes with the type json_schema only", param="response_format.json_schema"
        )
    if schema is not None and schema.schema_ is None:
        name = "response_format.json_schema.schema"
        raise ApiError(400, f"{name} is missing", param=name)
    if schema is not None:
        return [("json_schema", "response_format.json_schema.schema", schema.schema_)]
    return [("json_object", "response_format", True)] if asked.type == "json_object" else []
