"""The recipes that come with the package, by name. Knows files, and not what stands in them."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

HERE = Path(__file__).parent


def names() -> list[str]:
    """Of all that come with the package, in order."""
    return sorted(path.name.removesuffix(".yaml") for path in HERE.glob("*.yaml"))


def shipped(name: str) -> Path:
    """The file of one of ours; ValueError, with the nearest name, for a name that none has."""
    if name not in names():
        near = get_close_matches(name, names(), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names())}"
        raise ValueError(f"no recipe {name!r} comes with shardwise; {hint}")
    return HERE / f"{name}.yaml"


def find(name: str) -> Path:
    """The file that is meant: a path, which has a slash or ends in .yaml or .yml, or else one of ours by its name."""
    is_path = "/" in name or name.endswith((".yaml", ".yml"))
    return Path(name).expanduser() if is_path else shipped(name)


def title(name: str) -> str:
    """One line about a recipe: its first."""
    return shipped(name).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
