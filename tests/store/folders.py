"""Model folders and archives, made in the test."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import textwrap
import zipfile
from pathlib import Path


def make_folder(path: Path, yaml: str = "", handler: str | None = None, code: str | None = None, **model: str) -> Path:
    """A model's folder, with a manifest where there is something to say in it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "model-config.yaml").write_text(textwrap.dedent(yaml))
    if code is not None:
        (path / "handler.py").write_text(textwrap.dedent(code))
    if handler is not None or model:
        document = {"runtime": "python", "archiverVersion": "0.12.0", "model": {"modelName": path.name, **model}}
        if handler is not None:
            document["model"]["handler"] = handler  # type: ignore[index]
        (path / "MAR-INF").mkdir(exist_ok=True)
        (path / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(document))
    return path


def make_zip(path: Path, folder: Path) -> Path:
    """As torch-model-archiver's default format has it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for inner in sorted(folder.rglob("*")):
            file.write(inner, inner.relative_to(folder))
    return path


def make_tar(path: Path, folder: Path, inside: str = "") -> Path:
    """As its format tgz has it."""
    with tarfile.open(path, "w:gz") as file:
        file.add(folder, arcname=inside or ".")
    return path


def odd_tar(path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    """A tar archive of entries that no archiver would write."""
    with tarfile.open(path, "w:gz") as file:
        for entry, content in entries:
            entry.size = entry.size or len(content)
            file.addfile(entry, io.BytesIO(content.ljust(entry.size, b"\0")))
    return path


def raw_gzip(path: Path, content: bytes) -> Path:
    """A compressed file of any bytes."""
    path.write_bytes(gzip.compress(content))
    return path
