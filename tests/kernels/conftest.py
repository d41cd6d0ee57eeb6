"""The kernels under test: both kinds of operations, and one thread unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from shardwise.kernels.build import BuildError
from shardwise.kernels.native import NativeOps
from shardwise.kernels.ops import Ops

FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Of weights; float64 ones go with float64 activations, the others with float32."""


def compute_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def native() -> Callable[[torch.dtype], NativeOps]:
    try:
        made = {compute: NativeOps(compute) for compute in (torch.float32, torch.float64)}
    except BuildError as error:
        pytest.skip(str(error))
    return made.__getitem__


@pytest.fixture(params=[torch.float32, torch.float64], ids=["f32", "f64"])
def pair(request: pytest.FixtureRequest, native: Callable[[torch.dtype], NativeOps]) -> tuple[NativeOps, Ops]:
    return native(request.param), Ops(request.param)
