"""What happens when a Triton kernel cannot be compiled or launched.

A kernel that a GPU, a driver or a compiler does not take fails before its first launch has written
anything, and the ops mutate nothing: so an op begins once more, on its PyTorch path, and stays
there. The setting ``kernel_failure="raise"`` passes the failure on instead.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import subprocess
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from greyhound_ops.config import settings

_Result = TypeVar("_Result")

_KERNELS = "greyhound_ops.kernels."
# By name, so that nothing imports Triton where it is not there.
_FAILURES = {"CompilationError", "OutOfResources", "PTXASError"}

_pytorch_only = contextvars.ContextVar("greyhound_pytorch_only", default=False)
_failed: set[tuple[str, torch.dtype]] = set()


def pytorch_only() -> bool:
    """Whether the op that is running has given up its kernels."""
    return _pytorch_only.get()


def forget() -> None:
    """Try every kernel again."""
    _failed.clear()


@contextlib.contextmanager
def _without_kernels() -> Iterator[None]:
    token = _pytorch_only.set(True)
    try:
        yield
    finally:
        _pytorch_only.reset(token)


def _kernel_of(error: BaseException) -> str | None:
    """The launcher that an error came through; None for errors from elsewhere.

    A user's own callable may run Triton inside an op: its failures are its own.
    """
    name = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_KERNELS):
            name = f"{module.removeprefix(_KERNELS)}.{frame.f_code.co_name}"
    return name


def _is_failure(error: BaseException) -> bool:
    """Whether a kernel could not be made, as against one that ran and went wrong."""
    for each in type(error).__mro__:
        if each.__module__.startswith("triton.") and each.__name__ in _FAILURES:
            return True
    # Triton builds its launcher with the system's C compiler.
    return isinstance(error, subprocess.CalledProcessError) or (
        isinstance(error, RuntimeError) and "find C compiler" in str(error)
    )


def guarded(name: str, function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Have a function run again without kernels when one of them fails.

    Args:
        name: Of the op, for the warning.
        function: Mutates nothing before its kernels ran; its first argument is a tensor, or a
            list of some.

    Returns:
        The function. From its first failure on it leaves the kernels alone for that dtype.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> _Result:
        first = args[0]
        if isinstance(first, (list, tuple)):
            if not first:
                return function(*args, **kwargs)  # which says what is missing
            first = first[0]
        key = name, first.dtype
        if key not in _failed:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                kernel = _kernel_of(error) if _is_failure(error) else None
                if kernel is None or settings().kernel_failure == "raise":
                    raise
                cause = f"{type(error).__name__}: {str(error).strip()[:500]}"
            # Not inside the handler: the error holds on to the chunk of what failed.
            _failed.add(key)
            warnings.warn(
                f"{name}: the kernel {kernel} could not be compiled or launched for {first.dtype}; "
                f"using PyTorch operators from now on, which is slower. {cause}. Set "
                "GREYHOUND_KERNEL_FAILURE=raise to make this an error.",
                RuntimeWarning,
                stacklevel=2,
            )
        with _without_kernels():
            return function(*args, **kwargs)

    return run
