"""From a model's keys to a model argument and an EngineConfig. Knows no bodies and no processes; opens no weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.config import EngineConfig, Layout
from shardwise.features import Compile, MaxMemory, Quantization, Speculation
from shardwise.shapes import build
from shardwise.store.archive import Folder
from shardwise.store.manifest import Manifest
from shardwise.store.settings import (
    DeepspeedConfig,
    DeepspeedKeys,
    Frontend,
    HandlerKeys,
    PippyKeys,
    Settings,
)
from shardwise.store.styles import Style
from shardwise.strict_yaml import read

SPECULATE_K = 8
"""Drafts of a round, where GPT-fast's handler isn't told."""
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16"}
PICKLED = (".pth", ".pt", ".bin")
ROUNDED = re.compile(r".*_(int8|int4)(?:\.g([0-9]{1,4}))?\.pth")
"""How gpt-fast names what it has quantised."""


def plan_engine(
    folder: Folder, manifest: Manifest, settings: Settings, style: Style, workers: int, given: Mapping[str, Any]
) -> tuple[str, EngineConfig, tuple[str, ...]]:
    """The model, how it is run, and what to tell an operator. Raises ValueError for what can't be."""
    frontend, keys = settings.frontend, style.keys
    pippy = settings.shipped("pippy", PippyKeys)
    zero = _deepspeed(folder, settings.shipped("deepspeed", DeepspeedKeys))
    notes: list[str] = []
    named = {name: getattr(keys, name) for name in ("converted_ckpt_dir", "model_path", "model_name")}
    named |= {"serializedFile": manifest.serialized_file, "folder": "."}
    key, asked = next((name, value) for name, value in named.items() if value)
    model, rounded = _find(folder, key, asked, notes)
    _check_beside(folder, model, keys)
    said: dict[str, Any] = {
        "layout": _layout(frontend, pippy, zero, workers),
        "quantize": rounded or _bits(keys),
        "speculate": _drafts(folder, model, rounded, keys, notes),
        "device": {"gpu": "cuda", "cpu": "cpu", None: "auto"}[frontend.device_type],
        "threads": frontend.torchrun.omp_number_threads,
        "dtype": _dtype(keys, zero),
        "compile": _compile(keys),
    }
    if frontend.device_ids is not None:
        said["device_ids"] = frontend.device_ids
    if frontend.max_retry_timeout is not None:
        said["restart_timeout"] = float(frontend.max_retry_timeout)
    if frontend.startup_timeout is not None:
        said["start_timeout"] = float(frontend.startup_timeout)
    if (step := pippy.rpc_timeout or frontend.response_timeout) is not None:
        said["step_timeout"] = float(step)
    if frontend.batch_size is not None or frontend.continuous_batching is False:
        said["max_num_seqs"] = frontend.batch_size or 1
    if pippy.chunks > 1:
        usual = EngineConfig()
        said["max_batch_tokens"] = max(1, usual.max_batch_tokens // pippy.chunks)
        said["max_chunk"] = max(1, usual.max_chunk // pippy.chunks)
    if zero.max_out_tokens is not None:
        said["max_model_len"] = zero.max_out_tokens
    if zero.replace_with_kernel_inject is False:
        said["kernels"] = "torch"
    if keys.max_memory is not None:
        said["max_memory"] = MaxMemory.parse(keys.max_memory)
        said["offload_dir"] = str(folder.path / keys.offload_folder) if keys.offload_folder is not None else None
    check_hosts(frontend, f"--model {model} --layout {said['layout']}")
    if manifest.requirements_file is not None:
        notes.append(f"{manifest.requirements_file} is not installed: a shipped handler needs nothing")
    return model, EngineConfig(**{**said, **given}), tuple(notes)


def _layout(frontend: Frontend, pippy: PippyKeys, zero: DeepspeedConfig, workers: int) -> Layout:
    kind, ranks = frontend.parallel_type or "none", frontend.num_ranks
    if zero.tensor_parallel is not None:
        size = zero.tensor_parallel.tp_size
        if kind == "none" and ranks == 1:
            kind, ranks = "tp", size
        if size != ranks or (kind != "tp" and size > 1):
            raise ValueError(
                f"deepspeed's tp_size {size} says another layout than parallelType {kind} of {ranks} processes"
            )
    ranks *= frontend.torchrun.nnodes
    stages = pippy.pp_group_size
    if kind == "custom":
        raise ValueError("parallelType custom leaves the layout to a handler of the model's own: say tp, pp or pptp")
    if stages is not None and (kind not in ("pp", "pptp") or (kind == "pp" and stages != ranks)):
        raise ValueError(
            f"pippy.pp_group_size {stages} goes with parallelType pptp, and here that is {kind} of {ranks}"
        )
    if kind == "pptp":
        if stages is None or ranks % stages:
            raise ValueError(
                f"parallelType pptp needs pippy.pp_group_size, the number of pipeline stages, which divides the "
                f"{ranks} processes of a worker"
            )
        return Layout(dp=workers, tp=ranks // stages, pp=stages)
    return Layout(dp=workers, pp=ranks) if kind == "pp" else Layout(dp=workers, tp=ranks)


def _find(folder: Folder, key: str, asked: str, notes: list[str]) -> tuple[str, Quantization | None]:
    """A model argument, from a path in the folder or elsewhere, an alias or a hub id; and the rounding it is named for.

    ``key`` is where it is asked for.
    ``,quantize=int8`` or ``int4`` after it rounds its weights when they are read.
    """
    asked, given, text = asked.partition(",quantize=")
    rounded = Quantization.parse(text) if given else None
    path = folder.path / Path(asked).expanduser()
    if path.suffix in PICKLED:
        model = _beside(path, f"{key} {asked}", notes)
        if named := ROUNDED.fullmatch(path.name):
            rounded = rounded or Quantization.parse(named[1] + (f",group={named[2]}" if named[2] else ""))
        return model, rounded
    if not path.exists():
        return asked, rounded
    pickled = [name for name in ("*.bin", "*.pth", "*.pt") if any(path.glob(name))] if path.is_dir() else []
    if pickled and not any(any(path.glob(name)) for name in ("*.safetensors", "*.gguf")):
        raise ValueError(f"{key} {asked} holds its weights as {pickled[0]}, {_remedy(path)}")
    return str(path), rounded


def _beside(path: Path, asked: str, notes: list[str]) -> str:
    """The directory of a pickled checkpoint, if the same model lies there in a format that is opened."""
    beside = path.parent
    if (beside / "config.json").is_file() and any(beside.glob("*.safetensors")):
        notes.append(f"{asked} is not opened: the weights are read from the safetensors beside it")
        return str(beside)
    if len(found := sorted(beside.glob("*.gguf"))) == 1:
        notes.append(f"{asked} is not opened: the weights are read from {found[0].name} beside it")
        return str(found[0])
    raise ValueError(f"{asked} is a pickled checkpoint with no safetensors or .gguf beside it, {_remedy(path)}")


def _remedy(path: Path) -> str:
    target = path.with_name(f"{path.stem}-safetensors")
    return f"and only shardwise convert opens such: run `shardwise convert {path} {target}` and name {target} instead"


def _drafts(
    folder: Folder, model: str, rounded: Quantization | None, keys: HandlerKeys, notes: list[str]
) -> Speculation | None:
    """What drafts: another model, or the model itself where its own name comes with another rounding."""
    if keys.draft_checkpoint_path is None:
        return None
    draft, narrow = _find(folder, "draft_checkpoint_path", keys.draft_checkpoint_path, notes)
    k = SPECULATE_K if keys.speculate_k is None else keys.speculate_k
    if draft != model:
        return Speculation("draft", model=draft, k=k, quantize=narrow)
    if narrow is None or narrow == rounded:
        raise ValueError(
            f"draft_checkpoint_path names the model itself, which would only cost: name a smaller one, or say "
            f"{keys.draft_checkpoint_path},quantize=int4 to have it draft with its own weights rounded"
        )
    return Speculation("self", k=k, quantize=narrow)


def _deepspeed(folder: Folder, keys: DeepspeedKeys) -> DeepspeedConfig:
    if keys.checkpoint is not None:
        path = folder.file(keys.checkpoint)
        names = re.findall(r'"([^"]+\.(?:bin|pt|pth))"', path.read_text(errors="replace")) if path.is_file() else []
        if names:
            raise ValueError(
                f"deepspeed.checkpoint {keys.checkpoint} names {names[0]}, {_remedy(folder.path / names[0])}"
            )
    if keys.config is None:
        return DeepspeedConfig()
    path = folder.file(keys.config)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config {keys.config} can't be read: {error}") from None
    return build(read(text.expandtabs(), path), DeepspeedConfig)  # JSON is YAML but for its tabs, which text has not


def _dtype(keys: HandlerKeys, zero: DeepspeedConfig) -> str:
    said = {
        DTYPES.get(name, name)
        for each in (keys.dtype, keys.torch_dtype, zero.dtype)
        if each
        for name in [each.removeprefix("torch.")]
    }
    if len(said) > 1:
        raise ValueError(f"dtype is said twice, as {' and '.join(sorted(said))}")
    return said.pop() if said else "auto"


def _bits(keys: HandlerKeys) -> Quantization | None:
    if keys.load_in_8bit or keys.load_in_4bit:
        return Quantization.parse("int8" if keys.load_in_8bit else "int4")
    return None


def _compile(keys: HandlerKeys) -> Compile | None:
    if keys.fx_graph_cache is not None and not keys.compile:
        raise ValueError("fx_graph_cache is a cache of what compile makes: say compile true, or leave it out")
    if not keys.compile:
        return None
    return Compile(options={} if keys.fx_graph_cache is not False else {"fx_graph_cache": False})


def _check_beside(folder: Folder, model: str, keys: HandlerKeys) -> None:
    """Files that are named apart have to be those that are read with the model."""
    home = Path(model) if Path(model).is_dir() else Path(model).parent
    index = keys.index_filename or keys.index_file_name
    if index is not None:
        path = home / index
        if path.name.endswith(tuple(f"{suffix}.index.json" for suffix in PICKLED)):
            raise ValueError(f"index_filename {index} is of pickled weights, {_remedy(home)}")
        if not path.is_file():
            raise ValueError(f"index_filename {index} isn't in {home}")
    for name in ("tokenizer_path", "model_args_path"):
        value = getattr(keys, name)
        if value is not None and (folder.path / value).resolve().parent != home.resolve():
            raise ValueError(
                f"{name} {value} isn't in {home}, and a model is read with the files that lie beside its weights: "
                "shardwise convert puts them there"
            )


def check_hosts(frontend: Frontend, instead: str = "") -> None:
    """Raise ValueError for several hosts, with what serves the model over them ``instead``, if anything does."""
    run = frontend.torchrun
    flags = {
        "nnodes": run.nnodes,
        "nproc-per-node": frontend.num_ranks,
        "node-rank": run.node_rank,
        "rdzv-backend": run.rdzv_backend,
        "rdzv-endpoint": run.rdzv_endpoint,
        "rdzv-conf": run.rdzv_conf,
        "monitor-interval": run.monitor_interval,
    }
    if run.nnodes > 1:
        words = " ".join(f"--{name} {value}" for name, value in flags.items() if value is not None)
        remedy = f"start `torchrun {words} -m shardwise serve {instead}` on each" if instead else "nnodes can be 1"
        raise ValueError(f"torchrun.nnodes {run.nnodes}: a store's models run on one host; {remedy}")
    if named := [name for name in ("rdzv-endpoint", "rdzv-conf") if flags[name] is not None]:
        raise ValueError(
            f"torchrun.{named[0]} is where processes of several hosts meet, and torchrun.nnodes is 1: leave it out"
        )
