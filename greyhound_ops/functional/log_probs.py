"""Log-probabilities of a linear projection's classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from greyhound_ops import torch_private, validation
from greyhound_ops.ops import linear_log_probs
from greyhound_ops.reference.log_probs import LogProbs

__all__ = ["LogProbs", "chunked_linear_log_probs"]


@overload
def chunked_linear_log_probs(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    return_entropy: Literal[False] = False,
    return_lse: Literal[False] = False,
    return_argmax: Literal[False] = False,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
    keep_logits: bool | None = None,
) -> Tensor: ...


@overload
def chunked_linear_log_probs(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_argmax: bool = False,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
    keep_logits: bool | None = None,
) -> Tensor | LogProbs: ...


def chunked_linear_log_probs(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_argmax: bool = False,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
    keep_logits: bool | None = None,
) -> Tensor | LogProbs:
    """Log-probability of ``target`` under ``softmax(input @ weight.T + bias)``, in row chunks.

    Equals ``log_softmax(F.linear(input, weight, bias).float() / temperature, -1)`` gathered at the
    targets, without the logits. The logits are ``softcap * tanh(logit_scale * x / softcap) /
    temperature`` with ``x = input @ weight.T + bias``, without the cap
    ``logit_scale * x / temperature``.

    Args:
        input: Hidden states ``[..., D]``, bf16, fp16, fp32 or fp64, any strides.
        weight: Projection ``[V, D]``, dtype of ``input`` unless under `torch.autocast`; the
            transpose of a contiguous ``[D, V]`` is as good.
        target: Classes ``[...]``, int64 or int32, in ``[0, V)`` or ``ignore_index``.
        bias: ``[V]`` or None.
        temperature: Positive number, or a tensor of one per row ``[...]`` or one for all ``[]``; a
            tensor that requires grad gets its gradient.
        ignore_index: Rows with this target have the log-probability 0, from which no gradient
            comes. Entropy, log-sum-exp and argmax do not depend on the target: such rows have their
            ordinary values and gradients there. Any integer.
        logit_scale: Factor on the logits (Cohere, Granite).
        softcap: Cap of the logits (Gemma 2, arXiv:2408.00118), or None.
        return_entropy: Whether to return the entropy of each row's softmax, in nats.
        return_lse: Whether to return the log-sum-exp of each row.
        return_argmax: Whether to return the class of each row's largest logit, the first if there
            are several. Not differentiable.
        chunk_size: Rows per chunk, or None for the plan of `greyhound_ops.chunking`. The result
            does not depend on it beyond rounding.
        grad_weight_accum_dtype: ``"fp32"`` sums the chunks' contributions to ``grad_weight`` in
            float32; ``"weight"`` in the dtype of the weight, which saves one fp32 ``[V, D]``.
        keep_logits: Whether the logits of all rows are kept for the backward, which then has no
            need to project once more, a product in four, and writes their gradient over them. None
            keeps them on CUDA where they take no more memory than the backward's float32 sum over
            chunks would (``N <= 2 D`` in bf16): the peak of a step is the same, but for several
            calls before one backward, which hold theirs together. Only where ``weight`` needs a
            gradient, and not under `torch.func`.

    Returns:
        Log-probabilities ``[...]`` in nats, never positive, in fp32 (fp64 for fp64 input); with any
        of the other outputs a `LogProbs`, in which those not asked for are None. The entropy lies
        in ``[0, log V]``. Every output but argmax is differentiable.

    Raises:
        TypeError: A dtype that is not supported, or input and weight of different dtypes outside
            autocast.
        ValueError: A shape, device or option that is not as above; on CPU, a temperature per row
            that is not positive where the target is not ignored. On CUDA such a row becomes NaN.
        TargetOutOfRangeError: On CPU, a target outside ``[0, V)`` that is not ``ignore_index``. On
            CUDA that row's log-probability, and the gradient that comes from it, become NaN without
            waiting for the device; `greyhound_ops.config.configure(checks=True)` makes it an error
            there too.
        NotDifferentiableTwiceError: When a gradient of this is differentiated again.
        ForwardModeError: Under forward-mode differentiation.

    Note:
        Memory above the inputs: two or three numbers per row from forward to backward (and the
        logits where ``keep_logits`` says so, in place of the sum and the chunk below), one chunk of
        logits (at most 512 MiB on CUDA when ``weight`` needs a gradient, or as much as its fp32
        accumulator's final cast takes; 256 MiB when only others do; 128 MiB without gradients) and
        the gradients themselves. A tensor that needs no gradient costs no buffer and no product.
        The backward projects once more, unless the logits are kept. No host synchronisation;
        capturable in a CUDA graph; deterministic for a given GPU and shape.
    """
    # What the op's schema would refuse in its own words, or read requires_grad of, before the op.
    validation.check_projection(input, weight, bias)
    validation.check_target(input, target)
    validation.check_row_options(
        ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap
    )
    validation.check_chunk_size(chunk_size)
    validation.check_choice(
        "grad_weight_accum_dtype", grad_weight_accum_dtype, validation.ACCUM_DTYPES
    )
    for name, value in (
        ("return_entropy", return_entropy),
        ("return_lse", return_lse),
        ("return_argmax", return_argmax),
    ):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {value!r}")
    linear_log_probs.check_keep_logits(keep_logits)
    fixed_temperature, per_row = split_temperature(temperature, target)
    grad_mode = torch.is_grad_enabled()
    call: Callable[..., Any] = torch.ops.greyhound.linear_log_probs
    if not torch.compiler.is_compiling() and torch_private.functorch_is_active():
        call = linear_log_probs.OP.functorch_call
    keeps = grad_mode and weight.requires_grad and call is torch.ops.greyhound.linear_log_probs
    if keeps and keep_logits is None:
        keep_logits = linear_log_probs.keeps_logits(input, weight, grad_weight_accum_dtype)
    log_probs, entropy, lse, argmax, *_ = call(
        input,
        weight,
        target,
        bias,
        per_row,
        fixed_temperature,
        ignore_index,
        float(logit_scale),
        None if softcap is None else float(softcap),
        return_entropy,
        return_lse,
        return_argmax,
        chunk_size,
        grad_weight_accum_dtype,
        None,  # products in the dtype of the operands, or autocast's
        grad_mode and input.requires_grad,
        grad_mode and weight.requires_grad,
        grad_mode and bias is not None and bias.requires_grad,
        grad_mode and per_row is not None and per_row.requires_grad,
        keeps and bool(keep_logits),
    )
    if not (return_entropy or return_lse or return_argmax):
        return log_probs  # type: ignore[no-any-return]
    return LogProbs(
        log_probs,
        entropy if return_entropy else None,
        lse if return_lse else None,
        argmax if return_argmax else None,
    )


def split_temperature(
    temperature: float | Tensor, target: Tensor, name: str = "target"
) -> tuple[float, Tensor | None]:
    """A temperature as the ops take it: a number, and one per row or None.

    Args:
        temperature: As the caller gave it.
        target: ``[...]``, a target of each row.
        name: Of the target, for messages.
    """
    if not isinstance(temperature, Tensor):
        linear_log_probs.check_temperature(temperature)
        return float(temperature), None
    if temperature.dim() == 0:
        temperature = temperature.expand(target.shape)
    linear_log_probs.check_temperature(temperature, target, name)
    return 1.0, temperature
