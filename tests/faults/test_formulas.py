"""Options that must have an effect, the right one, and none when they are off; limits; layouts."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samples
from faults import every
from faults.every import Entry, having, over
from greyhound_ops import functional

explicit = over(lambda entry: not entry.rewritten)


# ------------------------------------------------------------------------------------- the formula


@pytest.mark.fault("B63", "B64")
@having("softcap")
def test_softcap(entry: Entry) -> None:
    """With a cap that changes the answer, and logits far beyond it."""
    sample = every.make()
    sample = sample.replace(weight=sample.weight * 4.0)
    capped = every.check(entry, sample, softcap=3.0)
    assert (capped.loss - every.run(entry, sample).loss).abs().max() > 1e-3


@pytest.mark.fault("B63")
def test_softcap_by_hand() -> None:
    """A logit of 124 under a cap of 30 is 29.98, not 124 times a tanh; its slope is almost 0."""
    logits = torch.tensor([[124.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = functional.cross_entropy(logits, torch.tensor([1]), softcap=30.0)
    loss.backward()
    z = 30.0 * math.tanh(124.0 / 30.0)
    p = 1.0 / (1.0 + math.exp(-z))
    every.assert_close(loss, torch.tensor(math.log1p(math.exp(z)), dtype=torch.float64))
    slope = p * (1.0 - math.tanh(124.0 / 30.0) ** 2)
    assert logits.grad is not None
    assert float(logits.grad[0, 0]) == pytest.approx(slope, rel=1e-9)
    assert float(logits.grad[0, 1]) == pytest.approx(-p, rel=1e-9)


@pytest.mark.fault("B87")
@having("logit_scale")
def test_logit_scale(entry: Entry) -> None:
    sample = every.make()
    scaled = every.check(entry, sample, logit_scale=0.0625)
    assert (scaled.loss - every.run(entry, sample).loss).abs().max() > 1e-3
    # The same as scaling the head by hand.
    bias = None if sample.bias is None else sample.bias * 0.0625
    by_hand = every.run(entry, sample.replace(weight=sample.weight * 0.0625, bias=bias))
    every.assert_close(scaled.loss, by_hand.loss)


@pytest.mark.fault("B67")
@having("z_loss")
def test_z_loss_that_is_off_is_plain_cross_entropy(entry: Entry) -> None:
    sample = every.make(dtype=torch.float32)
    plain, off = every.run(entry, sample), every.run(entry, sample, z_loss=0.0)
    samples.assert_equal_results(plain, off)
    on = every.run(entry, sample, z_loss=1e-2)
    assert (on.loss - off.loss).abs().max() > 1e-3


@pytest.mark.fault("R16")
@pytest.mark.parametrize("ignore_index", [-100, -1, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_z_loss_by_hand(reduction: str, ignore_index: int) -> None:
    """Ignored rows have none whatever ignore_index is, and it is reduced as the loss is."""
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 1, 2, 4, 4, 0])
    target[[1, 4]] = ignore_index
    counts = target != ignore_index
    lse = logits.logsumexp(-1)
    chosen = logits.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    rows = (lse - chosen + 0.1 * lse.square()) * counts
    expected = {"mean": rows.sum() / counts.sum(), "sum": rows.sum(), "none": rows}[reduction]
    ours = functional.cross_entropy(
        logits, target, z_loss=0.1, reduction=reduction, ignore_index=ignore_index
    )
    every.assert_close(ours, expected)
    upstream = torch.linspace(0.5, 2.0, ours.numel(), dtype=torch.float64).view(ours.shape)
    (grad,) = torch.autograd.grad(ours, logits, upstream)
    (truth,) = torch.autograd.grad(expected, logits, upstream)
    every.assert_close(grad, truth)


@pytest.mark.fault("B68")
def test_z_loss_is_returned_and_lse_is_differentiable() -> None:
    sample = samples.make_sample(dtype=torch.float64)
    output = functional.chunked_linear_cross_entropy(
        sample.input, sample.weight, sample.target, z_loss=0.1, return_z_loss=True, chunk_size=5
    )
    plain = functional.chunked_linear_cross_entropy(
        sample.input, sample.weight, sample.target, chunk_size=5
    )
    every.assert_close(output.loss, plain + output.z_loss)
    grads = []
    for ours in (True, False):
        weight = sample.weight.detach().requires_grad_()
        if ours:
            lse = functional.chunked_linear_log_probs(
                sample.input, weight, sample.target, return_lse=True, chunk_size=5
            ).lse
        else:
            lse = F.linear(sample.input, weight).logsumexp(-1)
        assert lse is not None
        lse.pow(2).mean().backward()
        grads.append(weight.grad)
    every.assert_close(*grads)


@pytest.mark.fault("B08")
def test_entropy_alone_has_a_gradient() -> None:
    """Each output by itself, then all together: the gradients add up."""
    sample = samples.make_sample(dtype=torch.float64, bias=True)

    def grad(*names: str) -> Tensor:
        weight = sample.weight.detach().requires_grad_()
        outputs = functional.chunked_linear_log_probs(
            sample.input, weight, sample.target, sample.bias, return_entropy=True, return_lse=True,
            return_argmax=True, chunk_size=5,
        )  # fmt: skip
        assert outputs.argmax is not None
        assert not outputs.argmax.requires_grad
        torch.stack([getattr(outputs, name).sum() for name in names]).sum().backward()
        assert weight.grad is not None
        return weight.grad

    alone = [grad(name) for name in ("log_probs", "entropy", "lse")]
    assert all(each.abs().sum() > 0 for each in alone)
    every.assert_close(grad("log_probs", "entropy", "lse"), torch.stack(alone).sum(0))
    weight = sample.weight.detach().requires_grad_()
    log_p = F.linear(sample.input, weight, sample.bias).log_softmax(-1)
    (-(log_p.exp() * log_p).sum()).backward()
    every.assert_close(alone[1], weight.grad)


@pytest.mark.fault("B69")
@pytest.mark.parametrize("dtype", samples.DTYPES, ids=samples.dtype_id)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_log_probs_and_entropies_stay_in_their_range(scale: float, dtype: torch.dtype) -> None:
    input = (torch.randn(40, 8) * scale).to(dtype)
    weight = torch.randn(300, 8).to(dtype)
    outputs = functional.chunked_linear_log_probs(
        input, weight, torch.arange(40), return_entropy=True, chunk_size=16
    )
    assert (outputs.log_probs <= 0).all()
    assert outputs.entropy is not None
    assert (outputs.entropy >= 0).all()
    assert (outputs.entropy <= math.log(300) * (1 + 1e-6)).all()
    selected = functional.selective_log_softmax(F.linear(input, weight), torch.arange(40))
    assert (selected <= 0).all()


@pytest.mark.fault("B70")
def test_defaults_of_distillation_give_the_divergence_alone() -> None:
    input, weight = torch.randn(6, 8), torch.randn(11, 8)
    target = torch.zeros(6, dtype=torch.int64)
    for divergence in ("jsd", "kl", "reverse_kl", "tvd", "cosine"):
        loss = functional.chunked_linear_distillation(
            input, weight, input, weight, target, divergence=divergence
        )
        assert float(loss) == pytest.approx(0.0, abs=1e-6), divergence
    teacher = torch.randn(11, 8)
    loss = functional.chunked_linear_distillation(input, weight, input, teacher, target)
    q, p = (F.linear(input, each).double().softmax(-1) for each in (weight, teacher))
    middle = (p + q) / 2
    jsd = ((p * (p / middle).log() + q * (q / middle).log()) / 2).sum(-1).mean()
    assert float(loss) == pytest.approx(float(jsd), rel=1e-5)


@pytest.mark.fault("B71")
@pytest.mark.parametrize("divergence", ["jsd", "kl", "reverse_kl", "tvd"])
def test_probabilities_of_zero(divergence: str) -> None:
    """Both models mask the same class: 0 log 0 is 0 in the loss and in every gradient."""
    torch.manual_seed(2)
    input, weight, teacher = (
        torch.randn(*s, dtype=torch.float64) for s in ((5, 4), (7, 4), (7, 4))
    )
    masked = torch.zeros(7, dtype=torch.float64)
    masked[3] = -torch.inf
    student = input.requires_grad_()
    loss = functional.chunked_linear_distillation(
        student, weight, input.detach(), teacher, None, masked, masked, divergence=divergence
    )
    (grad,) = torch.autograd.grad(loss, student)
    kept = [0, 1, 2, 4, 5, 6]
    expected = functional.chunked_linear_distillation(
        student, weight[kept], input.detach(), teacher[kept], divergence=divergence
    )
    every.assert_close(loss, expected)
    every.assert_close(grad, torch.autograd.grad(expected, student)[0])


@pytest.mark.fault("B72")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@having("label_smoothing")
def test_masked_class(entry: Entry, smoothing: float) -> None:
    """A logit of -inf: finite without smoothing, with it whatever torch makes of it."""
    sample = every.make()
    assert sample.bias is not None
    masked = every.CLASSES - 1
    sample.bias[masked] = -torch.inf
    sample.target[sample.target == masked] = 0
    sample.target[0] = 1
    frozen = ("weight", "bias")
    ours = every.run(entry, sample, label_smoothing=smoothing, frozen=frozen)
    plain = every.run_plain(entry, sample, label_smoothing=smoothing, frozen=frozen)
    every.assert_close(ours.loss, plain.loss)
    if smoothing == 0.0:
        assert ours.loss.isfinite().all()
        every.assert_close(ours.input, plain.input)


@pytest.mark.fault("B93")
@having("class_weight")
def test_weighted_mean_divides_by_the_weights_of_the_targets(entry: Entry) -> None:
    """As torch does, and not by the number of rows."""
    torch.manual_seed(0)
    sample = every.make(classes=3, hidden=4)
    weights = torch.tensor([2.0, 4.0, 6.0], dtype=torch.float64)
    every.check(entry, sample.replace(class_weight=weights))
    if entry.name == "logits-cross-entropy-mean":
        logits, target = torch.randn(2, 3, dtype=torch.float64), torch.tensor([0, 2])
        loss = functional.cross_entropy(logits, target, class_weight=weights)
        rows = -logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
        every.assert_close(loss, (2.0 * rows[0] + 6.0 * rows[1]) / 8.0)
        every.assert_close(loss, F.cross_entropy(logits, target, weight=weights))


# ----------------------------------------------------------------------------------------- layouts


@pytest.mark.fault("B42")
@pytest.mark.parametrize("layout", ["padded", "offset", "strided", "padded-transposed"])
@explicit
def test_operands_of_any_stride(entry: Entry, layout: str) -> None:
    sample = every.make(batch=4, tokens=3)
    for name in ("input", "weight"):
        value = getattr(sample, name)
        if layout == "padded-transposed" and name == "input":
            other = (
                value.transpose(0, 1).contiguous().transpose(0, 1)
            )  # [T, B, D] seen as [B, T, D]
        else:
            other = samples.LAYOUTS[layout](value)
        assert torch.equal(other, value)
        assert other.stride() != value.stride() or other.storage_offset()
        every.check(entry, sample.replace(**{name: other}))


@pytest.mark.fault("B74", "B75")
@over()
def test_targets_of_any_stride(entry: Entry) -> None:
    sample = every.make(ignored=0.0)
    batch, tokens = sample.target.shape
    wide = torch.full((2 * batch, 2 * tokens), 2**40)
    wide[::2, ::2] = sample.target
    column = torch.full((batch, tokens, 5), 2**40)
    column[..., 3] = sample.target
    views = {
        "every second": wide[::2, ::2],
        "one column of five": column[..., 3],
        "transposed": sample.target.t().contiguous().t(),
    }
    if not entry.rewritten:
        views["expanded"] = sample.target[:1].expand(batch, tokens)
        views["one number"] = sample.target[:1, :1].expand(batch, tokens)
    for name, view in views.items():
        ours = every.check(entry, sample.replace(target=view))
        if "expanded" not in name and "number" not in name:
            plain = every.run(entry, sample)
            every.assert_close(ours.loss, plain.loss, name)


@pytest.mark.fault("B74")
@pytest.mark.parametrize("name", ["cross_entropy", "selective_log_softmax"])
def test_logits_with_strided_classes(name: str) -> None:
    wide = torch.full((9, 22), torch.nan, dtype=torch.float64)
    logits = torch.randn(9, 11, dtype=torch.float64)
    wide[:, ::2] = logits
    target = torch.arange(18)[::2] % 11
    grads = []
    for tensor in (wide, logits):
        leaf = tensor.detach().requires_grad_()
        view = leaf[:, ::2] if tensor is wide else leaf
        getattr(functional, name)(view, target).sum().backward()
        assert leaf.grad is not None
        grads.append(leaf.grad[:, ::2] if tensor is wide else leaf.grad)
    every.assert_close(*grads)
