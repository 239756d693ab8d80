"""Losses and log-probabilities of logits that exist already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from greyhound_ops import torch_private, validation
from greyhound_ops.functional.log_probs import split_temperature
from greyhound_ops.ops import logits as ops

__all__ = ["cross_entropy", "selective_log_softmax"]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Cross entropy of ``softcap * tanh(logit_scale * logits / softcap)`` against ``target``.

    For a model that needs its logits anyway; where it does not, `chunked_linear_cross_entropy`
    spares them. Equals ``torch.nn.functional.cross_entropy(logits.float(), target)`` with the
    classes last, but for the mean over no counting row at all, which is 0 with zero gradients.

    Args:
        logits: ``[..., V]``, bf16, fp16, fp32 or fp64, any strides; never written to.
        target: Classes ``[...]``, int64 or int32, in ``[0, V)`` or ``ignore_index``.
        class_weight: ``[V]`` or None; the mean then divides by the sum of the targets' weights, as
            torch's does. Not differentiable.
        ignore_index: Rows with this target count nowhere: not in the loss, not in the divisor, and
            their gradients are exactly zero. Any integer.
        reduction: ``"mean"`` (over the rows that count), ``"sum"`` or ``"none"``.
        label_smoothing: In ``[0, 1]``.
        z_loss: Multiplier of the squared log-sum-exp of each row that counts, reduced like the
            cross entropy (PaLM, arXiv:2204.02311).
        logit_scale: Factor on the logits.
        softcap: Cap of the logits (Gemma 2, arXiv:2408.00118), or None.

    Returns:
        Loss in fp32 (fp64 for fp64 logits): a scalar, or ``[...]`` for ``"none"``.

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape, device, reduction or option that is not as above.
        TargetOutOfRangeError: On CPU, a target outside ``[0, V)`` that is not ``ignore_index``. On
            CUDA that row's loss and gradient become NaN without waiting for the device;
            `greyhound_ops.config.configure(checks=True)` makes it an error there too.
        NotDifferentiableTwiceError: When a gradient of this is differentiated again.
        ForwardModeError: Under forward-mode differentiation.

    Note:
        Memory: two numbers per row from forward to backward beside the logits, which the backward
        reads again; in the backward their gradient and nothing else of that size. Logits whose
        last dimension is strided are copied chunk by chunk. Under autocast nothing is cast. No host
        synchronisation; deterministic.
    """
    ops.check_logits(logits, target)
    if class_weight is not None:
        validation.check_float_tensor("class_weight", class_weight)
    validation.check_choice("reduction", reduction, validation.REDUCTIONS)
    validation.check_row_options(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_scale=logit_scale,
        softcap=softcap,
    )
    grad_mode = torch.is_grad_enabled()
    if class_weight is not None and class_weight.requires_grad and grad_mode:
        raise ValueError("class_weight: expected a tensor that needs no gradient, as in torch")
    loss: Tensor = _callable(ops.CROSS_ENTROPY)(
        logits,
        target,
        class_weight,
        ignore_index,
        reduction,
        float(label_smoothing),
        float(z_loss),
        float(logit_scale),
        None if softcap is None else float(softcap),
        False,  # the mean over no row is 0
        grad_mode and logits.requires_grad,
    )[0]
    return loss


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``log_softmax(logits / temperature, -1)`` at one class per row.

    Equals ``(logits / temperature).log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)``
    without a ``[..., V]`` tensor of log-probabilities. For a model that needs its logits anyway;
    where it does not, `chunked_linear_log_probs` spares them.

    Args:
        logits: ``[..., V]``, bf16, fp16, fp32 or fp64, any strides; never written to.
        index: Classes ``[...]``, int64 or int32, in ``[0, V)`` or ``ignore_index``.
        temperature: Positive number, or a tensor of one per row ``[...]`` or one for all ``[]``; a
            tensor that requires grad gets its gradient.
        ignore_index: Rows with this index have the log-probability 0, and their gradients are
            exactly zero. Any integer.
        dtype: Of the result; by default that of the logits. Everything is computed in fp32 (fp64
            for fp64 logits) and rounded once; bf16 has a step of 0.06 at a log-probability of -10,
            so ask for `torch.float32` where ratios of probabilities follow.

    Returns:
        Log-probabilities ``[...]`` in nats, never positive.

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape or device that is not as above; on CPU, a temperature per row that is
            not positive where the index is not ignored. On CUDA such a row becomes NaN.
        TargetOutOfRangeError: On CPU, an index outside ``[0, V)`` that is not ``ignore_index``. On
            CUDA that row's result and gradient become NaN without waiting for the device;
            `greyhound_ops.config.configure(checks=True)` makes it an error there too.
        NotDifferentiableTwiceError: When a gradient of this is differentiated again.
        ForwardModeError: Under forward-mode differentiation.

    Note:
        Memory as in `cross_entropy`.
    """
    ops.check_logits(logits, index, name="index")
    validation.check_row_options(ignore_index=ignore_index)
    if dtype is not None and dtype not in validation.FLOAT_DTYPES:
        raise TypeError(f"dtype: expected a floating dtype or None, got {dtype}")
    fixed_temperature, per_row = split_temperature(temperature, index, "index")
    grad_mode = torch.is_grad_enabled()
    log_probs: Tensor = _callable(ops.LOG_SOFTMAX)(
        logits,
        index,
        per_row,
        fixed_temperature,
        ignore_index,
        grad_mode and logits.requires_grad,
        grad_mode and per_row is not None and per_row.requires_grad,
    )[0]
    return log_probs.to(logits.dtype if dtype is None else dtype)


def _callable(op: Any) -> Callable[..., Any]:
    """How an op is called here: under ``torch.func`` in the form that its transforms take."""
    if not torch.compiler.is_compiling() and torch_private.functorch_is_active():
        return op.functorch_call  # type: ignore[no-any-return]
    return op.packet  # type: ignore[no-any-return]
