"""What only a GPU can show of distillation: no host sync, graphs, large offsets, numerics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops import config, reference
from greyhound_ops.errors import TargetOutOfRangeError
from greyhound_ops.functional import chunked_linear_distillation
from greyhound_ops.testing import assert_within_budget, peak_memory, relative_error
from samples import REDUCTIONS, dtype_id

pytestmark = pytest.mark.gpu
DIVERGENCES = ("jsd", "kl", "reverse_kl", "tvd", "cosine")
by_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)
by_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
by_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Every synchronising call of torch raises inside."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make(
    rows: int,
    hidden: int,
    classes: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    teacher_hidden: int | None = None,
    ignored: float = 0.25,
) -> list[Tensor]:
    """Input, weight, teacher's input and weight, target; logits of about unit size."""
    teacher_hidden = teacher_hidden or hidden
    options = {"dtype": dtype, "device": "cuda"}
    target = torch.randint(0, classes, (rows,), device="cuda")
    target[torch.rand(rows, device="cuda") < ignored] = -100
    target[0] = 1
    return [
        torch.randn(rows, hidden, **options),
        torch.randn(classes, hidden, **options) / hidden**0.5,
        torch.randn(rows, teacher_hidden, **options),
        torch.randn(classes, teacher_hidden, **options) / teacher_hidden**0.5,
        target,
    ]


def train(
    tensors: list[Tensor],
    upstream: Tensor,
    *,
    frozen: bool = False,
    function: Any = chunked_linear_distillation,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Loss and the gradients of the student, of its input alone if its head is frozen."""
    input, weight, *rest = tensors
    leaves = [input.detach().requires_grad_(), weight.detach().requires_grad_(not frozen)]
    loss = function(*leaves, *rest, **options)
    wanted = leaves[: 1 if frozen else 2]
    return loss.detach(), *torch.autograd.grad(loss, wanted, upstream.to(loss.dtype))


def upstream_for(reduction: str, rows: int) -> Tensor:
    return torch.randn((rows,) if reduction == "none" else (), device="cuda")


@by_half
@by_reduction
@by_divergence
def test_no_host_sync(divergence: str, reduction: str, dtype: torch.dtype) -> None:
    tensors = make(64, 32, 257, dtype=dtype)
    upstream = upstream_for(reduction, 64)
    options = {
        "divergence": divergence, "reduction": reduction, "chunk_size": 20, "hard_weight": 0.3,
        "temperature": 2.0,
    }  # fmt: skip
    for frozen in (False, True):
        train(tensors, upstream, frozen=frozen, **options)  # compiles the kernels
        chunked_linear_distillation(*tensors[:4], divergence=divergence, reduction=reduction)
    with no_host_sync():
        for frozen in (False, True):
            train(tensors, upstream, frozen=frozen, **options)
            chunked_linear_distillation(*tensors[:4], divergence=divergence, reduction=reduction)


@by_reduction
@pytest.mark.parametrize("frozen", [False, True], ids=["training", "frozen-head"])
def test_cuda_graph(frozen: bool, reduction: str) -> None:
    rows = 256
    static = make(rows, 64, 512)
    upstream = upstream_for(reduction, rows)
    options = {"frozen": frozen, "reduction": reduction, "chunk_size": 100, "hard_weight": 0.3}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train(static, upstream, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train(static, upstream, **options)
    for keep in (1.0, 0.5, 0.0):
        # New targets, each time with another number of rows that count: the divisor of the mean
        # must be made anew on the device.
        fresh = torch.randint(0, 512, (rows,), device="cuda")
        fresh[torch.rand(rows, device="cuda") >= keep] = -100
        static[4].copy_(fresh)
        static[2].copy_(torch.randn_like(static[2]))
        graph.replay()
        again = train([each.clone() for each in static], upstream, **options)
        for value, expected in zip(captured, again, strict=True):
            # cuBLAS may split a product otherwise while a graph is captured.
            torch.testing.assert_close(value, expected)


@by_reduction
def test_target_out_of_range(reduction: str) -> None:
    tensors = make(16, 32, 257, dtype=torch.float32, ignored=0.0)
    tensors[4][5] = 257
    options = {"reduction": reduction, "chunk_size": 6, "hard_weight": 0.5}
    upstream = torch.ones_like(upstream_for(reduction, 16))
    with no_host_sync():
        loss, grad_input, _ = train(tensors, upstream, **options)
    torch.cuda.synchronize()  # an illegal access would surface here
    assert grad_input[5].isnan().all()
    assert bool(loss[5].isnan() if reduction == "none" else loss.isnan())
    if reduction != "mean":
        assert grad_input[torch.arange(16, device="cuda") != 5].isfinite().all()
    with config.override(checks=True), pytest.raises(TargetOutOfRangeError, match="row 5"):
        chunked_linear_distillation(*tensors, hard_weight=0.5)


@by_half
@by_reduction
@by_divergence
def test_numerics(divergence: str, reduction: str, dtype: torch.dtype) -> None:
    rows, chunks = 1024, 4
    tensors = make(rows, 256, 8200, dtype=dtype, teacher_hidden=128)
    upstream = torch.full(
        (rows,) if reduction == "none" else (),
        1024.0 if dtype == torch.float16 and reduction == "mean" else 0.7,
        device="cuda",
    )
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    wide = [each.double() if each.is_floating_point() else each for each in tensors]
    for accum, hard_weight in (("fp32", 0.0), ("weight", 0.5)):
        options = {
            "divergence": divergence, "reduction": reduction, "beta": 0.3, "temperature": 1.5,
            "hard_weight": hard_weight,
        }  # fmt: skip
        ours = train(
            tensors, upstream, chunk_size=rows // chunks, grad_weight_accum_dtype=accum, **options
        )
        plain = train(tensors, upstream, function=reference.linear_distillation, **options)
        truth = train(wide, upstream, function=reference.linear_distillation, **options)
        assert_within_budget("loss", ours[0], plain[0], rounded_loss(tensors, options), slack=1e-6)
        slacks = [unit, unit * (chunks if accum == "weight" else 1)]
        for name, value, at_dtype, exact, slack in zip(
            ("grad_input", "grad_weight"), ours[1:], plain[1:], truth[1:], slacks, strict=True
        ):
            assert_within_budget(f"{accum} {name}", value, at_dtype, exact, slack=slack)


def rounded_loss(tensors: list[Tensor], options: dict[str, Any]) -> Tensor:
    """The loss in float64 of the logits as the products round them.

    A mean of 1024 rows has the rounding of the logits averaged out to what float32 arithmetic adds,
    so against the float64 truth the luckier of two equally good losses would win.
    """
    input, weight, teacher_input, teacher_weight, target = tensors
    eye = torch.eye(weight.shape[0], dtype=torch.float64, device=weight.device)
    student, teacher = input @ weight.t(), teacher_input @ teacher_weight.t()
    return reference.linear_distillation(
        student.double(), eye, teacher.double(), eye, target, **options
    )


def test_row_offsets_beyond_int32() -> None:
    # One chunk of more than 2^31 elements; the last row shows a wrapped offset.
    rows, classes = 40_000, 60_000
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    tensors = make(rows, 16, classes)
    upstream = torch.ones(rows, device="cuda")
    whole = train(tensors, upstream, frozen=True, reduction="none", chunk_size=rows)
    parts = train(tensors, upstream, frozen=True, reduction="none", chunk_size=5000)
    torch.testing.assert_close(whole[0], parts[0])
    assert relative_error(whole[1], parts[1]) < 1e-3
    assert relative_error(whole[1][-1], parts[1][-1]) < 1e-2


@by_reduction
@pytest.mark.parametrize(
    ("frozen", "budget_mib"), [(False, 256), (True, 512)], ids=["training", "frozen-head"]
)
def test_default_chunks_stay_within_the_budget(
    frozen: bool, budget_mib: int, reduction: str
) -> None:
    # 8192 rows of 64000 bf16 logits are 1 GiB on either side.
    tensors = make(8192, 64, 64000)
    upstream = upstream_for(reduction, 8192)
    options = {"frozen": frozen, "reduction": reduction, "grad_weight_accum_dtype": "weight"}
    train(tensors, upstream, **options)
    with peak_memory("cuda") as peak:
        train(tensors, upstream, **options)
    gradients = sum(each.nbytes for each in tensors[: 1 if frozen else 2])
    # The backward of a row-wise loss scales into a copy while the stored gradient is alive.
    assert peak.bytes <= budget_mib * 2**20 + 2 * gradients + 8 * 2**20


@by_reduction
def test_another_stream(reduction: str) -> None:
    tensors = make(128, 64, 257, dtype=torch.float32)
    upstream = upstream_for(reduction, 128)
    expected = train(tensors, upstream, reduction=reduction)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = train(tensors, upstream, reduction=reduction)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    for one, other in zip(result, expected, strict=True):
        assert torch.equal(one, other)


def test_another_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    tensors = [each.to("cuda:1") for each in make(64, 32, 257, dtype=torch.float32)]
    upstream = torch.tensor(1.5, device="cuda:1")
    assert torch.cuda.current_device() == 0
    ours = train(tensors, upstream)
    truth = train(tensors, upstream, function=reference.linear_distillation)
    for one, other in zip(ours, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_opcheck() -> None:
    for divergence, dtype in zip(DIVERGENCES, (torch.bfloat16, torch.float32) * 3, strict=False):
        tensors = make(13, 8, 11, dtype=dtype)
        tensors[0].requires_grad_()
        tensors[1].requires_grad_()
        for reduction in ("mean", "none"):
            torch.library.opcheck(
                torch.ops.greyhound.linear_distillation.default,
                tensors,
                {
                    "divergence": divergence, "reduction": reduction, "chunk_size": 5,
                    "hard_weight": 0.5, "need_grad_input": True, "need_grad_weight": True,
                },
            )  # fmt: skip
