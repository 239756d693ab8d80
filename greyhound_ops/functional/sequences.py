"""What the losses of whole sequences share: checks, masks, and log-probs of a frozen head.

B sequences, T tokens each (padded), D hidden size, V vocabulary. A token counts where the mask is
not zero; what stands at the others, inf and NaN too, enters nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from greyhound_ops import validation
from greyhound_ops.functional.log_probs import chunked_linear_log_probs

FLAG_DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, *validation.FLOAT_DTYPES)


def check_batch(input: Tensor, target: Tensor, prefix: str = "") -> None:
    """Check ``input [B, T, D]`` and ``target [B, T]``, arguments whose names have a prefix."""
    validation.check_float_tensor(f"{prefix}input", input)
    if input.dim() != 3:
        raise ValueError(f"{prefix}input: expected shape [B, T, D], got {list(input.shape)}")
    if isinstance(target, Tensor) and target.shape != input.shape[:-1]:
        raise ValueError(
            f"{prefix}target: expected shape [B, T] = {list(input.shape[:-1])}, got "
            f"{list(target.shape)}"
        )
    validation.check_target(input, target)


def check_log_probs(log_probs: Tensor) -> None:
    """Check ``log_probs [B, T]``."""
    validation.check_float_tensor("log_probs", log_probs)
    if log_probs.dim() != 2:
        raise ValueError(f"log_probs: expected shape [B, T], got {list(log_probs.shape)}")


def check_pairs(name: str, value: Tensor) -> None:
    """Check that a batch has a second half to compare the first with."""
    if value.shape[0] % 2:
        raise ValueError(
            f"{name}: expected an even first dimension 2 B, the chosen sequences and then the "
            f"rejected ones, got shape {list(value.shape)}"
        )


def check_flags(name: str, value: object, shape: Any, device: torch.device) -> Tensor:
    """Check a mask or another tensor of yes and no, and give it as bool."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    validation.check_not_distributed(name, value)
    if value.dtype not in FLAG_DTYPES:
        raise TypeError(f"{name}: expected dtype bool, or numbers of 0 and 1, got {value.dtype}")
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got {value.device}")
    return value if value.dtype == torch.bool else value != 0


def check_values(name: str, value: object, shape: Any, like: Tensor, *, or_rows: bool) -> Tensor:
    """Check numbers ``[B, T]``, or ``[B]`` where one a sequence will do, and detach them.

    Args:
        name: Of the argument.
        value: The argument.
        shape: ``[B, T]``.
        like: The log-probs, for device and dtype.
        or_rows: Whether ``[B]`` will do.

    Returns:
        The numbers in the dtype of the log-probs, without a gradient.
    """
    tensor = validation.check_float_tensor(name, value)
    if tensor.shape != shape and not (or_rows and tensor.shape == shape[:1]):
        choices = f"{list(shape[:1])} or {list(shape)}" if or_rows else f"{list(shape)}"
        raise ValueError(f"{name}: expected shape {choices}, got {list(tensor.shape)}")
    if tensor.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, got {tensor.device}")
    return tensor.detach().to(like.dtype)


def head_options(
    ignore_index: int,
    logit_scale: float,
    softcap: float | None,
    chunk_size: int | None,
    grad_weight_accum_dtype: str,
) -> dict[str, Any]:
    """Options of the projection, checked, by name."""
    validation.check_row_options(
        ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap
    )
    validation.check_chunk_size(chunk_size)
    validation.check_choice(
        "grad_weight_accum_dtype", grad_weight_accum_dtype, validation.ACCUM_DTYPES
    )
    return {
        "ignore_index": ignore_index,
        "logit_scale": logit_scale,
        "softcap": softcap,
        "chunk_size": chunk_size,
        "grad_weight_accum_dtype": grad_weight_accum_dtype,
    }


def check_positive(name: str, value: object) -> None:
    """Check that a value is a finite number above zero."""
    validation.check_number(name, value)
    if not value > 0:  # type: ignore[operator]
        raise ValueError(f"{name}: expected a number > 0, got {value}")


def reference_log_probs(
    target: Tensor,
    weight: Tensor,
    log_probs: Tensor | None,
    input: Tensor | None,
    head: Tensor | None,
    bias: Tensor | None,
    *,
    prefix: str = "ref",
    **options: Any,
) -> Tensor | None:
    """Log-probs of the reference: those given, or those of its own head, without a gradient.

    Args:
        target: ``[B, T]``.
        weight: ``[V, D]`` of the policy.
        log_probs: The argument ``ref_log_probs``.
        input: The argument ``ref_input``.
        head: The argument ``ref_weight``.
        bias: The argument ``ref_bias``.
        prefix: What the names of log-probs and input begin with in messages.
        **options: For `chunked_linear_log_probs`.

    Returns:
        ``[B, T]``, what was given, or None if nothing was.
    """
    if input is None:
        if head is not None or bias is not None:
            raise ValueError(
                f"{prefix}_input: expected the hidden states that ref_weight projects, got None"
            )
        return log_probs
    if log_probs is not None:
        raise ValueError(
            f"{prefix}_log_probs: expected None, since {prefix}_input is given to make them from, "
            "got a tensor"
        )
    if head is None:
        raise ValueError(
            "ref_weight: expected the head of the reference (weight itself, if it is the same), "
            "got None"
        )
    validation.check_float_tensor(f"{prefix}_input", input)
    validation.check_float_tensor("ref_weight", head)
    if input.shape[:-1] != target.shape:
        raise ValueError(
            f"{prefix}_input: expected shape [B, T, D] with [B, T] = {list(target.shape)} as in "
            f"target, got {list(input.shape)}"
        )
    if head.dim() != 2 or head.shape[0] != weight.shape[0] or head.shape[1] != input.shape[-1]:
        raise ValueError(
            f"ref_weight: expected shape [V, D] = [{weight.shape[0]}, {input.shape[-1]}], that of "
            f"weight and of ref_input, got {list(head.shape)}"
        )
    with torch.no_grad():
        made: Tensor = chunked_linear_log_probs(input, head, target, bias, **options)
    return made


def kept(values: Tensor, counted: Tensor) -> Tensor:
    """Values where they count and zero elsewhere; neither value nor gradient leaks from there."""
    return torch.where(counted, values, values.new_zeros(()))


def mean_over(values: Tensor, counted: Tensor) -> Tensor:
    """Mean of the values that count; 0, with gradients of 0, if none does."""
    return kept(values, counted).sum() / counted.sum().clamp(min=1)
