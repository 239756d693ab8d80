"""Policy-gradient losses of the GRPO family, from the papers, with the logits as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from greyhound_ops.reference.log_probs import linear_log_probs

__all__ = ["linear_grpo"]


def linear_grpo(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    denominator: float | Tensor | None = None,
    loss_type: str = "grpo",
    importance_sampling_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = False,
    entropy_coef: float = 0.0,
    max_completion_length: int | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    ignore_index: int = -100,
    **head: Any,
) -> Tensor:
    """The losses of `greyhound_ops.functional.chunked_linear_grpo`, sequence by sequence.

    Args:
        input: Hidden states ``[B, T, D]``.
        weight: Projection ``[V, D]``.
        target: Class indices ``[B, T]``.
        advantages: ``[B]`` or ``[B, T]``.
        bias: ``[V]``.
        mask: ``[B, T]``, zero where a token does not count; or None.
        old_log_probs: ``[B, T]``, or None for the detached ones of this call.
        ref_log_probs: ``[B, T]``, or None.
        ref_input: Hidden states of the reference ``[B, T, D']``, with ``ref_weight``.
        ref_weight: Its projection ``[V, D']``.
        ref_bias: Its bias ``[V]``.
        denominator: Divisor of the sum, or None.
        loss_type: PPO's clip (arXiv:1707.06347) in grpo (arXiv:2402.03300), bnpo, ppo, dapo
            (arXiv:2503.14476), dr_grpo (arXiv:2503.20783), luspo (arXiv:2602.05261); cispo
            (arXiv:2506.13585), sapo (arXiv:2511.20347), vespo (arXiv:2602.10693).
        importance_sampling_level: ``"token"``, or ``"sequence"`` (arXiv:2507.18071).
        epsilon_low: How far below 1 a ratio counts.
        epsilon_high: How far above; None for ``epsilon_low``.
        delta: Largest ratio that counts at all (arXiv:2505.07291), or None.
        beta: Factor of the divergence from the reference.
        use_bias_correction_kl: Weight the divergence by the ratio (arXiv:2512.02556).
        entropy_coef: Factor of the entropy.
        max_completion_length: For dr_grpo.
        sapo_temperature_pos: For advantages above 0.
        sapo_temperature_neg: For the others.
        vespo_k_pos: For advantages of at least 0.
        vespo_lambda_pos: Likewise.
        vespo_k_neg: For the others.
        vespo_lambda_neg: Likewise.
        ignore_index: Target of tokens that do not count.
        **head: ``temperature``, ``logit_scale``, ``softcap``.

    Returns:
        Scalar in float32 (float64 for float64 input).
    """
    counted = target != ignore_index
    if mask is not None:
        counted = counted & (mask != 0)
    outputs = linear_log_probs(input, weight, target, bias, ignore_index=ignore_index, **head)
    log_probs, entropy = outputs.log_probs, outputs.entropy
    if ref_input is not None and ref_weight is not None:
        with torch.no_grad():
            ref_log_probs = linear_log_probs(
                ref_input, ref_weight, target, ref_bias, ignore_index=ignore_index, **head
            ).log_probs
    if old_log_probs is None:
        old_log_probs = log_probs.detach()
    if epsilon_high is None:
        epsilon_high = epsilon_low
    batch, sums = target.shape[0], []
    for b in range(batch):
        keep = counted[b]
        p, old = log_probs[b][keep], old_log_probs[b][keep].to(log_probs.dtype)
        if p.numel() == 0:
            continue
        a = advantages[b][keep] if advantages.dim() == 2 else advantages[b]
        a = a.to(p.dtype)
        ratio = torch.exp(p - old)
        if importance_sampling_level == "sequence":
            ratio = torch.exp((p - old).mean()).expand_as(p)
        if loss_type == "cispo":
            loss = -torch.clamp(ratio, max=epsilon_high).detach() * a * p
        elif loss_type == "sapo":
            gains, losses = (a > 0).to(p.dtype), (a <= 0).to(p.dtype)
            tau = sapo_temperature_pos * gains + sapo_temperature_neg * losses
            loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * a
        elif loss_type == "vespo":
            gains, losses = (a >= 0).to(p.dtype), (a < 0).to(p.dtype)
            k = vespo_k_pos * gains + vespo_k_neg * losses
            rate = vespo_lambda_pos * gains + vespo_lambda_neg * losses
            whole = ratio.prod().detach()
            loss = -(whole**k) * torch.exp(rate * (1 - whole)) * a * p
        else:
            free = ratio if delta is None else torch.clamp(ratio, max=delta)
            clipped = torch.clamp(ratio, 1 - epsilon_low, 1 + epsilon_high)
            loss = -torch.minimum(free * a, clipped * a)
        if beta and ref_log_probs is not None:
            d = ref_log_probs[b][keep].to(p.dtype) - p
            kl = torch.exp(d) - d - 1
            loss = loss + beta * (kl * ratio if use_bias_correction_kl else kl)
        if entropy_coef and entropy is not None:
            loss = loss - entropy_coef * entropy[b][keep]
        sums.append(loss.mean() if loss_type in ("grpo", "sapo") else loss.sum())
    # Added to a zero that depends on the operands, so that there are gradients in any case.
    total = torch.stack(sums).sum() if sums else log_probs.sum() * 0
    if denominator is not None:
        return total / denominator
    if loss_type in ("grpo", "sapo", "luspo"):
        return total / max(batch, 1)
    if loss_type == "dr_grpo" and max_completion_length is not None:
        return total / (max(batch, 1) * max_completion_length)
    return total / counted.sum().clamp(min=1)
