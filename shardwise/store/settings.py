"""model-config.yaml: TorchServe's keys and those of its handlers, each with its kind; what has no meaning is refused.

Knows the keys; `stored` says what each of them becomes. A key that isn't here is an error with its line and the nearest
key, and so is a value of another kind: nothing is left at a default because it was mistyped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

from shardwise.shapes import build, located, values
from shardwise.strict_yaml import Section, read_file

T = TypeVar("T")

STATEFUL = "sequences that a worker keeps a state for are not served: each request brings its whole prompt"
REFUSED = {
    "sequenceBatching": STATEFUL,
    "sequenceMaxIdleMSec": STATEFUL,
    "sequenceTimeoutMSec": STATEFUL,
    "maxSequenceJobQueueSize": STATEFUL,
    "maxNumSequence": STATEFUL,
    "asyncCommunication": "workers always take requests while others run; leave it out",
    "useVenv": "nothing is ever installed for a model; install what it needs beside shardwise",
    "micro_batching": "batches are cut into steps by the engine; pippy.chunks makes those smaller",
    "torchrun.max-restarts": "a worker that dies is started again for maxRetryTimeoutInSec; say that",
    "handler.trust_remote_code": "a model's own code is never run",
    "handler.vllm_engine_config": "vLLM doesn't run here; say what it should do in this file's own keys",
}
"""Keys of TorchServe and its examples that are not taken, and why."""
Dtype = Literal["fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "auto"]


def key(name: str) -> dict[str, str]:
    """Metadata of a field whose key is written otherwise."""
    return {"key": name}


@dataclass(frozen=True)
class Torchrun:
    """How many processes make a worker, and where those of several hosts meet."""

    nnodes: int = 1
    nproc_per_node: int | None = field(default=None, metadata=key("nproc-per-node"))
    node_rank: int | None = field(default=None, metadata=key("node-rank"))
    rdzv_backend: str | None = field(default=None, metadata=key("rdzv-backend"))
    rdzv_endpoint: str | None = field(default=None, metadata=key("rdzv-endpoint"))
    rdzv_conf: str | None = field(default=None, metadata=key("rdzv-conf"))
    monitor_interval: float | None = field(default=None, metadata=key("monitor-interval"))
    omp_number_threads: int | None = field(default=None, metadata=key("OMP_NUMBER_THREADS"))

    def __post_init__(self) -> None:
        positive(self, "nnodes", "nproc_per_node", "monitor_interval", "omp_number_threads")
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"node-rank must be from 0 to {self.nnodes - 1} with nnodes {self.nnodes}")


@dataclass(frozen=True)
class Frontend:
    """How a model's workers are run and how its requests wait, in TorchServe's words; None: not said."""

    min_workers: int = field(default=1, metadata=key("minWorkers"))
    max_workers: int | None = field(default=None, metadata=key("maxWorkers"))
    batch_size: int | None = field(default=None, metadata=key("batchSize"))
    max_batch_delay: int | None = field(default=None, metadata=key("maxBatchDelay"))
    """Milliseconds."""
    response_timeout: int | None = field(default=None, metadata=key("responseTimeout"))
    """Seconds, as the next one."""
    startup_timeout: int | None = field(default=None, metadata=key("startupTimeout"))
    device_type: Literal["cpu", "gpu"] | None = field(default=None, metadata=key("deviceType"))
    device_ids: tuple[int, ...] | None = field(default=None, metadata=key("deviceIds"))
    parallel_type: Literal["none", "", "pp", "tp", "pptp", "custom"] | None = field(
        default=None, metadata=key("parallelType")
    )
    parallel_level: int | None = field(default=None, metadata=key("parallelLevel"))
    torchrun: Torchrun = field(default_factory=Torchrun)
    job_queue_size: int | None = field(default=None, metadata=key("jobQueueSize"))
    use_job_ticket: bool = field(default=False, metadata=key("useJobTicket"))
    client_timeout: int | None = field(default=None, metadata=key("clientTimeoutInMills"))
    """Milliseconds."""
    continuous_batching: bool | None = field(default=None, metadata=key("continuousBatching"))
    max_retry_timeout: int | None = field(default=None, metadata=key("maxRetryTimeoutInSec"))

    def __post_init__(self) -> None:
        positive(self, "max_workers", "batch_size", "response_timeout", "startup_timeout", "parallel_level")
        positive(self, "job_queue_size", "client_timeout", "max_retry_timeout")
        for name in ("min_workers", "max_batch_delay"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{spelling(self, name)} must be at least 0, not {getattr(self, name)}")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(f"maxWorkers {self.max_workers} is less than minWorkers {self.min_workers}")
        ids = self.device_ids
        if ids is not None and (not ids or len(set(ids)) < len(ids) or min(ids) < 0):
            raise ValueError(f"deviceIds must be different numbers of at least 0, not {list(ids)}")
        if ids is not None and self.device_type == "cpu":
            raise ValueError("deviceIds are numbers of GPUs, and deviceType is cpu")
        if self.parallel_level is not None and self.torchrun.nproc_per_node is not None:
            raise ValueError(
                f"parallelLevel {self.parallel_level} and torchrun.nproc-per-node {self.torchrun.nproc_per_node} both "
                "say how many processes make a worker: leave out one of them"
            )
        if self.num_ranks > 1 and self.parallel_type in (None, "none", ""):
            raise ValueError(f"parallelType must be tp, pp or pptp where {self.num_ranks} processes make a worker")
        if self.num_ranks == 1 and self.parallel_type == "pptp":
            raise ValueError("parallelType pptp needs torchrun.nproc-per-node or parallelLevel of more than 1")

    @property
    def num_ranks(self) -> int:
        """Processes of one worker on this host."""
        return self.parallel_level or self.torchrun.nproc_per_node or 1


@dataclass(frozen=True)
class HandlerKeys:
    """The section handler: of the shipped handlers, all of which read all of it. None: not said."""

    style: str | None = None
    """Our own: which shipped handler serves the model; see `styles`."""
    converted_ckpt_dir: str | None = None
    model_path: str | None = None
    model_name: str | None = None
    index_filename: str | None = None
    index_file_name: str | None = None
    tokenizer_path: str | None = None
    model_args_path: str | None = None
    draft_checkpoint_path: str | None = None
    speculate_k: int | None = None
    compile: bool = False
    fx_graph_cache: bool | None = None
    stream: bool | None = None
    profile: bool = False
    max_new_tokens: int | None = None
    max_length: int | None = None
    manual_seed: int | None = None
    dtype: Dtype | None = None
    torch_dtype: Dtype | None = None
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    mode: Literal["text_completion", "chat"] | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    return_full_text: bool | None = None
    max_memory: dict[str, int | str] | None = None
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None
    low_cpu_mem_usage: bool | None = None
    offload_folder: str | None = None
    offload_state_dict: bool | None = None

    def __post_init__(self) -> None:
        positive(self, "max_new_tokens", "max_length", "speculate_k")
        once(self, "dtype", "torch_dtype")
        once(self, "load_in_8bit", "load_in_4bit")
        once(self, "index_filename", "index_file_name")
        once(self, "converted_ckpt_dir", "model_path")
        if self.draft_checkpoint_path is None and self.speculate_k is not None:
            raise ValueError("speculate_k is for drafts: name what drafts with draft_checkpoint_path")
        if self.do_sample is False and any(each is not None for each in (self.temperature, self.top_p, self.top_k)):
            raise ValueError("do_sample false is greedy decoding: leave out temperature, top_p and top_k")
        if self.low_cpu_mem_usage is False or self.offload_state_dict is False:
            name = "low_cpu_mem_usage" if self.low_cpu_mem_usage is False else "offload_state_dict"
            raise ValueError(f"{name} false asks for a second copy in memory, which is never made: leave it out")
        if self.offload_folder is not None and self.max_memory is None:
            raise ValueError("offload_folder is for what max_memory leaves no room for: give both")


@dataclass(frozen=True)
class PippyKeys:
    """The section pippy:."""

    rpc_timeout: float | None = None
    """Seconds."""
    num_worker_threads: int | None = None
    chunks: int = 1
    input_names: tuple[str, ...] = ("input_ids",)
    model_type: Literal["HF"] = "HF"
    pp_group_size: int | None = None

    def __post_init__(self) -> None:
        positive(self, "rpc_timeout", "num_worker_threads", "chunks", "pp_group_size")
        if self.input_names not in (("input_ids",), ("input_ids", "attention_mask")):
            raise ValueError(
                f"input_names must be [input_ids], not {list(self.input_names)}: decoders read nothing else"
            )


@dataclass(frozen=True)
class DeepspeedKeys:
    """The section deepspeed:."""

    config: str | None = None
    """A file in the model's folder, whose keys are those of `DeepspeedConfig`."""
    checkpoint: str | None = None


@dataclass(frozen=True)
class TensorParallel:
    """tensor_parallel of a DeepSpeed configuration."""

    enabled: Literal[True] = True
    tp_size: int = 1

    def __post_init__(self) -> None:
        positive(self, "tp_size")


@dataclass(frozen=True)
class DeepspeedConfig:
    """What is read of ds-config.json."""

    dtype: Literal["fp32", "fp16", "bf16", "torch.half", "torch.float16", "torch.bfloat16", "torch.float32"] | None = (
        None
    )
    tensor_parallel: TensorParallel | None = None
    replace_with_kernel_inject: bool | None = None
    replace_method: Literal["auto"] = "auto"
    enable_cuda_graph: Literal[False] = False
    max_out_tokens: int | None = None

    def __post_init__(self) -> None:
        positive(self, "max_out_tokens")


@dataclass(frozen=True)
class Settings:
    """A model-config.yaml."""

    frontend: Frontend
    document: Section
    """All of it, for custom handlers."""
    sections: Section
    """handler, pippy, deepspeed, and whatever else a custom handler reads."""

    def shipped(self, name: str, kind: type[T]) -> T:
        """One of the sections as a shipped handler reads it; the defaults where it isn't there. Raises ValueError."""
        section = self.sections.get(name)
        if section is None:
            return kind()
        if not isinstance(section, Section):
            raise self.sections.error(name, f"{name} must be a section of keys")
        _refuse(section, f"{name}.")
        return build(section, kind)

    def check_shipped(self) -> None:
        """Raise ValueError for a section that no shipped handler has, or a key of them."""
        values(self.sections, {"handler": Section, "pippy": Section, "deepspeed": Section})
        self.shipped("handler", HandlerKeys)
        self.shipped("pippy", PippyKeys)
        self.shipped("deepspeed", DeepspeedKeys)

    def locate(self, error: ValueError) -> ValueError:
        """An error with the line of the key that it begins with, if there is one and it doesn't have it yet."""
        file = self.document.where.rpartition(":")[0]
        if file and file in str(error):
            return error
        word = (re.match(r"[\w-]+", str(error)) or [""])[0]
        within = [each for each in self.sections.values() if isinstance(each, Section) and word in each]
        return located(within[0] if within and word not in self.document else self.document, error)


def read_settings(path: Path | None) -> Settings:
    """A model-config.yaml; None is an empty one. Raises ValueError with the line of what can't be honoured."""
    document = read_file(path) if path is not None else Section("model-config.yaml:1")
    _refuse(document, "")
    known = [item.metadata.get("key", item.name) for item in fields(Frontend)]
    ours, others = Section(document.where), Section(document.where)
    for name, value in document.items():
        near = get_close_matches(name, known, 1, 0.8)
        if name not in known and near and name not in ("handler", "pippy", "deepspeed"):
            raise document.error(name, f"unknown key {name!r}; did you mean {near[0]!r}?")
        (ours if name in known else others).put(name, value, document.at(name))
    torchrun = ours.get("torchrun")
    if isinstance(torchrun, Section):
        _refuse(torchrun, "torchrun.")
    return Settings(build(ours, Frontend), document, others)


def _refuse(section: Section, prefix: str) -> None:
    for name in section:
        if prefix + name in REFUSED:
            raise section.error(name, f"{prefix}{name} is not taken: {REFUSED[prefix + name]}")


def positive(owner: Any, *names: str) -> None:
    """Check that fields are above 0, or not given."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value > 0:
            raise ValueError(f"{spelling(owner, name)} must be above 0, not {value}")


def once(owner: Any, one: str, other: str) -> None:
    """Check that two names of one thing aren't both given."""
    if getattr(owner, one) and getattr(owner, other):
        raise ValueError(f"{spelling(owner, one)} and {spelling(owner, other)} say the same thing: leave out one")


def spelling(owner: Any, name: str) -> str:
    """How the key of a field is written."""
    return next(str(item.metadata.get("key", name)) for item in fields(owner) if item.name == name)
