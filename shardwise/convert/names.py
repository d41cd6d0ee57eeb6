"""What other projects call a Llama's tensors, and how theirs become those of Hugging Face.

Meta's files hold slices for as many ranks as there were files; gpt-fast fuses q, k and v; those two and torchtune keep
the rows of a q or k head in the pairs that rope turns together. Knows names and shapes, and no file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.convert.pickled import Halved, Joined, Lazy, Plain
from shardwise.weights.checkpoint import LoadError

ENDS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "norm.scale": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
META = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
TORCHTUNE = {
    "attn.q_proj.weight": "self_attn.q_proj.weight",
    "attn.k_proj.weight": "self_attn.k_proj.weight",
    "attn.v_proj.weight": "self_attn.v_proj.weight",
    "attn.output_proj.weight": "self_attn.o_proj.weight",
    "mlp.w1.weight": "mlp.gate_proj.weight",
    "mlp.w2.weight": "mlp.down_proj.weight",
    "mlp.w3.weight": "mlp.up_proj.weight",
    "sa_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
}
FUSED = "attention.wqkv.weight"
UNUSED = r"rope\.freqs|.*\.inner_attention\.rope\.freqs|freqs_cis|causal_mask"
"""Tables that some of them store as well."""


def kind_of(names: Sequence[str]) -> str:
    """Whose names these are: "Hugging Face", "Meta", "gpt-fast" or "torchtune"."""
    for kind, sign in (("gpt-fast", FUSED), ("Meta", "attention.wq.weight"), ("torchtune", "attn.q_proj.weight")):
        if f"layers.0.{sign}" in names:
            return kind
    return "Hugging Face"


def merge(where: str, files: Sequence[Mapping[str, Tensor]], kind: str) -> dict[str, Lazy]:
    """The tensors of all files under the names of Hugging Face, q and k as yet as they were. Raises LoadError."""
    found: dict[str, Lazy] = {}
    for name in dict.fromkeys(name for file in files for name in file):
        parts = [file[name] for file in files if name in file]
        if kind != "Hugging Face" and re.fullmatch(UNUSED, name):
            continue
        if len(parts) > 1 and (kind != "Meta" or len(parts) != len(files)):
            raise LoadError(f"{where}: tensor {name} is in {len(parts)} of {len(files)} files")
        found[hf_name(where, name, kind)] = _join(where, name, parts)
    return found


def hf_name(where: str, name: str, kind: str) -> str:
    """One name; LoadError for one that such a checkpoint doesn't have."""
    if kind == "Hugging Face":
        return name
    if name in ENDS:
        return ENDS[name]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    layer = (TORCHTUNE if kind == "torchtune" else {**META, FUSED: FUSED}).get(match[2]) if match else None
    if match is None or layer is None:
        raise LoadError(f"{where}: tensor {name[:200]!r} is none that a Llama of {kind} has")
    return f"model.layers.{match[1]}.{layer}"


def _join(where: str, name: str, parts: Sequence[Tensor]) -> Lazy:
    """A tensor of one file, or the slices of several ranks."""
    if len(parts) == 1 or parts[0].dim() == 1:  # norms are held whole by every rank
        return Plain(parts[0])
    if any(part.shape != parts[0].shape for part in parts):
        raise LoadError(f"{where}: the slices of tensor {name} differ in shape")
    by_inputs = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
    if name == "tok_embeddings.weight":  # by columns up to Llama 2, by rows of the vocabulary since
        by_inputs = parts[0].shape[0] > parts[0].shape[1] * len(parts)
    return Joined(parts, 1 if by_inputs else 0)


def arrange(tensors: Mapping[str, Lazy], kind: str, heads: int, kv_heads: int, head_dim: int) -> dict[str, Lazy]:
    """Split what is fused, and lay out q and k for the rope of Hugging Face."""
    if kind == "Hugging Face":
        return dict(tensors)
    found: dict[str, Lazy] = {}
    for name, tensor in tensors.items():
        if name.endswith(FUSED):
            assert isinstance(tensor, Plain)
            sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
            if sum(sizes) != tensor.shape[0]:
                raise LoadError(f"tensor {name} has {tensor.shape[0]} rows, where config.json asks for {sum(sizes)}")
            for letter, part in zip("qkv", torch.split(tensor.tensor, sizes), strict=True):
                found[name.replace(FUSED, f"self_attn.{letter}_proj.weight")] = Plain(part)
        else:
            found[name] = tensor
    for name, tensor in found.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            found[name] = Halved(tensor, head_dim)
    return found


def from_params(where: str, params: Mapping[str, Any], tensors: Mapping[str, Lazy]) -> dict[str, Any]:
    """config.json for the numbers of Meta's params.json. Raises LoadError for what isn't there or isn't clear."""
    if params.get("use_scaled_rope"):
        raise LoadError(
            f"{where}: params.json asks for scaled rope and doesn't say by how much; put config.json beside it"
        )
    try:
        heads = int(params["n_heads"])
        values = {
            "hidden_size": int(params["dim"]),
            "num_hidden_layers": int(params["n_layers"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(params.get("n_kv_heads") or heads),
            "rms_norm_eps": float(params["norm_eps"]),
        }
        vocab = tensors["model.embed_tokens.weight"].shape[0]
        values["intermediate_size"] = tensors["model.layers.0.mlp.gate_proj.weight"].shape[0]
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{where}: params.json and the tensors beside it make no Llama: {error!r}") from None
    theta = float(params.get("rope_theta") or 10000.0)
    positions = 16384 if theta == 1e6 else 8192 if theta == 5e5 else 2048 if values["rms_norm_eps"] == 1e-6 else 4096
    llama3 = vocab >= 128256
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **values,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": 128000 if llama3 else 1,
        "eos_token_id": [128001, 128008, 128009] if llama3 else 2,
    }
