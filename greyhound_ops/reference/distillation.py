"""Divergences between the output distributions of a student and a teacher."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["linear_distillation"]


def linear_distillation(
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
    return_parts: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Divergence of a student's distribution from a teacher's, mixed with cross entropy.

    ``Q = softmax(student logits / temperature)``, ``P = softmax(teacher logits / temperature)``.
    The loss is not multiplied by the squared temperature as in Hinton et al., arXiv:1503.02531,
    section 2.

    Args:
        input: Hidden states of the student ``[..., D]``.
        weight: Projection of the student ``[V, D]``.
        teacher_input: Hidden states of the teacher ``[..., D_t]``.
        teacher_weight: Projection of the teacher ``[V, D_t]``; the teacher gets no gradient.
        target: Class indices ``[...]``; None if every row counts.
        bias: ``[V]``.
        teacher_bias: ``[V]``.
        divergence: ``"kl"`` is ``KL(P || Q)``, ``"reverse_kl"`` is ``KL(Q || P)``, ``"jsd"`` the
            generalised Jensen-Shannon divergence (arXiv:2306.13649, equation 1), ``"tvd"`` the
            total variation ``sum |P - Q| / 2`` (arXiv:2307.15190), ``"cosine"`` one minus the
            cosine of the logits.
        beta: Weight of the teacher in the mixture of ``"jsd"``. At 0 it is ``KL(P || Q)``, at 1
            ``KL(Q || P)``, by the convention of TRL's GKDTrainer (the formula itself is 0 there).
        temperature: Divides both logits.
        soft_weight: Factor on the divergence.
        hard_weight: Factor on the cross entropy of the student's logits at temperature 1.
        ignore_index: Target value of rows that do not count.
        reduction: ``"none"``, ``"mean"`` (over the rows that count; 0 over none) or ``"sum"``.
        return_parts: Return divergence and cross entropy as well, unweighted and reduced alike.

    Returns:
        Loss in float32 (float64 for float64 input): scalar, or ``[...]`` for ``"none"``; with
        ``return_parts`` a tuple of three.
    """
    student = F.linear(input, weight, bias)
    with torch.no_grad():
        teacher = F.linear(teacher_input, teacher_weight, teacher_bias)
    student = student.to(torch.promote_types(student.dtype, torch.float32))
    teacher = teacher.to(student.dtype)
    if divergence == "cosine":
        soft = 1.0 - F.cosine_similarity(student, teacher, dim=-1)
    else:
        log_q = F.log_softmax(student / temperature, -1)
        log_p = F.log_softmax(teacher / temperature, -1)
        if divergence == "tvd":
            soft = 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
        elif divergence == "kl" or (divergence == "jsd" and beta == 0.0):
            soft = _kl(log_p, log_q)
        elif divergence == "reverse_kl" or (divergence == "jsd" and beta == 1.0):
            soft = _kl(log_q, log_p)
        else:
            absent = log_p.isneginf() & log_q.isneginf()
            mixture = torch.logaddexp(
                log_p.masked_fill(absent, 0.0) + math.log(beta),
                log_q.masked_fill(absent, 0.0) + math.log1p(-beta),
            )
            soft = beta * _kl(log_p, mixture) + (1.0 - beta) * _kl(log_q, mixture)
    counts = None if target is None else target != ignore_index
    if counts is not None:
        soft = soft.where(counts, 0.0)
    hard = torch.zeros_like(soft)
    if target is not None and hard_weight:
        hard = F.cross_entropy(
            student.reshape(-1, student.shape[-1]),
            target.reshape(-1).long(),
            ignore_index=ignore_index,
            reduction="none",
        ).reshape(soft.shape)
    if reduction != "none":
        number = soft.numel() if counts is None else counts.sum()
        divisor = torch.as_tensor(number).clamp_min(1) if reduction == "mean" else 1
        soft, hard = soft.sum() / divisor, hard.sum() / divisor
    loss = soft_weight * soft
    if hard_weight:
        loss = loss + hard_weight * hard
    if return_parts:
        return loss, soft.detach(), hard.detach()
    return loss


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``sum p log(p / q)`` over the last dimension with ``0 log 0 = 0``, in gradients too."""
    absent = log_p.isneginf()
    difference = log_p.masked_fill(absent, 0.0) - log_q.masked_fill(absent, 0.0)
    return (log_p.exp() * difference).sum(-1)
