"""Cross entropy of a linear projection, as a module."""

from __future__ import annotations

from torch import Tensor, nn

from greyhound_ops import functional, validation

__all__ = ["ChunkedLinearCrossEntropyLoss"]


class ChunkedLinearCrossEntropyLoss(nn.Module):
    """`functional.chunked_linear_cross_entropy` with its options fixed.

    Call it with ``(input [..., D], weight [V, D], target [...], bias [V] or None)`` and, by
    keyword, ``row_weight`` and ``denominator``; the head's parameters stay with the model.

    Args:
        class_weight: ``[V]`` or None; kept as a buffer.
        ignore_index: Target value of rows that do not count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: In ``[0, 1]``.
        z_loss: Multiplier of the squared log-sum-exp.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits, or None.
        return_z_loss: Return the z-loss part as well.
        return_lse: Return each row's log-sum-exp as well.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Raises:
        ValueError: An option outside its range, at construction.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        class_weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_lse: bool = False,
        chunk_size: int | None = None,
        grad_weight_accum_dtype: str = "fp32",
    ) -> None:
        super().__init__()
        validation.check_options(
            reduction=reduction,
            chunk_size=chunk_size,
            grad_weight_accum_dtype=grad_weight_accum_dtype,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            logit_scale=logit_scale,
            softcap=softcap,
        )
        self.register_buffer("class_weight", class_weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.logit_scale = logit_scale
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.return_lse = return_lse
        self.chunk_size = chunk_size
        self.grad_weight_accum_dtype = grad_weight_accum_dtype

    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        row_weight: Tensor | None = None,
        denominator: float | Tensor | None = None,
    ) -> Tensor | functional.CrossEntropyOutput:
        """The loss; shapes and errors as in `functional.chunked_linear_cross_entropy`."""
        return functional.chunked_linear_cross_entropy(
            input,
            weight,
            target,
            bias,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            row_weight=row_weight,
            denominator=denominator,
            return_z_loss=self.return_z_loss,
            return_lse=self.return_lse,
            chunk_size=self.chunk_size,
            grad_weight_accum_dtype=self.grad_weight_accum_dtype,
        )

    def extra_repr(self) -> str:
        """Options that differ from the defaults."""
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}, z_loss={self.z_loss}, "
            f"logit_scale={self.logit_scale}, softcap={self.softcap}"
        )
