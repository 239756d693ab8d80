"""Losses of logits that exist already, as modules."""

from __future__ import annotations

from torch import Tensor, nn

from greyhound_ops import functional, validation

__all__ = ["LogitsCrossEntropyLoss"]


class LogitsCrossEntropyLoss(nn.Module):
    """`functional.cross_entropy` with its options fixed.

    Call it with ``(logits [..., V], target [...])``. Unlike `torch.nn.CrossEntropyLoss` it has the
    classes last and returns fp32.

    Args:
        class_weight: ``[V]`` or None; kept as a buffer.
        ignore_index: Target value of rows that do not count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: In ``[0, 1]``.
        z_loss: Multiplier of the squared log-sum-exp.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits, or None.

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
    ) -> None:
        super().__init__()
        validation.check_choice("reduction", reduction, validation.REDUCTIONS)
        validation.check_row_options(
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

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss; shapes and errors as in `functional.cross_entropy`."""
        return functional.cross_entropy(
            logits,
            target,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
        )

    def extra_repr(self) -> str:
        """Options of the loss."""
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}, z_loss={self.z_loss}, "
            f"logit_scale={self.logit_scale}, softcap={self.softcap}"
        )
