"""Explicit calls under torch.compile: one graph, one compile, the gradients of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from greyhound_ops import ChunkedLinearCrossEntropyLoss
from greyhound_ops.functional import chunked_linear_cross_entropy
from samples import (
    CASES,
    REDUCTIONS,
    Sample,
    assert_equal_results,
    check_against_reference,
    dtype_id,
    make_sample,
    run,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")
by_dynamic = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
by_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


def head(**options: Any) -> Callable[..., Tensor]:
    """Something before the call and something after it, so that there is a graph around it."""

    def call(
        input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Any
    ) -> Tensor:
        loss = chunked_linear_cross_entropy(
            input.tanh(), weight, target, bias, class_weight=class_weight, **options
        )
        return loss.square()

    return call


def compiled(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


def assert_as_eager(
    function: Callable[..., Tensor], sample: Sample, *, rtol: float = 1e-5, **options: Any
) -> None:
    frozen = options.pop("frozen", ())
    ours = run(compiled(function, **options), sample, frozen=frozen)
    assert_equal_results(ours, run(function, sample, frozen=frozen), rtol=rtol, atol=rtol)


@pytest.mark.fault("B29", "B44", "B49")
@by_dynamic
@by_reduction
@pytest.mark.parametrize("case", ["plain", "all"])
def test_gradients(case: str, reduction: str, dynamic: bool, device: torch.device) -> None:
    wanted, options = CASES[case]
    sample = make_sample(device=device, **wanted)
    assert_as_eager(head(reduction=reduction, chunk_size=5, **options), sample, dynamic=dynamic)


@pytest.mark.fault("B29", "B30")
@by_reduction
@pytest.mark.parametrize("frozen", [("input",), ("weight", "bias"), ("bias",)], ids="+".join)
def test_frozen(frozen: tuple[str, ...], reduction: str) -> None:
    assert_as_eager(head(reduction=reduction), make_sample(bias=True), frozen=frozen)


@by_reduction
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_reduced_precision(dtype: torch.dtype, reduction: str, device: torch.device) -> None:
    # fp16 keeps its gradients undivided until the backward: other outputs, other saved tensors.
    sample = make_sample(dtype=dtype, device=device)
    assert_as_eager(head(reduction=reduction, chunk_size=5), sample, rtol=1e-2)


def recompiles(function: Callable[..., Tensor], samples: list[Sample], dynamic: bool) -> int:
    """How many compiles came after the first call's; every result is compared with eager.

    The first call may trace twice: with dynamic=True Dynamo first makes symbols of the float
    options, then learns from the op that they are constants.
    """
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(function, backend=counter, dynamic=dynamic or None)
    first = None
    for sample in samples:
        assert_equal_results(run(call, sample), run(function, sample), rtol=1e-5, atol=1e-5)
        first = counter.frame_count if first is None else first
    return counter.frame_count - first


@pytest.mark.fault("B40")
@by_dynamic
@by_reduction
def test_one_compile_serves_every_row_count(reduction: str, dynamic: bool) -> None:
    samples = [make_sample(rows) for rows in range(7, 47, 4)]
    # Without dynamic=True the first size is taken as a constant and the second makes it a symbol.
    assert recompiles(head(reduction=reduction), samples, dynamic) == (0 if dynamic else 1)


@pytest.mark.fault("B40")
@by_reduction
def test_guards_do_not_hold_the_chunk_arithmetic(reduction: str) -> None:
    # N from one chunk to many, dividing and not.
    samples = [make_sample(rows) for rows in (3, 4, 5, 8, 9, 200)]
    assert recompiles(head(reduction=reduction, chunk_size=4), samples, dynamic=True) == 0


@by_reduction
def test_batch_dimensions_may_vary_too(reduction: str) -> None:
    samples = [make_sample(shape) for shape in ((2, 5), (3, 4), (6, 7))]
    assert recompiles(head(reduction=reduction), samples, dynamic=True) == 0


@by_reduction
def test_no_grad(reduction: str) -> None:
    function = head(reduction=reduction)
    sample = make_sample()
    call = compiled(function)
    trained = run(call, sample)
    with torch.no_grad():
        # The same function again: the flags must not be remembered from the call before.
        loss = call(sample.input, sample.weight.requires_grad_(), sample.target, None, None)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, trained.loss)


@by_reduction
def test_autocast(reduction: str) -> None:
    sample = make_sample(bias=True)

    def function(*args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return head(reduction=reduction)(*args, **kwargs)

    assert_as_eager(function, sample)


@by_reduction
def test_transposed_weight(reduction: str) -> None:
    sample = make_sample(hidden=6)

    def function(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return head(reduction=reduction)(input, weight.t().contiguous().t(), *args, **kwargs)

    assert_as_eager(function, sample)


def test_bad_argument_is_reported_while_tracing() -> None:
    sample = make_sample()
    with pytest.raises(Exception, match="target: expected shape"):
        run(compiled(head()), sample.replace(target=sample.target[:3]))


def test_module() -> None:
    module = ChunkedLinearCrossEntropyLoss(torch.rand(11), label_smoothing=0.1, chunk_size=5)

    def function(*args: Any, class_weight: Any) -> Tensor:
        return module(*args)

    assert_as_eager(function, make_sample(bias=True))


@pytest.mark.fault("B44")
@by_reduction
def test_inductor(reduction: str, device: torch.device) -> None:
    sample = make_sample(device=device, bias=True)
    function = head(reduction=reduction, chunk_size=5)
    assert_as_eager(function, sample, backend="inductor", dynamic=True)


def test_inductor_keeps_a_graph_that_is_retained() -> None:
    # In a compiled backward the buffer of the stored gradient is donated unless it is kept.
    sample = make_sample()
    call = compiled(head(), backend="inductor")
    weight = sample.weight.requires_grad_()
    with torch._functorch.config.patch(donated_buffer=False):
        loss = call(sample.input, weight, sample.target, None, None)
        first, second = (
            torch.autograd.grad(loss, weight, torch.tensor(3.0), retain_graph=True)[0]
            for _ in range(2)
        )
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_inductor_at_reduced_precision(device: torch.device) -> None:
    sample = make_sample(dtype=torch.bfloat16, device=device)
    check_against_reference(
        sample,
        function=compiled(chunked_linear_cross_entropy, backend="inductor"),
        upstream=1.5,
        reduction="sum",
    )


# ----------------------------------------------------------------------------------------- flops

PRODUCT = 2 * 13 * 8 * 11


@pytest.mark.parametrize(
    ("reduction", "frozen", "products"),
    [
        ("mean", (), 3),
        ("sum", ("weight",), 2),
        ("mean", ("input",), 2),
        ("mean", ("input", "weight"), 1),
        # The backward projects once more.
        ("none", (), 4),
        ("none", ("input",), 3),
        ("none", ("weight",), 2),
    ],
    ids=str,
)
def test_flops(reduction: str, frozen: tuple[str, ...], products: int) -> None:
    with FlopCounterMode(display=False) as counter:
        run(chunked_linear_cross_entropy, make_sample(), reduction=reduction, frozen=frozen)
    assert counter.get_total_flops() == products * PRODUCT


def test_flops_of_bias_alone() -> None:
    # No product makes it, but by rows the logits are projected twice.
    frozen = ("input", "weight")
    for reduction, products in (("sum", 1), ("none", 2)):
        with FlopCounterMode(display=False) as counter:
            run(
                chunked_linear_cross_entropy,
                make_sample(bias=True),
                reduction=reduction,
                frozen=frozen,
            )
        assert counter.get_total_flops() == products * PRODUCT
