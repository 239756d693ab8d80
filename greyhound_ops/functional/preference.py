"""Preference losses: from hidden states without the logits, or from log-probs of tokens.

Each loss is a function of log-probs per token, which `chunked_linear_log_probs` makes in row
chunks; what is left is arithmetic on ``[B]`` numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from greyhound_ops import validation
from greyhound_ops.functional import sequences
from greyhound_ops.functional.log_probs import chunked_linear_log_probs
from greyhound_ops.functional.sequences import kept, mean_over

__all__ = [
    "KTOLoss",
    "PreferenceLoss",
    "chunked_linear_cpo",
    "chunked_linear_dpo",
    "chunked_linear_kto",
    "chunked_linear_orpo",
    "chunked_linear_simpo",
    "concatenate_pairs",
    "cpo_loss",
    "dpo_loss",
    "kto_kl",
    "kto_loss",
    "orpo_loss",
    "simpo_loss",
]


class PreferenceLoss(NamedTuple):
    """A loss over pairs and what one watches beside it; all but ``loss`` is detached.

    Attributes:
        loss: Scalar.
        chosen_log_probs: ``[B]``, log-prob of each chosen sequence, summed or averaged as the loss
            takes it.
        rejected_log_probs: ``[B]``, likewise.
        chosen_rewards: ``[B]``, ``beta`` times the log-ratio to the reference (times the log-prob,
            where a loss has no reference).
        rejected_rewards: ``[B]``, likewise.
        accuracy: Scalar, share of the pairs that count whose chosen reward is the larger one.
        margin: Scalar, mean difference of the rewards over the pairs that count.
        nll: Scalar, negative log-likelihood of a chosen token, the mean over all of them.
    """

    loss: Tensor
    chosen_log_probs: Tensor
    rejected_log_probs: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    accuracy: Tensor
    margin: Tensor
    nll: Tensor


class KTOLoss(NamedTuple):
    """A loss over unpaired sequences and what one watches beside it; all but ``loss`` is detached.

    Attributes:
        loss: Scalar.
        log_probs: ``[B]``, log-prob of each sequence.
        rewards: ``[B]``, ``beta`` times the log-ratio to the reference.
        desirable_reward: Scalar, mean over the desirable sequences that count.
        undesirable_reward: Scalar, mean over the others that count.
        margin: Scalar, their difference.
        kl: Scalar or ``[B]``, the reference point.
    """

    loss: Tensor
    log_probs: Tensor
    rewards: Tensor
    desirable_reward: Tensor
    undesirable_reward: Tensor
    margin: Tensor
    kl: Tensor


# ---------------------------------------------------------------------------------------- pairs


class _Pairs(NamedTuple):
    """Values of B pairs."""

    chosen: Tensor
    rejected: Tensor


def _halves(values: Tensor) -> _Pairs:
    half = values.shape[0] // 2
    return _Pairs(values[:half], values[half:])


class _Batch(NamedTuple):
    """Log-probs ``[2 B, T]`` that have been checked, and what counts in them."""

    log_probs: Tensor  # zero where a token does not count
    counted: Tensor  # [2 B, T]
    lengths: Tensor  # [2 B], tokens that count
    average: bool

    def by_sequence(self, values: Tensor) -> Tensor:
        """Sums or averages of values by token that are zero where nothing counts."""
        total = values.sum(-1)
        return total / self.lengths.clamp(min=1) if self.average else total

    def pairs_counted(self) -> Tensor:
        """``[B]``: whether both sequences of a pair have a token that counts."""
        chosen, rejected = _halves(self.lengths > 0)
        return chosen & rejected

    def nll(self) -> Tensor:
        """Negative log-likelihood of the chosen tokens, the mean over them."""
        half = self.lengths.shape[0] // 2
        return -self.log_probs[:half].sum() / self.lengths[:half].sum().clamp(min=1)


def _batch(log_probs: Tensor, mask: Tensor, average: bool, *, paired: bool = True) -> _Batch:
    if not isinstance(average, bool):
        raise TypeError(f"average_log_prob: expected a bool, got {average!r}")
    sequences.check_log_probs(log_probs)
    if paired:
        sequences.check_pairs("log_probs", log_probs)
    counted = sequences.check_flags("mask", mask, log_probs.shape, log_probs.device)
    log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    return _Batch(kept(log_probs, counted), counted, counted.sum(-1), average)


def _log_ratios(batch: _Batch, ref_log_probs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probs by sequence ``[2 B]``, of the policy and relative to the reference.

    Reference values by token are subtracted token by token: over thousands of tokens the sums are
    large and their difference small.
    """
    policy = batch.by_sequence(batch.log_probs)
    if ref_log_probs is None:
        return policy, policy
    reference = sequences.check_values(
        "ref_log_probs", ref_log_probs, batch.log_probs.shape, batch.log_probs, or_rows=True
    )
    if reference.dim() == 1:
        return policy, policy - kept(reference, batch.lengths > 0)
    return policy, batch.by_sequence(batch.log_probs - kept(reference, batch.counted))


def _finish(
    batch: _Batch, loss: Tensor, log_probs: Tensor, rewards: Tensor, nll_weight: float
) -> PreferenceLoss:
    """Add the likelihood of the chosen tokens, and the metrics."""
    nll = batch.nll()
    if nll_weight:
        loss = loss + nll_weight * nll
    sides, counted = _halves(rewards.detach()), batch.pairs_counted()
    margins = sides.chosen - sides.rejected
    return PreferenceLoss(
        loss,
        *_halves(log_probs.detach()),
        *sides,
        mean_over((margins > 0).to(margins.dtype), counted),
        mean_over(margins, counted),
        nll.detach(),
    )


def _only_pairs(batch: _Batch, values: Tensor, otherwise: float = 0.0) -> _Pairs:
    """Halves of values by sequence, a constant where a pair does not count."""
    counted = batch.pairs_counted()
    constant = values.new_full((), otherwise)
    return _Pairs(*(torch.where(counted, half, constant) for half in _halves(values)))


# ------------------------------------------------------------------------------------------ DPO

# Optimal transport: each side is sorted by itself, so that it is no function of one pair.
_AOT = ("aot", "aot_unpaired")
_SMOOTHED = ("sigmoid", "robust", "exo_pair", *_AOT)
DPO_LOSS_TYPES = (
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    *_AOT,
)
CPO_LOSS_TYPES = ("sigmoid", "hinge", "ipo")


class PairOptions(NamedTuple):
    """Options of a loss of log-ratios."""

    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    nll_weight: float = 0.0

    def check(self, choices: tuple[str, ...] = DPO_LOSS_TYPES) -> None:
        """Check every option."""
        validation.check_choice("loss_type", self.loss_type, choices)
        sequences.check_positive("beta", self.beta)
        sequences.check_positive("discopop_tau", self.discopop_tau)
        validation.check_number("nll_weight", self.nll_weight, least=0.0)
        validation.check_number("label_smoothing", self.label_smoothing, least=0.0)
        expected = ""
        if self.label_smoothing and self.loss_type not in _SMOOTHED:
            expected = f"0, since loss_type={self.loss_type!r} has none"
        elif self.label_smoothing > 0.5:
            expected = "a number in [0, 0.5]"
        elif self.label_smoothing == 0.5 and self.loss_type == "robust":
            expected = "a number in [0, 0.5) for loss_type='robust'"
        elif not self.label_smoothing and self.loss_type == "exo_pair":
            expected = "a number in (0, 0.5] for loss_type='exo_pair', such as 1e-3"
        if expected:
            raise ValueError(f"label_smoothing: expected {expected}, got {self.label_smoothing}")


def _smoothed(z: Tensor, label_smoothing: float) -> Tensor:
    """``-log sigmoid(z)``, with a share of the labels taken to be the other way round."""
    if not label_smoothing:
        return -F.logsigmoid(z)
    return -(1.0 - label_smoothing) * F.logsigmoid(z) - label_smoothing * F.logsigmoid(-z)


def _sigmoid(z: Tensor) -> Tensor:
    """``sigmoid(z)`` with a derivative that is as exact far above 0 as it is far below.

    Autograd's own is ``y (1 - y)``, in which ``1 - y`` has lost its digits where y is all but 1.
    """
    return torch.where(z > 0, 1.0 - torch.sigmoid(-z), torch.sigmoid(z))


def _pair_losses(chosen: Tensor, rejected: Tensor, options: PairOptions) -> Tensor:
    """Losses ``[B]`` of log-ratios ``[B]``, by the formulas of `chunked_linear_dpo`."""
    kind, beta, epsilon, tau, _ = options
    z = beta * (chosen - rejected)
    if kind == "sigmoid":
        return _smoothed(z, epsilon)
    if kind == "hinge":
        return torch.relu(1.0 - z)
    if kind == "ipo":
        return (chosen - rejected - 0.5 / beta).square()
    if kind == "robust":
        likely = (1.0 - epsilon) * F.logsigmoid(z) - epsilon * F.logsigmoid(-z)
        return -likely / (1.0 - 2.0 * epsilon)
    if kind == "exo_pair":
        upright = torch.sigmoid(z) * (F.logsigmoid(z) - math.log1p(-epsilon))
        return upright + torch.sigmoid(-z) * (F.logsigmoid(-z) - math.log(epsilon))
    if kind == "nca_pair":
        noise = F.logsigmoid(-beta * chosen) + F.logsigmoid(-beta * rejected)
        return -F.logsigmoid(beta * chosen) - 0.5 * noise
    if kind == "bco_pair":
        return -F.logsigmoid(beta * chosen) - F.logsigmoid(-beta * rejected)
    if kind == "sppo_hard":
        return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()
    if kind == "apo_zero":
        return _sigmoid(-beta * chosen) + _sigmoid(beta * rejected)
    if kind == "apo_down":
        return _sigmoid(beta * chosen) + _sigmoid(-z)
    # DiscoPOP. exp(-z) alone overflows where its weight sigmoid(z / tau) is all but 0.
    exponential = torch.exp(F.logsigmoid(z / tau) - z)
    return exponential - torch.sigmoid(-z / tau) * F.logsigmoid(z)


def _sorted_losses(
    batch: _Batch, policy: Tensor, ratios: Tensor, options: PairOptions
) -> tuple[Tensor, Tensor]:
    """Losses of AOT in the order of the sorted sides, and which places count: the first ones."""
    counted = batch.pairs_counted()
    if options.loss_type == "aot":
        now, before = _halves(policy), _halves(policy - ratios)
        sides = _Pairs(now.chosen - now.rejected, before.chosen - before.rejected)
    else:
        sides = _halves(ratios)
    last = policy.new_full((), math.inf)
    upper, lower = (
        kept(side, counted).gather(
            0, torch.where(counted, side.detach(), last).argsort(stable=True)
        )
        for side in sides
    )
    places = torch.arange(counted.shape[0], device=counted.device) < counted.sum()
    return _smoothed(options.beta * (upper - lower), options.label_smoothing), places


def _dpo(batch: _Batch, ref_log_probs: Tensor | None, options: PairOptions) -> PreferenceLoss:
    policy, ratios = _log_ratios(batch, ref_log_probs)
    if options.loss_type in _AOT:
        losses, counted = _sorted_losses(batch, policy, ratios, options)
    else:
        losses = _pair_losses(*_only_pairs(batch, ratios), options)
        counted = batch.pairs_counted()
    rewards = options.beta * ratios
    return _finish(batch, mean_over(losses, counted), policy, rewards, options.nll_weight)


def _averages(average_log_prob: bool | None, loss_type: str) -> bool:
    return loss_type == "ipo" if average_log_prob is None else average_log_prob


def _check_reference_choice(given: bool, reference_free: bool) -> None:
    if reference_free and given:
        raise ValueError(
            "reference_free: expected False, since log-probs or a head of a reference are given, "
            "got True"
        )
    if not reference_free and not given:
        raise ValueError(
            "ref_log_probs: expected log-probs of the reference (or ref_input with ref_weight to "
            "make them from, or reference_free=True), got None"
        )


def dpo_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    ref_log_probs: Tensor | None = None,
    reference_free: bool = False,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    average_log_prob: bool | None = None,
    nll_weight: float = 0.0,
) -> PreferenceLoss:
    """Direct preference optimisation of log-probs by token; `chunked_linear_dpo` has the formulas.

    Args:
        log_probs: ``[2 B, T]``, log-prob of each token, the chosen sequences first.
        mask: ``[2 B, T]``, bool or numbers; a token counts where it is not zero.
        ref_log_probs: ``[2 B, T]`` or ``[2 B]``, as in `chunked_linear_dpo`.
        reference_free: Whether to do without a reference.
        loss_type: One of those of `chunked_linear_dpo`.
        beta: Strength of the preference, above 0.
        label_smoothing: Share of labels taken to be wrong.
        discopop_tau: Temperature of ``"discopop"``.
        average_log_prob: Whether a sequence has the mean of its tokens instead of their sum.
        nll_weight: Factor of the negative log-likelihood of the chosen tokens.

    Returns:
        Loss and metrics in fp32 (fp64 for fp64). Only ``log_probs`` gets a gradient.

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape, device or option that is not as above, or no reference.
    """
    options = PairOptions(loss_type, beta, label_smoothing, discopop_tau, nll_weight)
    options.check()
    _check_reference_choice(ref_log_probs is not None, reference_free)
    batch = _batch(log_probs, mask, _averages(average_log_prob, loss_type))
    return _dpo(batch, ref_log_probs, options)


def chunked_linear_dpo(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ref_log_probs: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    reference_free: bool = False,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    average_log_prob: bool | None = None,
    nll_weight: float = 0.0,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
) -> PreferenceLoss:
    """Direct preference optimisation (arXiv:2305.18290) of hidden states, without the logits.

    With ``c`` and ``r`` the log-prob of the chosen and of the rejected sequence minus those of the
    reference, ``z = beta * (c - r)`` and ``e = label_smoothing``, a pair's loss is

    ================  ===================================================================
    ``loss_type``     loss
    ================  ===================================================================
    ``sigmoid``       ``-(1 - e) log s(z) - e log s(-z)``; with e it is conservative DPO
    ``hinge``         ``max(0, 1 - z)`` (SLiC, arXiv:2305.10425; RSO, arXiv:2309.06657)
    ``ipo``           ``(c - r - 1 / (2 beta))^2``, averaged log-probs (arXiv:2310.12036)
    ``robust``        ``(-(1 - e) log s(z) + e log s(-z)) / (1 - 2 e)`` (arXiv:2403.00409)
    ``exo_pair``      KL of ``[s(z), s(-z)]`` to ``[1 - e, e]`` (arXiv:2402.00856)
    ``nca_pair``      ``-log s(beta c) - (log s(-beta c) + log s(-beta r)) / 2``
                      (arXiv:2402.05369)
    ``bco_pair``      ``-log s(beta c) - log s(-beta r)`` (arXiv:2404.04656, reward shift 0)
    ``sppo_hard``     ``(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2`` (arXiv:2405.00675)
    ``apo_zero``      ``s(-beta c) + s(beta r)`` (arXiv:2408.06266)
    ``apo_down``      ``s(beta c) + s(-z)`` (arXiv:2408.06266)
    ``discopop``      ``-s(-z / tau) log s(z) + s(z / tau) exp(-z)`` (arXiv:2406.08414)
    ``aot``           ``sigmoid`` of sorted policy margins minus sorted reference margins
                      (arXiv:2406.05882)
    ``aot_unpaired``  ``sigmoid`` of sorted ``c`` minus sorted ``r`` (arXiv:2406.05882)
    ================  ===================================================================

    and the result is their mean plus ``nll_weight`` times the negative log-likelihood of a chosen
    token (RPO, arXiv:2404.19733), the mean over all of them.

    A pair in which a sequence has no token that counts has nothing to compare: it counts nowhere,
    not in the mean either. With no pair at all the result is 0 with zero gradients.

    Args:
        input: Hidden states ``[2 B, T, D]``, the B chosen sequences first, then the rejected ones
            in the same order. `concatenate_pairs` makes it of two tensors.
        weight: Projection ``[V, D]``.
        target: Classes ``[2 B, T]``, ``ignore_index`` at prompt and padding. They are those that
            each position predicts: shifted by the caller, ``F.pad(labels[:, 1:], (0, 1),
            value=ignore_index)``.
        bias: ``[V]`` or None.
        ref_log_probs: Log-probs of the reference, per token ``[2 B, T]``, or per sequence
            ``[2 B]``, summed or averaged as this call does. By token is more accurate: small
            differences are taken before the large sum.
        ref_input: Hidden states of the reference ``[2 B, T, D']``, instead of ``ref_log_probs``.
        ref_weight: Its projection ``[V, D']``, with ``ref_input``; may be ``weight``.
        ref_bias: Its bias ``[V]`` or None.
        reference_free: Take the log-probs of the reference to be 0.
        loss_type: See above.
        beta: Strength of the preference, above 0.
        label_smoothing: ``e`` above, in ``[0, 0.5]``; 0 where the formula has none.
        discopop_tau: ``tau`` above.
        average_log_prob: Whether a sequence has the mean of its tokens' log-probs instead of their
            sum; None for ``loss_type == "ipo"``.
        nll_weight: See above; at least 0.
        ignore_index: Target of tokens that do not count.
        logit_scale: As in `chunked_linear_cross_entropy`; for both heads.
        softcap: Likewise.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Returns:
        Loss and detached metrics in fp32 (fp64 for fp64). Nothing of the reference gets a gradient.

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape, device or option that is not as above, an odd batch, or no reference.

    Note:
        Memory, gradients and what else is raised are those of `chunked_linear_log_probs`, beside a
        few ``[2 B, T]``. Deterministic, no host synchronisation.
    """
    options = PairOptions(loss_type, beta, label_smoothing, discopop_tau, nll_weight)
    options.check()
    _check_reference_choice(ref_log_probs is not None or ref_input is not None, reference_free)
    head = sequences.head_options(
        ignore_index, logit_scale, softcap, chunk_size, grad_weight_accum_dtype
    )
    sequences.check_batch(input, target)
    sequences.check_pairs("input", input)
    ref_log_probs = sequences.reference_log_probs(
        target, weight, ref_log_probs, ref_input, ref_weight, ref_bias, **head
    )
    log_probs = chunked_linear_log_probs(input, weight, target, bias, **head)
    average = _averages(average_log_prob, loss_type)
    return _dpo(_batch(log_probs, target != ignore_index, average), ref_log_probs, options)


# ------------------------------------------------------------------------- without a reference


def cpo_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    average_log_prob: bool | None = None,
    nll_weight: float = 1.0,
) -> PreferenceLoss:
    """Contrastive preference optimisation of log-probs by token; see `chunked_linear_cpo`.

    Args:
        log_probs: ``[2 B, T]``, log-prob of each token, the chosen sequences first.
        mask: ``[2 B, T]``, bool or numbers; a token counts where it is not zero.
        loss_type: ``"sigmoid"``, ``"hinge"`` or ``"ipo"``.
        beta: Strength of the preference, above 0.
        label_smoothing: Share of labels taken to be wrong, for ``"sigmoid"``.
        average_log_prob: Whether a sequence has the mean of its tokens instead of their sum.
        nll_weight: Factor of the negative log-likelihood of the chosen tokens.

    Returns:
        Loss and metrics in fp32 (fp64 for fp64).

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape, device or option that is not as above.
    """
    options = PairOptions(loss_type, beta, label_smoothing, nll_weight=nll_weight)
    options.check(CPO_LOSS_TYPES)
    return _dpo(_batch(log_probs, mask, _averages(average_log_prob, loss_type)), None, options)


def chunked_linear_cpo(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    average_log_prob: bool | None = None,
    nll_weight: float = 1.0,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
) -> PreferenceLoss:
    """Contrastive preference optimisation (arXiv:2401.08417) of hidden states, without the logits.

    ``-log s(beta * (log p_chosen - log p_rejected))`` plus ``nll_weight`` times the negative
    log-likelihood of a chosen token, which clones the preferred behaviour. The mixture with SimPO
    is `chunked_linear_simpo` with an ``nll_weight``.

    Args:
        input: Hidden states ``[2 B, T, D]``, as for `chunked_linear_dpo`.
        weight: Projection ``[V, D]``.
        target: Classes ``[2 B, T]``, already shifted.
        bias: ``[V]`` or None.
        loss_type: ``"sigmoid"``, ``"hinge"`` or ``"ipo"``, as in `chunked_linear_dpo`.
        beta: Strength of the preference, above 0.
        label_smoothing: In ``[0, 0.5]``, for ``"sigmoid"``.
        average_log_prob: As in `chunked_linear_dpo`.
        nll_weight: See above; at least 0.
        ignore_index: Target of tokens that do not count.
        logit_scale: As in `chunked_linear_cross_entropy`.
        softcap: Likewise.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Returns:
        Loss and detached metrics in fp32 (fp64 for fp64).

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape, device or option that is not as above, or an odd batch.
    """
    options = PairOptions(loss_type, beta, label_smoothing, nll_weight=nll_weight)
    options.check(CPO_LOSS_TYPES)
    head = sequences.head_options(
        ignore_index, logit_scale, softcap, chunk_size, grad_weight_accum_dtype
    )
    sequences.check_batch(input, target)
    sequences.check_pairs("input", input)
    log_probs = chunked_linear_log_probs(input, weight, target, bias, **head)
    average = _averages(average_log_prob, loss_type)
    return _dpo(_batch(log_probs, target != ignore_index, average), None, options)


def check_simpo_options(
    *, beta: float, gamma: float, label_smoothing: float, nll_weight: float
) -> None:
    """Check the options of `simpo_loss`."""
    PairOptions("sigmoid", beta, label_smoothing, nll_weight=nll_weight).check()
    validation.check_number("gamma", gamma)


def simpo_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
    nll_weight: float = 0.0,
) -> PreferenceLoss:
    """Simple preference optimisation of log-probs by token; see `chunked_linear_simpo`.

    Args:
        log_probs: ``[2 B, T]``, log-prob of each token, the chosen sequences first.
        mask: ``[2 B, T]``, bool or numbers; a token counts where it is not zero.
        beta: Strength of the preference, above 0.
        gamma: Margin of the rewards.
        label_smoothing: Share of labels taken to be wrong.
        nll_weight: Factor of the negative log-likelihood of the chosen tokens.

    Returns:
        Loss and metrics in fp32 (fp64 for fp64).

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape, device or option that is not as above.
    """
    check_simpo_options(
        beta=beta, gamma=gamma, label_smoothing=label_smoothing, nll_weight=nll_weight
    )
    batch = _batch(log_probs, mask, average=True)
    policy = batch.by_sequence(batch.log_probs)
    chosen, rejected = _only_pairs(batch, policy)
    losses = _smoothed(beta * (chosen - rejected) - gamma, label_smoothing)
    loss = mean_over(losses, batch.pairs_counted())
    return _finish(batch, loss, policy, beta * policy, nll_weight)


def chunked_linear_simpo(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
    nll_weight: float = 0.0,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
) -> PreferenceLoss:
    """Simple preference optimisation (arXiv:2405.14734) of hidden states, without the logits.

    ``-log s(beta * (a_chosen - a_rejected) - gamma)``, with ``a`` the mean log-prob of a sequence's
    tokens, plus ``nll_weight`` times the negative log-likelihood of a chosen token (CPO-SimPO, if
    it is not 0).

    Args:
        input: Hidden states ``[2 B, T, D]``, as for `chunked_linear_dpo`.
        weight: Projection ``[V, D]``.
        target: Classes ``[2 B, T]``, already shifted.
        bias: ``[V]`` or None.
        beta: Strength of the preference, above 0.
        gamma: Margin by which the chosen reward is to be larger.
        label_smoothing: In ``[0, 0.5]``.
        nll_weight: See above; at least 0.
        ignore_index: Target of tokens that do not count.
        logit_scale: As in `chunked_linear_cross_entropy`.
        softcap: Likewise.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Returns:
        Loss and detached metrics in fp32 (fp64 for fp64).

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape, device or option that is not as above, or an odd batch.
    """
    check_simpo_options(
        beta=beta, gamma=gamma, label_smoothing=label_smoothing, nll_weight=nll_weight
    )
    head = sequences.head_options(
        ignore_index, logit_scale, softcap, chunk_size, grad_weight_accum_dtype
    )
    sequences.check_batch(input, target)
    sequences.check_pairs("input", input)
    return simpo_loss(
        chunked_linear_log_probs(input, weight, target, bias, **head),
        target != ignore_index,
        beta=beta,
        gamma=gamma,
        label_smoothing=label_smoothing,
        nll_weight=nll_weight,
    )


def check_orpo_options(*, beta: float, nll_weight: float) -> None:
    """Check the options of `orpo_loss`."""
    sequences.check_positive("beta", beta)
    validation.check_number("nll_weight", nll_weight, least=0.0)


def _log1mexp(value: Tensor) -> Tensor:
    """``log(1 - exp(value))`` of values below zero, without cancellation near zero.

    Maechler 2012, "Accurately computing log(1 - exp(-|a|))". Each branch sees only values that it
    is made for, so that the gradient of the other one is no NaN.
    """
    near = value > -math.log(2.0)
    constant = value.new_full((), -1.0)
    small = torch.log(-torch.expm1(torch.where(near, value, constant)))
    large = torch.log1p(-torch.exp(torch.where(near, constant, value)))
    return torch.where(near, small, large)


def _odds_ratio_losses(chosen: Tensor, rejected: Tensor) -> Tensor:
    """``-log s(log odds_chosen - log odds_rejected)`` of mean log-probs.

    The sigmoid's argument is infinite where the chosen probability rounds to 1, though loss and
    gradient have a limit: ``log1p(odds_rejected * (1 - p) / p)`` has it.
    """
    odds = rejected - _log1mexp(rejected)
    near = chosen > -math.log(2.0)
    constant = chosen.new_full((), -1.0)
    high, low = torch.where(near, chosen, constant), torch.where(near, constant, chosen)
    confident = torch.log1p(torch.exp(odds - high) * -torch.expm1(high))
    usual = -F.logsigmoid(low - torch.log1p(-torch.exp(low)) - odds)
    return torch.where(near, confident, usual)


def orpo_loss(
    log_probs: Tensor, mask: Tensor, *, beta: float = 0.1, nll_weight: float = 1.0
) -> PreferenceLoss:
    """Odds-ratio preference optimisation of log-probs by token; see `chunked_linear_orpo`.

    Args:
        log_probs: ``[2 B, T]``, log-prob of each token, the chosen sequences first.
        mask: ``[2 B, T]``, bool or numbers; a token counts where it is not zero.
        beta: Factor of the odds-ratio loss, above 0.
        nll_weight: Factor of the negative log-likelihood of the chosen tokens.

    Returns:
        Loss and metrics in fp32 (fp64 for fp64).

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape, device or option that is not as above.
    """
    check_orpo_options(beta=beta, nll_weight=nll_weight)
    batch = _batch(log_probs, mask, average=True)
    policy = batch.by_sequence(batch.log_probs)
    losses = _odds_ratio_losses(*_only_pairs(batch, policy, otherwise=-1.0))
    loss = beta * mean_over(losses, batch.pairs_counted())
    return _finish(batch, loss, policy, beta * policy, nll_weight)


def chunked_linear_orpo(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 0.1,
    nll_weight: float = 1.0,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
) -> PreferenceLoss:
    """Odds-ratio preference optimisation (arXiv:2403.07691) of hidden states, without the logits.

    ``nll_weight`` times the negative log-likelihood of a chosen token, plus ``beta`` (lambda in the
    paper) times ``-log s(log odds(p_chosen) - log odds(p_rejected))``, where ``log p`` is the mean
    log-prob of a sequence's tokens and ``odds(p) = p / (1 - p)``. The loss is infinite if a
    rejected sequence has probability 1, to the precision of a log-prob: so are its odds.

    Args:
        input: Hidden states ``[2 B, T, D]``, as for `chunked_linear_dpo`.
        weight: Projection ``[V, D]``.
        target: Classes ``[2 B, T]``, already shifted.
        bias: ``[V]`` or None.
        beta: See above; above 0.
        nll_weight: See above; at least 0.
        ignore_index: Target of tokens that do not count.
        logit_scale: As in `chunked_linear_cross_entropy`.
        softcap: Likewise.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Returns:
        Loss and detached metrics in fp32 (fp64 for fp64).

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape, device or option that is not as above, or an odd batch.
    """
    check_orpo_options(beta=beta, nll_weight=nll_weight)
    head = sequences.head_options(
        ignore_index, logit_scale, softcap, chunk_size, grad_weight_accum_dtype
    )
    sequences.check_batch(input, target)
    sequences.check_pairs("input", input)
    log_probs = chunked_linear_log_probs(input, weight, target, bias, **head)
    return orpo_loss(log_probs, target != ignore_index, beta=beta, nll_weight=nll_weight)


# ------------------------------------------------------------------------------------- unpaired


def check_kto_options(*, beta: float, desirable_weight: float, undesirable_weight: float) -> None:
    """Check the options of `kto_loss`."""
    sequences.check_positive("beta", beta)
    validation.check_number("desirable_weight", desirable_weight, least=0.0)
    validation.check_number("undesirable_weight", undesirable_weight, least=0.0)


def kto_loss(
    log_probs: Tensor,
    mask: Tensor,
    desirable: Tensor,
    *,
    ref_log_probs: Tensor | None = None,
    reference_free: bool = False,
    kl: Tensor | None = None,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    average_log_prob: bool = False,
) -> KTOLoss:
    """Kahneman-Tversky optimisation of log-probs by token; see `chunked_linear_kto`.

    Args:
        log_probs: ``[B, T]``, log-prob of each token.
        mask: ``[B, T]``, bool or numbers; a token counts where it is not zero.
        desirable: ``[B]``, bool or numbers: whether a sequence is wanted.
        ref_log_probs: ``[B, T]`` or ``[B]``, as in `chunked_linear_kto`.
        reference_free: Whether to do without a reference.
        kl: Scalar or ``[B]``, as in `chunked_linear_kto`.
        beta: Strength of the preference, above 0.
        desirable_weight: Factor of the loss of desirable sequences.
        undesirable_weight: Factor of the loss of the others.
        average_log_prob: Whether a sequence has the mean of its tokens instead of their sum.

    Returns:
        Loss and metrics in fp32 (fp64 for fp64). Only ``log_probs`` gets a gradient.

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape, device or option that is not as above, or no reference.
    """
    check_kto_options(
        beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight
    )
    _check_reference_choice(ref_log_probs is not None, reference_free)
    batch = _batch(log_probs, mask, average_log_prob, paired=False)
    desirable = sequences.check_flags("desirable", desirable, log_probs.shape[:1], log_probs.device)
    policy, ratios = _log_ratios(batch, ref_log_probs)
    kl = _reference_point(kl, batch)
    counted = batch.lengths > 0
    gains = beta * (kept(ratios, counted) - kl)
    losses = torch.where(
        desirable,
        desirable_weight * _sigmoid(-gains),
        undesirable_weight * _sigmoid(gains),
    )
    rewards = beta * ratios.detach()
    wanted = mean_over(rewards, counted & desirable)
    unwanted = mean_over(rewards, counted & ~desirable)
    return KTOLoss(
        mean_over(losses, counted),
        policy.detach(),
        rewards,
        wanted,
        unwanted,
        wanted - unwanted,
        kl,
    )


def _reference_point(kl: Tensor | None, batch: _Batch) -> Tensor:
    """The argument ``kl`` in the dtype of the log-probs, without a gradient; 0 for None."""
    if kl is None:
        return batch.log_probs.new_zeros(())
    validation.check_float_tensor("kl", kl)
    if kl.dim() and kl.shape != batch.lengths.shape:
        raise ValueError(
            f"kl: expected a scalar or shape {list(batch.lengths.shape)}, got {list(kl.shape)}"
        )
    if kl.device != batch.lengths.device:
        raise ValueError(f"kl: expected a tensor on {batch.lengths.device}, got {kl.device}")
    return kl.detach().to(batch.log_probs.dtype)


def kto_kl(
    log_probs: Tensor,
    mask: Tensor,
    ref_log_probs: Tensor,
    *,
    average_log_prob: bool = False,
) -> Tensor:
    """Reference point of KTO: the divergence from the reference on mismatched completions.

    ``max(0, mean over sequences of log p - log p_ref)`` (arXiv:2402.01306) of completions
    that belong to other prompts of the batch. With several processes the mean is to be
    taken over all of them before ``clamp``: give `kto_loss` that instead.

    Args:
        log_probs: ``[M, T]``, log-prob of each token.
        mask: ``[M, T]``, bool or numbers; a token counts where it is not zero.
        ref_log_probs: ``[M, T]`` or ``[M]``.
        average_log_prob: As in the loss it is for.

    Returns:
        Scalar, without a gradient; 0 if no token counts.

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape or device that is not as above.
    """
    batch = _batch(log_probs.detach(), mask, average_log_prob, paired=False)
    _, ratios = _log_ratios(batch, ref_log_probs)
    return mean_over(ratios, batch.lengths > 0).clamp(min=0)


def chunked_linear_kto(
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
    reference_free: bool = False,
    kl: Tensor | None = None,
    kl_input: Tensor | None = None,
    kl_target: Tensor | None = None,
    kl_ref_log_probs: Tensor | None = None,
    kl_ref_input: Tensor | None = None,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    average_log_prob: bool = False,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
) -> KTOLoss:
    """Kahneman-Tversky optimisation (arXiv:2402.01306) of hidden states, without the logits.

    With ``r`` the log-prob of a sequence minus that of the reference and ``k`` the reference point,
    the loss is the mean of ``desirable_weight * (1 - s(beta * (r - k)))`` over desirable sequences
    and of ``undesirable_weight * (1 - s(beta * (k - r)))`` over the others, one mean over both.

    ``k`` is ``kl`` if that is given, or else estimated by `kto_kl` from ``kl_input``, or else 0
    (which is the unpaired form of APO-zero). It never gets a gradient.

    A sequence without a token that counts counts nowhere, not in the mean either; with none that
    does the result is 0 with zero gradients.

    Args:
        input: Hidden states ``[B, T, D]``.
        weight: Projection ``[V, D]``.
        target: Classes ``[B, T]``, already shifted.
        desirable: ``[B]``, bool or numbers: whether a sequence is wanted.
        bias: ``[V]`` or None.
        ref_log_probs: As in `chunked_linear_dpo`, ``[B, T]`` or ``[B]``.
        ref_input: Hidden states of the reference ``[B, T, D']``, instead.
        ref_weight: Its projection ``[V, D']``, with ``ref_input``; may be ``weight``.
        ref_bias: Its bias ``[V]`` or None.
        reference_free: Take the log-probs of the reference to be 0.
        kl: Reference point, scalar or ``[B]``.
        kl_input: Hidden states of the policy ``[M, T', D]`` for mismatched completions.
        kl_target: Their classes ``[M, T']``, already shifted.
        kl_ref_log_probs: Their log-probs under the reference, ``[M, T']`` or ``[M]``.
        kl_ref_input: Their hidden states of the reference ``[M, T', D']``, instead; projected by
            ``ref_weight``.
        beta: Strength of the preference, above 0.
        desirable_weight: See above; at least 0.
        undesirable_weight: See above; at least 0.
        average_log_prob: Whether a sequence has the mean of its tokens' log-probs instead of their
            sum.
        ignore_index: Target of tokens that do not count.
        logit_scale: As in `chunked_linear_cross_entropy`; for both heads.
        softcap: Likewise.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Returns:
        Loss and detached metrics in fp32 (fp64 for fp64). Nothing of the reference gets a gradient.

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: A shape, device or option that is not as above, or no reference.
    """
    check_kto_options(
        beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight
    )
    _check_reference_choice(ref_log_probs is not None or ref_input is not None, reference_free)
    head = sequences.head_options(
        ignore_index, logit_scale, softcap, chunk_size, grad_weight_accum_dtype
    )
    sequences.check_batch(input, target)
    if kl_input is None:
        stray = {
            "kl_target": kl_target,
            "kl_ref_log_probs": kl_ref_log_probs,
            "kl_ref_input": kl_ref_input,
        }
        for name, value in stray.items():
            if value is not None:
                raise ValueError(f"{name}: expected None without kl_input, got a tensor")
    else:
        if kl is not None:
            raise ValueError("kl: expected None, since kl_input is given, got a tensor")
        if kl_target is None:
            raise ValueError("kl_target: expected the classes of kl_input, got None")
        sequences.check_batch(kl_input, kl_target, "kl_")
        with torch.no_grad():
            kl_reference = sequences.reference_log_probs(
                kl_target,
                weight,
                kl_ref_log_probs,
                kl_ref_input,
                None if kl_ref_input is None else ref_weight,
                None if kl_ref_input is None else ref_bias,
                prefix="kl_ref",
                **head,
            )
            if kl_reference is None:
                raise ValueError(
                    "kl_ref_log_probs: expected log-probs of the reference (or kl_ref_input), "
                    "got None"
                )
            kl_log_probs = chunked_linear_log_probs(kl_input, weight, kl_target, bias, **head)
        kl = kto_kl(
            kl_log_probs,
            kl_target != ignore_index,
            kl_reference,
            average_log_prob=average_log_prob,
        )
    ref_log_probs = sequences.reference_log_probs(
        target, weight, ref_log_probs, ref_input, ref_weight, ref_bias, **head
    )
    return kto_loss(
        chunked_linear_log_probs(input, weight, target, bias, **head),
        target != ignore_index,
        desirable,
        ref_log_probs=ref_log_probs,
        reference_free=reference_free,
        kl=kl,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
        average_log_prob=average_log_prob,
    )


# ---------------------------------------------------------------------------------------- input


def concatenate_pairs(
    chosen_input: Tensor,
    chosen_target: Tensor,
    rejected_input: Tensor,
    rejected_target: Tensor,
    *,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """One batch of pairs, as the losses above take it, from chosen and rejected ones apart.

    A copy of the hidden states costs less than two calls would: each makes a ``[V, D]`` gradient.

    Args:
        chosen_input: Hidden states ``[B, T, D]``.
        chosen_target: Classes ``[B, T]``.
        rejected_input: Hidden states ``[B, T', D]``.
        rejected_target: Classes ``[B, T']``.
        ignore_index: Target for the padding of the shorter ones.

    Returns:
        Hidden states ``[2 B, max(T, T'), D]``, zero in the padding, and targets.

    Raises:
        TypeError: A dtype that is not supported.
        ValueError: Shapes that do not go together.
    """
    sequences.check_batch(chosen_input, chosen_target, "chosen_")
    sequences.check_batch(rejected_input, rejected_target, "rejected_")
    sizes = chosen_input.shape[0], chosen_input.shape[2]
    if (rejected_input.shape[0], rejected_input.shape[2]) != sizes:
        raise ValueError(
            f"rejected_input: expected shape [{sizes[0]}, T, {sizes[1]}], B and D of chosen_input, "
            f"got {list(rejected_input.shape)}"
        )
    longest = max(chosen_target.shape[1], rejected_target.shape[1])
    inputs, targets = [], []
    for input, target in ((chosen_input, chosen_target), (rejected_input, rejected_target)):
        missing = longest - target.shape[1]
        inputs.append(F.pad(input, (0, 0, 0, missing)))
        targets.append(F.pad(target, (0, missing), value=ignore_index))
    return torch.cat(inputs), torch.cat(targets)
