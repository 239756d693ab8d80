"""Matrix products over the rows that count, whose number only the device knows.

Rows whose target is ``ignore_index`` contribute nothing, and in instruction tuning they are most of
a batch. They are moved behind the others (`LiveRows`), and every product here reads from device
memory how many rows there are, so that tiles behind the last one that counts are never computed.
The host is not asked: launches are the same whatever the number, and those without work end at
once. cuBLAS has no such bound.

All three products are persistent kernels over tiles of 128 x 256 with operands fetched by the
tensor memory accelerator. On an H200, timed in turn (docs/performance.md, "Products over the rows
that count"), they run at cuBLAS's speed: 1.00 and 0.99 of it for the projection, 1.00 and 1.02 for
``grad_input``, 1.00 and 1.03 for ``grad_weight`` (2048 rows, 128256 x 4096 and 151936 x 2048). They
leave registers for another program on each multiprocessor, which cuBLAS's do not, so a pass over
logits can run beside them (`greyhound_ops.ops.live_loop`).
"""

import functools
import itertools

import torch
import triton
import triton.language as tl

from greyhound_ops import torch_private
from greyhound_ops.kernels import panels as panel_layout
from greyhound_ops.kernels.panels import Panels, panel_row

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # an older Triton: cuBLAS serves
    TensorDescriptor = None

# 128 x 256 x 64 with four stages (192 KiB of operands) and eight warps: tiles of 128 x 128 and
# 256 x 128 were 3 to 18% slower.
BLOCK_M, BLOCK_N, BLOCK_K, STAGES, WARPS = 128, 256, 64, 4, 8

# Shared memory that one program may take on a Hopper multiprocessor; the kernels take nearly all.
LEAST_SHARED_BYTES = 227 * 1024

# grad_input of few rows has fewer tiles than there are multiprocessors: each sum over V, 1.5 ms at
# V=128256, is then cut into at most so many, in all at most so many for each multiprocessor.
MOST_SPLITS, MOST_UNITS = 16, 2

# What another launch and its sum over parts cost, of the time of one wave of tiles (1.6 ms at
# V=128256).
PIECE_WAVES = 0.02

# Tiles of V that run together over all tiles of D, so that both operands come from L2.
GROUP = 8


@triton.jit
def compact_kernel(
    target_ptr,  # [N]
    target_stride,
    order_ptr,  # [N] out, int64: rows that count first, each kind in its order
    labels_ptr,  # [N] out, int64: the targets in that order
    live_ptr,  # scalar out, int32: rows that count
    num_rows,
    ignore_index,
    BLOCK: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    live = 0
    for start in range(0, num_rows, BLOCK):
        inside = start + at < num_rows
        target = tl.load(
            target_ptr + (start + at).to(tl.int64) * target_stride, mask=inside, other=0
        ).to(tl.int64)
        live += tl.sum((inside & (target != ignore_index)).to(tl.int32), 0)
    tl.store(live_ptr, live)
    before = 0
    for start in range(0, num_rows, BLOCK):
        row = start + at
        inside = row < num_rows
        target = tl.load(target_ptr + row.to(tl.int64) * target_stride, mask=inside, other=0).to(
            tl.int64
        )
        counts = (inside & (target != ignore_index)).to(tl.int32)
        kept = before + tl.cumsum(counts, 0)  # rows that count up to this one
        position = tl.where(counts > 0, kept - 1, live + row - kept)
        tl.store(order_ptr + position, row.to(tl.int64), mask=inside)
        tl.store(labels_ptr + position, target, mask=inside)
        before += tl.sum(counts, 0)


@triton.jit
def gather_kernel(
    input_ptr,  # [N, D], unit column stride
    input_stride,
    order_ptr,  # [N]
    live_ptr,
    out_ptr,  # [M, D] out, contiguous
    start,
    hidden_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < hidden_size
    source = tl.load(order_ptr + start + row)
    # Zeros, not the rows: the last block of 64 of a sum over rows reads beyond those that count,
    # and what stands there is multiplied by a zero gradient. An ignored row may hold NaN.
    counts = start + row < tl.load(live_ptr)
    x = tl.load(input_ptr + source * input_stride + d, mask=inside & counts, other=0.0)
    tl.store(out_ptr + row * hidden_size + d, x, mask=inside)


@triton.jit
def _rows_here(live_ptr, start, num_rows):
    """How many of the rows from ``start`` on count, at most ``num_rows``."""
    return tl.minimum(tl.maximum(tl.load(live_ptr) - start, 0), num_rows)


@triton.jit
def _halves(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile in two: what waits for its store then takes half the shared memory."""
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def _narrow(x, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """A float32 tile in the dtype it is stored in, rounded to nearest."""
    if WIDEN and dtype == tl.bfloat16:
        # The interpreter cuts bf16 off instead.
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def _store_quarters(acc, out_desc, row_start, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a float32 tile by quarters of its columns, 32 KiB of shared memory at a time."""
    left, right = _halves(acc, BLOCK_M, BLOCK_N)
    first, second = _halves(left, BLOCK_M, BLOCK_N // 2)
    third, fourth = _halves(right, BLOCK_M, BLOCK_N // 2)
    out_desc.store([row_start, 0], first)
    out_desc.store([row_start, BLOCK_N // 4], second)
    out_desc.store([row_start, BLOCK_N // 2], third)
    out_desc.store([row_start, BLOCK_N // 4 * 3], fourth)


@triton.jit(do_not_specialize=["panel_first", "panel_shift", "panels"])
def logits_kernel(
    input_desc,  # [M, D] in tiles [BLOCK_M, BLOCK_K]
    weight_desc,  # [V, D] in tiles [BLOCK_N, BLOCK_K]
    out_desc,  # [M, V] out, or the memory of panels, in tiles [BLOCK_M, BLOCK_N / 2]
    bias_ptr,  # [V] or None
    live_ptr,
    start,
    num_rows,
    num_classes,
    hidden_size,
    panel_first,
    panel_pitch,
    panel_shift,
    panels,
    PANELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,  # the interpreter multiplies the bits of bf16, not its values
):
    tiles_m = tl.cdiv(_rows_here(live_ptr, start, num_rows), BLOCK_M)
    tiles = tiles_m * tl.cdiv(num_classes, BLOCK_N)
    # Flattened, the loads of a tile's first operands run behind the epilogue of the tile before.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        # Rows first: programs that run together share tiles of the weight.
        row_start = (tile % tiles_m) * BLOCK_M
        column_start = (tile // tiles_m) * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in range(tl.cdiv(hidden_size, BLOCK_K)):
            a = input_desc.load([row_start, k * BLOCK_K])
            b = weight_desc.load([column_start, k * BLOCK_K])
            if WIDEN:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b.T, acc)
        if HAS_BIAS:
            columns = column_start + tl.arange(0, BLOCK_N)
            bias = tl.load(bias_ptr + columns, mask=columns < num_classes, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        left, right = _halves(acc, BLOCK_M, BLOCK_N)
        middle = column_start + BLOCK_N // 2
        if PANELS:
            row = panel_first + row_start
            at = row + panel_row(column_start, panel_pitch, panel_shift, panels)
            out_desc.store([at, 0], _narrow(left, out_desc.dtype, WIDEN))
            at = row + panel_row(middle, panel_pitch, panel_shift, panels)
            out_desc.store([at, 0], _narrow(right, out_desc.dtype, WIDEN))
        else:
            out_desc.store([row_start, column_start], _narrow(left, out_desc.dtype, WIDEN))
            out_desc.store([row_start, middle], _narrow(right, out_desc.dtype, WIDEN))


@triton.jit
def _splits(tiles, programs, MOST_SPLITS: tl.constexpr, MOST_UNITS: tl.constexpr):
    """Into how many parts the sum of every tile is cut: as leaves the fewest programs idle."""
    best = 1
    for splits in tl.static_range(2, MOST_SPLITS + 1):
        units = tiles * splits
        waves = tl.cdiv(units, programs)
        best_waves = tl.cdiv(tiles * best, programs)
        # Share of busy programs, units / waves; another part is worth 3% of it.
        better = units * best_waves * 32 > tiles * best * waves * 33
        best = tl.where(better & (units <= programs * MOST_UNITS), splits, best)
    return best


def splits(tiles: int, programs: int) -> int:
    """What `_splits` finds, for the host to plan by."""
    best = 1
    for count in range(2, MOST_SPLITS + 1):
        units, waves = tiles * count, triton.cdiv(tiles * count, programs)
        better = units * triton.cdiv(tiles * best, programs) * 32 > tiles * best * waves * 33
        if better and units <= programs * MOST_UNITS:
            best = count
    return best


@functools.cache
def input_pieces(tiles_m: int, tiles_n: int, programs: int, most: int) -> tuple[int, ...]:
    """Tiles of rows that each `Products.grad_input` of some rows takes, so that few programs idle.

    All tiles of a piece are computed in waves of one for each program. At D=2304, 9 tiles wide, the
    144 tiles of 2048 rows take two waves of an H200's 132 programs and 126 of 1792 rows take one.

    Args:
        tiles_m: Tiles of rows.
        tiles_n: Tiles of D.
        programs: Programs that run at once.
        most: Largest piece.
    """
    pieces = []
    while tiles_m > 4 * most:  # long before the end the best piece is the best
        costs = [(_waves(m * tiles_n, programs) + PIECE_WAVES) / m for m in range(1, most + 1)]
        pieces.append(1 + costs.index(min(costs)))
        tiles_m -= pieces[-1]
    # For every number of tiles the least cost and its first piece.
    plans: list[tuple[float, int]] = [(0.0, 0)]
    for count in range(1, tiles_m + 1):
        plans.append(
            min(
                (_waves(m * tiles_n, programs) + PIECE_WAVES + plans[count - m][0], -m)
                for m in range(1, min(most, count) + 1)
            )
        )
    while tiles_m:
        pieces.append(-plans[tiles_m][1])
        tiles_m -= pieces[-1]
    return tuple(pieces)


def _waves(tiles: int, programs: int) -> float:
    """Time of some tiles of a sum over V, in that of one."""
    parts = splits(tiles, programs)
    return float(triton.cdiv(tiles * parts, programs) / parts)


@triton.jit(do_not_specialize=["panel_first", "panel_shift", "panels"])
def grad_input_kernel(
    grad_desc,  # [M, V], or the memory of panels, in tiles [BLOCK_M, BLOCK_K]
    weight_desc,  # [V, D] in tiles [BLOCK_K, BLOCK_N]
    parts_desc,  # [blocks * BLOCK_M, BLOCK_N] float32 out, in tiles [BLOCK_M, BLOCK_N / 4]
    live_ptr,
    start,
    num_rows,
    num_classes,
    hidden_size,
    programs,
    panel_first,
    panel_pitch,
    panel_shift,
    panels,
    PANELS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    MOST_UNITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tiles_m = tl.cdiv(_rows_here(live_ptr, start, num_rows), BLOCK_M)
    tiles = tiles_m * tl.cdiv(hidden_size, BLOCK_N)
    splits = _splits(tiles, programs, MOST_SPLITS, MOST_UNITS)
    blocks_k = tl.cdiv(tl.cdiv(num_classes, BLOCK_K), splits)
    for unit in tl.range(tl.program_id(0), tiles * splits, tl.num_programs(0), flatten=True):
        tile = unit % tiles
        first = (unit // tiles) * blocks_k
        row_start = (tile % tiles_m) * BLOCK_M
        column_start = (tile // tiles_m) * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in range(blocks_k):
            # What lies beyond V, in the last part, is read as zeros.
            column = (first + k) * BLOCK_K
            if PANELS:
                row = panel_first + panel_row(column, panel_pitch, panel_shift, panels)
                a = grad_desc.load([row + row_start, column % (BLOCK_N // 2)])
            else:
                a = grad_desc.load([row_start, column])
            b = weight_desc.load([column, column_start])
            if WIDEN:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b, acc)
        _store_quarters(acc, parts_desc, unit * BLOCK_M, BLOCK_M, BLOCK_N)


@triton.jit
def finish_input_kernel(
    parts_ptr,  # [blocks, BLOCK_M, BLOCK_N] float32
    order_ptr,  # [N]
    live_ptr,
    factor_ptr,  # [M] float32, or None
    hard_ptr,  # [M] float32 weight of the target's row of the head, with factor
    target_ptr,  # [M] int64, with factor
    weight_ptr,  # [V, D], unit column stride, with factor
    weight_stride,
    out_ptr,  # [N, D] out, unit column stride
    out_stride,
    start,
    num_rows,
    num_classes,
    hidden_size,
    programs,
    HAS_FACTOR: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    MOST_UNITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < hidden_size
    rows_here = _rows_here(live_ptr, start, num_rows)
    grad = tl.zeros([BLOCK], dtype=tl.float32)
    if row < rows_here:
        tiles_m = tl.cdiv(rows_here, BLOCK_M)
        tiles = tiles_m * tl.cdiv(hidden_size, BLOCK_N)
        tile = (d // BLOCK_N) * tiles_m + row // BLOCK_M
        for split in range(_splits(tiles, programs, MOST_SPLITS, MOST_UNITS)):
            at = (split * tiles + tile).to(tl.int64) * BLOCK_M + row % BLOCK_M
            grad += tl.load(parts_ptr + at * BLOCK_N + d % BLOCK_N, mask=inside, other=0.0)
        if HAS_FACTOR:
            # As for the exponentials: a row without weight stays exactly zero, whatever the
            # product or the head hold.
            target = tl.load(target_ptr + row)
            in_range = (target >= 0) & (target < num_classes)
            safe_target = tl.where(in_range, target, 0)
            factor = tl.load(factor_ptr + row)
            hard = tl.load(hard_ptr + row)
            w = tl.load(weight_ptr + safe_target * weight_stride + d, mask=inside, other=0.0)
            w = w.to(tl.float32)
            grad = tl.where(factor == 0.0, 0.0, factor * grad)
            grad -= tl.where(hard == 0.0, 0.0, hard * w)
    target_row = tl.load(order_ptr + start + row)
    tl.store(out_ptr + target_row * out_stride + d, grad.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _fold(
    acc,  # [BLOCK_M, columns] float32
    row_start,
    column_start,
    high_desc,
    low_desc,
    READS: tl.constexpr,
    HAS_LOW: tl.constexpr,
    WRITES_LOW: tl.constexpr,
    WIDEN: tl.constexpr,
):
    if READS and not HAS_LOW and high_desc.dtype == tl.bfloat16:
        # Added in L2, so that nothing waits for what is there: 1.84 ms instead of 2.02 for 2048
        # rows of 151936 x 2048, where a store takes 1.83. The tile is rounded once more. The same
        # in float32 writes twice the bytes, 2.28 ms, and wants a cast in the end.
        tile = _narrow(acc, high_desc.dtype, WIDEN)
        if WIDEN:  # the interpreter has no such addition
            there = high_desc.load([row_start, column_start]).to(tl.float32)
            total = _narrow(there + tile.to(tl.float32), high_desc.dtype, WIDEN)
            high_desc.store([row_start, column_start], total)
        else:
            high_desc.atomic_add([row_start, column_start], tile)
    else:
        if READS:
            acc += high_desc.load([row_start, column_start]).to(tl.float32)
            if HAS_LOW:
                acc += low_desc.load([row_start, column_start]).to(tl.float32)
        high = _narrow(acc, high_desc.dtype, WIDEN)
        high_desc.store([row_start, column_start], high)
        if WRITES_LOW:
            rest = _narrow(acc - high.to(tl.float32), low_desc.dtype, WIDEN)
            low_desc.store([row_start, column_start], rest)


@triton.jit(
    do_not_specialize=[
        "panels", "panel_start", "panel_stop", "own_row", "own_pitch", "own_shift", "own_blocks",
        "spare_row", "spare_pitch", "other_row", "other_pitch",
    ]
)  # fmt: skip
def grad_weight_kernel(
    grad_desc,  # [M, V], or all memory in which there are panels, in tiles [BLOCK_K, BLOCK_M]
    rows_desc,  # [M, D] in tiles [BLOCK_K, BLOCK_N]
    high_desc,  # [V, D] in tiles [BLOCK_M, BLOCK_N / PIECES]: the sum, in the end the gradient
    low_desc,  # [V, D] likewise: what bf16 cannot hold of the sum; or None
    live_ptr,
    start,
    num_rows,
    num_classes,
    hidden_size,
    panels,
    panel_start,  # panels of this launch
    panel_stop,
    own_row,  # row of the descriptor where the panels in the gradient's memory begin
    own_pitch,
    own_shift,
    own_blocks,  # blocks of BLOCK_K rows that they hold; the rest is in other memory
    spare_row,  # where the last of them have been copied to
    spare_pitch,
    other_row,
    other_pitch,
    PANELS: tl.constexpr,
    READS: tl.constexpr,  # adds to what is there
    HAS_LOW: tl.constexpr,
    LAST: tl.constexpr,  # with low: this launch is for the last chunk with rows that count
    PIECES: tl.constexpr,  # 2 or 4, in which a tile is read and written
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    live = tl.load(live_ptr)
    rows_here = tl.minimum(tl.maximum(live - start, 0), num_rows)
    tiles_m = tl.cdiv(num_classes, BLOCK_M)
    if PANELS:
        tiles_m = panel_stop - panel_start
    tiles_n = tl.cdiv(hidden_size, BLOCK_N)
    # The first chunk writes zeros where nothing counts at all.
    wanted = (live > start) | (start == 0)
    if HAS_LOW:
        wanted = wanted & ((live <= start + num_rows) == LAST)
    tiles = tl.where(wanted, tiles_m * tiles_n, 0)
    # Never no block: a flattened loop would skip the tile's epilogue. The first is zero then.
    blocks_k = tl.maximum(tl.cdiv(rows_here, BLOCK_K), 1)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        group = tile // (GROUP * tiles_n)
        inner = tile % (GROUP * tiles_n)
        size = tl.minimum(tiles_m - group * GROUP, GROUP)
        row_start = (group * GROUP + inner % size) * BLOCK_M
        column_start = (inner // size) * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        if PANELS:
            row_start += panel_start * BLOCK_M
            panel = row_start // BLOCK_M
            place = panel + own_shift
            moved = spare_row + (place - panels) * spare_pitch
            own = tl.where(place < panels, own_row + place * own_pitch, moved)
            other = other_row + panel * other_pitch - own_blocks * BLOCK_K
        for k in range(blocks_k):
            if PANELS:
                a = grad_desc.load([tl.where(k < own_blocks, own, other) + k * BLOCK_K, 0])
            else:
                a = grad_desc.load([k * BLOCK_K, row_start])
            b = rows_desc.load([k * BLOCK_K, column_start])
            if WIDEN:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a.T, b, acc)
        left, right = _halves(acc, BLOCK_M, BLOCK_N)
        middle = column_start + BLOCK_N // 2
        low: tl.constexpr = HAS_LOW and not LAST
        if PIECES == 2:
            _fold(left, row_start, column_start, high_desc, low_desc, READS, HAS_LOW, low, WIDEN)
            _fold(right, row_start, middle, high_desc, low_desc, READS, HAS_LOW, low, WIDEN)
        else:
            step: tl.constexpr = BLOCK_N // 4
            first, second = _halves(left, BLOCK_M, BLOCK_N // 2)
            _fold(first, row_start, column_start, high_desc, low_desc, READS, HAS_LOW, low, WIDEN)
            _fold(
                second,
                row_start,
                column_start + step,
                high_desc,
                low_desc,
                READS,
                HAS_LOW,
                low,
                WIDEN,
            )
            third, fourth = _halves(right, BLOCK_M, BLOCK_N // 2)
            _fold(third, row_start, middle, high_desc, low_desc, READS, HAS_LOW, low, WIDEN)
            _fold(fourth, row_start, middle + step, high_desc, low_desc, READS, HAS_LOW, low, WIDEN)


def supported(
    input: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, *, interpreted: bool = False
) -> bool:
    """Whether the products of these operands can be made here.

    Args:
        input: ``[N, D]``; rows are gathered, so that only ``D`` matters.
        weight: ``[V, D]``.
        dtype: Of the products; a weight of another dtype is copied, row by row.
        interpreted: Accept CPU tensors, for Triton's interpreter.
    """
    if TensorDescriptor is None or dtype != torch.bfloat16:
        return False
    if 0 in (*input.shape, *weight.shape) or input.shape[1] % 8:
        return False
    if not interpreted and not (input.is_cuda and has_tensor_memory_accelerator(input.device)):
        return False
    if weight.dtype != dtype:
        # The copy keeps the order of its strides; that of a single row, which may be any, as it is.
        by_row = weight.stride(0) >= weight.stride(1)
        return by_row and (weight.shape[0] > 1 or weight.stride(0) % 8 == 0)
    return tma_ready(weight)


def compact(
    target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order rows so that those that count come first.

    Args:
        target: ``[N]`` int64, any stride.
        ignore_index: Target of rows that do not count.

    Returns:
        Original row of each ``[N]`` int64, targets in that order ``[N]`` int64, and how many count,
        a scalar int32; all on the device of the target.
    """
    num_rows = target.shape[0]
    order, labels = target.new_empty((2, num_rows), dtype=torch.int64)
    live = target.new_empty((), dtype=torch.int32)
    block = min(max(triton.next_power_of_2(num_rows), 16), 4096)
    compact_kernel[(1,)](
        target,
        target.stride(0),
        order,
        labels,
        live,
        num_rows,
        ignore_index,
        BLOCK=block,
        num_warps=8,
    )
    return order, labels, live


class Products:
    """The products of one call.

    Args:
        weight: ``[V, D]`` bf16.
        bias: ``[V]`` or None.
        order: ``[N]`` int64, from `compact`.
        live: Scalar int32, from `compact`.

    Attributes:
        input_rows: Most rows of one `grad_input`; `pieces` says how to cut more.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        order: torch.Tensor,
        live: torch.Tensor,
    ) -> None:
        self.weight, self.bias, self.order, self.live = weight, bias, order, live
        self.num_classes, self.hidden_size = weight.shape
        self.programs = multiprocessors(weight.device)
        # Two tiles for each multiprocessor, at most 2048 rows; fewer tiles are made up for by
        # splitting their sums.
        tiles_n = triton.cdiv(self.hidden_size, BLOCK_N)
        self.input_rows = BLOCK_M * min(max(self.programs * MOST_UNITS // tiles_n, 1), 16)
        self._widen = not weight.is_cuda
        self._weight_rows = TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K])
        self._weight_sums = TensorDescriptor.from_tensor(weight, [BLOCK_K, BLOCK_N])

    def pieces(self, num_rows: int) -> list[tuple[int, int]]:
        """First row and row after the last of each `grad_input` that some rows take together.

        Args:
            num_rows: Rows, whether they count or not.
        """
        tiles_n = triton.cdiv(self.hidden_size, BLOCK_N)
        cut = input_pieces(
            triton.cdiv(num_rows, BLOCK_M), tiles_n, self.programs, self.input_rows // BLOCK_M
        )
        stops = [min(stop * BLOCK_M, num_rows) for stop in itertools.accumulate(cut)]
        return list(itertools.pairwise([0, *stops]))

    def gather(self, input: torch.Tensor, out: torch.Tensor, start: int) -> None:
        """Write some rows in the order of the call; zeros for those that do not count.

        Args:
            input: ``[N, D]`` bf16, unit column stride.
            out: ``[M, D]`` bf16, contiguous.
            start: First row.
        """
        block = min(triton.next_power_of_2(self.hidden_size), 2048)
        gather_kernel[(out.shape[0], triton.cdiv(self.hidden_size, block))](
            input,
            input.stride(0),
            self.order,
            self.live,
            out,
            start,
            self.hidden_size,
            BLOCK=block,
            num_warps=4,
        )

    def logits(self, rows: torch.Tensor, out: torch.Tensor | Panels, start: int) -> None:
        """Project rows; tiles behind the last one that counts are left as they are.

        Args:
            rows: ``[M, D]`` bf16, contiguous.
            out: ``[M, V]`` bf16, rows on 16 bytes, or panels.
            start: First row.
        """
        num_rows = rows.shape[0]
        memory, *panels = _layout(out)
        tiles = triton.cdiv(num_rows, BLOCK_M) * triton.cdiv(self.num_classes, BLOCK_N)
        logits_kernel[(min(self.programs, tiles),)](
            TensorDescriptor.from_tensor(rows, [BLOCK_M, BLOCK_K]),
            self._weight_rows,
            _tiles(memory, [BLOCK_M, BLOCK_N // 2]),
            self.bias,
            self.live,
            start,
            num_rows,
            self.num_classes,
            self.hidden_size,
            *panels,
            PANELS=isinstance(out, Panels),
            HAS_BIAS=self.bias is not None,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            WIDEN=self._widen,
            num_stages=STAGES,
            num_warps=WARPS,
        )

    def partial_sums(self) -> torch.Tensor:
        """Room for the sums of one `grad_input`, float32."""
        tiles = self.input_rows // BLOCK_M * triton.cdiv(self.hidden_size, BLOCK_N)
        blocks = max(self.programs * MOST_UNITS, tiles)
        # A row more than needed, to begin with panels where another memory's rows do.
        return self.weight.new_empty((blocks * BLOCK_M + 1, BLOCK_N), dtype=torch.float32)

    def grad_input(
        self, grad_logits: torch.Tensor | Panels, parts: torch.Tensor, start: int
    ) -> None:
        """Multiply the logits gradient of some rows by the head, into partial sums.

        Args:
            grad_logits: ``[M, V]`` bf16, rows on 16 bytes, or panels; at most `input_rows`.
            parts: From `partial_sums`.
            start: First row.
        """
        memory, *panels = _layout(grad_logits)
        grad_input_kernel[(self.programs,)](
            _tiles(memory, [BLOCK_M, BLOCK_K]),
            self._weight_sums,
            _tiles(parts, [BLOCK_M, BLOCK_N // 4]),
            self.live,
            start,
            grad_logits.shape[0],
            self.num_classes,
            self.hidden_size,
            self.programs,
            *panels,
            PANELS=isinstance(grad_logits, Panels),
            MOST_SPLITS=MOST_SPLITS,
            MOST_UNITS=MOST_UNITS,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            WIDEN=self._widen,
            num_stages=STAGES,
            num_warps=WARPS,
        )

    def finish_input(
        self,
        parts: torch.Tensor,
        out: torch.Tensor,
        start: int,
        num_rows: int,
        *,
        factor: torch.Tensor | None = None,
        hard: torch.Tensor | None = None,
        target: torch.Tensor | None = None,
    ) -> None:
        """Add the partial sums up and write them to their original rows; zeros for the others.

        Args:
            parts: As `grad_input` filled them.
            out: ``[N, D]``, unit column stride.
            start: First row.
            num_rows: Rows.
            factor: ``[M]`` float32, what the product of each row still lacks, or None.
            hard: ``[M]`` float32, with factor: weight of the target's row of the head.
            target: ``[M]`` int64, with factor.
        """
        block = min(triton.next_power_of_2(self.hidden_size), 1024)
        finish_input_kernel[(num_rows, triton.cdiv(self.hidden_size, block))](
            parts,
            self.order,
            self.live,
            factor,
            hard,
            target,
            self.weight,
            self.weight.stride(0),
            out,
            out.stride(0),
            start,
            num_rows,
            self.num_classes,
            self.hidden_size,
            self.programs,
            HAS_FACTOR=factor is not None,
            MOST_SPLITS=MOST_SPLITS,
            MOST_UNITS=MOST_UNITS,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK=block,
            num_warps=4,
        )

    def grad_weight(
        self,
        grad_logits: torch.Tensor,
        rows: torch.Tensor,
        high: torch.Tensor,
        low: torch.Tensor | None,
        start: int,
        all_rows: int,
    ) -> None:
        """Fold some rows into the head's gradient.

        The sum over chunks is kept as a bf16 number and what bf16 cannot hold of it, 16 bits
        together: as exact as a float32 sum to 2^-17, and after the last chunk that counts the
        first of the two is the gradient, without a cast.

        Args:
            grad_logits: ``[M, V]`` bf16; zeros from the last row that counts to the next multiple
                of `BLOCK_K` (the whole first block if none does).
            rows: ``[M, D]`` bf16, contiguous, likewise.
            high: ``[V, D]`` in the dtype of the gradient, unit column stride.
            low: ``[V, D]`` bf16, or None to keep the sum in the dtype of ``high``.
            start: First row.
            all_rows: N.
        """
        grad_desc = _tiles(grad_logits, [BLOCK_K, BLOCK_M])
        self._grad_weight(grad_desc, rows, high, low, start, all_rows, None)

    def grad_weight_in_place(
        self,
        own: Panels | None,
        other: Panels | None,
        spare: torch.Tensor,
        rows: torch.Tensor,
        high: torch.Tensor,
        low: torch.Tensor | None,
        start: int,
        all_rows: int,
    ) -> None:
        """Fold some rows, whose logits gradient may lie where the head's gradient goes.

        All of them are one product, summed up in float32.

        Args:
            own: The first rows' logits gradient, in the memory of ``high``
                (`kernels.panels.in_gradient`), a multiple of `BLOCK_K` of them if there is an
                ``other``; or None.
            other: That of the rows behind, or None.
            spare: Memory of `spare_panels` panels, written over.
            rows: As for `grad_weight`, like what follows; ``own`` only with the first.
            high: Contiguous.
            low: Likewise.
            start: First row.
            all_rows: N.
        """
        held = own if other is None else other
        assert held is not None
        panels, own_rows = held.panels, 0 if own is None else own.num_rows
        step, spare_pitch = panels, panel_layout.padded(own_rows)
        memories = [held.memory, held.memory, held.memory]
        if own is not None:
            # The last panels, which lie where the first rows of the gradient go.
            step = own.shift
            flat = spare.view(-1).view(own.dtype)
            moved = panel_layout.in_chunk(flat, own_rows, step * BLOCK_M, own.memory).memory
            source = own.memory.view(panels, own.pitch, -1)[:step, :spare_pitch]
            moved.view(source.shape).copy_(source)
            memories = [own.memory, moved, held.memory]
        # One descriptor for all of them, wherever they lie: a loop over blocks of rows that loads
        # by one of two would not be pipelined.
        base = min(memories, key=lambda memory: memory.data_ptr())
        row_bytes = base.stride(0) * base.element_size()
        own_row, spare_row, other_row = away = [
            (each.data_ptr() - base.data_ptr()) // row_bytes for each in memories
        ]
        extent = max(at + each.shape[0] for at, each in zip(away, memories, strict=True))
        window = TensorDescriptor(
            base, [extent, base.shape[1]], [base.stride(0), 1], [BLOCK_K, BLOCK_M]
        )
        places = [
            [
                panels,
                first,
                min(first + step, panels),
                own_row,
                0 if own is None else own.pitch,
                0 if own is None else own.shift,
                triton.cdiv(own_rows, BLOCK_K),
                spare_row,
                spare_pitch,
                other_row + (0 if other is None else other.first),
                0 if other is None else other.pitch,
            ]
            for first in range(0, panels, step)
        ]
        self._grad_weight(window, rows, high, low, start, all_rows, places)

    def spare_panels(self, own_rows: int, spare: torch.Tensor) -> int:
        """How many panels of a gradient's memory are multiplied at a time, and must be moved.

        Args:
            own_rows: Rows of logits in the gradient's memory.
            spare: Memory for them.

        Returns:
            As many as ``spare`` holds, cut to whole waves of programs; never none.
        """
        row_elements = panel_layout.WIDTH * torch.bfloat16.itemsize // spare.element_size()
        most = (spare.numel() // row_elements - 1) // panel_layout.padded(own_rows)
        tiles_n = triton.cdiv(self.hidden_size, BLOCK_N)
        waves = most * tiles_n // self.programs
        return max(min(waves * self.programs // tiles_n if waves else most, most), 1)

    def _grad_weight(
        self,
        grad_desc: TensorDescriptor,
        rows: torch.Tensor,
        high: torch.Tensor,
        low: torch.Tensor | None,
        start: int,
        all_rows: int,
        places: list[list[int]] | None,
    ) -> None:
        """Launch by launch, of one matrix or of panels in some places."""
        num_rows = rows.shape[0]
        reads = start > 0
        pieces, stages = fold_shape(reads, high.dtype, low is not None)
        box = [BLOCK_M, BLOCK_N // pieces]
        descriptors = [
            grad_desc,
            TensorDescriptor.from_tensor(rows, [BLOCK_K, BLOCK_N]),
            _tiles(high, box),
            None if low is None else _tiles(low, box),
        ]
        # With a second half there are two launches, one of which ends at once: after the last chunk
        # that counts the second half is of no use. Behind the last chunk of all nothing counts.
        more = low is not None and start + num_rows < all_rows
        for place in places or [[0] * 11]:
            for last in (False, True) if more else (True,):
                grad_weight_kernel[(self.programs,)](
                    *descriptors,
                    self.live,
                    start,
                    num_rows,
                    self.num_classes,
                    self.hidden_size,
                    *place,
                    PANELS=places is not None,
                    READS=reads,
                    HAS_LOW=low is not None,
                    LAST=last,
                    PIECES=pieces,
                    GROUP=GROUP,
                    BLOCK_M=BLOCK_M,
                    BLOCK_N=BLOCK_N,
                    BLOCK_K=BLOCK_K,
                    WIDEN=self._widen,
                    num_stages=stages,
                    num_warps=WARPS,
                )


def fold_shape(reads: bool, dtype: torch.dtype, low: bool) -> tuple[int, int]:
    """Pieces in which `grad_weight_kernel` reads and writes a tile, and stages of its operands.

    What a piece takes of shared memory, once to be written and once to be read, comes off the room
    for operands: of the 227 KiB of a Hopper multiprocessor 4 stages leave 35, and 3 leave 83.
    """
    wide = dtype == torch.float32
    loads = reads and (wide or low)  # a bf16 sum is added to where it lies
    return 4 if reads and wide else 2, STAGES - (loads or wide)


def _layout(logits: torch.Tensor | Panels) -> tuple[torch.Tensor, int, int, int, int]:
    """Memory of logits, and what the kernels need to know of panels."""
    if isinstance(logits, Panels):
        return logits.memory, logits.first, logits.pitch, logits.shift, logits.panels
    return logits, 0, 0, 0, 0


def _tiles(matrix: torch.Tensor, box: list[int]) -> TensorDescriptor:
    """A descriptor of a matrix whose rows may be padded."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device, which is how many programs a persistent kernel has."""
    if device.type != "cuda":
        return 2  # the interpreter: few, so that a program has several tiles
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def has_tensor_memory_accelerator(device: torch.device) -> bool:
    """Whether a CUDA device fetches tiles by itself and has room for them.

    Hopper and later, but not the later ones for workstations, whose programs have 99 KiB of shared
    memory: these tiles take up to 227.
    """
    if not torch.cuda.is_available():  # a fake tensor may be on a GPU that is not there
        return False
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= LEAST_SHARED_BYTES


def tma_ready(matrix: torch.Tensor) -> bool:
    """Whether a matrix can be read in bulk: unit columns, rows and start on 16 bytes.

    A fake tensor, by which calls are planned, has no address and is taken to begin on 16 bytes.
    """
    return (
        matrix.stride(1) == 1
        and matrix.stride(0) >= matrix.shape[1]
        and (matrix.stride(0) * matrix.element_size()) % 16 == 0
        and (torch_private.is_fake(matrix) or matrix.data_ptr() % 16 == 0)
    )
