"""Following the logits: what lies between a projection and its loss, step by step.

Every step that only rearranges rows is moved in front of the projection, onto the hidden states:
``head(x)[:, :-1]`` is ``head(x[:, :-1])``. Steps on the values (bias, scale, cap, a wider dtype)
are gathered as options. A step that is neither ends the following with a reason. There is no list
of chains: any sequence of known steps is understood.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from greyhound_lowering.declined import Declined
from greyhound_lowering.projection import Projection, _arguments, example, known

RowOp = Callable[[fx.Graph, fx.Node], fx.Node]


@dataclasses.dataclass(frozen=True)
class Logits:
    """What is known of a value that descends from the logits.

    Attributes:
        projection: Where it comes from.
        node: The node that holds it.
        class_dim: Which of its dimensions is the vocabulary.
        row_ops: What to do with the hidden states so that their rows stand as this value's do.
        row_operands: Nodes that `row_ops` read beside the hidden states.
        bias: Node of a ``[V]`` vector added to the logits.
        bias_negative: Whether it is subtracted instead.
        bias_since: How many of `nodes` came before it was added: 0 for the projection's own.
        transforms: ``("scale", factor)`` and ``("tanh", 1.0)``, in order.
        class_stop: Number of leading classes kept by a slice, or None for all.
        log_softmax: Whether it holds log-probabilities.
        nodes: The nodes passed, first to last.
    """

    projection: Projection
    node: fx.Node
    class_dim: int
    row_ops: tuple[RowOp, ...] = ()
    row_operands: tuple[fx.Node, ...] = ()
    bias: fx.Node | None = None
    bias_negative: bool = False
    bias_since: int = 0
    transforms: tuple[tuple[str, float], ...] = ()
    class_stop: int | None = None
    log_softmax: bool = False
    nodes: tuple[fx.Node, ...] = ()

    @property
    def value(self) -> Tensor:
        """The fake tensor of `node`."""
        value = example(self.node)
        assert value is not None
        return value

    @property
    def classes_last(self) -> bool:
        """Whether the vocabulary is the last dimension."""
        return self.class_dim == self.value.dim() - 1


def start(projection: Projection) -> Logits:
    """The logits of a projection as they leave it."""
    row_ops: tuple[RowOp, ...] = ()
    if projection.row_order != tuple(sorted(projection.row_order)):
        order = (*projection.row_order, len(projection.row_order))
        row_ops = (_permute(order),)
    return Logits(
        projection,
        projection.node,
        projection.class_dim,
        row_ops=row_ops,
        bias=projection.bias,
        nodes=(projection.node,),
    )


# ------------------------------------------------------------------------------ names of steps


def _names(*pairs: tuple[str, tuple[Any, ...]]) -> dict[Any, str]:
    return {target: name for name, targets in pairs for target in (name, *targets)}


#: Targets of calls, functions and methods, by the name of the step.
STEP_NAMES: dict[Any, str] = _names(
    ("view", ()),
    ("reshape", (torch.reshape,)),
    ("flatten", (torch.flatten,)),
    ("unflatten", (torch.unflatten,)),
    ("squeeze", (torch.squeeze,)),
    ("unsqueeze", (torch.unsqueeze,)),
    ("permute", (torch.permute,)),
    ("transpose", (torch.transpose, torch.swapaxes, torch.swapdims, "swapaxes", "swapdims")),
    ("movedim", (torch.movedim, torch.moveaxis, "moveaxis")),
    ("t", (torch.t,)),
    ("getitem", (operator.getitem, "__getitem__")),
    ("contiguous", ()),
    ("clone", (torch.clone,)),
    ("float", ()),
    ("to", ("type", "type_as", "double")),
    ("add", (operator.add, torch.add, "__add__", "__radd__")),
    ("sub", (operator.sub, torch.sub, torch.subtract, "__sub__", "subtract")),
    ("mul", (operator.mul, torch.mul, torch.multiply, "__mul__", "__rmul__", "multiply")),
    (
        "div",
        (operator.truediv, torch.div, torch.true_divide, "__truediv__", "divide", "true_divide"),
    ),
    ("tanh", (torch.tanh, F.tanh)),
    ("log_softmax", (torch.log_softmax, F.log_softmax, torch.special.log_softmax)),
    ("cross_entropy", (F.cross_entropy,)),
    ("nll_loss", (F.nll_loss,)),
)  # fmt: skip

#: Steps that end the following: they turn the logits into a loss.
LOSSES = ("cross_entropy", "nll_loss")


def step_name(node: fx.Node) -> str:
    """Name of the step that a node is, or how the graph calls it."""
    if isinstance(node.target, (str,)) or callable(node.target):
        known = STEP_NAMES.get(node.target)
        if known is not None:
            return known
    return getattr(node.target, "__name__", str(node.target))


# -------------------------------------------------------------------------------------- steps

Step = Callable[[Logits, fx.Node], Logits]
STEPS: dict[str, Step] = {}


def _step(*names: str) -> Callable[[Step], Step]:
    def register(step: Step) -> Step:
        for name in names:
            STEPS[name] = step
        return step

    return register


def advance(logits: Logits, node: fx.Node) -> Logits:
    """The value after one more step.

    Raises:
        Declined: If the step is not one that leaves the rows independent and the values known.
    """
    name = step_name(node)
    step = STEPS.get(name)
    if step is None:
        raise Declined(f"the logits go into {name}")
    if logits.log_softmax and name not in _AFTER_LOG_SOFTMAX:
        raise Declined(f"log-probabilities go into {name}")
    if example(node) is None:
        raise Declined(f"{name} has no recorded shape")
    if node.kwargs.get("out") is not None:
        raise Declined(f"{name} writes to a tensor of the caller's")
    if name not in _BINARY and (not node.args or node.args[0] is not logits.node):
        # As somebody's shape, dtype or index, or by keyword, which nobody writes.
        raise Declined(f"the logits are not the first argument of {name}")
    after = step(logits, node)
    return dataclasses.replace(after, nodes=(*logits.nodes, node))


_BINARY = ("add", "sub", "mul", "div")


_AFTER_LOG_SOFTMAX = (
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose",
    "movedim", "t", "getitem", "contiguous", "clone", "float", "to",
)  # fmt: skip


def _with_row_op(logits: Logits, node: fx.Node, class_dim: int, row_op: RowOp | None) -> Logits:
    row_ops = logits.row_ops if row_op is None else (*logits.row_ops, row_op)
    return dataclasses.replace(logits, node=node, class_dim=class_dim, row_ops=row_ops)


def _method(name: str, *args: Any) -> RowOp:
    return lambda graph, hidden: graph.call_method(name, (hidden, *args))


def _permute(order: tuple[int, ...]) -> RowOp:
    return _method("permute", *order)


@_step("view", "reshape")
def _reshape(logits: Logits, node: fx.Node) -> Logits:
    sizes = list(node.args[1:])
    if "shape" in node.kwargs:
        sizes = [node.kwargs["shape"]]
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)):
        sizes = list(sizes[0])
    if len(sizes) == 1 and isinstance(sizes[0], torch.dtype):
        raise Declined("the logits' bits are reinterpreted in another dtype")
    before, after = logits.value, example(node)
    assert after is not None
    kept = after.dim() > 0 and logits.classes_last and _same(after.shape[-1], before.shape[-1])
    if not kept or len(sizes) != after.dim():
        raise Declined(f"{step_name(node)} mixes the vocabulary with other dimensions")
    # With the last dimension unchanged, a row-major reshape only regroups the rows.
    hidden_size = logits.projection.hidden_size

    def regroup(graph: fx.Graph, hidden: fx.Node) -> fx.Node:
        last: Any = hidden_size
        if not isinstance(last, int):
            last = graph.call_method("size", (hidden, -1))
        return graph.call_method("reshape", (hidden, *sizes[:-1], last))

    return _with_row_op(logits, node, after.dim() - 1, regroup)


@_step("flatten", "unflatten", "squeeze", "unsqueeze")
def _regroup(logits: Logits, node: fx.Node) -> Logits:
    before, after = logits.value, example(node)
    assert after is not None
    name = step_name(node)
    kept = after.dim() > 0 and logits.classes_last and _same(after.shape[-1], before.shape[-1])
    if not kept:
        raise Declined(f"{name} mixes the vocabulary with other dimensions")
    dims = _dimensions(node)
    if dims is None or (
        name != "unsqueeze" and any(dim % before.dim() == logits.class_dim for dim in dims)
    ):
        # It may keep V and still not be the same step on D, such as squeeze of a D of 1.
        raise Declined(f"{name} touches the vocabulary")
    # Negative dimensions count the same on the hidden states: both have one dimension after the
    # rows.
    args, kwargs = node.args[1:], dict(node.kwargs)
    return _with_row_op(
        logits,
        node,
        after.dim() - 1,
        lambda graph, hidden: graph.call_method(name, (hidden, *args), kwargs),
    )


def _dimensions(node: fx.Node) -> list[int] | None:
    """Dimensions that flatten, unflatten, squeeze or unsqueeze names, or None where unknown."""
    name = step_name(node)
    if name == "flatten":
        _, start, end = _arguments(node, "input", "start_dim", "end_dim")
        dims = [0 if start is None else start, -1 if end is None else end]
    elif name == "unflatten":
        dims = [_arguments(node, "input", "dim", "sizes")[1]]
    else:
        dims = list(node.args[1:]) or [node.kwargs.get("dim")]
        if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
            dims = list(dims[0])
    return dims if all(type(dim) is int for dim in dims) else None


@_step("permute", "transpose", "movedim", "t")
def _reorder(logits: Logits, node: fx.Node) -> Logits:
    dims = logits.value.dim()
    # The dimensions themselves, run through the same call, tell where each one went.
    probe = torch.empty(tuple(range(2, 2 + dims)), device="meta")
    args = [probe, *node.args[1:]]
    function: Any = getattr(torch.Tensor, step_name(node))
    try:
        moved = function(*args, **node.kwargs)
    except (TypeError, RuntimeError, IndexError) as error:
        raise Declined(f"{step_name(node)} with arguments that are not numbers") from error
    order = [int(size) - 2 for size in moved.shape]
    rows_before = [dim for dim in range(dims) if dim != logits.class_dim]
    row_order = [rows_before.index(dim) for dim in order if dim != logits.class_dim]
    row_op = None
    if row_order != sorted(row_order):
        row_op = _permute((*row_order, len(row_order)))
    return _with_row_op(logits, node, order.index(logits.class_dim), row_op)


@_step("getitem")
def _index(logits: Logits, node: fx.Node) -> Logits:
    index = node.args[1]
    if isinstance(index, list):
        raise Declined("an index by a list of rows")
    items = list(index) if isinstance(index, tuple) else [index]
    before, after = logits.value, example(node)
    assert after is not None
    if not logits.classes_last:
        raise Declined("an index into logits whose vocabulary is not the last dimension")
    if len(items) == 1 and isinstance(items[0], fx.Node):
        return _select_rows(logits, node, items[0])
    if any(
        isinstance(i, bool) or not isinstance(i, (slice, int, type(None), type(Ellipsis)))
        for i in items
    ):
        raise Declined("an index of a kind that is not followed")
    used = sum(1 for item in items if item is not None and item is not Ellipsis)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (before.dim() - used)
    else:
        items += [slice(None)] * (before.dim() - used)
    *rows, classes = items
    class_stop = logits.class_stop
    if not isinstance(classes, slice):
        raise Declined("an index into the vocabulary")
    if not _is_everything(classes, known(before.shape[-1])):
        if classes.start not in (None, 0) or classes.step not in (None, 1):
            raise Declined("a slice of the vocabulary that does not start at its beginning")
        stop = known(after.shape[-1])
        if not isinstance(stop, int) or logits.log_softmax or logits.transforms:
            raise Declined("a slice of transformed or symbolic logits")
        class_stop = stop
    row_op: RowOp | None = None
    if any(not (isinstance(item, slice) and _is_everything(item, None)) for item in rows):
        chosen = (*rows, slice(None))
        row_op = lambda graph, hidden: graph.call_function(operator.getitem, (hidden, chosen))  # noqa: E731
    result = _with_row_op(logits, node, after.dim() - 1, row_op)
    return dataclasses.replace(result, class_stop=class_stop)


def _select_rows(logits: Logits, node: fx.Node, index: fx.Node) -> Logits:
    """``logits[mask]`` or ``logits[rows]``: the same index takes the same hidden states."""
    chosen, before, after = example(index), logits.value, example(node)
    if chosen is None or after is None:
        raise Declined("an index of a kind that is not followed")
    spans = chosen.dim() if chosen.dtype == torch.bool else 1
    if spans >= before.dim():
        raise Declined("an index into the vocabulary")
    result = _with_row_op(
        logits,
        node,
        after.dim() - 1,
        lambda graph, hidden: graph.call_function(operator.getitem, (hidden, index)),
    )
    return dataclasses.replace(result, row_operands=(*logits.row_operands, index))


def _is_everything(item: slice, size: Any) -> bool:
    return (
        item.start in (None, 0)
        and item.step in (None, 1)
        and (item.stop is None or (size is not None and item.stop == size))
    )


def _same(left: Any, right: Any) -> bool:
    """Whether two sizes are the same number, without a guard on symbolic ones."""
    left, right = known(left), known(right)
    return isinstance(left, int) and isinstance(right, int) and left == right


@_step("contiguous", "clone")
def _layout(logits: Logits, node: fx.Node) -> Logits:
    return dataclasses.replace(logits, node=node)


@_step("float", "to")
def _convert(logits: Logits, node: fx.Node) -> Logits:
    before, after = logits.value, example(node)
    assert after is not None
    if after.device != before.device:
        raise Declined(f"the logits move from {before.device} to {after.device}")
    if after.dtype != before.dtype:
        wider = torch.promote_types(before.dtype, after.dtype) == after.dtype
        if not wider or after.dtype == torch.float64:
            raise Declined(f"the logits are cast from {before.dtype} to {after.dtype}")
    return dataclasses.replace(logits, node=node)


def _other_operand(logits: Logits, node: fx.Node) -> tuple[Any, bool]:
    """The operand that is not the logits, and whether the logits come first."""
    left, right = _arguments(node, "input", "other")[:2]
    if len(node.args) > 2 or set(node.kwargs) - {"input", "other"}:
        raise Declined(f"{step_name(node)} with further arguments")
    return (right, True) if left is logits.node else (left, False)


@_step("add", "sub")
def _shift(logits: Logits, node: fx.Node) -> Logits:
    other, first = _other_operand(logits, node)
    vector, before, after = example(other), logits.value, example(node)
    assert after is not None
    name = step_name(node)
    if vector is None or vector.dim() != 1 or not _same(vector.shape[0], before.shape[-1]):
        raise Declined(f"{name} of something that is not a vector over the vocabulary")
    if not logits.classes_last or before.dim() < 2:
        raise Declined(f"{name} of a vector over another dimension than the vocabulary")
    if name == "sub" and not first:
        raise Declined("the logits are subtracted from a vector")
    projected = example(logits.projection.node)
    assert projected is not None
    if logits.bias is not None or logits.transforms:
        raise Declined("a second vector is added to the logits")
    if not vector.dtype == before.dtype == after.dtype == projected.dtype:
        raise Declined("a vector of another dtype than the projection is added to the logits")
    return dataclasses.replace(
        logits,
        node=node,
        bias=other,
        bias_negative=name == "sub",
        bias_since=len(logits.nodes),
    )


@_step("mul", "div")
def _scale(logits: Logits, node: fx.Node) -> Logits:
    other, first = _other_operand(logits, node)
    if isinstance(other, bool) or not isinstance(other, (int, float)):
        what = "a tensor" if example(other) is not None else "a number that changes between calls"
        raise Declined(f"{step_name(node)} of the logits by {what}")
    factor = float(other)
    if step_name(node) == "div":
        if not first:
            raise Declined("a number is divided by the logits")
        factor = math.inf if factor == 0 else 1.0 / factor
    if not math.isfinite(factor):
        raise Declined(f"the logits are scaled by {factor}")
    return dataclasses.replace(
        logits, node=node, transforms=(*logits.transforms, ("scale", factor))
    )


@_step("tanh")
def _tanh(logits: Logits, node: fx.Node) -> Logits:
    return dataclasses.replace(logits, node=node, transforms=(*logits.transforms, ("tanh", 1.0)))


@_step("log_softmax")
def _log_softmax(logits: Logits, node: fx.Node) -> Logits:
    _, dim, *_ = _arguments(node, "input", "dim", "_stacklevel", "dtype")
    before, after = logits.value, example(node)
    assert after is not None
    if not isinstance(dim, int):
        raise Declined("log_softmax without a dimension")
    if dim % before.dim() != logits.class_dim:
        raise Declined("log_softmax over another dimension than the vocabulary")
    converted = _convert(logits, node)
    return dataclasses.replace(converted, log_softmax=True)


# ------------------------------------------------------------------------------- scale and cap


def scale_and_cap(logits: Logits) -> tuple[float, float | None]:
    """``logit_scale`` and ``softcap`` that say the same as the transforms passed.

    ``a * tanh(b * x)`` is ``a * tanh((a * b) * x / a)``: cap ``a``, scale ``a * b``.

    Raises:
        Declined: If they are more than one tanh between factors.
    """
    inner, outer, capped = 1.0, 1.0, False
    for kind, factor in logits.transforms:
        if kind == "tanh":
            if capped:
                raise Declined("tanh is applied to the logits twice")
            capped = True
        elif capped:
            outer *= factor
        else:
            inner *= factor
    if not capped:
        return inner, None
    if outer == 0.0:
        raise Declined("the logits are scaled by 0")
    # tanh is odd: a negative cap is a negative scale.
    return inner * outer, abs(outer)
