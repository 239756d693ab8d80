"""Gradients that the forward made: kept, scaled by the upstream once, refused a second time."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from greyhound_ops import torch_private
from greyhound_ops.config import settings
from greyhound_ops.errors import NotDifferentiableTwiceError
from greyhound_ops.ops import kernel_failures
from greyhound_ops.ops.chunk_loop import FP16_ACCUM_GAIN, row_major


def use_triton(dtype: torch.dtype, device_type: str) -> bool:
    """Whether kernels run as Triton's: by default on CUDA, except for float64."""
    if kernel_failures.pytorch_only():
        return False
    choice = settings().kernels
    if choice != "auto":
        return choice == "triton"
    # float64 stays with PyTorch: Triton passes scalar options as float32.
    return device_type == "cuda" and dtype != torch.float64


def not_twice(name: str) -> NotDifferentiableTwiceError:
    """The error for a second derivative."""
    return NotDifferentiableTwiceError(
        f"{name} is not differentiable twice: its gradients are made chunk by chunk, and their own "
        "derivative is not kept. Use greyhound_ops.reference, or plain torch, where a second "
        "derivative is wanted (gradient penalties, Hessians)."
    )


class _RefuseSecondDerivative(torch.autograd.Function):
    """Passes a gradient on and ties it to what it depends on, so that differentiating it raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, name: str, *depends_on: Tensor | None) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise not_twice(ctx.name)


class _Anchor(torch.autograd.Function):
    """An empty tensor that depends on tensors without holding them.

    A second derivative can be refused only through what the first one depends on. Saving the
    operands for it would keep an activation alive and forbid writing to it after the loss.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, *depends_on: Tensor | None) -> Tensor:
        first = next(each for each in depends_on if each is not None)
        return first.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise not_twice(ctx.name)


def refuse_twice(name: str) -> tuple[Any, Any]:
    """Setup and backward of an op that is a derivative itself."""

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Tensor) -> None:
        raise not_twice(name)

    return setup_context, backward


def blocks(tensor: Tensor) -> list[slice]:
    """Row ranges of about 32 MiB in float32, for passes that need a float32 temporary."""
    rows = max(2**23 // max(tensor[0].numel(), 1), 1) if tensor.shape[0] else 1
    return [slice(i, i + rows) for i in range(0, tensor.shape[0], rows)]


def _scale_by_kernel(values: Tensor, factor: Tensor) -> bool:
    """Multiply in place by Triton's kernel; False where it does not run."""
    if not use_triton(values.dtype, values.device.type):
        return False
    from greyhound_ops.kernels.scale import scale_

    scale_(values, factor)
    return True


_scaled_by_kernel = kernel_failures.guarded("the scale of a gradient", _scale_by_kernel)


# Memory that a backward has written over, by `torch_private.storage_reference`.
_written_over: dict[int, Any] = {}
_written_over_lock = threading.Lock()


def to_write_over(kept: Tensor) -> Tensor | None:
    """What a forward has kept for its backward, to be written over: itself, a copy, or nothing.

    Whoever keeps the graph comes for it once more; so may a replay of what is captured here,
    however often: they get a copy. A backward that failed on its way may be called again: autograd
    then says that what it saved has been modified.

    Another backward may come for the same memory unseen by autograd: of an equal call that
    AOTAutograd has merged with this one, of the next sample of a batch of gradients, of a second
    derivation inside one graph. It gets None and has to make the values again.
    """
    reference = torch_private.storage_reference(kept)
    keeps = reference is None or torch_private.graph_is_kept() or torch_private.is_capturing()
    with _written_over_lock:
        # The reference keeps the number from being given to other memory while it is here.
        for number in [each for each, ref in _written_over.items() if ref.expired()]:
            del _written_over[number]
        if reference is not None and reference.cdata in _written_over:
            return None
        if not keeps and kept.numel():
            _written_over[reference.cdata] = reference
    if keeps:
        return kept.clone()
    torch.autograd.graph.increment_version(kept)
    return kept


def scaled(stored: Tensor, factor: Tensor, dtype: torch.dtype, may_overwrite: bool) -> Tensor:
    """``stored * factor`` in ``dtype``, multiplied in the statistics' dtype.

    Args:
        stored: Gradient as the forward left it.
        factor: Scalar, or one per row of ``stored``.
        dtype: Of the result.
        may_overwrite: Whether ``stored`` is needed no more; then no second buffer of its size is
            made.
    """
    if not torch_private.is_plain_eager(stored):
        # Inductor fuses the three and writes over the donated buffer.
        if factor.dim():
            factor = factor.unsqueeze(-1)
        return (stored.to(factor.dtype) * factor).to(dtype)
    in_place = may_overwrite and stored.dtype == dtype
    transposed = stored.dim() == 2 and not row_major(stored)
    flat = stored.t() if transposed else stored
    if factor.dim():
        flat = flat.reshape(-1, flat.shape[-1])
        factor = factor.reshape(-1, 1)
    if in_place and factor.dim() == 0 and _scaled_by_kernel(flat, factor):
        return stored
    out = flat if in_place else torch.empty_like(flat, dtype=dtype)
    if flat.dtype == factor.dtype == dtype or flat.dim() == 0:
        torch.mul(flat, factor, out=out)
    else:
        for block in blocks(flat):
            out[block] = flat[block].to(factor.dtype) * (factor[block] if factor.dim() else factor)
    if factor.dim():
        return out.reshape(stored.shape)
    return out.t() if transposed else out


def keep(
    ctx: Any,
    name: str,
    operands: dict[str, Tensor | None],
    stored: dict[str, Tensor | None],
    *,
    denominator: Tensor | None = None,
    private: bool,
) -> None:
    """Keep gradients that the forward made for `give`.

    Args:
        ctx: Autograd's context.
        name: Of the op, for the refusal of a second derivative.
        operands: What the gradients belong to; they are not saved.
        stored: The gradients by the same names, None where none is wanted.
        denominator: Scalar by which the backward still has to divide (fp16, whose gradients are
            kept undivided), or None.
        private: Whether nobody else can hold the stored gradients, so that they may be written
            over.
    """
    ctx.greyhound = name, tuple(operands), private
    ctx.dtypes = tuple(None if each is None else each.dtype for each in operands.values())
    with torch.enable_grad():
        ctx.anchor = _Anchor.apply(name, *operands.values())
    ctx.save_for_backward(denominator, *(stored[each] for each in operands))


def give(ctx: Any, upstream: Tensor, *, accumulated: str = "weight") -> dict[str, Tensor | None]:
    """The kept gradients times the upstream gradient.

    Args:
        ctx: Autograd's context, from `keep`.
        upstream: Scalar, or one per row (for gradients that are per row).
        accumulated: What the names of operands begin with whose fp16 gradients were accumulated
            `FP16_ACCUM_GAIN` times too small.

    Returns:
        The gradients by the operands' names.
    """
    name, names, private = ctx.greyhound
    denominator, *stored = ctx.saved_tensors
    # Asked at run time: in a compiled graph Inductor's donated buffers decide the same thing.
    # Outputs of an op are the caller's, unless he says that he keeps none of them.
    may_overwrite = private and not torch_private.graph_is_kept()
    factor = upstream if denominator is None else upstream / denominator
    grads: dict[str, Tensor | None] = {}
    # Under create_graph the upstream may require grad itself; the derivative that would be
    # recorded here is the one refused below.
    with torch.no_grad():
        for each, value, dtype in zip(names, stored, ctx.dtypes, strict=True):
            grads[each] = None
            if value is None:
                continue
            by = factor
            small = value.dtype == torch.float16 and each.startswith(accumulated)
            if denominator is not None and small:
                by = factor * FP16_ACCUM_GAIN
            grads[each] = scaled(value, by, dtype, may_overwrite)
    if torch.is_grad_enabled():
        grads = {
            each: None
            if grad is None
            else _RefuseSecondDerivative.apply(grad, name, upstream, ctx.anchor)
            for each, grad in grads.items()
        }
    return grads
