"""Any row-wise loss of a linear projection."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from greyhound_ops import torch_private, validation
from greyhound_ops.ops import loss_call
from greyhound_ops.ops.loss_call import per_row, whole

__all__ = ["autograd_loss_and_logits_grad", "chunked_linear_loss", "per_row", "whole"]


def autograd_loss_and_logits_grad(
    loss_fn: Callable[..., Tensor],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make a ``loss_and_grad_fn`` for `chunked_linear_loss` out of a loss alone.

    Args:
        loss_fn: Takes ``(logits [C, V], *args, **kwargs)`` and returns a scalar that is a sum over
            the rows. A function, an `torch.nn.Module` (its parameters learn too), or either after
            `torch.compile`.

    Returns:
        A callable that returns the loss and its gradient with respect to the logits, both detached.
        Make it once and keep it: a compiled region compiles anew for another one.

    Raises:
        TypeError: ``loss_fn`` cannot be called.
    """
    return loss_call.LogitsGrad(loss_fn)


def chunked_linear_loss(
    input: Tensor,
    weight: Tensor,
    loss_and_grad_fn: Callable[..., tuple[Tensor, Tensor]],
    *loss_args: Any,
    bias: Tensor | None = None,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
    **loss_kwargs: Any,
) -> Tensor:
    """A row-wise loss of ``input @ weight.T + bias``, computed in row chunks.

    Equals ``loss(F.linear(input, weight, bias), *loss_args, **loss_kwargs)`` for a loss that is a
    sum over rows, with N rows in all. Divide the result rather than the loss inside: what is
    returned is exact under any scale, and fp16 keeps more bits.

    Each chunk calls ``loss_and_grad_fn(logits [C, V], *args, **kwargs)`` with the arguments cut to
    its rows. A tensor among them, also inside lists, tuples and dicts, is cut if its leading
    dimensions are those of ``input`` (``[..., *]``) or if its first dimension is N (``[N, *]``),
    and arrives as ``[C, *]``; every other tensor arrives whole. A ``[V]`` tensor would be cut when
    V happens to equal N: `whole` and `per_row` say what is meant.

    Args:
        input: Hidden states ``[..., D]``, bf16, fp16, fp32 or fp64, any strides. ``[D]`` is one
            row.
        weight: Projection ``[V, D]``, dtype of ``input`` unless under `torch.autocast`; the
            transpose of a contiguous ``[D, V]`` is as good.
        loss_and_grad_fn: Returns a scalar loss, summed over its rows, and its gradient with respect
            to the logits, ``[C, V]`` of any floating dtype. `autograd_loss_and_logits_grad` makes
            one of a loss alone. The logits have the dtype of the products, as `F.linear` makes
            them: bf16 for bf16 operands, that of autocast under it, and autocast is on inside as
            it is outside. (The adapter's loss sees fp16 logits and arguments in fp32: its
            gradient would be rounded to fp16 before the upstream could lift it.) They are scratch:
            they may be written to, and are gone after the call.
        *loss_args: For the callable. With the adapter, tensors that require grad get their
            gradients: whole ones summed over the chunks in fp32, others row by row.
        bias: ``[V]`` or None. A loss with an argument of this name, or that of another option
            here, gets it by position.
        chunk_size: Rows per chunk, or None for the plan of `greyhound_ops.chunking`. The result
            does not depend on it beyond rounding.
        grad_weight_accum_dtype: ``"fp32"`` sums the chunks' contributions to ``grad_weight`` in
            float32; ``"weight"`` in the dtype of the weight, which saves one fp32 ``[V, D]``.
        **loss_kwargs: As ``loss_args``.

    Returns:
        The sum of the chunks' losses, a scalar in fp32 (fp64 for fp64 input). 0 for N = 0, without
        a call.

    Raises:
        TypeError: A dtype that is not supported, input and weight of different dtypes outside
            autocast, or a callable that cannot be called, or named in a compiled graph.
        ValueError: A shape, device or option that is not as above; a loss that is no scalar, a
            gradient of another shape than the logits; a `per_row` tensor of another length; a
            learnable tensor that would get no gradient, because the callable holds it by itself or
            makes its gradients without the adapter.
        NotDifferentiableTwiceError: When a gradient of this is differentiated again.
        ForwardModeError: Under forward-mode differentiation.
        NotImplementedError: Under a ``torch.func`` transform.

    Note:
        Memory above the inputs: one chunk of logits, what the callable itself holds for one (with
        the adapter a few times as much), and the gradients of what requires grad. A tensor that
        needs no gradient costs no buffer and no product; with nothing to differentiate the adapter
        runs the loss alone. No host synchronisation beside the callable's own. The gradients are
        made in the forward and scaled by the upstream in the backward.

        Under ``torch.compile`` this is one operator, and the callable is compiled by itself, once
        for any number of rows. Numbers among the arguments may change; each other constant, and
        each other callable, compiles anew. A callable made inside the compiled region may close
        over constants only: pass tensors as arguments.
    """
    validation.check_projection(input, weight, bias)
    validation.check_chunk_size(chunk_size)
    validation.check_choice(
        "grad_weight_accum_dtype", grad_weight_accum_dtype, validation.ACCUM_DTYPES
    )
    if not callable(loss_and_grad_fn):
        raise TypeError(
            f"loss_and_grad_fn: expected a callable, got {type(loss_and_grad_fn).__name__}"
        )
    grad_mode = torch.is_grad_enabled()
    function: Callable[..., Any] = loss_and_grad_fn
    differentiate = isinstance(loss_and_grad_fn, loss_call.LogitsGrad)
    if isinstance(loss_and_grad_fn, loss_call.LogitsGrad):
        function = loss_and_grad_fn.loss_fn
    if isinstance(function, functools.partial) and not function.args:
        # Tensors in it are arguments like others.
        loss_kwargs = {**function.keywords, **loss_kwargs}
    parameters = {}
    if differentiate and isinstance(function, nn.Module):
        parameters = {name: whole(value) for name, value in function.named_parameters()}
    leaves = loss_call.Leaves([], [], [])
    structure = loss_call.flatten((loss_args, loss_kwargs, parameters), leaves)
    need_grad_tensors = [grad_mode and each.requires_grad for each in leaves.tensors]
    if not differentiate and any(need_grad_tensors):
        raise ValueError(
            "loss_and_grad_fn: expected arguments that need no gradient, since it returns that of "
            f"the logits alone, got tensor argument {need_grad_tensors.index(True)} that requires "
            "grad; detach it, or use autograd_loss_and_logits_grad"
        )
    operands = (input, weight, bias, leaves.tensors, leaves.ints, leaves.floats)
    options = (
        chunk_size,
        grad_weight_accum_dtype,
        None,  # products in the dtype of the operands, or autocast's
        grad_mode and input.requires_grad,
        grad_mode and weight.requires_grad,
        grad_mode and bias is not None and bias.requires_grad,
        need_grad_tensors,
        grad_mode,
        True,  # only the loss leaves this function
    )
    op = torch.ops.greyhound.linear_loss
    if torch.compiler.is_dynamo_compiling():
        return _loss(op(*operands, loss_call.key_in_graph(loss_and_grad_fn, structure), *options))
    if torch_private.functorch_is_active():
        raise NotImplementedError(
            "chunked_linear_loss has no rule for torch.func transforms: its callable is opaque; "
            "use torch.autograd, or greyhound_ops.reference.linear_loss"
        )
    call = loss_call.eager_call(loss_and_grad_fn, structure)
    if torch_private.is_recording():
        return _loss(op(*operands, loss_call.keep_for_good(call), *options))
    with loss_call.registered(call) as key:
        return _loss(op(*operands, key, *options))


def _loss(outputs: Any) -> Tensor:
    loss: Tensor = outputs[0]
    return loss
