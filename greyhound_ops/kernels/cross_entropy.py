"""Loss and logits gradient of one chunk of logits, in one launch, in place.

One program owns one row: a first pass over the row finds its log-sum-exp, a second one, served by
L2, replaces the logits by their gradient. The chunk buffer belongs to the op, so writing over it
harms nobody.

Derivation, for a row with logits ``x``, ``z = c * tanh(s * x / c)`` (or ``z = s * x``), target
``t``, class weights ``w``, smoothing ``e``, ``p = softmax(z)``, ``L = logsumexp(z)``::

    loss      = (1 - e) * w_t * (L - z_t) + e / V * sum_j w_j * (L - z_j) + zeta * L^2
    dloss/dz_j = p_j * [(1 - e) * w_t + e / V * sum_j w_j + 2 * zeta * L]
                 - (1 - e) * w_t * (j == t) - e / V * w_j
    dz/dx     = s * (1 - (z / c)^2)          (s without a cap)
"""

import torch
import triton
import triton.language as tl

from greyhound_ops.kernels.panels import WIDTH, Panels, places

# Rows of one block of a sum over rows: what the products of `kernels.products` read beyond the last
# row that counts.
LIVE_ROWS = tl.constexpr(64)


# exp2 is one instruction that flushes denormals; exp is four, which scale around them.
LOG2_E = tl.constexpr(1.4426950408889634)

# Neighbouring columns that one thread loads at once, 16 bytes of a 16-bit dtype. Each has its own
# running maximum and sum, so that a row's threads wait for each other once and not once a block.
LANE = tl.constexpr(8)


@triton.jit
def _transform(
    x,
    logit_scale,
    softcap,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr = False,
):
    if HAS_SCALE:
        x = x * logit_scale
    if HAS_SOFTCAP:
        # tanh by one exp, exact at both infinities; libdevice's is not there in the interpreter.
        if FAST:
            # Two instructions instead of nine for the quotient: 4e-7 of it, which logits of 8 or 11
            # bits do not show.
            e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E / softcap))
            r = tl.rsqrt(1.0 + e)
            t = (1.0 - e) * (r * r)
        else:
            e = tl.exp(tl.abs(x) * (-2.0 / softcap))
            t = (1.0 - e) / (1.0 + e)
        x = softcap * tl.where(x < 0, -t, t)
    return x


@triton.jit
def _add_block(
    start,
    top,  # [BLOCK / LANE] running maximum of each thread's columns
    total,  # [BLOCK / LANE] sum of exp(z - top), of those that are not -inf
    weighted,  # [BLOCK / LANE] sum of z by class weight
    row_ptr,
    class_weight_ptr,
    num_classes,
    pitch,
    shift,
    panels,
    logit_scale,
    softcap,
    PANELS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WHOLE: tl.constexpr,  # no column of the block lies behind the last
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics of a row with those of one more block of columns."""
    j = start + tl.arange(0, BLOCK)
    at = places(j, pitch, shift, panels, PANELS)
    if WHOLE:
        x = tl.load(row_ptr + at, eviction_policy="evict_last").to(tl.float32)
    else:
        x = tl.load(
            row_ptr + at,
            mask=j < num_classes,
            other=float("-inf"),
            eviction_policy="evict_last",
        ).to(tl.float32)
    z = _transform(x, logit_scale, softcap, HAS_SCALE, HAS_SOFTCAP, FAST)
    if HAS_SMOOTHING:
        by = z
        if HAS_CLASS_WEIGHT:
            by *= tl.load(class_weight_ptr + j, mask=j < num_classes, other=0.0).to(tl.float32)
        if not WHOLE:
            by = tl.where(j < num_classes, by, 0.0)
        weighted += tl.sum(tl.reshape(by, (BLOCK // LANE, LANE)), 1)
    if not WHOLE:
        # Padding must stay -inf: a cap would turn it into -c, a negative scale into +inf.
        z = tl.where(j < num_classes, z, float("-inf"))
    z = tl.reshape(z, (BLOCK // LANE, LANE))
    # Triton's max drops NaN, as IEEE maxNum does; exp below brings it back.
    new_top = tl.maximum(top, tl.max(z, 1))
    # All -inf so far: subtracting -inf from -inf would be NaN, where the sum is 0.
    reference = tl.where(new_top == float("-inf"), 0.0, new_top)
    parts = tl.exp2((z - reference[:, None]) * LOG2_E)
    total = total * tl.exp2((top - reference) * LOG2_E) + tl.sum(parts, 1)
    return new_top, total, weighted


@triton.jit
def _write_block(
    start,
    row_ptr,
    grad_row_ptr,
    class_weight_ptr,
    target,
    num_classes,
    pitch,
    panel_shift,
    panels,
    shift,
    log2_sum,
    hard,
    more,
    smooth,
    scale,
    logit_scale,
    softcap,
    PANELS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_MORE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WHOLE: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of one block of columns, over its logits."""
    j = start + tl.arange(0, BLOCK)
    at = places(j, pitch, panel_shift, panels, PANELS)
    if WHOLE:
        x = tl.load(row_ptr + at, eviction_policy="evict_first").to(tl.float32)
    else:
        x = tl.load(
            row_ptr + at,
            mask=j < num_classes,
            other=float("-inf"),
            eviction_policy="evict_first",
        ).to(tl.float32)
    z = _transform(x, logit_scale, softcap, HAS_SCALE, HAS_SOFTCAP, FAST)
    # Not through lse = shift + log_sum: at logits of 1e4 its last bit is 1e-3.
    p = tl.exp2((z - shift) * LOG2_E - log2_sum)
    grad = hard * (p - tl.where(j == target, 1.0, 0.0))
    if HAS_MORE:
        grad += more * p
    if HAS_SMOOTHING:
        if HAS_CLASS_WEIGHT:
            w = tl.load(class_weight_ptr + j, mask=j < num_classes, other=0.0).to(tl.float32)
            grad -= smooth * w
        else:
            grad -= smooth
    if HAS_SOFTCAP:
        capped = z * (1.0 / softcap)
        grad *= 1.0 - capped * capped
    grad *= scale
    grad = grad.to(grad_row_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(grad_row_ptr + at, grad)
    else:
        tl.store(grad_row_ptr + at, grad, mask=j < num_classes)


@triton.jit
def row_loss_and_grad(
    row,  # int64
    logits_ptr,  # [C, V], row stride logits_stride, unit column stride
    logits_stride,
    grad_ptr,  # [C, V] out if WRITE_GRAD, as the logits and possibly the same
    grad_stride,
    target_ptr,  # [C] int32 or int64
    target_stride,
    loss_ptr,  # [C] out, float32
    statistics_ptr,  # [2, C] out, or in if READ_STATISTICS: shift and log of the shifted sum
    statistics_stride,
    class_weight_ptr,  # [V], float32, or None
    class_weight_sum_ptr,  # scalar, float32, or None
    grad_scale_ptr,  # scalar factor of the gradient, float32, or None
    row_scale_ptr,  # [C] factor of each row's gradient, or None
    row_scale_stride,
    lse_grad_ptr,  # [C] upstream gradient of each row's log-sum-exp, or None
    lse_grad_stride,
    live_ptr,  # scalar int32, how many rows count of those that `live_start` numbers, or None
    live_start,
    num_classes,
    pitch,  # of panels: elements from one to the next, and how far they are moved on
    panel_shift,
    panels,
    ignore_index,
    label_smoothing,
    z_loss,
    logit_scale,
    softcap,
    gain,
    PANELS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_LSE_GRAD: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    READ_STATISTICS: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_ptr = logits_ptr + row * logits_stride
    grad_row_ptr = grad_ptr + row * grad_stride
    columns = tl.arange(0, BLOCK)
    # Blocks without a column behind the last: no masks, a seventh of the instructions.
    whole = num_classes // BLOCK * BLOCK
    FAST: tl.constexpr = logits_ptr.dtype.element_ty != tl.float32
    target = tl.load(target_ptr + row * target_stride).to(tl.int64)

    if target == ignore_index:
        if not READ_STATISTICS:
            tl.store(loss_ptr + row, 0.0)
            tl.store(statistics_ptr + row, 0.0)
            tl.store(statistics_ptr + statistics_stride + row, 0.0)
        if WRITE_GRAD:
            # Zeros by store, not by a product with zero: these logits may be inf or NaN.
            end = num_classes
            if HAS_LIVE:
                # The products end with the last block of LIVE_ROWS rows that holds one that counts.
                blocks = tl.cdiv(tl.load(live_ptr) - live_start, LIVE_ROWS)
                read = (row < blocks * LIVE_ROWS) | ((live_start == 0) & (row < LIVE_ROWS))
                end = tl.where(read, num_classes, 0)
            for start in range(0, end, BLOCK):
                j = start + columns
                at = places(j, pitch, panel_shift, panels, PANELS)
                zeros = tl.zeros([BLOCK], dtype=grad_ptr.dtype.element_ty)
                tl.store(grad_row_ptr + at, zeros, mask=j < num_classes)
    else:
        in_range = (target >= 0) & (target < num_classes)
        # A target outside the row is never used as an offset; it poisons its row instead.
        safe_target = tl.where(in_range, target, 0)
        poison = tl.where(in_range, 0.0, float("nan")).to(tl.float32)

        target_weight = tl.full([], 1.0, tl.float32)
        weight_sum = tl.full([], 1.0, tl.float32) * num_classes
        if HAS_CLASS_WEIGHT:
            target_weight = tl.load(class_weight_ptr + safe_target).to(tl.float32)
        hard = target_weight
        smooth = tl.full([], 0.0, tl.float32)
        if HAS_SMOOTHING:
            if HAS_CLASS_WEIGHT:
                weight_sum = tl.load(class_weight_sum_ptr).to(tl.float32)
            hard = (1.0 - label_smoothing) * target_weight
            smooth = tl.full([], 1.0, tl.float32) * label_smoothing / num_classes

        if READ_STATISTICS:
            shift = tl.load(statistics_ptr + row)
            log_sum = tl.load(statistics_ptr + statistics_stride + row)
        else:
            tops = tl.full([BLOCK // LANE], float("-inf"), tl.float32)
            totals = tl.zeros([BLOCK // LANE], tl.float32)
            weights = tl.zeros([BLOCK // LANE], tl.float32)
            for start in range(0, whole, BLOCK):
                tops, totals, weights = _add_block(
                    start,
                    tops,
                    totals,
                    weights,
                    row_ptr,
                    class_weight_ptr,
                    num_classes,
                    pitch,
                    panel_shift,
                    panels,
                    logit_scale,
                    softcap,
                    PANELS,
                    HAS_CLASS_WEIGHT,
                    HAS_SMOOTHING,
                    HAS_SCALE,
                    HAS_SOFTCAP,
                    True,
                    FAST,
                    BLOCK,
                )
            if whole < num_classes:
                tops, totals, weights = _add_block(
                    whole,
                    tops,
                    totals,
                    weights,
                    row_ptr,
                    class_weight_ptr,
                    num_classes,
                    pitch,
                    panel_shift,
                    panels,
                    logit_scale,
                    softcap,
                    PANELS,
                    HAS_CLASS_WEIGHT,
                    HAS_SMOOTHING,
                    HAS_SCALE,
                    HAS_SOFTCAP,
                    False,
                    FAST,
                    BLOCK,
                )
            top = tl.max(tops, 0)
            shift = tl.where(top == float("-inf"), 0.0, top)
            total = tl.sum(totals * tl.exp2((tops - shift) * LOG2_E), 0)
            weighted = tl.sum(weights, 0)
            log_sum = tl.log(total)
            z_target = _transform(
                tl.load(row_ptr + places(safe_target, pitch, panel_shift, panels, PANELS)).to(
                    tl.float32
                ),
                logit_scale,
                softcap,
                HAS_SCALE,
                HAS_SOFTCAP,
                FAST,
            )
            # Not through lse = shift + log_sum: at logits of 1e4 its last bit is 1e-3.
            loss = hard * (log_sum - (z_target - shift))
            if HAS_SMOOTHING:
                loss += smooth * (weight_sum * (shift + log_sum) - weighted)
            if HAS_Z_LOSS:
                loss += z_loss * (shift + log_sum) * (shift + log_sum)
            tl.store(loss_ptr + row, loss + poison)
            tl.store(statistics_ptr + row, shift)
            tl.store(statistics_ptr + statistics_stride + row, log_sum)

        if WRITE_GRAD:
            scale = poison + gain
            if HAS_SCALE:
                scale *= logit_scale
            # What multiplies the probabilities is hard, and more where a term does not fall on the
            # target alone. Apart: near p = 1 the target's hard * (p - 1) is exact, and the last
            # bit of a sum of the two is as large as a small z-loss's whole gradient.
            more = tl.full([], 0.0, tl.float32)
            if HAS_SMOOTHING:
                more += smooth * weight_sum
            if HAS_Z_LOSS:
                more += 2.0 * z_loss * (shift + log_sum)
            upstream = tl.full([], 1.0, tl.float32)
            if HAS_GRAD_SCALE:
                upstream *= tl.load(grad_scale_ptr).to(tl.float32)
            if HAS_ROW_SCALE:
                upstream *= tl.load(row_scale_ptr + row * row_scale_stride).to(tl.float32)
            more *= upstream
            hard *= upstream
            smooth *= upstream
            if HAS_LSE_GRAD:
                # dlse/dz_j = p_j.
                more += tl.load(lse_grad_ptr + row * lse_grad_stride).to(tl.float32)
            # The target's logit is read above by every thread of the program and written below by
            # one: without a barrier a fast warp would overwrite it under a slow one.
            tl.debug_barrier()
            log2_sum = log_sum * LOG2_E
            HAS_MORE: tl.constexpr = HAS_SMOOTHING or HAS_Z_LOSS or HAS_LSE_GRAD
            for start in range(0, whole, BLOCK):
                _write_block(
                    start,
                    row_ptr,
                    grad_row_ptr,
                    class_weight_ptr,
                    target,
                    num_classes,
                    pitch,
                    panel_shift,
                    panels,
                    shift,
                    log2_sum,
                    hard,
                    more,
                    smooth,
                    scale,
                    logit_scale,
                    softcap,
                    PANELS,
                    HAS_CLASS_WEIGHT,
                    HAS_SMOOTHING,
                    HAS_MORE,
                    HAS_SCALE,
                    HAS_SOFTCAP,
                    True,
                    FAST,
                    BLOCK,
                )
            if whole < num_classes:
                _write_block(
                    whole,
                    row_ptr,
                    grad_row_ptr,
                    class_weight_ptr,
                    target,
                    num_classes,
                    pitch,
                    panel_shift,
                    panels,
                    shift,
                    log2_sum,
                    hard,
                    more,
                    smooth,
                    scale,
                    logit_scale,
                    softcap,
                    PANELS,
                    HAS_CLASS_WEIGHT,
                    HAS_SMOOTHING,
                    HAS_MORE,
                    HAS_SCALE,
                    HAS_SOFTCAP,
                    False,
                    FAST,
                    BLOCK,
                )


@triton.jit(do_not_specialize=["panel_shift", "panels"])
def cross_entropy_kernel(
    logits_ptr,  # [C, V], row stride logits_stride, unit column stride
    logits_stride,
    grad_ptr,  # [C, V] out if WRITE_GRAD, as the logits and possibly the same
    grad_stride,
    target_ptr,  # [C] int32 or int64
    target_stride,
    loss_ptr,  # [C] out, float32
    statistics_ptr,  # [2, C] out, or in if READ_STATISTICS: shift and log of the shifted sum
    statistics_stride,
    class_weight_ptr,  # [V], float32, or None
    class_weight_sum_ptr,  # scalar, float32, or None
    grad_scale_ptr,  # scalar factor of the gradient, float32, or None
    row_scale_ptr,  # [C] factor of each row's gradient, or None
    row_scale_stride,
    lse_grad_ptr,  # [C] upstream gradient of each row's log-sum-exp, or None
    lse_grad_stride,
    live_ptr,  # scalar int32, how many rows count of those that `live_start` numbers, or None
    live_start,
    num_classes,
    pitch,  # of panels: elements from one to the next, and how far they are moved on
    panel_shift,
    panels,
    ignore_index,
    label_smoothing,
    z_loss,
    logit_scale,
    softcap,
    gain,
    PANELS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_LSE_GRAD: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    READ_STATISTICS: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64-bit row offsets: C * V passes 2^31 at 16384 rows of a 131072 vocabulary.
    row = tl.program_id(0).to(tl.int64)
    row_loss_and_grad(
        row,
        logits_ptr,
        logits_stride,
        grad_ptr,
        grad_stride,
        target_ptr,
        target_stride,
        loss_ptr,
        statistics_ptr,
        statistics_stride,
        class_weight_ptr,
        class_weight_sum_ptr,
        grad_scale_ptr,
        row_scale_ptr,
        row_scale_stride,
        lse_grad_ptr,
        lse_grad_stride,
        live_ptr,
        live_start,
        num_classes,
        pitch,
        panel_shift,
        panels,
        ignore_index,
        label_smoothing,
        z_loss,
        logit_scale,
        softcap,
        gain,
        PANELS,
        HAS_CLASS_WEIGHT,
        HAS_SMOOTHING,
        HAS_Z_LOSS,
        HAS_SCALE,
        HAS_SOFTCAP,
        HAS_GRAD_SCALE,
        HAS_ROW_SCALE,
        HAS_LSE_GRAD,
        HAS_LIVE,
        READ_STATISTICS,
        WRITE_GRAD,
        BLOCK,
    )


def launch_shape(num_classes: int, *, capped: bool = False) -> tuple[int, int]:
    """Block of columns and warps for one row.

    Measured on an H200 at 2048 rows of 128256 bf16 logits (docs/performance.md, "Logits pass"):
    0.39 ms with gradient and 0.14 ms without; with a cap 0.52 ms in blocks of 4096, which 39
    registers a thread serve, and 0.58 in blocks of 8192, which take 128.
    """
    block = min(max(triton.next_power_of_2(num_classes), 128), 4096 if capped else 8192)
    return block, 4 if block <= 1024 else 8


def cross_entropy(
    logits: torch.Tensor | Panels,
    target: torch.Tensor,
    loss: torch.Tensor,
    statistics: torch.Tensor,
    *,
    class_weight: torch.Tensor | None,
    class_weight_sum: torch.Tensor | None,
    grad_scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    lse_grad: torch.Tensor | None = None,
    grad_logits: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    live_start: int = 0,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    logit_scale: float,
    softcap: float | None,
    gain: float,
    read_statistics: bool,
    write_grad: bool,
) -> None:
    """Write the losses and statistics of a chunk, and its logits gradient.

    Args:
        logits: ``[C, V]``, unit column stride, or panels; holds the gradient afterwards if
            ``write_grad`` and no ``grad_logits``, which panels do not go with.
        target: ``[C]`` int32 or int64.
        loss: ``[C]`` out, float32, contiguous; untouched if ``read_statistics``.
        statistics: ``[2, C]`` float32, unit column stride, out (in if ``read_statistics``): the
            row's maximum as a shift, and the logarithm of its sum of ``exp(z - shift)``. Their sum
            is the log-sum-exp; apart they keep its last bits when logits are large.
        class_weight: ``[V]`` contiguous, or None.
        class_weight_sum: Scalar on the device, with ``class_weight``.
        grad_scale: Scalar on the device that multiplies the gradient, or None.
        row_scale: ``[C]``, multiplies the gradient row by row, any stride, or None.
        lse_grad: ``[C]``, upstream gradient of each row's log-sum-exp, any stride, or None.
        grad_logits: ``[C, V]`` out if ``write_grad``, unit column stride, for logits that are
            somebody else's; None to write over the logits.
        live: Scalar int32 on the device: how many rows of a call count, which come first. Zeros are
            then written only as far as `LIVE_ROWS` says, since no product reads further.
        live_start: Number, in the call, of the first row here.
        ignore_index: Target value of rows that do not count; they get zeros.
        label_smoothing: In ``[0, 1]``.
        z_loss: Multiplier of the squared log-sum-exp.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits, or None.
        gain: Host factor on the gradient.
        read_statistics: Take the statistics as given instead of making them.
        write_grad: Write the logits' gradient.
    """
    rows, num_classes = logits.shape
    if rows == 0:
        return
    block, warps = launch_shape(num_classes, capped=softcap is not None)
    pitch = panel_shift = panels = 0
    if isinstance(logits, Panels):
        pitch, panel_shift, panels = logits.pitch * WIDTH, logits.shift, logits.panels
        values = logits.begin
    else:
        values = logits
    grad = values if grad_logits is None else grad_logits
    cross_entropy_kernel[(rows,)](
        values,
        values.stride(0),
        grad,
        grad.stride(0),
        target,
        target.stride(0),
        loss,
        statistics,
        statistics.stride(0),
        class_weight,
        class_weight_sum,
        grad_scale,
        row_scale,
        0 if row_scale is None else row_scale.stride(0),
        lse_grad,
        0 if lse_grad is None else lse_grad.stride(0),
        live,
        live_start,
        num_classes,
        pitch,
        panel_shift,
        panels,
        ignore_index,
        label_smoothing,
        z_loss,
        logit_scale,
        0.0 if softcap is None else softcap,
        gain,
        PANELS=panels > 0,
        HAS_CLASS_WEIGHT=class_weight is not None,
        HAS_SMOOTHING=label_smoothing != 0.0,
        HAS_Z_LOSS=z_loss != 0.0,
        HAS_SCALE=logit_scale != 1.0,
        HAS_SOFTCAP=softcap is not None,
        HAS_GRAD_SCALE=grad_scale is not None,
        HAS_ROW_SCALE=row_scale is not None,
        HAS_LSE_GRAD=lse_grad is not None,
        HAS_LIVE=live is not None,
        READ_STATISTICS=read_statistics,
        WRITE_GRAD=write_grad,
        BLOCK=block,
        num_warps=warps,
    )
