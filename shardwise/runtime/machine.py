"""What this host has for its ranks, as far as the kernel tells: no driver is asked, and no torch."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable: the GPUs that CUDA may find, by number or name."""


def visible_gpus() -> int:
    """How many GPUs CUDA finds here, and numbers from 0: the host's, or those that CUDA_VISIBLE_DEVICES lists."""
    count = sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
    if (shown := os.environ.get(VISIBLE)) is None:
        return count

    def there(name: str) -> bool:
        return int(name) < count if name.isdecimal() else count > 0 and name.startswith(("GPU-", "MIG-"))

    return len([*takewhile(there, map(str.strip, shown.split(",")))])  # CUDA, too, leaves out all after a wrong one


def available_memory() -> int:
    """Bytes that new processes could use without swapping, as the kernel estimates; a guess elsewhere than on Linux."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // 2
