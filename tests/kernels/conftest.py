"""Kernels run on the GPU, or on the CPU under Triton's interpreter (see the parent's conftest)."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")


def _repair_interpreter() -> None:
    """Triton 3.6's interpreter takes int() of a one-element array, which numpy 2.4 refuses.

    Triton 3.7 squeezes it first; this does the same.
    """
    import triton
    from packaging.version import Version

    if Version(triton.__version__) >= Version("3.7"):
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patched


if os.environ.get("TRITON_INTERPRET") == "1":
    _repair_interpreter()


@pytest.fixture(autouse=True)
def _somewhere_to_run() -> None:
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA GPU or TRITON_INTERPRET=1")


@pytest.fixture
def kernel_device() -> torch.device:
    """Where kernels run in this process: compiled ones do not take CPU tensors."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return torch.device("cpu" if interpreted else "cuda")
