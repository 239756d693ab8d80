"""Inputs of the log-probability ops under test and the one place that compares their results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops import reference
from greyhound_ops.functional import LogProbs, chunked_linear_log_probs
from greyhound_ops.testing import assert_within_budget
from samples import SLACK

by_path = pytest.mark.parametrize("path", ["torch", "triton"])


def device_of(path: str) -> str:
    """Where a path's kernels run: on a GPU if there is one, else in Triton's interpreter."""
    return "cuda" if path == "triton" and torch.cuda.is_available() else "cpu"


OPERANDS = ("input", "weight", "bias", "temperature")


OUTPUTS = ("log_probs", "entropy", "lse")  # those that can be differentiated


EVERYTHING = {"return_entropy": True, "return_lse": True, "return_argmax": True}


@dataclasses.dataclass(frozen=True)
class Sample:
    """Tensors of a call; they keep the strides they are made with."""

    input: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    temperature: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> Sample:
        changed = {
            name: function(value)
            for name, value in vars(self).items()
            if value is not None and name != "target"
        }
        return dataclasses.replace(self, **changed)

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(name for name in OPERANDS if getattr(self, name) is not None)


def make_sample(
    rows: int | tuple[int, ...] = 13,
    hidden: int = 8,
    classes: int = 11,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    bias: bool = True,
    temperature: bool = True,
    ignore_index: int = -100,
) -> Sample:
    """Random arguments; about a quarter of the rows, but never the first, has no target."""
    shape = (rows,) if isinstance(rows, int) else rows
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    drop = torch.rand(shape, device=device) < 0.25
    if drop.numel():
        drop.view(-1)[0] = False
    return Sample(
        torch.randn(*shape, hidden, **options),
        torch.randn(classes, hidden, **options),
        torch.randint(0, classes, shape, device=device).masked_fill(drop, ignore_index),
        torch.randn(classes, **options) if bias else None,
        torch.rand(shape, **options) + 0.5 if temperature else None,
    )


def make_upstreams(like: Tensor, names: Collection[str] = OUTPUTS) -> dict[str, Tensor | None]:
    """Random gradients of the outputs, exact in every dtype; None for those not named."""
    return {
        name: torch.randn(like.shape, device=like.device).bfloat16().float()
        if name in names
        else None
        for name in OUTPUTS
    }


@dataclasses.dataclass(frozen=True)
class Result:
    outputs: LogProbs
    grads: dict[str, Tensor | None]


def run(
    function: Callable[..., Any],
    sample: Sample,
    upstreams: dict[str, Tensor | None],
    *,
    frozen: Collection[str] = (),
    **options: Any,
) -> Result:
    """Outputs and gradients."""
    leaves: dict[str, Tensor] = {}
    for name in sample.operands:
        value = getattr(sample, name).detach()
        leaves[name] = value if name in frozen else value.requires_grad_()
    options = dict(options)
    if "temperature" in leaves:
        options["temperature"] = leaves["temperature"]
    outputs = function(
        leaves["input"], leaves["weight"], sample.target, leaves.get("bias"), **options
    )
    if not isinstance(outputs, LogProbs):
        outputs = LogProbs(outputs, None, None, None)
    pairs = [
        (getattr(outputs, name), upstream)
        for name, upstream in upstreams.items()
        if upstream is not None and getattr(outputs, name).requires_grad
    ]
    if pairs:
        torch.autograd.backward(
            [output for output, _ in pairs],
            # No cast where the dtype already fits: strides are part of what is tested.
            [upstream.to(output.dtype) for output, upstream in pairs],
        )
    detached = (None if each is None else each.detach() for each in outputs)
    return Result(LogProbs(*detached), {name: leaf.grad for name, leaf in leaves.items()})


def check(
    sample: Sample,
    upstreams: dict[str, Tensor | None] | None = None,
    *,
    frozen: Collection[str] = (),
    slack: float | None = None,
    only_ours: dict[str, Any] | None = None,
    function: Callable[..., Any] = chunked_linear_log_probs,
    **options: Any,
) -> Result:
    """Compare outputs and gradients with fp64, as close as plain torch comes at this dtype."""
    dtype = sample.input.dtype
    slack = SLACK[dtype] if slack is None else slack
    if upstreams is None:
        upstreams = make_upstreams(sample.target)
    common = {"frozen": frozen, **options}
    ours = run(function, sample, upstreams, **common, **(EVERYTHING | (only_ours or {})))
    plain = run(reference.linear_log_probs, sample, upstreams, **common)
    truth = run(reference.linear_log_probs, sample.map(Tensor.double), upstreams, **common)
    for name in OUTPUTS:
        value = getattr(ours.outputs, name)
        if value is None:
            continue
        assert value.dtype == torch.promote_types(dtype, torch.float32)
        assert_within_budget(
            name, value, getattr(plain.outputs, name), getattr(truth.outputs, name),
            slack=max(slack, 1e-6) if dtype != torch.float64 else slack,
        )  # fmt: skip
    if dtype in (torch.float32, torch.float64) and ours.outputs.argmax is not None:
        assert torch.equal(ours.outputs.argmax, truth.outputs.argmax)
    for name in sample.operands:
        value, expected = ours.grads[name], truth.grads[name]
        if name in frozen:
            assert value is None, f"{name} got a gradient that nobody asked for"
            continue
        if expected is None:
            assert value is None
            continue
        assert value is not None, f"{name} got no gradient"
        assert value.dtype == dtype
        assert_within_budget(f"grad_{name}", value, plain.grads[name], expected, slack=slack)
    return ours


def assert_equal(first: Result, second: Result, **tolerances: float) -> None:
    """Compare two results, bitwise unless tolerances are given; NaN equals NaN."""
    tolerances = {"equal_nan": True, **(tolerances or {"rtol": 0.0, "atol": 0.0})}
    for one, other in zip(first.outputs, second.outputs, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, **tolerances)
    for name, grad in first.grads.items():
        other = second.grads[name]
        assert (grad is None) == (other is None), name
        if grad is not None:
            torch.testing.assert_close(grad, other, **tolerances)


# What a sample needs, and the options, by the name of the case.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"bias": False, "temperature": False}, {}),
    "bias": ({"temperature": False}, {}),
    "temperature": ({"temperature": False}, {"temperature": 0.7}),
    "row-temperature": ({"bias": False}, {}),
    "scale": ({"temperature": False}, {"logit_scale": 0.25}),
    "negative-scale": ({}, {"logit_scale": -0.5}),
    "softcap": ({"temperature": False}, {"softcap": 2.0}),
    "capped-temperature": ({"temperature": False}, {"softcap": 2.0, "temperature": 1.5}),
    "all": ({}, {"softcap": 3.0, "logit_scale": 0.5}),
}
