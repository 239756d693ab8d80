"""Kernels run on the GPU, or on the CPU under Triton's interpreter (see the parent's conftest)."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")


@pytest.fixture(autouse=True)
def _somewhere_to_run() -> None:
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA GPU or TRITON_INTERPRET=1")
