"""`shardwise convert`: what goes in and what comes out are one model, on every way in, and nothing half-done stays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardwise.convert.job import Job, convert
from shardwise.convert.names import ENDS, META, TORCHTUNE
from shardwise.features import Quantization, Speculation
from shardwise.models.families.llama import GGUF_LAYER
from shardwise.open import open_tokenizer
from shardwise.runtime.source import open_source
from shardwise.weights.checkpoint import LoadError
from shardwise.weights.quantise import quantise
from tests.harness import Answer, plan_of, run, threads, whole_weights
from tests.test_equivalence import jobs_for
from tests.tiny import hf_logits, save_gpt2, save_llama, save_other, save_text_model


def made(source: Path, to: Path, said: list[str] | None = None, **how: Any) -> Path:
    convert(Job(str(source), to, **how), (said if said is not None else []).append)
    return to


def answers(path: Path, layout: str = "1", **settings: Any) -> list[Answer]:
    plan = plan_of(path, layout, **settings)
    with threads(plan) as executors:
        return run(executors, plan, jobs_for(plan.source, 6))


def tensors(path: Path) -> dict[str, Tensor]:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    found = {name: load_file(path / file)[name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def same_weights(first: Path, second: Path) -> bool:
    one, two = (whole_weights(open_source(path)) for path in (first, second))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    paths = {name: save_llama(root / name, name) for name in ("groups", "few_kv")}
    return {**paths, "gpt2": save_gpt2(root / "gpt2"), "mixtral": save_other(root / "mixtral", "mixtral")}


@pytest.mark.parametrize("quantize", ["int8", "int4", "int4,group=24"])
@pytest.mark.parametrize("name", ["groups", "few_kv", "gpt2", "mixtral"])
def test_rounded_ahead_of_time_as_on_load(models: dict[str, Path], tmp_path: Path, name: str, quantize: str) -> None:
    """A number, a scale or an offset that is stored or read at another place: one hash on load and from the folder."""
    rounding = Quantization.parse(quantize)
    path = made(models[name], tmp_path / "model", quantize=rounding)
    assert json.loads((path / "config.json").read_text())["quantization_config"] == {
        "quant_method": "shardwise",
        "bits": rounding.bits,
        "group_size": rounding.group,
    }
    expected = answers(models[name], dtype="float32", quantize=rounding)
    for layout, settings in (("1", {}), ("tp3", {}), ("tp2.pp2", {"quantize": rounding})):
        assert answers(path, layout, dtype="float32", **settings) == expected, layout


@pytest.mark.parametrize("name", ["groups", "gpt2", "mixtral"])
def test_floats_stay_the_model(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    """A tensor that is turned round, cut, cast or lost: transformers reads the new folder and finds the old model."""
    path = made(models[name], tmp_path / "same", shard_bytes=20_000)
    assert len(list(path.glob("*.safetensors"))) > 1
    assert same_weights(models[name], path)
    if name != "mixtral":
        assert torch.equal(hf_logits(path, [5, 6, 7]), hf_logits(models[name], [5, 6, 7]))
    halves = tensors(made(models[name], tmp_path / "half", dtype="bfloat16"))
    assert all(tensor.dtype == torch.bfloat16 for tensor in halves.values())
    assert open_source(tmp_path / "half").config.dtype == "bfloat16"


def test_what_is_stored(models: dict[str, Path], tmp_path: Path) -> None:
    """A format that drifts from docs/quantisation.md, which others may read."""
    path = made(models["few_kv"], tmp_path / "model", quantize=Quantization(4, 24))
    found = tensors(path)
    original = load_file(models["few_kv"] / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    numbers, scales = quantise(original[name], 4, 24)
    packed = found[name].int()
    opened = torch.stack((packed & 15, packed >> 4), -1).flatten(1)[:, : numbers.shape[1]] - 8
    assert torch.equal(opened, numbers.int())
    assert torch.equal(found[name + ".scales"], scales[0])
    assert torch.equal(found[name + ".offsets"], scales[1])
    embedding = "model.embed_tokens.weight"
    assert found[embedding].dtype == torch.int8
    assert found[embedding + ".scales"].shape == (67, 1)
    assert found["model.norm.weight"].dtype == torch.float64


def test_a_self_draft_may_round_a_rounded_folder_further(models: dict[str, Path], tmp_path: Path) -> None:
    """Numbers of 8 bits that are taken for floats, and rounded again without their scales."""
    path = made(models["groups"], tmp_path / "model", quantize=Quantization(8))
    plain = answers(path, dtype="float32")
    for layout in ("1", "tp2.pp2"):
        drafted = answers(path, layout, dtype="float32", speculate=Speculation.parse("self,quantize=int4,k=3"))
        assert drafted == plain
        accepted = sum(answer.drafts.accepted for answer in drafted if answer.drafts is not None)
        assert accepted > 0


def test_refusals(models: dict[str, Path], tmp_path: Path) -> None:
    """What can't be done, and would come out as another model or over another's file."""
    rounded = made(models["groups"], tmp_path / "rounded", quantize=Quantization(8))
    refused: list[tuple[Path, Path, str]] = [
        (models["groups"], rounded, "is there already"),
        (models["groups"], tmp_path / "no" / "where", "no directory"),
        (rounded, tmp_path / "again", "int8 already"),
        (tmp_path / "missing", tmp_path / "x", "no such file"),
    ]
    for source, to, words in refused:
        with pytest.raises(ValueError, match=words):
            made(source, to)
    with pytest.raises(ValueError, match="can't become int4"):
        plan_of(rounded, "1", quantize=Quantization(4, 32))
    config = json.loads((rounded / "config.json").read_text())
    (rounded / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match="gptq"):
        open_source(rounded)
    (rounded / "config.json").write_text(
        json.dumps({**config, "quantization_config": {**config["quantization_config"], "bits": 4, "group_size": 32}})
    )
    with pytest.raises(LoadError, match=r"offsets|shape"):
        open_source(rounded)


def test_nothing_half_done_stays(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that looks whole after a full disk, or a scratch folder that nobody ever removes."""
    written = 0
    real = os.pwrite

    def full(descriptor: int, data: Any, place: int) -> int:
        nonlocal written
        written += len(data)
        if written > 40_000:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="space"):
        made(models["groups"], tmp_path / "model")
    assert not list(tmp_path.iterdir())


PAIRED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


def pairs(tensor: Tensor, dim: int) -> Tensor:
    """Rows of heads from halves to pairs: what Meta's rope wants."""
    return tensor.view(-1, 2, dim // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def renamed(path: Path, kind: str) -> dict[str, Tensor]:
    """The float32 tensors of a tiny Llama, under another project's names and in its layout."""
    layers = {hf: name for name, hf in (TORCHTUNE if kind == "torchtune" else META).items()}
    ends = {
        hf: name for name, hf in ENDS.items() if name.endswith(".scale") == (kind == "torchtune") or "norm" not in name
    }
    found: dict[str, Tensor] = {}
    dim = json.loads((path / "config.json").read_text())["head_dim"]
    for name, tensor in load_file(path / "model.safetensors").items():
        tensor = pairs(tensor, dim).contiguous() if name.endswith(PAIRED) else tensor
        if name in ends:
            found[ends[name]] = tensor
        else:
            _, _, layer, rest = name.split(".", 3)
            found[f"layers.{layer}.{layers[rest]}"] = tensor
    if kind == "gpt-fast":
        for layer in {name.split(".")[1] for name in found if name.startswith("layers.")}:
            parts = [found.pop(f"layers.{layer}.attention.w{letter}.weight") for letter in "qkv"]
            found[f"layers.{layer}.attention.wqkv.weight"] = torch.cat(parts)
    return found


LLAMA = {"heads": 4, "kv": 2, "dim": 8, "hidden": 32, "width": 48, "vocab": 96, "layers": 2}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama") / "model", LLAMA, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["gpt-fast", "torchtune", "Hugging Face", "Meta", "Meta of 2"])
def test_pickled_checkpoints(llama: Path, tmp_path: Path, kind: str) -> None:
    """A tensor under another's name, rows in the wrong pairs, slices joined the wrong way; trust that goes unsaid."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((llama / "config.json").read_bytes())
    if kind == "Hugging Face":
        whole = load_file(llama / "model.safetensors")
        names = sorted(whole)
        for number, own in enumerate((names[:7], names[7:]), 1):
            torch.save({name: whole[name] for name in own}, source / f"pytorch_model-{number:05}-of-00002.bin")
    elif kind == "Meta of 2":
        whole = renamed(llama, "Meta")
        for rank in range(2):
            part = {}
            for name, tensor in whole.items():
                by_inputs = name.endswith(("wo.weight", "w2.weight", "tok_embeddings.weight"))
                part[name] = tensor.chunk(2, 1 if by_inputs else 0)[rank].clone() if tensor.dim() == 2 else tensor
            part["rope.freqs"] = torch.ones(4)
            torch.save(part, source / f"consolidated.{rank:02}.pth")
        (source / "config.json").unlink()
        params = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "norm_eps": 1e-5}
        (source / "params.json").write_text(json.dumps(params))
    else:
        whole = renamed(llama, kind)
        torch.save({"model": whole, "epochs_run": 3} if kind == "torchtune" else whole, source / "model.pth")
    said: list[str] = []
    path = made(source, tmp_path / "out", said)
    assert same_weights(llama, path)
    assert "weights_only" in said[0]
    if kind != "Meta of 2":
        assert answers(made(source, tmp_path / "eight", quantize=Quantization(8))) == answers(
            llama, quantize=Quantization(8)
        )


def test_masks_beside_the_weights(models: dict[str, Path], tmp_path: Path) -> None:
    """Guards old checkpoints of GPT-2, which store causal masks of a kind that weights can't be."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((models["gpt2"] / "config.json").read_bytes())
    whole = load_file(models["gpt2"] / "model.safetensors")
    for layer in range(3):
        whole[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
        whole[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    torch.save(whole, source / "pytorch_model.bin")
    assert same_weights(models["gpt2"], made(source, tmp_path / "out"))
    torch.save({**whole, "h.0.attn.mask": torch.ones(2, dtype=torch.bool)}, source / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"h\.0\.attn\.mask is torch\.bool"):
        made(source, tmp_path / "other")


class Evil:
    """Runs a command when it is unpickled the careless way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_runs_code_is_refused(llama: Path, tmp_path: Path) -> None:
    """R1: guards against the one thing pickles are feared for, and against weights of no plain kind."""
    source, sign = tmp_path / "source", tmp_path / "ran"
    source.mkdir()
    (source / "config.json").write_bytes((llama / "config.json").read_bytes())
    for bad in (
        {"model.norm.weight": Evil(sign)},
        {"model.norm.weight": "text"},
        [1, 2],
        {"x": torch.ones(2).to_sparse()},
    ):
        torch.save(bad, source / "pytorch_model.bin")
        with pytest.raises(LoadError, match=r"pytorch_model\.bin"):
            made(source, tmp_path / "out")
    (source / "pytorch_model.bin").write_bytes(b"not a zip file")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin"):
        made(source, tmp_path / "out")
    torch.save({"model.norm.weight": torch.ones(32)}, source / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"lacks|tensors can't be"):
        made(source, tmp_path / "out")
    assert not sign.exists()
    assert not (tmp_path / "out").exists()


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """A text model as a GGUF file, through the gguf package, q and k in pairs as llama.cpp has them."""
    gguf = pytest.importorskip("gguf")
    path = save_text_model(tmp_path / "text")
    config = json.loads((path / "config.json").read_text())
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    tokens = json.loads((path / "tokenizer.json").read_text())
    vocab = {**tokens["model"]["vocab"], **{each["content"]: each["id"] for each in tokens["added_tokens"]}}
    spelled = [text for text, _ in sorted(vocab.items(), key=lambda item: item[1])]
    spelled += [f"<unused{number}>" for number in range(len(spelled), config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(spelled)
    writer.add_token_types([1] * 256 + [3] * (len(spelled) - 256))
    writer.add_token_merges([])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0].content }}")
    ends = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    ends["lm_head.weight"] = "output.weight"
    layers = {hf: name for name, hf in GGUF_LAYER.items()}
    for name, tensor in load_file(path / "model.safetensors").items():
        tensor = pairs(tensor, config["head_dim"]) if name.endswith(PAIRED) else tensor
        if name not in ends:
            _, _, layer, rest = name.split(".", 3)
            ends[name] = f"blk.{layer}.{layers[rest.removesuffix('.weight')]}.weight"
        writer.add_tensor(ends[name], np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def test_gguf_with_its_tokenizer(gguf_file: Path, tmp_path: Path) -> None:
    """Rows left in pairs, a tokenizer that forgets its first token, its template or its last tokens."""
    path = made(gguf_file, tmp_path / "out")
    first, second = open_source(gguf_file), open_source(path)
    assert same_weights(gguf_file, path)
    assert same_weights(tmp_path / "text", path)
    one, two = open_tokenizer(first), open_tokenizer(second)
    assert one.encode("Hello <s> you") == two.encode("Hello <s> you")
    assert one.encode("Hello")[0] == 257
    assert one.chat([{"role": "user", "content": "hi"}]) == two.chat([{"role": "user", "content": "hi"}])
    assert first.eos | one.eos == second.eos | two.eos
    eight = made(gguf_file, tmp_path / "eight", quantize=Quantization(8))
    assert answers(eight, "tp2") == answers(gguf_file, quantize=Quantization(8))
