"""Numbers of rows that are equal only as far as the trace knows: a guard, and never a wrong row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import greyhound_lowering
from lowering.rewriting import Backend, reasons


class Picked(nn.Module):
    """Log-probabilities of targets; `gather` takes fewer targets than rows as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 37)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        log_p = (self.head(x * 1.0)).log_softmax(-1)
        return log_p.gather(-1, y.unsqueeze(-1)).squeeze(-1).square().sum()


class Weighted(Picked):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        log_p = (self.head(x * 1.0)).log_softmax(-1)
        return (log_p.amax(-1) * y).square().sum()


def step(module: nn.Module, function: object, x: Tensor, y: Tensor) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    if y.dim() == 1 and x.shape[0] == y.shape[0]:
        for each in (leaf, y):
            torch._dynamo.mark_dynamic(each, 0)
    loss = function(leaf, y)  # type: ignore[operator]
    loss.backward(torch.tensor(1.7))
    return [loss.detach(), leaf.grad, *(each.grad for each in module.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("kind", [Picked, Weighted])
@pytest.mark.usefixtures("fresh_compiler")
def test_rows_of_separate_symbols(kind: type[Picked]) -> None:
    greyhound_lowering.clear_report()
    module = kind()
    compiled = torch.compile(module, backend=Backend())
    # Fewer targets than rows (gather) and one factor for all (broadcasting) are torch's meaning
    # too; the graph that was made for equal numbers must not serve them.
    other = (9, 4) if kind is Picked else (9, 1)
    for rows, targets in ((12, 12), (7, 7), other):
        x, y = torch.randn(rows, 8), torch.randint(0, 37, (targets,))
        y = y if kind is Picked else y.float()
        for value, plain in zip(
            step(module, compiled, x, y), step(module, module, x, y), strict=True
        ):
            torch.testing.assert_close(value, plain, rtol=1e-4, atol=1e-3)
    ops = [each.op for each in greyhound_lowering.explain().decisions]
    # One graph serves both equal numbers; what came after has its own.
    assert ops[:1] == ["greyhound::row_region"], reasons()
    assert len(ops) == 2


class PreparedLabels(Picked):
    """Log-probabilities of sequences as preference trainers take them, labels made in place."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x * 1.0)[:, :-1]
        labels = y[:, 1:].clone()
        mask = labels != -100
        labels[labels == -100] = 0
        picked = logits.log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
        return (picked * mask).sum(-1).sigmoid().mean()


class ChangedBetween(Picked):
    """Labels that are read before and behind a write."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        log_p = self.head(x * 1.0).log_softmax(-1)
        labels = y.clone()
        before = log_p.detach().gather(2, labels.unsqueeze(2)).squeeze(2)
        labels[labels == 3] = 0
        return (before * log_p.gather(2, labels.unsqueeze(2)).squeeze(2)).sum()


@pytest.mark.parametrize(("kind", "rewritten"), [(PreparedLabels, True), (ChangedBetween, False)])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.usefixtures("fresh_compiler")
def test_labels_prepared_in_place(kind: type[Picked], rewritten: bool, dynamic: bool) -> None:
    greyhound_lowering.clear_report()
    module = kind()
    compiled = torch.compile(module, backend=Backend(), dynamic=dynamic)
    x, y = torch.randn(3, 6, 8), torch.randint(0, 5, (3, 6))
    if kind is PreparedLabels:
        y[:, :3] = -100
    for value, plain in zip(step(module, compiled, x, y), step(module, module, x, y), strict=True):
        torch.testing.assert_close(value, plain, rtol=1e-4, atol=1e-4)
    assert (greyhound_lowering.explain().rewritten_count == 1) == rewritten, reasons()
