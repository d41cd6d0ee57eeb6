"""The proof's own judgement: what it refuses, what it lets pass, and how it and `inspect` are printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.config import EngineConfig, Layout
from shardwise.describe import describe, show
from shardwise.features import Speculation
from shardwise.verify import Cell, Report, Run, _compare, verify_layouts
from tests.tiny import save_text_model

SINGLE = np.dtype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("verify") / "text [v2] [/b]")


def one_row(*logits: float) -> Run:
    return Run([[1]], [[np.array(logits, SINGLE).tobytes()]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_no_tolerance_allows_what_is_no_number(bad: float) -> None:
    """Guards the verdict from NaN, which is never the larger of two, and its document from what JSON can't hold."""
    first, other = one_row(1.0, 2.0), one_row(1.0, bad)
    for pair in ((first, other), (other, first), (one_row(bad, 1.0), one_row(bad, 2.0))):
        assert _compare(*pair, SINGLE) == (1.0, float("inf"))
    assert _compare(first, one_row(1.0, 2.5), SINGLE) == (1.0, 0.5)
    assert _compare(other, other, SINGLE) == (1.0, 0.0)
    report = Report("m", 1e-3, [Cell("1", "a", "h", 1.0, 0.0), Cell("tp2", "a", "i", *_compare(first, other, SINGLE))])
    assert not report.ok
    document = json.loads(json.dumps(report.document(), allow_nan=False))
    assert [cell["difference"] for cell in document["cells"]] == [0.0, None]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_tokens": 0}, "--max-tokens must be at least 1, not 0"),
        ({"batches": (4, 0)}, "--batches must be at least 1, not 0"),
        ({"chunks": (-3,)}, "--chunks must be at least 1, not -3"),
        ({"max_tokens": 256}, "--max-tokens 256 leaves no room for a prompt in a context of 256"),
    ],
)
def test_what_proves_nothing_is_refused(
    model: Path, asked: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a proof that divides by nothing, or never ends, once ranks are up."""
    monkeypatch.setattr("shardwise.verify.launch", None)
    given: dict[str, Any] = {"batches": (1,), "chunks": (1,), "max_tokens": 3, **asked}
    with pytest.raises(ValueError) as error:  # noqa: PT011
        verify_layouts(str(model), [Layout()], tolerance=None, say=print, device="cpu", **given)
    assert str(error.value) == words


def test_paths_are_printed_as_they_are(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards names in brackets, which would else be taken for colours or end the command."""
    show(describe(str(model), EngineConfig(device="cpu", speculate=Speculation.parse(f"draft={model},k=2"))))
    Report(f"directory {model}", cells=[Cell("1", "a", "h", 1.0, 0.0)]).show()
    printed = "".join(capsys.readouterr().out.split())
    assert printed.count("text[v2][/b]") == 3  # the model, its draft and the report
