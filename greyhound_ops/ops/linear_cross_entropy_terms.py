"""``greyhound::linear_cross_entropy_terms``: several cross entropies in one call.

Multi-token prediction has K hidden states on one shared head; Medusa, EnCodec and MusicGen have K
heads on one hidden state. As K calls either makes K gradients of the shared tensor, which autograd
then adds up one by one: K ``[V, D]`` for a shared head. Here every term folds into one accumulator,
through one chunk of memory.

Term k is the cross entropy of ``inputs[k]`` on ``weights[k]`` against ``targets[k]``, where a list
of one is shared by all terms; the loss is ``sum_k term_weight[k] * reduction_k``.

The file holds, in this order: schema, implementation, fake, autograd, flops, registration.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from greyhound_ops import validation
from greyhound_ops.ops import gradients
from greyhound_ops.ops.chunk_loop import (
    ChunkLoop,
    ChunkMemory,
    GradientNeeds,
    defers_division,
    empty,
    empty_grad_weight,
    fp16_gain,
    stored_bias_dtype,
    stored_weight_dtype,
)
from greyhound_ops.ops.linear_cross_entropy import RowLoss, row_losses
from greyhound_ops.ops.op import Op, product_flops
from greyhound_ops.ops.rows import check_targets, statistics_dtype

# -------------------------------------------------------------------------------------- schema

OP = Op(
    "linear_cross_entropy_terms("
    "Tensor[] inputs, Tensor[] weights, Tensor[] targets, Tensor[] biases, "
    "Tensor? term_weight=None, bool[] detach_head=[], "
    "int ignore_index=-100, str reduction='mean', float label_smoothing=0.0, float z_loss=0.0, "
    "float logit_scale=1.0, float? softcap=None, SymInt? chunk_size=None, "
    "str grad_weight_accum_dtype='fp32', ScalarType? compute_dtype=None, "
    "bool[] need_grad_inputs=[], bool[] need_grad_weights=[], bool[] need_grad_biases=[], "
    "bool grads_are_private=False"
    ") -> (Tensor loss, Tensor losses, Tensor denominator, "
    "Tensor[] grad_inputs, Tensor[] grad_weights, Tensor[] grad_biases)",
)


@dataclasses.dataclass(frozen=True)
class _Term:
    """Which of the lists' tensors a term uses, and which gradients it contributes to."""

    input: int
    head: int
    needs: GradientNeeds


def _flag(flags: list[bool], index: int) -> bool:
    """One of the flags; an empty list is False for all."""
    return bool(flags) and flags[index]


def _terms(call: Any) -> list[_Term]:
    terms = []
    for index in range(len(call.targets)):
        input = index if len(call.inputs) > 1 else 0
        head = index if len(call.weights) > 1 else 0
        learns = not _flag(call.detach_head, index)
        terms.append(
            _Term(
                input,
                head,
                GradientNeeds(
                    _flag(call.need_grad_inputs, input),
                    learns and _flag(call.need_grad_weights, head),
                    learns and _flag(call.need_grad_biases, head),
                ),
            )
        )
    return terms


def _check(call: Any) -> RowLoss:
    count = len(call.targets)
    validation.check_terms(call.inputs, call.weights, call.targets, call.biases)
    for name, expected in (
        ("detach_head", count),
        ("need_grad_inputs", len(call.inputs)),
        ("need_grad_weights", len(call.weights)),
        ("need_grad_biases", len(call.biases)),
    ):
        given = getattr(call, name)
        if given and len(given) != expected:
            raise ValueError(f"{name}: expected {expected} flags or none, got {len(given)}")
    validation.check_choice("reduction", call.reduction, ("mean", "sum"))
    row_loss = RowLoss(
        call.ignore_index, call.label_smoothing, call.z_loss, call.logit_scale, call.softcap
    )
    validation.check_options(
        reduction=call.reduction,
        chunk_size=call.chunk_size,
        grad_weight_accum_dtype=call.grad_weight_accum_dtype,
        **dataclasses.asdict(row_loss),
    )
    validation.check_term_weight(call.inputs[0], call.term_weight, count)
    return row_loss


# ------------------------------------------------------------------------------ implementation


def _forward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    call = OP.named(args, kwargs)
    row_loss = _check(call)
    compute_dtype = validation.resolve_compute_dtype(
        call.inputs[0], call.weights[0], call.compute_dtype
    )
    dtype = statistics_dtype(compute_dtype)
    device = call.inputs[0].device
    terms = _terms(call)
    targets = [target.reshape(-1).long() for target in call.targets]
    for index, target in enumerate(targets):
        classes = call.weights[terms[index].head].shape[0]
        check_targets(target, classes, call.ignore_index, name=f"targets[{index}]")

    # What each term's gradient is multiplied by, on the device before the first gradient is made.
    counts = torch.stack([(target != call.ignore_index).sum(dtype=dtype) for target in targets])
    scales = torch.ones(len(terms), dtype=dtype, device=device)
    if call.reduction == "mean":
        scales = scales / counts.clamp_min(1.0)  # over no row: 0, as everywhere here
    if call.term_weight is not None:
        scales = scales * call.term_weight.to(dtype)
    deferred = defers_division(compute_dtype) and any(term.needs for term in terms)
    denominator = torch.ones((), dtype=dtype, device=device)
    grad_scales = scales
    if deferred:
        # fp16 has no room below: the gradients are kept as if the largest factor were one.
        largest = scales.abs().amax()
        denominator = torch.where(largest > 0, largest, 1.0).reciprocal()
        grad_scales = scales * denominator

    chunk = ChunkMemory()
    heads: dict[int, ChunkLoop] = {}
    grad_inputs = [
        tensor.new_empty((targets_of.numel(), tensor.shape[-1]))
        if _flag(call.need_grad_inputs, index)
        else None
        for index, (tensor, targets_of) in enumerate(zip(call.inputs, targets, strict=False))
    ]
    loops: list[ChunkLoop] = []
    for term in terms:
        needs = term.needs
        if term.head not in heads:
            # It owns the head's sums, also if its own term is detached.
            needs = GradientNeeds(needs.input, *_head_needs(terms, term.head))
        loop = ChunkLoop(
            call.inputs[term.input].reshape(-1, call.inputs[term.input].shape[-1]),
            call.weights[term.head],
            call.biases[term.head] if call.biases else None,
            needs=needs,
            compute_dtype=compute_dtype,
            accum=call.grad_weight_accum_dtype,
            chunk_size=call.chunk_size,
            gain=fp16_gain(call.logit_scale) if deferred else 1.0,
            spare_fp16=True,
            chunk=chunk,
            sums=heads.get(term.head),
            shared_sums=sum(other.head == term.head for other in terms) > 1,
            grad_input=grad_inputs[term.input],
        )
        heads.setdefault(term.head, loop)
        loops.append(loop)

    losses = torch.zeros(len(terms), dtype=dtype, device=device)
    for input, group in itertools.groupby(range(len(terms)), key=lambda k: terms[k].input):
        _run(
            row_loss, list(group), terms, loops, targets, grad_scales, losses, grad_inputs[input]
        )  # fmt: skip
    losses = losses / counts.clamp_min(1.0) if call.reduction == "mean" else losses
    weighted = losses if call.term_weight is None else losses * call.term_weight.to(dtype)
    made = [heads[index].finish()[1:] for index in range(len(call.weights))]
    return (
        weighted.sum(),
        losses,
        denominator,
        [
            empty(tensor) if grad is None else grad.reshape(tensor.shape)
            for tensor, grad in zip(call.inputs, grad_inputs, strict=True)
        ],
        [
            empty(weight) if grad is None else grad
            for weight, (grad, _) in zip(call.weights, made, strict=True)
        ],
        [
            empty(bias) if grad is None else grad
            for bias, (_, grad) in zip(call.biases, made, strict=False)
        ],
    )


def _head_needs(terms: list[_Term], head: int) -> tuple[bool, bool]:
    """Whether any term asks for the gradient of a head's weight, and of its bias."""
    needs = [term.needs for term in terms if term.head == head]
    return any(each.weight for each in needs), any(each.bias for each in needs)


def _run(
    row_loss: RowLoss,
    group: list[int],
    terms: list[_Term],
    loops: list[ChunkLoop],
    targets: list[Tensor],
    grad_scales: Tensor,
    losses: Tensor,
    grad_input: Tensor | None,
) -> None:
    """Project and fold the terms of one input, chunk by chunk."""
    num_rows = targets[group[0]].numel()
    rows = min(loops[index].rows for index in group)
    shared = len(group) > 1 and grad_input is not None
    row_loss_of = losses.new_empty(min(rows, num_rows))
    statistics = losses.new_empty((2, min(rows, num_rows)))
    for start, stop in loops[group[0]].spans(rows):
        total: Tensor | None = None
        for position, index in enumerate(group):
            loop, needs = loops[index], terms[index].needs
            made = row_losses(
                loop.project(start, stop),
                targets[index][start:stop],
                row_loss_of[: stop - start],
                statistics[:, : stop - start],
                row_loss,
                class_weight=None,
                class_weight_sum=None,
                grad_scale=grad_scales[index],
                row_scale=None,
                gain=loop.gain,
                read_statistics=False,
                write_grad=bool(needs),
            )
            losses[index] += row_loss_of[: stop - start].sum()
            if not needs:
                continue
            loop.fold_head(start, stop, made, needs)
            if grad_input is None:
                continue
            out = grad_input[start:stop]
            if shared:
                # One rounding for all heads, not one each.
                if total is None:
                    total = torch.empty(
                        out.shape,
                        dtype=torch.promote_types(out.dtype, torch.float32),
                        device=out.device,
                    )
                out = total
            loop.fold_input(made, out, first=position == 0)
        if total is not None:
            assert grad_input is not None
            grad_input[start:stop] = total


# ---------------------------------------------------------------------------------------- fake


def _fake(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    call = OP.named(args, kwargs)
    _check(call)
    compute_dtype = validation.resolve_compute_dtype(
        call.inputs[0], call.weights[0], call.compute_dtype
    )
    dtype = statistics_dtype(compute_dtype)
    needs = [_head_needs(_terms(call), index) for index in range(len(call.weights))]
    like = call.inputs[0]
    return (
        like.new_empty((), dtype=dtype),
        like.new_empty(len(call.targets), dtype=dtype),
        like.new_empty((), dtype=dtype),
        [
            each.new_empty(each.shape) if _flag(call.need_grad_inputs, index) else empty(each)
            for index, each in enumerate(call.inputs)
        ],
        [
            empty_grad_weight(
                each,
                stored_weight_dtype(each.dtype, compute_dtype, call.grad_weight_accum_dtype),
            )
            if needs[index][0]
            else empty(each)
            for index, each in enumerate(call.weights)
        ],
        [
            each.new_empty(each.shape, dtype=stored_bias_dtype(each.dtype))
            if needs[index][1]
            else empty(each)
            for index, each in enumerate(call.biases)
        ],
    )


# ------------------------------------------------------------------------------------ autograd

_OPERANDS = ("inputs", "weights", "biases")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    call = OP.named(inputs, {})
    _, losses, denominator, *grads = output
    ctx.mark_non_differentiable(losses, denominator, *itertools.chain(*grads))
    # Else autograd would make a zero of [V, D] for the output grad_weight that nobody uses.
    ctx.set_materialize_grads(False)
    compute_dtype = validation.resolve_compute_dtype(
        call.inputs[0], call.weights[0], call.compute_dtype
    )
    # A list is one argument, and its tensors one flag each: they come one after the other.
    required = iter(ctx.needs_input_grad)
    operands: dict[str, Tensor | None] = {}
    stored: dict[str, Tensor | None] = {}
    for name in ("inputs", "weights", "targets", "biases"):
        tensors = getattr(call, name)
        requires = [next(required) for _ in tensors]
        if name == "targets":
            continue
        made = grads[_OPERANDS.index(name)]
        wanted = getattr(call, f"need_grad_{name}") or [False] * len(tensors)
        for index, tensor in enumerate(tensors):
            if requires[index] and not wanted[index]:
                raise ValueError(
                    f"need_grad_{name}: expected True at {index}, since {name}[{index}] requires "
                    f"grad, got False; detach it if no gradient is wanted"
                )
            operands[f"{name}.{index}"] = tensor
            has = wanted[index] and made[index].shape == tensor.shape
            stored[f"{name}.{index}"] = made[index] if has else None
    if next(required, False):
        raise ValueError("term_weight: expected a tensor that needs no gradient; detach it")
    gradients.keep(
        ctx,
        OP.name,
        operands,
        stored,
        denominator=denominator if defers_division(compute_dtype) else None,
        private=call.grads_are_private,
    )
    ctx.lengths = {
        name: len(value)
        for name, value in vars(call).items()
        # An empty list of flags counts as one of tensors too.
        if isinstance(value, (list, tuple)) and (not value or isinstance(value[0], Tensor))
    }


def _autograd_backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    lists: dict[str, list[Tensor | None]] = {
        name: [None] * length for name, length in ctx.lengths.items()
    }
    if grad_loss is not None:
        for key, grad in gradients.give(ctx, grad_loss).items():
            name, index = key.split(".")
            lists[name][int(index)] = grad
    return tuple(lists.get(name) for name in OP.arguments)


# --------------------------------------------------------------------------------------- flops


def _flops(
    inputs: Any, weights: Any, targets: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    call = OP.named((inputs, weights, targets, *args), kwargs)
    return sum(
        product_flops(inputs[term.input], weights[term.head])
        * (1 + term.needs.input + term.needs.weight)
        for term in _terms(call)
    )


# -------------------------------------------------------------------------------- registration

OP.implement(_forward, _fake)
OP.autograd(_setup_context, _autograd_backward)
OP.autocast()
OP.flops(_flops)
