"""Tiny random checkpoints, made with transformers and saved as Hugging Face directories, and their float64 truth."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

EPS = 1e-5
LLAMAS: dict[str, dict[str, Any]] = {
    "even": {"heads": 4, "kv": 4, "dim": 8, "hidden": 32, "width": 48, "vocab": 96, "layers": 3},
    "groups": {"heads": 9, "kv": 3, "dim": 6, "hidden": 54, "width": 37, "vocab": 101, "layers": 3},
    "few_kv": {"heads": 8, "kv": 2, "dim": 10, "hidden": 40, "width": 71, "vocab": 67, "layers": 4, "tied": True},
    "text": {"heads": 6, "kv": 3, "dim": 8, "hidden": 48, "width": 64, "vocab": 290, "layers": 4},
    "one_kv": {"heads": 7, "kv": 1, "dim": 16, "hidden": 35, "width": 53, "vocab": 61, "layers": 3},
}
"""Head, kv and vocabulary counts of which most divide by nothing; hidden is not always heads x dim (C55)."""


def save_llama(
    path: Path, shape: str | dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float64, **extra: Any
) -> Path:
    """A random Llama of one of the shapes above, or of one alike."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = LLAMAS[shape] if isinstance(shape, str) else shape
    config = LlamaConfig(
        hidden_size=size["hidden"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        head_dim=size["dim"],
        intermediate_size=size["width"],
        vocab_size=size["vocab"],
        num_hidden_layers=size["layers"],
        tie_word_embeddings=size.get("tied", False),
        max_position_embeddings=256,
        rms_norm_eps=EPS,
        bos_token_id=1,
        eos_token_id=2,
        **extra,
    )
    return _save(LlamaForCausalLM, config, path, seed, dtype)


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
"""The text model's first 256 tokens."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system role here') }}"
    "{% endif %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}<s>assistant:"
)


def save_text_model(path: Path, **extra: Any) -> Path:
    """A random Llama that reads and writes bytes: 256 of them, <pad> 256, <s> 257, </s> 258."""
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(ALPHABET)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    save_llama(path, "text", dtype=torch.float32, **extra)
    backend.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": 258, "bos_token_id": None}))
    return path


def save_gpt2(path: Path, *, heads: int = 5, hidden: int = 35, layers: int = 3, vocab: int = 83, seed: int = 0) -> Path:
    """A random GPT-2; 5 heads of width 7 divide by nothing."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=hidden,
        n_head=heads,
        n_layer=layers,
        vocab_size=vocab,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _save(GPT2LMHeadModel, config, path, seed, torch.float64)


GROUPED = {"hidden_size": 54, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 6}
FEW_KV = {"hidden_size": 40, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 10}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {**FEW_KV, "sliding_window": 20, "intermediate_size": 45}),
    "code_llama": (
        "Llama",
        {**FEW_KV, "intermediate_size": 45, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen2": ("Qwen2", {**GROUPED, "intermediate_size": 37, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**FEW_KV, "intermediate_size": 71, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {**GROUPED, "intermediate_size": 13, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**FEW_KV, "moe_intermediate_size": 5, "num_experts": 26, "num_experts_per_tok": 6, "norm_topk_prob": True},
    ),
    "qwen3_moe_plain": (
        "Qwen3Moe",
        {**FEW_KV, "moe_intermediate_size": 9, "num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": False},
    ),
    "opt": ("OPT", {"hidden_size": 35, "num_attention_heads": 5, "ffn_dim": 53, "word_embed_proj_dim": 35}),
    "bloom": ("Bloom", {"hidden_size": 48, "n_head": 12, "seq_length": 256}),
    "bloom_even": ("Bloom", {"hidden_size": 32, "n_head": 4, "seq_length": 256}),
}
"""One or two of every other family; 12 heads are no power of two, 5 x 5 and 26 expert chunks divide by nothing."""


def save_other(path: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **extra: Any) -> Path:
    """A random model of those above."""
    import transformers

    family, size = OTHERS[name]
    common = {"vocab_size": 83, "num_hidden_layers": 3, "max_position_embeddings": 256, "bos_token_id": 1}
    norms = {} if family in ("OPT", "Bloom") else {"rms_norm_eps": EPS}
    config = getattr(transformers, family + "Config")(**{**common, **norms, "eos_token_id": 2, **size, **extra})
    return _save(getattr(transformers, family + "ForCausalLM"), config, path, seed, dtype)


def _save(kind: Any, config: Any, path: Path, seed: int, dtype: torch.dtype) -> Path:
    torch.manual_seed(seed)
    model = kind(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than the usual start, so that a wrong slice can't hide
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.15 + (parameter.dim() == 1))
    model.save_pretrained(path)
    stored = json.loads((path / "config.json").read_text())
    stored["dtype"] = str(dtype).removeprefix("torch.")
    (path / "config.json").write_text(json.dumps(stored))
    return path


@torch.no_grad()
def hf_logits(path: Path, tokens: list[int]) -> Tensor:
    """Logits [tokens, vocabulary] of transformers in float64.

    Whatever the model's format, transformers rounds the rotary tables, the input of RMSNorm, the odds of experts and
    BLOOM's slopes, softmax and gelu to float32, which would hide everything below 1e-7. Here all stay in float64 (the
    rotary angles are its own, float32).
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.bloom import modeling_bloom

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    if getattr(model.config, "num_experts_per_tok", None):
        model.set_experts_implementation("eager")  # the others have no float64
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = partial(F.rms_norm, normalized_shape=module.weight.shape, weight=module.weight, eps=EPS)
        elif kind == "BloomGelu":
            module.forward = partial(F.gelu, approximate="tanh")
        elif kind.endswith("TopKRouter"):
            module.forward = partial(_route, module, getattr(model.config, "norm_topk_prob", True))
    rotary = getattr(model.model, "rotary_emb", None) if hasattr(model, "model") else None
    if rotary is not None:

        def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            angles = (position_ids[:, :, None].float() * rotary.inv_freq[None, None].float()).double()
            angles = torch.cat([angles, angles], -1)
            return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling

        rotary.forward = forward
    slopes = partial(_slopes, dtype=torch.float64)
    with (
        patch.object(modeling_bloom, "_get_alibi_slopes", lambda heads, device: slopes(heads)),
        patch.object(F, "softmax", lambda x, dim, dtype: x.softmax(dim)),
    ):
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def _route(router: Any, normed: bool, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scores = F.linear(x.flatten(0, -2), router.weight)
    best, chosen = scores.softmax(-1).topk(router.top_k)
    return scores, best / best.sum(-1, keepdim=True) if normed else best, chosen


def _slopes(heads: int, dtype: torch.dtype) -> Tensor:
    below = 2 ** int(math.log2(heads))
    powers = torch.arange(1, 2 * below + 1, dtype=dtype)
    return torch.cat([2.0 ** (-8 * powers[:below] / below), 2.0 ** (-4 * powers[::2] / below)])[:heads]
