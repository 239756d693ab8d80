"""Log-probability, entropy and argmax of each row of logits, and their logits gradient.

One program owns one row. The forward reads the row once and writes nothing of its size; the
backward reads it once and writes the gradient, over the row itself or elsewhere.

Derivation, for a row with logits ``x``, ``y = c * tanh(s * x / c)`` (or ``y = s * x``), temperature
``T``, ``z = y / T``, target ``t``, ``L = logsumexp(z)``, ``l_j = z_j - L``, ``p = exp(l)``::

    log_prob  = l_t                        d/dz_j = (j == t) - p_j
    lse       = L                          d/dz_j = p_j
    entropy   = H = -sum_j p_j * l_j       d/dz_j = -p_j * (l_j + H)
    dz/dx     = s / T * (1 - (y / c)^2)    (s / T without a cap)
    dz_j/dT   = -z_j / T

With upstream gradients a, b and e of the three outputs, ``g_j = dloss/dz_j`` sums to ``b``. Hence
``dloss/dT = -(sum_j g_j * (y_j - m) / T + b * m / T) / T`` for any shift ``m``; the row's maximum
keeps the sum's last bits when logits are large. The shift is taken before the temperature, since
a difference of two large logits is exact where their quotients are already rounded.
"""

import torch
import triton
import triton.language as tl

from greyhound_ops.kernels.cross_entropy import _transform, launch_shape


@triton.jit
def _inverse_temperature(temperature_ptr, row, temperature_stride, inverse_temperature):
    # A temperature that is not positive poisons its row, as a target out of range does.
    temperature = tl.load(temperature_ptr + row * temperature_stride).to(tl.float32)
    return tl.where(temperature > 0.0, inverse_temperature / temperature, float("nan"))


@triton.jit
def log_probs_kernel(
    logits_ptr,  # [C, V], row stride logits_stride, unit column stride
    logits_stride,
    target_ptr,  # [C] int32 or int64
    target_stride,
    temperature_ptr,  # [C], or None
    temperature_stride,
    log_probs_ptr,  # [C] out, float32
    statistics_ptr,  # [2, C] out, float32: shift and log of the shifted sum; [3, C] with entropy
    statistics_stride,
    argmax_ptr,  # [C] out, int64, or None
    num_classes,
    ignore_index,
    logit_scale,
    softcap,
    inverse_temperature,
    largest_entropy,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_INVERSE: tl.constexpr,
    WRITE_ENTROPY: tl.constexpr,
    WRITE_ARGMAX: tl.constexpr,
    EVERY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64-bit row offsets: C * V passes 2^31 at 16384 rows of a 131072 vocabulary.
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    columns = tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row * target_stride).to(tl.int64)
    ignored = target == ignore_index

    skipped = ignored
    if EVERY_ROW:
        skipped = target != target
    if skipped:
        # Nobody asks for what such a row holds, not even whether it is finite.
        tl.store(log_probs_ptr + row, 0.0)
        tl.store(statistics_ptr + row, 0.0)
        tl.store(statistics_ptr + statistics_stride + row, 0.0)
        if WRITE_ENTROPY:
            tl.store(statistics_ptr + 2 * statistics_stride + row, 0.0)
    else:
        inverse = inverse_temperature
        if HAS_TEMPERATURE:
            inverse = _inverse_temperature(
                temperature_ptr, row, temperature_stride, inverse_temperature
            )
        top = tl.full([], float("-inf"), tl.float32)
        total = tl.full([], 0.0, tl.float32)
        weighted = tl.full([], 0.0, tl.float32)  # sum of exp(z - z_top) * (z - z_top)
        best = tl.full([], float("-inf"), tl.float32)
        best_at = tl.full([], 0, tl.int32)
        for start in range(0, num_classes, BLOCK):
            j = start + columns
            inside = j < num_classes
            x = tl.load(row_ptr + j, mask=inside, other=float("-inf")).to(tl.float32)
            y = _transform(x, logit_scale, softcap, HAS_SCALE, HAS_SOFTCAP)
            # Padding must stay -inf: a cap would turn it into -c, a negative scale into +inf.
            y = tl.where(inside, y, float("-inf"))
            # Triton's max drops NaN, as IEEE maxNum does; exp below brings it back.
            tile_top = tl.max(y, 0)
            block_top = tl.maximum(top, tile_top)
            # All -inf so far: subtracting -inf from -inf would be NaN, where the sum is 0.
            reference = tl.where(block_top == float("-inf"), 0.0, block_top)
            moved = top - reference
            shifted = y - reference
            if HAS_TEMPERATURE or HAS_INVERSE:
                moved = moved * inverse
                shifted = shifted * inverse
            decay = tl.exp(moved)
            exponentials = tl.exp(shifted)
            if WRITE_ENTROPY:
                # Before the first finite logit both sums are 0, and so is what moves them.
                moved = tl.where(top == float("-inf"), 0.0, moved)
                terms = exponentials * tl.where(exponentials == 0.0, 0.0, shifted)
                weighted = decay * (weighted + moved * total) + tl.sum(terms, 0)
            total = total * decay + tl.sum(exponentials, 0)
            top = block_top
            if WRITE_ARGMAX:
                # The first NaN of the row wins, then the first maximum, as in torch.argmax.
                is_nan = y != y
                key = tl.where(is_nan, j, tl.where(y == tile_top, num_classes + j, 2 * num_classes))
                first = tl.min(tl.where(inside, key, 2 * num_classes), 0)
                take_nan = (first < num_classes) & (best == best)
                take = (first >= num_classes) & (tile_top > best)
                at = tl.where(first < num_classes, first, first - num_classes)
                best_at = tl.where(take_nan | take, at, best_at)
                best = tl.where(take_nan, float("nan"), tl.where(take, tile_top, best))

        shift = tl.where(top == float("-inf"), 0.0, top)
        log_sum = tl.log(total)
        tl.store(statistics_ptr + row, shift)
        tl.store(statistics_ptr + statistics_stride + row, log_sum)
        if WRITE_ENTROPY:
            entropy = log_sum - weighted / total
            # Rounding may leave [0, log V]; comparisons, because a minimum would drop NaN.
            entropy = tl.where(entropy < 0.0, 0.0, entropy)
            entropy = tl.where(entropy > largest_entropy, largest_entropy, entropy)
            tl.store(statistics_ptr + 2 * statistics_stride + row, entropy)
        if WRITE_ARGMAX:
            tl.store(argmax_ptr + row, best_at.to(tl.int64))

        # A target outside the row is never used as an offset; it poisons its row instead.
        in_range = (target >= 0) & (target < num_classes)
        safe_target = tl.where(in_range, target, 0)
        shifted_target = _transform(
            tl.load(row_ptr + safe_target).to(tl.float32),
            logit_scale,
            softcap,
            HAS_SCALE,
            HAS_SOFTCAP,
        )
        shifted_target = shifted_target - shift
        if HAS_TEMPERATURE or HAS_INVERSE:
            shifted_target = shifted_target * inverse
        # Not through lse = shift + log_sum: at logits of 1e4 its last bit is 1e-3.
        log_prob = shifted_target - log_sum
        log_prob = tl.where(log_prob > 0.0, 0.0, log_prob)
        log_prob += tl.where(in_range, 0.0, float("nan")).to(tl.float32)
        tl.store(log_probs_ptr + row, tl.where(ignored, 0.0, log_prob))


@triton.jit
def log_probs_backward_kernel(
    logits_ptr,  # [C, V], row stride logits_stride, unit column stride
    logits_stride,
    grad_ptr,  # [C, V] out, row stride grad_stride, unit column stride; may be the logits
    grad_stride,
    target_ptr,  # [C] int32 or int64
    target_stride,
    temperature_ptr,  # [C], or None
    temperature_stride,
    statistics_ptr,  # [2, C] float32, from the forward; [3, C] with entropy
    statistics_stride,
    grad_log_probs_ptr,  # [C], or None
    grad_log_probs_stride,
    grad_entropy_ptr,  # [C], or None
    grad_entropy_stride,
    grad_lse_ptr,  # [C], or None
    grad_lse_stride,
    grad_temperature_ptr,  # [C] out, float32, or None
    num_classes,
    ignore_index,
    logit_scale,
    softcap,
    inverse_temperature,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_INVERSE: tl.constexpr,
    HAS_LOG_PROBS: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_LSE: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    WRITE_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    out_ptr = grad_ptr + row * grad_stride
    columns = tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row * target_stride).to(tl.int64)
    ignored = target == ignore_index

    by_target = tl.full([], 0.0, tl.float32)
    by_lse = tl.full([], 0.0, tl.float32)
    by_entropy = tl.full([], 0.0, tl.float32)
    if HAS_LOG_PROBS:
        in_range = (target >= 0) & (target < num_classes)
        by_target = tl.load(grad_log_probs_ptr + row * grad_log_probs_stride).to(tl.float32)
        by_target += tl.where(in_range, 0.0, float("nan")).to(tl.float32)
        # By choice and not by a product with zero: what comes from such a row may be inf or NaN.
        by_target = tl.where(ignored, 0.0, by_target)
    if HAS_LSE:
        by_lse = tl.load(grad_lse_ptr + row * grad_lse_stride).to(tl.float32)
    if HAS_ENTROPY:
        by_entropy = tl.load(grad_entropy_ptr + row * grad_entropy_stride).to(tl.float32)

    if ignored & (by_lse == 0.0) & (by_entropy == 0.0):
        if WRITE_GRAD:
            # Zeros by store: these logits may be inf or NaN.
            for start in range(0, num_classes, BLOCK):
                j = start + columns
                zeros = tl.zeros([BLOCK], dtype=grad_ptr.dtype.element_ty)
                tl.store(out_ptr + j, zeros, mask=j < num_classes)
        if WRITE_TEMPERATURE:
            tl.store(grad_temperature_ptr + row, 0.0)
    else:
        inverse = inverse_temperature
        if HAS_TEMPERATURE:
            inverse = _inverse_temperature(
                temperature_ptr, row, temperature_stride, inverse_temperature
            )
        shift = tl.load(statistics_ptr + row)
        log_sum = tl.load(statistics_ptr + statistics_stride + row)
        mass = by_lse - by_target
        entropy = tl.full([], 0.0, tl.float32)
        if HAS_ENTROPY:
            entropy = tl.load(statistics_ptr + 2 * statistics_stride + row)
        scale = tl.full([], 1.0, tl.float32)
        if HAS_TEMPERATURE or HAS_INVERSE:
            scale = scale * inverse
        if HAS_SCALE:
            scale = scale * logit_scale
        moment = tl.full([], 0.0, tl.float32)
        for start in range(0, num_classes, BLOCK):
            j = start + columns
            inside = j < num_classes
            x = tl.load(
                row_ptr + j, mask=inside, other=float("-inf"), eviction_policy="evict_first"
            ).to(tl.float32)
            y = _transform(x, logit_scale, softcap, HAS_SCALE, HAS_SOFTCAP)
            shifted = tl.where(inside, y, float("-inf")) - shift
            if HAS_TEMPERATURE or HAS_INVERSE:
                shifted = shifted * inverse
            log_p = shifted - log_sum
            p = tl.exp(log_p)
            factor = mass
            if HAS_ENTROPY:
                # 0 * log 0 is 0: a masked class has no share in the entropy.
                factor = mass - by_entropy * (tl.where(p == 0.0, 0.0, log_p) + entropy)
            grad = p * factor
            if HAS_LOG_PROBS:
                grad += tl.where(j == target, by_target, 0.0)
            if WRITE_TEMPERATURE:
                moment += tl.sum(grad * tl.where(grad == 0.0, 0.0, shifted), 0)
            if WRITE_GRAD:
                if HAS_SOFTCAP:
                    capped = y / softcap
                    grad *= 1.0 - capped * capped
                grad *= scale
                tl.store(out_ptr + j, grad.to(grad_ptr.dtype.element_ty), mask=inside)
        if WRITE_TEMPERATURE:
            tl.store(grad_temperature_ptr + row, -(moment + by_lse * shift * inverse) * inverse)


def log_probs(
    logits: torch.Tensor,
    target: torch.Tensor,
    log_probs: torch.Tensor,
    statistics: torch.Tensor,
    argmax: torch.Tensor | None,
    *,
    temperature: torch.Tensor | None,
    ignore_index: int,
    logit_scale: float,
    softcap: float | None,
    inverse_temperature: float,
    largest_entropy: float,
    every_row: bool,
) -> None:
    """Write log-probabilities and statistics of a chunk; the logits are only read.

    Args:
        logits: ``[C, V]``, unit column stride.
        target: ``[C]`` int32 or int64.
        log_probs: ``[C]`` out, float32, contiguous; never positive.
        statistics: ``[2, C]`` or ``[3, C]`` out, float32, unit column stride: the row's maximum
            before the temperature as a shift ``m``, the logarithm of its sum of
            ``exp((y - m) / T)`` and, if there is room, the entropy in nats.
        argmax: ``[C]`` out, int64, contiguous, or None.
        temperature: ``[C]``, any stride, or None. Rows where it is not positive become NaN.
        ignore_index: Target value of rows whose log-probability is 0.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits, or None.
        inverse_temperature: Factor on the capped logits of every row.
        largest_entropy: ``log V``.
        every_row: Whether statistics of ignored rows are wanted too; else they are zeros.
    """
    rows, num_classes = logits.shape
    if rows == 0:
        return
    block, warps = launch_shape(num_classes)
    log_probs_kernel[(rows,)](
        logits,
        logits.stride(0),
        target,
        target.stride(0),
        temperature,
        0 if temperature is None else temperature.stride(0),
        log_probs,
        statistics,
        statistics.stride(0),
        argmax,
        num_classes,
        ignore_index,
        logit_scale,
        0.0 if softcap is None else softcap,
        inverse_temperature,
        largest_entropy,
        HAS_SCALE=logit_scale != 1.0,
        HAS_SOFTCAP=softcap is not None,
        HAS_TEMPERATURE=temperature is not None,
        HAS_INVERSE=inverse_temperature != 1.0,
        WRITE_ENTROPY=statistics.shape[0] == 3,
        WRITE_ARGMAX=argmax is not None,
        EVERY_ROW=every_row,
        BLOCK=block,
        num_warps=warps,
    )


def log_probs_backward(
    logits: torch.Tensor,
    grad_logits: torch.Tensor | None,
    target: torch.Tensor,
    statistics: torch.Tensor,
    grad_temperature: torch.Tensor | None,
    *,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    temperature: torch.Tensor | None,
    ignore_index: int,
    logit_scale: float,
    softcap: float | None,
    inverse_temperature: float,
) -> None:
    """Write the logits gradient of a chunk from its statistics.

    Args:
        logits: ``[C, V]``, unit column stride.
        grad_logits: ``[C, V]`` out, unit column stride; may be ``logits``. None where only the
            temperature's gradient is wanted.
        target: ``[C]`` int32 or int64.
        statistics: As the forward left them, ``[3, C]`` with ``grad_entropy``.
        grad_temperature: ``[C]`` out, float32, contiguous, or None.
        grad_log_probs: Upstream ``[C]``, any stride, or None; likewise the next two.
        grad_entropy: Upstream of the entropy.
        grad_lse: Upstream of the log-sum-exp.
        temperature: As in the forward.
        ignore_index: As in the forward.
        logit_scale: As in the forward.
        softcap: As in the forward.
        inverse_temperature: As in the forward.
    """
    rows, num_classes = logits.shape
    if rows == 0:
        return
    block, warps = launch_shape(num_classes)

    def stride(tensor: torch.Tensor | None) -> int:
        return 0 if tensor is None else tensor.stride(0)

    log_probs_backward_kernel[(rows,)](
        logits,
        logits.stride(0),
        logits if grad_logits is None else grad_logits,
        logits.stride(0) if grad_logits is None else grad_logits.stride(0),
        target,
        target.stride(0),
        temperature,
        stride(temperature),
        statistics,
        statistics.stride(0),
        grad_log_probs,
        stride(grad_log_probs),
        grad_entropy,
        stride(grad_entropy),
        grad_lse,
        stride(grad_lse),
        grad_temperature,
        num_classes,
        ignore_index,
        logit_scale,
        0.0 if softcap is None else softcap,
        inverse_temperature,
        HAS_SCALE=logit_scale != 1.0,
        HAS_SOFTCAP=softcap is not None,
        HAS_TEMPERATURE=temperature is not None,
        HAS_INVERSE=inverse_temperature != 1.0,
        HAS_LOG_PROBS=grad_log_probs is not None,
        HAS_ENTROPY=grad_entropy is not None,
        HAS_LSE=grad_lse is not None,
        WRITE_GRAD=grad_logits is not None,
        WRITE_TEMPERATURE=grad_temperature is not None,
        BLOCK=block,
        num_warps=warps,
    )
