"""``greyhound::linear_cross_entropy``: projection and cross entropy, the logits never whole.

Scalar reductions make their gradients in the forward (three matrix products, none repeated) and
the backward scales them. ``reduction="none"`` has a gradient per row that only the backward knows:
``grad_input`` is a per-row product, so with a frozen head it is still made in the forward, while
``grad_weight`` and ``grad_bias`` need the chunks projected once more in the backward, which is one
opaque op of its own.

The file holds, in this order: schemas, implementations, fakes, autograd, flops, registration.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from greyhound_ops import validation
from greyhound_ops.config import settings
from greyhound_ops.ops import gradients, live_loop
from greyhound_ops.ops.chunk_loop import (
    ChunkLoop,
    GradientNeeds,
    backward_budget,
    defers_division,
    empty,
    empty_grad_weight,
    fp16_gain,
    stored_bias_dtype,
    stored_weight_dtype,
)
from greyhound_ops.ops.gradients import use_triton
from greyhound_ops.ops.op import Op, check_flags, check_frozen, in_order, product_flops
from greyhound_ops.ops.rows import check_targets, statistics_dtype

# ------------------------------------------------------------------------------------- schemas

OP = Op(
    "linear_cross_entropy("
    "Tensor input, Tensor weight, Tensor target, Tensor? bias=None, Tensor? class_weight=None, "
    "int ignore_index=-100, str reduction='mean', float label_smoothing=0.0, float z_loss=0.0, "
    "float logit_scale=1.0, float? softcap=None, bool empty_mean_is_nan=False, "
    "SymInt? chunk_size=None, str grad_weight_accum_dtype='fp32', "
    "ScalarType? compute_dtype=None, bool need_grad_input=False, bool need_grad_weight=False, "
    "bool need_grad_bias=False, bool grads_are_private=False, "
    "Tensor? row_weight=None, Tensor? divisor=None, bool return_lse=False"
    ") -> (Tensor loss, Tensor statistics, Tensor denominator, "
    "Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor lse, Tensor row_loss)",
)
OP_BACKWARD = Op(
    "linear_cross_entropy_backward("
    "Tensor grad_loss, Tensor input, Tensor weight, Tensor target, Tensor statistics, "
    "Tensor? bias=None, Tensor? class_weight=None, "
    "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, "
    "float logit_scale=1.0, float? softcap=None, "
    "SymInt? chunk_size=None, str grad_weight_accum_dtype='fp32', "
    "ScalarType? compute_dtype=None, bool need_grad_input=False, bool need_grad_weight=False, "
    "bool need_grad_bias=False, Tensor? grad_lse=None"
    ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
)


@dataclasses.dataclass(frozen=True)
class RowLoss:
    """The loss of one row: what the kernels need beside the tensors."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    logit_scale: float
    softcap: float | None


def _check(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    row_loss: RowLoss,
    reduction: str,
    chunk_size: int | None,
    grad_weight_accum_dtype: str,
    needs: GradientNeeds,
    row_weight: Tensor | None = None,
    divisor: Tensor | None = None,
) -> None:
    validation.check_projection(input, weight, bias)
    validation.check_target(input, target)
    if class_weight is not None:
        validation.check_float_tensor("class_weight", class_weight)
        if class_weight.dim() != 1 or class_weight.shape[0] != weight.shape[0]:
            raise ValueError(
                f"class_weight: expected shape [V] = [{weight.shape[0]}], "
                f"got {list(class_weight.shape)}"
            )
        validation.check_same_device(input, class_weight=class_weight)
    validation.check_options(
        reduction=reduction,
        chunk_size=chunk_size,
        grad_weight_accum_dtype=grad_weight_accum_dtype,
        **vars(row_loss),
    )
    validation.check_row_weight(input, row_weight)
    validation.check_divisor(input, divisor, reduction)
    if needs.bias and bias is None:
        raise ValueError("need_grad_bias: expected False, since bias is None, got True")


def _recomputes(reduction: str, return_lse: bool, needs: GradientNeeds) -> bool:
    """Whether the backward makes the gradients.

    Gradients per row need the upstream of that row before rows are summed up; and the upstream of a
    log-sum-exp is per row whatever the reduction of the loss.
    """
    return bool(needs) and (return_lse or (reduction == "none" and (needs.weight or needs.bias)))


def _made_now(reduction: str, return_lse: bool, needs: GradientNeeds) -> GradientNeeds:
    """The gradients that the forward makes: all or none."""
    if _recomputes(reduction, return_lse, needs):
        return GradientNeeds(False, False, False)
    return needs


# ----------------------------------------------------------------------------- implementations

# Memory of a projection that stores nothing of [rows, V]: rows in the order of those that count,
# and for each tile and row a sum and room for a maximum; 2560 rows at V=128256 and D=4096. Chunks
# of 1024 rows were 6% slower than of 4096 (docs/performance.md, "Forward only").
STATISTICS_BYTES = 30 * 2**20


def statistics_rows(num_classes: int, hidden_size: int) -> int:
    """Rows of one projection that stores nothing of ``[rows, V]``."""
    from greyhound_ops.kernels import exponentials

    tiles = -(-num_classes // exponentials.BLOCK_N)
    rows = STATISTICS_BYTES // (2 * 4 * tiles + 2 * hidden_size)
    return max(rows - rows % exponentials.BLOCK_M, exponentials.BLOCK_M)


def _torch_rows(
    logits: Tensor,
    target: Tensor,
    loss: Tensor,
    statistics: Tensor,
    row_loss: RowLoss,
    *,
    class_weight: Tensor | None,
    class_weight_sum: Tensor | None,
    grad_scale: Tensor | None,
    row_scale: Tensor | None,
    lse_grad: Tensor | None = None,
    gain: float,
    read_statistics: bool,
    write_grad: bool,
) -> Tensor | None:
    """What the Triton kernel does, in PyTorch operators; the formulas are derived there.

    Writes over ``logits`` and holds at most two ``[C, V]`` buffers of the statistics' dtype.

    Returns:
        The logits gradient ``[C, V]`` in the dtype of the statistics, or None.
    """
    num_classes = logits.shape[1]
    z = logits.to(loss.dtype)
    if row_loss.logit_scale != 1.0:
        z.mul_(row_loss.logit_scale)
    if row_loss.softcap is not None:
        z.div_(row_loss.softcap).tanh_().mul_(row_loss.softcap)

    ignored = target == row_loss.ignore_index
    in_range = (target >= 0) & (target < num_classes)
    safe_target = target.masked_fill(~in_range, 0).long()
    hard = torch.ones_like(loss) if class_weight is None else class_weight[safe_target]
    more = torch.zeros_like(loss)
    smooth = row_loss.label_smoothing / num_classes
    if row_loss.label_smoothing:
        hard = hard * (1.0 - row_loss.label_smoothing)
        total_weight = num_classes if class_weight_sum is None else class_weight_sum
        more = more + smooth * total_weight
    poison = torch.where(in_range, 0.0, float("nan")).to(loss.dtype)

    # The cap's derivative needs z once more; without a cap z is free to be overwritten.
    keep_z = row_loss.softcap is not None and write_grad
    shift, log_sum = statistics
    if read_statistics:
        probabilities = torch.sub(z, shift.unsqueeze(1), out=None if keep_z else z)
        probabilities.sub_(log_sum.unsqueeze(1)).exp_()
    else:
        top = z.amax(1)
        reference = torch.where(top == -torch.inf, 0.0, top)
        z_target = z.gather(1, safe_target.unsqueeze(1)).squeeze(1)
        smoothed = None
        if row_loss.label_smoothing:
            smoothed = z.sum(1) if class_weight is None else z @ class_weight
        exponentials = torch.sub(z, reference.unsqueeze(1), out=None if keep_z else z).exp_()
        total = exponentials.sum(1)
        row_log_sum = total.log()
        # Not through the log-sum-exp: at logits of 1e4 its last bit is 1e-3 in float32.
        row = hard * (row_log_sum - (z_target - reference))
        if smoothed is not None:
            row = row + smooth * (total_weight * (reference + row_log_sum) - smoothed)
        if row_loss.z_loss:
            row = row + row_loss.z_loss * (reference + row_log_sum).square()
        loss.copy_((row + poison).masked_fill(ignored, 0.0))
        shift.copy_(reference.masked_fill(ignored, 0.0))
        log_sum.copy_(row_log_sum.masked_fill(ignored, 0.0))
        if not write_grad:
            return None
        probabilities = exponentials.div_(total.unsqueeze(1))

    if row_loss.z_loss:
        more = more + 2.0 * row_loss.z_loss * (shift + log_sum)
    upstream = torch.ones_like(shift) if grad_scale is None else grad_scale.expand_as(shift)
    if row_scale is not None:
        upstream = upstream * row_scale
    hard, more = hard * upstream, more * upstream
    if lse_grad is not None:
        more = more + lse_grad  # dlse/dz_j = p_j
    at_target = probabilities.gather(1, safe_target.unsqueeze(1)).squeeze(1)
    at_target = hard * (at_target - 1.0) + more * at_target  # in this order, see the kernel
    grad = probabilities.mul_((hard + more).unsqueeze(1))
    grad.scatter_(1, safe_target.unsqueeze(1), at_target.unsqueeze(1))
    if row_loss.label_smoothing:
        by_class = (smooth * upstream).unsqueeze(1)
        if class_weight is None:
            grad.sub_(by_class)
        else:
            grad.addcmul_(by_class, class_weight.unsqueeze(0), value=-1.0)
    if row_loss.softcap is not None:
        grad.mul_(z.div_(row_loss.softcap).square_().neg_().add_(1.0))
    scale = (poison + gain) * row_loss.logit_scale
    return grad.mul_(scale.unsqueeze(1)).masked_fill_(ignored.unsqueeze(1), 0.0)


def row_losses(
    logits: Any,
    target: Tensor,
    loss: Tensor,
    statistics: Tensor,
    row_loss: RowLoss,
    **kwargs: Any,
) -> Any:
    """Losses of a chunk and its logits gradient, by Triton (in place) or by PyTorch.

    ``logits`` are a tensor or, where Triton's kernels run, panels.
    """
    if not use_triton(logits.dtype, logits.device.type):
        grad = _torch_rows(logits, target, loss, statistics, row_loss, **kwargs)
        if grad is None:
            return logits
        # cuBLAS accumulates the products' own dtype in fp32; elsewhere the fp32 gradient is kept.
        return logits.copy_(grad) if logits.is_cuda else grad
    from greyhound_ops.kernels import cross_entropy  # Triton is not there on every platform

    cross_entropy.cross_entropy(
        logits, target, loss, statistics, **kwargs, **dataclasses.asdict(row_loss)
    )
    return logits


def _lacks_a_factor(needs: GradientNeeds, label_smoothing: float) -> bool:
    """Whether a factor per row is all that exponentials lack, so that it may come at the end.

    Not where weight or bias get a gradient, which sum rows up. Label smoothing gives every element
    a share that no factor per row can supply later.
    """
    return not (needs.weight or needs.bias or label_smoothing)


def _exponentials(
    loop: ChunkLoop,
    target: Tensor,
    row_loss: RowLoss,
    class_weight: Tensor | None,
    divisor: Divisor,
) -> tuple[Any, live_loop.LiveRows | None]:
    """The path that never stores logits, where it can serve, and its rows that count; else None.

    It serves where `_lacks_a_factor` says so.
    """
    input, weight, bias = loop.operands
    if not _lacks_a_factor(loop.needs, row_loss.label_smoothing):
        return None, None
    if not use_triton(input.dtype, input.device.type):
        return None, None
    from greyhound_ops.kernels import exponentials, products

    if not exponentials.supported(input, weight, interpreted=settings().kernels == "triton"):
        return None, None
    options = dataclasses.asdict(row_loss)
    del options["label_smoothing"]
    live = kernels = None
    if live_loop.worth_it(input, weight):
        live = live_loop.LiveRows(target, row_loss.ignore_index, input)
        kernels = products.Products(weight, bias, live.order, live.count)
    source = exponentials.Exponentials(
        input,
        weight,
        bias,
        target if live is None else live.labels,
        class_weight=class_weight,
        grad_scale=lambda: divisor.reciprocal,
        live=kernels,
        **options,
    )
    return source, live


@dataclasses.dataclass(frozen=True)
class _ExponentialChunk:
    """One chunk's way through `kernels.exponentials`, for `ChunkLoop.fold_exponentials`."""

    source: Any
    start: int
    stop: int
    loss: Tensor
    statistics: Tensor
    row_weight: Tensor | None

    def __call__(self, chunk: Tensor) -> Any:
        factor, hard = self.source.exponentials(
            self.start, self.stop, chunk, self.loss, self.statistics
        )
        if self.row_weight is not None:
            factor *= self.row_weight[self.start : self.stop]
            hard *= self.row_weight[self.start : self.stop]

        def finish(rows: slice, part: slice, product: Tensor, out: Tensor) -> None:
            self.source.grad_input(rows, product, factor[part], hard[part], out)

        return finish


class Divisor:
    """What a loss over all rows is divided by, made on the device when it is first asked for.

    The small kernels it takes are launched behind the first projection, not before it.

    Args:
        target: ``[N]``.
        class_weight: ``[V]`` in the statistics' dtype, or None.
        row_weight: ``[N]`` in the statistics' dtype, or None.
        ignore_index: Target of rows that do not count.
        mean: Whether anything is divided at all.
        given: The caller's own divisor, or None.
        dtype: Of the statistics.
    """

    def __init__(
        self,
        target: Tensor,
        class_weight: Tensor | None,
        row_weight: Tensor | None,
        ignore_index: int,
        mean: bool,
        given: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self._target, self._class_weight, self._row_weight = target, class_weight, row_weight
        self._ignore_index, self._mean, self._given = ignore_index, mean, given
        self._dtype = dtype

    @functools.cached_property
    def _parts(self) -> tuple[Tensor, Tensor | None]:
        """The divisor, and whether nothing counts (None where that does not matter)."""
        if self._given is not None:
            return self._given.to(self._dtype), None
        counts = self._target != self._ignore_index
        number = counts.sum(dtype=self._dtype)
        nothing = number == 0
        if self._class_weight is None and self._row_weight is None:
            return number, nothing
        weights = torch.ones((), dtype=self._dtype, device=self._target.device)
        if self._class_weight is not None:
            last = self._class_weight.shape[0] - 1
            weights = self._class_weight[self._target.clamp(0, last)]
        if self._row_weight is not None:
            weights = weights * self._row_weight
        # By choice and not by product: the weight of a row that does not count may be NaN.
        return torch.where(counts, weights, 0.0).sum(), nothing

    @functools.cached_property
    def reciprocal(self) -> Tensor | None:
        """One over the divisor, or None where nothing is divided."""
        return self._parts[0].reciprocal() if self._mean else None

    def apply(self, total: Tensor, empty_is_nan: bool) -> tuple[Tensor, Tensor]:
        """The loss, and the divisor for a backward that has still to divide."""
        if not self._mean:
            return total, torch.ones((), dtype=self._dtype, device=total.device)
        divisor, nothing = self._parts
        loss = total / divisor
        if nothing is None:
            return loss, divisor.clone()
        if not empty_is_nan:
            loss = torch.where(nothing, 0.0, loss)
        # Where nothing counts there is nothing to divide either: 0 / 0 must not reach a gradient.
        return loss, torch.where(nothing, 1.0, divisor)


def _forward_loop(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: GradientNeeds,
    made_now: GradientNeeds,
    *,
    compute_dtype: torch.dtype,
    accum: str,
    chunk_size: int | None,
    gain: float,
    live: bool = False,
) -> ChunkLoop:
    """The chunks of a forward: of its own gradients, or of those that its backward makes."""
    budget = None
    if not made_now:
        budget = backward_budget(
            rows.shape[0], rows.device.type, weight, needs, compute_dtype, accum
        )
    return ChunkLoop(
        rows,
        weight,
        bias,
        needs=made_now,
        compute_dtype=compute_dtype,
        accum=accum,
        chunk_size=chunk_size,
        gain=gain,
        spare_fp16=True,
        budget=budget,
        live=live,
    )


def planned_rows(call: Any) -> int:
    """Rows of one chunk of a call, for the report of the rewrite; takes fake tensors.

    A loss alone may take a kernel that cuts its rows otherwise.

    Args:
        call: Arguments by name, as `Op.named` gives them.

    Returns:
        Rows.
    """
    needs = GradientNeeds(call.need_grad_input, call.need_grad_weight, call.need_grad_bias)
    made_now = _made_now(call.reduction, call.return_lse, needs)
    rows = call.input.reshape(-1, call.input.shape[-1])
    compute_dtype = validation.resolve_compute_dtype(call.input, call.weight, call.compute_dtype)
    loop = _forward_loop(
        rows,
        call.weight,
        call.bias,
        needs,
        made_now,
        compute_dtype=compute_dtype,
        accum=call.grad_weight_accum_dtype,
        chunk_size=call.chunk_size,
        gain=1.0,
        live=live_loop.serves(rows, call.weight, made_now, compute_dtype),
    )
    return loop.rows


def _forward(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    empty_mean_is_nan: bool = False,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
    compute_dtype: torch.dtype | None = None,
    need_grad_input: bool = False,
    need_grad_weight: bool = False,
    need_grad_bias: bool = False,
    grads_are_private: bool = False,
    row_weight: Tensor | None = None,
    divisor: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, ...]:
    row_loss = RowLoss(ignore_index, label_smoothing, z_loss, logit_scale, softcap)
    needs = GradientNeeds(need_grad_input, need_grad_weight, need_grad_bias)
    _check(
        input, weight, target, bias, class_weight, row_loss, reduction, chunk_size,
        grad_weight_accum_dtype, needs, row_weight, divisor,
    )  # fmt: skip
    compute_dtype = validation.resolve_compute_dtype(input, weight, compute_dtype)
    dtype = statistics_dtype(compute_dtype)
    rows = input.reshape(-1, input.shape[-1])
    labels = target.reshape(-1).long()  # an ignore_index beyond int32 must not wrap round
    num_rows, num_classes = rows.shape[0], weight.shape[0]
    check_targets(labels, num_classes, ignore_index)
    if class_weight is not None:
        class_weight = class_weight.to(dtype).contiguous()
    if row_weight is not None:
        row_weight = row_weight.reshape(-1).to(dtype)

    made_now = _made_now(reduction, return_lse, needs)
    deferred = defers_division(compute_dtype)
    live = None
    if live_loop.serves(rows, weight, made_now, compute_dtype):
        live = live_loop.LiveRows(labels, ignore_index, rows)
    loop = _forward_loop(
        rows,
        weight,
        bias,
        needs,
        made_now,
        compute_dtype=compute_dtype,
        accum=grad_weight_accum_dtype,
        chunk_size=chunk_size,
        gain=fp16_gain(logit_scale) if deferred and made_now else 1.0,
        live=live is not None,
    )
    loss = input.new_empty(num_rows, dtype=dtype)
    statistics = input.new_empty((2, num_rows), dtype=dtype)
    divides = Divisor(
        labels, class_weight, row_weight, ignore_index, reduction == "mean", divisor, dtype
    )
    divides_now = bool(made_now) and not deferred
    # fp16 again: a class weight of 300 times the gain would leave its range before it is divided.
    largest_weight = None
    for weights in (class_weight, row_weight if num_rows else None):
        if deferred and made_now and weights is not None:
            largest = weights.abs().amax().clamp_min(1.0)
            largest_weight = largest if largest_weight is None else largest_weight * largest
    grad_scale = None if largest_weight is None else largest_weight.reciprocal()
    exponentials = None
    if made_now or not needs:
        # Not where the backward makes the gradients: it reads logits rounded to bf16, and with
        # statistics of unrounded ones the gradient of a confident row would be off by percents.
        exponentials, live_frozen = _exponentials(loop, labels, row_loss, class_weight, divides)
        live = live_frozen if live is None else live
    class_weight_sum = None if class_weight is None else class_weight.sum()

    def row_pass(
        start: int,
        stop: int,
        logits: Any,
        labels: Tensor,
        row_weight: Tensor | None,
        **rows: Any,
    ) -> Any:
        return row_losses(
            logits,
            labels[start:stop],
            loss[start:stop],
            statistics[:, start:stop],
            row_loss,
            class_weight=class_weight,
            class_weight_sum=class_weight_sum,
            grad_scale=divides.reciprocal if divides_now else grad_scale,
            row_scale=None if row_weight is None else row_weight[start:stop],
            gain=loop.gain,
            read_statistics=False,
            write_grad=bool(made_now),
            **rows,
        )

    spans = loop.spans()
    if exponentials is not None and not made_now and chunk_size is None:
        spans = loop.spans(statistics_rows(*weight.shape))
    live_weight = row_weight
    if live is not None and row_weight is not None:
        live_weight = live.take(row_weight)
    partial_sums = None
    if live is not None and exponentials is not None and made_now:
        partial_sums = exponentials.live.partial_sums()
    if live is not None and exponentials is None:

        def live_pass(start: int, stop: int, logits: Any) -> None:
            row_pass(
                start, stop, logits, live.labels, live_weight, live=live.count, live_start=start
            )

        if divides_now:
            # Made on the caller's stream, which reads it again behind the join.
            divides.reciprocal  # noqa: B018
        live_loop.run(loop, live, live_pass)
        spans = []
    for start, stop in spans:
        results = loss[start:stop], statistics[:, start:stop]
        if partial_sums is not None:
            live_loop.fold_exponentials(
                loop, exponentials, partial_sums, start, stop, *results,
                None if live_weight is None else live_weight[start:stop],
            )  # fmt: skip
        elif exponentials is not None and made_now:
            chunk = _ExponentialChunk(exponentials, start, stop, *results, row_weight)
            loop.fold_exponentials(start, stop, chunk)
        elif exponentials is not None:
            exponentials.losses(start, stop, *results)
        else:
            logits = loop.project(start, stop)
            grad_logits = row_pass(start, stop, logits, labels, row_weight)
            if made_now:
                loop.fold(start, stop, grad_logits)
            del logits, grad_logits  # or the chunk would outlive the loop, into the final cast
    grad_input, grad_weight, grad_bias = loop.finish()
    if live is not None:
        loss, statistics = live.restore(loss), live.restore(statistics)

    weighted = loss
    if row_weight is not None:
        weighted = torch.where(labels == ignore_index, 0.0, loss * row_weight)
    total = weighted.reshape(target.shape) if reduction == "none" else weighted.sum()
    result, denominator = divides.apply(total, empty_mean_is_nan)
    if reduction == "none" and row_weight is None:
        result = result.clone()  # two outputs may not share memory
    stored = denominator if largest_weight is None else denominator / largest_weight
    return (
        result,
        statistics.reshape(2, *target.shape),
        torch.stack([denominator, stored]),
        empty(input) if grad_input is None else grad_input.reshape(input.shape),
        empty(weight) if grad_weight is None else grad_weight,
        empty(input if bias is None else bias) if grad_bias is None else grad_bias,
        statistics.sum(0).reshape(target.shape) if return_lse else empty(loss),
        loss.reshape(target.shape),
    )


def _backward_by_row(
    grad_loss: Tensor,
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    statistics: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
    compute_dtype: torch.dtype | None = None,
    need_grad_input: bool = False,
    need_grad_weight: bool = False,
    need_grad_bias: bool = False,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    row_loss = RowLoss(ignore_index, label_smoothing, z_loss, logit_scale, softcap)
    needs = GradientNeeds(need_grad_input, need_grad_weight, need_grad_bias)
    _check(
        input, weight, target, bias, class_weight, row_loss, "none", chunk_size,
        grad_weight_accum_dtype, needs,
    )  # fmt: skip
    compute_dtype = validation.resolve_compute_dtype(input, weight, compute_dtype)
    dtype = statistics_dtype(compute_dtype)
    rows = input.reshape(-1, input.shape[-1])
    if statistics.shape != (2, *target.shape):
        raise ValueError(
            f"statistics: expected shape {[2, *target.shape]}, as the forward returned them, "
            f"got {list(statistics.shape)}"
        )
    labels, statistics = target.reshape(-1).long(), statistics.reshape(2, -1)
    upstream = grad_loss.reshape(-1)
    if grad_lse is not None:
        grad_lse = grad_lse.reshape(-1)
    if class_weight is not None:
        class_weight = class_weight.to(dtype).contiguous()
    loop = ChunkLoop(
        rows,
        weight,
        bias,
        needs=needs,
        compute_dtype=compute_dtype,
        accum=grad_weight_accum_dtype,
        chunk_size=chunk_size,
        gain=1.0,  # the upstream gradient brings its own scale, a GradScaler's for one
    )
    class_weight_sum = None if class_weight is None else class_weight.sum()
    unused = statistics[0]  # the kernel writes no loss when it reads the statistics
    for start, stop in loop.spans():
        grad_logits = row_losses(
            loop.project(start, stop),
            labels[start:stop],
            unused[start:stop],
            statistics[:, start:stop],
            row_loss,
            class_weight=class_weight,
            class_weight_sum=class_weight_sum,
            grad_scale=None,
            row_scale=upstream[start:stop],
            lse_grad=None if grad_lse is None else grad_lse[start:stop],
            gain=1.0,
            read_statistics=True,
            write_grad=True,
        )
        loop.fold(start, stop, grad_logits)
        del grad_logits
    grad_input, grad_weight, grad_bias = loop.finish()
    return (
        empty(input) if grad_input is None else grad_input.reshape(input.shape),
        empty(weight) if grad_weight is None else grad_weight.to(weight.dtype),
        empty(input) if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


# --------------------------------------------------------------------------------------- fakes


def _check_named(call: Any, reduction: str) -> tuple[GradientNeeds, torch.dtype]:
    needs = GradientNeeds(call.need_grad_input, call.need_grad_weight, call.need_grad_bias)
    row_loss = RowLoss(
        call.ignore_index, call.label_smoothing, call.z_loss, call.logit_scale, call.softcap
    )
    _check(
        call.input, call.weight, call.target, call.bias, call.class_weight, row_loss, reduction,
        call.chunk_size, call.grad_weight_accum_dtype, needs,
        getattr(call, "row_weight", None), getattr(call, "divisor", None),
    )  # fmt: skip
    dtype = validation.resolve_compute_dtype(call.input, call.weight, call.compute_dtype)
    return needs, dtype


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = OP.named(args, kwargs)
    needs, compute_dtype = _check_named(call, call.reduction)
    input, weight, target, bias = call.input, call.weight, call.target, call.bias
    dtype = statistics_dtype(compute_dtype)
    by_row = call.reduction == "none"
    made_now = not _recomputes(call.reduction, call.return_lse, needs)
    stored = stored_weight_dtype(weight.dtype, compute_dtype, call.grad_weight_accum_dtype)
    return (
        input.new_empty(target.shape if by_row else (), dtype=dtype),
        input.new_empty((2, *target.shape), dtype=dtype),
        input.new_empty(2, dtype=dtype),
        input.new_empty(input.shape) if needs.input and made_now else empty(input),
        empty_grad_weight(weight, stored) if needs.weight and made_now else empty(weight),
        bias.new_empty(bias.shape, dtype=stored_bias_dtype(bias.dtype))
        if needs.bias and made_now
        else empty(input if bias is None else bias),
        input.new_empty(target.shape if call.return_lse else 0, dtype=dtype),
        input.new_empty(target.shape, dtype=dtype),
    )


def _fake_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = OP_BACKWARD.named(args, kwargs)
    needs, _ = _check_named(call, "none")
    input, weight, bias = call.input, call.weight, call.bias
    return (
        input.new_empty(input.shape) if needs.input else empty(input),
        empty_grad_weight(weight, weight.dtype) if needs.weight else empty(weight),
        bias.new_empty(bias.shape) if needs.bias else empty(input),
    )


# ------------------------------------------------------------------------------------ autograd

_OPERANDS = ("input", "weight", "bias")
_OPTIONS = OP.arguments[5:]
_READ_AGAIN = ("input", "weight", "target", "bias", "class_weight")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = dict(zip(OP.arguments, inputs, strict=True))
    check_flags(ctx, OP, call, _OPERANDS)
    check_frozen(ctx, OP, ("class_weight", "row_weight", "divisor"))
    _, statistics, denominator, *grads, lse, row_loss = output
    ctx.mark_non_differentiable(statistics, denominator, *grads, row_loss)
    if not call["return_lse"]:
        ctx.mark_non_differentiable(lse)
    # Else autograd would make a zero of [V, D] for the output grad_weight that nobody uses.
    ctx.set_materialize_grads(False)
    needs = {name: call[f"need_grad_{name}"] for name in _OPERANDS}
    ctx.recompute = _recomputes(call["reduction"], call["return_lse"], GradientNeeds(**needs))
    if ctx.recompute:
        ctx.by_row = call["reduction"] == "none"
        ctx.options = {name: call[name] for name in OP_BACKWARD.arguments if name in _OPTIONS}
        ctx.save_for_backward(
            *(call[name] for name in _READ_AGAIN), statistics, denominator, call["row_weight"]
        )
        return
    dtype = validation.resolve_compute_dtype(call["input"], call["weight"], call["compute_dtype"])
    gradients.keep(
        ctx,
        OP.name,
        {name: call[name] for name in _OPERANDS},
        {name: grad if needs[name] else None for name, grad in zip(_OPERANDS, grads, strict=True)},
        denominator=denominator[1] if defers_division(dtype) else None,
        private=call["grads_are_private"],
    )


def _autograd_backward(ctx: Any, grad_loss: Tensor | None, *rest: Tensor | None) -> tuple[Any, ...]:
    grad_lse = rest[-2]
    if grad_loss is None and grad_lse is None:
        return (None,) * len(OP.arguments)
    if not ctx.recompute:
        assert grad_loss is not None
        return in_order(OP, gradients.give(ctx, grad_loss))
    input, weight, target, bias, class_weight, statistics, denominator, row_weight = (
        ctx.saved_tensors
    )
    if grad_loss is None:
        grad_loss = torch.zeros((), dtype=statistics.dtype, device=statistics.device)
    if not ctx.by_row:
        grad_loss = grad_loss / denominator[0]
    grad_loss = grad_loss.expand(target.shape)
    if row_weight is not None:
        grad_loss = grad_loss * row_weight
    given = {
        "grad_loss": grad_loss, "input": input, "weight": weight, "target": target,
        "statistics": statistics, "bias": bias, "class_weight": class_weight,
        **ctx.options, "grad_lse": grad_lse,
    }  # fmt: skip
    made = OP_BACKWARD.inner_call(*(given[name] for name in OP_BACKWARD.arguments))
    return in_order(
        OP,
        {
            name: grad if ctx.options[f"need_grad_{name}"] else None
            for name, grad in zip(_OPERANDS, made, strict=True)
        },
    )


# --------------------------------------------------------------------------------------- flops


def _flops(
    input_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    # Which gradients were made is read off the outputs: one that was not asked for is empty.
    made = sum(1 for shape in out_shape[3:5] if len(shape) > 1)
    return product_flops(input_shape, weight_shape) * (1 + made)


def _flops_backward(
    grad_shape: Any,
    input_shape: Any,
    weight_shape: Any,
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    made = sum(1 for shape in out_shape[:2] if len(shape) > 1)
    return product_flops(input_shape, weight_shape) * (1 + made)


# -------------------------------------------------------------------------------- registration

OP.implement(_forward, _fake)
OP.autograd(_setup_context, _autograd_backward)
OP.autocast()
OP.vmap_by_sample()
OP.flops(_flops)
OP_BACKWARD.implement(_backward_by_row, _fake_backward)
OP_BACKWARD.autograd(*gradients.refuse_twice(OP.name))
OP_BACKWARD.flops(_flops_backward)
