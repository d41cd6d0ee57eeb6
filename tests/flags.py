"""Every option of ``shardwise serve``, from the command itself; `python -m tests.flags` writes docs/server-flags.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from shardwise.cli import app

DOCS = Path(__file__).parent.parent / "docs" / "server-flags.md"
HEAD = """# Options of `shardwise serve`

Times are in seconds, sizes in bytes or tokens. This page is written by `python -m tests.flags` from the command itself,
and a test compares the two.

| Option | Default | What it does |
|---|---|---|
"""


def parameters() -> list[Any]:
    """The command's parameters, as click knows them."""
    command = typer.main.get_command(app)
    return list(command.commands["serve"].params)  # type: ignore[attr-defined]


def page() -> str:
    return HEAD + "".join(_row(each) for each in parameters())


def _row(parameter: Any) -> str:
    names = [f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts)]
    default = "" if parameter.default is None else f"`{_said(parameter.default)}`"
    variable = f" Also by the environment variable `{parameter.envvar}`." if parameter.envvar else ""
    return f"| {', '.join(names)} | {default} | {parameter.help}{variable} |\n"


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    DOCS.write_text(page())
