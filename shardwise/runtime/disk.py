"""Directories that users name, looked at before anything is written there."""

from __future__ import annotations

import os
from pathlib import Path


def check_writable(name: str, directory: str) -> Path:
    """The part of ``directory`` that exists already; ValueError, which names the setting, where nothing can be made."""
    place = Path(directory).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"{name} {directory}: nothing can be written there; give a directory of yours, with room")
    return place
