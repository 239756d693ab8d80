"""Reductions and the gradient that comes from above, over every op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import samples
from faults import every
from faults.every import Entry, over
from greyhound_ops import config
from log_prob_samples import by_path, device_of
from samples import Sample

MEANS = (
    "cross-entropy-mean",
    "multi-token",
    "multi-head",
    "logits-cross-entropy-mean",
    "distillation-jsd-mean",
    "rewritten-cross-entropy",
    "rewritten-region",
)

per_row = over(lambda entry: entry.per_row)


def upstreams(sample: Sample) -> dict[str, Tensor]:
    """Gradients of a loss per row, each of another memory layout."""
    batch, tokens = sample.target.shape
    return {
        "random": torch.randn(batch, tokens),
        "every-second": torch.randn(2 * batch, 2 * tokens)[::2, ::2],
        "transposed": torch.randn(tokens, batch).t(),
        "one-of-two": torch.randn(batch, tokens, 2)[..., 1],
        "expanded": torch.tensor(0.7).expand(batch, tokens),
        "by-sequence": torch.randn(batch, 1).expand(batch, tokens),
    }


@pytest.mark.fault("B01", "B04", "R13")
@per_row
def test_each_row_has_an_upstream_of_its_own(entry: Entry) -> None:
    sample = every.make(batch=3)
    for upstream in upstreams(sample).values():
        every.check(entry, sample, upstream=upstream.double())


@pytest.mark.fault("B01", "B04", "B09")
@per_row
def test_weighted_and_sliced_sums(entry: Entry) -> None:
    """What a mask, a slice and a weighted mean send back, made by autograd itself."""
    sample = every.make()
    extra = every.extra_for(sample.input, sample.weight)
    factor = torch.randn(sample.target.shape, dtype=torch.float64)

    def step(values: Tensor) -> Tensor:
        weighted = (values * factor).sum() / factor.abs().sum()
        return weighted + values[::2, 1:].square().sum() - values[1].mean()

    grads = []
    for function in (entry.ours, entry.plain):
        operands = every.leaves(sample)
        values = function(
            operands["input"], operands["weight"], sample.target, operands["bias"], extra
        )
        step(values).backward()
        grads.append({name: leaf.grad for name, leaf in operands.items()})
    for name, grad in grads[0].items():
        every.assert_close(grad, grads[1][name], name)


@pytest.mark.fault("B09")
@by_path
@over(lambda entry: not entry.rewritten)
def test_every_backend_has_the_same_gradients(entry: Entry, path: str) -> None:
    """Row by row where there are rows; zero gradients would fail as wrong ones do."""
    sample = every.make(dtype=torch.float32, batch=4, device=device_of(path))
    with config.override(kernels=path):
        result = every.run(entry, sample)
    expected = every.run_plain(entry, sample.double())
    for name in ("loss", "input", "weight", "bias"):
        value, truth = getattr(result, name), getattr(expected, name)
        assert value.abs().sum() > 0
        torch.testing.assert_close(value.double(), truth, rtol=1e-3, atol=1e-4)


@pytest.mark.fault("B05", "R14")
@over()
def test_chunk_size_changes_nothing(entry: Entry) -> None:
    sample = every.make()
    sizes = (1, 7, None) if not entry.rewritten else (7, None)
    for size in sizes:
        every.check(entry, sample, chunk_size=size)


@pytest.mark.fault("R14")
@pytest.mark.parametrize("rows", [1, 7, 9])
@over(lambda entry: not entry.rewritten)
def test_no_number_of_rows_is_special(entry: Entry, rows: int) -> None:
    # Sequences come in pairs; their length is what varies.
    every.check(entry, every.make(batch=2, tokens=rows), chunk_size=8)


@pytest.mark.fault("B06")
@over()
def test_shape_of_the_loss(entry: Entry) -> None:
    sample = every.make(batch=2, tokens=3)
    loss = every.run(entry, sample).loss
    assert loss.shape == ((2, 3) if entry.per_row else ())


@pytest.mark.fault("B07")
@over(lambda entry: entry.ignores)
def test_half_of_the_rows_ignored(entry: Entry) -> None:
    sample = every.make(ignored=0.0)
    sample.target[:, 1::2] = -100
    result = every.check(entry, sample)
    assert not result.input[:, 1::2].any(), "ignored rows get exactly zero"
    assert result.input[:, ::2].any()


@pytest.mark.fault("B07")
@over(lambda entry: entry.name in MEANS)
def test_mean_is_over_the_rows_that_count(entry: Entry) -> None:
    """Without the oracle's own divisor: the same rows alone have the same mean."""
    sample = every.make(ignored=0.0)
    extra = every.extra_for(sample.input, sample.weight)
    sample.target[:, 2:] = -100
    alone = sample.replace(input=sample.input[:, :2], target=sample.target[:, :2])
    extra_alone = {**extra, "teacher_input": extra["teacher_input"][:, :2]}
    ours = every.run(entry, sample, extra=extra)
    expected = every.run(entry, alone, extra=extra_alone)
    every.assert_close(ours.loss, expected.loss, "loss")
    every.assert_close(ours.weight, expected.weight, "grad_weight")
    every.assert_close(ours.input[:, :2], expected.input, "grad_input")


@pytest.mark.fault("B10")
@over()
def test_loss_is_the_same_with_and_without_gradients(entry: Entry) -> None:
    sample = every.make()
    learned = every.run(entry, sample)
    assert learned.loss.abs().sum() > 0
    for frozen in (samples.DIFFERENTIABLE, ("weight", "bias")):
        loss = every.run(entry, sample, frozen=frozen).loss
        every.assert_close(loss, learned.loss, f"without {frozen}")
