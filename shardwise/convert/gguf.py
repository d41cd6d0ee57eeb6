"""The files that stand beside safetensors, from what a GGUF file says of itself: config.json and the tokenizer's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.models.config import ModelConfig, Rope
from shardwise.tokenizer.gguf import describe

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""By family; the others' GGUF files hold matrices turned round or stacked."""


def config_json(config: ModelConfig) -> dict[str, Any]:
    """config.json for the numbers of a GGUF file; ValueError for what it has no word for."""
    if config.family not in ARCHITECTURES:
        raise ValueError(
            f"convert: GGUF files of {config.family} can't be converted, only those of {', '.join(ARCHITECTURES)}; "
            "they run as they are"
        )
    assert config.rope is not None
    return {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rope.theta,
        **_scaling(config.rope, config.head_dim),
        "bos_token_id": config.bos,
        "eos_token_id": list(config.eos),
    }


def _scaling(rope: Rope, head_dim: int) -> dict[str, Any]:
    if rope.scaling not in ("default", "linear") or rope.dim != head_dim:
        raise ValueError(
            f"convert: this GGUF file scales its rope by {rope.scaling!r} over {rope.dim} of {head_dim} dimensions, "
            "which can't be written back into a config.json; it runs as it is"
        )
    return {} if rope.scaling == "default" else {"rope_scaling": {"rope_type": "linear", "factor": rope.factor}}


def write_tokenizer(directory: Path, metadata: Mapping[str, Any]) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json."""
    from tokenizers.processors import TemplateProcessing

    told = describe(metadata)
    backend = told["backend"]
    around = {number: backend.id_to_token(number) for number in (*told["prefix"], *told["suffix"])}
    if around:
        single = [*(around[number] for number in told["prefix"]), "$A", *(around[number] for number in told["suffix"])]
        tokens = [(text, number) for number, text in around.items()]
        backend.post_processor = TemplateProcessing(single=single, special_tokens=tokens)
    backend.save(str(directory / "tokenizer.json"))
    template = {} if told["template"] is None else {"chat_template": told["template"]}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **told["named"], **template}
    write_json(directory / "tokenizer_config.json", settings)
    write_json(directory / "generation_config.json", {"eos_token_id": told["eos"]})


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """A file as people read it."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
