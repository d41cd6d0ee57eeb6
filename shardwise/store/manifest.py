"""MAR-INF/MANIFEST.json: what torch-model-archiver wrote of a model, read strictly. Knows no other file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NoReturn

from shardwise.store.archive import MANIFEST, NAME, ArchiveError, Folder

MAX_BYTES = 2**20
TEXTS = {
    "modelName": "name",
    "modelVersion": "version",
    "handler": "handler",
    "configFile": "config_file",
    "modelFile": "model_file",
    "serializedFile": "serialized_file",
    "requirementsFile": "requirements_file",
}
OTHERS = ("description", "extensions", "envelope")
OUTER = (
    *("createdOn", "description", "model", "runtime", "archiverVersion", "specificationVersion"),
    *("implementationVersion", "license", "publisher", "engine", "userData"),
)


@dataclass(frozen=True)
class Manifest:
    """What a model is called and which of its files are what; None where the manifest doesn't say."""

    name: str | None = None
    version: str = "1.0"
    handler: str | None = None
    config_file: str | None = None
    model_file: str | None = None
    serialized_file: str | None = None
    requirements_file: str | None = None
    document: Mapping[str, Any] = field(default_factory=dict)
    """All of it, for handlers that look into it."""


def read_manifest(folder: Folder) -> Manifest:
    """A folder's manifest; the defaults where there is none. Raises ArchiveError naming the field that is wrong."""
    path = folder.path / MANIFEST
    if not path.is_file():
        return Manifest()
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ArchiveError(f"{path}: is larger than {MAX_BYTES} bytes")
        document = load(content)
    except OSError as error:
        raise ArchiveError(f"{path}: can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ArchiveError(f"{path}: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise ArchiveError(f"{path}: must be a JSON object that holds an object model")
    model = document["model"]
    for key, known in (*((key, OUTER) for key in document), *((key, (*TEXTS, *OTHERS)) for key in model)):
        if key not in known:
            near = get_close_matches(key, known, 1)
            raise ArchiveError(f"{path}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    for key in TEXTS:
        if key in model and (not isinstance(model[key], str) or not model[key]):
            raise ArchiveError(f"{path}: model.{key} must be a text that is not empty, not {model[key]!r}")
    if "modelVersion" in model and (not NAME.fullmatch(model["modelVersion"]) or model["modelVersion"] == "all"):
        raise ArchiveError(
            f"{path}: model.modelVersion {model['modelVersion']!r} can't stand in an address: use letters, digits, "
            "dots, dashes and underscores, and not the word all"
        )
    if not str(document.get("runtime", "python")).lower().startswith("python"):
        raise ArchiveError(f"{path}: runtime {document['runtime']!r} is not python, and nothing else is run")
    if model.get("envelope") not in (None, ""):
        raise ArchiveError(
            f"{path}: model.envelope {model['envelope']!r}: request envelopes are not read; leave it out"
        )
    return Manifest(**{field: model[key] for key, field in TEXTS.items() if key in model}, document=document)


def load(content: bytes) -> Any:
    """The value of a JSON text; ValueError for what is none, for a key given twice and for NaN and infinities."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            raise ValueError("a key is given twice")
        return found

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is no JSON")

    try:
        return json.loads(content.decode(), object_pairs_hook=pairs, parse_constant=refuse)
    except UnicodeDecodeError:
        raise ValueError("is not text in UTF-8") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON: {error}") from None
