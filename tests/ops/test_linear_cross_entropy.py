from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from greyhound_ops import config, reference
from greyhound_ops.errors import (
    ForwardModeError,
    NotDifferentiableTwiceError,
    TargetOutOfRangeError,
)
from greyhound_ops.functional import chunked_linear_cross_entropy
from greyhound_ops.ops.linear_cross_entropy import OP, planned_rows
from greyhound_ops.testing import relative_error
from samples import (
    CASES,
    DIFFERENTIABLE,
    DTYPES,
    LAYOUTS,
    REDUCTIONS,
    SLACK,
    Sample,
    assert_equal_results,
    assert_results_match,
    check_against_reference,
    dtype_id,
    make_sample,
    run,
)

REDUCED = (torch.float32, torch.bfloat16, torch.float16)
SUBSETS = [subset for size in range(4) for subset in itertools.combinations(DIFFERENTIABLE, size)]
by_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


def upstreams(rows: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Gradients of a per-row loss, each of another memory layout."""
    return {
        "random": torch.randn(rows, device=device),
        "strided": torch.randn(2 * rows, device=device)[::2],
        "reversed": torch.randn(rows, 2, device=device)[:, 1],
        "expanded": torch.tensor(0.7, device=device).expand(rows),
        "zero": torch.zeros(rows, device=device),
    }


# ------------------------------------------------------------------------------ loss, gradients


@by_dtype
@by_reduction
@pytest.mark.parametrize("case", CASES)
def test_options(case: str, reduction: str, dtype: torch.dtype, device: torch.device) -> None:
    wanted, options = CASES[case]
    sample = make_sample(dtype=dtype, device=device, **wanted)
    check_against_reference(
        sample, reduction=reduction, upstream=-1.7, only_ours={"chunk_size": 5}, **options
    )


@pytest.mark.fault("B05")
@by_dtype
@by_reduction
@pytest.mark.parametrize("chunk_size", [1, 5, 6, 12, 100, None])
def test_chunk_sizes(
    chunk_size: int | None, reduction: str, dtype: torch.dtype, device: torch.device
) -> None:
    sample = make_sample(12, dtype=dtype, device=device, bias=True)
    check_against_reference(sample, reduction=reduction, only_ours={"chunk_size": chunk_size})


@by_reduction
def test_chunk_budget_cuts_the_rows(reduction: str, device: torch.device) -> None:
    sample = make_sample(40, classes=16, dtype=torch.float64, device=device, bias=True)
    with config.override(chunk_budget_bytes=3 * 16 * 8):
        check_against_reference(sample, reduction=reduction)


@pytest.mark.parametrize("dtype", REDUCED, ids=dtype_id)
@by_reduction
@pytest.mark.parametrize("frozen", SUBSETS, ids=lambda names: "+".join(names) or "nothing")
def test_frozen(
    frozen: tuple[str, ...], reduction: str, dtype: torch.dtype, device: torch.device
) -> None:
    sample = make_sample(dtype=dtype, device=device, bias=True)
    result = check_against_reference(
        sample, reduction=reduction, frozen=frozen, upstream=0.3, only_ours={"chunk_size": 4}
    )
    assert all((getattr(result, name) is None) == (name in frozen) for name in DIFFERENTIABLE)


@pytest.mark.fault("B01", "B04", "R13")
@pytest.mark.parametrize("dtype", REDUCED, ids=dtype_id)
@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("input",)], ids="-".join)
@pytest.mark.parametrize("layout", upstreams(1))
def test_upstream_by_row(
    layout: str, frozen: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> None:
    sample = make_sample(dtype=dtype, device=device, bias=True)
    check_against_reference(
        sample,
        reduction="none",
        frozen=frozen,
        upstream=upstreams(13, device)[layout],
        only_ours={"chunk_size": 5},
        z_loss=1e-2,
    )


@pytest.mark.fault("B01", "B04", "B09")
def test_upstream_that_autograd_makes(device: torch.device) -> None:
    # Weighted and sliced sums, as masks and policies make them: issues B01, B04, B09.
    sample = make_sample(16, dtype=torch.float64, device=device)
    factors = torch.rand(16, dtype=torch.float64, device=device)

    def total(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            loss = function(*args, reduction="none", **kwargs)
            return (
                loss[::2].sum()
                + (loss * factors).sum() / factors.sum()
                + loss.view(4, 4).t()[1].exp().sum()
            )

        return call

    ours, truth = (
        run(total(function), sample)
        for function in (chunked_linear_cross_entropy, reference.linear_cross_entropy)
    )
    assert_equal_results(ours, truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("upstream", [0.0, 2.5], ids=["zero", "factor"])
def test_upstream_scalar(upstream: float, reduction: str, device: torch.device) -> None:
    result = check_against_reference(
        make_sample(device=device), reduction=reduction, upstream=upstream
    )
    assert bool(result.weight.any()) == bool(upstream)


@pytest.mark.fault("B58", "R08")
@pytest.mark.parametrize("accum", ["fp32", "weight"])
@by_reduction
@by_dtype
def test_accumulation(dtype: torch.dtype, reduction: str, accum: str, device: torch.device) -> None:
    sample = make_sample(64, dtype=dtype, device=device)
    chunks = 8
    check_against_reference(
        sample,
        reduction=reduction,
        # Each chunk rounds the sum once more when it is kept in the weight's own dtype.
        slack=SLACK[dtype] * (chunks if accum == "weight" else 1),
        only_ours={"chunk_size": 64 // chunks, "grad_weight_accum_dtype": accum},
    )


@pytest.mark.fault("B58", "B59")
def test_fp32_accumulation_is_better_than_bf16() -> None:
    # Else the two options would be one.
    sample = make_sample(512, dtype=torch.bfloat16)
    truth = run(reference.linear_cross_entropy, sample.double(), reduction="sum")
    errors = {}
    for accum in ("fp32", "weight"):
        ours = run(
            chunked_linear_cross_entropy,
            sample,
            reduction="sum",
            chunk_size=4,
            grad_weight_accum_dtype=accum,
        )
        errors[accum] = float((ours.weight.double() - truth.weight).norm())
    assert errors["weight"] > 2 * errors["fp32"]


# ------------------------------------------------------------------------------ targets, shapes


@pytest.mark.fault("B07", "B15", "B18")
@by_reduction
@pytest.mark.parametrize("ignore_index", [0, 3, -1, -100, 10, 11, 255, -(2**40)])
def test_ignore_index(ignore_index: int, reduction: str, device: torch.device) -> None:
    sample = make_sample(24, device=device, ignore_index=ignore_index)
    assert bool((sample.target == ignore_index).any())
    result = check_against_reference(
        sample,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=0.2,
        z_loss=0.1,
        only_ours={"chunk_size": 7},
    )
    ignored = sample.target == ignore_index
    assert not result.input[ignored].any(), "ignored rows get exactly zero"
    if reduction == "none":
        assert not result.loss[ignored].any()


@by_reduction
def test_int32_targets(reduction: str, device: torch.device) -> None:
    sample = make_sample(device=device, class_weight=True)
    wide, narrow = (
        check_against_reference(sample.replace(target=sample.target.to(dtype)), reduction=reduction)
        for dtype in (torch.int64, torch.int32)
    )
    assert_equal_results(wide, narrow)


def test_ignore_index_beyond_int32_with_int32_targets() -> None:
    sample = make_sample(ignored=0.0)
    narrow = sample.replace(target=sample.target.to(torch.int32))
    # 2**32 + 3 must not wrap around to class 3.
    results = [
        run(chunked_linear_cross_entropy, each, ignore_index=2**32 + 3) for each in (sample, narrow)
    ]
    assert_equal_results(*results)


@by_reduction
@pytest.mark.parametrize("shape", [(), (1,), (2, 5), (2, 1, 3), (0,), (2, 0, 3)], ids=str)
def test_leading_dimensions(shape: tuple[int, ...], reduction: str, device: torch.device) -> None:
    sample = make_sample(shape, device=device, bias=True)
    result = check_against_reference(
        sample, reduction=reduction, upstream=1.5, only_ours={"chunk_size": 2}
    )
    assert result.loss.shape == (shape if reduction == "none" else ())


@pytest.mark.fault("R14")
@by_reduction
@pytest.mark.parametrize(
    ("hidden", "classes"), [(8, 1), (1, 11), (1, 1), (3, 2), (16, 129)], ids=str
)
def test_odd_sizes(hidden: int, classes: int, reduction: str, device: torch.device) -> None:
    sample = make_sample(9, hidden, classes, device=device, bias=True)
    check_against_reference(
        sample, reduction=reduction, z_loss=0.1, label_smoothing=0.1, only_ours={"chunk_size": 4}
    )


@pytest.mark.fault("B42")
@by_reduction
@pytest.mark.parametrize("name", ["input", "weight"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, name: str, reduction: str, device: torch.device) -> None:
    sample = make_sample(device=device, bias=True)
    other = LAYOUTS[layout](getattr(sample, name))
    assert layout == "expanded" or torch.equal(other, getattr(sample, name))
    check_against_reference(
        sample.replace(**{name: other}),
        reduction=reduction,
        # All rows of an expanded weight are the same: grad_input is zero but for rounding.
        frozen=("input",) if (layout, name) == ("expanded", "weight") else (),
        only_ours={"chunk_size": 5},
    )


@pytest.mark.fault("B74")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accum", ["fp32", "weight"])
@pytest.mark.parametrize("shape", [(5, 8, 1), (5, 1, 8), (1, 8, 1), (5, 1, 1)], ids=str)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
def test_layouts_of_single_rows_and_columns(
    layout: str,
    shape: tuple[int, int, int],
    accum: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    # The stride of a dimension of size 1 says nothing about where the next row begins.
    sample = make_sample(*shape, dtype=dtype, device=device)
    check_against_reference(
        sample.replace(input=LAYOUTS[layout](sample.input), weight=LAYOUTS[layout](sample.weight)),
        z_loss=0.1,  # the cross entropy of one class has no gradient
        only_ours={"chunk_size": 2, "grad_weight_accum_dtype": accum},
    )


@pytest.mark.fault("B74", "B75")
@by_reduction
def test_layouts_of_the_vectors(reduction: str, device: torch.device) -> None:
    sample = make_sample(device=device, bias=True, class_weight=True)
    target = torch.full((13, 3), 2**40, device=device)
    target[:, 1] = sample.target
    check_against_reference(
        sample.replace(
            target=target[:, 1],
            bias=LAYOUTS["strided"](sample.bias),
            class_weight=LAYOUTS["strided"](sample.class_weight),
        ),
        reduction=reduction,
        label_smoothing=0.1,
        only_ours={"chunk_size": 5},
    )


@pytest.mark.fault("B75")
@by_reduction
def test_expanded_target(reduction: str, device: torch.device) -> None:
    sample = make_sample(device=device)
    check_against_reference(
        sample.replace(target=sample.target[:1].expand(13)),
        reduction=reduction,
        only_ours={"chunk_size": 5},
    )


@by_reduction
def test_permuted_leading_dimensions(reduction: str, device: torch.device) -> None:
    # [T, B, D] seen as [B, T, D]: no view of it is [N, D].
    sample = make_sample((3, 4), device=device)
    check_against_reference(
        sample.replace(input=sample.input.transpose(0, 1), target=sample.target.transpose(0, 1)),
        reduction=reduction,
        only_ours={"chunk_size": 5},
    )


@by_dtype
@by_reduction
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_grad_weight_has_the_strides_of_the_weight(
    layout: str, reduction: str, dtype: torch.dtype, device: torch.device
) -> None:
    sample = make_sample(dtype=dtype, device=device)
    weight = sample.weight if layout == "contiguous" else LAYOUTS[layout](sample.weight)
    # Asked of the op and not of .grad, which autograd would restride.
    weight = weight.detach().requires_grad_()
    loss = chunked_linear_cross_entropy(sample.input, weight, sample.target, reduction=reduction)
    (grad,) = torch.autograd.grad(loss, weight, torch.full_like(loss, 0.5))
    assert grad.stride() == weight.stride()


# -------------------------------------------------------------------------------- special values


@pytest.mark.fault("B11", "B12", "R14", "R15")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_mean_over_nothing_is_zero(dtype: torch.dtype, device: torch.device) -> None:
    sample = make_sample(dtype=dtype, device=device, bias=True)
    result = run(
        chunked_linear_cross_entropy,
        sample.replace(target=torch.full_like(sample.target, -100)),
        label_smoothing=0.1,
        z_loss=0.1,
        chunk_size=4,
    )
    assert result.loss == 0
    for name in DIFFERENTIABLE:
        assert torch.equal(getattr(result, name), torch.zeros_like(getattr(sample, name)))


@pytest.mark.fault("B13")
@pytest.mark.parametrize("rows", [0, 6])
def test_mean_over_nothing_in_a_rewritten_graph_is_torchs(rows: int, device: torch.device) -> None:
    sample = make_sample(rows, device=device)
    sample = sample.replace(target=torch.full_like(sample.target, -100))
    flags = {f"need_grad_{name}": True for name in ("input", "weight")}

    def op(input: Tensor, weight: Tensor, target: Tensor, bias: None, **options: Any) -> Tensor:
        return torch.ops.greyhound.linear_cross_entropy(
            input, weight, target, empty_mean_is_nan=True, **flags, **options
        )[0]

    def plain(input: Tensor, weight: Tensor, target: Tensor, bias: None, **_: Any) -> Tensor:
        return F.cross_entropy(F.linear(input, weight), target)

    ours, torchs = run(op, sample), run(plain, sample)
    assert ours.loss.isnan()
    assert_equal_results(ours, torchs)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_all_rows_ignored(reduction: str, device: torch.device) -> None:
    sample = make_sample(device=device)
    result = check_against_reference(
        sample.replace(target=torch.full_like(sample.target, -100)), reduction=reduction
    )
    assert not result.loss.any()


@pytest.mark.fault("B28")
@by_reduction
def test_most_chunks_are_wholly_ignored(reduction: str, device: torch.device) -> None:
    # Only the last turn counts: issue B28.
    sample = make_sample(64, device=device, ignored=0.0)
    target = sample.target.clone()
    target[:60] = -100
    result = check_against_reference(
        sample.replace(target=target), reduction=reduction, only_ours={"chunk_size": 4}
    )
    assert result.input[60:].all()


@by_reduction
def test_ignored_rows_may_hold_anything(reduction: str, device: torch.device) -> None:
    sample = make_sample(device=device)
    target = sample.target.clone()
    target[3:5] = -100
    input = sample.input.clone()
    input[3], input[4] = float("nan"), float("inf")
    result = run(
        chunked_linear_cross_entropy,
        sample.replace(input=input, target=target),
        reduction=reduction,
        frozen=("weight",),
        chunk_size=5,
    )
    assert result.loss.isfinite().all()
    assert result.input.isfinite().all()
    assert not result.input[3:5].any()


@by_reduction
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_large_offset(
    offset: float, dtype: torch.dtype, reduction: str, device: torch.device
) -> None:
    sample = make_sample(dtype=dtype, device=device, bias=True)
    sample = sample.replace(bias=sample.bias + offset)
    check_against_reference(sample, reduction=reduction, only_ours={"chunk_size": 5})


@pytest.mark.fault("B72")
@by_reduction
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("which", ["one", "target", "all"])
@pytest.mark.parametrize("value", ["-inf", "inf", "nan"])
def test_logits_that_are_not_finite(
    value: str, which: str, smoothing: float, reduction: str, device: torch.device
) -> None:
    # A masked vocabulary has -inf logits (B72); whatever torch makes of them, so do we.
    sample = make_sample(device=device, bias=True, ignored=0.0)
    bias, target = sample.bias.clone(), sample.target % 10
    bias[{"one": 10, "target": int(target[0]), "all": slice(None)}[which]] = float(value)
    sample = sample.replace(bias=bias, target=target)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    ours = run(chunked_linear_cross_entropy, sample, chunk_size=5, **options)
    torchs = run(reference.linear_cross_entropy, sample, **options)
    assert_equal_results(ours, torchs, rtol=1e-5, atol=1e-5)
    if value == "-inf" and which == "one":
        assert ours.input.isfinite().all()
        assert ours.loss.isfinite().all() == (smoothing == 0.0)


# ------------------------------------------------------------------------------------------ fp16


@pytest.mark.parametrize("accum", ["fp32", "weight"])
@pytest.mark.parametrize("upstream", [1.0, 65536.0], ids=["unscaled", "scaled"])
@by_reduction
def test_fp16_tiny_gradients(
    reduction: str, upstream: float, accum: str, device: torch.device
) -> None:
    # Mean probability 1/V over N rows: 4e-7 is far below fp16's smallest normal number, and the
    # factor of a GradScaler comes only in the backward.
    rows, classes = 2048, 1024
    sample = make_sample(rows, 16, classes, dtype=torch.float16, device=device)
    if reduction != "mean":
        upstream /= rows
    check_against_reference(
        sample,
        reduction=reduction,
        upstream=upstream,
        slack=SLACK[torch.float16] * (4 if accum == "weight" else 1),
        only_ours={"chunk_size": 512, "grad_weight_accum_dtype": accum},
    )


@pytest.mark.parametrize("accum", ["fp32", "weight"])
def test_fp16_mean_fits_where_the_sum_would_not(accum: str, device: torch.device) -> None:
    # N * |input| = 131072, fp16 ends at 65504; the mean of it is 64 at most.
    sample = make_sample(2048, 4, 8, dtype=torch.float16, device=device, ignored=0.0)
    sample = sample.replace(
        input=torch.full_like(sample.input, 64.0),
        weight=torch.zeros_like(sample.weight),
        target=torch.zeros_like(sample.target),
    )
    result = check_against_reference(
        sample,
        slack=4 * SLACK[torch.float16],
        only_ours={"chunk_size": 512, "grad_weight_accum_dtype": accum},
    )
    assert result.weight.isfinite().all()


# -------------------------------------------------------------------------------------- autocast


def _under_autocast(
    function: Callable[..., Tensor], device: torch.device, dtype: torch.dtype
) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast(device.type, dtype):
            return function(*args, **kwargs)

    return call


def _mixed(input_dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> Sample:
    sample = make_sample(device=device, bias=True, class_weight=True)
    return sample.replace(
        input=sample.input.to(input_dtype),
        weight=sample.weight.to(weight_dtype),
        bias=sample.bias.to(weight_dtype),
    )


@pytest.mark.fault("B53", "R08")
@by_reduction
@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
    ids=lambda pair: "-".join(map(dtype_id, pair)),
)
def test_autocast(
    dtypes: tuple[torch.dtype, torch.dtype],
    autocast_dtype: torch.dtype,
    reduction: str,
    device: torch.device,
) -> None:
    sample = _mixed(*dtypes, device)
    ours, plain = (
        run(
            _under_autocast(function, device, autocast_dtype),
            sample,
            reduction=reduction,
            label_smoothing=0.1,
        )
        for function in (chunked_linear_cross_entropy, reference.linear_cross_entropy)
    )
    truth = run(
        reference.linear_cross_entropy, sample.double(), reduction=reduction, label_smoothing=0.1
    )
    assert ours.loss.dtype == torch.float32
    assert_results_match(
        ours, plain, truth, sample, slack=max(SLACK[autocast_dtype], SLACK[dtypes[0]])
    )


@pytest.mark.fault("B53")
@by_reduction
def test_autocast_multiplies_in_its_dtype(reduction: str, device: torch.device) -> None:
    sample = make_sample(device=device)
    cast = run(
        _under_autocast(chunked_linear_cross_entropy, device, torch.bfloat16),
        sample,
        reduction=reduction,
    )
    by_hand = run(chunked_linear_cross_entropy, sample.map(Tensor.bfloat16), reduction=reduction)
    torch.testing.assert_close(cast.loss, by_hand.loss)
    full = run(chunked_linear_cross_entropy, sample, reduction=reduction)
    assert not torch.allclose(cast.loss, full.loss, rtol=1e-5)
    # The fp32 accumulator is the gradient: no rounding to bf16 in between.
    assert not torch.equal(cast.weight, cast.weight.bfloat16().float())


@by_reduction
def test_autocast_leaves_fp64_alone(reduction: str, device: torch.device) -> None:
    sample = make_sample(dtype=torch.float64, device=device)
    cast = run(
        _under_autocast(chunked_linear_cross_entropy, device, torch.bfloat16),
        sample,
        reduction=reduction,
    )
    assert_equal_results(cast, run(chunked_linear_cross_entropy, sample, reduction=reduction))


def test_autocast_that_is_off_changes_nothing(device: torch.device) -> None:
    sample = make_sample(device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=False):
        inside = run(chunked_linear_cross_entropy, sample)
    assert_equal_results(inside, run(chunked_linear_cross_entropy, sample))


def test_autocast_takes_every_argument_by_position(device: torch.device) -> None:
    sample = make_sample(device=device, bias=True)
    op = torch.ops.greyhound.linear_cross_entropy
    tensors = (sample.input, sample.weight, sample.target, sample.bias, None)
    options = (
        -100, "mean", 0.1, 0.01, 0.5, 3.0, False, 4, "weight", None, True, True, True, True,
        torch.rand(13, device=device), torch.tensor(7.0, device=device), True,
    )  # fmt: skip
    names = [argument.name for argument in op.default._schema.arguments[5:]]
    with torch.autocast(device.type, torch.bfloat16):
        by_position = op(*tensors, *options)
        by_name = op(*tensors, **dict(zip(names, options, strict=True)))
    for one, other in zip(by_position, by_name, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# ------------------------------------------------------------------------------ autograd contract


@pytest.mark.fault("B35")
@by_reduction
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_retained_graph(dtype: torch.dtype, reduction: str, device: torch.device) -> None:
    sample = make_sample(dtype=dtype, device=device, bias=True)
    leaves = [getattr(sample, name).detach().requires_grad_() for name in DIFFERENTIABLE]
    loss = chunked_linear_cross_entropy(
        leaves[0], leaves[1], sample.target, leaves[2], reduction=reduction, chunk_size=4
    )
    # Zero first: a factor folded into what is stored would leave nothing for the next (B35).
    results = [
        torch.autograd.grad(loss, leaves, torch.full_like(loss, factor), retain_graph=keep)
        for factor, keep in ((0.0, True), (3.0, True), (1.0, True), (3.0, False))
    ]
    zero, first, one, second = results
    assert not any(grad.any() for grad in zero)
    for a, b, c in zip(first, second, one, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a.double(), 3.0 * c.double(), rtol=2e-2, atol=1e-2)
    with pytest.raises(RuntimeError, match="second time"):
        loss.sum().backward()


@pytest.mark.fault("B33")
@by_reduction
def test_two_heads_share_an_input(reduction: str, device: torch.device) -> None:
    sample = make_sample(dtype=torch.float64, device=device)

    def twice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return function(input, weight, *args, **kwargs) + 0.1 * function(
                2 * input, weight, *args, **kwargs
            )

        return call

    ours, truth = (
        run(twice(function), sample, reduction=reduction)
        for function in (chunked_linear_cross_entropy, reference.linear_cross_entropy)
    )
    assert_equal_results(ours, truth, rtol=1e-10, atol=1e-12)


@by_reduction
def test_gradients_accumulate(reduction: str, device: torch.device) -> None:
    sample = make_sample(device=device)
    weight = sample.weight.detach().requires_grad_()
    for _ in range(3):
        chunked_linear_cross_entropy(
            sample.input, weight, sample.target, reduction=reduction
        ).sum().backward()
    once = run(chunked_linear_cross_entropy, sample, reduction=reduction).weight
    torch.testing.assert_close(weight.grad, 3 * once)


@pytest.mark.fault("B36")
@by_reduction
@pytest.mark.parametrize("frozen", SUBSETS[:-1], ids=lambda names: "+".join(names) or "nothing")
def test_second_derivative_raises(frozen: tuple[str, ...], reduction: str) -> None:
    sample = make_sample(dtype=torch.float64, bias=True)
    leaves = {
        name: getattr(sample, name).detach().requires_grad_(name not in frozen)
        for name in DIFFERENTIABLE
    }
    loss = chunked_linear_cross_entropy(
        leaves["input"], leaves["weight"], sample.target, leaves["bias"], reduction=reduction
    )
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    grads = torch.autograd.grad(loss.sum(), wanted, create_graph=True)
    truth = run(reference.linear_cross_entropy, sample, reduction=reduction, frozen=frozen)
    expected = [grad for grad in (truth.input, truth.weight, truth.bias) if grad is not None]
    for grad, value in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.detach(), value)  # create_graph alone does no harm
        penalty = grad.square().sum() + loss.sum()
        with pytest.raises(NotDifferentiableTwiceError, match="reference"):
            penalty.backward(retain_graph=True)
        for leaf in wanted:
            with pytest.raises(NotDifferentiableTwiceError):
                torch.autograd.grad(grad.sum(), leaf, retain_graph=True)


@by_reduction
def test_second_derivative_through_the_upstream_raises(reduction: str) -> None:
    # The gradient is linear in the upstream: its derivative is not zero either.
    sample = make_sample(dtype=torch.float64)
    input = sample.input.requires_grad_()
    loss = chunked_linear_cross_entropy(input, sample.weight, sample.target, reduction=reduction)
    upstream = torch.ones_like(loss).requires_grad_()
    (grad,) = torch.autograd.grad(loss, input, upstream, create_graph=True)
    with pytest.raises(NotDifferentiableTwiceError):
        torch.autograd.grad(grad.sum(), upstream)


@by_reduction
@pytest.mark.parametrize("transform", ["hessian", "hvp", "vhp"])
def test_functional_second_order_raises(transform: str, reduction: str) -> None:
    sample = make_sample(3, 2, 4, dtype=torch.float64)

    def loss(input: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(
            input, sample.weight, sample.target, reduction=reduction
        ).sum()

    arguments = (sample.input,) if transform == "hessian" else (sample.input, sample.input)
    with pytest.raises(NotDifferentiableTwiceError):
        getattr(torch.autograd.functional, transform)(loss, *arguments)


@by_reduction
@pytest.mark.parametrize("name", ["input", "weight", "bias", "class_weight"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["constant", "leaf"])
def test_forward_mode_raises(requires_grad: bool, name: str, reduction: str) -> None:
    sample = make_sample(bias=True, class_weight=True)
    if requires_grad and name != "class_weight":
        getattr(sample, name).requires_grad_()
    with forward_ad.dual_level():
        value = getattr(sample, name)
        dual = sample.replace(**{name: forward_ad.make_dual(value, torch.ones_like(value))})
        with pytest.raises(ForwardModeError, match="reference"):
            chunked_linear_cross_entropy(
                dual.input,
                dual.weight,
                dual.target,
                dual.bias,
                class_weight=dual.class_weight,
                reduction=reduction,
            )


@pytest.mark.fault("B43")
@by_reduction
@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev", "jvp", "jacfwd", "hessian"])
def test_torch_func_is_right_or_refused(transform: str, reduction: str) -> None:
    sample = make_sample(4, 3, 5, dtype=torch.float64)

    def apply(function: Callable[..., Tensor]) -> list[Tensor]:
        def loss(input: Tensor, weight: Tensor) -> Tensor:
            return function(input, weight, sample.target, reduction=reduction).sum()

        both = (sample.input, sample.weight)
        if transform == "vjp":
            value, pull = torch.func.vjp(loss, *both)
            return [value, *pull(torch.full_like(value, 2.0))]
        if transform == "jvp":
            return list(torch.func.jvp(loss, both, (both[0].cos(), both[1].sin())))
        result = getattr(torch.func, transform)(loss, argnums=(0, 1))(*both)
        return list(torch.utils._pytree.tree_leaves(result))

    expected = apply(reference.linear_cross_entropy)
    try:
        values = apply(chunked_linear_cross_entropy)
    except (RuntimeError, NotImplementedError):
        return
    for value, truth in zip(values, expected, strict=True):
        torch.testing.assert_close(value, truth)


@by_reduction
@pytest.mark.parametrize("in_dims", [(0, None, 0), (0, 0, 0), (None, 0, None), (1, 2, 1)], ids=str)
def test_vmap(in_dims: tuple[int | None, ...], reduction: str, device: torch.device) -> None:
    sample = make_sample(device=device, dtype=torch.float64)
    batched = [
        value if dim is None else torch.stack([value, value.flip(0), value], dim)
        for value, dim in zip((sample.input, sample.weight, sample.target), in_dims, strict=True)
    ]
    values, truths = (
        torch.func.vmap(lambda *args: function(*args, reduction=reduction), in_dims)(*batched)  # noqa: B023
        for function in (
            lambda *args, **kwargs: chunked_linear_cross_entropy(*args, chunk_size=5, **kwargs),
            lambda input, weight, target, reduction: _textbook(input, weight, target, reduction),
        )
    )
    torch.testing.assert_close(values, truths)


def _textbook(input: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
    """Without data-dependent control flow, so that vmap takes it."""
    loss = F.cross_entropy(F.linear(input, weight), target, reduction="none")
    if reduction == "none":
        return loss
    return loss.sum() / ((target != -100).sum() if reduction == "mean" else 1)


@by_reduction
def test_vmap_is_right_or_refused_in_backward(reduction: str) -> None:
    sample = make_sample((2, 7), dtype=torch.float64)
    results = []
    for function in (_textbook, chunked_linear_cross_entropy):
        input, weight = (value.detach().requires_grad_() for value in (sample.input, sample.weight))
        loss = torch.func.vmap(
            lambda x, t: function(x, weight, t, reduction=reduction)  # noqa: B023
        )
        try:
            values = loss(input, sample.target)
            results.append((values, *torch.autograd.grad(values.sum(), (input, weight))))
        except (RuntimeError, NotImplementedError):
            assert function is not _textbook
            return
    for truth, value in zip(*results, strict=True):
        torch.testing.assert_close(value, truth)


@by_reduction
def test_gradient_of_vmap(reduction: str, device: torch.device) -> None:
    sample = make_sample((3, 7), dtype=torch.float64, device=device)

    def grads(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        def total(input: Tensor, weight: Tensor) -> Tensor:
            losses = torch.func.vmap(lambda x, t: function(x, weight, t, reduction=reduction))(
                input, sample.target
            )
            return (
                losses * torch.arange(1, losses.numel() + 1, device=device).view_as(losses)
            ).sum()

        return torch.func.grad(total, (0, 1))(sample.input, sample.weight)  # type: ignore[no-any-return]

    for value, truth in zip(grads(chunked_linear_cross_entropy), grads(_textbook), strict=True):
        torch.testing.assert_close(value, truth)


def test_class_weight_that_needs_a_gradient_is_refused() -> None:
    sample = make_sample(class_weight=True)
    wanting = sample.class_weight.requires_grad_()
    with pytest.raises(ValueError, match="class_weight"):
        chunked_linear_cross_entropy(
            sample.input, sample.weight, sample.target, class_weight=wanting
        )
    with torch.no_grad():
        chunked_linear_cross_entropy(
            sample.input, sample.weight, sample.target, class_weight=wanting
        )


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_op_refuses_a_leaf_whose_gradient_it_was_not_told_to_make(name: str) -> None:
    sample = make_sample(bias=True)
    getattr(sample, name).requires_grad_()
    with pytest.raises(ValueError, match=f"need_grad_{name}"):
        torch.ops.greyhound.linear_cross_entropy(
            sample.input, sample.weight, sample.target, sample.bias
        )


@by_reduction
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_without_gradients(mode: Any, reduction: str, device: torch.device) -> None:
    sample = make_sample(device=device)
    expected = run(chunked_linear_cross_entropy, sample, reduction=reduction).loss
    leaves = [value.detach().requires_grad_() for value in (sample.input, sample.weight)]
    with mode():
        loss = chunked_linear_cross_entropy(*leaves, sample.target, reduction=reduction)
    assert not loss.requires_grad
    assert torch.equal(loss, expected)


@pytest.mark.fault("B30")
@pytest.mark.parametrize("need", ["input", "weight", "bias"])
def test_op_makes_what_it_is_told_and_no_more(need: str) -> None:
    sample = make_sample(bias=True)
    outputs = torch.ops.greyhound.linear_cross_entropy(
        sample.input, sample.weight, sample.target, sample.bias, **{f"need_grad_{need}": True}
    )
    made = dict(zip(DIFFERENTIABLE, outputs[3:6], strict=True))
    assert {name for name, grad in made.items() if grad.numel()} == {need}


# --------------------------------------------------------------------------------- side effects


@pytest.mark.fault("B32", "B34", "B51")
@by_reduction
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_id)
def test_arguments_are_not_written(
    dtype: torch.dtype, case: str, reduction: str, device: torch.device
) -> None:
    wanted, options = CASES[case]
    sample = make_sample(dtype=dtype, device=device, **wanted)
    upstream = (
        torch.randn(13, device=device) if reduction == "none" else torch.tensor(3.0, device=device)
    )
    tensors = [value for value in (*vars(sample).values(), upstream) if isinstance(value, Tensor)]
    copies = [value.clone() for value in tensors]
    versions = [value._version for value in tensors]
    run(
        chunked_linear_cross_entropy,
        sample,
        upstream=upstream,
        reduction=reduction,
        chunk_size=5,
        **options,
    )
    assert [value._version for value in tensors] == versions
    assert all(torch.equal(value, copy) for value, copy in zip(tensors, copies, strict=True))


def test_writing_over_an_input_between_forward_and_backward_is_noticed() -> None:
    sample = make_sample()
    input = sample.input.requires_grad_()
    hidden = input * 1.0
    loss = chunked_linear_cross_entropy(
        hidden, sample.weight.requires_grad_(), sample.target, reduction="none"
    )
    with torch.no_grad():
        hidden.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


@pytest.mark.fault("B92")
@by_reduction
def test_deterministic(reduction: str, device: torch.device) -> None:
    sample = make_sample(64, 32, 257, device=device, bias=True)
    results = [
        run(chunked_linear_cross_entropy, sample, reduction=reduction, chunk_size=10)
        for _ in range(20)
    ]
    for result in results[1:]:
        assert_equal_results(results[0], result)


def test_threads(device: torch.device) -> None:
    samples = [make_sample(20 + index, device=device, bias=True) for index in range(16)]

    def call(sample: Sample) -> Any:
        return run(chunked_linear_cross_entropy, sample, chunk_size=3, reduction="none")

    expected = [call(sample) for sample in samples]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for result, truth in zip(pool.map(call, samples), expected, strict=True):
                assert_equal_results(result, truth)


# ----------------------------------------------------------------------------------- properties


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 12),
    chunk_size=st.integers(1, 14) | st.none(),
    seed=st.integers(0, 2**16),
    reduction=st.sampled_from(REDUCTIONS),
)
def test_permuting_rows_permutes_results(
    rows: int, chunk_size: int | None, seed: int, reduction: str
) -> None:
    torch.manual_seed(seed)
    sample = make_sample(rows, 3, 5, dtype=torch.float64)
    order = torch.randperm(rows)
    shuffled = sample.replace(input=sample.input[order], target=sample.target[order])
    options = {"reduction": reduction, "chunk_size": chunk_size, "z_loss": 0.1}
    before = run(chunked_linear_cross_entropy, sample, **options)
    after = run(chunked_linear_cross_entropy, shuffled, **options)
    expected = before.loss[order] if reduction == "none" else before.loss
    torch.testing.assert_close(after.loss, expected)
    torch.testing.assert_close(after.input, before.input[order])
    torch.testing.assert_close(after.weight, before.weight)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 12),
    sizes=st.tuples(st.integers(1, 14), st.integers(1, 14) | st.none()),
    case=st.sampled_from(sorted(CASES)),
    reduction=st.sampled_from(REDUCTIONS),
)
def test_chunk_size_changes_rounding_only(
    rows: int, sizes: tuple[int, int | None], case: str, reduction: str
) -> None:
    wanted, options = CASES[case]
    sample = make_sample(rows, 3, 5, dtype=torch.float64, **wanted)
    first, second = (
        run(chunked_linear_cross_entropy, sample, reduction=reduction, chunk_size=size, **options)
        for size in sizes
    )
    assert_equal_results(first, second, rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------ bad input

_VECTOR = torch.zeros(7)
BAD_ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "input-list": ("input", {"input": [[1.0]]}),
    "input-none": ("input", {"input": None}),
    "input-int": ("input", {"input": torch.zeros(4, 8, dtype=torch.int64)}),
    "input-complex": ("input", {"input": torch.zeros(4, 8, dtype=torch.complex64)}),
    "input-scalar": ("input", {"input": torch.tensor(1.0)}),
    "input-width": ("input", {"input": torch.zeros(4, 9)}),
    "input-sparse": ("input", {"input": torch.zeros(4, 8).to_sparse()}),
    "weight-none": ("weight", {"weight": None}),
    "weight-int": ("weight", {"weight": torch.zeros(11, 8, dtype=torch.int32)}),
    "weight-flat": ("weight", {"weight": torch.zeros(88)}),
    "weight-3d": ("weight", {"weight": torch.zeros(2, 11, 8)}),
    "weight-empty": ("weight", {"weight": torch.zeros(0, 8)}),
    "weight-and-input-without-width": (
        "weight",
        {"input": torch.zeros(4, 0), "weight": torch.zeros(11, 0)},
    ),
    "weight-dtype": ("weight", {"weight": torch.zeros(11, 8, dtype=torch.bfloat16)}),
    "weight-fp64": ("weight", {"weight": torch.zeros(11, 8, dtype=torch.float64)}),
    "weight-device": ("weight", {"weight": torch.zeros(11, 8, device="meta")}),
    "weight-sparse": ("weight", {"weight": torch.zeros(11, 8).to_sparse()}),
    "target-list": ("target", {"target": [0, 1, 2, 3]}),
    "target-none": ("target", {"target": None}),
    "target-float": ("target", {"target": torch.zeros(4)}),
    "target-int16": ("target", {"target": torch.zeros(4, dtype=torch.int16)}),
    "target-bool": ("target", {"target": torch.zeros(4, dtype=torch.bool)}),
    "target-probabilities": ("target", {"target": torch.zeros(4, 11)}),
    "target-short": ("target", {"target": torch.zeros(3, dtype=torch.int64)}),
    "target-2d": ("target", {"target": torch.zeros(1, 4, dtype=torch.int64)}),
    "target-device": ("target", {"target": torch.zeros(4, dtype=torch.int64, device="meta")}),
    "bias-float": ("bias", {"bias": 1.0}),
    "bias-int": ("bias", {"bias": torch.zeros(11, dtype=torch.int64)}),
    "bias-shape": ("bias", {"bias": _VECTOR}),
    "bias-2d": ("bias", {"bias": torch.zeros(11, 1)}),
    "bias-device": ("bias", {"bias": torch.zeros(11, device="meta")}),
    "class-weight-list": ("class_weight", {"class_weight": [1.0] * 11}),
    "class-weight-int": ("class_weight", {"class_weight": torch.ones(11, dtype=torch.int64)}),
    "class-weight-shape": ("class_weight", {"class_weight": _VECTOR}),
    "class-weight-device": ("class_weight", {"class_weight": torch.zeros(11, device="meta")}),
    "ignore-index-float": ("ignore_index", {"ignore_index": 1.5}),
    "ignore-index-none": ("ignore_index", {"ignore_index": None}),
    "ignore-index-beyond-int64": ("ignore_index", {"ignore_index": 2**70}),
    "reduction-unknown": ("reduction", {"reduction": "avg"}),
    "reduction-none": ("reduction", {"reduction": None}),
    "smoothing-negative": ("label_smoothing", {"label_smoothing": -0.1}),
    "smoothing-above-one": ("label_smoothing", {"label_smoothing": 1.1}),
    "smoothing-nan": ("label_smoothing", {"label_smoothing": float("nan")}),
    "smoothing-string": ("label_smoothing", {"label_smoothing": "little"}),
    "smoothing-none": ("label_smoothing", {"label_smoothing": None}),
    "z-loss-negative": ("z_loss", {"z_loss": -1e-4}),
    "z-loss-nan": ("z_loss", {"z_loss": float("nan")}),
    "z-loss-none": ("z_loss", {"z_loss": None}),
    "scale-none": ("logit_scale", {"logit_scale": None}),
    "scale-nan": ("logit_scale", {"logit_scale": float("nan")}),
    "softcap-zero": ("softcap", {"softcap": 0.0}),
    "softcap-negative": ("softcap", {"softcap": -30.0}),
    "softcap-nan": ("softcap", {"softcap": float("nan")}),
    "softcap-infinite": ("softcap", {"softcap": float("inf")}),
    "softcap-string": ("softcap", {"softcap": "none"}),
    "chunk-size-zero": ("chunk_size", {"chunk_size": 0}),
    "chunk-size-negative": ("chunk_size", {"chunk_size": -4}),
    "chunk-size-float": ("chunk_size", {"chunk_size": 2.5}),
    "chunk-size-bool": ("chunk_size", {"chunk_size": True}),
    "chunk-size-string": ("chunk_size", {"chunk_size": "4"}),
    "accum-unknown": ("grad_weight_accum_dtype", {"grad_weight_accum_dtype": "bf16"}),
    "accum-dtype": ("grad_weight_accum_dtype", {"grad_weight_accum_dtype": torch.float32}),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_argument(case: str) -> None:
    name, changes = BAD_ARGUMENTS[case]
    arguments = {
        "input": torch.randn(4, 8),
        "weight": torch.randn(11, 8),
        "target": torch.tensor([0, 1, -100, 10]),
        **changes,
    }
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b.*expected"):
        chunked_linear_cross_entropy(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["input", "weight", "target", "bias", "class_weight"])
def test_bad_device(name: str) -> None:
    sample = make_sample(device="cuda", bias=True, class_weight=True)
    sample = sample.replace(**{name: getattr(sample, name).cpu()})
    with pytest.raises(ValueError, match="on the device of input"):
        chunked_linear_cross_entropy(
            sample.input, sample.weight, sample.target, sample.bias,
            class_weight=sample.class_weight,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["label_smoothing", "softcap", "z_loss"])
def test_bad_option_of_the_backward_op(name: str) -> None:
    sample = make_sample()
    with pytest.raises(ValueError, match=name):
        torch.ops.greyhound.linear_cross_entropy_backward(
            torch.ones(13),
            sample.input,
            sample.weight,
            sample.target,
            torch.ones(13),
            **{name: -1.0},
        )


def test_need_grad_bias_without_a_bias() -> None:
    sample = make_sample()
    with pytest.raises(ValueError, match="need_grad_bias"):
        torch.ops.greyhound.linear_cross_entropy(
            sample.input, sample.weight, sample.target, need_grad_bias=True
        )


@pytest.mark.fault("B16", "R04")
@by_reduction
@pytest.mark.parametrize("shape", [(13,), (1, 13)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=dtype_id)
@pytest.mark.parametrize("value", [11, -1, -101, 2**31 - 1])
def test_target_out_of_range_on_cpu(
    value: int, dtype: torch.dtype, shape: tuple[int, ...], reduction: str
) -> None:
    sample = make_sample(shape, class_weight=True)
    target = sample.target.to(dtype)
    target.view(-1)[7] = value
    with pytest.raises(TargetOutOfRangeError, match=rf"got {value} in row 7") as raised:
        chunked_linear_cross_entropy(
            sample.input,
            sample.weight,
            target,
            reduction=reduction,
            class_weight=sample.class_weight,
        )
    # Code that catches torch's error catches ours.
    assert isinstance(raised.value, IndexError)
    assert isinstance(raised.value, ValueError)


@pytest.mark.fault("B15")
def test_negative_target_beside_a_negative_ignore_index() -> None:
    # Issue B15: -4 is not -1.
    sample = make_sample(ignored=0.0)
    target = sample.target.clone()
    target[2], target[3] = -4, -1
    with pytest.raises(TargetOutOfRangeError, match="got -4 in row 2"):
        chunked_linear_cross_entropy(sample.input, sample.weight, target, ignore_index=-1)


def test_target_checks_do_not_depend_on_the_setting_on_cpu() -> None:
    sample = make_sample()
    with config.override(checks=False), pytest.raises(TargetOutOfRangeError):
        chunked_linear_cross_entropy(
            sample.input, sample.weight, torch.full_like(sample.target, 11)
        )


# ----------------------------------------------------------------- what the op must not hold on to


@pytest.mark.parametrize("frozen", [("weight",), ("input",), ()], ids=["head", "input", "none"])
def test_operands_may_change_after_the_loss(frozen: tuple[str, ...]) -> None:
    # Gradients of a scalar loss are made: nothing is read again, so nothing is kept from changing.
    sample = make_sample(bias=True)
    expected = run(chunked_linear_cross_entropy, sample, frozen=(*frozen, "bias"))
    leaves = {
        name: getattr(sample, name).clone().requires_grad_(name not in frozen)
        for name in ("input", "weight")
    }
    bias = sample.bias.clone()
    held = {name: value * 1 for name, value in leaves.items()}
    loss = chunked_linear_cross_entropy(held["input"], held["weight"], sample.target, bias)
    for value in (*held.values(), bias):
        with torch.no_grad():
            value.zero_()
    loss.backward()
    for name, value in leaves.items():
        if name not in frozen:
            assert relative_error(value.grad, getattr(expected, name)) < 1e-5


def test_input_is_not_kept_alive_for_the_backward() -> None:
    sample = make_sample()
    hidden = sample.input.clone().requires_grad_() * 1
    alive = weakref.ref(hidden.untyped_storage())
    loss = chunked_linear_cross_entropy(hidden, sample.weight, sample.target)
    del hidden
    assert loss.requires_grad
    assert alive() is None


@pytest.mark.parametrize("weights", [False, True], ids=["scale", "class-weight"])
def test_fp16_large_factors(weights: bool) -> None:
    # 256 times 300 is beyond fp16: the gain of its logits gradients must make room.
    sample = make_sample(dtype=torch.float16, class_weight=weights)
    options = {} if weights else {"logit_scale": 300.0}
    if weights:
        sample = sample.replace(class_weight=sample.class_weight * 300)
    check_against_reference(sample, reduction="mean", **options)
    check_against_reference(sample, reduction="none", frozen=("weight",), **options)


def test_statistics_of_another_call_are_refused() -> None:
    sample = make_sample()
    with pytest.raises(ValueError, match=r"\bstatistics\b.*expected"):
        torch.ops.greyhound.linear_cross_entropy_backward(
            torch.ones(13), sample.input, sample.weight, sample.target, torch.ones(13)
        )


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_small_z_loss_keeps_its_digits_where_a_row_is_certain(
    kernels: str, kernel_device: torch.device
) -> None:
    # With one class p is 1, the cross entropy's own gradient is 0 and what is left is the
    # z-loss's: taken from a sum of the two, 3e-5 of it was lost.
    sample = make_sample(5, 8, 1, ignored=0.0, device=kernel_device)
    with config.override(kernels=kernels):
        check_against_reference(sample, z_loss=1e-4, upstream=1.7)


@pytest.mark.parametrize(
    ("dtype", "options", "mib"),
    [
        (torch.bfloat16, {}, 256),
        (torch.bfloat16, {"label_smoothing": 0.1}, 256),
        (torch.float32, {}, 256),
        (torch.bfloat16, {"need_grad_weight": True}, 512),
    ],
)
def test_planned_rows(dtype: torch.dtype, options: dict[str, Any], mib: int) -> None:
    with FakeTensorMode():  # of a GPU, whether there is one or not
        input = torch.empty(65536, 64, dtype=dtype, device="cuda")
        weight = torch.empty(32768, 64, dtype=dtype, device="cuda")
        target = torch.empty(65536, dtype=torch.int64, device="cuda")
        call = OP.named((input, weight, target), {"need_grad_input": True, **options})
        rows = planned_rows(call)
    assert rows * 32768 * dtype.itemsize == mib * 2**20


@pytest.mark.gpu
def test_planned_rows_beside_a_sum_in_two_halves() -> None:
    # Halves of 1 GiB each: chunks as large as both, on a GPU whose products leave them there.
    products = pytest.importorskip("greyhound_ops.kernels.products")
    if not products.has_tensor_memory_accelerator(torch.device("cuda", 0)):
        pytest.skip("needs a GPU with tensor memory accelerators and 227 KiB of shared memory")
    with FakeTensorMode():
        input = torch.empty(65536, 4096, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(131072, 4096, dtype=torch.bfloat16, device="cuda")
        target = torch.empty(65536, dtype=torch.int64, device="cuda")
        call = OP.named((input, weight, target), {"need_grad_weight": True})
        assert planned_rows(call) == 2**31 // (2 * 131072)
