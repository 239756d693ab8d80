"""The proof that a traced region is row-wise, and its restatement for a chunk of rows.

The region arrives as a graph of ATen operators in the shapes of the user's code. Every dimension
of every value that depends on the logits gets a label:

``r``
    one of the row dimensions. In their order they always run through the rows of the hidden states,
    so flattened they are the rows of a chunk.
``c``
    any other dimension: the vocabulary, codebooks, the k of a topk.
``1``
    a dimension of size one.

An operator keeps the rows apart if it treats all its ``r`` dimensions alike and touches only the
others; for each such operator a rule gives the labels of the result and the call that does the
same on ``[C, *other dimensions]``. A reduction over rows is cut in two: what it does within a row
is done in the chunk, the rest on the ``[N]`` values that leave it. An operator without a rule ends
the proof: the region is left alone.

What does not depend on the logits stays outside and enters the chunk cut by rows or whole,
according to the dimensions it meets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from greyhound_lowering.declined import Declined
from greyhound_ops import torch_private

aten = torch.ops.aten

#: Operators that are pointwise but not tagged so, or that do nothing to values.
_ALSO_POINTWISE = {
    aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default,
    aten.lift_fresh_copy.default, aten.contiguous.default, aten.xlogy.Tensor,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, aten.where.ScalarSelf,
    aten.where.ScalarOther, aten.where.Scalar, aten.copy.default,
    aten.log_sigmoid_forward.default,
}  # fmt: skip

#: Keyword arguments that say how a result lies in memory, which a chunk decides anew.
_DROPPED = ("memory_format", "layout", "pin_memory", "non_blocking")

CREATION = {
    aten.full.default: 1, aten.full_like.default: 1, aten.zeros.default: 0, aten.ones.default: 1,
    aten.zeros_like.default: 0, aten.ones_like.default: 1,
}  # fmt: skip


def filled_with(node: Any) -> Any:
    """The number that an operator of `CREATION` fills its result with."""
    if node.target in (aten.full.default, aten.full_like.default):
        return node.args[1] if len(node.args) > 1 else None
    return CREATION[node.target]


@dataclasses.dataclass(frozen=True)
class AtRunTime:
    """A size or place that is a number only at run time; equal where the formula is.

    Attributes:
        formula: As text.
        value: The symbol.
    """

    formula: str
    value: Any = dataclasses.field(compare=False, repr=False)


def _place(argument: Any) -> Any:
    """A bound of a slice as `RowOp` keeps it."""
    value = argument.meta["val"] if isinstance(argument, fx.Node) else argument
    if isinstance(value, torch.SymInt):
        number = torch_private.static_size(value)
        return AtRunTime(str(value), value) if number is None else number
    return value


@dataclasses.dataclass(frozen=True)
class RowOp:
    """Something done to the rows of the logits, to be done to the hidden states instead.

    Attributes:
        name: ``"slice"`` or ``"select"``.
        dim: Which of the row dimensions.
        args: Start, stop and step, or the index; numbers, None or `AtRunTime`.
    """

    name: str
    dim: int
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of the body.

    Attributes:
        name: Its Python name in the body.
        labels: One of ``r``, ``c``, ``1`` per dimension of the value in the user's shape; ``x`` for
            a dimension of size one that lies where others have rows, and is left out.
        shape: Sizes in the user's shape.
        by_row: Whether it has a leading dimension of rows in the body.
        space: What was done to the rows so far.
        dtype: Of the value.
    """

    name: str
    labels: str
    shape: tuple[Any, ...]
    by_row: bool
    space: tuple[RowOp, ...]
    dtype: torch.dtype

    @property
    def rest(self) -> list[int]:
        """Dimensions that the body has beside the rows."""
        return [i for i, label in enumerate(self.labels) if label in "c1"]

    def inner(self, dim: int) -> int:
        """A dimension of the user's value as one of the body's."""
        return self.rest.index(dim) + int(self.by_row)


@dataclasses.dataclass(frozen=True)
class SideArgument:
    """A value from outside that the body reads.

    Attributes:
        node: In the traced graph.
        labels: As for `Value`.
        row_shape: Sizes of all row dimensions where it is used, for a value cut by rows.
        row_at: Which of its dimensions each row dimension is; None for those it is repeated along.
    """

    node: Any
    labels: str
    row_shape: tuple[Any, ...] = ()
    row_at: tuple[int | None, ...] = ()

    @property
    def by_row(self) -> bool:
        """Whether it is cut by rows."""
        return "r" in self.labels


@dataclasses.dataclass
class RowWise:
    """A region restated for a chunk of rows.

    Attributes:
        body: Source of ``def body(logits, row_args, whole_args)``.
        row_args: Values cut by rows, in order.
        whole_args: Values passed whole, in order.
        outputs: What the body returns: the traced node that each stands for, and its value. For a
            reduction over rows the value is what is left to reduce.
        partial: Nodes whose output is such a rest.
        space: What is done to the rows of the hidden states first.
        depends: For each name of the body, the names that it can pass gradients to.
    """

    body: str
    row_args: list[SideArgument]
    whole_args: list[SideArgument]
    outputs: list[tuple[fx.Node, Value]]
    partial: set[fx.Node]
    space: tuple[RowOp, ...]
    depends: dict[str, set[str]]

    def reaches(self, name: str) -> bool:
        """Whether a gradient of some output reaches a name."""
        pending = [v.name for _, v in self.outputs if v.dtype.is_floating_point]
        seen = set(pending)
        while pending:
            for other in self.depends.get(pending.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    pending.append(other)
        return name in seen


def same(one: Any, other: Any) -> bool:
    """Whether two sizes are equal in every run, without adding a guard."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return torch_private.statically_equal(one, other)


def is_one(size: Any) -> bool:
    """Whether a size is one in every run."""
    return same(size, 1)


def _elements(value: Any) -> int | None:
    """Number of elements at the sizes that were traced with."""
    if not isinstance(value, Tensor):
        return None
    sizes = [torch_private.size_hint(size) for size in value.shape]
    if any(size is None for size in sizes):
        return None
    return math.prod(size for size in sizes if size is not None)


class Prover:
    """Restates a traced region for a chunk of rows, or says why it cannot be.

    Args:
        graph: The region in ATen operators; placeholders are the logits and what comes from
            outside.
        seeds: Placeholders of the logits with the dimension of each that is the vocabulary.
        wide_elements: Values with more elements than this must not leave the chunk.
        full_elements: Values with at least this many that do not depend on the logits are made in
            the chunk where that can be.
    """

    def __init__(
        self,
        graph: fx.Graph,
        seeds: dict[fx.Node, int],
        wide_elements: float,
        full_elements: float,
    ) -> None:
        self.graph, self.seeds = graph, seeds
        self._wide_elements, self._full_elements = wide_elements, full_elements
        self._values: dict[fx.Node, Any] = {}
        self._lines: list[str] = []
        self._depends: dict[str, set[str]] = {}
        self._sides: dict[Any, Value] = {}
        self._row_sizes: dict[tuple[RowOp, ...], list[Any]] = {}
        self.row_args: list[SideArgument] = []
        self.whole_args: list[SideArgument] = []
        self.partial: dict[fx.Node, Value] = {}
        self._count = 0
        self.dependent = self._find_dependent()
        self.inside = self._find_inside()

    # ------------------------------------------------------------------------- which nodes

    def _find_dependent(self) -> set[fx.Node]:
        found = set(self.seeds)
        for node in self.graph.nodes:
            if node.op != "call_function" or not _holds_tensor(node):
                continue  # sizes are known from outside
            if node.target in CREATION:
                continue  # of a value it reads the size only
            if any(argument in found for argument in node.all_input_nodes):
                found.add(node)
        return found

    def _is_wide(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else [value]
        return any((_elements(each) or 0) > self._wide_elements for each in values)

    def is_wide(self, shape: Sequence[Any]) -> bool:
        """Whether a value of a shape is too large to leave the chunk."""
        sizes = [torch_private.size_hint(size) for size in shape]
        return math.prod(size or 0 for size in sizes) > self._wide_elements

    def _find_inside(self) -> set[fx.Node]:
        """Dependent nodes that are wide or read a wide value, and whatever lies between."""
        inside = {
            node
            for node in self.dependent
            if node.op == "call_function"
            and (
                self._is_wide(node)
                or any(self._is_wide(each) for each in node.all_input_nodes)
                or (
                    node.target is _GETITEM
                    and any(self._is_wide(each) for each in _of_tuple(node).all_input_nodes)
                )
            )
        }
        above: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            if node in inside or node in above:
                above.update(each for each in node.all_input_nodes if each in self.dependent)
        return inside | {node for node in above if node.op == "call_function"}

    # ------------------------------------------------------------------------------- proof

    def run(self) -> RowWise:
        """Restate the region.

        Raises:
            Declined: With the operator that mixes rows or is not known.
        """
        for node in self.graph.nodes:
            if node in self.seeds:
                index = list(self.seeds).index(node)
                value = node.meta["val"]
                labels = "".join(
                    "c" if dim == self.seeds[node] else "r" for dim in range(value.dim())
                )
                self._values[node] = Value(
                    f"logits[{index}]", labels, tuple(value.shape), True, (), value.dtype
                )
            elif node in self.inside:
                made = self._visit(node)
                if made is not None:
                    self._values[node] = made
            elif node in self.dependent and node.op == "call_function":
                self._take_in(node)
        outputs = self._find_outputs()
        spaces = {value.space for _, value in outputs}
        if len(spaces) > 1:
            raise Declined("the rows of the logits are read in two ways")
        space = spaces.pop() if spaces else ()
        self._check_spaces(space)
        returned = ", ".join(value.name for _, value in outputs)
        # On one line: Inductor quotes the arguments of a node in comments of the code it writes,
        # and a comment ends where its line does.
        body = "def body(logits, row_args, whole_args): " + "; ".join(
            [*self._lines, f"return [{returned}]"]
        )
        return RowWise(
            body,
            self.row_args,
            self.whole_args,
            outputs,
            set(self.partial),
            space,
            self._depends,
        )

    def _take_in(self, node: fx.Node) -> None:
        """Compute a value per row in the chunk as well, where that can be.

        What is left behind the op is then mostly a weighted sum, whose gradient can be made in the
        forward: the square of a log-sum-exp, the weight of a focal loss.
        """
        inputs = [each for each in node.all_input_nodes if each in self.dependent]
        if any(each not in self._values for each in inputs):
            return
        before = (
            len(self._lines), dict(self._depends), dict(self._sides), list(self.row_args),
            list(self.whole_args), dict(self.partial),
        )  # fmt: skip
        try:
            made = self._visit(node)
            values = made if isinstance(made, list) else [made]
            if made is None or all("r" in each.labels for each in values):
                if made is not None:
                    self._values[node] = made
                return
        except Declined:
            pass
        lines, self._depends, self._sides, self.row_args, self.whole_args, self.partial = before
        del self._lines[lines:]

    def _find_outputs(self) -> list[tuple[fx.Node, Value]]:
        outputs: list[tuple[fx.Node, Value]] = []
        for node in self.graph.nodes:
            if node in self.partial:
                outputs.append((node, self.partial[node]))
                continue
            value = self._values.get(node)
            if not isinstance(value, Value) or node in self.seeds:
                continue
            left = any(user.op == "output" for user in node.users)
            if not left and all(
                user in self._values
                or user in self.partial
                or not _holds_tensor(user)
                or user.target in CREATION  # reads the size only
                for user in node.users
                if user.op != "output"
            ):
                continue
            if self._is_wide(node):
                raise Declined(
                    f"a value as large as the logits leaves the loss ({_short(node.target)})"
                )
            outputs.append((node, value))
        return outputs

    def _check_spaces(self, space: tuple[RowOp, ...]) -> None:
        """Row arguments that were met before a slice of the rows would have to be sliced too."""
        if not space:
            return
        for side, value in self._sides.items():
            if value.by_row and value.space != space:
                raise Declined(f"{side[0]} is combined with the logits before their rows are cut")

    def _visit(self, node: Any) -> Any:
        target: Any = node.target
        if target is _GETITEM:
            made = self._values.get(node.args[0])
            if made is None:
                raise Declined("a part of a value that mixes rows")
            return made[node.args[1]]
        rule = _RULES.get(target)
        if rule is not None:
            return rule(self, node)
        if target in _ALSO_POINTWISE or (
            isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
        ):
            if torch.Tag.nondeterministic_seeded in target.tags:
                raise Declined(f"{_short(target)} draws random numbers")
            return self.pointwise(node)
        raise Declined(f"{_short(target)} is not known to keep the rows apart")

    # --------------------------------------------------------------------------- emission

    def emit(self, call: str, reads: Iterable[str], *, stops: bool = False) -> str:
        """Add a line to the body and return the name of its result."""
        name = f"v{self._count}"
        self._count += 1
        self._lines.append(f"{name} = {call}")
        self._depends[name] = set() if stops else set(reads)
        return name

    def call(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Add a call of an operator; arguments that are values are given as `_Name`."""
        reads: list[str] = []
        shown = [_show(each, reads) for each in args]
        shown += [f"{key}={_show(each, reads)}" for key, each in kwargs.items()]
        if isinstance(target, torch._ops.OpOverload):
            path = f"torch.ops.{target.namespace}.{target._opname}.{target._overloadname}"
        else:
            raise Declined(f"{_short(target)} is no operator")
        stops = target is aten.detach.default
        return self.emit(f"{path}({', '.join(shown)})", reads, stops=stops)

    def operand(self, node: fx.Node, labels: str, shape: Sequence[Any]) -> Value:
        """A tensor argument; one from outside takes the labels of the dimensions it meets."""
        if node in self._values:
            value = self._values[node]
            if not isinstance(value, Value):
                raise Declined("a tuple where a tensor is expected")
            return value
        if node in self.dependent:
            raise Declined(f"{_short(node.target)} mixes rows, and its result meets the logits")
        if self._is_made_inside(node):
            return self._make_inside(node, labels, shape)
        return self.side(node, labels, shape)

    def _is_made_inside(self, node: Any) -> bool:
        elements = _elements(node.meta.get("val"))
        target: Any = node.target
        if node.op != "call_function" or elements is None:
            return False
        if target in CREATION and any(each in self.dependent for each in node.all_input_nodes):
            return True
        if elements < self._full_elements:
            return False
        if _is_marked(node):
            return True
        return target in CREATION or target is aten.expand.default or _is_plain_pointwise(target)

    def _make_inside(self, node: Any, labels: str, shape: Sequence[Any]) -> Value:
        """A wide value that does not depend on the logits, made for each chunk."""
        value: Tensor = node.meta["val"]
        target: Any = node.target
        own_labels, own_shape = _aligned(value, labels, shape)
        if target in CREATION:
            number = filled_with(node)
            if not isinstance(number, (bool, int, float)):
                return self.side(node, labels, shape)
            # Not of no dimensions, or its dtype would count for less.
            name = self.emit(
                f"torch.ops.aten.full.default([1], {_constant(number)}, dtype={value.dtype}, "
                f"device={value.device!r})",
                (),
            )
            return Value(name, "x" * value.dim(), own_shape, False, (), value.dtype)
        if target is aten.expand.default:
            return self.operand(node.args[0], own_labels, own_shape)
        if target is aten.scatter.value:
            return self._mark_inside(node, own_labels, own_shape)
        made: Value = self._pointwise(node, own_labels, own_shape)
        return made

    def _mark_inside(self, node: Any, labels: str, shape: tuple[Any, ...]) -> Value:
        """A number at one class of each row and another elsewhere, see `_is_marked`.

        NaN where there is no such class, since an error would have to wait for the device.
        """
        base, dim, index, number = node.args
        made: Tensor = node.meta["val"]
        dim %= made.dim()
        if labels[dim] != "c":
            raise Declined("scatter works along the rows")
        classes = _static(made.shape[dim])
        at = self.operand(index, labels, shape)
        if not at.by_row:
            return self.side(node, labels, shape)
        own = "".join("1" if i == dim else each for i, each in enumerate(labels))
        at_name = self.align(at, own)
        counted = self.emit(f"torch.ops.aten.arange.default({classes}, device={made.device!r})", ())
        behind = sum(each != "r" for each in labels[dim + 1 :])
        for _ in range(behind):
            counted = self.call(aten.unsqueeze.default, [_Name(counted), -1], {})
        hit = self.call(aten.eq.Tensor, [_Name(at_name), _Name(counted)], {})
        fill, mark, no_class = (
            self.emit(
                f"torch.ops.aten.full.default([1], {_constant(each)}, dtype={made.dtype}, "
                f"device={made.device!r})",
                (),
            )
            for each in (filled_with(base), number, math.nan)
        )
        name = self.call(aten.where.self, [_Name(hit), _Name(mark), _Name(fill)], {})
        low = self.call(aten.lt.Scalar, [_Name(at_name), 0], {})
        high = self.call(aten.ge.Scalar, [_Name(at_name), classes], {})
        wrong = self.call(aten.logical_or.default, [_Name(low), _Name(high)], {})
        name = self.call(aten.where.self, [_Name(wrong), _Name(no_class), _Name(name)], {})
        return Value(name, labels, shape, True, self._space_now, made.dtype)

    def side(self, node: fx.Node, labels: str, shape: Sequence[Any]) -> Value:
        """A value from outside as an argument of the body."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            # A size in the place of a number.
            return self._scalar(node)
        offset = len(labels) - value.dim()
        own = ""
        for dim, size in enumerate(value.shape):
            at = offset + dim
            if labels[at] == "r":
                if is_one(size):
                    own += "x"
                elif agree(size, shape[at]):
                    own += "r"
                else:
                    raise Declined("a value of another number of rows meets the logits")
            else:
                own += "1" if is_one(size) else "c"
        rows = [at for at, label in enumerate(labels) if label == "r"]
        row_at = tuple(
            at - offset if at >= offset and own[at - offset] == "r" else None for at in rows
        )
        argument = SideArgument(node, own)
        if "r" in own:
            argument = SideArgument(node, own, tuple(shape[at] for at in rows), row_at)
        key = (node, own, row_at if "r" in own else ())
        if key not in self._sides:
            arguments = self.row_args if argument.by_row else self.whole_args
            kind = "row_args" if argument.by_row else "whole_args"
            name = f"{kind}[{len(arguments)}]"
            arguments.append(argument)
            self._sides[key] = Value(
                name, own, tuple(value.shape), argument.by_row, self._space_now, value.dtype
            )
        return self._sides[key]

    _space_now: tuple[RowOp, ...] = ()

    def _scalar(self, node: Any) -> Value:
        key = (node, "scalar", ())
        if key not in self._sides:
            self.whole_args.append(SideArgument(node, ""))
            self._sides[key] = Value(
                f"whole_args[{len(self.whole_args) - 1}]", "", (), False, (), torch.float64
            )
        return self._sides[key]

    def align(self, value: Value, labels: str) -> str:
        """A value with exactly the other dimensions of a result, of size one where it has none."""
        offset = len(labels) - len(value.labels)
        own = [offset + dim for dim in value.rest]
        wanted = [at for at, label in enumerate(labels) if label != "r"]
        if any(at not in wanted for at in own):
            raise Declined("a class dimension meets the rows")
        name, lead = value.name, int(value.by_row)
        first = wanted.index(own[0]) if own else len(wanted)
        for position, at in enumerate(wanted):
            if at in own or (not value.by_row and position < first):
                continue
            name = self.call(
                aten.unsqueeze.default,
                [_Name(name), lead + position - (0 if value.by_row else first)],
                {},
            )
        return name

    def merge(self, values: Sequence[Value], shape: Sequence[Any]) -> str:
        """Labels of what values that depend on the logits broadcast to.

        Raises:
            Declined: If rows of one meet other rows of another.
        """
        labels = ["1" if is_one(size) else "?" for size in shape]
        rows: set[tuple[int, ...]] = set()
        spaces = set()
        for value in values:
            offset = len(shape) - len(value.labels)
            if value.by_row:
                rows.add(tuple(offset + i for i, each in enumerate(value.labels) if each == "r"))
                spaces.add(value.space)
            for dim, label in enumerate(value.labels):
                if label == "r":
                    if not same(shape[offset + dim], value.shape[dim]):
                        raise Declined("the rows of the logits are repeated")
                    labels[offset + dim] = "r"
                elif label == "c" and labels[offset + dim] != "r":
                    labels[offset + dim] = "c"
        if len(rows) > 1:
            raise Declined("rows are combined with other rows")
        if len(spaces) > 1:
            raise Declined("the rows of the logits are read in two ways")
        self._space_now = spaces.pop() if spaces else ()
        return "".join("c" if label == "?" else label for label in labels)

    def result(
        self, node: fx.Node, name: str, labels: str, space: tuple[RowOp, ...], value: Any = None
    ) -> Value:
        """The value of a node."""
        value = node.meta["val"] if value is None else value
        return Value(name, labels, tuple(value.shape), True, space, value.dtype)

    # -------------------------------------------------------------------------- pointwise

    def pointwise(self, node: fx.Node) -> Any:
        """An operator that treats every element alike."""
        value = node.meta["val"]
        first = value[0] if isinstance(value, (tuple, list)) else value
        values = [self._values[each] for each in node.all_input_nodes if each in self._values]
        values = [each for each in values if isinstance(each, Value)]
        if not values:
            raise Declined(f"{_short(node.target)} reads a value that mixes rows")
        labels = self.merge(values, first.shape)
        return self._pointwise(node, labels, tuple(first.shape))

    def _pointwise(self, node: Any, labels: str, shape: tuple[Any, ...]) -> Any:
        by_row = False

        def convert(argument: Any) -> Any:
            nonlocal by_row
            if isinstance(argument, fx.Node):
                value = self.operand(argument, labels, shape)
                by_row = by_row or value.by_row
                return _Name(self.align(value, labels))
            if isinstance(argument, (tuple, list)):
                return [convert(each) for each in argument]
            return argument

        args = [convert(each) for each in node.args]
        kwargs = {
            key: convert(each)
            for key, each in node.kwargs.items()
            if key not in _DROPPED and not (key == "device" and each is not None)
        }
        device = node.kwargs.get("device")
        value = node.meta["val"]
        if device is not None and torch.device(device) != value.device:
            raise Declined("a value is copied to another device")
        name = self.call(node.target, args, kwargs)
        if isinstance(value, (tuple, list)):
            made = []
            for index, each in enumerate(value):
                part = self.emit(f"{name}[{index}]", [name])
                made.append(Value(part, labels, shape, True, self._space_now, each.dtype))
            return made
        own = labels if by_row else "".join("x" if each == "r" else each for each in labels)
        return Value(name, own, shape, by_row, self._space_now, value.dtype)

    def cut(self, value: Value, op: RowOp, labels: str, shape: Sequence[Any]) -> tuple[RowOp, ...]:
        """What was done to the rows once some of them are taken, too.

        It is done to the hidden states, so the rows must lie in the value as they lie there.
        """
        sizes = _row_sizes(value.labels, value.shape)
        if not value.space:
            seed = next(iter(self.seeds))
            self._row_sizes[()] = _row_sizes(self._values[seed].labels, self._values[seed].shape)
        known = self._row_sizes[value.space]
        if len(sizes) != len(known) or not all(map(same, sizes, known)):
            raise Declined("the rows of the logits are cut in a shape of their own")
        space = (*value.space, op)
        self._row_sizes[space] = _row_sizes(labels, shape)
        return space

    def reads_logits(self, name: str) -> bool:
        """Whether a gradient of a value of the body reaches a tensor from outside it."""
        pending, seen = [name], {name}
        while pending:
            for other in self._depends.get(pending.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    pending.append(other)
        return any(each not in self._depends for each in seen)

    def source(self, node: Any, position: int = 0) -> Value:
        """The first argument of an operator, which depends on the logits."""
        value = self._values.get(node.args[position])
        if not isinstance(value, Value):
            raise Declined(f"{_short(node.target)} reads a value that mixes rows")
        self._space_now = value.space
        return value


class _Name(str):
    """A name of the body among the arguments of a call."""

    __slots__ = ()


def _row_sizes(labels: str, shape: Sequence[Any]) -> list[Any]:
    return [size for size, label in zip(shape, labels, strict=True) if label == "r"]


def _getitem() -> Any:
    import operator

    return operator.getitem


_GETITEM = _getitem()


def _of_tuple(node: Any) -> fx.Node:
    """The node whose part a getitem takes."""
    whole: fx.Node = node.args[0]
    return whole


def _holds_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return any(isinstance(each, Tensor) for each in value)
    return isinstance(value, Tensor)


def _is_marked(node: Any) -> bool:
    """Whether a value is a constant with another number at one class of each row."""
    if node.target is not aten.scatter.value or len(node.args) != 4:
        return False
    base, dim, index, number = node.args
    made, at = node.meta["val"], index.meta["val"]
    if base.target not in CREATION or not isinstance(filled_with(base), (bool, int, float)):
        return False
    if not isinstance(number, (bool, int, float)) or not made.is_floating_point():
        return False
    dim %= made.dim()
    return at.dim() == made.dim() and all(
        is_one(size) if i == dim else same(size, made.shape[i]) for i, size in enumerate(at.shape)
    )


def _is_plain_pointwise(target: Any) -> bool:
    if target in _ALSO_POINTWISE:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    tags = target.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def agree(size: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Whether two numbers of rows are equal, or were when the graph was traced.

    Hidden states and targets of one batch may come with symbols of their own, after a graph break
    for one. The op asks whether its arguments have as many rows as its logits, which makes their
    being equal a guard of the graph, as `torch.nn.functional.cross_entropy` would.
    """
    if same(size, other):
        return True
    hint = torch_private.size_hint(size)
    return hint is not None and hint == torch_private.size_hint(other)


def _aligned(value: Tensor, labels: str, shape: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """The labels that a value of fewer dimensions takes from those it meets."""
    own = labels[len(labels) - value.dim() :]
    if any(
        label == "r" and not is_one(size) and not agree(size, other)
        for label, size, other in zip(
            own, value.shape, shape[len(labels) - value.dim() :], strict=True
        )
    ):
        raise Declined("a value of another number of rows meets the logits")
    return own, tuple(value.shape)


def _constant(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return repr(value)


def _show(argument: Any, reads: list[str]) -> str:
    if isinstance(argument, _Name):
        reads.append(str(argument))
        return str(argument)
    if isinstance(argument, (tuple, list)):
        return "[" + ", ".join(_show(each, reads) for each in argument) + "]"
    if argument is None or isinstance(argument, (bool, int, float, str)):
        return _constant(argument)
    if isinstance(argument, torch.dtype):
        return str(argument)
    if isinstance(argument, torch.device):
        return repr(argument)
    raise Declined(f"an argument of type {type(argument).__name__}")


def _short(target: Any) -> str:
    return str(target).removeprefix("aten.").removesuffix(".default")


# --------------------------------------------------------------------------------------- rules

_Rule = Callable[[Prover, Any], Any]
_RULES: dict[Any, _Rule] = {}


def _rule(*targets: str) -> Callable[[_Rule], _Rule]:
    """Register a rule for operators, by name since versions of torch differ in which there are."""

    def register(rule: _Rule) -> _Rule:
        for target in targets:
            name, overload = target.split(".")
            packet = getattr(aten, name, None)
            if packet is not None and overload in packet.overloads():
                _RULES[getattr(packet, overload)] = rule
        return rule

    return register


def _argument(node: Any, name: str) -> Any:
    """An argument of a call by its name in the schema, with its default."""
    schema = node.target._schema
    for position, argument in enumerate(schema.arguments):
        if argument.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            if position < len(node.args):
                return node.args[position]
            return argument.default_value
    return None


def _dims(node: Any, value: Value, name: str = "dim") -> list[int]:
    """Dimensions that a reduction names; all where it names none."""
    dims = _argument(node, name)
    rank = len(value.labels)
    if dims is None or dims == []:
        return list(range(rank))
    dims = dims if isinstance(dims, (tuple, list)) else [dims]
    return [dim % rank if rank else 0 for dim in dims]


def _class_dim(node: Any, value: Value, name: str = "dim") -> int:
    """The one dimension an operator works along, which must not be one of rows."""
    dim = _argument(node, name)
    if not isinstance(dim, int):
        raise Declined(f"{_short(node.target)} names no dimension")
    dim %= len(value.labels)
    if value.labels[dim] == "r":
        raise Declined(f"{_short(node.target)} works along the rows")
    return dim


def _reduced(labels: str, dims: Sequence[int], keepdim: bool) -> str:
    return "".join(
        "1" if dim in dims else label
        for dim, label in enumerate(labels)
        if keepdim or dim not in dims
    )


#: Reductions that may be done within rows first and over rows after.
_IN_TWO = {"sum", "mean", "amax", "amin", "any", "all"}


@_rule(
    "sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "amax.default", "amin.default",
    "any.default", "any.dim", "any.dims", "all.default", "all.dim", "all.dims", "max.default",
    "min.default",
)  # fmt: skip
def _reduction(prover: Prover, node: Any) -> Value | None:
    value = prover.source(node)
    name = node.target._schema.name.split("::")[1]
    dims = _dims(node, value)
    keepdim = bool(_argument(node, "keepdim"))
    over_rows = any(value.labels[dim] == "r" for dim in dims)
    operator_name = {"max": "amax", "min": "amin"}.get(name, name)
    if name in ("max", "min") and value.labels and not over_rows:
        over_rows = True  # no dimension is named: a scalar
    inner = [value.inner(dim) for dim in dims if value.labels[dim] != "r"]
    if over_rows and operator_name not in _IN_TWO:
        raise Declined(f"{_short(node.target)} works along the rows")
    dtype = _argument(node, "dtype") if name in ("sum", "mean") else None
    if (
        over_rows
        and inner
        and operator_name in ("amax", "amin")
        and prover.reads_logits(value.name)
    ):
        # Equal largest values share the gradient evenly, wherever they are.
        raise Declined(f"{_short(node.target)} has a gradient along rows and classes")
    keep = keepdim or over_rows
    made: Tensor = node.meta["val"]
    if not inner:
        partial = value.name
        if dtype is not None:
            partial = prover.call(aten._to_copy.default, [_Name(value.name)], {"dtype": dtype})
        partial_dtype = value.dtype if dtype is None else dtype
    else:
        kwargs: dict[str, Any] = {}
        partial_dtype = made.dtype
        if dtype is not None:
            kwargs["dtype"] = dtype
        elif over_rows and name in ("sum", "mean") and made.dtype in (torch.bfloat16, torch.half):
            # Rounded once at the end, not once a row.
            partial_dtype = kwargs["dtype"] = torch.float32
        target = {
            "sum": aten.sum.dim_IntList, "mean": aten.mean.dim, "amax": aten.amax.default,
            "amin": aten.amin.default, "any": aten.any.dims, "all": aten.all.dims,
        }[operator_name]  # fmt: skip
        partial = prover.call(target, [_Name(value.name), inner, keep], kwargs)
    if not over_rows:
        return prover.result(node, partial, _reduced(value.labels, dims, keepdim), value.space)
    classes = [dim for dim in dims if value.labels[dim] != "r"]
    shape = tuple(1 if dim in classes else size for dim, size in enumerate(value.shape))
    left = _reduced(value.labels, classes, True)
    if "c" in left and prover.is_wide(shape):
        raise Declined(f"{_short(node.target)} works along the rows of a value as large as they")
    prover.partial[node] = Value(partial, left, shape, True, value.space, partial_dtype)
    return None


@_rule(
    "logsumexp.default", "prod.dim_int", "argmax.default", "argmin.default", "max.dim", "min.dim",
    "var.correction", "std.correction", "var_mean.correction", "linalg_vector_norm.default",
    "norm.ScalarOpt_dim", "nansum.default", "median.dim", "mode.default",
)  # fmt: skip
def _class_reduction(prover: Prover, node: Any) -> Any:
    value = prover.source(node)
    dims = _dims(node, value)
    if _argument(node, "dim") is None or any(value.labels[dim] == "r" for dim in dims):
        raise Declined(f"{_short(node.target)} works along the rows")
    keepdim = bool(_argument(node, "keepdim"))
    labels = _reduced(value.labels, dims, keepdim)
    schema = node.target._schema
    given: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema.arguments:
        current: Any = _argument(node, argument.name)
        if argument.name == schema.arguments[0].name:
            current = _Name(value.name)
        elif argument.name == "dim":
            inner = [value.inner(dim) for dim in dims]
            current = inner if isinstance(_argument(node, "dim"), (tuple, list)) else inner[0]
        if argument.kwarg_only:
            kwargs[argument.name] = current
        else:
            given.append(current)
    name = prover.call(node.target, given, kwargs)
    made = node.meta["val"]
    if isinstance(made, (tuple, list)):
        return [
            prover.result(node, prover.emit(f"{name}[{index}]", [name]), labels, value.space, each)
            for index, each in enumerate(made)
        ]
    return prover.result(node, name, labels, value.space)


@_rule(
    "_softmax.default", "_log_softmax.default", "cumsum.default", "cumprod.default",
    "logcumsumexp.default", "flip.default", "softmax.int", "log_softmax.int",
    "_safe_softmax.default",
)  # fmt: skip
def _along_classes(prover: Prover, node: Any) -> Value:
    value = prover.source(node)
    if node.target is aten.flip.default:
        dims = _dims(node, value, "dims")
        if any(value.labels[dim] == "r" for dim in dims):
            raise Declined("flip works along the rows")
        inner: Any = [value.inner(dim) for dim in dims]
    else:
        inner = value.inner(_class_dim(node, value))
    args = [_Name(value.name), inner, *node.args[2:]]
    name = prover.call(node.target, args, dict(node.kwargs))
    return prover.result(node, name, value.labels, value.space)


@_rule("topk.default", "sort.default", "sort.stable")
def _ordered(prover: Prover, node: Any) -> Any:
    value = prover.source(node)
    dim = _class_dim(node, value)
    given, kwargs = [], {}
    for argument in node.target._schema.arguments:
        current: Any = _argument(node, argument.name)
        if argument.name == "self":
            current = _Name(value.name)
        elif argument.name == "dim":
            current = value.inner(dim)
        if argument.kwarg_only:
            kwargs[argument.name] = current
        else:
            given.append(current)
    name = prover.call(node.target, given, kwargs)
    return [
        prover.result(
            node, prover.emit(f"{name}[{index}]", [name]), value.labels, value.space, each
        )
        for index, each in enumerate(node.meta["val"])
    ]


@_rule("gather.default", "scatter.value", "scatter.src", "scatter_add.default")
def _gather(prover: Prover, node: Any) -> Value:
    index = node.args[2]
    shape = index.meta["val"].shape
    known = [each for each in (node.args[0], index) if each in prover._values]
    if not known:
        raise Declined(f"{_short(node.target)} reads a value that mixes rows")
    guide = prover._values[known[0]]
    prover._space_now = guide.space
    # The labels of the logits' own dimensions; along `dim` the index has a size of its own.
    dim = _class_dim(node, guide)
    source = prover.operand(node.args[0], guide.labels, guide.shape)
    at = prover.operand(index, guide.labels, guide.shape)
    if len(source.labels) != len(at.labels) or not (source.by_row and at.by_row):
        raise Declined(f"{_short(node.target)} has an index of another form")
    for i, (one, other) in enumerate(zip(node.args[0].meta["val"].shape, shape, strict=True)):
        if i != dim and not agree(one, other):
            raise Declined(f"{_short(node.target)} has an index of another number of rows")
    args: list[Any] = [_Name(source.name), source.inner(dim), _Name(at.name)]
    if node.target in (aten.scatter.src, aten.scatter_add.default):
        src = prover.operand(node.args[3], guide.labels, shape)
        if not src.by_row or len(src.labels) != len(at.labels):
            raise Declined("scatter has a source of another form")
        args.append(_Name(src.name))
    elif node.target is aten.scatter.value:
        args.append(node.args[3])
    name = prover.call(node.target, args, {})
    made = node.meta["val"]
    labels = "".join(
        label if i != dim else ("1" if is_one(made.shape[i]) else "c")
        for i, label in enumerate(source.labels)
    )
    return prover.result(node, name, labels, source.space)


def _is_arange(node: Any, size: Any) -> Any:
    """Whether a node is 0, 1, .. up to a size."""
    if not isinstance(node, fx.Node):
        return False
    args = tuple(each.meta["val"] if isinstance(each, fx.Node) else each for each in node.args)
    if node.target is aten.arange.default and len(args) == 1:
        return same(args[0], size)
    if node.target is aten.arange.start:
        return args[0] == 0 and same(args[1], size)
    if node.target is aten.arange.start_step:
        return args[0] == 0 and same(args[1], size) and (len(args) < 3 or args[2] == 1)
    if str(node.target) == "prims.iota.default":
        return (
            same(args[0], size)
            and node.kwargs.get("start", 0) == 0
            and node.kwargs.get("step", 1) == 1
        )
    return False


#: Operators that show the same numbers in the same order.
_SHOWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.alias.default,
    aten.detach.default, aten.clone.default, aten.lift_fresh_copy.default,
}  # fmt: skip


def _counts_along(node: Any, size: Any, behind: int) -> bool:
    """Whether an index counts 0, 1, .. size along the dimension that has some more behind it."""
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
        return False
    shape = node.meta["val"].shape
    at = len(shape) - 1 - behind
    if at < 0 or not all(is_one(each) for dim, each in enumerate(shape) if dim != at):
        return False
    each: Any = node
    while each.target in _SHOWS or (
        each.target is aten.slice.Tensor
        and _argument(each, "step") in (None, 1)
        and len(each.args[0].meta["val"].shape) == len(each.meta["val"].shape)
        and all(map(same, each.args[0].meta["val"].shape, each.meta["val"].shape))
    ):
        each = each.args[0]
    return same(shape[at], size) and _is_arange(each, size)


@_rule("index.Tensor")
def _index(prover: Prover, node: Any) -> Value:
    value = prover.source(node)
    indices = list(node.args[1])
    indices += [None] * (len(value.labels) - len(indices))
    rows = len(value.labels) - 1
    if value.labels == "r" * rows + "c" and all(
        _counts_along(each, value.shape[dim], rows - 1 - dim)
        for dim, each in enumerate(indices[:rows])
    ):
        return _one_of_each_row(prover, node, value, indices[rows])
    given = [dim for dim, each in enumerate(indices) if each is not None]
    if len(given) == 1 and value.labels[given[0]] == "c":
        (dim,) = given
        chosen = indices[dim]
        subset = chosen.meta["val"]
        if (
            subset.dim() == 1
            and subset.dtype in (torch.int64, torch.int32)
            and chosen not in (prover.dependent)
        ):
            whole = prover.side(chosen, "c", subset.shape)
            inner: list[Any] = [None] * value.inner(dim) + [_Name(whole.name)]
            name = prover.call(aten.index.Tensor, [_Name(value.name), inner], {})
            return prover.result(node, name, value.labels, value.space)
    raise Declined("rows are chosen by an index")


def _one_of_each_row(prover: Prover, node: Any, value: Value, chosen: Any) -> Value:
    """``x[arange(N), y]``, where a negative ``y`` counts from the end."""
    rows = len(value.labels) - 1
    made = node.meta["val"]
    if not isinstance(chosen, fx.Node) or len(made.shape) != rows:
        raise Declined("rows are indexed with something other than one class each")
    picked = prover.operand(chosen, "r" * rows, value.shape[:rows])
    if not picked.by_row or picked.rest or picked.space != value.space:
        raise Declined("rows are indexed with something other than one class each")
    name = picked.name
    if picked.dtype == torch.int32:
        name = prover.call(aten._to_copy.default, [_Name(name)], {"dtype": torch.int64})
    elif picked.dtype != torch.int64:
        raise Declined(f"rows are chosen by an index of {picked.dtype}")
    at = prover.call(aten.unsqueeze.default, [_Name(name), 1], {})
    behind = prover.call(aten.lt.Scalar, [_Name(at), 0], {})
    wrapped = prover.call(aten.add.Scalar, [_Name(at), _static(value.shape[rows])], {})
    at = prover.call(aten.where.self, [_Name(behind), _Name(wrapped), _Name(at)], {})
    name = prover.call(aten.gather.default, [_Name(value.name), 1, _Name(at)], {})
    name = prover.call(aten.squeeze.dim, [_Name(name), 1], {})
    return prover.result(node, name, "r" * rows, value.space)


@_rule("index_select.default")
def _index_select(prover: Prover, node: Any) -> Value:
    value = prover.source(node)
    dim = _class_dim(node, value)
    chosen = node.args[2]
    if chosen in prover.dependent:
        raise Declined("classes are chosen by an index that depends on the logits")
    whole = prover.side(chosen, "c", chosen.meta["val"].shape)
    name = prover.call(node.target, [_Name(value.name), value.inner(dim), _Name(whole.name)], {})
    return prover.result(node, name, value.labels, value.space)


@_rule("select.int")
def _select(prover: Prover, node: Any) -> Value:
    value = prover.source(node)
    dim = node.args[1] % len(value.labels)
    labels = value.labels[:dim] + value.labels[dim + 1 :]
    if value.labels[dim] == "r":
        if not isinstance(node.args[2], int):
            raise Declined("the rows of the logits are cut at a place known only at run time")
        op = RowOp("select", value.labels[:dim].count("r"), (node.args[2],))
        space = prover.cut(value, op, labels, node.meta["val"].shape)
        return prover.result(node, value.name, labels, space)
    name = prover.call(node.target, [_Name(value.name), value.inner(dim), node.args[2]], {})
    return prover.result(node, name, labels, value.space)


@_rule("slice.Tensor")
def _slice(prover: Prover, node: Any) -> Value:
    value = prover.source(node)
    dim = (_argument(node, "dim") or 0) % len(value.labels)
    start, stop, step = (_argument(node, each) for each in ("start", "end", "step"))
    made = node.meta["val"]
    if same(made.shape[dim], value.shape[dim]) and step in (None, 1):
        return prover.result(node, value.name, value.labels, value.space)
    if value.labels[dim] == "r":
        places = tuple(map(_place, (start, stop, step)))
        op = RowOp("slice", value.labels[:dim].count("r"), places)
        space = prover.cut(value, op, value.labels, made.shape)
        return prover.result(node, value.name, value.labels, space)
    if any(isinstance(each, fx.Node) for each in (start, stop, step)):
        raise Declined("the classes are cut at a place known only at run time")
    name = prover.call(
        node.target, [_Name(value.name), value.inner(dim), start, stop, step or 1], {}
    )
    return prover.result(node, name, value.labels, value.space)


@_rule("split.Tensor", "split_with_sizes.default", "chunk.default", "unbind.int")
def _split(prover: Prover, node: Any) -> Any:
    value = prover.source(node)
    name = {"unbind.int": "dim"}.get(str(node.target), "dim")
    dim = _argument(node, name) or 0
    dim %= len(value.labels)
    if value.labels[dim] == "r":
        raise Declined(f"{_short(node.target)} takes the rows apart")
    args: list[Any] = [_Name(value.name), *node.args[1:]]
    if str(node.target).startswith("aten.unbind"):
        args = [_Name(value.name), value.inner(dim)]
        labels = value.labels[:dim] + value.labels[dim + 1 :]
    else:
        args = [_Name(value.name), _plain(node.args[1]), value.inner(dim)]
        labels = value.labels
    whole = prover.call(node.target, args, {})
    return [
        prover.result(node, prover.emit(f"{whole}[{index}]", [whole]), labels, value.space, each)
        for index, each in enumerate(node.meta["val"])
    ]


def _plain(argument: Any) -> Any:
    """A size or sizes that are numbers in every run."""
    if isinstance(argument, (tuple, list)):
        return [_plain(each) for each in argument]
    if isinstance(argument, int):
        return argument
    raise Declined("a size of classes is known only at run time")


@_rule("cat.default", "stack.default")
def _cat(prover: Prover, node: Any) -> Value:
    parts = list(node.args[0])
    stacks = node.target is aten.stack.default
    guides = [prover._values[each] for each in parts if each in prover._values]
    guides = [each for each in guides if isinstance(each, Value)]
    if not guides:
        raise Declined("cat reads a value that mixes rows")
    guide = guides[0]
    prover._space_now = guide.space
    dim = (_argument(node, "dim") or 0) % (len(guide.labels) + int(stacks))
    labels = guide.labels
    if stacks:
        inner = int(guide.by_row) + sum(each != "r" for each in labels[:dim])
    elif labels[dim] == "r":
        raise Declined("cat puts rows behind rows")
    else:
        inner = guide.inner(dim)
        # A part of size one along the dimension is as good as one of more.
        labels = "".join("c" if i == dim else each for i, each in enumerate(labels))
    names = []
    for part in parts:
        value = prover.operand(part, labels, guide.shape)
        rows = [each == "r" for each in value.labels]
        if not value.by_row or rows != [each == "r" for each in labels]:
            raise Declined("cat joins values with and without rows")
        if value.space != guide.space:
            raise Declined("the rows of the logits are read in two ways")
        names.append(_Name(value.name))
    name = prover.call(node.target, [names, inner], {})
    if stacks:
        labels = labels[:dim] + ("1" if len(parts) == 1 else "c") + labels[dim:]
    return prover.result(node, name, labels, guide.space)


@_rule("bmm.default")
def _bmm(prover: Prover, node: Any) -> Value:
    """A product within each row: ``einsum('nv,nv->n')``."""
    known = [each for each in node.args if each in prover._values]
    if not known:
        raise Declined("bmm reads a value that mixes rows")
    guide = prover.source(node, node.args.index(known[0]))
    values = []
    for each in node.args:
        shape = each.meta["val"].shape
        value = prover.operand(each, "rcc", (guide.shape[0], *shape[1:]))
        if not value.by_row or value.labels[0] != "r" or len(value.rest) != 2:
            raise Declined("bmm works along the rows")
        if value.space != guide.space:
            raise Declined("the rows of the logits are read in two ways")
        values.append(value)
    name = prover.call(node.target, [_Name(each.name) for each in values], {})
    labels = "r" + "".join("1" if is_one(size) else "c" for size in node.meta["val"].shape[1:])
    return prover.result(node, name, labels, guide.space)


@_rule("native_layer_norm.default")
def _layer_norm(prover: Prover, node: Any) -> list[Value]:
    value = prover.source(node)
    _, shape, weight, bias, eps = node.args
    if any(label == "r" for label in value.labels[len(value.labels) - len(shape) :]):
        raise Declined("native_layer_norm works along the rows")
    args: list[Any] = [_Name(value.name), [_static(size) for size in shape]]
    for each in (weight, bias):
        if each is None:
            args.append(None)
            continue
        given = prover.operand(each, "c" * len(shape), shape)
        if given.by_row:
            raise Declined("native_layer_norm has a weight of the logits")
        args.append(_Name(given.name))
    name = prover.call(node.target, [*args, eps], {})
    reduced = _reduced(value.labels, range(len(value.labels) - len(shape), len(value.labels)), True)
    return [
        prover.result(
            node,
            prover.emit(f"{name}[{index}]", [name]),
            value.labels if index == 0 else reduced,
            value.space,
            each,
        )
        for index, each in enumerate(node.meta["val"])
    ]


@_rule("permute.default", "transpose.int", "t.default")
def _permute(prover: Prover, node: Any) -> Value:
    value = prover.source(node)
    rank = len(value.labels)
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [dim % rank for dim in node.args[1]]
    elif node.target is aten.t.default:
        order = order[::-1]
    else:
        one, other = (dim % rank for dim in node.args[1:3])
        order[one], order[other] = order[other], order[one]
    rows = [dim for dim in order if value.labels[dim] == "r"]
    if rows != sorted(rows):
        raise Declined("the rows of the logits change their order")
    labels = "".join(value.labels[dim] for dim in order)
    inner = [value.inner(dim) for dim in order if value.labels[dim] != "r"]
    name = value.name
    if inner != sorted(inner):
        name = prover.call(aten.permute.default, [_Name(name), [0, *inner]], {})
    return prover.result(node, name, labels, value.space)


@_rule("unsqueeze.default")
def _unsqueeze(prover: Prover, node: Any) -> Value:
    value = prover.source(node)
    dim = node.args[1] % (len(value.labels) + 1)
    labels = value.labels[:dim] + "1" + value.labels[dim:]
    at = 1 + sum(label != "r" for label in value.labels[:dim])
    name = prover.call(node.target, [_Name(value.name), at], {})
    return prover.result(node, name, labels, value.space)


@_rule("squeeze.default", "squeeze.dim", "squeeze.dims")
def _squeeze(prover: Prover, node: Any) -> Value:
    value = prover.source(node)
    rank = len(value.labels)
    dims = list(range(rank))
    if len(node.args) > 1:
        given = node.args[1]
        dims = [d % rank for d in (given if isinstance(given, (tuple, list)) else [given])]
    gone = [dim for dim in dims if is_one(value.shape[dim])]
    labels = "".join(each for dim, each in enumerate(value.labels) if dim not in gone)
    inner = [value.inner(dim) for dim in gone if value.labels[dim] != "r"]
    name = value.name
    if inner:
        name = prover.call(aten.squeeze.dims, [_Name(name), inner], {})
    return prover.result(node, name, labels, value.space)


@_rule("expand.default")
def _expand(prover: Prover, node: Any) -> Value:
    value = prover.source(node)
    made = node.meta["val"]
    labels = prover.merge([value], made.shape)
    name = prover.align(value, labels)
    sizes = [-1] + [
        _static(size) for size, label in zip(made.shape, labels, strict=True) if label != "r"
    ]
    name = prover.call(node.target, [_Name(name), sizes], {})
    return prover.result(node, name, labels, value.space)


def _static(size: Any) -> int:
    number = torch_private.static_size(size)
    if number is None:
        raise Declined(f"a dimension beside the rows has the symbolic size {size}")
    return number


@_rule("view.default", "_unsafe_view.default", "reshape.default", "unflatten.int")
def _view(prover: Prover, node: Any) -> Value:
    value = prover.source(node)
    made = node.meta["val"]
    labels = _relabel(value.labels, value.shape, tuple(made.shape))
    before = [value.shape[dim] for dim in value.rest]
    after = [size for size, label in zip(made.shape, labels, strict=True) if label != "r"]
    name = value.name
    if len(before) != len(after) or not all(map(same, before, after)):
        sizes = [-1] + [_static(size) for size in after]
        name = prover.call(aten.reshape.default, [_Name(name), sizes], {})
    return prover.result(node, name, labels, value.space)


def _relabel(labels: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    """Labels of a value in another shape.

    Raises:
        Declined: If a new dimension holds rows and classes.
    """
    old = [(size, label) for size, label in zip(before, labels, strict=True) if not is_one(size)]
    new = [dim for dim, size in enumerate(after) if not is_one(size)]
    result = ["1"] * len(after)
    i = j = 0
    while i < len(old) or j < len(new):
        if i >= len(old) or j >= len(new):
            raise Declined("the logits are viewed in a shape that cannot be followed")
        left, right = old[i][0], after[new[j]]
        group, targets = {old[i][1]}, [new[j]]
        i, j = i + 1, j + 1
        while not same(left, right):
            # The smaller side takes its next dimension.
            if _smaller(left, right) and i < len(old):
                left = left * old[i][0]
                group.add(old[i][1])
                i += 1
            elif j < len(new):
                right = right * after[new[j]]
                targets.append(new[j])
                j += 1
            else:
                raise Declined("the logits are viewed in a shape that cannot be followed")
        if len(group) > 1:
            raise Declined("a view puts rows and classes into one dimension")
        for target in targets:
            result[target] = group.copy().pop()
    # A row dimension of size one has lost its label, which is right: it holds one row or none.
    if "r" in labels and "r" not in result:
        raise Declined("the logits have a single row")
    return "".join(result)


def _smaller(one: Any, other: Any) -> bool:
    left, right = torch_private.size_hint(one), torch_private.size_hint(other)
    if left is None or right is None:
        raise Declined("a size of the logits is not known")
    return left < right
