"""A trace of a rank's first steps by torch's profiler, in which kernels and exchanges between ranks have their names.

The file is Chrome's trace format, for chrome://tracing or https://ui.perfetto.dev.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.schedule.step import Step

STEPS = 64
"""How many are recorded: a trace of more is too much for those who look at it, and for memory."""

T = TypeVar("T")


class Profile:
    """Records steps until `STEPS` are done or it is closed, and then writes ``path``."""

    def __init__(self, path: Path, device: torch.device) -> None:
        """Raises OSError where no file can be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of an earlier run
        self._path = path
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile: profile | None = profile(activities=activities, acc_events=True)
        self._num_steps = 0

    def step(self, step: Step) -> record_function:
        """A context for one step."""
        if self._profile is not None and self._num_steps == 0:
            self._profile.start()
        elif self._num_steps == STEPS:
            self.close()
        self._num_steps += 1
        tokens = sum(len(chunk.tokens) for chunk in step.chunks)
        return record_function(f"step {step.number}: {tokens} tokens{' of drafts' if step.draft else ''}")

    def close(self) -> None:
        """Write what was recorded; harmless when repeated."""
        recorded, self._profile = self._profile, None
        if recorded is not None and self._num_steps:
            recorded.stop()
            recorded.export_chrome_trace(str(self._path))


class _Labelled:
    def __init__(self, inner: Any, of: str) -> None:
        self._inner, self._of = inner, of

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*given: Any, **named: Any) -> Any:
            with record_function(f"{self._of}.{name}"):
                return found(*given, **named)

        return call


def labelled(inner: T, of: str) -> T:
    """The same object, as far as callers see; a trace shows each call of its methods as ``of.method``."""
    return cast(T, _Labelled(inner, of))
