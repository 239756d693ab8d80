"""Every op as a step from leaves to a loss, for promises that all of them make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from greyhound_ops import functional


@dataclasses.dataclass(frozen=True)
class Step:
    """Arguments of one call.

    Attributes:
        input: ``[B, T, D]``.
        weight: ``[V, D]``.
        target: ``[B, T]``, some ignored.
        bias: ``[V]``.
    """

    input: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor

    def leaves(self) -> list[Tensor]:
        return [self.input, self.weight, self.bias]

    def fresh(self, learn: bool = True) -> Step:
        """The same values in leaves of their own."""
        made = [each.detach().clone().requires_grad_(learn) for each in self.leaves()]
        return Step(made[0], made[1], self.target, made[2])


def make_step(
    batch: int = 4,
    tokens: int = 5,
    hidden: int = 8,
    classes: int = 19,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Step:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    target = torch.randint(0, classes, (batch, tokens), generator=generator)
    target[:, 0] = -100
    return Step(
        normal(batch, tokens, hidden), normal(classes, hidden) / 3, target.to(device),
        normal(classes),
    )  # fmt: skip


def sum_of_squares(logits: Tensor, target: Tensor) -> Tensor:
    rows = logits.float().logsumexp(-1).square()
    return rows.masked_fill(target == -100, 0.0).sum()


SQUARES = functional.autograd_loss_and_logits_grad(sum_of_squares)


def _cross_entropy(**options: Any) -> Callable[..., Tensor]:
    def call(step: Step, **common: Any) -> Tensor:
        loss = functional.chunked_linear_cross_entropy(
            step.input, step.weight, step.target, step.bias, **options, **common
        )
        if not isinstance(loss, Tensor):
            return loss.loss + loss.lse.square().mean()
        return loss if loss.dim() == 0 else (loss * loss.detach()).mean()

    return call


def _log_probs(**options: Any) -> Callable[..., Tensor]:
    def call(step: Step, **common: Any) -> Tensor:
        result = functional.chunked_linear_log_probs(
            step.input, step.weight, step.target, step.bias, return_entropy=True, **options,
            **common,
        )  # fmt: skip
        return (result.log_probs * 0.5 - result.entropy.square()).mean()

    return call


def _distillation(**options: Any) -> Callable[..., Tensor]:
    def call(step: Step, **common: Any) -> Tensor:
        teacher = step.input.detach().flip(-1), step.weight.detach().flip(0)
        return functional.chunked_linear_distillation(
            step.input, step.weight, *teacher, step.target, step.bias, hard_weight=0.5,
            **options, **common,
        ).mean()  # fmt: skip

    return call


def _loss(step: Step, **common: Any) -> Tensor:
    return functional.chunked_linear_loss(
        step.input, step.weight, SQUARES, step.target, bias=step.bias, **common
    )


def _multi_token(step: Step, **common: Any) -> Tensor:
    return functional.chunked_multi_token_cross_entropy(
        [step.input, step.input * 0.5], step.weight, [step.target, step.target], step.bias,
        term_weights=[1.0, 0.3], **common,
    ).loss  # fmt: skip


def _multi_head(step: Step, **common: Any) -> Tensor:
    return functional.chunked_multi_head_cross_entropy(
        step.input, [step.weight, step.weight * 0.5], [step.target, step.target],
        [step.bias, step.bias], **common,
    ).loss  # fmt: skip


def _logits(step: Step, **_: Any) -> Tensor:
    logits = F.linear(step.input, step.weight, step.bias)
    exact = torch.promote_types(logits.dtype, torch.float32)
    chosen = functional.selective_log_softmax(logits, step.target, dtype=exact)
    return functional.cross_entropy(logits, step.target) - 0.1 * chosen.mean()


def _dpo(step: Step, **common: Any) -> Tensor:
    return functional.chunked_linear_dpo(
        step.input, step.weight, step.target, step.bias, reference_free=True, nll_weight=0.5,
        **common,
    ).loss  # fmt: skip


def _kto(step: Step, **common: Any) -> Tensor:
    desirable = torch.arange(step.input.shape[0], device=step.input.device) % 2 == 0
    return functional.chunked_linear_kto(
        step.input, step.weight, step.target, desirable, step.bias, reference_free=True, **common
    ).loss


def _grpo(step: Step, **common: Any) -> Tensor:
    advantages = torch.linspace(-1.0, 1.0, step.input.shape[0], device=step.input.device)
    return functional.chunked_linear_grpo(
        step.input, step.weight, step.target, advantages, step.bias, entropy_coef=0.1, **common
    ).loss


#: A scalar loss of a `Step` per op, and per place where gradients are made.
OPS: dict[str, Callable[..., Tensor]] = {
    "cross-entropy": _cross_entropy(),
    "cross-entropy-by-row": _cross_entropy(reduction="none", z_loss=1e-2),
    "cross-entropy-lse": _cross_entropy(return_lse=True, label_smoothing=0.1),
    "log-probs": _log_probs(),
    "log-probs-kept": _log_probs(keep_logits=True),
    "distillation": _distillation(),
    "distillation-by-row": _distillation(reduction="none", divergence="kl"),
    "loss": _loss,
    "multi-token": _multi_token,
    "multi-head": _multi_head,
    "logits": _logits,
    "dpo": _dpo,
    "kto": _kto,
    "grpo": _grpo,
}

#: Those that hold no more than a chunk of logits.
CHUNKED = {name: call for name, call in OPS.items() if name not in ("logits", "log-probs-kept")}


def train(name: str, step: Step, **common: Any) -> list[Tensor]:
    """Loss and gradients of fresh leaves, with an upstream gradient that is not one."""
    step = step.fresh()
    if name != "logits":
        common.setdefault("chunk_size", 6)
    loss = OPS[name](step, **common)
    (loss * -1.75).backward()
    return [loss.detach(), *(each.grad for each in step.leaves())]


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    """Bitwise."""
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
