"""Nothing of the caller's is written to; graphs that are kept, shared or differentiated twice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

import samples
from faults import every
from faults.every import Entry, over
from greyhound_ops import functional
from greyhound_ops.errors import NotDifferentiableTwiceError

explicit = over(lambda entry: not entry.rewritten)


@pytest.mark.fault("B32", "B34", "B51")
@over()
def test_nothing_is_written_to(entry: Entry) -> None:
    """Leaves, targets, everything passed beside them, and the gradient that comes from above."""
    sample = every.make()
    operands = every.leaves(sample)
    extra = every.extra_for(sample.input, sample.weight)
    loss = every.call(entry, operands, sample, extra=extra)
    upstream = every.upstream_like(loss, entry, sample)
    everything = [*operands.values(), sample.target, *extra.values(), upstream]
    kept = loss.detach().clone()
    before = [(each._version, each.detach().clone()) for each in everything]
    loss.backward(upstream)
    every.call(entry, operands, sample, extra=extra)
    for each, (version, value) in zip(everything, before, strict=True):
        assert each._version == version
        assert torch.equal(each.detach(), value)
    assert torch.equal(loss.detach(), kept)


@pytest.mark.fault("B32")
@explicit
def test_what_produced_the_operands_differentiates_its_own_values(entry: Entry) -> None:
    """tanh and softmax save their outputs, which are our inputs."""
    sample = every.make()
    extra = every.extra_for(sample.input, sample.weight)
    grads = []
    for function in (entry.ours, entry.plain):
        operands = every.leaves(sample)
        loss = function(
            operands["input"].tanh(), operands["weight"].softmax(0), sample.target,
            operands["bias"].tanh(), extra,
        )  # fmt: skip
        loss.backward(every.upstream_like(loss, entry, sample))
        grads.append(operands)
    for name, leaf in grads[0].items():
        every.assert_close(leaf.grad, grads[1][name].grad, name)


@pytest.mark.fault("B32", "B33", "B34")
@pytest.mark.parametrize("name", ["cross_entropy", "selective_log_softmax"])
def test_logits_serve_two_losses(name: str) -> None:
    """As leaves and as results of an operation; another loss and a softmax read them as well."""
    for leaf in (True, False):
        grads = []
        for ours in (True, False):
            start = torch.linspace(-2, 2, 77, dtype=torch.float64).view(7, 11).requires_grad_()
            logits = start if leaf else start.exp()
            target = torch.arange(7)
            probabilities = logits.softmax(-1)
            if ours:
                loss = getattr(functional, name)(logits, target).sum()
            elif name == "cross_entropy":
                loss = F.cross_entropy(logits, target)
            else:
                loss = -F.cross_entropy(logits, target, reduction="sum")
            total = loss + 0.1 * logits.square().mean() + probabilities.max(-1).values.sum()
            total.backward()
            grads.append(start.grad)
        every.assert_close(grads[0], grads[1])


@pytest.mark.fault("B33")
@explicit
def test_two_heads_on_one_input_and_a_checkpoint(entry: Entry) -> None:
    sample = every.make()
    extra = every.extra_for(sample.input, sample.weight)
    grads = []
    for function in (entry.ours, entry.plain):
        operands = every.leaves(sample)

        def body(
            input: Tensor, weight: Tensor, bias: Tensor, function: every.Loss = function
        ) -> Tensor:
            first = function(input, weight, sample.target, bias, extra).sum()
            return first + 0.3 * function(input, 0.5 * weight, sample.target, None, extra).sum()

        loss = torch.utils.checkpoint.checkpoint(body, *operands.values(), use_reentrant=False)
        (loss + 0.1 * operands["input"].square().mean()).backward()
        grads.append(operands)
    for name, leaf in grads[0].items():
        every.assert_close(leaf.grad, grads[1][name].grad, name)


@pytest.mark.fault("B35", "R12")
@over()
def test_upstream_is_applied_in_the_backward_only(entry: Entry) -> None:
    """Zero first: a factor folded into what is kept would leave nothing for the next."""
    sample = every.make()
    operands = every.leaves(sample)
    expected = every.run_plain(entry, sample)
    # Of a compiled graph, AOTAutograd gives a second backward only so.
    with torch._functorch.config.patch(donated_buffer=False):
        loss = every.call(entry, operands, sample)
        upstream = every.upstream_like(loss, entry, sample)
        for factor in (0.0, 1.0, -2.0, 1.0):
            for leaf in operands.values():
                leaf.grad = None
            loss.backward(upstream * factor, retain_graph=True)
            for name, leaf in operands.items():
                truth = factor * getattr(expected, name)
                every.assert_close(leaf.grad, truth, f"{name} x {factor}")


@pytest.mark.fault("B35")
@explicit
def test_upstream_of_zero_gives_zero(entry: Entry) -> None:
    sample = every.make(dtype=torch.float16)
    result = every.run(entry, sample, upstream=0.0)
    for name in samples.DIFFERENTIABLE:
        assert not getattr(result, name).any()


@pytest.mark.fault("B36")
@pytest.mark.parametrize("name", samples.DIFFERENTIABLE)
@explicit
def test_second_derivative_is_refused(entry: Entry, name: str) -> None:
    """A gradient penalty; the parts around the op alone would give a value that looks right."""
    sample = every.make(batch=2, tokens=3)
    operands = every.leaves(sample, (name,))
    loss = every.call(entry, operands, sample)
    upstream = every.upstream_like(loss, entry, sample)
    (grad,) = torch.autograd.grad(loss, operands[name], upstream, create_graph=True)
    with pytest.raises(NotDifferentiableTwiceError):
        torch.autograd.grad(grad.square().sum(), operands[name])


@pytest.mark.fault("B36")
@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="needs torch 2.13: before, second derivatives of any compiled scalar are dropped",
)
@over(lambda entry: entry.rewritten)
def test_second_derivative_of_a_rewritten_graph_is_refused(entry: Entry) -> None:
    sample = every.make()
    operands = every.leaves(sample, ("weight",))
    loss = every.call(entry, operands, sample).sum()
    (grad,) = torch.autograd.grad(loss, operands["weight"], create_graph=True)
    # With the loss beside it: a penalty that is dropped would leave a gradient all the same.
    with pytest.raises(RuntimeError, match=r"double backward|differentiable twice"):
        (loss + grad.square().sum()).backward()


@pytest.mark.fault("B36", "B43")
@explicit
def test_transform_of_a_gradient_is_right_or_refused(entry: Entry) -> None:
    """`torch.func.grad`, eager and inside a compiled region: never a gradient that is wrong."""
    sample = every.make(bias=False)
    extra = every.extra_for(sample.input, sample.weight)

    def loss_of(function: every.Loss) -> every.Loss:
        return lambda weight: (
            function(sample.input, weight, sample.target, None, extra).square().sum()
        )

    expected = torch.func.grad(loss_of(entry.plain))(sample.weight)
    assert expected.any()
    eager = torch.func.grad(loss_of(entry.ours))
    torch._dynamo.reset()
    for transformed in (eager, torch.compile(eager, backend="aot_eager")):
        try:
            grad = transformed(sample.weight)
        except (RuntimeError, NotImplementedError):  # torch's own errors among them
            continue
        every.assert_close(grad, expected)
