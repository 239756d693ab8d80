"""Policy-gradient losses of the GRPO family: from hidden states without the logits, or by token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from greyhound_ops import validation
from greyhound_ops.functional import sequences
from greyhound_ops.functional.log_probs import chunked_linear_log_probs
from greyhound_ops.functional.sequences import kept, mean_over

__all__ = ["PolicyLoss", "chunked_linear_grpo", "grpo_loss"]

_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "ppo", "luspo")
_BY_TOKEN = ("cispo", "sapo", "vespo")
GRPO_LOSS_TYPES = (*_CLIPPED, *_BY_TOKEN)
LEVELS = ("token", "sequence")


class PolicyLoss(NamedTuple):
    """A policy loss and what one watches beside it; all but ``loss`` is detached.

    Means are over the tokens that count.

    Attributes:
        loss: Scalar.
        log_probs: ``[B, T]``, 0 where a token does not count; the ``old_log_probs`` of later steps.
        kl: Scalar, mean divergence from the reference, or None without one.
        entropy: Scalar, mean entropy in nats, or None if it was not asked for.
        clip_fraction_low: Scalar, share of tokens whose ratio is clipped from below.
        clip_fraction_high: Scalar, share of tokens whose ratio is clipped from above.
    """

    loss: Tensor
    log_probs: Tensor
    kl: Tensor | None
    entropy: Tensor | None
    clip_fraction_low: Tensor
    clip_fraction_high: Tensor


class PolicyOptions(NamedTuple):
    """Options of a policy loss."""

    loss_type: str = "grpo"
    importance_sampling_level: str = "token"
    epsilon_low: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = False
    entropy_coef: float = 0.0
    max_completion_length: int | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    @property
    def lower(self) -> float:
        """Smallest ratio that is not clipped."""
        return 1.0 - self.epsilon_low

    @property
    def upper(self) -> float:
        """Largest ratio that is not clipped."""
        if self.epsilon_high is None:
            return 1.0 + self.epsilon_low
        return self.epsilon_high if self.loss_type == "cispo" else 1.0 + self.epsilon_high

    def check(self, has_denominator: bool) -> None:
        """Check every option, and whether a loss type has what it needs."""
        kind, level = self.loss_type, self.importance_sampling_level
        validation.check_choice("loss_type", kind, GRPO_LOSS_TYPES)
        validation.check_choice("importance_sampling_level", level, LEVELS)
        if level == "sequence" and kind in _BY_TOKEN:
            raise ValueError(
                f"importance_sampling_level: expected 'token' for loss_type={kind!r}, "
                "got 'sequence'"
            )
        if level == "token" and kind == "luspo":
            raise ValueError(
                "importance_sampling_level: expected 'sequence' for loss_type='luspo', got 'token'"
            )
        validation.check_number("epsilon_low", self.epsilon_low, least=0.0)
        if self.epsilon_high is not None:
            validation.check_number("epsilon_high", self.epsilon_high, least=0.0)
        elif kind == "cispo":
            raise ValueError(
                "epsilon_high: expected the largest weight for loss_type='cispo', such as 5.0, "
                "got None"
            )
        if self.delta is not None:
            sequences.check_positive("delta", self.delta)
            if kind not in _CLIPPED:
                raise ValueError(
                    f"delta: expected None, since loss_type={kind!r} does not clip, "
                    f"got {self.delta}"
                )
        validation.check_number("beta", self.beta, least=0.0)
        validation.check_number("entropy_coef", self.entropy_coef)
        for name in self._fields[-6:]:
            sequences.check_positive(name, getattr(self, name))
        length = self.max_completion_length
        if length is None:
            if kind == "dr_grpo" and not has_denominator:
                raise ValueError(
                    "max_completion_length: expected a number of tokens for loss_type='dr_grpo', "
                    "got None"
                )
        elif isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)):
            raise TypeError(f"max_completion_length: expected an int or None, got {length!r}")
        elif length <= 0:
            raise ValueError(f"max_completion_length: expected at least 1 token, got {length}")


# ---------------------------------------------------------------------------------- the surrogate


def _exp_where(moves: Tensor, log_ratio: Tensor, otherwise: Tensor) -> Tensor:
    """The ratio where the loss moves with it, and constants elsewhere.

    A constant in the other branch of `torch.where` and not a product with zero: the derivative of
    a ratio that has overflowed is infinite, and zero times that would be NaN.
    """
    moving = torch.exp(torch.where(moves, log_ratio, log_ratio.new_zeros(())))
    return torch.where(moves, moving, otherwise)


def _clipped(
    log_ratio: Tensor, ratio: Tensor, advantages: Tensor, options: PolicyOptions
) -> Tensor:
    """``-min(min(ratio, delta) * A, clip(ratio) * A)``."""
    free = ratio if options.delta is None else ratio.clamp(max=options.delta)
    clipped = ratio.clamp(options.lower, options.upper)
    takes_free = free * advantages <= clipped * advantages
    moves = torch.where(takes_free, free == ratio, clipped == ratio)
    chosen = torch.where(takes_free, free, clipped)
    return -_exp_where(moves, log_ratio, chosen) * advantages


def _soft_gate(
    log_ratio: Tensor, ratio: Tensor, advantages: Tensor, options: PolicyOptions
) -> Tensor:
    """SAPO: ``-4 / tau * sigmoid(tau * (ratio - 1)) * A``."""
    positive, negative = (
        ratio.new_full((), tau)
        for tau in (options.sapo_temperature_pos, options.sapo_temperature_neg)
    )
    tau = torch.where(advantages > 0, positive, negative)
    moving = _exp_where(ratio.isfinite(), log_ratio, ratio)
    return -torch.sigmoid(tau * (moving - 1.0)) * 4.0 / tau * advantages


def _gamma_weight(log_ratio: Tensor, advantages: Tensor, options: PolicyOptions) -> Tensor:
    """VESPO: ``w^k * exp(lambda * (1 - w))`` with w the ratio of the whole sequence."""
    log_weight = log_ratio.sum(-1, keepdim=True)
    gains = advantages >= 0
    shape, rate = (
        torch.where(gains, log_ratio.new_full((), positive), log_ratio.new_full((), negative))
        for positive, negative in (
            (options.vespo_k_pos, options.vespo_k_neg),
            (options.vespo_lambda_pos, options.vespo_lambda_neg),
        )
    )
    return torch.exp(shape * log_weight - rate * torch.expm1(log_weight))


def _surrogate(
    log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, options: PolicyOptions
) -> Tensor:
    """Policy loss by token, ``[B, T]`` or, with one ratio a sequence, ``[B, 1]``."""
    ratio = torch.exp(log_ratio.detach())
    if options.loss_type == "cispo":
        return -ratio.clamp(max=options.upper) * advantages * log_probs
    if options.loss_type == "vespo":
        weight = _gamma_weight(log_ratio.detach(), advantages, options)
        return -weight * advantages * log_probs
    if options.loss_type == "sapo":
        return _soft_gate(log_ratio, ratio, advantages, options)
    return _clipped(log_ratio, ratio, advantages, options)


def _reduce(
    by_token: Tensor,
    counted: Tensor,
    options: PolicyOptions,
    denominator: float | Tensor | None,
) -> Tensor:
    """Sum of the tokens' losses (averaged by sequence for some) over the denominator."""
    kind, lengths = options.loss_type, counted.sum(-1)
    by_sequence = by_token.sum(-1)
    if kind in ("grpo", "sapo"):
        by_sequence = by_sequence / lengths.clamp(min=1)
    total = by_sequence.sum()
    divisor: float | Tensor
    if isinstance(denominator, Tensor):
        divisor = denominator.detach().to(total.dtype)
        divisor = torch.where(divisor == 0, 1.0, divisor)
    elif denominator is not None:
        divisor = denominator
    elif kind in ("grpo", "sapo", "luspo"):
        divisor = max(counted.shape[0], 1)
    elif kind == "dr_grpo":
        assert options.max_completion_length is not None
        divisor = max(counted.shape[0], 1) * options.max_completion_length
    else:
        divisor = lengths.sum().clamp(min=1)
    return total / divisor


def _check_denominator(denominator: object, device: torch.device) -> None:
    if denominator is None:
        return
    if not isinstance(denominator, Tensor):
        sequences.check_positive("denominator", denominator)
        return
    if denominator.dim() or denominator.dtype == torch.bool or denominator.is_complex():
        raise ValueError(
            "denominator: expected a number or a scalar tensor of one, got shape "
            f"{list(denominator.shape)}, dtype {denominator.dtype}"
        )
    if denominator.device != device:
        raise ValueError(f"denominator: expected a tensor on {device}, got {denominator.device}")


def grpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
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
) -> PolicyLoss:
    """Policy loss of log-probs by token; `chunked_linear_grpo` has the formulas and the options.

    Args:
        log_probs: ``[B, T]``, log-prob of each token.
        advantages: ``[B]`` or ``[B, T]``.
        mask: ``[B, T]``, bool or numbers; a token counts where it is not zero. None for all.
        old_log_probs: ``[B, T]`` of the policy that sampled, or None for ``log_probs``.
        ref_log_probs: ``[B, T]`` of the reference, or None.
        entropy: ``[B, T]`` in nats, or None; gets a gradient where ``entropy_coef`` is not 0.
        denominator: What the sum is divided by, or None; see `chunked_linear_grpo`.
        loss_type: One of those of `chunked_linear_grpo`; so for all that follow.
        importance_sampling_level: ``"token"`` or ``"sequence"``.
        epsilon_low: How far below 1 a ratio counts.
        epsilon_high: How far above 1; None for ``epsilon_low``.
        delta: Largest ratio that counts at all, or None.
        beta: Factor of the divergence from the reference.
        use_bias_correction_kl: Whether to weight the divergence by the ratio.
        entropy_coef: Factor of the entropy that is taken off the loss.
        max_completion_length: Tokens, for ``"dr_grpo"``.
        sapo_temperature_pos: For ``"sapo"`` and advantages above 0.
        sapo_temperature_neg: For the others.
        vespo_k_pos: For ``"vespo"`` and advantages of at least 0.
        vespo_lambda_pos: Likewise.
        vespo_k_neg: For the others.
        vespo_lambda_neg: Likewise.

    Returns:
        Loss and metrics in fp32 (fp64 for fp64). Only ``log_probs`` and ``entropy`` get gradients.

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape, device or option that is not as above, or no reference for ``beta``.
    """
    options = PolicyOptions(
        loss_type,
        importance_sampling_level,
        epsilon_low,
        epsilon_high,
        delta,
        beta,
        use_bias_correction_kl,
        entropy_coef,
        max_completion_length,
        sapo_temperature_pos,
        sapo_temperature_neg,
        vespo_k_pos,
        vespo_lambda_pos,
        vespo_k_neg,
        vespo_lambda_neg,
    )
    options.check(denominator is not None)
    _check_reference(beta, ref_log_probs is not None)
    sequences.check_log_probs(log_probs)
    if mask is None:
        counted = torch.ones_like(log_probs, dtype=torch.bool)
    else:
        counted = sequences.check_flags("mask", mask, log_probs.shape, log_probs.device)
    return _grpo(
        log_probs, advantages, counted, old_log_probs, ref_log_probs, entropy, denominator, options
    )


def _check_reference(beta: float, given: bool) -> None:
    if beta and not given:
        raise ValueError(
            "ref_log_probs: expected log-probs of the reference (or ref_input with ref_weight to "
            f"make them from), since beta={beta}, got None"
        )


def _grpo(
    log_probs: Tensor,
    advantages: Tensor,
    counted: Tensor,
    old_log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
    entropy: Tensor | None,
    denominator: float | Tensor | None,
    options: PolicyOptions,
) -> PolicyLoss:
    if options.entropy_coef and entropy is None:
        raise ValueError(
            f"entropy: expected a tensor, since entropy_coef={options.entropy_coef}, got None"
        )
    shape = log_probs.shape
    log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    log_probs = kept(log_probs, counted)
    advantages = sequences.check_values("advantages", advantages, shape, log_probs, or_rows=True)
    advantages = advantages.unsqueeze(-1) if advantages.dim() == 1 else kept(advantages, counted)
    _check_denominator(denominator, log_probs.device)
    old = log_probs.detach()
    if old_log_probs is not None:
        old = sequences.check_values(
            "old_log_probs", old_log_probs, shape, log_probs, or_rows=False
        )
        old = kept(old, counted)
    log_ratio = log_probs - old
    if options.importance_sampling_level == "sequence":
        # GSPO: the geometric mean of the tokens' ratios.
        log_ratio = log_ratio.sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)
    by_token = _surrogate(log_probs, log_ratio, advantages, options)
    kl = None
    if ref_log_probs is not None:
        reference = sequences.check_values(
            "ref_log_probs", ref_log_probs, shape, log_probs, or_rows=False
        )
        difference = kept(reference, counted) - log_probs
        kl = torch.expm1(difference) - difference
        if options.use_bias_correction_kl:
            kl = kl * torch.exp(log_ratio)
        if options.beta:
            by_token = by_token + options.beta * kl
    if entropy is not None:
        validation.check_float_tensor("entropy", entropy)
        if entropy.shape != shape:
            raise ValueError(f"entropy: expected shape {list(shape)}, got {list(entropy.shape)}")
        entropy = kept(entropy.to(log_probs.dtype), counted)
        if options.entropy_coef:
            by_token = by_token - options.entropy_coef * entropy
    low, high = _clip_fractions(log_ratio.detach(), advantages, counted, options)
    return PolicyLoss(
        _reduce(kept(by_token, counted), counted, options, denominator),
        log_probs.detach(),
        None if kl is None else mean_over(kl.detach(), counted),
        None if entropy is None else mean_over(entropy.detach(), counted),
        low,
        high,
    )


def _clip_fractions(
    log_ratio: Tensor, advantages: Tensor, counted: Tensor, options: PolicyOptions
) -> tuple[Tensor, Tensor]:
    """Share of tokens whose ratio is clipped below and above; none for losses that do not clip."""
    ratio = torch.exp(log_ratio)
    low = high = torch.zeros_like(ratio, dtype=torch.bool)
    if options.loss_type in _CLIPPED:
        low = (ratio < options.lower) & (advantages < 0)
    if options.loss_type in (*_CLIPPED, "cispo"):
        high = (ratio > options.upper) & (advantages > 0)
    return (
        mean_over(low.to(ratio.dtype), counted),
        mean_over(high.to(ratio.dtype), counted),
    )


def chunked_linear_grpo(
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
    return_entropy: bool = False,
    max_completion_length: int | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
) -> PolicyLoss:
    """Group-relative policy optimisation (arXiv:2402.03300) and its kin, without the logits.

    With ``p`` the log-prob of a token, A its advantage and ``w = exp(p - old_log_prob)``, the loss
    of a token is

    ======================  ==================================================================
    ``loss_type``           loss of a token
    ======================  ==================================================================
    grpo, bnpo, dr_grpo,    ``-min(min(w, delta) A, clip(w, 1 - epsilon_low, 1 + epsilon_high)
    dapo, ppo, luspo        A)`` (PPO, arXiv:1707.06347; delta, arXiv:2505.07291)
    cispo                   ``-sg(min(w, epsilon_high)) A p`` (arXiv:2506.13585, in the form of
                            arXiv:2510.13786: the bound is ``epsilon_high`` itself)
    sapo                    ``-4 / tau * sigmoid(tau (w - 1)) A``, tau by the sign of A
                            (arXiv:2511.20347)
    vespo                   ``-sg(W^k exp(lambda (1 - W))) A p``, W the product of the
                            sequence's ``w``, k and lambda by the sign of A (arXiv:2602.10693)
    ======================  ==================================================================

    (sg: no gradient) plus ``beta * (exp(d) - d - 1)``, ``d`` the reference's log-prob minus ``p``
    (the estimator k3, Schulman 2020, "Approximating KL divergence"), minus ``entropy_coef`` times
    the entropy. The sum over the tokens that count is divided by ``denominator``, or else by

    =====================  ===================================================================
    ``loss_type``          divisor
    =====================  ===================================================================
    grpo, sapo             B, after each sequence's sum has been divided by its length
    bnpo, ppo, dapo,       tokens that count; TRL divides dapo, cispo and vespo by the tokens
    cispo, vespo           of the whole step, the ``num_items_in_batch`` that goes into
                           ``denominator`` (arXiv:2503.14476)
    dr_grpo                ``B * max_completion_length`` (arXiv:2503.20783)
    luspo                  B: each sequence weighs as much as it is long (arXiv:2602.05261)
    =====================  ===================================================================

    With ``importance_sampling_level="sequence"`` (GSPO, arXiv:2507.18071) ``w`` is the geometric
    mean of the sequence's ratios.

    Tokens that do not count enter nothing: whatever stands there in log-probs or advantages, inf
    and NaN too, neither loss nor gradient sees it. If none counts the loss is 0 with zero
    gradients; a sequence without one contributes 0 (and is one of the B).

    Args:
        input: Hidden states ``[B, T, D]``.
        weight: Projection ``[V, D]``.
        target: Sampled tokens ``[B, T]``, each at the position that predicts it; ``ignore_index``
            where a token does not count.
        advantages: ``[B]`` or ``[B, T]``. A correction of the sampler's mismatch (truncated
            importance weights) is a factor of them.
        bias: ``[V]`` or None.
        mask: ``[B, T]``, bool or numbers, zero where a token does not count, beside
            ``ignore_index``; or None.
        old_log_probs: ``[B, T]``, of the policy that sampled; None for those of this call, so that
            each ratio is 1 and only its gradient is left.
        ref_log_probs: ``[B, T]``, of the reference.
        ref_input: Hidden states of the reference ``[B, T, D']``, instead.
        ref_weight: Its projection ``[V, D']``, with ``ref_input``; may be ``weight``.
        ref_bias: Its bias ``[V]`` or None.
        denominator: Number or scalar tensor, for a step of several batches or processes; see
            above. A tensor of 0 stands for no token and gives 0.
        loss_type: See above.
        importance_sampling_level: ``"token"`` or ``"sequence"``; luspo takes the latter, cispo,
            sapo and vespo the former.
        epsilon_low: How far below 1 a ratio counts, at least 0.
        epsilon_high: How far above; None for ``epsilon_low``. For cispo the bound itself.
        delta: Largest ratio that counts at all, or None (two-sided clipping).
        beta: Factor of the divergence from the reference, at least 0. With 0 a reference that is
            given is still measured.
        use_bias_correction_kl: Weight the divergence by ``w`` (DeepSeek-V3.2, arXiv:2512.02556).
        entropy_coef: Factor of the entropy.
        return_entropy: Whether to measure the entropy also with ``entropy_coef=0``.
        max_completion_length: Tokens, for dr_grpo without a ``denominator``.
        sapo_temperature_pos: tau of sapo for A > 0.
        sapo_temperature_neg: tau for the rest.
        vespo_k_pos: k of vespo for A >= 0.
        vespo_lambda_pos: lambda for A >= 0.
        vespo_k_neg: k for the rest.
        vespo_lambda_neg: lambda for the rest.
        temperature: Of the softmax, as in `chunked_linear_log_probs`; for both heads.
        ignore_index: Target of tokens that do not count.
        logit_scale: As in `chunked_linear_cross_entropy`; for both heads.
        softcap: Likewise.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Returns:
        Loss and detached metrics in fp32 (fp64 for fp64). Only input, weight, bias and temperature
        get gradients.

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape, device or option that is not as above, or no reference for ``beta``.

    Note:
        Memory, gradients and what else is raised are those of `chunked_linear_log_probs`, beside a
        few ``[B, T]``. Deterministic, no host synchronisation.
    """
    options = PolicyOptions(
        loss_type,
        importance_sampling_level,
        epsilon_low,
        epsilon_high,
        delta,
        beta,
        use_bias_correction_kl,
        entropy_coef,
        max_completion_length,
        sapo_temperature_pos,
        sapo_temperature_neg,
        vespo_k_pos,
        vespo_lambda_pos,
        vespo_k_neg,
        vespo_lambda_neg,
    )
    options.check(denominator is not None)
    _check_reference(beta, ref_log_probs is not None or ref_input is not None)
    head: dict[str, Any] = sequences.head_options(
        ignore_index, logit_scale, softcap, chunk_size, grad_weight_accum_dtype
    )
    head["temperature"] = temperature
    sequences.check_batch(input, target)
    counted = target != ignore_index
    if mask is not None:
        counted = counted & sequences.check_flags("mask", mask, target.shape, target.device)
        target = torch.where(counted, target, ignore_index)
    ref_log_probs = sequences.reference_log_probs(
        target, weight, ref_log_probs, ref_input, ref_weight, ref_bias, **head
    )
    entropy = None
    if return_entropy or entropy_coef:
        outputs = chunked_linear_log_probs(input, weight, target, bias, return_entropy=True, **head)
        assert not isinstance(outputs, Tensor)
        log_probs, entropy = outputs.log_probs, outputs.entropy
    else:
        log_probs = chunked_linear_log_probs(input, weight, target, bias, **head)
    return _grpo(
        log_probs, advantages, counted, old_log_probs, ref_log_probs, entropy, denominator, options
    )
