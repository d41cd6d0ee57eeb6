"""One recipe: a YAML file and assignments in, the settings of `shardwise generate` out. Runs nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardwise.config import EngineConfig
from shardwise.params import SamplingParams
from shardwise.recipes.shipped import find
from shardwise.shapes import located, shape_of, values
from shardwise.strict_yaml import Section, override, read_file

ASSIGNMENT = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*=")

Message = dict[str, str]


@dataclass(frozen=True)
class Content:
    """What somebody says, in torchtune's form."""

    text: str


@dataclass(frozen=True)
class Roles:
    """A prompt by roles: what the system is told, if anything, and what the user says."""

    user: str | Content
    system: str | Content | None = None


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


SHAPE: dict[str, Any] = {
    "model": str,
    **shape_of(EngineConfig),
    "generation_config": bool,
    "sampling": {**shape_of(SamplingParams), "json_schema": str | dict[str, Any]},
    "prompt": str | Roles,
    "messages": list[Turn],
    "input": str,
    "output": str,
}
"""The keys of a recipe."""


@dataclass(frozen=True)
class Recipe:
    """What a recipe asks for, as the flags of `generate` would."""

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of EngineConfig."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams; rows and the model's defaults fill in the rest."""
    generation_config: bool = True
    prompts: tuple[str, ...] = ()
    before: tuple[Message, ...] | None = None
    """The messages before a prompt, which is a user's; None: prompts are texts to continue."""
    input: Path | None = None
    output: Path | None = None

    def opening(self, chat: bool | None) -> tuple[Message, ...] | None:
        """``before``, where ``chat`` says whether prompts are messages, and None that it is open.

        ValueError if messages that go before a prompt would be lost.
        """
        if chat is False and self.before:
            raise ValueError("--no-chat would leave out the recipe's messages before the prompt; leave out one of them")
        return self.before if chat is None else (self.before or ()) if chat else None


def open_recipe(name: str, arguments: Sequence[str] = ()) -> tuple[Recipe, list[str]]:
    """The recipe of a name or path with the assignments (``key=value``) among ``arguments``, and the other arguments.

    Raises ValueError, with the line and the nearest key or name, for whatever the recipe can't mean.
    """
    section = read_file(find(name))
    assignments = [text for text in arguments if ASSIGNMENT.match(text)]
    override(section, assignments)
    return _recipe(section), [text for text in arguments if text not in assignments]


def _recipe(section: Section) -> Recipe:
    found = values(section, SHAPE)
    if "model" not in found:
        raise ValueError(f"{section.where}: model is missing: an alias, a directory, a .gguf file or a hub id")
    settings = {name: found[name] for name in shape_of(EngineConfig) if name in found}
    sampling = found.get("sampling", {})
    for within, kind, given in (
        (section, EngineConfig, settings),
        (section.get("sampling", section), SamplingParams, sampling),
    ):
        try:
            kind(**given)
        except ValueError as error:
            raise located(within, error) from None
    prompts, before = _prompt(section, found)
    files = {name: Path(found[name]) for name in ("input", "output") if name in found}
    return Recipe(found["model"], settings, sampling, found.get("generation_config", True), prompts, before, **files)


def _prompt(section: Section, found: dict[str, Any]) -> tuple[tuple[str, ...], tuple[Message, ...] | None]:
    """The prompt, if there is one, and the messages before it."""
    named = [name for name in ("prompt", "messages", "input") if name in found]
    if len(named) > 1:
        raise section.error(named[1], f"give only one of {' and '.join(named)}")
    prompt = found.get("prompt")
    if isinstance(prompt, str):
        return (prompt,), None
    if isinstance(prompt, Roles):
        system = _text(prompt.system)
        return (_text(prompt.user),), ({"role": "system", "content": system},) if system else ()
    turns = found.get("messages")
    if turns is None:
        return (), None
    if not turns or turns[-1].role != "user":
        raise section.error("messages", "messages must end with one of role user, to be answered")
    return (turns[-1].content,), tuple({"role": turn.role, "content": turn.content} for turn in turns[:-1])


def _text(content: str | Content | None) -> str:
    return content.text if isinstance(content, Content) else content or ""
