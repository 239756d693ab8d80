"""Rows of existing logits by PyTorch and by Triton, through the functionals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops import config, reference
from greyhound_ops.functional import cross_entropy, selective_log_softmax
from log_prob_samples import by_path, device_of
from logits_samples import OPTIONS, VIEWS, check, make_logits, run
from samples import DTYPES, LAYOUTS, REDUCTIONS, SLACK, dtype_id, interpreter_slack

# ---------------------------------------------------------------------------- values, gradients


@by_path
@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [
        (torch.float64, "none"),
        (torch.float32, "mean"),
        (torch.bfloat16, "none"),
        (torch.bfloat16, "mean"),
        (torch.float16, "sum"),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", OPTIONS)
def test_cross_entropy(case: str, path: str, reduction: str, dtype: torch.dtype) -> None:
    if path == "triton" and dtype == torch.float64:
        pytest.skip("needs a dtype of Triton's: its scalar options are float32")
    logits, target = make_logits(classes=300, dtype=dtype, device=device_of(path))
    slack = SLACK[dtype] + (interpreter_slack(dtype) if path == "triton" else 0.0)
    upstream = torch.randn(13, device=logits.device) if reduction == "none" else -1.7
    with config.override(kernels=path):
        check(
            "cross_entropy", logits, target, upstream, slack=slack, reduction=reduction,
            **OPTIONS[case],
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@by_path
@pytest.mark.parametrize("temperature", [1.0, 0.7, "per row"], ids=str)
def test_selective_log_softmax(temperature: Any, path: str, dtype: torch.dtype) -> None:
    if path == "triton" and dtype == torch.float64:
        pytest.skip("needs a dtype of Triton's: its scalar options are float32")
    logits, target = make_logits(classes=300, dtype=dtype, device=device_of(path))
    if temperature == "per row":
        temperature = (torch.rand(13, device=logits.device) + 0.5).to(dtype)
    slack = SLACK[dtype] + (interpreter_slack(dtype) if path == "triton" else 0.0)
    with config.override(kernels=path):
        check(
            "log_softmax", logits, target, torch.randn(13, device=logits.device), slack=slack,
            temperature=temperature,
        )  # fmt: skip


@by_path
@pytest.mark.parametrize("shape", ["row", "scalar"])
def test_gradient_of_the_temperature(shape: str, path: str) -> None:
    device = device_of(path)
    logits, index = make_logits((3, 5), device=device)
    temperature = torch.rand((3, 5) if shape == "row" else (), device=device) + 0.5

    def grads(function: Callable[..., Tensor], frozen: bool, dtype: torch.dtype) -> list[Tensor]:
        leaf = temperature.to(dtype).requires_grad_()
        scores = logits.to(dtype).requires_grad_(not frozen)
        out = function(scores, index, temperature=leaf)
        return list(torch.autograd.grad(out.square().sum(), [leaf] if frozen else [leaf, scores]))

    with config.override(kernels=path):
        both = grads(selective_log_softmax, False, torch.float32)
        alone = grads(selective_log_softmax, True, torch.float32)
    truth = grads(reference.selective_log_softmax, False, torch.float64)
    assert torch.equal(alone[0], both[0])
    for value, expected in zip(both, truth, strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-5)


@by_path
@pytest.mark.parametrize("name", ["cross_entropy", "log_softmax"])
@pytest.mark.parametrize("layout", VIEWS)
def test_views(layout: str, name: str, path: str) -> None:
    device = device_of(path)
    logits = torch.randn(3, 7, 13, device=device)
    view = VIEWS[layout]
    shape = view(logits).shape
    target = torch.randint(0, shape[-1], shape[:-1], device=device)
    target = target.masked_fill(torch.rand(shape[:-1], device=device) < 0.2, -100)
    upstream = torch.randn(shape[:-1], device=device)
    options: dict[str, Any] = {"reduction": "none"} if name == "cross_entropy" else {}
    with config.override(kernels=path):
        result, _ = check(name, logits, target, upstream, view=view, **options)
    assert result.shape == shape[:-1]
    assert result.is_contiguous()


@by_path
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, path: str) -> None:
    logits, target = make_logits(device=device_of(path))
    with config.override(kernels=path):
        check("cross_entropy", LAYOUTS[layout](logits), target)


@by_path
def test_layouts_of_the_vectors(path: str) -> None:
    device = device_of(path)
    logits, target = make_logits((3, 5), device=device)
    upstreams = [
        torch.randn(3, 10, device=device)[:, ::2],
        torch.randn(5, 3, device=device).t(),
        torch.tensor(0.7, device=device).expand(3, 5),
        torch.randn(3, 1, device=device).expand(3, 5),
    ]
    targets = [target.repeat_interleave(2, 1)[:, ::2], target[:1].expand(3, 5), target.int()]
    with config.override(kernels=path):
        for upstream in upstreams:
            check("cross_entropy", logits, target, upstream, reduction="none")
            check("log_softmax", logits, target, upstream)
        for each in targets:
            check("cross_entropy", logits, each)
            check("log_softmax", logits, each)
        temperature = (torch.rand(5, 3, device=device) + 0.5).t()
        check("log_softmax", logits, target, temperature=temperature)
        check("log_softmax", logits[:, 1:], target[:, 1:], temperature=temperature[:, 1:])


# ------------------------------------------------------------------------------------ row values


@by_path
def test_nothing_counts(path: str) -> None:
    logits, target = make_logits(device=device_of(path))
    target = torch.full_like(target, -100)
    with config.override(kernels=path):
        for reduction in REDUCTIONS:
            loss, grad = run(cross_entropy, logits, target, reduction=reduction)
            assert not loss.any()
            assert not grad.any()
        log_probs, grad = run(selective_log_softmax, logits, target)
        assert not log_probs.any()
        assert not grad.any()
    empty = torch.zeros(0, 11)
    assert cross_entropy(empty, torch.zeros(0).long()) == 0.0


@by_path
@pytest.mark.parametrize("name", ["cross_entropy", "log_softmax"])
def test_ignored_rows_may_hold_anything(name: str, path: str) -> None:
    logits, target = make_logits(device=device_of(path))
    bad = torch.tensor([torch.nan, torch.inf], device=logits.device).repeat(7)[:13, None]
    poisoned = torch.where((target == -100)[:, None], bad, logits)
    function = cross_entropy if name == "cross_entropy" else selective_log_softmax
    upstream = 2.0 if name == "cross_entropy" else torch.randn(13, device=logits.device)
    with config.override(kernels=path):
        for ours, clean in zip(
            run(function, poisoned, target, upstream),
            run(function, logits, target, upstream),
            strict=True,
        ):
            assert torch.equal(ours, clean)


@by_path
def test_masked_classes(path: str) -> None:
    logits, target = make_logits(classes=300, device=device_of(path))
    logits[:, ::3] = -torch.inf
    target = torch.where(target < 0, target, target // 3 * 3 + 1)
    with config.override(kernels=path):
        for name in ("cross_entropy", "log_softmax"):
            result, grad = check(name, logits, target)
            assert result.isfinite().all()
            assert not grad[:, ::3].any()


@by_path
def test_log_probs_are_never_positive(path: str) -> None:
    logits, _ = make_logits((40,), 300, device=device_of(path))
    with config.override(kernels=path):
        for factor in (0.0, 1.0, 30.0, 1e4, 1e30):
            out = selective_log_softmax(factor * logits, logits.argmax(-1))
            assert (out <= 0.0).all()


@by_path
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_large_offset(offset: float, path: str) -> None:
    logits, target = make_logits(device=device_of(path))
    with config.override(kernels=path):
        check("cross_entropy", logits + offset, target)
        check("log_softmax", logits + offset, target, temperature=0.7)
