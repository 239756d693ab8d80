"""Several cross entropies in one call: multi-token prediction and several heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from greyhound_ops import validation
from greyhound_ops.ops import linear_cross_entropy_terms as _ops  # noqa: F401

__all__ = [
    "MultiCrossEntropyOutput",
    "chunked_multi_head_cross_entropy",
    "chunked_multi_token_cross_entropy",
]


class MultiCrossEntropyOutput(NamedTuple):
    """A sum of cross entropies and its terms.

    Attributes:
        loss: Scalar, the weighted sum.
        losses: ``[K]``, each term's own loss before its weight; detached.
    """

    loss: Tensor
    losses: Tensor


def chunked_multi_token_cross_entropy(
    inputs: Sequence[Tensor] | Tensor,
    weight: Tensor,
    targets: Sequence[Tensor] | Tensor,
    bias: Tensor | None = None,
    *,
    term_weights: Sequence[float] | Tensor | None = None,
    detach_head: Sequence[bool] | bool = False,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
) -> MultiCrossEntropyOutput:
    """Cross entropies of several hidden states on one shared head.

    Multi-token prediction (arXiv:2404.19737; DeepSeek-V3, arXiv:2412.19437) trains K hidden states
    through the model's one unembedding. As K separate calls autograd holds K gradients of the head
    and adds them up; here all terms are summed in one accumulator.

    Args:
        inputs: K hidden states ``[..., D]``, as a sequence or stacked ``[K, ..., D]``; each may
            have rows of its own number.
        weight: Projection ``[V, D]``.
        targets: K targets ``[...]``, int64 or int32, as a sequence or stacked; already shifted to
            what each hidden state predicts.
        bias: ``[V]`` or None.
        term_weights: K factors of the terms, as numbers or a tensor ``[K]``; ones if None. Not
            differentiable.
        detach_head: Whether a term leaves the head (weight and bias) alone, for all terms or one
            flag each; its hidden state still gets its gradient, without the product for the head.
        ignore_index: Rows with this target count nowhere.
        reduction: ``"mean"``, each term over its own counting rows (0 if there are none), or
            ``"sum"``.
        label_smoothing: In ``[0, 1]``.
        z_loss: Multiplier of the squared log-sum-exp.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits, or None.
        chunk_size: Rows per chunk, or None for the plan.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Returns:
        The sum ``loss`` and the terms ``losses [K]`` (detached), fp32 (fp64 for fp64 input).

    Raises:
        TypeError: A dtype that is not supported, or tensors of different dtypes outside autocast.
        ValueError: A number of tensors, a shape, device or option that is not as above.
        TargetOutOfRangeError: On the CPU; on CUDA that row becomes NaN.
        NotDifferentiableTwiceError: When a gradient of this is differentiated again.
        ForwardModeError: Under forward-mode differentiation.

    Note:
        Memory above the inputs: one chunk of logits and the gradients asked for, once each. In
        fp16 all terms share one scale: the input gradient of a term whose factor (weight over
        counting rows) is below 2^-10 of the largest loses bits.
    """
    return _call(
        _as_list("inputs", inputs),
        [weight],
        _as_list("targets", targets),
        [] if bias is None else [bias],
        term_weights,
        detach_head,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_scale=logit_scale,
        softcap=softcap,
        chunk_size=chunk_size,
        grad_weight_accum_dtype=grad_weight_accum_dtype,
    )


def chunked_multi_head_cross_entropy(
    input: Tensor,
    weights: Sequence[Tensor] | Tensor,
    targets: Sequence[Tensor] | Tensor,
    biases: Sequence[Tensor] | Tensor | None = None,
    *,
    term_weights: Sequence[float] | Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
) -> MultiCrossEntropyOutput:
    """Cross entropies of one hidden state on several heads.

    Codebook heads (MusicGen, arXiv:2306.05284) and Medusa's (arXiv:2401.10774) read the same hidden
    state. All heads of a chunk of rows go through one chunk of memory, and their contributions to
    ``grad_input`` are summed in fp32 and rounded once, where K calls would make K tensors that
    autograd adds up.

    Args:
        input: Hidden states ``[..., D]``.
        weights: K projections ``[V_k, D]``, as a sequence or stacked ``[K, V, D]``.
        targets: K targets ``[...]``, as a sequence or stacked ``[K, ...]``.
        biases: K biases ``[V_k]``, or None.
        term_weights: As for `chunked_multi_token_cross_entropy`, as all further arguments.
        ignore_index: Rows with this target count nowhere.
        reduction: ``"mean"`` or ``"sum"``, of each term.
        label_smoothing: In ``[0, 1]``.
        z_loss: Multiplier of the squared log-sum-exp.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits, or None.
        chunk_size: Rows per chunk, or None for the plan.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Returns:
        The sum ``loss`` and the terms ``losses [K]`` (detached), fp32 (fp64 for fp64 input).

    Raises:
        TypeError: As for `chunked_multi_token_cross_entropy`.
        ValueError: Likewise.

    Note:
        Memory above the inputs: one chunk of logits, one ``[C, D]`` of fp32 and the gradients.
    """
    return _call(
        [input],
        _as_list("weights", weights),
        _as_list("targets", targets),
        [] if biases is None else _as_list("biases", biases),
        term_weights,
        False,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_scale=logit_scale,
        softcap=softcap,
        chunk_size=chunk_size,
        grad_weight_accum_dtype=grad_weight_accum_dtype,
    )


def _as_list(name: str, tensors: object) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        if tensors.dim() == 0:
            raise ValueError(f"{name}: expected K tensors, stacked or in a sequence, got a scalar")
        return list(tensors.unbind(0))
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(
            f"{name}: expected a tensor or a sequence of tensors, got {type(tensors).__name__}"
        )
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name}: expected tensors, got {type(tensor).__name__} at position {index}"
            )
    return list(tensors)


def _call(
    inputs: list[Tensor],
    weights: list[Tensor],
    targets: list[Tensor],
    biases: list[Tensor],
    term_weights: Sequence[float] | Tensor | None,
    detach_head: Sequence[bool] | bool,
    **options: Any,
) -> MultiCrossEntropyOutput:
    # What the op's schema would refuse in its own words.
    validation.check_terms(inputs, weights, targets, biases)
    reduction = options["reduction"]
    validation.check_choice("reduction", reduction, ("mean", "sum"))
    validation.check_options(**options)
    for name in ("label_smoothing", "z_loss", "logit_scale"):
        options[name] = float(options[name])
    if options["softcap"] is not None:
        options["softcap"] = float(options["softcap"])
    count = len(targets)
    grad_mode = torch.is_grad_enabled()
    loss, losses, *_ = torch.ops.greyhound.linear_cross_entropy_terms(
        inputs,
        weights,
        targets,
        biases,
        _term_weight(inputs[0], term_weights, count, grad_mode),
        _flags(detach_head, count),
        **options,
        need_grad_inputs=[grad_mode and each.requires_grad for each in inputs],
        need_grad_weights=[grad_mode and each.requires_grad for each in weights],
        need_grad_biases=[grad_mode and each.requires_grad for each in biases],
        grads_are_private=True,
    )
    return MultiCrossEntropyOutput(loss, losses)


def _flags(detach_head: object, count: int) -> list[bool]:
    flags = [detach_head] * count if isinstance(detach_head, bool) else detach_head
    if not isinstance(flags, (list, tuple)) or not all(isinstance(each, bool) for each in flags):
        raise TypeError(f"detach_head: expected a bool or {count} bools, got {detach_head!r}")
    if len(flags) != count:
        raise ValueError(f"detach_head: expected {count} flags, got {len(flags)}")
    return list(flags)


def _term_weight(input: Tensor, term_weights: object, count: int, grad_mode: bool) -> Tensor | None:
    if term_weights is None:
        return None
    if not isinstance(term_weights, Tensor):
        if not isinstance(term_weights, (list, tuple)):
            raise TypeError(
                f"term_weights: expected {count} numbers or a tensor, got {term_weights!r}"
            )
        if len(term_weights) != count:
            raise ValueError(f"term_weights: expected {count} numbers, got {len(term_weights)}")
        for value in term_weights:
            validation.check_number("term_weights", value)
        # Fills, not a copy from the host, which would wait for the device.
        return torch.stack(
            [
                torch.full((), value, dtype=torch.float64, device=input.device)
                for value in term_weights
            ]
        )
    if term_weights.requires_grad and grad_mode:
        raise ValueError("term_weights: expected a tensor that needs no gradient; detach it")
    validation.check_term_weight(input, term_weights, count)
    return term_weights
