"""Rows of log-probabilities by PyTorch and by Triton, through the functional."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops import config, reference
from greyhound_ops.functional import chunked_linear_log_probs
from greyhound_ops.kernels import exponentials
from greyhound_ops.testing import assert_within_budget
from log_prob_samples import (
    CASES,
    EVERYTHING,
    OPERANDS,
    OUTPUTS,
    Result,
    assert_equal,
    by_path,
    check,
    device_of,
    make_sample,
    make_upstreams,
    run,
)
from samples import SLACK, dtype_id, interpreter_slack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("case", CASES)
def test_kernels(case: str, dtype: torch.dtype) -> None:
    wanted, options = CASES[case]
    sample = make_sample(classes=300, dtype=dtype, device=device_of("triton"), **wanted)
    with config.override(kernels="triton"):
        check(
            sample,
            slack=SLACK[dtype] + interpreter_slack(dtype),
            only_ours={"chunk_size": 5},
            **options,
        )


@pytest.mark.parametrize("case", ["plain", "capped-temperature", "all"])
def test_several_blocks_of_classes(case: str) -> None:
    # Sums are moved to a new maximum from block to block.
    wanted, options = CASES[case]
    sample = make_sample(3, 4, 20000, device=device_of("triton"), **wanted)
    rising = torch.linspace(-5.0, 5.0, 20000, device=sample.weight.device).unsqueeze(1)
    sample = dataclasses.replace(sample, weight=sample.weight + rising)
    with config.override(kernels="triton"):
        check(sample, **options)


@pytest.mark.fault("B04")
@pytest.mark.parametrize("layout", ["strided", "column", "expanded", "zero"])
@by_path
def test_upstream_layouts(layout: str, path: str) -> None:
    device = device_of(path)
    made = {
        "strided": lambda: torch.randn(26, device=device)[::2],
        "column": lambda: torch.randn(13, 2, device=device)[:, 1],
        "expanded": lambda: torch.tensor(0.7, device=device).expand(13),
        "zero": lambda: torch.zeros(13, device=device),
    }[layout]
    sample = make_sample(device=device)
    with config.override(kernels=path):
        check(sample, {name: made() for name in OUTPUTS}, only_ours={"chunk_size": 5})


@by_path
def test_rows_without_target_may_hold_anything(path: str) -> None:
    device = device_of(path)
    sample = make_sample(device=device)
    ignored = sample.target == -100
    bad = torch.tensor([torch.nan, torch.inf], device=device).repeat(7)[:13]
    poisoned = dataclasses.replace(
        sample,
        input=torch.where(ignored.unsqueeze(1), bad.unsqueeze(1), sample.input),
        temperature=torch.where(ignored, 0.0, sample.temperature),
    )
    upstreams = make_upstreams(sample.target, ["log_probs"])
    with config.override(kernels=path):
        ours = run(chunked_linear_log_probs, poisoned, upstreams, chunk_size=5)
        clean = run(chunked_linear_log_probs, sample, upstreams, chunk_size=5)
    assert_equal(
        Result(ours.outputs, {**ours.grads, "weight": None}),
        Result(clean.outputs, {**clean.grads, "weight": None}),
    )
    assert not ours.outputs.log_probs[ignored].any()
    assert not ours.grads["input"][ignored].any()
    assert not ours.grads["temperature"][ignored].any()
    # The products with an input of NaN are torch's own: 0 * NaN.
    assert torch.isnan(ours.grads["weight"]).any()


# --------------------------------------------------------------------------------------- limits


@pytest.mark.fault("B71")
@by_path
@pytest.mark.parametrize("where", ["some", "target", "all-but-one"])
def test_masked_classes(where: str, path: str) -> None:
    # A vocabulary masked through the bias: 0 * log 0 is 0, in the gradient too (issue B71).
    device = device_of(path)
    with config.override(kernels=path):
        sample = make_sample(classes=300, device=device)
        bias = sample.bias.clone()
        if where == "some":
            bias[::3] = -torch.inf
            target = sample.target // 3 * 3 + 1
        elif where == "target":
            bias[sample.target[0]] = -torch.inf
            target = sample.target
        else:
            bias[torch.arange(300, device=device) != 7] = -torch.inf
            target = torch.full_like(sample.target, 7)
        sample = dataclasses.replace(sample, bias=bias, target=target.where(target >= 0, -100))
        upstreams = make_upstreams(sample.target)
        ours = run(chunked_linear_log_probs, sample, upstreams, frozen=["bias"], **EVERYTHING)
        truth = run(reference.linear_log_probs, sample, upstreams, frozen=["bias"])
        if where != "target":
            assert all(value.isfinite().all() for value in ours.outputs)
            assert all(grad is None or grad.isfinite().all() for grad in ours.grads.values())
        for name in OUTPUTS:
            torch.testing.assert_close(
                getattr(ours.outputs, name), getattr(truth.outputs, name), rtol=1e-4, atol=1e-4
            )
        for name in ("input", "weight"):
            torch.testing.assert_close(ours.grads[name], truth.grads[name], rtol=1e-4, atol=1e-4)


@by_path
@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("which", ["one", "all"])
def test_logits_that_are_not_finite(which: str, value: float, path: str) -> None:
    device = device_of(path)
    with config.override(kernels=path):
        sample = make_sample(classes=300, device=device, temperature=False)
        bias = sample.bias.clone()
        bias[200 if which == "one" else slice(None)] = value
        sample = dataclasses.replace(sample, bias=bias, target=sample.target % 200)
        upstreams = make_upstreams(sample.target, ["log_probs"])
        ours = run(chunked_linear_log_probs, sample, upstreams, **EVERYTHING)
        truth = run(reference.linear_log_probs, sample, upstreams)
        for one, other in zip(ours.outputs, truth.outputs, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-4, atol=1e-4)
        assert torch.equal(ours.grads["input"].isnan(), truth.grads["input"].isnan())


@pytest.mark.fault("B69")
@by_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_bounds(dtype: torch.dtype, path: str) -> None:
    # Issue B69: log-probabilities above 0, entropies outside [0, log V].
    device = device_of(path)
    with config.override(kernels=path):
        sample = make_sample(40, 16, 300, dtype=dtype, device=device, bias=False, temperature=False)
        for factor in (0.0, 1e-3, 1.0, 30.0, 1e4):
            logits = (factor * sample.input) @ sample.weight.t()
            target = logits.argmax(-1)
            outputs = chunked_linear_log_probs(
                factor * sample.input, sample.weight, target, **EVERYTHING
            )
            assert (outputs.log_probs <= 0.0).all()
            assert not outputs.log_probs.signbit().logical_and(outputs.log_probs == 0).any()
            assert (outputs.entropy >= 0.0).all()
            assert (outputs.entropy <= math.log(300) + 1e-6).all()
        bias = torch.zeros(300, dtype=dtype, device=device)
        bias[7] = 1e4
        certain = chunked_linear_log_probs(
            sample.input, sample.weight, torch.full_like(target, 7), bias, **EVERYTHING
        )
        assert (certain.log_probs == 0.0).all()
        assert (certain.entropy == 0.0).all()


@by_path
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_confident_rows_keep_a_small_gradient(dtype: torch.dtype, path: str) -> None:
    # A gradient made from other logits than its statistics were would be off by the rounding of a
    # logit of 40, which is 13% of a probability.
    device = device_of(path)
    with config.override(kernels=path):
        sample = make_sample(40, 16, 300, dtype=dtype, device=device, temperature=False)
        target = (sample.input @ sample.weight.t() + sample.bias).argmax(-1)
        sample = dataclasses.replace(sample, input=4 * sample.input, target=target)
        slack = SLACK[dtype] + (interpreter_slack(dtype) if path == "triton" else 0.0)
        check(sample, slack=slack, only_ours={"chunk_size": 16})


@by_path
def test_argmax_takes_the_first_of_equals(path: str) -> None:
    device = device_of(path)
    with config.override(kernels=path):
        sample = make_sample(4, 2, 9000, device=device, bias=True, temperature=False)
        bias = torch.zeros_like(sample.bias)
        bias[[17, 400, 8999]] = 3.0
        zero = torch.zeros_like(sample.input)
        outputs = chunked_linear_log_probs(
            zero, sample.weight, sample.target, bias, return_argmax=True
        )
        assert outputs.argmax.tolist() == [17] * 4
        bias[[500, 600]] = torch.nan
        outputs = chunked_linear_log_probs(
            zero, sample.weight, sample.target, bias, return_argmax=True
        )
        assert outputs.argmax.tolist() == [500] * 4


# --------------------------------------------------------- nothing to differentiate, bf16, Hopper


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"softcap": 4.0}], ids=str)
@pytest.mark.parametrize("lse", [False, True], ids=["alone", "lse"])
def test_forward_that_stores_no_logits(lse: bool, options: dict[str, Any]) -> None:
    device = device_of("triton")
    sample = make_sample(130, 64, 300, dtype=torch.bfloat16, device=device, temperature=False)
    if not exponentials.supported(sample.input, sample.weight, interpreted=device == "cpu"):
        pytest.skip("needs Hopper's tensor memory accelerator, or Triton's interpreter")
    upstreams = make_upstreams(sample.target, [])
    with config.override(kernels="triton"):
        ours = run(
            chunked_linear_log_probs, sample, upstreams, frozen=OPERANDS, return_lse=lse, **options
        ).outputs
    plain = run(reference.linear_log_probs, sample, upstreams, **options).outputs
    truth = run(reference.linear_log_probs, sample.map(Tensor.double), upstreams, **options).outputs
    assert ours.log_probs.dtype == torch.float32
    assert (ours.log_probs <= 0.0).all()
    assert not ours.log_probs[sample.target == -100].any()
    assert not ours.log_probs.signbit()[sample.target == -100].any()
    names = ("log_probs", "lse") if lse else ("log_probs",)
    for name in names:
        value, expected = getattr(ours, name), getattr(truth, name)
        assert_within_budget(name, value, getattr(plain, name), expected, slack=1e-6)
        # Logits that are never rounded to bf16: closer than plain torch can come.
        assert (value - expected).abs().max() < (getattr(plain, name) - expected).abs().max() / 4
