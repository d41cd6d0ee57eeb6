"""One thread per rank, no network, and nothing left behind."""

from __future__ import annotations

import os
import signal

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background job ignores it, and so would our children
