"""The oracle itself, against torch's own functions and finite differences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from greyhound_ops import reference
from samples import CASES, REDUCTIONS, make_sample


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_equals_torch(weighted: bool, smoothing: float, reduction: str) -> None:
    sample = make_sample(bias=True, class_weight=weighted, dtype=torch.float64)
    options = {"label_smoothing": smoothing, "reduction": reduction}
    torch.testing.assert_close(
        reference.linear_cross_entropy(
            sample.input,
            sample.weight,
            sample.target,
            sample.bias,
            class_weight=sample.class_weight,
            **options,
        ),
        F.cross_entropy(
            F.linear(sample.input, sample.weight, sample.bias),
            sample.target,
            weight=sample.class_weight,
            **options,
        ),
    )


@pytest.mark.fault("B63", "R16")
def test_softcap_scale_and_z_loss_by_hand() -> None:
    # One row whose logits are 124 and 0: the cap must bite (B63), the scale come before it.
    options = {"logit_scale": 0.5, "softcap": 30.0, "z_loss": 0.1, "reduction": "sum"}
    loss = reference.linear_cross_entropy(
        torch.tensor([[124.0]]), torch.tensor([[1.0], [0.0]]), torch.tensor([1]), **options
    )
    z = 30.0 * torch.tanh(torch.tensor(62.0) / 30.0)
    lse = torch.logaddexp(z, torch.tensor(0.0))
    torch.testing.assert_close(loss, lse + 0.1 * lse**2)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case: str, reduction: str) -> None:
    wanted, options = CASES[case]
    sample = make_sample(4, 3, 5, dtype=torch.float64, **wanted)
    leaves = [
        value.requires_grad_()
        for value in (sample.input, sample.weight, sample.bias)
        if value is not None
    ]

    def loss(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return reference.linear_cross_entropy(
            input,
            weight,
            sample.target,
            bias,
            class_weight=sample.class_weight,
            reduction=reduction,
            **options,
        )

    assert torch.autograd.gradcheck(loss, leaves)
    assert torch.autograd.gradgradcheck(loss, leaves)


@pytest.mark.fault("B13")
@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_mean_over_nothing(value: float) -> None:
    sample = make_sample()
    loss = reference.linear_cross_entropy(
        sample.input.requires_grad_(),
        sample.weight,
        torch.full_like(sample.target, -100),
        empty_mean=value,
    )
    torch.testing.assert_close(loss, torch.tensor(value), equal_nan=True)
    loss.backward()
    assert not sample.input.grad.any()
