"""Cross entropy of a linear projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from greyhound_ops import torch_private, validation
from greyhound_ops.ops import linear_cross_entropy

__all__ = ["CrossEntropyOutput", "chunked_linear_cross_entropy"]


class CrossEntropyOutput(NamedTuple):
    """A loss and what was asked for beside it.

    Attributes:
        loss: As without further outputs.
        z_loss: The part of ``loss`` that is the z-loss, reduced alike and detached; or None.
        lse: Log-sum-exp ``[...]`` of each row's logits, differentiable, 0 for ignored rows; or
            None.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    lse: Tensor | None = None


def chunked_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    row_weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    return_z_loss: bool = False,
    return_lse: bool = False,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of ``input @ weight.T + bias`` against ``target``, computed in row chunks.

    Equals ``torch.nn.functional.cross_entropy(F.linear(input, weight, bias).float(), target)`` but
    for one thing: the mean over no counting row at all is 0, with zero gradients, where torch has
    NaN. A graph rewritten by ``greyhound_lowering`` keeps torch's NaN.

    The logits are ``softcap * tanh(logit_scale * (input @ weight.T + bias) / softcap)``, without
    the cap ``logit_scale * (input @ weight.T + bias)``.

    Args:
        input: Hidden states ``[..., D]``, bf16, fp16, fp32 or fp64, any strides.
        weight: Projection ``[V, D]``, dtype of ``input`` unless under `torch.autocast`; the
            transpose of a contiguous ``[D, V]`` is as good.
        target: Classes ``[...]``, int64 or int32, in ``[0, V)`` or ``ignore_index``.
        bias: ``[V]`` or None.
        class_weight: ``[V]`` or None; the mean then divides by the sum of the targets' weights, as
            torch's does. Not differentiable.
        ignore_index: Rows with this target count nowhere: not in the loss, not in the divisor, and
            their gradients are exactly zero. Any integer.
        reduction: ``"mean"`` (over the rows that count), ``"sum"`` or ``"none"``.
        label_smoothing: In ``[0, 1]``.
        z_loss: Multiplier of the squared log-sum-exp of each row that counts, reduced like the
            cross entropy (PaLM, arXiv:2204.02311). 0 is exactly plain cross entropy.
        logit_scale: Factor on the logits (Cohere, Granite).
        softcap: Cap of the logits (Gemma 2, arXiv:2408.00118), or None.
        row_weight: ``[...]`` floating, a factor on each row's loss (cross entropy and z-loss), or
            None. The mean then divides by the sum of the weights of the rows that count, as it does
            with class weights. Not differentiable.
        denominator: Number or scalar tensor on the device of ``input`` that the mean divides by
            instead (tokens of all accumulated or all ranks' batches, for one), or None. Only with
            ``reduction="mean"``. Not differentiable.
        return_z_loss: Return the z-loss part as well.
        return_lse: Return each row's log-sum-exp as well, differentiable. The gradients are then
            made in the backward, which projects once more.
        chunk_size: Rows per chunk, or None for the plan of `greyhound_ops.chunking`. The result
            does not depend on it beyond rounding.
        grad_weight_accum_dtype: ``"fp32"`` sums the chunks' contributions to ``grad_weight`` in
            float32; ``"weight"`` in the dtype of the weight, which saves one fp32 ``[V, D]``.

    Returns:
        Loss in fp32 (fp64 for fp64 input): a scalar, or ``[...]`` for ``"none"``. With
        ``return_z_loss`` or ``return_lse`` a `CrossEntropyOutput`.

    Raises:
        TypeError: A dtype that is not supported, or input and weight of different dtypes outside
            autocast.
        ValueError: A shape, device, reduction or option that is not as above.
        TargetOutOfRangeError: On CPU, a target outside ``[0, V)`` that is not ``ignore_index``. On
            CUDA that row's loss and gradient become NaN without waiting for the device;
            `greyhound_ops.config.configure(checks=True)` makes it an error there too.
        NotDifferentiableTwiceError: When a gradient of this is differentiated again.
        ForwardModeError: Under forward-mode differentiation.

    Note:
        Memory above the inputs: one chunk of logits (at most 512 MiB on CUDA when ``weight`` needs
        a gradient, 256 MiB otherwise) and the gradients themselves. A tensor that needs no gradient
        costs no buffer and no product. No host synchronisation; capturable in a CUDA graph;
        deterministic for a given GPU and shape. The gradients are made in the forward when
        ``reduction`` is a scalar one; with ``"none"`` or ``return_lse`` the backward projects once
        more.
    """
    # What the op's schema would refuse in its own words, or read requires_grad of, before the op.
    validation.check_projection(input, weight, bias)
    validation.check_target(input, target)
    if class_weight is not None:
        validation.check_float_tensor("class_weight", class_weight)
    validation.check_options(
        reduction=reduction,
        chunk_size=chunk_size,
        grad_weight_accum_dtype=grad_weight_accum_dtype,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_scale=logit_scale,
        softcap=softcap,
    )
    validation.check_row_weight(input, row_weight)
    divisor = _divisor(input, denominator, reduction)
    grad_mode = torch.is_grad_enabled()
    frozen = {"class_weight": class_weight, "row_weight": row_weight, "denominator": divisor}
    for name, value in frozen.items():
        if value is not None and value.requires_grad and grad_mode:
            raise ValueError(f"{name}: expected a tensor that needs no gradient; detach it")
    call: Callable[..., Any] = torch.ops.greyhound.linear_cross_entropy
    if not torch.compiler.is_compiling() and torch_private.functorch_is_active():
        call = linear_cross_entropy.OP.functorch_call
    loss, statistics, divided_by, _, _, _, lse, _ = call(
        input,
        weight,
        target,
        bias,
        class_weight,
        ignore_index,
        reduction,
        float(label_smoothing),
        float(z_loss),
        float(logit_scale),
        None if softcap is None else float(softcap),
        False,  # the mean over no row is 0
        chunk_size,
        grad_weight_accum_dtype,
        None,  # products in the dtype of the operands, or autocast's
        grad_mode and input.requires_grad,
        grad_mode and weight.requires_grad,
        grad_mode and bias is not None and bias.requires_grad,
        True,  # only the loss leaves this function
        row_weight,
        divisor,
        return_lse,
    )
    if not (return_z_loss or return_lse):
        return loss  # type: ignore[no-any-return]
    part = None
    if return_z_loss:
        # Ignored rows have statistics of zero.
        part = float(z_loss) * statistics.sum(0).square()
        if row_weight is not None:
            part = torch.where(target == ignore_index, 0.0, part * row_weight.to(part.dtype))
        if reduction != "none":
            part = part.sum() / divided_by[0]
    return CrossEntropyOutput(loss, part, lse if return_lse else None)


def _divisor(input: Tensor, denominator: object, reduction: str) -> Tensor | None:
    """The caller's denominator as a tensor on the device of the input."""
    if denominator is None:
        return None
    if not isinstance(denominator, Tensor):
        if isinstance(denominator, bool) or not isinstance(
            denominator, (int, float, torch.SymInt, torch.SymFloat)
        ):
            raise TypeError(
                f"denominator: expected a number, a scalar tensor or None, got {denominator!r}"
            )
        # A fill, not a copy from the host, which would wait for the device.
        number: Any = denominator
        denominator = torch.full((), number, dtype=torch.float64, device=input.device)
    if reduction != "mean":
        raise ValueError(
            f"denominator: expected None with reduction={reduction!r}; only a mean is divided"
        )
    if denominator.dim() != 0:
        raise ValueError(f"denominator: expected a scalar, got shape {list(denominator.shape)}")
    validation.check_same_device(input, denominator=denominator)
    return denominator
