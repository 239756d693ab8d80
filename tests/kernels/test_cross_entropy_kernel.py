from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops import config
from greyhound_ops.functional import chunked_linear_cross_entropy
from greyhound_ops.kernels.cross_entropy import cross_entropy
from greyhound_ops.ops.linear_cross_entropy import RowLoss, _torch_rows
from samples import (
    CASES,
    REDUCTIONS,
    SLACK,
    Result,
    Sample,
    check_against_reference,
    dtype_id,
    interpreter_slack,
    make_sample,
    run,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
by_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
NAN = float("nan")


@dataclasses.dataclass
class Launch:
    """Arguments of one launch, and what it left behind."""

    logits: Tensor
    target: Tensor
    row_loss: RowLoss
    tensors: dict[str, Tensor | None]
    gain: float = 1.0
    read_statistics: bool = False
    write_grad: bool = True
    statistics: Tensor | None = None

    def outputs(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Loss and statistics, poisoned: every element must be written."""
        loss = torch.full(self.target.shape, NAN, dtype=dtype, device=self.logits.device)
        if self.statistics is not None:
            return loss, self.statistics.to(dtype)
        statistics = torch.full((2, *loss.shape), NAN, dtype=dtype, device=loss.device)
        return loss, statistics

    def kwargs(self) -> dict[str, Any]:
        return {
            **self.tensors,
            "gain": self.gain,
            "read_statistics": self.read_statistics,
            "write_grad": self.write_grad,
        }

    def by_kernel(self) -> tuple[Tensor, Tensor, Tensor]:
        loss, statistics = self.outputs()
        # Columns beyond V belong to the padding of the buffer.
        buffer = self.logits.new_full((self.logits.shape[0], self.logits.shape[1] + 5), 77.0)
        logits = buffer[:, : self.logits.shape[1]].copy_(self.logits)
        cross_entropy(
            logits,
            self.target,
            loss,
            statistics,
            **self.kwargs(),
            **dataclasses.asdict(self.row_loss),
        )
        assert (buffer[:, self.logits.shape[1] :] == 77.0).all(), "written beyond the row"
        if not self.write_grad:
            assert torch.equal(logits.nan_to_num(), self.logits.nan_to_num())
        if self.read_statistics:
            assert loss.isnan().all(), "the loss is not to be written when the statistics are read"
        return loss, statistics, logits

    def by_torch(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same in float64."""
        loss, statistics = self.outputs(torch.float64)
        wide = {
            name: value.double() if value is not None and value.is_floating_point() else value
            for name, value in self.tensors.items()
        }
        grad = _torch_rows(
            self.logits.double(),
            self.target,
            loss,
            statistics,
            self.row_loss,
            **{**self.kwargs(), **wide},
        )
        return loss, statistics, grad

    def check(self) -> tuple[Tensor, Tensor, Tensor]:
        results, truths = self.by_kernel(), self.by_torch()
        tolerances = [1e-5, 1e-5, 2 * SLACK[self.logits.dtype] + 1e-5]
        for value, truth, tolerance in zip(results, truths, tolerances, strict=True):
            if truth is None or (self.read_statistics and value is results[0]):
                continue
            torch.testing.assert_close(
                value.double(), truth, rtol=tolerance, atol=tolerance, equal_nan=True
            )
        return results


def make_launch(
    rows: int = 7,
    classes: int = 37,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device,
    class_weight: bool = False,
    row_scale: Tensor | None = None,
    grad_scale: float | None = None,
    ignore_index: int = -100,
    target_dtype: torch.dtype = torch.int64,
    options: dict[str, Any] | None = None,
    **launch: Any,
) -> Launch:
    target = torch.randint(0, classes, (rows,), device=device)
    target[rows // 2] = ignore_index
    weight = torch.rand(classes, device=device) + 0.25 if class_weight else None
    return Launch(
        torch.randn(rows, classes, device=device).mul(3).to(dtype),
        target.to(target_dtype),
        RowLoss(
            **{
                "ignore_index": ignore_index,
                "label_smoothing": 0.0,
                "z_loss": 0.0,
                "logit_scale": 1.0,
                "softcap": None,
                **(options or {}),
            }
        ),
        {
            "class_weight": weight,
            "class_weight_sum": None if weight is None else weight.sum(),
            "grad_scale": None if grad_scale is None else torch.tensor(grad_scale, device=device),
            "row_scale": row_scale,
        },
        **launch,
    )


def _case(name: str) -> dict[str, Any]:
    wanted, options = CASES[name]
    return {"class_weight": wanted.get("class_weight", False), "options": options}


# ---------------------------------------------------------------------------------- the launcher


@by_dtype
@pytest.mark.parametrize("case", sorted(set(CASES) - {"bias"}))
def test_options(case: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    make_launch(dtype=dtype, device=kernel_device, grad_scale=0.5, gain=4.0, **_case(case)).check()


@pytest.mark.parametrize("case", ["plain", "all"])
@pytest.mark.parametrize("classes", [1, 2, 127, 128, 129, 1000, 8191, 8192, 8193, 20001])
def test_vocabulary_sizes(classes: int, case: str, kernel_device: torch.device) -> None:
    # Blocks are of at most 8192 columns: one, exactly one, one more, several.
    make_launch(3, classes, device=kernel_device, **_case(case)).check()


@pytest.mark.parametrize("case", ["plain", "all"])
def test_forward_only(case: str, kernel_device: torch.device) -> None:
    make_launch(device=kernel_device, write_grad=False, **_case(case)).check()


@pytest.mark.fault("B01", "B09")
@pytest.mark.parametrize("layout", ["contiguous", "strided", "expanded"])
@pytest.mark.parametrize("case", ["plain", "all"])
def test_by_row(case: str, layout: str, kernel_device: torch.device) -> None:
    scale = torch.randn(14, device=kernel_device)
    row_scale = {
        "contiguous": scale[:7],
        "strided": scale[::2],
        "expanded": scale[:1].expand(7),
    }[layout]
    launch = make_launch(device=kernel_device, row_scale=row_scale, **_case(case))
    statistics = launch.by_kernel()[1]
    launch = dataclasses.replace(launch, read_statistics=True, statistics=statistics)
    launch.check()
    lse_grad = -2.0 * row_scale
    dataclasses.replace(launch, tensors={**launch.tensors, "lse_grad": lse_grad}).check()


def test_read_statistics_is_not_written(kernel_device: torch.device) -> None:
    launch = make_launch(device=kernel_device)
    statistics = launch.by_kernel()[1]
    before = statistics.clone()
    dataclasses.replace(launch, read_statistics=True, statistics=statistics).by_kernel()
    assert torch.equal(statistics, before)


@pytest.mark.parametrize("ignore_index", [-100, 0, 36, 37, -(2**33), 2**33])
def test_ignore_index(ignore_index: int, kernel_device: torch.device) -> None:
    loss, statistics, grad = make_launch(
        device=kernel_device, ignore_index=ignore_index, **_case("all")
    ).check()
    assert loss[3] == 0
    assert not statistics[:, 3].any()
    assert not grad[3].any()


@pytest.mark.parametrize("value", [NAN, float("inf"), float("-inf")])
def test_ignored_rows_may_hold_anything(value: float, kernel_device: torch.device) -> None:
    launch = make_launch(device=kernel_device)
    launch.logits[3] = value
    loss, _, grad = launch.by_kernel()
    assert loss.isfinite().all()
    assert not grad[3].any()


def test_every_row_ignored(kernel_device: torch.device) -> None:
    launch = make_launch(device=kernel_device)
    launch.target.fill_(-100)
    for output in launch.by_kernel():
        assert not output.any()


@pytest.mark.fault("B74")
@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64], ids=dtype_id)
def test_targets_of_any_stride(target_dtype: torch.dtype, kernel_device: torch.device) -> None:
    launch = make_launch(device=kernel_device, target_dtype=target_dtype)
    wide = torch.full((7, 3), 2**31 - 1, dtype=target_dtype, device=kernel_device)
    wide[:, 1] = launch.target
    dataclasses.replace(launch, target=wide[:, 1]).check()
    dataclasses.replace(launch, target=wide[:1, 1].expand(7)).check()


@pytest.mark.fault("B16", "R04")
@pytest.mark.parametrize("case", ["plain", "all"])
@pytest.mark.parametrize("target", [-1, 37, 2**40, -(2**40)])
def test_target_out_of_range_poisons_its_row(
    target: int, case: str, kernel_device: torch.device
) -> None:
    launch = make_launch(device=kernel_device, **_case(case))
    launch.target[5] = target
    loss, _, grad = launch.check()
    assert loss[5].isnan()
    assert grad[5].isnan().all()
    others = [0, 1, 2, 3, 4, 6]
    assert loss[others].isfinite().all()
    assert grad[others].isfinite().all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("where", ["one", "first-block", "all"])
def test_minus_infinity(where: str, smoothing: float, kernel_device: torch.device) -> None:
    launch = make_launch(2, 9000, device=kernel_device, options={"label_smoothing": smoothing})
    launch.target[:] = 8999
    launch.logits[
        :, {"one": slice(5, 6), "first-block": slice(0, 8192), "all": slice(None)}[where]
    ] = float("-inf")
    loss, _, grad = launch.check()
    if where != "all":
        assert grad.isfinite().all()
        assert loss.isfinite().all() == (smoothing == 0.0)


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_nan_is_not_lost(value: float, kernel_device: torch.device) -> None:
    launch = make_launch(3, 9000, device=kernel_device)
    launch.target[:] = 1
    launch.logits[1, 8500] = value
    loss, _, grad = launch.by_kernel()
    assert loss[1].isnan()
    assert grad[1].isnan().any()
    assert loss[[0, 2]].isfinite().all()


@pytest.mark.parametrize("value", [1e30, -1e30, 3e4])
def test_large_logits_do_not_overflow(value: float, kernel_device: torch.device) -> None:
    launch = make_launch(device=kernel_device)
    launch.logits[:, 3] = value
    launch.check()


def test_softcap_at_infinity(kernel_device: torch.device) -> None:
    launch = make_launch(device=kernel_device, options={"softcap": 5.0})
    launch.logits[0, 0], launch.logits[1, 0] = float("inf"), float("-inf")
    launch.logits[2, 0] = 1e20
    loss, _, grad = launch.check()
    assert loss.isfinite().all()
    assert grad.isfinite().all()


def test_no_rows(kernel_device: torch.device) -> None:
    launch = make_launch(device=kernel_device)
    empty = dataclasses.replace(launch, logits=launch.logits[:0], target=launch.target[:0])
    assert [value.numel() for value in empty.by_kernel()] == [0, 0, 0]


def test_gradient_of_the_scale_factors(kernel_device: torch.device) -> None:
    # Each of the three factors by itself, against the gradient without any.
    launch = make_launch(device=kernel_device)
    plain = launch.by_kernel()[2]
    rows = torch.arange(7.0, device=kernel_device)
    for tensors, gain, factor in (
        ({"grad_scale": torch.tensor(0.25, device=kernel_device)}, 1.0, 0.25),
        ({}, 8.0, 8.0),
        ({"row_scale": rows}, 1.0, rows[:, None]),
    ):
        scaled = dataclasses.replace(launch, tensors={**launch.tensors, **tensors}, gain=gain)
        torch.testing.assert_close(scaled.by_kernel()[2], plain * factor)


# ----------------------------------------------------------------- the op through the kernels


def check_op(sample: Sample, **options: Any) -> Result:
    dtype = sample.input.dtype
    with config.override(kernels="triton"):
        return check_against_reference(
            sample, slack=SLACK[dtype] + 2 * interpreter_slack(dtype), **options
        )


@by_dtype
@by_reduction
@pytest.mark.parametrize("case", CASES)
def test_op(case: str, reduction: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    wanted, options = CASES[case]
    sample = make_sample(9, 8, 37, dtype=dtype, device=kernel_device, **wanted)
    check_op(sample, reduction=reduction, upstream=0.7, only_ours={"chunk_size": 4}, **options)


@by_dtype
@by_reduction
@pytest.mark.parametrize("frozen", [("weight", "bias"), ("input",), ("bias",)], ids="-".join)
def test_op_with_frozen_tensors(
    frozen: tuple[str, ...], reduction: str, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    sample = make_sample(9, 8, 37, dtype=dtype, device=kernel_device, bias=True)
    check_op(
        sample,
        reduction=reduction,
        frozen=frozen,
        upstream=torch.randn(9, device=kernel_device) if reduction == "none" else -2.0,
        only_ours={"chunk_size": 4},
    )


@by_reduction
def test_op_equals_torch_rows(reduction: str, kernel_device: torch.device) -> None:
    sample = make_sample(9, 8, 37, device=kernel_device, bias=True, class_weight=True)
    results = []
    for kernels in ("triton", "torch"):
        with config.override(kernels=kernels):
            results.append(
                run(chunked_linear_cross_entropy, sample, reduction=reduction, **CASES["all"][1])
            )
    for name in ("loss", "input", "weight", "bias"):
        torch.testing.assert_close(*(getattr(result, name) for result in results))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_op_keeps_what_a_retained_graph_needs(reduction: str, kernel_device: torch.device) -> None:
    # The in-place scale of the backward has its own kernel.
    sample = make_sample(9, 8, 37, device=kernel_device)
    weight = sample.weight.requires_grad_()
    with config.override(kernels="triton"):
        loss = chunked_linear_cross_entropy(
            sample.input, weight, sample.target, reduction=reduction
        )
        first, second, last = (
            torch.autograd.grad(
                loss, weight, torch.tensor(factor, device=kernel_device), retain_graph=keep
            )[0]
            for factor, keep in ((3.0, True), (3.0, True), (1.0, False))
        )
    assert torch.equal(first, second)
    torch.testing.assert_close(first, 3 * last)


# The path of a frozen bf16 head that stores exponentials instead of logits; needs N >= 128.
@by_reduction
@pytest.mark.parametrize("case", ["plain", "bias", "z-loss", "class-weight", "scale", "softcap"])
@pytest.mark.parametrize("needs", ["forward", "input"])
def test_op_with_a_frozen_head_in_bf16(
    needs: str, case: str, reduction: str, kernel_device: torch.device
) -> None:
    wanted, options = CASES[case]
    sample = make_sample(150, 16, 41, dtype=torch.bfloat16, device=kernel_device, **wanted)
    frozen = ("weight", "bias") if needs == "input" else ("input", "weight", "bias")
    check_op(sample, reduction=reduction, frozen=frozen, upstream=0.7, **options)


@pytest.mark.parametrize("needs", ["forward", "input"])
def test_op_with_a_frozen_head_and_a_loss_beyond_exp(
    needs: str, kernel_device: torch.device
) -> None:
    # Losses of some hundreds: exp(logit - target's logit) overflows.
    sample = make_sample(150, 16, 41, dtype=torch.bfloat16, device=kernel_device)
    input = sample.input.clone()
    input[::7] *= 64
    frozen = ("weight",) if needs == "input" else ("input", "weight")
    # What overflows is projected once more with its logits stored, in bf16.
    result = check_op(
        sample.replace(input=input),
        reduction="none",
        frozen=frozen,
        loss_slack=1e-6 + 2 * interpreter_slack(torch.bfloat16),
    )
    assert float(result.loss.max()) > 100
