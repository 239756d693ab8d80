"""Log-probabilities of classes, of a projection or of logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LogProbs", "linear_log_probs", "selective_log_softmax"]


class LogProbs(NamedTuple):
    """What `chunked_linear_log_probs` returns if more than log-probabilities is asked for.

    Attributes:
        log_probs: Log-probability of each row's target ``[...]``, in nats.
        entropy: Entropy of each row's softmax ``[...]`` in nats, or None.
        lse: Log-sum-exp of each row's logits ``[...]``, or None.
        argmax: Class of each row's largest logit ``[...]`` int64, or None.
    """

    log_probs: Tensor
    entropy: Tensor | None
    lse: Tensor | None
    argmax: Tensor | None


def _of_logits(
    logits: Tensor,
    target: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
) -> LogProbs:
    if isinstance(temperature, Tensor):
        temperature = temperature.to(logits.dtype).unsqueeze(-1)
    z = logits / temperature
    log_p = z.log_softmax(-1)
    ignored = target == ignore_index
    index = target.long().masked_fill(ignored, 0).unsqueeze(-1)
    chosen = log_p.gather(-1, index).squeeze(-1).masked_fill(ignored, 0.0)
    # A class of probability 0 has no share in the entropy: 0 * log 0 is 0, in the gradient too.
    possible = log_p > -torch.inf
    terms = log_p.exp() * log_p.masked_fill(~possible & ~log_p.isnan(), 0.0)
    return LogProbs(chosen, -terms.sum(-1), torch.logsumexp(z, -1), z.argmax(-1))


def linear_log_probs(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> LogProbs:
    """Log-probabilities, entropy, log-sum-exp and argmax of a projection's logits.

    The logits are ``softcap * tanh(logit_scale * x / softcap) / temperature`` with
    ``x = input @ weight.T + bias``. Log-probability and entropy are those of a categorical policy
    (Williams 1992, "Simple statistical gradient-following algorithms"; Shannon 1948).

    Args:
        input: Hidden states ``[..., D]``.
        weight: Projection ``[V, D]``.
        target: Class indices ``[...]``.
        bias: ``[V]``.
        temperature: Number, or one per row ``[...]``.
        ignore_index: Target of rows whose log-probability is 0; their other values are as ever.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits (Gemma 2, arXiv:2408.00118, section 2); None for none.

    Returns:
        All four, in float32 (float64 for float64 input).
    """
    logits = F.linear(input, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return _of_logits(logits, target, temperature, ignore_index)


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
) -> Tensor:
    """``log_softmax(logits / temperature)`` at one class per row.

    Args:
        logits: ``[..., V]``.
        index: Class indices ``[...]``.
        temperature: Number, or one per row ``[...]``.
        ignore_index: Index of rows whose result is 0.

    Returns:
        ``[...]`` in float32 (float64 for float64 logits).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return _of_logits(logits, index, temperature, ignore_index).log_probs
