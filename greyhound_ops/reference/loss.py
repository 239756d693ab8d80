"""Any loss of a linear projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["linear_loss"]


def linear_loss(
    input: Tensor,
    weight: Tensor,
    loss_fn: Callable[..., Tensor],
    *loss_args: Any,
    bias: Tensor | None = None,
    **loss_kwargs: Any,
) -> Tensor:
    """A loss of all rows' logits at once.

    Args:
        input: Hidden states ``[..., D]``.
        weight: Projection ``[V, D]``.
        loss_fn: Takes ``(logits [N, V], *loss_args, **loss_kwargs)`` and returns a scalar; what the
            adapter ``autograd_loss_and_logits_grad`` takes.
        *loss_args: For the loss; per-row tensors as ``[N, *]``.
        bias: ``[V]``.
        **loss_kwargs: For the loss.

    Returns:
        The scalar in float32 (float64 for float64 input).
    """
    logits = F.linear(input, weight, bias)
    loss = loss_fn(logits.reshape(-1, logits.shape[-1]), *loss_args, **loss_kwargs)
    return loss.to(torch.promote_types(logits.dtype, torch.float32))
