"""Directories and files of strangers, as the command meets them: nothing in them is run, and no lie in them is dear."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise.weights.checkpoint import LoadError
from shardwise.weights.gguf import read_gguf
from shardwise.weights.safetensors import index_safetensors
from tests.tiny import save_text_model
from tests.weights import test_gguf, test_safetensors

RAN = "RAN"
"""The file that code of the directory would leave beside itself."""
CANARY = "import pathlib\npathlib.Path(__file__).with_name('RAN').write_text(__name__)\n"
MODULES = ["modeling_evil", "configuration_evil", "tokenization_evil", "processing_evil", "custom_generate/generate"]
"""Those that a model's files name."""
if sys.version_info >= (3, 11):  # before, a rank's Python looks into the current directory, see docs/security.md
    MODULES += [
        "torch",
        "numpy",
        "tokenizers",
        "msgspec",
        "jinja2",
        "gguf",
        "regex",
        "sitecustomize",
        "typer",
        "random",
    ]
WATCH = """
import os, sys
LOG, HERE = os.environ["WATCHED_LOG"], os.environ["WATCHED_DIRECTORY"]
def hook(event, args):
    if event not in ("open", "exec", "import", "compile"):
        return
    name = args[0] if event == "open" else args[0].co_filename if event == "exec" else args[1]
    name = os.fsdecode(name) if isinstance(name, (str, bytes)) else ""
    if name.startswith(HERE) or "evil" in name:
        fd = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, (event + " " + name + "\\n").encode())
        os.close(fd)
sys.addaudithook(hook)
"""
"""Tells which files of the directory any of the processes opens, compiles, imports or runs."""
PICKLE = b"\x80\x04cposix\nsystem\n(X\x09\x00\x00\x00touch RANtR."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


def edit(file: Path, **values: Any) -> None:
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**found, **values}))


def baited(model: Path, path: Path) -> Path:
    """The model with all that other programs take for code, or for a reason to run some."""
    shutil.copytree(model, path)
    for name in MODULES:
        file = path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(CANARY)
    names = {
        "AutoConfig": "configuration_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilModel",
        "AutoTokenizer": ["tokenization_evil.EvilTokenizer", None],
        "AutoProcessor": "processing_evil.EvilProcessor",
    }
    code = {"auto_map": names, "trust_remote_code": True}
    edit(path / "config.json", **code, _attn_implementation_internal="evil/kernels", custom_pipelines={"evil": {}})
    edit(path / "tokenizer_config.json", **code)
    edit(path / "generation_config.json", **code, custom_generate="custom_generate")
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (path / name).write_bytes(PICKLE)
    (path / "adapter_config.json").write_text(json.dumps({"auto_mapping": code}))
    return path


def command(path: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """``shardwise generate`` with the directory as the current one, as an installed command; and how long it took.

    No process of it may be left.
    """
    mark = uuid.uuid4().hex
    runner = "import sys; del sys.path[0]; from shardwise.cli import main; main()"
    root = str(Path(__file__).parent.parent.parent)
    paths = os.pathsep.join([*filter(None, [environment.pop("PYTHONPATH", "")]), root])
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", runner, "generate", "--model", str(path), "--device", "cpu", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=path if path.is_dir() else path.parent,
        env={**os.environ, "PYTHONPATH": paths, "TEST_MARK": mark, **environment},
    )
    took = time.monotonic() - began
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TEST_MARK") == mark:
                left.append(process)
        except psutil.Error:
            continue
    _, alive = psutil.wait_procs(left, 5)
    assert not alive
    return done, took


@pytest.mark.parametrize("tokenizer", ["fast", "slow"])
def test_nothing_of_a_model_is_run(model: Path, tmp_path: Path, tokenizer: str) -> None:
    """R2: guards against code that comes with a model: neither imported nor unpickled nor even opened, in no process.

    Without a tokenizer.json it is transformers that reads the directory.
    """
    path = baited(model, tmp_path / "model")
    if tokenizer == "slow":
        vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
        (path / "tokenizer.json").unlink()
        (path / "vocab.json").write_text(json.dumps(vocabulary))
        (path / "merges.txt").write_text("#version: 0.2\n")
        edit(path / "tokenizer_config.json", tokenizer_class="EvilTokenizer")
    watch, log = tmp_path / "watch", tmp_path / "log"
    watch.mkdir()
    (watch / "sitecustomize.py").write_text(WATCH)
    layout = "tp2" if tokenizer == "fast" else "1"
    done, _ = command(
        path,
        *("--layout", layout, "--max-tokens", "2", "hello"),
        PYTHONPATH=str(watch),
        WATCHED_LOG=str(log),
        WATCHED_DIRECTORY=str(path),
    )
    assert not list(tmp_path.rglob(RAN)), done.stderr
    assert "Traceback" not in done.stderr
    assert (done.returncode == 0) if tokenizer == "fast" else (done.returncode in (0, 2)), done.stderr
    seen = log.read_text().splitlines()
    assert any(line.endswith("config.json") for line in seen), "nothing was watched"
    read = {line.split(" ", 1)[1] for line in seen}
    data = (".json", ".safetensors", ".jinja", ".txt", "/model")
    assert not [name for name in read if not name.endswith(data)], seen
    assert {line.split(" ", 1)[0] for line in seen} == {"open"}


BROKEN = {
    "truncated": lambda data: data[: len(data) // 2],
    "a bit of the header": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
    "lying length": lambda data: struct.pack("<Q", 2**62) + data[8:],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_ends_the_command(model: Path, tmp_path: Path, name: str) -> None:
    """R9: guards the exit code, the one line with the file's name, and that no process is left, with two ranks."""
    path = tmp_path / "model"
    shutil.copytree(model, path)
    file = path / "model.safetensors"
    file.write_bytes(BROKEN[name](file.read_bytes()))
    done, took = command(path, "--layout", "tp2", "hello")
    assert done.returncode == 3, done.stderr
    assert str(file) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert took < 10


def test_a_broken_gguf_ends_the_command(tmp_path: Path) -> None:
    """R10: guards the same for GGUF."""
    file = test_gguf.write(tmp_path, test_gguf.HOSTILE["array of 2**62 strings"], body=64)
    done, _ = command(file, "--layout", "tp2", "hello")
    assert done.returncode == 3, done.stderr
    assert str(file) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def peak(reset: bool = False) -> int:
    """The most memory that this process had since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    fields = Path("/proc/self/status").read_text().split()
    return int(fields[fields.index("VmHWM:") + 1]) * 1024


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="there is no telling the peak")
def test_lies_cost_no_memory(tmp_path: Path) -> None:
    """R9, R10: guards memory as the system counts it: 16 MB and the header, whatever a file says of itself."""
    cases: list[tuple[Path, Any]] = []
    for at, (header, data) in enumerate(test_safetensors.HOSTILE.values()):
        directory = tmp_path / f"s{at}"
        directory.mkdir()
        test_safetensors.write(directory / "model.safetensors", header, data)
        cases.append((directory, index_safetensors))
    for at, content in enumerate(test_gguf.HOSTILE.values()):
        directory = tmp_path / f"g{at}"
        directory.mkdir()
        cases.append((test_gguf.write(directory, content, body=64), read_gguf))
    large = tmp_path / "large"
    large.mkdir()
    text = json.dumps({"__metadata__": {"a": "x" * 2**25}, "t": test_safetensors.entry("F7")}).encode()
    test_safetensors.write(large / "model.safetensors", text, bytes(8))
    cases.append((large, index_safetensors))
    for path, read in cases:
        size = len(text) if path is large else 0
        before = peak(reset=True)
        began = time.thread_time()
        with pytest.raises(LoadError):
            read(path)
        assert time.thread_time() - began < 1, path
        assert peak() - before < 16e6 + size, path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_many_mutants(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F21, F22, R9, R10: the mutants of the quick tests, by the thousand."""
    module: Any = test_safetensors if kind == "safetensors" else test_gguf
    plain = module.random.Random
    for seed in range(10):
        monkeypatch.setattr(module.random, "Random", lambda number, seed=seed: plain(1000 * seed + number))
        module.test_mutants(tmp_path)
