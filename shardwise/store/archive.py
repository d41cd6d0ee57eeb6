"""Model folders, and archives unpacked into private ones: what is in a store, and what is too odd to be opened.

Knows paths and bytes; nothing of what a model is. An archive is a stranger's file: each of its entries is a plain file
or directory that lies within, there are not too many of them, and they are not much larger than the archive.
"""

from __future__ import annotations

import gzip
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import IO, NamedTuple

MAX_ENTRIES = 10_000
MAX_DEPTH = 32
"""Directories within each other."""
MAX_RATIO = 100
"""Unpacked bytes for each byte of the archive."""
MAX_TAR_HEADER = 2**20
"""Unpacked bytes between two files of a tar archive, some of which are read into memory."""
PIECE = 2**20
ZIPS = (".mar", ".zip")
TARS = (".tgz", ".tar.gz")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MANIFEST = Path("MAR-INF", "MANIFEST.json")
CONFIGS = ("model-config.yaml", "model_config.yaml")
"""What a configuration is called where no manifest names it."""


class ArchiveError(ValueError):
    """A folder or archive that can't be opened: what is wrong with it, and where."""


class Found(NamedTuple):
    """A model of a store: where it lies, or why there is none."""

    name: str
    path: Path | None
    error: str | None = None


class Folder:
    """A model's folder. `close` removes it where it was unpacked; it goes with the process in any case."""

    def __init__(self, path: Path, unpacked: TemporaryDirectory[str] | None = None) -> None:
        self.path = path
        self._unpacked = unpacked

    def file(self, name: str) -> Path:
        """The file of that name within; ArchiveError for a name that leads out of the folder."""
        path = self.path / name
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise ArchiveError(f"{name!r} leads out of the model's folder {self.path}")
        return path

    def close(self) -> None:
        """Remove what was unpacked; harmless when repeated."""
        if self._unpacked is not None:
            self._unpacked.cleanup()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def find(store: Path, names: Sequence[str]) -> list[Found]:
    """The models of a store that ``names`` ask for: "all", a "name", or "name=archive" with a path within the store.

    A name that can't be found, or is asked for twice, comes with its error. Raises ValueError if there is no store.
    """
    if not store.is_dir():
        raise ValueError(f"the model store {store} is not a directory")
    found: list[Found] = []
    for name in names:
        found += _all(store) if name == "all" else [_one(store, name)]
    seen: set[str] = set()
    for at, each in enumerate(found):
        if each.name in seen and each.error is None:
            found[at] = Found(each.name, None, f"{each.path} would be a second model of the name {each.name}")
        seen.add(each.name)
    return found


def find_url(store: Path, url: str) -> Path:
    """What a request may name as a model to register: a path within the store; ValueError for anything else."""
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", url):
        raise ValueError(f"{url} is an address: models are registered from the model store only, so put it there first")
    path = store / url
    try:
        if not path.resolve().is_relative_to(store.resolve()) or path.resolve() == store.resolve():
            raise ValueError(f"{url} leads out of the model store")
        if not path.exists():
            raise ValueError(f"the model store holds no {url}")
        return _checked(path)
    except OSError as error:  # of a name that is too long, for one
        raise ValueError(f"the model store holds no {url[:100]} that can be read: {error.strerror}") from None


def name_of(path: Path) -> str:
    """What a folder or archive is called, without its suffix."""
    for suffix in (*TARS, *ZIPS):
        if path.name.lower().endswith(suffix) and not path.is_dir():
            return path.name[: -len(suffix)]
    return path.name


def check_name(name: str) -> str:
    """A name under which a model may be served; ValueError for one that can't stand in an address."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} can't be a model's name: use letters, digits, dots, dashes and underscores")
    return name


def _one(store: Path, asked: str) -> Found:
    name, given, archive = asked.partition("=")
    try:
        check_name(name)
        if given:
            return Found(name, find_url(store, archive))
        paths = [store / f"{name}{suffix}" for suffix in ("", *ZIPS, *TARS)]
        paths = [path for path in paths if path.exists()]
        if not paths:
            held = ", ".join(each.name for each in _all(store)) or "nothing"
            raise ValueError(f"the model store {store} holds no {name}; it holds {held}")
        if len(paths) > 1:
            raise ValueError(f"{' and '.join(path.name for path in paths)} could both be {name}: say {name}=FILE")
        return Found(name, _checked(paths[0]))
    except (ValueError, OSError) as error:
        return Found(name, None, str(error))


def _all(store: Path) -> list[Found]:
    found = []
    for path in sorted(store.iterdir()):
        name = path.name
        try:
            if name.startswith(".") or not (path.is_dir() or _is_model(path)):
                continue
            name = check_name(name_of(path))
            found.append(Found(name, _checked(path)))
        except (ValueError, OSError) as error:
            found.append(Found(name, None, str(error)))
    return found


def _checked(path: Path) -> Path:
    if not _is_model(path):
        lacks = f"holds neither {MANIFEST} nor {CONFIGS[0]}" if path.is_dir() else "is no archive"
        raise ValueError(f"{path} {lacks} ({', '.join((*ZIPS, *TARS))}): there is no model")
    return path


def _is_model(path: Path) -> bool:
    if path.is_dir():
        return any((path / name).is_file() for name in (MANIFEST, *CONFIGS))
    return path.is_file() and path.name.lower().endswith((*ZIPS, *TARS))


def open_folder(path: Path) -> Folder:
    """A folder as it lies, or an archive unpacked. Raises ArchiveError, and then nothing is left of it."""
    if path.is_dir():
        return Folder(path)
    lower = path.name.lower()
    if not lower.endswith((*ZIPS, *TARS)):
        raise ArchiveError(f"{path} is neither a folder nor one of {', '.join((*ZIPS, *TARS))}")
    unpacked = TemporaryDirectory(prefix="shardwise-store-")
    try:
        _unpack(path, Path(unpacked.name), zipped=lower.endswith(ZIPS))
        return Folder(_root(Path(unpacked.name)), unpacked)
    except BaseException:
        unpacked.cleanup()
        raise


def _unpack(archive: Path, target: Path, *, zipped: bool) -> None:
    try:
        size = archive.stat().st_size
        free = shutil.disk_usage(target).free
        (_unzip if zipped else _untar)(archive, target, min(MAX_RATIO * size, free), free)
    except OSError as error:  # gzip's own errors are among them
        raise ArchiveError(f"{archive}: can't be unpacked: {error.strerror or error}") from None
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ArchiveError(f"{archive}: is no archive that can be read: {error}") from None


def _root(path: Path) -> Path:
    """Where the model's files are: some archives hold one folder that holds all."""
    inner = list(path.iterdir())
    return inner[0] if len(inner) == 1 and inner[0].is_dir() and not _is_model(path) else path


def _unzip(archive: Path, target: Path, most: int, free: int) -> None:
    with zipfile.ZipFile(archive) as file:
        entries = file.infolist()
        _check_count(archive, len(entries))
        _check_total(archive, sum(entry.file_size for entry in entries), most, free)
        for entry in entries:
            kind = stat.S_IFMT(entry.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise ArchiveError(f"{archive}: {entry.filename!r} is a link or a device; only files are unpacked")
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ArchiveError(f"{archive}: {entry.filename!r} is compressed in an unusual way: use deflate")
            path = _place(archive, target, entry.filename)
            if entry.is_dir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            with file.open(entry) as source:
                _copy(archive, source, path, entry.file_size)


def _untar(archive: Path, target: Path, most: int, free: int) -> None:
    total = count = 0
    with gzip.open(archive) as stream:
        metered = _Metered(stream)  # type: ignore[arg-type]
        file = tarfile.open(fileobj=metered, mode="r|")  # type: ignore[call-overload]  # noqa: SIM115  # reads only
        for entry in file:
            count += 1
            _check_count(archive, count)
            if not (entry.isreg() or entry.isdir()) or entry.issparse():
                raise ArchiveError(f"{archive}: {entry.name!r} is a link or a device; only files are unpacked")
            total += entry.size
            _check_total(archive, total, most, free)
            metered.allowed = MAX_TAR_HEADER + entry.size
            path = _place(archive, target, entry.name)
            if entry.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            source = file.extractfile(entry)
            assert source is not None
            _copy(archive, source, path, entry.size)


class _Metered:
    """Unpacked bytes, up to as many as are allowed: long names, sparse maps and padding can't grow without end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.allowed = MAX_TAR_HEADER
        self._stream = stream

    def read(self, size: int) -> bytes:
        """Up to so many bytes."""
        data = self._stream.read(size)
        self.allowed -= len(data)
        if self.allowed < 0:
            raise tarfile.ReadError(f"more than {MAX_TAR_HEADER} bytes stand between two files")
        return data


def _check_count(archive: Path, count: int) -> None:
    if count > MAX_ENTRIES:
        raise ArchiveError(f"{archive}: holds more than {MAX_ENTRIES} entries")


def _check_total(archive: Path, total: int, most: int, free: int) -> None:
    if total > free:
        raise ArchiveError(f"{archive}: needs {total} bytes where it is unpacked, and {free} are free")
    if total > most:
        raise ArchiveError(f"{archive}: would be more than {MAX_RATIO} times as large unpacked, as no model is")


def _place(archive: Path, target: Path, name: str) -> Path:
    """Where an entry goes."""
    pure = PurePosixPath(name)
    if len(pure.parts) > MAX_DEPTH:
        raise ArchiveError(f"{archive}: the entry {name[:100]!r} … lies in more than {MAX_DEPTH} directories")
    odd = pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or re.match("[a-zA-Z]:", name)
    path = target.joinpath(*pure.parts) if not odd else target
    if odd or not path.resolve().is_relative_to(target.resolve()):
        raise ArchiveError(f"{archive}: the entry {name!r} leads out of the archive")
    return path


def _copy(archive: Path, source: IO[bytes], path: Path, declared: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with suppress(FileExistsError), path.open("xb") as file:
        for piece in _pieces(source):
            written += len(piece)
            if written > declared:
                raise ArchiveError(f"{archive}: {path.name} is larger than the {declared} bytes it declares")
            file.write(piece)
        if written < declared:
            raise ArchiveError(f"{archive}: {path.name} is cut short")
        return
    raise ArchiveError(f"{archive}: holds {path.name} twice")


def _pieces(source: IO[bytes]) -> Iterator[bytes]:
    while piece := source.read(PIECE):
        yield piece
