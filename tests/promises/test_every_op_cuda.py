"""Promises of every op that only GPUs can show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from greyhound_ops import functional
from greyhound_ops.ops import live_loop
from greyhound_ops.ops.chunk_loop import GradientNeeds
from promises.every_op import OPS, Step, assert_same, make_step, train

pytestmark = pytest.mark.gpu
by_op = pytest.mark.parametrize("name", OPS)
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def learn(name: str, step: Step) -> list[torch.Tensor]:
    """Loss and gradients; nothing here but the op could wait for the device."""
    loss = OPS[name](step, **({} if name == "logits" else {"chunk_size": 7}))
    upstream = torch.full((), -1.75, dtype=loss.dtype, device=loss.device)
    return [loss.detach(), *torch.autograd.grad(loss, step.leaves(), upstream)]


@by_op
def test_no_host_sync(name: str) -> None:
    step = make_step(device="cuda").fresh()
    learn(name, step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        learn(name, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@by_op
def test_cuda_graph_with_new_targets_and_weights(name: str) -> None:
    static = make_step(device="cuda").fresh()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            learn(name, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = learn(name, static)
    for seed in (1, 2, 3):
        other = make_step(device="cuda", seed=seed)
        other.target[:, : seed + 1] = -100  # another number of rows that count
        with torch.no_grad():
            for name_of in ("input", "weight", "target", "bias"):
                getattr(static, name_of).copy_(getattr(other, name_of))
        graph.replay()
        torch.cuda.synchronize()
        for value, expected in zip(captured, learn(name, other.fresh()), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


@needs_two
@by_op
def test_second_device(name: str) -> None:
    wanted = train(name, make_step(device="cuda:0"))
    step = make_step(device="cuda:1")
    for current in (0, 1):
        with torch.cuda.device(current):
            result = train(name, step)
            assert torch.cuda.current_device() == current
        for value, expected in zip(result, wanted, strict=True):
            assert value.device == torch.device("cuda:1")
            torch.testing.assert_close(value.cpu(), expected.cpu(), rtol=1e-5, atol=1e-6)


@needs_two
@pytest.mark.parametrize("moved", ["weight", "target", "bias"])
@pytest.mark.parametrize("name", sorted(set(OPS) - {"logits", "loss"}))
def test_operands_on_two_devices_raise(name: str, moved: str) -> None:
    step = make_step(device="cuda:0")
    values = {each: getattr(step, each) for each in ("input", "weight", "target", "bias")}
    values[moved] = values[moved].to("cuda:1")
    with pytest.raises(ValueError, match="device"):
        train(name, Step(**values))


HUGE_CLASSES, HUGE_HIDDEN = 2**20 + 3, 2049  # together more than 2^31


@pytest.mark.parametrize(
    ("op", "rows", "hidden"),
    [
        ("cross-entropy", 40, HUGE_HIDDEN),
        ("cross-entropy", 300, HUGE_HIDDEN + 7),  # the loop over the rows that count
        ("log-probs", 40, HUGE_HIDDEN),
        ("distillation", 40, HUGE_HIDDEN),
        ("loss", 40, HUGE_HIDDEN),
    ],
)
def test_a_weight_of_more_than_int32_elements(op: str, rows: int, hidden: int) -> None:
    device = "cuda"
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "generator": generator}
    weight = torch.randn(HUGE_CLASSES, hidden, **options).mul_(0.05).requires_grad_()
    assert weight.numel() > 2**31
    input = torch.randn(rows, hidden, **options).requires_grad_()
    target = torch.randint(0, HUGE_CLASSES, (rows,), device=device, generator=generator)
    target[-1], target[0] = HUGE_CLASSES - 1, 0
    if op == "cross-entropy":
        if rows == 300:
            needs = GradientNeeds(True, True, False)
            assert live_loop.serves(input, weight, needs, torch.bfloat16)
        loss = functional.chunked_linear_cross_entropy(
            input, weight, target, reduction="sum", chunk_size=16 if rows < 300 else 128
        )
    elif op == "log-probs":
        loss = -functional.chunked_linear_log_probs(input, weight, target, chunk_size=16).sum()
    elif op == "loss":
        function = functional.autograd_loss_and_logits_grad(summed_cross_entropy)
        loss = functional.chunked_linear_loss(input, weight, function, target, chunk_size=16)
    else:
        teacher = input.detach().flip(0), weight.detach()
        loss = functional.chunked_linear_distillation(
            input, weight, *teacher, target, soft_weight=0.0, hard_weight=1.0, reduction="sum",
            chunk_size=16,
        )  # fmt: skip
    loss.backward()
    with torch.no_grad():
        logits = (input @ weight.t()).float()
        probabilities = logits.softmax(-1)
        truth = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
        probabilities[torch.arange(rows, device=device), target] -= 1.0
        torch.testing.assert_close(loss.detach(), truth, rtol=1e-4, atol=1e-3)
        # The ends: a wrapped offset reads or writes the wrong one.
        for part in (slice(0, 64), slice(HUGE_CLASSES - 64, HUGE_CLASSES)):
            expected = probabilities[:, part].t() @ input.float()
            error = (weight.grad[part].float() - expected).norm() / expected.norm()
            assert error < 2e-2, part
        expected = probabilities.to(torch.bfloat16) @ weight
        error = (input.grad.float() - expected.float()).norm() / expected.float().norm()
        assert error < 2e-2


def summed_cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), target, reduction="sum")


@by_op
def test_another_stream_and_many_steps(name: str) -> None:
    # Memory that a step has given back must not be reused before the step is done with it.
    step = make_step(8, 64, 32, 777, dtype=torch.bfloat16, device="cuda")
    wanted = train(name, step)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for index in range(12):
        with torch.cuda.stream(streams[index % 3]):
            results.append(train(name, step))
    torch.cuda.synchronize()
    for result in results:
        assert_same(result, wanted)
