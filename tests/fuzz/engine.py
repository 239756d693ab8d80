"""Random problems of an op family, each judged against float64 beside plain torch.

A family names its axes: for every choice that a call has, the values it may take, the plainest
first. Hypothesis draws one value per axis and, when an example fails, moves every axis towards its
first value that still fails; what it prints is then a minimal case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from greyhound_ops import config
from greyhound_ops.ops import live_loop
from greyhound_ops.testing import relative_error
from samples import SLACK, dtype_id

#: Times the largest of a few draws of `sensitivity` that is allowed.
ROOM = 1.5

Case = dict[str, Any]
Outputs = dict[str, Tensor]

#: Times plain torch's own error that is allowed, as in ``assert_within_budget``.
FACTOR = 1.1


@dataclasses.dataclass
class Problem:
    """One drawn call.

    Attributes:
        operands: Tensors that can get gradients, with the strides they were drawn with.
        others: Further tensors and options, for both functions.
        ours: Called with operands and others by keyword, and with ``only_ours``.
        plain: Likewise, without ``only_ours``.
        upstreams: Gradients of the outputs, None for an output that is not used.
        frozen: Operands that get no gradient.
        only_ours: Options that the reference does not have.
        zero_rows: Rows whose gradient must be exactly zero, by the operand's name.
        row_wise: Names of operands, others and outputs that have a value per row, and of how many
            leading dimensions; for the permutation of rows.
        autocast: Dtype of autocast around both, or None.
        unit: Size of the terms that a gradient is a sum of, relative to the upstream gradient: one
            over the divisor of a mean.
        terms: Size of the sum of the outputs' terms, were none of them negative.
        slack: Relative error allowed beside plain torch's, where it is not that of the dtype.
    """

    operands: dict[str, Tensor]
    others: dict[str, Any]
    ours: Callable[..., Outputs]
    plain: Callable[..., Outputs]
    upstreams: dict[str, Tensor | None]
    frozen: frozenset[str] = frozenset()
    only_ours: dict[str, Any] = dataclasses.field(default_factory=dict)
    zero_rows: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    row_wise: tuple[str, ...] = ()
    slack: float | None = None
    autocast: torch.dtype | None = None
    unit: float = 1.0
    terms: float = 1.0

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.operands.values())).dtype

    @property
    def device(self) -> torch.device:
        return next(iter(self.operands.values())).device

    def double(self) -> Problem:
        return dataclasses.replace(
            self,
            operands={name: value.double() for name, value in self.operands.items()},
            others={name: widened(value) for name, value in self.others.items()},
            autocast=None,
        )

    def permuted(self, order: Tensor) -> Problem:
        """The same rows in another order."""

        def move(values: dict[str, Any]) -> dict[str, Any]:
            return {
                name: value[order] if name in self.row_wise and isinstance(value, Tensor) else value
                for name, value in values.items()
            }

        return dataclasses.replace(
            self,
            operands=move(self.operands),
            others=move(self.others),
            upstreams={
                name: value[order] if name in self.row_wise and value is not None else value
                for name, value in self.upstreams.items()
            },
            zero_rows={},
        )


def widened(value: Any) -> Any:
    """Floating-point tensors in float64, in containers too."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(widened(each) for each in value)
    return value


#: Operands and others whose last dimension is summed over by a projection.
HIDDEN = re.compile(r"(teacher_|ref_|kl_)?(input|weight)\d*")

#: Those that a projection rounds, and what is as good as one.
PROJECTED = re.compile(r"(teacher_|ref_|kl_)?(input|weight|bias|logits)\d*")

#: Below this share of the upstream gradient (of one, for an output) a truth is rounding of a zero.
ZERO = 1e-13


def reversed_sums(problem: Problem) -> Problem:
    """The same problem with the terms of every projection in the opposite order."""

    def flip(values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value.flip(-1) if HIDDEN.fullmatch(name) and isinstance(value, Tensor) else value
            for name, value in values.items()
        }

    return dataclasses.replace(
        problem, operands=flip(problem.operands), others=flip(problem.others)
    )


def plain_errors(problem: Problem, truth: Outputs) -> dict[str, float]:
    """Errors of plain torch: the larger of two orders of the same sums.

    One order alone may happen to be exact where another, as good, is not; then nothing could be
    held against it.
    """
    errors = {name: relative_error(value, truth[name]) for name, value in
              evaluate(problem, problem.plain).items()}  # fmt: skip
    for name, value in evaluate(reversed_sums(problem), problem.plain).items():
        if HIDDEN.fullmatch(name.removeprefix("grad_")):
            value = value.flip(-1)
        errors[name] = max(errors[name], relative_error(value, truth[name]))
    return errors


def sensitivity(problem: Problem, truth: Outputs) -> dict[str, float]:
    """Errors of exact arithmetic on operands that are off by one unit roundoff of their dtype.

    No algorithm that rounds its logits can promise less: two that round alike in the mean differ
    in a sum of few rows, where either may happen to be nearly exact.
    """
    errors = dict.fromkeys(truth, 0.0)
    wide = problem.double()
    generator = torch.Generator().manual_seed(1)

    def near(values: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in values.items():
            found[name] = widened(value)
            if isinstance(value, Tensor) and PROJECTED.fullmatch(name):
                signs = torch.randint(0, 2, value.shape, generator=generator).to(value.device)
                unit = torch.finfo(problem.autocast or value.dtype).eps / 2
                found[name] = found[name] * (1 + unit * (2 * signs - 1))
        return found

    for _ in range(16):
        moved = dataclasses.replace(
            wide, operands=near(problem.operands), others=near(problem.others)
        )
        for name, value in evaluate(moved, problem.plain).items():
            errors[name] = max(errors[name], relative_error(value, truth[name]))
    return errors


def largest_upstream(problem: Problem) -> float:
    used = (each for each in problem.upstreams.values() if each is not None and each.numel())
    return max((float(each.abs().max()) for each in used), default=1.0)


def rounding_floor(problem: Problem, name: str, truth: Tensor) -> float:
    """Error (norm) that rounding makes where large terms cancel: a last bit or two of each.

    A probability of all but 1 less 1, a sum of losses of both signs: what is left may be as small
    as it likes, the error is that of the terms.
    """
    step = torch.finfo(torch.promote_types(problem.dtype, torch.float32)).eps
    if not name.startswith("grad_"):
        return 4 * step * problem.terms * truth.numel() ** 0.5  # a norm, of errors per row
    if problem.dtype == torch.float16 and name.startswith("grad_weight") and (
        problem.only_ours.get("grad_weight_accum_dtype") == "weight"
    ):  # fmt: skip
        # An fp16 accumulator is kept 2^10 times too small, where the step is 2^-24.
        step = 2.0 ** (10 - 24)
    first = next(iter(problem.operands.values()))
    terms = 1 if truth.shape == first.shape else first.numel() / max(first.shape[-1], 1)
    return 4 * step * problem.unit * largest_upstream(problem) * (truth.numel() * terms) ** 0.5


def without_rounding(truth: Outputs, problem: Problem) -> Outputs:
    """Zeros where the truth is no more than the rounding of one."""
    upstream = largest_upstream(problem)
    return {
        name: torch.zeros_like(value)
        if float(value.norm()) < ZERO * (upstream if name.startswith("grad_") else 1.0)
        else value
        for name, value in truth.items()
    }


def evaluate(problem: Problem, function: Callable[..., Outputs], **options: Any) -> Outputs:
    """Outputs, and gradients as ``grad_<operand>``."""
    leaves = {name: value.detach() for name, value in problem.operands.items()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in problem.frozen)
    with contextlib.ExitStack() as stack:
        if problem.autocast is not None:
            stack.enter_context(torch.autocast(problem.device.type, dtype=problem.autocast))
        outputs = function(**leaves, **problem.others, **options)
    pairs = [
        (outputs[name], upstream)
        for name, upstream in problem.upstreams.items()
        if upstream is not None and outputs[name].requires_grad
    ]
    if pairs:
        torch.autograd.backward(
            [output for output, _ in pairs],
            # No cast where the dtype already fits: strides are part of what is drawn.
            [upstream.to(output.dtype) for output, upstream in pairs],
        )
    results = {name: value.detach() for name, value in outputs.items()}
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            results[f"grad_{name}"] = leaf.grad
    return results


@dataclasses.dataclass
class Figures:
    """What was tried and how far it stayed from what is allowed.

    Attributes:
        inputs: Number of problems.
        results: Number of tensors compared.
        worst_share: Per dtype the largest share that an error had of what is allowed, which is
            `FACTOR` times plain torch's error plus the slack.
        worst_ratio: Per dtype the largest ratio to plain torch's error, where that is above the
            slack.
        within_sensitivity: Number of tensors that were further off than plain torch, but no further
            than exact arithmetic on operands that are off by one unit roundoff.
        worst_case: What was drawn where the share was largest, and of which tensor.
    """

    inputs: int = 0
    results: int = 0
    worst_share: dict[str, float] = dataclasses.field(default_factory=dict)
    worst_ratio: dict[str, float] = dataclasses.field(default_factory=dict)
    within_sensitivity: int = 0
    worst_case: str = ""

    def note(self, name: str, dtype: str, error: float, plain: float, slack: float, case: Case):
        self.results += 1
        share = error / (FACTOR * plain + slack)
        if share >= max(self.worst_share.values(), default=0.0):
            self.worst_case = f"{name} of {case}"
        self.worst_share[dtype] = max(self.worst_share.get(dtype, 0.0), share)
        if plain > slack:
            self.worst_ratio[dtype] = max(self.worst_ratio.get(dtype, 0.0), error / plain)


FIGURES: dict[str, Figures] = {}


def write_figures() -> None:
    """Write what was tried so far to the file that ``GREYHOUND_FUZZ_FIGURES`` names."""
    path = os.environ.get("GREYHOUND_FUZZ_FIGURES")
    if path:
        with open(path, "w") as file:
            json.dump({key: vars(value) for key, value in FIGURES.items()}, file, indent=1)


@contextlib.contextmanager
def kernels_of(case: Case, device: torch.device) -> Iterator[bool]:
    """Kernels as the case says: PyTorch's or, interpreted where there is no GPU, Triton's.

    On a GPU ``"triton"`` has small logits take what is otherwise for large ones.
    """
    triton = case.get("kernels") == "triton" and case["dtype"] != torch.float64
    options: dict[str, Any] = {"chunk_budget_bytes": case.get("budget")}
    if device.type != "cuda":
        options["kernels"] = "triton" if triton else "torch"
    least = 0 if triton else live_loop.LEAST_LOGITS_BYTES
    with mock.patch.object(live_loop, "LEAST_LOGITS_BYTES", least), config.override(**options):
        yield triton and device.type != "cuda"


def judge(family: str, problem: Problem, case: Case) -> None:
    """Compare outputs and gradients with float64, as close as plain torch comes at this dtype.

    Raises:
        AssertionError: If one is further away, missing, of another dtype or not asked for.
    """
    figures = FIGURES.setdefault(f"{family} on {problem.device.type}", Figures())
    with kernels_of(case, problem.device) as interpreted:
        ours = evaluate(problem, problem.ours, **problem.only_ours)
    truth = without_rounding(evaluate(problem.double(), problem.plain), problem)
    plain = plain_errors(problem, truth)
    figures.inputs += 1
    dtype = problem.dtype
    slack = SLACK[dtype if problem.autocast is None else problem.autocast]
    unavoidable: dict[str, float] | None = None
    if problem.slack is not None:
        slack = problem.slack
    for name, expected in truth.items():
        value = ours[name]
        is_grad = name.startswith("grad_")
        wide = torch.promote_types(dtype, torch.float32)
        assert value.dtype == (dtype if is_grad else wide), f"{name}: {value.dtype}"
        assert value.shape == expected.shape, f"{name}: {value.shape}"
        allowed = slack if is_grad or dtype == torch.float64 else 1e-6
        if interpreted and (problem.autocast or dtype) == torch.bfloat16:
            allowed += SLACK[torch.bfloat16]  # cuts off where a GPU rounds
        if not expected.isfinite().all():
            continue  # certain choices have no odds: the formula itself has no value there
        error, same = relative_error(value, expected), plain[name]
        allowed += rounding_floor(problem, name, expected) / (float(expected.norm()) or 1.0)
        if not error <= FACTOR * same + allowed:
            if unavoidable is None:
                unavoidable = sensitivity(problem, truth)
            if error <= ROOM * unavoidable[name] + allowed:
                figures.within_sensitivity += 1
                continue
            raise AssertionError(
                f"{name}: relative error {error:.3e}, plain torch makes {same:.3e} "
                f"(allowed {FACTOR} times that plus {allowed:g})"
            )
        figures.note(name, dtype_id(dtype), error, same, allowed, case)
    unasked = sorted(set(ours) - set(truth))
    assert not unasked, f"nobody asked for {unasked}"
    for name, rows in problem.zero_rows.items():
        if f"grad_{name}" in ours:
            assert not ours[f"grad_{name}"][rows].any(), f"grad_{name} of rows that do not count"


def judge_order(problem: Problem, chunk_size: int | None, seed: int) -> None:
    """Rows in another order and other chunks change nothing beyond rounding (float64)."""
    first = evaluate(problem, problem.ours, **problem.only_ours)
    rows = next(problem.operands[name] for name in problem.operands if name in problem.row_wise)
    order = torch.randperm(rows.shape[0], generator=torch.Generator().manual_seed(seed))
    order = order.to(problem.device)
    options = {**problem.only_ours, "chunk_size": chunk_size}
    second = evaluate(problem.permuted(order), problem.ours, **options)
    assert first.keys() == second.keys()
    for name, value in first.items():
        if name.removeprefix("grad_") in problem.row_wise:
            value = value[order]
        error = relative_error(second[name], value)
        # A difference of rounding only; where all terms cancel, nothing but rounding is left.
        rounding = 1e-12 * largest_upstream(problem) * value.numel() ** 0.5
        absolute = error * (float(value.norm()) or 1.0)
        assert error <= 1e-9 or absolute <= rounding, f"{name}: {error:.3e} after reordering rows"


class Draw:
    """Tensors of a case, the same on every device."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(case["seed"])

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return values.to(self.case["dtype"] if dtype is None else dtype).to(self.device)

    def uniform(self, *shape: int, low: float = 0.25, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.rand(shape, generator=self.generator, dtype=torch.float64) + low
        return values.to(self.case["dtype"] if dtype is None else dtype).to(self.device)

    def target(self, shape: tuple[int, ...], classes: int, ignore_index: int) -> Tensor:
        target = torch.randint(0, classes, shape, generator=self.generator)
        # Whatever the generator says, a share of 0 drops nothing and of 1 everything.
        drop = torch.rand(shape, generator=self.generator) < self.case["ignored"]
        target = target.masked_fill(drop, ignore_index)
        return target.to(self.case.get("target_dtype", torch.int64)).to(self.device)

    def upstream(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Gradient of an output, exact in every dtype."""
        values = torch.randn(shape, generator=self.generator).bfloat16().to(dtype)
        values = values.to(self.device)
        huge = 32.0 if self.case["dtype"] == torch.float16 else 2.0**40
        if self.case["scaled"]:  # as a GradScaler does it: all outputs alike
            values = values * huge
        constants = {"one": 1.0, "zero": 0.0, "negative": -1.75}
        if kind in constants:
            values = torch.full_like(values, constants[kind])
            return values * huge if self.case["scaled"] else values
        if kind == "strided" and shape:
            return strided(values)
        if kind == "expanded":
            factor = 0.75 * huge if self.case["scaled"] else 0.75
            return torch.full((), factor, dtype=dtype, device=self.device).expand(shape)
        return values


# ------------------------------------------------------------------------------------- layouts


def _filler(value: Tensor) -> float:
    return float("nan") if value.is_floating_point() else 2**20


def padded(value: Tensor) -> Tensor:
    """Rows further apart than they are long."""
    if value.dim() == 0:
        return value
    wide = value.new_full((*value.shape[:-1], value.shape[-1] + 3), _filler(value))
    return wide[..., : value.shape[-1]].copy_(value)


def offset(value: Tensor) -> Tensor:
    """Not at the beginning of its storage, nor on 16 bytes."""
    flat = value.new_full((value.numel() + 3,), _filler(value))
    return flat[3:].view(value.shape).copy_(value)


def strided(value: Tensor) -> Tensor:
    """No dimension of unit stride."""
    wide = value.new_full([2 * size for size in value.shape], _filler(value))
    return wide[tuple(slice(None, None, 2) for _ in value.shape)].copy_(value)


def transposed(value: Tensor) -> Tensor:
    """The first dimension is the fastest."""
    if value.dim() < 2:
        return value
    return value.movedim(0, -1).contiguous().movedim(-1, 0)


def padded_transposed(value: Tensor) -> Tensor:
    """Likewise, with room between."""
    if value.dim() < 2:
        return value
    return padded(value.movedim(0, -1)).movedim(-1, 0)


def swapped(value: Tensor) -> Tensor:
    """The first two dimensions stored the other way round; no view of it is flat."""
    if value.dim() < 3:
        return value
    return value.transpose(0, 1).contiguous().transpose(0, 1)


def expanded(value: Tensor) -> Tensor:
    """One slice of the last dimension for all of it (so of all columns of a matrix)."""
    if value.dim() == 0 or value.shape[-1] == 0:
        return value
    return value[..., :1].expand(value.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda value: value,
    "padded": padded,
    "offset": offset,
    "strided": strided,
    "transposed": transposed,
    "padded-transposed": padded_transposed,
    "swapped": swapped,
    "expanded": expanded,
}
