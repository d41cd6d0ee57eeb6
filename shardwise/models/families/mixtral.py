"""Mixtral: Llama with a mixture of experts in place of each MLP; and where the experts of such families lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from shardwise.models.config import Experts, ModelConfig
from shardwise.models.families import llama
from shardwise.models.families.family import gguf_names, matrix, number
from shardwise.models.shard import Shard
from shardwise.parallel.placement import Placement, Plan, Run


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Read a Mixtral config.json."""
    count, chosen = number(values, "num_local_experts", int), number(values, "num_experts_per_tok", int)
    return llama.hf_config({**DEFAULTS, **values}, "mixtral", experts=Experts(count, chosen, normed=True))


DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
"""What transformers takes where config.json does not say."""


def from_gguf(values: Mapping[str, Any]) -> ModelConfig:
    """Read the metadata of a GGUF file of architecture "llama" with experts."""
    return llama.gguf_config(values, "mixtral", "llama", experts=gguf_experts(values, "llama"))


def gguf_experts(values: Mapping[str, Any], arch: str) -> Experts:
    """The mixture of a GGUF file; llama.cpp gives the weights of a token's experts the sum 1 in these architectures."""
    count = number(values, f"{arch}.expert_count", int)
    return Experts(count, number(values, f"{arch}.expert_used_count", int), normed=True)


class Spelling(NamedTuple):
    """How a family calls its experts: the block that they are in, and the matrices of each."""

    block: str
    gate: str
    up: str
    down: str

    def gguf(self, layer: Mapping[str, str]) -> dict[str, str]:
        """The names in the layers of GGUF files, those of ``layer`` with experts in place of the MLP."""
        rest = {name: stored for name, stored in layer.items() if not stored.startswith("mlp.")}
        kinds = {"gate": self.gate, "up": self.up, "down": self.down}
        experts = {f"ffn_{kind}_exps": f"{self.block}.experts.{stored}" for kind, stored in kinds.items()}
        return {**rest, "ffn_gate_inp": f"{self.block}.gate", **experts}


SPELLING = Spelling("block_sparse_moe", "w1", "w3", "w2")


def plan(config: ModelConfig, shard: Shard) -> Plan:
    """As Llama's, with experts."""
    return llama.plan(config, shard, partial(experts_plan, SPELLING))


def experts_plan(spelling: Spelling, config: ModelConfig, shard: Shard, at: str, layer: str) -> Plan:
    """This rank's experts and parts of experts, and the whole router; see `llama.MLPPlan`."""
    assert config.experts is not None
    block = f"{layer}{spelling.block}."
    hidden, width, count = config.hidden_size, config.intermediate_size, config.experts.count
    found: Plan = {at + "mlp.router.weight": (matrix(block + "gate.weight", (count, hidden)),)}

    def part(expert: int, name: str, shape: tuple[int, int], rows: Run | None, cols: Run | None) -> Placement:
        rows, cols = rows or Run(0, shape[0]), cols or Run(0, shape[1])
        if config.stored == "gguf":  # all experts in one tensor
            return Placement(f"{block}experts.{name}.weight", (count, *shape), rows, cols, index=expert)
        return Placement(f"{block}experts.{expert}.{name}.weight", shape, rows, cols)

    for expert, run in shard.experts(width).items():
        name = f"{at}mlp.experts.{expert}."
        found[name + "up.weight"] = tuple(
            part(expert, kind, (width, hidden), run, None) for kind in (spelling.gate, spelling.up)
        )
        found[name + "down.weight"] = (part(expert, spelling.down, (hidden, width), None, run),)
    return found


GGUF_LAYER = SPELLING.gguf(llama.GGUF_LAYER)


MIXTRAL = replace(
    llama.LLAMA,
    name="mixtral",
    from_hf=from_hf,
    from_gguf=from_gguf,
    plan=plan,
    gguf_name=gguf_names(llama.GGUF_ENDS, GGUF_LAYER, "model.layers."),
)
