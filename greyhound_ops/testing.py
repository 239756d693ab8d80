"""Helpers that judge errors and peak memory; used by the tests, the demo and the benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["PeakMemory", "assert_within_budget", "peak_memory", "relative_error"]


@dataclasses.dataclass
class PeakMemory:
    """Peak of the memory a block held above what was held when it began.

    Attributes:
        bytes: Filled in when the block ends.
    """

    bytes: int = 0


@contextmanager
def peak_memory(device: torch.device | str) -> Iterator[PeakMemory]:
    """Measure the peak of live tensor memory in a block.

    On CUDA this reads the caching allocator's own statistics of what was requested of it; what it
    handed out may be up to 1 MiB more per tensor, as the blocks it has left over happen to be. On
    the CPU it adds up every allocation and release that torch's allocator reports to the profiler,
    temporaries inside operators and compiled graphs included.

    Args:
        device: Whose memory to measure.

    Yields:
        An object whose ``bytes`` is set when the block ends.
    """
    device = torch.device(device)
    peak = PeakMemory()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
        yield peak
        torch.cuda.synchronize(device)
        after = torch.cuda.memory_stats(device)
        peak.bytes = after["requested_bytes.all.peak"] - before
        return
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        yield peak
    live = 0
    for event in profile.kineto_results.events():
        # Releases of tensors that were made before the block count as well: they make room.
        if event.name() == "[memory]" and str(event.device_type()).endswith("CPU"):
            live += event.nbytes()
            peak.bytes = max(peak.bytes, live)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """``|value - truth| / |truth|`` in float64 (Frobenius norms); absolute where truth is zero."""
    truth = truth.detach().double()
    difference = float((value.detach().double() - truth).norm())
    scale = float(truth.norm())
    return difference / scale if scale > 0 else difference


def assert_within_budget(
    name: str, value: Tensor, plain: Tensor, truth: Tensor, *, factor: float = 1.1, slack: float
) -> None:
    """Check an error against the error that plain torch makes at the same dtype.

    Args:
        name: For the message.
        value: Result under test.
        plain: The same from plain torch at the same dtype.
        truth: The same in float64.
        factor: How many times plain torch's relative error is allowed.
        slack: Relative error allowed on top, for cases in which plain torch happens to be exact.

    Raises:
        AssertionError: If the error is larger, or not a number where the truth is one.
    """
    if value.shape != truth.shape:
        raise AssertionError(f"{name}: shape {list(value.shape)}, expected {list(truth.shape)}")
    error, allowed = relative_error(value, truth), relative_error(plain, truth)
    if not error <= factor * allowed + slack:
        raise AssertionError(
            f"{name}: relative error {error:.3e}, plain torch makes {allowed:.3e} "
            f"(allowed {factor:g} times that plus {slack:g})"
        )
