"""Which backends of torch.compile this machine has, and what each needs; said before anything heavy starts.

Those that people name are looked for without torch; for any other name torch is asked.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from shardwise.features import Compile

GROUP = "torch_dynamo_backends"
"""Entry points under which an installed package offers backends to torch."""
BARE = ("eager", "aot_eager", "cudagraphs")
"""torch's own that take neither mode nor options."""
PACKAGES = {
    "torch_tensorrt": ("torch_tensorrt", "pip install torch-tensorrt, on a machine with an NVIDIA GPU"),
    "tensorrt": ("torch_tensorrt", "pip install torch-tensorrt, on a machine with an NVIDIA GPU"),
    "openvino": ("openvino", "pip install openvino"),
}
"""Backends that a package brings which must be imported first, and how to get it."""


def check_backend(by: Compile, device: str, *, processes: bool) -> None:
    """ValueError, with the remedy, if the backend can't be had on a ``device`` ("cpu" or "cuda").

    ``processes``: it runs in processes of its own, which know only what is installed.
    """
    name = by.backend
    if name in BARE and (by.mode is not None or by.passed):
        raise ValueError(f"compile: backend {name} takes neither mode nor options: leave them out")
    if name == "inductor":
        _check_inductor(device)
    elif name == "cudagraphs" and device != "cuda":
        raise ValueError("compile: backend cudagraphs records what runs on a GPU, and this runs on the CPU")
    elif name in PACKAGES:
        package, remedy = PACKAGES[name]
        if find_spec(package) is None:
            raise ValueError(f"compile: backend {name} is not installed: {remedy}")
    elif name not in BARE and name not in entry_points(group=GROUP).names:
        _ask_torch(name, processes)


def _check_inductor(device: str) -> None:
    """It writes C++ for the CPU, and Triton for GPUs."""
    if device == "cuda":
        if find_spec("triton") is None:
            raise ValueError("compile: inductor needs triton for GPUs: pip install triton")
        return
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler.split()[0]) is None:
        raise ValueError(
            f"compile: inductor needs a C++ compiler on the CPU, and there is no {compiler}: install g++, or name one "
            "in CXX; backend aot_eager needs none"
        )
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        raise ValueError(
            f"compile: inductor needs Python's headers on the CPU, and there is no Python.h in {headers}: install them "
            "(python3-dev or the like); backend aot_eager needs none"
        )


def _ask_torch(name: str, processes: bool) -> None:
    from torch._dynamo.backends import registry

    known = registry.list_backends(exclude_tags=())
    if name not in known:
        raise ValueError(
            f"compile: there is no backend {name}; torch knows {', '.join(registry.list_backends())} here, and an "
            f"installed package can offer its own as an entry point in the group {GROUP}"
        )
    made = registry.lookup_backend(name)
    if processes and not made.__module__.startswith("torch."):
        raise ValueError(
            f"compile: backend {name} is registered in this process, and ranks are others: offer it as an entry point "
            f"in the group {GROUP}, from an installed package"
        )
