"""Ray Data: a stage that continues the prompts of a data set, by actors that each host a model on a layout.

Knows columns and blocks; what a row may ask for is `rows`' business. Needs `pip install 'shardwise[ray]'`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config import Layout
from shardwise.integrations.ray_actor import engine_config, resources
from shardwise.llm import LLM
from shardwise.params import SamplingParams
from shardwise.rows import submit_row

if TYPE_CHECKING:
    from ray.data import Dataset

NEW = ("text", "token_ids", "finish_reason", "error")
"""Columns that are added; of a bad row the error alone is set, of all others everything else."""
UNTOLD = ("n", "logprobs", "prompt_logprobs")
"""Sampling fields whose results have no place in those columns."""


def generate_dataset(
    dataset: Dataset,
    model: str | Path,
    layout: str | Layout = "1",
    *,
    prompt: str = "prompt",
    fields: Sequence[str] = (),
    sampling: Mapping[str, Any] | None = None,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int | None = 1024,
    device: str = "cpu",
    threads: int = 1,
    generation_config: bool = True,
    **settings: Any,
) -> Dataset:
    """The data set with a continuation of each row's ``prompt``: a text, token ids, or a list of chat messages.

    Every row keeps its columns and gets those of NEW. ``sampling`` are fields of SamplingParams for all rows; columns
    named in ``fields`` are such fields of their row, where they aren't null. A row that can't be run has an error and
    harms no other. ``concurrency`` actors (or from, to) take part, each with ``threads`` CPUs for each rank of its
    layout and, where ``device`` is cuda, a GPU. Rows of a batch are generated together, so ``batch_size`` should be
    several times ``max_num_seqs``; None is whole blocks. ``settings`` are the other fields of EngineConfig, as LLM
    takes them. Raises ValueError, before anything is started, for what can't be.
    """
    engine = engine_config(layout, device, threads, settings)
    by = dict(sampling or {})
    for name in (*fields, *by):
        if name in UNTOLD:
            raise ValueError(f"sampling: {name} can't be set: there are no columns for what it gives")
    SamplingParams.from_dict(by)
    if unknown := set(fields) - {item.name for item in dataclasses.fields(SamplingParams)}:
        raise ValueError(f"fields: {', '.join(sorted(unknown))} are no sampling fields; rename such columns first")
    if (schema := dataset.schema(fetch_if_missing=False)) is not None:
        _check_columns(schema.names, prompt, fields)
    from ray.data import ActorPoolStrategy

    low, high = (concurrency, concurrency) if isinstance(concurrency, int) else concurrency
    needed = resources(engine)
    return dataset.map_batches(
        Generator,
        fn_constructor_kwargs={
            "model": str(model),
            "settings": {**settings, "layout": engine.layout, "device": device, "threads": threads, "isolate": True},
            "generation_config": generation_config,
            "prompt": prompt,
            "fields": tuple(fields),
            "sampling": by,
        },
        compute=ActorPoolStrategy(min_size=low, max_size=high),
        batch_size=batch_size,
        batch_format="pyarrow",
        udf_modifying_row_count=False,
        num_cpus=needed["CPU"],
        num_gpus=needed.get("GPU"),
    )


class Generator:
    """What an actor does: a model on a layout, which continues the rows of one table after another."""

    def __init__(
        self,
        model: str,
        settings: Mapping[str, Any],
        generation_config: bool,
        prompt: str,
        fields: Sequence[str],
        sampling: Mapping[str, Any],
    ) -> None:
        self._llm = LLM(model, generation_config=generation_config, **settings)
        self._prompt, self._fields, self._sampling = prompt, fields, sampling

    def __call__(self, table: Any) -> Any:
        """A ``pyarrow.Table`` with the columns of NEW beside its own."""
        import pyarrow

        _check_columns(table.column_names, self._prompt, self._fields)
        rows = table.select([self._prompt, *self._fields]).to_pylist()
        found: list[dict[str, Any]] = [{} for _ in rows]
        numbers: dict[int, int] = {}
        for at, row in enumerate(rows):
            try:
                numbers[at] = submit_row(self._llm, self._request(row), self._sampling, at)
            except ValueError as error:
                found[at]["error"] = str(error)
        for at, number in numbers.items():
            (part,) = self._llm.result(number).outputs
            fine = part.finish_reason != "error"
            found[at] = {name: getattr(part, name) for name in NEW[:3]} if fine else {"error": part.error}
        kinds = (pyarrow.string(), pyarrow.list_(pyarrow.int32()), pyarrow.string(), pyarrow.string())
        for name, kind in zip(NEW, kinds, strict=True):
            table = table.append_column(name, pyarrow.array([row.get(name) for row in found], kind))
        return table

    def _request(self, row: Mapping[str, Any]) -> dict[str, Any]:
        given = row[self._prompt]
        given = given.tolist() if hasattr(given, "tolist") else given  # of ids that came as an array
        request = {name: row[name] for name in self._fields if row[name] is not None}
        if isinstance(given, list) and given and isinstance(given[0], dict):
            messages = [{name: value for name, value in each.items() if value is not None} for each in given]
            return {**request, "messages": messages}
        return {**request, "prompt": given}


def _check_columns(names: Sequence[str], prompt: str, fields: Sequence[str]) -> None:
    for name in (prompt, *fields):
        if name not in names:
            raise ValueError(f"the data set has no column {name!r}, only {', '.join(names)}")
    for name in NEW:
        if name in names:
            raise ValueError(f"the data set has a column {name!r} already: rename or drop it first")
