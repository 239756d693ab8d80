"""Inputs of the ops under test and the one place that compares gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops import functional, reference
from greyhound_ops.ops import chunk_loop
from greyhound_ops.testing import assert_within_budget

REDUCTIONS = ("mean", "sum", "none")
DIFFERENTIABLE = ("input", "weight", "bias")

# Relative error allowed beside that of plain torch. The stored gradient is rounded once, scaled by
# the upstream and rounded again, so one unit roundoff in reduced precision.
SLACK = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}
DTYPES = tuple(SLACK)


def interpreter_slack(dtype: torch.dtype) -> float:
    """Relative error that Triton's interpreter adds: it cuts bf16 off where a GPU rounds."""
    cuts = os.environ.get("TRITON_INTERPRET") == "1" and dtype == torch.bfloat16
    return SLACK[dtype] if cuts else 0.0


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclasses.dataclass(frozen=True)
class Sample:
    """Arguments of ``linear_cross_entropy``; the tensors keep the strides they are made with."""

    input: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None
    class_weight: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Sample:
        """The same with a function applied to every floating-point tensor."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Sample(
            **{
                name: function(value) if value is not None and name != "target" else value
                for name, value in values.items()
            }
        )

    def double(self) -> Sample:
        return self.map(Tensor.double)

    def replace(self, **changes: Any) -> Sample:
        return dataclasses.replace(self, **changes)


def make_sample(
    rows: int | tuple[int, ...] = 13,
    hidden: int = 8,
    classes: int = 11,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    bias: bool = False,
    class_weight: bool = False,
    ignored: float = 0.25,
    ignore_index: int = -100,
) -> Sample:
    """Random arguments; about a quarter of the rows, but never the first, is ignored."""
    shape = (rows,) if isinstance(rows, int) else rows
    options = {"dtype": dtype, "device": device}
    target = torch.randint(0, classes, shape, device=device)
    drop = torch.rand(shape, device=device) < ignored
    if drop.numel():
        drop.view(-1)[0] = False
    return Sample(
        torch.randn(*shape, hidden, **options),
        torch.randn(classes, hidden, **options),
        target.masked_fill(drop, ignore_index),
        torch.randn(classes, **options) if bias else None,
        torch.rand(classes, **options) + 0.25 if class_weight else None,
    )


@dataclasses.dataclass(frozen=True)
class Result:
    """A loss and the gradients of the tensors that were not frozen (None for those that were)."""

    loss: Tensor
    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def run(
    function: Callable[..., Tensor],
    sample: Sample,
    *,
    upstream: Tensor | float | None = None,
    frozen: Collection[str] = (),
    **options: Any,
) -> Result:
    """Loss and gradients.

    Args:
        function: Takes the arguments of a sample.
        sample: Its tensors are detached first, which keeps their strides.
        upstream: Gradient of the loss, expanded to its shape; None for ones.
        frozen: Names of tensors that need no gradient.
        **options: For ``function``.
    """
    leaves: dict[str, Tensor | None] = {}
    for name in DIFFERENTIABLE:
        value = getattr(sample, name)
        leaves[name] = None if value is None else value.detach()
        if value is not None and name not in frozen:
            leaves[name] = value.detach().requires_grad_()
    loss = function(
        leaves["input"],
        leaves["weight"],
        sample.target,
        leaves["bias"],
        class_weight=sample.class_weight,
        **options,
    )
    if loss.requires_grad:
        if not isinstance(upstream, Tensor):
            upstream = torch.full_like(loss, 1.0 if upstream is None else upstream)
        # No cast where the dtype already fits: strides are part of what is tested.
        loss.backward(upstream.to(loss.dtype))
    grads = {name: None if leaf is None else leaf.grad for name, leaf in leaves.items()}
    return Result(loss.detach(), **grads)


def check_against_reference(
    sample: Sample,
    *,
    upstream: Tensor | float | None = None,
    frozen: Collection[str] = (),
    slack: float | None = None,
    loss_slack: float = 1e-6,
    only_ours: dict[str, Any] | None = None,
    function: Callable[..., Tensor] = functional.chunked_linear_cross_entropy,
    **options: Any,
) -> Result:
    """Compare loss and every gradient with fp64, as close as plain torch comes at this dtype.

    Args:
        sample: Arguments.
        upstream: As for `run`.
        frozen: As for `run`; their gradients must be None.
        slack: See `SLACK`.
        loss_slack: The same for the loss, which is made in fp32 whatever the dtype.
        only_ours: Options that plain torch does not have.
        function: What is under test.
        **options: For both.

    Returns:
        The result under test.
    """
    if slack is None:
        slack = SLACK[sample.input.dtype]
    if sample.input.dtype == torch.float64:
        loss_slack = slack
    common = {"upstream": upstream, "frozen": frozen, **options}
    ours = run(function, sample, **common, **(only_ours or {}))
    plain = run(reference.linear_cross_entropy, sample, **common)
    truth = run(reference.linear_cross_entropy, sample.double(), **common)
    assert_results_match(ours, plain, truth, sample, slack=slack, loss_slack=loss_slack)
    return ours


def assert_results_match(
    ours: Result,
    plain: Result,
    truth: Result,
    sample: Sample,
    *,
    slack: float,
    loss_slack: float = 1e-6,
) -> None:
    """Check a result's values, dtypes, and which gradients there are."""
    assert ours.loss.dtype == torch.promote_types(plain.loss.dtype, torch.float32)
    assert_within_budget("loss", ours.loss, plain.loss, truth.loss, slack=loss_slack)
    for name in DIFFERENTIABLE:
        value, expected = getattr(ours, name), getattr(truth, name)
        if expected is None:
            assert value is None, f"{name} got a gradient that nobody asked for"
            continue
        assert value is not None, f"{name} got no gradient"
        assert value.dtype == getattr(sample, name).dtype
        assert_within_budget(f"grad_{name}", value, getattr(plain, name), expected, slack=slack)


def assert_equal_results(first: Result, second: Result, **tolerances: float) -> None:
    """Compare two results, bitwise unless tolerances are given; NaN equals NaN."""
    tolerances = tolerances or {"rtol": 0.0, "atol": 0.0}
    for name in ("loss", *DIFFERENTIABLE):
        one, other = getattr(first, name), getattr(second, name)
        if one is None or other is None:
            assert one is other, name
        else:
            torch.testing.assert_close(
                one,
                other,
                **tolerances,
                equal_nan=True,
                msg=lambda text, name=name: f"{name}: {text}",
            )


# What a sample needs, and the options, by the name of the case.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bias": ({"bias": True}, {}),
    "smoothing": ({}, {"label_smoothing": 0.1}),
    "z-loss": ({}, {"z_loss": 1e-2}),
    "class-weight": ({"class_weight": True}, {}),
    "scale": ({}, {"logit_scale": 0.25}),
    "negative-scale": ({}, {"logit_scale": -0.5}),
    "softcap": ({}, {"softcap": 2.0}),
    "weighted-smoothing": ({"class_weight": True}, {"label_smoothing": 0.2}),
    "all": (
        {"bias": True, "class_weight": True},
        {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_scale": 0.5, "softcap": 3.0},
    ),
}


def _padded(value: Tensor) -> Tensor:
    """Rows further apart than they are long, NaN in between."""
    wide = value.new_full((*value.shape[:-1], value.shape[-1] + 3), float("nan"))
    return wide[..., : value.shape[-1]].copy_(value)


def _offset(value: Tensor) -> Tensor:
    """Not at the beginning of its storage, nor on 16 bytes."""
    flat = value.new_full((value.numel() + 3,), float("nan"))
    return flat[3:].view(value.shape).copy_(value)


def _strided(value: Tensor) -> Tensor:
    """No dimension of unit stride, NaN in between."""
    wide = value.new_full([2 * size for size in value.shape], float("nan"))
    return wide[tuple(slice(None, None, 2) for _ in value.shape)].copy_(value)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "padded": _padded,
    "offset": _offset,
    "strided": _strided,
    "transposed": lambda value: value.t().contiguous().t(),
    "padded-transposed": lambda value: _padded(value.t()).t(),
    "expanded": lambda value: value[:1].expand_as(value),
}


@contextlib.contextmanager
def kept_gradients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets loops on the CPU keep the logits gradient, as those on CUDA do; one has to."""
    kept: list[bool] = []
    original = chunk_loop.ChunkLoop.finish

    def finish(loop: chunk_loop.ChunkLoop) -> Any:
        kept.append(loop.keeps_gradient)
        return original(loop)

    monkeypatch.setattr(chunk_loop, "KEEPS_GRADIENT_ON_CPU", True)
    monkeypatch.setattr(chunk_loop.ChunkLoop, "finish", finish)
    yield
    assert any(kept)
