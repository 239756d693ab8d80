"""The chunk loop that every op shares: project some rows, fold their gradient, reuse the buffer.

Memory while it runs: one buffer of ``[rows, V]`` logits and the gradients that were asked for. A
gradient that was not asked for has no buffer and no matrix product.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from greyhound_ops import chunking
from greyhound_ops.config import settings

# fp16 logits gradients are made 2^8 times too large and the products scale them back: an average
# probability of a 128k vocabulary, 8e-6, lies below fp16's smallest normal number, 6e-5, and would
# be rounded to two or three bits.
FP16_GAIN = 256.0

# grad_weight accumulated in fp16 itself is kept 2^10 times too small until the backward: the plain
# sum over N rows would pass 65504 at N * |input| = 65504.
FP16_ACCUM_GAIN = 1024.0


# On the CPU the logits gradient stays in float32 where the sum is, which costs no more there.
KEEPS_GRADIENT_ON_CPU = False


# Elements of one grad_input product. One wave of 128 x 256 tiles over an H200's 132
# multiprocessors is 2^22 elements, and cuBLAS ran 0 to 1.5% faster (step time) in products of that
# size than over the whole chunk (docs/performance.md, "Rows per product"). The projection gained
# nothing from such a cut.
GRAD_INPUT_ELEMENTS = 2**22


def fp16_gain(logit_scale: float) -> float:
    """What fp16 logits gradients are multiplied by: `FP16_GAIN`, less for scaled-up logits.

    The scale multiplies the gradient too: 256 times a scale of 300 would pass fp16's 65504.
    """
    return 2.0 ** math.floor(math.log2(FP16_GAIN / max(1.0, abs(logit_scale))))


@dataclasses.dataclass(frozen=True)
class GradientNeeds:
    """Which gradients to make."""

    input: bool
    weight: bool
    bias: bool

    def __bool__(self) -> bool:
        return self.input or self.weight or self.bias


def defers_division(compute_dtype: torch.dtype) -> bool:
    """Whether gradients are kept undivided until the backward.

    fp16 has no room below: a mean gradient over 8192 rows would lose its small elements before a
    `torch.amp.GradScaler` could lift them. So the sum is kept, and divided in the backward together
    with the upstream factor, in float32.
    """
    return compute_dtype == torch.float16


def accumulator_dtype(
    weight_dtype: torch.dtype, compute_dtype: torch.dtype, accum: str
) -> torch.dtype:
    """Dtype in which ``grad_weight`` is summed over the chunks."""
    if torch.float64 in (weight_dtype, compute_dtype):
        return torch.float64
    if accum == "weight" and weight_dtype == compute_dtype:
        return weight_dtype
    return torch.float32


def stored_weight_dtype(
    weight_dtype: torch.dtype, compute_dtype: torch.dtype, accum: str
) -> torch.dtype:
    """Dtype in which the forward hands ``grad_weight`` to the backward."""
    if defers_division(compute_dtype):
        return accumulator_dtype(weight_dtype, compute_dtype, accum)
    return weight_dtype


def stored_bias_dtype(bias_dtype: torch.dtype) -> torch.dtype:
    """Dtype in which the forward hands ``grad_bias`` to the backward: never less than float32."""
    return torch.promote_types(bias_dtype, torch.float32)


# A sum over chunks in two bf16 halves is read and written once a chunk, whatever D: 11% of a step
# at 2048 rows, 5% at 4096 (docs/performance.md, "Heads of few hidden units").
LIVE_ROWS = 4096
LIVE_BYTES = 1280 * chunking.MIB


def row_bytes(
    num_classes: int, compute_dtype: torch.dtype, device_type: str, beside: float = 0.0
) -> int:
    """Bytes of one row of logits in a chunk, with what the caller keeps beside it."""
    element_bytes = compute_dtype.itemsize
    if device_type != "cuda" and element_bytes < 4:
        element_bytes += 4  # outside Triton the statistics work on an fp32 copy of the chunk
    return int(padded_classes(num_classes, compute_dtype) * element_bytes * (1.0 + beside))


def padded_classes(num_classes: int, compute_dtype: torch.dtype) -> int:
    """Elements from one row of a chunk to the next.

    Rows start on 16 bytes also when V is odd: cuBLAS and the kernels load 16 bytes at once, and
    what is stored in bulk is stored so, padding included.
    """
    per_16_bytes = 16 // compute_dtype.itemsize
    return -(-num_classes // per_16_bytes) * per_16_bytes


def keeping_is_less(
    num_rows: Any,
    weight_shape: tuple[int, ...],
    device_type: str,
    *,
    weight_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    accum: str,
) -> Any:
    """Whether logits of all rows, or their gradient, take no more than a sum over chunks.

    Args:
        num_rows: N, or a symbol.
        weight_shape: ``[V, D]``.
        device_type: ``"cuda"`` or any other.
        weight_dtype: Of the head.
        compute_dtype: Of the products and the logits.
        accum: ``"fp32"`` or ``"weight"``.

    Returns:
        A bool, or a condition on symbols. False where they would not take the sum's place: on the
        CPU, and where the sum itself is the gradient.
    """
    sum_dtype = accumulator_dtype(weight_dtype, compute_dtype, accum)
    if not stored_weight_dtype(weight_dtype, compute_dtype, accum) == compute_dtype != sum_dtype:
        return False
    if not (device_type == "cuda" or KEEPS_GRADIENT_ON_CPU):
        return False
    num_classes, hidden = weight_shape
    kept = num_rows * padded_classes(num_classes, compute_dtype) * compute_dtype.itemsize
    return kept <= num_classes * hidden * sum_dtype.itemsize


def _budget_bytes(
    device_type: str,
    weight: Tensor,
    needs: GradientNeeds,
    compute_dtype: torch.dtype,
    accum: str,
    whole_bytes: int,
    budget: chunking.Budget | None,
    override_bytes: int | None = None,
    live: bool = False,
) -> int:
    """The cap on a chunk's logits, by what its gradients need beside it."""
    accum_dtype = accumulator_dtype(weight.dtype, compute_dtype, accum)
    stored_dtype = stored_weight_dtype(weight.dtype, compute_dtype, accum)
    cast_bytes = accumulator_bytes = 0
    if needs.weight and stored_dtype != accum_dtype:
        cast_bytes = weight.numel() * stored_dtype.itemsize
        if device_type == "cuda":
            accumulator_bytes = weight.numel() * accum_dtype.itemsize
        if live:
            # Chunks as large as the two halves; of LIVE_ROWS, where those are small.
            wanted = LIVE_ROWS * row_bytes(weight.shape[0], compute_dtype, device_type)
            cast_bytes = max(weight.numel() * 2 * stored_dtype.itemsize, min(wanted, LIVE_BYTES))
            # What several chunks would need and one does not: the second half, and such a chunk.
            accumulator_bytes = weight.numel() * stored_dtype.itemsize + cast_bytes
    return chunking.chunk_budget_bytes(
        device_type,
        need_grad_weight=needs.weight,
        need_grads=bool(needs),
        final_cast_bytes=cast_bytes,
        accumulator_bytes=accumulator_bytes,
        whole_bytes=whole_bytes,
        override_bytes=override_bytes,
        budget=budget,
    )


def backward_budget(
    num_rows: int,
    device_type: str,
    weight: Tensor,
    needs: GradientNeeds,
    compute_dtype: torch.dtype,
    accum: str,
    budget: chunking.Budget | None = None,
    *,
    beside: float = 0.0,
) -> chunking.Budget | None:
    """Caps on a chunk of a forward whose gradients its backward makes: those of the backward.

    A gradient must be made from the very logits that its statistics were made of: one that is
    rounded otherwise moves the probability of a confident row away from 1 by percents. Products of
    the same shape round alike. Where there is no gradient to come, ``budget`` as it is.
    """
    if not needs:
        return budget
    whole_bytes = 0
    if not beside:
        whole_bytes = num_rows * row_bytes(weight.shape[0], compute_dtype, device_type)
    same = _budget_bytes(device_type, weight, needs, compute_dtype, accum, whole_bytes, budget)
    return chunking.Budget(same, same, same)


def empty_kept(input: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    """Room for the logits of all rows as the loop lays them out: ``[..., padded V]``.

    Args:
        input: ``[..., D]``.
        num_classes: V.
        dtype: Of the logits.

    Returns:
        Memory without values but for the padding, which is zeros: what an op returns is a value.
    """
    padded = padded_classes(num_classes, dtype)
    made = input.new_empty((*input.shape[:-1], padded), dtype=dtype)
    if padded != num_classes:
        made[..., num_classes:].zero_()
    return made


def empty(like: Tensor) -> Tensor:
    """What stands for a gradient that was not asked for."""
    return like.new_empty(0)


def row_major(weight: Tensor) -> bool:
    """Whether a ``[V, D]`` gradient is laid out row by row, like its weight.

    Always with a single row, whose stride says nothing: as the transpose of a ``[D, 1]`` buffer its
    leading dimension would be 1, which cublasLt refuses for D rows.
    """
    return weight.shape[0] == 1 or weight.stride(0) >= weight.stride(1)


def empty_grad_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A dense ``[V, D]`` buffer in the order of the weight's strides.

    A head stored ``[D, V]`` reaches the op as its transpose; its gradient must come back in the
    same layout, or autograd would copy it.
    """
    num_classes, hidden = weight.shape
    if row_major(weight):
        return weight.new_empty((num_classes, hidden), dtype=dtype)
    return weight.new_empty((hidden, num_classes), dtype=dtype).t()


def _accumulate(out: Tensor, left: Tensor, right: Tensor, first: bool, alpha: float) -> None:
    """``out = (0 if first else out) + alpha * left @ right`` without a temporary of out's size."""
    if not row_major(out):
        out, left, right = out.t(), right.t(), left.t()
    if left.dtype == right.dtype == out.dtype:
        # beta=0 reads nothing: what the fresh buffer holds, NaN too, does not matter.
        torch.addmm(out, left, right, beta=0 if first else 1, alpha=alpha, out=out)
    elif out.is_cuda and out.dtype == torch.float32:
        # cuBLAS multiplies bf16 or fp16 and adds into fp32 in the product's own epilogue.
        torch.addmm(
            out, left, right, out_dtype=out.dtype, beta=0 if first else 1, alpha=alpha, out=out
        )
    else:
        torch.addmm(
            out, left.to(out.dtype), right.to(out.dtype), beta=0 if first else 1, alpha=alpha,
            out=out,
        )  # fmt: skip


def class_parts(num_classes: int, compute_dtype: torch.dtype, device_type: str) -> list[slice]:
    """Columns of logits that one product makes: two parts where their number is odd for cuBLAS.

    Its 16-bit products take five times as long when a size is no multiple of 8, aligned rows or
    not (docs/performance.md, "Small shapes"): the last few columns have products of their own.
    """
    odd = num_classes % 8 if device_type == "cuda" and compute_dtype.itemsize == 2 else 0
    if odd == 0 or num_classes < 64:
        return [slice(0, num_classes)]
    return [slice(0, num_classes - odd), slice(num_classes - odd, num_classes)]


# Room for a dense product that `_rounded_once` then moves to its place, or a quarter of the chunk:
# with few rows each product would read the whole head for little work.
DENSE_BYTES = 32 * chunking.MIB


def _rounded_once(out: Tensor, bias: Tensor, rows: Tensor, weight: Tensor) -> None:
    """``out = rows @ weight.T + bias`` where the rows of ``out`` are padded.

    cuBLAS adds a bias before it rounds only into dense memory; elsewhere the product is rounded
    first, and logits are off by 6% more (H200, torch 2.11, bf16).
    """
    most = max(DENSE_BYTES // (out.shape[1] * out.element_size()), out.shape[0] // 4, 1)
    dense = out.new_empty(min(most, out.shape[0]), out.shape[1])
    for here, source in zip(out.split(most), rows.split(most), strict=True):
        here.copy_(torch.addmm(bias, source, weight.t(), out=dense[: len(here)]))


def _parts(rows: int, most: int) -> list[slice]:
    """Cut rows into pieces of at most ``most``, a short rest joined to its neighbour."""
    pieces = max((rows + most // 2) // most, 1)
    size = most if pieces > 1 else rows
    return [
        slice(index * size, rows if index == pieces - 1 else (index + 1) * size)
        for index in range(pieces)
    ]


def _rows_in_gradient(weight: Tensor, dtype: torch.dtype) -> int:
    """Rows of logits that the memory of ``grad_weight`` holds."""
    from greyhound_ops.kernels import panels  # Triton is not there on every platform

    return panels.rows_in_gradient(weight.shape[1], dtype)


def _empty_for_panels(weight: Tensor, dtype: torch.dtype) -> Tensor:
    from greyhound_ops.kernels import panels

    return panels.empty_gradient(weight, dtype)


def _panel_elements(rows: int, num_classes: int) -> int:
    """Elements of a chunk in panels, and of one row to begin where other memory's rows do."""
    from greyhound_ops.kernels import panels

    return panels.elements(rows, num_classes) + panels.WIDTH if rows else 0


class ChunkMemory:
    """One allocation for the chunks of loops that run in turn, made when it is first needed.

    Args:
        whole: Memory of all rows instead, ``[N, padded V]``, in which every chunk has its place.
    """

    def __init__(self, whole: Tensor | None = None) -> None:
        self._elements = 0
        self._tensor: Tensor | None = None if whole is None else whole.view(-1)
        self.is_whole = whole is not None

    def reserve(self, elements: int) -> None:
        """Be at least so large; before the first use."""
        self._elements = max(self._elements, elements)

    def tensor(self, like: Tensor) -> Tensor:
        """The memory, flat, in the dtype and on the device of a tensor."""
        if self._tensor is None:
            self._tensor = like.new_empty(self._elements)
        return self._tensor

    def free(self) -> None:
        """Let go of the memory, until it is needed again."""
        self._tensor = None


class ChunkLoop:
    """Projects rows chunk by chunk and folds each chunk's logits gradient.

    Args:
        input: ``[N, D]``.
        weight: ``[V, D]``.
        bias: ``[V]`` or None.
        needs: Gradients to make.
        compute_dtype: Dtype of the products and of the logits.
        accum: ``"fp32"`` or ``"weight"``.
        chunk_size: Rows per chunk, or None for the plan.
        gain: Factor that the logits gradients carry; taken off by the products.
        spare_fp16: Keep an fp16 accumulator ``FP16_ACCUM_GAIN`` times too small, for a caller that
            multiplies it back in float32.
        beside: Further buffers of a chunk's size that the caller keeps beside this one, as a share
            of it; the budget is for all of them.
        budget: Caps on the bytes of a chunk, None for those of `chunking`.
        chunk: Memory of the chunk, to be shared with loops that run in turn; None for its own.
        sums: A loop over the same weight and bias, into whose ``grad_weight`` and ``grad_bias``
            this one folds; None for its own.
        shared_sums: Whether other loops fold into this one.
        like: A loop over the same weight, whose copy in the dtype of the products is used again;
            None for ``sums``.
        grad_input: Where ``grad_input`` goes, ``[N, D]``; None for a buffer of its own.
        live: The gradients are made by `live_loop`, which keeps the sum in `live_sums`. Unless the
            caller wishes rows per chunk, the logits of the first ones lie in the memory of
            ``grad_weight`` (`kernels.panels`), and `own_rows` says how many.
        may_keep_gradient: Where the logits gradient of all rows takes no more than a float32 sum
            over chunks would, keep it and take ``grad_weight`` by one product in `finish`. The
            chunk is then part of it, so that it must be this loop's own, and every row must be
            folded.
    """

    def __init__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        needs: GradientNeeds,
        compute_dtype: torch.dtype,
        accum: str,
        chunk_size: int | None,
        gain: float,
        spare_fp16: bool = False,
        beside: float = 0.0,
        budget: chunking.Budget | None = None,
        chunk: ChunkMemory | None = None,
        sums: ChunkLoop | None = None,
        shared_sums: bool = False,
        like: ChunkLoop | None = None,
        grad_input: Tensor | None = None,
        live: bool = False,
        may_keep_gradient: bool = False,
    ) -> None:
        self.num_rows = input.shape[0]
        self.needs = needs
        self.gain = gain
        self._input_dtype = input.dtype
        self._input = input.to(compute_dtype)
        like = sums if like is None else like
        copy = weight if like is None else like.operands[1]
        self._weight = (copy if copy.dtype == compute_dtype else weight).to(compute_dtype)
        if 1 not in self._weight.stride() and self._weight.numel() > 1:
            self._weight = self._weight.contiguous()  # once, not once a chunk inside the product
        # Kernels read a bias without strides: one number expanded, or a column, would be another.
        self._bias = None if bias is None else bias.to(compute_dtype).contiguous()
        num_classes = weight.shape[0]
        accum_dtype = accumulator_dtype(weight.dtype, compute_dtype, accum)
        self._stored_dtype = stored_weight_dtype(weight.dtype, compute_dtype, accum)
        self._weight_gain = gain
        if spare_fp16 and accum_dtype == torch.float16:
            self._weight_gain = gain * FP16_ACCUM_GAIN
        self._grad_input_rows = max(GRAD_INPUT_ELEMENTS // max(weight.shape[1], 1), 128)

        a_row = row_bytes(num_classes, compute_dtype, input.device.type, beside)
        self.own_rows = 0
        self.in_place = live and chunk_size is None
        if self.in_place:
            self.own_rows = min(self.num_rows, _rows_in_gradient(weight, self._stored_dtype))
        rest = self.num_rows - self.own_rows
        self.rows = self.own_rows + chunking.chunk_rows(
            rest,
            a_row,
            _budget_bytes(
                input.device.type,
                weight,
                needs,
                compute_dtype,
                accum,
                # One chunk of all rows only where its gradient takes the place of the logits.
                0 if may_keep_gradient or shared_sums or beside else rest * a_row,
                budget,
                settings().chunk_budget_bytes,
                live,
            ),
            chunk_size,
        )
        single = self.rows >= self.num_rows and not shared_sums
        if single and input.is_cuda and self._stored_dtype == compute_dtype:
            # One product, summed up in float32 inside, is the gradient: nothing to accumulate.
            accum_dtype = compute_dtype
        self.keeps_gradient = (
            may_keep_gradient
            and needs.weight
            and not (single or shared_sums or live)
            and keeping_is_less(
                self.num_rows,
                weight.shape,
                input.device.type,
                weight_dtype=weight.dtype,
                compute_dtype=compute_dtype,
                accum=accum,
            )
        )
        if live:
            self._keeps_low = not single and accum == "fp32" and self._stored_dtype == compute_dtype
            accum_dtype = self._stored_dtype

        if grad_input is None and needs.input:
            grad_input = input.new_empty(input.shape)
        self.grad_input = grad_input
        # No reference to itself: a cycle would keep input and gradients until the next collection.
        self._others_sums = sums
        self._begun = False  # whether the accumulator holds anything yet
        own = sums is None
        self._accumulator: Tensor | None = None
        if own and needs.weight and self.in_place:
            self._accumulator = _empty_for_panels(weight, accum_dtype)
        elif own and needs.weight and not self.keeps_gradient:
            self._accumulator = empty_grad_weight(weight, accum_dtype)
        self._head = weight if self.keeps_gradient else None  # its layout, for `finish`
        self._kept_rows = 0
        self.grad_bias = (
            torch.zeros(num_classes, dtype=stored_bias_dtype(bias.dtype), device=bias.device)
            if own and needs.bias and bias is not None
            else None
        )
        self._chunk = ChunkMemory() if chunk is None else chunk
        self._num_classes = num_classes
        self._class_parts = class_parts(num_classes, compute_dtype, input.device.type)
        self._padded = padded_classes(num_classes, compute_dtype)
        held_rows = self.num_rows if self.keeps_gradient else min(self.rows, self.num_rows)
        if self.in_place:
            self._chunk.reserve(_panel_elements(held_rows - self.own_rows, num_classes))
        else:
            self._chunk.reserve(held_rows * self._padded)

    def live_sums(self) -> tuple[Tensor, Tensor | None]:
        """Where ``grad_weight`` is summed up: the gradient, and what its dtype cannot hold."""
        assert self._accumulator is not None
        self._begun = True
        return self._accumulator, torch.empty_like(self._accumulator) if self._keeps_low else None

    def spans(self, rows: int | None = None) -> list[tuple[int, int]]:
        """Start and stop row of every chunk, in order; of ``rows`` rows instead of the plan's.

        The first chunk has `own_rows` more than the others.
        """
        rows = self.rows - self.own_rows if rows is None else rows
        starts = [0, *range(self.own_rows + rows, self.num_rows, max(rows, 1))]
        stops = [*starts[1:], self.num_rows]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if stop > start]

    @property
    def chunk_memory(self) -> Tensor:
        """The chunk, flat."""
        return self._chunk.tensor(self._input)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Input, weight and bias as the products see them."""
        return self._input, self._weight, self._bias

    def buffer(self, start: int, stop: int) -> Tensor:
        """Room for ``[stop - start, V]`` logits; all chunks share it, unless gradients are kept."""
        first = start * self._padded if self.keeps_gradient or self._chunk.is_whole else 0
        flat = self._chunk.tensor(self._input)[first : first + (stop - start) * self._padded]
        return flat.view(stop - start, self._padded)[:, : self._num_classes]

    def project(self, start: int, stop: int) -> Tensor:
        """Logits ``[stop - start, V]`` of some rows, in the shared buffer."""
        logits = self.buffer(start, stop)
        rows = self._input[start:stop]
        for part in self._class_parts:
            out, weight = logits[:, part], self._weight[part]
            if self._bias is None:
                torch.mm(rows, weight.t(), out=out)
            elif len(self._class_parts) == 1:
                torch.addmm(self._bias[part], rows, weight.t(), out=out)
            else:
                _rounded_once(out, self._bias[part], rows, weight)
        return logits

    def fold(self, start: int, stop: int, grad_logits: Tensor) -> None:
        """Fold the logits gradient of some rows into the gradients asked for.

        Args:
            start: First row.
            stop: Row after the last.
            grad_logits: ``[stop - start, V]``, ``gain`` times too large; in the dtype of the
                products or, where the products accumulate outside the GEMM, in float32.
        """
        if len(self._class_parts) > 1 and grad_logits.stride(0) % 8 and not self.keeps_gradient:
            # An odd distance between rows costs cuBLAS as much as an odd number of classes.
            grad_logits = self._in_chunk(start, stop, grad_logits)
        self.fold_head(start, stop, grad_logits, self.needs)
        if self.keeps_gradient:
            grad_logits = self.buffer(start, stop)  # the other may have lain under it
        if self.grad_input is not None:
            self.fold_input(grad_logits, self.grad_input[start:stop])

    def fold_head(self, start: int, stop: int, grad_logits: Tensor, needs: GradientNeeds) -> None:
        """Fold the logits gradient of some rows into ``grad_weight`` and ``grad_bias``.

        Args:
            start: First row.
            stop: Row after the last.
            grad_logits: As for `fold`.
            needs: Which of the two.
        """
        sums = self if self._others_sums is None else self._others_sums
        if sums.grad_bias is not None and needs.bias:
            sums.grad_bias += grad_logits.sum(0, dtype=sums.grad_bias.dtype)
        if self.keeps_gradient:
            self._in_chunk(start, stop, grad_logits)
            self._kept_rows += stop - start
        elif sums._accumulator is not None and needs.weight:
            # On the CPU fp32 gradients are kept for an fp32 accumulator; cuBLAS takes bf16 as is.
            rows = self._input[start:stop].to(grad_logits.dtype)
            self._add_to_head(sums._accumulator, grad_logits, rows, not sums._begun)
            sums._begun = True

    def _in_chunk(self, start: int, stop: int, grad_logits: Tensor) -> Tensor:
        """The logits gradient of some rows, where their logits were."""
        room = self.buffer(start, stop)
        # A callable may have made its gradient in the logits themselves, or a view of them with
        # strides of its own, which a copy onto itself would read while it writes.
        if grad_logits.untyped_storage().data_ptr() != room.untyped_storage().data_ptr():
            room.copy_(grad_logits)
        elif grad_logits.data_ptr() != room.data_ptr() or grad_logits.stride() != room.stride():
            room.copy_(grad_logits.clone())
        return room

    def _add_to_head(self, out: Tensor, grad_logits: Tensor, rows: Tensor, first: bool) -> None:
        """Add to ``grad_weight``, or write it."""
        for part in self._class_parts:
            grad = grad_logits[:, part].t()
            _accumulate(out[part], grad, rows, first, 1.0 / self._weight_gain)

    def _times_head(self, out: Tensor, factors: Tensor, first: bool, alpha: float) -> None:
        """``out = (0 if first else out) + alpha * factors @ weight``."""
        for part in self._class_parts:
            _accumulate(out, factors[:, part], self._weight[part], first, alpha)
            first = False

    def _wide_products(self, factors: Tensor, alpha: float) -> Iterator[tuple[slice, Tensor]]:
        """``alpha * factors @ weight`` in float32, some rows at a time."""
        for part in _parts(factors.shape[0], self._grad_input_rows):
            shape = (part.stop - part.start, self._weight.shape[1])
            product = factors.new_empty(shape, dtype=torch.float32)
            self._times_head(product, factors[part], True, alpha)
            yield part, product

    def fold_input(self, grad_logits: Tensor, out: Tensor, *, first: bool = True) -> None:
        """Write ``grad_input`` of some rows, or add to it.

        Args:
            grad_logits: As for `fold`.
            out: ``[rows, D]``; in float32 where it is added to.
            first: Whether ``out`` holds nothing yet.
        """
        grad_logits = grad_logits.to(self._weight.dtype)
        if len(self._class_parts) > 1 and out.dtype.itemsize == 2:
            # Parts of the classes may be all but opposite, a target among the last few and the
            # others, where rows of the head have much in common: their sum is rounded once.
            for part, product in self._wide_products(grad_logits, 1.0 / self.gain):
                out[part] = product
            return
        if out.dtype == self._weight.dtype or (out.is_cuda and out.dtype == torch.float32):
            for part in _parts(out.shape[0], self._grad_input_rows):
                self._times_head(out[part], grad_logits[part], first, 1.0 / self.gain)
            return
        # Rather a [rows, D] temporary than a cast of the whole weight.
        product = grad_logits.new_empty(out.shape)
        # The gain comes off inside the product: fp16 may not hold it with the gain on.
        self._times_head(product, grad_logits, True, 1.0 / self.gain)
        if first:
            out.copy_(product)
        else:
            out += product

    def fold_exponentials(self, start: int, stop: int, source: Any) -> None:
        """Project some rows by exponentials and fold them into ``grad_input``.

        Args:
            start: First row.
            stop: Row after the last.
            source: Called with the shared buffer; fills it with exponentials and returns the
                function that finishes a part: ``(rows, part, product, out)``.
        """
        assert self.grad_input is not None
        chunk = self.buffer(start, stop)
        finish = source(chunk)
        # fp32 between the product and the factor: grad_input is rounded once.
        for part, product in self._wide_products(chunk, 1.0):
            rows = slice(start + part.start, start + part.stop)
            finish(rows, part, product, self.grad_input[rows])

    def free_chunk(self) -> None:
        """Free the chunk, unless it holds what `finish` needs."""
        if not self.keeps_gradient:
            self._chunk.free()

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Free the chunk and return grad_input, grad_weight and grad_bias (None if not wanted)."""
        if self._head is not None:
            assert self._kept_rows == self.num_rows, "every row must be folded"
            self._accumulator = empty_grad_weight(self._head, self._stored_dtype)
            kept = self.buffer(0, self.num_rows)
            self._add_to_head(self._accumulator, kept, self._input, True)
            self._begun = True
            self._head = None
            del kept
        # Before the cast allocates: the peak then counts the larger of the two, not both.
        self._chunk.free()
        grad_weight = self._accumulator
        if grad_weight is not None:
            if not self._begun:
                grad_weight.zero_()
            grad_weight = grad_weight.to(self._stored_dtype)
        self._accumulator = None
        if self.grad_bias is not None and self.gain != 1.0:
            self.grad_bias /= self.gain
        return self.grad_input, grad_weight, self.grad_bias
