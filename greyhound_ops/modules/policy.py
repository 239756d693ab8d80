"""Policy-gradient losses of a linear projection, as a module."""

from __future__ import annotations

from torch import Tensor

from greyhound_ops import functional
from greyhound_ops.functional import PolicyLoss, sequences
from greyhound_ops.functional.policy import PolicyOptions
from greyhound_ops.modules.preference import SequenceLoss
from greyhound_ops.ops.linear_log_probs import check_temperature

__all__ = ["ChunkedLinearGRPOLoss"]


class ChunkedLinearGRPOLoss(SequenceLoss):
    """`functional.chunked_linear_grpo` with its options fixed.

    Args:
        loss_type: Which of the losses.
        importance_sampling_level: ``"token"`` or ``"sequence"``.
        epsilon_low: How far below 1 a ratio counts, at least 0.
        epsilon_high: How far above; None for ``epsilon_low``. For cispo the bound itself.
        delta: Largest ratio that counts at all, or None.
        beta: Factor of the divergence from the reference, at least 0.
        use_bias_correction_kl: Weight the divergence by the ratio.
        entropy_coef: Factor of the entropy that is taken off the loss.
        max_completion_length: Tokens, for dr_grpo.
        sapo_temperature_pos: tau of sapo for advantages above 0.
        sapo_temperature_neg: tau for the rest.
        vespo_k_pos: k of vespo for advantages of at least 0.
        vespo_lambda_pos: lambda likewise.
        vespo_k_neg: k for the rest.
        vespo_lambda_neg: lambda for the rest.
        return_entropy: Whether to measure the entropy also with ``entropy_coef=0``.
        temperature: Of the softmax.
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
        return_entropy: bool = False,
        temperature: float = 1.0,
        ignore_index: int = -100,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        chunk_size: int | None = None,
        grad_weight_accum_dtype: str = "fp32",
    ) -> None:
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
        # What divides the loss may come with the call.
        options.check(has_denominator=True)
        if isinstance(temperature, Tensor):
            raise TypeError("temperature: expected a number; give one per token with the function")
        check_temperature(temperature)
        head = sequences.head_options(
            ignore_index, logit_scale, softcap, chunk_size, grad_weight_accum_dtype
        )
        super().__init__(
            **options._asdict(), return_entropy=return_entropy, temperature=temperature, **head
        )

    def forward(
        self,
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
    ) -> PolicyLoss:
        """Loss and metrics; shapes and errors as in `functional.chunked_linear_grpo`."""
        return functional.chunked_linear_grpo(
            input,
            weight,
            target,
            advantages,
            bias,
            mask=mask,
            old_log_probs=old_log_probs,
            ref_log_probs=ref_log_probs,
            ref_input=ref_input,
            ref_weight=ref_weight,
            ref_bias=ref_bias,
            denominator=denominator,
            **self.options,
        )
