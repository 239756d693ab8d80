"""Products over a vocabulary in two parts, as cuBLAS gets an odd one, against one product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from greyhound_ops import functional
from greyhound_ops.ops import chunk_loop
from greyhound_ops.testing import relative_error
from ops.test_row_region import WAYS, make_region, outcome
from samples import dtype_id

ROWS, HIDDEN, CLASSES = 37, 16, 33


def two_parts(num_classes: int, dtype: torch.dtype, device_type: str) -> list[slice]:
    whole = num_classes - num_classes % 8
    parts = [slice(0, whole), slice(whole, num_classes)]
    return parts if 0 < whole < num_classes else [slice(0, num_classes)]


def odd_gradient(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A loss whose gradient is another's memory, with rows an odd distance apart."""
    grad = logits.softmax(1)
    grad[torch.arange(len(target)), target] -= 1
    return F.cross_entropy(logits, target, reduction="sum"), grad.clone()


def gradient_over_logits(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    loss, grad = odd_gradient(logits, target)
    return loss, logits.copy_(grad)


OPS: dict[str, Callable[..., Any]] = {
    "cross_entropy": functional.chunked_linear_cross_entropy,
    "by-row": lambda *args, **kwargs: functional.chunked_linear_cross_entropy(
        *args, reduction="none", **kwargs
    ),
    "log_probs": functional.chunked_linear_log_probs,
    "distillation": lambda x, w, target, bias, **kwargs: functional.chunked_linear_distillation(
        x, w, x.detach().flip(0), w.detach().flip(0), bias=bias, **kwargs
    ),
    "loss": lambda x, w, target, bias, **kwargs: functional.chunked_linear_loss(
        x, w, odd_gradient, target, bias=bias, **kwargs
    ),
    "loss-in-place": lambda x, w, target, bias, **kwargs: functional.chunked_linear_loss(
        x, w, gradient_over_logits, target, bias=bias, **kwargs
    ),
}


def results(op: str, dtype: torch.dtype, *, transposed: bool, bias: bool) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, dtype=dtype).requires_grad_()
    weight = torch.randn(CLASSES, HIDDEN, dtype=dtype)
    if transposed:
        weight = weight.t().contiguous().t()
    weight.requires_grad_()
    shift = torch.randn(CLASSES, dtype=dtype).requires_grad_() if bias else None
    target = torch.randint(0, CLASSES, (ROWS,))
    out = OPS[op](x, weight, target, shift, chunk_size=10)
    leaves = [each for each in (x, weight, shift) if each is not None]
    upstream = torch.linspace(0.5, 2.0, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("keeps", [False, True], ids=["sums", "keeps"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("op", OPS)
def test_two_parts_are_one_product(
    op: str, dtype: torch.dtype, keeps: bool, bias: bool, transposed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(chunk_loop, "KEEPS_GRADIENT_ON_CPU", keeps)
    expected = results(op, dtype, transposed=transposed, bias=bias)
    monkeypatch.setattr(chunk_loop, "class_parts", two_parts)
    monkeypatch.setattr(chunk_loop, "DENSE_BYTES", 4 * 32 * dtype.itemsize)  # a bias by 4 rows
    made = results(op, dtype, transposed=transposed, bias=bias)
    for value, one in zip(made, expected, strict=True):
        assert value.dtype == one.dtype
        assert relative_error(value, one) < (1e-13 if dtype == torch.float64 else 2**-8)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["cross_entropy", "distillation", "dense"])
def test_regions(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    region = make_region(name, 23, dtype=torch.float64)
    expected = outcome(WAYS[way], region, chunk_size=7)
    monkeypatch.setattr(chunk_loop, "class_parts", two_parts)
    made = outcome(WAYS[way], region, chunk_size=7)
    for key, value in expected.items():
        if value is not None:
            assert relative_error(made[key], value) < 1e-13, key


def test_a_bias_is_added_into_dense_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    dense: list[bool] = []
    addmm = torch.addmm

    def spy(bias: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        if bias.dim() == 1:
            dense.append(out.is_contiguous())
        return addmm(bias, *args, out=out, **kwargs)

    monkeypatch.setattr(chunk_loop, "class_parts", two_parts)
    monkeypatch.setattr(torch, "addmm", spy)
    results("cross_entropy", torch.bfloat16, transposed=False, bias=True)
    assert dense
    assert all(dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_parts_that_cancel(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every target in the second part, rows of the head nearly alike: rounded before they were
    # added, the parts left 1.3 and 1.7 times the error of one product.
    monkeypatch.setattr(chunk_loop, "class_parts", two_parts)
    torch.manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, device=device).to(dtype).requires_grad_()
    weight = (4 + 0.1 * torch.randn(257, HIDDEN, device=device)).to(dtype)
    target = torch.full((ROWS,), 256, device=device)
    loss = functional.chunked_linear_cross_entropy(x, weight, target, chunk_size=10)
    (made,) = torch.autograd.grad(loss, x)
    wide = x.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(F.cross_entropy(wide @ weight.double().t(), target), wide)
    (plain,) = torch.autograd.grad(F.cross_entropy(F.linear(x, weight).float(), target), x)
    assert relative_error(made, truth) < 1.1 * relative_error(plain, truth) + 2.0**-10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_logits_with_a_bias_are_rounded_once(dtype: torch.dtype) -> None:
    # A padded row is no dense memory, and cuBLAS then rounds before it adds: 6% more.
    torch.manual_seed(0)
    x = torch.randn(2048, 256, device="cuda").to(dtype)
    weight = torch.randn(8193, 256, device="cuda").to(dtype) / 16
    bias = (4 * torch.randn(8193, device="cuda")).to(dtype)
    loop = chunk_loop.ChunkLoop(
        x, weight, bias, needs=chunk_loop.GradientNeeds(True, True, True), compute_dtype=dtype,
        accum="fp32", chunk_size=None, gain=1.0,
    )  # fmt: skip
    assert len(loop._class_parts) == 2
    exact = x.double() @ weight.double().t() + bias.double()
    once = relative_error(exact.to(dtype), exact)
    assert relative_error(loop.project(0, 2048), exact) < 1.01 * once


class InTheLogits(torch.autograd.Function):
    """``(logits * by).sum()``; the gradient of ``by`` is the logits, and not a copy of them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, by: Tensor) -> Tensor:
        ctx.save_for_backward(logits, by)
        return (logits * by).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, by = ctx.saved_tensors
        return grad * by, logits


@pytest.mark.parametrize("keeps", [False, True], ids=["sums", "keeps"])
def test_an_argument_whose_gradient_is_the_logits(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_loop, "KEEPS_GRADIENT_ON_CPU", keeps)
    monkeypatch.setattr(chunk_loop, "class_parts", two_parts)
    torch.manual_seed(0)
    shapes = ((ROWS, HIDDEN), (CLASSES, HIDDEN), (ROWS, CLASSES))
    leaves = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    x, weight, by = leaves
    adapter = functional.autograd_loss_and_logits_grad(InTheLogits.apply)
    loss = functional.chunked_linear_loss(x, weight, adapter, by, chunk_size=10)
    made = torch.autograd.grad(loss, leaves)
    expected = torch.autograd.grad((F.linear(x, weight).double() * by.double()).sum(), leaves)
    for value, truth in zip(made, expected, strict=True):
        assert relative_error(value, truth) < 2**-7


def test_who_is_cut() -> None:
    cut = chunk_loop.class_parts
    assert cut(50257, torch.bfloat16, "cuda") == [slice(0, 50256), slice(50256, 50257)]
    for kept in ((50256, torch.bfloat16, "cuda"), (50257, torch.float32, "cuda"),
                 (50257, torch.bfloat16, "cpu"), (33, torch.float16, "cuda")):  # fmt: skip
        assert len(cut(*kept)) == 1
