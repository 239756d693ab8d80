"""A Triton kernel that cannot be compiled: the op goes on in PyTorch, or raises, as configured."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from greyhound_ops import config, functional
from greyhound_ops.kernels import cross_entropy, distillation, log_probs, scale
from greyhound_ops.ops import kernel_failures
from promises.every_op import SQUARES, make_step, train

# The module of the kernels that an op launches, and their names there.
LAUNCHES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "cross-entropy": (cross_entropy, ("cross_entropy_kernel",)),
    "cross-entropy-by-row": (cross_entropy, ("cross_entropy_kernel",)),
    "log-probs": (log_probs, ("log_probs_kernel", "log_probs_backward_kernel")),
    "log-probs-kept": (log_probs, ("log_probs_kernel", "log_probs_backward_kernel")),
    "distillation": (distillation, ("distillation_kernel",)),
    "multi-token": (cross_entropy, ("cross_entropy_kernel",)),
    "logits": (cross_entropy, ("cross_entropy_kernel",)),
    "dpo": (log_probs, ("log_probs_kernel",)),
}
by_op = pytest.mark.parametrize("name", LAUNCHES)


class Broken:
    """Stands for a kernel; fails as a launch does."""

    def __init__(self, make: Callable[[], Exception], after: int = 0) -> None:
        self.make, self.after, self.launches = make, after, 0
        self.kernel: Any = None

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        self.launches += 1
        if self.launches <= self.after:
            return self.kernel[grid]

        def launch(*args: Any, **kwargs: Any) -> None:
            raise self.make()

        return launch


def out_of_resources() -> Exception:
    from triton.runtime.errors import OutOfResources

    return OutOfResources(300000, 232448, "shared memory")


def does_not_compile() -> Exception:
    from triton.compiler.errors import CompilationError

    return CompilationError("x = 1", None, "no such instruction")


def no_c_compiler() -> Exception:
    return RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")


def c_compiler_fails() -> Exception:
    return subprocess.CalledProcessError(1, ["gcc", "launcher.c"])


FAILURES = (out_of_resources, does_not_compile, no_c_compiler, c_compiler_fails)


@pytest.fixture(autouse=True)
def _triton_that_may_fail() -> Iterator[None]:
    kernel_failures.forget()
    with config.override(kernels="triton", kernel_failure="fallback"):
        yield
    kernel_failures.forget()


def break_kernels(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    failure: Callable[[], Exception] = out_of_resources,
    after: int = 0,
) -> list[Broken]:
    module, kernels = LAUNCHES[name]
    broken = []
    for each in kernels:
        broken.append(Broken(failure, after))
        broken[-1].kernel = getattr(module, each)
        monkeypatch.setattr(module, each, broken[-1])
    return broken


def in_pytorch(name: str) -> list[torch.Tensor]:
    with config.override(kernels="torch"):
        return train(name, make_step())


@by_op
def test_the_op_goes_on_in_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = in_pytorch(name)
    broken = break_kernels(monkeypatch, name)
    with pytest.warns(RuntimeWarning, match=r"_kernel|OutOfResources") as caught:
        result = train(name, make_step())
    assert all(each.launches <= 2 for each in broken)
    for one, other in zip(result, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    first = str(caught[0].message)
    assert f"{LAUNCHES[name][0].__name__.rsplit('.', 1)[1]}." in first, "names the kernel"
    assert "OutOfResources: out of resource: shared memory" in first, "names the cause"
    assert "GREYHOUND_KERNEL_FAILURE=raise" in first
    launches = [each.launches for each in broken]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(name, make_step())
    assert [each.launches for each in broken] == launches, "tried again"


@pytest.mark.parametrize("failure", FAILURES)
def test_failures(failure: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = in_pytorch("cross-entropy")
    break_kernels(monkeypatch, "cross-entropy", failure)
    with pytest.warns(RuntimeWarning, match=type(failure()).__name__):
        result = train("cross-entropy", make_step())
    for one, other in zip(result, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@by_op
def test_configured_to_raise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    break_kernels(monkeypatch, name)
    with config.override(kernel_failure="raise"), pytest.raises(OutOfResources):
        train(name, make_step())
    assert not kernel_failures.pytorch_only()


def test_a_failure_between_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the first chunks have added to the gradients must not be counted twice.
    wanted = in_pytorch("cross-entropy")
    broken = break_kernels(monkeypatch, "cross-entropy", after=2)
    with pytest.warns(RuntimeWarning, match="cross_entropy"):
        result = train("cross-entropy", make_step())
    assert broken[0].launches == 3
    for one, other in zip(result, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["log-probs", "log-probs-kept"])
@pytest.mark.parametrize("after", [0, 2])
def test_the_backward_alone_fails(name: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Statistics of Triton's forward, read by PyTorch's backward; logits that the first chunks have
    # written over are projected again.
    wanted = in_pytorch(name)
    kernel = Broken(out_of_resources, after)
    kernel.kernel = log_probs.log_probs_backward_kernel
    monkeypatch.setattr(log_probs, "log_probs_backward_kernel", kernel)
    with pytest.warns(RuntimeWarning, match="log_probs_backward"):
        result = train(name, make_step())
    for one, other in zip(result, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_scale_of_a_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = in_pytorch("cross-entropy")
    monkeypatch.setattr(scale, "scale_kernel", Broken(out_of_resources))
    with pytest.warns(RuntimeWarning, match=r"scale\.scale_"):
        result = train("cross-entropy", make_step())
    for one, other in zip(result, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_another_dtype_keeps_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = break_kernels(monkeypatch, "cross-entropy")[0]
    with pytest.warns(RuntimeWarning, match="float32"):
        train("cross-entropy", make_step())
    broken.after = 2**30
    launches = broken.launches
    train("cross-entropy", make_step(dtype=torch.bfloat16))
    assert broken.launches > launches


@pytest.mark.parametrize("error", [ValueError("of its own"), RuntimeError("launch failure")])
def test_other_errors_are_passed_on(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    # A kernel that ran and went wrong must not be hidden behind a second attempt.
    break_kernels(monkeypatch, "cross-entropy", lambda: error)
    with pytest.raises(type(error), match=str(error)):
        train("cross-entropy", make_step())


def test_a_users_own_kernel_is_the_users() -> None:
    from triton.runtime.errors import OutOfResources

    def loss(logits: torch.Tensor) -> torch.Tensor:
        raise out_of_resources()

    step = make_step().fresh()
    function = functional.autograd_loss_and_logits_grad(loss)
    with pytest.raises(OutOfResources):
        functional.chunked_linear_loss(step.input, step.weight, function)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        functional.chunked_linear_loss(step.input, step.weight, SQUARES, step.target).backward()


def test_in_a_compiled_graph(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> None:
    wanted = in_pytorch("cross-entropy-by-row")
    step = make_step()
    break_kernels(monkeypatch, "cross-entropy-by-row")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        rows = functional.chunked_linear_cross_entropy(
            input, weight, step.target, bias, reduction="none", z_loss=1e-2, chunk_size=6
        )
        return (rows * rows.detach()).mean()

    def learn() -> list[torch.Tensor]:
        leaves = step.fresh().leaves()
        result = loss(*leaves)
        (result * -1.75).backward()
        return [result.detach(), *(each.grad for each in leaves)]

    with pytest.warns(RuntimeWarning, match="cross_entropy"):
        result = learn()
    for one, other in zip(result, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
