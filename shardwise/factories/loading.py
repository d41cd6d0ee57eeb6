"""What all ready factories refuse alike: an unknown number format, a flag that is none, an unknown field of an item."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def dtype_of(name: str, device: str) -> torch.dtype:
    """torch's dtype of this name; auto is float16 on a GPU and float32 on a CPU."""
    if name not in DTYPES:
        raise ValueError(f"--set dtype must be one of {', '.join(DTYPES)}, not {name!r}")
    found: torch.dtype = getattr(
        torch, name if name != "auto" else "float16" if device.startswith("cuda") else "float32"
    )
    return found


def check_flags(**flags: Any) -> None:
    """Raises ValueError for one that is neither True nor False: text, as of --set normalize=False, would be true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"--set {name} must be true or false, not {value!r}")


def fields_of(item: Any, text: str, known: Iterable[str]) -> Mapping[str, Any]:
    """An item's fields; one that is a string is the field ``text`` alone. ValueError for fields that aren't known."""
    if isinstance(item, str):
        return {text: item}
    known = (text, *known)
    if not isinstance(item, dict) or not isinstance(item.get(text), str):
        raise ValueError(f'an item is a string, or an object with "{text}" and perhaps {", ".join(known[1:])}')
    for key in item:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            raise ValueError(f"unknown field {key!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return item
