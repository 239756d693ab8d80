"""``greyhound::linear_loss``: projection and any row-wise loss, the logits never whole.

The loss is a callable that gets the logits of some rows and returns a scalar with its gradient. The
gradients of input, weight and bias are made in the forward, chunk by chunk, and the backward scales
them; so are those of learnable tensors among the callable's arguments. `loss_call` says how a
callable comes to be an operator's argument.

The file holds, in this order: schema, implementation, fake, autograd, flops, registration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from greyhound_ops import validation
from greyhound_ops.ops import gradients, loss_call
from greyhound_ops.ops.chunk_loop import (
    ChunkLoop,
    GradientNeeds,
    defers_division,
    empty,
    empty_grad_weight,
    stored_bias_dtype,
    stored_weight_dtype,
)
from greyhound_ops.ops.op import Op, check_flags, product_flops

# -------------------------------------------------------------------------------------- schema

OP = Op(
    "linear_loss("
    "Tensor input, Tensor weight, Tensor? bias, Tensor[] tensors, SymInt[] ints, float[] floats, "
    "str call, SymInt? chunk_size=None, str grad_weight_accum_dtype='fp32', "
    "ScalarType? compute_dtype=None, bool need_grad_input=False, bool need_grad_weight=False, "
    "bool need_grad_bias=False, bool[] need_grad_tensors=[], bool grad_mode=False, "
    "bool grads_are_private=False"
    ") -> (Tensor loss, Tensor grad_input, Tensor grad_weight, Tensor grad_bias, "
    "Tensor[] grad_tensors)",
)
_OPERANDS = ("input", "weight", "bias")


def _check(call: Any) -> tuple[GradientNeeds, list[bool], torch.dtype]:
    """Check what is no matter of the callable; which gradients are wanted, and the products' dtype.

    An empty ``need_grad_tensors`` asks for none.
    """
    validation.check_projection(call.input, call.weight, call.bias)
    validation.check_chunk_size(call.chunk_size)
    validation.check_choice(
        "grad_weight_accum_dtype", call.grad_weight_accum_dtype, validation.ACCUM_DTYPES
    )
    needs = GradientNeeds(call.need_grad_input, call.need_grad_weight, call.need_grad_bias)
    if needs.bias and call.bias is None:
        raise ValueError("need_grad_bias: expected False, since bias is None, got True")
    wanted = list(call.need_grad_tensors) or [False] * len(call.tensors)
    if len(wanted) != len(call.tensors):
        raise ValueError(
            f"need_grad_tensors: expected one flag per tensor, {len(call.tensors)}, "
            f"got {len(wanted)}"
        )
    dtype = validation.resolve_compute_dtype(call.input, call.weight, call.compute_dtype)
    return needs, wanted, dtype


# ------------------------------------------------------------------------------ implementation

# fp16 gradients are lifted to a largest element of 2^12 for the products: the smallest normal
# number is 26 powers of two below, and a row of the product may be 16 times as large.
FP16_TOP_EXPONENT = 12


def stored_input_dtype(input_dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
    """Dtype in which the forward hands ``grad_input`` to the backward.

    How a loss is scaled is the callable's affair: a mean over 8192 rows has gradients that fp16
    would round to a few bits before the upstream of a `torch.amp.GradScaler` could lift them.
    """
    if defers_division(compute_dtype) and input_dtype == torch.float16:
        return torch.float32
    return input_dtype


def stored_tensor_dtype(dtype: torch.dtype) -> torch.dtype:
    """The same for a learnable argument of the callable."""
    return torch.float32 if dtype == torch.float16 else dtype


class LossLoop(ChunkLoop):
    """The chunk loop for logits gradients of any floating dtype and any size."""

    def __init__(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> None:
        super().__init__(input, weight, *args, **options)
        stored = stored_input_dtype(input.dtype, self._weight.dtype)
        self._fp16 = self._weight.dtype == torch.float16
        if self.grad_input is not None and stored != input.dtype:
            self.grad_input = input.new_empty(input.shape, dtype=stored)
        self._scale: Tensor | None = None

    def fold_any(self, start: int, stop: int, grad_logits: Tensor) -> None:
        """Fold the logits gradient of some rows, as `fold` does."""
        dtype = self._weight.dtype
        if not grad_logits.is_cuda:
            # fp32 as well as the products' own dtype is folded as it is, see `fold`.
            wide = torch.promote_types(dtype, torch.float32)
            if grad_logits.dtype != dtype or self._fp16:
                grad_logits = grad_logits.to(wide)
            if self._fp16:
                self._fold_fp16_on_cpu(start, stop, grad_logits)
            else:
                self.fold(start, stop, grad_logits)
        elif self._fp16 and grad_logits.dtype != torch.float16:
            self._fold_scaled(start, stop, grad_logits.float())
        else:
            self.fold(start, stop, grad_logits.to(dtype))

    def _fold_fp16_on_cpu(self, start: int, stop: int, grad_logits: Tensor) -> None:
        """`fold` with ``grad_input`` made in fp32: a product in fp16 would round it once too often.

        The weight is cast a block of rows at a time.
        """
        grad_input, self.grad_input = self.grad_input, None
        try:
            self.fold(start, stop, grad_logits)
        finally:
            self.grad_input = grad_input
        if grad_input is None:
            return
        product = grad_logits.new_zeros(stop - start, self._weight.shape[1])
        for block in gradients.blocks(self._weight):
            product.addmm_(grad_logits[:, block], self._weight[block].to(grad_logits.dtype))
        grad_input[start:stop] = product

    def _fold_scaled(self, start: int, stop: int, grad_logits: Tensor) -> None:
        """`fold` for an fp32 gradient and fp16 products: scaled into fp16's range on the device.

        The scale is a power of two, chosen per chunk. What is accumulated carries the scale of the
        last chunk, and changes it with the next.
        """
        if self.grad_bias is not None:
            self.grad_bias += grad_logits.sum(0)
        largest = grad_logits.abs().amax()
        usable = (largest > 0) & largest.isfinite()
        _, exponent = torch.frexp(torch.where(usable, largest, 1.0))
        # Bounded, so that an accumulator of one chunk's scale fits in fp32 with the next one's.
        exponent = (FP16_TOP_EXPONENT - exponent).clamp(-30, 60)
        scale = torch.where(usable, torch.ldexp(torch.ones_like(largest), exponent), 1.0)
        scaled = (grad_logits * scale).to(torch.float16)
        grad_bias, self.grad_bias = self.grad_bias, None
        if self._accumulator is not None and self._accumulator.dtype == torch.float32:
            if self._scale is not None:
                self._accumulator *= scale / self._scale
            self._scale = scale
            self.fold(start, stop, scaled)
            if self.grad_input is not None:
                self.grad_input[start:stop] /= scale
        else:
            # An fp16 accumulator has fp16's range, whatever is done.
            self.fold(start, stop, grad_logits.to(torch.float16))
        self.grad_bias = grad_bias

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Free the chunk and return the gradients, see `ChunkLoop.finish`."""
        if self._scale is not None and self._accumulator is not None:
            self._accumulator /= self._scale
        return super().finish()


class Arguments:
    """The callable's tensor arguments: those of a chunk, and the gradients of those that learn.

    Args:
        tensors: As they came.
        marks: For each ``"per_row"``, ``"whole"`` or ``"rule"``.
        wanted: For each whether its gradient is wanted.
        batch: Leading dimensions of the input.
        num_rows: N.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        marks: Sequence[str],
        wanted: Sequence[bool],
        batch: tuple[int, ...],
        num_rows: int,
    ) -> None:
        if len(marks) != len(tensors):
            raise ValueError(
                f"tensors: expected {len(marks)} tensors, as the call says, got {len(tensors)}"
            )
        self._shapes = [each.shape for each in tensors]
        self._dtypes = [stored_tensor_dtype(each.dtype) for each in tensors]
        self.by_row: list[bool] = []
        self._tensors = []
        for index, (tensor, mark) in enumerate(zip(tensors, marks, strict=True)):
            rest = _row_shape(tensor, batch, num_rows) if mark != "whole" else None
            if rest is None and mark == "per_row":
                raise ValueError(
                    f"per_row: expected a tensor of {num_rows} rows, or with the leading "
                    f"dimensions {list(batch)} of input, got shape {list(tensor.shape)} "
                    f"(tensor argument {index})"
                )
            self.by_row.append(rest is not None)
            self._tensors.append(tensor if rest is None else tensor.reshape(num_rows, *rest))
        self._grads: list[Tensor | None] = []
        for tensor, cut, dtype, need in zip(
            self._tensors, self.by_row, self._dtypes, wanted, strict=True
        ):
            if not need:
                self._grads.append(None)
            elif cut:
                self._grads.append(tensor.new_empty(tensor.shape, dtype=dtype))
            else:
                # Summed over the chunks in fp32 at least, like grad_bias.
                total = torch.promote_types(dtype, torch.float32)
                self._grads.append(tensor.new_zeros(tensor.shape, dtype=total))

    def chunk(self, start: int, stop: int) -> list[Tensor]:
        """The arguments of some rows."""
        return [
            tensor[start:stop] if cut else tensor
            for tensor, cut in zip(self._tensors, self.by_row, strict=True)
        ]

    def fold(self, start: int, stop: int, made: Sequence[Tensor | None]) -> None:
        """Keep the gradients of some rows; None stands for zero."""
        for total, cut, grad in zip(self._grads, self.by_row, made, strict=True):
            if total is None:
                continue
            if not cut:
                if grad is not None:
                    total += grad
            elif grad is None:
                total[start:stop].zero_()
            else:
                total[start:stop] = grad

    def finish(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One gradient per tensor, empty where none is wanted."""
        return [
            empty(tensor) if grad is None else grad.to(dtype).reshape(shape)
            for tensor, grad, dtype, shape in zip(
                tensors, self._grads, self._dtypes, self._shapes, strict=True
            )
        ]


def _row_shape(tensor: Tensor, batch: tuple[int, ...], num_rows: int) -> tuple[int, ...] | None:
    """Shape of one row of a tensor whose leading dimensions are the input's or N, else None."""
    if tuple(tensor.shape[: len(batch)]) == batch:
        return tuple(tensor.shape[len(batch) :])
    if tensor.dim() and tensor.shape[0] == num_rows:
        return tuple(tensor.shape[1:])
    return None


def _check_made(grad_logits: object, logits: Tensor) -> Tensor:
    name = "loss_and_grad_fn: expected a gradient of the logits,"
    if not isinstance(grad_logits, Tensor):
        raise ValueError(f"{name} a tensor, got {type(grad_logits).__name__}")
    if grad_logits.shape != logits.shape:
        raise ValueError(
            f"{name} of their shape {list(logits.shape)}, got shape {list(grad_logits.shape)}"
        )
    if not grad_logits.is_floating_point():
        raise ValueError(f"{name} of a floating dtype, got {grad_logits.dtype}")
    if grad_logits.device != logits.device:
        raise ValueError(f"{name} on {logits.device}, got {grad_logits.device}")
    return grad_logits.detach()


def _forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    call = OP.named(args, kwargs)
    needs, wanted, compute_dtype = _check(call)
    loss_fn = loss_call.resolve(call.call)
    input, weight, bias, tensors = call.input, call.weight, call.bias, call.tensors
    rows = input.reshape(-1, input.shape[-1])
    num_rows = rows.shape[0]
    batch = tuple(input.shape[:-1]) or (1,)
    arguments = Arguments(tensors, loss_fn.marks, wanted, batch, num_rows)
    loop = LossLoop(
        rows,
        weight,
        bias,
        needs=needs,
        compute_dtype=compute_dtype,
        accum=call.grad_weight_accum_dtype,
        chunk_size=call.chunk_size,
        gain=1.0,  # a loss that nobody knows may have gradients of any size
        may_keep_gradient=True,
    )
    total = input.new_zeros((), dtype=torch.promote_types(compute_dtype, torch.float32))
    for start, stop in loop.spans():
        logits = loop.project(start, stop)
        with loss_call.autocast_for(input.device.type, call.compute_dtype):
            loss, grad_logits, grads = loss_fn.run(
                logits,
                arguments.chunk(start, stop),
                call.ints,
                call.floats,
                want_logits=bool(needs),
                want_tensors=wanted,
                by_row=arguments.by_row,
                grad_mode=call.grad_mode,
            )
        total += loss
        # First: an argument's gradient may lie in the logits, which the other may be copied over.
        arguments.fold(start, stop, grads)
        if needs:
            loop.fold_any(start, stop, _check_made(grad_logits, logits))
        del logits, grad_logits, grads, loss  # or the chunk would outlive the loop
    grad_input, grad_weight, grad_bias = loop.finish()
    return (
        total,
        empty(input) if grad_input is None else grad_input.reshape(input.shape),
        empty(weight) if grad_weight is None else grad_weight,
        empty(input if bias is None else bias) if grad_bias is None else grad_bias,
        arguments.finish(tensors),
    )


# ---------------------------------------------------------------------------------------- fake


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    call = OP.named(args, kwargs)
    needs, wanted, compute_dtype = _check(call)
    input, weight, bias = call.input, call.weight, call.bias
    stored = stored_weight_dtype(weight.dtype, compute_dtype, call.grad_weight_accum_dtype)
    return (
        input.new_empty((), dtype=torch.promote_types(compute_dtype, torch.float32)),
        input.new_empty(input.shape, dtype=stored_input_dtype(input.dtype, compute_dtype))
        if needs.input
        else empty(input),
        empty_grad_weight(weight, stored) if needs.weight else empty(weight),
        bias.new_empty(bias.shape, dtype=stored_bias_dtype(bias.dtype))
        if needs.bias
        else empty(input if bias is None else bias),
        [
            each.new_empty(each.shape, dtype=stored_tensor_dtype(each.dtype))
            if need
            else empty(each)
            for each, need in zip(call.tensors, wanted, strict=True)
        ],
    )


# ------------------------------------------------------------------------------------ autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    call = dict(zip(OP.arguments, inputs, strict=True))
    # Lists of tensors are one argument here and one per tensor in needs_input_grad; they come
    # after the operands, whose places are therefore right.
    check_flags(ctx, OP, call, _OPERANDS)
    tensors = call["tensors"]
    wanted = list(call["need_grad_tensors"]) or [False] * len(tensors)
    first = OP.arguments.index("tensors")
    for index, (need, requires) in enumerate(
        zip(wanted, ctx.needs_input_grad[first : first + len(tensors)], strict=True)
    ):
        if requires and not need:
            raise ValueError(
                f"need_grad_tensors: expected True for tensor {index}, since it requires grad, "
                "got False; detach it if no gradient is wanted"
            )
    _, *grads, grad_tensors = output
    ctx.mark_non_differentiable(*grads, *grad_tensors)
    # Else autograd would make a zero of [V, D] for the output grad_weight that nobody uses.
    ctx.set_materialize_grads(False)
    needs = [call[f"need_grad_{name}"] for name in _OPERANDS]
    names = (*_OPERANDS, *(f"tensors.{index}" for index in range(len(tensors))))
    operands = (*(call[name] for name in _OPERANDS), *tensors)
    stored = zip((*grads, *grad_tensors), (*needs, *wanted), strict=True)
    lists = {name: value for name, value in call.items() if isinstance(value, list)}
    ctx.empty_lists = [name for name, value in lists.items() if not value]
    ctx.num_tensors = len(tensors)
    gradients.keep(
        ctx,
        OP.name,
        dict(zip(names, operands, strict=True)),
        dict(zip(names, (grad if need else None for grad, need in stored), strict=True)),
        private=call["grads_are_private"],
    )


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    # A gradient per argument: a list for a list of tensors, which an empty list of numbers also is
    # to the wrapper that flattens them.
    result: dict[str, Any] = dict.fromkeys(OP.arguments)
    result["tensors"] = [None] * ctx.num_tensors
    result.update({name: [] for name in ctx.empty_lists})
    if grad_loss is not None:
        grads = gradients.give(ctx, grad_loss)
        result.update({name: grads[name] for name in _OPERANDS})
        result["tensors"] = [grads[f"tensors.{index}"] for index in range(ctx.num_tensors)]
    return tuple(result[name] for name in OP.arguments)


# --------------------------------------------------------------------------------------- flops


def _flops(
    input_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    # What the callable computes is not counted: per element and small against the products.
    made = sum(1 for shape in out_shape[1:3] if len(shape) > 1)
    return product_flops(input_shape, weight_shape) * (1 + made)


# -------------------------------------------------------------------------------- registration

OP.implement(_forward, _fake)
OP.autograd(_setup_context, _backward)
OP.autocast()
OP.flops(_flops)
