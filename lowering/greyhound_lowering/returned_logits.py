"""Logits that are returned beside a loss: NaN in their place, where the user asked for it.

A model that is compiled alone returns its logits with the loss, as those of Hugging Face do, and
returned logits have to exist. Training reads the loss alone. Under ``returned_logits="nan"`` the
loss is rewritten as if the logits were not returned, and what is returned is one NaN, expanded::

    before   return (loss, logits)
    after    nan = full((), nan).expand(B, T, V)
             return (loss, nan)

Logits stand here for every value that would be NaN if the logits were: views, casts, a scale or
soft cap of them. Values that NaN tells nothing of, such as an argmax, are ordinary readers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from greyhound_lowering import follow, guards
from greyhound_lowering.declined import Declined
from greyhound_lowering.projection import example, find_projection
from greyhound_ops import torch_private

_STEPS = {
    *follow.STEPS, "detach", "bfloat16", "half", "double", "cpu", "cuda", "narrow", "select",
}  # fmt: skip


class Returned:
    """What a graph returns of its logits, taken out of its output and put back.

    Args:
        graph: The graph.
        families: For each projection whose logits are returned the values that are NaN if they are.

    Attributes:
        replaced: Names of the projections whose returned logits became NaN.
    """

    def __init__(self, graph: fx.Graph, families: dict[fx.Node, list[fx.Node]]) -> None:
        self._graph = graph
        self._families = families
        self._output = graph.output_node()
        self._leaves = {
            head: [node for node in family if self._output in node.users]
            for head, family in families.items()
        }
        self._sizes = {leaf: _sizes(graph, leaf) for each in self._leaves.values() for leaf in each}
        self._stand_ins: dict[fx.Node, fx.Node] = {}
        self._detours: list[tuple[fx.Node, fx.Node]] = []
        self._dead: dict[fx.Node, list[fx.Node]] = {}
        self.replaced: set[str] = set()

    def concerns(self, head: fx.Node) -> bool:
        """Whether logits of a projection are returned."""
        return head in self._families

    def take_out(self) -> None:
        """Return none of the logits, and let nothing read them for the sake of being returned."""
        graph = self._graph
        for head, family in self._families.items():
            self._dead[head] = _dead(head, family, self._output)
        self._detours = [
            (node, source)
            for head, family in self._families.items()
            for node in self._dead[head]
            for source in node.all_input_nodes
            if source in (head, *family) and source not in self._dead[head]
        ]
        first = next(node for node in graph.nodes if node.op != "placeholder")
        sources = [source for _, source in self._detours]
        leaves = [leaf for each in self._leaves.values() for leaf in each]
        with graph.inserting_before(first):
            for node in dict.fromkeys([*leaves, *sources]):
                self._stand_ins[node] = graph.call_function(torch.full, ((), math.nan))
        self._output.args = fx.map_arg(
            self._output.args,
            lambda node: self._stand_ins[node] if node in leaves else node,
        )
        for node, source in self._detours:
            node.replace_input_with(source, self._stand_ins[source])

    def put_back_or_replace(self) -> None:
        """NaN for the logits of projections that are gone; the others are returned as before."""
        graph = self._graph
        gone = [head for head in self._families if head not in graph.nodes]
        back = {stand_in: node for node, stand_in in self._stand_ins.items()}
        lost = {node: None for head in gone for node in self._dead[head]}
        for node, source in self._detours:
            if node not in lost:
                node.replace_input_with(self._stand_ins[source], source)
        with graph.inserting_before(self._output):
            for head in gone:
                for leaf in self._leaves[head]:
                    stand_in = self._stand_ins[leaf]
                    if back[stand_in] is leaf:
                        back[stand_in] = self._nan(leaf)
        self._output.args = fx.map_arg(self._output.args, lambda node: back.get(node, node))
        for node in reversed(lost):
            graph.erase_node(node)
        for stand_in in self._stand_ins.values():
            graph.erase_node(stand_in)
        self.replaced = {head.name for head in gone}

    def _nan(self, leaf: fx.Node) -> fx.Node:
        value = leaf.meta["example_value"]
        nan = self._graph.call_function(
            torch.full, ((), math.nan), {"dtype": value.dtype, "device": value.device}
        )
        sizes = [_emit_size(self._graph, size) for size in self._sizes[leaf]]
        return self._graph.call_method("expand", (nan, *sizes))


def find(graph: fx.Graph) -> Returned | None:
    """What a graph returns of the logits of its projections; None if nothing, or unnameable."""
    if not torch_private.is_outermost_graph(graph):
        return None  # what a checkpoint's body returns is read by the graph around it
    output = graph.output_node()
    families = {}
    for node in graph.nodes:
        if find_projection(node) is None:
            continue
        family = _family(node)
        leaves = [each for each in family if output in each.users]
        if leaves:
            families[node] = family
    try:
        return Returned(graph, families) if families else None
    except Declined:
        return None


def _family(head: fx.Node) -> list[fx.Node]:
    """The logits and the values that are NaN where they are, in the order of the graph."""
    family = {head: None}
    for node in head.graph.nodes:
        if _passes_nan_on(node, family):
            family[node] = None
    return list(family)


def _passes_nan_on(node: fx.Node, family: dict[fx.Node, None]) -> bool:
    if node.op not in ("call_function", "call_method") or not node.args:
        return False
    name, value = follow.step_name(node), example(node)
    if name not in _STEPS or value is None or not value.is_floating_point():
        return False
    # As an index or as somebody's dtype a value does not pass itself on.
    sources = node.args if name in ("add", "sub", "mul", "div") else node.args[:1]
    return any(source in family for source in sources if isinstance(source, fx.Node)) and (
        not guards.changed_in_place(node)
    )


def _dead(head: fx.Node, family: list[fx.Node], output: fx.Node) -> list[fx.Node]:
    """Members of a family that nothing reads but each other, now that they are not returned."""
    dead: list[fx.Node] = []
    for node in reversed(family):
        if node is not head and all(user in dead or user is output for user in node.users):
            dead.append(node)
    return dead[::-1]


# --------------------------------------------------------------------------------------- sizes

#: A size: a number, a node that holds it, a dimension of a node, or an operator on sizes.
_Size = Any


def _sizes(graph: fx.Graph, leaf: fx.Node) -> list[_Size]:
    """How each size of a value can be had without the value."""
    value = example(leaf)
    if value is None or not torch_private.is_plain_fake(value):
        raise Declined(f"{leaf.name} is not a plain tensor")
    return [_name_size(graph, size) for size in value.shape]


def _name_size(graph: fx.Graph, size: Any) -> _Size:
    number = torch_private.static_size(size)
    if number is not None:
        return number
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt) and torch_private.statically_equal(value, size):
            return node
        if isinstance(value, Tensor):
            for dim, each in enumerate(value.shape):
                if torch_private.statically_equal(each, size):
                    return (node, dim)
    parts = torch_private.size_parts(size)
    if parts is None:
        raise Declined(f"a size that no input has ({size})")
    function, terms = parts
    return (function, [_name_size(graph, term) for term in terms])


def _emit_size(graph: fx.Graph, size: _Size) -> Any:
    if isinstance(size, (int, fx.Node)):
        return size
    first, rest = size
    if isinstance(first, fx.Node):
        return graph.call_method("size", (first, rest))
    result = _emit_size(graph, rest[0])
    for term in rest[1:]:
        result = graph.call_function(first, (result, _emit_size(graph, term)))
    return result
