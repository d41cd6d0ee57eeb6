"""The TorchServe handler without TorchServe: what its configuration may say, and what becomes of a batch."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import Layout
from shardwise.features import Quantization
from shardwise.integrations import torchserve as module
from shardwise.integrations.hosted import Hosted
from shardwise.integrations.torchserve import ShardwiseHandler
from shardwise.integrations.torchserve_config import read_handler_config
from shardwise.params import SamplingParams
from shardwise.runtime.executor import RankFailure
from tests.harness import start_threads, threaded_llm
from tests.tiny import save_text_model

Write = Callable[[str], Path]
PROMPTS = ["once", "upon a time", "there was"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("handler") / "model")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        (tmp_path / "model-config.yaml").write_text(text)
        return tmp_path / "model-config.yaml"

    return write


class Metrics:
    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def add_time(self, name: str, value: float) -> None:
        self.found[name] = value

    add_counter = add_time


class Context:
    """What TorchServe hands to a handler, of a batch of ``size``."""

    def __init__(self, folder: Path, size: int = 0, **properties: Any) -> None:
        self.system_properties = {"model_dir": str(folder), **properties}
        self.manifest = {"model": {"configFile": "model-config.yaml"}}
        self.request_ids = {at: f"id-{at}" for at in range(size)}
        self.metrics = Metrics()
        self.statuses: dict[int, int] = {}
        self.types: dict[int, str] = {}

    def set_response_status(self, code: int, phrase: str, at: int) -> None:
        self.statuses[at] = code

    def set_response_content_type(self, at: int, value: str) -> None:
        self.types[at] = value


@pytest.fixture
def loaded(model: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ShardwiseHandler]]:
    """Makes handlers whose ranks are threads, of some more lines of configuration."""
    monkeypatch.setattr(module, "Hosted", partial(Hosted, start=start_threads))
    made: list[ShardwiseHandler] = []

    def load(*lines: str, asynchronous: bool = False) -> ShardwiseHandler:
        common = [f"model: {model}", "layout: tp2", "device: cpu", "kv_tokens: 2048", "ignore_eos: true", *lines]
        path = write(
            f"asyncCommunication: {str(asynchronous).lower()}\nhandler:\n" + "".join(f"  {line}\n" for line in common)
        )
        made.append(ShardwiseHandler())
        made[-1].initialize(Context(path.parent))
        return made[-1]

    yield load
    for handler in made:
        if handler._hosted is not None:
            handler._hosted.close()


def test_a_batch_runs_together(loaded: Callable[..., ShardwiseHandler], model: Path, tmp_path: Path) -> None:
    """b10, b11, c6: guards bodies of every kind in one batch: each has its own text, a bad one its own error."""
    handler = loaded("max_new_tokens: 12", "temperature: 0.7", "seed: 3")
    data: list[dict[str, Any]] = [
        {"body": b'{"prompt": "once"}'},
        {"data": {"prompt": "upon a time", "max_new_tokens": 5, "temperature": 0}},
        {"body": b"there was"},
        {"body": {"messages": [{"role": "user", "content": "hi"}]}},
        *({"body": body} for body in (b"{", b"\xff", {"prompt": "once", "max_new_tokens": 13}, {"prompt": 3}, [1])),
        *(
            {"body": {"prompt": "once", **bad}}
            for bad in ({"n": 2}, {"max_tokens": 3, "max_new_tokens": 3}, {"tempertaure": 1})
        ),
        {"prompt": b"once"},
    ]
    context = Context(tmp_path, len(data))
    answers = handler.handle(data, context)
    by = {"max_tokens": 12, "temperature": 0.7, "seed": 3, "ignore_eos": True}
    own = {**by, "max_tokens": 5, "temperature": 0}
    with threaded_llm(model) as llm:
        right = llm.generate(PROMPTS, [SamplingParams(**fields) for fields in (by, own, by)])
        right += llm.chat([{"role": "user", "content": "hi"}], SamplingParams(**by))
    assert answers[:4] == [output.text for output in right]
    assert context.statuses == dict.fromkeys(range(4, len(data)), 400)
    words = ["JSON", "neither text", "13 is more than the 12", "string or a list", "JSON object"]
    words += ["plain text", "give one of them", "tempertaure", "no body"]
    assert all(word in answer["message"] for word, answer in zip(words, answers[4:], strict=True))
    assert {kind for at, kind in context.types.items() if at < 4} == {"text/plain; charset=utf-8"}
    assert context.types[4] == "application/json"
    assert context.metrics.found["GeneratedTokens"] == 12 * 3 + 5


def test_a_null_lifts_no_cap_and_brackets_fail_alone(loaded: Callable[..., ShardwiseHandler], tmp_path: Path) -> None:
    """Guards the operator's cap from a null, and a batch from brackets without end in one of its bodies."""
    handler = loaded("max_new_tokens: 4")
    bodies = [b"once", b'{"prompt": "once", "max_new_tokens": null}', b'{"a":' + b"[" * 200_000, {"messages": [{}]}]
    context = Context(tmp_path, 4)
    plain, null, deep, wrong = handler.handle([{"body": body} for body in bodies], context)  # type: ignore[misc]
    assert plain == null
    assert context.statuses == {2: 400, 3: 400}
    assert "neither text nor a JSON object" in deep["message"]
    assert "role" in wrong["message"]


def test_pieces_go_out_as_they_come(
    loaded: Callable[..., ShardwiseHandler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """b20: guards streaming of a batch: requests take turns, and the pieces of each join to its text."""
    sent: list[tuple[int, str]] = []
    plain = loaded("max_new_tokens: 20").handle([{"body": prompt} for prompt in PROMPTS], Context(tmp_path, 3))
    monkeypatch.setattr(module, "_send", lambda text, at, context: sent.append((at, text)))
    handler = loaded("max_new_tokens: 20", "stream: true")
    assert handler.handle([{"body": prompt} for prompt in PROMPTS], Context(tmp_path, 3)) == [""] * 3
    assert ["".join(text for at, text in sent if at == which) for which in range(3)] == plain
    order = [at for at, _ in sent]
    assert order.index(2) < len(order) - order[::-1].index(0) - 1  # the last begins before the first has ended


def test_a_worker_without_ranks_ends(
    loaded: Callable[..., ShardwiseHandler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a worker that stays, with nothing to answer with, so that TorchServe never starts another one."""
    handler, codes = loaded(), []

    def fail(*_: object) -> None:
        raise RankFailure(0, "is gone for good")

    handler._leave = codes.append  # type: ignore[assignment]
    monkeypatch.setattr(handler._hosted._service.replicas, "step", fail)  # type: ignore[union-attr]
    (answer,) = handler.handle([{"body": "once"}], Context(tmp_path, 1))  # type: ignore[misc]
    assert (answer["code"], codes) == (503, [1])


def test_requests_come_while_others_run(
    loaded: Callable[..., ShardwiseHandler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards continuous batching with asynchronous workers: a short request ends before a long one does."""
    ended: list[str] = []
    handler = loaded(asynchronous=True)

    async def ask(prompt: str, tokens: int) -> str:
        body = {"prompt": prompt, "max_new_tokens": tokens, "temperature": 0}
        (text,) = await handler.handle([{"body": body}], Context(tmp_path, 1))  # type: ignore[misc]
        ended.append(prompt)
        return str(text)

    async def both() -> list[str]:
        return await asyncio.gather(ask("a long story", 200), ask("once", 4))

    long, short = asyncio.run(both())
    assert ended == ["once", "a long story"]
    plain = loaded()
    assert plain.handle([{"body": {"prompt": "once", "max_new_tokens": 4}}], Context(tmp_path, 1)) == [short]
    assert len(long) > len(short)


def test_memory_that_runs_out_is_called_so(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """serve#2300: guards the operator who would else be told that a worker died."""
    path = write("handler:\n  model: m\n")

    def fail(*_: object, **__: object) -> None:
        raise RankFailure(1, "MemoryError: no room", "MemoryError")

    monkeypatch.setattr(module, "Hosted", fail)
    with pytest.raises(MemoryError, match="rank 1"):
        ShardwiseHandler().initialize(Context(path.parent))


def test_the_other_ranks_of_torchrun_are_idle(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a second copy of the model in a worker whose answers TorchServe drops."""
    path = write("parallelType: pp\nhandler:\n  model: there is no such thing\n")
    for name, value in (("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    handler = ShardwiseHandler()
    handler.initialize(Context(path.parent))
    assert handler.handle([{"body": "once"}, {"body": "once"}], Context(path.parent, 2)) == ["", ""]


def test_one_gpu_is_not_enough_for_two_ranks(write: Write) -> None:
    """Guards GPUs from two workers: TorchServe tells each worker of one, unless there is a parallelType."""
    path = write("handler:\n  model: m\n  layout: tp2\n")
    with pytest.raises(RuntimeError, match="parallelType to custom, parallelLevel to 2 and asyncCommunication to true"):
        ShardwiseHandler().initialize(Context(path.parent, gpu_id=1))


def test_settings_are_read(write: Write, model: Path) -> None:
    """b8: guards the keys of the handler section: each reaches the engine, the requests or the handler."""
    path = write(
        "deviceType: cpu\nminWorkers: 1\nhandler:\n  model: part\n  layout: tp2\n  quantize: int8\n  speculate: ngram\n"
        "  temperature: 0.5\n  max_new_tokens: 9\n  stream: true\n  stop: [x]\n  split: [2, 1]\n"
        "  generation_config: false\n"
    )
    (path.parent / "part").mkdir()
    found = read_handler_config(path, {})
    assert found.model == str(path.parent / "part")
    assert found.engine.speculate is not None
    assert found.engine.speculate.kind == "ngram"
    assert found.engine.layout == Layout(tp=2)
    assert (found.engine.quantize, found.engine.split, found.engine.device) == (Quantization(8), (2, 1), "cpu")
    assert found.engine.isolate
    assert found.sampling == {"temperature": 0.5, "stop": ("x",)}
    assert (found.max_new_tokens, found.stream, found.generation_config, found.asynchronous) == (9, True, False, False)
    assert read_handler_config(write("handler:\n  model: smollm2\n"), {}).model == "smollm2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("minWorkers: 1\n", "handler must be a section"),
        ("asyncCommunication: true\nbatchSize: 2\nhandler:\n  model: m\n", ":2: batchSize must be 1"),
        ("continuousBatching: true\nhandler:\n  model: m\n", ":1: continuousBatching is another way"),
        ("handler:\n  layout: tp2\n", ":2: model is missing"),
        (
            "handler:\n  model: m\n  max_new_token: 3\n",
            ":3: unknown key 'max_new_token'; did you mean 'max_new_tokens'",
        ),
        ("handler:\n  model: m\n  logprobs: 3\n", ":3: unknown key 'logprobs'"),
        ("handler:\n  model: m\n  stream: 1\n", ":3: stream must be true or false"),
        ("handler:\n  model: m\n  max_new_tokens: 0\n", ":3: max_new_tokens must be at least 1"),
        ("handler:\n  model: m\n  temperature: -1\n", ":3: temperature must be a number of at least 0"),
        ("handler:\n  model: m\n  layout: tp2\n  split: [1]\n", ":4: split must give"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, message: str, write: Write) -> None:
    """c18: guards against settings that are dropped, or changed, without a word."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read_handler_config(write(text), {})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("kind", "environ", "layout"),
    [
        ("tp", {"WORLD_SIZE": "3"}, "tp3"),
        ("pp", {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "pp2"),
        ("custom", {}, "1"),
    ],
)
def test_torchrun_gives_the_layout(kind: str, environ: dict[str, str], layout: str, write: Write) -> None:
    """c12: guards a group of torchrun's: a rank for each of its processes, unless the layout is said."""
    path = write(f"parallelType: {kind}\nhandler:\n  model: m\n")
    assert str(read_handler_config(path, environ).engine.layout) == layout


@pytest.mark.parametrize(
    ("text", "environ", "message"),
    [
        ("parallelType: pptp\nhandler:\n  model: m\n", {"WORLD_SIZE": "4"}, ":3: layout is missing"),
        ("handler:\n  model: m\n  layout: tp2\n", {"WORLD_SIZE": "4"}, ":3: layout tp2 has 2 ranks, and torchrun"),
        ("handler:\n  model: m\n", {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "must be on one host"),
    ],
)
def test_what_torchrun_can_not_be_is_refused(text: str, environ: dict[str, str], message: str, write: Write) -> None:
    """c12: guards against a group of which some processes would have no part in the model, silently."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read_handler_config(write(text), environ)
    assert message in str(error.value)


def test_the_module_defines_one_class() -> None:
    """Guards the module from a second class, with which TorchServe would refuse it."""
    classes = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]
    assert classes == [ShardwiseHandler]
