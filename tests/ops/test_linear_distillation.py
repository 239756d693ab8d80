from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from greyhound_ops import config, modules, reference
from greyhound_ops.errors import (
    ForwardModeError,
    NotDifferentiableTwiceError,
    TargetOutOfRangeError,
)
from greyhound_ops.functional import chunked_linear_distillation
from greyhound_ops.testing import assert_within_budget, peak_memory
from samples import (
    DIFFERENTIABLE,
    DTYPES,
    LAYOUTS,
    REDUCTIONS,
    SLACK,
    Result,
    dtype_id,
    kept_gradients,
)

OP = torch.ops.greyhound.linear_distillation
OP_BACKWARD = torch.ops.greyhound.linear_distillation_backward
DIVERGENCES = ("jsd", "kl", "reverse_kl", "tvd", "cosine")
REDUCED = (torch.float32, torch.bfloat16, torch.float16)
by_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)
by_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Arguments of ``linear_distillation`` in its order."""

    input: Tensor
    weight: Tensor
    teacher_input: Tensor
    teacher_weight: Tensor
    target: Tensor | None = None
    bias: Tensor | None = None
    teacher_bias: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Pair:
        """The same with a function applied to every floating-point tensor."""
        values = {
            name: function(value) if value is not None and value.is_floating_point() else value
            for name, value in vars(self).items()
        }
        return Pair(**values)

    def replace(self, **changes: Any) -> Pair:
        return dataclasses.replace(self, **changes)


def make_pair(
    rows: int | tuple[int, ...] = 13,
    hidden: int = 8,
    classes: int = 11,
    *,
    teacher_hidden: int = 6,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    bias: bool = False,
    target: bool = True,
    ignored: float = 0.25,
    ignore_index: int = -100,
) -> Pair:
    """Random arguments; about a quarter of the rows, but never the first, is ignored."""
    shape = (rows,) if isinstance(rows, int) else rows
    options = {"dtype": dtype, "device": device}
    labels = torch.randint(0, classes, shape, device=device)
    drop = torch.rand(shape, device=device) < ignored
    if drop.numel():
        drop.view(-1)[0] = False
    return Pair(
        torch.randn(*shape, hidden, **options) / hidden**0.5,
        torch.randn(classes, hidden, **options),
        torch.randn(*shape, teacher_hidden, **options) / teacher_hidden**0.5,
        torch.randn(classes, teacher_hidden, **options),
        labels.masked_fill(drop, ignore_index) if target else None,
        torch.randn(classes, **options) if bias else None,
        torch.randn(classes, **options) if bias else None,
    )


def run(
    function: Callable[..., Any],
    pair: Pair,
    *,
    upstream: Tensor | float | None = None,
    frozen: Collection[str] = (),
    **options: Any,
) -> Result:
    """Loss and gradients of the student's tensors, None for frozen ones."""
    values = dict(vars(pair))
    for name in DIFFERENTIABLE:
        if values[name] is not None:
            values[name] = values[name].detach().requires_grad_(name not in frozen)
    loss = function(*values.values(), **options)
    if loss.requires_grad:
        if not isinstance(upstream, Tensor):
            upstream = torch.full_like(loss, 1.0 if upstream is None else upstream)
        loss.backward(upstream.to(loss.dtype))
    grads = {name: None if values[name] is None else values[name].grad for name in DIFFERENTIABLE}
    return Result(loss.detach(), **grads)


def check(
    pair: Pair,
    *,
    slack: float | None = None,
    loss_slack: float = 1e-6,
    function: Callable[..., Any] = chunked_linear_distillation,
    only_ours: dict[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Loss and every gradient against fp64, as close as plain torch comes at this dtype."""
    dtype = pair.input.dtype
    slack = SLACK[dtype] if slack is None else slack
    if dtype == torch.float64:
        loss_slack = slack
    ours = run(function, pair, **options, **(only_ours or {}))
    plain = run(reference.linear_distillation, pair, **options)
    truth = run(reference.linear_distillation, pair.map(Tensor.double), **options)
    assert ours.loss.dtype == torch.promote_types(plain.loss.dtype, torch.float32)
    assert_within_budget("loss", ours.loss, plain.loss, truth.loss, slack=loss_slack)
    for name in DIFFERENTIABLE:
        value, expected = getattr(ours, name), getattr(truth, name)
        if expected is None:
            assert value is None, f"{name} got a gradient that nobody asked for"
            continue
        assert value is not None, f"{name} got no gradient"
        assert value.dtype == getattr(pair, name).dtype
        assert_within_budget(f"grad_{name}", value, getattr(plain, name), expected, slack=slack)
    return ours


def assert_same(first: Result, second: Result, **tolerances: float) -> None:
    tolerances = tolerances or {"rtol": 0.0, "atol": 0.0}
    for name in ("loss", *DIFFERENTIABLE):
        one, other = getattr(first, name), getattr(second, name)
        if one is None or other is None:
            assert one is other, name
        else:
            torch.testing.assert_close(one, other, **tolerances, equal_nan=True)


# Every option with a value that changes the result.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tempered": {"temperature": 2.5},
    "sharpened": {"temperature": 0.5, "soft_weight": 0.3},
    "hard": {"hard_weight": 0.7, "soft_weight": 0.4},
    "hard-tempered": {"hard_weight": 0.7, "soft_weight": 0.4, "temperature": 2.0},
}
by_case = pytest.mark.parametrize("case", CASES)


# ------------------------------------------------------------------------------ loss, gradients


@by_dtype
@by_divergence
@by_case
def test_options(case: str, divergence: str, dtype: torch.dtype, device: torch.device) -> None:
    # Every pair of the five; reduction turns with them.
    reduction = REDUCTIONS[(list(CASES).index(case) + DTYPES.index(dtype)) % 3]
    check(
        make_pair(dtype=dtype, device=device, bias=True),
        divergence=divergence,
        beta=0.3,
        reduction=reduction,
        upstream=-1.7,
        only_ours={"chunk_size": 5},
        **CASES[case],
    )


@by_reduction
@by_divergence
def test_gradients_by_finite_differences(divergence: str, reduction: str) -> None:
    # The reference is differentiated by autograd and could be as wrong as what it judges.
    pair = make_pair(4, 3, 5, dtype=torch.float64, bias=True)
    options = {"divergence": divergence, "beta": 0.3, "temperature": 1.5, "hard_weight": 0.4}

    def loss(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        call = pair.replace(input=input, weight=weight, bias=bias)
        return chunked_linear_distillation(
            *vars(call).values(), reduction=reduction, chunk_size=3, **options
        )

    leaves = [getattr(pair, name).requires_grad_() for name in DIFFERENTIABLE]
    assert torch.autograd.gradcheck(loss, leaves)


@by_reduction
@pytest.mark.parametrize("beta", [0.0, 1e-3, 0.1, 0.9, 0.999, 1.0])
def test_beta(beta: float, reduction: str, device: torch.device) -> None:
    pair = make_pair(device=device)
    result = check(pair, beta=beta, reduction=reduction)
    ends = {0.0: "kl", 1.0: "reverse_kl"}
    if beta in ends:
        named = run(chunked_linear_distillation, pair, divergence=ends[beta], reduction=reduction)
        assert_same(result, named)


def test_directions_are_those_of_torch() -> None:
    # F.kl_div(log q, log p) is KL(P || Q), that of the teacher: TRL's and Liger's beta = 0.
    pair = make_pair(target=False, dtype=torch.float64)
    log_q = (pair.input @ pair.weight.t()).log_softmax(-1)
    log_p = (pair.teacher_input @ pair.teacher_weight.t()).log_softmax(-1)
    kl_div = torch.nn.functional.kl_div
    forward = kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    reverse = kl_div(log_p, log_q, log_target=True, reduction="batchmean")
    assert not torch.isclose(forward, reverse)
    for options, expected in (
        ({"divergence": "kl"}, forward),
        ({"beta": 0.0}, forward),
        ({"divergence": "reverse_kl"}, reverse),
        ({"beta": 1.0}, reverse),
    ):
        loss = chunked_linear_distillation(*vars(pair).values(), **options)
        torch.testing.assert_close(loss, expected)


def test_no_factor_of_the_squared_temperature() -> None:
    pair = make_pair()
    plain = run(chunked_linear_distillation, pair, temperature=2.0)
    hinton = run(chunked_linear_distillation, pair, temperature=2.0, soft_weight=4.0)
    assert_same(
        Result(*(4.0 * each if each is not None else None for each in vars(plain).values())),
        hinton,
        rtol=1e-6,
        atol=1e-7,
    )


@by_dtype
@pytest.mark.parametrize("chunk_size", [1, 5, 6, 12, 100, None])
def test_chunk_sizes(chunk_size: int | None, dtype: torch.dtype, device: torch.device) -> None:
    reduction = REDUCTIONS[(chunk_size or 0) % 3]
    check(
        make_pair(12, dtype=dtype, device=device, bias=True),
        reduction=reduction,
        only_ours={"chunk_size": chunk_size},
    )


def test_chunk_budget_cuts_the_rows(device: torch.device) -> None:
    pair = make_pair(40, classes=16, dtype=torch.float64, device=device)
    with config.override(chunk_budget_bytes=3 * 16 * 8 * 8):
        check(pair)


@by_reduction
@pytest.mark.parametrize(
    "frozen",
    [(), ("input",), ("weight",), ("bias",), ("weight", "bias"), ("input", "weight"),
     DIFFERENTIABLE],
    ids=lambda names: "+".join(names) or "nothing",
)  # fmt: skip
def test_frozen(frozen: tuple[str, ...], reduction: str, device: torch.device) -> None:
    for dtype in REDUCED:
        pair = make_pair(dtype=dtype, device=device, bias=True)
        result = check(
            pair, reduction=reduction, frozen=frozen, upstream=0.3, only_ours={"chunk_size": 4}
        )
        assert all((getattr(result, name) is None) == (name in frozen) for name in DIFFERENTIABLE)


@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("input",)], ids="-".join)
@pytest.mark.parametrize("layout", ["random", "strided", "column", "expanded", "zero"])
def test_upstream_by_row(layout: str, frozen: tuple[str, ...], device: torch.device) -> None:
    upstream = {
        "random": torch.randn(13, device=device),
        "strided": torch.randn(26, device=device)[::2],
        "column": torch.randn(13, 2, device=device)[:, 1],
        "expanded": torch.tensor(0.7, device=device).expand(13),
        "zero": torch.zeros(13, device=device),
    }[layout]
    dtypes = (*REDUCED, torch.float32, torch.bfloat16)
    for divergence, dtype in zip(DIVERGENCES, dtypes, strict=True):
        check(
            make_pair(dtype=dtype, device=device, bias=True),
            divergence=divergence,
            reduction="none",
            frozen=frozen,
            upstream=upstream,
            hard_weight=0.5,
            only_ours={"chunk_size": 5},
        )


@pytest.mark.fault("R11")
@pytest.mark.parametrize("accum", ["fp32", "weight"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_accumulation(reduction: str, accum: str, device: torch.device) -> None:
    chunks = 8
    for dtype in DTYPES:
        check(
            make_pair(64, dtype=dtype, device=device),
            reduction=reduction,
            # Each chunk rounds the sum once more when it is kept in the weight's own dtype.
            slack=SLACK[dtype] * (chunks if accum == "weight" else 1),
            only_ours={"chunk_size": 64 // chunks, "grad_weight_accum_dtype": accum},
        )


# --------------------------------------------------------------------------------- the teacher


@by_reduction
@pytest.mark.parametrize("teacher_dtype", DTYPES, ids=dtype_id)
def test_teacher_dtype_is_its_own(
    teacher_dtype: torch.dtype, reduction: str, device: torch.device
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pair = make_pair(dtype=dtype, device=device, bias=True)
        teacher = {
            name: getattr(pair, name).to(teacher_dtype)
            for name in ("teacher_input", "teacher_weight", "teacher_bias")
        }
        check(pair.replace(**teacher), reduction=reduction, only_ours={"chunk_size": 5})


@by_reduction
def test_teacher_that_requires_grad_gets_none(reduction: str) -> None:
    pair = make_pair(bias=True)
    expected = run(chunked_linear_distillation, pair, reduction=reduction)
    names = ("teacher_input", "teacher_weight", "teacher_bias")
    wanting = {name: getattr(pair, name).clone().requires_grad_() for name in names}
    result = run(chunked_linear_distillation, pair.replace(**wanting), reduction=reduction)
    assert_same(result, expected)
    assert all(leaf.grad is None for leaf in wanting.values())
    # With a frozen student there is nothing left to differentiate.
    loss = chunked_linear_distillation(*vars(pair.replace(**wanting)).values())
    assert not loss.requires_grad


@pytest.mark.parametrize("name", ["teacher_input", "teacher_weight", "teacher_bias"])
def test_op_refuses_a_teacher_that_requires_grad(name: str) -> None:
    pair = make_pair(bias=True)
    getattr(pair, name).requires_grad_()
    with pytest.raises(ValueError, match=f"{name}: expected a tensor that needs no gradient"):
        OP(*vars(pair).values())


def test_heads_may_be_one() -> None:
    pair = make_pair(teacher_hidden=8, dtype=torch.float64)
    truth = run(reference.linear_distillation, pair.replace(teacher_weight=pair.weight.clone()))
    weight = pair.weight.clone().requires_grad_()
    shared = pair.replace(weight=weight, teacher_weight=weight)
    chunked_linear_distillation(*vars(shared).values()).backward()
    torch.testing.assert_close(weight.grad, truth.weight)


@pytest.mark.fault("B70")
@by_dtype
@by_divergence
@pytest.mark.parametrize("beta", [0.3, 0.5])
def test_identical_models(
    beta: float, divergence: str, dtype: torch.dtype, device: torch.device
) -> None:
    # A mix of a hard term into the default would show here.
    pair = make_pair(40, classes=300, dtype=dtype, device=device, target=False)
    twin = pair.replace(teacher_input=pair.input, teacher_weight=pair.weight)
    result = run(
        chunked_linear_distillation, twin,
        divergence=divergence, beta=beta, temperature=3.0, reduction="none", chunk_size=7,
    )  # fmt: skip
    assert (result.loss >= 0.0).all()
    resolution = torch.finfo(result.loss.dtype).eps
    if divergence == "cosine":
        assert (result.loss <= 4.0 * resolution).all()
        assert (result.input.abs() <= 64.0 * resolution).all()
        return
    assert not result.loss.any()
    assert not result.input.any()
    assert not result.weight.any()


def test_never_negative(device: torch.device) -> None:
    # Models that differ by next to nothing: the sum of signed terms may round below zero.
    pair = make_pair(200, classes=50, device=device, target=False)
    near = pair.replace(
        teacher_input=pair.input + 1e-7 * torch.randn_like(pair.input), teacher_weight=pair.weight
    )
    for divergence in DIVERGENCES:
        loss = chunked_linear_distillation(
            *vars(near).values(), divergence=divergence, reduction="none"
        )
        assert (loss >= 0.0).all()
        assert (loss < 1e-5).all()


# ------------------------------------------------------------------------------ targets, shapes


@pytest.mark.fault("B20", "B21", "R09")
@by_reduction
@pytest.mark.parametrize("ignore_index", [0, -1, 10, -(2**40)])
def test_ignore_index(ignore_index: int, reduction: str, device: torch.device) -> None:
    pair = make_pair(24, device=device, ignore_index=ignore_index)
    ignored = pair.target == ignore_index
    assert bool(ignored.any())
    for divergence, hard_weight in zip(DIVERGENCES, (0.0, 0.5, 0.5, 0.0, 0.5), strict=True):
        result = check(
            pair,
            divergence=divergence,
            reduction=reduction,
            ignore_index=ignore_index,
            hard_weight=hard_weight,
            only_ours={"chunk_size": 7},
        )
        assert not result.input[ignored].any(), "ignored rows get exactly zero"
        if reduction == "none":
            assert not result.loss[ignored].any()


@by_reduction
def test_without_target_every_row_counts(reduction: str, device: torch.device) -> None:
    pair = make_pair(device=device, ignored=0.0)
    given = check(pair, reduction=reduction)
    assert_same(check(pair.replace(target=None), reduction=reduction), given)


def test_target_that_only_counts_rows_may_hold_anything() -> None:
    pair = make_pair(ignored=0.0)
    wild = pair.replace(target=torch.full_like(pair.target, 2**40))
    assert_same(run(chunked_linear_distillation, wild), run(chunked_linear_distillation, pair))
    with pytest.raises(TargetOutOfRangeError, match="row 0"):
        chunked_linear_distillation(*vars(wild).values(), hard_weight=0.1)


@by_reduction
def test_int32_targets(reduction: str) -> None:
    pair = make_pair()
    narrow = pair.replace(target=pair.target.to(torch.int32))
    options = {"reduction": reduction, "hard_weight": 0.5}
    assert_same(
        run(chunked_linear_distillation, pair, **options),
        run(chunked_linear_distillation, narrow, **options),
    )


@by_reduction
@by_dtype
def test_all_rows_ignored(dtype: torch.dtype, reduction: str, device: torch.device) -> None:
    pair = make_pair(dtype=dtype, device=device, bias=True)
    result = run(
        chunked_linear_distillation,
        pair.replace(target=torch.full_like(pair.target, -100)),
        reduction=reduction,
        hard_weight=0.5,
        chunk_size=4,
    )
    assert not result.loss.any()
    for name in DIFFERENTIABLE:
        assert torch.equal(getattr(result, name), torch.zeros_like(getattr(pair, name)))


@by_reduction
@by_divergence
def test_ignored_rows_may_hold_anything(
    divergence: str, reduction: str, device: torch.device
) -> None:
    pair = make_pair(device=device)
    target, input = pair.target.clone(), pair.input.clone()
    target[3:5] = -100
    input[3], input[4] = float("nan"), float("inf")
    result = run(
        chunked_linear_distillation,
        pair.replace(input=input, target=target),
        divergence=divergence,
        reduction=reduction,
        hard_weight=0.5,
        frozen=("weight",),
        chunk_size=5,
    )
    assert result.loss.isfinite().all()
    assert result.input.isfinite().all()
    assert not result.input[3:5].any()


@by_reduction
@pytest.mark.parametrize("shape", [(), (1,), (2, 5), (2, 1, 3), (0,), (2, 0, 3)], ids=str)
def test_leading_dimensions(shape: tuple[int, ...], reduction: str, device: torch.device) -> None:
    pair = make_pair(shape, device=device, bias=True)
    options = {"reduction": reduction, "hard_weight": 0.5}
    result = run(chunked_linear_distillation, pair, upstream=1.5, chunk_size=2, **options)
    truth = run(reference.linear_distillation, pair, upstream=1.5, **options)
    assert_same(result, truth, rtol=1e-5, atol=1e-6)
    assert result.loss.shape == (shape if reduction == "none" else ())


@pytest.mark.parametrize(
    ("hidden", "classes"), [(8, 1), (1, 11), (1, 1), (3, 2), (16, 129)], ids=str
)
def test_odd_sizes(hidden: int, classes: int, device: torch.device) -> None:
    reductions = (*REDUCTIONS, "mean", "none")
    for divergence, reduction in zip(DIVERGENCES, reductions, strict=True):
        pair = make_pair(9, hidden, classes, teacher_hidden=3, device=device, bias=True)
        options = {"divergence": divergence, "reduction": reduction, "hard_weight": 0.3}
        ours = run(chunked_linear_distillation, pair, chunk_size=4, **options)
        # One class leaves gradients that are zero but for rounding.
        truth = run(reference.linear_distillation, pair, **options)
        assert_same(ours, truth, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["input", "weight", "teacher_input", "teacher_weight"])
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"expanded"}))
def test_layouts(layout: str, name: str, device: torch.device) -> None:
    reduction = "none" if name.endswith("weight") == (layout == "padded") else "mean"
    pair = make_pair(device=device, bias=True)
    other = LAYOUTS[layout](getattr(pair, name))
    assert torch.equal(other, getattr(pair, name))
    check(pair.replace(**{name: other}), reduction=reduction, only_ours={"chunk_size": 5})


@by_reduction
def test_layouts_of_the_vectors(reduction: str, device: torch.device) -> None:
    pair = make_pair(device=device, bias=True)
    target = torch.full((13, 3), 2**40, device=device)
    target[:, 1] = pair.target
    check(
        pair.replace(
            target=target[:, 1],
            bias=LAYOUTS["strided"](pair.bias),
            teacher_bias=LAYOUTS["strided"](pair.teacher_bias),
        ),
        reduction=reduction,
        hard_weight=0.5,
        only_ours={"chunk_size": 5},
    )


@by_reduction
def test_permuted_leading_dimensions(reduction: str, device: torch.device) -> None:
    # [T, B, D] seen as [B, T, D]: no view of it is [N, D].
    pair = make_pair((3, 4), device=device)
    check(
        pair.replace(
            input=pair.input.transpose(0, 1),
            teacher_input=pair.teacher_input.transpose(0, 1),
            target=pair.target.transpose(0, 1),
        ),
        reduction=reduction,
        only_ours={"chunk_size": 5},
    )


@by_reduction
def test_grad_weight_has_the_strides_of_the_weight(reduction: str) -> None:
    pair = make_pair()
    weight = LAYOUTS["transposed"](pair.weight).requires_grad_()
    loss = chunked_linear_distillation(
        *vars(pair.replace(weight=weight)).values(), reduction=reduction
    )
    (grad,) = torch.autograd.grad(loss, weight, torch.full_like(loss, 0.5))
    assert grad.stride() == weight.stride()


# -------------------------------------------------------------------------------- special values


@by_divergence
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_large_offset(
    offset: float, dtype: torch.dtype, divergence: str, device: torch.device
) -> None:
    pair = make_pair(dtype=dtype, device=device, bias=True)
    pair = pair.replace(bias=pair.bias + offset, teacher_bias=pair.teacher_bias - offset / 2)
    if divergence == "cosine":
        # It sees the offset and little else: loss 0 or 2, gradient zero but for rounding.
        result = run(chunked_linear_distillation, pair, divergence=divergence, chunk_size=5)
        torch.testing.assert_close(
            result.loss, torch.full_like(result.loss, 2.0), atol=1e-6, rtol=0
        )
        assert result.input.isfinite().all()
        return
    check(pair, divergence=divergence, hard_weight=0.3, only_ours={"chunk_size": 5})


@pytest.mark.fault("B71")
@by_divergence
@pytest.mark.parametrize("which", ["teacher", "student", "both"])
def test_masked_vocabulary(which: str, divergence: str, device: torch.device) -> None:
    # 0 log 0 = 0, in gradients too.
    if divergence == "cosine":
        pytest.skip("a cosine of infinite logits is NaN, in torch too")
    pair = make_pair(device=device, bias=True, dtype=torch.float64)
    target = torch.where(pair.target == 10, 0, pair.target)
    masked = {}
    for name, who in (("bias", "student"), ("teacher_bias", "teacher")):
        value = getattr(pair, name).clone()
        if which in (who, "both"):
            value[10] = -torch.inf
        masked[name] = value
    pair = pair.replace(target=target, **masked)
    for reduction in REDUCTIONS:
        options = {"divergence": divergence, "reduction": reduction, "hard_weight": 0.2}
        ours = run(chunked_linear_distillation, pair, chunk_size=5, **options)
        infinite = (divergence, which) in (("kl", "student"), ("reverse_kl", "teacher"))
        assert bool(ours.loss.isinf().any()) == infinite
        assert not ours.loss.isnan().any()
        if not infinite:
            assert ours.input.isfinite().all()
            truth = run(reference.linear_distillation, pair, **options)
            assert_same(ours, truth, rtol=1e-9, atol=1e-12)
        elif divergence == "kl":
            # An infinite loss with the finite gradient Q - P.
            assert ours.input.isfinite().all()


@by_divergence
@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
@pytest.mark.parametrize("side", ["input", "teacher_input"])
def test_a_bad_row_is_nan_and_no_other_is(
    side: str, value: str, divergence: str, device: torch.device
) -> None:
    pair = make_pair(device=device, target=False)
    hidden = getattr(pair, side).clone()
    hidden[4] = float(value)
    bad = pair.replace(**{side: hidden})
    options = {"divergence": divergence, "reduction": "none", "chunk_size": 5}
    result = run(chunked_linear_distillation, bad, frozen=("weight",), **options)
    assert result.loss[4].isnan()
    assert result.input[4].isnan().all()
    rest = torch.arange(13, device=device) != 4
    expected = run(chunked_linear_distillation, pair, frozen=("weight",), **options)
    torch.testing.assert_close(result.loss[rest], expected.loss[rest])
    torch.testing.assert_close(result.input[rest], expected.input[rest])


def test_confident_and_contradicting_models(device: torch.device) -> None:
    # Probabilities of exactly 1 and 0 in float32, on different classes.
    pair = make_pair(6, 4, 4, teacher_hidden=4, device=device, target=False)
    eye = torch.eye(4, device=device)
    pair = pair.replace(
        input=300.0 * eye[[0, 1, 2, 3, 0, 1]],
        weight=eye,
        teacher_input=300.0 * eye[[1, 1, 0, 3, 2, 0]],
        teacher_weight=eye,
    )
    for divergence in DIVERGENCES:
        result = run(
            chunked_linear_distillation, pair, divergence=divergence, beta=0.3, reduction="none"
        )
        truth = run(
            reference.linear_distillation, pair.map(Tensor.double),
            divergence=divergence, beta=0.3, reduction="none",
        )  # fmt: skip
        torch.testing.assert_close(result.loss.double(), truth.loss, rtol=1e-5, atol=1e-6)
        # Differences of terms of 300, whose last bit in float32 is 3e-5.
        torch.testing.assert_close(result.input.double(), truth.input, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("upstream", [1.0, 65536.0], ids=["unscaled", "scaled"])
@by_divergence
def test_fp16_tiny_gradients(divergence: str, upstream: float, device: torch.device) -> None:
    # Mean probability 1/V over N rows lies far below fp16's smallest normal number.
    pair = make_pair(1024, 16, 512, dtype=torch.float16, device=device)
    check(
        pair, divergence=divergence, upstream=upstream, slack=2 * SLACK[torch.float16],
        only_ours={"chunk_size": 256},
    )  # fmt: skip


# -------------------------------------------------------------------------------------- autocast


@by_reduction
@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("teacher_dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_autocast(
    teacher_dtype: torch.dtype, autocast_dtype: torch.dtype, reduction: str, device: torch.device
) -> None:
    pair = make_pair(device=device, bias=True)
    pair = pair.replace(
        input=pair.input.bfloat16(), teacher_weight=pair.teacher_weight.to(teacher_dtype)
    )

    def under_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device.type, autocast_dtype):
                return function(*args, **kwargs)

        return call

    options = {"reduction": reduction, "hard_weight": 0.3}
    ours, plain = (
        run(under_autocast(function), pair, **options)
        for function in (chunked_linear_distillation, reference.linear_distillation)
    )
    truth = run(reference.linear_distillation, pair.map(Tensor.double), **options)
    assert ours.loss.dtype == torch.float32
    assert_within_budget("loss", ours.loss, plain.loss, truth.loss, slack=1e-6)
    for name in DIFFERENTIABLE:
        value = getattr(ours, name)
        assert value.dtype == getattr(pair, name).dtype
        assert_within_budget(
            name, value, getattr(plain, name), getattr(truth, name), slack=SLACK[torch.bfloat16]
        )


def test_autocast_multiplies_the_teacher_in_its_dtype(device: torch.device) -> None:
    pair = make_pair(device=device)
    with torch.autocast(device.type, torch.bfloat16):
        cast = run(chunked_linear_distillation, pair)
    by_hand = run(chunked_linear_distillation, pair.map(Tensor.bfloat16))
    torch.testing.assert_close(cast.loss, by_hand.loss)
    only_student = pair.replace(input=pair.input.bfloat16(), weight=pair.weight.bfloat16())
    assert not torch.equal(cast.loss, run(chunked_linear_distillation, only_student).loss)


def test_autocast_leaves_fp64_alone(device: torch.device) -> None:
    pair = make_pair(dtype=torch.float64, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        cast = run(chunked_linear_distillation, pair)
    assert_same(cast, run(chunked_linear_distillation, pair))


# ------------------------------------------------------------------------------ autograd contract


@by_reduction
@by_dtype
def test_retained_graph(dtype: torch.dtype, reduction: str, device: torch.device) -> None:
    pair = make_pair(dtype=dtype, device=device, bias=True)
    leaves = [getattr(pair, name).requires_grad_() for name in DIFFERENTIABLE]
    loss = chunked_linear_distillation(*vars(pair).values(), reduction=reduction, chunk_size=4)
    zero, first, one, second = (
        torch.autograd.grad(loss, leaves, torch.full_like(loss, factor), retain_graph=keep)
        for factor, keep in ((0.0, True), (3.0, True), (1.0, True), (3.0, False))
    )
    assert not any(grad.any() for grad in zero)
    for a, b, c in zip(first, second, one, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a.double(), 3.0 * c.double(), rtol=2e-2, atol=1e-2)
    with pytest.raises(RuntimeError, match="second time"):
        loss.sum().backward()


@by_reduction
@pytest.mark.parametrize("frozen", [(), ("input",), ("weight", "bias")], ids="+".join)
def test_second_derivative_raises(frozen: tuple[str, ...], reduction: str) -> None:
    pair = make_pair(dtype=torch.float64, bias=True)
    wanted = [getattr(pair, name).requires_grad_() for name in DIFFERENTIABLE if name not in frozen]
    loss = chunked_linear_distillation(*vars(pair).values(), reduction=reduction)
    grads = torch.autograd.grad(loss.sum(), wanted, create_graph=True)
    for grad in grads:
        for leaf in wanted:
            with pytest.raises(NotDifferentiableTwiceError, match="reference"):
                torch.autograd.grad(grad.sum(), leaf, retain_graph=True)


@pytest.mark.parametrize("name", ["input", "weight", "bias"])
def test_forward_mode_raises(name: str) -> None:
    pair = make_pair(bias=True)
    with forward_ad.dual_level():
        value = getattr(pair, name)
        dual = pair.replace(**{name: forward_ad.make_dual(value, torch.ones_like(value))})
        with pytest.raises(ForwardModeError, match="reference"):
            chunked_linear_distillation(*vars(dual).values())


@by_reduction
def test_torch_func_grad_is_right_or_refused(reduction: str) -> None:
    pair = make_pair(4, 3, 5, dtype=torch.float64)

    def gradients(function: Callable[..., Any]) -> Any:
        def loss(input: Tensor, weight: Tensor) -> Tensor:
            call = pair.replace(input=input, weight=weight)
            return function(*vars(call).values(), reduction=reduction, hard_weight=0.2).sum()

        return torch.func.grad(loss, argnums=(0, 1))(pair.input, pair.weight)

    truths = gradients(reference.linear_distillation)
    if reduction == "none":
        # Its backward is an op of its own, which torch.func does not differentiate through.
        with pytest.raises(RuntimeError):
            gradients(chunked_linear_distillation)
        return
    for value, truth in zip(gradients(chunked_linear_distillation), truths, strict=True):
        torch.testing.assert_close(value, truth)


@by_reduction
def test_vmap(reduction: str) -> None:
    pair = make_pair((3, 7), dtype=torch.float64, target=False)
    call = torch.func.vmap(
        lambda x, t: chunked_linear_distillation(
            x, pair.weight, t, pair.teacher_weight, reduction=reduction, chunk_size=4
        )
    )
    values = call(pair.input, pair.teacher_input)
    for index in range(3):
        truth = reference.linear_distillation(
            pair.input[index], pair.weight, pair.teacher_input[index], pair.teacher_weight,
            reduction=reduction,
        )  # fmt: skip
        torch.testing.assert_close(values[index], truth)
    if reduction == "none":
        return
    (value,) = torch.func.grad(lambda x: call(x, pair.teacher_input).sum(), (0,))(pair.input)
    leaf = pair.input.clone().requires_grad_()
    losses = [
        reference.linear_distillation(
            leaf[index], pair.weight, pair.teacher_input[index], pair.teacher_weight,
            reduction=reduction,
        )
        for index in range(3)
    ]  # fmt: skip
    torch.testing.assert_close(value, torch.autograd.grad(torch.stack(losses).sum(), leaf)[0])


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_op_refuses_a_leaf_whose_gradient_it_was_not_told_to_make(name: str) -> None:
    pair = make_pair(bias=True)
    getattr(pair, name).requires_grad_()
    with pytest.raises(ValueError, match=f"need_grad_{name}"):
        OP(*vars(pair).values())


@pytest.mark.parametrize("need", DIFFERENTIABLE)
def test_op_makes_what_it_is_told_and_no_more(need: str) -> None:
    pair = make_pair(bias=True)
    outputs = OP(*vars(pair).values(), **{f"need_grad_{need}": True})
    made = dict(zip(DIFFERENTIABLE, outputs[4:], strict=True))
    assert {name for name, grad in made.items() if grad.numel()} == {need}


@by_reduction
def test_without_gradients(reduction: str, device: torch.device) -> None:
    pair = make_pair(device=device)
    expected = run(chunked_linear_distillation, pair, reduction=reduction).loss
    pair.weight.requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss = chunked_linear_distillation(*vars(pair).values(), reduction=reduction)
        assert not loss.requires_grad
        assert torch.equal(loss, expected)


@by_reduction
def test_return_parts(reduction: str, device: torch.device) -> None:
    pair = make_pair(device=device)
    pair.input.requires_grad_()
    options = {
        "reduction": reduction, "temperature": 2.0, "soft_weight": 0.3, "hard_weight": 0.7,
        "return_parts": True,
    }  # fmt: skip
    ours = chunked_linear_distillation(*vars(pair).values(), **options)
    truth = reference.linear_distillation(*vars(pair).values(), **options)
    for value, expected in zip(ours, truth, strict=True):
        torch.testing.assert_close(value, expected)
    assert ours.loss.requires_grad
    assert not ours.soft.requires_grad
    assert not ours.hard.requires_grad
    torch.testing.assert_close(ours.loss, 0.3 * ours.soft + 0.7 * ours.hard)
    alone = chunked_linear_distillation(*vars(pair).values(), return_parts=True)
    assert not alone.hard.any()


@by_reduction
@by_divergence
def test_arguments_are_not_written(divergence: str, reduction: str) -> None:
    for dtype in (torch.float32, torch.float16):
        pair = make_pair(dtype=dtype, bias=True)
        upstream = torch.randn(13) if reduction == "none" else torch.tensor(3.0)
        tensors = [*vars(pair).values(), upstream]
        copies = [value.clone() for value in tensors]
        versions = [value._version for value in tensors]
        run(
            chunked_linear_distillation, pair, divergence=divergence, upstream=upstream,
            reduction=reduction, hard_weight=0.2, chunk_size=5,
        )  # fmt: skip
        assert [value._version for value in tensors] == versions
        assert all(torch.equal(value, copy) for value, copy in zip(tensors, copies, strict=True))


@by_reduction
def test_deterministic(reduction: str, device: torch.device) -> None:
    pair = make_pair(64, 32, 257, device=device, bias=True)
    first, *rest = (
        run(chunked_linear_distillation, pair, reduction=reduction, chunk_size=10) for _ in range(8)
    )
    for result in rest:
        assert_same(first, result)


# ---------------------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({}, {"divergence": "js"}, ValueError, "divergence: expected one of 'jsd', 'kl'"),
        ({}, {"beta": 1.5}, ValueError, r"beta: expected a number in \[0, 1\], got 1.5"),
        ({}, {"beta": -0.1}, ValueError, "beta: expected a finite number >= 0, got -0.1"),
        ({}, {"temperature": 0.0}, ValueError, "temperature: expected a positive number"),
        ({}, {"temperature": "1"}, TypeError, "temperature: expected a number"),
        ({}, {"soft_weight": float("inf")}, ValueError, "soft_weight: expected a finite"),
        ({}, {"hard_weight": None}, TypeError, "hard_weight: expected a number"),
        ({}, {"reduction": "batchmean"}, ValueError, "reduction: expected one of"),
        ({}, {"chunk_size": 0}, ValueError, "chunk_size: expected at least 1"),
        ({"target": None}, {"hard_weight": 0.5}, ValueError, "target: expected a tensor, since"),
        ({"target": torch.zeros(4, dtype=torch.long)}, {}, ValueError, "target: expected shape"),
        ({"target": torch.zeros(13)}, {}, TypeError, "target: expected dtype int64"),
        ({"teacher_input": torch.randn(12, 6)}, {}, ValueError, "teacher_input: expected shape"),
        ({"teacher_input": torch.randn(13, 5)}, {}, ValueError, "teacher_input: expected last"),
        ({"teacher_weight": torch.randn(12, 6)}, {}, ValueError, "teacher_weight: expected V = 11"),
        ({"teacher_weight": torch.randn(11)}, {}, ValueError, "teacher_weight: expected shape"),
        ({"teacher_weight": torch.randn(11, 6).half()}, {}, TypeError,
         "teacher_weight: expected the dtype of teacher_input"),
        ({"teacher_bias": torch.randn(10)}, {}, ValueError, "teacher_bias: expected shape"),
        ({"weight": torch.randn(11, 8).half()}, {}, TypeError, "weight: expected the dtype of"),
        ({"teacher_input": [1.0]}, {}, TypeError, "teacher_input: expected a tensor, got list"),
    ],
)  # fmt: skip
def test_errors(
    changes: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        chunked_linear_distillation(*vars(make_pair().replace(**changes)).values(), **options)


def test_backward_op_checks_its_shapes() -> None:
    pair = make_pair(target=False)
    tensors = (pair.input, pair.weight, pair.teacher_input, pair.teacher_weight)
    with pytest.raises(ValueError, match="statistics: expected shape"):
        OP_BACKWARD(torch.ones(13), *tensors, torch.ones(2, 13))
    with pytest.raises(ValueError, match="grad_loss: expected shape"):
        OP_BACKWARD(torch.ones(()), *tensors, torch.ones(6, 13))


# ------------------------------------------------------------------------------------- modules


@pytest.mark.parametrize("case", CASES)
def test_module_equals_the_function(case: str) -> None:
    options = {"divergence": "reverse_kl", "ignore_index": 2, "chunk_size": 4, **CASES[case]}
    pair = make_pair(ignore_index=2, bias=True)
    module = modules.ChunkedLinearDistillationLoss(reduction="sum", **options)
    assert not module.state_dict()
    copy = pickle.loads(pickle.dumps(module))
    assert repr(copy) == repr(module)
    assert_same(run(copy, pair), run(chunked_linear_distillation, pair, reduction="sum", **options))


def test_jsd_module() -> None:
    pair = make_pair()
    options = {"beta": 0.2, "temperature": 2.0}
    assert_same(
        run(modules.ChunkedLinearJSDLoss(**options), pair),
        run(chunked_linear_distillation, pair, divergence="jsd", **options),
    )
    with pytest.raises(ValueError, match="beta: expected"):
        modules.ChunkedLinearJSDLoss(2.0)


# ------------------------------------------------------------------------------------- opcheck


OPCHECK: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: ({}, options) for name, options in CASES.items()},
    "bias": ({"bias": True}, {"divergence": "kl"}),
    "no-target": ({"target": False}, {"divergence": "tvd"}),
    "leading": ({"rows": (2, 3)}, {"divergence": "cosine", "chunk_size": 4}),
    "no-rows": ({"rows": 0, "bias": True}, {}),
    "bfloat16": ({"dtype": torch.bfloat16, "bias": True}, {"chunk_size": 5}),
    "float16": (
        {"dtype": torch.float16, "bias": True},
        {"chunk_size": 5, "grad_weight_accum_dtype": "weight"},
    ),
    "float64": ({"dtype": torch.float64}, {"divergence": "reverse_kl"}),
    "products-in-bfloat16": ({"bias": True}, {"compute_dtype": torch.bfloat16}),
}


def with_gradients(pair: Pair, frozen: Collection[str] = ()) -> tuple[list[Any], dict[str, bool]]:
    values, flags = dict(vars(pair)), {}
    for name in DIFFERENTIABLE:
        flags[f"need_grad_{name}"] = values[name] is not None and name not in frozen
        if flags[f"need_grad_{name}"]:
            values[name] = values[name].detach().requires_grad_()
    return list(values.values()), flags


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", OPCHECK)
def test_opcheck(case: str, reduction: str) -> None:
    wanted, options = OPCHECK[case]
    arguments, flags = with_gradients(make_pair(**wanted))
    torch.library.opcheck(OP.default, arguments, {"reduction": reduction, **flags, **options})


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("frozen", [("input",), ("weight", "bias"), DIFFERENTIABLE], ids="-".join)
def test_opcheck_frozen(frozen: tuple[str, ...], reduction: str) -> None:
    arguments, flags = with_gradients(make_pair(bias=True), frozen)
    torch.library.opcheck(OP.default, arguments, {"reduction": reduction, **flags})


@pytest.mark.parametrize("case", ["hard-tempered", "bias", "leading", "no-rows", "float16"])
def test_opcheck_backward(case: str) -> None:
    wanted, options = OPCHECK[case]
    pair = make_pair(**wanted)
    loss, _, statistics, *_ = OP(*vars(pair).values(), reduction="none", **options)
    flags = {f"need_grad_{name}": getattr(pair, name) is not None for name in DIFFERENTIABLE}
    torch.library.opcheck(
        OP_BACKWARD.default,
        (
            torch.randn_like(loss), pair.input, pair.weight, pair.teacher_input,
            pair.teacher_weight, statistics, pair.target, pair.bias, pair.teacher_bias,
        ),
        {**options, **flags},
    )  # fmt: skip


# ------------------------------------------------------------------------------------- compile


def head(**options: Any) -> Callable[..., Tensor]:
    """Something before the call and something after it, so that there is a graph around it."""

    def call(input: Tensor, *args: Any) -> Tensor:
        return chunked_linear_distillation(input.tanh(), *args, **options).square()

    return call


@pytest.mark.usefixtures("fresh_compiler")
@by_reduction
def test_one_compile_serves_every_row_count(reduction: str) -> None:
    # One graph (fullgraph), gradients with an upstream that is not one (square), any N.
    function = head(reduction=reduction, hard_weight=0.3, temperature=2.0, chunk_size=4)
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    first = None
    for rows in (7, 3, 4, 8, 9, 40):
        pair = make_pair(rows, bias=True)
        assert_same(run(call, pair), run(function, pair), rtol=1e-5, atol=1e-5)
        first = counter.frame_count if first is None else first
    assert counter.frame_count == first


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("frozen", [("input",), ("weight", "bias")], ids="+".join)
def test_compile_without_target_or_chunk_size(frozen: tuple[str, ...]) -> None:
    function = head(divergence="kl")
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(function, fullgraph=True, backend=counter)
    for rows in (7, 12, 30, 5):
        pair = make_pair(rows, bias=True, target=False)
        assert_same(
            run(call, pair, frozen=frozen), run(function, pair, frozen=frozen),
            rtol=1e-5, atol=1e-5,
        )  # fmt: skip
    assert counter.frame_count == 2  # the second size makes a symbol of the first


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inductor(reduction: str, device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        compiled = torch.compile(chunked_linear_distillation, fullgraph=True)
        check(
            make_pair(dtype=dtype, device=device), reduction=reduction, upstream=1.5,
            function=compiled, only_ours={"chunk_size": 5},
        )  # fmt: skip


# ------------------------------------------------------------------------------- flops, memory


@pytest.mark.parametrize(
    ("reduction", "frozen", "student"),
    [
        ("mean", (), 3),
        ("sum", ("weight",), 2),
        ("mean", ("input", "weight"), 1),
        ("none", ("weight",), 2),
        ("none", (), 4),
    ],
    ids=str,
)
def test_flops(reduction: str, frozen: tuple[str, ...], student: int) -> None:
    with FlopCounterMode(display=False) as counter:
        run(chunked_linear_distillation, make_pair(), reduction=reduction, frozen=frozen)
    teacher = 2 if student == 4 else 1
    assert counter.get_total_flops() == 2 * 13 * 11 * (8 * student + 6 * teacher)


@pytest.mark.fault("B25", "R11")
@by_reduction
@pytest.mark.parametrize("needs", [(), ("input",), ("weight",), ("bias",), ("input", "weight")],
                         ids=lambda names: "+".join(names) or "nothing")  # fmt: skip
def test_frozen_costs_no_product(needs: tuple[str, ...], reduction: str) -> None:
    chunks = 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(
            chunked_linear_distillation, make_pair(16, bias=True), reduction=reduction,
            frozen=set(DIFFERENTIABLE) - set(needs), chunk_size=16 // chunks,
        )  # fmt: skip
    products = sum(
        event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm")
    )
    twice = reduction == "none" and bool(set(needs) & {"weight", "bias"})
    assert products == chunks * (2 + len(set(needs) & {"input", "weight"}) + 2 * twice)


ROWS, HIDDEN, CLASSES, CHUNK = 512, 64, 2000, 16
PER_ROW_AND_CLASS = 64 * ROWS + 24 * CLASSES


def peak_bytes(pair: Pair, **options: Any) -> int:
    """Peak of forward and backward, libraries warmed up."""
    run(chunked_linear_distillation, pair, **options)
    with peak_memory(pair.input.device) as peak:
        run(chunked_linear_distillation, pair, **options)
    return peak.bytes


@by_reduction
@by_divergence
def test_peak(divergence: str, reduction: str, device: torch.device) -> None:
    pair = make_pair(ROWS, HIDDEN, CLASSES, teacher_hidden=32, device=device)
    options = {"divergence": divergence, "reduction": reduction, "chunk_size": CHUNK}
    upstream = torch.full((ROWS,) if reduction == "none" else (), 0.5, device=device)
    # On the CPU the formulas work in PyTorch operators, with buffers of their own.
    chunks = (7 if device.type == "cpu" else 2) * CHUNK * CLASSES * 4
    allowed = chunks + PER_ROW_AND_CLASS
    assert allowed + pair.weight.nbytes < ROWS * CLASSES * 4, "the logits would pass unnoticed"
    for needs in ((), ("input",), ("input", "weight")):
        peak = peak_bytes(
            pair, upstream=upstream, frozen=set(DIFFERENTIABLE) - set(needs), **options
        )
        assert peak <= allowed + sum(getattr(pair, name).nbytes for name in needs), needs


@pytest.mark.fault("B25", "R11")
@by_reduction
def test_frozen_head_costs_no_buffer_of_its_size(reduction: str, device: torch.device) -> None:
    pair = make_pair(32, 512, 2000, teacher_hidden=512, device=device)
    peak = peak_bytes(pair, frozen=("weight",), reduction=reduction, chunk_size=4)
    assert peak < pair.weight.nbytes / 4


def test_chunk_budget_is_a_cap(device: torch.device) -> None:
    pair = make_pair(512, 16, 1000, device=device)
    budget = 256 * 1000 * 4
    with config.override(chunk_budget_bytes=budget):
        peak = peak_bytes(pair)
    gradients = pair.input.nbytes + pair.weight.nbytes
    assert budget / 3 < peak <= budget + gradients + 64 * 512 + 24 * 1000


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_second_grad_weight_for_the_upstream(reduction: str, device: torch.device) -> None:
    pair = make_pair(32, 512, 2000, device=device)
    weight = pair.weight.requires_grad_()

    def backward_bytes(retain_graph: bool) -> int:
        weight.grad = None
        loss = chunked_linear_distillation(*vars(pair).values(), reduction=reduction, chunk_size=4)
        upstream = torch.full_like(loss, 0.5)
        with peak_memory(device) as peak:
            loss.backward(upstream, retain_graph=retain_graph)
        return peak.bytes

    assert backward_bytes(retain_graph=False) < weight.nbytes / 4
    # One that is kept must not be overwritten.
    assert backward_bytes(retain_graph=True) >= weight.nbytes


@by_reduction
def test_kept_gradients(
    reduction: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(hidden=16, dtype=torch.bfloat16, device=device, bias=True)
    with kept_gradients(monkeypatch):
        check(pair, reduction=reduction, upstream=0.3, only_ours={"chunk_size": 4})
