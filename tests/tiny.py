"""Tiny random checkpoints, made with transformers and saved as Hugging Face directories, and their float64 truth."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

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

    Whatever the model's format, transformers rounds the rotary tables and the input of RMSNorm to float32, which would
    hide everything below 1e-7. Here both stay in float64 (the rotary angles are its own, float32).
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa").eval()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(F.rms_norm, normalized_shape=module.weight.shape, weight=module.weight, eps=EPS)
    rotary = getattr(model.model, "rotary_emb", None) if hasattr(model, "model") else None
    if rotary is not None:

        def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            angles = (position_ids[:, :, None].float() * rotary.inv_freq[None, None].float()).double()
            angles = torch.cat([angles, angles], -1)
            return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling

        rotary.forward = forward
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits
