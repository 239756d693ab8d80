"""Rewritten graphs under every mode of ``torch.compile`` and what surrounds a training step.

CUDA graphs, autotuning, compiled autograd, donated buffers; each against plain torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import compilation_time_metrics, counters

import greyhound_lowering
from greyhound_ops import config, torch_private
from greyhound_ops.ops import row_region
from lowering.rewriting import TINY, TINY_OPTIONS, UPSTREAM, assert_same_results, reasons, run

B, T, D, V = 2, 6, 8, 37


class Model(nn.Module):
    """A trunk and a head; subclasses say what is lost."""

    op: str

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(D, D)
        self.head = nn.Linear(D, V)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.body(x).tanh(), y)

    def loss(self, hidden: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError


class CrossEntropy(Model):
    op = "greyhound::linear_cross_entropy"

    def loss(self, hidden: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


class Linear(Model):
    """Linear in the values per row: gradients are made in the forward."""

    op = "greyhound::row_region"

    def loss(self, hidden: Tensor, y: Tensor) -> Tensor:
        logits = self.head(hidden)
        lse = logits.logsumexp(-1)
        picked = logits.gather(-1, y[..., None]).squeeze(-1)
        return (lse - picked).mean() + 1e-2 * (lse**2).mean()


class NotLinear(Model):
    """What a row is worth depends on the others: the backward projects once more."""

    op = "greyhound::row_region"

    def loss(self, hidden: Tensor, y: Tensor) -> Tensor:
        log_p = self.head(hidden).log_softmax(-1).gather(-1, y[..., None]).squeeze(-1)
        return log_p.sum(-1).exp().add(1).log().mean() - log_p.square().mean().sqrt()


class GraphBreak(NotLinear):
    """Trunk and loss in two graphs, as with regional compilation."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        torch._dynamo.graph_break()
        return self.loss(hidden, y) * hidden.square().mean()


KINDS = [CrossEntropy, Linear, NotLinear, GraphBreak]


def batch(seed: int, device: Any = "cpu", length: int = T) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, length, D, generator=generator).to(device).requires_grad_()
    return x, torch.randint(0, V, (B, length), generator=generator).to(device)


@pytest.fixture(autouse=True)
def _clean(fresh_compiler: None) -> Iterator[None]:
    greyhound_lowering.clear_report()
    with torch._dynamo.config.patch(compiled_autograd=False):
        yield
    torch._dynamo.compiled_autograd.reset()


def assert_rewritten(kind: type[Model], graphs: int = 1) -> None:
    ops = [each.op for each in greyhound_lowering.explain().decisions]
    assert ops == [kind.op] * graphs, reasons()


def assert_same(kind: type[Model], compile_: Callable[[Any], Any], **arguments: Any) -> None:
    """Loss and every gradient of a compiled model against the plain one and fp64."""
    plain = run(kind(), batch(1), **arguments)

    def make() -> tuple[Model, tuple[Tensor, ...]]:
        return kind().double(), (batch(1)[0].detach().double().requires_grad_(), batch(1)[1])

    module = kind()
    value = run(module, batch(1), compiled=compile_(module), **arguments)
    assert_same_results(plain, value, run(*make(), **arguments))
    assert_rewritten(kind)


# ------------------------------------------------------------------------------- modes on the CPU


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (CrossEntropy, "max-autotune-no-cudagraphs"),
        (GraphBreak, "reduce-overhead"),
    ],
)
def test_mode_of_the_backend(kind: type[Model], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREYHOUND_REWRITE_MIN_BYTES", "0")
    assert_same(kind, lambda module: torch.compile(module, backend="greyhound", mode=mode))


def test_mode_while_enabled() -> None:
    with greyhound_lowering.enabled(**TINY):
        assert_same(Linear, lambda module: torch.compile(module, mode="max-autotune"))


def test_mode_and_settings_together() -> None:
    """``torch.compile`` takes a mode or options; a mode's own options can be given as options."""
    options = {**torch._inductor.list_mode_options("max-autotune-no-cudagraphs"), **TINY_OPTIONS}
    assert options["max_autotune"]
    assert_same(
        NotLinear, lambda module: torch.compile(module, backend="greyhound", options=options)
    )


def test_reset_of_dynamo_reaches_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for Inductor itself: else the memory pools of recorded graphs would outlive them."""
    from torch._inductor import cudagraph_trees

    calls: list[None] = []
    monkeypatch.setattr(cudagraph_trees, "reset_cudagraph_trees", lambda: calls.append(None))
    monkeypatch.setenv("GREYHOUND_REWRITE_MIN_BYTES", "0")
    torch.compile(Linear(), backend="greyhound", mode="reduce-overhead")(*batch(1))
    assert not calls
    torch._dynamo.reset()
    assert calls


# --------------------------------------------------------------------- what is compiled inside ops


@contextlib.contextmanager
def compiled_bodies() -> Iterator[None]:
    with config.override(region_body="compiled"):
        row_region._compiled_chunk.cache_clear()
        yield
    row_region._compiled_chunk.cache_clear()


def generation() -> int:
    return int(torch._dynamo.mutation_guard.GenerationTracker.generation)


@pytest.mark.parametrize("kind", [Linear, NotLinear])
def test_compiled_bodies_are_no_steps_of_the_user(kind: type[Model]) -> None:
    """CUDA graph trees free what an earlier step holds, and count steps by compiled calls."""
    with compiled_bodies():
        module = kind()
        compiled = torch.compile(module, backend="greyhound", options=TINY_OPTIONS)
        for _ in range(2):  # the first call compiles
            before = generation()
            loss = compiled(*batch(1))
            assert generation() == before + 1
            loss.backward()
            assert generation() == before + 1
        assert row_region._compiled_chunk.cache_info().currsize >= 1
    assert_rewritten(kind)


def test_compiled_bodies_record_no_cuda_graphs() -> None:
    """They run where one is recorded; the two cannot nest, whatever the settings of the process."""
    with compiled_bodies():
        assert_same(
            Linear, lambda module: torch.compile(module, backend="greyhound", options=TINY_OPTIONS)
        )
        torch._dynamo.reset()
        row_region._compiled_chunk.cache_clear()
        counters.clear()
        with torch._inductor.config.patch({"triton.cudagraphs": True}):
            # On the CPU every graph that should be recorded is skipped, and counted.
            torch.compile(lambda x: x.sin())(torch.ones(3))
            assert counters["inductor"]["cudagraph_skips"] == 1
            hidden, weight = torch.randn(11, D), torch.randn(V, D)
            body = "def body(logits, row_args, whole_args): return [logits[0].sum(1)]"
            (made,), _, _ = torch.ops.greyhound.row_region(
                [hidden], [weight], [], [], [], body, "float32", [False], [], chunk_size=5
            )
        torch.testing.assert_close(made, (hidden @ weight.t()).sum(1))
        assert row_region._compiled_chunk.cache_info().currsize == 1
        assert counters["inductor"]["cudagraph_skips"] == 1


def test_nothing_is_compiled_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, module = run(NotLinear(), batch(1)), NotLinear()
    compiled = torch.compile(module, backend="greyhound", options=TINY_OPTIONS)

    def compiles() -> bool:
        before = len(compilation_time_metrics.get("compile_fx_inner", ()))
        module.zero_grad()
        assert_same_results(plain, run(module, batch(1), compiled=compiled), None)
        return len(compilation_time_metrics.get("compile_fx_inner", ())) != before

    with compiled_bodies():
        with monkeypatch.context() as patch:
            assert compiles()
            row_region._compiled_chunk.cache_clear()
            patch.setattr(torch_private, "is_capturing", lambda: True)
            assert not compiles()
        assert compiles()  # later on
        with monkeypatch.context() as patch:
            patch.setattr(torch_private, "is_capturing", lambda: True)
            assert not compiles()
    assert not row_region._not_compilable


# ------------------------------------------------------------------------------ compiled autograd


@pytest.mark.parametrize(
    ("kind", "bodies"),
    [(CrossEntropy, "eager"), (Linear, "eager"), (NotLinear, "compiled")],
)
def test_compiled_autograd(kind: type[Model], bodies: Any) -> None:
    """One capture, the step's: what an op differentiates by itself is none."""
    plain = run(kind(), batch(1))
    module = kind()
    compiled = torch.compile(module, backend="greyhound", options=TINY_OPTIONS)
    backward = torch.compile(backend="greyhound", options=TINY_OPTIONS)
    with (
        config.override(region_body=bodies),
        torch._dynamo.compiled_autograd._enable(backward),
    ):
        value = run(module, batch(1), compiled=compiled)
    assert_same_results(plain, value, None)
    assert counters["compiled_autograd"]["captures"] == 1
    assert_rewritten(kind)


def test_compiled_autograd_by_configuration() -> None:
    """The whole step in one compiled function, as torch's documentation asks for."""
    plain = run(NotLinear(), batch(1))
    module, given = NotLinear(), batch(1)
    with torch._dynamo.config.patch(compiled_autograd=True):

        @torch.compile(backend="greyhound", options=TINY_OPTIONS)
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = module(x, y)
            (loss * UPSTREAM).backward()
            return loss.detach()

        loss = step(*given)
    torch.testing.assert_close(loss, plain.loss)
    grads = {name: p.grad for name, p in module.named_parameters()}
    torch.testing.assert_close({**grads, "input 0": given[0].grad}, plain.grads)
    assert_rewritten(NotLinear)


# ------------------------------------------------------------------------------- donated buffers


def twice(kind: type[Model], backend: str, retain: bool, **options: Any) -> Any:
    """Gradients after two backward passes, or the second's error."""
    torch._dynamo.reset()
    module = kind()
    try:
        loss = torch.compile(module, backend=backend, **options)(*batch(1))
        (loss * UPSTREAM).backward(retain_graph=retain)
        loss.backward()
    except RuntimeError as error:
        return str(error).split(".")[0]
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize(
    ("kind", "retain", "donated"),
    [(Linear, True, True), (Linear, True, False), (NotLinear, True, False), (Linear, False, True)],
)
def test_second_backward(kind: type[Model], retain: bool, donated: bool) -> None:
    """Right where torch allows it, else torch's own error."""
    with torch._functorch.config.patch(donated_buffer=donated):
        plain = twice(kind, "aot_eager", retain)
        value = twice(kind, "greyhound", retain, options=TINY_OPTIONS)
    assert_rewritten(kind)
    if donated and isinstance(value, str):
        assert "donated" in value or "second time" in value
        return
    if retain:
        torch.testing.assert_close(value, plain)
    else:
        assert isinstance(value, str)
        assert value == plain


# ------------------------------------------------------------------------------------- on the GPU


def grads_of(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Copies: a recorded graph writes its outputs to the same memory again."""
    found = {"input": x, **dict(module.named_parameters())}
    return {name: each.grad.clone() for name, each in found.items() if each.grad is not None}


def step(module: nn.Module, function: Any, seed: int, length: int = T) -> dict[str, Tensor]:
    """One training step on a batch of its own: its loss and gradients."""
    module.zero_grad(set_to_none=True)
    x, y = batch(seed, "cuda", length)
    loss = function(x, y)
    (loss * UPSTREAM).backward()
    return {"loss": loss.detach().clone(), **grads_of(module, x)}


def assert_recorded(least: int) -> None:
    """Check that CUDA graphs were recorded, and that none was skipped."""
    from torch._inductor import cudagraph_trees

    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), False)
    assert manager is not None
    assert manager.new_graph_id().id >= least


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", KINDS)
def test_reduce_overhead_on_cuda(
    kind: type[Model], dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm-up, recording and replays, each with new inputs and targets."""
    monkeypatch.setenv("GREYHOUND_REWRITE_MIN_BYTES", "0")
    plain, module = kind().cuda(), kind().cuda()
    compiled = torch.compile(module, backend="greyhound", mode="reduce-overhead", dynamic=dynamic)
    lengths = [T] * 5 if not dynamic else [T, 9] * 4
    for seed, length in enumerate(lengths):
        expected = step(plain, plain, seed, length)
        torch.testing.assert_close(step(module, compiled, seed, length), expected)
    # A forward and a backward; of each number of rows its own.
    assert_recorded(4 if dynamic else 2)
    assert_rewritten(kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Linear, NotLinear])
def test_cuda_graphs_without_gradients(kind: type[Model]) -> None:
    """Two graphs of one step: the second's warm-up reads what the first left."""
    options = {**TINY_OPTIONS, "triton.cudagraphs": True}
    module = kind().cuda()

    @torch.compile(backend="greyhound", options=options)
    def evaluate(x: Tensor, y: Tensor) -> Tensor:
        loss = module(x, y)
        torch._dynamo.graph_break()
        return loss * 2 + x.mean()

    with torch.no_grad():
        for seed in range(5):
            x, y = batch(seed, "cuda")
            torch.testing.assert_close(evaluate(x, y).clone(), module(x, y) * 2 + x.mean())
    assert_recorded(2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [CrossEntropy, Linear])
def test_max_autotune_on_cuda(kind: type[Model]) -> None:
    plain, module = kind().cuda(), kind().cuda()
    with greyhound_lowering.enabled(**TINY):
        compiled = torch.compile(module, mode="max-autotune")
        for seed in range(4):
            expected = step(plain, plain, seed)
            torch.testing.assert_close(step(module, compiled, seed), expected)
    assert_rewritten(kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [CrossEntropy, Linear, NotLinear])
def test_a_whole_step_captured_by_hand(kind: type[Model]) -> None:
    plain, module = kind().cuda(), kind().cuda()
    compiled = torch.compile(module, backend="greyhound", options=TINY_OPTIONS)
    x, y = batch(0, "cuda")
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            module.zero_grad(set_to_none=True)
            x.grad = None
            (compiled(x, y) * UPSTREAM).backward()
    torch.cuda.current_stream().wait_stream(aside)
    module.zero_grad(set_to_none=True)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = compiled(x, y)
        (loss * UPSTREAM).backward()
    for seed in (1, 2):
        expected = step(plain, plain, seed)
        new_x, new_y = batch(seed, "cuda")
        with torch.no_grad():
            x.copy_(new_x)
            y.copy_(new_y)
        graph.replay()
        value = {"loss": loss.detach().clone(), **grads_of(module, x)}
        torch.testing.assert_close(value, expected)
    assert_rewritten(kind)
