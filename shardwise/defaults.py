"""What a model's generation_config.json asks of requests that don't say otherwise, in the names of SamplingParams.

Knows files no better than as a mapping that was read from one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardwise.params import SamplingParams

SAMPLED: dict[str, tuple[Any, ...]] = {"temperature": (1,), "top_k": (0, 50), "top_p": (1,), "min_p": (0,)}
"""Fields that count only where ``do_sample`` is true: without it the model's author meant greedy decoding."""
ALWAYS = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "diversity_penalty": (0,),
    "length_penalty": (1,),
    "penalty_alpha": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "sequence_bias": ({},),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "stop_strings": ([],),
    "token_healing": (False,),
}
"""Fields that would change the tokens and are not applied, and their values that change nothing."""
HARMLESS = re.compile(
    r"(bos|pad|eos|decoder_start)_token_id|_from_model_config|transformers_version|do_sample|early_stopping|"
    r"renormalize_logits|remove_invalid_values|(output|return)_\w+|\w*(cache|compile|assistant|lookbehind)\w*|low_memory|"
    r"prefill_chunk_size|continuous_batching_config|max_matching_ngram_size|prompt_lookup_num_tokens|speculation_type|use_mtp"
)
"""Fields that change no tokens here. (The end tokens among them are read elsewhere; early_stopping is for beams.)"""


class Defaults(NamedTuple):
    """Values for the fields of SamplingParams, and the settings that were left out, as "name=value"."""

    fields: dict[str, Any]
    left_out: list[str]


def model_defaults(generation: Mapping[str, Any]) -> Defaults:
    """The defaults in a generation_config.json; ValueError naming the field if a value is out of its range."""
    sampled = generation.get("do_sample") is True
    names = {name: name for name in (*(SAMPLED if sampled else ()), *ALWAYS)} | {"max_new_tokens": "max_tokens"}
    found = {field: generation[name] for name, field in names.items() if generation.get(name) is not None}
    if sampled:
        found.setdefault("temperature", 1.0)
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ValueError(
            f"generation_config.json: {error}; mend the file, or leave it aside with generation_config off"
        ) from None
    left_out = [
        f"{name}={value!r}"
        for name, value in generation.items()
        if value is not None and name not in names and not _is_harmless(name, value)
    ]
    return Defaults(found, left_out)


def _is_harmless(name: str, value: Any) -> bool:
    return HARMLESS.fullmatch(name) is not None or value in {**NEUTRAL, **SAMPLED}.get(name, ())
