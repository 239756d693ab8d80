"""Rows that do not count, labels that are no classes, and nothing at all, over every op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import samples
from faults import every
from faults.every import ENTRIES, Entry, having, over
from greyhound_ops import config, functional
from greyhound_ops.errors import TargetOutOfRangeError
from samples import dtype_id

ignoring = over(lambda entry: entry.ignores)
_RANGE = 2**40  # far enough that a read there would not go unnoticed


@pytest.mark.fault("B11", "B12", "R14", "R15")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_id)
@over(lambda entry: entry.ignores and not entry.rewritten)
def test_nothing_counts(entry: Entry, dtype: torch.dtype) -> None:
    sample = every.make(dtype=dtype)
    sample.target.fill_(-100)
    result = every.run(entry, sample)
    assert not result.loss.any(), "neither NaN nor anything else"
    for name in samples.DIFFERENTIABLE:
        grad = getattr(result, name)
        assert grad is not None
        assert torch.equal(grad, torch.zeros_like(grad)), name


@pytest.mark.fault("B13")
@over(lambda entry: entry.rewritten)
def test_nothing_counts_in_a_rewritten_graph(entry: Entry) -> None:
    """What the user wrote decides: torch's mean of nothing is NaN, with gradients of zero."""
    sample = every.make()
    sample.target.fill_(-100)
    ours, plain = every.run(entry, sample), every.run_plain(entry, sample)
    samples.assert_equal_results(ours, plain)
    assert bool(ours.loss.isnan().all()) == (entry.name == "rewritten-cross-entropy")


@pytest.mark.fault("B12")
@ignoring
def test_one_row_counts(entry: Entry) -> None:
    sample = every.make(ignored=0.0)
    sample.target[:, 1:] = -100
    sample.target[1:, 0] = -100 if entry.name not in PAIRED else sample.target[1:, 0]
    every.check(entry, sample)


#: Losses of pairs, of which one half alone counts nowhere.
PAIRED = ("dpo", "cpo", "simpo", "orpo")


@pytest.mark.fault("B15", "B16", "R04")
@pytest.mark.parametrize("label", [-4, every.CLASSES, _RANGE])
@over(lambda entry: entry.ignores and not entry.rewritten)
def test_label_that_is_no_class(entry: Entry, label: int) -> None:
    sample = every.make()
    sample.target[1, 2] = label
    # What a callable of the user's reads is his: torch raises there too.
    error: Any = TargetOutOfRangeError
    if entry.name.startswith("linear-loss"):
        error = (IndexError, RuntimeError)
    with pytest.raises(error) as caught:
        every.run(entry, sample)
    if error is TargetOutOfRangeError:
        assert str(label) in str(caught.value)


@pytest.mark.fault("B15")
@having("ignore_index")
def test_only_ignore_index_is_ignored(entry: Entry) -> None:
    sample = every.make()
    sample.target[sample.target == -100] = -1
    every.check(entry, sample, ignore_index=-1)
    sample.target[1, 2] = -4
    with pytest.raises(TargetOutOfRangeError, match="-4"):
        every.run(entry, sample, ignore_index=-1)


#: Ops that read the label; what reads their results inherits the NaN.
POISONED = (
    "cross-entropy-mean",
    "cross-entropy-sum",
    "cross-entropy-none",
    "multi",
    "log-probs",
    "logits",
    "selective",
    "distillation",
)


@pytest.mark.gpu
@pytest.mark.fault("B15", "B16", "R04")
@over(lambda entry: entry.name.startswith(POISONED))
def test_label_that_is_no_class_poisons_its_row_alone(entry: Entry) -> None:
    """Where an error would wait for the device: NaN, and in its row only."""
    for label in (-4, every.CLASSES, _RANGE):
        sample = every.make(dtype=torch.float32, device="cuda")
        sample.target[1, 2] = label
        result = every.run(entry, sample, frozen=("weight", "bias"))
        assert result.loss.isnan().any()
        assert result.input is not None
        assert result.input[1, 2].isnan().all()
        if entry.per_row:
            assert int(result.loss.isnan().sum()) == 1


@pytest.mark.fault("B18")
@pytest.mark.parametrize("name", ["input", "loss"])
@having("label_smoothing")
def test_smoothing_leaves_ignored_rows_out(entry: Entry, name: str) -> None:
    """The uniform term too: whatever the ignored rows hold, nothing of it is seen."""
    sample = every.make()
    ignored = sample.target == -100
    assert bool(ignored.any())
    first = every.check(entry, sample, label_smoothing=0.2)
    other = sample.replace(input=sample.input.clone())
    other.input[ignored] *= 100.0
    second = every.run(entry, other, label_smoothing=0.2)
    if name == "loss":
        every.assert_close(first.loss, second.loss)
        every.assert_close(first.weight, second.weight)
    else:
        assert not second.input[ignored].any()


@pytest.mark.fault("B18")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_smoothing_by_hand(reduction: str) -> None:
    """8 rows of which 2 are ignored, against torch's own options."""
    logits = torch.randn(8, every.CLASSES, dtype=torch.float64)
    target = torch.arange(8)
    target[[2, 5]] = -100
    counts = target != -100
    log_probs = logits.log_softmax(-1)[counts]
    hard = -log_probs.gather(-1, target[counts, None]).squeeze(-1)
    rows = 0.8 * hard - 0.2 * log_probs.mean(-1)
    expected = rows.mean() if reduction == "mean" else rows.sum()
    ours = functional.cross_entropy(logits, target, label_smoothing=0.2, reduction=reduction)
    every.assert_close(ours, expected)


@pytest.mark.fault("B20", "B21", "R09")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("divergence", ["jsd", "kl", "reverse_kl", "tvd", "cosine"])
def test_distillation_leaves_masked_rows_out(divergence: str, reduction: str) -> None:
    """Loss, gradient and divisor of 6 rows, 2 of them masked, are those of the other 4 alone."""
    torch.manual_seed(1)
    tensors = [torch.randn(*shape, dtype=torch.float64) for shape in ((6, 8), (11, 8)) * 2]
    target = torch.zeros(6, dtype=torch.int64)
    target[[1, 4]] = -100
    kept = target != -100

    def run(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        student, weight = (each.detach().requires_grad_() for each in tensors[:2])
        loss = functional.chunked_linear_distillation(
            student[rows], weight, tensors[2][rows], tensors[3], target[rows],
            divergence=divergence, reduction=reduction, beta=0.5, chunk_size=4,
        )  # fmt: skip
        loss.sum().backward()
        assert student.grad is not None
        assert weight.grad is not None
        return loss.detach(), student.grad, weight.grad

    masked, alone = run(torch.arange(6)), run(kept.nonzero().squeeze(-1))
    loss = masked[0][kept] if reduction == "none" else masked[0]
    every.assert_close(loss, alone[0], "loss")
    every.assert_close(masked[1], alone[1], "grad_input")
    every.assert_close(masked[2], alone[2], "grad_weight")
    assert not masked[1][~kept].any()


@pytest.mark.fault("B22", "B23")
@over(lambda entry: not entry.rewritten)
def test_no_class(entry: Entry) -> None:
    """An ungathered head has no row; the error must name it and not come from a division."""
    sample = every.make(bias=False)
    sample = sample.replace(weight=sample.weight[:0])
    name = "weight" if entry.linear else "logits"
    with pytest.raises(ValueError, match=rf"{name}: expected") as caught:
        every.run(entry, sample)
    if entry.linear:
        assert "gathered" in str(caught.value)


@pytest.mark.fault("B22")
@over(lambda entry: entry.linear and not entry.rewritten)
def test_no_hidden_size(entry: Entry) -> None:
    with pytest.raises(ValueError, match="weight: expected D >= 1"):
        every.run(entry, every.make(hidden=0, bias=False))


@pytest.mark.fault("B28")
@ignoring
def test_only_the_last_turn_counts(entry: Entry) -> None:
    """Most chunks have no row that counts."""
    sample = every.make(batch=2, tokens=24, ignored=0.0)
    sample.target[:, :21] = -100
    result = every.check(entry, sample, chunk_size=4)
    assert result.input[:, 21:].any()
    assert not result.input[:, :21].any()


@pytest.mark.fault("B16")
def test_checks_make_it_an_error_on_every_device(device: torch.device) -> None:
    sample = samples.make_sample(device=device)
    sample.target[3] = 11
    with config.override(checks=True), pytest.raises(TargetOutOfRangeError, match="11"):
        samples.run(functional.chunked_linear_cross_entropy, sample)


@pytest.mark.fault("B13")
def test_torch_itself_gives_nan() -> None:
    """That the choice of the rewrite is torch's, should torch ever change it."""
    assert F.cross_entropy(torch.randn(10, 5), torch.full((10,), -100)).isnan()
    assert set(ENTRIES) >= {"cross-entropy-mean", "rewritten-cross-entropy"}
