"""What docs/server.md says, tried: its Python, its routes, its metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shardwise.features import Speculation
from tests.server.conftest import deps_on, serving
from tests.server.dictation import save_chat_model

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = save_chat_model(tmp_path_factory.mktemp("model"))
    settings = {"served_model_names": ("smollm2", "Qwen3-0.6B"), "tool_parser": "hermes", "max_model_len": 300}
    with deps_on(path, speculate=Speculation("ngram"), **settings) as deps, serving(deps) as found:
        yield found


def test_the_python_of_the_page_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards readers from a quickstart that fails."""
    for source in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        names: dict[str, object] = {}
        source = source.replace("stream=True", "stream=True, seed=1")  # a random model may say nothing
        exec(source.replace("http://127.0.0.1:8000", url), names)
        names["client"].close()  # type: ignore[attr-defined]
    assert capsys.readouterr().out


def test_the_names_of_the_page_are_real(url: str) -> None:
    """Guards operators from a route or a metric that there isn't, and from one that is not told of."""
    routes = set(re.findall(r"`(/[a-z0-9/_]+)`", PAGE))
    known = set(httpx.get(f"{url}/openapi.json", timeout=60).json()["paths"]) - {"/v1/models/{model}"}
    assert known <= routes <= known | {"/openapi.json", "/help"}
    table = PAGE.partition("`shardwise_…`")[2].partition("\n\n")[0]
    told = set(re.findall(r"`([a-z0-9_]+)(?:\{\w+\})?`", table))
    page = httpx.get(f"{url}/metrics", timeout=60).text
    families = re.findall(r"^# TYPE shardwise_(\w+) (\w+)$", page, re.MULTILINE)
    assert told == {name for name, _ in families}
