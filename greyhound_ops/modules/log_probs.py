"""Log-probabilities of a linear projection's classes, as a module."""

from __future__ import annotations

from torch import Tensor, nn

from greyhound_ops import functional, validation
from greyhound_ops.functional import LogProbs
from greyhound_ops.ops.linear_log_probs import check_keep_logits, check_temperature

__all__ = ["ChunkedLinearLogProbs"]


class ChunkedLinearLogProbs(nn.Module):
    """`functional.chunked_linear_log_probs` with its options fixed.

    Call it with ``(input [..., D], weight [V, D], target [...], bias [V] or None)``; the head's
    parameters stay with the model.

    Args:
        temperature: Positive number; one per row is given with the call.
        ignore_index: Target of rows whose log-probability is 0.
        logit_scale: Factor on the logits.
        softcap: Cap of the logits, or None.
        return_entropy: Whether to return entropies.
        return_lse: Whether to return log-sum-exps.
        return_argmax: Whether to return the classes of the largest logits.
        chunk_size: Rows per chunk, or None.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``.
        keep_logits: Whether logits are kept for the backward, or None.

    Raises:
        ValueError: An option outside its range, at construction.
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        ignore_index: int = -100,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        return_entropy: bool = False,
        return_lse: bool = False,
        return_argmax: bool = False,
        chunk_size: int | None = None,
        grad_weight_accum_dtype: str = "fp32",
        keep_logits: bool | None = None,
    ) -> None:
        super().__init__()
        if isinstance(temperature, Tensor):
            raise TypeError("temperature: expected a number; give one per row with the call")
        check_temperature(temperature)
        validation.check_options(
            reduction="none",
            chunk_size=chunk_size,
            grad_weight_accum_dtype=grad_weight_accum_dtype,
            ignore_index=ignore_index,
            logit_scale=logit_scale,
            softcap=softcap,
        )
        self.temperature = temperature
        self.ignore_index = ignore_index
        self.logit_scale = logit_scale
        self.softcap = softcap
        self.return_entropy = return_entropy
        self.return_lse = return_lse
        self.return_argmax = return_argmax
        self.chunk_size = chunk_size
        self.grad_weight_accum_dtype = grad_weight_accum_dtype
        check_keep_logits(keep_logits)
        self.keep_logits = keep_logits

    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        temperature: Tensor | None = None,
    ) -> Tensor | LogProbs:
        """Log-probabilities; shapes and errors as in `functional.chunked_linear_log_probs`.

        ``temperature`` here takes the place of the module's.
        """
        return functional.chunked_linear_log_probs(
            input,
            weight,
            target,
            bias,
            temperature=self.temperature if temperature is None else temperature,
            ignore_index=self.ignore_index,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            return_entropy=self.return_entropy,
            return_lse=self.return_lse,
            return_argmax=self.return_argmax,
            chunk_size=self.chunk_size,
            grad_weight_accum_dtype=self.grad_weight_accum_dtype,
            keep_logits=self.keep_logits,
        )

    def extra_repr(self) -> str:
        """Options of the logits and the outputs."""
        outputs = [name for name in ("entropy", "lse", "argmax") if getattr(self, f"return_{name}")]
        return (
            f"temperature={self.temperature}, ignore_index={self.ignore_index}, "
            f"logit_scale={self.logit_scale}, softcap={self.softcap}, also={outputs}"
        )
