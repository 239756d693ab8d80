"""Dtypes, autocast and accumulation, over every op."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samples
from faults import every
from faults.every import Entry, over
from greyhound_ops import functional
from greyhound_ops.testing import assert_within_budget, relative_error
from samples import SLACK, dtype_id

REDUCED = (torch.bfloat16, torch.float16)
by_dtype = pytest.mark.parametrize("dtype", REDUCED, ids=dtype_id)
explicit = over(lambda entry: not entry.rewritten)
#: Differences of log-probabilities, of which a single one may come out exact by chance.
SEQUENCES = ("dpo", "cpo", "simpo", "orpo", "kto", "grpo")


@pytest.mark.fault("B53", "R08")
@over(lambda entry: entry.linear and not entry.rewritten)
def test_autocast_with_a_head_in_fp32(entry: Entry) -> None:
    """Products in the dtype of autocast, each gradient in the dtype of its own tensor."""
    sample = every.make(dtype=torch.float32)
    sample = sample.replace(input=sample.input.bfloat16())
    operands = every.leaves(sample)
    extra = every.extra_for(sample.input, sample.weight)
    extra["teacher_weight"] = extra["teacher_weight"].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = every.call(entry, operands, sample, extra=extra)
    assert loss.dtype == torch.float32
    loss.backward(every.upstream_like(loss, entry, sample))
    truth = every.run_plain(entry, sample.double(), extra=double(extra))
    for name, leaf in operands.items():
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype, name
        assert relative_error(leaf.grad, getattr(truth, name)) < 0.1, name
    # Not a gradient in bf16 that was widened afterwards.
    head = operands["weight"].grad
    assert not torch.equal(head, head.bfloat16().float())


def double(extra: every.Extra) -> every.Extra:
    return {
        name: each.double() if each.is_floating_point() else each for name, each in extra.items()
    }


@pytest.mark.fault("B53", "R08")
@over(lambda entry: entry.linear and not entry.rewritten)
def test_two_dtypes_without_autocast(entry: Entry) -> None:
    """No product of two dtypes deep inside: an error that names both and the cure."""
    sample = every.make(dtype=torch.float32)
    sample = sample.replace(input=sample.input.bfloat16())
    with pytest.raises(TypeError, match=r"weight.*bfloat16.*float32|weights.*float32"):
        every.run(entry, sample)


@pytest.mark.fault("B55")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=dtype_id)
@over()
def test_wide_dtypes(entry: Entry, dtype: torch.dtype) -> None:
    result = every.run(entry, every.make(dtype=dtype))
    assert result.loss.dtype == dtype
    assert result.weight is not None
    assert result.weight.dtype == dtype
    expected = every.run_plain(entry, every.make(dtype=dtype).double())
    assert expected.loss.dtype == torch.float64


@pytest.mark.fault("B55")
@explicit
def test_finite_differences(entry: Entry) -> None:
    """Against no oracle at all: the slope of the loss itself, in fp64."""
    sample = every.make(batch=2, tokens=2, hidden=3, classes=4)
    extra = every.extra_for(sample.input, sample.weight)

    def loss(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return entry.ours(input, weight, sample.target, bias, extra, chunk_size=3)

    assert torch.autograd.gradcheck(
        loss, tuple(every.leaves(sample).values()), fast_mode=True, eps=1e-6, atol=1e-5
    )


@pytest.mark.fault("B56")
@by_dtype
@over()
def test_loss_is_not_rounded(entry: Entry, dtype: torch.dtype) -> None:
    """fp32 whatever the operands: bf16 has a step of a quarter at a loss of 36."""
    sample = every.make(dtype=dtype)
    loss = every.run(entry, sample).loss
    assert loss.dtype == torch.float32
    assert not torch.equal(loss, loss.to(dtype).float()), "on the grid of the operands"


@pytest.mark.fault("B56")
def test_large_loss_is_not_rounded() -> None:
    logits = torch.tensor([[0.0, 36.125, 2.0]], dtype=torch.bfloat16)
    loss = functional.cross_entropy(logits, torch.tensor([0]))
    expected = F.cross_entropy(logits.double(), torch.tensor([0]))
    assert abs(float(loss) - float(expected)) < 1e-5


@pytest.mark.fault("B59", "B60")
@by_dtype
@over(lambda entry: not entry.rewritten and entry.name not in SEQUENCES)
def test_error_is_no_larger_than_that_of_plain_torch(entry: Entry, dtype: torch.dtype) -> None:
    """Many rows on few classes, where sums over rows in a narrow dtype would show."""
    torch.manual_seed(3)
    sample = every.make(dtype=dtype, batch=64, tokens=16, hidden=16, classes=32)
    sample = sample.replace(input=sample.input * 0.5)
    every.check(entry, sample, chunk_size=100)


@pytest.mark.fault("B58", "B59")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_head_gradient_of_a_tiny_vocabulary(reduction: str) -> None:
    """8192 rows in 32 chunks: fp32 accumulation keeps what bf16 would lose between chunks."""
    sample = samples.make_sample(8192, 32, 32, dtype=torch.bfloat16)
    result = samples.check_against_reference(
        sample, reduction=reduction, upstream=0.7, only_ours={"chunk_size": 256}
    )
    rough = samples.run(
        functional.chunked_linear_cross_entropy, sample, reduction=reduction, upstream=0.7,
        chunk_size=256, grad_weight_accum_dtype="weight",
    )  # fmt: skip
    truth = samples.run(
        functional.chunked_linear_cross_entropy, sample.double(), reduction=reduction, upstream=0.7
    )
    assert result.weight is not None
    assert rough.weight is not None
    assert truth.weight is not None
    assert relative_error(result.weight, truth.weight) < relative_error(rough.weight, truth.weight)


@pytest.mark.fault("B60")
@pytest.mark.parametrize("path", ["logits", "projection", "one row", "temperature"])
def test_log_probs_of_bf16_logits_are_made_in_fp32(path: str) -> None:
    """32000 classes: a softmax in bf16 would be off in the second digit."""
    hidden, classes = 4, 32000
    rows = 1 if path == "one row" else 4
    input = torch.randn(rows, hidden).bfloat16()
    weight = torch.randn(classes, hidden).bfloat16()
    target = torch.arange(rows) * 7
    logits = F.linear(input, weight)
    temperature = 0.5 if path == "temperature" else 1.0
    truth = (logits.double() / temperature).log_softmax(-1)
    truth = truth.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    if path == "logits":
        ours = functional.selective_log_softmax(logits, target, dtype=torch.float32)
    else:
        ours = functional.chunked_linear_log_probs(input, weight, target, temperature=temperature)
    assert ours.dtype == torch.float32
    assert relative_error(ours, truth) < 1e-6


@pytest.mark.fault("B61")
@over(lambda entry: entry.per_row and entry.linear and not entry.rewritten and entry.ignores)
def test_fp16_logits_beyond_its_range(entry: Entry) -> None:
    """As `F.linear` does under the same autocast: not finite, where 80000 does not fit.

    Never a finite value that is wrong, and never in another row. bf16 holds it.
    """
    input = torch.tensor([[[200.0, 200.0]], [[2.0, 2.0]]])
    weight = torch.tensor([[200.0, 200.0], [199.0, 199.0]])
    sample = samples.Sample(input, weight, torch.ones(2, 1, dtype=torch.int64))
    losses = {}
    for dtype in REDUCED:
        operands = every.leaves(sample)
        with torch.autocast("cpu", dtype=dtype):
            losses[dtype] = every.call(entry, operands, sample).detach()
            plain = F.linear(input, weight)
        assert plain.isfinite().all() == (dtype == torch.bfloat16)
    truth = every.run_plain(entry, sample.double()).loss
    assert losses[torch.bfloat16].isfinite().all()
    assert not losses[torch.float16][0].isfinite().any()
    assert relative_error(losses[torch.float16][1], truth[1]) < 1e-2


@pytest.mark.fault("R07")
@pytest.mark.parametrize("grad_dtype", [torch.float64, torch.float32, torch.bfloat16], ids=dtype_id)
@by_dtype
def test_callable_whose_gradient_has_another_dtype(
    dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    def loss_and_grad(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        loss, grad = every.cross_entropy_and_grad(logits, target)
        return loss, grad.to(grad_dtype)

    sample = samples.make_sample(dtype=dtype)
    leaves = [each.detach().requires_grad_() for each in (sample.input, sample.weight)]
    functional.chunked_linear_loss(*leaves, loss_and_grad, sample.target, chunk_size=5).backward()
    expected = samples.run(
        functional.chunked_linear_cross_entropy, sample, reduction="sum", chunk_size=5
    )
    truth = samples.run(functional.chunked_linear_cross_entropy, sample.double(), reduction="sum")
    for leaf, name in zip(leaves, ("input", "weight"), strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype
        slack = SLACK[torch.bfloat16]  # the gradient of the callable may be rounded to it
        assert_within_budget(
            name, leaf.grad, getattr(expected, name), getattr(truth, name), slack=slack
        )
