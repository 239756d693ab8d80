"""Divergence of a student's row of logits from a teacher's, and its gradient, in place.

One program owns one row of both chunk buffers. Pass A finds the statistics of the two rows, pass B
the loss and the one constant that the gradient of a row needs, pass C writes the gradient over the
student's logits. The Kullback-Leibler divergence of the teacher needs no constant and the cosine
none beyond pass A: they have no pass B. Pass B reads the row backwards, so that it begins with what
pass A has just read.

Derivation. Student logits ``s``, teacher logits ``t``, temperature ``T``, ``Q = softmax(s / T)``,
``P = softmax(t / T)``. A divergence with ``g_j = dD/dQ_j`` has, by the Jacobian of softmax (terms
of ``g`` that do not depend on ``j`` cancel)::

    dD/ds_j = Q_j * (g_j - sum_k Q_k g_k) / T

    kl          D = sum P log(P/Q)          dD/ds_j = (Q_j - P_j) / T
    reverse_kl  D = sum Q log(Q/P)          g_j = log(Q_j / P_j),    sum Q g = D
    jsd         D = beta KL(P || M) + (1 - beta) KL(Q || M),  M = beta P + (1 - beta) Q
                                            g_j = (1 - beta) log(Q_j / M_j)
    tvd         D = sum |P - Q| / 2         g_j = sign(Q_j - P_j) / 2
    cosine      D = 1 - s.t / (|s| |t|)     dD/ds_j = -(t_j / |t| - cos s_j / |s|) / |s|

For the loss the mixture ``M`` is never formed: with ``d = log(Q_j / P_j)``, ``L`` the larger of the
two probabilities, ``r = exp(-|d|)`` the smaller over the larger and ``w`` the smaller one's weight,
``M_j / L = 1 + w * (r - 1)``. One exponential and one logarithm serve both sides, nothing cancels
where the two nearly agree, and where they agree the result is exactly zero.

Logarithms are to base 2 inside, because that is what the hardware has.
"""

import torch
import triton
import triton.language as tl

from greyhound_ops.kernels.cross_entropy import LIVE_ROWS
from greyhound_ops.kernels.panels import WIDTH, Panels, places

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below any log2 probability that does not round to zero: takes the place of -inf where a difference
# of two of them would be NaN.
FLOOR = tl.constexpr(-16384.0)
# As in torch.nn.functional.cosine_similarity.
NORM_EPS = tl.constexpr(1e-8)
# Neighbours in a row that one thread keeps to itself in pass A: 16 bytes of bf16.
PER_LANE = 8


@triton.jit
def _online(x, top, total, scale):
    """One step of the online softmax of every lane: its maximum and its shifted sum."""
    top_now = tl.maximum(top, tl.max(x, 1))
    # All -inf so far: -inf - -inf would be NaN, where the sum is 0.
    shift = tl.where(top_now == float("-inf"), 0.0, top_now)
    # Triton's max drops NaN, as IEEE maxNum does; the exponential brings it back.
    exponentials = tl.exp2((x - shift[:, None]) * scale)
    return tl.exp2((top - shift) * scale) * total + tl.sum(exponentials, 1)


@triton.jit
def _across_lanes(top, total, scale):
    """Shift and shifted sum of a row from those of its lanes."""
    shift = tl.max(top, 0)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    return shift, tl.sum(total * tl.exp2((top - shift) * scale), 0)


@triton.jit
def _log2(x, APPROXIMATE: tl.constexpr):
    if APPROXIMATE:
        # One instruction with an absolute error of 2^-22 where the exact one takes twenty, in a
        # pass that is bound by instructions.
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def _mixture(log_q, log_p, beta, rest, APPROXIMATE: tl.constexpr):
    """``P``, ``Q``, ``log2(M / P)`` and ``log2(M / Q)`` from the logarithms to base 2."""
    log_q = tl.maximum(log_q, FLOOR)
    log_p = tl.maximum(log_p, FLOOR)
    difference = log_q - log_p
    student_leads = difference > 0.0
    ratio = tl.exp2(-tl.abs(difference))
    larger = tl.exp2(tl.maximum(log_q, log_p))
    smaller = larger * ratio
    p = tl.where(student_leads, smaller, larger)
    q = tl.where(student_leads, larger, smaller)
    # r - 1 is exact for r in [0.5, 1], so equal probabilities give exactly log(1) = 0.
    of_smaller = tl.where(student_leads, beta, rest)
    mix = _log2(1.0 + of_smaller * (ratio - 1.0), APPROXIMATE)
    over_p = mix + tl.maximum(difference, 0.0)
    over_q = mix - tl.minimum(difference, 0.0)
    return p, q, over_p, over_q


@triton.jit(do_not_specialize=["panel_shift", "panels"])
def distillation_kernel(
    student_ptr,  # [C, V], row stride student_stride, unit column stride; overwritten by WRITE_GRAD
    student_stride,
    teacher_ptr,  # [C, V], row stride teacher_stride, unit column stride
    teacher_stride,
    target_ptr,  # [C] int64, or None
    target_stride,
    parts_ptr,  # [2, C] out, float32: divergence, and cross entropy if HARD; not if READ_STATISTICS
    parts_stride,
    statistics_ptr,  # [6, C] out, float32, or in if READ_STATISTICS; see `distillation`
    statistics_stride,
    grad_scale_ptr,  # scalar factor of the gradient, float32, or None
    row_scale_ptr,  # [C] factor of each row's gradient, or None
    row_scale_stride,
    live_ptr,  # scalar int32, how many rows count of those that `live_start` numbers, or None
    live_start,
    num_classes,
    pitch,  # of panels: elements from one to the next, and how far they are moved on
    panel_shift,
    panels,
    ignore_index,
    scale_log2,  # log2(e) / temperature
    soft_factor,  # of the divergence's gradient: its weight over the temperature
    hard_factor,  # weight of the cross entropy
    beta,
    rest,  # 1 - beta, from the host: in float32 it would be off by 1e-5 at beta = 0.999
    gain,
    PANELS: tl.constexpr,  # the student's logits lie in panels
    KIND: tl.constexpr,  # "kl", "reverse_kl", "jsd", "tvd" or "cosine"
    HAS_TARGET: tl.constexpr,
    HARD: tl.constexpr,
    TEMPERED: tl.constexpr,  # the cross entropy's softmax is not Q
    HAS_GRAD_SCALE: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    READ_STATISTICS: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    LANES: tl.constexpr,
    PER_LANE: tl.constexpr,
):
    # 64-bit row offsets: C * V passes 2^31 at 16384 rows of a 131072 vocabulary.
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    columns = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    BLOCK: tl.constexpr = LANES * PER_LANE
    COSINE: tl.constexpr = KIND == "cosine"
    blocks = tl.cdiv(num_classes, BLOCK)

    target = tl.full([], 0, tl.int64)
    ignored = tl.full([], 0, tl.int1)
    if HAS_TARGET:
        target = tl.load(target_ptr + row * target_stride).to(tl.int64)
        ignored = target == ignore_index

    if ignored:
        if not READ_STATISTICS:
            tl.store(parts_ptr + row, 0.0)
            tl.store(parts_ptr + parts_stride + row, 0.0)
            for which in tl.static_range(6):
                tl.store(statistics_ptr + which * statistics_stride + row, 0.0)
        if WRITE_GRAD:
            # Zeros by store, not by a product with zero: these logits may be inf or NaN.
            zeroed = blocks
            if HAS_LIVE:
                # The products end with the last block of LIVE_ROWS rows that holds one that counts.
                read = tl.cdiv(tl.load(live_ptr) - live_start, LIVE_ROWS) * LIVE_ROWS
                read = tl.maximum(read, tl.where(live_start == 0, LIVE_ROWS, 0))
                zeroed = tl.where(row < read, blocks, 0)
            for block in range(0, zeroed):
                j = block * BLOCK + columns
                at = places(j, pitch, panel_shift, panels, PANELS)
                zeros = tl.zeros([LANES, PER_LANE], dtype=student_ptr.dtype.element_ty)
                tl.store(student_ptr + at, zeros, mask=j < num_classes)
    else:
        # A target outside the row is never used as an offset; it poisons its row instead. One
        # that only says whether the row counts may be anything.
        poison = tl.full([], 0.0, tl.float32)
        if HARD:
            in_range = (target >= 0) & (target < num_classes)
            poison = tl.where(in_range, 0.0, float("nan")).to(tl.float32)

        # ---- pass A. Lanes keep statistics of their own, so that threads meet only at the end.
        if READ_STATISTICS:
            top_q = tl.load(statistics_ptr + row)
            sum_q = tl.load(statistics_ptr + statistics_stride + row)
            top_p = tl.load(statistics_ptr + 2 * statistics_stride + row)
            sum_p = tl.load(statistics_ptr + 3 * statistics_stride + row)
            constant = tl.load(statistics_ptr + 4 * statistics_stride + row)
            sum_hard = tl.load(statistics_ptr + 5 * statistics_stride + row)
        else:
            tops_q = tl.full([LANES], float("-inf"), tl.float32)
            tops_p = tl.full([LANES], float("-inf"), tl.float32)
            sums_q = tl.zeros([LANES], tl.float32)
            sums_p = tl.zeros([LANES], tl.float32)
            sums_hard = tl.zeros([LANES], tl.float32)
            dots = tl.zeros([LANES], tl.float32)
            for block in range(0, blocks):
                j = block * BLOCK + columns
                inside = j < num_classes
                s = tl.load(
                    student_ptr + places(j, pitch, panel_shift, panels, PANELS),
                    mask=inside,
                    other=float("-inf"),
                    eviction_policy="evict_last",
                ).to(tl.float32)
                t = tl.load(
                    teacher_ptr + j,
                    mask=inside,
                    other=float("-inf"),
                    eviction_policy="evict_last",
                ).to(tl.float32)
                if HARD and TEMPERED:
                    sums_hard = _online(s, tops_q, sums_hard, LOG2_E)
                if COSINE:
                    a = tl.where(inside, s, 0.0)
                    b = tl.where(inside, t, 0.0)
                    sums_q += tl.sum(a * a, 1)
                    sums_p += tl.sum(b * b, 1)
                    dots += tl.sum(a * b, 1)
                else:
                    sums_q = _online(s, tops_q, sums_q, scale_log2)
                    sums_p = _online(t, tops_p, sums_p, scale_log2)
                tops_q = tl.maximum(tops_q, tl.max(s, 1))
                tops_p = tl.maximum(tops_p, tl.max(t, 1))
            constant = tl.full([], 0.0, tl.float32)
            sum_hard = tl.full([], 0.0, tl.float32)
            if HARD and TEMPERED:
                top_q, sum_hard = _across_lanes(tops_q, sums_hard, LOG2_E)
            if COSINE:
                if not HARD:
                    top_q = tl.full([], 0.0, tl.float32)
                top_p = tl.full([], 0.0, tl.float32)
                sum_q = tl.maximum(tl.sqrt(tl.sum(sums_q, 0)), NORM_EPS)
                sum_p = tl.maximum(tl.sqrt(tl.sum(sums_p, 0)), NORM_EPS)
                constant = tl.sum(dots, 0) / sum_q / sum_p
            else:
                top_q, sum_q = _across_lanes(tops_q, sums_q, scale_log2)
                top_p, sum_p = _across_lanes(tops_p, sums_p, scale_log2)
                if HARD and not TEMPERED:
                    sum_hard = sum_q

        log_sum_q = tl.full([], 0.0, tl.float32)
        log_sum_p = tl.full([], 0.0, tl.float32)
        if not COSINE:
            log_sum_q = tl.log2(sum_q)
            log_sum_p = tl.log2(sum_p)
            # What the selections below would let pass: NaN or inf anywhere in the row.
            poison += 0.0 * (log_sum_q + log_sum_p)
        log_sum_hard = tl.full([], 0.0, tl.float32)
        if HARD:
            log_sum_hard = tl.log2(sum_hard)
            if not READ_STATISTICS:
                of_target = tl.where(in_range, target, 0)
                of_target = places(of_target, pitch, panel_shift, panels, PANELS)
                x = tl.load(student_ptr + of_target).to(tl.float32)
                # Not through the log-sum-exp: at logits of 1e4 its last bit is 1e-3.
                hard_loss = LN_2 * log_sum_hard - (x - top_q)
                tl.store(parts_ptr + parts_stride + row, hard_loss + poison)
                # Read by every thread of the program here and written by one below.
                tl.debug_barrier()

        # ---- pass B.
        if not READ_STATISTICS:
            if (KIND == "reverse_kl" or KIND == "jsd") or KIND == "tvd":
                losses = tl.zeros([LANES], tl.float32)
                constants = tl.zeros([LANES], tl.float32)
                for block in range(0, blocks):
                    j = (blocks - 1 - block) * BLOCK + columns
                    inside = j < num_classes
                    s = tl.load(
                        student_ptr + places(j, pitch, panel_shift, panels, PANELS),
                        mask=inside,
                        other=float("-inf"),
                        eviction_policy="evict_last",
                    ).to(tl.float32)
                    t = tl.load(
                        teacher_ptr + j,
                        mask=inside,
                        other=float("-inf"),
                        eviction_policy="evict_last",
                    ).to(tl.float32)
                    log_q = (s - top_q) * scale_log2 - log_sum_q
                    log_p = (t - top_p) * scale_log2 - log_sum_p
                    if KIND == "reverse_kl":
                        q = tl.exp2(log_q)
                        losses += tl.sum(tl.where(q > 0.0, q * (log_q - log_p), 0.0), 1)
                    elif KIND == "jsd":
                        p, q, over_p, over_q = _mixture(log_q, log_p, beta, rest, APPROXIMATE)
                        losses += tl.sum(p * over_p, 1)
                        constants += tl.sum(q * over_q, 1)
                    else:
                        p = tl.exp2(log_p)
                        q = tl.exp2(log_q)
                        losses += tl.sum(tl.abs(q - p), 1)
                        constants += tl.sum(tl.where(q > p, q, 0.0) - tl.where(q < p, q, 0.0), 1)
                loss = tl.sum(losses, 0)
                if KIND == "reverse_kl":
                    loss = LN_2 * loss
                    constant = loss
                elif KIND == "jsd":
                    mean_over_q = tl.sum(constants, 0)
                    loss = -LN_2 * (beta * loss + rest * mean_over_q)
                    constant = -LN_2 * rest * mean_over_q
                else:
                    loss = 0.5 * loss
                    constant = 0.5 * tl.sum(constants, 0)
                # No divergence is negative; a selection keeps NaN where a maximum drops it.
                loss = tl.where(loss < 0.0, 0.0, loss)
                tl.store(parts_ptr + row, loss + poison)
            elif COSINE:
                loss = 1.0 - constant
                tl.store(parts_ptr + row, tl.where(loss < 0.0, 0.0, loss))

        # ---- pass C.
        if WRITE_GRAD or (KIND == "kl" and not READ_STATISTICS):
            scale = poison + gain
            if HAS_GRAD_SCALE:
                scale *= tl.load(grad_scale_ptr).to(tl.float32)
            if HAS_ROW_SCALE:
                scale *= tl.load(row_scale_ptr + row * row_scale_stride).to(tl.float32)
            soft = scale * soft_factor
            hard = scale * hard_factor
            losses = tl.zeros([LANES], tl.float32)
            grad_factor = tl.full([], 0.0, tl.float32)
            grad_shift = tl.full([], 0.0, tl.float32)
            if COSINE:
                grad_shift = -soft / sum_q / sum_p
                grad_factor = soft * constant / sum_q / sum_q
            elif KIND == "jsd":
                grad_shift = soft * constant
                grad_factor = soft * -LN_2 * rest
            for block in range(0, blocks):
                j = block * BLOCK + columns
                inside = j < num_classes
                s = tl.load(
                    student_ptr + places(j, pitch, panel_shift, panels, PANELS),
                    mask=inside,
                    other=float("-inf"),
                    eviction_policy="evict_first",
                ).to(tl.float32)
                t = tl.load(
                    teacher_ptr + j,
                    mask=inside,
                    other=float("-inf"),
                    eviction_policy="evict_first",
                ).to(tl.float32)
                if COSINE:
                    grad = grad_factor * s + grad_shift * t
                else:
                    log_q = (s - top_q) * scale_log2 - log_sum_q
                    log_p = (t - top_p) * scale_log2 - log_sum_p
                    if KIND == "kl":
                        p = tl.exp2(log_p)
                        q = tl.exp2(log_q)
                        if not READ_STATISTICS:
                            losses += tl.sum(tl.where(p > 0.0, p * (log_p - log_q), 0.0), 1)
                        grad = soft * (q - p)
                    elif KIND == "reverse_kl":
                        q = tl.exp2(log_q)
                        inner = q * (LN_2 * (log_q - log_p) - constant)
                        grad = soft * tl.where(q > 0.0, inner, 0.0)
                    elif KIND == "jsd":
                        q = tl.exp2(log_q)
                        # P / Q straight: without P log(M / P) there is nothing to cancel. Where
                        # the bound takes effect, also for -inf - -inf, Q is zero.
                        exponent = log_p - log_q
                        ratio = tl.exp2(tl.where(exponent < 120.0, exponent, 120.0))
                        over_q = _log2(beta * ratio + rest, APPROXIMATE)
                        grad = q * (grad_factor * over_q - grad_shift)
                    else:
                        p = tl.exp2(log_p)
                        q = tl.exp2(log_q)
                        half_sign = tl.where(q > p, 0.5, 0.0) - tl.where(q < p, 0.5, 0.0)
                        grad = soft * q * (half_sign - constant)
                if HARD:
                    at_one = tl.exp2((s - top_q) * LOG2_E - log_sum_hard) if TEMPERED else q
                    grad += hard * (at_one - tl.where(j == target, 1.0, 0.0))
                if WRITE_GRAD:
                    at = places(j, pitch, panel_shift, panels, PANELS)
                    tl.store(student_ptr + at, grad.to(student_ptr.dtype.element_ty), mask=inside)
            if KIND == "kl" and not READ_STATISTICS:
                loss = LN_2 * tl.sum(losses, 0)
                tl.store(parts_ptr + row, tl.where(loss < 0.0, 0.0, loss) + poison)

        if not READ_STATISTICS:
            if not HARD:
                tl.store(parts_ptr + parts_stride + row, 0.0)
            tl.store(statistics_ptr + row, top_q)
            tl.store(statistics_ptr + statistics_stride + row, sum_q)
            tl.store(statistics_ptr + 2 * statistics_stride + row, top_p)
            tl.store(statistics_ptr + 3 * statistics_stride + row, sum_p)
            tl.store(statistics_ptr + 4 * statistics_stride + row, constant)
            tl.store(statistics_ptr + 5 * statistics_stride + row, sum_hard)


def _launch_shape(num_classes: int) -> tuple[int, int]:
    """Lanes of `PER_LANE` columns and warps for one row.

    Many warps a row: what is in flight on the device is a pair of rows per program, half a MiB at
    128k bf16 classes, and only fewer rows at once leave something of them in L2 for the next pass.
    """
    block = min(max(triton.next_power_of_2(num_classes), 128), 8192)
    return block // PER_LANE, 4 if block <= 1024 else 16


def _approximate(student: torch.Tensor | Panels) -> bool:
    """Whether the hardware's logarithm will do: for 16-bit gradients, on NVIDIA's GPUs."""
    compiled = isinstance(distillation_kernel, triton.JITFunction)
    return compiled and student.dtype.itemsize == 2 and torch.version.cuda is not None


def distillation(
    student: torch.Tensor | Panels,
    teacher: torch.Tensor,
    target: torch.Tensor | None,
    parts: torch.Tensor,
    statistics: torch.Tensor,
    *,
    live: torch.Tensor | None = None,
    live_start: int = 0,
    divergence: str,
    beta: float,
    temperature: float,
    soft_weight: float,
    hard_weight: float,
    ignore_index: int,
    grad_scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    gain: float,
    read_statistics: bool,
    write_grad: bool,
) -> None:
    """Write the losses and statistics of a chunk, and its gradient over the student's logits.

    Args:
        student: ``[C, V]`` logits, unit column stride, or panels; holds ``soft_weight`` times the
            gradient of the divergence plus ``hard_weight`` times that of the cross entropy
            afterwards if ``write_grad``.
        teacher: ``[C, V]`` logits, unit column stride, any dtype.
        target: ``[C]`` int64, or None if every row counts; needed with ``hard_weight``.
        parts: ``[2, C]`` out, float32, unit column stride: the divergence, and the cross entropy at
            temperature 1 (0 without ``hard_weight``); untouched if ``read_statistics``.
        statistics: ``[6, C]`` float32, unit column stride, out (in if
            ``read_statistics``): largest student logit, its sum of ``exp((s - top) / T)``, the same
            two of the teacher, the constant ``sum Q g``, and the student's sum at temperature 1.
            For the cosine the two sums are norms and the constant the cosine.
        live: Scalar int32 on the device, with a target: how many rows of a call count, which come
            first. Zeros are then written only as far as `LIVE_ROWS` of `kernels.cross_entropy`
            says, since no product reads further.
        live_start: Number, in the call, of the first row here.
        divergence: ``"kl"``, ``"reverse_kl"``, ``"jsd"`` (``beta`` strictly between 0 and 1),
            ``"tvd"`` or ``"cosine"``.
        beta: Weight of the teacher in the mixture of ``"jsd"``.
        temperature: Positive.
        soft_weight: Factor of the divergence in the gradient.
        hard_weight: Factor of the cross entropy in the gradient; 0 leaves it out altogether.
        ignore_index: Target value of rows that do not count; they get zeros.
        grad_scale: Scalar on the device that multiplies the gradient, or None.
        row_scale: ``[C]``, multiplies the gradient row by row, any stride, or None.
        gain: Host factor on the gradient.
        read_statistics: Take the statistics as given instead of making them.
        write_grad: Overwrite the student's logits with their gradient.
    """
    rows, num_classes = student.shape
    if rows == 0:
        return
    lanes, warps = _launch_shape(num_classes)
    cosine = divergence == "cosine"
    pitch = panel_shift = panels = 0
    if isinstance(student, Panels):
        pitch, panel_shift, panels = student.pitch * WIDTH, student.shift, student.panels
        values = student.begin
    else:
        values = student
    distillation_kernel[(rows,)](
        values,
        values.stride(0),
        teacher,
        teacher.stride(0),
        target,
        0 if target is None else target.stride(0),
        parts,
        parts.stride(0),
        statistics,
        statistics.stride(0),
        grad_scale,
        row_scale,
        0 if row_scale is None else row_scale.stride(0),
        live,
        live_start,
        num_classes,
        pitch,
        panel_shift,
        panels,
        ignore_index,
        LOG2_E.value / temperature,
        soft_weight if cosine else soft_weight / temperature,
        hard_weight,
        beta,
        1.0 - beta,
        gain,
        PANELS=panels > 0,
        KIND=divergence,
        HAS_TARGET=target is not None,
        HARD=hard_weight != 0.0,
        TEMPERED=cosine or temperature != 1.0,
        HAS_GRAD_SCALE=grad_scale is not None,
        HAS_ROW_SCALE=row_scale is not None,
        HAS_LIVE=live is not None,
        READ_STATISTICS=read_statistics,
        WRITE_GRAD=write_grad,
        APPROXIMATE=_approximate(student),
        LANES=lanes,
        PER_LANE=PER_LANE,
        num_warps=warps,
    )
