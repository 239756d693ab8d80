"""``greyhound::linear_cross_entropy``: projection and cross entropy, the logits never whole.

Scalar reductions make their gradients in the forward (three matrix products, none repeated) and
the backward scales them. ``reduction="none"`` has a gradient per row that only the backward knows:
``grad_input`` is a per-row product, so with a frozen head it is still made in the forward, while
``grad_weight`` and ``grad_bias`` need the chunks projected once more in the backward, which is one
opaque op of its own.

The file holds, in this order: schemas, implementations, fakes, autograd, autocast, vmap, flops.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from greyhound_ops import torch_private, validation
from greyhound_ops.config import settings
from greyhound_ops.errors import (
    ForwardModeError,
    NotDifferentiableTwiceError,
    TargetOutOfRangeError,
)
from greyhound_ops.ops.chunk_loop import (
    FP16_ACCUM_GAIN,
    ChunkLoop,
    GradientNeeds,
    defers_division,
    empty,
    empty_grad_weight,
    fp16_gain,
    row_major,
    stored_bias_dtype,
    stored_weight_dtype,
)

NAME = "greyhound::linear_cross_entropy"

# ------------------------------------------------------------------------------------- schemas

_LIBRARY = torch.library.Library("greyhound", "FRAGMENT")

_LIBRARY.define(
    "linear_cross_entropy("
    "Tensor input, Tensor weight, Tensor target, Tensor? bias=None, Tensor? class_weight=None, "
    "int ignore_index=-100, str reduction='mean', float label_smoothing=0.0, float z_loss=0.0, "
    "float logit_scale=1.0, float? softcap=None, bool empty_mean_is_nan=False, "
    "SymInt? chunk_size=None, str grad_weight_accum_dtype='fp32', "
    "ScalarType? compute_dtype=None, bool need_grad_input=False, bool need_grad_weight=False, "
    "bool need_grad_bias=False, bool grads_are_private=False"
    ") -> (Tensor loss, Tensor statistics, Tensor denominator, "
    "Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "linear_cross_entropy_backward("
    "Tensor grad_loss, Tensor input, Tensor weight, Tensor target, Tensor statistics, "
    "Tensor? bias=None, Tensor? class_weight=None, "
    "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, "
    "float logit_scale=1.0, float? softcap=None, "
    "SymInt? chunk_size=None, str grad_weight_accum_dtype='fp32', "
    "ScalarType? compute_dtype=None, bool need_grad_input=False, bool need_grad_weight=False, "
    "bool need_grad_bias=False"
    ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@dataclasses.dataclass(frozen=True)
class _RowLoss:
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
    row_loss: _RowLoss,
    reduction: str,
    chunk_size: int | None,
    grad_weight_accum_dtype: str,
    needs: GradientNeeds,
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
        **dataclasses.asdict(row_loss),
    )
    if needs.bias and bias is None:
        raise ValueError("need_grad_bias: expected False, since bias is None, got True")


# ----------------------------------------------------------------------------- implementations

# Rows of one projection that stores nothing but a maximum and a sum per tile and row: 16 MiB of
# those at V=128256. 1024 rows were 6% slower (docs/performance.md, "Forward only").
STATISTICS_ROWS = 4096


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check_targets(target: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise for a target out of range: always on the CPU, with checks on elsewhere."""
    if target.device.type != "cpu" and not settings().checks:
        return  # reading it back would wait for the device; such a row becomes NaN instead
    wrong = ((target < 0) | (target >= num_classes)) & (target != ignore_index)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise TargetOutOfRangeError(
            f"target: expected a class in [0, {num_classes}) or ignore_index={ignore_index}, "
            f"got {int(target[row])} in row {row}"
        )


def _torch_rows(
    logits: Tensor,
    target: Tensor,
    loss: Tensor,
    statistics: Tensor,
    row_loss: _RowLoss,
    *,
    class_weight: Tensor | None,
    class_weight_sum: Tensor | None,
    grad_scale: Tensor | None,
    row_scale: Tensor | None,
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
    mass = hard
    smooth = row_loss.label_smoothing / num_classes
    if row_loss.label_smoothing:
        hard = hard * (1.0 - row_loss.label_smoothing)
        total_weight = num_classes if class_weight_sum is None else class_weight_sum
        mass = hard + smooth * total_weight
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
        mass = mass + 2.0 * row_loss.z_loss * (shift + log_sum)
    grad = probabilities.mul_(mass.unsqueeze(1))
    grad.scatter_add_(1, safe_target.unsqueeze(1), -hard.unsqueeze(1))
    if row_loss.label_smoothing:
        grad.sub_(smooth if class_weight is None else smooth * class_weight)
    if row_loss.softcap is not None:
        grad.mul_(z.div_(row_loss.softcap).square_().neg_().add_(1.0))
    scale = (poison + gain) * row_loss.logit_scale
    if grad_scale is not None:
        scale = scale * grad_scale
    if row_scale is not None:
        scale = scale * row_scale
    return grad.mul_(scale.unsqueeze(1)).masked_fill_(ignored.unsqueeze(1), 0.0)


def _use_triton(logits_dtype: torch.dtype, device_type: str) -> bool:
    choice = settings().kernels
    if choice != "auto":
        return choice == "triton"
    # float64 stays with PyTorch: Triton passes scalar options as float32.
    return device_type == "cuda" and logits_dtype != torch.float64


def _rows(
    logits: Tensor,
    target: Tensor,
    loss: Tensor,
    statistics: Tensor,
    row_loss: _RowLoss,
    **kwargs: Any,
) -> Tensor:
    """Losses of a chunk and its logits gradient, by Triton (in place) or by PyTorch."""
    if not _use_triton(logits.dtype, logits.device.type):
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


def _exponentials(
    loop: ChunkLoop,
    target: Tensor,
    row_loss: _RowLoss,
    class_weight: Tensor | None,
    divisor: _Divisor,
) -> Any:
    """The path that never stores logits, where it can serve; else None.

    It serves where neither weight nor bias gets a gradient. Label smoothing gives every element a
    share that no factor per row can supply later, so it keeps the plain path too.
    """
    input, weight, bias = loop.operands
    if row_loss.label_smoothing or loop.needs.weight or loop.needs.bias:
        return None
    if not _use_triton(input.dtype, input.device.type):
        return None
    from greyhound_ops.kernels import exponentials

    if not exponentials.supported(input, weight, interpreted=settings().kernels == "triton"):
        return None
    options = dataclasses.asdict(row_loss)
    del options["label_smoothing"]
    return exponentials.Exponentials(
        input,
        weight,
        bias,
        target,
        class_weight=class_weight,
        grad_scale=lambda: divisor.reciprocal,
        **options,
    )


@dataclasses.dataclass(frozen=True)
class _ExponentialChunk:
    """One chunk's way through `kernels.exponentials`, for `ChunkLoop.fold_exponentials`."""

    source: Any
    start: int
    stop: int
    loss: Tensor
    statistics: Tensor

    def __call__(self, chunk: Tensor) -> Any:
        factor, hard = self.source.exponentials(
            self.start, self.stop, chunk, self.loss, self.statistics
        )

        def finish(rows: slice, part: slice, product: Tensor, out: Tensor) -> None:
            self.source.grad_input(rows, product, factor[part], hard[part], out)

        return finish


class _Divisor:
    """What a loss over all rows is divided by, made on the device when it is first asked for.

    The small kernels it takes are launched behind the first projection, not before it.

    Args:
        target: ``[N]``.
        class_weight: ``[V]`` in the statistics' dtype, or None.
        ignore_index: Target of rows that do not count.
        mean: Whether anything is divided at all.
        dtype: Of the statistics.
    """

    def __init__(
        self,
        target: Tensor,
        class_weight: Tensor | None,
        ignore_index: int,
        mean: bool,
        dtype: torch.dtype,
    ) -> None:
        self._target, self._class_weight = target, class_weight
        self._ignore_index, self._mean, self._dtype = ignore_index, mean, dtype

    @functools.cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        counts = self._target != self._ignore_index
        number = counts.sum(dtype=self._dtype)
        if self._class_weight is None:
            return number, number == 0
        last = self._class_weight.shape[0] - 1
        chosen = self._class_weight[self._target.clamp(0, last)]
        return (chosen * counts).sum(), number == 0

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
        if not empty_is_nan:
            loss = torch.where(nothing, 0.0, loss)
        # Where nothing counts there is nothing to divide either: 0 / 0 must not reach a gradient.
        return loss, torch.where(nothing, 1.0, divisor)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    row_loss = _RowLoss(ignore_index, label_smoothing, z_loss, logit_scale, softcap)
    needs = GradientNeeds(need_grad_input, need_grad_weight, need_grad_bias)
    _check(
        input, weight, target, bias, class_weight, row_loss, reduction, chunk_size,
        grad_weight_accum_dtype, needs,
    )  # fmt: skip
    compute_dtype = validation.resolve_compute_dtype(input, weight, compute_dtype)
    dtype = _statistics_dtype(compute_dtype)
    rows = input.reshape(-1, input.shape[-1])
    labels = target.reshape(-1).long()  # an ignore_index beyond int32 must not wrap round
    num_rows, num_classes = rows.shape[0], weight.shape[0]
    _check_targets(labels, num_classes, ignore_index)
    if class_weight is not None:
        class_weight = class_weight.to(dtype).contiguous()

    # Gradients per row need the upstream of that row before rows are summed up.
    made_now = needs
    if reduction == "none" and (needs.weight or needs.bias):
        made_now = GradientNeeds(False, False, False)
    deferred = defers_division(compute_dtype)
    loop = ChunkLoop(
        rows,
        weight,
        bias,
        needs=made_now,
        compute_dtype=compute_dtype,
        accum=grad_weight_accum_dtype,
        chunk_size=chunk_size,
        gain=fp16_gain(logit_scale) if deferred and made_now else 1.0,
        spare_fp16=True,
    )
    loss = input.new_empty(num_rows, dtype=dtype)
    statistics = input.new_empty((2, num_rows), dtype=dtype)
    divisor = _Divisor(labels, class_weight, ignore_index, reduction == "mean", dtype)
    divides_now = bool(made_now) and not deferred
    # fp16 again: a class weight of 300 times the gain would leave its range before it is divided.
    largest_weight = None
    if deferred and made_now and class_weight is not None:
        largest_weight = class_weight.abs().amax().clamp_min(1.0)
    grad_scale = None if largest_weight is None else largest_weight.reciprocal()
    exponentials = _exponentials(loop, labels, row_loss, class_weight, divisor)
    class_weight_sum = None if class_weight is None else class_weight.sum()
    spans = loop.spans()
    if exponentials is not None and not made_now:
        # Nothing of [rows, V] is stored, so rows are limited only by the sums of each tile.
        spans = loop.spans(STATISTICS_ROWS if chunk_size is None else loop.rows)
    for start, stop in spans:
        results = loss[start:stop], statistics[:, start:stop]
        if exponentials is not None and made_now:
            chunk = _ExponentialChunk(exponentials, start, stop, *results)
            loop.fold_exponentials(start, stop, chunk)
        elif exponentials is not None:
            exponentials.losses(start, stop, *results)
        else:
            logits = loop.project(start, stop)
            grad_logits = _rows(
                logits,
                labels[start:stop],
                *results,
                row_loss,
                class_weight=class_weight,
                class_weight_sum=class_weight_sum,
                grad_scale=divisor.reciprocal if divides_now else grad_scale,
                row_scale=None,
                gain=loop.gain,
                read_statistics=False,
                write_grad=bool(made_now),
            )
            if made_now:
                loop.fold(start, stop, grad_logits)
            del logits, grad_logits  # or the chunk would outlive the loop, into the final cast
    grad_input, grad_weight, grad_bias = loop.finish()

    if reduction == "none":
        result, denominator = divisor.apply(loss.reshape(target.shape), empty_mean_is_nan)
    else:
        result, denominator = divisor.apply(loss.sum(), empty_mean_is_nan)
    if largest_weight is not None:
        denominator = denominator / largest_weight
    return (
        result,
        statistics.reshape(2, *target.shape),
        denominator,
        empty(input) if grad_input is None else grad_input.reshape(input.shape),
        empty(weight) if grad_weight is None else grad_weight,
        empty(input if bias is None else bias) if grad_bias is None else grad_bias,
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
) -> tuple[Tensor, Tensor, Tensor]:
    row_loss = _RowLoss(ignore_index, label_smoothing, z_loss, logit_scale, softcap)
    needs = GradientNeeds(need_grad_input, need_grad_weight, need_grad_bias)
    _check(
        input, weight, target, bias, class_weight, row_loss, "none", chunk_size,
        grad_weight_accum_dtype, needs,
    )  # fmt: skip
    compute_dtype = validation.resolve_compute_dtype(input, weight, compute_dtype)
    dtype = _statistics_dtype(compute_dtype)
    rows = input.reshape(-1, input.shape[-1])
    if statistics.shape != (2, *target.shape):
        raise ValueError(
            f"statistics: expected shape {[2, *target.shape]}, as the forward returned them, "
            f"got {list(statistics.shape)}"
        )
    labels, statistics = target.reshape(-1).long(), statistics.reshape(2, -1)
    upstream = grad_loss.reshape(-1)
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
        grad_logits = _rows(
            loop.project(start, stop),
            labels[start:stop],
            unused[start:stop],
            statistics[:, start:stop],
            row_loss,
            class_weight=class_weight,
            class_weight_sum=class_weight_sum,
            grad_scale=None,
            row_scale=upstream[start:stop],
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


def _named(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments of a call by name, those left out by their defaults."""
    arguments = op._schema.arguments
    values = {each.name: each.default_value for each in arguments if each.has_default_value()}
    values.update(zip((each.name for each in arguments), args, strict=False))
    return SimpleNamespace(**{**values, **kwargs})


def _check_named(call: Any, reduction: str) -> tuple[GradientNeeds, torch.dtype]:
    needs = GradientNeeds(call.need_grad_input, call.need_grad_weight, call.need_grad_bias)
    row_loss = _RowLoss(
        call.ignore_index, call.label_smoothing, call.z_loss, call.logit_scale, call.softcap
    )
    _check(
        call.input, call.weight, call.target, call.bias, call.class_weight, row_loss, reduction,
        call.chunk_size, call.grad_weight_accum_dtype, needs,
    )  # fmt: skip
    dtype = validation.resolve_compute_dtype(call.input, call.weight, call.compute_dtype)
    return needs, dtype


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = _named(torch.ops.greyhound.linear_cross_entropy.default, args, kwargs)
    needs, compute_dtype = _check_named(call, call.reduction)
    input, weight, target, bias = call.input, call.weight, call.target, call.bias
    dtype = _statistics_dtype(compute_dtype)
    by_row = call.reduction == "none"
    made_now = not (by_row and (needs.weight or needs.bias))
    stored = stored_weight_dtype(weight.dtype, compute_dtype, call.grad_weight_accum_dtype)
    return (
        input.new_empty(target.shape if by_row else (), dtype=dtype),
        input.new_empty((2, *target.shape), dtype=dtype),
        input.new_empty((), dtype=dtype),
        input.new_empty(input.shape) if needs.input and made_now else empty(input),
        empty_grad_weight(weight, stored) if needs.weight and made_now else empty(weight),
        bias.new_empty(bias.shape, dtype=stored_bias_dtype(bias.dtype))
        if needs.bias and made_now
        else empty(input if bias is None else bias),
    )


def _fake_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _named(torch.ops.greyhound.linear_cross_entropy_backward.default, args, kwargs)
    needs, _ = _check_named(call, "none")
    input, weight, bias = call.input, call.weight, call.bias
    return (
        input.new_empty(input.shape) if needs.input else empty(input),
        empty_grad_weight(weight, weight.dtype) if needs.weight else empty(weight),
        bias.new_empty(bias.shape) if needs.bias else empty(input),
    )


# ------------------------------------------------------------------------------------ autograd

_ARGUMENTS = [
    argument.name for argument in torch.ops.greyhound.linear_cross_entropy.default._schema.arguments
]
_OPTIONS = _ARGUMENTS[5:]


class _RefuseSecondDerivative(torch.autograd.Function):
    """Passes a gradient on and ties it to what it depends on, so that differentiating it raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, *depends_on: Tensor | None) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotDifferentiableTwiceError(
            f"{NAME} is not differentiable twice: its gradients are made in the forward, chunk by "
            "chunk, and their own derivative is not kept. Use greyhound_ops.reference, or plain "
            "torch, where a second derivative is wanted (gradient penalties, Hessians)."
        )


class _Anchor(torch.autograd.Function):
    """An empty tensor that depends on tensors without holding them.

    A second derivative can be refused only through what the first one depends on. Saving the
    operands for it would keep an activation alive and forbid writing to it after the loss.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*depends_on: Tensor | None) -> Tensor:
        return depends_on[0].new_empty(0)  # type: ignore[union-attr]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotDifferentiableTwiceError(f"{NAME} is not differentiable twice")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    arguments = dict(zip(_ARGUMENTS, inputs, strict=True))
    needs = tuple(arguments[f"need_grad_{name}"] for name in ("input", "weight", "bias"))
    for name, position, need in zip(("input", "weight", "bias"), (0, 1, 3), needs, strict=True):
        if ctx.needs_input_grad[position] and not need:
            raise ValueError(
                f"need_grad_{name}: expected True, since {name} requires grad, got False; "
                f"detach {name} if no gradient is wanted"
            )
    if ctx.needs_input_grad[4]:
        raise ValueError("class_weight: expected a tensor that needs no gradient, as in torch")
    _, statistics, denominator, grad_input, grad_weight, grad_bias = output
    ctx.mark_non_differentiable(statistics, denominator, grad_input, grad_weight, grad_bias)
    # Else autograd would make a zero of [V, D] for the output grad_weight that nobody uses.
    ctx.set_materialize_grads(False)
    ctx.options = {name: arguments[name] for name in _OPTIONS}
    ctx.needs = needs
    ctx.by_row = arguments["reduction"] == "none"
    ctx.recompute = ctx.by_row and (needs[1] or needs[2])
    ctx.deferred = defers_division(
        validation.resolve_compute_dtype(
            arguments["input"], arguments["weight"], arguments["compute_dtype"]
        )
    )
    operands = arguments["input"], arguments["weight"], arguments["bias"]
    ctx.dtypes = tuple(None if each is None else each.dtype for each in operands)
    read_again = ("input", "weight", "target", "bias", "class_weight")
    with torch.enable_grad():
        ctx.anchor = None if ctx.recompute else _Anchor.apply(*operands)
    ctx.save_for_backward(
        *(arguments[name] if ctx.recompute else None for name in read_again),
        statistics if ctx.recompute else None,
        denominator if ctx.deferred else None,
        grad_input if needs[0] and not ctx.recompute else None,
        grad_weight if needs[1] and not ctx.recompute else None,
        grad_bias if needs[2] and not ctx.recompute else None,
    )


def _blocks(tensor: Tensor) -> list[slice]:
    """Row ranges of about 32 MiB in float32, for passes that need a float32 temporary."""
    rows = max(2**23 // max(tensor[0].numel(), 1), 1) if tensor.shape[0] else 1
    return [slice(i, i + rows) for i in range(0, tensor.shape[0], rows)]


def _scaled(stored: Tensor, factor: Tensor, dtype: torch.dtype, may_overwrite: bool) -> Tensor:
    """``stored * factor`` in ``dtype``, multiplied in the statistics' dtype.

    Args:
        stored: Gradient as the forward left it.
        factor: Scalar, or one per row of ``stored``.
        dtype: Of the result.
        may_overwrite: Whether ``stored`` is needed no more; then no second buffer of its size is
            made.
    """
    if not torch_private.is_plain_eager(stored):
        # Inductor fuses the three and writes over the donated buffer.
        if factor.dim():
            factor = factor.unsqueeze(-1)
        return (stored.to(factor.dtype) * factor).to(dtype)
    in_place = may_overwrite and stored.dtype == dtype
    transposed = stored.dim() == 2 and not row_major(stored)
    flat = stored.t() if transposed else stored
    if factor.dim():
        flat = flat.reshape(-1, flat.shape[-1])
        factor = factor.reshape(-1, 1)
    if in_place and factor.dim() == 0 and _use_triton(flat.dtype, flat.device.type):
        from greyhound_ops.kernels.scale import scale_

        scale_(flat, factor)
        return stored
    out = flat if in_place else torch.empty_like(flat, dtype=dtype)
    if flat.dtype == factor.dtype == dtype or flat.dim() == 0:
        torch.mul(flat, factor, out=out)
    else:
        for block in _blocks(flat):
            out[block] = flat[block].to(factor.dtype) * (factor[block] if factor.dim() else factor)
    if factor.dim():
        return out.reshape(stored.shape)
    return out.t() if transposed else out


def _autograd_backward(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    result: list[Any] = [None] * len(_ARGUMENTS)
    if grad_loss is None:
        return tuple(result)
    (
        input, weight, target, bias, class_weight, statistics, denominator, *stored,
    ) = ctx.saved_tensors  # fmt: skip
    options = dict(ctx.options)
    if ctx.recompute:
        for name in ("reduction", "empty_mean_is_nan", "grads_are_private"):
            options.pop(name)
        grads: list[Tensor | None] = list(
            torch.ops.greyhound.linear_cross_entropy_backward(
                grad_loss, input, weight, target, statistics, bias, class_weight, **options
            )
        )
    else:
        # Asked at run time: in a compiled graph Inductor's donated buffers decide the same thing.
        # Outputs of an op are the caller's, unless he says that he keeps none of them.
        may_overwrite = ctx.options["grads_are_private"] and not torch_private.graph_is_kept()
        factor = grad_loss
        if ctx.deferred:
            factor = factor / denominator
        grads = [None, None, None]
        # Under create_graph the upstream may require grad itself; the derivative that would be
        # recorded here is the one refused below.
        with torch.no_grad():
            for index, (value, dtype) in enumerate(zip(stored, ctx.dtypes, strict=True)):
                if value is None:
                    continue
                each = factor
                if ctx.deferred and value.dtype == torch.float16 and index == 1:
                    each = factor * FP16_ACCUM_GAIN
                grads[index] = _scaled(value, each, dtype, may_overwrite)
        if torch.is_grad_enabled():
            grads = [
                None if grad is None else _RefuseSecondDerivative.apply(grad, grad_loss, ctx.anchor)
                for grad in grads
            ]
    for position, grad, need in zip((0, 1, 3), grads, ctx.needs, strict=True):
        result[position] = grad if need else None
    return tuple(result)


class _Functorch(torch.autograd.Function):
    """The same derivative in the form that ``torch.func`` asks of a function.

    The kernel that ``register_autograd`` makes is refused there (and an op without one would
    silently get a zero).
    """

    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.greyhound.linear_cross_entropy.default(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _autograd_backward(ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _vmap(info, in_dims, *args)


def functorch_call(*args: Any) -> Any:
    """The op under ``torch.func`` transforms; arguments all positional."""
    return _Functorch.apply(*args)


def _refuse_twice(ctx: Any, *grads: Tensor) -> None:
    _RefuseSecondDerivative.backward(ctx, *grads)


def _no_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)


def _refuse_forward_mode(args: tuple[Any, ...]) -> None:
    for value in args:
        if isinstance(value, Tensor) and torch_private.has_forward_tangent(value):
            raise ForwardModeError(
                f"{NAME} has no forward-mode derivative (jvp); use greyhound_ops.reference or "
                "plain torch there. Ignoring the tangent would give a silent zero."
            )


def _guarded(kernel: Any) -> Any:
    """Refuse forward-mode tangents before the autograd kernel would drop them."""

    def autograd_kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_forward_mode((*args, *kwargs.values()))
        return kernel(keyset, *args, **kwargs)

    return autograd_kernel


# ------------------------------------------------------------------------------------ autocast


def _autocast(device_type: str) -> Any:
    position = _ARGUMENTS.index("compute_dtype")

    def cast(*args: Any, **kwargs: Any) -> Any:
        # Nothing is cast here: the op multiplies in the dtype of autocast and hands each gradient
        # back in the dtype of its own tensor, so that an fp32 weight gets its fp32 accumulator
        # as it is, without a rounding to bf16 in between. float64 is left alone, as autocast does.
        given = kwargs.get("compute_dtype", args[position] if len(args) > position else None)
        wide = any(value.dtype == torch.float64 for value in args[:2])
        with torch.autocast(device_type, enabled=False):
            if given is None and not wide:
                kwargs["compute_dtype"] = torch.get_autocast_dtype(device_type)
                args = args[:position] + args[position + 1 :] if len(args) > position else args
                if len(args) > position:
                    kwargs.update(zip(_ARGUMENTS[position + 1 :], args[position:], strict=False))
                    args = args[:position]
            return torch.ops.greyhound.linear_cross_entropy.default(*args, **kwargs)

    return cast


# ---------------------------------------------------------------------------------------- vmap


def _vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    """One call per sample: a batched head would otherwise need its logits side by side."""
    calls = []
    for index in range(info.batch_size):
        sample = [
            value if dim is None else value.select(dim, index)
            for value, dim in zip(args, in_dims, strict=True)
        ]
        # The flags were read off batched tensors, which never say that they require grad.
        for name, position in (("input", 0), ("weight", 1), ("bias", 3)):
            tensor = sample[position]
            if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
                sample[_ARGUMENTS.index(f"need_grad_{name}")] = True
        calls.append(torch.ops.greyhound.linear_cross_entropy.default(*sample))
    outputs = tuple(torch.stack(column) for column in zip(*calls, strict=True))
    return outputs, (0,) * len(outputs)


# --------------------------------------------------------------------------------------- flops


def _product_flops(input_shape: Any, weight_shape: Any) -> int:
    rows = 1
    for size in input_shape[:-1]:
        rows *= size
    return int(2 * rows * weight_shape[0] * weight_shape[1])


def _flops(
    input_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    # Which gradients were made is read off the outputs: one that was not asked for is empty.
    made = sum(1 for shape in out_shape[3:5] if len(shape) > 1)
    return _product_flops(input_shape, weight_shape) * (1 + made)


def _flops_backward(
    grad_shape: Any,
    input_shape: Any,
    weight_shape: Any,
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    made = sum(1 for shape in out_shape[:2] if len(shape) > 1)
    return _product_flops(input_shape, weight_shape) * (1 + made)


# -------------------------------------------------------------------------------- registration


def _on_device(function: Any) -> Any:
    """Run an implementation with the device of its tensors current: Triton launches there."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if args[0].is_cuda and args[0].device.index != torch.cuda.current_device():
            with torch.cuda.device(args[0].device):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    op = torch.ops.greyhound.linear_cross_entropy
    backward = torch.ops.greyhound.linear_cross_entropy_backward
    _LIBRARY.impl("linear_cross_entropy", _on_device(_forward), "CompositeExplicitAutograd")
    _LIBRARY.impl(
        "linear_cross_entropy_backward", _on_device(_backward_by_row), "CompositeExplicitAutograd"
    )
    torch.library.register_fake(NAME, _fake, lib=_LIBRARY)
    torch.library.register_fake(f"{NAME}_backward", _fake_backward, lib=_LIBRARY)
    for packet, rule, setup in (
        (op, _autograd_backward, _setup_context),
        (backward, _refuse_twice, _no_context),
    ):
        kernel = torch_private.autograd_kernel(packet.default, rule, setup)
        _LIBRARY.impl(packet.default._opname, _guarded(kernel), "Autograd", with_keyset=True)
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _LIBRARY.impl("linear_cross_entropy", _autocast(device_type), key)
    torch.library.register_vmap(NAME, _vmap, lib=_LIBRARY)
    register_flop_formula(op)(_flops)
    register_flop_formula(backward)(_flops_backward)


_register()
