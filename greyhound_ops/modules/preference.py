"""Preference losses of a linear projection, as modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from greyhound_ops import functional
from greyhound_ops.functional import KTOLoss, PreferenceLoss, preference, sequences
from greyhound_ops.functional.preference import PairOptions

__all__ = [
    "ChunkedLinearCPOLoss",
    "ChunkedLinearDPOLoss",
    "ChunkedLinearKTOLoss",
    "ChunkedLinearORPOLoss",
    "ChunkedLinearSimPOLoss",
]


class SequenceLoss(nn.Module):
    """A loss whose options are fixed at construction; the head's parameters stay with the model.

    Args:
        **options: For the function of the same name; checked by the subclass.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def extra_repr(self) -> str:
        """Every option."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class ChunkedLinearDPOLoss(SequenceLoss):
    """`functional.chunked_linear_dpo` with its options fixed.

    Args:
        loss_type: Which of the variants.
        beta: Strength of the preference, above 0.
        label_smoothing: In ``[0, 0.5]``.
        discopop_tau: Temperature of ``"discopop"``.
        reference_free: Take the log-probs of the reference to be 0.
        average_log_prob: Mean instead of sum over a sequence's tokens; None for ``"ipo"`` alone.
        nll_weight: Factor of the negative log-likelihood of a chosen token.
        ignore_index: Target of tokens that do not count.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits, or None.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Raises:
        TypeError: An option of the wrong type, at construction.
        ValueError: An option outside its range, at construction.
    """

    def __init__(
        self,
        *,
        loss_type: str = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        reference_free: bool = False,
        average_log_prob: bool | None = None,
        nll_weight: float = 0.0,
        ignore_index: int = -100,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        chunk_size: int | None = None,
        grad_weight_accum_dtype: str = "fp32",
    ) -> None:
        options = PairOptions(loss_type, beta, label_smoothing, discopop_tau, nll_weight)
        options.check()
        head = sequences.head_options(
            ignore_index, logit_scale, softcap, chunk_size, grad_weight_accum_dtype
        )
        super().__init__(
            **options._asdict(),
            reference_free=reference_free,
            average_log_prob=average_log_prob,
            **head,
        )

    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        ref_log_probs: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> PreferenceLoss:
        """Loss and metrics; shapes and errors as in `functional.chunked_linear_dpo`."""
        return functional.chunked_linear_dpo(
            input,
            weight,
            target,
            bias,
            ref_log_probs=ref_log_probs,
            ref_input=ref_input,
            ref_weight=ref_weight,
            ref_bias=ref_bias,
            **self.options,
        )


class ChunkedLinearCPOLoss(SequenceLoss):
    """`functional.chunked_linear_cpo` with its options fixed.

    Args:
        loss_type: ``"sigmoid"``, ``"hinge"`` or ``"ipo"``.
        beta: Strength of the preference, above 0.
        label_smoothing: In ``[0, 0.5]``, for ``"sigmoid"``.
        average_log_prob: Mean instead of sum over a sequence's tokens; None for ``"ipo"`` alone.
        nll_weight: Factor of the negative log-likelihood of a chosen token.
        ignore_index: Target of tokens that do not count.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits, or None.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Raises:
        TypeError: An option of the wrong type, at construction.
        ValueError: An option outside its range, at construction.
    """

    def __init__(
        self,
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
    ) -> None:
        options = PairOptions(loss_type, beta, label_smoothing, nll_weight=nll_weight)
        options.check(preference.CPO_LOSS_TYPES)
        head = sequences.head_options(
            ignore_index, logit_scale, softcap, chunk_size, grad_weight_accum_dtype
        )
        super().__init__(
            loss_type=loss_type,
            beta=beta,
            label_smoothing=label_smoothing,
            average_log_prob=average_log_prob,
            nll_weight=nll_weight,
            **head,
        )

    def forward(
        self, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> PreferenceLoss:
        """Loss and metrics; shapes and errors as in `functional.chunked_linear_cpo`."""
        return functional.chunked_linear_cpo(input, weight, target, bias, **self.options)


class ChunkedLinearSimPOLoss(SequenceLoss):
    """`functional.chunked_linear_simpo` with its options fixed.

    Args:
        beta: Strength of the preference, above 0.
        gamma: Margin by which the chosen reward is to be larger.
        label_smoothing: In ``[0, 0.5]``.
        nll_weight: Factor of the negative log-likelihood of a chosen token.
        ignore_index: Target of tokens that do not count.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits, or None.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Raises:
        TypeError: An option of the wrong type, at construction.
        ValueError: An option outside its range, at construction.
    """

    def __init__(
        self,
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
    ) -> None:
        options = {
            "beta": beta,
            "gamma": gamma,
            "label_smoothing": label_smoothing,
            "nll_weight": nll_weight,
        }
        preference.check_simpo_options(**options)
        head = sequences.head_options(
            ignore_index, logit_scale, softcap, chunk_size, grad_weight_accum_dtype
        )
        super().__init__(**options, **head)

    def forward(
        self, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> PreferenceLoss:
        """Loss and metrics; shapes and errors as in `functional.chunked_linear_simpo`."""
        return functional.chunked_linear_simpo(input, weight, target, bias, **self.options)


class ChunkedLinearORPOLoss(SequenceLoss):
    """`functional.chunked_linear_orpo` with its options fixed.

    Args:
        beta: Factor of the odds-ratio loss, above 0.
        nll_weight: Factor of the negative log-likelihood of a chosen token.
        ignore_index: Target of tokens that do not count.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits, or None.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Raises:
        TypeError: An option of the wrong type, at construction.
        ValueError: An option outside its range, at construction.
    """

    def __init__(
        self,
        *,
        beta: float = 0.1,
        nll_weight: float = 1.0,
        ignore_index: int = -100,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        chunk_size: int | None = None,
        grad_weight_accum_dtype: str = "fp32",
    ) -> None:
        preference.check_orpo_options(beta=beta, nll_weight=nll_weight)
        head = sequences.head_options(
            ignore_index, logit_scale, softcap, chunk_size, grad_weight_accum_dtype
        )
        super().__init__(beta=beta, nll_weight=nll_weight, **head)

    def forward(
        self, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> PreferenceLoss:
        """Loss and metrics; shapes and errors as in `functional.chunked_linear_orpo`."""
        return functional.chunked_linear_orpo(input, weight, target, bias, **self.options)


class ChunkedLinearKTOLoss(SequenceLoss):
    """`functional.chunked_linear_kto` with its options fixed.

    Args:
        beta: Strength of the preference, above 0.
        desirable_weight: Factor of the loss of desirable sequences, at least 0.
        undesirable_weight: Factor of the loss of the others, at least 0.
        reference_free: Take the log-probs of the reference to be 0.
        average_log_prob: Mean instead of sum over a sequence's tokens.
        ignore_index: Target of tokens that do not count.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits, or None.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Raises:
        TypeError: An option of the wrong type, at construction.
        ValueError: An option outside its range, at construction.
    """

    def __init__(
        self,
        *,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        reference_free: bool = False,
        average_log_prob: bool = False,
        ignore_index: int = -100,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        chunk_size: int | None = None,
        grad_weight_accum_dtype: str = "fp32",
    ) -> None:
        options = {
            "beta": beta,
            "desirable_weight": desirable_weight,
            "undesirable_weight": undesirable_weight,
        }
        preference.check_kto_options(**options)
        head = sequences.head_options(
            ignore_index, logit_scale, softcap, chunk_size, grad_weight_accum_dtype
        )
        super().__init__(
            **options,
            reference_free=reference_free,
            average_log_prob=average_log_prob,
            **head,
        )

    def forward(
        self,
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
        kl: Tensor | None = None,
        kl_input: Tensor | None = None,
        kl_target: Tensor | None = None,
        kl_ref_log_probs: Tensor | None = None,
        kl_ref_input: Tensor | None = None,
    ) -> KTOLoss:
        """Loss and metrics; shapes and errors as in `functional.chunked_linear_kto`."""
        return functional.chunked_linear_kto(
            input,
            weight,
            target,
            desirable,
            bias,
            ref_log_probs=ref_log_probs,
            ref_input=ref_input,
            ref_weight=ref_weight,
            ref_bias=ref_bias,
            kl=kl,
            kl_input=kl_input,
            kl_target=kl_target,
            kl_ref_log_probs=kl_ref_log_probs,
            kl_ref_input=kl_ref_input,
            **self.options,
        )
