"""What this host has for its ranks, as far as the kernel tells: no driver is asked, and no torch."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable: the GPUs that CUDA may find, by number or name."""


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_gpus() -> int:
    """GPUs of this host. CUDA numbers them from 0, whatever their files are called."""
    return sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))


def gpu_names() -> tuple[str, ...]:
    """The GPUs that CUDA finds here, by the names that CUDA_VISIBLE_DEVICES has for them: all, or those it lists."""
    count = num_gpus()

    def there(name: str) -> bool:
        is_number = name.isascii() and name.isdecimal()
        return int(name) < count if is_number else count > 0 and name.startswith(("GPU-", "MIG-"))

    if (shown := os.environ.get(VISIBLE)) is None:
        return tuple(map(str, range(count)))
    return tuple(takewhile(there, map(str.strip, shown.split(","))))  # CUDA, too, leaves out all after a wrong one


def visible_gpus() -> int:
    """How many GPUs CUDA finds here, and numbers from 0."""
    return len(gpu_names())


def available_memory() -> int:
    """Bytes that new processes could use without swapping, as the kernel estimates; a guess elsewhere than on Linux."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // 2
