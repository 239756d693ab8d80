"""Preference losses of a linear projection, from the papers, with the logits as they are."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from greyhound_ops.reference.log_probs import linear_log_probs

__all__ = ["linear_cpo", "linear_dpo", "linear_kto", "linear_orpo", "linear_simpo"]


def _log_probs(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **head: Any
) -> Tensor:
    return linear_log_probs(input, weight, target, bias, **head).log_probs


def _reference(
    target: Tensor,
    ref_log_probs: Tensor | None,
    ref_input: Tensor | None,
    ref_weight: Tensor | None,
    ref_bias: Tensor | None,
    **head: Any,
) -> Tensor:
    """Log-probs of the reference ``[B, T]`` or ``[B]``; zeros by token if there is none."""
    if ref_input is not None and ref_weight is not None:
        with torch.no_grad():
            return _log_probs(ref_input, ref_weight, target, ref_bias, **head)
    if ref_log_probs is None:
        return torch.zeros(target.shape, device=target.device)
    return ref_log_probs


def _by_sequence(values: Tensor, counted: Tensor, average: bool) -> Tensor:
    """Sum or mean over the tokens that count, ``[B]``; values by sequence are left alone."""
    if values.dim() == 1:
        return values
    total = values.masked_fill(~counted, 0.0).sum(-1)
    return total / counted.sum(-1).clamp(min=1) if average else total


def _pairs_that_count(counted: Tensor) -> Tensor:
    chosen, rejected = counted.any(-1).chunk(2)
    return chosen & rejected


def _mean(losses: Tensor) -> Tensor:
    return losses.sum() / max(losses.numel(), 1)


def _nll(log_probs: Tensor, counted: Tensor) -> Tensor:
    """Negative log-likelihood of the chosen tokens, the mean over them."""
    half = counted.shape[0] // 2
    tokens = log_probs[:half][counted[:half]]
    return -tokens.sum() / max(tokens.numel(), 1)


def linear_dpo(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ref_log_probs: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    average_log_prob: bool | None = None,
    nll_weight: float = 0.0,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Direct preference optimisation (arXiv:2305.18290, equation 7) and its variants.

    Args:
        input: Hidden states ``[2 B, T, D]``, the chosen sequences first.
        weight: Projection ``[V, D]``.
        target: Class indices ``[2 B, T]``.
        bias: ``[V]``.
        ref_log_probs: Of the reference, ``[2 B, T]`` or ``[2 B]``; none is a reference of 0.
        ref_input: Hidden states of the reference ``[2 B, T, D']``, with ``ref_weight``.
        ref_weight: Its projection ``[V, D']``.
        ref_bias: Its bias ``[V]``.
        loss_type: As in `greyhound_ops.functional.chunked_linear_dpo`, which names the papers.
        beta: Strength of the preference.
        label_smoothing: Share of labels taken to be wrong.
        discopop_tau: Temperature of ``"discopop"``.
        average_log_prob: Mean instead of sum over a sequence's tokens; None for ``"ipo"`` alone.
        nll_weight: Factor of the negative log-likelihood of the chosen tokens.
        ignore_index: Target of tokens that do not count.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits.

    Returns:
        Scalar in float32 (float64 for float64 input); 0 if no pair counts.
    """
    head = {"ignore_index": ignore_index, "logit_scale": logit_scale, "softcap": softcap}
    average = loss_type == "ipo" if average_log_prob is None else average_log_prob
    counted = target != ignore_index
    log_probs = _log_probs(input, weight, target, bias, **head)
    reference = _reference(target, ref_log_probs, ref_input, ref_weight, ref_bias, **head)
    policy = _by_sequence(log_probs, counted, average)
    reference = _by_sequence(reference, counted, average).to(policy.dtype)
    keep = _pairs_that_count(counted)
    policy_w, policy_l = (half[keep] for half in policy.chunk(2))
    ref_w, ref_l = (half[keep] for half in reference.chunk(2))
    losses = _dpo_losses(
        policy_w, policy_l, ref_w, ref_l, loss_type, beta, label_smoothing, discopop_tau
    )
    loss = _mean(losses)
    return loss + nll_weight * _nll(log_probs, counted) if nll_weight else loss


def _dpo_losses(
    policy_w: Tensor,
    policy_l: Tensor,
    ref_w: Tensor,
    ref_l: Tensor,
    loss_type: str,
    beta: float,
    label_smoothing: float,
    discopop_tau: float,
) -> Tensor:
    e = label_smoothing
    r_w, r_l = policy_w - ref_w, policy_l - ref_l
    h = (policy_w - policy_l) - (ref_w - ref_l)
    if loss_type == "aot":  # arXiv:2406.05882, paired
        h = (policy_w - policy_l).sort().values - (ref_w - ref_l).sort().values
    elif loss_type == "aot_unpaired":  # unpaired
        h = r_w.sort().values - r_l.sort().values
    if loss_type in ("sigmoid", "aot", "aot_unpaired"):
        return -(1 - e) * F.logsigmoid(beta * h) - e * F.logsigmoid(-beta * h)
    if loss_type == "hinge":  # arXiv:2305.10425, arXiv:2309.06657
        return (1 - beta * h).clamp(min=0)
    if loss_type == "ipo":  # arXiv:2310.12036, equation 17
        return (h - 1 / (2 * beta)) ** 2
    if loss_type == "robust":  # arXiv:2403.00409
        return -((1 - e) * F.logsigmoid(beta * h) - e * F.logsigmoid(-beta * h)) / (1 - 2 * e)
    if loss_type == "exo_pair":  # arXiv:2402.00856, equation 16
        model = torch.stack((F.logsigmoid(beta * h), F.logsigmoid(-beta * h)))
        human = model.new_tensor([math.log(1 - e), math.log(e)]).unsqueeze(-1)
        return (model.exp() * (model - human)).sum(0)
    if loss_type == "nca_pair":  # arXiv:2402.05369
        fit = -F.logsigmoid(beta * r_w)
        return fit - 0.5 * F.logsigmoid(-beta * r_w) - 0.5 * F.logsigmoid(-beta * r_l)
    if loss_type == "bco_pair":  # arXiv:2404.04656 with a reward shift of 0
        return -F.logsigmoid(beta * r_w) - F.logsigmoid(-beta * r_l)
    if loss_type == "sppo_hard":  # arXiv:2405.00675, equation 4.7 with P = 1 and 0
        return (r_w - 0.5 / beta) ** 2 + (r_l + 0.5 / beta) ** 2
    if loss_type == "apo_zero":  # arXiv:2408.06266, equation 7
        return 1 - torch.sigmoid(beta * r_w) + torch.sigmoid(beta * r_l)
    if loss_type == "apo_down":  # equation 8
        return torch.sigmoid(beta * r_w) + 1 - torch.sigmoid(beta * h)
    if loss_type == "discopop":  # arXiv:2406.08414, equation 5
        share = torch.sigmoid(beta * h / discopop_tau)
        return (1 - share) * -F.logsigmoid(beta * h) + share * torch.exp(-beta * h)
    raise ValueError(f"loss_type: unknown, got {loss_type!r}")


def linear_cpo(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    nll_weight: float = 1.0,
    **options: Any,
) -> Tensor:
    """Contrastive preference optimisation (arXiv:2401.08417): no reference, and a cloning term.

    Args:
        input: Hidden states ``[2 B, T, D]``, the chosen sequences first.
        weight: Projection ``[V, D]``.
        target: Class indices ``[2 B, T]``.
        bias: ``[V]``.
        nll_weight: Factor of the negative log-likelihood of the chosen tokens.
        **options: As for `linear_dpo`.

    Returns:
        Scalar in float32 (float64 for float64 input).
    """
    return linear_dpo(input, weight, target, bias, nll_weight=nll_weight, **options)


def linear_simpo(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
    nll_weight: float = 0.0,
    **head: Any,
) -> Tensor:
    """Simple preference optimisation (arXiv:2405.14734).

    Args:
        input: Hidden states ``[2 B, T, D]``, the chosen sequences first.
        weight: Projection ``[V, D]``.
        target: Class indices ``[2 B, T]``.
        bias: ``[V]``.
        beta: Strength of the preference.
        gamma: Margin of the rewards.
        label_smoothing: Share of labels taken to be wrong.
        nll_weight: Factor of the negative log-likelihood of the chosen tokens.
        **head: ``ignore_index``, ``logit_scale``, ``softcap``.

    Returns:
        Scalar in float32 (float64 for float64 input).
    """
    counted = target != head.get("ignore_index", -100)
    log_probs = _log_probs(input, weight, target, bias, **head)
    keep = _pairs_that_count(counted)
    chosen, rejected = (
        half[keep] for half in _by_sequence(log_probs, counted, average=True).chunk(2)
    )
    z = beta * chosen - beta * rejected - gamma
    loss = _mean(-(1 - label_smoothing) * F.logsigmoid(z) - label_smoothing * F.logsigmoid(-z))
    return loss + nll_weight * _nll(log_probs, counted) if nll_weight else loss


def linear_orpo(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 0.1,
    nll_weight: float = 1.0,
    **head: Any,
) -> Tensor:
    """Odds-ratio preference optimisation (arXiv:2403.07691).

    Args:
        input: Hidden states ``[2 B, T, D]``, the chosen sequences first.
        weight: Projection ``[V, D]``.
        target: Class indices ``[2 B, T]``.
        bias: ``[V]``.
        beta: Factor of the odds-ratio loss, lambda in the paper.
        nll_weight: Factor of the negative log-likelihood of the chosen tokens.
        **head: ``ignore_index``, ``logit_scale``, ``softcap``.

    Returns:
        Scalar in float32 (float64 for float64 input).
    """
    counted = target != head.get("ignore_index", -100)
    log_probs = _log_probs(input, weight, target, bias, **head)
    keep = _pairs_that_count(counted)
    log_odds = []
    for half in _by_sequence(log_probs, counted, average=True).chunk(2):
        log_odds.append(half[keep] - torch.log1p(-torch.exp(half[keep])))
    loss = beta * _mean(-F.logsigmoid(log_odds[0] - log_odds[1]))
    return loss + nll_weight * _nll(log_probs, counted)


def linear_kto(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    desirable: Tensor,
    bias: Tensor | None = None,
    *,
    ref_log_probs: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    kl: Tensor | float = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    average_log_prob: bool = False,
    **head: Any,
) -> Tensor:
    """Kahneman-Tversky optimisation (arXiv:2402.01306).

    Args:
        input: Hidden states ``[B, T, D]``.
        weight: Projection ``[V, D]``.
        target: Class indices ``[B, T]``.
        desirable: ``[B]`` bool.
        bias: ``[V]``.
        ref_log_probs: Of the reference, ``[B, T]`` or ``[B]``; none is a reference of 0.
        ref_input: Hidden states of the reference ``[B, T, D']``, with ``ref_weight``.
        ref_weight: Its projection ``[V, D']``.
        ref_bias: Its bias ``[V]``.
        kl: Reference point, scalar or ``[B]``.
        beta: Strength of the preference.
        desirable_weight: lambda_D in the paper.
        undesirable_weight: lambda_U.
        average_log_prob: Mean instead of sum over a sequence's tokens.
        **head: ``ignore_index``, ``logit_scale``, ``softcap``.

    Returns:
        Scalar in float32 (float64 for float64 input).
    """
    counted = target != head.get("ignore_index", -100)
    log_probs = _log_probs(input, weight, target, bias, **head)
    reference = _reference(target, ref_log_probs, ref_input, ref_weight, ref_bias, **head)
    policy = _by_sequence(log_probs, counted, average_log_prob)
    ratio = policy - _by_sequence(reference, counted, average_log_prob).to(policy.dtype)
    losses = torch.where(
        desirable,
        desirable_weight * (1 - torch.sigmoid(beta * (ratio - kl))),
        undesirable_weight * (1 - torch.sigmoid(beta * (kl - ratio))),
    )
    return _mean(losses[counted.any(-1)])
