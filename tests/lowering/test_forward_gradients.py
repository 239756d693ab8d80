"""Gradients of a region made in its forward, where what each row is worth is known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import greyhound_lowering
from lowering.rewriting import Backend, check

ROWS, HIDDEN, CLASSES = 12, 8, 37

Body = Callable[[Tensor, nn.Linear, Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.body = body

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self.body(x, self.head, y, weight)


def make(body: Body) -> Any:
    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        x = torch.randn(3, 4, HIDDEN, requires_grad=True)
        y = torch.randint(0, CLASSES, (3, 4))
        weight = torch.rand(3, 4, requires_grad=True)
        return Model(body), (x, y, weight)

    return build


def log_probs(x: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return head(x).log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)


def masked_mean(x: Tensor, head: nn.Linear, y: Tensor, weight: Tensor) -> Tensor:
    mask = (y > 5).float()
    return -(log_probs(x, head, y) * mask).sum() / mask.sum().clamp_min(1)


def squared_lse(x: Tensor, head: nn.Linear, y: Tensor, weight: Tensor) -> Tensor:
    z = head(x)
    return F.cross_entropy(z.flatten(0, 1), y.flatten()) + 0.1 * z.logsumexp(-1).square().mean()


def focal(x: Tensor, head: nn.Linear, y: Tensor, weight: Tensor) -> Tensor:
    p = log_probs(x, head, y)
    return -((1 - p.exp()) ** 2 * p).mean()


def learned_row_weight(x: Tensor, head: nn.Linear, y: Tensor, weight: Tensor) -> Tensor:
    return -(log_probs(x, head, y) * weight).sum() / weight.sum()


def two_losses(x: Tensor, head: nn.Linear, y: Tensor, weight: Tensor) -> Tensor:
    z = head(x)
    hard = F.cross_entropy(z.flatten(0, 1), y.flatten()) * 0.3
    return hard + 0.7 * F.mse_loss(z, torch.zeros_like(z))


def mean_of_sequences(x: Tensor, head: nn.Linear, y: Tensor, weight: Tensor) -> Tensor:
    return -log_probs(x, head, y).sum(-1).mean()


LINEAR: dict[str, Body] = {
    "masked mean": masked_mean,
    "squared lse": squared_lse,
    "focal": focal,
    "learned row weight": learned_row_weight,
    "two losses": two_losses,
    "mean of sequences": mean_of_sequences,
}


def per_sequence_sigmoid(x: Tensor, head: nn.Linear, y: Tensor, weight: Tensor) -> Tensor:
    return -F.logsigmoid(log_probs(x, head, y).sum(-1)).mean()


def worst_row(x: Tensor, head: nn.Linear, y: Tensor, weight: Tensor) -> Tensor:
    return -log_probs(x, head, y).min()


def root_of_the_sum(x: Tensor, head: nn.Linear, y: Tensor, weight: Tensor) -> Tensor:
    return log_probs(x, head, y).sum().square()


NOT_LINEAR: dict[str, Body] = {
    "sigmoid of a sequence": per_sequence_sigmoid,
    "worst row": worst_row,
    "square of the sum": root_of_the_sum,
}

dynamic_or_not = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


def made_in_forward(backend: Backend) -> bool:
    (node,) = backend.region_nodes
    return bool(node.args[8])  # coefficients


@dynamic_or_not
@pytest.mark.parametrize("body", LINEAR.values(), ids=LINEAR)
def test_made_in_the_forward(body: Body, dynamic: bool) -> None:
    assert made_in_forward(check(make(body), dynamic=dynamic))


@dynamic_or_not
@pytest.mark.parametrize("body", NOT_LINEAR.values(), ids=NOT_LINEAR)
def test_made_in_the_backward(body: Body, dynamic: bool) -> None:
    assert not made_in_forward(check(make(body), dynamic=dynamic))


def test_per_row_losses_wait_for_their_upstream() -> None:
    def body(x: Tensor, head: nn.Linear, y: Tensor, weight: Tensor) -> Tensor:
        return -log_probs(x, head, y) * 2

    torch._dynamo.reset()
    backend = Backend()
    model, inputs = make(body)()
    plain, same = make(body)()
    upstream = torch.randn(3, 4)
    torch.compile(model, backend=backend)(*inputs).backward(upstream)
    plain(*same).backward(upstream)
    assert not made_in_forward(backend)
    torch.testing.assert_close(inputs[0].grad, same[0].grad)
    torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad)


def test_nothing_is_made_without_a_gradient() -> None:
    backend = check(make(masked_mean), context=torch.no_grad)
    assert not made_in_forward(backend)


def test_an_infinite_loss_stays_infinite() -> None:
    def body(x: Tensor, head: nn.Linear, y: Tensor, weight: Tensor) -> Tensor:
        z = head(x).masked_fill(torch.arange(CLASSES) < 3, float("-inf"))
        return -z.log_softmax(-1).gather(-1, torch.ones_like(y).unsqueeze(-1)).mean()

    torch._dynamo.reset()
    backend = Backend()
    model, inputs = make(body)()
    loss = torch.compile(model, backend=backend)(*inputs)
    assert made_in_forward(backend)
    assert loss == float("inf")


def test_the_report_names_the_op() -> None:
    check(make(masked_mean))
    (decision,) = greyhound_lowering.explain().decisions
    assert decision.op == "greyhound::row_region"


def test_value_and_gradient_apart() -> None:
    value = torch.tensor(2.0, dtype=torch.bfloat16, requires_grad=True)
    source = torch.tensor(2.5, requires_grad=True)
    op = torch.ops.greyhound.with_gradient_of.default
    torch.library.opcheck(op, (value, source))
    made = op(value, source)
    assert made == 2.0
    (made * 3).backward()
    assert value.grad == 3
    assert value.grad.dtype == torch.bfloat16
    assert source.grad == 3
    assert source.grad.dtype == torch.float32


def test_the_body_stands_on_one_line() -> None:
    # Inductor quotes it in comments of the code it writes for a GPU; a second line broke that code.
    (node,) = check(make(squared_lse)).region_nodes
    assert node.args[5].startswith("def body(")
    assert "\n" not in node.args[5]
