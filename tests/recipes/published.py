"""The numbers that the public models' config.json files hold, and a source of each without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.models.families.table import BY_MODEL_TYPE, find
from shardwise.runtime.source import Source, open_source
from shardwise.weights.checkpoint import Index
from shardwise.weights.resolve import Resolved

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
LLAMA_405B = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
LONG = {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {
    **LLAMA,
    **LLAMA_8B,
    "model_type": "mixtral",
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "meta-llama/Meta-Llama-3-8B-Instruct": (8_030_261_248, {**LLAMA, **LLAMA_8B}),
    "meta-llama/Meta-Llama-3-70B-Instruct": (70_553_706_496, {**LLAMA, **LLAMA_70B}),
    "meta-llama/Llama-3.1-8B-Instruct": (8_030_261_248, {**LLAMA, **LLAMA_8B, **LONG}),
    "meta-llama/Llama-3.1-70B-Instruct": (70_553_706_496, {**LLAMA, **LLAMA_70B, **LONG}),
    "meta-llama/Llama-3.1-405B-Instruct": (405_853_388_800, {**LLAMA, **LLAMA_405B, **LONG}),
    "meta-llama/Llama-3.3-70B-Instruct": (70_553_706_496, {**LLAMA, **LLAMA_70B, **LONG}),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (46_702_792_704, MIXTRAL),
    "Qwen/Qwen3-8B": (
        8_190_735_360,
        {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
    ),
    "Qwen/Qwen3-32B": (
        32_762_123_264,
        {
            **QWEN3,
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
        },
    ),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, QWEN3_MOE),
}
"""Hub id → parameters, as the model's page counts them, and config.json."""


def published_source(model: str | Path) -> Source:
    """A source with a published model's numbers and no tensors; the real one of what lies on this machine."""
    if str(model) not in PUBLISHED:
        return open_source(model)
    values = PUBLISHED[str(model)][1]
    config = find(BY_MODEL_TYPE, "model_type", values).from_hf(values)
    return Source(Resolved("hf", str(model), str(model)), config, Index({}, {}), frozenset(), None, {})
