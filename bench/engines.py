"""The bench's side of a peer: starts the process, asks, waits with a deadline, ends it."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class Engine:
    """One peer process, asleep in a read until it is asked.

    Its OpenMP threads spin for some milliseconds after their last work, as libgomp does by default, and then sleep too.
    """

    def __init__(self, name: str, python: str, module: str, *args: str, env: dict[str, str] | None = None) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-m", f"bench.peers.{module}", *args],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.version: str = self._read(300.0)["version"]

    def ask(self, timeout_s: float = 900.0, **request: Any) -> dict[str, Any]:
        """The peer's answer; RuntimeError with the end of its stderr if it died or took too long."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._read(timeout_s)

    def close(self) -> None:
        """End the process by closing its stdin, or by force after ten seconds."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(timeout_s) else ""
        if not line:
            self._process.kill()
            self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"{self.name} gave no answer within {timeout_s:g} s:\n{self._errors.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def prompts(tokenizer: Path, batch: int, length: int) -> list[Sequence[int]]:
    """``batch`` different pieces of real English, ``length`` tokens each: windows of the project's licence."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(tokenizer)).encode((ROOT / "LICENSE").read_text()).ids
    stride = max(1, (len(ids) - length) // batch)
    return [ids[start * stride : start * stride + length] for start in range(batch)]
