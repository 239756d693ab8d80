"""Projection whose epilogue takes the exponentials: the logits themselves are never stored.

For a frozen head. The gradient of a row's cross entropy is ``exp(z - lse) - onehot``, but ``lse``
is known only when the row is complete. So the projection stores ``E = exp(z - r)`` instead, with a
reference ``r`` that is known before: the logit of the target, a dot product with one row of the
weight. What is missing is a factor per row, ``exp(r - lse) = 1 / sum_j exp(z_j - r)``, and a factor
per row commutes with the gradient product::

    grad_input = diag(f) (E W) - diag(h) W[target]

The second term is taken in float32 after the product, from the one row of the weight it needs: in
E it would be rounded to bf16. (For ``grad_weight`` the factor would have to go onto the input, and
both roundings together made 1.2 to 2.9 times plain bf16's error, so a head that learns takes the
path of `cross_entropy`.)

bf16 has the exponent range of fp32 and its relative precision does not depend on the size of a
number, so nothing is lost as long as nothing overflows: ``z_j - r < 88``. A row that does (its loss
would be above 69) is found by its sum; its tile of 128 rows is then projected once more with the
logits stored, and goes through the row kernel of `cross_entropy`. Both launches are always made and
end at once where nothing is flagged: the host is never asked.

With nothing to differentiate not even exponentials are stored, only their sum over each tile's
rows; what overflows is projected once more for the maximum of each tile as well.

Measured on an H200 (docs/performance.md): the pass over the logits that this replaces costs 7% of a
step with a frozen head.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from greyhound_ops.kernels.cross_entropy import (
    LOG2_E,
    _transform,
    launch_shape,
    row_loss_and_grad,
)
from greyhound_ops.kernels.products import (
    Products,
    _rows_here,
    has_tensor_memory_accelerator,
    multiprocessors,
    tma_ready,
)

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # an older Triton: the plain path serves
    TensorDescriptor = None

# 128 x 256 x 64 with four stages (192 KiB of operands) and eight warps: storing exponentials at
# 640 x 128256 x 4096 takes 1.005 of cuBLAS's time, with three stages 1.013, and 1.055 without the
# flattened loop and the halved store. Tiles of 128 x 128 and 256 x 128 were 3 to 18% slower.
BLOCK_M, BLOCK_N, BLOCK_K, STAGES, WARPS = 128, 256, 64, 4, 8

# A sum above this sends its tile to the repair. bf16 ends at 3e38; the rest is room for the
# products that sum such numbers up in fp32.
LARGEST_SUM = 1e30


@triton.jit
def reference_kernel(
    input_ptr,  # [N, D], unit column stride
    input_stride,
    weight_ptr,  # [V, D], unit column stride
    weight_stride,
    bias_ptr,  # [V] or None
    target_ptr,  # [N]
    target_stride,
    order_ptr,  # [N] row of the input of each, or None
    reference_ptr,  # [N] out, float32: logit of the target; inf for ignored rows
    num_classes,
    hidden_size,
    ignore_index,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row * target_stride).to(tl.int64)
    if target == ignore_index:
        tl.store(reference_ptr + row, float("inf"))
    else:
        source = row
        if HAS_ORDER:
            source = tl.load(order_ptr + row)
        in_range = (target >= 0) & (target < num_classes)
        safe_target = tl.where(in_range, target, 0)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, hidden_size, BLOCK):
            d = start + tl.arange(0, BLOCK)
            inside = d < hidden_size
            x = tl.load(input_ptr + source * input_stride + d, mask=inside, other=0.0)
            w = tl.load(weight_ptr + safe_target * weight_stride + d, mask=inside, other=0.0)
            total += x.to(tl.float32) * w.to(tl.float32)
        logit = tl.sum(total, 0)
        if HAS_BIAS:
            logit += tl.load(bias_ptr + safe_target).to(tl.float32)
        logit = _transform(logit, logit_scale, softcap, HAS_SCALE, HAS_SOFTCAP, True)
        tl.store(reference_ptr + row, logit)


@triton.jit
def _store_half(
    acc,  # [BLOCK_M, COLUMNS] float32
    row_start,
    column_start,
    reference,  # [BLOCK_M] float32
    out_desc,
    bias_ptr,
    num_classes,
    logit_scale,
    softcap,
    MODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store half a tile, as logits or as exponentials; returns the sums of the latter."""
    columns = column_start + tl.arange(0, COLUMNS)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=columns < num_classes, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    total = reference
    if MODE == "exponentials" or MODE == "sums":
        z = _transform(acc, logit_scale, softcap, HAS_SCALE, HAS_SOFTCAP, True)
        # inf marks ignored rows: exact zeros, whatever their logits are.
        keep = (reference != float("inf"))[:, None] & (columns < num_classes)[None, :]
        acc = tl.where(keep, tl.exp2((z - reference[:, None]) * LOG2_E), 0.0)
        total = tl.sum(acc, 1)
        if HAS_SOFTCAP and MODE == "exponentials":
            capped = z / softcap
            acc *= 1.0 - capped * capped
    if MODE != "sums":
        out_desc.store([row_start, column_start], acc.to(out_desc.dtype))
    return total


@triton.jit
def projection_kernel(
    input_desc,  # [M, D] in tiles [BLOCK_M, BLOCK_K]
    weight_desc,  # [V, D] in tiles [BLOCK_N, BLOCK_K]
    out_desc,  # [M, V] in tiles [BLOCK_M, BLOCK_N / 2]; for MODE "exponentials" and "logits"
    reference_ptr,  # [M] float32
    bias_ptr,  # [V] or None
    sums_ptr,  # [tiles of V, M] out, float32
    tops_ptr,  # [tiles of V, M] out, float32; for MODE "statistics"
    flags_ptr,  # [tiles of M] int32, tiles to repair; for MODE "logits" and "statistics"
    live_ptr,  # scalar int32, how many rows count of those that `start` numbers, or None
    start,
    num_rows,
    num_classes,
    hidden_size,
    logit_scale,
    softcap,
    MODE: tl.constexpr,  # "exponentials" or "sums"; to repair those, "logits" or "statistics"
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FLAGS: tl.constexpr,  # tiles of M, rounded up to a power of two
    WIDEN: tl.constexpr,  # the interpreter multiplies the bits of bf16, not its values
):
    rows_here = num_rows
    if HAS_LIVE:
        rows_here = _rows_here(live_ptr, start, num_rows)
    tiles_m = tl.cdiv(rows_here, BLOCK_M)
    tiles_n = tl.cdiv(num_classes, BLOCK_N)
    tiles_k = tl.cdiv(hidden_size, BLOCK_K)
    stop = tiles_m * tiles_n
    repairs: tl.constexpr = MODE == "logits" or MODE == "statistics"
    if repairs:
        each = tl.arange(0, FLAGS)
        flags = tl.load(flags_ptr + each, mask=each < tiles_m, other=0)
        stop = tl.where(tl.max(flags, 0) > 0, stop, 0)
    # Flattened, the loads of a tile's first operands run behind the epilogue of the tile before:
    # 2 to 3% of the projection. A loop with a branch in it cannot be.
    for tile in tl.range(tl.program_id(0), stop, tl.num_programs(0), flatten=not repairs):
        # Rows first: the programs that run together share tiles of the weight, so that it comes
        # from HBM once, while the input (32 MB at 4096 x 4096) stays in L2.
        tile_m = tile % tiles_m
        tile_n = tile // tiles_m
        wanted = True
        if repairs:
            wanted = tl.load(flags_ptr + tile_m) != 0
        if wanted:
            row_start = tile_m * BLOCK_M
            column_start = tile_n * BLOCK_N
            acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            for k in range(tiles_k):
                a = input_desc.load([row_start, k * BLOCK_K])
                b = weight_desc.load([column_start, k * BLOCK_K])
                if WIDEN:
                    a = a.to(tl.float32)
                    b = b.to(tl.float32)
                acc = tl.dot(a, b.T, acc)
            rows = row_start + tl.arange(0, BLOCK_M)
            if MODE == "statistics":
                columns = column_start + tl.arange(0, BLOCK_N)
                if HAS_BIAS:
                    bias = tl.load(bias_ptr + columns, mask=columns < num_classes, other=0.0)
                    acc += bias.to(tl.float32)[None, :]
                z = _transform(acc, logit_scale, softcap, HAS_SCALE, HAS_SOFTCAP, True)
                at = tile_n.to(tl.int64) * num_rows + rows
                z = tl.where((columns < num_classes)[None, :], z, float("-inf"))
                top = tl.max(z, 1)
                shift = tl.where(top == float("-inf"), 0.0, top)
                total = tl.sum(tl.exp2((z - shift[:, None]) * LOG2_E), 1)
                tl.store(tops_ptr + at, top, mask=rows < num_rows)
                tl.store(sums_ptr + at, total, mask=rows < num_rows)
            else:
                # In two halves: what waits for its store then takes 32 KiB of shared memory
                # instead of 64, which is room for one more stage of operands.
                halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
                left, right = tl.split(halves)
                reference = tl.zeros([BLOCK_M], dtype=tl.float32)
                if MODE != "logits":
                    reference = tl.load(
                        reference_ptr + rows, mask=rows < num_rows, other=float("inf")
                    )
                total = _store_half(
                    left,
                    row_start,
                    column_start,
                    reference,
                    out_desc,
                    bias_ptr,
                    num_classes,
                    logit_scale,
                    softcap,
                    MODE,
                    HAS_BIAS,
                    HAS_SCALE,
                    HAS_SOFTCAP,
                    BLOCK_N // 2,
                )
                total += _store_half(
                    right,
                    row_start,
                    column_start + BLOCK_N // 2,
                    reference,
                    out_desc,
                    bias_ptr,
                    num_classes,
                    logit_scale,
                    softcap,
                    MODE,
                    HAS_BIAS,
                    HAS_SCALE,
                    HAS_SOFTCAP,
                    BLOCK_N // 2,
                )
                if MODE != "logits":
                    at = tile_n.to(tl.int64) * num_rows + rows
                    tl.store(sums_ptr + at, total, mask=rows < num_rows)


@triton.jit
def finalise_kernel(
    target_ptr,  # [M]
    target_stride,
    reference_ptr,  # [M] float32
    sums_ptr,  # [tiles of V, M] float32
    loss_ptr,  # [M] out, float32
    statistics_ptr,  # [2, M] out, float32: shift and log of the shifted sum
    statistics_stride,
    factor_ptr,  # [M] out, float32: what the product of each row still lacks
    hard_ptr,  # [M] out, float32: weight of the target's own row
    flags_ptr,  # [tiles of M] int32, set to 1 for tiles to repair
    class_weight_ptr,  # [V] float32 or None
    grad_scale_ptr,  # scalar or None
    num_rows,
    num_classes,
    tiles_n,
    ignore_index,
    z_loss,
    logit_scale,
    softcap,
    largest_sum,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row * target_stride).to(tl.int64)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(statistics_ptr + row, 0.0)
        tl.store(statistics_ptr + statistics_stride + row, 0.0)
        tl.store(factor_ptr + row, 0.0)
        tl.store(hard_ptr + row, 0.0)
    else:
        in_range = (target >= 0) & (target < num_classes)
        safe_target = tl.where(in_range, target, 0)
        poison = tl.where(in_range, 0.0, float("nan")).to(tl.float32)
        tiles = tl.arange(0, TILES)
        sums = tl.load(
            sums_ptr + tiles.to(tl.int64) * num_rows + row, mask=tiles < tiles_n, other=0.0
        )
        total = tl.sum(sums, 0)
        reference = tl.load(reference_ptr + row)
        if (total > 0.0) & (total < largest_sum):
            hard = tl.full([], 1.0, tl.float32)
            if HAS_CLASS_WEIGHT:
                hard = tl.load(class_weight_ptr + safe_target).to(tl.float32)
            # The reference is the target's logit, so lse - z_target is this logarithm alone.
            log_total = tl.log(total)
            lse = reference + log_total
            loss = hard * log_total
            mass = hard
            if HAS_Z_LOSS:
                loss += z_loss * lse * lse
                mass += 2.0 * z_loss * lse
            scale = poison + logit_scale
            if HAS_GRAD_SCALE:
                scale *= tl.load(grad_scale_ptr).to(tl.float32)
            tl.store(loss_ptr + row, loss + poison)
            tl.store(statistics_ptr + row, reference)
            tl.store(statistics_ptr + statistics_stride + row, log_total)
            tl.store(factor_ptr + row, scale * mass / total)
            hard *= scale
            if HAS_SOFTCAP:
                capped = reference / softcap
                hard *= 1.0 - capped * capped
            tl.store(hard_ptr + row, hard)
        else:
            tl.atomic_max(flags_ptr + row // BLOCK_M, 1, sem="relaxed")


@triton.jit
def repair_kernel(
    values_ptr,
    values_stride,
    target_ptr,
    target_stride,
    loss_ptr,
    statistics_ptr,
    statistics_stride,
    factor_ptr,
    hard_ptr,
    flags_ptr,
    class_weight_ptr,
    grad_scale_ptr,
    absent_ptr,  # None: what this path does not have
    num_classes,
    ignore_index,
    z_loss,
    logit_scale,
    softcap,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(flags_ptr + row // BLOCK_M) != 0:
        row_loss_and_grad(
            row,
            values_ptr,
            values_stride,
            values_ptr,
            values_stride,
            target_ptr,
            target_stride,
            loss_ptr,
            statistics_ptr,
            statistics_stride,
            class_weight_ptr,
            absent_ptr,
            grad_scale_ptr,
            absent_ptr,
            0,
            absent_ptr,
            0,
            absent_ptr,
            0,
            num_classes,
            0,
            0,
            0,
            ignore_index,
            0.0,
            z_loss,
            logit_scale,
            softcap,
            1.0,
            False,
            HAS_CLASS_WEIGHT,
            False,
            HAS_Z_LOSS,
            HAS_SCALE,
            HAS_SOFTCAP,
            HAS_GRAD_SCALE,
            False,
            False,
            False,
            False,
            True,
            BLOCK,
        )
        # The row kernel leaves nothing to be multiplied in.
        tl.store(factor_ptr + row, 1.0)
        tl.store(hard_ptr + row, 0.0)


@triton.jit
def statistics_kernel(
    target_ptr,
    target_stride,
    reference_ptr,
    tops_ptr,  # [tiles of V, M]
    sums_ptr,  # [tiles of V, M]
    loss_ptr,
    statistics_ptr,
    statistics_stride,
    flags_ptr,  # [tiles of M] int32: tiles to repair
    class_weight_ptr,
    num_rows,
    num_classes,
    tiles_n,
    ignore_index,
    z_loss,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row * target_stride).to(tl.int64)
    # What the others got from their sums stays, ignored rows' zeros too.
    if (tl.load(flags_ptr + row // BLOCK_M) != 0) & (target != ignore_index):
        in_range = (target >= 0) & (target < num_classes)
        safe_target = tl.where(in_range, target, 0)
        poison = tl.where(in_range, 0.0, float("nan")).to(tl.float32)
        tiles = tl.arange(0, TILES)
        at = tiles.to(tl.int64) * num_rows + row
        tops = tl.load(tops_ptr + at, mask=tiles < tiles_n, other=float("-inf"))
        sums = tl.load(sums_ptr + at, mask=tiles < tiles_n, other=0.0)
        top = tl.max(tops, 0)
        shift = tl.where(top == float("-inf"), 0.0, top)
        log_sum = tl.log(tl.sum(sums * tl.exp(tops - shift), 0))
        hard = tl.full([], 1.0, tl.float32)
        if HAS_CLASS_WEIGHT:
            hard = tl.load(class_weight_ptr + safe_target).to(tl.float32)
        loss = hard * (log_sum - (tl.load(reference_ptr + row) - shift))
        if HAS_Z_LOSS:
            loss += z_loss * (shift + log_sum) * (shift + log_sum)
        tl.store(loss_ptr + row, loss + poison)
        tl.store(statistics_ptr + row, shift)
        tl.store(statistics_ptr + statistics_stride + row, log_sum)


@triton.jit
def grad_input_kernel(
    product_ptr,  # [M, D] float32, contiguous
    factor_ptr,  # [M] float32
    hard_ptr,  # [M] float32
    target_ptr,  # [M]
    target_stride,
    weight_ptr,  # [V, D], unit column stride
    weight_stride,
    out_ptr,  # [M, D], unit column stride
    out_stride,
    num_classes,
    hidden_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < hidden_size
    target = tl.load(target_ptr + row * target_stride).to(tl.int64)
    in_range = (target >= 0) & (target < num_classes)
    safe_target = tl.where(in_range, target, 0)
    factor = tl.load(factor_ptr + row)
    hard = tl.load(hard_ptr + row)
    # A row without weight stays exactly zero, whatever the product or the head hold.
    product = tl.load(product_ptr + row * hidden_size + d, mask=inside)
    w = tl.load(weight_ptr + safe_target * weight_stride + d, mask=inside).to(tl.float32)
    grad = tl.where(factor == 0.0, 0.0, factor * product) - tl.where(hard == 0.0, 0.0, hard * w)
    tl.store(out_ptr + row * out_stride + d, grad.to(out_ptr.dtype.element_ty), mask=inside)


def supported(input: torch.Tensor, weight: torch.Tensor, *, interpreted: bool = False) -> bool:
    """Whether these operands can take this path.

    Args:
        input: ``[N, D]``, in the dtype of the products.
        weight: ``[V, D]``, likewise.
        interpreted: Accept CPU tensors, for Triton's interpreter.
    """
    if TensorDescriptor is None or input.dtype != torch.bfloat16:
        return False
    if input.shape[0] < BLOCK_M or input.shape[1] == 0:
        return False
    if not interpreted and not (input.is_cuda and has_tensor_memory_accelerator(input.device)):
        return False
    return tma_ready(input) and tma_ready(weight)


class Exponentials:
    """One call's projections by exponentials.

    Args:
        input: ``[N, D]`` bf16.
        weight: ``[V, D]`` bf16.
        bias: ``[V]`` or None.
        target: ``[N]``.
        class_weight: ``[V]`` float32 or None.
        grad_scale: Called after the first projection has been launched; returns a scalar on the
            device that multiplies the gradient, or None.
        ignore_index: Target of rows that do not count.
        z_loss: Multiplier of the squared log-sum-exp.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits, or None.
        live: Products over the rows that count, whose order the target is in, or None for all rows
            of the input in theirs.
    """

    def __init__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        *,
        class_weight: torch.Tensor | None,
        grad_scale: Callable[[], torch.Tensor | None],
        ignore_index: int,
        z_loss: float,
        logit_scale: float,
        softcap: float | None,
        live: Products | None = None,
    ) -> None:
        self.live = live
        self._rows = input.new_empty(0)
        self._held: slice | None = None
        self.input, self.weight, self.bias, self.target = input, weight, bias, target
        self.class_weight, self.grad_scale = class_weight, grad_scale
        self.ignore_index, self.z_loss = ignore_index, z_loss
        self.logit_scale, self.softcap = logit_scale, softcap
        self.num_classes, self.hidden_size = weight.shape
        self.tiles_n = triton.cdiv(self.num_classes, BLOCK_N)
        self._weight_desc = TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K])
        self.reference = torch.empty(input.shape[0], dtype=torch.float32, device=input.device)
        reference_kernel[(input.shape[0],)](
            input,
            input.stride(0),
            weight,
            weight.stride(0),
            bias,
            target,
            target.stride(0),
            None if live is None else live.order,
            self.reference,
            self.num_classes,
            self.hidden_size,
            ignore_index,
            logit_scale,
            0.0 if softcap is None else softcap,
            HAS_BIAS=bias is not None,
            HAS_SCALE=logit_scale != 1.0,
            HAS_SOFTCAP=softcap is not None,
            HAS_ORDER=live is not None,
            BLOCK=min(triton.next_power_of_2(self.hidden_size), 1024),
            num_warps=4,
        )

    def _gathered(self, rows: slice) -> torch.Tensor:
        """Rows of the input in the order of the target."""
        assert self.live is not None
        num_rows = rows.stop - rows.start
        if self._rows.shape[0] < num_rows:
            self._rows = self.input.new_empty((num_rows, self.hidden_size))
        if self._held != rows:  # a repair reads them again
            self.live.gather(self.input, self._rows[:num_rows], rows.start)
            self._held = rows
        return self._rows[:num_rows]

    def _project(
        self,
        mode: str,
        rows: slice,
        out: Any,
        sums: Any,
        tops: Any = None,
        flags: Any = None,
    ) -> None:
        chunk = self.input[rows] if self.live is None else self._gathered(rows)
        num_rows = chunk.shape[0]
        tiles = triton.cdiv(num_rows, BLOCK_M) * self.tiles_n
        out_desc = None
        if out is not None:
            out_desc = TensorDescriptor(
                out, list(out.shape), list(out.stride()), [BLOCK_M, BLOCK_N // 2]
            )
        projection_kernel[(min(multiprocessors(chunk.device), tiles),)](
            TensorDescriptor.from_tensor(chunk, [BLOCK_M, BLOCK_K]),
            self._weight_desc,
            out_desc,
            self.reference[rows],
            self.bias,
            sums,
            tops,
            flags,
            None if self.live is None else self.live.live,
            rows.start,
            num_rows,
            self.num_classes,
            self.hidden_size,
            self.logit_scale,
            0.0 if self.softcap is None else self.softcap,
            MODE=mode,
            HAS_BIAS=self.bias is not None,
            HAS_SCALE=self.logit_scale != 1.0,
            HAS_SOFTCAP=self.softcap is not None,
            HAS_LIVE=self.live is not None,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            FLAGS=triton.next_power_of_2(triton.cdiv(num_rows, BLOCK_M)),
            WIDEN=not chunk.is_cuda,
            num_stages=STAGES,
            num_warps=WARPS,
        )

    def losses(self, start: int, stop: int, loss: torch.Tensor, statistics: torch.Tensor) -> None:
        """Losses and statistics of some rows; nothing of size V is stored.

        Args:
            start: First row.
            stop: Row after the last.
            loss: ``[stop - start]`` float32, out.
            statistics: ``[2, stop - start]`` float32, out.
        """
        rows = slice(start, stop)
        num_rows = stop - start
        sums = loss.new_empty((self.tiles_n, num_rows))
        self._project("sums", rows, None, sums)
        _, _, flags = self._finalise(rows, sums, loss, statistics, None)
        tops = torch.empty_like(sums)
        self._project("statistics", rows, None, sums, tops=tops, flags=flags)
        target = self.target[rows]
        statistics_kernel[(num_rows,)](
            target,
            target.stride(0),
            self.reference[rows],
            tops,
            sums,
            loss,
            statistics,
            statistics.stride(0),
            flags,
            self.class_weight,
            num_rows,
            self.num_classes,
            self.tiles_n,
            self.ignore_index,
            self.z_loss,
            HAS_CLASS_WEIGHT=self.class_weight is not None,
            HAS_Z_LOSS=self.z_loss != 0.0,
            BLOCK_M=BLOCK_M,
            TILES=triton.next_power_of_2(self.tiles_n),
            num_warps=4,
        )

    def _finalise(
        self,
        rows: slice,
        sums: torch.Tensor,
        loss: torch.Tensor,
        statistics: torch.Tensor,
        grad_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Losses and statistics from the sums: factor and hard of `exponentials`, and flags."""
        target = self.target[rows]
        num_rows = target.shape[0]
        factor, hard = loss.new_empty((2, num_rows))
        flags = torch.zeros(triton.cdiv(num_rows, BLOCK_M), dtype=torch.int32, device=loss.device)
        finalise_kernel[(num_rows,)](
            target,
            target.stride(0),
            self.reference[rows],
            sums,
            loss,
            statistics,
            statistics.stride(0),
            factor,
            hard,
            flags,
            self.class_weight,
            grad_scale,
            num_rows,
            self.num_classes,
            self.tiles_n,
            self.ignore_index,
            self.z_loss,
            self.logit_scale,
            0.0 if self.softcap is None else self.softcap,
            LARGEST_SUM,
            HAS_CLASS_WEIGHT=self.class_weight is not None,
            HAS_Z_LOSS=self.z_loss != 0.0,
            HAS_SOFTCAP=self.softcap is not None,
            HAS_GRAD_SCALE=grad_scale is not None,
            BLOCK_M=BLOCK_M,
            TILES=triton.next_power_of_2(self.tiles_n),
            num_warps=4,
        )
        return factor, hard, flags

    def exponentials(
        self, start: int, stop: int, out: torch.Tensor, loss: torch.Tensor, statistics: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of some rows and their exponentials.

        Args:
            start: First row.
            stop: Row after the last.
            out: ``[stop - start, V]`` bf16, rows on 16 bytes; holds the exponentials afterwards.
            loss: ``[stop - start]`` float32, out.
            statistics: ``[2, stop - start]`` float32, out.

        Returns:
            Factor of each row's product and weight of its target's row, ``[stop - start]`` float32.
        """
        rows = slice(start, stop)
        num_rows = stop - start
        sums = loss.new_empty((self.tiles_n, num_rows))
        self._project("exponentials", rows, out, sums)
        # Everything else comes after the first big launch: the host takes most of a millisecond
        # for it, which is 4% of a step, and the device may as well be working then.
        grad_scale = self.grad_scale()
        factor, hard, flags = self._finalise(rows, sums, loss, statistics, grad_scale)
        target = self.target[rows]
        softcap = 0.0 if self.softcap is None else self.softcap
        self._project("logits", rows, out, sums, flags=flags)
        block, warps = launch_shape(self.num_classes, capped=self.softcap is not None)
        repair_kernel[(num_rows,)](
            out,
            out.stride(0),
            target,
            target.stride(0),
            loss,
            statistics,
            statistics.stride(0),
            factor,
            hard,
            flags,
            self.class_weight,
            grad_scale,
            None,
            self.num_classes,
            self.ignore_index,
            self.z_loss,
            self.logit_scale,
            softcap,
            HAS_CLASS_WEIGHT=self.class_weight is not None,
            HAS_Z_LOSS=self.z_loss != 0.0,
            HAS_SCALE=self.logit_scale != 1.0,
            HAS_SOFTCAP=self.softcap is not None,
            HAS_GRAD_SCALE=grad_scale is not None,
            BLOCK_M=BLOCK_M,
            BLOCK=block,
            num_warps=warps,
        )
        return factor, hard

    def grad_input(
        self,
        rows: slice,
        product: torch.Tensor,
        factor: torch.Tensor,
        hard: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Finish ``grad_input`` of some rows.

        Args:
            rows: Which rows of the input.
            product: Exponentials times the weight, ``[M, D]`` float32, contiguous.
            factor: ``[M]``, from `exponentials`.
            hard: ``[M]``, from `exponentials`.
            out: ``[M, D]``, unit column stride.
        """
        num_rows, hidden_size = product.shape
        block = min(triton.next_power_of_2(hidden_size), 2048)
        target = self.target[rows]
        grad_input_kernel[(num_rows, triton.cdiv(hidden_size, block))](
            product,
            factor,
            hard,
            target,
            target.stride(0),
            self.weight,
            self.weight.stride(0),
            out,
            out.stride(0),
            self.num_classes,
            hidden_size,
            BLOCK=block,
            num_warps=4,
        )
