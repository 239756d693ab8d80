from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops import config, reference
from greyhound_ops.functional import chunked_linear_cross_entropy
from greyhound_ops.kernels import exponentials
from greyhound_ops.testing import assert_within_budget, relative_error
from samples import make_sample

NAN = float("nan")
INF = float("inf")


@dataclasses.dataclass
class Problem:
    """A frozen head: 150 rows are one tile and a rest, 301 classes likewise."""

    input: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None
    class_weight: Tensor | None = None
    ignore_index: int = -100
    z_loss: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def options(self) -> dict[str, object]:
        return {
            "class_weight": self.class_weight,
            "ignore_index": self.ignore_index,
            "z_loss": self.z_loss,
            "logit_scale": self.logit_scale,
            "softcap": self.softcap,
        }

    def source(self, grad_scale: Tensor | None = None) -> exponentials.Exponentials:
        return exponentials.Exponentials(
            self.input,
            self.weight,
            self.bias,
            self.target,
            grad_scale=lambda: grad_scale,
            **self.options(),  # type: ignore[arg-type]
        )

    def losses(self) -> tuple[Tensor, Tensor]:
        """Loss and log-sum-exp of the path that stores nothing."""
        rows = self.input.shape[0]
        loss = torch.full((rows,), NAN, device=self.input.device)
        statistics = torch.full((2, rows), NAN, device=self.input.device)
        self.source().losses(0, rows, loss, statistics)
        return loss, statistics.sum(0)

    def gradient(self, grad_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss and grad_input of the path that stores exponentials."""
        rows, classes = self.input.shape[0], self.weight.shape[0]
        source = self.source(grad_scale)
        out = self.input.new_full((rows, -(-classes // 8) * 8), NAN)[:, :classes]
        loss = torch.full((rows,), NAN, device=self.input.device)
        statistics = torch.full((2, rows), NAN, device=self.input.device)
        factor, hard = source.exponentials(0, rows, out, loss, statistics)
        assert not statistics[:, self.target == self.ignore_index].any()
        product = (out.float() @ self.weight.float()).contiguous()
        grad = torch.full_like(self.input, NAN)
        source.grad_input(slice(0, rows), product, factor, hard, grad)
        return loss, grad

    def truth(self, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Loss and grad_input in float64."""
        input = self.input.double().requires_grad_()
        options = self.options()
        if self.class_weight is not None:
            options["class_weight"] = self.class_weight.double()
        loss = reference.linear_cross_entropy(
            input,
            self.weight.double(),
            self.target,
            None if self.bias is None else self.bias.double(),
            reduction="none",
            **options,  # type: ignore[arg-type]
        )
        (loss.sum() * scale).backward()
        assert input.grad is not None
        return loss.detach(), input.grad


# float32 in the interpreter, whose conversion to bf16 cuts off instead of rounding; on a GPU the
# products of float32 would be TF32, so bf16 there, which is what the path is for.
def make_problem(
    device: torch.device, *, spread: float = 1.0, classes: int = 301, **options: object
) -> Problem:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows, hidden = 150, 48
    values: dict[str, object] = {
        "input": torch.randn(rows, hidden, generator=generator) * spread,
        "weight": torch.randn(classes, hidden, generator=generator) / hidden**0.5,
        "target": torch.randint(0, classes, (rows,), generator=generator),
        "bias": torch.randn(classes, generator=generator) if options.pop("bias", False) else None,
        "class_weight": torch.rand(classes, generator=generator) + 0.5
        if options.pop("class_weight", False)
        else None,
    }
    placed = {
        name: value.to(device, dtype if value.is_floating_point() else None)
        if isinstance(value, Tensor)
        else value
        for name, value in values.items()
    }
    if isinstance(placed["class_weight"], Tensor):
        placed["class_weight"] = placed["class_weight"].float()
    problem = Problem(**placed, **options)  # type: ignore[arg-type]
    problem.target[[3, 140]] = problem.ignore_index
    return problem


def budget(device: torch.device) -> float:
    return 4e-3 if device.type == "cuda" else 2e-6


OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "scaled": {"logit_scale": 0.5, "bias": True},
    "capped": {"softcap": 2.0, "logit_scale": 1.5},
    "z_loss": {"z_loss": 1e-2},
    "weighted": {"class_weight": True},
    "everything": {
        "bias": True,
        "softcap": 3.0,
        "logit_scale": 0.7,
        "z_loss": 1e-2,
        "class_weight": True,
        "ignore_index": 7,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_losses_equal_the_reference(
    options: dict[str, object], kernel_device: torch.device
) -> None:
    problem = make_problem(kernel_device, **dict(options))
    loss, lse = problem.losses()
    truth, _ = problem.truth()
    assert relative_error(loss, truth) < 1e-6
    assert lse[3] == 0
    assert lse.isfinite().all()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_equal_the_reference(
    options: dict[str, object], kernel_device: torch.device
) -> None:
    problem = make_problem(kernel_device, **dict(options))
    scale = torch.tensor(0.25, device=kernel_device)
    loss, grad = problem.gradient(scale)
    truth, true_grad = problem.truth(0.25)
    assert relative_error(loss, truth) < 1e-6
    assert relative_error(grad, true_grad) < budget(kernel_device)
    assert (grad[[3, 140]] == 0).all()


@pytest.mark.parametrize("spread", [30.0, 200.0])
@pytest.mark.parametrize("classes", [301, 3])  # three: fewer than a thread loads at once
def test_rows_beyond_the_range_of_the_exponentials_are_repaired(
    classes: int, spread: float, kernel_device: torch.device
) -> None:
    problem = make_problem(kernel_device, spread=spread, classes=classes)
    truth, true_grad = problem.truth()
    assert (truth > 88).any()  # such a row's exponentials overflow
    assert (truth < 60).any()
    loss, grad = problem.gradient()
    assert relative_error(loss, truth) < budget(kernel_device)
    # Large logits are less exact in bf16: plain torch's error grows alike.
    assert relative_error(grad, true_grad) < (0.1 if kernel_device.type == "cuda" else 1e-4)


def test_only_flagged_tiles_are_repaired(kernel_device: torch.device) -> None:
    problem = make_problem(kernel_device)
    problem.input[10] *= 400  # its row is in the first tile of 128
    calm = make_problem(kernel_device)
    _, grad = problem.gradient()
    _, expected = calm.gradient()
    assert torch.equal(grad[128:], expected[128:])
    truth, true_grad = problem.truth()
    assert truth[10] > 88
    assert relative_error(grad[:128], true_grad[:128]) < (
        2e-2 if kernel_device.type == "cuda" else 1e-4
    )


def test_bias_of_minus_infinity_at_the_target(kernel_device: torch.device) -> None:
    problem = make_problem(kernel_device, bias=True)
    assert problem.bias is not None
    problem.target[10] = 5
    problem.target[problem.target == 6] = 5
    problem.bias[5:7] = -INF
    loss, grad = problem.gradient()
    assert loss[10] == INF
    assert grad.isfinite().all()
    forward_only, _ = problem.losses()
    assert forward_only[10] == INF
    finite = problem.target != 5
    truth, true_grad = problem.truth()
    assert relative_error(loss[finite], truth[finite]) < budget(kernel_device)
    assert relative_error(grad[finite], true_grad[finite]) < 2 * budget(kernel_device)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_ignored_rows_are_zero_whatever_they_hold(
    value: float, kernel_device: torch.device
) -> None:
    problem = make_problem(kernel_device)
    problem.input[3] = value
    loss, grad = problem.gradient()
    assert loss[3] == 0
    assert (grad[3] == 0).all()
    assert grad.isfinite().all()
    assert problem.losses()[0][3] == 0


@pytest.mark.parametrize("wrong", [301, 10**6, -1, -(10**6)])
def test_targets_out_of_range_poison_their_row_alone(
    wrong: int, kernel_device: torch.device
) -> None:
    problem = make_problem(kernel_device)
    problem.target[20] = wrong
    loss, grad = problem.gradient()
    assert loss[20].isnan()
    assert grad[20].isnan().all()
    others = torch.arange(150, device=kernel_device) != 20
    assert loss[others].isfinite().all()
    assert grad[others].isfinite().all()
    assert problem.losses()[0].isnan().nonzero().tolist() == [[20]]


def test_nan_in_a_row_stays_in_it(kernel_device: torch.device) -> None:
    problem = make_problem(kernel_device)
    problem.input[20] = NAN
    loss, grad = problem.gradient()
    assert loss.isnan().nonzero().tolist() == [[20]]
    assert grad[20].isnan().all()
    assert grad[torch.arange(150, device=kernel_device) != 20].isfinite().all()


def test_confident_rows_keep_a_small_gradient(kernel_device: torch.device) -> None:
    # p of the target is almost one: p - 1 must not be the difference of two rounded numbers.
    problem = make_problem(kernel_device, bias=True)
    assert problem.bias is not None
    problem.target[:] = 5
    problem.bias[5] = 16.0
    _, grad = problem.gradient()
    truth, true_grad = problem.truth()
    assert truth.max() < 0.01
    # In float32 the probability of the target is one but for its last bits, for torch as for us.
    plain = problem.input.float().requires_grad_()
    reference.linear_cross_entropy(
        plain, problem.weight.float(), problem.target, problem.bias.float(), reduction="sum"
    ).backward()
    assert plain.grad is not None
    assert_within_budget(
        "grad_input", grad, plain.grad, true_grad, factor=2.0, slack=budget(kernel_device)
    )


def test_supported_asks_for_what_the_kernel_needs(kernel_device: torch.device) -> None:
    input = torch.zeros(256, 64, dtype=torch.bfloat16, device=kernel_device)
    weight = torch.zeros(512, 64, dtype=torch.bfloat16, device=kernel_device)
    asks = lambda *pair: exponentials.supported(*pair, interpreted=True)  # noqa: E731
    assert asks(input, weight)
    assert not asks(input.float(), weight.float())
    assert not asks(input[:100], weight)  # less than a tile of rows
    assert not asks(input[:, 1:], weight[:, 1:])  # off the 16-byte grid
    assert not asks(input.t().contiguous().t(), weight)
    assert asks(input[::2], weight)
    if kernel_device.type == "cpu":
        assert not exponentials.supported(input, weight)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_size", [None, 140, 13])
def test_the_op_takes_this_path(
    reduction: str,
    chunk_size: int | None,
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = make_problem(kernel_device)
    input = problem.input.bfloat16().requires_grad_()
    weight = problem.weight.bfloat16()
    spans: list[tuple[int, int]] = []
    original = exponentials.Exponentials.exponentials

    def spy(self: object, start: int, stop: int, *args: Tensor) -> object:
        spans.append((start, stop))
        return original(self, start, stop, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(exponentials.Exponentials, "exponentials", spy)
    exact = input.detach().double().requires_grad_()
    with config.override(kernels="triton"):
        loss = chunked_linear_cross_entropy(
            input, weight, problem.target, reduction=reduction, chunk_size=chunk_size
        )
        upstream = torch.linspace(0.5, 1.5, loss.numel(), device=kernel_device).view_as(loss)
        loss.backward(upstream)
    truth = reference.linear_cross_entropy(
        exact, weight.double(), problem.target, reduction=reduction
    )
    truth.backward(upstream.double())
    assert spans[0][0] == 0
    assert spans[-1][1] == 150
    assert input.grad is not None
    assert exact.grad is not None
    assert relative_error(loss, truth) < 1e-6
    # bf16 twice: the stored gradient and its product with the upstream; the interpreter cuts off.
    assert relative_error(input.grad, exact.grad) < 2.0**-7
    assert (input.grad[3] == 0).all()


def test_a_learning_head_does_not(kernel_device: torch.device) -> None:
    problem = make_problem(kernel_device)
    input, weight = problem.input.bfloat16(), problem.weight.bfloat16().requires_grad_()

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("the path for frozen heads was taken")

    with pytest.MonkeyPatch.context() as patch, config.override(kernels="triton"):
        patch.setattr(exponentials.Exponentials, "__init__", fail)
        chunked_linear_cross_entropy(input, weight, problem.target).backward()
    assert weight.grad is not None


@pytest.mark.parametrize(
    ("options", "frozen"),
    [({"reduction": "none"}, ()), ({"return_lse": True}, ()), ({"return_lse": True}, ("weight",))],
    ids=str,
)
def test_gradients_of_the_backward_come_from_the_logits_of_their_statistics(
    options: dict[str, Any], frozen: tuple[str, ...], kernel_device: torch.device
) -> None:
    # A logit of 40 rounded to bf16 moves by 0.125: a probability near one by 13%. The gradient of
    # a confident row is one minus that.
    sample = make_sample(200, 16, 300, dtype=torch.bfloat16, device=kernel_device, ignored=0.0)
    target = (sample.input @ sample.weight.t()).argmax(-1)
    sample = sample.replace(input=4 * sample.input, target=target)
    results = []
    with config.override(kernels="triton"):
        # Against a head that learns, whose logits are rounded to bf16 as plain torch's are.
        for given, still in ((options, frozen), ({"reduction": "sum"}, ())):
            leaves = [
                getattr(sample, name).detach().requires_grad_(name not in still)
                for name in ("input", "weight")
            ]
            made = chunked_linear_cross_entropy(*leaves, sample.target, **given)
            loss = made if isinstance(made, Tensor) else made.loss * len(target)
            loss.sum().backward()
            results.append(leaves)
    truth = sample.input.double().requires_grad_()
    reference.linear_cross_entropy(
        truth, sample.weight.double(), sample.target, reduction="sum"
    ).backward()
    errors = [relative_error(leaves[0].grad, truth.grad) for leaves in results]
    assert errors[0] <= 1.2 * errors[1]
    if not frozen:
        torch.testing.assert_close(results[0][1].grad, results[1][1].grad, rtol=0.05, atol=0.02)
