"""Code that once gave a wrong result, a crash, or a gradient of its own under the rewrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import greyhound_lowering
from greyhound_ops.testing import relative_error
from lowering.rewriting import Backend, reasons

N, D, V = 12, 6, 19
Body = Callable[[Tensor, Tensor, Tensor], Tensor]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def change_in_checkpoint(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    h = h * 1
    logits = F.linear(h, w.detach())
    other = checkpoint(lambda h: h.mul_(2).sum(), h, use_reentrant=False)
    return F.cross_entropy(logits, y) + 0.1 * other


def change_in_function(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    h = h * 1
    logits = F.linear(h, w.detach())
    doubled = Doubled.apply(h)
    return F.cross_entropy(logits, y) + doubled.sum()


def change_by_renorm(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    w = w.detach() * 1
    logits = F.linear(h.detach(), w)
    F.embedding(torch.tensor([0, 1]), w, max_norm=0.1)
    return F.cross_entropy(logits, y)


def change_of_running_mean(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    mean = torch.zeros(V)
    logits = F.linear(h, w) + mean
    F.batch_norm(w.t().detach(), mean, torch.ones(V), training=True)
    return F.cross_entropy(logits, y)


def list_of_rows(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h.view(3, 4, D), w)[[0, 2]]
    return F.cross_entropy(logits.flatten(0, 1), y.view(3, 4)[[0, 2]].flatten())


def unflattened_vocabulary(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).unflatten(-1, (1, V)).flatten(0, 1), y)


def squeezed_hidden_of_one(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h[:, :1], w[:, :1]).squeeze(1), y)


def in_inference_mode(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        return F.cross_entropy(F.linear(h, w), y) * 1


LEFT = {
    "change in a checkpoint": (change_in_checkpoint, "changed in place"),
    "change in a Function": (change_in_function, "changed in place"),
    "renormalised table": (change_by_renorm, "changed in place"),
    "running statistics": (change_of_running_mean, "changed in place"),
    "list of rows": (list_of_rows, "list of rows"),
    "unflatten": (unflattened_vocabulary, "touches the vocabulary"),
    "squeeze": (squeezed_hidden_of_one, "touches the vocabulary"),
}


def compare(body: Body, *, tolerance: float = 1e-5, **settings: Any) -> None:
    results = []
    for rewritten in (False, True):
        torch._dynamo.reset()
        greyhound_lowering.clear_report()
        generator = torch.Generator().manual_seed(0)
        h = torch.randn(N, D, generator=generator).requires_grad_()
        w = torch.randn(V, D, generator=generator).requires_grad_()
        y = torch.randint(0, V, (N,), generator=generator)
        function = torch.compile(body, backend=Backend(**settings)) if rewritten else body
        loss = function(h, w, y)
        if loss.requires_grad:
            (1.7 * loss).backward()
        results.append((loss, h.grad, w.grad))
    for plain, ours in zip(*results, strict=True):
        assert (plain is None) == (ours is None)
        if plain is not None and ours is not None:
            assert relative_error(ours, plain) < tolerance


@pytest.mark.fault("B47")
@pytest.mark.parametrize(("body", "reason"), LEFT.values(), ids=LEFT)
def test_left_with_a_reason(body: Body, reason: str) -> None:
    compare(body, kinds=("cross_entropy",))
    assert any(reason in each for each in reasons())
    compare(body)  # as a region it may be taken; it must be right either way


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="needs torch 2.13: before, AOTAutograd itself fails on such a graph",
)
def test_inference_mode_is_left() -> None:
    compare(in_inference_mode)
    assert any("inference_mode" in each for each in reasons())


def into_a_buffer(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        buffer = torch.zeros(N, V)
        logits = torch.mm(h, w.t(), out=buffer)
        return F.cross_entropy(logits, y) + buffer.abs().sum()


def broadcast_contraction(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.einsum("nd,vd->nv", h[:, :1], w), y)


@pytest.mark.parametrize("body", [into_a_buffer, broadcast_contraction])
def test_no_projection_of_ours(body: Body) -> None:
    compare(body)
    assert greyhound_lowering.explain().rewritten_count == 0


def bias_changed_after_the_loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    prior = w[:, 0].detach() * 1
    loss = F.cross_entropy(F.linear(h, w) + prior, y)
    prior.mul_(0.9)
    return loss + prior.sum()


def hidden_changed_after_a_frozen_head(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    x = h * 1
    loss = F.cross_entropy(F.linear(x, w.detach()), y)
    return loss + F.relu(x, inplace=True).sum()


def loss_is_the_next_hidden(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w).view(3, 4, V).transpose(1, 2)
    hidden = F.cross_entropy(logits, y.view(3, 4), reduction="none")
    return F.cross_entropy(F.linear(hidden, torch.ones(25, 4).cumsum(0) / 9), y[:3])


@pytest.mark.parametrize(
    "body",
    [bias_changed_after_the_loss, hidden_changed_after_a_frozen_head, loss_is_the_next_hidden],
)
def test_rewritten_all_the_same(body: Body) -> None:
    compare(body)
    assert greyhound_lowering.explain().left_count == 0
    assert greyhound_lowering.explain().rewritten_count >= 1


def large_class_weight(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    weights = torch.ones(V).index_fill(0, y[:1], 400.0)
    return F.cross_entropy(F.linear(h.half(), w.half()).float(), y, weight=weights)


def large_scale(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h.half(), w.half()).float() * 300, y)


def large_scale_under_autocast(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return F.cross_entropy(F.linear(h, w) * 100, y)


@pytest.mark.parametrize("body", [large_class_weight, large_scale, large_scale_under_autocast])
def test_fp16_gradients_stay_in_range(body: Body) -> None:
    compare(body, tolerance=1e-2)
    assert greyhound_lowering.explain().rewritten_count == 1
