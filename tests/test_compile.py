"""What may be said of torch.compile, and what is refused, before torch is imported or a weight is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise import LLM
from shardwise.config import EngineConfig, Layout
from shardwise.features import Compile, MaxMemory
from shardwise.mapping.config import MapConfig
from shardwise.mapping.job import Job
from shardwise.mapping.source import encode_values
from shardwise.options import compilation
from shardwise.runtime import backends, compiling
from shardwise.runtime.backends import check_backend
from tests.tiny import save_text_model

GOOD: list[tuple[str, Compile]] = [
    ("inductor", Compile()),
    ("inductor,mode=max-autotune", Compile(mode="max-autotune")),
    ('openvino,options={"device": "CPU", "n": [1, 2]}', Compile("openvino", options={"device": "CPU", "n": [1, 2]})),
    ('inductor,mode=default,options={"dynamic": false}', Compile(mode="default", options={"dynamic": False})),
]


@pytest.mark.parametrize(("text", "value"), GOOD, ids=lambda each: str(each)[:24])
def test_a_compilation_is_read_and_written(text: str, value: Compile) -> None:
    """Guards recipes and flags: what is written is read, with types as JSON has them, and the other way round."""
    assert Compile.parse(text) == value
    assert str(value) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no backend's name"),
        ("The sky is", "no backend's name"),
        ("inductor,max-autotune", "BACKEND,mode=MODE"),
        ("inductor,mode=fast", "max-autotune-no-cudagraphs, not 'fast'"),
        ("openvino,mode=", "mode must be a name"),
        ("openvino,options=[1]", "not a JSON object"),
        ("openvino,options={", "not a JSON object"),
        ('openvino,options={"a": 1, "a": 2}', "given twice"),
        ('openvino,options={"a": NaN}', "JSON values"),
        ('openvino,options={"dynamic": 3}', "true, false or null"),
        ('inductor,mode=default,options={"max_autotune": true}', "not both"),
    ],
)
def test_a_compilation_that_can_t_be(text: str, why: str) -> None:
    """Guards against a setting that is misread or quietly dropped."""
    with pytest.raises(ValueError, match=why):
        Compile.parse(text)


def test_flags_make_one_setting() -> None:
    """Guards the three flags: together they say one thing, and none of them says it alone or twice."""
    assert compilation(None, None, None) is None
    assert compilation("inductor", "max-autotune", None) == Compile(mode="max-autotune")
    assert compilation("x", None, '{"a": {"b": [1.5]}}') == Compile("x", options={"a": {"b": [1.5]}})
    with pytest.raises(ValueError, match="are for --compile BACKEND"):
        compilation(None, None, "{}")
    with pytest.raises(ValueError, match="says already"):
        compilation("inductor,mode=default", "default", None)


def test_dynamic_is_on_and_torch_s_own() -> None:
    """a11: guards growing sequences from a graph for each length, and backends from an option that isn't theirs."""
    assert Compile().dynamic is True
    by = Compile("x", options={"dynamic": None, "deep": True})
    assert by.dynamic is None
    assert by.passed == {"deep": True}


@pytest.mark.parametrize(
    ("by", "device", "why"),
    [
        (Compile("torch_tensorrt"), "cuda", "torch_tensorrt is not installed: pip install torch-tensorrt"),
        (Compile("tensorrt"), "cuda", "tensorrt is not installed: pip install torch-tensorrt"),
        (Compile("openvino"), "cpu", "openvino is not installed: pip install openvino"),
        (Compile("cudagraphs"), "cpu", "this runs on the CPU"),
        (Compile("inductor"), "cuda", "pip install triton"),
        (Compile("eager", mode="x"), "cpu", "neither mode nor options"),
        (Compile("aot_eager", options={"a": 1}), "cpu", "neither mode nor options"),
        (Compile("indctor"), "cpu", "no backend indctor; torch knows .*inductor.*torch_dynamo_backends"),
    ],
    ids=lambda each: getattr(each, "backend", None),
)
def test_a_backend_that_isn_t_here(by: Compile, device: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards users from a stack trace of a rank, or a silent way without: refused by name, with how to get it."""
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=why):
        check_backend(by, device, processes=True)


def test_inductor_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards users of a bare machine from finding it out in the first request."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"no no-such-compiler: install g\+\+"):
        check_backend(Compile(), "cpu", processes=True)
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(backends.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ValueError, match=r"no Python\.h .*python3-dev"):
        check_backend(Compile(), "cpu", processes=True)
    (tmp_path / "Python.h").touch()
    check_backend(Compile(), "cpu", processes=True)


def test_a_backend_of_this_process_is_not_the_ranks() -> None:
    """Guards against a backend that the front finds, and ranks in processes of their own don't."""
    from torch._dynamo.backends import registry

    name = "of_this_test"
    registry.register_backend(lambda graph, inputs: graph.forward, name=name)
    try:
        check_backend(Compile(name), "cpu", processes=False)
        with pytest.raises(ValueError, match="registered in this process, and ranks are others"):
            check_backend(Compile(name), "cpu", processes=True)
    finally:
        del registry._COMPILER_FNS[name], registry._BACKENDS[name]


def test_the_front_stays_without_torch() -> None:
    """Guards the quick start: what most people name is looked for without torch."""
    code = (
        "import sys; from shardwise.config import Compile; from shardwise.runtime.backends import check_backend\n"
        "for name in ('inductor', 'aot_eager', 'openvino'):\n"
        "    try: check_backend(Compile(name), 'cpu', processes=True)\n"
        "    except ValueError as error: print(error)\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_refused_before_a_rank_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards users from reading weights for nothing, of an engine and of a map."""

    def start(*_: Any) -> Any:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("shardwise.llm.launch", start)
    monkeypatch.setattr("shardwise.mapping.job.Team", start)
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install openvino"):
        LLM(save_text_model(tmp_path / "model"), device="cpu", compile="openvino")
    config = MapConfig("json:dumps", Layout(), device="cpu", compile=Compile("torch_tensorrt"))
    with pytest.raises(ValueError, match="pip install torch-tensorrt"):
        Job(config, encode_values([1]))
    with pytest.raises(ValueError, match="compile with max_memory"):
        EngineConfig(compile=Compile(), max_memory=MaxMemory(10**9))


def test_precisions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """a9: guards Torch-TensorRT's options: dtypes are no JSON, so they are named; all else stays as it is."""
    import torch

    monkeypatch.setenv(compiling.CACHE, str(tmp_path))
    found = compiling.open_options(
        {"enabled_precisions": ["fp16", "torch.float32", "bfloat16"], "precision": "fp16", "debug": True, "n": [1]}
    )
    assert found == {
        "enabled_precisions": {torch.float16, torch.float32, torch.bfloat16},
        "precision": torch.float16,
        "debug": True,
        "n": [1],
    }
    with pytest.raises(ValueError, match="'fp17' is no precision"):
        compiling.open_options({"enabled_precisions": ["fp17"]})
    with pytest.raises(ValueError, match=r"inductor refuses: .*no_such_option"):
        compiling.compile_call(len, Compile(options={"no_such_option": 1}))


def test_graphs_are_kept_where_nobody_else_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R1: guards against graphs, which torch reads as pickles, that somebody else has put there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = compiling.private_cache()
    assert directory == tmp_path / "shardwise" / "inductor"
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o777)
    assert compiling.private_cache().stat().st_mode & 0o777 == 0o700
    directory.rmdir()
    (tmp_path / "other").mkdir()
    directory.symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match="isn't a directory of yours"):
        compiling.private_cache()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ValueError, match="isn't a directory of yours"):
        compiling.private_cache()
