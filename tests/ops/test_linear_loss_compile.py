"""Any callable as a loss under torch.compile: one graph, one compile, the gradients of eager."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from greyhound_ops import reference
from greyhound_ops.functional import (
    autograd_loss_and_logits_grad,
    chunked_linear_loss,
    per_row,
    whole,
)
from greyhound_ops.modules import ChunkedLinearLoss
from greyhound_ops.ops import loss_call

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # A callable that falls back to eager is right and slow.
    pytest.mark.filterwarnings("error:.*runs eagerly inside the compiled graph"),
]
by_dynamic = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


@pytest.fixture(autouse=True)
def inner(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts the compiles of callables, which take a backend that is quicker than Inductor."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(
        loss_call, "compile_callable", lambda function: torch.compile(function, backend=counter)
    )
    return counter


def nll(logits: Tensor, target: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    return F.nll_loss(F.log_softmax(logits * scale, -1), target, reduction="sum")


def nll_and_grad(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_probabilities = torch.log_softmax(logits, -1)
    chosen = log_probabilities.gather(1, target.unsqueeze(1))
    return -chosen.sum(), log_probabilities.exp() - F.one_hot(target, logits.shape[1])


ADAPTER = autograd_loss_and_logits_grad(nll)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    # A graph's callable is kept, and with it what an earlier test compiled.
    loss_call._calls.clear()


def leaves(rows: int = 13, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {
        "x": torch.randn(rows, 8, dtype=dtype, requires_grad=True),
        "w": torch.randn(11, 8, dtype=dtype, requires_grad=True),
        "t": torch.randint(0, 11, (rows,)),
        "s": torch.tensor(1.3, dtype=dtype, requires_grad=True),
    }


def results(call: Callable[..., Tensor], given: dict[str, Any], **more: Any) -> list[Tensor | None]:
    """Loss and gradients; the upstream is not one."""
    own = {
        name: value.detach().clone().requires_grad_(value.requires_grad)
        for name, value in given.items()
    }
    loss = call(**own, **more)
    if loss.requires_grad:
        loss.backward(torch.full_like(loss, -1.7))
    return [loss.detach(), *(value.grad for value in own.values())]


def assert_same(ours: list[Tensor | None], truth: list[Tensor | None], tol: float = 1e-10) -> None:
    for one, other in zip(ours, truth, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=tol, atol=tol)


def run_chunked(x: Tensor, w: Tensor, t: Tensor, *, function: Any, **options: Any) -> Tensor:
    return chunked_linear_loss(x, w, function, t, **options)


def run_plain(x: Tensor, w: Tensor, t: Tensor, *, loss: Any = nll, **options: Any) -> Tensor:
    return reference.linear_loss(x, w, loss, t, **options)


def compiled(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


def plain(x: Tensor, w: Tensor, t: Tensor, s: Tensor) -> Tensor:
    return reference.linear_loss(x.tanh(), w, nll, t, s).square()


def head(x: Tensor, w: Tensor, t: Tensor, s: Tensor) -> Tensor:
    return chunked_linear_loss(x.tanh(), w, ADAPTER, t, s, chunk_size=5).square()


@pytest.mark.fault("B29", "B49")
@by_dynamic
@pytest.mark.parametrize("frozen", [(), ("w",), ("x", "w"), ("x", "w", "s")], ids="".join)
def test_gradients(frozen: tuple[str, ...], dynamic: bool) -> None:
    given = leaves()
    for name in frozen:
        given[name].requires_grad_(False)
    assert_same(results(compiled(head, dynamic=dynamic), given), results(plain, given))


@pytest.mark.fault("B40")
@by_dynamic
def test_one_compile_serves_every_row_count(
    dynamic: bool, inner: CompileCounterWithBackend
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(head, backend=counter, dynamic=dynamic or None)
    counts = []
    # From one chunk to many, dividing and not.
    for rows in (13, 4, 10, 203):
        given = leaves(rows)
        assert_same(results(call, given), results(plain, given))
        counts.append((counter.frame_count, inner.frame_count))
    # Without dynamic=True the second row count makes a symbol of the first; the callable's rows
    # always are one.
    assert counts[-1][0] - counts[0][0] == (0 if dynamic else 1)
    assert counts[-1][1] == counts[0][1]


@pytest.mark.fault("B39")
def test_compiled_callable_meets_many_chunk_lengths() -> None:
    # In an eager call: chunks of two lengths, and other ones with every batch.
    counter = CompileCounterWithBackend("aot_eager")
    direct = torch.compile(nll_and_grad, backend=counter)
    adapter = autograd_loss_and_logits_grad(torch.compile(nll, backend=counter))
    for function, compiles in ((direct, 1), (adapter, 1)):
        counter.frame_count = 0
        for rows, size in ((13, 5), (24, 7), (9, 9), (40, 11)):
            given = leaves(rows)
            del given["s"]
            call = functools.partial(run_chunked, function=function, chunk_size=size)
            ours = results(call, given)
            assert_same(ours, results(run_plain, given))
        assert counter.frame_count == compiles


def test_compiled_adapter_in_eager() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(autograd_loss_and_logits_grad(nll), backend=counter, fullgraph=True)
    given = leaves()
    del given["s"]
    ours = results(lambda x, w, t: chunked_linear_loss(x, w, function, t, chunk_size=5), given)
    assert_same(ours, results(run_plain, given))
    assert counter.frame_count == 1


# ------------------------------------------------------------------------------------- callables


class Callables:
    """Losses of the same numbers in every form that a callable may have."""

    def method(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return nll_and_grad(logits, target)

    def __call__(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return nll_and_grad(logits, target)


class Loss(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return nll(logits, target)


OUTSIDE: dict[str, Callable[[], Any]] = {
    "function": lambda: nll_and_grad,
    "lambda": lambda: lambda logits, target: nll_and_grad(logits, target),
    "adapter": lambda: ADAPTER,
    "adapter-of-module": lambda: autograd_loss_and_logits_grad(Loss()),
    "adapter-of-method": lambda: autograd_loss_and_logits_grad(Loss().forward),
    "adapter-of-torchs": lambda: autograd_loss_and_logits_grad(
        functools.partial(F.cross_entropy, reduction="sum")
    ),
    "adapter-of-compiled": lambda: autograd_loss_and_logits_grad(
        torch.compile(nll, backend="aot_eager")
    ),
    "partial": lambda: functools.partial(nll_and_grad),
    "module-of-method": lambda: ChunkedLinearLoss(Callables().method, chunk_size=5),
    "module-of-instance": lambda: ChunkedLinearLoss(Callables(), chunk_size=5),
    "module-of-compiled": lambda: ChunkedLinearLoss(
        torch.compile(nll_and_grad, backend="aot_eager"), chunk_size=5
    ),
    "module-of-adapter": lambda: ChunkedLinearLoss(ADAPTER, chunk_size=5),
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_callables_from_outside(kind: str) -> None:
    function = OUTSIDE[kind]()
    given = leaves()
    del given["s"]

    def call(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        if isinstance(function, nn.Module):
            return function(x, w, t)
        return chunked_linear_loss(x, w, function, t, chunk_size=5)

    truth = results(run_plain, given)
    assert_same(results(compiled(call), given), truth)


def test_callables_made_inside() -> None:
    given = leaves()
    del given["s"]
    factor = 2.0

    def calls() -> Iterator[Callable[..., Tensor]]:
        yield lambda x, w, t: chunked_linear_loss(x, w, autograd_loss_and_logits_grad(nll), t)
        yield lambda x, w, t: chunked_linear_loss(
            x, w, autograd_loss_and_logits_grad(lambda z, t: nll(z, t)), t
        )
        yield lambda x, w, t: chunked_linear_loss(x, w, lambda z, t: nll_and_grad(z, t), t)
        yield lambda x, w, t: chunked_linear_loss(
            x, w, autograd_loss_and_logits_grad(lambda z, t: nll(z, t, factor / 2)), t
        )
        yield lambda x, w, t: chunked_linear_loss(
            x,
            w,
            autograd_loss_and_logits_grad(functools.partial(F.cross_entropy, reduction="sum")),
            t,
        )

    truth = results(run_plain, given)
    for call in calls():
        torch._dynamo.reset()
        assert_same(results(compiled(call), given), truth)


def test_closures_are_told_apart() -> None:
    # Dynamo guards a function by its code, which closures of one def share.
    def make(factor: float) -> tuple[Any, ...]:
        scale = torch.tensor(factor, dtype=torch.float64)
        return (
            lambda z, t: tuple(factor * each for each in nll_and_grad(z, t)),
            lambda z, t: tuple(scale * each for each in nll_and_grad(z, t)),
            autograd_loss_and_logits_grad(lambda z, t: factor * nll(z, t)),
            functools.partial(lambda z, t: tuple(factor * each for each in nll_and_grad(z, t))),
        )

    def scaled(factor: float) -> Callable[..., Tensor]:
        return lambda z, t: factor * nll(z, t)

    given = leaves()
    del given["s"]

    @compiled
    def call(x: Tensor, w: Tensor, t: Tensor, function: Any) -> Tensor:
        return chunked_linear_loss(x, w, function, t, chunk_size=5)

    one, three = make(1.0), make(3.0)
    for first, second in zip(one, three, strict=True):
        torch._dynamo.reset()
        for function, factor in ((first, 1.0), (second, 3.0)):
            truth = results(functools.partial(run_plain, loss=scaled(factor)), given)
            assert_same(results(call, given, function=function), truth)


def test_function_as_an_argument() -> None:
    def loss(logits: Tensor, target: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        return nll(activation(logits), target)

    adapter = autograd_loss_and_logits_grad(loss)
    given = leaves()
    del given["s"]

    @compiled
    def call(x: Tensor, w: Tensor, t: Tensor, activation: Any) -> Tensor:
        return chunked_linear_loss(x, w, adapter, t, activation=activation)

    def scaled(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda z: z * factor

    for activation in (scaled(2.0), scaled(3.0), torch.tanh):
        truth = results(functools.partial(run_plain, loss=loss, activation=activation), given)
        assert_same(results(call, given, activation=activation), truth)


@pytest.mark.parametrize("function", [Callables(), Loss()], ids=["instance", "module"])
def test_what_cannot_be_named_is_refused_with_a_cure(function: Any) -> None:
    given = leaves()

    def call(x: Tensor, w: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return chunked_linear_loss(x, w, function, t)

    with pytest.raises(Exception, match=r"ChunkedLinearLoss.*outside the region"):
        results(compiled(call), given)


def test_captured_learnable_tensor_is_an_error() -> None:
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    adapter = autograd_loss_and_logits_grad(lambda z, t: nll(z * scale, t))
    for function in (
        adapter,
        lambda z, t: (scale * z.sum(), torch.ones_like(z)),
    ):

        def call(x: Tensor, w: Tensor, t: Tensor, s: Tensor, function: Any = function) -> Tensor:
            return chunked_linear_loss(x, w, function, t, chunk_size=5)

        with pytest.raises(ValueError, match=r"holds a tensor of shape \[\] that requires grad"):
            results(compiled(call), leaves())
    eager = torch.compile(adapter, backend="aot_eager")
    with pytest.raises(ValueError, match=r"holds a tensor of shape \[\] that requires grad"):
        results(lambda x, w, t, s: chunked_linear_loss(x, w, eager, t), leaves())


def test_parameters_of_a_module_learn() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([1.3] * 11, dtype=torch.float64))

        def forward(self, logits: Tensor, target: Tensor) -> Tensor:
            return nll(logits * self.scale, target)

    module = Scaled()
    criterion = ChunkedLinearLoss(autograd_loss_and_logits_grad(module), chunk_size=5)
    given = leaves()
    del given["s"]
    truth = results(lambda x, w, t: reference.linear_loss(x, w, module, t), given)
    expected, module.scale.grad = module.scale.grad, None
    assert_same(results(compiled(criterion_of(criterion)), given), truth)
    torch.testing.assert_close(module.scale.grad, expected)


def test_parameters_and_buffers_of_copies_and_compiled_modules() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))
            self.register_buffer("factor", torch.tensor(2.0, dtype=torch.float64))

        def forward(self, logits: Tensor, target: Tensor) -> Tensor:
            return self.factor * nll(logits * self.scale, target)

    module = Shifted()
    criterion = ChunkedLinearLoss(autograd_loss_and_logits_grad(module), chunk_size=5)
    other = copy.deepcopy(criterion)
    other.loss_fn.factor.fill_(3.0)
    pickled = pickle.loads(pickle.dumps(ChunkedLinearLoss(autograd_loss_and_logits_grad(Loss()))))
    within = torch.compile(module, backend="aot_eager")
    given = leaves()
    del given["s"]
    for call, loss in (
        (criterion, module),
        (other, other.loss_fn),
        (pickled, nll),
        (ChunkedLinearLoss(autograd_loss_and_logits_grad(within), chunk_size=5), module),
    ):
        module.scale.grad = None
        truth = results(functools.partial(run_plain, loss=loss), given)
        expected, module.scale.grad = module.scale.grad, None
        assert_same(results(compiled(criterion_of(call)), given), truth)
        torch.testing.assert_close(module.scale.grad, expected)


def criterion_of(criterion: nn.Module) -> Callable[..., Tensor]:
    return lambda x, w, t: criterion(x, w, t)


# ------------------------------------------------------------------------------------- arguments


def test_numbers_may_change_and_be_symbols() -> None:
    def loss(logits: Tensor, target: Tensor, power: int, rows: int, scale: float) -> Tensor:
        return nll(logits, target) * scale * power / rows

    adapter = autograd_loss_and_logits_grad(loss)
    counter = CompileCounterWithBackend("aot_eager")

    @functools.partial(compiled, backend=counter, dynamic=True)
    def call(x: Tensor, w: Tensor, t: Tensor, power: int, scale: float) -> Tensor:
        return chunked_linear_loss(x, w, adapter, t, power, x.shape[0], scale=scale, chunk_size=5)

    counts = []
    for rows, power, scale in ((13, 2, 0.5), (9, 3, 0.5), (22, 5, 0.5), (22, 5, 1.5)):
        given = leaves(rows)
        del given["s"]
        options = {"power": power, "rows": rows, "scale": scale}
        truth = results(functools.partial(run_plain, loss=loss, **options), given)
        assert_same(results(call, given, power=power, scale=scale), truth)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] == counts[2]


def test_constants_and_containers() -> None:
    def loss(logits: Tensor, items: Any, *, options: dict[str, Any], dtype: Any) -> Tensor:
        target, (scale, nothing) = items
        assert nothing is None
        result = F.cross_entropy(logits.to(dtype) * scale, target, **options)
        return result.double()

    adapter = autograd_loss_and_logits_grad(loss)

    @compiled
    def call(x: Tensor, w: Tensor, t: Tensor, s: Tensor, smoothing: float, dtype: Any) -> Tensor:
        return chunked_linear_loss(
            x, w, adapter, [per_row(t), (whole(s), None)], chunk_size=5, dtype=dtype,
            options={"reduction": "sum", "label_smoothing": smoothing},
        )  # fmt: skip

    given = leaves()
    for smoothing, dtype in ((0.0, torch.float64), (0.1, torch.float64), (0.1, torch.float32)):
        options = {"reduction": "sum", "label_smoothing": smoothing}

        def expected(options: Any = options, dtype: Any = dtype, **leaves: Tensor) -> Tensor:
            items = [leaves["t"], (leaves["s"], None)]
            return reference.linear_loss(
                leaves["x"], leaves["w"], loss, items, options=options, dtype=dtype
            )

        truth = results(expected, given)
        tol = 1e-10 if dtype == torch.float64 else 1e-5
        ours = results(call, given, smoothing=smoothing, dtype=dtype)
        assert_same(ours, truth, tol)


def test_rows_as_many_as_classes_change_nothing() -> None:
    # Which tensors are rows is found inside the op: no guard compares N with V.
    counter = CompileCounterWithBackend("aot_eager")

    @functools.partial(compiled, backend=counter, dynamic=True)
    def call(x: Tensor, w: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return chunked_linear_loss(x, w, ADAPTER, t, scale=whole(s.expand(11)), chunk_size=4)

    counts = []
    for rows in (13, 11, 4):
        given = leaves(rows)
        truth = results(lambda x, w, t, s: reference.linear_loss(x, w, nll, t, s.expand(11)), given)
        assert_same(results(call, given), truth)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1]


def test_no_grad_after_training() -> None:
    given, call = leaves(), compiled(head)
    trained = results(call, given)
    with torch.no_grad():
        loss = call(**given)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, trained[0])


@pytest.mark.parametrize("inside", [True, False], ids=["region-inside", "region-outside"])
def test_autocast(inside: bool) -> None:
    given = leaves(dtype=torch.float32)

    def call(x: Tensor, w: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return chunked_linear_loss(x, w, ADAPTER, t, s, chunk_size=5)

    def under(function: Any) -> Any:
        def run(**kwargs: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return function(**kwargs)

        return run

    ours = under(compiled(call)) if inside else compiled(under(call))
    assert_same(results(ours, given), results(under(call), given), 1e-3)


def test_leading_dimensions() -> None:
    given = leaves(12)
    del given["s"]

    def call(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return chunked_linear_loss(x.view(3, 4, 8), w, ADAPTER, t.view(3, 4), chunk_size=5)

    truth = results(run_plain, given)
    assert_same(results(compiled(call), given), truth)


@pytest.mark.filterwarnings("default:.*runs eagerly inside the compiled graph")
def test_callable_that_cannot_be_compiled_runs_eagerly() -> None:
    seen: list[int] = []

    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            return logits.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    def loss(logits: Tensor, target: Tensor, scale: Tensor) -> Tensor:
        seen.append(logits.shape[0])
        torch._dynamo.graph_break()
        return nll(Opaque.apply(logits), target, scale)

    adapter = autograd_loss_and_logits_grad(loss)

    def call(x: Tensor, w: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return chunked_linear_loss(x.tanh(), w, adapter, t, s, chunk_size=5).square()

    given = leaves()
    run = compiled(call)
    with pytest.warns(UserWarning, match="runs eagerly inside the compiled graph"):
        assert_same(results(run, given), results(plain, given))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(results(run, given), results(plain, given))


def test_error_of_the_callable_is_its_own() -> None:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return logits.sum(1)

    adapter = autograd_loss_and_logits_grad(loss)

    def call(x: Tensor, w: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return chunked_linear_loss(x, w, adapter, t, chunk_size=5)

    with pytest.raises(ValueError, match=r"expected a scalar loss per chunk, got shape \[5\]"):
        results(compiled(call), leaves())


# ------------------------------------------------------------------------------------------ keys


def test_key_of_another_process() -> None:
    op = torch.ops.greyhound.linear_loss
    x, w = torch.randn(5, 3), torch.randn(4, 3)
    with pytest.raises(RuntimeError, match="call: expected the name of a callable of this process"):
        op(x, w, None, [], [], [], "process:0123:4|1|('tuple',)")


def test_importable_function_is_found_again() -> None:
    # What a warm cache of another process holds: a key, and a module that can be imported.
    module = types.ModuleType("losses_of_a_test")
    exec(
        "def loss_and_grad(logits, scale):\n    return logits.sum() * scale, logits * 0 + scale",
        module.__dict__,
    )
    module.loss_and_grad.__module__ = module.__name__
    import sys

    sys.modules[module.__name__] = module
    try:
        structure = loss_call.flatten(((2.0,), {}, {}), loss_call.Leaves([], [], []))
        token = loss_call.name_callable(module.loss_and_grad)
        key = loss_call.name_call(token, False, structure)
        assert token.startswith("import:losses_of_a_test:loss_and_grad:")
        del loss_call._calls[key], loss_call._kept[token]
        x, w = torch.randn(5, 3), torch.randn(4, 3)
        op = functools.partial(torch.ops.greyhound.linear_loss, x, w, None, [], [], [2.0])
        torch.testing.assert_close(op(key)[0], 2 * (x @ w.t()).sum())
        del loss_call._calls[key]
        # The same name with other code is another callable.
        exec("def loss_and_grad(logits, scale):\n    return logits.sum(), logits * 0 + 1",
             module.__dict__)  # fmt: skip
        with pytest.raises(RuntimeError, match="with the same code"):
            op(key)
    finally:
        del sys.modules[module.__name__]


def test_graph_keeps_its_callable() -> None:
    def region() -> Callable[..., Tensor]:
        adapter = autograd_loss_and_logits_grad(lambda z, t, s: nll(z, t, s))
        return compiled(lambda x, w, t, s: chunked_linear_loss(x.tanh(), w, adapter, t, s).square())

    call, given = region(), leaves()
    truth = results(plain, given)
    for _ in range(2):
        assert_same(results(call, given), truth)


# --------------------------------------------------------------------------------------- inductor


def test_callable_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def loss(logits: Tensor, scale: Tensor) -> Tensor:
        return (logits.tanh() * scale).sum()

    adapter = autograd_loss_and_logits_grad(loss)
    given = leaves(dtype=torch.float32)

    def call(x: Tensor, w: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return chunked_linear_loss(x, w, adapter, s, chunk_size=5)

    truth = results(lambda x, w, t, s: reference.linear_loss(x, w, loss, s), given)
    assert_same(results(compiled(call), given), truth, 1e-4)


@pytest.mark.gpu
def test_both_by_inductor_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    call = compiled(head, backend="inductor", dynamic=True)
    for rows in (13, 200, 37):
        given = {
            name: value.detach().cuda().requires_grad_(value.requires_grad)
            for name, value in leaves(rows, torch.float32).items()
        }
        assert_same(results(call, given), results(plain, given), 1e-3)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One call of the op."""

    args: tuple[Any, ...]
    flags: dict[str, Any]


def sample(
    loss: Callable[..., Any],
    *args: Any,
    dtype: torch.dtype = torch.float32,
    rows: tuple[int, ...] = (13,),
    bias: bool = False,
    frozen: tuple[str, ...] = (),
    adapter: bool = True,
    weight: Callable[[Tensor], Tensor] = lambda value: value,
    **options: Any,
) -> Sample:
    held = loss_call.Leaves([], [], [])
    structure = loss_call.flatten((args, {}, {}), held)
    key = loss_call.keep_for_good(loss_call.LossCall(loss, adapter, structure))
    tensors = {
        "input": torch.randn(*rows, 8, dtype=dtype),
        "weight": weight(torch.randn(11, 8, dtype=dtype)),
        "bias": torch.randn(11, dtype=dtype) if bias else None,
    }
    wanted = {name: tensors[name] is not None and name not in frozen for name in tensors}
    flags = {f"need_grad_{name}": value for name, value in wanted.items()}
    operands = [
        value.detach().requires_grad_() if wanted[name] else value
        for name, value in tensors.items()
    ]
    flags["need_grad_tensors"] = [each.requires_grad for each in held.tensors]
    return Sample(
        (*operands, held.tensors, held.ints, held.floats, key),
        {**flags, "grad_mode": True, "chunk_size": 5, **options},
    )


def target(rows: int = 13) -> Tensor:
    return torch.randint(0, 11, (rows,))


def learnable(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(shape, dtype=dtype).add(0.5).requires_grad_()


def total(logits: Tensor, *_: Any) -> Tensor:
    return logits.square().sum()


def with_number(logits: Tensor, target: Tensor, power: int, scale: float) -> Tensor:
    return nll(logits, target) * scale * power


SAMPLES: dict[str, Callable[[], Sample]] = {
    "no-arguments": lambda: sample(total),
    "target": lambda: sample(nll, target()),
    "numbers": lambda: sample(with_number, target(), 2, 0.5),
    "bias": lambda: sample(nll, target(), bias=True),
    "learnable-whole": lambda: sample(nll, target(), learnable()),
    "learnable-rows": lambda: sample(nll, target(), learnable(13, 1), bias=True),
    "learnable-alone": lambda: sample(
        nll, target(), learnable(), frozen=("input", "weight", "bias")
    ),
    "direct": lambda: sample(nll_and_grad, target(), adapter=False),
    "frozen-weight": lambda: sample(nll, target(), bias=True, frozen=("weight",)),
    "frozen-input": lambda: sample(nll, target(), frozen=("input",)),
    "forward": lambda: sample(nll, target(), frozen=("input", "weight")),
    "leading": lambda: sample(nll, target(6), rows=(2, 3)),
    "no-rows": lambda: sample(nll, target(0), learnable(), rows=(0,), bias=True),
    "bfloat16": lambda: sample(
        nll, target(), learnable(dtype=torch.bfloat16), dtype=torch.bfloat16, bias=True
    ),
    "float16": lambda: sample(
        nll, target(), learnable(dtype=torch.float16), dtype=torch.float16, bias=True
    ),
    "float16-in-weight": lambda: sample(
        nll, target(), dtype=torch.float16, grad_weight_accum_dtype="weight"
    ),
    "float64": lambda: sample(nll, target(), dtype=torch.float64),
    "transposed": lambda: sample(nll, target(), weight=lambda value: value.t().contiguous().t()),
    "products-in-bfloat16": lambda: sample(nll, target(), compute_dtype=torch.bfloat16, bias=True),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_opcheck(case: str) -> None:
    made = SAMPLES[case]()
    torch.library.opcheck(torch.ops.greyhound.linear_loss.default, made.args, made.flags)


def test_flags_are_checked() -> None:
    op = torch.ops.greyhound.linear_loss
    made = sample(nll, target(), learnable())
    for name, value, message in (
        ("need_grad_input", False, "need_grad_input: expected True, since input requires grad"),
        ("need_grad_tensors", [False, False], "expected True for tensor 1"),
        ("need_grad_tensors", [True], "expected one flag per tensor, 2, got 1"),
        ("need_grad_bias", True, "need_grad_bias: expected False, since bias is None"),
        ("grad_weight_accum_dtype", "fp8", "grad_weight_accum_dtype: expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            op(*made.args, **{**made.flags, name: value})
