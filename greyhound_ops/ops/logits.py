"""``greyhound::cross_entropy`` and ``greyhound::selective_log_softmax``: logits that exist already.

The forward keeps two numbers per row. The backward makes the gradient, one buffer of the logits'
size, from those and the logits; nothing else is of that size. The caller's logits are only read,
whatever their strides.

The file holds, in this order: schemas, the way through the rows, implementations, fakes, autograd,
registration.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from greyhound_ops import chunking, validation
from greyhound_ops.config import settings
from greyhound_ops.ops import gradients
from greyhound_ops.ops.chunk_loop import empty
from greyhound_ops.ops.gradients import use_triton
from greyhound_ops.ops.linear_cross_entropy import Divisor, RowLoss, row_losses
from greyhound_ops.ops.linear_log_probs import (
    LogitsOptions,
    backward_rows,
    check_temperature,
    check_temperatures,
    forward_rows,
)
from greyhound_ops.ops.op import Op, check_flags, check_frozen, in_order
from greyhound_ops.ops.rows import check_targets, statistics_dtype

# ------------------------------------------------------------------------------------- schemas

CROSS_ENTROPY = Op(
    "cross_entropy("
    "Tensor logits, Tensor target, Tensor? class_weight=None, int ignore_index=-100, "
    "str reduction='mean', float label_smoothing=0.0, float z_loss=0.0, float logit_scale=1.0, "
    "float? softcap=None, bool empty_mean_is_nan=False, bool need_grad_logits=False"
    ") -> (Tensor loss, Tensor statistics, Tensor denominator)",
)
CROSS_ENTROPY_BACKWARD = Op(
    "cross_entropy_backward("
    "Tensor logits, Tensor target, Tensor statistics, Tensor grad_loss, "
    "Tensor? class_weight=None, int ignore_index=-100, float label_smoothing=0.0, "
    "float z_loss=0.0, float logit_scale=1.0, float? softcap=None"
    ") -> Tensor",
)
LOG_SOFTMAX = Op(
    "selective_log_softmax("
    "Tensor logits, Tensor index, Tensor? temperature=None, float fixed_temperature=1.0, "
    "int ignore_index=-100, bool need_grad_logits=False, bool need_grad_temperature=False"
    ") -> (Tensor log_probs, Tensor statistics)",
)
LOG_SOFTMAX_BACKWARD = Op(
    "selective_log_softmax_backward("
    "Tensor logits, Tensor index, Tensor statistics, Tensor grad_log_probs, "
    "Tensor? temperature=None, float fixed_temperature=1.0, int ignore_index=-100, "
    "bool need_grad_logits=False, bool need_grad_temperature=False"
    ") -> (Tensor grad_logits, Tensor grad_temperature)",
)


# ----------------------------------------------------------------------- the way through the rows


class Rows:
    """The rows of a ``[..., V]`` tensor of any strides, without a copy of it.

    A tensor like ``logits[:, :-1]`` is no ``[N, V]`` matrix: its rows lie at two strides. Such a
    tensor is taken in parts, each one stretch of its longest leading dimension. Values per row are
    held in the order in which the rows are visited.

    Args:
        logits: ``[..., V]``.
    """

    def __init__(self, logits: Tensor) -> None:
        lead = logits.shape[:-1]
        self.logits = logits
        self.num_rows, self.num_classes = math.prod(lead), logits.shape[-1]
        self._order = list(range(len(lead)))
        self._is_matrix = True
        try:
            logits.view(self.num_rows, self.num_classes)
        except RuntimeError:
            self._is_matrix = False
            longest = max(self._order, key=lambda dim: lead[dim])
            self._order.remove(longest)
            self._order.append(longest)

    def flat(self, values: Tensor) -> Tensor:
        """Values ``[...]`` as ``[N]`` in the order of the rows."""
        return values.permute(self._order).reshape(-1)

    def shaped(self, values: Tensor) -> Tensor:
        """``[..., N]`` values in the order of the rows as ``[..., *leading dimensions]``."""
        lead = self.logits.shape[:-1]
        front = values.shape[:-1]
        values = values.reshape([*front, *(lead[dim] for dim in self._order)])
        back = [self._order.index(dim) for dim in range(len(lead))]
        each = range(len(front))
        return values.permute([*each, *(len(front) + dim for dim in back)]).contiguous()

    def _parts(self, tensor: Tensor) -> Iterator[Tensor]:
        if self._is_matrix:
            yield tensor.view(self.num_rows, self.num_classes)
            return
        tensor = tensor.permute(*self._order, tensor.dim() - 1)
        for index in itertools.product(*(range(size) for size in tensor.shape[:-2])):
            yield tensor[index]

    def chunks(
        self, out: Tensor | None, *, copied: bool
    ) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Which rows, their logits ``[C, V]`` and their part of ``out``.

        Args:
            out: Contiguous, of the logits' shape, or None.
            copied: Whether the caller will copy the logits, so that a chunk must be small.
        """
        if self.num_rows == 0:
            return
        dtype = statistics_dtype(self.logits.dtype)
        start = 0
        outs = itertools.repeat(None) if out is None else self._parts(out)
        for part, out_part in zip(self._parts(self.logits), outs, strict=False):
            rows = part.shape[0]
            if copied or part.stride(1) != 1:
                budget = chunking.chunk_budget_bytes(
                    part.device.type,
                    need_grad_weight=False,
                    need_grads=out is not None,
                    override_bytes=settings().chunk_budget_bytes,
                )
                rows = chunking.chunk_rows(part.shape[0], self.num_classes * dtype.itemsize, budget)
            for first in range(0, part.shape[0], rows):
                these = slice(first, min(first + rows, part.shape[0]))
                yield (
                    slice(start + these.start, start + these.stop),
                    part[these],
                    None if out_part is None else out_part[these],
                )
            start += part.shape[0]


def _readable(logits: Tensor) -> tuple[Tensor, bool]:
    """A chunk as the row operators take it, and whether it may be written over."""
    if not use_triton(logits.dtype, logits.device.type):
        return logits.to(statistics_dtype(logits.dtype), copy=True), True
    if logits.stride(1) == 1 or logits.shape[1] == 1:
        return logits, False
    return logits.contiguous(), True


def _copies(logits: Tensor) -> bool:
    return not use_triton(logits.dtype, logits.device.type)


def check_logits(logits: object, target: object, *, name: str = "target") -> None:
    """Check ``logits [..., V]`` and ``target [...]`` against each other.

    Args:
        logits: First argument of the op.
        target: Second.
        name: Of the second, for the message.
    """
    checked = validation.check_float_tensor("logits", logits)
    if checked.dim() < 1 or checked.shape[-1] == 0:
        raise ValueError(
            f"logits: expected shape [..., V] with at least one class, got {list(checked.shape)}"
        )
    if not isinstance(target, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(target).__name__}")
    validation.check_not_distributed(name, target)
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: expected dtype int64 or int32, got {target.dtype}")
    if target.shape != checked.shape[:-1]:
        raise ValueError(
            f"{name}: expected shape {list(checked.shape[:-1])}, that of logits without its last "
            f"dimension, got {list(target.shape)}"
        )
    if target.device != checked.device:
        raise ValueError(
            f"{name}: expected a tensor on the device of logits, {checked.device}, "
            f"got {target.device}"
        )


# ----------------------------------------------------------------------------- implementations


def _check_cross_entropy(call: Any, reduction: str) -> RowLoss:
    check_logits(call.logits, call.target)
    if call.class_weight is not None:
        validation.check_float_tensor("class_weight", call.class_weight)
        if call.class_weight.shape != call.logits.shape[-1:]:
            raise ValueError(
                f"class_weight: expected shape [V] = [{call.logits.shape[-1]}], "
                f"got {list(call.class_weight.shape)}"
            )
        if call.class_weight.device != call.logits.device:
            raise ValueError(
                f"class_weight: expected a tensor on the device of logits, {call.logits.device}, "
                f"got {call.class_weight.device}"
            )
    row_loss = RowLoss(
        call.ignore_index, call.label_smoothing, call.z_loss, call.logit_scale, call.softcap
    )
    validation.check_row_options(**dataclasses.asdict(row_loss))
    validation.check_choice("reduction", reduction, validation.REDUCTIONS)
    return row_loss


def _check_statistics(statistics: Tensor, target: Tensor) -> None:
    if statistics.shape != (2, *target.shape):
        raise ValueError(
            f"statistics: expected shape {[2, *target.shape]}, as the forward returned them, "
            f"got {list(statistics.shape)}"
        )


def _class_weights(call: Any, dtype: torch.dtype) -> dict[str, Tensor | None]:
    if call.class_weight is None:
        return {"class_weight": None, "class_weight_sum": None}
    class_weight = call.class_weight.to(dtype).contiguous()
    return {"class_weight": class_weight, "class_weight_sum": class_weight.sum()}


def _cross_entropy(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = CROSS_ENTROPY.named(args, kwargs)
    row_loss = _check_cross_entropy(call, call.reduction)
    logits, target = call.logits, call.target
    dtype = statistics_dtype(logits.dtype)
    rows = Rows(logits)
    check_targets(target.reshape(-1).long(), rows.num_classes, row_loss.ignore_index)
    labels = rows.flat(target).long()  # an ignore_index beyond int32 must not wrap round
    weights = _class_weights(call, dtype)
    loss = logits.new_empty(rows.num_rows, dtype=dtype)
    statistics = logits.new_empty((2, rows.num_rows), dtype=dtype)
    for these, chunk, _ in rows.chunks(None, copied=_copies(logits)):
        row_losses(
            _readable(chunk)[0],
            labels[these],
            loss[these],
            statistics[:, these],
            row_loss,
            **weights,
            grad_scale=None,
            row_scale=None,
            gain=1.0,
            read_statistics=False,
            write_grad=False,
        )
    divisor = Divisor(
        labels, weights["class_weight"], None, row_loss.ignore_index, call.reduction == "mean",
        None, dtype,
    )  # fmt: skip
    total = rows.shaped(loss) if call.reduction == "none" else loss.sum()
    result, denominator = divisor.apply(total, call.empty_mean_is_nan)
    return result, rows.shaped(statistics), denominator


def _cross_entropy_backward(*args: Any, **kwargs: Any) -> Tensor:
    call = CROSS_ENTROPY_BACKWARD.named(args, kwargs)
    row_loss = _check_cross_entropy(call, "none")
    logits, target = call.logits, call.target
    _check_statistics(call.statistics, target)
    rows = Rows(logits)
    labels, upstream = rows.flat(target).long(), rows.flat(call.grad_loss)
    statistics = torch.stack([rows.flat(each) for each in call.statistics])
    weights = _class_weights(call, statistics.dtype)
    grad_logits: Tensor = logits.new_empty(logits.shape)
    for these, chunk, out in rows.chunks(grad_logits, copied=_copies(logits)):
        assert out is not None
        readable, _ = _readable(chunk)
        triton = use_triton(chunk.dtype, chunk.device.type)
        made = row_losses(
            readable,
            labels[these],
            statistics[0, these],  # no loss is written when the statistics are read
            statistics[:, these],
            row_loss,
            **weights,
            grad_scale=None,
            row_scale=upstream[these],
            gain=1.0,
            read_statistics=True,
            write_grad=True,
            **({"grad_logits": out} if triton else {}),
        )
        if not triton:
            out.copy_(made)
    return grad_logits


def _check_log_softmax(call: Any) -> LogitsOptions:
    check_logits(call.logits, call.index, name="index")
    if call.temperature is not None:
        check_temperature(call.temperature, call.index, "index")
    if call.need_grad_temperature and call.temperature is None:
        raise ValueError("need_grad_temperature: expected False, since temperature is None")
    options: LogitsOptions = LogitsOptions.of(call)
    return options


def _log_softmax(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = LOG_SOFTMAX.named(args, kwargs)
    options = _check_log_softmax(call)
    logits, index = call.logits, call.index
    dtype = statistics_dtype(logits.dtype)
    rows = Rows(logits)
    in_order_of_index = index.reshape(-1).long()
    check_targets(in_order_of_index, rows.num_classes, options.ignore_index, name="index")
    temperature = None
    if call.temperature is not None:
        check_temperatures(call.temperature.reshape(-1), in_order_of_index, options.ignore_index)
        temperature = rows.flat(call.temperature)
    labels = rows.flat(index).long()
    log_probs = logits.new_empty(rows.num_rows, dtype=dtype)
    statistics = logits.new_empty((2, rows.num_rows), dtype=dtype)
    for these, chunk, _ in rows.chunks(None, copied=_copies(logits)):
        readable, may_overwrite = _readable(chunk)
        forward_rows(
            readable,
            labels[these],
            log_probs[these],
            statistics[:, these],
            None,
            temperature=None if temperature is None else temperature[these],
            options=options,
            every_row=False,
            may_overwrite=may_overwrite,
        )
    return rows.shaped(log_probs), rows.shaped(statistics)


def _log_softmax_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = LOG_SOFTMAX_BACKWARD.named(args, kwargs)
    options = _check_log_softmax(call)
    logits, index = call.logits, call.index
    _check_statistics(call.statistics, index)
    rows = Rows(logits)
    labels, upstream = rows.flat(index).long(), rows.flat(call.grad_log_probs)
    statistics = torch.stack([rows.flat(each) for each in call.statistics])
    temperature = None if call.temperature is None else rows.flat(call.temperature)
    grad_logits = logits.new_empty(logits.shape) if call.need_grad_logits else None
    grad_temperature = None
    if call.need_grad_temperature:
        grad_temperature = logits.new_empty(rows.num_rows, dtype=statistics.dtype)
    for these, chunk, out in rows.chunks(grad_logits, copied=_copies(logits)):
        readable, may_overwrite = _readable(chunk)
        made = backward_rows(
            readable,
            out,
            labels[these],
            statistics[:, these],
            None if grad_temperature is None else grad_temperature[these],
            grad_log_probs=upstream[these],
            grad_entropy=None,
            grad_lse=None,
            temperature=None if temperature is None else temperature[these],
            options=options,
            may_overwrite=may_overwrite,
        )
        if out is not None and made is not None and made is not out:
            out.copy_(made)
    return (
        empty(logits) if grad_logits is None else grad_logits,
        empty(logits)
        if grad_temperature is None
        else rows.shaped(grad_temperature).to(call.temperature.dtype),
    )


# --------------------------------------------------------------------------------------- fakes


def _fake_cross_entropy(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = CROSS_ENTROPY.named(args, kwargs)
    _check_cross_entropy(call, call.reduction)
    logits, shape = call.logits, call.target.shape
    dtype = statistics_dtype(logits.dtype)
    return (
        logits.new_empty(shape if call.reduction == "none" else (), dtype=dtype),
        logits.new_empty((2, *shape), dtype=dtype),
        logits.new_empty((), dtype=dtype),
    )


def _fake_cross_entropy_backward(*args: Any, **kwargs: Any) -> Tensor:
    call = CROSS_ENTROPY_BACKWARD.named(args, kwargs)
    _check_cross_entropy(call, "none")
    grad: Tensor = call.logits.new_empty(call.logits.shape)
    return grad


def _fake_log_softmax(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = LOG_SOFTMAX.named(args, kwargs)
    _check_log_softmax(call)
    logits, shape = call.logits, call.index.shape
    dtype = statistics_dtype(logits.dtype)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty((2, *shape), dtype=dtype)


def _fake_log_softmax_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = LOG_SOFTMAX_BACKWARD.named(args, kwargs)
    _check_log_softmax(call)
    logits, temperature = call.logits, call.temperature
    return (
        logits.new_empty(logits.shape) if call.need_grad_logits else empty(logits),
        temperature.new_empty(temperature.shape) if call.need_grad_temperature else empty(logits),
    )


# ------------------------------------------------------------------------------------ autograd


def _setup_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = dict(zip(CROSS_ENTROPY.arguments, inputs, strict=True))
    check_flags(ctx, CROSS_ENTROPY, call, ("logits",))
    check_frozen(ctx, CROSS_ENTROPY, ("class_weight",))
    _, statistics, denominator = output
    ctx.mark_non_differentiable(statistics, denominator)
    ctx.set_materialize_grads(False)
    ctx.options = [call[name] for name in CROSS_ENTROPY_BACKWARD.arguments[5:]]
    ctx.mean = call["reduction"] == "mean"
    ctx.save_for_backward(
        call["logits"], call["target"], call["class_weight"], statistics, denominator
    )


def _differentiate_cross_entropy(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad_loss is None:
        return (None,) * len(CROSS_ENTROPY.arguments)
    logits, target, class_weight, statistics, denominator = ctx.saved_tensors
    if ctx.mean:
        grad_loss = grad_loss / denominator
    grad = CROSS_ENTROPY_BACKWARD.inner_call(
        logits, target, statistics, grad_loss.expand(target.shape), class_weight, *ctx.options
    )
    return in_order(CROSS_ENTROPY, {"logits": grad})


def _setup_log_softmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = dict(zip(LOG_SOFTMAX.arguments, inputs, strict=True))
    check_flags(ctx, LOG_SOFTMAX, call, ("logits", "temperature"))
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.options = [call[name] for name in LOG_SOFTMAX_BACKWARD.arguments[5:]]
    ctx.needs = {name: call[f"need_grad_{name}"] for name in ("logits", "temperature")}
    ctx.save_for_backward(call["logits"], call["index"], call["temperature"], output[1])


def _differentiate_log_softmax(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * len(LOG_SOFTMAX.arguments)
    logits, index, temperature, statistics = ctx.saved_tensors
    made = LOG_SOFTMAX_BACKWARD.inner_call(
        logits, index, statistics, grad, temperature, *ctx.options
    )
    return in_order(
        LOG_SOFTMAX,
        {
            name: value if ctx.needs[name] else None
            for name, value in zip(("logits", "temperature"), made, strict=True)
        },
    )


# -------------------------------------------------------------------------------- registration

CROSS_ENTROPY.implement(_cross_entropy, _fake_cross_entropy)
CROSS_ENTROPY.autograd(_setup_cross_entropy, _differentiate_cross_entropy)
CROSS_ENTROPY.vmap_by_sample()
CROSS_ENTROPY_BACKWARD.implement(_cross_entropy_backward, _fake_cross_entropy_backward)
CROSS_ENTROPY_BACKWARD.autograd(*gradients.refuse_twice(CROSS_ENTROPY.name))
CROSS_ENTROPY_BACKWARD.vmap_by_sample()
LOG_SOFTMAX.implement(_log_softmax, _fake_log_softmax)
LOG_SOFTMAX.autograd(_setup_log_softmax, _differentiate_log_softmax)
LOG_SOFTMAX.vmap_by_sample()
LOG_SOFTMAX_BACKWARD.implement(_log_softmax_backward, _fake_log_softmax_backward)
LOG_SOFTMAX_BACKWARD.autograd(*gradients.refuse_twice(LOG_SOFTMAX.name))
LOG_SOFTMAX_BACKWARD.vmap_by_sample()
