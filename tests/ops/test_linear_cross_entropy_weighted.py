"""Row weights, the caller's denominator, and the further outputs of linear_cross_entropy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops import functional, modules, reference
from greyhound_ops.errors import NotDifferentiableTwiceError
from greyhound_ops.testing import assert_within_budget
from samples import (
    CASES,
    DIFFERENTIABLE,
    LAYOUTS,
    REDUCTIONS,
    SLACK,
    Sample,
    dtype_id,
    make_sample,
    run,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = ("loss", "z_loss", "lse")

by_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
by_case = pytest.mark.parametrize("case", CASES)


def outputs_and_gradients(
    function: Any,
    sample: Sample,
    upstreams: dict[str, Tensor],
    frozen: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, Tensor | None]:
    """Outputs by name and gradients by ``grad_`` and name, for an upstream of each output."""
    leaves = {
        name: None
        if getattr(sample, name) is None
        else getattr(sample, name).detach().requires_grad_(name not in frozen)
        for name in DIFFERENTIABLE
    }
    made = function(
        leaves["input"], leaves["weight"], sample.target, leaves["bias"],
        class_weight=sample.class_weight, **options,
    )  # fmt: skip
    made = dict(zip(NAMES, (made,) if isinstance(made, Tensor) else made, strict=False))
    used = {name: value for name, value in upstreams.items() if made.get(name) is not None}
    if any(made[name].requires_grad for name in used):
        torch.autograd.backward(
            [made[name] for name in used],
            [used[name].to(made[name].dtype) for name in used],
        )
    return {
        **{name: None if value is None else value.detach() for name, value in made.items()},
        **{f"grad_{name}": None if leaf is None else leaf.grad for name, leaf in leaves.items()},
    }


def compare(
    sample: Sample,
    row_weight: Tensor | None = None,
    *,
    upstreams: dict[str, Tensor] | None = None,
    frozen: tuple[str, ...] = (),
    only_ours: dict[str, Any] | None = None,
    function: Any = functional.chunked_linear_cross_entropy,
    **options: Any,
) -> dict[str, Tensor | None]:
    """Compare every output and gradient with fp64, as close as plain torch comes."""
    upstreams = upstreams or {"loss": torch.tensor(-1.7)}
    wide = None if row_weight is None else row_weight.double()
    ours = outputs_and_gradients(
        function, sample, upstreams, frozen, row_weight=row_weight, **options, **(only_ours or {})
    )
    plain = outputs_and_gradients(
        reference.linear_cross_entropy, sample, upstreams, frozen, row_weight=row_weight, **options
    )
    truth = outputs_and_gradients(
        reference.linear_cross_entropy, sample.double(), upstreams, frozen, row_weight=wide,
        **options,
    )  # fmt: skip
    for name, expected in truth.items():
        if expected is None:
            assert ours[name] is None, name
            continue
        dtype = sample.input.dtype
        slack = SLACK[dtype] if name.startswith("grad_") else min(SLACK[dtype], 1e-6)
        assert_within_budget(name, ours[name], plain[name], expected, slack=slack)
    return ours


def upstream_of(reduction: str, rows: int, device: torch.device) -> Tensor:
    if reduction == "none":
        return torch.randn(rows, device=device)
    return torch.tensor(-1.7, device=device)


@pytest.mark.fault("B90")
@by_reduction
@by_case
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_row_weight(dtype: torch.dtype, case: str, reduction: str, device: torch.device) -> None:
    if dtype == torch.float64 and device.type == "cuda":
        pytest.skip("needs the CPU: float64 has no kernel and takes the same path there")
    wanted, options = CASES[case]
    sample = make_sample(dtype=dtype, device=device, **wanted)
    weight = torch.randn(13, device=device, dtype=dtype)
    compare(
        sample,
        weight,
        upstreams={"loss": upstream_of(reduction, 13, device)},
        reduction=reduction,
        only_ours={"chunk_size": 5},
        **options,
    )


@pytest.mark.parametrize("frozen", [("weight", "bias"), ("input",), DIFFERENTIABLE], ids=len)
@by_reduction
def test_row_weight_frozen(reduction: str, frozen: tuple[str, ...], device: torch.device) -> None:
    sample = make_sample(device=device, bias=True)
    compare(
        sample,
        torch.rand(13, device=device),
        upstreams={"loss": upstream_of(reduction, 13, device)},
        frozen=frozen,
        reduction=reduction,
        only_ours={"chunk_size": 4},
    )


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_row_weight_on_the_path_of_exponentials(reduction: str) -> None:
    device = torch.device("cuda")
    sample = make_sample(200, 64, 1000, dtype=torch.bfloat16, device=device)
    compare(
        sample,
        torch.randn(200, device=device),
        upstreams={"loss": torch.tensor(2.5, device=device)},
        frozen=("weight",),
        reduction=reduction,
        z_loss=1e-2,
    )


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_layouts_of_the_row_weight(reduction: str, layout: str, device: torch.device) -> None:
    shape = (3, 4) if "transposed" in layout else (12,)
    sample = make_sample(shape, device=device)
    weight = LAYOUTS[layout](torch.rand(shape, device=device))
    upstream = torch.randn(shape, device=device) if reduction == "none" else torch.tensor(3.0)
    compare(
        sample,
        weight,
        upstreams={"loss": upstream.to(device)},
        reduction=reduction,
        only_ours={"chunk_size": 5},
    )


def test_weights_of_ones_change_nothing(device: torch.device) -> None:
    sample = make_sample(device=device, bias=True)
    plain = run(functional.chunked_linear_cross_entropy, sample, chunk_size=4)
    ones = run(
        functional.chunked_linear_cross_entropy, sample, chunk_size=4,
        row_weight=torch.ones(13, device=device),
    )  # fmt: skip
    torch.testing.assert_close(plain.loss, ones.loss)
    for name in DIFFERENTIABLE:
        torch.testing.assert_close(getattr(plain, name), getattr(ones, name))


@by_reduction
def test_a_nan_weight_of_an_ignored_row_counts_nowhere(
    reduction: str, device: torch.device
) -> None:
    sample = make_sample(device=device)
    ignored = sample.target == -100
    assert ignored.any()
    weight = torch.rand(13, device=device).masked_fill(ignored, float("nan"))
    result = run(
        functional.chunked_linear_cross_entropy, sample, row_weight=weight, reduction=reduction,
        chunk_size=4,
    )  # fmt: skip
    assert result.loss.isfinite().all()
    assert result.input.isfinite().all()
    assert result.weight.isfinite().all()
    assert not result.input[ignored].any()


def test_fp16_row_weights_beyond_its_range(device: torch.device) -> None:
    sample = make_sample(64, 8, 50, dtype=torch.float16, device=device)
    weight = torch.full((64,), 5e3, device=device)
    compare(
        sample, weight, upstreams={"loss": torch.tensor(1.0, device=device)}, reduction="mean",
        only_ours={"chunk_size": 16},
    )  # fmt: skip


@pytest.mark.fault("B88")
@pytest.mark.parametrize("kind", [int, float, torch.tensor])
@pytest.mark.parametrize("case", ["plain", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_id)
def test_denominator(dtype: torch.dtype, case: str, kind: Any, device: torch.device) -> None:
    wanted, options = CASES[case]
    sample = make_sample(dtype=dtype, device=device, **wanted)
    denominator = kind(37)
    if isinstance(denominator, Tensor):
        denominator = denominator.to(device)
    compare(sample, denominator=denominator, only_ours={"chunk_size": 5}, **options)
    compare(
        sample, torch.rand(13, device=device), denominator=denominator,
        only_ours={"chunk_size": 5}, **options,
    )  # fmt: skip


def test_denominator_over_no_row(device: torch.device) -> None:
    sample = make_sample(device=device, ignored=2.0)
    sample.target[0] = -100
    result = run(functional.chunked_linear_cross_entropy, sample, denominator=5)
    assert result.loss == 0
    assert not result.input.any()
    assert not result.weight.any()


@pytest.mark.fault("B68")
@by_reduction
@by_case
def test_further_outputs(case: str, reduction: str, device: torch.device) -> None:
    wanted, options = CASES[case]
    for dtype in DTYPES if device.type == "cpu" else DTYPES[1:]:
        sample = make_sample(dtype=dtype, device=device, **wanted)
        # fp16 alone rounds an upstream of 1/N times a probability to two bits; a GradScaler's does
        # not.
        scale = 64.0 if dtype == torch.float16 else 1.0
        made = compare(
            sample,
            torch.rand(13, device=device),
            upstreams={
                "loss": upstream_of(reduction, 13, device) * scale,
                "lse": torch.randn(13, device=device) * scale,
            },
            reduction=reduction,
            return_z_loss=True,
            return_lse=True,
            only_ours={"chunk_size": 5},
            **options,
        )
        assert not made["lse"][sample.target == -100].any()


@pytest.mark.fault("B08", "B68")
@pytest.mark.parametrize("used", ["loss", "lse"])
@by_reduction
def test_one_of_the_outputs_used(used: str, reduction: str, device: torch.device) -> None:
    sample = make_sample((3, 4), device=device, bias=True)
    shape = (3, 4) if used == "lse" or reduction == "none" else ()
    compare(
        sample,
        upstreams={used: torch.randn(shape, device=device)},
        reduction=reduction,
        return_lse=True,
        only_ours={"chunk_size": 5},
    )


@pytest.mark.parametrize("frozen", [("weight", "bias"), ("input",), DIFFERENTIABLE], ids=len)
def test_lse_frozen(frozen: tuple[str, ...], device: torch.device) -> None:
    sample = make_sample(device=device, bias=True)
    compare(
        sample,
        upstreams={"loss": torch.tensor(0.5), "lse": torch.randn(13, device=device)},
        frozen=frozen,
        return_lse=True,
        only_ours={"chunk_size": 4},
    )


def test_z_loss_value_costs_no_second_projection(device: torch.device) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    sample = make_sample(device=device)
    counts = []
    for options in ({}, {"return_z_loss": True}):
        with FlopCounterMode(display=False) as counter:
            outputs_and_gradients(
                functional.chunked_linear_cross_entropy, sample,
                {"loss": torch.tensor(1.0, device=device)}, z_loss=0.1, **options,
            )  # fmt: skip
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@by_reduction
def test_compiled(reduction: str, dynamic: bool, device: torch.device) -> None:
    def function(*args: Any, **kwargs: Any) -> Any:
        return functional.chunked_linear_cross_entropy(*args, **kwargs)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (13, 17):
        compare(
            make_sample(rows, device=device, bias=True),
            torch.rand(rows, device=device),
            upstreams={
                "loss": upstream_of(reduction, rows, device),
                "lse": torch.randn(rows, device=device),
            },
            function=compiled,
            reduction=reduction,
            z_loss=1e-2,
            return_z_loss=True,
            return_lse=True,
            only_ours={"chunk_size": 5},
            **({"denominator": 23} if reduction == "mean" else {}),
        )


def test_second_derivative_of_the_lse_is_refused() -> None:
    sample = make_sample()
    input = sample.input.requires_grad_()
    lse = functional.chunked_linear_cross_entropy(
        input, sample.weight, sample.target, return_lse=True
    ).lse
    (grad,) = torch.autograd.grad(lse.sum(), input, create_graph=True)
    with pytest.raises(NotDifferentiableTwiceError):
        grad.sum().backward()


@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=["all", "weight frozen"])
@by_reduction
def test_opcheck(reduction: str, frozen: tuple[str, ...]) -> None:
    sample = make_sample(bias=True)
    tensors = [
        getattr(sample, name).detach().requires_grad_(name not in frozen)
        for name in ("input", "weight", "bias")
    ]
    flags = {f"need_grad_{name}": name not in frozen for name in ("input", "weight", "bias")}
    divisor = torch.tensor(3.0) if reduction == "mean" else None
    for return_lse in (False, True):
        torch.library.opcheck(
            torch.ops.greyhound.linear_cross_entropy.default,
            (tensors[0], tensors[1], sample.target, tensors[2]),
            {
                **flags, "reduction": reduction, "row_weight": torch.rand(13), "divisor": divisor,
                "return_lse": return_lse, "chunk_size": 5,
            },
        )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"row_weight": torch.rand(12)}, ValueError, r"row_weight: expected shape \[13\]"),
        ({"row_weight": torch.ones(13, dtype=torch.int64)}, TypeError, "row_weight: expected"),
        ({"row_weight": 2.0}, TypeError, "row_weight: expected a tensor, got float"),
        ({"row_weight": torch.ones(13, requires_grad=True)}, ValueError, "row_weight: .* detach"),
        ({"denominator": "7"}, TypeError, "denominator: expected a number"),
        ({"denominator": True}, TypeError, "denominator: expected a number"),
        ({"denominator": torch.ones(2)}, ValueError, r"denominator: .* got shape \[2\]"),
        ({"denominator": 3, "reduction": "sum"}, ValueError, "denominator: .*reduction='sum'"),
        (
            {"denominator": torch.ones((), requires_grad=True)},
            ValueError,
            "denominator: expected a tensor that needs no gradient",
        ),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    sample = make_sample()
    with pytest.raises(error, match=message):
        functional.chunked_linear_cross_entropy(
            sample.input, sample.weight, sample.target, **options
        )


def test_module(device: torch.device) -> None:
    sample = make_sample(device=device)
    module = modules.ChunkedLinearCrossEntropyLoss(z_loss=1e-2, return_z_loss=True, return_lse=True)
    weight = torch.rand(13, device=device)
    made = module(sample.input, sample.weight, sample.target, row_weight=weight, denominator=9)
    expected = functional.chunked_linear_cross_entropy(
        sample.input, sample.weight, sample.target, z_loss=1e-2, return_z_loss=True,
        return_lse=True, row_weight=weight, denominator=9,
    )  # fmt: skip
    assert isinstance(made, functional.CrossEntropyOutput)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
