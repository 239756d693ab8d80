"""Whatever fails inside an op: the error comes out as it is, and nothing is left half done."""

from __future__ import annotations

import gc
import sys
import weakref
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops import functional
from greyhound_ops.ops import kernel_failures, linear_log_probs
from promises.every_op import OPS, Step, assert_same, make_step, train

#: Places to fail at, of each op: spread over all that it does.
PLACES = 8


class FailAt:
    """Raises instead of one call of torch that this project's ops make, forward or backward.

    By the interpreter's own hook: modes of torch do not see into an operator.
    """

    def __init__(self, place: int) -> None:
        self.place, self.seen = place, 0

    def __enter__(self) -> FailAt:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call":
            return
        owner = getattr(function, "__self__", None)
        if not (isinstance(owner, Tensor) or owner is torch._C._VariableFunctions):
            return
        if function.__name__ == "view":
            return  # takes no memory, and an op may try whether there is one
        if frame.f_globals.get("__name__", "").startswith("greyhound_ops.ops."):
            self.seen += 1
            if self.seen == self.place:
                raise torch.OutOfMemoryError(f"out of memory in {function.__name__}")


def state() -> tuple[Any, ...]:
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        *(str(each) for each in keys),
        kernel_failures.pytorch_only(),
    )


def learn(name: str, step: Step) -> None:
    options = {} if name == "logits" else {"chunk_size": 6}
    (OPS[name](step, **options) * -1.75).backward()


@pytest.mark.parametrize("name", OPS)
def test_out_of_memory_anywhere(name: str) -> None:
    step = make_step()
    wanted = train(name, step)
    before = state()
    leaves = step.fresh()
    with FailAt(0) as count:
        learn(name, leaves)
    assert count.seen > 5
    for index in range(PLACES):
        place = 1 + index * (count.seen - 1) // (PLACES - 1)
        leaves = step.fresh()
        grads = [torch.full_like(each, 3.0) for each in leaves.leaves()]
        for leaf, grad in zip(leaves.leaves(), grads, strict=True):
            leaf.grad = grad
        with pytest.raises(torch.OutOfMemoryError), FailAt(place):
            learn(name, leaves)
        for leaf, grad in zip(leaves.leaves(), grads, strict=True):
            assert leaf.grad is grad
            assert grad.eq(3.0).all()
        assert state() == before
    assert_same(train(name, step), wanted)


def test_a_backward_that_failed_half_way_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kept logits are half logits and half their gradient."""
    leaves = make_step().fresh()
    loss = OPS["log-probs-kept"](leaves, chunk_size=6)
    inner, chunks = linear_log_probs.backward_rows, []

    def failing(*args: Any, **options: Any) -> Any:
        chunks.append(inner(*args, **options))
        if len(chunks) == 2:
            raise torch.OutOfMemoryError("in the second chunk")
        return chunks[-1]

    with monkeypatch.context() as patch:
        patch.setattr(linear_log_probs, "backward_rows", failing)
        with pytest.raises(torch.OutOfMemoryError, match="in the second chunk"):
            loss.backward()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|second time"):
        loss.backward()
    assert all(leaf.grad is None for leaf in leaves.leaves())


def test_memory_is_free_after_a_failure() -> None:
    step = make_step().fresh()
    seen: list[weakref.ref[Tensor]] = []

    def loss(logits: Tensor) -> Tensor:
        seen.append(weakref.ref(logits))
        if len(seen) == 3:
            raise torch.OutOfMemoryError("in the callable")
        return logits.square().sum()

    function = functional.autograd_loss_and_logits_grad(loss)
    with pytest.raises(torch.OutOfMemoryError, match="in the callable"):
        functional.chunked_linear_loss(step.input, step.weight, function, chunk_size=6)
    gc.collect()
    assert [each() for each in seen] == [None] * 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopIteration, ValueError, RecursionError])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_exception_in_a_callable(
    error: type[BaseException], compiled: bool, fresh_compiler: None
) -> None:
    step = make_step()
    fails = [True]

    @torch.compiler.disable
    def check() -> None:
        if fails[0]:
            raise error("on purpose")

    def loss(logits: Tensor) -> Tensor:
        check()
        return logits.square().sum()

    function = functional.autograd_loss_and_logits_grad(loss)

    def call(input: Tensor, weight: Tensor) -> Tensor:
        return functional.chunked_linear_loss(input, weight, function, chunk_size=6)

    if compiled:
        call = torch.compile(call, backend="aot_eager")
    leaves = step.fresh()
    before = state()
    with pytest.raises(error, match="on purpose"):
        call(leaves.input, leaves.weight)
    assert state() == before
    assert leaves.input.grad is None
    fails[0] = False
    call(leaves.input, leaves.weight).backward()
    logits = step.input @ step.weight.t()
    torch.testing.assert_close(leaves.input.grad, 2.0 * logits @ step.weight)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_out_of_memory_on_a_gpu(name: str) -> None:
    big = make_step(8, 256, 64, 65536, dtype=torch.bfloat16, device="cuda")
    small = make_step(dtype=torch.bfloat16, device="cuda")
    wanted = train(name, small)
    options = {} if name == "logits" else {"chunk_size": 2048}
    train(name, big, **options)  # compiles what it needs; the logits are 256 MiB
    other = torch.ones(4, device="cuda", requires_grad=True)
    other.grad = torch.full_like(other, 3.0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    allowed = torch.cuda.memory_reserved() + 64 * 2**20
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            train(name, big, **options)
        assert_same(train(name, small), wanted)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert other.grad.eq(3.0).all()
    held = torch.cuda.memory_allocated()
    assert all(each.isfinite().all() for each in train(name, big, **options))
    gc.collect()
    assert torch.cuda.memory_allocated() <= held
