"""What all tests of faults have in common."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

from interpreter import repair_interpreter

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    repair_interpreter()


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
