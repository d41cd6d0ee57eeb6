"""What is decided before ranks start, of the host that they start on."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.config import EngineConfig, Layout
from shardwise.runtime import launch
from shardwise.runtime.machine import visible_gpus


@pytest.mark.parametrize(
    ("shown", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("2", 1),
        ("3, 1", 2),
        ("1,7,2", 1),
        ("0,-1,2", 1),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,MIG-1", 2),
    ],
)
def test_gpus_are_those_that_are_shown(monkeypatch: pytest.MonkeyPatch, shown: str | None, count: int) -> None:
    """Guards against ranks on GPUs that CUDA_VISIBLE_DEVICES hides, as a scheduler does: they would not be found."""
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path(f"/dev/nvidia{number}") for number in range(4)])
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert visible_gpus() == count
    for size in (1, 2, 4):
        assert launch._device(EngineConfig(layout=Layout(tp=size)), size) == ("cuda" if count >= size else "cpu")
    with pytest.raises(ValueError, match=r"this host has no GPU 4.*; it has "):
        launch._device(EngineConfig(device_ids=(4,)), 1)
    if 0 < count < 4:
        assert launch._device(EngineConfig(device_ids=(count - 1,)), 1) == "cuda"
        with pytest.raises(ValueError, match=f"no GPU {count} that CUDA_VISIBLE_DEVICES='.*' shows"):
            launch._device(EngineConfig(device_ids=(count,)), 1)
