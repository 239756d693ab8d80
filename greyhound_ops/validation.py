"""The input contract of the ops: every message names the argument, what was expected, what came."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")
ACCUM_DTYPES = ("fp32", "weight")
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_float_tensor(name: str, value: object) -> Tensor:
    """Check that a value is a floating-point tensor that the ops can work on."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {value.layout}")
    if value.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{name}: expected dtype bfloat16, float16, float32 or float64, got {value.dtype}"
        )
    return value


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Check that a value is one of a few strings."""
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}: expected one of {listed}, got {value!r}")


def check_number(name: str, value: object, *, least: float = -math.inf) -> None:
    """Check that a value is a finite number, at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    # Comparisons, which Dynamo can trace for a number it made symbolic; isfinite it cannot.
    if not -math.inf < value < math.inf or value < least:
        bound = "" if least == -math.inf else f" >= {least:g}"
        raise ValueError(f"{name}: expected a finite number{bound}, got {value}")


def check_row_options(
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> None:
    """Check the options of a row's cross entropy."""
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index: expected an int, got {ignore_index!r}")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index: expected a 64-bit integer, got {ignore_index}")
    check_number("label_smoothing", label_smoothing, least=0.0)
    if label_smoothing > 1.0:
        raise ValueError(f"label_smoothing: expected a number in [0, 1], got {label_smoothing}")
    check_number("z_loss", z_loss, least=0.0)
    check_number("logit_scale", logit_scale)
    if softcap is not None:
        check_number("softcap", softcap)
        if softcap <= 0.0:
            raise ValueError(f"softcap: expected a positive number or None, got {softcap}")


def check_same_device(reference: Tensor, **others: Tensor | None) -> None:
    """Check that tensors lie on the device of the input."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != reference.device:
            raise ValueError(
                f"{name}: expected a tensor on the device of input, {reference.device}, "
                f"got {tensor.device}"
            )


def check_projection(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check ``input [..., D]``, ``weight [V, D]`` and ``bias [V]`` against each other."""
    check_float_tensor("input", input)
    check_float_tensor("weight", weight)
    if weight.dim() != 2:
        raise ValueError(
            f"weight: expected shape [V, D], got {list(weight.shape)}; a flat or sharded parameter "
            "must be gathered first"
        )
    if input.dim() < 1:
        raise ValueError("input: expected shape [..., D], got a scalar")
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input: expected last dimension D = {weight.shape[1]} as in weight "
            f"{list(weight.shape)}, got shape {list(input.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError(
            f"weight: expected at least one class, got shape {list(weight.shape)}; "
            "a sharded parameter must be gathered first"
        )
    if weight.shape[1] == 0:
        raise ValueError(f"weight: expected D >= 1, got shape {list(weight.shape)}")
    if bias is not None:
        check_float_tensor("bias", bias)
        if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
            raise ValueError(
                f"bias: expected shape [V] = [{weight.shape[0]}], got {list(bias.shape)}"
            )
    check_same_device(input, weight=weight, bias=bias)


def check_target(input: Tensor, target: object) -> None:
    """Check ``target [...]`` against ``input [..., D]``."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target: expected a tensor, got {type(target).__name__}")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target: expected dtype int64 or int32, got {target.dtype}")
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target: expected shape {list(input.shape[:-1])}, that of input without its last "
            f"dimension, got {list(target.shape)}"
        )
    check_same_device(input, target=target)


def check_chunk_size(chunk_size: int | None) -> None:
    """Check a number of rows per chunk."""
    if chunk_size is None:
        return
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, (int, torch.SymInt)):
        raise TypeError(f"chunk_size: expected an int or None, got {type(chunk_size).__name__}")
    if isinstance(chunk_size, int) and chunk_size <= 0:
        raise ValueError(f"chunk_size: expected at least 1 row, got {chunk_size}")


def check_options(
    *,
    reduction: str,
    chunk_size: int | None,
    grad_weight_accum_dtype: str,
    **row_options: Any,
) -> None:
    """Check every option that is no tensor; ``row_options`` as for `check_row_options`."""
    check_row_options(**row_options)
    check_chunk_size(chunk_size)
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("grad_weight_accum_dtype", grad_weight_accum_dtype, ACCUM_DTYPES)


def resolve_compute_dtype(
    input: Tensor, weight: Tensor, compute_dtype: torch.dtype | None
) -> torch.dtype:
    """Dtype of the matrix products.

    Raises:
        TypeError: If input and weight differ and neither autocast nor the caller says what to use.
    """
    if compute_dtype is not None:
        if compute_dtype not in FLOAT_DTYPES:
            raise TypeError(f"compute_dtype: expected a floating dtype, got {compute_dtype}")
        return compute_dtype
    if input.dtype != weight.dtype:
        raise TypeError(
            f"weight: expected the dtype of input, {input.dtype}, got {weight.dtype}; "
            "cast one of them or run under torch.autocast"
        )
    return input.dtype
