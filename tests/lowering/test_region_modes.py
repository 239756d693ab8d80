"""Regions, losses of no known kind, as people get them: Inductor, checkpoints, caches, export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import greyhound_lowering
from greyhound_ops.ops import chunk_loop
from greyhound_ops.testing import assert_within_budget, peak_memory
from lowering.rewriting import (
    TINY_OPTIONS,
    UPSTREAM,
    Backend,
    assert_same_results,
    in_double,
    leaves,
    reasons,
    run,
)

B, T, D, V = 2, 6, 8, 37


def loss_of_logits(head: nn.Module, hidden: Tensor, y: Tensor) -> Tensor:
    """Cross entropy by hand, its z-loss, and an entropy bonus: three readers of the logits."""
    logits = head(hidden)
    lse = logits.logsumexp(-1)
    nll = lse - logits.gather(-1, y[..., None]).squeeze(-1)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return nll.mean() + 1e-2 * (lse**2).mean() - 0.1 * entropy.mean()


class Block(nn.Linear):
    """A block that can be compiled by itself; Dynamo skips frames of torch's own modules."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, classes: int = V, hidden: int = D) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = Block(hidden, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return loss_of_logits(self.head, self.body(x).tanh(), y)


class Checkpointed(Model):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        loss = checkpoint(loss_of_logits, self.head, hidden, y, use_reentrant=False)
        assert isinstance(loss, Tensor)
        return loss


@torch.compiler.nested_compile_region
def compiled_once(head: nn.Module, hidden: Tensor, y: Tensor) -> Tensor:
    return loss_of_logits(head, hidden, y)


class Nested(Model):
    """A region that Dynamo traces once for two calls."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = self.body(x)
        return compiled_once(self.head, hidden, y) + compiled_once(self.head, hidden.tanh(), y)


def make(model: type[Model] = Model, length: int = T) -> tuple[Model, tuple[Tensor, ...]]:
    module = model()
    torch.manual_seed(length)
    x = torch.randn(B, length, D, requires_grad=True)
    return module, (x, torch.randint(0, V, (B, length)))


def compile_(function: Any, **arguments: Any) -> Any:
    return torch.compile(function, backend="greyhound", options=TINY_OPTIONS, **arguments)


@pytest.fixture(autouse=True)
def _clean(fresh_compiler: None) -> None:
    greyhound_lowering.clear_report()


def assert_region(count: int = 1) -> None:
    """Check that regions were rewritten and nothing left."""
    report = greyhound_lowering.explain()
    assert [each.op for each in report.decisions] == ["greyhound::row_region"] * count, reasons()


def test_rewritten_inside_an_activation_checkpoint() -> None:
    plain = run(*make(Checkpointed))
    module, inputs = make(Checkpointed)
    value = run(module, inputs, compiled=compile_(module))
    assert_same_results(plain, value, in_double(lambda: make(Checkpointed), torch.enable_grad))
    assert_region()


def test_rewritten_inside_a_nested_compile_region() -> None:
    """Without Inductor, whose code for it has wrong gradients without the rewrite too."""
    plain = run(*make(Nested))
    module, inputs = make(Nested)
    value = run(module, inputs, compiled=torch.compile(module, backend=Backend()))
    assert_same_results(plain, value, in_double(lambda: make(Nested), torch.enable_grad))
    assert_region()


def test_gradients_accumulate_over_steps() -> None:
    module, inputs = make()
    plain, same = make()
    for function, given in ((compile_(module), inputs), (plain, same)):
        for scale in (0.5, UPSTREAM):
            (function(*given) * scale).backward()
    grads = {name: leaf.grad for name, leaf in leaves(module, inputs).items()}
    torch.testing.assert_close(
        grads, {name: leaf.grad for name, leaf in leaves(plain, same).items()}
    )
    assert_region()


def test_regional_compilation() -> None:
    """Blocks compiled one by one: the one with head and loss is rewritten."""

    class Regional(Model):
        def __init__(self) -> None:
            super().__init__()
            self.body.compile(backend="greyhound", options=TINY_OPTIONS)
            self._loss = compile_(loss_of_logits)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = self._loss(self.head, self.body(x).tanh(), y)
            assert isinstance(loss, Tensor)
            return loss

    plain = run(*make())
    value = run(*make(Regional))
    assert_same_results(plain, value, in_double(make, torch.enable_grad))
    assert_region()
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(("dynamic", "most"), [(True, 1), (None, 2)], ids=["dynamic", "automatic"])
def test_compiles_for_ten_numbers_of_rows(dynamic: bool | None, most: int) -> None:
    module, plain = Model(), Model()
    compiled = compile_(module, dynamic=dynamic)
    # Whole chunks of five rows, ragged ones, one row more or less, fewer than a chunk.
    for length in (7, 2, 4, 5, 9, 10, 11, 24, 25, 40):
        for function in (compiled, plain):
            function.zero_grad()
            _, inputs = make(length=length)
            function(*inputs).backward()
        torch.testing.assert_close(
            [p.grad for p in module.parameters()], [p.grad for p in plain.parameters()]
        )
    assert counters["stats"]["unique_graphs"] == most
    assert_region(most)


def test_peak_memory_stays_below_the_logits() -> None:
    rows, classes, hidden = 1024, 2000, 16
    torch.manual_seed(0)
    x, y = torch.randn(B, rows, hidden), torch.randint(0, classes, (B, rows))
    options = {**TINY_OPTIONS, "greyhound.chunk_size": 16}
    compiled = torch.compile(Model(classes, hidden), backend="greyhound", options=options)
    for _ in range(2):  # the first call compiles
        with peak_memory("cpu") as peak:
            compiled(x, y).backward()
    assert_region()
    # Some seven values of a chunk's size at a time: the body runs operator by operator here.
    assert peak.bytes < B * rows * classes * 4 / 8


def frozen() -> tuple[Model, tuple[Tensor, ...]]:
    module, (x, y) = make()
    return module.eval().requires_grad_(False), (x.detach(), y)


def test_an_exported_program_is_the_plain_one() -> None:
    """Export does not compile: it sees through a compiled model, and nothing of ours is in it."""
    module, inputs = frozen()
    program = torch.export.export(compile_(module), inputs)
    assert "greyhound" not in str(program.graph)
    torch.testing.assert_close(program.module()(*inputs), module(*inputs))
    # Compiled later on it works too, and is as it was: its operators are ATen's.
    torch.testing.assert_close(compile_(program.module())(*inputs), module(*inputs))
    assert not greyhound_lowering.explain().rewritten_count


def test_a_rewritten_inference_graph_can_be_exported() -> None:
    module, inputs = frozen()
    backend = Backend()
    with torch.no_grad():
        torch.compile(module, backend=backend)(*inputs)
    (graph,) = backend.graphs
    assert len(backend.region_nodes) == 1
    given = {"L_x_": inputs[0], "L_y_": inputs[1]}
    for name, parameter in module.named_parameters():
        given[f"L_self_modules_{name.replace('.', '_parameters_')}_"] = parameter
    values = tuple(given[str(node.target)] for node in graph.nodes if node.op == "placeholder")
    program = torch.export.export(fx.GraphModule(nn.Module(), graph), values)
    assert "greyhound.row_region" in str(program.graph)
    torch.testing.assert_close(program.module()(*values)[0], module(*inputs))


def test_frozen_head_and_two_projections_in_one_checkpoint() -> None:
    """A teacher beside a student under activation checkpointing."""

    class Distilled(Model):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Linear(D, V).requires_grad_(False)

        def loss(self, hidden: Tensor, x: Tensor) -> Tensor:
            log_p = (self.head(hidden) / 2).log_softmax(-1)
            return F.kl_div(log_p, (self.teacher(x) / 2).softmax(-1), reduction="batchmean")

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return checkpoint(self.loss, self.body(x).tanh(), x.detach(), use_reentrant=False)

    plain = run(*make(Distilled))
    module, inputs = make(Distilled)
    value = run(module, inputs, compiled=torch.compile(module, backend=Backend()))
    assert_same_results(plain, value, in_double(lambda: make(Distilled), torch.enable_grad))
    assert_region(2)


class Pairs(nn.Module):
    """A loss of pairs of rows: what a row's log-prob is worth, only the backward knows."""

    def __init__(self, classes: int = 96, hidden: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(hidden, classes, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor, y: Tensor, old: Tensor) -> Tensor:
        logp = self.head(x).float().log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
        margin = (logp - old).view(2, -1).sum(1)
        return -F.logsigmoid(0.1 * (margin[0] - margin[1])) + logp.var()


def kept_for(rows: int, compiled: Any, backend: Backend) -> list[bool]:
    """Runs a step of so many rows beside plain ones; whether the op kept its logits."""
    torch.manual_seed(rows)
    x = torch.randn(rows, 32).bfloat16()
    y, old = torch.randint(96, (rows,)), torch.randn(rows) * 0.3 - 4.5
    results = []
    for step, dtype in ((compiled, x.dtype), (Pairs(), x.dtype), (Pairs(), torch.float64)):
        leaf, weight = x.clone().to(dtype).requires_grad_(), step.head.weight
        weight.data, weight.grad = weight.data.to(dtype), None
        step(leaf, y, old).backward(torch.tensor(UPSTREAM))
        results.append((leaf.grad, weight.grad))
    for got, expected, true in zip(*results, strict=True):
        assert_within_budget("gradient", got, expected, true, slack=1e-3)
    return list(backend.region_nodes[-1].kwargs["keep_logits"])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_logits_are_kept_while_a_sum_takes_more(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_loop, "KEEPS_GRADIENT_ON_CPU", True)
    for settings, expected in (
        ({}, {24: True, 40: True, 64: True, 70: False}),  # N <= 2 D
        ({"grad_weight_accum_dtype": "weight"}, {40: False}),
        ({"keep_logits": False}, {40: False, 70: False}),
    ):
        torch._dynamo.reset()
        backend = Backend(**settings, chunk_size=24)
        compiled = torch.compile(Pairs(), backend=backend, dynamic=dynamic)
        for rows, kept in expected.items():
            assert kept_for(rows, compiled, backend) == ([True] if kept else []), (settings, rows)
        if dynamic:
            assert len(backend.region_nodes) == len(set(expected.values()))


def test_logits_are_not_kept_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen head has no sum, and a loss whose gradients are made in the forward no backward."""
    monkeypatch.setattr(chunk_loop, "KEEPS_GRADIENT_ON_CPU", True)
    backend = Backend()
    frozen = Pairs().requires_grad_(False)
    inputs = torch.randn(8, 32).bfloat16(), torch.randint(96, (8,)), torch.randn(8)
    torch.compile(frozen, backend=backend)(inputs[0].requires_grad_(), *inputs[1:]).backward()
    with torch.no_grad():
        torch.compile(Pairs(), backend=backend)(*inputs)
    torch.compile(Model(), backend=backend)(torch.randn(B, T, D), torch.randint(V, (B, T)))
    assert [node.kwargs["keep_logits"] for node in backend.region_nodes] == [[], [], []]


def test_equal_regions_of_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd makes one forward of both, whose kept logits two backwards then share."""
    monkeypatch.setattr(chunk_loop, "KEEPS_GRADIENT_ON_CPU", True)
    torch.manual_seed(0)
    x = torch.randn(24, 32).bfloat16()
    y, old = torch.randint(96, (24,)), torch.randn(2, 24)
    results = []
    for compiles, dtype in ((True, x.dtype), (False, x.dtype), (False, torch.float64)):
        module = Pairs().to(dtype)

        def loss(x: Tensor, module: nn.Module = module) -> Tensor:
            return module(x, y, old[0]) + module(x, y, old[1])

        backend = Backend(chunk_size=5)
        leaf = x.clone().to(dtype).requires_grad_()
        (torch.compile(loss, backend=backend) if compiles else loss)(leaf).backward()
        if compiles:
            assert [node.kwargs["keep_logits"] for node in backend.region_nodes] == [[True]] * 2
        results.append((leaf.grad, module.head.weight.grad))
    for got, expected, true in zip(*results, strict=True):
        assert_within_budget("gradient", got, expected, true, slack=1e-3)


@pytest.mark.parametrize("kind", [Model, Pairs])
def test_a_checkpoint_around_the_first_call(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is differentiated while a graph is rewritten is nothing that the checkpoint saves."""
    monkeypatch.setattr(chunk_loop, "KEEPS_GRADIENT_ON_CPU", True)
    torch.manual_seed(0)
    inputs = {
        Model: (torch.randn(B, T, D), torch.randint(V, (B, T))),
        Pairs: (torch.randn(24, 32).bfloat16(), torch.randint(96, (24,)), torch.randn(24)),
    }[kind]
    grads = []
    for compiles in (True, False):
        module = kind()
        function = torch.compile(module, backend=Backend()) if compiles else module
        leaf = inputs[0].clone().requires_grad_()
        checkpoint(function, leaf, *inputs[1:], use_reentrant=False).backward()
        grads.append([leaf.grad, *(each.grad for each in module.parameters())])
    torch.testing.assert_close(*grads)
    assert_region()
