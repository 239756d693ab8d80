"""Statistics of rows of logits, and the bodies of regions that take them from there."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops import config
from greyhound_ops.ops import row_region, row_statistics
from greyhound_ops.ops.row_statistics import OP
from greyhound_ops.testing import relative_error
from samples import dtype_id

# Inner factor, tanh, outer factor.
FORMS = {
    "plain": (1.0, False, 1.0),
    "factor": (1.0, False, 1.0 / 0.7),
    "capped": (1.0 / 3.0, True, 3.0),
    "capped-tempered": (0.5, True, 5.0),
}
by_form = pytest.mark.parametrize("form", FORMS)
by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
by_kernels = pytest.mark.parametrize("kernels", ["torch", "triton"])


def values(x: Tensor, form: str) -> Tensor:
    inner, tanh, outer = FORMS[form]
    return torch.tanh(x * inner) * outer if tanh else x * outer


def statistics(logits: Tensor, form: str, kernels: str) -> Tensor:
    with config.override(kernels=kernels):
        return OP.overload(logits, *FORMS[form])


# ----------------------------------------------------------------------------------- the op


@by_kernels
@by_dtype
@by_form
@pytest.mark.parametrize("classes", [1, 7, 300, 9001])
def test_against_float64(
    classes: int, form: str, dtype: torch.dtype, kernels: str, device: torch.device
) -> None:
    wide = (4 * torch.randn(5, 2 * classes, device=device)).to(dtype)
    logits = wide[:, :classes]  # rows further apart than they are long
    top, log_sum = statistics(logits, form, kernels)
    x = logits.double()
    assert torch.equal(top.double(), x.amax(1))
    z = values(x, form)
    expected = torch.logsumexp(z - z.amax(1, keepdim=True), 1)
    torch.testing.assert_close(log_sum.double(), expected, rtol=3e-6, atol=3e-6)


@by_kernels
@by_form
def test_what_is_not_finite(form: str, kernels: str, device: torch.device) -> None:
    inf = math.inf
    logits = torch.randn(5, 20, device=device).bfloat16()
    logits[0] = -inf
    logits[1, 3] = inf
    logits[2, 4] = math.nan
    logits[3, ::2] = -inf
    top, log_sum = statistics(logits, form, kernels)
    x = logits.float()
    z = values(x, form)
    reference = values(top, form).unsqueeze(1)
    log_p = z - reference - log_sum.unsqueeze(1)
    torch.testing.assert_close(log_p, z.log_softmax(1), equal_nan=True, rtol=1e-5, atol=2e-6)


@by_kernels
def test_no_rows(kernels: str, device: torch.device) -> None:
    logits = torch.empty(0, 9, dtype=torch.bfloat16, device=device)
    assert statistics(logits, "plain", kernels).shape == (2, 0)


# ---------------------------------------------------------------------------------- bodies

CAST = "x = torch.ops.aten._to_copy.default(logits[0], dtype=torch.float32)"
LOG_SOFTMAX = "torch.ops.aten._log_softmax.default({}, 1, False)"
CHOSEN = "torch.ops.aten.squeeze.dim(torch.ops.aten.gather.default({}, 1, row_args[0]), 1)"


def body(*lines: str) -> str:
    return "\n    ".join(["def body(logits, row_args, whole_args):", *lines])


TAKEN = {
    "log-prob": body(CAST, f"p = {LOG_SOFTMAX.format('x')}", f"return [{CHOSEN.format('p')}]"),
    "reassigned": body(
        CAST,
        "x = torch.ops.aten.mul.Tensor(x, 0.3)",
        f"x = {LOG_SOFTMAX.format('x')}",
        f"x = {CHOSEN.format('x')}",
        "return [x]",
    ),
    "tempered": body(
        CAST,
        "x = torch.ops.aten.div.Tensor(x, 0.7)",
        f"p = {LOG_SOFTMAX.format('x')}",
        f"return [{CHOSEN.format('p')}]",
    ),
    "widened-by-prims": body(
        "x = torch.ops.prims.convert_element_type.default(logits[0], torch.float32)",
        "x = torch.ops.aten.div.Tensor(x, 2)",
        f"return [{CHOSEN.format(LOG_SOFTMAX.format('x'))}]",
    ),
    "capped": body(
        CAST,
        "x = torch.ops.aten.mul.Tensor(torch.ops.aten.tanh.default("
        "torch.ops.aten.div.Tensor(x, 3.0)), 3.0)",
        "lse = torch.ops.aten.logsumexp.default(x, [1])",
        f"chosen = {CHOSEN.format('x')}",
        "return [torch.ops.aten.sub.Tensor(chosen, lse), torch.ops.aten.pow.Tensor_Scalar(lse, 2)]",
    ),
    "entropy": body(
        CAST,
        "p = torch.ops.aten._softmax.default(x, -1, False)",
        f"log_p = {LOG_SOFTMAX.format('x')}",
        "return [torch.ops.aten.sum.dim_IntList(torch.ops.aten.mul.Tensor(p, log_p), [1])]",
    ),
    "kept-dimension": body(
        CAST,
        "lse = torch.ops.aten.logsumexp.default(x, [-1], True)",
        "y = torch.ops.aten.tanh.default(torch.ops.aten.sub.Tensor(x, lse))",
        "return [torch.ops.aten.sum.dim_IntList(y, [1])]",
    ),
    "not-widened": body(
        "p = torch.ops.aten._log_softmax.default(logits[0], 1, False)",
        f"return [torch.ops.aten._to_copy.default({CHOSEN.format('p')}, dtype=torch.float32)]",
    ),
    "detached": body(
        CAST,
        f"p = {LOG_SOFTMAX.format('x')}",
        "q = torch.ops.aten.detach.default(p)",
        f"p = {CHOSEN.format('p')}",
        f"q = {CHOSEN.format('q')}",
        "return [torch.ops.aten.mul.Tensor(p, q), p]",
    ),
    "two-classes-a-row": body(
        CAST,
        f"p = {LOG_SOFTMAX.format('x')}",
        "two = torch.ops.aten.cat.default([row_args[0], row_args[0]], 1)",
        "return [torch.ops.aten.gather.default(p, 1, two)]",
    ),
}
# Statistics that are others' matter: the reason by the name.
LEFT = {
    "negative-factor": "y = torch.ops.aten.mul.Tensor(x, -1.0)",
    "factor-by-row": "y = torch.ops.aten.mul.Tensor(x, row_args[1])",
    "two-caps": "y = torch.ops.aten.tanh.default(torch.ops.aten.tanh.default(x))",
    "another-shape": "y = torch.ops.aten.slice.Tensor(x, 1, 0, 5)",
    "a-sum": "y = torch.ops.aten.add.Tensor(x, 1.0)",
    "beyond-float32": "y = torch.ops.aten.mul.Tensor(x, 1e30)",
}


def outcome(function: Any, logits: Tensor, index: Tensor) -> list[Tensor]:
    leaf = logits.clone().requires_grad_()
    outputs = function([leaf], [index], [])
    upstream = [torch.linspace(-1.5, 2.0, each.numel()).view_as(each) for each in outputs]
    weighed = (each * by.to(each) for each, by in zip(outputs, upstream, strict=True))
    total = sum(each.sum() for each in weighed)
    (grad,) = torch.autograd.grad(total, leaf)
    return [*(each.detach() for each in outputs), grad]


@by_dtype
@pytest.mark.parametrize("name", TAKEN)
def test_bodies(name: str, dtype: torch.dtype, device: torch.device) -> None:
    text = TAKEN[name]
    assert "_statistics(" in row_statistics.rewritten(text, (dtype,))
    logits = (3 * torch.randn(6, 40, device=device)).to(dtype)
    index = torch.randint(0, 40, (6, 1), device=device)
    plain = row_region._function(text)
    expected = outcome(plain, logits, index)
    truth = outcome(plain, logits.double(), index)
    made = outcome(row_region._function(text, recorded=(dtype,)), logits, index)
    for value, other, exact in zip(made, expected, truth, strict=True):
        assert value.dtype == other.dtype
        assert value.shape == other.shape
        unit = torch.finfo(dtype if value is made[-1] or name == "not-widened" else torch.float32)
        # Up to four roundings, half a unit each: cap, sum of exponentials, logarithm, difference.
        allowed = 1.1 * relative_error(other, exact) + 2 * unit.eps
        assert relative_error(value, exact) <= allowed, name


def test_a_softmax_that_widens(device: torch.device) -> None:
    # Plain torch has it on CUDA alone.
    text = body(f"return [{CHOSEN.format(LOG_SOFTMAX.format('logits[0]'))}]").replace(
        "False", "True"
    )
    logits = torch.randn(6, 40, device=device).bfloat16()
    index = torch.randint(0, 40, (6, 1), device=device)
    made, expected = (
        outcome(row_region._function(each, recorded=(torch.bfloat16,)), logits, index)
        for each in (text, TAKEN["log-prob"])
    )
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    text = body(CAST, LEFT[name], f"return [{CHOSEN.format(LOG_SOFTMAX.format('y'))}]")
    assert "_statistics(" not in row_statistics.rewritten(text, (torch.bfloat16,))


@pytest.mark.parametrize("step", ["div.Tensor(logits[0], 0.7)", "tanh.default(logits[0])"])
def test_steps_in_16_bits_are_left_alone(step: str) -> None:
    # Whether such a value is rounded depends on who else reads it.
    text = body(
        f"x = torch.ops.aten.{step}",
        "x = torch.ops.aten._to_copy.default(x, dtype=torch.float32)",
        f"return [{CHOSEN.format(LOG_SOFTMAX.format('x'))}]",
    )
    assert "_statistics(" not in row_statistics.rewritten(text, (torch.bfloat16,))


def test_an_extreme_of_16_bits_has_a_derivative(fresh_compiler: None) -> None:
    # Stored rounded and computed again unrounded, no element was equal to it: 0 / 0.
    text = body(
        "x = torch.ops.aten.mul.Tensor(logits[0], whole_args[0])",
        "return [torch.ops.aten.amax.default(torch.ops.aten._softmax.default(x, 1, False), [1])]",
    )
    logits = torch.randn(6, 40).bfloat16()
    plan = row_region._Plan((True, True), (True,), None, True)
    groups = [[logits], [], [torch.tensor(1.3)]]
    with config.override(region_body="compiled"):
        made = row_region._run_chunk(text, plan, groups, [torch.ones(6)], None)
    exact = row_region._run_chunk(
        text, plan, [[logits.double()], [], [torch.tensor(1.3).double()]], [torch.ones(6)], None
    )
    for value, truth in zip(made.grads, exact.grads, strict=True):
        assert value is not None
        assert truth is not None
        assert relative_error(value, truth) < 2**-6


def test_float32_logits_are_left_alone() -> None:
    made = row_statistics.rewritten(TAKEN["log-prob"], (torch.float32,))
    assert "_statistics(" not in made


def test_one_read_for_equal_values() -> None:
    made = row_statistics.rewritten(TAKEN["entropy"], (torch.bfloat16,))
    assert len(re.findall(r"= _statistics\(", made)) == 1


@by_dtype
def test_confident_rows(dtype: torch.dtype, device: torch.device) -> None:
    # Differences of large logits are exact: so is what comes of them.
    largest = 1e4 if dtype == torch.bfloat16 else 3e4
    logits = torch.zeros(4, 30, device=device)
    logits[:, 7] = torch.tensor([largest, 20.0, 5.0, largest])
    logits[3] += largest
    logits[3, 7] = logits[3, 0]
    logits = logits.to(dtype)
    index = torch.full((4, 1), 7, device=device)
    function = row_region._function(TAKEN["log-prob"], recorded=(dtype,))
    (log_probs, grad), (expected, _) = (
        outcome(each, logits, index) for each in (function, row_region._function(TAKEN["log-prob"]))
    )
    assert (log_probs <= 0.0).all()
    torch.testing.assert_close(log_probs, expected, rtol=1e-6, atol=1.2e-7)
    assert grad[0].count_nonzero() == 0


@pytest.mark.parametrize("name", ["log-prob", "tempered", "capped"])
def test_class_out_of_range_is_nan(name: str, device: torch.device) -> None:
    logits = torch.randn(3, 8, device=device).bfloat16()
    index = torch.tensor([[2], [8], [-1]], device=device)
    function = row_region._function(TAKEN[name], recorded=(torch.bfloat16,))
    assert "gather" not in function.__code__.co_names
    first = function([logits], [index], [])[0]
    assert first.isnan().tolist() == [False, True, True]


def test_rows_without_a_finite_logit(device: torch.device) -> None:
    logits = torch.randn(3, 8, device=device).bfloat16()
    logits[1] = -math.inf
    logits[2, 2] = math.inf
    text = body(CAST, "return [torch.ops.aten.logsumexp.default(x, [1], False)]")
    index = torch.zeros(3, 1, dtype=torch.int64, device=device)
    made, expected = (
        outcome(row_region._function(text, **options), logits, index)
        for options in ({"recorded": (torch.bfloat16,)}, {})
    )
    torch.testing.assert_close(made[0], expected[0], equal_nan=True)
    torch.testing.assert_close(made[1][:2], expected[1][:2], equal_nan=True, rtol=2**-7, atol=0)
    assert made[1][2, 2].isnan()


@pytest.mark.parametrize("text", [
    "def body(logits, row_args, whole_args):\n    a, b = logits\n    return [a, b]",
    "def body(logits, row_args, whole_args):\n    if True:\n        return logits",
    "other = 1",
])  # fmt: skip
def test_other_sources_stay_as_they_are(text: str) -> None:
    import ast

    made = row_statistics.rewritten(text, (torch.bfloat16, torch.bfloat16))
    assert ast.dump(ast.parse(made)) == ast.dump(ast.parse(text))


@pytest.mark.gpu
@by_form
def test_a_prepared_kernel_is_the_one_that_is_launched(form: str) -> None:
    from greyhound_ops.kernels import row_statistics as kernels

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    inner, tanh, outer = FORMS[form]
    logits = torch.randn(128, 1104, device="cuda").bfloat16()
    kernels.prepare(logits, inner=inner, tanh=tanh, outer=outer)
    cache = kernels.row_statistics_kernel.device_caches[logits.device.index][0]
    known = len(cache)
    statistics(logits, form, "triton")
    assert len(cache) == known


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
def test_a_gathered_logit_keeps_its_digits(dtype: torch.dtype, device: torch.device) -> None:
    # No float32 on the way: a float64 model's loss would change in its eighth digit.
    text = body(f"return [{CHOSEN.format('logits[0]')}]")
    logits = torch.randn(6, 40, device=device, dtype=dtype)
    index = torch.randint(0, 40, (6, 1), device=device)
    made, grad = outcome(row_region._function(text, recorded=(dtype,)), logits, index)
    assert torch.equal(made, logits.gather(1, index).squeeze(1))
    assert grad.count_nonzero() == 6
