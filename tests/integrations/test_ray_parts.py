"""What Ray's actors do, without Ray: tables through a generator, checks before anything starts, a replica's health."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.features import Quantization
from shardwise.integrations.ray_actor import engine_config, resources
from shardwise.integrations.ray_data import NEW, Generator, generate_dataset
from shardwise.integrations.ray_serve import Replica, Unprefixed, build_app
from shardwise.params import SamplingParams
from shardwise.server.config import ServerConfig
from tests.harness import start_threads, threaded_llm
from tests.tiny import save_text_model

pyarrow = pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("parts") / "model")


@pytest.fixture
def generator(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Generator]:
    """One whose ranks are threads."""
    monkeypatch.setattr("shardwise.llm.launch", start_threads)
    settings = {"layout": "tp2", "device": "cpu", "threads": 1, "kv_tokens": 2048}
    made = Generator(str(model), settings, True, "prompt", ("seed", "stop"), {"max_tokens": 8, "temperature": 0.9})
    yield made
    made._llm.close()


def test_prompts_of_every_kind(generator: Generator, model: Path) -> None:
    """Guards a column's values as Arrow gives them: texts, ids, messages with holes; and fields that are null."""
    right = {}
    with threaded_llm(model) as llm:
        for seed in (1, 2):
            by = SamplingParams(max_tokens=8, temperature=0.9, seed=seed)
            right["text", seed] = llm.generate("once", by)[0].token_ids
            right["ids", seed] = llm.generate([5, 6, 7], by)[0].token_ids
            right["chat", seed] = llm.chat([{"role": "user", "content": "a"}], by)[0].token_ids
    chat = [{"role": "user", "content": "a", "name": None}]
    for kind, value in {"text": "once", "ids": [5, 6, 7], "chat": chat}.items():
        table = pyarrow.table({"row": [7, 8], "prompt": [value] * 2, "seed": [1, 2], "stop": [None, ["never there"]]})
        found = generator(table)
        assert found.column_names == ["row", "prompt", "seed", "stop", *NEW]
        assert found.column("row").to_pylist() == [7, 8]
        assert found.column("token_ids").to_pylist() == [right[kind, 1], right[kind, 2]]
        assert found.column("error").null_count == 2
    strange = pyarrow.table({"prompt": [1.5, None], "seed": [1, 2], "stop": [[""], None]})
    found = generator(strange)
    assert found.column("text").null_count == 2
    assert [type(error) for error in found.column("error").to_pylist()] == [str, str]
    empty = generator(table.slice(0, 0))
    assert (empty.num_rows, empty.column_names) == (0, [*table.column_names, *NEW])


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        (["text", "prompt"], {}, "column 'text' already"),
        (["question"], {}, "no column 'prompt', only question"),
        (["prompt", "heat"], {"fields": ["heat"]}, "heat are no sampling fields"),
        (["prompt"], {"fields": ["seed"]}, "no column 'seed'"),
        (["prompt"], {"sampling": {"n": 2}}, "n can't be set"),
        (["prompt"], {"sampling": {"temperature": -1}}, "temperature must be"),
        (["prompt"], {"layout": "tp"}, "layout 'tp'"),
        (["prompt"], {"device": "auto"}, "device must be cpu or cuda"),
        (["prompt"], {"quantize": "int5"}, "not int8 or int4"),
    ],
)
def test_a_job_is_checked_before_it_starts(names: list[str], settings: dict[str, Any], message: str) -> None:
    """Guards a cluster from jobs that would fail an hour later, on their first block."""
    dataset: Any = SimpleNamespace(schema=lambda fetch_if_missing: SimpleNamespace(names=names))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        generate_dataset(dataset, "m", **{"layout": "tp2", **settings})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, "0 <= 3 <= 2"),
        ({"min_replicas": 0, "max_replicas": 0}, "at least one"),
        ({"target_requests": 0}, "target_requests"),
        ({"device": "auto"}, "device must be cpu or cuda"),
        ({"split": (1,)}, "split must give"),
        ({"server": ServerConfig(host="0.0.0.0")}, "API key"),
    ],
)
def test_a_fleet_is_checked_before_it_starts(settings: dict[str, Any], message: str) -> None:
    """Guards against replicas that Serve would start, and start again, in vain; and against an open door."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        build_app("m", "tp2", **settings)
    assert message in str(error.value)


def test_an_actor_asks_for_what_its_ranks_use() -> None:
    """Guards hosts from more ranks than they have cores or GPUs for."""
    engine = engine_config("dp2.tp2", "cuda", 3, {"quantize": "int8"})
    assert resources(engine) == {"CPU": 12, "GPU": 4}
    assert (engine.quantize, engine.threads, engine.isolate) == (Quantization(8), 3, True)
    assert resources(engine_config("pp2", "cpu", 1, {})) == {"CPU": 2}


def test_a_replica_without_ranks_says_so() -> None:
    """Guards a fleet from a replica that answers 503 for ever: Serve replaces what raises here, and nothing else."""
    replica = object.__new__(Replica)
    service = SimpleNamespace(failure=None)
    replica._deps = SimpleNamespace(service=service)  # type: ignore[assignment]
    asyncio.run(replica.check_health())
    service.failure = RuntimeError("rank 0: was killed")
    with pytest.raises(RuntimeError, match="rank 0: was killed"):
        asyncio.run(replica.check_health())


def test_routes_are_known_from_the_root() -> None:
    """Guards health checks and limits, which go by paths, under a route prefix of Serve's."""
    seen: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], receive: object, send: object) -> None:
        seen.append(scope)

    for scope in ({"path": "/llm/health", "root_path": "/llm"}, {"path": "/health"}, {"type": "lifespan"}):
        asyncio.run(Unprefixed(app)(scope, None, None))
    assert [scope.get("path") for scope in seen] == ["/health", "/health", None]
