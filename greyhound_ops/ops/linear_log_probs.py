"""``greyhound::linear_log_probs``: log-probabilities of a projection, the logits never whole.

Each row has an upstream gradient of its own for each of three outputs, which only the backward
knows. So the forward keeps statistics per row and nothing else, and the backward, one opaque op,
projects the chunks once more; or, with ``keep_logits``, the forward keeps the logits of all rows,
over which the backward writes their gradient. The operators per chunk serve
`greyhound_ops.ops.logits` as well.

The file holds, in this order: schemas, operators on a chunk, implementations, fakes, autograd,
flops, registration.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from greyhound_ops import torch_private, validation
from greyhound_ops.config import settings
from greyhound_ops.ops import gradients, kernel_failures
from greyhound_ops.ops.chunk_loop import (
    ChunkLoop,
    ChunkMemory,
    GradientNeeds,
    backward_budget,
    empty,
    empty_grad_weight,
    empty_kept,
    keeping_is_less,
    padded_classes,
)
from greyhound_ops.ops.gradients import use_triton
from greyhound_ops.ops.linear_cross_entropy import statistics_rows
from greyhound_ops.ops.op import Op, check_flags, in_order, product_flops
from greyhound_ops.ops.rows import check_targets, reads_values, statistics_dtype

# ------------------------------------------------------------------------------------- schemas

OP = Op(
    "linear_log_probs("
    "Tensor input, Tensor weight, Tensor target, Tensor? bias=None, Tensor? temperature=None, "
    "float fixed_temperature=1.0, int ignore_index=-100, float logit_scale=1.0, "
    "float? softcap=None, bool return_entropy=False, bool return_lse=False, "
    "bool return_argmax=False, SymInt? chunk_size=None, str grad_weight_accum_dtype='fp32', "
    "ScalarType? compute_dtype=None, bool need_grad_input=False, bool need_grad_weight=False, "
    "bool need_grad_bias=False, bool need_grad_temperature=False, bool keep_logits=False"
    ") -> (Tensor log_probs, Tensor entropy, Tensor lse, Tensor argmax, Tensor statistics, "
    "Tensor kept)",
)
OP_BACKWARD = Op(
    "linear_log_probs_backward("
    "Tensor input, Tensor weight, Tensor target, Tensor statistics, "
    "Tensor? grad_log_probs=None, Tensor? grad_entropy=None, Tensor? grad_lse=None, "
    "Tensor? bias=None, Tensor? temperature=None, "
    "float fixed_temperature=1.0, int ignore_index=-100, float logit_scale=1.0, "
    "float? softcap=None, SymInt? chunk_size=None, str grad_weight_accum_dtype='fp32', "
    "ScalarType? compute_dtype=None, bool need_grad_input=False, bool need_grad_weight=False, "
    "bool need_grad_bias=False, bool need_grad_temperature=False, Tensor? kept=None"
    ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_temperature)",
)


# ------------------------------------------------------------------------ operators on a chunk


@dataclasses.dataclass(frozen=True)
class LogitsOptions:
    """What happens to logits before the softmax, and which rows have no target.

    Attributes:
        inverse_temperature: Factor on the capped logits of every row, beside a temperature per row.
        ignore_index: Target of rows whose log-probability is 0.
        logit_scale: Factor on the logits.
        softcap: Cap of the scaled logits, or None.
    """

    inverse_temperature: float
    ignore_index: int
    logit_scale: float
    softcap: float | None

    @classmethod
    def of(cls, call: Any, *, logit_scale: float = 1.0, softcap: float | None = None) -> Any:
        """The checked options of a call; without a cap one factor does for scale and T."""
        validation.check_row_options(
            ignore_index=call.ignore_index, logit_scale=logit_scale, softcap=softcap
        )
        check_temperature(call.fixed_temperature)
        inverse = 1.0 / call.fixed_temperature
        if softcap is None:
            logit_scale, inverse = logit_scale * inverse, 1.0
        return cls(inverse, call.ignore_index, logit_scale, softcap)

    def inverse(self, temperature: Tensor | None, dtype: torch.dtype) -> Tensor | float:
        """What the capped logits are multiplied by: a number, or ``[C]``."""
        if temperature is None:
            return self.inverse_temperature
        temperature = temperature.to(dtype)
        return torch.where(temperature > 0.0, self.inverse_temperature / temperature, torch.nan)


def check_keep_logits(keep_logits: object) -> None:
    """Check the option of that name."""
    if keep_logits is not None and not isinstance(keep_logits, bool):
        raise TypeError(f"keep_logits: expected a bool or None, got {keep_logits!r}")


def check_temperature(
    temperature: object, target: Tensor | None = None, name: str = "target"
) -> None:
    """Check a temperature: a positive number, or one per row.

    Args:
        temperature: Number, or a tensor if there is a target.
        target: ``[...]``, whose shape and device a tensor must have.
        name: Of the target, for the message.
    """
    if target is None or not isinstance(temperature, Tensor):
        validation.check_number("temperature", temperature)
        if temperature <= 0.0:  # type: ignore[operator]
            raise ValueError(f"temperature: expected a positive number, got {temperature}")
        return
    validation.check_float_tensor("temperature", temperature)
    if temperature.shape != target.shape:
        raise ValueError(
            f"temperature: expected a number or shape {list(target.shape)}, that of {name}, "
            f"got shape {list(temperature.shape)}"
        )
    if temperature.device != target.device:
        raise ValueError(
            f"temperature: expected a tensor on the device of {name}, {target.device}, "
            f"got {temperature.device}"
        )


def check_temperatures(temperature: Tensor, target: Tensor, ignore_index: int) -> None:
    """Raise for a temperature per row that is not positive, where values may be looked at."""
    if not reads_values(temperature):
        return
    wrong = ~(temperature > 0.0) & (target != ignore_index)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"temperature: expected a positive number, got {float(temperature[row])} in row {row}"
        )


def _capped_logits(
    logits: Tensor, dtype: torch.dtype, options: LogitsOptions, may_overwrite: bool
) -> Tensor:
    """Logits after scale and cap, in a buffer that may be written over."""
    y = logits.to(dtype, copy=not may_overwrite)
    if options.logit_scale != 1.0:
        y.mul_(options.logit_scale)
    if options.softcap is not None:
        y.div_(options.softcap).tanh_().mul_(options.softcap)
    return y


def _times_rows(matrix: Tensor, factor: Tensor | float) -> Tensor:
    """A matrix times a number, or row by row, in place."""
    if isinstance(factor, Tensor):
        return matrix.mul_(factor.unsqueeze(1))
    return matrix if factor == 1.0 else matrix.mul_(factor)


def _torch_forward(
    logits: Tensor,
    target: Tensor,
    log_probs: Tensor,
    statistics: Tensor,
    argmax: Tensor | None,
    *,
    temperature: Tensor | None,
    options: LogitsOptions,
    every_row: bool,
    may_overwrite: bool,
) -> None:
    """What `kernels.log_probs` does, in PyTorch operators; the formulas are derived there.

    Holds at most two ``[C, V]`` buffers of the statistics' dtype.
    """
    num_classes = logits.shape[1]
    y = _capped_logits(logits, log_probs.dtype, options, may_overwrite)
    inverse = options.inverse(temperature, log_probs.dtype)
    ignored = target == options.ignore_index
    in_range = (target >= 0) & (target < num_classes)
    safe_target = target.masked_fill(~in_range, 0).long()
    top = y.amax(1)
    reference = torch.where(top == -torch.inf, 0.0, top)
    if argmax is not None:
        torch.argmax(y, 1, out=argmax)
    shifted = _times_rows(y.sub_(reference.unsqueeze(1)), inverse)
    shifted_target = shifted.gather(1, safe_target.unsqueeze(1)).squeeze(1)
    if statistics.shape[0] == 3:
        exponentials = shifted.exp()
        total = exponentials.sum(1)
        # 0 * log 0 is 0; NaN passes the clamp.
        terms = shifted.clamp_(min=torch.finfo(shifted.dtype).min).mul_(exponentials)
        entropy = total.log() - terms.sum(1) / total
        statistics[2].copy_(entropy.clamp(0.0, math.log(num_classes)))
    else:
        total = shifted.exp_().sum(1)
    log_sum = total.log()
    statistics[0].copy_(reference)
    statistics[1].copy_(log_sum)
    if not every_row:
        statistics.masked_fill_(ignored, 0.0)
    # Not through the log-sum-exp: at logits of 1e4 its last bit is 1e-3 in float32.
    row = (shifted_target - log_sum).clamp(max=0.0)
    log_probs.copy_(row.masked_fill(~in_range, torch.nan).masked_fill(ignored, 0.0))


def _torch_backward(
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    grad_temperature: Tensor | None,
    *,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    temperature: Tensor | None,
    options: LogitsOptions,
    may_overwrite: bool,
) -> Tensor:
    """What `kernels.log_probs_backward` does, in PyTorch operators.

    Holds two ``[C, V]`` buffers of the statistics' dtype, one more each for an entropy and a cap.

    Returns:
        The logits gradient ``[C, V]`` in the dtype of the statistics.
    """
    num_classes, dtype = logits.shape[1], statistics.dtype
    y = _capped_logits(logits, dtype, options, may_overwrite)
    inverse = options.inverse(temperature, dtype)
    ignored = target == options.ignore_index
    in_range = (target >= 0) & (target < num_classes)
    safe_target = target.masked_fill(~in_range, 0).long()
    silent = ignored
    by_lse = by_target = torch.zeros_like(statistics[0])
    if grad_log_probs is not None:
        by_target = grad_log_probs.to(dtype).masked_fill(~in_range, torch.nan)
        by_target = by_target.masked_fill(ignored, 0.0)
    if grad_lse is not None:
        by_lse = grad_lse.to(dtype)
        silent = silent & (by_lse == 0.0)
    mass = (by_lse - by_target).unsqueeze(1)

    shift, log_sum = statistics[0], statistics[1].unsqueeze(1)
    keep_y = options.softcap is not None
    shifted = _times_rows(torch.sub(y, shift.unsqueeze(1), out=None if keep_y else y), inverse)
    keep_shifted = grad_entropy is not None or grad_temperature is not None
    grad = torch.sub(shifted, log_sum, out=None if keep_shifted else shifted).exp_()
    if grad_entropy is not None:
        by_entropy = grad_entropy.to(dtype)
        silent = silent & (by_entropy == 0.0)
        # 0 * log 0 is 0: far below this every probability is 0 already, also in float64.
        factor = (shifted - log_sum).clamp_(min=-1e4).add_(statistics[2].unsqueeze(1))
        grad.mul_(factor.mul_(-by_entropy.unsqueeze(1)).add_(mass))
        del factor
    else:
        grad.mul_(mass)
    if grad_log_probs is not None:
        grad.scatter_add_(1, safe_target.unsqueeze(1), by_target.unsqueeze(1))
    if grad_temperature is not None:
        moment = shifted.masked_fill_(grad == 0.0, 0.0).mul_(grad).sum(1)
        made = -(moment + by_lse * shift * inverse) * inverse
        grad_temperature.copy_(made.masked_fill(silent, 0.0))
    if options.softcap is not None:
        grad.mul_(y.div_(options.softcap).square_().neg_().add_(1.0))
    grad = _times_rows(grad, inverse * options.logit_scale)
    return grad.masked_fill_(silent.unsqueeze(1), 0.0)


def forward_rows(
    logits: Tensor,
    target: Tensor,
    log_probs: Tensor,
    statistics: Tensor,
    argmax: Tensor | None,
    *,
    temperature: Tensor | None,
    options: LogitsOptions,
    every_row: bool,
    may_overwrite: bool,
) -> None:
    """Log-probabilities and statistics of a chunk, by Triton or by PyTorch.

    Args:
        logits: ``[C, V]``, unit column stride.
        target: ``[C]``.
        log_probs: ``[C]`` out, contiguous.
        statistics: ``[2, C]`` out: the largest logit before the temperature, as a shift, and the
            logarithm of the shifted sum; with a third row, the entropy.
        argmax: ``[C]`` int64 out, contiguous, or None.
        temperature: ``[C]`` or None.
        options: The others.
        every_row: Whether the statistics of ignored rows are wanted; else they are zeros.
        may_overwrite: Whether the logits are needed no more.
    """
    if not use_triton(logits.dtype, logits.device.type):
        _torch_forward(
            logits, target, log_probs, statistics, argmax, temperature=temperature,
            options=options, every_row=every_row, may_overwrite=may_overwrite,
        )  # fmt: skip
        return
    from greyhound_ops.kernels import log_probs as kernels  # Triton is not there on every platform

    kernels.log_probs(
        logits,
        target,
        log_probs,
        statistics,
        argmax,
        temperature=temperature,
        largest_entropy=math.log(logits.shape[1]),
        every_row=every_row,
        **dataclasses.asdict(options),
    )


def backward_rows(
    logits: Tensor,
    grad_logits: Tensor | None,
    target: Tensor,
    statistics: Tensor,
    grad_temperature: Tensor | None,
    *,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    temperature: Tensor | None,
    options: LogitsOptions,
    may_overwrite: bool,
) -> Tensor | None:
    """The logits gradient of a chunk, by Triton or by PyTorch.

    Args:
        logits: ``[C, V]``, unit column stride.
        grad_logits: ``[C, V]`` out, possibly the logits; None where it is not wanted.
        target: ``[C]``.
        statistics: As `forward_rows` left them.
        grad_temperature: ``[C]`` out, contiguous, or None.
        grad_log_probs: Upstream ``[C]`` or None.
        grad_entropy: Likewise.
        grad_lse: Likewise.
        temperature: ``[C]`` or None.
        options: The others.
        may_overwrite: Whether the logits are needed no more.

    Returns:
        The gradient: ``grad_logits``, or on the CPU one in the dtype of the statistics, which
        rounds once less; None where it is not wanted.
    """
    upstream: dict[str, Any] = {
        "grad_log_probs": grad_log_probs, "grad_entropy": grad_entropy, "grad_lse": grad_lse,
    }  # fmt: skip
    if not use_triton(logits.dtype, logits.device.type):
        grad = _torch_backward(
            logits, target, statistics, grad_temperature, temperature=temperature,
            options=options, may_overwrite=may_overwrite, **upstream,
        )  # fmt: skip
        if grad_logits is None:
            return None
        return grad_logits.copy_(grad) if logits.is_cuda else grad
    from greyhound_ops.kernels import log_probs as kernels  # Triton is not there on every platform

    kernels.log_probs_backward(
        logits,
        grad_logits,
        target,
        statistics,
        grad_temperature,
        temperature=temperature,
        **upstream,
        **dataclasses.asdict(options),
    )
    return grad_logits


# ----------------------------------------------------------------------------- implementations


def _check(call: Any) -> tuple[GradientNeeds, LogitsOptions, torch.dtype]:
    """Check the arguments of either op.

    Returns:
        Gradients of the projection to make, options of the rows, dtype of the products.
    """
    validation.check_projection(call.input, call.weight, call.bias)
    validation.check_target(call.input, call.target)
    if call.temperature is not None:
        check_temperature(call.temperature, call.target)
    options = LogitsOptions.of(call, logit_scale=call.logit_scale, softcap=call.softcap)
    validation.check_chunk_size(call.chunk_size)
    validation.check_choice(
        "grad_weight_accum_dtype", call.grad_weight_accum_dtype, validation.ACCUM_DTYPES
    )
    for name in ("bias", "temperature"):
        if getattr(call, f"need_grad_{name}") and getattr(call, name) is None:
            raise ValueError(f"need_grad_{name}: expected False, since {name} is None, got True")
    needs = GradientNeeds(call.need_grad_input, call.need_grad_weight, call.need_grad_bias)
    return (
        needs,
        options,
        validation.resolve_compute_dtype(call.input, call.weight, call.compute_dtype),
    )


def _exponentials(loop: ChunkLoop, labels: Tensor, options: LogitsOptions, every_row: bool) -> Any:
    """The projection that stores statistics only, where it can serve; else None."""
    input, weight, bias = loop.operands
    if options.inverse_temperature != 1.0:
        return None  # its epilogue has one factor, in front of the cap
    if not use_triton(input.dtype, input.device.type):
        return None
    from greyhound_ops.kernels import exponentials

    if not exponentials.supported(input, weight, interpreted=settings().kernels == "triton"):
        return None
    ignore_index = options.ignore_index
    if every_row:
        # That path leaves ignored rows out; any class will do for them, none is to be ignored.
        labels = labels.masked_fill(labels == ignore_index, 0)
        ignore_index = -(2**63)
    return exponentials.Exponentials(
        input,
        weight,
        bias,
        labels,
        class_weight=None,
        grad_scale=lambda: None,
        ignore_index=ignore_index,
        z_loss=0.0,
        logit_scale=options.logit_scale,
        softcap=options.softcap,
    )


def keeps_logits(input: Tensor, weight: Tensor, accum: str) -> bool:
    """Whether a forward does best to keep its logits for a backward that wants ``grad_weight``.

    Where those of all rows take no more than the float32 sum that the backward would make chunk by
    chunk: it then needs neither that sum nor a second projection, a product in four. On a number of
    rows that is a symbol the answer is a guard, on one without a value it is no.

    Args:
        input: ``[..., D]``.
        weight: ``[V, D]``.
        accum: ``"fp32"`` or ``"weight"``.
    """
    compute_dtype, device_type = input.dtype, weight.device.type
    if torch.is_autocast_enabled(device_type):
        compute_dtype = torch.get_autocast_dtype(device_type)
    return torch_private.guard_or_no(
        keeping_is_less(
            math.prod(input.shape[:-1]),
            (weight.shape[0], weight.shape[1]),
            device_type,
            weight_dtype=weight.dtype,
            compute_dtype=compute_dtype,
            accum=accum,
        )
    )


def _empty_kept(call: Any, compute_dtype: torch.dtype) -> Tensor:
    """Room for the logits of all rows, as `ChunkLoop` lays them out; empty if they are not kept."""
    if not call.keep_logits:
        return empty(call.input)
    return empty_kept(call.input, call.weight.shape[0], compute_dtype)


def _forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = OP.named(args, kwargs)
    needs, options, compute_dtype = _check(call)
    input, weight, target = call.input, call.weight, call.target
    dtype = statistics_dtype(compute_dtype)
    rows = input.reshape(-1, input.shape[-1])
    labels = target.reshape(-1).long()  # an ignore_index beyond int32 must not wrap round
    num_rows, num_classes = rows.shape[0], weight.shape[0]
    check_targets(labels, num_classes, options.ignore_index)
    temperature = None
    if call.temperature is not None:
        temperature = call.temperature.reshape(-1)
        check_temperatures(temperature, labels, options.ignore_index)

    log_probs = input.new_empty(num_rows, dtype=dtype)
    statistics = input.new_empty((2 + call.return_entropy, num_rows), dtype=dtype)
    argmax = input.new_empty(num_rows if call.return_argmax else 0, dtype=torch.int64)
    kept = _empty_kept(call, compute_dtype)
    loop = ChunkLoop(
        rows,
        weight,
        call.bias,
        needs=GradientNeeds(False, False, False),
        compute_dtype=compute_dtype,
        accum=call.grad_weight_accum_dtype,
        chunk_size=call.chunk_size,
        gain=1.0,
        budget=backward_budget(
            num_rows,
            call.input.device.type,
            call.weight,
            needs,
            compute_dtype,
            call.grad_weight_accum_dtype,
        ),
        chunk=ChunkMemory(kept) if call.keep_logits else None,
    )
    every_row = call.return_entropy or call.return_lse or call.return_argmax
    source = None
    # Not with a gradient to come, which is made from rounded logits: see `backward_budget`.
    differentiable = needs or call.need_grad_temperature or call.keep_logits
    if not (differentiable or temperature is not None or call.return_entropy or call.return_argmax):
        source = _exponentials(loop, labels, options, every_row)
    if source is not None:
        rows_at_once = loop.rows
        if call.chunk_size is None:
            rows_at_once = statistics_rows(*call.weight.shape)
        for start, stop in loop.spans(rows_at_once):
            source.losses(start, stop, log_probs[start:stop], statistics[:, start:stop])
        log_probs.neg_().clamp_(max=0.0).add_(0.0)  # -0.0 + 0.0 is 0.0
        if every_row:
            log_probs.masked_fill_(labels == options.ignore_index, 0.0)
    else:
        for start, stop in loop.spans():
            forward_rows(
                loop.project(start, stop),
                labels[start:stop],
                log_probs[start:stop],
                statistics[:, start:stop],
                argmax[start:stop] if call.return_argmax else None,
                temperature=None if temperature is None else temperature[start:stop],
                options=options,
                every_row=every_row,
                may_overwrite=not call.keep_logits,
            )
    loop.finish()

    def shaped(values: Tensor) -> Tensor:
        return values.reshape(target.shape)

    lse = log_probs.new_empty(0)
    if call.return_lse:
        shift = statistics[0] * options.inverse(temperature, dtype)
        # The sum of a row with a logit of +inf is no number, its logarithm is.
        lse = shaped(torch.where(shift == torch.inf, shift, shift + statistics[1]))
    return (
        shaped(log_probs),
        shaped(statistics[2].clone()) if call.return_entropy else log_probs.new_empty(0),
        lse,
        shaped(argmax) if call.return_argmax else argmax,
        statistics.reshape(statistics.shape[0], *target.shape),
        kept,
    )


def _backward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = OP_BACKWARD.named(args, kwargs)
    needs, options, compute_dtype = _check(call)
    input, weight, target, bias = call.input, call.weight, call.target, call.bias
    dtype = statistics_dtype(compute_dtype)
    least = 2 if call.grad_entropy is None else 3
    if call.statistics.shape[1:] != target.shape or not least <= call.statistics.shape[0] <= 3:
        raise ValueError(
            f"statistics: expected shape {[least, *target.shape]}, as the forward returned them, "
            f"got {list(call.statistics.shape)}"
        )
    rows = input.reshape(-1, input.shape[-1])
    num_rows = rows.shape[0]
    labels = target.reshape(-1).long()
    statistics = call.statistics.reshape(call.statistics.shape[0], num_rows)
    by_row = {
        name: None if getattr(call, name) is None else getattr(call, name).reshape(-1)
        for name in ("grad_log_probs", "grad_entropy", "grad_lse", "temperature")
    }
    grad_temperature = None
    if call.need_grad_temperature:
        grad_temperature = input.new_empty(num_rows, dtype=dtype)
    # Not a second time, where a kernel has failed behind chunks that were written over.
    projected = call.kept is not None and not kernel_failures.pytorch_only()
    memory = None
    if projected:
        expected = [*target.shape, padded_classes(weight.shape[0], compute_dtype)]
        if list(call.kept.shape) != expected or call.kept.dtype != compute_dtype:
            raise ValueError(
                f"kept: expected shape {expected} of {compute_dtype}, as the forward returned it, "
                f"got {list(call.kept.shape)} of {call.kept.dtype}"
            )
        mine = gradients.to_write_over(call.kept)
        projected, memory = mine is not None, None if mine is None else ChunkMemory(mine)
        del mine
    loop = ChunkLoop(
        rows,
        weight,
        bias,
        needs=needs,
        compute_dtype=compute_dtype,
        accum=call.grad_weight_accum_dtype,
        chunk_size=call.chunk_size,
        gain=1.0,  # the upstream gradient brings its own scale, a GradScaler's for one
        chunk=memory,
        may_keep_gradient=projected,
    )
    del memory  # or it would outlive the loop's part of it, into the final cast
    for start, stop in loop.spans():
        logits = loop.buffer(start, stop) if projected else loop.project(start, stop)
        grad_logits = backward_rows(
            logits,
            logits if needs else None,
            labels[start:stop],
            statistics[:, start:stop],
            None if grad_temperature is None else grad_temperature[start:stop],
            options=options,
            may_overwrite=True,
            **{name: None if each is None else each[start:stop] for name, each in by_row.items()},
        )
        if grad_logits is not None:
            loop.fold(start, stop, grad_logits)
        del logits, grad_logits  # or the chunk would outlive the loop, into the final cast
    grad_input, grad_weight, grad_bias = loop.finish()
    return (
        empty(input) if grad_input is None else grad_input.reshape(input.shape),
        empty(weight) if grad_weight is None else grad_weight.to(weight.dtype),
        empty(input) if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        empty(input)
        if grad_temperature is None
        else grad_temperature.reshape(target.shape).to(call.temperature.dtype),
    )


# --------------------------------------------------------------------------------------- fakes


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = OP.named(args, kwargs)
    _, _, compute_dtype = _check(call)
    dtype = statistics_dtype(compute_dtype)
    shape = call.target.shape

    def made(wanted: bool, dtype: torch.dtype = dtype) -> Tensor:
        new: Tensor = call.input.new_empty(shape if wanted else 0, dtype=dtype)
        return new

    return (
        made(True),
        made(call.return_entropy),
        made(call.return_lse),
        made(call.return_argmax, torch.int64),
        call.input.new_empty((2 + call.return_entropy, *shape), dtype=dtype),
        _empty_kept(call, compute_dtype),
    )


def _fake_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = OP_BACKWARD.named(args, kwargs)
    needs, _, _ = _check(call)
    input, weight, bias, temperature = call.input, call.weight, call.bias, call.temperature
    return (
        input.new_empty(input.shape) if needs.input else empty(input),
        empty_grad_weight(weight, weight.dtype) if needs.weight else empty(weight),
        bias.new_empty(bias.shape) if needs.bias else empty(input),
        temperature.new_empty(temperature.shape) if call.need_grad_temperature else empty(input),
    )


# ------------------------------------------------------------------------------------ autograd

_OPERANDS = ("input", "weight", "bias", "temperature")
_READ_AGAIN = ("input", "weight", "target", "bias", "temperature")
_OPTIONS = OP_BACKWARD.arguments[9:-1]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = dict(zip(OP.arguments, inputs, strict=True))
    check_flags(ctx, OP, call, _OPERANDS)
    _, entropy, lse, argmax, statistics, kept = output
    unasked = [
        value for name, value in (("entropy", entropy), ("lse", lse)) if not call[f"return_{name}"]
    ]
    ctx.mark_non_differentiable(argmax, statistics, kept, *unasked)
    # An output that nobody used sends None, and its part of the gradient is left out.
    ctx.set_materialize_grads(False)
    ctx.options = {name: call[name] for name in _OPTIONS}
    ctx.save_for_backward(
        *(call[name] for name in _READ_AGAIN), statistics, kept if call["keep_logits"] else None
    )


def _autograd_backward(
    ctx: Any,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    *_: Tensor | None,
) -> tuple[Any, ...]:
    if grad_log_probs is None and grad_entropy is None and grad_lse is None:
        return (None,) * len(OP.arguments)
    input, weight, target, bias, temperature, statistics, kept = ctx.saved_tensors
    made = OP_BACKWARD.inner_call(
        input, weight, target, statistics, grad_log_probs, grad_entropy, grad_lse, bias,
        temperature, *ctx.options.values(), kept,
    )  # fmt: skip
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
    return product_flops(input_shape, weight_shape)


def _flops_backward(
    input_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    # Which gradients were made is read off the outputs: one that was not asked for is empty.
    grad_input, grad_weight = out_shape[:2]
    made = int(grad_input == input_shape) + int(len(grad_weight) > 1)
    kept = OP_BACKWARD.named((input_shape, weight_shape, *args), kwargs).kept
    return product_flops(input_shape, weight_shape) * (made + (kept is None))


# -------------------------------------------------------------------------------- registration

OP.implement(_forward, _fake)
OP.autograd(_setup_context, _autograd_backward)
OP.autocast()
OP.vmap_by_sample()
OP.flops(_flops)
OP_BACKWARD.implement(_backward, _fake_backward)
OP_BACKWARD.autograd(*gradients.refuse_twice(OP.name))
OP_BACKWARD.vmap_by_sample()
OP_BACKWARD.flops(_flops_backward)
