"""What becomes of the project under a torch that is older or newer than those it was made with.

A newer torch is simulated by taking away, one by one, the private names that the project uses:
each function of `torch_private` must do what its docstring says. docs/versions.md has the versions
that were run as they are.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import itertools
import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import greyhound_lowering
import greyhound_ops
from greyhound_lowering import report as report_module
from greyhound_ops import torch_private
from greyhound_ops.ops import gradients

ROOT = Path(greyhound_ops.__file__).parents[1]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that finds the packages of this tree."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "lowering")])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )


# ------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize("version", ["2.10.1", "2.9.0+cpu", "1.13.1", "2.2"])
def test_an_older_torch_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError) as caught:
        torch_private._check_version()
    message = str(caught.value)
    assert f"needs torch 2.11 or newer, found torch {version}" in message
    assert "pip install 'torch>=2.11'" in message


@pytest.mark.parametrize(
    "version", ["2.11.0", "2.11.0a0+git1234", "2.14.1+cu130", "2.15.0.dev20260101", "10.0", "main"]
)
def test_any_other_torch_is_not(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    torch_private._check_version()


def test_an_older_torch_is_refused_before_anything_else_fails() -> None:
    """Both packages, where a torch that old lacks what they import."""
    code = """
import sys, torch
torch.__version__ = "2.10.0"
for name in ("library", "compiler", "func"):  # whatever an import would reach for first
    if hasattr(torch, name):
        delattr(torch, name)
for package in ("greyhound_ops", "greyhound_lowering"):
    try:
        __import__(package)
    except ImportError as error:
        print(error)
    for name in [name for name in sys.modules if name.startswith("greyhound")]:
        del sys.modules[name]
"""
    ran = python(code)
    assert ran.stdout.count("greyhound-ops needs torch 2.11 or newer, found torch 2.10.0") == 2, (
        ran.stderr
    )


# ------------------------------------------------------- a newer torch: the ops, called directly

# Everything private that the ops use and can do without is hidden from `torch_private`; torch goes
# on using it.
WITHOUT_PRIVATE_NAMES = """
import sys, types
import torch
name = "torch._library.autograd"  # read by an import when the ops register
kept = sys.modules[name]
sys.modules[name] = types.ModuleType(name)
from greyhound_ops import torch_private
sys.modules[name] = kept

class Without:
    def __init__(self, original, hidden=(), **replaced):
        self.__dict__.update(replaced, _original=original, _hidden=hidden)
    def __getattr__(self, name):
        if name in self._hidden:
            raise AttributeError(name)
        return getattr(self._original, name)

torch_private.torch = Without(torch, _C=Without(
    torch._C,
    ("_len_torch_dispatch_stack", "_are_functorch_transforms_active", "_functorch",
     "_ForceDispatchKeyGuard", "_dispatch_tls_local_exclude_set"),
    _autograd=Without(torch._C._autograd, ("_get_current_graph_task_keep_graph",)),
))
assert torch_private.graph_is_kept() and not torch_private.is_plain_eager(torch.ones(1))
"""


def test_ops_work_without_any_private_name() -> None:
    ran = python(
        WITHOUT_PRIVATE_NAMES
        + """
import greyhound_ops
from greyhound_ops import functional, reference
torch.manual_seed(0)
target = torch.randint(0, 11, (13,))
target[3] = -100

def leaves():
    generator = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    return [make(13, 8).requires_grad_(), make(11, 8).requires_grad_()]

def check(name, ours, truth, upstream=0.75):
    results = []
    for function in (ours, truth):
        tensors = leaves()
        loss = function(*tensors)
        loss.backward(torch.full_like(loss, upstream))
        results.append([loss.detach(), *(each.grad for each in tensors)])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    print(name, "right")

for reduction in ("mean", "none"):
    check(
        reduction,
        lambda x, w: functional.chunked_linear_cross_entropy(
            x, w, target, reduction=reduction, chunk_size=5
        ),
        lambda x, w: reference.linear_cross_entropy(x, w, target, reduction=reduction),
    )
check(
    "log_probs",
    lambda x, w: functional.chunked_linear_log_probs(x, w, target, chunk_size=5),
    lambda x, w: -reference.linear_cross_entropy(x, w, target, reduction="none"),
)
check(
    "logits",
    lambda x, w: functional.cross_entropy(x @ w.t(), target),
    lambda x, w: reference.linear_cross_entropy(x, w, target),
)
def square(z, scale):  # a loss with lists of tensors among the arguments of its op
    return (z.square() * scale).sum(), 2 * z * scale

check(
    "loss",
    lambda x, w: functional.chunked_linear_loss(
        x, w, square, torch.tensor(0.5, dtype=torch.float64), chunk_size=5
    ),
    lambda x, w: ((x @ w.t()).square() * 0.5).sum(),
)
try:
    x, w = leaves()
    loss_and_grad = functional.autograd_loss_and_logits_grad(lambda z: z.square().sum())
    functional.chunked_linear_loss(x, w, loss_and_grad)
except ValueError as error:
    print(error)

# A graph that is kept must not be written over, whatever the engine would have said.
x, w = leaves()
loss = functional.chunked_linear_cross_entropy(x, w, target)
first = torch.autograd.grad(loss, (x, w), torch.tensor(0.5), retain_graph=True)
second = torch.autograd.grad(loss, (x, w), torch.tensor(0.5))
assert all(torch.equal(one, other) for one, other in zip(first, second))
try:
    torch.autograd.grad(
        functional.chunked_linear_cross_entropy(x, w, target), x, create_graph=True
    )[0].sum().backward()
except greyhound_ops.errors.NotDifferentiableTwiceError:
    print("second derivative refused")
"""
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    # Nothing is recorded inside an operator then: an error, not a gradient of zero.
    assert "got one without a graph" in lines.pop(5)
    assert lines == [
        "mean right",
        "none right",
        "log_probs right",
        "logits right",
        "loss right",
        "second derivative refused",
    ]


# --------------------------------------------------------------- a newer torch: the rewrite


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 64, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(x), target)


def _hide(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """Take a name away; a whole module where its members cannot be."""
    if "." in name:  # of a class written in C
        monkeypatch.setattr(torch_private, "_NEEDED_BY_REWRITE", ((module, f"{name}_gone"),))
    elif module.endswith("config"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    else:
        monkeypatch.delattr(f"{module}.{name}")


@pytest.mark.parametrize(("module", "name"), torch_private._NEEDED_BY_REWRITE)
def test_rewrite_says_what_it_lacks(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch_private.rewrite_lacks() is None
    _hide(monkeypatch, module, name)
    lacks = torch_private.rewrite_lacks()
    assert lacks is not None
    assert lacks.startswith(f"torch {torch.__version__} has no {module}.{name}")


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> str:
    """The rewrite lacks a name; the account is a new one, as in a new process."""
    account = report_module._Account()
    for module in (greyhound_lowering, greyhound_lowering.hooks, report_module):
        monkeypatch.setattr(module, "account", account)
    needed = (*torch_private._NEEDED_BY_REWRITE, ("torch._inductor.config", "no_such_hook"))
    monkeypatch.setattr(torch_private, "_NEEDED_BY_REWRITE", needed)
    reason = torch_private.rewrite_lacks()
    assert reason is not None
    return reason


def test_toggles_change_nothing_and_warn_once(
    lacking: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = torch_private.inductor_config()
    before = config.pre_grad_custom_pass
    with caplog.at_level(logging.WARNING):
        greyhound_lowering.enable()
        assert not greyhound_lowering.is_enabled()
        with greyhound_lowering.enabled():
            assert config.pre_grad_custom_pass is before
        greyhound_lowering.disable()
        greyhound_lowering.enable()
    assert config.pre_grad_custom_pass is before
    warned = [each for each in caplog.records if "the rewrite is off" in each.getMessage()]
    assert len(warned) == 1
    assert lacking in warned[0].getMessage()
    report = greyhound_lowering.explain()
    assert str(report) == f"the rewrite is off: {lacking}"
    assert report.to_dict()["unavailable"] == lacking
    assert lacking in report.to_html()


def test_wrong_settings_are_errors_all_the_same(lacking: str) -> None:
    with pytest.raises(TypeError, match="nonsense"):
        greyhound_lowering.enable(nonsense=1)
    with pytest.raises(Exception, match="nonsense"):
        torch.compile(Head(), backend="greyhound", options={"greyhound.nonsense": 1})(
            torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)
        )


def test_backend_compiles_without_the_rewrite(lacking: str, fresh_compiler: None) -> None:
    model = Head()
    x, target = torch.randn(16, 8, requires_grad=True), torch.randint(0, 64, (16,))
    expected = torch.autograd.grad(model(x, target) * 0.5, (x, model.head.weight))
    compiled = torch.compile(
        model, backend="greyhound", options={"greyhound.min_logits_bytes": 0}, fullgraph=True
    )
    found = torch.autograd.grad(compiled(x, target) * 0.5, (x, model.head.weight))
    torch.testing.assert_close(found, expected)
    report = greyhound_lowering.explain()
    assert report.decisions == ()
    assert str(report) == f"the rewrite is off: {lacking}"


def test_import_where_the_base_class_of_passes_is_gone() -> None:
    ran = python(
        """
import torch._inductor.custom_graph_pass as passes, torch
kept = passes.CustomGraphPass  # torch's own modules have taken it already
import torch._inductor.compile_fx
del passes.CustomGraphPass
import greyhound_lowering, greyhound_ops
print(greyhound_lowering.explain())
x, w = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8)
greyhound_ops.chunked_linear_cross_entropy(x, w, torch.zeros(4, dtype=torch.int64)).backward()
print(x.grad is not None, greyhound_lowering.is_enabled())
""",
        GREYHOUND_REWRITE="1",  # enabled by the import
    )
    assert ran.returncode == 0, ran.stderr
    first, second = ran.stdout.splitlines()
    assert first.startswith("the rewrite is off: torch ")
    assert first.endswith("has no torch._inductor.custom_graph_pass.CustomGraphPass")
    assert second == "True False"
    assert ran.stderr.count("the rewrite is off") == 1


# ------------------------------------------------ a newer torch: each function of torch_private

Check = Callable[[pytest.MonkeyPatch], None]
CHECKS: dict[str, Check] = {}


def without(function: Callable[..., Any]) -> Callable[[Check], Check]:
    """Register a check of a function without the private names that it uses."""

    def register(check: Check) -> Check:
        CHECKS[function.__name__] = check
        return check

    return register


@without(torch_private.graph_is_kept)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert torch_private.graph_is_kept()


@without(torch_private.is_plain_eager)
def _(patch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(2)
    assert torch_private.is_plain_eager(tensor)
    with patch.context() as inner:
        inner.delattr(torch._C._functorch, "is_functorch_wrapped_tensor")
        assert not torch_private.is_plain_eager(tensor)
    patch.delattr(torch._C, "_len_torch_dispatch_stack")
    assert not torch_private.is_plain_eager(tensor)


@without(torch_private.is_recording)
def _(patch: pytest.MonkeyPatch) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.is_recording())
        return x + 1

    make_fx(function)(torch.ones(2))
    assert seen == [True]
    patch.delattr(torch._C, "_len_torch_dispatch_stack")
    assert not torch_private.is_recording()


@without(torch_private.has_forward_tangent)
def _(patch: pytest.MonkeyPatch) -> None:
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        assert torch_private.has_forward_tangent(dual)
    patch.delattr(forward_ad, "_current_level")
    assert not torch_private.has_forward_tangent(torch.ones(2))


@without(torch_private.functorch_is_active)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(torch._C, "_are_functorch_transforms_active")
    assert not torch_private.functorch_is_active()


@without(torch_private.autograd_kernel)
def _(patch: pytest.MonkeyPatch) -> None:
    name = "torch._library.autograd"
    patch.setitem(sys.modules, name, types.ModuleType(name))
    overload = torch.ops.greyhound.linear_cross_entropy.default
    assert torch_private.autograd_kernel(overload, lambda *a: None, lambda *a: None) is None


@without(torch_private.inductor_config)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "torch._inductor.config", None)
    assert "torch._inductor.config.pre_grad_custom_pass" in str(torch_private.rewrite_lacks())


@without(torch_private.rewrite_lacks)
def _(patch: pytest.MonkeyPatch) -> None:
    importlib.import_module("torch._inductor.compile_fx")  # which wants the name itself
    patch.delattr("torch._subclasses.fake_tensor.FakeTensorMode")
    assert "FakeTensorMode" in str(torch_private.rewrite_lacks())


@without(torch_private.early_pass_options)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch_private, "inductor_config", types.SimpleNamespace)
    assert torch_private.early_pass_options() == {}


@without(torch_private.graph_pass_base)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.delattr("torch._inductor.custom_graph_pass.CustomGraphPass")
    assert torch_private.graph_pass_base() is object


@without(torch_private.compile_with_inductor)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "torch._inductor.compile_fx", None)
    patch.setattr(torch._dynamo, "lookup_backend", lambda name: lambda *args: (name, *args))
    graph: Any = object()
    assert torch_private.compile_with_inductor(graph, [1], {}) == ("inductor", graph, [1])
    with pytest.raises(ImportError):  # an option must not be dropped without a word
        torch_private.compile_with_inductor(graph, [1], {"max_autotune": True})


@without(torch_private.inductor_mode_options)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(torch._inductor, "list_mode_options")
    assert torch_private.inductor_mode_options("default") == {}
    with pytest.raises(AttributeError, match="list_mode_options"):
        torch_private.inductor_mode_options("reduce-overhead")


@without(torch_private.register_backend)
def _(patch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends import registry

    with patch.context() as inner:
        inner.delattr(registry, "_COMPILER_FNS")
        torch_private.register_backend(print, "greyhound-not-there")
    assert "greyhound-not-there" not in torch._dynamo.list_backends(exclude_tags=())
    patch.setitem(sys.modules, "torch._dynamo.backends", types.ModuleType("gone"))
    torch_private.register_backend(print, "greyhound-not-there")


@without(torch_private.compile_attempt)
def _(patch: pytest.MonkeyPatch) -> None:
    from torch import _guards

    with patch.context() as inner:
        inner.delattr(_guards.CompileContext, "current_trace_id")
        assert torch_private.compile_attempt() is None
    patch.delattr(_guards, "CompileContext")
    assert torch_private.compile_attempt() is None


@without(torch_private.count)
def _(patch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.utils

    patch.delattr(torch._dynamo.utils, "counters")
    torch_private.count("rewritten")


@without(torch_private.trace_artifact)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(torch._logging, "trace_structured")
    torch_private.trace_artifact("greyhound_rewrite", lambda: pytest.fail("nobody asks for it"))


def symbol(**node: Any) -> Any:
    """A symbolic size of a torch whose nodes have these attributes only."""
    return types.SimpleNamespace(node=types.SimpleNamespace(**node))


@without(torch_private.size_hint)
def _(patch: pytest.MonkeyPatch) -> None:
    assert torch_private.size_hint(symbol(hint=3)) == 3
    assert torch_private.size_hint(symbol()) is None


@without(torch_private.static_size)
def _(patch: pytest.MonkeyPatch) -> None:
    assert torch_private.static_size(symbol(maybe_as_int=lambda: 3)) == 3
    assert torch_private.static_size(symbol()) is None


@without(torch_private.size_parts)
def _(patch: pytest.MonkeyPatch) -> None:
    import sympy

    product = 2 * sympy.Symbol("s0")
    shapes = types.SimpleNamespace(create_symintnode=lambda term, hint: term)
    parts = torch_private.size_parts(symbol(expr=product, shape_env=shapes))
    assert parts is not None
    assert parts[1] == [2, sympy.Symbol("s0")]
    assert torch_private.size_parts(symbol(shape_env=shapes)) is None
    assert torch_private.size_parts(symbol(expr=product)) is None


@without(torch_private.legacy_reduction)
def _(patch: pytest.MonkeyPatch) -> None:
    from torch.nn import _reduction

    for average, reduce in itertools.product((None, True, False), repeat=2):
        expected = _reduction.legacy_get_string(average, reduce, emit_warning=False)
        assert torch_private.legacy_reduction(average, reduce) == expected


@without(torch_private.storage_id)
def _(patch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(4)
    assert torch_private.storage_id(tensor) == torch_private.storage_id(tensor[1:])
    storage = types.SimpleNamespace(data_ptr=lambda: 7)
    newer: Any = types.SimpleNamespace(untyped_storage=lambda: storage)
    assert torch_private.storage_id(newer) == 7


def _needs_fake_tensors(patch: pytest.MonkeyPatch) -> None:
    patch.delattr("torch._subclasses.fake_tensor.FakeTensor")
    assert "FakeTensor" in str(torch_private.rewrite_lacks())


for each in (
    torch_private.is_plain_fake,
    torch_private.fake_mode_of,
    torch_private.fresh_fake_mode,
):
    CHECKS[each.__name__] = _needs_fake_tensors


@without(torch_private.is_fake)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.delattr("torch._subclasses.fake_tensor.FakeTensor")
    assert not torch_private.is_fake(torch.ones(4))


@without(torch_private.linear_function)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(torch._C._nn, "linear")
    assert torch_private.linear_function() is torch.nn.functional.linear


@without(torch_private.constant_under_dynamo)
def _(patch: pytest.MonkeyPatch) -> None:
    # The mark is what the public decorator leaves, which imports Dynamo.
    theirs = torch.compiler.assume_constant_result(lambda: 1)
    ours = torch_private.constant_under_dynamo(lambda: 1)
    assert vars(ours).items() <= vars(theirs).items()
    assert ours() == 1


@without(torch_private.autograd_in_op)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(torch._C, "_ForceDispatchKeyGuard")
    with torch.no_grad(), torch_private.autograd_in_op():
        assert torch.is_grad_enabled()


@without(torch_private.mark_rows_dynamic)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "torch._dynamo", types.ModuleType("newer"))
    torch_private.mark_rows_dynamic(torch.ones(2))
    patch.delitem(sys.modules, "torch._dynamo")
    torch_private.mark_rows_dynamic(torch.ones(2))


@without(torch_private.is_compiled)
def _(patch: pytest.MonkeyPatch) -> None:
    assert torch_private.is_compiled(torch.compile(lambda x: x))
    assert torch_private.is_compiled(torch.compile(torch.nn.ReLU()))
    assert not torch_private.is_compiled(lambda x: x)


@without(torch_private.statically_equal)
def _(patch: pytest.MonkeyPatch) -> None:
    assert torch_private.statically_equal(2, 2)
    patch.delattr("torch.fx.experimental.symbolic_shapes.statically_known_true")
    assert not torch_private.statically_equal(2, 2)


@without(torch_private.decompositions)
def _(patch: pytest.MonkeyPatch) -> None:
    assert torch_private.decompositions(["_log_softmax", "no_such_operator"])
    patch.delattr("torch._decomp.get_decompositions")
    assert torch_private.decompositions(["_log_softmax"]) == {}


@without(torch_private.is_outermost_graph)
def _(patch: pytest.MonkeyPatch) -> None:
    graph = torch.fx.Graph()
    graph.placeholder("x").meta["grapharg"] = object()
    assert torch_private.is_outermost_graph(graph)
    graph = torch.fx.Graph()
    graph.placeholder("x")  # of a Dynamo that marks them otherwise
    assert not torch_private.is_outermost_graph(graph)


@without(torch_private.fresh_compile_cache)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.delattr("torch._inductor.utils.fresh_cache")
    with torch_private.fresh_compile_cache():
        pass


@without(torch_private.is_capturing)
def _(patch: pytest.MonkeyPatch) -> None:
    # Public names alone.
    assert not torch_private.is_capturing()


@without(torch_private.compile_in_op)
def _(patch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import mutation_guard

    patch.setattr(torch, "compile", lambda function, **options: function)
    patch.delattr(mutation_guard, "GenerationTracker")
    patch.delitem(sys.modules, "torch._dynamo.compiled_autograd", raising=False)
    assert torch_private.compile_in_op(lambda x: x + 1)(torch.ones(())) == 2


@without(torch_private.known_options)
def _(patch: pytest.MonkeyPatch) -> None:
    options = {"realize_opcount_threshold": 1, "triton.cudagraphs": False}
    assert torch_private.known_options(options) == options
    assert torch_private.known_options({"no_such": 1, "triton.no_such": 1}) == {}


@without(torch_private.compile_stance)
def _(patch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import eval_frame

    assert torch_private.compile_stance() == "default"
    with torch.compiler.set_stance("eager_on_recompile"):
        assert torch_private.compile_stance() == "eager_on_recompile"
    with torch.compiler.set_stance("force_eager"):
        assert torch_private.compile_stance() is None
    with torch.compiler.set_stance("default", force_backend="eager"):
        assert torch_private.compile_stance() is None
    patch.setattr(eval_frame, "_stance", types.SimpleNamespace(newer="default"))
    assert torch_private.compile_stance() is None
    patch.delattr(eval_frame, "_stance")
    assert torch_private.compile_stance() is None


@without(torch_private.process_state)
def _(patch: pytest.MonkeyPatch) -> None:
    unchanged = torch_private.process_state()
    assert unchanged is not None
    assert unchanged()
    with torch.set_grad_enabled(not torch.is_grad_enabled()):
        assert not unchanged()
    patch.delattr(torch._C._dynamo.guards, "GlobalStateGuard")
    assert torch_private.process_state() is None


@without(torch_private.compile_lock)
def _(patch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import convert_frame

    assert torch_private.compile_lock() is convert_frame.compile_lock
    patch.delattr(convert_frame, "compile_lock")
    with torch_private.compile_lock(), torch_private.compile_lock():
        pass


@without(torch_private.compile_traced)
def _(patch: pytest.MonkeyPatch) -> None:
    def compiled() -> Any:
        return torch_private.compile_traced(lambda x: [x + 1], [torch.ones(3, 2)], [True], {})

    for module, name in (
        ("torch._dispatch.python", "enable_python_dispatcher"),
        ("torch._dynamo.source", "ConstantSource"),
        ("torch._guards", "TracingContext"),
        ("torch._guards", "tracing"),
        ("torch._inductor.compile_fx", "compile_fx_inner"),
        ("torch._inductor.decomposition", "select_decomp_table"),
        ("torch._inductor.virtualized", "V"),
        ("torch._subclasses.fake_tensor", "FakeTensorMode"),
        ("torch.fx.experimental.proxy_tensor", "make_fx"),
        ("torch.fx.experimental.symbolic_shapes", "DimDynamic"),
        ("torch.fx.experimental.symbolic_shapes", "ShapeEnv"),
        ("torch.fx.experimental.symbolic_shapes", "ShapeEnv.create_symbol"),
        ("torch.fx.experimental.symbolic_shapes", "ShapeEnv.create_symintnode"),
        ("torch.fx.experimental.symbolic_shapes", "ShapeEnv.produce_guards_expression"),
        ("torch.fx.experimental.symbolic_shapes", "ShapeEnv.evaluate_guards_expression"),
    ):
        importlib.import_module(module)
        with patch.context() as here:
            here.delattr(f"{module}.{name}")
            assert compiled() is None, name
    function, serves = compiled()
    assert serves(5)
    (made,) = function([5, torch.ones(5, 2)])
    assert made.eq(2).all()


@without(torch_private.while_inductor_waits)
def _(patch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    events: list[str] = []
    theirs = AsyncCompile.wait
    with torch_private.while_inductor_waits(lambda: events.append("work")):
        for _ in range(2):
            AsyncCompile().wait({})
        events.append("behind")
    assert events == ["work", "behind"]
    assert AsyncCompile.wait is theirs
    # Nobody waits, or there is no such name: at the end.
    for gone in (False, True):
        events.clear()
        if gone:
            patch.delattr(AsyncCompile, "wait")
        with torch_private.while_inductor_waits(lambda: events.append("work")):
            events.append("in front")
        assert events == ["in front", "work"]


@without(torch_private.without_compiled_autograd)
def _(patch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import compiled_autograd

    patch.delattr(compiled_autograd, "_disable")
    with torch_private.without_compiled_autograd():
        pass


@without(torch_private.without_saved_tensors_hooks)
def _(patch: pytest.MonkeyPatch) -> None:
    # Public names alone: hooks that are around are not called.
    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("packed")

    leaf = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        with torch_private.without_saved_tensors_hooks():
            value = leaf.exp().sum()
        with pytest.raises(AssertionError, match="packed"):
            leaf.exp()
    value.backward()
    torch.testing.assert_close(leaf.grad, leaf.detach().exp())


@without(torch_private.storage_reference)
def _(patch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(2)
    reference = torch_private.storage_reference(tensor)
    assert reference.cdata == torch_private.storage_reference(tensor[1:]).cdata
    assert reference.cdata != torch_private.storage_reference(torch.ones(2)).cdata
    assert not reference.expired()
    del tensor
    assert reference.expired()
    patch.delattr("torch.multiprocessing.reductions.StorageWeakRef")
    kept = torch.ones(2)
    assert torch_private.storage_reference(kept) is None
    # What is not known to be its only reader's is copied.
    copy = gradients.to_write_over(kept)
    assert copy is not None
    assert copy.data_ptr() != kept.data_ptr()


@without(torch_private.guard_or_no)
def _(patch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    shapes, source = ShapeEnv(), ConstantSource("rows")
    rows = shapes.create_symintnode(
        shapes.create_symbol(7, source, DimDynamic.DYNAMIC), hint=7, source=source
    )
    assert torch_private.guard_or_no(True)
    assert torch_private.guard_or_no(rows < 11)
    assert not torch_private.guard_or_no(rows < 5)
    assert not torch_private.guard_or_no(shapes.create_unbacked_symint() < 11)
    patch.delattr("torch.fx.experimental.symbolic_shapes.guard_or_false")
    assert torch_private.guard_or_no(rows < 10)


@without(torch_private.reset_cuda_graphs)
def _(patch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(ImportError):
        import torch._inductor.cudagraph_trees

        patch.delattr(torch._inductor.cudagraph_trees, "reset_cudagraph_trees")
    torch_private.reset_cuda_graphs()


def _functions() -> list[str]:
    return [
        name
        for name, value in vars(torch_private).items()
        if inspect.isfunction(value)
        and value.__module__ == torch_private.__name__
        and not name.startswith("_")
    ]


@pytest.mark.parametrize("name", _functions())
def test_function_without_its_private_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name in CHECKS, f"torch_private.{name} needs a check of what it does without its names"
    CHECKS[name](monkeypatch)


def test_private_modules_are_imported_in_one_place() -> None:
    found = []
    for package in (ROOT / "greyhound_ops", ROOT / "lowering" / "greyhound_lowering"):
        for path in sorted(package.rglob("*.py")):
            if path.name == "torch_private.py":
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                found += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
                    for name in names
                    if name.startswith("torch._")
                ]
    assert not found, "\n".join(found)
