"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path


def machine() -> str:
    """One line: CPU, cores, memory, system, versions, date."""
    model = platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpuinfo = Path("/proc/cpuinfo")
    vector = ""
    if cpuinfo.exists():
        fields = dict(
            (part.strip() for part in line.split(":", 1)) for line in cpuinfo.read_text().splitlines() if ":" in line
        )
        model = fields.get("model name", model) + f" (family {fields.get('cpu family')}, model {fields.get('model')})"
        flags = fields.get("flags", "").split()
        vector = " ".join(flag for flag in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags)
    return (
        f"{model}, {os.cpu_count()} cores, {vector}, {memory / 2**30:.0f} GiB, {platform.system()} "
        f"{platform.machine()}, Python {platform.python_version()}, torch {version('torch')}, {date.today()}"
    )
