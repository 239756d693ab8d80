"""What compilers and custom ops get wrong; most of it is tested beside each op and form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import greyhound_lowering
from faults import every
from faults.every import Entry, over
from greyhound_ops import functional
from lowering.rewriting import Backend, reasons

#: One functional of each family.
FAMILIES = (
    "cross-entropy-mean",
    "multi-token",
    "linear-loss-direct",
    "log-probs",
    "logits-cross-entropy-mean",
    "distillation-jsd-mean",
)


@pytest.mark.fault("B40", "B44", "B45", "B50", "B89")
@over(lambda entry: entry.name in FAMILIES)
def test_one_graph_for_every_length(entry: Entry) -> None:
    """No graph break, no tensor touched while tracing, no size of a chunk in a guard."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(entry.ours, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for tokens in (3, 5, 7, 13):
        sample = every.make(batch=2, tokens=tokens, bias=False)
        extra = every.extra_for(sample.input, sample.weight)
        loss = compiled(sample.input, sample.weight, sample.target, None, extra)
        plain = entry.plain(sample.input, sample.weight, sample.target, None, extra)
        every.assert_close(loss, plain)
        counts.append(counter.frame_count)
    # Numbers among the options may be traced as symbols once before they are constants.
    assert counts[-1] == counts[0]


@pytest.mark.fault("B39", "B51")
def test_compiled_step_changes_nothing_it_closes_over() -> None:
    """Gradients add up in `.grad` over steps; a buffer written from inside would double them."""
    torch._dynamo.reset()
    entry = every.ENTRIES["linear-loss-direct"]
    sample = every.make()
    extra = every.extra_for(sample.input, sample.weight)
    operands = every.leaves(sample)
    step = torch.compile(entry.ours, backend="aot_eager", fullgraph=True)
    expected = every.run_plain(entry, sample, upstream=1.0)
    for count in (1, 2, 3):
        step(
            operands["input"], operands["weight"], sample.target, operands["bias"], extra
        ).backward()
        every.assert_close(operands["weight"].grad, count * expected.weight)


@pytest.mark.fault("B42")
@pytest.mark.parametrize("hidden", [7, 9, 24])
def test_producer_inside_the_graph(hidden: int, device: torch.device) -> None:
    """Inductor may pad the rows of what a projection before ours returns."""
    torch._dynamo.reset()
    body = nn.Linear(5, hidden, bias=False).to(device)
    head = nn.Linear(hidden, 33, bias=False).to(device)
    x, target = torch.randn(40, 5, device=device), torch.arange(40, device=device) % 33

    def step() -> Tensor:
        hidden_states = body(x).tanh().contiguous()
        loss = functional.chunked_linear_cross_entropy(hidden_states, head.weight, target)
        assert isinstance(loss, Tensor)
        return loss

    backend = "inductor" if device.type == "cuda" else "aot_eager"
    loss = torch.compile(step, backend=backend, fullgraph=True)()
    (1.7 * loss).backward()
    ours = body.weight.grad
    body.weight.grad = None
    plain = F.cross_entropy(head(body(x).tanh()), target)
    (1.7 * plain).backward()
    torch.testing.assert_close(loss, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, body.weight.grad, rtol=1e-3, atol=1e-5)


class _Doubled(torch.autograd.Function):
    """Looks at its upstream gradient and returns a new one."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0] * 2.0


@pytest.mark.fault("B29", "B43")
def test_function_of_the_users_before_a_rewritten_loss() -> None:
    """Its backward is neither dropped nor asked which gradients it needs."""
    torch._dynamo.reset()

    def user(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(_Doubled.apply(input), weight), target)

    sample = every.make(dtype=torch.float32, batch=1, tokens=24, bias=False)
    grads = []
    for compiled in (True, False):
        input, weight = (
            each[0] if each.dim() == 3 else each for each in (sample.input, sample.weight)
        )
        leaves = [each.detach().requires_grad_() for each in (input, weight)]
        backend = Backend()
        function = torch.compile(user, backend=backend, fullgraph=True) if compiled else user
        (-1.7 * function(*leaves, sample.target[0])).backward()
        assert backend.op_nodes or not compiled, reasons()
        grads.append([each.grad for each in leaves])
    for ours, plain in zip(*grads, strict=True):
        every.assert_close(ours, plain)


def mark(kind: str, leaves: dict[str, Tensor], target: Tensor) -> None:
    """Make the number of tokens the only symbol.

    Dimensions that are marked one by one are different symbols. Cross entropy says that they are
    equal; a gather does not, and its region would be left alone.
    """
    if kind == "cross-entropy":
        torch._dynamo.mark_dynamic(leaves["input"], 1)
        torch._dynamo.mark_dynamic(target, 1)
        return
    for static in (leaves["weight"], leaves["bias"]):
        torch._dynamo.mark_static(static)
    torch._dynamo.mark_static(leaves["input"], 2)


@pytest.mark.fault("B47")
@pytest.mark.parametrize("kind", ["cross-entropy", "region"])
def test_rewrite_with_dynamic_rows(kind: str) -> None:
    torch._dynamo.reset()
    user = every.ENTRIES[f"rewritten-{kind}"].plain
    backend = Backend()
    dynamic = True if kind == "region" else None
    compiled = torch.compile(user, backend=backend, fullgraph=True, dynamic=dynamic)
    for tokens in (5, 9, 14):
        sample = every.make(tokens=tokens)
        grads = []
        for function in (compiled, user):
            leaves = every.leaves(sample)
            mark(kind, leaves, sample.target)
            loss = function(leaves["input"], leaves["weight"], sample.target, leaves["bias"], {})
            (loss * every.UPSTREAM).backward()
            grads.append([loss.detach(), *(leaf.grad for leaf in leaves.values())])
        for ours, plain in zip(*grads, strict=True):
            every.assert_close(ours, plain)
    assert len(backend.graphs) == 1
    assert backend.our_nodes, reasons()


@pytest.mark.fault("B47")
def test_rewrite_that_is_not_safe_leaves_the_graph_and_says_why() -> None:
    """Several tangents: the logits leave as well."""
    torch._dynamo.reset()
    greyhound_lowering.clear_report()

    def user(input: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(input, weight)
        return F.cross_entropy(logits, target), logits

    backend = Backend()
    sample = every.make(batch=1, dtype=torch.float32, bias=False)
    torch.compile(user, backend=backend)(sample.input[0], sample.weight, sample.target[0])
    assert backend.unchanged
    assert any("logits" in reason for reason in reasons())
