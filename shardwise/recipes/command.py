"""`shardwise recipes`: list, show and copy what comes with the package. Knows no models and runs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.recipes.shipped import names, shipped, title

recipes = typer.Typer(no_args_is_help=True, help="Recipes: a model, a layout, sampling and a prompt in one file.")

NameArgument = Annotated[str, typer.Argument(help="A recipe's name; `shardwise recipes list` tells them.")]


@recipes.command("list")
def list_recipes(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """List the recipes that come with shardwise."""
    if as_json:
        from shardwise.recipes.recipe import open_recipe

        found = {name: open_recipe(name)[0] for name in names()}
        told = [
            {"name": name, "title": title(name), "model": each.model, "layout": str(each.settings.get("layout", "1"))}
            for name, each in found.items()
        ]
        print(json.dumps({"recipes": told}, ensure_ascii=False))
        return
    widest = max(map(len, names()))
    for name in names():
        print(f"{name:{widest}}  {title(name)}")


@recipes.command()
def show(name: NameArgument) -> None:
    """Print a recipe, with what its first lines say of memory."""
    print(shipped(name).read_text(encoding="utf-8"), end="")


@recipes.command()
def copy(
    name: NameArgument,
    destination: Annotated[Path | None, typer.Argument(help="File or directory; default: NAME.yaml here.")] = None,
) -> None:
    """Copy a recipe to a file of your own, which must not exist yet."""
    source = shipped(name)
    target = destination if destination is not None else Path()
    target = target / source.name if target.is_dir() else target
    try:
        with target.open("xb") as file:
            file.write(source.read_bytes())
    except FileExistsError:
        raise ValueError(f"{target} exists and is left as it is; give another name") from None
    except OSError as error:
        raise ValueError(f"{target}: can't be written: {error.strerror}") from None
    print(target)
