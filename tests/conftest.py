"""Fixtures and marks that every test may use."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

from interpreter import repair_interpreter

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    # Triton reads it when a kernel is decorated, so it must be there before the first import of
    # triton; torch.compile on the CPU generates C++ and does not mind.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A kernel that fails is to fail the test: the fallback would hide it behind right results. Before
# the first import of greyhound_ops, which reads it.
os.environ.setdefault("GREYHOUND_KERNEL_FAILURE", "raise")

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    repair_interpreter()

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers are the parallelism; threads of their own would fight over the same cores.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn."""
    return torch.device(request.param)


@pytest.fixture
def kernel_device() -> torch.device:
    """Where kernels run in this process: compiled ones do not take CPU tensors."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return torch.device("cpu" if interpreted else "cuda")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _gradients_stay_on() -> Iterator[None]:
    """A compile that fails half-way may leave them off, and every test behind it would fail."""
    yield
    left_off = not torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert not left_off, "gradients were off when the test ended"


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No graph of another test, neither in Dynamo nor in a cache on disk."""
    from torch._inductor import utils

    # Named fresh_inductor_cache before torch 2.8 and possibly once more after 2.14.
    fresh = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with fresh():
        yield
    torch._dynamo.reset()
