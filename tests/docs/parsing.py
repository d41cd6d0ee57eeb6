"""Commands that are told and not run, held against the options that there really are. Runs none of them."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from torch.distributed.run import get_args_parser
from typer.main import get_command

from shardwise.cli import app
from shardwise.recipes.recipe import open_recipe
from shardwise.recipes.shipped import HERE as SHIPPED
from shardwise.recipes.shipped import find
from tests.docs.pages import ROOT

PLACEHOLDER = re.compile(r"[…\[\]|]|\.\.\.")
"""Signs of a sketch of a command, which can't be parsed as one."""
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
FIRST = re.compile(r"^(?:[A-Z_]+=\S+\s+)*")
"""Variables that are set for a command."""


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """shardwise's command that the words begin with, and its arguments. Raises ValueError if there is none."""
    command = get_command(app)
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            break
        command, words = command.commands[words[0]], words[1:]
    if hasattr(command, "commands") and words:
        raise ValueError(f"shardwise has no command {words[0]!r}")
    return command, words


def options_of(command: Any) -> set[str]:
    """The command's long options, those of its own commands included."""
    found = {name for each in command.params for name in (*each.opts, *each.secondary_opts) if name.startswith("--")}
    for each in getattr(command, "commands", {}).values():
        found |= options_of(each)
    return found | {"--help"}


@cache
def known_options() -> set[str]:
    """Every long option of shardwise."""
    return options_of(get_command(app))


def after_shardwise(text: str) -> str | None:
    """What follows `shardwise` in a command, or `-m shardwise` in a launcher's; None if it is no such command."""
    bare = FIRST.sub("", text.strip())
    match = re.match(r"(?:\.venv/bin/)?shardwise(?:\s+|$)", bare) or re.search(r"-m\s+shardwise\s+", bare)
    return bare[match.end() :] if match else None


def check(text: str, sketch: bool = False) -> None:
    """Raise ValueError unless a told command could be run: its command, options and values are parsed.

    Of a ``sketch`` (`shardwise convert SRC DST [--dtype F]`) only the names are looked at.
    """
    check_launcher(text)
    rest = after_shardwise(text)
    if rest is None:
        check_module(text)
        return
    if sketch or PLACEHOLDER.search(rest):
        words = re.sub(r"[\[\]…]", " ", rest).split()
        command, _ = command_of([word for word in words if word != "|"][:2] if words[:1] else [])
        if unknown := set(FLAG.findall(rest)) - options_of(command):
            raise ValueError(f"{text}: no option {sorted(unknown)}")
        return
    words = shlex.split(re.split(r"\s(?:[<>|&]|2>)", rest)[0], comments=True)
    command, words = command_of(words)
    if hasattr(command, "commands"):
        return
    try:
        told = command.make_context(command.name, list(words)).params
    except Exception as error:  # of typer's own copy of click, which has no public name
        raise ValueError(f"{text}: {error}") from None
    if told.get("recipe") is not None and find(told["recipe"]).parent == SHIPPED:
        open_recipe(told["recipe"], told["prompts"] or ())


def check_launcher(text: str) -> None:
    """The same for torchrun's own options, where a command begins with it."""
    bare = FIRST.sub("", text.strip())
    if bare.startswith("torchrun ") and not PLACEHOLDER.search(bare):
        try:
            get_args_parser().parse_args([*shlex.split(bare, comments=True)[1:], "script"])
        except SystemExit:  # argparse has said why
            raise ValueError(f"{text}: torchrun has no such option") from None


def check_module(text: str) -> None:
    """The same for `python -m MODULE --option`, of modules of this project, and for `python FILE`."""
    if match := re.search(r"python[\d.]* (?:-m ((?:bench|tests)[\w.]*)|((?:bench|tests|examples)/\S+\.py))(.*)", text):
        path = ROOT / match[2] if match[2] else source_of(match[1])
        if not path.exists():
            raise ValueError(f"{text}: there is no {path}")
        if unknown := set(FLAG.findall(match[3])) - declared_in(path):
            raise ValueError(f"{text}: {path.relative_to(ROOT)} has no option {sorted(unknown)}")


def source_of(module: str) -> Path:
    """The file that `python -m` runs. Raises ValueError if there is none."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"there is no module {module}")
    path = Path(spec.origin)
    return path.with_name("__main__.py") if path.name == "__init__.py" else path


def declared_in(path: Path) -> set[str]:
    """The options that a file declares with argparse, or that the modules do which it takes options from."""
    found = {"--help"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}  # type: ignore[misc]
    return found
