from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from shardwise.kernels import build
from shardwise.kernels.native import NativeOps
from shardwise.kernels.ops import Ops, Program, load_ops
from shardwise.kernels.sync import load_sync
from shardwise.weights.quantise import quantise

from .cases import context, pack, pack_whole
from .conftest import FORMATS, compute_of

FAKE_COMPILER = """#!/bin/sh
for last in "$@"; do
  [ "$previous" = -o ] && echo "library of process $$" > "$last"
  [ "$last" = --version ] && echo fake 1.0
  previous="$last"
done
exit 0
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shardwise"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "fake-cc"
    script.write_text(FAKE_COMPILER)
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    return script


def test_compiles_once_per_content(cache: Path, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale library for changed sources, another compiler or other flags; or a compilation at every start."""
    path, origin = build.library()
    assert path.parent == cache
    assert origin == "compiled for this CPU by fake 1.0"
    assert [entry.name for entry in cache.iterdir()] == [path.name]
    made = path.stat().st_mtime_ns
    assert build.library()[0] == path
    assert path.stat().st_mtime_ns == made
    sources = tmp_path / "sources"
    shutil.copytree(build.HERE, sources)
    monkeypatch.setattr(build, "HERE", sources)
    assert build.library()[0] == path
    (sources / "norm.c").write_text((sources / "norm.c").read_text() + "\n")
    assert build.library()[0] != path
    fake.write_text(FAKE_COMPILER.replace("fake 1.0", "fake 2.0"))
    assert len({build.library()[0], *cache.iterdir()}) == 3


def test_ranks_may_race(cache: Path, fake: Path) -> None:
    """A rank that loads a half-written library, or trips over another's temporary files."""
    program = (
        "from shardwise.kernels import build; import sys; print(build.library()[0]); assert 'torch' not in sys.modules"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    found = {rank.communicate(timeout=60)[0].strip() for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert found == {str(entry) for entry in cache.iterdir()}


def test_prebuilt_library_comes_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel's library that is ignored, or one that this CPU cannot run."""
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    sources = tmp_path / "sources"
    shutil.copytree(build.HERE, sources)
    monkeypatch.setattr(build, "HERE", sources)
    monkeypatch.setattr(build, "cpu_flags", lambda: build.LEVELS["x86-64-v3"])
    for level in ("x86-64-v4", "x86-64-v3"):
        (sources / build.prebuilt_name(level)).touch()
    assert build.library() == (sources / build.prebuilt_name("x86-64-v3"), "prebuilt for x86-64-v3")
    (sources / "norm.c").write_text("/* changed */")
    with pytest.raises(build.BuildError, match="install one"):
        build.library()


def test_no_compiler_is_said(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent fallback, or "native" that quietly is not."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "LEVELS", {})
    ops, reason = load_ops("auto", "cpu", torch.float32)
    assert type(ops) is Ops
    assert "torch kernels" in reason
    assert "no C compiler" in reason
    with pytest.raises(ValueError, match="install one"):
        load_ops("native", "cpu", torch.float32)
    with pytest.raises(ValueError, match="not on cuda"):
        load_ops("native", "cuda:0", torch.float32)
    assert type(load_ops("torch", "cpu", torch.float32)[0]) is Ops


def test_what_fails_is_told(cache: Path, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's message lost, a broken library left in the cache, a cache that cannot be written."""
    fake.write_text(FAKE_COMPILER.replace("exit 0", '[ "$1" = --version ] || { echo "disk on fire" >&2; exit 3; }'))
    with pytest.raises(build.BuildError, match="disk on fire"):
        build.library()
    assert list(cache.iterdir()) == []
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(build.BuildError, match="set XDG_CACHE_HOME"):
        build.library()


def test_a_library_that_cannot_be_loaded(cache: Path, fake: Path) -> None:
    """Guards kernels=auto: a library of another machine's, or cut short, ends no run that torch could do."""
    path, _ = build.library()
    ops, reason = load_ops("auto", "cpu", torch.float32)
    assert type(ops) is Ops
    assert "can't be loaded" in reason
    assert str(path) in reason
    with pytest.raises(ValueError, match="can't be loaded"):
        load_ops("native", "cpu", torch.float32)
    with pytest.raises(build.BuildError, match="can't be loaded"):
        load_sync()
    assert not build.have_library()


def test_a_damaged_library_is_compiled_once_more(cache: Path) -> None:
    """Guards against a cache that stays broken until somebody thinks of deleting it."""
    try:
        path, _ = build.library()
    except build.BuildError as error:
        pytest.skip(str(error))
    path.write_bytes(bytes(1000))
    assert build.have_library()
    assert build.load()[0].sw_wait
    assert list(cache.iterdir()) == [path]


def test_no_compiler_outlives_its_time(
    cache: Path, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against compilers, and what they started, that run on beside a folder that nobody removes."""
    pids = tmp_path / "pids"
    fake.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && {{ echo fake; exit 0; }}\nsleep 300 & echo $$ $! >> {pids}\nwait\n'
    )
    monkeypatch.setattr(build, "TIMEOUT", 1.0)
    with pytest.raises(build.BuildError, match="took more than 1 s"):
        build.library()
    assert list(cache.iterdir()) == []
    started = [int(pid) for pid in pids.read_text().split()]
    left = [psutil.Process(pid) for pid in started if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, 30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares two widths of x86 vectors")
def test_vector_width_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order of sums that follows the register width: two machines of one fleet would disagree."""
    flags = build.cpu_flags()
    try:
        widths = [level for level in ("x86-64-v3", "x86-64-v4") if build.LEVELS[level] <= flags]
        libraries = {level: tmp_path / f"{level}.so" for level in widths}
        for level, path in libraries.items():
            build.compile_library(path, level)
    except build.BuildError as error:
        pytest.skip(str(error))
    assert ctypes.CDLL(str(libraries[widths[0]])).sw_wait
    if len(widths) < 2:
        pytest.skip("this CPU has only one of the widths")
    results = []
    for path in libraries.values():
        monkeypatch.setattr(build, "library", lambda path=path: (path, "for a test"))
        results.append([answer for dtype in FORMATS for answer in everything(NativeOps(compute_of(dtype)), dtype)])
    for index, (narrow, wide) in enumerate(zip(*results, strict=True)):
        assert torch.equal(narrow, wide), index


def everything(ops: NativeOps, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(3)
    x, matrix = torch.randn(29, 66, dtype=ops.compute), torch.randn(45, 66)
    answers = [ops.linear(x[:rows], pack(ops, matrix, dtype), Program((0, 30, 66), (0, 1))) for rows in (1, 3, 6, 29)]
    for bits, group in ((8, 66), (4, 11)):
        weight = pack_whole(ops, *quantise(matrix, bits, group), group)
        answers += [ops.linear(x[:rows], weight, Program((0, 30, 66), (0, 1))) for rows in (1, 3, 6, 29)]
    answers += [ops.rms_norm(x, x[0], 1e-5), ops.layer_norm(x, x[0], x[1], 1e-5)]
    answers += [ops.activate(kind, x) for kind in ("silu_mul", "gelu", "gelu_tanh")]
    answers += [context(ops, (0, 3, 6), dims, (70, 20), (30, 1)).attend(ops) for dims in (10, 64, 80)]
    answers += [ops.gumbel([1, 2], [3, 4], 5, 2001), ops.exp(-torch.rand(1001, dtype=torch.float64) * 50)]
    return answers
