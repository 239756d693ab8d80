"""Cross entropy of logits and of a linear projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["cross_entropy", "linear_cross_entropy"]


def linear_cross_entropy(
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
    empty_mean: float = 0.0,
    return_z_loss: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor | None, Tensor | None]:
    """Cross entropy of ``softcap * tanh(logit_scale * (input @ weight.T + bias) / softcap)``.

    Args:
        input: Hidden states ``[..., D]``.
        weight: Projection ``[V, D]``.
        target: Class indices ``[...]``.
        bias: ``[V]``.
        class_weight: ``[V]``, as ``weight`` of `torch.nn.functional.cross_entropy`.
        ignore_index: Target value of rows that do not count.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        label_smoothing: In ``[0, 1]``.
        z_loss: Multiplier of the squared log-sum-exp of each row that counts, reduced like the
            cross entropy (PaLM, arXiv:2204.02311, section 5).
        logit_scale: Factor on the logits.
        softcap: Cap of the logits (Gemma 2, arXiv:2408.00118, section 2); None for none.
        row_weight: ``[...]``, factor on each row's loss.
        denominator: What the mean divides by; by default the weights of the rows that count.
        empty_mean: Value of a mean over no row at all.
        return_z_loss: Return the z-loss part as well.
        return_lse: Return each row's log-sum-exp as well (0 for ignored rows).

    Returns:
        Loss in float32 (float64 for float64 input): scalar, or ``[...]`` for ``"none"``; with
        further outputs ``(loss, z_loss, lse)``.
    """
    return cross_entropy(
        F.linear(input, weight, bias),
        target,
        class_weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_scale=logit_scale,
        softcap=softcap,
        row_weight=row_weight,
        denominator=denominator,
        empty_mean=empty_mean,
        return_z_loss=return_z_loss,
        return_lse=return_lse,
    )


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
    row_weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    empty_mean: float = 0.0,
    return_z_loss: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor | None, Tensor | None]:
    """Cross entropy of ``softcap * tanh(logit_scale * logits / softcap)``.

    Args:
        logits: ``[..., V]``.
        target: Class indices ``[...]``.
        class_weight: As for `linear_cross_entropy`; so are the other options.
        ignore_index: See there.
        reduction: See there.
        label_smoothing: See there.
        z_loss: See there.
        logit_scale: See there.
        softcap: See there.
        row_weight: See there.
        denominator: See there.
        empty_mean: See there.
        return_z_loss: See there.
        return_lse: See there.

    Returns:
        As `linear_cross_entropy`.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits.reshape(-1, logits.shape[-1]) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat_target = target.reshape(-1).long()
    counts = flat_target != ignore_index
    if class_weight is not None:
        class_weight = class_weight.to(logits.dtype)
    loss = F.cross_entropy(
        logits,
        flat_target,
        weight=class_weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    lse = torch.logsumexp(logits, -1).masked_fill(~counts, 0.0)
    parts = [loss, z_loss * lse.square()]
    weights = torch.ones_like(loss)
    if row_weight is not None:
        weights = row_weight.reshape(-1).to(loss.dtype)
    parts = [(part * weights).masked_fill(~counts, 0.0) for part in parts]
    if reduction == "none":
        parts = [part.reshape(target.shape) for part in parts]
    else:
        parts = [part.sum() for part in parts]
    if reduction == "mean":
        if denominator is None:
            if class_weight is not None:
                weights = weights * class_weight[flat_target.masked_fill(~counts, 0)]
            denominator = weights.masked_fill(~counts, 0.0).sum()
            if not counts.any():
                denominator = 1.0
                parts[0] = parts[0] + empty_mean
        parts = [part / denominator for part in parts]
    total = parts[0] + parts[1] if z_loss else parts[0]
    if not (return_z_loss or return_lse):
        return total
    return (
        total,
        parts[1].detach() if return_z_loss else None,
        lse.reshape(target.shape) if return_lse else None,
    )
