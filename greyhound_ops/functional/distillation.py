"""Distillation of a teacher's output distribution into a student's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from greyhound_ops import torch_private, validation
from greyhound_ops.ops import linear_distillation

__all__ = ["DistillationOutput", "chunked_linear_distillation"]


class DistillationOutput(NamedTuple):
    """A distillation loss and what it is the sum of.

    Attributes:
        loss: ``soft_weight * soft + hard_weight * hard``, differentiable.
        soft: The divergence, reduced like ``loss``, unweighted and detached.
        hard: The cross entropy likewise; 0 without ``hard_weight``, where it is not computed.
    """

    loss: Tensor
    soft: Tensor
    hard: Tensor


def chunked_linear_distillation(
    input: Tensor,
    weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    divergence: str = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
    return_parts: bool = False,
) -> Tensor | DistillationOutput:
    """Divergence between the softmaxes of two projections, computed in row chunks.

    With student logits ``s = input @ weight.T + bias``, teacher logits ``t`` likewise,
    ``Q = softmax(s / temperature)`` and ``P = softmax(t / temperature)``::

        "kl"          KL(P || Q), forward KL
        "reverse_kl"  KL(Q || P)
        "jsd"         beta * KL(P || M) + (1 - beta) * KL(Q || M),  M = beta * P + (1 - beta) * Q
        "tvd"         sum |P - Q| / 2
        "cosine"      1 - s.t / (|s| |t|), whatever the temperature

        loss = soft_weight * divergence + hard_weight * cross_entropy(s, target)

    ``"jsd"`` is the generalised Jensen-Shannon divergence of arXiv:2306.13649, with the ends as TRL
    and Liger have them: ``beta=0`` is exactly ``"kl"`` and ``beta=1`` exactly ``"reverse_kl"``
    (the formula's own limits there are 0).

    The divergence is not multiplied by the squared temperature: pass ``soft_weight=temperature**2``
    for the gradient scale of Hinton et al. (arXiv:1503.02531). The cross entropy is that of ``s``
    at temperature 1. The defaults give the divergence alone, 0 for identical models.

    Args:
        input: Hidden states of the student ``[..., D]``, bf16, fp16, fp32 or fp64, any strides.
        weight: Projection of the student ``[V, D]``, dtype of ``input`` unless under
            `torch.autocast`; the transpose of a contiguous ``[D, V]`` is as good.
        teacher_input: Hidden states of the teacher ``[..., D_t]``, of a size and dtype of its own.
        teacher_weight: Projection of the teacher ``[V, D_t]``, dtype of ``teacher_input``.
        target: Classes ``[...]``, int64 or int32, or None: then every row counts. Without
            ``hard_weight`` a target says no more than whether its row counts.
        bias: ``[V]`` of the student, or None.
        teacher_bias: ``[V]`` of the teacher, or None.
        divergence: One of the above.
        beta: In ``[0, 1]``, weight of the teacher in the mixture of ``"jsd"``; the others ignore
            it.
        temperature: Positive; divides the logits of both.
        soft_weight: Factor on the divergence.
        hard_weight: Factor on the cross entropy; needs ``target``. 0 leaves it out altogether.
        ignore_index: Rows with this target count nowhere: not in the loss, not in the divisor, and
            their gradients are exactly zero. Any integer.
        reduction: ``"mean"`` (over the rows that count; 0 over none), ``"sum"`` or ``"none"``.
        chunk_size: Rows per chunk, or None for a plan. The result does not depend on it beyond
            rounding.
        grad_weight_accum_dtype: ``"fp32"`` sums the chunks' contributions to ``grad_weight`` in
            float32; ``"weight"`` in the dtype of the weight, which saves one fp32 ``[V, D]``.
        return_parts: Return divergence and cross entropy beside the loss.

    Returns:
        Loss in fp32 (fp64 for fp64 input): a scalar, or ``[...]`` for ``"none"``. With
        ``return_parts`` a `DistillationOutput`.

    Raises:
        TypeError: A dtype that is not supported, or input and weight (of either model) of different
            dtypes outside autocast.
        ValueError: A shape, device, reduction or option that is not as above, in particular two
            heads of different V.
        TargetOutOfRangeError: On CPU, with ``hard_weight``, a target outside ``[0, V)`` that is not
            ``ignore_index``. On CUDA that row's loss and gradient become NaN without waiting for
            the device; `greyhound_ops.config.configure(checks=True)` makes it an error there too.
        NotDifferentiableTwiceError: When a gradient of this is differentiated again.
        ForwardModeError: Under forward-mode differentiation.

    Note:
        The teacher is never differentiated, as under `torch.no_grad`: what requires grad among its
        tensors is detached and gets no gradient from here. If both share a head, it gets the
        student's gradient.

        Memory above the inputs: one chunk of student and of teacher logits (together at most 256
        MiB on CUDA when ``weight`` needs a gradient, 512 MiB otherwise) and the gradients
        themselves. A tensor that needs no gradient costs no buffer and no product. No host
        synchronisation; capturable in a CUDA graph; deterministic for a given GPU and shape. The
        gradients are made in the forward when ``reduction`` is a scalar one; with ``"none"`` the
        backward projects both sides once more, unless only ``input`` needs a gradient.
    """
    # What the op's schema would refuse in its own words, or read requires_grad of, before the op.
    validation.check_options(
        reduction=reduction,
        chunk_size=chunk_size,
        grad_weight_accum_dtype=grad_weight_accum_dtype,
        ignore_index=ignore_index,
    )
    validation.check_distillation_options(
        divergence=divergence,
        beta=beta,
        temperature=temperature,
        soft_weight=soft_weight,
        hard_weight=hard_weight,
    )
    linear_distillation.check_tensors(
        input, weight, teacher_input, teacher_weight, target, bias, teacher_bias, hard_weight
    )
    grad_mode = torch.is_grad_enabled()
    call: Callable[..., Any] = torch.ops.greyhound.linear_distillation
    if not torch.compiler.is_compiling() and torch_private.functorch_is_active():
        call = linear_distillation.OP.functorch_call
    loss, parts, *_ = call(
        input,
        weight,
        teacher_input.detach(),
        teacher_weight.detach(),
        target,
        bias,
        None if teacher_bias is None else teacher_bias.detach(),
        divergence,
        float(beta),
        float(temperature),
        float(soft_weight),
        float(hard_weight),
        ignore_index,
        reduction,
        chunk_size,
        grad_weight_accum_dtype,
        None,  # products in the dtype of the operands, or autocast's
        grad_mode and input.requires_grad,
        grad_mode and weight.requires_grad,
        grad_mode and bias is not None and bias.requires_grad,
        True,  # none of the gradients leaves this function
    )
    if return_parts:
        return DistillationOutput(loss, parts[0], parts[1])
    return loss  # type: ignore[no-any-return]
