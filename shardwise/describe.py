"""What a model is and what each rank of a layout would hold, from headers alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardwise.config import BLOCK, EngineConfig
from shardwise.runtime.draft_plan import DraftPlan
from shardwise.runtime.launch import plan_run
from shardwise.runtime.source import open_source

Document = dict[str, Any]


def describe(model: str, engine: EngineConfig) -> Document:
    """A JSON-ready description; sizes in bytes, ranges half-open. ValueError or LoadError as for loading the model."""
    source = open_source(model)
    plan = plan_run(source, engine)
    config = asdict(source.config)
    return {
        "model": source.resolved.source,
        "config": config,
        "layout": str(engine.layout),
        "world_size": engine.layout.world_size,
        "dtype": plan.dtype,
        "quantize": str(plan.quantize) if plan.quantize is not None else None,
        "device": plan.device,
        "max_model_len": plan.max_model_len,
        "kv_tokens": plan.num_blocks * BLOCK,
        "draft": None if plan.draft is None else _draft(plan.draft),
        "places": plan.places(),
        "ranks": [
            {
                "rank": index,
                "tp": rank.tp,
                "pp": rank.pp,
                "layers": list(rank.shard.layers),
                "heads": list(rank.shard.heads),
                "kv_heads": list(rank.shard.kv_heads),
                "mlp": list(rank.shard.mlp),
                "experts": list(rank.shard.experts(source.config.intermediate_size)) if source.config.experts else None,
                "vocabulary": list(rank.shard.vocab),
                "parameters": rank.parameters,
                "weight_bytes": rank.weight_bytes,
                "kv_bytes_per_token": rank.kv_bytes_per_token,
                "memory": None if plan.offload is None else plan.offload.document(index, rank),
            }
            for index, rank in enumerate(plan.ranks)
        ],
    }


def _draft(draft: DraftPlan) -> Document:
    """What the ranks hold for the draft alone; nothing where it runs the model's own layers."""
    return {
        "model": draft.source.resolved.source if draft.source is not None else None,
        "dtype": draft.dtype,
        "quantize": str(draft.quantize) if draft.quantize is not None else None,
        "max_len": draft.max_len,
        "ranks": [
            {
                "layers": list(rank.shard.layers),
                "parameters": rank.parameters,
                "weight_bytes": rank.weight_bytes,
                "kv_bytes_per_token": rank.kv_bytes_per_token,
            }
            for rank in draft.ranks
        ],
    }


def show(document: Document) -> None:
    """Print a description for people."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.print(document["model"], highlight=False, markup=False)  # a path may hold brackets
    numbers = Table(show_header=False, box=None)
    for name, value in document["config"].items():
        numbers.add_row(name, escape(str(value)))
    console.print(numbers)
    weights = document["quantize"] or document["dtype"]
    ranks = Table(title=f"layout {document['layout']} · {weights} on {document['device']} · one replica")
    sizes = ("parameters", "weights", "kv per token")
    for column in ("rank", "tp", "pp", "layers", "heads", "kv heads", *sizes):
        ranks.add_column(column, justify="right")
    for rank in document["ranks"]:
        runs = [_run(rank[name]) for name in ("layers", "heads", "kv_heads")]
        ranks.add_row(*map(str, (rank["rank"], rank["tp"], rank["pp"])), *runs, *_sizes(rank))
    console.print(ranks)
    if document["draft"] is not None:
        draft = document["draft"]
        console.print(f"draft: {draft['model'] or 'the model itself'}", highlight=False, markup=False)
        drafts = Table(title=f"{draft['quantize'] or draft['dtype']}, beside the above")
        for column in ("rank", "layers", *sizes):
            drafts.add_column(column, justify="right")
        for index, rank in enumerate(draft["ranks"]):
            drafts.add_row(str(index), _run(rank["layers"]), *_sizes(rank))
        console.print(drafts)
    for line in document["places"]:
        console.print(line, highlight=False, markup=False)


def _run(run: list[int]) -> str:
    start, stop = run
    return f"{start}–{stop - 1}" if stop > start else "none"


def _sizes(rank: Document) -> list[str]:
    return [
        f"{rank['parameters'] / 1e6:,.1f} M",
        f"{rank['weight_bytes'] / 2**20:,.1f} MiB",
        f"{rank['kv_bytes_per_token'] / 1024:,.1f} KiB",
    ]
