"""Distillation of a teacher's output distribution into a student's, as a module."""

from __future__ import annotations

from torch import Tensor, nn

from greyhound_ops import functional, validation

__all__ = ["ChunkedLinearDistillationLoss", "ChunkedLinearJSDLoss"]


class ChunkedLinearDistillationLoss(nn.Module):
    """`functional.chunked_linear_distillation` with its options fixed.

    Call it with ``(input [..., D], weight [V, D], teacher_input [..., D_t], teacher_weight [V,
    D_t], target [...] or None, bias [V] or None, teacher_bias [V] or None)``; the heads'
    parameters stay with their models.

    Args:
        divergence: ``"jsd"``, ``"kl"``, ``"reverse_kl"``, ``"tvd"`` or ``"cosine"``.
        beta: In ``[0, 1]``, weight of the teacher in the mixture of ``"jsd"``.
        temperature: Positive.
        soft_weight: Factor on the divergence.
        hard_weight: Factor on the cross entropy.
        ignore_index: Target value of rows that do not count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.
        return_parts: Return divergence and cross entropy beside the loss.

    Raises:
        ValueError: An option outside its range, at construction.
    """

    def __init__(
        self,
        *,
        divergence: str = "jsd",
        beta: float = 0.5,
        temperature: float = 1.0,
        soft_weight: float = 1.0,
        hard_weight: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        chunk_size: int | None = None,
        grad_weight_accum_dtype: str = "fp32",
        return_parts: bool = False,
    ) -> None:
        super().__init__()
        validation.check_options(
            reduction=reduction,
            chunk_size=chunk_size,
            grad_weight_accum_dtype=grad_weight_accum_dtype,
            ignore_index=ignore_index,
        )
        validation.check_distillation_options(
            divergence=divergence,
            beta=beta,
            temperature=temperature,
            soft_weight=soft_weight,
            hard_weight=hard_weight,
        )
        self.divergence = divergence
        self.beta = beta
        self.temperature = temperature
        self.soft_weight = soft_weight
        self.hard_weight = hard_weight
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.chunk_size = chunk_size
        self.grad_weight_accum_dtype = grad_weight_accum_dtype
        self.return_parts = return_parts

    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        target: Tensor | None = None,
        bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | functional.DistillationOutput:
        """The loss; shapes and errors as in `functional.chunked_linear_distillation`."""
        return functional.chunked_linear_distillation(
            input,
            weight,
            teacher_input,
            teacher_weight,
            target,
            bias,
            teacher_bias,
            divergence=self.divergence,
            beta=self.beta,
            temperature=self.temperature,
            soft_weight=self.soft_weight,
            hard_weight=self.hard_weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            chunk_size=self.chunk_size,
            grad_weight_accum_dtype=self.grad_weight_accum_dtype,
            return_parts=self.return_parts,
        )

    def extra_repr(self) -> str:
        """What the loss is made of."""
        return (
            f"divergence={self.divergence!r}, beta={self.beta}, temperature={self.temperature}, "
            f"soft_weight={self.soft_weight}, hard_weight={self.hard_weight}, "
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}"
        )


class ChunkedLinearJSDLoss(ChunkedLinearDistillationLoss):
    """Generalised Jensen-Shannon divergence (arXiv:2306.13649) between student and teacher.

    `ChunkedLinearDistillationLoss` under the name and with the option that on-policy distillation
    knows: ``beta=0`` is forward KL and ``beta=1`` reverse KL, as in TRL and Liger.

    Args:
        beta: In ``[0, 1]``.
        temperature: Positive.
        ignore_index: Target value of rows that do not count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Raises:
        ValueError: An option outside its range, at construction.
    """

    def __init__(
        self,
        beta: float = 0.5,
        *,
        temperature: float = 1.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        chunk_size: int | None = None,
        grad_weight_accum_dtype: str = "fp32",
    ) -> None:
        super().__init__(
            divergence="jsd",
            beta=beta,
            temperature=temperature,
            ignore_index=ignore_index,
            reduction=reduction,
            chunk_size=chunk_size,
            grad_weight_accum_dtype=grad_weight_accum_dtype,
        )
