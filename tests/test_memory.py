"""Peak memory is part of the contract: one chunk and the gradients that were asked for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops import reference
from greyhound_ops.functional import chunked_linear_cross_entropy
from greyhound_ops.ops import gradients
from greyhound_ops.testing import peak_memory
from samples import DIFFERENTIABLE, REDUCTIONS, Sample, dtype_id, make_sample, run

# [N, V] is far larger than all that is allowed, and [V, D] far larger than the slack.
ROWS, HIDDEN, CLASSES, CHUNK = 512, 64, 2000, 16
SLACK_BYTES = 48 * ROWS + 24 * CLASSES  # numbers per row and per class
NEEDS = [subset for size in range(4) for subset in itertools.combinations(DIFFERENTIABLE, size)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

by_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
by_accum = pytest.mark.parametrize("accum", ["fp32", "weight"])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale in blocks as small against these gradients as 32 MiB are against those of a model."""
    monkeypatch.setattr(
        gradients,
        "blocks",
        lambda tensor: [slice(i, i + 16) for i in range(0, tensor.shape[0], 16)],
    )


def memory_sample(dtype: torch.dtype, device: torch.device) -> Sample:
    return make_sample(ROWS, HIDDEN, CLASSES, dtype=dtype, device=device, bias=True)


def library_bytes(sample: Sample, needs: tuple[str, ...]) -> int:
    """What the bare products of one chunk take by themselves.

    oneDNN packs a bf16 operand into a copy of its own on some processors; no caller can avoid it.
    """
    rows = sample.input[:CHUNK]
    logits = rows.new_zeros(CHUNK, CLASSES)
    products = [lambda: torch.mm(rows, sample.weight.t(), out=logits)]
    if "input" in needs:
        out = torch.empty_like(rows)
        products.append(lambda: torch.mm(logits, sample.weight, out=out))
    if "weight" in needs:
        grad = torch.empty_like(sample.weight)
        products.append(lambda: torch.mm(logits.t(), rows, out=grad))
    peaks = []
    for product in products:
        product()
        with peak_memory(rows.device) as peak:
            product()
        peaks.append(peak.bytes)
    return max(peaks)


def chunk_bytes(dtype: torch.dtype, device: torch.device, needs: tuple[str, ...]) -> int:
    """Buffers of one chunk of logits."""
    elements = CHUNK * CLASSES
    if device.type == "cuda":
        return elements * dtype.itemsize
    if dtype == torch.float32:
        return elements * 4
    # Logits, their float32 gradient, and that gradient once more in the dtype of a product.
    return elements * (dtype.itemsize + 4 + (dtype.itemsize if needs else 0))


def allowed_bytes(
    sample: Sample, needs: tuple[str, ...], accum: str, *, library: bool = True
) -> int:
    dtype, device = sample.input.dtype, sample.input.device
    allowed = chunk_bytes(dtype, device, needs) + SLACK_BYTES
    allowed += sum(getattr(sample, name).nbytes for name in needs)
    if "weight" in needs and accum == "fp32" and dtype != torch.float32:
        allowed += sample.weight.numel() * 4
    return allowed + (library_bytes(sample, needs) if library else 0)


def measure(function: Any, sample: Sample, **options: Any) -> int:
    """Peak of forward and backward; run once before, so that libraries have their workspaces."""
    run(function, sample, **options)
    with peak_memory(sample.input.device) as peak:
        result = run(function, sample, **options)
    assert result.loss.isfinite().all()
    return peak.bytes


def upstream_for(reduction: str, device: torch.device) -> Tensor:
    # Not one, so that the scale in the backward has something to do.
    return torch.full((ROWS,) if reduction == "none" else (), 0.5, device=device)


@pytest.mark.fault("B25", "B58")
@by_accum
@by_dtype
@by_reduction
@pytest.mark.parametrize("needs", NEEDS, ids=lambda names: "+".join(names) or "nothing")
def test_peak(
    needs: tuple[str, ...],
    reduction: str,
    dtype: torch.dtype,
    accum: str,
    device: torch.device,
) -> None:
    sample = memory_sample(dtype, device)
    peak = measure(
        chunked_linear_cross_entropy,
        sample,
        upstream=upstream_for(reduction, device),
        frozen=set(DIFFERENTIABLE) - set(needs),
        reduction=reduction,
        chunk_size=CHUNK,
        grad_weight_accum_dtype=accum,
    )
    allowed = allowed_bytes(sample, needs, accum)
    assert allowed < ROWS * CLASSES * dtype.itemsize, "the logits would pass unnoticed"
    assert peak <= allowed


@by_reduction
def test_plain_torch_would_fail(reduction: str, device: torch.device) -> None:
    # That the bound above means something.
    sample = memory_sample(torch.float32, device)
    peak = measure(reference.linear_cross_entropy, sample, reduction=reduction)
    assert peak > 2 * allowed_bytes(sample, DIFFERENTIABLE, "fp32")


@pytest.mark.fault("B25", "R01")
@by_reduction
@pytest.mark.parametrize(
    ("needs", "why"),
    [((), "forward only"), (("input",), "frozen head"), (("bias",), "bias alone")],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_frozen_head_costs_no_buffer_of_its_size(
    needs: tuple[str, ...], why: str, reduction: str, device: torch.device
) -> None:
    # A head so wide that its size stands out against everything else: issue B25. float32, in
    # which the products have no copies of their own.
    rows, hidden, classes = 32, 512, 2000
    sample = make_sample(rows, hidden, classes, device=device, bias=True)
    peak = measure(
        chunked_linear_cross_entropy,
        sample,
        upstream=torch.full((rows,) if reduction == "none" else (), 0.5, device=device),
        frozen=set(DIFFERENTIABLE) - set(needs),
        reduction=reduction,
        chunk_size=8,
    )
    assert peak < sample.weight.nbytes / 4, why


@pytest.mark.fault("B58")
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_second_grad_weight_for_the_upstream(
    reduction: str, layout: str, device: torch.device
) -> None:
    sample = make_sample(32, 512, 2000, device=device)
    if layout == "transposed":
        sample = sample.replace(weight=sample.weight.t().contiguous().t())

    def backward_bytes(retain_graph: bool) -> int:
        weight = sample.weight.detach().requires_grad_()
        loss = chunked_linear_cross_entropy(
            sample.input, weight, sample.target, reduction=reduction, chunk_size=8
        )
        upstream = torch.full_like(loss, 0.5)
        with peak_memory(device) as peak:
            loss.backward(upstream, retain_graph=retain_graph)
        return peak.bytes

    assert backward_bytes(retain_graph=False) < sample.weight.nbytes / 4
    # One that is kept must not be overwritten.
    assert backward_bytes(retain_graph=True) >= sample.weight.nbytes


@pytest.mark.fault("B89")
@by_reduction
def test_peak_does_not_grow_with_the_rows(reduction: str, device: torch.device) -> None:
    peaks = []
    for rows in (256, 1024):
        sample = make_sample(rows, 16, 1000, device=device)
        peaks.append(
            measure(chunked_linear_cross_entropy, sample, reduction=reduction, chunk_size=16)
            - sample.input.nbytes
        )
    assert peaks[1] - peaks[0] <= 64 * (1024 - 256)


def test_chunk_budget_is_a_cap(device: torch.device) -> None:
    from greyhound_ops import config

    sample = make_sample(256, 16, 1000, device=device)
    budget = 64 * 1000 * 4
    with config.override(chunk_budget_bytes=budget):
        peak = measure(chunked_linear_cross_entropy, sample)
    gradients = sample.input.nbytes + sample.weight.nbytes
    assert budget / 2 < peak <= budget + gradients + 48 * 256 + 24 * 1000


@pytest.mark.fault("B48")
def test_profiler_adds_nothing(device: torch.device) -> None:
    # Issue B48. On CUDA the allocator is asked; on the CPU the profiler is the instrument itself,
    # so there it is memory held after the step that is looked at.
    sample = memory_sample(torch.float32, device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    options = {"chunk_size": CHUNK, "reduction": "mean"}
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        without = measure(chunked_linear_cross_entropy, sample, **options)
        with torch.profiler.profile(activities=activities, record_shapes=True):
            within = measure(chunked_linear_cross_entropy, sample, **options)
        assert within <= without
        return
    with torch.profiler.profile(
        activities=activities, record_shapes=True, profile_memory=True
    ) as profile:
        run(chunked_linear_cross_entropy, sample, **options)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert peak <= allowed_bytes(sample, DIFFERENTIABLE, "fp32")


@pytest.mark.fault("B25", "R01", "R17")
@by_reduction
@pytest.mark.parametrize("needs", NEEDS, ids=lambda names: "+".join(names) or "nothing")
def test_frozen_costs_no_product(needs: tuple[str, ...], reduction: str) -> None:
    sample = make_sample(16, 8, 11, bias=True)
    chunks = 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(
            chunked_linear_cross_entropy,
            sample,
            reduction=reduction,
            frozen=set(DIFFERENTIABLE) - set(needs),
            chunk_size=16 // chunks,
        )
    products = sum(
        event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm")
    )
    gradients = len(set(needs) & {"input", "weight"})
    # Only the sum of rows needs their upstream first, so the projection twice.
    twice = reduction == "none" and bool(set(needs) & {"weight", "bias"})
    assert products == chunks * (1 + gradients + twice)
