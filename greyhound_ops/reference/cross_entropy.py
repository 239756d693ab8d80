"""Cross entropy of a linear projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["linear_cross_entropy"]


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
    empty_mean: float = 0.0,
) -> Tensor:
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
        empty_mean: Value of a mean over no row at all.

    Returns:
        Loss in float32 (float64 for float64 input): scalar, or ``[...]`` for ``"none"``.
    """
    logits = F.linear(input, weight, bias)
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
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(logits, -1).square().masked_fill(~counts, 0.0)
    if reduction == "none":
        return loss.reshape(target.shape)
    total = loss.sum()
    if reduction == "sum":
        return total
    if class_weight is None:
        denominator = counts.sum().to(total.dtype)
    else:
        chosen = class_weight[flat_target.masked_fill(~counts, 0)]
        denominator = chosen.masked_fill(~counts, 0.0).sum()
    if not counts.any():
        return total + empty_mean
    return total / denominator
