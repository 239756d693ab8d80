"""Several cross entropies in one call, as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from greyhound_ops import functional, validation

__all__ = ["ChunkedMultiHeadCrossEntropyLoss", "ChunkedMultiTokenCrossEntropyLoss"]


class _MultiCrossEntropyLoss(nn.Module):
    """Options that both modules have."""

    def __init__(
        self,
        term_weights: Sequence[float] | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        chunk_size: int | None = None,
        grad_weight_accum_dtype: str = "fp32",
    ) -> None:
        super().__init__()
        validation.check_choice("reduction", reduction, ("mean", "sum"))
        self.term_weights = None if term_weights is None else tuple(term_weights)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "logit_scale": logit_scale,
            "softcap": softcap,
            "chunk_size": chunk_size,
            "grad_weight_accum_dtype": grad_weight_accum_dtype,
        }
        validation.check_options(**self.options)

    def extra_repr(self) -> str:
        """Options."""
        shown = {"term_weights": self.term_weights, **self.options}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class ChunkedMultiTokenCrossEntropyLoss(_MultiCrossEntropyLoss):
    """`functional.chunked_multi_token_cross_entropy` with its options fixed.

    Args:
        term_weights: K factors of the terms, or None for ones.
        ignore_index: Target value of rows that do not count.
        reduction: ``"mean"`` or ``"sum"``, of each term.
        label_smoothing: In ``[0, 1]``.
        z_loss: Multiplier of the squared log-sum-exp.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits, or None.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Raises:
        ValueError: An option outside its range, at construction.
    """

    def forward(
        self,
        inputs: Sequence[Tensor] | Tensor,
        weight: Tensor,
        targets: Sequence[Tensor] | Tensor,
        bias: Tensor | None = None,
        *,
        detach_head: Sequence[bool] | bool = False,
    ) -> functional.MultiCrossEntropyOutput:
        """The loss and its terms; shapes and errors as in the functional."""
        return functional.chunked_multi_token_cross_entropy(
            inputs, weight, targets, bias,
            term_weights=self.term_weights, detach_head=detach_head, **self.options,
        )  # fmt: skip


class ChunkedMultiHeadCrossEntropyLoss(_MultiCrossEntropyLoss):
    """`functional.chunked_multi_head_cross_entropy` with its options fixed.

    Args:
        term_weights: K factors of the terms, or None for ones.
        ignore_index: Target value of rows that do not count.
        reduction: ``"mean"`` or ``"sum"``, of each term.
        label_smoothing: In ``[0, 1]``.
        z_loss: Multiplier of the squared log-sum-exp.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits, or None.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Raises:
        ValueError: An option outside its range, at construction.
    """

    def forward(
        self,
        input: Tensor,
        weights: Sequence[Tensor] | Tensor,
        targets: Sequence[Tensor] | Tensor,
        biases: Sequence[Tensor] | Tensor | None = None,
    ) -> functional.MultiCrossEntropyOutput:
        """The loss and its terms; shapes and errors as in the functional."""
        return functional.chunked_multi_head_cross_entropy(
            input, weights, targets, biases,
            term_weights=self.term_weights, **self.options,
        )  # fmt: skip
