"""Heads stacked in one tensor and multiplied by bmm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowering.rewriting import Backend, assert_left, check

HEADS, ROWS, HIDDEN, CLASSES = 3, 5, 8, 37
OP = torch.ops.greyhound.linear_cross_entropy_terms.default

Body = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, body: Body, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(HEADS, HIDDEN, CLASSES, dtype=dtype) * 0.3)
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(x, self.heads, y)


def make(body: Body, *, ignored: float = 0.3, dtype: torch.dtype = torch.float32) -> Any:
    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        x = torch.randn(HEADS, ROWS, HIDDEN, dtype=dtype, requires_grad=True)
        y = torch.randint(0, CLASSES, (HEADS, ROWS))
        y = y.masked_fill(torch.rand(HEADS, ROWS) < ignored, -100)
        return Model(body, dtype), (x, y)

    return build


def mean(x: Tensor, heads: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.bmm(x, heads).reshape(-1, CLASSES), y.view(-1))


def total(x: Tensor, heads: Tensor, y: Tensor) -> Tensor:
    z = torch.matmul(x, heads).float().flatten(0, 1)
    return F.cross_entropy(z, y.flatten(), reduction="sum", label_smoothing=0.1)


def frozen_heads(x: Tensor, heads: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((x @ heads.detach()).view(-1, CLASSES), y.view(-1))


def other_ignore_index(x: Tensor, heads: Tensor, y: Tensor) -> Tensor:
    z = torch.bmm(x, heads).view(-1, CLASSES)
    return 3 * F.cross_entropy(z, y.view(-1).clamp_min(0), ignore_index=0)


def deprecated_sum(x: Tensor, heads: Tensor, y: Tensor) -> Tensor:
    z = torch.bmm(x, heads).view(-1, CLASSES)
    return F.cross_entropy(z, y.view(-1), size_average=False)


TAKEN: dict[str, Body] = {
    "mean": mean,
    "sum": total,
    "frozen heads": frozen_heads,
    "ignore_index": other_ignore_index,
    "size_average=False": deprecated_sum,
}


def transposed(x: Tensor, heads: Tensor, y: Tensor) -> Tensor:
    z = torch.bmm(x, heads).transpose(0, 1)
    return F.cross_entropy(z.reshape(-1, CLASSES), y.t().reshape(-1))


def per_row(x: Tensor, heads: Tensor, y: Tensor) -> Tensor:
    z = torch.bmm(x, heads).view(-1, CLASSES)
    return F.cross_entropy(z, y.view(-1), reduction="none").square().sum()


def read_twice(x: Tensor, heads: Tensor, y: Tensor) -> Tensor:
    z = torch.bmm(x, heads).view(-1, CLASSES)
    return F.cross_entropy(z, y.view(-1)) + z.square().mean()


def attention(x: Tensor, heads: Tensor, y: Tensor) -> Tensor:
    return (torch.bmm(x, heads).softmax(-1) @ heads.transpose(1, 2)).square().mean()


def classes_weighted(x: Tensor, heads: Tensor, y: Tensor) -> Tensor:
    z = torch.bmm(x, heads).view(-1, CLASSES)
    return F.cross_entropy(z, y.view(-1), weight=torch.ones(CLASSES))


LEFT: dict[str, Body] = {
    "transposed": transposed,
    "per row": per_row,
    "read twice": read_twice,
    "attention": attention,
    "class weights": classes_weighted,
}


def nodes_of(backend: Backend) -> list[Any]:
    return [node for node in backend.our_nodes if node.target is OP]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("body", TAKEN.values(), ids=TAKEN)
def test_taken(body: Body, dynamic: bool) -> None:
    backend = check(make(body), dynamic=dynamic)
    (node,) = nodes_of(backend)
    assert node.kwargs["need_grad_weights"] == [body is not frozen_heads] * HEADS
    assert not backend.wide_products(CLASSES)


@pytest.mark.parametrize("body", LEFT.values(), ids=LEFT)
def test_left(body: Body) -> None:
    assert_left(check(make(body)), "stack of matrices")


def test_a_buffer_of_the_callers_is_left() -> None:
    def body(x: Tensor, heads: Tensor, y: Tensor) -> Tensor:
        buffer = torch.zeros(HEADS, ROWS, CLASSES)
        z = torch.bmm(x, heads, out=buffer)
        return F.cross_entropy(z.view(-1, CLASSES), y.view(-1)) + buffer.abs().sum()

    assert_left(check(make(body), context=torch.no_grad), "stack of matrices")


def test_bfloat16() -> None:
    assert nodes_of(check(make(mean, dtype=torch.bfloat16)))


def test_no_row_counts() -> None:
    torch._dynamo.reset()
    model, inputs = make(mean, ignored=2.0)()
    backend = Backend()
    loss = torch.compile(model, backend=backend)(*inputs)
    assert nodes_of(backend)
    assert loss.isnan()


def test_too_small_to_pay() -> None:
    assert_left(check(make(mean), min_logits_bytes=None), "stack of matrices")
