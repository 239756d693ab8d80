"""Runs a function plain and rewritten and compares what comes out; used by all tests here.

The rewrite is applied to the graphs from Dynamo as Inductor applies it, subgraphs included, but
AOTAutograd runs the result: no code is generated, so that a whole corpus can be run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils import _pytree as pytree

import greyhound_lowering
from greyhound_ops.testing import assert_within_budget, relative_error
from lowering.forms import Inputs, call, loss_of

ROOT = pathlib.Path(__file__).parents[2]

#: What makes tiny shapes worth a rewrite, in several chunks.
TINY: dict[str, Any] = {"min_logits_bytes": 0, "chunk_size": 5}

#: The same for ``backend="greyhound"``.
TINY_OPTIONS = {f"greyhound.{name}": value for name, value in TINY.items()}

#: Upstream gradient of every loss: not one, so that a forgotten scale shows.
UPSTREAM = 1.7

# Relative error allowed beside that of plain torch: the stored gradient is rounded once, scaled by
# the upstream gradient and rounded again.
SLACK = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}

OP = torch.ops.greyhound.linear_cross_entropy.default
REGION = torch.ops.greyhound.row_region.default

_PRODUCTS = {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum", "__matmul__"}

Make: TypeAlias = Callable[[], "tuple[Callable[..., Any], Inputs]"]


def graph_modules(module: nn.Module) -> list[fx.GraphModule]:
    """A graph module and the subgraphs of its higher-order ops, innermost first."""
    inner = [each for child in module.children() for each in graph_modules(child)]
    return [*inner, module] if isinstance(module, fx.GraphModule) else inner


class Backend:
    """``torch.compile`` backend: the rewrite, then AOTAutograd without code generation.

    Args:
        **settings: Of the rewrite, over `TINY`.

    Attributes:
        before: Text of every graph as Dynamo made it.
        after: Text of every graph as the rewrite left it.
        graphs: The same; Dynamo empties those of an attempt that it starts again.
    """

    def __init__(self, **settings: Any) -> None:
        self.rewrite = greyhound_lowering.rewrite_pass(**{**TINY, **settings})
        self.before: list[str] = []
        self.after: list[str] = []
        self.graphs: list[fx.Graph] = []

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        for each in graph_modules(module):
            self.before.append(str(each.graph))
            self.rewrite(each.graph)
            each.graph.lint()
            each.recompile()
            self.after.append(str(each.graph))
            self.graphs.append(each.graph)
        return aot_eager(module, example_inputs)

    @property
    def our_nodes(self) -> list[fx.Node]:
        """The nodes of all our ops in all graphs."""
        return [
            node
            for graph in self.graphs
            for node in graph.nodes
            if getattr(node.target, "namespace", "") == "greyhound"
        ]

    @property
    def unchanged(self) -> bool:
        """Whether every graph is exactly as Dynamo made it."""
        return self.after == self.before

    @property
    def op_nodes(self) -> list[fx.Node]:
        """The nodes of the cross entropy op in all graphs."""
        return [node for graph in self.graphs for node in graph.nodes if node.target is OP]

    @property
    def region_nodes(self) -> list[fx.Node]:
        """The nodes of the op for any other loss in all graphs."""
        return [node for graph in self.graphs for node in graph.nodes if node.target is REGION]

    def wide_products(self, num_classes: int) -> list[str]:
        """Matrix products left in the graphs that have a dimension of ``num_classes``."""
        return [
            node.format_node() or node.name
            for graph in self.graphs
            for node in graph.nodes
            if getattr(node.target, "__name__", node.target) in _PRODUCTS
            and num_classes in getattr(node.meta.get("example_value"), "shape", ())
        ]


@dataclasses.dataclass
class Result:
    """Loss and gradients of one run; the loss too carries no graph any more."""

    loss: Tensor
    grads: dict[str, Tensor | None]
    differentiable: bool


def leaves(function: Callable[..., Any], inputs: Inputs) -> dict[str, Tensor]:
    """Parameters and floating point inputs, by name."""
    found = dict(function.named_parameters()) if isinstance(function, nn.Module) else {}
    pairs = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    for name, value in pairs:
        if isinstance(value, Tensor) and value.is_floating_point():
            found[f"input {name}"] = value
    return found


def run(
    function: Callable[..., Any],
    inputs: Inputs,
    *,
    compiled: Callable[..., Any] | None = None,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Result:
    """Run a function, or its compiled form, forward and backward."""
    torch.manual_seed(1)
    with context():
        loss = loss_of(call(function if compiled is None else compiled, inputs))
    if loss.requires_grad:
        loss.backward(torch.full_like(loss, UPSTREAM))
    grads = {name: leaf.grad for name, leaf in leaves(function, inputs).items()}
    return Result(loss.detach(), grads, loss.requires_grad)


def in_double(
    make: Make, context: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Result | None:
    """The same in fp64, or None if the function names a dtype that forbids it."""
    function, inputs = make()
    if isinstance(function, nn.Module):
        function = function.double()

    def widen(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().double().requires_grad_(value.requires_grad)

    try:
        result = run(function, pytree.tree_map(widen, inputs), context=context)
    except RuntimeError:
        return None
    return result if result.loss.dtype == torch.float64 else None


def assert_same_results(
    plain: Result, value: Result, truth: Result | None, slack: float | None = None
) -> None:
    """Check loss and gradients against plain torch, by the error that plain torch itself makes."""
    assert value.differentiable == plain.differentiable, "the loss lost or gained its gradient"
    assert value.loss.dtype == plain.loss.dtype
    assert value.loss.shape == plain.loss.shape
    pairs = {"loss": (value.loss, plain.loss)}
    for name, grad in plain.grads.items():
        other = value.grads[name]
        assert (other is None) == (grad is None), f"{name}: a gradient against none"
        if grad is not None and other is not None:
            assert other.dtype == grad.dtype, name
            assert other.shape == grad.shape, name
            pairs[name] = (other, grad)
    # Without a truth the dtype of the roughest operand is the measure.
    if slack is None:
        slack = max(SLACK[expected.dtype] for _, expected in pairs.values())
    for name, (got, expected) in pairs.items():
        true = None
        if truth is not None:
            true = truth.loss if name == "loss" else truth.grads[name]
        if true is not None and bool(torch.isfinite(true).all()):
            assert_within_budget(name, got, expected, true, slack=slack)
        else:
            torch.testing.assert_close(got, expected, rtol=10 * slack, atol=slack, equal_nan=True)


def check(
    make: Make,
    *,
    dynamic: bool = False,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    slack: float | None = None,
    **settings: Any,
) -> Backend:
    """Compare a function with its rewritten self.

    Args:
        make: Returns the function and its inputs, the same each time.
        dynamic: As for ``torch.compile``.
        context: Entered around each forward.
        slack: Relative error allowed beside plain torch's own; by default as the dtypes say.
        **settings: Of the rewrite, over `TINY`.

    Returns:
        The backend that compiled it, with the graphs; ``explain()`` tells of this function alone.
    """
    torch._dynamo.reset()
    greyhound_lowering.clear_report()
    backend = Backend(**settings)
    function, inputs = make()
    plain = run(function, inputs, context=context)
    function, inputs = make()
    compiled = torch.compile(function, backend=backend, dynamic=dynamic)
    value = run(function, inputs, compiled=compiled, context=context)
    # A graph that is as it was gives what it gave; random numbers would differ in fp64.
    truth = None if backend.unchanged else in_double(make, context)
    assert_same_results(plain, value, truth, slack)
    return backend


def reasons() -> list[str]:
    """Why projections were left alone since `check` began."""
    return [each.reason for each in greyhound_lowering.explain().decisions if each.op is None]


def assert_rewritten(backend: Backend, count: int = 1) -> None:
    """Check that the op stands in the graphs ``count`` times, and that the account says so."""
    assert len(backend.op_nodes) == count, reasons()
    assert greyhound_lowering.explain().rewritten_count == count


def assert_left(backend: Backend, reason: str | None = None) -> None:
    """Check that the graphs are as they were and that the account says why."""
    assert not backend.our_nodes
    assert backend.unchanged
    assert reasons(), "left alone without a word"
    if reason is not None:
        assert any(reason in each for each in reasons()), reasons()


def listing(graph: fx.Graph) -> str:
    """A graph as text that is the same in every torch: op, target, arguments; no type comments."""
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name} = input")
        elif node.op == "output":
            lines.append(f"return {_text(node.args[0])}")
        else:
            options = [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
            arguments = [*map(_text, node.args), *options]
            # One a line where they are many, so that a changed option is a changed line.
            joined = "".join(f"\n    {each}," for each in arguments)
            if len(arguments) < 6:
                joined = ", ".join(arguments)
            lines.append(f"{node.name} = {_target(node)}({joined})")
    return "\n".join(lines)


def _target(node: fx.Node) -> str:
    if node.op == "call_method":
        return f".{node.target}"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removesuffix(".default")
    return str(getattr(node.target, "__name__", node.target))


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_text, value))
        return f"[{inner}]"
    if isinstance(value, slice):
        return ":".join(
            "" if each is None else _text(each) for each in (value.start, value.stop, value.step)
        )
    return "..." if value is Ellipsis else str(value)


def run_python(
    code: str, *, env: dict[str, str] | None = None, cwd: pathlib.Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds the packages of this tree.

    Returns:
        The finished process, whose exit status was checked.
    """
    paths = [str(ROOT), str(ROOT / "lowering"), str(ROOT / "tests")]
    surroundings = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GREYHOUND_", "TORCH_LOGS", "TORCH_TRACE", "TORCHINDUCTOR_"))
    }
    surroundings["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**surroundings, **(env or {})},
        cwd=cwd or ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


__all__ = [
    "OP",
    "REGION",
    "TINY",
    "TINY_OPTIONS",
    "UPSTREAM",
    "Backend",
    "Result",
    "assert_left",
    "assert_rewritten",
    "assert_same_results",
    "check",
    "graph_modules",
    "leaves",
    "listing",
    "reasons",
    "relative_error",
    "run",
    "run_python",
]
