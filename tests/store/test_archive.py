"""Which models a store holds, and R36: what an archive may not be."""

from __future__ import annotations

import gzip
import random
import stat
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from shardwise.store import archive
from shardwise.store.archive import ArchiveError, Found, find, find_url, open_folder
from tests.store.folders import make_folder, make_tar, make_zip, odd_tar, raw_gzip


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unpacked").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "unpacked"))


def left(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "unpacked").iterdir()]


@pytest.mark.parametrize("kind", ["mar", "tgz", "tar.gz", "tgz in a folder"])
def test_archives_are_folders_while_they_are_open(tmp_path: Path, kind: str) -> None:
    """Guards the three formats of torch-model-archiver, and against unpacked models that outlive their use."""
    folder = make_folder(tmp_path / "m", "minWorkers: 1", "gpt_fast")
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "file").write_bytes(b"x" * 10_000)
    path = tmp_path / f"m.{kind.split()[0]}"
    made = make_zip(path, folder) if kind == "mar" else make_tar(path, folder, "m" if " " in kind else "")
    with open_folder(made) as opened:
        assert (opened.path / "deep" / "er" / "file").read_bytes() == b"x" * 10_000
        assert (opened.path / "MAR-INF" / "MANIFEST.json").is_file()
        assert stat.S_IMODE((tmp_path / "unpacked" / left(tmp_path)[0]).stat().st_mode) == 0o700
    assert left(tmp_path) == []
    with open_folder(folder) as opened:
        assert opened.path == folder
    assert folder.is_dir()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, size
    return made


TARS = {
    "absolute": [(entry("/etc/x"), b"")],
    "above": [(entry("a/../../x"), b"")],
    "symlink": [(entry("x", tarfile.SYMTYPE, "/etc/passwd"), b"")],
    "a file through a symlink": [(entry("d", tarfile.SYMTYPE, "/tmp"), b""), (entry("d/x"), b"1")],
    "hardlink": [(entry("x", tarfile.LNKTYPE, "y"), b"")],
    "device": [(entry("x", tarfile.CHRTYPE), b"")],
    "pipe": [(entry("x", tarfile.FIFOTYPE), b"")],
    "twice": [(entry("x"), b"1"), (entry("x"), b"2")],
    "bomb": [(entry("x", size=50_000_000), b"")],
}


@pytest.mark.parametrize("case", TARS)
def test_odd_tars_are_refused(tmp_path: Path, case: str) -> None:
    """R36: guards against tar entries that lead out, are no files, or are a bomb; nothing is left of them."""
    path = odd_tar(tmp_path / "m.tgz", *TARS[case])
    with pytest.raises(ArchiveError, match=r"m\.tgz: .*(leads out|link or a device|twice|100 times)"):
        open_folder(path)
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "a\\..\\x", "c:x"])
def test_zip_names_that_lead_out(tmp_path: Path, name: str) -> None:
    """R36: guards against zip entries that are written elsewhere."""
    with zipfile.ZipFile(tmp_path / "m.mar", "w") as file:
        file.writestr(zipfile.ZipInfo(name), "x")
    with pytest.raises(ArchiveError, match="leads out"):
        open_folder(tmp_path / "m.mar")
    assert left(tmp_path) == []


def test_zip_links_bombs_and_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R36: guards against links, bombs, too many entries, depths that can't be removed again and sizes that lie."""
    path = tmp_path / "m.mar"
    link = zipfile.ZipInfo("x")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(link, "/etc/passwd")
    with pytest.raises(ArchiveError, match="link or a device"):
        open_folder(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x", bytes(20_000_000))
    with pytest.raises(ArchiveError, match="100 times"):
        open_folder(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x", b"ab" * 1000)
    path.write_bytes(path.read_bytes().replace((2000).to_bytes(4, "little"), (1000).to_bytes(4, "little")))
    with pytest.raises(ArchiveError, match=r"no archive that can be read|larger than"):
        open_folder(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
        file.writestr("x", b"ab" * 1000)
    with pytest.raises(ArchiveError, match="unusual way"):
        open_folder(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/" * 1800, "")
    with pytest.raises(ArchiveError, match="more than 32 directories"):
        open_folder(path)
    monkeypatch.setattr(archive, "MAX_ENTRIES", 20)
    with zipfile.ZipFile(path, "w") as file:
        for number in range(21):
            file.writestr(str(number), "")
    with pytest.raises(ArchiveError, match="more than 20 entries"):
        open_folder(path)
    with pytest.raises(ArchiveError, match="more than 20 entries"):
        open_folder(odd_tar(tmp_path / "m.tgz", *[(entry(str(number)), b"") for number in range(21)]))
    assert left(tmp_path) == []


def test_archives_that_are_none(tmp_path: Path) -> None:
    """R36: guards against files that are cut short or something else, and headers that would fill the memory."""
    whole = make_tar(tmp_path / "m.tgz", make_folder(tmp_path / "m", "x: 1", "gpt_fast")).read_bytes()
    for name, content in {"cut.tgz": whole[:-60], "no.tgz": b"hello", "no.mar": b"PK\3\4hello"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ArchiveError, match=name):
            open_folder(tmp_path / name)
    header = entry("x", tarfile.XHDTYPE, size=2**33).tobuf(tarfile.GNU_FORMAT)
    path = raw_gzip(tmp_path / "long.tgz", header + b"1" * 5_000_000)
    with pytest.raises(ArchiveError, match="between two files"):
        open_folder(path)
    with pytest.raises(ArchiveError, match="neither a folder"):
        open_folder(tmp_path / "m.txt")
    assert left(tmp_path) == []


@pytest.mark.parametrize("kind", ["mar", "tgz"])
def test_damaged_archives(tmp_path: Path, kind: str) -> None:
    """R36: guards against a damaged archive that raises anything but the one error, or leaves something behind."""
    folder = make_folder(tmp_path / "m", "minWorkers: 1\n" * 50, "gpt_fast")
    whole = (make_zip if kind == "mar" else make_tar)(tmp_path / f"m.{kind}", folder).read_bytes()
    rng = random.Random(kind)
    content = whole if kind == "mar" else gzip.decompress(whole)
    for number in range(150):
        broken = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        del broken[rng.choice([len(broken), rng.randrange(len(broken))]) :]
        path = tmp_path / f"{number}.{kind}"
        path.write_bytes(broken if kind == "mar" else gzip.compress(bytes(broken), 1))
        with suppress(ArchiveError):
            open_folder(path).close()
        path.unlink()
        assert left(tmp_path) == []


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an archive that fills the disk."""
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda _: type("", (), {"free": 100}))
    with pytest.raises(ArchiveError, match="100 are free"):
        open_folder(make_zip(tmp_path / "m.mar", make_folder(tmp_path / "m", "x: " + "y" * 200)))
    assert left(tmp_path) == []


def test_find(tmp_path: Path) -> None:
    """Guards what --models names: all, a name, name=archive; each with its own error, all of them within."""
    store = tmp_path / "store"
    folder = make_folder(store / "one", "", "gpt_fast")
    make_zip(store / "two.mar", folder)
    (store / "three").mkdir()
    (store / "README.md").write_text("")
    (tmp_path / "outside.mar").write_bytes(b"")
    found = {each.name: each for each in find(store, ["all"])}
    assert found["one"] == Found("one", store / "one")
    assert found["two"] == Found("two", store / "two.mar")
    assert "neither" in str(found["three"].error)
    assert len(found) == 3
    assert find(store, ["one"]) == [Found("one", store / "one")]
    assert find(store, ["x=two.mar"]) == [Found("x", store / "two.mar")]
    refused = {
        "four": "holds no four; it holds one, three, two",
        "x=../outside.mar": "leads out",
        "x=/etc/passwd": "leads out",
        "x=http://host/m.mar": "from the model store only",
        "x=": "leads out",
        "x=README.md": "is no archive",
        "../one": "can't be a model's name",
    }
    for name, error in refused.items():
        (each,) = find(store, [name])
        assert each.path is None
        assert error in str(each.error)
    assert [each.error is None for each in find(store, ["one", "one=two.mar"])] == [True, False]
    (store / "two").mkdir()
    assert "could both be two" in str(find(store, ["two"])[0].error)
    with pytest.raises(ValueError, match="not a directory"):
        find(store / "no", ["all"])
    with pytest.raises(ValueError, match="holds no four"):
        find_url(store, "four")
    with pytest.raises(ValueError, match="File name too long"):
        find_url(store, "x" * 300)


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the other models of a store against one whose folder is closed to the server."""
    store = tmp_path / "store"
    for name in ("closed", "open"):
        make_folder(store / name, "", "gpt_fast")
    is_file = Path.is_file

    def denied(path: Path) -> bool:
        if path.is_relative_to(store / "closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", denied)
    closed, opened = find(store, ["all"])
    assert opened == Found("open", store / "open")
    assert "Permission denied" in str(closed.error)
    assert "Permission denied" in str(find(store, ["closed"])[0].error)
    with pytest.raises(ValueError, match="Permission denied"):
        find_url(store, "closed")


def test_links_out_of_a_store(tmp_path: Path) -> None:
    """R36: guards against a request that registers what a link in the store points to elsewhere."""
    store = tmp_path / "store"
    store.mkdir()
    (store / "m").symlink_to(make_folder(tmp_path / "elsewhere", "", "gpt_fast"))
    with pytest.raises(ValueError, match="leads out"):
        find_url(store, "m")
    assert find(store, ["m"]) == find(store, ["all"]) == [Found("m", store / "m")]
