"""Run-time settings of the ops, read from the environment once and changeable by the program.

Nothing here enters a compiled graph: ops read the settings when they run, so that a graph taken
from a compile cache behaves as the present process says.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

KernelChoice = Literal["auto", "triton", "torch"]
BodyChoice = Literal["auto", "compiled", "eager"]
FailureChoice = Literal["fallback", "raise"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the ops.

    Attributes:
        checks: Check data that lives on the device too (targets in range). Costs a host
            synchronisation per call on CUDA; CPU tensors are always checked.
        kernels: ``"auto"`` takes Triton for CUDA tensors and PyTorch elsewhere; ``"triton"`` and
            ``"torch"`` force one. ``"triton"`` on CPU tensors needs ``TRITON_INTERPRET=1``.
        chunk_budget_bytes: Cap in bytes on the logits buffer of one chunk, ``None`` for the
            measured default of `greyhound_ops.chunking`.
        region_body: How the values of a rewritten region are computed from a chunk of logits:
            ``"auto"`` compiles them with Inductor for CUDA tensors and runs them operator by
            operator elsewhere; ``"compiled"`` and ``"eager"`` force one.
        kernel_failure: What a Triton kernel that cannot be compiled or launched does to its op:
            ``"fallback"`` warns once and takes PyTorch operators from then on, ``"raise"`` passes
            the failure on.
        skip_ignored: Compute only the rows that count, where the products can be bounded by a
            number on the device (bf16 on Hopper and later). False takes cuBLAS's products over
            all rows.
    """

    checks: bool = False
    kernels: KernelChoice = "auto"
    chunk_budget_bytes: int | None = None
    region_body: BodyChoice = "auto"
    kernel_failure: FailureChoice = "fallback"
    skip_ignored: bool = True

    def __post_init__(self) -> None:
        if self.kernels not in ("auto", "triton", "torch"):
            raise ValueError(f"kernels: expected 'auto', 'triton' or 'torch', got {self.kernels!r}")
        if self.chunk_budget_bytes is not None and self.chunk_budget_bytes <= 0:
            raise ValueError(
                f"chunk_budget_bytes: expected a positive number, got {self.chunk_budget_bytes}"
            )
        if self.region_body not in ("auto", "compiled", "eager"):
            raise ValueError(
                f"region_body: expected 'auto', 'compiled' or 'eager', got {self.region_body!r}"
            )
        if self.kernel_failure not in ("fallback", "raise"):
            raise ValueError(
                f"kernel_failure: expected 'fallback' or 'raise', got {self.kernel_failure!r}"
            )


def env_bool(name: str, default: bool) -> bool:
    """Read a switch from the environment.

    Raises:
        ValueError: If the variable holds anything but 0/1, true/false, yes/no, on/off.
    """
    value = os.environ.get(name)
    if value is None or not value.strip():
        return default
    lowered = value.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"environment variable {name}: expected 0 or 1, got {value!r}")


def env_bytes(name: str) -> int | None:
    """Read a number of bytes from the environment, with an optional KiB, MiB or GiB suffix.

    Raises:
        ValueError: If the variable does not hold such a number.
    """
    value = os.environ.get(name)
    if value is None or not value.strip():
        return None
    text = value.strip()
    factor = 1
    for suffix, unit in (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30)):
        if text.endswith(suffix):
            text, factor = text[: -len(suffix)].strip(), unit
    try:
        return int(float(text) * factor)
    except (ValueError, OverflowError):
        raise ValueError(
            f"environment variable {name}: expected bytes such as 268435456 or 256MiB, "
            f"got {value!r}"
        ) from None


def _from_environment() -> Settings:
    return Settings(
        checks=env_bool("GREYHOUND_CHECKS", False),
        kernels=os.environ.get("GREYHOUND_KERNELS", "auto"),  # type: ignore[arg-type]
        chunk_budget_bytes=env_bytes("GREYHOUND_CHUNK_BYTES"),
        region_body=os.environ.get("GREYHOUND_REGION_BODY", "auto"),  # type: ignore[arg-type]
        kernel_failure=os.environ.get(  # type: ignore[arg-type]
            "GREYHOUND_KERNEL_FAILURE", "fallback"
        ),
        skip_ignored=env_bool("GREYHOUND_SKIP_IGNORED", True),
    )


_settings = _from_environment()


def settings() -> Settings:
    """The settings in force."""
    return _settings


def configure(**changes: Any) -> Settings:
    """Change settings for the whole process.

    Args:
        **changes: Fields of `Settings`.

    Returns:
        The settings as they were before, for restoring.
    """
    # Process-wide and not thread-local: the backward of a CUDA graph runs on autograd's own
    # thread, which would not see a thread-local override.
    global _settings
    before = _settings
    _settings = dataclasses.replace(_settings, **changes)
    return before


@contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Change settings for a block (process-wide while it lasts).

    Args:
        **changes: Fields of `Settings`.

    Yields:
        The settings in force inside the block.
    """
    before = configure(**changes)
    try:
        yield _settings
    finally:
        configure(**dataclasses.asdict(before))
