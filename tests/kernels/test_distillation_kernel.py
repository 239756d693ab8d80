from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops import config, reference
from greyhound_ops.functional import chunked_linear_distillation
from greyhound_ops.kernels import products
from greyhound_ops.kernels.distillation import distillation
from greyhound_ops.ops import linear_distillation, live_loop
from greyhound_ops.ops.linear_distillation import STATISTICS, _RowLoss, _torch_rows
from greyhound_ops.testing import assert_within_budget
from samples import REDUCTIONS, SLACK, dtype_id, interpreter_slack

DIVERGENCES = ("jsd", "kl", "reverse_kl", "tvd", "cosine")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
by_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
NAN = float("nan")


@dataclasses.dataclass
class Launch:
    """Arguments of one launch."""

    student: Tensor
    teacher: Tensor
    target: Tensor | None
    row_loss: _RowLoss
    grad_scale: Tensor | None = None
    row_scale: Tensor | None = None
    gain: float = 1.0
    read_statistics: bool = False
    write_grad: bool = True
    statistics: Tensor | None = None

    def kwargs(self) -> dict[str, Any]:
        names = ("grad_scale", "row_scale", "gain", "read_statistics", "write_grad")
        return {name: getattr(self, name) for name in names}

    def outputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Parts and statistics, poisoned: every element must be written."""
        rows, device = self.student.shape[0], self.student.device
        parts = torch.full((2, rows), NAN, dtype=dtype, device=device)
        if self.statistics is not None:
            return parts, self.statistics.to(dtype)
        return parts, torch.full((STATISTICS, rows), NAN, dtype=dtype, device=device)

    def by_kernel(self) -> tuple[Tensor, Tensor, Tensor]:
        parts, statistics = self.outputs(torch.float32)
        # Columns beyond V belong to the padding of the buffers.
        rows, classes = self.student.shape
        buffer = self.student.new_full((rows, classes + 5), 77.0)
        student = buffer[:, :classes].copy_(self.student)
        teacher = self.teacher.new_full((rows, classes + 3), 55.0)[:, :classes].copy_(self.teacher)
        options = dataclasses.asdict(self.row_loss)
        distillation(student, teacher, self.target, parts, statistics, **self.kwargs(), **options)
        assert (buffer[:, classes:] == 77.0).all(), "written beyond the row"
        assert torch.equal(teacher, self.teacher) or self.teacher.isnan().any()
        if not self.write_grad:
            assert torch.equal(student.nan_to_num(), self.student.nan_to_num())
        if self.read_statistics:
            assert parts.isnan().all(), "no loss is to be written when the statistics are read"
        return parts, statistics, student

    def by_torch(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same in float64."""
        parts, statistics = self.outputs(torch.float64)
        wide = {
            name: value.double() if isinstance(value, Tensor) else value
            for name, value in self.kwargs().items()
        }
        grad = _torch_rows(
            self.student.double(), self.teacher.double(), self.target, parts, statistics,
            self.row_loss, **wide,
        )  # fmt: skip
        return parts, statistics, grad

    def check(self) -> tuple[Tensor, Tensor, Tensor]:
        results, truths = self.by_kernel(), self.by_torch()
        tolerances = [1e-5, 1e-5, 2 * SLACK[self.student.dtype] + 1e-5]
        for value, truth, tolerance in zip(results, truths, tolerances, strict=True):
            if truth is None or (self.read_statistics and value is results[0]):
                continue
            torch.testing.assert_close(
                value.double(), truth, rtol=tolerance, atol=tolerance, equal_nan=True
            )
        return results


def make(
    divergence: str,
    device: torch.device,
    *,
    rows: int = 5,
    classes: int = 37,
    dtype: torch.dtype = torch.float32,
    teacher_dtype: torch.dtype | None = None,
    **options: Any,
) -> Launch:
    """A launch with a row that is ignored."""
    target = torch.randint(0, classes, (rows,), device=device)
    target[-1] = -100
    defaults = {
        "beta": 0.3, "temperature": 1.0, "soft_weight": 1.0, "hard_weight": 0.0,
        "ignore_index": -100,
    }  # fmt: skip
    return Launch(
        2.0 * torch.randn(rows, classes, device=device, dtype=dtype),
        2.0 * torch.randn(rows, classes, device=device, dtype=teacher_dtype or dtype),
        target,
        _RowLoss(divergence, **{**defaults, **options}),
    )


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tempered": {"temperature": 2.5, "soft_weight": 0.7},
    "hard": {"hard_weight": 0.4},
    "hard-tempered": {"hard_weight": 0.4, "temperature": 0.5},
}


@by_dtype
@by_divergence
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient(
    case: str, divergence: str, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    make(divergence, kernel_device, dtype=dtype, **CASES[case]).check()


@by_divergence
@pytest.mark.parametrize("classes", [1, 2, 128, 129, 8191, 8193, 20000])
def test_every_width(classes: int, divergence: str, kernel_device: torch.device) -> None:
    # One block of columns, several, and a last one that is nearly empty.
    make(divergence, kernel_device, rows=3, classes=classes, hard_weight=0.5).check()


@by_divergence
@pytest.mark.parametrize("case", CASES)
def test_without_gradient_the_logits_stay(
    case: str, divergence: str, kernel_device: torch.device
) -> None:
    launch = make(divergence, kernel_device, **CASES[case])
    whole = launch.check()
    alone = dataclasses.replace(launch, write_grad=False).check()
    for one, other in zip(whole[:2], alone[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@by_divergence
@pytest.mark.parametrize("case", CASES)
def test_reading_the_statistics_gives_the_same_gradient(
    case: str, divergence: str, kernel_device: torch.device
) -> None:
    launch = make(divergence, kernel_device, **CASES[case])
    _, statistics, grad = launch.by_kernel()
    again = dataclasses.replace(launch, read_statistics=True, statistics=statistics)
    torch.testing.assert_close(again.by_kernel()[2], grad, rtol=1e-5, atol=1e-6)


@by_divergence
def test_scales(divergence: str, kernel_device: torch.device) -> None:
    launch = make(divergence, kernel_device, hard_weight=0.4)
    launch.gain = 256.0
    launch.grad_scale = torch.tensor(0.125, device=kernel_device)
    launch.row_scale = torch.randn(10, device=kernel_device)[::2]
    launch.check()


@pytest.mark.parametrize("teacher_dtype", DTYPES, ids=dtype_id)
def test_teacher_of_another_dtype(teacher_dtype: torch.dtype, kernel_device: torch.device) -> None:
    for dtype in DTYPES:
        make("jsd", kernel_device, dtype=dtype, teacher_dtype=teacher_dtype).check()


@by_divergence
def test_without_target_every_row_counts(divergence: str, kernel_device: torch.device) -> None:
    launch = dataclasses.replace(make(divergence, kernel_device), target=None)
    parts, _, grad = launch.check()
    assert parts[0].all()
    assert grad.any(1).all()


@by_divergence
def test_ignored_rows_are_zero_whatever_they_hold(
    divergence: str, kernel_device: torch.device
) -> None:
    launch = make(divergence, kernel_device, hard_weight=0.5)
    launch.student[-1], launch.teacher[-1] = NAN, float("inf")
    parts, statistics, grad = launch.by_kernel()
    assert not parts[:, -1].any()
    assert not statistics[:, -1].any()
    assert not grad[-1].any()
    assert grad[:-1].isfinite().all()


@by_divergence
@pytest.mark.parametrize("which", ["student", "teacher", "both"])
def test_masked_classes(which: str, divergence: str, kernel_device: torch.device) -> None:
    # 0 log 0 = 0, in gradients too; an infinite divergence is infinite.
    if divergence == "cosine":
        pytest.skip("a cosine of infinite logits is NaN, in torch too")
    launch = make(divergence, kernel_device)
    for name in ("student", "teacher"):
        if which in (name, "both"):
            getattr(launch, name)[:, 3:6] = -torch.inf
    parts, _, grad = launch.check()
    infinite = (divergence, which) in (("kl", "student"), ("reverse_kl", "teacher"))
    assert bool(parts[0, :-1].isinf().all()) == infinite
    if (divergence, which) != ("reverse_kl", "teacher"):
        assert grad.isfinite().all()


@by_divergence
@pytest.mark.parametrize("value", [NAN, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_bad_rows_are_nan(
    side: str, value: float, divergence: str, kernel_device: torch.device
) -> None:
    launch = make(divergence, kernel_device)
    getattr(launch, side)[1] = value
    parts, _, grad = launch.by_kernel()
    assert parts[0].isnan().nonzero().flatten().tolist() == [1]
    assert grad[1].isnan().all()
    assert grad[[0, 2, 3, 4]].isfinite().all()


@by_divergence
@pytest.mark.parametrize("value", [-1, 37, 2**40])
def test_target_out_of_range(value: int, divergence: str, kernel_device: torch.device) -> None:
    launch = make(divergence, kernel_device, hard_weight=0.5)
    launch.target[1] = value
    parts, _, grad = launch.by_kernel()
    assert parts[1].isnan().nonzero().flatten().tolist() == [1]
    assert grad[1].isnan().all()
    assert grad[[0, 2, 3, 4]].isfinite().all()
    # One that says no more than that its row counts is not looked at.
    soft = make(divergence, kernel_device)
    soft.target[1] = value
    parts, _, grad = soft.by_kernel()
    assert parts.isfinite().all()
    assert grad.isfinite().all()


@by_divergence
@by_dtype
def test_identical_rows_are_zero(
    dtype: torch.dtype, divergence: str, kernel_device: torch.device
) -> None:
    for beta in (0.1, 0.3, 0.5, 0.7):
        launch = make(divergence, kernel_device, dtype=dtype, beta=beta, temperature=3.0)
        launch.teacher = launch.student.clone()
        parts, _, grad = launch.by_kernel()
        if divergence == "cosine":
            assert (parts[0] <= 1e-6).all()
            assert (grad.abs() <= 1e-6).all()
        else:
            assert not parts.any()
            assert not grad.any()


@by_divergence
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_large_offset(offset: float, divergence: str, kernel_device: torch.device) -> None:
    if divergence == "cosine":
        pytest.skip("a cosine is not invariant to an offset")
    launch = make(divergence, kernel_device, hard_weight=0.5, temperature=2.0)
    launch.student += offset
    launch.teacher -= offset / 2
    launch.check()


# ---------------------------------------------------------------------------- the op on kernels


@pytest.mark.parametrize("reduction", REDUCTIONS)
@by_divergence
def test_op(divergence: str, reduction: str, kernel_device: torch.device) -> None:
    turn = DIVERGENCES.index(divergence) + REDUCTIONS.index(reduction)
    dtype = (torch.float32, torch.bfloat16)[turn % 2]
    # 7 rows of the student to 3 of the teacher: the kernel works on parts of the student's chunk.
    rows, classes = 17, 11
    tensors = [
        torch.randn(shape, device=kernel_device, dtype=dtype) / 3.0
        for shape in ((rows, 9), (classes, 9), (rows, 6), (classes, 6), (classes,), (classes,))
    ]
    target = torch.randint(0, classes, (rows,), device=kernel_device)
    target[4:6] = -100
    upstream = torch.randn((rows,) if reduction == "none" else (), device=kernel_device)
    options = {
        "divergence": divergence, "beta": 0.3, "temperature": 2.0, "soft_weight": 0.7,
        "hard_weight": 0.4, "reduction": reduction,
    }  # fmt: skip

    def results(function: Any, tensors: list[Tensor], **more: Any) -> list[Tensor]:
        input, weight, teacher_input, teacher_weight, bias, teacher_bias = tensors
        leaves = [each.detach().requires_grad_() for each in (input, weight, bias)]
        loss = function(
            *leaves[:2], teacher_input, teacher_weight, target, leaves[2], teacher_bias,
            **options, **more,
        )  # fmt: skip
        grads = torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))
        return [loss.detach(), *grads]

    with config.override(kernels="triton"):
        ours = results(chunked_linear_distillation, tensors, chunk_size=7)
    plain = results(reference.linear_distillation, tensors)
    truth = results(reference.linear_distillation, [each.double() for each in tensors])
    slack = SLACK[dtype] + interpreter_slack(dtype)
    for name, value, at_dtype, exact in zip(
        ("loss", "grad_input", "grad_weight", "grad_bias"), ours, plain, truth, strict=True
    ):
        assert_within_budget(name, value, at_dtype, exact, slack=1e-6 if name == "loss" else slack)


# ------------------------------------------------------ logits where the student's gradient will be


@pytest.mark.parametrize("share", [None, 0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    ("rows", "accum", "weight_dtype", "budget", "divergence"),
    [
        (100, "fp32", torch.bfloat16, None, "jsd"),  # all of them in the gradient's memory
        (200, "fp32", torch.bfloat16, None, "kl"),  # some beside it, in the same product
        (330, "fp32", torch.bfloat16, 2**15, "reverse_kl"),  # several chunks, two halves of a sum
        (330, "weight", torch.bfloat16, 2**15, "tvd"),
        (330, "fp32", torch.float32, 2**15, "cosine"),  # a gradient of twice the bytes
    ],
)
def test_logits_in_the_students_gradient(
    rows: int,
    accum: str,
    weight_dtype: torch.dtype,
    budget: int | None,
    divergence: str,
    share: float | None,
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    classes, hidden = 500, 136
    monkeypatch.setattr(live_loop, "LEAST_LOGITS_BYTES", 0)
    # Two buffers of 128 rows, so that the third part takes the first one's.
    monkeypatch.setattr(linear_distillation, "TEACHER_BYTES", 2 * 128 * classes * 2)
    # Few panels at a time, so that products are written over logits that others have read.
    monkeypatch.setattr(products.Products, "spare_panels", lambda *_: 2)
    calls = counted_runs(monkeypatch)
    shapes = (rows, hidden), (classes, hidden), (rows, 72), (classes, 72), (classes,)
    tensors = [torch.randn(shape, device=kernel_device).to(weight_dtype) for shape in shapes]
    target = None
    if share is not None:
        target = torch.randint(0, classes, (rows,), device=kernel_device)
        target[torch.rand(rows, device=kernel_device) < share] = -100
    options = {
        "divergence": divergence, "beta": 0.3, "temperature": 2.0,
        "hard_weight": 0.0 if share is None else 0.4,
    }  # fmt: skip

    def run(function: Any, tensors: list[Tensor], **more: Any) -> list[Tensor]:
        input, weight, teacher_input, teacher_weight, teacher_bias = tensors
        leaves = [each.detach().requires_grad_() for each in (input, weight)]
        loss = function(
            *leaves, teacher_input, teacher_weight, target, None, teacher_bias, **options, **more
        )
        return [loss.detach(), *torch.autograd.grad(loss, leaves, torch.full_like(loss, 1.7))]

    autocast = torch.autocast(
        kernel_device.type, torch.bfloat16, enabled=weight_dtype != torch.bfloat16
    )
    with config.override(kernels="triton", chunk_budget_bytes=budget), autocast:
        ours = run(chunked_linear_distillation, tensors, grad_weight_accum_dtype=accum)
    assert calls == [1]
    if share == 1.0:
        assert not any(each.any() for each in ours)
        return
    with autocast:
        plain = run(reference.linear_distillation, tensors)
    exact = run(reference.linear_distillation, [each.bfloat16().double() for each in tensors])
    chunks = 1 if budget is None or accum == "fp32" else 5
    slack = SLACK[torch.bfloat16] * chunks**0.5 + interpreter_slack(torch.bfloat16)
    names = ("loss", "grad_input", "grad_weight")
    for name, one, other, truth in zip(names, ours, plain, exact, strict=True):
        assert_within_budget(name, one, other, truth, slack=slack)
    if target is not None:
        assert not ours[1][target == -100].any()


def test_a_teacher_equal_to_the_student_in_its_gradients_memory(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Products of one kind: the logits are the same to the last bit.
    monkeypatch.setattr(live_loop, "LEAST_LOGITS_BYTES", 0)
    calls = counted_runs(monkeypatch)
    input = torch.randn(200, 136, device=kernel_device).bfloat16().requires_grad_()
    weight = torch.randn(500, 136, device=kernel_device).bfloat16().requires_grad_()
    with config.override(kernels="triton"):
        loss = chunked_linear_distillation(input, weight, input.detach(), weight.detach())
    grads = torch.autograd.grad(loss, (input, weight))
    assert calls == [1]
    assert not loss
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_size": 64},
        {"reduction": "none"},
        {"teacher_dtype": torch.float32},
        {"bias": True},
        {"frozen": True},
    ],
    ids=str,
)
def test_calls_whose_logits_lie_elsewhere(
    change: dict[str, Any], kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_loop, "LEAST_LOGITS_BYTES", 0)
    calls = counted_runs(monkeypatch)
    change = dict(change)
    dtype = change.pop("teacher_dtype", torch.bfloat16)
    learns = not change.pop("frozen", False)
    input = torch.randn(30, 136, device=kernel_device).bfloat16().requires_grad_()
    weight = torch.randn(40, 136, device=kernel_device).bfloat16().requires_grad_(learns)
    teacher = [torch.randn(size, 72, device=kernel_device, dtype=dtype) for size in (30, 40)]
    bias = torch.zeros(40, device=kernel_device).bfloat16() if change.pop("bias", False) else None
    if bias is not None:
        bias.requires_grad_()
    with config.override(kernels="triton"):
        loss = chunked_linear_distillation(input, weight, *teacher, None, bias, **change)
        loss.sum().backward()
    assert not calls


def counted_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the runs of the loop that leaves out rows."""
    calls: list[int] = []
    original = live_loop.run

    def run(*args: Any, **options: Any) -> None:
        calls.append(1)
        original(*args, **options)

    monkeypatch.setattr(live_loop, "run", run)
    return calls
