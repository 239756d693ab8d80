"""Projection then cross entropy, however spelled, becomes ``greyhound::linear_cross_entropy``.

Before::

    logits = linear(hidden, weight, bias)            # [B, T, V]
    flat   = logits.float().view(-1, V)
    loss   = cross_entropy(flat, labels.view(-1))

After::

    rows   = hidden.reshape(-1, D)
    parts  = greyhound.linear_cross_entropy(rows, weight, labels.view(-1), bias, ...)
    loss   = parts[0]
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

import greyhound_ops.ops  # noqa: F401  registers the op
from greyhound_lowering import guards
from greyhound_lowering.declined import Declined
from greyhound_lowering.follow import Logits, scale_and_cap, step_name
from greyhound_lowering.projection import _arguments, example
from greyhound_lowering.settings import RewriteSettings
from greyhound_ops import torch_private

OP_NAME = "greyhound::linear_cross_entropy"


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """A cross entropy node read in full: torch's options under one name each."""

    target: fx.Node
    class_weight: fx.Node | None
    ignore_index: int
    reduction: str
    label_smoothing: float


def read_loss(
    node: fx.Node, logits: fx.Node, class_dim: int, *, log_softmax: bool = False
) -> CrossEntropy:
    """Read a loss node.

    Args:
        node: The loss.
        logits: What it should read.
        class_dim: Which dimension of the logits is the vocabulary.
        log_softmax: Whether they are log-probabilities.

    Raises:
        Declined: If it is not a cross entropy of these logits against class indices.
    """
    name = step_name(node)
    names = ["input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"]
    if name == "cross_entropy":
        names.append("label_smoothing")
    values = dict(zip(names, _arguments(node, *names), strict=False))
    if values["input"] is not logits:
        raise Declined(f"the logits are not the input of {name}")
    if name == "cross_entropy" and log_softmax:
        # log_softmax is idempotent, but only in exact arithmetic: leave odd code as it is.
        raise Declined("cross_entropy of log-probabilities")
    if name == "nll_loss" and not log_softmax:
        raise Declined("nll_loss of plain logits")
    target, scores = example(values["target"]), example(logits)
    if target is None or scores is None:
        raise Declined(f"the target of {name} has no recorded shape")
    if target.dtype != torch.int64:
        raise Declined(f"targets are {target.dtype}: probabilities, not classes")
    if class_dim != (0 if scores.dim() == 1 else 1):
        raise Declined("the loss reads another dimension than the vocabulary as classes")
    if target.dim() != scores.dim() - 1:
        raise Declined("the target has another number of dimensions than the rows")
    reduction = values["reduction"] if values["reduction"] is not None else "mean"
    if values["size_average"] is not None or values["reduce"] is not None:
        reduction = torch_private.legacy_reduction(values["size_average"], values["reduce"])
    if reduction not in ("none", "mean", "sum"):
        raise Declined(f"reduction {reduction!r}")
    ignore_index = -100 if values["ignore_index"] is None else values["ignore_index"]
    smoothing = values.get("label_smoothing")
    smoothing = 0.0 if smoothing is None else smoothing
    if not isinstance(ignore_index, int) or not isinstance(smoothing, (int, float)):
        raise Declined("an option of the loss is not a number")
    class_weight = values["weight"]
    if class_weight is not None:
        weights = example(class_weight)
        if weights is None or weights.requires_grad:
            raise Declined("class weights that require grad")
    return CrossEntropy(
        values["target"], class_weight, ignore_index, str(reduction), float(smoothing)
    )


def rewrite(graph: fx.Graph, logits: Logits, node: fx.Node, settings: RewriteSettings) -> None:
    """Put the op in the place of a loss and of everything back to its projection.

    Raises:
        Declined: If that would not be safe; the graph is then as it was.
    """
    loss = read_loss(node, logits.node, logits.class_dim, log_softmax=logits.log_softmax)
    scale, cap = scale_and_cap(logits)
    projection = logits.projection
    operands = [projection.hidden, projection.weight]
    if logits.bias is not None:
        operands.append(logits.bias)
        vector = example(logits.bias)
        if vector is None or vector.dim() != 1 or vector.shape[0] == 1 != projection.num_classes:
            raise Declined("its bias is broadcast over the vocabulary")
    guards.check_operands(
        [*operands, loss.target, *([loss.class_weight] if loss.class_weight is not None else [])]
    )
    guards.check_unchanged(projection, node, [*operands, *logits.row_operands])
    _emit(graph, logits, node, loss, scale, cap, settings)


def _emit(
    graph: fx.Graph,
    logits: Logits,
    node: fx.Node,
    loss: CrossEntropy,
    scale: float,
    cap: float | None,
    settings: RewriteSettings,
) -> None:
    projection = logits.projection
    value, projected = example(node), example(projection.node)
    assert value is not None
    assert projected is not None
    # Whether a gradient of the loss reaches back to each value on the way: a no_grad region cuts
    # off what came before it, but not a bias that was added behind it.
    off = guards.grad_is_off(graph)
    flows = [value.requires_grad and node not in off]
    for passed in reversed(logits.nodes):
        held = example(passed)
        differentiable = held is not None and held.requires_grad and passed not in off
        flows.insert(0, flows[0] and differentiable)
    first = node.prev
    with graph.inserting_before(node):
        hidden, need_input = _differentiated(graph, projection.hidden, flows[0])
        for row_op in logits.row_ops:
            hidden = row_op(graph, hidden)
        weight, need_weight = _differentiated(graph, projection.weight, flows[0])
        if projection.weight_is_transposed:
            weight = graph.call_method("t", (weight,))
        bias, need_bias = logits.bias, False
        if bias is not None:
            bias, need_bias = _differentiated(graph, bias, flows[logits.bias_since])
            if logits.bias_negative:
                bias = graph.call_method("neg", (bias,))
        if logits.class_stop is not None:
            kept = slice(None, logits.class_stop)
            weight = graph.call_function(operator.getitem, (weight, kept))
            # A bias that was added after the slice already has its length.
            full = bias is not None and example(logits.bias).shape[0] != logits.class_stop  # type: ignore[union-attr]
            if full:
                bias = graph.call_function(operator.getitem, (bias, kept))
        parts = graph.call_function(
            torch.ops.greyhound.linear_cross_entropy.default,
            (hidden, weight, loss.target, bias, loss.class_weight),
            {
                "ignore_index": loss.ignore_index,
                "reduction": loss.reduction,
                "label_smoothing": loss.label_smoothing,
                "logit_scale": scale,
                "softcap": cap,
                "empty_mean_is_nan": True,
                "chunk_size": settings.chunk_size,
                "grad_weight_accum_dtype": settings.grad_weight_accum_dtype,
                # What autocast made of the projection where it stood, not where the loss stands.
                "compute_dtype": projected.dtype,
                "need_grad_input": need_input,
                "need_grad_weight": need_weight,
                "need_grad_bias": need_bias,
            },
        )
        result = graph.call_function(operator.getitem, (parts, 0))
        statistics = torch.promote_types(projected.dtype, torch.float32)
        if value.dtype != statistics:
            result = graph.call_method("to", (result, value.dtype))
    inserted = first.next
    while inserted is not node:
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in node.meta:
                inserted.meta[key] = node.meta[key]
        inserted = inserted.next
    result.meta["example_value"] = value
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    for passed in reversed(logits.nodes):
        graph.erase_node(passed)


def _differentiated(graph: fx.Graph, operand: fx.Node, flows: bool) -> tuple[fx.Node, bool]:
    """An operand as the op shall see it, and whether it gets a gradient.

    One that gets none is detached if it requires grad: the op refuses an operand that requires a
    gradient nobody asked for.
    """
    value = example(operand)
    assert value is not None
    if value.requires_grad and not flows:
        return graph.call_method("detach", (operand,)), False
    return operand, bool(value.requires_grad)
