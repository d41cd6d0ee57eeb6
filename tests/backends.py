"""A backend of torch.compile that writes down what it is told, offered as a package would: by an entry point."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

MODULE = """
import json
import os


def record(graph, inputs, **told):
    told = {"told": {key: repr(value) for key, value in told.items()}}
    told |= {"pid": os.getpid(), "open": any(type(each).__name__ == "SymInt" for each in inputs)}
    with open(os.environ["RECORD"], "a") as file:
        file.write(json.dumps(told) + "\\n")
    return graph.forward
"""


class Recorder:
    """The backend "record" in a directory that goes on the import path; its records are in a file of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "records.jsonl"
        information = folder / "recorder-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: recorder\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text("[torch_dynamo_backends]\nrecord = recorder:record\n")
        (folder / "recorder.py").write_text(MODULE)

    def records(self) -> list[dict[str, Any]]:
        """Of each graph: what it was "told" besides, as text, in which process, and whether sizes were left "open"."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [json.loads(line) for line in lines]


@contextmanager
def known(recorder: Recorder, graphs: Path) -> Iterator[None]:
    """This process and those that it starts know the backend meanwhile, and keep what inductor makes in ``graphs``."""
    import torch._dynamo
    from torch._dynamo.backends import registry

    registry.list_backends()
    variables = {"RECORD": str(recorder.file), "TORCHINDUCTOR_CACHE_DIR": str(graphs)}
    with patch.dict("os.environ", variables), patch.object(sys, "path", [str(recorder.folder), *sys.path]):
        registry._discover_entrypoint_backends.cache_clear()
        registry._discover_entrypoint_backends()
        try:
            yield
        finally:
            registry._BACKENDS.pop("record", None)
            registry._COMPILER_FNS.pop("record", None)
            sys.modules.pop("recorder", None)
            registry._discover_entrypoint_backends.cache_clear()
            torch._dynamo.reset()
