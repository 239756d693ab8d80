"""``greyhound::row_statistics``, and the compiled bodies of regions that use it.

A body finds the log-sum-exp of its logits by operators whose loop Inductor writes: a running
maximum and sum with two exponentials a logit and a wait for the other threads each block. Another
loop follows for each value gathered and for each derivative's own sum. With the two statistics of a
row made by a kernel of this project, what is left of a softmax, its logarithm and their derivatives
is elementwise, and Inductor fuses it with the rest of the body (docs/performance.md, "Statistics of
a region's rows").

`rewritten` replaces, in a body's source, the softmaxes of logits that went through nothing but a
cast to float32 and then positive factors and one tanh. Values of 16 bits in between are rounded
where Inductor stores them and not where it computes them again: statistics of the one are none of
the other. The logits themselves have 16 bits, a last bit of which is 2^13 times as large as what
the two roundings of a factor differ by.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from greyhound_ops.ops import gradients
from greyhound_ops.ops.op import Op

OP = Op("row_statistics(Tensor logits, float inner, bool tanh, float outer) -> Tensor")


def _values(x: Tensor, inner: float, tanh: bool, outer: float) -> Tensor:
    return torch.tanh(x * inner) * outer if tanh else x * outer


def _fake(logits: Tensor, inner: float, tanh: bool, outer: float) -> Tensor:
    return logits.new_empty((2, logits.shape[0]), dtype=torch.float32)


def _implementation(logits: Tensor, inner: float, tanh: bool, outer: float) -> Tensor:
    """``[2, C]`` float32: maximum of the logits, log of the sum of ``exp(z - z_top)``."""
    out = _fake(logits, inner, tanh, outer)
    if gradients.use_triton(logits.dtype, logits.device.type):
        from greyhound_ops.kernels import row_statistics  # Triton is not there on every platform

        row_statistics.row_statistics(logits, out, inner=inner, tanh=tanh, outer=outer)
        return out
    for rows in gradients.blocks(logits):
        x = logits[rows].float()
        top = x.amax(1)
        reference = top if tanh else torch.where(top == -torch.inf, 0.0, top)
        z = _values(x, inner, tanh, outer)
        z -= _values(reference, inner, tanh, outer).unsqueeze(1)
        out[0, rows], out[1, rows] = top, z.exp_().sum(1).log_()
    return out


OP.implement(_implementation, _fake)

# Inductor's own gather would be one more way to index the logits, and in the kernel that writes
# their gradient a reason not to write it over them.
AT_OP = Op("logits_at(Tensor logits, Tensor index) -> Tensor")


def _logits_at(logits: Tensor, index: Tensor) -> Tensor:
    """``[C, 1]``: one logit a row; of the nearest class, where there is no such class."""
    return torch.gather(logits, 1, index.clamp(0, logits.shape[1] - 1))


AT_OP.implement(_logits_at, lambda logits, index: logits.new_empty(index.shape))

# --------------------------------------------------------------- what a rewritten body calls

# All take ``x``, float32 ``[C, V]``, and the statistics of its rows as ``[C, 1]``: ``top``, the
# largest of ``x``, and ``log_sum``. Apart, they keep their last bits where logits are large.


# What bodies that were recorded will launch.
_wanted: list[tuple[Tensor, float, bool, float]] = []


def prepare() -> None:
    """Compile the kernels of the bodies recorded since the last call, 0.4 s of a first step.

    What goes wrong here goes wrong once more at the launch, where it is dealt with.
    """
    while _wanted:
        logits, inner, tanh, outer = _wanted.pop()
        if not gradients.use_triton(logits.dtype, logits.device.type):
            continue
        from greyhound_ops.kernels import row_statistics  # Triton is not there on every platform

        with contextlib.suppress(Exception), torch.cuda.device(logits.device):
            row_statistics.prepare(logits, inner=inner, tanh=tanh, outer=outer)


def _statistics(logits: Tensor, inner: float, tanh: bool, outer: float) -> tuple[Tensor, Tensor]:
    """Maximum of the logits and log of the sum of exponentials, ``[C, 1]`` each."""
    if logits.is_cuda:
        _wanted.append((logits, inner, tanh, outer))
    top, log_sum = OP.overload(logits.detach(), inner, tanh, outer).unbind(0)
    return top.unsqueeze(1), log_sum.unsqueeze(1)


# Of the logits at one class per row what ``x`` is of all of them.
_Steps = Callable[[Tensor], Tensor]


def _at(x: Tensor, index: Tensor, logits: Tensor, steps: _Steps) -> Tensor:
    """``x`` at one class per row, ``[C, 1]``; NaN where there is no such class."""
    chosen = AT_OP.overload(logits.detach(), index)
    chosen = steps(chosen.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)
    return torch.where((index >= 0) & (index < x.shape[1]), chosen, torch.nan)


def _is_class(index: Tensor, num_classes: int) -> Tensor:
    return torch.arange(num_classes, device=index.device) == index


def _p(x: Tensor, top: Tensor, log_sum: Tensor) -> Tensor:
    """Probabilities; the logarithm of the largest is at most 0."""
    return (x - top - log_sum).exp()


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, top: Tensor, log_sum: Tensor) -> Tensor:
        ctx.save_for_backward(x, top, log_sum)
        return x - top - log_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad - _p(*ctx.saved_tensors) * grad.sum(1, keepdim=True), None, None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, top: Tensor, log_sum: Tensor) -> Tensor:
        ctx.save_for_backward(x, top, log_sum)
        return _p(x, top, log_sum)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p = _p(*ctx.saved_tensors)
        weighted = grad * p
        return weighted - p * weighted.sum(1, keepdim=True), None, None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, top: Tensor, log_sum: Tensor) -> Tensor:
        ctx.save_for_backward(x, top, log_sum)
        return torch.where(top == torch.inf, top, top + log_sum)  # inf - inf is in the sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * _p(*ctx.saved_tensors), None, None


class _LogProb(torch.autograd.Function):
    """``gather(log_softmax(x), 1, index)`` of one class per row, ``chosen`` of ``x``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, top: Tensor, log_sum: Tensor, chosen: Tensor, index: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, top, log_sum, index)
        return chosen - top - log_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, top, log_sum, index = ctx.saved_tensors
        of_target = torch.where(_is_class(index, x.shape[1]), 1.0, 0.0)
        return grad * (of_target - _p(x, top, log_sum)), None, None, None, None


class _Chosen(torch.autograd.Function):
    """``gather(x, 1, index)`` of one class per row, which is ``chosen``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_classes = x.shape[1]
        return chosen.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return torch.where(_is_class(index, ctx.num_classes), grad, 0.0), None, None


def _one_per_row(x: Tensor, dim: int, index: Tensor) -> bool:
    return x.dim() == 2 and dim in (1, -1) and index.shape[1] == 1 and index.shape[0] == x.shape[0]


def _gather_logits(logits: Tensor, steps: _Steps, x: Tensor, dim: int, index: Tensor) -> Tensor:
    """``gather`` of an elementwise function of logits; torch's derivative scatters into zeros."""
    if not _one_per_row(x, dim, index):
        return torch.gather(x, dim, index)
    return _Chosen.apply(x, _at(x, index, logits, steps), index)  # type: ignore[no-any-return]


def _log_prob(
    logits: Tensor,
    steps: _Steps,
    x: Tensor,
    top: Tensor,
    log_sum: Tensor,
    log_probs: Tensor,
    dim: int,
    index: Tensor,
) -> Tensor:
    """``gather`` of a log-softmax of such a function."""
    if not _one_per_row(x, dim, index):
        return torch.gather(log_probs, dim, index)
    return _LogProb.apply(x, top, log_sum, _at(x, index, logits, steps), index)  # type: ignore[no-any-return]


def _logsumexp(x: Tensor, top: Tensor, log_sum: Tensor, keepdim: bool = False) -> Tensor:
    made: Tensor = _LogSumExp.apply(x, top, log_sum)
    return made if keepdim else made.squeeze(1)


#: Names that a rewritten source uses.
NAMES: dict[str, Any] = {
    "_statistics": _statistics,
    "_log_softmax": _LogSoftmax.apply,
    "_softmax": _Softmax.apply,
    "_logsumexp": _logsumexp,
    "_log_prob": _log_prob,
    "_gather_logits": _gather_logits,
}

# ----------------------------------------------------------------------- rewriting of a source


@dataclasses.dataclass(frozen=True)
class _Chain:
    """What a value is of one projection's logits.

    Attributes:
        head: Index of the projection.
        wide: Whether the logits have been cast to float32.
        inner: Positive factor in front of the tanh.
        tanh: Whether there is one.
        outer: Positive factor of the result.
        steps: The operators, innermost first: each a call with the place of its argument.
    """

    head: int
    wide: bool = False
    inner: float = 1.0
    tanh: bool = False
    outer: float = 1.0
    steps: tuple[ast.Call, ...] = ()

    def source(self) -> str:
        """The logits and the function that a value is of them, as arguments."""
        steps = ast.unparse(_applied(self.steps, ast.Name("_x", ast.Load())))
        return f"logits[{self.head}], lambda _x: {steps}"

    def times(self, factor: float, step: ast.Call) -> _Chain | None:
        product = self.outer * factor
        # What float32 holds with room on both sides; any other factor is the operators' matter.
        if not self.wide or not 2.0**-60 < product < 2.0**60:
            return None
        return dataclasses.replace(self, outer=product, steps=(*self.steps, step))


_OWN = {
    "aten._log_softmax.default": "_log_softmax",
    "aten._softmax.default": "_softmax",
    "aten.logsumexp.default": "_logsumexp",
}


def _operator(node: ast.expr) -> str:
    """``aten.mul.Tensor`` of ``torch.ops.aten.mul.Tensor(...)``, else an empty string."""
    if not isinstance(node, ast.Call):
        return ""
    text = ast.unparse(node.func)
    return text.removeprefix("torch.ops.") if text.startswith("torch.ops.") else ""


def _number(node: ast.expr) -> float | None:
    """A positive, finite number."""
    if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
        return None
    value = float(node.value)  # type: ignore[arg-type]
    return value if 0.0 < value < math.inf else None


def _constant(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


class _Rewriter(ast.NodeTransformer):
    """Replaces calls in one body.

    Args:
        body: Its statements, each value assigned once.
        dtypes: Of each projection's logits.
    """

    def __init__(self, body: list[ast.Assign], dtypes: tuple[torch.dtype, ...]) -> None:
        self._dtypes = dtypes
        self._values = {_name(each): each.value for each in body}
        self._statistics: dict[tuple[Any, ...], str] = {}
        # What made a log-softmax by the name of the value: logits, arguments and a cast.
        self._log_softmax: dict[str, tuple[str, str, str]] = {}

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        """A statement with its softmaxes replaced, behind the statistics that it needs first."""
        before = len(self._statistics)
        if isinstance(node, ast.Assign):
            found = self._softmax(node.value)
            if found is not None and found[1] == "_log_softmax":
                chain, _, arguments, cast = found
                self._log_softmax[_name(node)] = chain.source(), arguments, cast
        made = self.visit(node)
        new = list(self._statistics.items())[before:]
        lines = (
            f"{name} = _statistics(logits[{head}], {options})" for (head, options), name in new
        )
        return [*(ast.parse(line).body[0] for line in lines), made]

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """A call or what is called instead."""
        found = self._softmax(node)
        if found is not None:
            _, name, arguments, cast = found
            return ast.parse(f"{name}({arguments}){cast}", mode="eval").body
        self.generic_visit(node)
        if ast.unparse(node.func) != "_gather":
            return node
        text, others = "", ", ".join(map(ast.unparse, node.args[:3]))
        chain = self._chain(node.args[0])
        name, detached = self._before_detach(node.args[0])
        if name in self._log_softmax:
            logits, arguments, cast = self._log_softmax[name]
            text = f"_log_prob({logits}, {arguments}, {others}){cast}{detached}"
        elif chain is not None:
            text = f"_gather_logits({chain.source()}, {others})"
        return ast.parse(text, mode="eval").body if text else node

    def _before_detach(self, node: ast.expr) -> tuple[str, str]:
        """The name of a value as it was before it was detached, and what detaches it again."""
        detached = ""
        while isinstance(node, ast.Name) and node.id in self._values:
            value = self._values[node.id]
            if not isinstance(value, ast.Call) or _operator(value) != "aten.detach.default":
                return node.id, detached
            node, detached = value.args[0], ".detach()"
        return "", ""

    def _softmax(self, node: ast.expr) -> tuple[_Chain, str, str, str] | None:
        """What computes a softmax, its logarithm or a log-sum-exp instead; None for others.

        Returns:
            What is taken the softmax of; name, arguments and a cast of the result.
        """
        name = _OWN.get(_operator(node))
        if name is None or not isinstance(node, ast.Call) or node.keywords:
            return None
        options = [_constant(each) for each in node.args[1:]]
        if not options or options[0] not in (1, -1, [1], [-1]):
            return None
        chain = self._chain(node.args[0])
        if chain is None or self._dtypes[chain.head].itemsize != 2:
            return None
        if name == "_logsumexp" and not chain.wide:
            return None
        x = ast.unparse(node.args[0]) + ("" if chain.wide else ".float()")
        cast = "" if chain.wide or options[1:] == [True] else f".to({self._dtypes[chain.head]})"
        key = chain.head, f"{chain.inner!r}, {chain.tanh}, {chain.outer!r}"
        statistics = self._statistics.setdefault(key, f"_s{len(self._statistics)}")
        top = ast.unparse(_applied(chain.steps, ast.parse(f"{statistics}[0]", mode="eval").body))
        arguments = f"{x}, {top}, {statistics}[1]"
        if name == "_logsumexp":
            arguments += f", {options[1] if len(options) > 1 else False}"
        return chain, name, arguments, cast

    def _chain(self, node: ast.expr) -> _Chain | None:
        if isinstance(node, ast.Name):
            return self._chain(self._values[node.id]) if node.id in self._values else None
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "logits":
            head = _constant(node.slice)
            return _Chain(head) if isinstance(head, int) else None
        operator = _operator(node)
        if not isinstance(node, ast.Call) or not operator or not node.args:
            return None
        chain = self._chain(node.args[0])
        if chain is None:
            return None
        others = [ast.unparse(each) for each in node.args[1:]]
        keywords = {each.arg: ast.unparse(each.value) for each in node.keywords}
        if operator == "aten.detach.default":
            return chain
        if (operator, others, keywords) in (
            ("aten._to_copy.default", [], {"dtype": "torch.float32"}),
            ("prims.convert_element_type.default", ["torch.float32"], {}),
            ("aten.to.dtype", ["torch.float32"], {}),
        ):
            return dataclasses.replace(chain, wide=True)
        # A cap above 1000 wants a tanh that is exact next to 0.
        if operator == "aten.tanh.default" and chain.wide and not chain.tanh:
            if chain.outer < 1e-3:
                return None
            return dataclasses.replace(
                chain, inner=chain.outer, tanh=True, outer=1.0, steps=(*chain.steps, node)
            )
        factor = _number(node.args[1]) if len(node.args) == 2 and not keywords else None
        if factor is not None and operator in ("aten.mul.Tensor", "aten.mul.Scalar"):
            return chain.times(factor, node)
        if factor is not None and operator in ("aten.div.Tensor", "aten.div.Scalar"):
            return chain.times(1.0 / factor, node)
        return None


def _applied(steps: tuple[ast.Call, ...], value: ast.expr) -> ast.expr:
    """The same operators on another value: bitwise what they make of the largest logit."""
    for step in steps:
        value = ast.Call(func=step.func, args=[value, *step.args[1:]], keywords=[])
    return value


class _Renamer(ast.NodeTransformer):
    """Gives every value a name of its own."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._count = 0

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """The name that a value has now."""
        return ast.Name(self._names.get(node.id, node.id), node.ctx)

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        """An assignment to a new name."""
        value = self.visit(node.value)
        self._count += 1
        name = f"_v{self._count}"
        self._names[_name(node)] = name
        return ast.Assign([ast.Name(name, ast.Store())], value)


def _name(node: ast.Assign) -> str:
    assert isinstance(node.targets[0], ast.Name)
    return node.targets[0].id


def rewritten(source: str, dtypes: tuple[torch.dtype, ...]) -> str:
    """A body's source whose softmaxes take their statistics from `OP`, where they can.

    Args:
        source: Defines ``body(logits, row_args, whole_args)`` by assignments and a return;
            gathers are spelled ``_gather``.
        dtypes: Of each projection's logits.

    Returns:
        Source that uses `NAMES`.
    """
    tree = ast.parse(source)
    for each in tree.body:
        if not (isinstance(each, ast.FunctionDef) and each.name == "body"):
            continue
        *body, last = each.body
        plain = all(
            isinstance(line, ast.Assign)
            and len(line.targets) == 1
            and isinstance(line.targets[0], ast.Name)
            for line in body
        )
        if not plain or not isinstance(last, ast.Return):
            continue  # not what the rewrite writes
        renamer = _Renamer()
        renamed = [ast.fix_missing_locations(renamer.visit(line)) for line in (*body, last)]
        rewriter = _Rewriter([line for line in renamed if isinstance(line, ast.Assign)], dtypes)
        each.body = [made for line in renamed for made in rewriter.statement(line)]
    return ast.unparse(ast.fix_missing_locations(tree))


@functools.cache
def serve(source: str, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether any statistics of a body's softmaxes come from `OP`; arguments as for `rewritten`."""
    return "_statistics(" in rewritten(source, dtypes)
