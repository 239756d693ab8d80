"""Gradients in the forward, where the loss is linear in the values per row.

The region's op hands out values per row, and the backward knows what each is worth: it projects
every chunk once more, four products instead of three. But a loss is mostly a weighted sum of those
values, and what a row is worth, a mask over a count, is known beforehand. That is proved here on
the traced graph: the derivative of the loss with respect to the values is traced, and if it does
not read them, it is written in front of the op as coefficients.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from greyhound_lowering import guards
from greyhound_lowering.region import SIZES, Region, Traced, _count, modes, reduce_rest
from greyhound_lowering.rowwise import Prover, RowWise
from greyhound_ops import torch_private

#: Nodes behind the region that may be taken in to reach a scalar: more is no tail of a loss.
_MOST_NODES = 64

_NEVER = ("dropout", "rand", "bernoulli", "normal", "multinomial")


def with_tail(graph: fx.Graph, region: Region) -> Region | None:
    """The region and what follows it down to one scalar loss, or None if it does not end in one.

    Everything that depends on the region's outputs is taken in: masks, divisions, sums of losses.
    """
    inside = set(region.nodes)
    states = modes(graph)
    taken: list[fx.Node] = []
    dependent = set(region.outputs)
    for node in graph.nodes:
        if node in inside or not any(each in dependent for each in node.all_input_nodes):
            continue
        if node.op == "output":
            continue
        if not _is_plain(node) or states[node] != states[region.last] or len(taken) >= _MOST_NODES:
            return None
        if _count(node) * 2 > region.elements:
            return None
        dependent.add(node)
        taken.append(node)
    together = inside.union(taken)
    nodes = [node for node in graph.nodes if node in together]
    outputs = [node for node in nodes if any(user not in together for user in node.users)]
    whole = dataclasses.replace(region, nodes=nodes, outputs=outputs)
    return None if whole.loss is None else whole


def _is_plain(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator) or guards.changed_in_place(node):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    if any(each in name for each in _NEVER):
        return False
    module = str(getattr(node.target, "__module__", ""))
    if module.startswith("torch.ops") or isinstance(node.target, torch._ops.OpOverload):
        return False  # an op of somebody else's, or ours
    return isinstance(node.meta.get("example_value"), (Tensor, tuple, list))


@dataclasses.dataclass
class Coefficients:
    """What each value per row is worth to the loss.

    Attributes:
        graph: Traced; its placeholders are `inputs`.
        inputs: Nodes of the region's traced graph that its placeholders stand for.
        placeholders: By the same order.
        results: For each output of the body the node that holds its coefficients, in the shape of
            the value, or None where it gets no gradient.
        unknown: Nodes of the graph that depend on the body's outputs; only their sizes are read.
    """

    graph: fx.Graph
    inputs: list[fx.Node]
    placeholders: list[fx.Node]
    results: list[fx.Node | None]
    unknown: set[fx.Node]


def coefficients(
    region: Region, traced: Traced, prover: Prover, proved: RowWise
) -> Coefficients | None:
    """The derivative of the loss with respect to the body's outputs, if it does not read them."""
    loss = region.loss
    values = [
        index for index, (_, value) in enumerate(proved.outputs) if value.dtype.is_floating_point
    ]
    if loss is None or not values:
        return None
    tail, inputs = _tail(traced.results[loss], prover, proved)
    examples: list[Any] = []
    for position, node in enumerate(inputs):
        example: Any = node.meta["val"]
        if position < len(proved.outputs) and node in proved.partial:
            example = _partial_example(proved, position)
        examples.append(example.detach() if isinstance(example, Tensor) else example)
    mode = torch_private.fake_mode_of([each for each in examples if isinstance(each, Tensor)])
    if mode is None:
        return None

    def derivative(*arguments: Any) -> Any:
        given = list(arguments)
        for index in values:
            given[index] = given[index].detach().requires_grad_()
        result = tail(*given)
        if not result.requires_grad:
            return [None for _ in values]
        leaves = [given[index] for index in values]
        # Not ones_like: that would read the loss.
        one = torch.ones((), dtype=result.dtype, device=result.device)
        return list(torch.autograd.grad(result, leaves, one, allow_unused=True))

    try:
        with (
            mode,
            torch.enable_grad(),
            torch_private.without_compiled_autograd(),
            torch_private.without_saved_tensors_hooks(),
        ):
            graph = make_fx(derivative, tracing_mode="real")(*examples).graph
    except Exception:
        return None  # the backward makes the gradients then, as it can for everything
    graph.eliminate_dead_code()
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    unknown = set(placeholders[: len(proved.outputs)])
    for node in graph.nodes:
        reads = any(each in unknown for each in node.all_input_nodes)
        if reads and node.op == "call_function" and node.target not in SIZES:
            unknown.add(node)
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return None
        if node.op == "get_attr":
            return None
    (output,) = (node for node in graph.nodes if node.op == "output")
    results: list[fx.Node | None] = [None] * len(proved.outputs)
    for index, node in zip(values, output.args[0], strict=True):
        if node in unknown:
            return None  # it reads a value, which is known only behind the op
        results[index] = node
    if all(node is None for node in results):
        return None
    return Coefficients(graph, inputs, placeholders, results, unknown)


def _tail(result: fx.Node, prover: Prover, proved: RowWise) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The part of the traced graph from the body's outputs to the loss, and what it reads.

    Its first inputs are the body's outputs, in their order; for a reduction over rows what is left
    to reduce.
    """
    graph = fx.Graph()
    inputs = [node for node, _ in proved.outputs]
    held = {node: value.dtype for node, value in proved.outputs}
    places = {node: graph.placeholder(f"value_{i}") for i, node in enumerate(inputs)}
    copies = {node: place for node, place in places.items() if node not in proved.partial}

    def visit(node: fx.Node) -> fx.Node:
        if node in copies:
            return copies[node]
        if node in proved.partial:
            made = reduce_rest(graph, node, places[node], held[node])
        elif node in prover.dependent:
            made = graph.node_copy(node, visit)
        else:
            inputs.append(node)
            # Placeholders stand before everything else.
            with graph.inserting_before(first):
                made = graph.placeholder(f"side_{len(inputs)}")
        copies[node] = made
        return made

    first = graph.call_function(torch.Tensor.detach, ())  # a mark
    last = visit(result)
    graph.output(last)
    graph.erase_node(first)
    return fx.GraphModule(torch.nn.Module(), graph), inputs


def _partial_example(proved: RowWise, position: int) -> Tensor:
    """A tensor of what is left of a reduction over rows."""
    node, value = proved.outputs[position]
    like: Tensor = node.meta["val"]
    with torch_private.fake_mode_of([like]):
        return torch.empty(value.shape, dtype=value.dtype, device=like.device)
