"""The input contract of the ops: every message names the argument, what was expected, what came."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")
ACCUM_DTYPES = ("fp32", "weight")
DIVERGENCES = ("jsd", "kl", "reverse_kl", "tvd", "cosine")
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_not_distributed(name: str, value: Tensor) -> None:
    """Check that a tensor is no `torch.distributed.tensor.DTensor`: a chunk needs whole rows of it.

    Replicated ones too: autograd would hand a plain gradient back to a distributed parameter.
    """
    kind = type(value)
    if kind is Tensor or kind is torch.nn.Parameter:
        return
    # By name: importing torch.distributed.tensor takes a second, and it may not be built.
    if any(each.__name__ == "DTensor" for each in kind.__mro__):
        raise TypeError(
            f"{name}: expected a plain tensor, got a DTensor; gather it first, once per call "
            "(full_tensor(), or unshard() of its FSDP module), or take to_local() where it is "
            "replicated: heads sharded over the vocabulary are not supported"
        )


def check_float_tensor(name: str, value: object) -> Tensor:
    """Check that a value is a floating-point tensor that the ops can work on."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    check_not_distributed(name, value)
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


def check_projection(input: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    """Check ``input [..., D]``, ``weight [V, D]`` and ``bias [V]`` against each other.

    Args:
        input: Hidden states.
        weight: Projection.
        bias: Or None.
        prefix: Of the arguments' names in messages, such as ``teacher_``.
    """
    check_float_tensor(f"{prefix}input", input)
    check_float_tensor(f"{prefix}weight", weight)
    if weight.dim() != 2:
        raise ValueError(
            f"{prefix}weight: expected shape [V, D], got {list(weight.shape)}; a flat or sharded "
            "parameter must be gathered first"
        )
    if input.dim() < 1:
        raise ValueError(f"{prefix}input: expected shape [..., D], got a scalar")
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{prefix}input: expected last dimension D = {weight.shape[1]} as in {prefix}weight "
            f"{list(weight.shape)}, got shape {list(input.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError(
            f"{prefix}weight: expected at least one class, got shape {list(weight.shape)}; "
            "a sharded parameter must be gathered first"
        )
    if weight.shape[1] == 0:
        raise ValueError(f"{prefix}weight: expected D >= 1, got shape {list(weight.shape)}")
    if bias is not None:
        check_float_tensor(f"{prefix}bias", bias)
        if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
            raise ValueError(
                f"{prefix}bias: expected shape [V] = [{weight.shape[0]}], got {list(bias.shape)}"
            )
    check_same_device(input, **{f"{prefix}weight": weight, f"{prefix}bias": bias})


def check_target(input: Tensor, target: object) -> None:
    """Check ``target [...]`` against ``input [..., D]``."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target: expected a tensor, got {type(target).__name__}")
    check_not_distributed("target", target)
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target: expected dtype int64 or int32, got {target.dtype}")
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target: expected shape {list(input.shape[:-1])}, that of input without its last "
            f"dimension, got {list(target.shape)}"
        )
    check_same_device(input, target=target)


def check_row_weight(input: Tensor, row_weight: object) -> None:
    """Check a weight per row, ``[...]`` for ``input [..., D]``."""
    if row_weight is None:
        return
    tensor = check_float_tensor("row_weight", row_weight)
    if tensor.shape != input.shape[:-1]:
        raise ValueError(
            f"row_weight: expected shape {list(input.shape[:-1])}, that of input without its last "
            f"dimension, got {list(tensor.shape)}"
        )
    check_same_device(input, row_weight=tensor)


def check_divisor(input: Tensor, divisor: object, reduction: str) -> None:
    """Check the caller's own divisor of a mean."""
    if divisor is None:
        return
    if reduction != "mean":
        raise ValueError(
            f"divisor: expected None with reduction={reduction!r}; only a mean is divided"
        )
    if not isinstance(divisor, Tensor):
        raise TypeError(f"divisor: expected a tensor, got {type(divisor).__name__}")
    check_not_distributed("divisor", divisor)
    if divisor.dim() != 0:
        raise ValueError(f"divisor: expected a scalar, got shape {list(divisor.shape)}")
    check_same_device(input, divisor=divisor)


def check_terms(
    inputs: list[Tensor], weights: list[Tensor], targets: list[Tensor], biases: list[Tensor]
) -> None:
    """Check the operands of K cross entropies; a list of one is shared by all."""
    count = len(targets)
    if count == 0:
        raise ValueError("targets: expected at least one tensor, got none")
    for name, tensors in (("inputs", inputs), ("weights", weights)):
        if len(tensors) not in (1, count):
            raise ValueError(
                f"{name}: expected 1 tensor or {count}, one per target, got {len(tensors)}"
            )
    if biases and len(biases) != len(weights):
        raise ValueError(
            f"biases: expected {len(weights)} tensors, one per weight, or none, got {len(biases)}"
        )
    for index in range(count):
        input = inputs[index if len(inputs) > 1 else 0]
        head = index if len(weights) > 1 else 0
        try:
            check_projection(input, weights[head], biases[head] if biases else None)
            check_target(input, targets[index])
            check_same_device(inputs[0], input=input)
        except (TypeError, ValueError) as error:
            raise type(error)(f"term {index}: {error}") from None
    for name, tensors in (("inputs", inputs), ("weights", weights)):
        for index, tensor in enumerate(tensors):
            if tensor.dtype != tensors[0].dtype:
                raise TypeError(
                    f"{name}: expected one dtype, {tensors[0].dtype} as {name}[0], got "
                    f"{tensor.dtype} at {index}"
                )


def check_term_weight(input: Tensor, term_weight: object, count: int) -> None:
    """Check a weight per term, ``[K]``."""
    if term_weight is None:
        return
    tensor = check_float_tensor("term_weight", term_weight)
    if tensor.dim() != 1 or tensor.shape[0] != count:
        raise ValueError(f"term_weight: expected shape [K] = [{count}], got {list(tensor.shape)}")
    check_same_device(input, term_weight=tensor)


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


def check_distillation_options(
    *,
    divergence: str,
    beta: float,
    temperature: float,
    soft_weight: float,
    hard_weight: float,
) -> None:
    """Check the options of a divergence between student and teacher."""
    check_choice("divergence", divergence, DIVERGENCES)
    check_number("beta", beta, least=0.0)
    if beta > 1.0:
        raise ValueError(f"beta: expected a number in [0, 1], got {beta}")
    check_number("temperature", temperature)
    if temperature <= 0.0:
        raise ValueError(f"temperature: expected a positive number, got {temperature}")
    check_number("soft_weight", soft_weight)
    check_number("hard_weight", hard_weight)


def resolve_compute_dtype(
    input: Tensor, weight: Tensor, compute_dtype: torch.dtype | None, prefix: str = ""
) -> torch.dtype:
    """Dtype of the matrix products; ``prefix`` as for `check_projection`.

    Raises:
        TypeError: If input and weight differ and neither autocast nor the caller says what to use.
    """
    if compute_dtype is not None:
        if compute_dtype not in FLOAT_DTYPES:
            raise TypeError(f"compute_dtype: expected a floating dtype, got {compute_dtype}")
        return compute_dtype
    if input.dtype != weight.dtype:
        raise TypeError(
            f"{prefix}weight: expected the dtype of {prefix}input, {input.dtype}, "
            f"got {weight.dtype}; "
            "cast one of them or run under torch.autocast"
        )
    return input.dtype
