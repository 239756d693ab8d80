"""The losses that are measured: as models and trainers write them, and taken apart for the truth.

The first half is what a user has: plain PyTorch from hidden states to a scalar. The second half
says the same once more in pieces that can be computed in row chunks and in any precision, which is
what errors are measured against and where the floor takes its data from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
NORM_EPS = 1e-6
SOFTCAP = 30.0
KD_TEMPERATURE = 2.0
KD_ALPHA = 0.5
DPO_BETA = 0.1

#: Sequences of a batch, for losses that see sequences: two pairs where they are paired.
SEQUENCES = 4

Loss = Literal[
    "cross_entropy", "distillation", "llama_head", "gemma2_head", "kd_ce", "dpo", "log_probs"
]


# --- as users write them ---------------------------------------------------------------------


def plain_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None
) -> Tensor:
    """The loss as models write it: projection, fp32 logits, mean cross entropy."""
    logits = F.linear(input, weight, bias).float()
    return F.cross_entropy(logits, target, ignore_index=IGNORE_INDEX)


def jsd_rows(student: Tensor, teacher: Tensor) -> Tensor:
    """Jensen-Shannon divergence of each row of logits, as trainers write it."""
    log_q, log_p = F.log_softmax(student, dim=-1), F.log_softmax(teacher, dim=-1)
    mixture = torch.logaddexp(log_q, log_p) - math.log(2.0)
    kl = F.kl_div(mixture, log_p, reduction="none", log_target=True)
    kl = kl + F.kl_div(mixture, log_q, reduction="none", log_target=True)
    return 0.5 * kl.sum(-1)


def plain_linear_jsd(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    teacher_input: Tensor,
    teacher_weight: Tensor,
) -> Tensor:
    """Distillation as trainers write it: two projections, fp32 logits, mean of rows that count."""
    student = F.linear(input, weight, bias).float()
    with torch.no_grad():
        teacher = F.linear(teacher_input, teacher_weight).float()
    counts = target != IGNORE_INDEX
    return torch.where(counts, jsd_rows(student, teacher), 0.0).sum() / counts.sum()


def rms_norm(hidden: Tensor, norm_weight: Tensor) -> Tensor:
    """RMSNorm of Llama: normalised in fp32, scaled in the dtype of the hidden states."""
    dtype = hidden.dtype
    hidden = hidden.to(torch.float32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    hidden = hidden * torch.rsqrt(variance + NORM_EPS)
    return norm_weight * hidden.to(dtype)


def gemma_rms_norm(hidden: Tensor, norm_weight: Tensor) -> Tensor:
    """RMSNorm of Gemma: scaled by ``1 + weight``, all of it in fp32."""
    x = hidden.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + NORM_EPS)
    return (x * (1.0 + norm_weight.float())).type_as(hidden)


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of a causal language model in transformers: it shifts the labels itself.

    Args:
        logits: ``[B, T, V]``.
        labels: ``[B, T]``, the tokens themselves.
    """
    logits = logits.float()
    labels = F.pad(labels, (0, 1), value=IGNORE_INDEX)
    shift_labels = labels[..., 1:].contiguous()
    logits = logits.view(-1, logits.size(-1))
    shift_labels = shift_labels.view(-1)
    return F.cross_entropy(logits, shift_labels, ignore_index=IGNORE_INDEX, reduction="mean")


def plain_llama_head(
    input: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, norm_weight: Tensor
) -> Tensor:
    """The end of Llama: final norm, head, causal loss. ``input [B, T, D]``, ``labels [B, T]``."""
    hidden = rms_norm(input, norm_weight)
    logits = F.linear(hidden, weight, bias)
    return causal_lm_loss(logits, labels)


def plain_gemma2_head(
    input: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, norm_weight: Tensor
) -> Tensor:
    """The end of Gemma 2: its norm, head, logits capped in their own dtype, causal loss."""
    hidden = gemma_rms_norm(input, norm_weight)
    logits = F.linear(hidden, weight, bias)
    logits = logits / SOFTCAP
    logits = torch.tanh(logits)
    logits = logits * SOFTCAP
    return causal_lm_loss(logits, labels)


def kd_ce_loss(student: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """Distillation of Hinton et al. (arXiv:1503.02531) mixed with cross entropy, of fp32 logits."""
    soft = F.kl_div(
        F.log_softmax(student / KD_TEMPERATURE, dim=-1),
        F.softmax(teacher / KD_TEMPERATURE, dim=-1),
        reduction="batchmean",
    )
    hard = F.cross_entropy(student, target, ignore_index=IGNORE_INDEX)
    return KD_ALPHA * KD_TEMPERATURE**2 * soft + (1.0 - KD_ALPHA) * hard


def plain_kd_ce(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    teacher_input: Tensor,
    teacher_weight: Tensor,
) -> Tensor:
    """Distillation with a frozen teacher, mixed with cross entropy."""
    student = F.linear(input, weight, bias).float()
    with torch.no_grad():
        teacher = F.linear(teacher_input, teacher_weight).float()
    return kd_ce_loss(student, teacher, target)


def batch_log_probs(logits: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
    """Log-probs of sequences ``[B]`` as preference trainers write them.

    Args:
        logits: ``[B, T, V]``.
        labels: ``[B, T - 1]``, what each position but the last predicts.
        loss_mask: ``[B, T - 1]``, which of them count.
    """
    logits = logits[:, :-1, :]
    per_token_logps = torch.gather(
        logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)
    ).squeeze(2)
    return (per_token_logps * loss_mask).sum(-1)


def plain_dpo(
    input: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ref_input: Tensor,
    ref_weight: Tensor,
) -> Tensor:
    """A step of DPO (arXiv:2305.18290): chosen sequences first, then as many rejected ones."""
    labels = labels[:, 1:].clone()
    loss_mask = labels != IGNORE_INDEX
    labels[labels == IGNORE_INDEX] = 0  # any class: these tokens are masked
    policy_logps = batch_log_probs(F.linear(input, weight, bias).float(), labels, loss_mask)
    with torch.no_grad():
        ref_logps = batch_log_probs(F.linear(ref_input, ref_weight).float(), labels, loss_mask)
    pairs = labels.shape[0] // 2
    pi_logratios = policy_logps[:pairs] - policy_logps[pairs:]
    ref_logratios = ref_logps[:pairs] - ref_logps[pairs:]
    return -F.logsigmoid(DPO_BETA * (pi_logratios - ref_logratios)).mean()


def plain_log_probs(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reward: Tensor
) -> Tensor:
    """A policy gradient: log-probs of the actions taken, each times its own reward."""
    logits = F.linear(input, weight, bias).float()
    mask = target != IGNORE_INDEX
    index = torch.where(mask, target, 0)
    log_probs = logits.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return -(log_probs * reward * mask).sum() / mask.sum()


# --- taken apart -----------------------------------------------------------------------------


def shifted(labels: Tensor) -> Tensor:
    """What each position of ``labels [B, T]`` predicts: the next token, nothing at the end."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def _log_probs(logits: Tensor, target: Tensor) -> Tensor:
    """Log-prob of each row's target; that of class 0 where the row is ignored."""
    column = target.where(target != IGNORE_INDEX, 0)[:, None]
    return (logits.gather(1, column) - logits.logsumexp(dim=-1, keepdim=True)).squeeze(1)


def _mean(values: Tensor, target: Tensor) -> Tensor:
    counts = target != IGNORE_INDEX
    return torch.where(counts, values, 0.0).sum() / counts.sum()


def _capped(logits: Tensor) -> Tensor:
    return SOFTCAP * torch.tanh(logits / SOFTCAP)


def _kd_rows(logits: Tensor, target: Tensor, teacher: Tensor | None) -> Tensor:
    assert teacher is not None
    log_q = (logits / KD_TEMPERATURE).log_softmax(-1)
    log_p = (teacher / KD_TEMPERATURE).log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    return torch.stack((divergence, -_log_probs(logits, target)), dim=-1)


def _kd_reduce(values: Tensor, target: Tensor, reward: Tensor | None) -> Tensor:
    soft, hard = values[:, 0].mean(), _mean(values[:, 1], target)
    return KD_ALPHA * KD_TEMPERATURE**2 * soft + (1.0 - KD_ALPHA) * hard


def _jsd_rows(logits: Tensor, target: Tensor, teacher: Tensor | None) -> Tensor:
    assert teacher is not None
    return jsd_rows(logits, teacher)[:, None]


def _dpo_rows(logits: Tensor, target: Tensor, teacher: Tensor | None) -> Tensor:
    assert teacher is not None
    return (_log_probs(logits, target) - _log_probs(teacher, target))[:, None]


def _dpo_reduce(values: Tensor, target: Tensor, reward: Tensor | None) -> Tensor:
    ratios = torch.where(target != IGNORE_INDEX, values[:, 0], 0.0).view(SEQUENCES, -1).sum(-1)
    chosen, rejected = ratios.chunk(2)
    return -F.logsigmoid(DPO_BETA * (chosen - rejected)).mean()


def _policy_reduce(values: Tensor, target: Tensor, reward: Tensor | None) -> Tensor:
    assert reward is not None
    return _mean(values[:, 0] * reward, target)


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS) * scale


@dataclass(frozen=True)
class LossParts:
    """A loss as users write it, and the same in pieces.

    Attributes:
        plain: From input, weight, target, bias and ``operands`` to a scalar.
        operands: Fields of `benchmarks.cases.Inputs` that ``plain`` takes behind the bias.
        by_sequence: Input is ``[B, T, D]`` and target ``[B, T]``, shifted inside.
        norm: From input rows and the norm's weight to what is projected; None for the input itself.
        rows: From logits, targets and the teacher's logits of some rows to values ``[rows, K]``.
        reduce: From all rows' values, targets and rewards to the scalar.
    """

    plain: Callable[..., Tensor]
    operands: tuple[str, ...] = ()
    by_sequence: bool = False
    norm: Callable[[Tensor, Tensor], Tensor] | None = None
    rows: Callable[[Tensor, Tensor, Tensor | None], Tensor] = lambda logits, target, teacher: (
        -_log_probs(logits, target)[:, None]
    )
    reduce: Callable[[Tensor, Tensor, Tensor | None], Tensor] = lambda values, target, reward: (
        _mean(values[:, 0], target)
    )

    def row_target(self, target: Tensor) -> Tensor:
        """What each row predicts ``[N]``, of the target that ``plain`` takes."""
        return shifted(target).flatten() if self.by_sequence else target


_TEACHER = ("teacher_input", "teacher_weight")

LOSSES: dict[Loss, LossParts] = {
    "cross_entropy": LossParts(plain_linear_cross_entropy),
    "distillation": LossParts(plain_linear_jsd, _TEACHER, rows=_jsd_rows),
    "llama_head": LossParts(plain_llama_head, ("norm_weight",), by_sequence=True, norm=_norm),
    "gemma2_head": LossParts(
        plain_gemma2_head,
        ("norm_weight",),
        by_sequence=True,
        norm=lambda x, weight: _norm(x, 1.0 + weight),
        rows=lambda logits, target, teacher: -_log_probs(_capped(logits), target)[:, None],
    ),
    "kd_ce": LossParts(plain_kd_ce, _TEACHER, rows=_kd_rows, reduce=_kd_reduce),
    "dpo": LossParts(plain_dpo, _TEACHER, by_sequence=True, rows=_dpo_rows, reduce=_dpo_reduce),
    "log_probs": LossParts(plain_log_probs, ("reward",), reduce=_policy_reduce),
}
