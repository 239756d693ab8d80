"""Maximum and sum of exponentials of each row of logits, in one read of them.

One program owns one row; each of its threads keeps a maximum and a sum per eight columns, which
meet once a row (`kernels.cross_entropy`).

For a row ``x`` and ``z_j = outer * x_j``, or ``outer * tanh(inner * x_j)``, both factors positive::

    top     = max_j x_j          (z grows with x, so that this is where z is largest)
    log_sum = log(sum_j exp(z_j - z_top))
"""

from typing import Any

import torch
import triton
import triton.language as tl

from greyhound_ops.kernels.cross_entropy import LANE, LOG2_E, _transform, launch_shape


@triton.jit
def _apart(x, reference, inner, HAS_INNER: tl.constexpr, HAS_TANH: tl.constexpr):
    """How far values are below a reference, before the outer factor."""
    if HAS_TANH:
        x = _transform(x, inner, 1.0, HAS_INNER, True, True)
        reference = _transform(reference, inner, 1.0, HAS_INNER, True, True)
    return x - reference


@triton.jit
def _reference(top, HAS_TANH: tl.constexpr):
    """What is subtracted: -inf from -inf would be NaN, but tanh(-inf) is a number."""
    if HAS_TANH:
        return top
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def row_statistics_kernel(
    logits_ptr,  # [C, V], row stride logits_stride, unit column stride
    logits_stride,
    out_ptr,  # [2, C] out, float32: top and log_sum
    out_stride,
    num_classes,
    inner,
    outer,
    HAS_INNER: tl.constexpr,
    HAS_TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64-bit row offsets: C * V passes 2^31 at 16384 rows of a 131072 vocabulary.
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    base2 = outer * LOG2_E
    tops = tl.full([BLOCK // LANE], float("-inf"), tl.float32)
    totals = tl.zeros([BLOCK // LANE], tl.float32)
    for start in range(0, num_classes, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + j, mask=j < num_classes, other=float("-inf")).to(tl.float32)
        x = tl.reshape(x, (BLOCK // LANE, LANE))
        # Triton's max drops NaN, as IEEE maxNum does; exp2 below brings it back.
        new_tops = tl.maximum(tops, tl.max(x, 1))
        reference = _reference(new_tops, HAS_TANH)
        parts = tl.exp2(_apart(x, reference[:, None], inner, HAS_INNER, HAS_TANH) * base2)
        if HAS_TANH:
            # tanh(-inf) counts: a logit may be -inf, a column behind the last may not be one.
            inside = tl.reshape(j < num_classes, (BLOCK // LANE, LANE))
            parts = tl.where(inside, parts, 0.0)
        decay = tl.exp2(_apart(tops, reference, inner, HAS_INNER, HAS_TANH) * base2)
        totals = totals * decay + tl.sum(parts, 1)
        tops = new_tops
    top = tl.max(tops, 0)
    reference = _reference(top, HAS_TANH)
    moved = tl.exp2(_apart(tops, reference, inner, HAS_INNER, HAS_TANH) * base2)
    tl.store(out_ptr + row, top)
    tl.store(out_ptr + out_stride + row, tl.log(tl.sum(totals * moved, 0)))


def _options(num_classes: int, inner: float, tanh: bool) -> dict[str, Any]:
    block, warps = launch_shape(num_classes, capped=tanh)
    return {"HAS_INNER": inner != 1.0, "HAS_TANH": tanh, "BLOCK": block, "num_warps": warps}


def prepare(logits: torch.Tensor, *, inner: float, tanh: bool, outer: float) -> None:
    """Compile and load the kernel for some logits, so that its first launch does not.

    Args:
        logits: ``[C, V]`` on CUDA; may be fake.
        inner: As for `row_statistics`.
        tanh: Likewise.
        outer: Likewise.
    """
    num_classes = logits.shape[1]
    kernel = row_statistics_kernel.warmup(
        logits.dtype, logits.stride(0), torch.float32, 1024, num_classes, inner, outer, grid=(1,),
        **_options(num_classes, inner, tanh),
    )  # fmt: skip
    kernel.run  # noqa: B018  loads it


def row_statistics(
    logits: torch.Tensor, out: torch.Tensor, *, inner: float, tanh: bool, outer: float
) -> None:
    """Write the statistics of a chunk.

    Args:
        logits: ``[C, V]``, unit column stride.
        out: ``[2, C]`` float32 out, unit column stride: the row's maximum, and the logarithm of its
            sum of ``exp(z - z_top)``.
        inner: Positive factor inside the tanh.
        tanh: Whether there is one.
        outer: Positive factor of all.
    """
    rows, num_classes = logits.shape
    if rows == 0:
        return
    row_statistics_kernel[(rows,)](
        logits,
        logits.stride(0),
        out,
        out.stride(0),
        num_classes,
        inner,
        outer,
        **_options(num_classes, inner, tanh),
    )
