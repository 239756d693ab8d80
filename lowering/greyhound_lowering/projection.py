"""Finding projections: every spelling of ``hidden @ weight.T (+ bias)`` becomes one record."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from greyhound_lowering.declined import Declined
from greyhound_ops import torch_private


def example(node: Any) -> Tensor | None:
    """The fake tensor that Dynamo recorded for a node, or None."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def known(size: int | torch.SymInt) -> int | torch.SymInt:
    """A size as a plain number where it is one in every run."""
    static = torch_private.static_size(size)
    return size if static is None else static


@dataclasses.dataclass(frozen=True)
class Projection:
    """``hidden [..., D]`` times ``weight [V, D]``, as a graph spells it.

    Attributes:
        node: The node whose value is the logits.
        hidden: Node of the hidden states, the contracted dimension last.
        weight: Node of the weight.
        weight_is_transposed: Whether the weight node holds ``[D, V]``.
        bias: Node of a ``[V]`` bias, or None.
        class_dim: Which dimension of the logits is the vocabulary.
        row_order: Dimensions of ``hidden`` (without the last) in the order of the logits' rows.
    """

    node: fx.Node
    hidden: fx.Node
    weight: fx.Node
    weight_is_transposed: bool
    bias: fx.Node | None
    class_dim: int
    row_order: tuple[int, ...]

    @property
    def head(self) -> tuple[fx.Node, bool]:
        """The tensor that the weight is, or is a transposition of, and whether it is ``[D, V]``.

        A model that writes ``x @ w.t()`` twice has two weight nodes and one head.
        """
        node, transposed = self.weight, self.weight_is_transposed
        while (source := _transposed(node)) is not None:
            node, transposed = source, not transposed
        return node, transposed

    @property
    def num_classes(self) -> int | torch.SymInt:
        """V."""
        weight = example(self.weight)
        assert weight is not None
        return known(weight.shape[1 if self.weight_is_transposed else 0])

    @property
    def hidden_size(self) -> int | torch.SymInt:
        """D."""
        hidden = example(self.hidden)
        assert hidden is not None
        return known(hidden.shape[-1])

    def describe(self) -> str:
        """The projection in one line, with shapes."""
        hidden, weight = example(self.hidden), example(self.weight)
        assert hidden is not None
        assert weight is not None
        name = getattr(self.node.target, "__name__", str(self.node.target))
        plus = " + bias" if self.bias is not None else ""
        return f"{name}({list(hidden.shape)}, {list(weight.shape)}){plus} {hidden.dtype}"


_TRANSPOSITIONS = (
    "t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "T", "mT",
)  # fmt: skip


def _transposed(node: fx.Node) -> fx.Node | None:
    """The matrix that a node is the transposition of, or None if it is none."""
    source = node.args[0] if node.args else None
    value = example(source)
    if value is None or value.dim() != 2 or not isinstance(source, fx.Node):
        return None
    rest = list(node.args[1:])
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "getattr":
        name, rest = str(rest[0]), []
    # Torch 2.14 records ``w.T`` as ``aten.numpy_T(w)``.
    name = name.split(".")[0].replace("numpy_T", "T")
    if name not in _TRANSPOSITIONS:
        return None
    # The dimensions themselves, through the same call, tell where each one went.
    probe = torch.empty((2, 3), device="meta")
    function = getattr(probe, name)
    try:
        moved = function(*rest, **node.kwargs) if callable(function) else function
    except (TypeError, RuntimeError, IndexError):
        return None
    return source if tuple(moved.shape) == (3, 2) else None


_Finder = Callable[[fx.Node], "Projection | None"]
_FINDERS: dict[Any, _Finder] = {}


def _finds(*targets: Any) -> Callable[[_Finder], _Finder]:
    def register(finder: _Finder) -> _Finder:
        for target in targets:
            _FINDERS[target] = finder
        return finder

    return register


def _arguments(node: fx.Node, *names: str) -> list[Any]:
    """Positional and keyword arguments of a call by name, None where not given."""
    values = list(node.args) + [None] * (len(names) - len(node.args))
    for index, name in enumerate(names):
        if name in node.kwargs:
            values[index] = node.kwargs[name]
    return values


def _plain(
    node: fx.Node, hidden: Any, weight: Any, bias: Any, transposed: bool
) -> Projection | None:
    left, right = example(hidden), example(weight)
    if left is None or right is None or right.dim() != 2 or left.dim() < 1:
        return None
    rows = left.dim() - 1
    return Projection(node, hidden, weight, transposed, bias, rows, tuple(range(rows)))


@_finds(torch_private.linear_function(), torch.nn.functional.linear)
def _linear(node: fx.Node) -> Projection | None:
    hidden, weight, bias = _arguments(node, "input", "weight", "bias")
    return _plain(node, hidden, weight, bias, transposed=False)


@_finds(torch.matmul, operator.matmul, torch.mm, "matmul", "mm", "__matmul__")
def _matmul(node: fx.Node) -> Projection | None:
    hidden, weight = _arguments(node, "input", "other")
    if weight is None:
        weight = node.kwargs.get("mat2")
    return _plain(node, hidden, weight, None, transposed=True)


@_finds(torch.addmm, "addmm")
def _addmm(node: fx.Node) -> Projection | None:
    bias, hidden, weight, beta, alpha = _arguments(node, "input", "mat1", "mat2", "beta", "alpha")
    row = example(bias)
    if beta not in (None, 1) or alpha not in (None, 1) or row is None or row.dim() != 1:
        return None
    return _plain(node, hidden, weight, bias, transposed=True)


@_finds(torch.einsum, torch.functional.einsum)
def _einsum(node: fx.Node) -> Projection | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return None
    terms, output = equation.replace(" ", "").split("->")
    letters = terms.split(",")
    for one, other in ((0, 1), (1, 0)):
        found = _einsum_projection(
            node, letters[one], letters[other], output, operands[one], operands[other]
        )
        if found is not None:
            return found
    return None


def _einsum_projection(
    node: fx.Node, left: str, right: str, output: str, hidden: Any, weight: Any
) -> Projection | None:
    """Read ``left,right->output`` with ``right`` as the weight."""
    value, matrix = example(hidden), example(weight)
    if value is None or matrix is None or matrix.dim() != 2 or "." in right or len(right) != 2:
        return None
    if "..." in left:
        spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in left + right + output]
        dots = "".join(spare[: value.dim() - (len(left) - 3)])
        left, output = left.replace("...", dots), output.replace("...", dots)
    if len(set(left)) != len(left) or len(set(output)) != len(output) or "." in output:
        return None
    if len(left) != value.dim() or not left:
        return None
    shared = set(left) & set(right)
    if len(shared) != 1:
        return None
    contracted = shared.pop()
    if known(value.shape[-1]) != known(matrix.shape[right.index(contracted)]):
        return None  # a size of one would be broadcast
    if contracted in output or left[-1] != contracted:
        return None
    classes = right.replace(contracted, "")
    rows = left[:-1]
    if sorted(output) != sorted(rows + classes):
        return None
    order = tuple(rows.index(letter) for letter in output if letter != classes)
    return Projection(
        node, hidden, weight, right[0] == contracted, None, output.index(classes), order
    )


def find_projection(node: fx.Node) -> Projection | None:
    """The projection that a node of a graph from Dynamo is, or None."""
    if node.op not in ("call_function", "call_method") or example(node) is None:
        return None
    finder = _FINDERS.get(node.target)
    if finder is None or node.kwargs.get("out") is not None:  # the buffer is the caller's
        return None
    return finder(node)


def is_batched_product(node: fx.Node) -> bool:
    """Whether a node multiplies by a stack of matrices: attention, or a head per codebook."""
    if node.target in (torch.bmm, "bmm"):
        return True
    if node.target not in (torch.matmul, operator.matmul, "matmul", torch.einsum):
        return False
    right = example(node.args[-1])
    return right is not None and right.dim() > 2


def is_product(node: fx.Node) -> bool:
    """Whether a node is any matrix product, also one that is no projection."""
    return node.target in _FINDERS or node.target in (torch.bmm, torch.baddbmm, "bmm", "baddbmm")


def check_wide(projection: Projection) -> None:
    """Decline a projection that has too few classes or an unknown number of them."""
    classes, hidden_size = projection.num_classes, projection.hidden_size
    if not isinstance(classes, int):
        raise Declined(f"its number of columns is symbolic ({classes})")
    size = torch_private.size_hint(hidden_size)
    if size is not None and classes <= size:
        raise Declined(
            f"{classes} classes are no more than the hidden size {size}: nothing to save"
        )
