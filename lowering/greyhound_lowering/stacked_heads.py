"""Heads stacked in one tensor and multiplied by ``bmm``: one op for all of them.

Codebook models keep K heads as one parameter ``[K, D, V]``; ``bmm(x [K, T, D], heads)`` and a
cross entropy over all ``K * T`` rows is K terms of `greyhound::linear_cross_entropy_terms`, one
head each::

    logits = bmm(x, heads)                                # [K, T, V]
    loss   = cross_entropy(logits.reshape(-1, V), y)      # y [K * T]

becomes the sum of the terms over the number of rows that count.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from greyhound_lowering import cross_entropy, guards
from greyhound_lowering.declined import Declined
from greyhound_lowering.follow import step_name
from greyhound_lowering.projection import _arguments, example
from greyhound_lowering.rowwise import same
from greyhound_lowering.settings import RewriteSettings
from greyhound_ops import torch_private

OP_NAME = "greyhound::linear_cross_entropy_terms"

#: More heads than this in one tensor are attention, not codebooks.
_MOST_HEADS = 64

_STEPS = ("view", "reshape", "flatten", "float", "contiguous", "to")

aten = torch.ops.aten


def rewrite(graph: fx.Graph, node: fx.Node, settings: RewriteSettings) -> None:
    """Put the op in the place of a stacked product and the cross entropy that reads it.

    Raises:
        Declined: If it is anything else; the graph is then as it was.
    """
    if guards.changed_in_place(node):
        raise Declined("the product is written to a buffer of the caller's")
    hidden, weight = _arguments(node, "input", "mat2")[:2]
    if weight is None:
        weight = node.kwargs.get("other")
    left, right, logits = example(hidden), example(weight), example(node)
    if left is None or right is None or logits is None or left.dim() != 3 or right.dim() != 3:
        raise Declined("its second operand is a stack of matrices, not one [V, D] weight")
    count = torch_private.static_size(right.shape[0])
    classes = torch_private.static_size(right.shape[2])
    hidden_size = torch_private.static_size(right.shape[1])
    if count is None or classes is None or hidden_size is None or count > _MOST_HEADS:
        raise Declined("its second operand is a stack of matrices of unknown number or size")
    if not same(left.shape[0], count):
        raise Declined("one hidden state is broadcast over a stack of heads")
    if classes <= hidden_size:
        raise Declined(f"{classes} classes are no more than the hidden size {hidden_size}")
    guards.check_graph(graph)
    passed, node_of_loss = _follow(node)
    scores = example(passed[-1])
    if scores is None or scores.dim() != 2 or not same(scores.shape[1], classes):
        raise Declined("the logits of stacked heads are read in another shape")
    loss = cross_entropy.read_loss(node_of_loss, passed[-1], 1)
    if loss.class_weight is not None:
        raise Declined("class weights over stacked heads")
    if loss.reduction == "none":
        raise Declined("a loss per row over stacked heads")
    guards.check_bytes(logits, settings)
    guards.check_operands([hidden, weight, loss.target])
    guards.check_unchanged(node, node_of_loss, [hidden, weight])
    off = guards.grad_is_off(graph)
    result = example(node_of_loss)
    assert result is not None
    flows = result.requires_grad and not any(each in off for each in (*passed, node_of_loss))
    with graph.inserting_before(node_of_loss):
        given = []
        needs = []
        for operand in (hidden, weight):
            value = example(operand)
            assert value is not None
            needs.append(bool(flows and value.requires_grad))
            if value.requires_grad and not needs[-1]:
                operand = graph.call_method("detach", (operand,))
            given.append(graph.call_function(aten.unbind.int, (operand, 0)))
        targets = graph.call_method("reshape", (loss.target, count, -1))
        targets = graph.call_function(aten.unbind.int, (targets, 0))
        each = range(count)
        inputs = [graph.call_function(operator.getitem, (given[0], k)) for k in each]
        heads = [graph.call_function(operator.getitem, (given[1], k)) for k in each]
        labels = [graph.call_function(operator.getitem, (targets, k)) for k in each]
        heads = [graph.call_method("t", (head,)) for head in heads]
        parts = graph.call_function(
            torch.ops.greyhound.linear_cross_entropy_terms.default,
            (inputs, heads, labels, []),
            {
                "ignore_index": loss.ignore_index,
                "reduction": "sum",
                "label_smoothing": loss.label_smoothing,
                "chunk_size": settings.chunk_size,
                "grad_weight_accum_dtype": settings.grad_weight_accum_dtype,
                "compute_dtype": logits.dtype,
                "need_grad_inputs": [needs[0]] * count,
                "need_grad_weights": [needs[1]] * count,
                "grads_are_private": True,
            },
        )
        made = graph.call_function(operator.getitem, (parts, 0))
        if loss.reduction == "mean":
            # Over no row at all 0 / 0 is NaN, as torch's mean is.
            counts = graph.call_function(operator.ne, (loss.target, loss.ignore_index))
            made = graph.call_function(
                operator.truediv, (made, graph.call_method("sum", (counts,)))
            )
        if result.dtype != torch.promote_types(logits.dtype, torch.float32):
            made = graph.call_method("to", (made, result.dtype))
    made.meta["example_value"] = result
    node_of_loss.replace_all_uses_with(made)
    for erased in (node_of_loss, *reversed(passed)):
        graph.erase_node(erased)


def _follow(node: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """A stacked product and what lies between it and its cross entropy, and the cross entropy."""
    passed = [node]
    while True:
        user = guards.only_user(passed[-1])
        name = step_name(user)
        if name == "cross_entropy":
            return passed, user
        before, after = example(passed[-1]), example(user)
        if name not in _STEPS or before is None or after is None:
            raise Declined(f"the logits of stacked heads go into {name}")
        if not same(before.shape[-1], after.shape[-1]):
            raise Declined("a view mixes the vocabulary of stacked heads")
        if torch.promote_types(before.dtype, after.dtype) != after.dtype:
            raise Declined("the logits of stacked heads are cast down")
        passed.append(user)
