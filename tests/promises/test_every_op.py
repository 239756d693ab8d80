"""Promises that every op makes, on every device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import greyhound_ops
from greyhound_ops.errors import NotDifferentiableTwiceError, TargetOutOfRangeError
from greyhound_ops.testing import peak_memory, relative_error
from promises.every_op import CHUNKED, OPS, Step, assert_same, make_step, train

by_op = pytest.mark.parametrize("name", OPS)
REDUCED = [torch.float32, torch.bfloat16, torch.float16]


def dtype_of(name: str) -> torch.dtype:
    """Each dtype with some of the ops."""
    return REDUCED[list(OPS).index(name) % len(REDUCED)]


@pytest.fixture
def deterministic() -> object:
    # Uninitialised memory is NaN in this mode: what is not written shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@by_op
@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_twenty_runs_are_one(name: str, deterministic: object, device: torch.device) -> None:
    step = make_step(dtype=dtype_of(name), device=device)
    first = train(name, step)
    assert all(each.isfinite().all() for each in first)
    for _ in range(19):
        assert_same(train(name, step), first)


@by_op
def test_retained_graph(name: str, device: torch.device) -> None:
    step = make_step(dtype=torch.float64, device=device).fresh()
    loss = OPS[name](step)
    grads = [
        torch.autograd.grad(loss * factor, step.leaves(), retain_graph=True)
        for factor in (1.0, -3.0, 0.0, 1.0)
    ]
    for one, three, none, again in zip(*grads, strict=True):
        assert torch.equal(one, again)
        torch.testing.assert_close(three, -3.0 * one, rtol=1e-12, atol=1e-14)
        assert not none.any()


@by_op
def test_second_derivatives_are_refused(name: str, device: torch.device) -> None:
    step = make_step(device=device).fresh()
    grads = torch.autograd.grad(OPS[name](step), step.leaves(), create_graph=True)
    with pytest.raises(NotDifferentiableTwiceError):
        sum(each.square().sum() for each in grads).backward()


# What torch.func differentiates here; the rest says that it does not.
DIFFERENTIATED = {"cross-entropy", "log-probs", "distillation", "logits", "dpo", "kto", "grpo"}


def attempt(function: Callable[..., Any], *values: Tensor) -> tuple[Tensor, ...] | str:
    """Results, or what the refusal says."""
    try:
        return function(*values)
    except (NotImplementedError, RuntimeError) as error:
        return str(error)


def right_or_refused(name: str, step: Step, compiled: bool) -> None:
    wanted = torch.autograd.grad(OPS[name](step), step.leaves())

    def loss(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return OPS[name](Step(input, weight, step.target, bias))

    function = torch.func.grad(loss, argnums=(0, 1, 2))
    if compiled:
        function = torch.compile(function, backend="aot_eager")
    made = attempt(function, *(each.detach() for each in step.leaves()))
    if isinstance(made, str):
        # Under Dynamo it is torch that refuses, on every op with an autograd kernel.
        assert compiled or name not in DIFFERENTIATED
        assert "func" in made
        return
    for value, expected in zip(made, wanted, strict=True):
        torch.testing.assert_close(value, expected)


@by_op
def test_func_grad_is_right_or_refused(name: str) -> None:
    right_or_refused(name, make_step(dtype=torch.float64).fresh(), False)


@pytest.mark.parametrize("name", ["cross-entropy", "cross-entropy-by-row", "loss", "logits"])
def test_compiled_func_grad_is_right_or_refused(name: str, fresh_compiler: None) -> None:
    right_or_refused(name, make_step(dtype=torch.float64).fresh(), True)


@by_op
def test_threads(name: str, device: torch.device) -> None:
    steps = [
        make_step(2 + 2 * (k % 2), 3 + k, 4 + k, 9 + 5 * k, device=device, seed=k) for k in range(6)
    ]
    alone = [train(name, step) for step in steps]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            for one, other in zip(pool.map(lambda step: train(name, step), steps), alone,
                                  strict=True):  # fmt: skip
                for value, expected in zip(one, other, strict=True):
                    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


SHIFT_INVARIANT = sorted(set(OPS) - {"cross-entropy-by-row", "cross-entropy-lse", "loss"})


@pytest.mark.parametrize("name", SHIFT_INVARIANT)
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_offset_of_all_logits(name: str, offset: float, device: torch.device) -> None:
    step = make_step(dtype=torch.float64, device=device)
    moved = Step(step.input, step.weight, step.target, step.bias + offset)
    for one, other in zip(train(name, step), train(name, moved), strict=True):
        assert relative_error(other, one) < 1e-8
    # In float32 a logit of 1e4 has a last bit of 1e-3; what is made of it is no worse than that.
    narrow = Step(*(each.float() if each.is_floating_point() else each for each in
                    (moved.input, moved.weight, moved.target, moved.bias)))  # fmt: skip
    for one, other in zip(train(name, step), train(name, narrow), strict=True):
        assert relative_error(other, one) < 1e-2


# A class that only the student rules out makes its divergence infinite, as label smoothing does.
MASKED = sorted(set(OPS) - {"cross-entropy-lse", "distillation", "distillation-by-row"})


@pytest.mark.parametrize("name", MASKED)
def test_masked_vocabulary(name: str, device: torch.device) -> None:
    step = make_step(classes=12, dtype=torch.float64, device=device)
    bias = torch.cat((step.bias, torch.full_like(step.bias[:7], -torch.inf)))
    weight = torch.cat((step.weight, step.weight[:7]))
    wanted = train(name, step)
    made = train(name, Step(step.input, weight, step.target, bias))
    torch.testing.assert_close(made[:2], wanted[:2])
    for value, expected in zip(made[2:], wanted[2:], strict=True):
        torch.testing.assert_close(value[:12], expected)
        assert not value[12:].any(), "a class that cannot be has no gradient"


@pytest.mark.parametrize("name", sorted(set(OPS) - {"loss"}))
@pytest.mark.parametrize("label", [19, -1, -(2**40)])
def test_label_out_of_range(name: str, label: int) -> None:
    step = make_step()
    wanted = train(name, step)
    target = step.target.clone()
    target[2, 3] = label
    with pytest.raises(TargetOutOfRangeError, match=str(label)):
        train(name, Step(step.input, step.weight, target, step.bias))
    assert_same(train(name, step), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(set(OPS) - {"loss"}))
@pytest.mark.parametrize("label", [19, 2**20, -1])
def test_label_out_of_range_on_cuda(name: str, label: int) -> None:
    step = make_step(device="cuda")
    target = step.target.clone()
    target[2, 3] = label
    loss, grad_input, *_ = train(name, Step(step.input, step.weight, target, step.bias))
    assert loss.isnan()
    assert grad_input[2, 3].isnan().all()
    clean = train(name, step)
    assert all(each.isfinite().all() for each in clean)


@pytest.mark.parametrize("name", CHUNKED)
def test_no_logits_in_memory(name: str, device: torch.device) -> None:
    batch, tokens, classes = 4, 128, 1000
    step = make_step(batch, tokens, 4, classes, device=device)
    train(name, step, chunk_size=16)
    with peak_memory(device) as peak:
        train(name, step, chunk_size=16)
    logits = batch * tokens * classes * 4
    assert peak.bytes < logits / 3


@by_op
def test_fp16_with_a_scaler_that_overflows_and_recovers(name: str, device: torch.device) -> None:
    step = make_step(device=device).fresh()
    exact = train(name, Step(*(each.double() if each.is_floating_point() else each for each in
                               (step.input, step.weight, step.target, step.bias))))  # fmt: skip
    before = [each.detach().clone() for each in step.leaves()]
    optimizer = torch.optim.SGD(step.leaves(), lr=1.0)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**127, backoff_factor=2.0**-30)
    skipped = 0
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            loss = OPS[name](step) * -3.5  # beyond float32, times the scale
        scaler.scale(loss.float()).backward()
        scaler.unscale_(optimizer)
        finite = all(each.grad.isfinite().all() for each in step.leaves())
        if not finite:
            skipped += 1
            scaler.step(optimizer)
            assert_same([each.detach() for each in step.leaves()], before)
            scaler.update()
            continue
        break
    assert finite, "never recovered"
    assert skipped
    for leaf, expected in zip(step.leaves(), exact[1:], strict=True):
        assert relative_error(leaf.grad, 2.0 * expected) < 2e-2
    scaler.step(optimizer)
    assert not any(torch.equal(leaf, old) for leaf, old in zip(step.leaves(), before, strict=True))


FORKED = """
import os, sys
import torch
torch.set_num_threads(1)
from promises.every_op import OPS, make_step, train
child = os.fork()
results = {name: [each.tolist() for each in train(name, make_step())] for name in OPS}
if child == 0:
    os.write(int(sys.argv[1]), repr(results).encode())
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
sys.stdout.write(repr(results))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_fork_after_import(tmp_path: Path) -> None:
    root = Path(greyhound_ops.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"}
    file = (tmp_path / "child").open("w+b", buffering=0)
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(file.fileno())], capture_output=True, text=True,
        env=environment, pass_fds=[file.fileno()], timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    file.seek(0)
    assert file.read().decode() == done.stdout
