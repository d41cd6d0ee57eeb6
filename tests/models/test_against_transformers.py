"""Logits against Hugging Face transformers, in float64, on tiny random checkpoints whose counts divide by nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import reference
from shardwise.runtime.source import open_source
from shardwise.schedule.step import Chunk, Sampling, Step
from tests.harness import plan_of, threads, whole_weights
from tests.tiny import LLAMAS, OTHERS, hf_logits, save_gpt2, save_llama, save_other

LAYOUTS = [f"tp{tp}.pp{pp}" for tp in (1, 2, 3, 4) for pp in (1, 2, 3)]
FEWER = [f"tp{tp}.pp{pp}" for tp in (1, 2, 3) for pp in (1, 2)]
TOKENS = [(7 * index + 3) % 61 for index in range(40)]
CUTS = [0, 1, 9, 16, 17, 33, 40]


class Models(dict[str, tuple[Path, Tensor]]):
    """Directories and their true logits of TOKENS by name, each made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __missing__(self, name: str) -> tuple[Path, Tensor]:
        path = self.root / name
        if name == "biased":
            save_llama(path, "groups", seed=1, attention_bias=True, mlp_bias=True)
        elif name == "gpt2_wide":
            save_gpt2(path, heads=4, hidden=24, layers=4, vocab=64, seed=2)
        elif name == "gpt2":
            save_gpt2(path)
        else:
            (save_llama if name in LLAMAS else save_other)(path, name)
        self[name] = path, hf_logits(path, TOKENS)
        return self[name]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def logits_at_cuts(path: Path, layout: str, kernels: str, **settings: Any) -> Tensor:
    """Logits of the last row of each chunk of TOKENS, cut at CUTS, on a layout of threads."""
    plan = plan_of(path, layout, kernels=kernels, **settings)
    sampling = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, logits=True)
    rows = []
    with threads(plan) as (executor,):
        for number, (start, stop) in enumerate(zip(CUTS, CUTS[1:], strict=False)):
            executor.submit(Step(0, number, [Chunk(5, start, TOKENS[start:stop], [3, 1, 7], sampling)]))
        for _ in CUTS[1:]:
            ((raw,),) = executor.collect().logits
            rows.append(torch.frombuffer(bytearray(raw), dtype=torch.float64))
    return torch.stack(rows)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", [*LLAMAS, "biased", "gpt2", "gpt2_wide"])
def test_logits_equal_transformers(models: Models, name: str, kernels: str) -> None:
    """Guards the mathematics of each family in every layout: 1e-10 leaves no room for a wrong slice or order."""
    path, expected = models[name]
    layers = open_source(path).config.num_layers
    for layout in LAYOUTS:
        if int(layout[-1]) <= layers:
            found = logits_at_cuts(path, layout, kernels)
            torch.testing.assert_close(found, expected[[cut - 1 for cut in CUTS[1:]]], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", OTHERS)
def test_logits_of_other_families(models: Models, name: str, kernels: str) -> None:
    """Guards every other family alike: biases, norms of heads, ALiBi, windows, offsets of positions, experts."""
    path, expected = models[name]
    for layout in FEWER:
        found = logits_at_cuts(path, layout, kernels)
        torch.testing.assert_close(found, expected[[cut - 1 for cut in CUTS[1:]]], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [*LLAMAS, "biased", "gpt2", *OTHERS])
def test_the_oracle_equals_transformers(models: Models, name: str) -> None:
    """Guards the oracle, which every other test trusts."""
    path, expected = models[name]
    source = open_source(path)
    found = reference.logits(source.config, whole_weights(source), TOKENS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "yarn_magnitudes": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_scaling_equals_transformers(tmp_path: Path, kind: str) -> None:
    """C56: scaled rotary positions are right below and beyond the original context of 32."""
    path = save_llama(tmp_path, "groups", seed=5, rope_parameters=SCALINGS[kind])
    found = logits_at_cuts(path, "tp2", "native")
    expected = hf_logits(path, TOKENS)[[cut - 1 for cut in CUTS[1:]]]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


LLAMA3 = {key: value for key, value in SCALINGS["llama3"].items() if key != "original_max_position_embeddings"}
OLD = {"rope_parameters": None, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "change",
    [
        {**OLD, "rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32},
        {**OLD, "rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 32}},
        {**OLD, "rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},  # and rope_parameters say default
        {"sliding_window": 8},
    ],
)
def test_settings_are_read_as_transformers_reads_them(tmp_path: Path, change: dict[str, Any]) -> None:
    """Guards where config.json may say what a rotation is, and a window that a Llama does not have."""
    import json

    path = save_llama(tmp_path, "groups", seed=5)
    config = path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    found = logits_at_cuts(path, "1", "native")
    expected = hf_logits(path, TOKENS)[[cut - 1 for cut in CUTS[1:]]]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_head_of_its_own_is_used(tmp_path: Path) -> None:
    """Guards against a stored head that is left out because config.json says that it is the embedding."""
    from safetensors.torch import load_file, save_file

    path = save_llama(tmp_path, "few_kv")
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    found = logits_at_cuts(path, "pp2", "native")
    expected = hf_logits(path, TOKENS)[[cut - 1 for cut in CUTS[1:]]]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["code_llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_what_config_json_does_not_say(tmp_path: Path, name: str) -> None:
    """Guards the numbers that transformers takes where config.json is silent: context, window, epsilon, base."""
    import json

    from transformers import AutoConfig

    size = {"num_key_value_heads": 8, "num_attention_heads": 8} if name in ("mistral", "mixtral") else {}
    path = save_other(tmp_path, name, **size)
    config = path / "config.json"
    silent = {"max_position_embeddings", "sliding_window", "rms_norm_eps", "rope_parameters", *size}
    values = {key: value for key, value in json.loads(config.read_text()).items() if key not in silent}
    config.write_text(json.dumps({**values, "num_attention_heads": 8} if size else values))
    found, theirs = open_source(path).config, AutoConfig.from_pretrained(path)
    assert found.rope is not None
    assert found.max_positions == theirs.max_position_embeddings
    assert found.window == getattr(theirs, "sliding_window", None)
    assert found.norm_eps == theirs.rms_norm_eps
    assert found.num_kv_heads == theirs.num_key_value_heads
    assert found.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope scaling 'dynamic'"),
        (
            {"model_type": "mamba"},
            "model_type 'mamba' is not supported; supported: bloom, gpt2, llama",
        ),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": 3}, "layer_types must be a list"),
        ({"num_key_value_heads": 2}, "9 heads can't share 2 kv heads"),
        ({"hidden_size": None}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 5000}, "num_layers must be a whole number from 1 to 4096"),
        ({"num_hidden_layers": 4000}, "tensors can't be the 4000 layers"),
        ({"num_attention_heads": 10**6, "num_key_value_heads": 10**6}, "num_heads must be a whole number from 1"),
        ({"head_dim": 7}, "must turn an even number of dimensions of a head of 7"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope scaling ['yarn']"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor of the rope scaling can't be 0"),
        ({"rope_scaling": {"type": "yarn"}}, "factor must be a number"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1e-300}}, "beta_fast of the rope scaling"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": -1.0}}, "mscale -1.0"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor must be a number"),
        ({"rope_scaling": {**SCALINGS["llama3"], "low_freq_factor": 4.0}}, "low_freq_factor 4.0 must be"),
        ({"rope_scaling": {**SCALINGS["yarn"], "original_max_position_embeddings": 0}}, "scaled from 0 positions"),
        ({"rope_scaling": {**SCALINGS["linear"], "partial_rotary_factor": 0.5}}, "partial_rotary_factor of rope"),
        ({"rope_scaling": {"full_attention": {"rope_theta": 5e5}}}, "full_attention of rope scaling 'default'"),
        ({"rope_parameters": None, "rope_theta": 0}, "rope_theta must be a number above 1"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a number"),
        ({"bos_token_id": 10**400}, "bos_token_id must be a token id"),
        ({"eos_token_id": 10**400}, "eos_token_id must be a token id"),
    ],
)
def test_unsupported_numbers_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """Guards against a feature of the model that is silently left out, which gives plausible wrong text.

    And against numbers that would end in a traceback, or in gigabytes of plans, instead of one line.
    """
    import json

    path = save_llama(tmp_path, "groups")
    config = path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(ValueError, match=r"model config|tensors") as caught:
        open_source(path)
    assert words in str(caught.value)


SOME_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("opt", {"do_layer_norm_before": False}, "opt-350m"),
        ("opt", {"word_embed_proj_dim": 16}, "an embedding of 16 for a width of 35"),
        ("opt", {"enable_bias": False}, "Galactica"),
        ("opt", {"activation_function": "swish"}, "activation_function 'swish'"),
        ("gpt2", {"activation_function": ["gelu"]}, "activation_function ['gelu']"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window 20 in some"),
        ("mistral", {"sliding_window": 0}, "a sliding window of 0"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("qwen2", SOME_WINDOW, None),
        ("qwen2", {**SOME_WINDOW, "max_window_layers": 1}, "window 8 in some layers"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_moe", {"num_hidden_layers": 4096}, "26 experts in 4096 layers are too many"),
        ("qwen3_moe", {"num_experts_per_tok": 27}, "27 of 26 experts"),
        ("mixtral", {"num_local_experts": 4}, "has shape [5, 54]"),
    ],
)
def test_what_other_families_refuse(tmp_path: Path, name: str, change: dict[str, Any], words: str | None) -> None:
    """Guards each family's variants that other code would be needed for, and that an idle setting stops nobody."""
    import json

    path = save_gpt2(tmp_path) if name == "gpt2" else save_other(tmp_path, name)
    config = path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    if words is None:
        assert open_source(path).config.window is None
        return
    with pytest.raises(ValueError, match=r"model config|configuration") as caught:
        open_source(path)
    assert words in str(caught.value)


def test_code_llamas_vocabulary(tmp_path: Path) -> None:
    """Guards 32016 tokens, which five ranks cut unevenly, with a rotation of base 1e6."""
    path = save_other(tmp_path, "code_llama", vocab_size=32016, num_hidden_layers=1, dtype=torch.float32)
    plan = plan_of(path, "tp5")
    assert plan.source.config.rope is not None
    assert plan.source.config.rope.theta == 1e6
    assert [rank.shard.vocab.size for rank in plan.ranks] == [6404, 6403, 6403, 6403, 6403]
    found = logits_at_cuts(path, "tp5", "native", dtype="float64")
    torch.testing.assert_close(found, hf_logits(path, TOKENS)[[cut - 1 for cut in CUTS[1:]]], rtol=0, atol=1e-10)
