"""Batches of sequences for the preference and policy losses, and their comparison with truth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from samples import SLACK, Result, Sample, assert_results_match, run

ROWS, TOKENS, HIDDEN, CLASSES = 6, 5, 8, 11
# Tokens that count in each sequence, from where to where: prompts before, padding behind.
SPANS = ((0, 5), (1, 4), (2, 5), (0, 2), (3, 4), (1, 5))
LONG_SPANS = ((0, 24), (1, 22), (2, 20), (0, 18), (1, 24), (2, 22))  # of 24 tokens


def ragged(target: Tensor, spans: tuple[tuple[int, int], ...] = SPANS) -> Tensor:
    """A target with nothing outside the spans."""
    result = torch.full_like(target, -100)
    for row, (start, stop) in enumerate(spans):
        result[row, start:stop] = target[row, start:stop]
    return result


def make_batch(
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    *,
    rows: int = ROWS,
    tokens: int = TOKENS,
    spans: tuple[tuple[int, int], ...] = SPANS,
    bias: bool = True,
) -> Sample:
    """Hidden states ``[B, T, D]``, a head, and ragged targets."""
    target = ragged(torch.randint(0, CLASSES, (rows, tokens)), spans)
    batch = Sample(
        torch.randn(rows, tokens, HIDDEN, dtype=dtype),
        torch.randn(CLASSES, HIDDEN, dtype=dtype) / 2,
        target.to(device),
        torch.randn(CLASSES, dtype=dtype) if bias else None,
    )
    # Made on the CPU, so that every device has the same numbers.
    return batch.map(lambda value: value.to(device))


def make_reference(batch: Sample, hidden: int = HIDDEN + 3) -> dict[str, Tensor]:
    """Another model's hidden states, of another width, and its head."""
    dtype = batch.input.dtype
    values = {
        "ref_input": torch.randn(*batch.target.shape, hidden, dtype=dtype),
        "ref_weight": torch.randn(CLASSES, hidden, dtype=dtype) / 2,
        "ref_bias": torch.randn(CLASSES, dtype=dtype),
    }
    return {name: value.to(batch.input.device) for name, value in values.items()}


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _call(function: Callable[..., Any], extra: tuple[Any, ...]) -> Callable[..., Tensor]:
    """A loss as `samples.run` calls one; what follows ``target`` is put in its place."""

    def call(
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        *,
        class_weight: None,
        **options: Any,
    ) -> Tensor:
        result = function(input, weight, target, *extra, bias, **options)
        return result if isinstance(result, Tensor) else result.loss

    return call


def check(
    function: Callable[..., Any],
    reference: Callable[..., Tensor],
    batch: Sample,
    *extra: Tensor,
    upstream: float = -1.7,
    frozen: Collection[str] = (),
    slack: float | None = None,
    only_ours: dict[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Compare loss and every gradient with fp64, as close as plain torch comes at this dtype."""
    if slack is None:
        slack = SLACK[batch.input.dtype]
    common: dict[str, Any] = {"upstream": upstream, "frozen": frozen}
    wide = {name: _double(value) for name, value in options.items()}
    wide_extra = tuple(_double(value) for value in extra)
    ours_options = {"chunk_size": 7, **options, **(only_ours or {})}
    ours = run(_call(function, extra), batch, **common, **ours_options)
    plain = run(_call(reference, extra), batch, **common, **options)
    truth = run(_call(reference, wide_extra), batch.double(), **common, **wide)
    loss_slack = 1e-12 if batch.input.dtype == torch.float64 else 1e-6
    assert_results_match(ours, plain, truth, batch, slack=slack, loss_slack=loss_slack)
    return ours


@dataclasses.dataclass
class Leaves:
    """The operands of a batch as leaves that require grad."""

    input: Tensor
    weight: Tensor
    bias: Tensor

    def grads(self) -> list[Tensor | None]:
        return [self.input.grad, self.weight.grad, self.bias.grad]


def leaves(batch: Sample) -> Leaves:
    assert batch.bias is not None
    return Leaves(
        *(value.detach().clone().requires_grad_() for value in
          (batch.input, batch.weight, batch.bias))
    )  # fmt: skip
