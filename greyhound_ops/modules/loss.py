"""Any row-wise loss of a linear projection, as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from greyhound_ops import functional, validation
from greyhound_ops.ops import loss_call

__all__ = ["ChunkedLinearLoss"]


class ChunkedLinearLoss(nn.Module):
    """`functional.chunked_linear_loss` with its callable and options fixed.

    Call it with ``(input [..., D], weight [V, D], *loss_args, bias=[V] or None, **loss_kwargs)``;
    the head's parameters stay with the model. A callable that the functional cannot take inside a
    compiled region, such as a bound method or a compiled function, can stand here.

    Args:
        loss_and_grad_fn: Returns the loss and the logits gradient of a chunk;
            `functional.autograd_loss_and_logits_grad` makes one of a loss alone. If that loss is a
            module, its parameters are this module's.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.

    Raises:
        TypeError: ``loss_and_grad_fn`` cannot be called.
        ValueError: An option outside its range, at construction.
    """

    def __init__(
        self,
        loss_and_grad_fn: Callable[..., tuple[Tensor, Tensor]],
        *,
        chunk_size: int | None = None,
        grad_weight_accum_dtype: str = "fp32",
    ) -> None:
        super().__init__()
        validation.check_chunk_size(chunk_size)
        validation.check_choice(
            "grad_weight_accum_dtype", grad_weight_accum_dtype, validation.ACCUM_DTYPES
        )
        if not isinstance(loss_and_grad_fn, loss_call.LogitsGrad):
            loss_and_grad_fn = loss_call.Direct(loss_and_grad_fn)
        elif isinstance(loss_and_grad_fn.loss_fn, nn.Module):
            self.loss_fn = loss_and_grad_fn.loss_fn
        self.loss_and_grad_fn = loss_and_grad_fn
        self.chunk_size = chunk_size
        self.grad_weight_accum_dtype = grad_weight_accum_dtype

    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        *loss_args: Any,
        bias: Tensor | None = None,
        **loss_kwargs: Any,
    ) -> Tensor:
        """The loss; shapes and errors as in `functional.chunked_linear_loss`."""
        return functional.chunked_linear_loss(
            input,
            weight,
            self.loss_and_grad_fn,
            *loss_args,
            bias=bias,
            chunk_size=self.chunk_size,
            grad_weight_accum_dtype=self.grad_weight_accum_dtype,
            **loss_kwargs,
        )

    def extra_repr(self) -> str:
        """The options."""
        return (
            f"chunk_size={self.chunk_size}, "
            f"grad_weight_accum_dtype={self.grad_weight_accum_dtype!r}"
        )
