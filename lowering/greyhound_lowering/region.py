"""Any other loss: find the region between projections and narrow values, prove it, put in one op.

Found in the graph from Dynamo, decided on ATen: the nodes that read the logits, up to values that
hold a few numbers per row, are copied into a graph of their own and traced to ATen operators.
`rowwise` proves there that rows stay apart. What remains is three parts::

    before   what does not depend on the logits, in the user's shapes
    op       greyhound::row_region: project a chunk of rows, run the body on it
    after    what is done to the values per row: masks, means, sums over a sequence

The parts before and after are ordinary operators in the graph and get their gradients from
autograd; only the op is ours.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from greyhound_lowering import guards
from greyhound_lowering.declined import Declined
from greyhound_lowering.follow import step_name
from greyhound_lowering.projection import Projection, example, find_projection
from greyhound_lowering.rowwise import (
    CREATION,
    AtRunTime,
    Prover,
    RowWise,
    SideArgument,
    Value,
    filled_with,
    same,
)
from greyhound_lowering.settings import RewriteSettings
from greyhound_ops import torch_private

if TYPE_CHECKING:
    from greyhound_lowering.forward_gradients import Coefficients
from greyhound_ops.ops import row_region, row_statistics

aten = torch.ops.aten

OP_NAME = "greyhound::row_region"

#: Loss operators that reduce over rows inside; everything else is proved as it is.
_DECOMPOSED = [
    "nll_loss_forward", "nll_loss2d_forward", "mse_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy_with_logits", "binary_cross_entropy", "soft_margin_loss",
]  # fmt: skip


def _multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = 1,
) -> Any:
    """As the operator; torch's own decomposition has another gradient at a margin just met."""
    if input.dim() != 2 or target.dim() != 1:
        return NotImplemented
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    at = target.unsqueeze(1)
    missed = (margin - wide.gather(1, at) + wide).relu()
    if p == 2:
        missed = missed * missed
    if weight is not None:
        missed = missed * weight.to(wide.dtype)[target].unsqueeze(1)
    classes = torch.arange(input.shape[1], device=input.device)
    missed = torch.where(classes == at, 0.0, missed)
    if reduction == 0:
        return missed.mean(1).to(input.dtype)
    whole = missed.mean() if reduction == 1 else (missed / input.shape[1]).sum()
    return whole.to(input.dtype)


#: A value is wide if it has more than this share of the elements of the logits.
_WIDE_SHARE = 1 / 16

#: Operators that read the size of a value only.
SIZES = (aten.sym_size.int, aten.sym_numel.default)


@dataclasses.dataclass
class Region:
    """Nodes of a graph from Dynamo that compute on logits.

    Attributes:
        seeds: The projections, in the order of the graph.
        nodes: What reads their logits, in the order of the graph, up to narrow values.
        outputs: Those of `nodes` that are read outside.
        elements: Elements of the largest logits, at the sizes traced with.
        known: Nodes outside that are traced along, see `_index_makers`; they stay where they are.
    """

    seeds: list[Projection]
    nodes: list[fx.Node]
    outputs: list[fx.Node]
    elements: int
    known: frozenset[fx.Node] = frozenset()

    @property
    def last(self) -> fx.Node:
        """The last node in the order of the graph."""
        return self.nodes[-1]

    @property
    def loss(self) -> int | None:
        """Which output is the loss: the only one that requires grad, and a scalar."""
        learning = [
            index
            for index, node in enumerate(self.outputs)
            if (value := example(node)) is not None and value.requires_grad
        ]
        if len(learning) != 1:
            return None
        value = example(self.outputs[learning[0]])
        return learning[0] if value is not None and value.dim() == 0 else None


# --------------------------------------------------------------------------------------- grow


def _count(node: fx.Node) -> int:
    """Elements of a node's largest tensor, 0 for anything else."""
    value = node.meta.get("example_value")
    values = value if isinstance(value, (tuple, list)) else [value]
    return max((_elements(each) for each in values), default=0)


def _elements(value: Any) -> int:
    if not isinstance(value, Tensor):
        return 0
    count = 1
    for size in value.shape:
        hint = torch_private.size_hint(size)
        if hint is None:
            raise Declined("a size is known only at run time")
        count *= hint
    return count


def grow(graph: fx.Graph, first: Projection) -> Region:
    """The region around a projection, with every other projection that meets it.

    Raises:
        Declined: If the logits leave it.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    seeds = {first.node: first}
    elements = _count(first.node)
    while True:
        nodes = _readers(graph, seeds, elements)
        found = _projections_read(nodes, seeds, elements)
        if not found:
            break
        for projection in found:
            seeds[projection.node] = projection
    if not nodes:
        raise Declined("nothing reads the logits")
    _absorb(graph, seeds, nodes)
    for node in nodes:
        _check_node(node, seeds, nodes)
    outputs = [node for node in nodes if any(user not in nodes for user in node.users)]
    changed = {_own(node, nodes) for node in nodes if guards.changed_in_place(node)}
    for node in outputs:
        if _own(node, nodes) in changed:
            raise Declined(f"{step_name(node)} leaves the loss and is changed in place")
    ordered = sorted(seeds.values(), key=lambda each: order[each.node])
    inside = sorted(nodes, key=order.__getitem__)
    known = _index_makers(inside, ordered)
    return Region(ordered, inside, outputs, elements, known)


#: What makes a value of nothing but positions, and what shows, casts or scales such a value.
_FROM_POSITIONS = {"arange", "one_hot"}
_SHOWN = {
    "view", "reshape", "unsqueeze", "squeeze", "flatten", "getitem", "to", "type", "float",
    "double", "half", "bfloat16", "long", "int", "bool", "contiguous", "mul", "add", "sub", "div",
    "truediv",
}  # fmt: skip


def _index_makers(nodes: list[fx.Node], seeds: list[Projection]) -> frozenset[fx.Node]:
    """Nodes outside a region that make an index or a one-hot target for it.

    With them the trace sees that an index counts the rows, and a one-hot target, as large as the
    logits, can be made chunk by chunk.
    """
    known: set[fx.Node] = set()

    def makes(node: fx.Node) -> bool:
        if node in known:
            return True
        value = example(node)
        if node.op not in ("call_function", "call_method") or value is None or value.requires_grad:
            return False
        if guards.changed_in_place(node):
            return False
        name = step_name(node)
        tensors = [each for each in node.all_input_nodes if example(each) is not None]
        if name in _FROM_POSITIONS:
            made = node.op == "call_function" and len(tensors) == int(name == "one_hot")
        else:
            made = name in _SHOWN and len(tensors) == 1 and makes(tensors[0])
        if made:
            try:
                # It is made again where the region ends.
                guards.check_unchanged(node, nodes[-1], [node, *tensors])
            except Declined:
                return False
            known.add(node)
        return made

    inside = {*nodes, *(each.node for each in seeds)}
    for node in nodes:
        for each in node.all_input_nodes:
            if each not in inside:
                makes(each)
    return frozenset(known)


def _readers(
    graph: fx.Graph, seeds: dict[fx.Node, Projection], elements: int
) -> dict[fx.Node, None]:
    """Nodes that read a wide value that depends on the logits, and what lies between them."""
    wide: set[fx.Node] = set(seeds)
    dependent: set[fx.Node] = set(seeds)
    nodes: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node in seeds:
            continue
        inputs = node.all_input_nodes
        if any(each in dependent for each in inputs):
            dependent.add(node)
        if not any(each in wide for each in inputs):
            continue
        if node.op == "output":
            raise Declined(
                "the logits leave the graph; compile the whole step, so that only the loss leaves"
            )
        nodes[node] = None
        if _count(node) > elements * _WIDE_SHARE:
            wide.add(node)
        elif isinstance(node.meta.get("example_value"), (tuple, list)):
            wide.add(node)  # its parts are looked at one by one
    above: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in nodes or node in above:
            above.update(
                each for each in node.all_input_nodes if each in dependent and each not in seeds
            )
    for node in above:
        nodes.setdefault(node)
    return nodes


def _absorb(graph: fx.Graph, seeds: dict[fx.Node, Projection], nodes: dict[fx.Node, None]) -> None:
    """Take in what reads the region's narrow values under another mode than the projections'.

    The entropy under ``no_grad`` beside a loss: such nodes cannot be moved behind the op, out of
    their mode, but the trace keeps what the mode did.
    """
    states = modes(graph)
    wanted = states[next(iter(seeds))]
    dependent = set(seeds) | set(nodes)
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        if node in dependent or not any(each in dependent for each in node.all_input_nodes):
            continue
        dependent.add(node)
        if node.op in ("call_function", "call_method") and states[node] != wanted:
            taken.add(node)
    pending = list(taken)
    while pending:
        node = pending.pop()
        nodes.setdefault(node)
        pending.extend(
            each
            for each in node.all_input_nodes
            if each in dependent and each not in nodes and each not in seeds
        )


def modes(graph: fx.Graph) -> dict[fx.Node, tuple[bool, tuple[str, ...]]]:
    """For each node whether gradients are off there, and the autocast regions it lies in."""
    off = guards.grad_is_off(graph)
    open_modes: list[str] = []
    states = {}
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "_enter_autocast":
            open_modes.append(node.name)
        elif name == "_exit_autocast":
            open_modes.remove(node.args[0].name)
        states[node] = (node in off, tuple(open_modes))
    return states


def _projections_read(
    nodes: dict[fx.Node, None], seeds: dict[fx.Node, Projection], elements: int
) -> list[Projection]:
    """Projections whose logits meet the region from outside."""
    found = []
    seen: set[fx.Node] = set()
    pending = [each for node in nodes for each in node.all_input_nodes if each not in nodes]
    while pending:
        node = pending.pop()
        if node in seen or node in seeds or node in nodes:
            continue
        seen.add(node)
        # Half of the elements: not the hidden states of a trunk, which lie above it as well.
        if _count(node) * 2 < elements:
            continue
        projection = find_projection(node)
        if projection is not None:
            found.append(projection)
        elif node.op in ("call_function", "call_method"):
            pending.extend(node.all_input_nodes)
    return found


def _check_node(
    node: fx.Node, seeds: dict[fx.Node, Projection], nodes: dict[fx.Node, None]
) -> None:
    if node.op not in ("call_function", "call_method"):
        raise Declined(f"{step_name(node)} reads the logits")
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        raise Declined(f"{step_name(node)} reads the logits")
    if find_projection(node) is not None and node not in seeds:
        raise Declined("the logits go into another product")
    for written in guards.changed_in_place(node):
        if _own(written, nodes) is None:
            raise Declined(f"{step_name(node)} writes in place")
    value = node.meta.get("example_value")
    if not isinstance(value, (Tensor, tuple, list)):
        raise Declined(f"{step_name(node)} makes no tensor of the logits")


#: Steps whose result nobody else has.
_NEW = {
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full",
    "new_empty", "clone",
}  # fmt: skip


def _own(node: Any, nodes: dict[fx.Node, None]) -> fx.Node | None:
    """Where the region made the tensor that a node is, if it did and shares it with nobody.

    A tensor that is filled in place, as ``zeros_like(logits).scatter_(1, y, 1.0)`` fills a one-hot
    target, is one value after another to the trace.
    """
    while isinstance(node, fx.Node) and node in nodes:
        if step_name(node) in _NEW:
            return node
        if node.op != "call_method" or guards.changed_in_place(node) != [node.args[0]]:
            return None
        node = node.args[0]
    return None


# -------------------------------------------------------------------------------------- trace


@dataclasses.dataclass
class Traced:
    """A region in ATen operators.

    Attributes:
        graph: Its graph; placeholders in the order of `inputs`.
        inputs: Nodes of the graph from Dynamo that its placeholders stand for, the logits first.
        placeholders: By the same order.
        results: What the region's outputs are in it.
    """

    graph: fx.Graph
    inputs: list[fx.Node]
    placeholders: list[fx.Node]
    results: list[fx.Node]


def _modes(graph: fx.Graph, until: fx.Node) -> list[fx.Node]:
    """Nodes that enter and leave autocast, up to a node."""
    found = []
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") in ("_enter_autocast", "_exit_autocast"):
            found.append(node)
        if node is until:
            break
    return found


def trace(graph: fx.Graph, region: Region) -> Traced:
    """Trace a region alone to ATen operators, on the fake tensors that Dynamo recorded.

    Raises:
        Declined: If it cannot be traced alone, or gives other dtypes or shapes than before.
    """
    inside = {*region.nodes, *region.known}
    inputs = [each.node for each in region.seeds]
    for node in graph.nodes:
        if node not in inside:
            continue
        for each in node.all_input_nodes:
            if each not in inside and each not in inputs:
                inputs.append(each)
    alone = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = alone.placeholder(node.name)
    modes = set(_modes(graph, region.last))
    off = guards.grad_is_off(graph)
    open_modes = []
    for node in graph.nodes:
        if node in modes:
            copies[node] = alone.node_copy(node, copies.__getitem__)
            if node.target.__name__ == "_enter_autocast":
                open_modes.append(copies[node])
            else:
                open_modes.remove(copies[node.args[0]])
        elif node in inside:
            copies[node] = alone.node_copy(node, copies.__getitem__)
            # Values made under no_grad are constants to autograd; the trace alone forgets that.
            if node in off and isinstance(node.meta.get("example_value"), Tensor):
                copies[node] = alone.call_method("detach", (copies[node],))
    for mode in reversed(open_modes):
        alone.call_function(torch.amp.autocast_mode._exit_autocast, (mode,))
    alone.output(tuple(copies[node] for node in region.outputs))
    arguments = []
    for node in inputs:
        value = node.meta.get("example_value")
        if not isinstance(value, (Tensor, int, float, bool, torch.SymInt, torch.SymFloat)):
            raise Declined(f"{node.name} is of type {type(value).__name__}")
        if isinstance(value, Tensor) and not torch_private.is_plain_fake(value):
            raise Declined(f"{node.name} is a {type(value).__name__}, not a plain tensor")
        arguments.append(value)
    module = fx.GraphModule(graph.owning_module or torch.nn.Module(), alone)
    mode = torch_private.fake_mode_of([each for each in arguments if isinstance(each, Tensor)])
    if mode is None:
        raise Declined("the graph was traced without shapes")
    try:
        with mode, torch.no_grad():
            plain = [each.detach() if isinstance(each, Tensor) else each for each in arguments]
            called: Any = lambda *args: module(*args)  # noqa: E731
            if any(map(guards.changed_in_place, region.nodes)):
                # What is written in place becomes one value after another.
                called = torch.func.functionalize(called)
            traced = make_fx(
                called,
                decomposition_table={
                    **torch_private.decompositions(_DECOMPOSED),
                    aten.multi_margin_loss.default: _multi_margin_loss,
                },
                tracing_mode="real",
            )(*plain)
    except Declined:
        raise
    except Exception as error:
        raise Declined(f"it cannot be traced alone ({type(error).__name__}: {error})") from error
    for node in traced.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            # Made chunk by chunk, or elsewhere in the graph, its numbers would be others.
            raise Declined(f"{node.target} is random")
    _settle_constants(traced.graph)
    traced.graph.eliminate_dead_code()
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    results = (
        list(output.args[0]) if isinstance(output.args[0], (tuple, list)) else [output.args[0]]
    )
    for node, result in zip(region.outputs, results, strict=True):
        before = node.meta.get("example_value")
        after = result.meta.get("val") if isinstance(result, fx.Node) else None
        if not isinstance(before, Tensor) or not isinstance(after, Tensor):
            raise Declined(f"{step_name(node)} leaves the loss and is no tensor")
        if before.dtype != after.dtype or before.dim() != after.dim():
            raise Declined(f"{step_name(node)} has another dtype when traced alone")
    return Traced(traced.graph, inputs, placeholders, results)


def _settle_constants(graph: fx.Graph) -> None:
    """Put a constant in the place of what was filled with one, and of what only detaches one.

    A one-hot target that was filled in place, or under ``no_grad``, is then as plain as any other,
    and is made chunk by chunk.
    """
    constants = set()
    for node in list(graph.nodes):
        if node.target is aten.fill.Scalar:
            with graph.inserting_before(node):
                full: fx.Node = graph.call_function(aten.full_like.default, node.args)
            full.meta.update(node.meta)
            node.replace_all_uses_with(full)
            constants.add(full)
        elif node.target in CREATION or (
            node.target is aten.scatter.value and node.args[0] in constants
        ):
            constants.add(node)
        elif node.target is aten.detach.default and node.args[0] in constants:
            node.replace_all_uses_with(node.args[0])


# --------------------------------------------------------------------------------------- emit


def rewrite(graph: fx.Graph, region: Region, settings: RewriteSettings) -> None:
    """Put the op in the place of a region that was grown.

    Raises:
        Declined: If that would not be safe; the graph is then as it was.
    """
    from greyhound_lowering import forward_gradients

    for projection in region.seeds:
        _check_seed(projection, region)
    whole = forward_gradients.with_tail(graph, region)
    if whole is not None:
        try:
            if _rewrite(graph, whole, settings, in_forward=True):
                return
        except Declined:
            pass  # the region alone may still do
    _rewrite(graph, region, settings, in_forward=False)


def _rewrite(
    graph: fx.Graph, region: Region, settings: RewriteSettings, *, in_forward: bool
) -> bool:
    """Rewrite a region; with ``in_forward`` only if its gradients can be made in the forward."""
    from greyhound_lowering import forward_gradients

    traced = trace(graph, region)
    seeds = {
        traced.placeholders[index]: projection.class_dim
        for index, projection in enumerate(region.seeds)
    }
    largest = region.elements
    prover = Prover(traced.graph, seeds, largest * _WIDE_SHARE, largest / 2)
    proved = prover.run()
    if not proved.outputs:
        raise Declined("nothing comes out of the logits")
    _check_body(region, proved)
    known = None
    if in_forward:
        known = forward_gradients.coefficients(region, traced, prover, proved)
        if known is None:
            return False
    emitter = _Emitter(graph, region, traced, prover, proved, settings, known)
    emitter.check()
    emitter.emit()
    return True


def _check_body(region: Region, proved: RowWise) -> None:
    """Decline if the body makes other dtypes or sizes of a few rows than the user's code did.

    Type promotion asks for dimensions, which values have fewer of in the body; and a rule that is
    wrong for an operator of some version of torch shall end here and not in a user's loss.
    """
    rows = 3

    def hints(value: Any, labels: str) -> list[int]:
        sizes = [
            torch_private.size_hint(size)
            for size, label in zip(value.shape, labels, strict=True)
            if label in "c1"
        ]
        return [0 if size is None else size for size in sizes]

    def stand_in(argument: SideArgument) -> Tensor:
        value = argument.node.meta.get("val")
        if not isinstance(value, Tensor):
            return torch.zeros((), dtype=torch.float64, device=device)
        sizes = hints(value, argument.labels)
        if argument.by_row or (argument.labels and not sizes):
            sizes = [rows if argument.by_row else 1, *sizes]
        return torch.zeros(sizes, dtype=value.dtype, device=device)

    logits_values = [value for each in region.seeds if (value := example(each.node)) is not None]
    device = logits_values[0].device
    with (
        torch_private.fake_mode_of(logits_values),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        logits = [
            torch.zeros(rows, each.shape[projection.class_dim], dtype=each.dtype, device=device)
            for each, projection in zip(logits_values, region.seeds, strict=True)
        ]
        arguments = [
            [stand_in(each) for each in group] for group in (proved.row_args, proved.whole_args)
        ]
        try:
            made = row_region.body_outputs(proved.body, logits, *arguments)
        except Exception as error:
            raise Declined(f"it fails on a chunk of rows ({error})") from error
    for each, (node, held) in zip(made, proved.outputs, strict=True):
        if each.dtype != held.dtype or list(each.shape) != [rows, *hints(held, held.labels)]:
            raise Declined(f"{node.name} is {each.dtype} {list(each.shape)} in a chunk of rows")


def _check_seed(projection: Projection, region: Region) -> None:
    if projection.row_order != tuple(sorted(projection.row_order)):
        raise Declined("the projection changes the order of the rows")
    hidden = example(projection.hidden)
    if hidden is None or hidden.dim() < 2:
        raise Declined("the hidden states are a single row")
    value, first = example(projection.node), example(region.seeds[0].node)
    assert value is not None
    assert first is not None
    rows = [size for dim, size in enumerate(value.shape) if dim != projection.class_dim]
    others = [size for dim, size in enumerate(first.shape) if dim != region.seeds[0].class_dim]
    if len(rows) != len(others) or not all(map(same, rows, others)):
        raise Declined("two projections of different rows meet")


def reduce_rest(graph: fx.Graph, node: Any, rest: fx.Node, dtype: torch.dtype) -> fx.Node:
    """What is left of a reduction over rows, as the user wrote it.

    Args:
        graph: Where to write it.
        node: The reduction in the traced graph.
        rest: What the chunks made of its argument.
        dtype: Of the rest.
    """
    made = graph.call_function(node.target, (rest, *node.args[1:]), dict(node.kwargs))
    wanted = node.meta["val"].dtype
    if dtype != wanted and wanted.is_floating_point:
        made = graph.call_function(aten._to_copy.default, (made,), {"dtype": wanted})
    return made


# A region's peak may be at most this share of what whole logits hold at the least: where its
# backward has to project once more (N > 2 D), a product in four, and where nothing makes its body
# faster than the loops that torch.compile writes for the same, only memory can pay.
MOST_SHARE_OF_PEAK = 0.8


def most_share_of_peak(
    body: str, logits: list[torch.dtype], device_type: str, *, projects_once: bool
) -> float:
    """The largest share of whole logits' memory at which a region pays.

    With softmaxes whose statistics a kernel makes it is also faster: mixed distillation of two
    heads of V=128256 and D=4096 at N=4096, where the two hold the same, took 0.93 of
    torch.compile's time on an H200, DPO 0.94 and 0.95 (docs/performance.md, "Rewritten models").

    Args:
        body: Source of the region's body.
        logits: Dtype of each projection.
        device_type: ``"cuda"`` or any other.
        projects_once: Whether no logits are made twice.
    """
    faster = device_type == "cuda" and row_statistics.serve(body, tuple(logits))
    return 1.0 if projects_once and faster else MOST_SHARE_OF_PEAK


class _Emitter:
    """Writes the three parts into the graph."""

    def __init__(
        self,
        graph: fx.Graph,
        region: Region,
        traced: Traced,
        prover: Prover,
        proved: RowWise,
        settings: RewriteSettings,
        known: Coefficients | None = None,
    ) -> None:
        self.known = known
        self.total: fx.Node | None = None
        self.graph, self.region, self.traced = graph, region, traced
        self.prover, self.proved, self.settings = prover, proved, settings
        self.made: dict[fx.Node, Any] = {}  # traced node to node of the graph
        self.off = guards.grad_is_off(graph)
        self._modes = modes(graph)
        self.moved: list[fx.Node] = []
        self.anchor = self._find_anchor()

    # ---------------------------------------------------------------------------- checks

    def check(self) -> None:
        """Everything that can still decline, before the first change."""
        region = self.region
        operands = []
        for projection in region.seeds:
            operands += [projection.hidden, projection.weight]
            if projection.bias is not None:
                operands.append(projection.bias)
        sides = [node for node in self.traced.inputs if isinstance(example(node), Tensor)]
        guards.check_operands([*operands, *sides])
        guards.check_unchanged(region.seeds[0], self.anchor, operands)
        for side in sides:
            # Labels are often prepared in place behind the head: what counts is what is first read.
            readers = (node for node in region.nodes if side in node.all_input_nodes)
            first = next(readers, region.seeds[0].node)
            guards.check_unchanged(first, self.anchor, [side])
        for projection in region.seeds:
            bias = None if projection.bias is None else example(projection.bias)
            if projection.bias is not None and (
                bias is None or bias.dim() != 1 or bias.shape[0] == 1 != projection.num_classes
            ):
                raise Declined("its bias is broadcast over the vocabulary")
            for op in self.proved.space:
                hidden = example(projection.hidden)
                assert hidden is not None
                if op.dim >= hidden.dim() - 1:
                    raise Declined("the rows of the logits are cut in a shape of their own")
        self._check_cuts()
        self._check_pays()
        self._find_moved()

    def _flows(self, index: int) -> bool:
        """Whether a gradient comes back to a projection."""
        node = self.region.seeds[index].node
        value = example(node)
        return (
            node not in self.off
            and value is not None
            and value.requires_grad
            and self.proved.reaches(f"logits[{index}]")
        )

    def _check_pays(self) -> None:
        """Decline where a chunk and the sums over chunks hold hardly less than whole logits.

        Whoever sets ``min_logits_bytes`` has decided that himself.
        """
        if self.settings.min_logits_bytes is not None:
            return
        sizes = self._sizes(torch_private.size_hint)
        if sizes is None:
            return  # known only at run time: the size of the logits has been judged before
        device_type, accum = self._device().type, self.settings.grad_weight_accum_dtype
        chunked, plain = row_region.peak_bytes(
            sizes, device_type, accum, self.settings.chunk_size, cut=bool(self.proved.space)
        )
        kept = self._kept(sizes)
        again = (size.needs and not has for size, has in zip(sizes, kept, strict=True))
        most = most_share_of_peak(
            self.proved.body,
            [each.compute_dtype for each in sizes],
            device_type,
            projects_once=self.known is not None or not any(again),
        )
        if chunked > most * plain:
            raise Declined(
                f"chunks and the sums over them would hold {chunked / 2**20:.0f} MiB where whole "
                f"logits hold {plain / 2**20:.0f}: too little is saved"
            )

    def _sizes(self, number: Callable[[Any], Any]) -> list[row_region.HeadSize] | None:
        """What the memory of each projection depends on, None where a size is unknown.

        Args:
            number: What to make of a size; None where it is unknown.
        """
        sizes = []
        owners = self._same_heads() or list(range(len(self.region.seeds)))
        for index, projection in enumerate(self.region.seeds):
            logits, weight = example(projection.node), example(projection.weight)
            assert logits is not None
            numbers = [number(size) for size in logits.shape]
            hidden = number(projection.hidden_size)
            if weight is None or hidden is None or any(each is None for each in numbers):
                return None
            classes = numbers.pop(projection.class_dim)
            flows = self._flows(index)
            sizes.append(
                row_region.HeadSize(
                    math.prod(numbers),
                    classes,
                    hidden,
                    logits.dtype,
                    weight.dtype,
                    flows,
                    flows and weight.requires_grad and projection.weight not in self.off,
                    owners[index],
                )
            )
        return sizes

    def _kept(self, sizes: list[row_region.HeadSize]) -> list[bool]:
        """For each projection whether its logits are kept for the backward."""
        if self.known is not None or not self.settings.keep_logits:
            return [False] * len(sizes)
        return row_region.keeps_logits(
            sizes, self._device().type, self.settings.grad_weight_accum_dtype
        )

    def _keep_logits(self) -> list[bool]:
        """For each projection whether its logits are kept for the backward; none are False for all.

        A guard on the number of rows where it is a symbol: with more of them a sum takes less.
        """
        sizes = self._sizes(lambda size: None if torch_private.size_hint(size) is None else size)
        if sizes is None:
            return []
        kept = self._kept(sizes)
        return kept if any(kept) else []

    def _check_cuts(self) -> None:
        """A slice of rows is done to the hidden states, whose rows must lie as the logits' did."""
        if not self.proved.space:
            return
        hidden = example(self.region.seeds[0].hidden)
        assert hidden is not None
        rows = hidden.dim() - 1
        for node in self.traced.graph.nodes:
            value = self.prover._values.get(node)
            if not isinstance(value, Value) or node.target not in (
                aten.slice.Tensor, aten.select.int,
            ):  # fmt: skip
                continue
            source = self.prover._values[node.args[0]]
            if source.space != value.space:
                selected = sum(op.name == "select" for op in source.space)
                if source.labels.count("r") != rows - selected:
                    raise Declined("the rows of the logits are cut in a shape of their own")

    def _find_anchor(self) -> fx.Node:
        """The node to write behind: the last of the region, or the end of a mode it ends in."""
        wanted = self._state(self.region.seeds[0].node)
        node = self.region.last
        while self._state(node) != wanted:
            node = node.next
            if node.op == "output":
                return self.region.last
        return node

    def _find_moved(self) -> None:
        """Nodes before the anchor that read the outputs: they must come after the op."""
        inside = set(self.region.nodes)
        late: set[fx.Node] = set()
        node = self.region.seeds[0].node
        while node is not self.anchor:
            node = node.next
            if node in inside:
                continue
            reads = any(
                each in late or each in self.region.outputs for each in node.all_input_nodes
            )
            if not reads:
                continue
            if any(each in late for user in self.region.nodes for each in user.all_input_nodes):
                raise Declined("the loss reads a value that depends on it")
            if guards.changed_in_place(node) or node.op not in ("call_function", "call_method"):
                raise Declined(f"{step_name(node)} stands between parts of the loss")
            if self._state(node) != self._state(self.anchor):
                raise Declined("autocast or no_grad changes between parts of the loss")
            late.add(node)
            self.moved.append(node)
            # It will read its other arguments where the op stands.
            guards.check_unchanged(node, self.anchor, node.all_input_nodes)

    def _state(self, node: fx.Node) -> tuple[bool, tuple[str, ...]]:
        return self._modes[node]

    # ------------------------------------------------------------------------------ emit

    def emit(self) -> None:
        """Write the parts behind the region and erase it."""
        graph, region = self.graph, self.region
        before = set(graph.nodes)
        mark = graph.create_node("placeholder", "_greyhound_mark")  # moved and erased below
        self.anchor.append(mark)
        try:
            with graph.inserting_before(mark):
                results = self._emit_parts()
        except Declined:
            for node in reversed(list(graph.nodes)):
                if node not in before:
                    graph.erase_node(node)
            raise
        self._describe(mark)
        for node in reversed(self.moved):
            mark.append(node)
        graph.erase_node(mark)
        for node, result in zip(region.outputs, results, strict=True):
            result.meta.setdefault("example_value", node.meta["example_value"])
            node.replace_all_uses_with(result)
        for node in reversed(region.nodes):
            graph.erase_node(node)
        for projection in reversed(region.seeds):
            graph.erase_node(projection.node)
        for node in reversed(list(graph.nodes)):
            if node in region.known and not node.users:
                graph.erase_node(node)

    def _emit_parts(self) -> list[Any]:
        """The three parts; what the region's outputs are after them."""
        graph = self.graph
        grad_off, autocasts = self._state(self.anchor)
        switched = None
        if autocasts:
            # Dtypes are settled in the trace; autocast would change them once more.
            switched = graph.call_function(
                torch.amp.autocast_mode._enter_autocast, (self._device().type, None, False, None)
            )
        if grad_off:
            graph.call_function(torch._C._set_grad_enabled, (True,))
        self._emit_op()
        results = [self._after(result) for result in self.traced.results]
        if self.total is not None:
            # Its value as the user wrote it; its gradient by way of the op.
            loss = self.region.loss
            assert loss is not None
            results[loss] = self._function(
                torch.ops.greyhound.with_gradient_of.default, results[loss], self.total
            )
        if grad_off:
            graph.call_function(torch._C._set_grad_enabled, (False,))
        if switched is not None:
            graph.call_function(torch.amp.autocast_mode._exit_autocast, (switched,))
        return results

    def _device(self) -> torch.device:
        value = example(self.region.seeds[0].node)
        assert value is not None
        return value.device

    def _describe(self, mark: fx.Node) -> None:
        node = self.anchor.next
        while node is not mark:
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
                if key in self.region.last.meta:
                    node.meta.setdefault(key, self.region.last.meta[key])
            node = node.next

    def _function(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def _emit_op(self) -> None:
        inputs, weights, biases = [], [], []
        needs: dict[str, list[bool]] = {name: [] for name in ("inputs", "weights", "biases")}
        has_bias, dtypes = [], []
        for index, projection in enumerate(self.region.seeds):
            value = example(projection.node)
            assert value is not None
            flows = self._flows(index)
            hidden, needed = self._operand(projection.hidden, flows)
            needs["inputs"].append(needed)
            for op in self.proved.space:
                hidden = self._cut(hidden, op)
            inputs.append(
                self._function(aten.reshape.default, hidden, [-1, projection.hidden_size])
                if isinstance(projection.hidden_size, int)
                else self._function(torch.flatten, hidden, 0, -2)
            )
            weight, needed = self._operand(projection.weight, flows)
            needs["weights"].append(needed)
            if projection.weight_is_transposed:
                weight = self._function(aten.t.default, weight)
            weights.append(weight)
            has_bias.append(projection.bias is not None)
            if projection.bias is not None:
                bias, needed = self._operand(projection.bias, flows)
                needs["biases"].append(needed)
                biases.append(bias)
            dtypes.append(str(value.dtype).removeprefix("torch."))
        row_args, row_needs = self._side_arguments(self.proved.row_args, "row_args")
        whole_args, whole_needs = self._side_arguments(self.proved.whole_args, "whole_args")
        parts = self._function(
            torch.ops.greyhound.row_region.default,
            inputs,
            weights,
            biases,
            row_args,
            whole_args,
            self.proved.body,
            ",".join(dtypes),
            has_bias,
            [] if self.known is None else self._coefficients(self.known),
            chunk_size=self.settings.chunk_size,
            grad_weight_accum_dtype=self.settings.grad_weight_accum_dtype,
            need_grad_inputs=needs["inputs"],
            need_grad_weights=needs["weights"],
            need_grad_biases=needs["biases"],
            need_grad_row_args=row_needs,
            need_grad_whole_args=whole_needs,
            same_head=self._same_heads(),
            keep_logits=self._keep_logits(),
            grads_are_private=True,  # only outputs and total are read from here on
        )
        outputs = self._function(operator.getitem, parts, 0)
        if self.known is not None:
            self.total = self._function(operator.getitem, parts, 1)
        for index, (node, held) in enumerate(self.proved.outputs):
            out = self._function(operator.getitem, outputs, index)
            out = self._restore(out, held)
            if node in self.proved.partial:
                out = reduce_rest(self.graph, node, out, held.dtype)
            self.made[node] = out

    def _coefficients(self, known: Coefficients) -> list[fx.Node]:
        """What each value per row is worth to the loss, in the body's shapes."""
        made: dict[fx.Node, Any] = {}
        for place, node in zip(known.placeholders, known.inputs, strict=True):
            if place not in known.unknown:
                made[place] = self._before(node)
        for node in known.graph.nodes:
            if node.op != "call_function" or node in known.unknown:
                continue
            if node.args and node.args[0] in known.unknown:
                made[node] = self._size_read(node)
                continue
            made[node] = self._function(
                node.target,
                *fx.map_arg(node.args, made.__getitem__),
                **fx.map_arg(node.kwargs, made.__getitem__),
            )
        nodes = []
        for (_, value), result in zip(self.proved.outputs, known.results, strict=True):
            if result is None:
                nodes.append(self._function(torch.empty, (0,), device=self._device()))
                continue
            node = self._function(aten.detach.default, made[result])
            rows = [dim for dim, label in enumerate(value.labels) if label == "r"]
            order = rows + value.rest
            if order != sorted(order):
                node = self._function(aten.permute.default, node, order)
            if len(rows) > 1:
                node = self._function(torch.flatten, node, 0, len(rows) - 1)
            nodes.append(node)
        return nodes

    def _same_heads(self) -> list[int]:
        """For each projection the first one with its weight and bias."""
        seeds = self.region.seeds
        heads = [
            (
                *(each.head, each.bias, each.node in self.off, each.weight in self.off),
                (value := example(each.weight)) is not None and value.requires_grad,
                each.node.meta["example_value"].dtype,
                self.proved.reaches(f"logits[{index}]"),
            )
            for index, each in enumerate(seeds)
        ]
        return [heads.index(head) for head in heads] if len(set(heads)) < len(heads) else []

    def _operand(self, operand: fx.Node, flows: bool) -> tuple[fx.Node, bool]:
        """An operand as the op shall see it, and whether it gets a gradient."""
        value = example(operand)
        assert value is not None
        if value.requires_grad and not flows:
            return self.graph.call_method("detach", (operand,)), False
        return operand, bool(value.requires_grad)

    def _cut(self, hidden: fx.Node, op: Any) -> fx.Node:
        if op.name == "select":
            return self._function(aten.select.int, hidden, op.dim, *op.args)
        start, stop, step = (
            self._size(each.value) if isinstance(each, AtRunTime) else each for each in op.args
        )
        return self._function(
            aten.slice.Tensor, hidden, op.dim, start, stop, 1 if step is None else step
        )

    # ------------------------------------------------------------- values from outside

    def _side_arguments(
        self, arguments: list[SideArgument], kind: str
    ) -> tuple[list[fx.Node], list[bool]]:
        nodes, needs = [], []
        for index, argument in enumerate(arguments):
            node = self._before(argument.node)
            wants = self._requires_grad(argument.node) and self.proved.reaches(f"{kind}[{index}]")
            if isinstance(node, fx.Node) and isinstance(argument.node.meta.get("val"), Tensor):
                if self._requires_grad(argument.node) and not wants:
                    node = self._function(aten.detach.default, node)
                node = (
                    self._by_row(node, argument) if argument.by_row else self._whole(node, argument)
                )
            else:  # a size
                node = self._function(
                    torch.full, (), node, dtype=torch.float64, device=self._device()
                )
            nodes.append(node)
            needs.append(wants)
        return nodes, needs

    def _requires_grad(self, node: fx.Node) -> bool:
        """Whether any tensor that a traced value is made of requires grad."""
        seen: set[fx.Node] = set()
        pending = [node]
        while pending:
            each = pending.pop()
            if each in seen:
                continue
            seen.add(each)
            if each.target is aten.detach.default:
                continue
            value = each.meta.get("val")
            if isinstance(value, Tensor) and not value.is_floating_point():
                continue
            if each.op == "placeholder":
                origin = self.traced.inputs[self.traced.placeholders.index(each)]
                given = example(origin)
                if given is not None and given.requires_grad and origin not in self.off:
                    return True
            pending.extend(each.all_input_nodes)
        return False

    def _by_row(self, node: fx.Node, argument: SideArgument) -> fx.Node:
        """Bring a value to ``[N, other dimensions]``."""
        value: Tensor = argument.node.meta["val"]
        rest = [dim for dim, label in enumerate(argument.labels) if label in "c1"]
        rows = list(argument.row_at)
        if any(at is None for at in rows):
            # Repeated along some of the row dimensions: all of them are laid out first.
            present = [at for at in rows if at is not None]
            gone = [d for d, label in enumerate(argument.labels) if label == "x"]
            node = self._function(aten.permute.default, node, [*present, *rest, *gone])
            if gone:
                kept = len(present) + len(rest)
                node = self._function(aten.squeeze.dims, node, list(range(kept, kept + len(gone))))
            for position, at in enumerate(rows):
                if at is None:
                    node = self._function(aten.unsqueeze.default, node, position)
            sizes: list[Any] = [
                -1 if at is not None else self._size(argument.row_shape[position])
                for position, at in enumerate(rows)
            ]
            node = self._function(aten.expand.default, node, sizes + [-1] * len(rest))
        else:
            order = [at for at in rows if at is not None] + rest
            gone = [d for d, label in enumerate(argument.labels) if label == "x"]
            if gone or order != list(range(value.dim())):
                node = self._function(aten.permute.default, node, [*order, *gone])
            if gone:
                node = self._function(
                    aten.squeeze.dims, node, list(range(len(order), len(order) + len(gone)))
                )
        if len(rows) > 1:
            node = self._function(torch.flatten, node, 0, len(rows) - 1)
        return node

    def _whole(self, node: fx.Node, argument: SideArgument) -> fx.Node:
        gone = [dim for dim, label in enumerate(argument.labels) if label == "x"]
        if gone and len(gone) == len(argument.labels):
            gone = gone[1:]  # a value of no dimensions would count for less in type promotion
        if gone:
            node = self._function(aten.squeeze.dims, node, gone)
        return node

    def _before(self, node: fx.Node) -> Any:
        """A traced value that does not depend on the logits, in the graph."""
        if node in self.made:
            return self.made[node]
        if node.op == "placeholder":
            made: Any = self.traced.inputs[self.traced.placeholders.index(node)]
        else:
            made = self._copy(node, self._before)
        self.made[node] = made
        return made

    def _after(self, node: fx.Node) -> Any:
        """A traced value behind the op, in the graph."""
        if node in self.made:
            return self.made[node]
        if node not in self.prover.dependent:
            return self._before(node)
        self.made[node] = self._copy(node, self._after)
        return self.made[node]

    def _copy(self, node: Any, convert: Any) -> Any:
        if node.target in SIZES and node.args[0] in self.prover.dependent:
            return self._size_read(node)
        if node.target in CREATION and any(
            each in self.prover.dependent for each in node.all_input_nodes
        ):
            # The size of a value that is no more, filled with a number.
            made: Tensor = node.meta["val"]
            sizes = [self._size(size) for size in made.shape]
            number = filled_with(node)
            if not isinstance(number, (bool, int, float)):
                raise Declined("a value is filled with a number known only at run time")
            return self._function(
                aten.full.default, sizes, number, dtype=made.dtype, device=made.device
            )
        if node.op == "get_attr":
            raise Declined("a constant stands in the loss")
        args = fx.map_arg(node.args, convert)
        kwargs = fx.map_arg(node.kwargs, convert)
        return self._function(node.target, *args, **kwargs)

    def _size_read(self, node: Any) -> Any:
        """What one of `SIZES` reads of a value that the graph does not hold."""
        shape = node.args[0].meta["val"].shape
        if node.target is aten.sym_size.int:
            return self._size(shape[node.args[1]])
        number: Any = 1
        for size in shape:
            number = self._function(operator.mul, number, self._size(size))
        return number

    def _size(self, size: Any) -> Any:
        """A size as a number, or as a node that holds it."""
        number = torch_private.static_size(size)
        if number is not None:
            return number
        for node, value in (*self._hidden_values(), *self._input_values()):
            for dim, each in enumerate(value.shape):
                if same(each, size):
                    return self._function(aten.sym_size.int, node, dim)
        parts = torch_private.size_parts(size)
        if parts is None:
            raise _Late(f"a size that no value at hand has ({size})")
        function, terms = parts
        result = self._size(terms[0])
        for term in terms[1:]:
            result = self._function(function, result, self._size(term))
        return result

    def _hidden_values(self) -> list[tuple[fx.Node, Tensor]]:
        found = []
        for projection in self.region.seeds:
            value = example(projection.hidden)
            assert value is not None
            found.append((projection.hidden, value))
        return found

    def _input_values(self) -> list[tuple[fx.Node, Tensor]]:
        found = []
        for node in self.traced.inputs[len(self.region.seeds) :]:
            value = example(node)
            if value is not None:
                found.append((node, value))
        return found

    # -------------------------------------------------------------- values per row, back

    def _restore(self, node: fx.Node, value: Value) -> fx.Node:
        """``[N, other dimensions]`` in the shape that the user's code gave it."""
        rows = [dim for dim, label in enumerate(value.labels) if label == "r"]
        rest = value.rest
        if len(rows) != 1:
            sizes = [value.shape[dim] for dim in rows]
            known = [self._try_size(size) for size in sizes]
            missing = [i for i, each in enumerate(known) if each is None]
            if len(missing) > 1:
                raise Declined("the rows of a value have sizes that cannot be named")
            shape = [-1 if each is None else each for each in known]
            inner = [self._size(value.shape[dim]) for dim in rest]
            if not missing and not all(isinstance(each, int) for each in shape):
                shape[0] = -1 if not _may_be_empty(sizes[1:]) else shape[0]
            node = self._function(aten.reshape.default, node, shape + inner)
        order = rows + rest
        if order != sorted(order):
            node = self._function(
                aten.permute.default, node, [order.index(dim) for dim in range(len(order))]
            )
        return node

    def _try_size(self, size: Any) -> Any:
        try:
            return self._size(size)
        except _Late:
            return None


def _may_be_empty(sizes: list[Any]) -> bool:
    return any(torch_private.static_size(size) == 0 for size in sizes)


class _Late(Declined):
    """A size that no value at hand has."""
