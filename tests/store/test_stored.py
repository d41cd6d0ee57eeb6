"""What the keys of a model-config.yaml become."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.config import EngineConfig, Layout
from shardwise.features import Compile, MaxMemory, Quantization, Speculation
from shardwise.runtime import launch
from shardwise.store.archive import ArchiveError
from shardwise.store.stored import open_stored
from tests.store.folders import make_folder, make_zip
from tests.store.test_settings import EVERY

INT8, INT4 = Quantization(8), Quantization(4, 32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What looks like a Hugging Face directory, of which no weights are read here."""
    return hugging_face(tmp_path / "checkpoints" / "m")


def hugging_face(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.model", "model.safetensors.index.json"):
        (path / name).write_text("{}")
    return path


def engine(folder: Path, yaml: str, handler: str | None = None, **given: Any) -> EngineConfig:
    return plan(folder, yaml, handler, **given)[1]


def plan(
    folder: Path, yaml: str, handler: str | None = None, **given: Any
) -> tuple[str, EngineConfig, tuple[str, ...]]:
    with open_stored(make_folder(folder, yaml, handler)) as stored:
        return stored.plan(given=given)


def test_every_key_becomes_something(tmp_path: Path, model: Path) -> None:
    """Guards requirement 28: each accepted key of the frontend is honoured, by the engine or by the server."""
    with open_stored(make_folder(tmp_path / "m", EVERY + f"handler:\n  model_path: {model}")) as stored:
        found = stored.plan()
        limits = stored.limits
        with pytest.raises(ValueError, match="0 to 3 workers"):
            stored.plan(4)
        assert stored.plan(3).engine.layout.dp == 3
    assert found.model == str(model)
    assert found.engine == EngineConfig(
        layout=Layout(dp=2, tp=2),
        device="cuda",
        device_ids=(2, 3),
        max_num_seqs=4,
        threads=2,
        start_timeout=60.0,
        step_timeout=300.0,
        restart_timeout=100.0,
    )
    assert (limits.min_workers, limits.max_workers, limits.queue_requests, limits.job_ticket) == (2, 3, 10, True)
    assert (limits.queue_timeout, limits.response_timeout) == (1.5, 300)


def test_what_the_operator_says_wins(tmp_path: Path, model: Path) -> None:
    """Guards the command line over the file: a folder made for GPUs runs on a CPU when it is told to."""
    found = engine(tmp_path / "m", f"deviceType: gpu\nhandler:\n  model_path: {model}", device="cpu", isolate=True)
    assert (found.device, found.isolate) == ("cpu", True)


LAYOUTS = {
    "": "1",
    "parallelType: tp\ntorchrun:\n  nproc-per-node: 2": "tp2",
    "parallelType: tp\nparallelLevel: 3": "tp3",
    "parallelType: pp\nparallelLevel: 2": "pp2",
    "parallelType: pp\nparallelLevel: 2\npippy:\n  pp_group_size: 2": "pp2",
    "parallelType: pptp\nparallelLevel: 6\npippy:\n  pp_group_size: 3": "tp2.pp3",
    "parallelType: pptp\nparallelLevel: 4\nminWorkers: 2\npippy:\n  pp_group_size: 2": "dp2.tp2.pp2",
    "parallelType: none\nminWorkers: 3": "dp3",
    "deepspeed:\n  config: ds-config.json": "tp2",
    "parallelType: tp\nparallelLevel: 2\ndeepspeed:\n  config: ds-config.json": "tp2",
}


@pytest.mark.parametrize("yaml", LAYOUTS)
def test_layouts(tmp_path: Path, model: Path, yaml: str) -> None:
    """Guards c11, c13: dp, tp, pp and their products, from the keys that say them."""
    (model / "ds-config.json").write_text('{"dtype": "fp16", "tensor_parallel": {"tp_size": 2}}')
    assert str(engine(model, yaml).layout) == LAYOUTS[yaml]


HOSTS = """parallelType: pp
torchrun:
    nnodes: 2
    nproc-per-node: 2
    node-rank: 1
    rdzv-backend: c10d
    rdzv-endpoint: h:1
    rdzv-conf: a=1
    monitor-interval: 3.0
"""
WRONG = {
    "parallelType: pptp\nparallelLevel: 4": r"yaml:1: parallelType pptp needs pippy\.pp_group_size",
    "parallelType: pptp\nparallelLevel: 4\npippy:\n  pp_group_size: 3": "which divides the 4",
    "parallelType: custom\nparallelLevel: 2": "yaml:1: parallelType custom leaves the layout",
    "parallelType: tp\nparallelLevel: 2\npippy:\n  pp_group_size: 2": r"pippy\.pp_group_size 2 goes with",
    "parallelType: pp\nparallelLevel: 2\ndeepspeed:\n  config: ds-config.json": "deepspeed's tp_size 2",
    HOSTS: (
        "torchrun --nnodes 2 --nproc-per-node 2 --node-rank 1 --rdzv-backend c10d --rdzv-endpoint h:1 --rdzv-conf a=1 "
        r"--monitor-interval 3.0 -m shardwise serve --model \S+/m --layout pp4"
    ),
    "torchrun:\n  rdzv-endpoint: h:1": r"torchrun\.rdzv-endpoint is where",
    "handler:\n  model_path: checkpoints/no.pth": r"yaml:2: .*shardwise convert \S+no\.pth \S+no-safetensors",
    "handler:\n  draft_checkpoint_path: '.'": "draft_checkpoint_path names the model itself",
    "handler:\n  fx_graph_cache: true": "yaml:2: fx_graph_cache is a cache",
    "handler:\n  index_filename: no.json": "yaml:2: index_filename no.json isn't in",
    "handler:\n  index_filename: pytorch_model.bin.index.json": "is of pickled weights, .*shardwise convert",
    "handler:\n  tokenizer_path: ../tokenizer.model": "yaml:2: tokenizer_path .* isn't in",
    "handler:\n  dtype: fp16\ndeepspeed:\n  config: bf16.json": "dtype is said twice, as bfloat16 and float16",
    "deepspeed:\n  config: bad.json": "bad.json:1: unknown key 'dtypes'; did you mean 'dtype'",
    "deepspeed:\n  config: ../x.json": "leads out",
    "deepspeed:\n  config: no.json": "yaml:2: config no.json can't be read",
    "deepspeed:\n  checkpoint: checkpoints.json": "names a.bin, .*shardwise convert",
    "handler:\n  max_memory: {'0': '10 lots'}": "yaml:2: max_memory: '10 lots'",
    "handler:\n  speculate_k: 20\n  draft_checkpoint_path: '.,quantize=int8'": "k must be a whole number from 1 to 16",
}


@pytest.mark.parametrize("yaml", WRONG)
def test_what_cannot_run_is_an_error(tmp_path: Path, model: Path, yaml: str) -> None:
    """Guards against a key that is read and then can't be honoured: the error has its line and a remedy."""
    files = {
        "ds-config.json": {"tensor_parallel": {"tp_size": 2}},
        "bad.json": {"dtypes": "fp16"},
        "bf16.json": {"dtype": "bf16"},
        "checkpoints.json": {"checkpoints": ["a.bin"]},
    }
    for name, content in files.items():
        (model / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=WRONG[yaml]):
        plan(model, yaml)


def test_gpt_fast_as_published(tmp_path: Path, model: Path) -> None:
    """Guards b1 to b9: the published model_config_speculative.yaml, with its .pth names, runs what lies beside them."""
    draft = hugging_face(tmp_path / "checkpoints" / "d")
    yaml = """
        minWorkers: 1
        maxWorkers: 1
        maxBatchDelay: 200
        responseTimeout: 300
        parallelType: "tp"
        deviceType: "gpu"
        continuousBatching: false
        torchrun:
            nproc-per-node: 4
        handler:
            profile: true
            converted_ckpt_dir: "../checkpoints/m/model_int8.pth"
            draft_checkpoint_path: "../checkpoints/%s"
            max_new_tokens: 50
            compile: true
            stream: false
    """
    found, by, notes = plan(tmp_path / "gpt_fast", yaml % "d/model_int4.g64.pth")
    assert Path(found).resolve() == model
    assert by.speculate is not None
    assert by.speculate.model is not None
    assert Path(by.speculate.model).resolve() == draft
    assert (by.speculate.k, by.speculate.quantize) == (8, Quantization(4, 64))
    assert (by.quantize, by.compile, by.max_num_seqs, str(by.layout)) == (INT8, Compile(), 1, "tp4")
    assert "model_int8.pth is not opened" in notes[0]
    by = plan(tmp_path / "gpt_fast", (yaml % "d/model_int4.g64.pth").rstrip() + "\n            fx_graph_cache: false")[
        1
    ]
    assert by.compile == Compile(options={"fx_graph_cache": False})
    by = plan(tmp_path / "gpt_fast", yaml % "m/model_int4.g32.pth")[1]
    assert by.speculate == Speculation("self", k=8, quantize=INT4)
    with open_stored(tmp_path / "gpt_fast") as stored:
        assert stored.style is not None
        assert (stored.style.name, stored.style.profile, stored.style.stream) == ("gpt_fast", True, False)


def test_models_and_drafts(tmp_path: Path, model: Path) -> None:
    """Guards the ways to name a model and what drafts for it: paths, aliases, roundings, the model itself."""
    said = "handler:\n  draft_checkpoint_path: %s\n  speculate_k: 3\n  model_name: %s"
    name, by, _ = plan(tmp_path / "m", said % ("'smollm2,quantize=int4,group=64'", "smollm2"))
    assert (name, by.speculate) == ("smollm2", Speculation("self", k=3, quantize=Quantization(4, 64)))
    by = engine(tmp_path / "m", said % ("owner/small", "owner/large"))
    assert by.speculate == Speculation("draft", model="owner/small", k=3)
    name, by, _ = plan(tmp_path / "m", "handler:\n  load_in_8bit: true\n  model_path: ../checkpoints/m")
    assert (Path(name).resolve(), by.quantize) == (model, INT8)
    gguf = tmp_path / "g" / "m.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"")
    name, by, _ = plan(tmp_path / "m", "handler:\n  converted_ckpt_dir: ../g/model.pth")
    assert Path(name).resolve() == gguf
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ValueError, match="shardwise convert"):
        plan(model, "")


def test_pippy_deepspeed_and_accelerate(model: Path) -> None:
    """Guards c3, c4, c27, c30: what their examples' keys mean here."""
    yaml = """
        parallelType: "pp"
        torchrun: {nproc-per-node: 2}
        pippy:
            rpc_timeout: 1800
            model_type: "HF"
            chunks: 4
            input_names: ["input_ids"]
            num_worker_threads: 512
        handler:
            model_path: "."
            index_filename: 'model.safetensors.index.json'
            max_length: 50
            max_new_tokens: 60
            manual_seed: 40
            dtype: fp16
    """
    by = engine(model, yaml)
    assert (str(by.layout), by.step_timeout, by.dtype) == ("pp2", 1800.0, "float16")
    assert (by.max_batch_tokens, by.max_chunk) == (128, 128)
    (model / "ds.json").write_text(
        '{\n\t"dtype": "torch.half", "replace_with_kernel_inject": false, "max_out_tokens": 99}'
    )
    by = engine(model, "deepspeed:\n  config: ds.json\n  checkpoint: made-by-theirs.json")
    assert (by.dtype, by.kernels, by.max_model_len) == ("float16", "torch", 99)
    yaml = """
        handler:
            max_memory: {"0": "10GB", "cpu": "20GB"}
            device_map: auto
            low_cpu_mem_usage: true
            offload_folder: cold
            offload_state_dict: true
            torch_dtype: bf16
    """
    by = engine(model, yaml)
    assert by.max_memory == MaxMemory.parse("0=10GB,cpu=20GB")
    assert (by.offload_dir, by.dtype) == (str(model / "cold"), "bfloat16")


def test_handlers_of_their_own_need_trust(tmp_path: Path, model: Path) -> None:
    """Guards against code of a model that is run, or silently replaced, without the operator's word."""
    folder = make_folder(
        tmp_path / "m", "handler:\n  converted_ckpt_dir: x\n  own: [1]", "handler.py", "raise SystemExit"
    )
    with pytest.raises(ValueError, match=r"only with --trust-handlers; or say handler\.style: gpt_fast"):
        open_stored(folder)
    stored = open_stored(folder, trust_handlers=True)
    assert (stored.custom, stored.handler, stored.style) == (True, "handler.py", None)
    assert stored.settings.document["handler"]["own"] == [1]
    for handler, error in {"no.py": "neither a file there nor", "../handler.py": "leads out"}.items():
        make_folder(folder, "", handler)
        with pytest.raises(ArchiveError, match=error):
            open_stored(folder, trust_handlers=True)
    make_folder(folder, "handler:\n  style: accelerate", "handler.py")
    assert not open_stored(folder).custom
    make_folder(folder, "continuousBatching: true", "handler.py:entry")
    with pytest.raises(ValueError, match="yaml:1: continuousBatching is for shipped"):
        open_stored(folder, trust_handlers=True)


def test_archives_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """Guards paths that are relative to an unpacked folder, the name and the version, and what is left of it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yaml = "handler:\n  model_path: weights"
    folder = make_folder(tmp_path / "made", yaml, "accelerate", modelName="theirs", modelVersion="2.1")
    model.rename(folder / "weights")
    archive = make_zip(tmp_path / "x.mar", folder)
    with open_stored(archive) as stored:
        assert (stored.name, stored.version) == ("theirs", "2.1")
        assert Path(stored.plan().model) == stored.folder / "weights"
        assert (stored.folder / "weights" / "config.json").is_file()
    assert not stored.folder.exists()
    with open_stored(archive, "ours") as stored:
        assert stored.name == "ours"
    with pytest.raises(ValueError, match="can't be a model's name"):
        open_stored(archive, "a/b")
    for version in ("1/0", "all", "2 0", "..", "2\n"):  # no address would name it
        make_folder(folder, "minWorkers: 0", "accelerate", modelVersion=version)
        with pytest.raises(ArchiveError, match="can't stand in an address"):
            open_stored(folder)
    assert not list(tmp_path.glob("shardwise-store-*"))


def test_device_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards deviceIds: ranks take these GPUs and no others, and GPUs that aren't there are told before any is used."""
    asked = EngineConfig(layout=Layout(dp=2), device_ids=(3, 1))
    with pytest.raises(ValueError, match="this host has no GPU 1; it has none"):
        launch._device(asked, 2)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path(f"/dev/nvidia{number}") for number in range(4)])
    assert launch._device(asked, 2) == "cuda"
    plan: Any = SimpleNamespace(local_size=2, engine=asked)
    assert [launch._gpu(plan, rank) for rank in range(2)] == [3, 1]
    with pytest.raises(ValueError, match="needs 3 GPUs on this host, one a rank, and there are 2"):
        launch._device(EngineConfig(layout=Layout(tp=3), device_ids=(3, 1)), 3)
    for wrong in ({"device_ids": (1, 1)}, {"device_ids": ()}, {"device_ids": (0,), "device": "cpu"}):
        with pytest.raises(ValueError, match="device_ids"):
            EngineConfig(**wrong)
