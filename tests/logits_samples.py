"""Inputs of the ops on existing logits and the one place that compares their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from greyhound_ops import reference
from greyhound_ops.functional import cross_entropy, selective_log_softmax
from greyhound_ops.testing import assert_within_budget
from samples import SLACK

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "class-weight": {"class_weight": True},
    "negative-scale": {"logit_scale": -0.5},
    "softcap": {"softcap": 2.0},
    "all": {
        "class_weight": True, "label_smoothing": 0.2, "z_loss": 1e-2, "logit_scale": 0.5,
        "softcap": 3.0,
    },
}  # fmt: skip


def make_logits(
    shape: tuple[int, ...] = (13,),
    classes: int = 11,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Random logits and targets; about a quarter of the rows, but never the first, is ignored."""
    logits = torch.randn(*shape, classes, dtype=dtype, device=device)
    drop = torch.rand(shape, device=device) < 0.25
    if drop.numel():
        drop.view(-1)[0] = False
    target = torch.randint(0, classes, shape, device=device).masked_fill(drop, ignore_index)
    return logits, target


def class_weights(classes: int, device: torch.device | str) -> Tensor:
    return torch.linspace(0.25, 1.5, classes, device=device)


def run(
    function: Callable[..., Tensor],
    logits: Tensor,
    target: Tensor,
    upstream: Tensor | float = 1.0,
    *,
    view: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """A result and the gradient of the logits, which a view may lead to."""
    leaf = logits.detach().requires_grad_()
    viewed = leaf if view is None else view(leaf)
    if options.get("class_weight") is True:
        options["class_weight"] = class_weights(viewed.shape[-1], viewed.device)
    result = function(viewed, target, **options)
    if not isinstance(upstream, Tensor):
        upstream = torch.full_like(result, upstream)
    result.backward(upstream.to(result.dtype))
    assert leaf.grad is not None
    return result.detach(), leaf.grad


def check(
    name: str,
    logits: Tensor,
    target: Tensor,
    upstream: Tensor | float = -1.7,
    *,
    view: Callable[[Tensor], Tensor] | None = None,
    slack: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compare with fp64, as close as plain torch comes at this dtype."""
    dtype = logits.dtype
    slack = SLACK[dtype] if slack is None else slack
    function = {"cross_entropy": cross_entropy, "log_softmax": selective_log_softmax}[name]
    plainly = {
        "cross_entropy": reference.cross_entropy,
        "log_softmax": reference.selective_log_softmax,
    }[name]
    exact = torch.promote_types(dtype, torch.float32)
    only_ours = {"dtype": exact} if name == "log_softmax" else {}
    ours = run(function, logits, target, upstream, view=view, **options, **only_ours)
    plain = run(plainly, logits, target, upstream, view=view, **options)
    temperature = options.get("temperature")
    if isinstance(temperature, Tensor):
        options["temperature"] = temperature.double()
    truth = run(plainly, logits.double(), target, upstream, view=view, **options)
    assert ours[0].dtype == exact
    assert ours[1].dtype == dtype
    loss_slack = slack if dtype == torch.float64 else 1e-6
    assert_within_budget("result", ours[0], plain[0], truth[0], slack=loss_slack)
    assert_within_budget("grad_logits", ours[1], plain[1], truth[1], slack=slack)
    return ours


# ---------------------------------------------------------------------------------------- layouts


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted": lambda logits: logits[:, :-1],
    "every-second": lambda logits: logits[:, 1::2],
    "transposed": lambda logits: logits.transpose(0, 1),
    "permuted": lambda logits: logits[:, :, None].expand(-1, -1, 2, -1).permute(2, 1, 0, 3),
    "expanded": lambda logits: logits[:1].expand(4, -1, -1),
    "columns": lambda logits: logits[..., ::2],
    "classes-first": lambda logits: logits.movedim(-1, 0).contiguous().movedim(0, -1),
    "padded": lambda logits: logits[..., :-3],
    "one-row": lambda logits: logits[0, 0],
    "no-rows": lambda logits: logits[:, :0],
    "no-batch": lambda logits: logits[:0],
}
