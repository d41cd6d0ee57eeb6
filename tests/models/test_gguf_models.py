"""The same model as a Hugging Face directory and as a GGUF file: the same bits, in every layout."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.numpy import load_file

from shardwise.config import Coordinates
from shardwise.kernels.ops import Ops
from shardwise.models.config import ModelConfig, Rope
from shardwise.models.families import bloom, gpt2, llama, mixtral, qwen3
from shardwise.models.families.family import vocabulary
from shardwise.models.families.rotation import rope_from_hf
from shardwise.parallel.axis import Axis
from shardwise.params import SamplingParams
from shardwise.runtime.launch import runner_spec
from shardwise.runtime.part import make_part
from shardwise.runtime.source import open_source
from shardwise.weights.checkpoint import LoadError
from tests.harness import Job, plan_of, run, threads
from tests.tiny import LLAMAS, OTHERS, save_gpt2, save_llama, save_other

Array = np.ndarray[Any, Any]


def paired(rows: Array, heads: int) -> Array:
    """As llama.cpp's converter stores q and k: the halves of each head's rotation side by side."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def names_of(table: dict[str, str], ends: dict[str, str], prefix: str, layers: int) -> dict[str, str]:
    """Hugging Face name → GGUF name, for weights and biases."""
    found = {new: old for old, new in ends.items()}
    for layer in range(layers):
        for old, new in table.items():
            for kind in ("weight", "bias"):
                found[f"{prefix}{layer}.{new}.{kind}"] = f"blk.{layer}.{old}.{kind}"
    return found


def to_gguf(source: Path, target: Path, arch: str, numbers: dict[str, Any], tensors: dict[str, Array]) -> Path:
    writer = GGUFWriter(target, arch)
    for key, value in numbers.items():
        kinds = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        kinds[type(value)](f"{arch}.{key}", value)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array.astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def llama_gguf(path: Path, target: Path, shape: str, more: dict[str, Any] | None = None, **extra: Array) -> Path:
    """``more`` are numbers beside the usual ones, or in place of them; ``extra`` are tensors."""
    size = LLAMAS[shape]
    names = names_of(llama.GGUF_LAYER, llama.GGUF_ENDS, "model.layers.", size["layers"])
    stored = {names[name]: array for name, array in load_file(path / "model.safetensors").items()}
    for name, array in stored.items():
        if "attn_q." in name or "attn_k." in name:
            stored[name] = paired(array, size["heads"] if "attn_q." in name else size["kv"])
    numbers = {
        "block_count": size["layers"],
        "context_length": 256,
        "embedding_length": size["hidden"],
        "feed_forward_length": size["width"],
        "attention.head_count": size["heads"],
        "attention.head_count_kv": size["kv"],
        "attention.key_length": size["dim"],
        "attention.value_length": size["dim"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": size["dim"],
        "rope.freq_base": 10000.0,
        "vocab_size": size["vocab"],
    }
    return to_gguf(path, target, "llama", {**numbers, **(more or {})}, {**stored, **extra})


def gpt2_gguf(path: Path, target: Path) -> Path:
    names = names_of(gpt2.GGUF_LAYER, gpt2.GGUF_ENDS, "h.", 3)
    stored = {
        names[name.removeprefix("transformer.")]: array.T if array.ndim == 2 and ".h." in name else array
        for name, array in load_file(path / "model.safetensors").items()
    }
    numbers = {
        "block_count": 3,
        "context_length": 256,
        "embedding_length": 35,
        "feed_forward_length": 140,
        "attention.head_count": 5,
        "attention.layer_norm_epsilon": 1e-5,
        "vocab_size": 83,
    }
    return to_gguf(path, target, "gpt2", numbers, stored)


RENAMED = {
    "qwen2": ("qwen2", llama.GGUF_LAYER),
    "qwen3": ("qwen3", qwen3.GGUF_LAYER),
    "qwen3_moe": ("qwen3moe", qwen3.GGUF_MOE_LAYER),
    "mixtral": ("llama", mixtral.GGUF_LAYER),
}
"""Their architectures, and their tensors by GGUF name."""


def other_gguf(path: Path, target: Path, name: str) -> Path:
    """What llama.cpp's converter makes of them: experts stacked, q and k in pairs for Mixtral alone."""
    arch, table = RENAMED[name]
    size = OTHERS[name][1]
    heads, kv = size["num_attention_heads"], size["num_key_value_heads"]
    names = names_of(table, llama.GGUF_ENDS, "model.layers.", 3)
    stored: dict[str, Array] = {}
    stacks: dict[str, dict[int, Array]] = {}
    for key, array in load_file(path / "model.safetensors").items():
        if match := re.fullmatch(r"(.*experts\.)(\d+)\.(.*)", key):
            stacks.setdefault(names[match[1] + match[3]], {})[int(match[2])] = array
        else:
            pairs = heads if ".q_proj." in key else kv if ".k_proj." in key else 0
            stored[names[key]] = paired(array, pairs) if pairs and name == "mixtral" else array
    stored |= {key: np.stack([stack[expert] for expert in range(len(stack))]) for key, stack in stacks.items()}
    width = size.get("intermediate_size", 1)
    numbers = {
        "block_count": 3,
        "context_length": 256,
        "embedding_length": size["hidden_size"],
        "feed_forward_length": width,
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        "attention.key_length": size["head_dim"],
        "attention.value_length": size["head_dim"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6 if name == "mixtral" else 1e4,
        "vocab_size": 83,
    }
    if stacks:
        experts = size.get("num_local_experts", size.get("num_experts"))
        numbers |= {"expert_count": experts, "expert_used_count": size["num_experts_per_tok"]}
        numbers |= {"expert_feed_forward_length": size.get("moe_intermediate_size", width)}
    return to_gguf(path, target, arch, numbers, stored)


def bloom_gguf(path: Path, target: Path) -> Path:
    """q, k and v of all heads one after the other, where Hugging Face has them head by head."""
    names, heads, hidden = names_of(bloom.GGUF_LAYER, bloom.GGUF_ENDS, "h.", 3), 12, 48
    stored = {}
    for key, array in load_file(path / "model.safetensors").items():
        if "query_key_value" in key:
            array = array.reshape(heads, 3, hidden // heads, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
        stored[names[key.removeprefix("transformer.")]] = array
    numbers = {
        "block_count": 3,
        "context_length": 256,
        "embedding_length": hidden,
        "feed_forward_length": 4 * hidden,
        "attention.head_count": heads,
        "attention.layer_norm_epsilon": 1e-5,
        "vocab_size": 83,
    }
    return to_gguf(path, target, "bloom", numbers, stored)


JOBS = [
    Job([5, 9, 13, 2, 40, 41, 42], SamplingParams(max_tokens=6, ignore_eos=True)),
    Job([(7 * index) % 61 for index in range(30)], SamplingParams(6, 0.8, seed=3, ignore_eos=True)),
]


@pytest.mark.parametrize("name", ["groups", "few_kv", "gpt2", "bloom", *RENAMED])
def test_both_formats_give_the_same_bits(tmp_path: Path, name: str) -> None:
    """Guards GGUF's own conventions: names, paired rotary rows, untransposed matrices, tied heads, numbers."""
    if name == "gpt2":
        path = save_gpt2(tmp_path / "hf")
        file = gpt2_gguf(path, tmp_path / "model.gguf")
    elif name in OTHERS:
        path = save_other(tmp_path / "hf", name, dtype=torch.float32)
        file = (bloom_gguf if name == "bloom" else partial(other_gguf, name=name))(path, tmp_path / "model.gguf")
    else:
        path = save_llama(tmp_path / "hf", name, dtype=torch.float32)
        file = llama_gguf(path, tmp_path / "model.gguf", name)
    found = []
    for model, layout in ((path, "1"), (file, "1"), (file, "tp3.pp2")):
        plan = plan_of(model, layout, dtype="float32")
        with threads(plan) as executors:
            found.append(run(executors, plan, JOBS, eos=frozenset()))
    assert found[0] == found[1] == found[2]


def test_rope_factors_of_a_file_are_used(tmp_path: Path) -> None:
    """Guards Llama 3's scaled rotation in GGUF files, which is a tensor of factors and not a setting."""
    path = save_llama(tmp_path / "hf", "groups", dtype=torch.float32)
    ones = llama_gguf(path, tmp_path / "ones.gguf", "groups", **{"rope_freqs.weight": np.ones(3)})
    some = llama_gguf(path, tmp_path / "some.gguf", "groups", **{"rope_freqs.weight": np.array([1.0, 4.0, 8.0])})
    found = []
    for model in (path, ones, some):
        plan = plan_of(model, "pp2", dtype="float32")
        with threads(plan) as executors:
            found.append(run(executors, plan, JOBS, eos=frozenset()))
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.parametrize(
    ("more", "kind", "factor"),
    [
        ({}, "default", 1.0),
        ({"rope.scaling.factor": 4.0}, "linear", 4.0),
        ({"rope.scale_linear": 4.0}, "linear", 4.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, "default", 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, "default", 1.0),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.0}, "yarn", 4.0),
    ],
)
def test_rope_scalings_are_read_as_llama_cpp_reads_them(
    tmp_path: Path, more: dict[str, Any], kind: str, factor: float
) -> None:
    """Guards a factor without a type, which is linear, its old name, and yarn's magnitude: HF's for the same factor."""
    path = save_llama(tmp_path / "hf", "groups", dtype=torch.float32)
    rope = open_source(llama_gguf(path, tmp_path / "model.gguf", "groups", more)).config.rope
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": 256}
    assert rope is not None
    assert (rope.scaling, rope.factor) == (kind, factor)
    assert rope.attention_factor == rope_from_hf({"rope_scaling": scaling}, 6, 256).attention_factor


FACTORS = {"rope_freqs.weight": np.ones(3)}


@pytest.mark.parametrize(
    ("more", "extra", "words"),
    [
        ({"rope.dimension_count": 8}, {}, "rope.dimension_count 8 must be the size of a head, 6"),
        ({"rope.dimension_count": 4}, {}, "rope.dimension_count 4 must be the size of a head, 6"),
        ({"rope.scaling.factor": 4.0}, FACTORS, "rope_freqs.weight with rope scaling 'linear'"),
        ({"rope.scaling.attn_factor": 2.0}, {}, "rope.scaling.attn_factor is not supported"),
        ({"rope.scaling.yarn_log_multiplier": 0.1}, {}, "rope.scaling.yarn_log_multiplier is not supported"),
        ({"rope.freq_base": 0.0}, {}, "rope_theta must be a number above 1"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, {}, "rms_epsilon must be a number"),
    ],
)
def test_other_rotations_are_refused(tmp_path: Path, more: dict[str, Any], extra: dict[str, Array], words: str) -> None:
    """Guards memory, which a rotation wider than the head would write beyond, and against one that is left out."""
    path = save_llama(tmp_path / "hf", "groups", dtype=torch.float32)
    with pytest.raises(ValueError, match="model config") as caught:
        open_source(llama_gguf(path, tmp_path / "model.gguf", "groups", more, **extra))
    assert words in str(caught.value)


@pytest.mark.parametrize("dim", [5, 8, 0, -2])
def test_a_rope_stays_within_its_head(dim: int) -> None:
    """Guards the same of every family, whatever it was read from."""
    numbers = dict.fromkeys(("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim"), 6)
    rest = {"intermediate_size": 6, "vocab_size": 6, "max_positions": 6, "norm_eps": 1e-5, "dtype": "float32"}
    with pytest.raises(ValueError, match="even number of dimensions of a head of 6"):
        ModelConfig(
            family="qwen2", stored="gguf", activation="silu_mul", tied=True, rope=Rope(1e4, dim), **numbers, **rest
        )


@pytest.mark.parametrize("tokens", [5, None])
def test_a_vocabulary_of_no_size_is_refused(tokens: Any) -> None:
    """Guards against a traceback for metadata of another type."""
    with pytest.raises(ValueError, match=r"llama\.vocab_size"):
        vocabulary({"tokenizer.ggml.tokens": tokens}, "llama")


def test_only_the_ranks_own_experts_are_read(tmp_path: Path) -> None:
    """Guards start-up of large mixtures: a rank reads its slices of the stacked tensors and nothing else."""
    path = save_other(tmp_path / "hf", "mixtral", dtype=torch.float32)
    file = other_gguf(path, tmp_path / "model.gguf", "mixtral")
    for model in (path, file):
        plan = plan_of(model, "tp3.pp2", dtype="float32")
        for rank in plan.ranks:
            part = make_part(runner_spec(plan), Coordinates(0, rank.tp, rank.pp), Axis(rank.tp, 3), Ops(torch.float32))
            assert 4 * rank.parameters <= part.load() <= 4 * rank.parameters * 4 / 3  # whole rows for three quarters


def test_a_tensor_without_a_use_is_refused(tmp_path: Path) -> None:
    """Guards against a file whose extra tensors would change the answer if they were understood."""
    path = save_llama(tmp_path / "hf", "groups", dtype=torch.float32)
    file = llama_gguf(path, tmp_path / "model.gguf", "groups", **{"blk.0.attn_sinks.weight": np.ones(9)})
    with pytest.raises(LoadError, match="attn_sinks"):
        open_source(file)


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, lost: str) -> None:
    """C45: a checkpoint that lacks a parameter is refused by name; random weights never stand in."""
    from safetensors.numpy import save_file

    path = save_llama(tmp_path / "hf", "groups", dtype=torch.float32)
    weights = load_file(path / "model.safetensors")
    del weights[lost]
    save_file(weights, path / "model.safetensors")
    with pytest.raises(LoadError, match=lost.replace(".", r"\.")):
        open_source(path)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Guards against a config.json that belongs to another checkpoint."""
    path = save_llama(tmp_path / "hf", "groups", dtype=torch.float32)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 101', '"vocab_size": 105'))
    with pytest.raises(LoadError, match=r"shape \[101, 54\]"):
        open_source(path)


def test_a_tensor_of_whole_numbers_is_refused(tmp_path: Path) -> None:
    """Guards against U16 that is taken for bfloat16, whose bits are read as such."""
    from safetensors.numpy import save_file

    path = save_llama(tmp_path / "hf", "groups", dtype=torch.float32)
    weights = load_file(path / "model.safetensors")
    for kind in (np.uint16, np.int8, np.int64):
        weights["model.norm.weight"] = np.ones(54, kind)
        save_file(weights, path / "model.safetensors")
        with pytest.raises(LoadError, match=r"tensor model\.norm\.weight is [UI]"):
            open_source(path)


def test_two_names_of_one_parameter_are_refused(tmp_path: Path) -> None:
    """Guards against a checkpoint of which either tensor could be meant."""
    from safetensors.numpy import save_file

    path = save_gpt2(tmp_path / "hf")
    weights = load_file(path / "model.safetensors")
    weights["h.0.ln_1.bias"] = weights["transformer.h.0.ln_1.bias"] + 1
    save_file(weights, path / "model.safetensors")
    with pytest.raises(LoadError, match=r"h\.0\.ln_1\.bias and transformer\.h\.0\.ln_1\.bias"):
        open_source(path)
