"""Which draft decoder runs beside the model, and every reason why one can't; decided from headers, before any weight.

Knows what the ranks will hold and not how drafts are used. Whether two tokenizers mean the same by an id is not seen
here: who opens tokenizers compares them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.config import EngineConfig
from shardwise.features import DTYPES, Quantization, Speculation
from shardwise.models.config import ModelConfig
from shardwise.parallel.placement import Run
from shardwise.runtime.rank_plan import BYTES, RankPlan, plan_ranks
from shardwise.runtime.source import Source, choose_quantization, open_source
from shardwise.runtime.spec import DraftSpec
from shardwise.weights.checkpoint import LoadError


@dataclass(frozen=True)
class DraftPlan:
    """A draft decoder with everything decided."""

    source: Source | None
    """A model of its own, with its own KV cache of as many blocks; None: the target itself, in the target's cache."""
    config: ModelConfig
    """Its own, or the target's."""
    dtype: str
    quantize: Quantization | None
    layers: int | None
    """Only the target's first so many layers run, and none of its weights is read again; None: all layers."""
    max_len: int
    """It sees positions below this; a sequence that is longer gets no drafts."""
    num_ids: int
    """Tokens from here on are never drafted: the draft or the target has no such row."""
    ranks: tuple[RankPlan, ...]
    """What each rank holds for the draft alone, in rank order."""

    @property
    def shared(self) -> bool:
        """Does it write to the target's KV cache?"""
        return self.source is None

    def spec(self) -> DraftSpec:
        """What every rank is told."""
        own = self.source
        return DraftSpec(
            model=own.config.to_dict() if own else None,
            index=own.index if own else None,
            dtype=self.dtype,
            quantize=self.quantize,
            layers=self.layers,
        )


def plan_draft(
    source: Source, engine: EngineConfig, dtype: str, quantize: Quantization | None, max_len: int
) -> DraftPlan | None:
    """The draft decoder that ``engine.speculate`` asks for beside a target that runs so; None where it asks for none.

    A draft model runs in its own dtype if given, else in the engine's, else in its checkpoint's; in float64 beside a
    float64 target and never elsewhere, since activations share one format. It is quantised as given, else as its own
    checkpoint or the engine is. Plain ``self`` rounds the target's weights to bfloat16 where they run as float32 (half
    the bytes to read, nearly the same tokens), and elsewhere stops after half of the layers. Raises ValueError with the
    remedy, LoadError for a draft model with broken files.
    """
    by = engine.speculate
    if by is None or by.kind == "ngram":
        return None
    target = source.config
    if by.kind == "draft":
        return _own_model(by, target, engine, dtype, max_len)
    rounding, whole = by.quantize, by.layers is None and by.quantize is None and quantize is None
    narrow = by.dtype or ("bfloat16" if whole and dtype == "float32" else None)
    if rounding is not None and quantize is not None and rounding.bits >= quantize.bits:
        remedy = "quantize can be int4" if quantize.bits == 8 else "use layers, as in self,layers=8"
        raise ValueError(
            f"speculate: self in {rounding} must be narrower than the model, or it only costs; "
            f"the model is {quantize}: {remedy}"
        )
    if narrow is not None or rounding is not None:
        if narrow is not None:
            _check_narrower(narrow, dtype, quantize)
        layers, found = None, plan_ranks(target, engine, narrow or dtype, rounding, engine.stages)
        ranks = tuple(replace(rank, kv_bytes_per_token=0) for rank in found)
    else:
        layers = by.layers or target.num_layers // 2
        _check_layers(layers, target.num_layers)
        found = plan_ranks(target, engine, dtype, quantize, engine.stages)
        ranks = tuple(_cut(rank, layers) for rank in found)
    return DraftPlan(None, target, narrow or dtype, rounding, layers, max_len, target.vocab_size, ranks)


def _own_model(by: Speculation, target: ModelConfig, engine: EngineConfig, dtype: str, max_len: int) -> DraftPlan:
    assert by.model is not None
    try:
        source = open_source(by.model)
    except ValueError as error:
        kind = LoadError if isinstance(error, LoadError) else ValueError
        raise kind(f"speculate: the draft: {error}") from error
    config = source.config
    try:
        config.check(engine.layout)
    except ValueError as error:
        raise ValueError(
            f"speculate: the draft {by.model} runs on the layout of the model, and can't: {error}; "
            "or take another draft, or ngram or self, which fit every layout"
        ) from error
    quantize = choose_quantization(by.quantize, source) or engine.quantize
    own = _own_dtype(by.dtype, config.dtype if engine.dtype == "auto" else engine.dtype, dtype)
    return DraftPlan(
        source=source,
        config=config,
        dtype=own,
        quantize=quantize,
        layers=None,
        max_len=min(max_len, config.max_positions),
        num_ids=min(config.vocab_size, target.vocab_size),
        ranks=plan_ranks(config, engine, own, quantize, None),
    )


def _own_dtype(given: str | None, usual: str, target: str) -> str:
    wide = target == "float64"
    if given is not None and (given == "float64") != wide:
        valid = "float64" if wide else ", ".join(name for name in DTYPES[1:] if name != "float64")
        raise ValueError(
            f"speculate: a draft of dtype {given} does not go with a model of dtype {target}, because activations are "
            f"{'float64' if wide else 'float32'} in both; dtype can be {valid}, or be left out"
        )
    if wide:
        return "float64"
    return given or ("float32" if usual == "float64" else usual)


def _check_narrower(narrow: str, dtype: str, quantize: Quantization | None) -> None:
    floats = [name for name in DTYPES[1:] if BYTES[name] < BYTES[dtype]]
    valid = floats if dtype != "float64" and quantize is None else []
    if narrow not in valid:
        why = "has activations of float64, which only float64 weights go with" if dtype == "float64" else f"is {dtype}"
        why = f"is {quantize}" if quantize is not None else why
        remedy = f"dtype can be {', '.join(valid)}" if valid else "no dtype can: use layers, as in self,layers=8"
        raise ValueError(
            f"speculate: self in {narrow} must be narrower than the model, or it only costs; the model {why}: {remedy}"
        )


def _check_layers(layers: int, num_layers: int) -> None:
    if num_layers == 1:
        raise ValueError(
            "speculate: self can't stop earlier in a model of a single layer: use ngram, a draft, or a narrower dtype"
        )
    if not 1 <= layers < num_layers:
        raise ValueError(
            f"speculate: self with layers={layers} must stop before the last of the model's {num_layers} layers: "
            f"layers can be 1 to {num_layers - 1}"
        )


def _cut(rank: RankPlan, layers: int) -> RankPlan:
    """Nothing beyond what the rank holds already, and only layers below ``layers``."""
    own = rank.shard.layers
    run = Run(min(own.start, layers), min(own.stop, layers))
    return RankPlan(rank.tp, rank.pp, replace(rank.shard, layers=run), 0, 0, (), 0, 0)
