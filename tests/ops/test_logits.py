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
from greyhound_ops.testing import peak_memory
from logits_samples import VIEWS, check, class_weights, make_logits, run
from samples import REDUCTIONS, dtype_id

by_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


@pytest.mark.fault("B60")
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


def test_chunks_of_a_small_budget() -> None:
    # On the CPU and for strided columns the rows are copied, a chunk at a time.
    logits, target = make_logits((4, 9), dtype=torch.float64)
    with config.override(chunk_budget_bytes=3 * 11 * 8):
        for view in (None, VIEWS["shifted"], VIEWS["classes-first"]):
            these = target[:, :-1] if view is VIEWS["shifted"] else target
            check("cross_entropy", logits, these, view=view)
            check("log_softmax", logits, these, view=view)


@pytest.mark.parametrize("ignore_index", [0, 3, -1, 255, -(2**40)])
def test_ignore_index(ignore_index: int, device: torch.device) -> None:
    logits, target = make_logits(device=device, ignore_index=ignore_index)
    for name in ("cross_entropy", "log_softmax"):
        _, grad = check(name, logits, target, ignore_index=ignore_index)
        assert not grad[target == ignore_index].any()


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


@pytest.mark.fault("B32", "B33", "B34")
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


@pytest.mark.fault("B33")
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
