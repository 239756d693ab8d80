"""Ops on logits that exist already: cross_entropy and selective_log_softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from greyhound_ops import config, reference
from greyhound_ops.errors import (
    ForwardModeError,
    NotDifferentiableTwiceError,
    TargetOutOfRangeError,
)
from greyhound_ops.functional import cross_entropy, selective_log_softmax
from greyhound_ops.modules import LogitsCrossEntropyLoss
from greyhound_ops.testing import assert_within_budget, peak_memory
from samples import DTYPES, LAYOUTS, REDUCTIONS, SLACK, dtype_id, interpreter_slack

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
by_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
by_path = pytest.mark.parametrize("path", ["torch", "triton"])

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "class-weight": {"class_weight": True},
    "negative-scale": {"logit_scale": -0.5},
    "softcap": {"softcap": 2.0},
    "all": {
        "class_weight": True, "label_smoothing": 0.2, "z_loss": 1e-2, "logit_scale": 0.5,
        "softcap": 3.0,
    },
}  # fmt: skip


def device_of(path: str) -> str:
    """Where a path's kernels run: on a GPU if there is one, else in Triton's interpreter."""
    if path == "triton":
        pytest.importorskip("triton", reason="needs triton")
    return "cuda" if path == "triton" and torch.cuda.is_available() else "cpu"


def make_logits(
    shape: tuple[int, ...] = (13,),
    classes: int = 11,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Random logits and targets; about a quarter of the rows, but never the first, is ignored."""
    logits = torch.randn(*shape, classes, dtype=dtype, device=device)
    drop = torch.rand(shape, device=device) < 0.25
    if drop.numel():
        drop.view(-1)[0] = False
    target = torch.randint(0, classes, shape, device=device).masked_fill(drop, ignore_index)
    return logits, target


def class_weights(classes: int, device: torch.device | str) -> Tensor:
    return torch.linspace(0.25, 1.5, classes, device=device)


def run(
    function: Callable[..., Tensor],
    logits: Tensor,
    target: Tensor,
    upstream: Tensor | float = 1.0,
    *,
    view: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """A result and the gradient of the logits, which a view may lead to."""
    leaf = logits.detach().requires_grad_()
    viewed = leaf if view is None else view(leaf)
    if options.get("class_weight") is True:
        options["class_weight"] = class_weights(viewed.shape[-1], viewed.device)
    result = function(viewed, target, **options)
    if not isinstance(upstream, Tensor):
        upstream = torch.full_like(result, upstream)
    result.backward(upstream.to(result.dtype))
    assert leaf.grad is not None
    return result.detach(), leaf.grad


def check(
    name: str,
    logits: Tensor,
    target: Tensor,
    upstream: Tensor | float = -1.7,
    *,
    view: Callable[[Tensor], Tensor] | None = None,
    slack: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compare with fp64, as close as plain torch comes at this dtype."""
    dtype = logits.dtype
    slack = SLACK[dtype] if slack is None else slack
    function = {"cross_entropy": cross_entropy, "log_softmax": selective_log_softmax}[name]
    plainly = {
        "cross_entropy": reference.cross_entropy,
        "log_softmax": reference.selective_log_softmax,
    }[name]
    exact = torch.promote_types(dtype, torch.float32)
    only_ours = {"dtype": exact} if name == "log_softmax" else {}
    ours = run(function, logits, target, upstream, view=view, **options, **only_ours)
    plain = run(plainly, logits, target, upstream, view=view, **options)
    temperature = options.get("temperature")
    if isinstance(temperature, Tensor):
        options["temperature"] = temperature.double()
    truth = run(plainly, logits.double(), target, upstream, view=view, **options)
    assert ours[0].dtype == exact
    assert ours[1].dtype == dtype
    loss_slack = slack if dtype == torch.float64 else 1e-6
    assert_within_budget("result", ours[0], plain[0], truth[0], slack=loss_slack)
    assert_within_budget("grad_logits", ours[1], plain[1], truth[1], slack=slack)
    return ours


# ---------------------------------------------------------------------------- values, gradients


@by_dtype
@by_reduction
@by_path
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


@by_dtype
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)
def test_dtype_of_log_probs(dtype: torch.dtype, device: torch.device) -> None:
    logits, index = make_logits(dtype=dtype, device=device)
    exact = selective_log_softmax(logits, index, dtype=torch.float32)
    assert exact.dtype == torch.float32
    rounded = selective_log_softmax(logits, index)
    # As TRL's: the dtype of the logits, but fp32 inside (issue B60).
    assert torch.equal(rounded, exact.to(dtype))
    assert rounded.dtype == dtype
    with pytest.raises(TypeError, match="dtype: expected a floating dtype"):
        selective_log_softmax(logits, index, dtype=torch.int32)


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


# ---------------------------------------------------------------------------------------- layouts

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted": lambda logits: logits[:, :-1],
    "every-second": lambda logits: logits[:, 1::2],
    "transposed": lambda logits: logits.transpose(0, 1),
    "permuted": lambda logits: logits[:, :, None].expand(-1, -1, 2, -1).permute(2, 1, 0, 3),
    "expanded": lambda logits: logits[:1].expand(4, -1, -1),
    "columns": lambda logits: logits[..., ::2],
    "classes-first": lambda logits: logits.movedim(-1, 0).contiguous().movedim(0, -1),
    "padded": lambda logits: logits[..., :-3],
    "one-row": lambda logits: logits[0, 0],
    "no-rows": lambda logits: logits[:, :0],
    "no-batch": lambda logits: logits[:0],
}


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


def test_chunks_of_a_small_budget() -> None:
    # On the CPU and for strided columns the rows are copied, a chunk at a time.
    logits, target = make_logits((4, 9), dtype=torch.float64)
    with config.override(chunk_budget_bytes=3 * 11 * 8):
        for view in (None, VIEWS["shifted"], VIEWS["classes-first"]):
            these = target[:, :-1] if view is VIEWS["shifted"] else target
            check("cross_entropy", logits, these, view=view)
            check("log_softmax", logits, these, view=view)


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


@pytest.mark.parametrize("ignore_index", [0, 3, -1, 255, -(2**40)])
def test_ignore_index(ignore_index: int, device: torch.device) -> None:
    logits, target = make_logits(device=device, ignore_index=ignore_index)
    for name in ("cross_entropy", "log_softmax"):
        _, grad = check(name, logits, target, ignore_index=ignore_index)
        assert not grad[target == ignore_index].any()


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


@pytest.mark.parametrize("value", [11, -1, 2**31 - 1])
def test_target_out_of_range_on_cpu(value: int) -> None:
    logits, target = make_logits((2, 7))
    target.view(-1)[5] = value
    with pytest.raises(TargetOutOfRangeError, match=rf"target: .*got {value} in row 5"):
        cross_entropy(logits, target)
    with pytest.raises(TargetOutOfRangeError, match=rf"index: .*got {value} in row 5"):
        selective_log_softmax(logits, target)
    # Also where rows are visited in another order.
    with pytest.raises(TargetOutOfRangeError, match=rf"target: .*got {value} in row 5"):
        cross_entropy(logits.transpose(0, 1).contiguous().transpose(0, 1), target)


@pytest.mark.gpu
def test_target_out_of_range_on_cuda() -> None:
    logits, target = make_logits(device="cuda")
    target[:] = torch.arange(13, device="cuda") % 11
    target[5] = 11
    for function, options in ((cross_entropy, {"reduction": "none"}), (selective_log_softmax, {})):
        result, grad = run(function, logits, target, **options)
        bad = torch.arange(13, device="cuda") == 5
        assert torch.equal(result.isnan(), bad)
        assert torch.equal(grad.isnan().any(1), bad)


def test_temperature_out_of_range_on_cpu() -> None:
    logits, index = make_logits()
    temperature = torch.ones(13)
    temperature[0] = -1.0
    with pytest.raises(ValueError, match=r"temperature: expected a positive number, .*in row 0"):
        selective_log_softmax(logits, index, temperature=temperature)


# ------------------------------------------------------------------------------ autograd contract


def calls() -> dict[str, Callable[..., Tensor]]:
    return {
        "mean": cross_entropy,
        "none": lambda *args: cross_entropy(*args, reduction="none"),
        "log_softmax": selective_log_softmax,
    }


by_call = pytest.mark.parametrize("name", calls())


@by_call
def test_logits_are_only_read(name: str, device: torch.device) -> None:
    # Two losses on the same logits: issues B32, B33, B34.
    logits, target = make_logits(device=device)
    leaf = logits.clone().requires_grad_()
    version = leaf._version
    loss = calls()[name](leaf, target).sum() + 0.1 * leaf.square().mean()
    loss.backward()
    assert torch.equal(leaf, logits)
    assert leaf._version == version
    alone = run(calls()[name], logits, target)[1]
    torch.testing.assert_close(leaf.grad, alone + 0.2 * logits / logits.numel())


@by_call
def test_writing_over_logits_before_the_backward_is_noticed(name: str) -> None:
    logits, target = make_logits()
    leaf = logits.requires_grad_()
    scores = leaf * 1.0
    loss = calls()[name](scores, target).sum()
    with torch.no_grad():
        scores.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@by_call
def test_retained_graph(name: str, device: torch.device) -> None:
    logits, target = make_logits(device=device)
    leaf = logits.requires_grad_()
    result = calls()[name](leaf, target)
    zero, first, once, second = (
        torch.autograd.grad(result, leaf, torch.full_like(result, factor), retain_graph=keep)[0]
        for factor, keep in ((0.0, True), (3.0, True), (1.0, True), (3.0, False))
    )
    assert not zero.any()
    assert torch.equal(first, second)
    torch.testing.assert_close(first, 3.0 * once)
    with pytest.raises(RuntimeError, match="second time"):
        result.sum().backward()


@by_call
def test_second_derivative_raises(name: str) -> None:
    logits, target = make_logits(dtype=torch.float64)
    leaf = logits.requires_grad_()
    result = calls()[name](leaf, target)
    upstream = torch.ones_like(result).requires_grad_()
    (grad,) = torch.autograd.grad(result, leaf, upstream, create_graph=True)
    for wanted in (leaf, upstream):
        with pytest.raises(NotDifferentiableTwiceError, match="reference"):
            torch.autograd.grad(grad.sum(), wanted, retain_graph=True)


@by_call
def test_forward_mode_raises(name: str) -> None:
    logits, target = make_logits()
    with forward_ad.dual_level(), pytest.raises(ForwardModeError, match="reference"):
        calls()[name](forward_ad.make_dual(logits, torch.ones_like(logits)), target)


@by_call
@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev", "vmap", "per-sample"])
def test_torch_func(transform: str, name: str) -> None:
    logits, target = make_logits((3, 4), dtype=torch.float64)

    def apply(function: Callable[..., Tensor]) -> Any:
        def loss(scores: Tensor) -> Tensor:
            return function(scores, target).square().sum()

        if transform == "vjp":
            value, pull = torch.func.vjp(loss, logits)
            return pull(torch.full_like(value, 2.0))
        if transform == "vmap":
            return torch.func.vmap(function)(logits, target)
        if transform == "per-sample":
            return torch.func.vmap(torch.func.grad(lambda *args: function(*args).square().sum()))(
                logits, target
            )
        return getattr(torch.func, transform)(loss)(logits)

    def plainly(scores: Tensor, classes: Tensor) -> Tensor:
        if name == "log_softmax":
            return reference.selective_log_softmax(scores, classes)
        losses = F.cross_entropy(
            scores.reshape(-1, scores.shape[-1]), classes.reshape(-1), reduction="none"
        ).reshape(classes.shape)
        return losses.sum() / (classes != -100).sum() if name == "mean" else losses

    torch.testing.assert_close(apply(calls()[name]), apply(plainly))


@by_call
def test_without_gradients(name: str, device: torch.device) -> None:
    logits, target = make_logits(device=device)
    leaf = logits.requires_grad_()
    with_graph = calls()[name](leaf, target)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            without = calls()[name](leaf, target)
        assert not without.requires_grad
        assert torch.equal(without, with_graph)


def test_autocast_casts_nothing(device: torch.device) -> None:
    logits, target = make_logits(device=device)
    with torch.autocast(device.type, torch.bfloat16):
        inside = run(cross_entropy, logits, target)
        log_probs = run(selective_log_softmax, logits, target)
    for one, other in ((inside, run(cross_entropy, logits, target)),
                       (log_probs, run(selective_log_softmax, logits, target))):  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_gradients_that_the_op_was_not_told_to_make() -> None:
    logits, target = make_logits()
    leaf = logits.requires_grad_()
    with pytest.raises(ValueError, match="need_grad_logits: expected True"):
        torch.ops.greyhound.cross_entropy(leaf, target)
    with pytest.raises(ValueError, match="need_grad_logits: expected True"):
        torch.ops.greyhound.selective_log_softmax(leaf, target)
    with pytest.raises(ValueError, match="need_grad_temperature: expected True"):
        torch.ops.greyhound.selective_log_softmax(
            leaf.detach(), target, torch.ones(13).requires_grad_()
        )
    with pytest.raises(ValueError, match="class_weight: expected a tensor that needs no gradient"):
        cross_entropy(leaf, target, class_weight=torch.ones(11).requires_grad_())


# --------------------------------------------------------------------------------------- memory


@by_call
@pytest.mark.parametrize("view", [None, "shifted", "classes-first"])
def test_peak_memory(view: str | None, name: str, device: torch.device) -> None:
    # bf16 on the CPU, where the copies in fp32 are twice as large as what they copy.
    logits, target = make_logits((3, 9), 4000, dtype=torch.bfloat16, device=device)
    look = (lambda value: value) if view is None else VIEWS[view]
    target = target[:, :-1] if view == "shifted" else target
    chunk = 4000 * 4
    with config.override(chunk_budget_bytes=chunk):
        leaf = logits.requires_grad_()
        viewed = look(leaf)
        call = calls()[name]
        call(viewed, target).sum().backward()
        leaf.grad = None
        viewed = look(leaf)
        with peak_memory(device) as forward:
            result = call(viewed, target)
        with peak_memory(device) as backward:
            (grad,) = torch.autograd.grad(result.sum(), viewed)
    slack = 4 * chunk + 100 * target.numel()
    assert slack < logits.nbytes / 3
    assert forward.bytes <= slack
    assert backward.bytes <= grad.nbytes + slack


# ------------------------------------------------------------------------------------- compiled

OPS = torch.ops.greyhound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("shape", [(13,), (2, 3), (), (0,)], ids=str)
def test_opcheck(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits, target = make_logits(shape, dtype=dtype)
    temperature = torch.rand(shape, dtype=dtype) + 0.5
    with torch.no_grad():
        losses, statistics, _ = OPS.cross_entropy(logits, target, reduction="none")
        _, log_statistics = OPS.selective_log_softmax(logits, target, temperature)
    torch.library.opcheck(
        OPS.cross_entropy_backward.default, (logits, target, statistics, losses), {"z_loss": 0.1}
    )
    both = {"need_grad_logits": True, "need_grad_temperature": True}
    torch.library.opcheck(
        OPS.selective_log_softmax_backward.default,
        (logits, target, log_statistics, losses, temperature),
        both,
    )
    leaf = logits.clone().requires_grad_()
    for reduction in REDUCTIONS:
        torch.library.opcheck(
            OPS.cross_entropy.default,
            (leaf, target),
            {"reduction": reduction, "need_grad_logits": True, "softcap": 2.0},
        )
    torch.library.opcheck(
        OPS.selective_log_softmax.default, (leaf, target, temperature.requires_grad_()), both
    )


@pytest.mark.parametrize("layout", ["shifted", "transposed", "classes-first", "padded"])
def test_opcheck_of_views(layout: str) -> None:
    logits = VIEWS[layout](torch.randn(3, 7, 13)).detach().requires_grad_()
    target = torch.randint(0, logits.shape[-1], logits.shape[:-1])
    torch.library.opcheck(
        OPS.cross_entropy.default, (logits, target), {"need_grad_logits": True, "reduction": "none"}
    )
    torch.library.opcheck(
        OPS.selective_log_softmax.default, (logits, target), {"need_grad_logits": True}
    )


@pytest.mark.gpu
def test_opcheck_on_cuda() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits, target = make_logits(dtype=dtype, device="cuda")
        leaf = logits.requires_grad_()
        for op in (OPS.cross_entropy, OPS.selective_log_softmax):
            torch.library.opcheck(op.default, (leaf, target), {"need_grad_logits": True})


@by_call
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(name: str, device: torch.device) -> None:
    def function(logits: Tensor, target: Tensor) -> Tensor:
        return calls()[name](logits.tanh()[:, :-1], target).square()

    for backend, dynamic in (("aot_eager", False), ("aot_eager", True)):
        call = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
        logits, _ = make_logits((3, 6), device=device)
        _, target = make_logits((3, 5), device=device)
        for ours, eager in zip(
            run(call, logits, target, 0.3), run(function, logits, target, 0.3), strict=True
        ):
            torch.testing.assert_close(ours, eager)


@pytest.mark.usefixtures("fresh_compiler")
def test_one_compile_serves_every_row_count() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def function(logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits, target) + selective_log_softmax(logits, target).exp().sum()

    call = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    first = None
    for rows in (7, 11, 3, 200):
        logits, target = make_logits((rows,))
        for ours, eager in zip(
            run(call, logits, target), run(function, logits, target), strict=True
        ):
            torch.testing.assert_close(ours, eager)
        first = counter.frame_count if first is None else first
    assert counter.frame_count == first


# -------------------------------------------------------------------------------- bad arguments

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tensor": ({"logits": [1.0]}, TypeError, "logits: expected a tensor"),
    "integers": ({"logits": torch.ones(13, 11).long()}, TypeError, "logits: expected dtype"),
    "no classes": ({"logits": torch.ones(13, 0)}, ValueError, "logits: expected shape"),
    "scalar": ({"logits": torch.tensor(1.0)}, ValueError, "logits: expected shape"),
    "shape": ({"second": torch.zeros(12).long()}, ValueError, "NAME: expected shape"),
    "dtype": ({"second": torch.zeros(13)}, TypeError, "NAME: expected dtype"),
    "second": ({"second": [0] * 13}, TypeError, "NAME: expected a tensor"),
    "device": ({"second": torch.zeros(13, device="meta").long()}, ValueError, "NAME: expected a"),
    "ignore_index": ({"ignore_index": 1.5}, TypeError, "ignore_index: expected an int"),
}


@pytest.mark.parametrize("name", ["target", "index"])
@pytest.mark.parametrize("case", BAD)
def test_bad_argument(case: str, name: str) -> None:
    changes, error, message = BAD[case]
    logits, second = make_logits()
    arguments = {"logits": logits, "second": second, **changes}
    arguments[name] = arguments.pop("second")
    function = cross_entropy if name == "target" else selective_log_softmax
    with pytest.raises(error, match=message.replace("NAME", name)):
        function(**arguments)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"reduction": "avg"}, ValueError),
        ({"label_smoothing": 1.5}, ValueError),
        ({"z_loss": -1.0}, ValueError),
        ({"logit_scale": math.nan}, ValueError),
        ({"softcap": 0.0}, ValueError),
        ({"class_weight": torch.ones(10)}, ValueError),
        ({"class_weight": torch.ones(11, device="meta")}, ValueError),
        ({"class_weight": torch.ones(11).long()}, TypeError),
    ],
    ids=str,
)
def test_bad_option_of_cross_entropy(options: dict[str, Any], error: type[Exception]) -> None:
    name = next(iter(options))
    with pytest.raises(error, match=f"{name}: expected"):
        cross_entropy(*make_logits(), **options)
    if name != "class_weight":
        with pytest.raises(error, match=f"{name}: expected"):
            LogitsCrossEntropyLoss(**options)


@pytest.mark.parametrize("temperature", [0.0, -1, math.inf, torch.ones(11), "1"], ids=str)
def test_bad_temperature(temperature: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="temperature: expected"):
        selective_log_softmax(*make_logits(), temperature=temperature)


def test_statistics_of_another_call_are_refused() -> None:
    logits, target = make_logits()
    for op in (OPS.cross_entropy_backward, OPS.selective_log_softmax_backward):
        with pytest.raises(ValueError, match="statistics: expected shape"):
            op(logits, target, torch.ones(2, 12), torch.ones(13))
    with pytest.raises(ValueError, match="need_grad_temperature: expected False"):
        OPS.selective_log_softmax(logits, target, need_grad_temperature=True)


def test_module_is_the_function(device: torch.device) -> None:
    logits, target = make_logits(device=device)
    options: dict[str, Any] = {"label_smoothing": 0.1, "softcap": 3.0, "reduction": "none"}
    weight = class_weights(11, device)
    module = LogitsCrossEntropyLoss(weight, **options).to(device)
    expected = cross_entropy(logits, target, class_weight=weight, **options)
    assert torch.equal(module(logits, target), expected)
    assert "label_smoothing=0.1" in repr(module)
    assert list(module.state_dict()) == ["class_weight"]
