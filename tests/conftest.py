"""One thread per rank, no network, and nothing left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.backends import Recorder, known

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")

settings.register_profile("repeatable", derandomize=True)
settings.register_profile(
    "random", print_blob=True
)  # other examples each time: scripts/test --hypothesis-profile=random
settings.load_profile("repeatable")

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background job ignores it, and so would our children


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    """The backend "record" of torch.compile, known to this process and to those that it starts."""
    found = Recorder(tmp_path / "recorder")
    with known(found, tmp_path / "graphs"):
        yield found
