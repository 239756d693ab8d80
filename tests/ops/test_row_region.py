"""Any values per row of projections: the op that a rewritten region becomes."""

from __future__ import annotations

import dataclasses
import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from greyhound_ops import config, torch_private
from greyhound_ops.errors import ForwardModeError, NotDifferentiableTwiceError
from greyhound_ops.ops import row_region
from greyhound_ops.testing import assert_within_budget, peak_memory
from samples import SLACK, dtype_id, kept_gradients

DTYPES = tuple(SLACK)
OPERANDS = ("inputs", "weights", "biases", "row_args", "whole_args")
aten = torch.ops.aten

# ------------------------------------------------------------- bodies, and the same in plain torch

CROSS_ENTROPY = """
def body(logits, row_args, whole_args):
    z = torch.ops.prims.convert_element_type.default(logits[0], WIDE)
    lse = torch.ops.aten.logsumexp.default(z, [1])
    index = torch.ops.aten.unsqueeze.default(row_args[0], 1)
    hit = torch.ops.aten.squeeze.dim(torch.ops.aten.gather.default(z, 1, index), 1)
    best = torch.ops.aten.argmax.default(z, 1)
    return [torch.ops.aten.sub.Tensor(lse, hit), lse, best]
"""


def cross_entropy(logits: Any, row_args: Any, whole_args: Any, wide: torch.dtype) -> list[Tensor]:
    z = logits[0].to(wide)
    lse = z.logsumexp(1)
    return [lse - z.gather(1, row_args[0][:, None])[:, 0], lse, z.argmax(1)]


# The teacher stands second and is detached; the last output has a dimension of its own.
DISTILLATION = """
def body(logits, row_args, whole_args):
    s = torch.ops.aten._to_copy.default(logits[0], dtype=WIDE)
    t = torch.ops.aten._to_copy.default(logits[1], dtype=WIDE)
    t = torch.ops.aten.detach.default(t)
    log_p = torch.ops.aten._log_softmax.default(s, 1, False)
    log_q = torch.ops.aten._log_softmax.default(t, 1, False)
    q = torch.ops.aten.exp.default(log_q)
    terms = torch.ops.aten.mul.Tensor(q, torch.ops.aten.sub.Tensor(log_q, log_p))
    kl = torch.ops.aten.sum.dim_IntList(terms, [1])
    return [kl, torch.ops.aten.slice.Tensor(log_p, 1, 0, 2)]
"""


def distillation(logits: Any, row_args: Any, whole_args: Any, wide: torch.dtype) -> list[Tensor]:
    log_p = logits[0].to(wide).log_softmax(1)
    log_q = logits[1].detach().to(wide).log_softmax(1)
    return [(log_q.exp() * (log_q - log_p)).sum(1), log_p[:, :2]]


# Both learn, and nothing is wider than the logits.
BOTH_LEARN = """
def body(logits, row_args, whole_args):
    gap = torch.ops.aten.sub.Tensor(logits[0], logits[1])
    return [torch.ops.aten.mean.dim(torch.ops.aten.pow.Tensor_Scalar(gap, 2), [1])]
"""


def both_learn(logits: Any, row_args: Any, whole_args: Any, wide: torch.dtype) -> list[Tensor]:
    return [(logits[0] - logits[1]).pow(2).mean(1)]


DENSE = """
def body(logits, row_args, whole_args):
    z = torch.ops.aten._to_copy.default(logits[0], dtype=WIDE)
    gap = torch.ops.aten.sub.Tensor(z, row_args[0])
    return [torch.ops.aten.mean.dim(torch.ops.aten.mul.Tensor(gap, gap), [1])]
"""


def dense(logits: Any, row_args: Any, whole_args: Any, wide: torch.dtype) -> list[Tensor]:
    return [(logits[0].to(wide) - row_args[0]).square().mean(1)]


# A temperature, a prior over classes and a weight per row that learn; a detached focal factor.
LEARNED = """
def body(logits, row_args, whole_args):
    z = torch.ops.aten._to_copy.default(logits[0], dtype=WIDE)
    z = torch.ops.aten.add.Tensor(torch.ops.aten.mul.Tensor(z, whole_args[0]), whole_args[1])
    log_p = torch.ops.aten._log_softmax.default(z, 1, False)
    index = torch.ops.aten.unsqueeze.default(row_args[0], 1)
    log_p = torch.ops.aten.squeeze.dim(torch.ops.aten.gather.default(log_p, 1, index), 1)
    focal = torch.ops.aten.rsub.Scalar(torch.ops.aten.exp.default(log_p), 1.0)
    focal = torch.ops.aten.detach.default(focal)
    nll = torch.ops.aten.mul.Tensor(torch.ops.aten.neg.default(log_p), focal)
    return [torch.ops.aten.mul.Tensor(nll, row_args[1]), log_p]
"""


def learned(logits: Any, row_args: Any, whole_args: Any, wide: torch.dtype) -> list[Tensor]:
    log_p = (logits[0].to(wide) * whole_args[0] + whole_args[1]).log_softmax(1)
    log_p = log_p.gather(1, row_args[0][:, None])[:, 0]
    return [-log_p * (1 - log_p.exp()).detach() * row_args[1], log_p]


# The gradient of either factor is made of the other: of two logits, and of logits and a row.
PRODUCT = """
def body(logits, row_args, whole_args):
    other = [*logits, *row_args][1]
    return [torch.ops.aten.sum.dim_IntList(torch.ops.aten.mul.Tensor(logits[0], other), [1])]
"""


def product(logits: Any, row_args: Any, whole_args: Any, wide: torch.dtype) -> list[Tensor]:
    return [(logits[0] * [*logits, *row_args][1]).sum(1)]


# Outputs that lie in the logits' own memory.
VIEWS = """
def body(logits, row_args, whole_args):
    z = torch.ops.prims.convert_element_type.default(logits[0], WIDE)
    one = torch.ops.aten.select.int(logits[0], 1, 3)
    some = torch.ops.aten.slice.Tensor(logits[0], 1, 2, 5)
    return [torch.ops.aten.logsumexp.default(z, [1]), one, some]
"""


def views(logits: Any, row_args: Any, whole_args: Any, wide: torch.dtype) -> list[Tensor]:
    return [logits[0].to(wide).logsumexp(1), logits[0][:, 3], logits[0][:, 2:5]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A body, the same in plain torch, and what its tensors look like."""

    text: str
    plain: Callable[..., list[Tensor]]
    hidden: tuple[int, ...] = (8,)
    has_bias: tuple[bool, ...] = (True,)
    # Which outputs have a coefficient; the others are values only.
    weighted: tuple[bool, ...] = (True,)
    rows: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


CASES = {
    "cross_entropy": Case(
        CROSS_ENTROPY, cross_entropy, weighted=(True, True, False), rows=("target",)
    ),
    "distillation": Case(
        DISTILLATION, distillation, hidden=(8, 6), has_bias=(False, True), weighted=(True, True)
    ),
    "both_learn": Case(BOTH_LEARN, both_learn, hidden=(8, 6), has_bias=(True, False)),
    "dense": Case(DENSE, dense, has_bias=(False,), rows=("dense",)),
    "learned": Case(
        LEARNED, learned, weighted=(True, False), rows=("target", "weight"),
        whole=("scale", "prior"),
    ),
    "product": Case(PRODUCT, product, hidden=(8, 8), has_bias=(False, False)),
    "product_with_a_row": Case(PRODUCT, product, has_bias=(False,), rows=("dense",)),
    "views": Case(VIEWS, views, has_bias=(False,), weighted=(True, True, False)),
}  # fmt: skip
CLASSES = 11


@dataclasses.dataclass
class Region:
    """Tensors of a call."""

    case: Case
    tensors: dict[str, list[Tensor]]
    coefficients: list[Tensor]
    compute_dtypes: list[torch.dtype]
    wide: torch.dtype

    def map(self, function: Callable[[Tensor], Tensor]) -> Region:
        """The same with a function applied to every floating-point operand."""
        return dataclasses.replace(
            self,
            tensors={
                name: [function(each) if each.is_floating_point() else each for each in values]
                for name, values in self.tensors.items()
            },
        )

    def double(self) -> Region:
        wider = self.map(Tensor.double)
        wider.compute_dtypes = [torch.float64] * len(self.compute_dtypes)
        wider.coefficients = [each.double() for each in self.coefficients]
        wider.wide = torch.float64
        return wider

    def leaves(self) -> dict[str, Tensor]:
        return {
            f"{name}{index}": each
            for name in OPERANDS
            for index, each in enumerate(self.tensors[name])
            if each.is_floating_point()
        }

    @property
    def text(self) -> str:
        return self.case.text.replace("WIDE", str(self.wide))


def make_region(
    name: str,
    rows: int = 13,
    *,
    classes: int = CLASSES,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    coefficient: float = 1.0,
    hidden: int | None = None,
) -> Region:
    case = CASES[name]
    sizes = case.hidden if hidden is None else [hidden] * len(case.hidden)
    wide = torch.promote_types(dtype, torch.float32)
    options = {"dtype": dtype, "device": device}
    makers = {
        "target": lambda: torch.randint(0, classes, (rows,), device=device),
        "dense": lambda: torch.randn(rows, classes, **options),
        "weight": lambda: torch.rand(rows, dtype=wide, device=device),
        "scale": lambda: torch.tensor(0.7, dtype=wide, device=device),
        "prior": lambda: torch.randn(classes, dtype=wide, device=device),
    }
    tensors = {
        "inputs": [torch.randn(rows, size, **options) for size in sizes],
        # Transposed views are usual.
        "weights": [torch.randn(size, classes, **options).t() for size in sizes],
        "biases": [torch.randn(classes, **options) for has in case.has_bias if has],
        "row_args": [makers[each]() for each in case.rows],
        "whole_args": [makers[each]() for each in case.whole],
    }
    region = Region(case, tensors, [], [dtype] * len(case.hidden), wide)
    outputs = plain_outputs(region)
    region.coefficients = [
        torch.rand(each.shape, dtype=wide, device=device) * coefficient
        if has
        else torch.empty(0, device=device)
        for each, has in zip(outputs, case.weighted, strict=True)
    ]
    return region


def plain_outputs(region: Region) -> list[Tensor]:
    biases = iter(region.tensors["biases"])
    logits = []
    for input, weight, has_bias, dtype in zip(
        region.tensors["inputs"], region.tensors["weights"], region.case.has_bias,
        region.compute_dtypes, strict=True,
    ):  # fmt: skip
        bias = next(biases).to(dtype) if has_bias else None
        logits.append(torch.nn.functional.linear(input.to(dtype), weight.to(dtype), bias))
    return region.case.plain(
        logits, region.tensors["row_args"], region.tensors["whole_args"], region.wide
    )


def weighted_sum(region: Region, outputs: list[Tensor]) -> Tensor:
    parts = [
        (each.to(region.wide) * by).sum()
        for each, by, has in zip(outputs, region.coefficients, region.case.weighted, strict=True)
        if has
    ]
    return torch.stack(parts).sum()


def plain(region: Region) -> tuple[list[Tensor], Tensor]:
    outputs = plain_outputs(region)
    return outputs, weighted_sum(region, outputs)


def call(region: Region, *, coefficients: bool, **options: Any) -> tuple[list[Tensor], Tensor, Any]:
    tensors = region.tensors
    return torch.ops.greyhound.row_region(
        *(tensors[name] for name in OPERANDS),
        region.text,
        ",".join(dtype_id(each) for each in region.compute_dtypes),
        list(region.case.has_bias),
        region.coefficients if coefficients else [],
        **flags(region),
        **options,
    )


def flags(region: Region) -> dict[str, list[bool]]:
    return {
        f"need_grad_{name}": [each.requires_grad for each in region.tensors[name]]
        for name in OPERANDS
    }


def forward_way(region: Region, **options: Any) -> tuple[list[Tensor], Tensor]:
    """Gradients of the total, made in the forward."""
    outputs, total, _ = call(region, coefficients=True, **options)
    return outputs, total


def backward_way(region: Region, **options: Any) -> tuple[list[Tensor], Tensor]:
    """Gradients of each output, made in the backward."""
    outputs, total, _ = call(region, coefficients=False, **options)
    assert total.numel() == 0
    return outputs, weighted_sum(region, outputs)


def kept_way(region: Region, **options: Any) -> tuple[list[Tensor], Tensor]:
    """Gradients of each output, made in the backward from logits that the forward kept."""
    options["keep_logits"] = [True] * len(region.tensors["inputs"])
    return backward_way(region, **options)


WAYS = {"forward": forward_way, "backward": backward_way, "kept": kept_way}


def outcome(
    function: Any,
    region: Region,
    *,
    upstream: float = -1.7,
    frozen: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, Tensor | None]:
    region = region.map(lambda each: each.detach())  # keeps the strides
    leaves = region.leaves()
    for name, leaf in leaves.items():
        leaf.requires_grad_(not (frozen and name.startswith(frozen)))
    outputs, total = function(region, **options)
    if total.requires_grad:
        total.backward(torch.full_like(total, upstream))
    return (
        {f"output{index}": each.detach() for index, each in enumerate(outputs)}
        | {"total": total.detach()}
        | {f"grad_{name}": leaf.grad for name, leaf in leaves.items()}
    )


def compare(
    region: Region,
    function: Any,
    *,
    upstream: float = -1.7,
    frozen: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, Tensor | None]:
    made = outcome(function, region, upstream=upstream, frozen=frozen, **options)
    same = outcome(plain, region, upstream=upstream, frozen=frozen)
    truth = outcome(plain, region.double(), upstream=upstream, frozen=frozen)
    dtype = region.compute_dtypes[0]
    for name, expected in truth.items():
        value, other = made[name], same[name]
        if other is None or expected is None:
            # Detached by the body, or frozen: the flag may still ask for it, and gets zeros.
            assert value is None or not value.any(), name
            continue
        assert value is not None, name
        assert value.dtype == other.dtype, name
        if not value.is_floating_point():
            # Two classes may be level in reduced precision, where a product rounds as it likes.
            least = 1.0 if dtype.itemsize >= 4 else 0.8
            assert (value == other).double().mean() >= least, name
            continue
        if name == "total" and dtype.itemsize < 4:
            continue  # a sum of rounded rows is near the truth by luck alone; they are judged
        # A value of 8 or 11 bits, as a gradient is, is rounded as its logits happen to be.
        rounded = name.startswith("grad_") or value.dtype.itemsize < 4
        slack = SLACK[dtype] if rounded else min(SLACK[dtype], 1e-6)
        assert_within_budget(name, value, other, expected, slack=slack)
    return made


def skip_fp64_on_cuda(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.float64 and device.type == "cuda":
        pytest.skip("needs the CPU: float64 takes the same path there")


by_case = pytest.mark.parametrize("name", CASES)
by_way = pytest.mark.parametrize("way", WAYS)


# ------------------------------------------------------------------------------------ gradients


@by_case
@by_way
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_against_plain_torch(name: str, way: str, dtype: torch.dtype, device: torch.device) -> None:
    skip_fp64_on_cuda(dtype, device)
    compare(make_region(name, dtype=dtype, device=device), WAYS[way], chunk_size=5)


@by_case
@by_way
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 100])
def test_chunk_sizes(name: str, way: str, chunk_size: int | None, device: torch.device) -> None:
    region = make_region(name, device=device)
    for accum in ("fp32", "weight") if chunk_size == 4 else ("fp32",):
        # Eager on CUDA as well: what is compiled is another test's.
        with config.override(region_body="eager"):
            compare(region, WAYS[way], chunk_size=chunk_size, grad_weight_accum_dtype=accum)


@by_case
@by_way
def test_frozen(name: str, way: str) -> None:
    region = make_region(name)
    names = list(region.leaves())
    alone = [tuple(each for each in names if each != kept) for kept in names]
    pairs = list(itertools.combinations(names, 2))[list(WAYS).index(way) :: 2]
    if way == "forward":
        pairs += alone
    for frozen in (*itertools.combinations(names, 1), *pairs):
        made = compare(region, WAYS[way], frozen=frozen, chunk_size=5)
        assert all(made[f"grad_{each}"] is None for each in frozen)
    made = outcome(WAYS[way], region, frozen=tuple(names))
    assert not made["total"].requires_grad


@by_way
def test_dtypes_of_their_own(way: str, device: torch.device) -> None:
    # As autocast leaves it: a bf16 student from fp32 tensors, a teacher in fp32.
    region = make_region("distillation", device=device)
    region.compute_dtypes = [torch.bfloat16, torch.float32]
    made = compare(region, WAYS[way], chunk_size=5)
    assert made["grad_weights0"].dtype == torch.float32


@by_way
def test_autocast_changes_nothing(way: str, device: torch.device) -> None:
    region = make_region("learned", device=device)
    expected = outcome(WAYS[way], region, chunk_size=5)
    with torch.autocast(device.type, torch.bfloat16):
        made = outcome(WAYS[way], region, chunk_size=5)
    for key, value in expected.items():
        assert (value is None) == (made[key] is None)
        if value is not None:
            assert torch.equal(value, made[key]), key


@pytest.mark.parametrize("accum", ["fp32", "weight"])
@pytest.mark.parametrize("name", ["cross_entropy", "learned", "both_learn"])
def test_fp16_small_coefficients(name: str, accum: str, device: torch.device) -> None:
    # The gradients of 2^-18 would vanish in fp16 before the upstream lifts them.
    compare(
        make_region(name, 40, dtype=torch.float16, device=device, coefficient=2.0**-18),
        forward_way,
        upstream=2.0**16,
        chunk_size=16,
        grad_weight_accum_dtype=accum,
    )


def test_fp16_coefficients_of_nothing(device: torch.device) -> None:
    region = make_region("cross_entropy", dtype=torch.float16, device=device, coefficient=0.0)
    made = outcome(forward_way, region, chunk_size=5)
    assert not made["grad_weights0"].any()
    assert not made["grad_inputs0"].any()


@by_way
def test_same_head_twice(way: str, device: torch.device) -> None:
    # One parameter under both projections: one sum, handed out once.
    region = make_region("both_learn", device=device)
    weight = torch.randn(CLASSES, 8, device=device)
    hidden = [torch.randn(13, 8, device=device) for _ in range(2)]
    results = []
    for same_head in ([], [0, 0]):
        leaf = weight.detach().requires_grad_()
        inputs = [each.detach().requires_grad_() for each in hidden]
        region.case = dataclasses.replace(region.case, has_bias=(False, False))
        region.tensors = {
            "inputs": inputs, "weights": [leaf, leaf], "biases": [], "row_args": [],
            "whole_args": [],
        }  # fmt: skip
        _, total = WAYS[way](region, same_head=same_head, chunk_size=5)
        results.append(torch.autograd.grad(total, [leaf, *inputs]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    torch._dynamo.reset()
    compiled = torch.compile(WAYS[way], fullgraph=True, backend="aot_eager")
    _, total = compiled(region, same_head=[0, 0], chunk_size=5)
    results[0] = torch.autograd.grad(total, [leaf, *inputs])
    expected = torch.autograd.grad(plain(region)[1], [leaf, *inputs])
    for one, two, other in zip(*results, expected, strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(two, other)


@pytest.mark.fault("B01", "B04")
def test_upstream_strided_expanded_and_missing(device: torch.device) -> None:
    region = make_region("cross_entropy", device=device)
    leaves = [each.requires_grad_() for each in region.leaves().values()]
    (first, second, best), *_ = call(region, coefficients=False, chunk_size=5)
    assert not best.requires_grad
    (plain_first, plain_second, _), _ = plain(region)
    strided = torch.rand(26, device=device)[::2]
    expanded = torch.tensor(0.3, device=device).expand(13)
    for outputs, by in (
        ((first, second), (strided, expanded)),
        ((second,), (strided,)),
        ((first,), (expanded,)),
    ):
        same = [{first: plain_first, second: plain_second}[each] for each in outputs]
        made = torch.autograd.grad(outputs, leaves, by, retain_graph=True)
        expected = torch.autograd.grad(same, leaves, by, retain_graph=True)
        for one, other in zip(made, expected, strict=True):
            torch.testing.assert_close(one, other)


@by_way
def test_no_rows(way: str, device: torch.device) -> None:
    for name in CASES:
        made = outcome(WAYS[way], make_region(name, 0, device=device))
        assert made["total"] == 0
        assert made["grad_inputs0"].shape == (0, 8)
        assert made["grad_weights0"].shape == (CLASSES, 8)
        assert not made["grad_weights0"].any()
        assert made["output0"].shape[0] == 0


@by_way
def test_odd_strides(way: str, device: torch.device) -> None:
    region = make_region("learned", device=device)
    strided = region.map(
        lambda each: torch.stack([each, torch.full_like(each, torch.nan)], -1)[..., 0]
    )
    made = outcome(WAYS[way], strided, chunk_size=5)
    for key, value in outcome(WAYS[way], region, chunk_size=5).items():
        if value is not None:
            torch.testing.assert_close(made[key], value)


@by_way
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_recorded(mode: Any, way: str, device: torch.device) -> None:
    region = make_region("learned", device=device)
    expected = outcome(plain, region, frozen=OPERANDS)
    with mode():
        _, total = WAYS[way](region.map(lambda each: each.clone()))
    torch.testing.assert_close(total, expected["total"])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_asked_for_where_nothing_is_recorded(mode: Any, device: torch.device) -> None:
    # The flags decide, not the mode.
    with mode():
        region = make_region("learned", device=device)
        for leaf in region.leaves().values():
            leaf.requires_grad_()
        _, _, grads = call(region, coefficients=True, chunk_size=5)
    for name, values in region.tensors.items():
        region.tensors[name] = [
            each.detach().clone().requires_grad_(each.is_floating_point()) for each in values
        ]
    region.coefficients = [each.clone() for each in region.coefficients]
    expected = torch.autograd.grad(plain(region)[1], list(region.leaves().values()))
    made = [each for each in grads if each.numel()]
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_retained_graph_and_second_derivative(device: torch.device) -> None:
    for way in WAYS.values():
        region = make_region("learned", device=device)
        leaves = [each.requires_grad_() for each in region.leaves().values()]
        _, total = way(region, chunk_size=5)
        up = torch.tensor(3.0, device=device)
        first = torch.autograd.grad(total, leaves, up, retain_graph=True)
        second = torch.autograd.grad(total, leaves, 2 * up)
        for one, other in zip(first, second, strict=True):
            torch.testing.assert_close(2 * one, other)
        _, total = way(region, chunk_size=5)
        grads = torch.autograd.grad(total, leaves, create_graph=True)
        with pytest.raises(NotDifferentiableTwiceError):
            grads[0].sum().backward()


@pytest.mark.parametrize("operand", ["inputs", "whole_args"])
def test_forward_mode_is_refused(operand: str) -> None:
    from torch.autograd import forward_ad

    region = make_region("learned")
    with forward_ad.dual_level():
        tensors = region.tensors[operand]
        tensors[0] = forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
        with pytest.raises(ForwardModeError):
            call(region, coefficients=True)


@by_way
def test_deterministic(way: str, device: torch.device) -> None:
    region = make_region("learned", 40, device=device)
    first, second = (outcome(WAYS[way], region, chunk_size=16) for _ in range(2))
    for key, value in first.items():
        assert value is None or torch.equal(value, second[key]), key


# ---------------------------------------------------------------------------------- compilation


@by_way
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["distillation", "learned"])
def test_in_a_compiled_graph(name: str, dynamic: bool, way: str, device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(WAYS[way], fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (13, 17) if dynamic else (13,):
        compare(make_region(name, rows, device=device), compiled, chunk_size=5)


@pytest.mark.fault("B40")
@by_way
def test_one_graph_for_every_number_of_rows(way: str, device: torch.device) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(WAYS[way], fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for rows in (13, 17, 29):
        outcome(compiled, make_region("learned", rows, device=device))
        frames.append(counter.frame_count)
    assert frames == frames[:1] * 3


@by_way
def test_compiled_body_in_a_compiled_graph(
    way: str, device: torch.device, fresh_compiler: None
) -> None:
    from torch._dynamo.utils import counters

    row_region._compiled_chunk.cache_clear()
    backend = "inductor" if way == "forward" else "aot_eager"
    compiled = torch.compile(WAYS[way], fullgraph=True, dynamic=True, backend=backend)
    with config.override(region_body="compiled"), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not be compiled")
        compare(make_region("learned", 13, device=device), compiled, chunk_size=5)
        graphs = counters["stats"]["unique_graphs"]
        # Other rows, other chunks, a last chunk that would be a single row.
        for rows in (17, 16):
            compare(make_region("learned", rows, device=device), compiled, chunk_size=5)
        assert counters["stats"]["unique_graphs"] == graphs


@by_way
def test_rows_known_at_run_time_only(way: str) -> None:
    # Rows chosen by a mask: their number is a symbol without a value.
    torch._dynamo.reset()
    region = make_region("cross_entropy")

    def chosen(weight: Tensor, input: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        rows, targets = input[mask], target[mask]
        ones = torch.ones_like(targets, dtype=torch.float32)
        outputs, total, _ = torch.ops.greyhound.row_region(
            [rows], [weight], [], [targets], [], region.text, "float32", [False],
            [ones, ones, torch.empty(0)] if way == "forward" else [], 4,
            need_grad_inputs=[True], need_grad_weights=[True],
        )  # fmt: skip
        return total if way == "forward" else outputs[0].sum() + outputs[1].sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(chosen, fullgraph=True, dynamic=True, backend="aot_eager")
        (weight,), (input,) = region.tensors["weights"], region.tensors["inputs"]
        (target,) = region.tensors["row_args"]
        leaves = [weight.requires_grad_(), input.requires_grad_()]
        for count in (3, 7):
            mask = torch.arange(13) < count
            made = torch.autograd.grad(compiled(weight, input, target, mask), leaves)
            logits = input[mask] @ weight.t()
            nll, lse, _ = cross_entropy([logits], [target[mask]], [], torch.float32)
            expected = torch.autograd.grad(nll.sum() + lse.sum(), leaves)
            for one, other in zip(made, expected, strict=True):
                torch.testing.assert_close(one, other)


def test_compiled_body_called_by_itself(device: torch.device, fresh_compiler: None) -> None:
    from torch._dynamo.utils import counters

    row_region._compiled_chunk.cache_clear()
    with config.override(region_body="compiled"), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not be compiled")
        region = make_region("distillation", dtype=torch.bfloat16, device=device)
        compare(region, backward_way, chunk_size=5, frozen=("inputs1", "weights1", "biases"))
        graphs = counters["stats"]["unique_graphs"]
        with torch.inference_mode():
            region = make_region("distillation", dtype=torch.bfloat16, device=device)
            _, total = backward_way(region, chunk_size=5)
            torch.testing.assert_close(total, plain(region)[1])
        assert counters["stats"]["unique_graphs"] == graphs


def test_compiled_chunk_makes_nothing_wide(fresh_compiler: None) -> None:
    """The gradient is written over the logits."""
    from torch._inductor.utils import run_and_get_code

    row_region._compiled_chunk.cache_clear()
    region = make_region("cross_entropy", 40, classes=64, dtype=torch.bfloat16)
    with config.override(region_body="compiled"):
        _, codes = run_and_get_code(lambda: outcome(forward_way, region, chunk_size=20))
        wide = re.findall(r"empty_strided_cpu\(\(\w+, 64\), \(64, 1\), (.*?)\)", "".join(codes))
        assert wide == []
        # A class that is not there: no value of another row's, and no error to wait for.
        region.tensors["row_args"][0][3] = 64
        outputs, _, _ = call(region, coefficients=True, chunk_size=20)
    nothing = outputs[0].isnan()
    assert nothing[3]
    assert nothing.sum() == 1


@by_way
@pytest.mark.parametrize("name", ["product", "product_with_a_row", "views"])
def test_nothing_is_lost_in_the_memory_of_logits(
    name: str, way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    # 16 classes of bf16 are dense rows, in whose place a compiled body writes gradients.
    row_region._compiled_chunk.cache_clear()
    region = make_region(name, 100, classes=16, dtype=torch.bfloat16, device=device, hidden=64)
    for choice in ("compiled", "eager"):
        with config.override(region_body=choice), kept_gradients(monkeypatch):
            compare(region, WAYS[way], chunk_size=40)


def test_body_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no compiler here")

    row_region._compiled_chunk.cache_clear()
    monkeypatch.setattr(torch_private, "compile_traced", broken)
    monkeypatch.setattr(torch_private, "compile_in_op", lambda *args: broken)
    monkeypatch.setattr(row_region, "_not_compilable", set())
    with (
        config.override(region_body="compiled"),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            compare(make_region("dense"), forward_way, chunk_size=5)
    assert ["no compiler here" in str(each.message) for each in caught] == [True]


def test_a_failure_while_running_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    # The eager body would read logits that are written over by half: no fallback then.
    inner = torch_private.compile_traced

    def failing(*args: Any) -> Any:
        made = inner(*args)
        assert made is not None
        _, serves = made

        def run(tensors: list[Any]) -> Any:
            tensors[1].zero_()
            raise torch.OutOfMemoryError("no room")

        return run, serves

    row_region._compiled_chunk.cache_clear()
    monkeypatch.setattr(torch_private, "compile_traced", failing)
    with config.override(region_body="compiled"):
        for way in WAYS.values():
            with pytest.raises(torch.OutOfMemoryError, match="no room"):
                outcome(way, make_region("dense"), chunk_size=5)
    row_region._compiled_chunk.cache_clear()


@pytest.mark.parametrize("choice", ["eager", "compiled"])
def test_kept_logits_outlive_a_kept_graph(
    choice: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    row_region._compiled_chunk.cache_clear()
    region = make_region("cross_entropy", 16, dtype=torch.bfloat16, device=device, hidden=16)
    leaves = [leaf.requires_grad_() for leaf in region.leaves().values()]
    with kept_gradients(monkeypatch), config.override(region_body=choice):
        outputs, _, (kept,) = call(region, coefficients=False, chunk_size=7, keep_logits=[True])
        (input,), (weight,) = region.tensors["inputs"], region.tensors["weights"]
        logits = torch.nn.functional.linear(input, weight, *region.tensors["biases"])
        torch.testing.assert_close(kept[:, :CLASSES], logits, rtol=0.02, atol=0.02)
        kept = kept[:, :CLASSES]  # what lies behind them is never written
        before = kept.clone()
        loss = (outputs[0] * 1.5).sum() - outputs[1].sum()
        made = [torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2)]
        assert torch.equal(kept, before)
        made.append(torch.autograd.grad(loss, leaves))
        assert not torch.equal(kept, before), "a second [N, V] was made"
    for first, *others in zip(*made, strict=True):
        assert all(torch.equal(first, other) for other in others)


def test_kept_logits_are_for_backwards() -> None:
    region = make_region("cross_entropy")
    with pytest.raises(ValueError, match="keep_logits: expected False for all"):
        call(region, coefficients=True, keep_logits=[True])
    with pytest.raises(ValueError, match="keep_logits: expected 1, one per projection, got 2"):
        call(region, coefficients=False, keep_logits=[True, False])


def test_no_single_row_at_the_end() -> None:
    for num_rows, rows in itertools.product(range(40), range(1, 12)):
        spans = row_region._spans(num_rows, rows)
        assert [row for start, stop in spans for row in range(start, stop)] == list(range(num_rows))
        assert all(0 < stop - start <= rows for start, stop in spans)
        if rows > 2 and num_rows > 1:
            assert all(stop - start > 1 for start, stop in spans)


# ------------------------------------------------------------------------------- cost and checks


@by_case
@by_way
def test_opcheck(name: str, way: str) -> None:
    region = make_region(name)
    names = list(region.leaves())
    for frozen in (None, names[0], names[-1]):
        for leaf_name, leaf in region.leaves().items():
            leaf.requires_grad_(leaf_name != frozen)
        checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
        if frozen is None:
            checks.append("test_aot_dispatch_dynamic")
        torch.library.opcheck(
            torch.ops.greyhound.row_region.default,
            (
                *(region.tensors[each] for each in OPERANDS),
                region.text,
                ",".join(dtype_id(each) for each in region.compute_dtypes),
                list(region.case.has_bias),
                region.coefficients if way == "forward" else [],
            ),
            {**flags(region), "chunk_size": 5},
            test_utils=checks,
        )


@by_case
def test_opcheck_of_the_backward(name: str) -> None:
    for dtype, keeps in itertools.product((torch.float32, torch.float16), (False, True)):
        region = make_region(name, dtype=dtype)
        kept = []
        if keeps:
            options = {"keep_logits": [True] * len(region.tensors["inputs"])}
            _, _, kept = call(region, coefficients=False, **options)
        torch.library.opcheck(
            torch.ops.greyhound.row_region_backward.default,
            (
                [each for each in region.coefficients if each.numel()],
                *(region.tensors[each] for each in OPERANDS), kept, region.text,
                ",".join(dtype_id(each) for each in region.compute_dtypes),
                list(region.case.has_bias), list(region.case.weighted),
            ),
            {
                "keep_logits": [True] * len(kept),
            }
            | {
                f"need_grad_{each}": [tensor.is_floating_point() for tensor in region.tensors[each]]
                for each in OPERANDS
            },
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


def products(function: Any) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return sum(
        event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm")
    )


@pytest.mark.fault("B25")
@by_way
@pytest.mark.parametrize(
    ("frozen", "gradients"),
    [((), 4), (("inputs1", "weights1"), 2), (("weights0", "weights1"), 2), (("inputs",), 2),
     (("inputs", "weights"), 0), (OPERANDS, 0)],
)  # fmt: skip
def test_frozen_costs_no_product(frozen: tuple[str, ...], gradients: int, way: str) -> None:
    region = make_region("both_learn", 16)
    chunks = 4
    again = 2 * (way == "backward" and frozen != OPERANDS)  # both are projected once more
    made = products(lambda: outcome(WAYS[way], region, frozen=frozen, chunk_size=16 // chunks))
    assert made == chunks * (2 + gradients + again)


def test_nothing_wanted_runs_no_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("differentiated")

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    for way in WAYS.values():
        outcome(way, make_region("learned"), frozen=OPERANDS)
    # Nor does the forward of what the backward makes.
    region = make_region("learned")
    for leaf in region.leaves().values():
        leaf.requires_grad_()
    backward_way(region)


def test_flops() -> None:
    region = make_region("both_learn", 16)
    one = 2 * 16 * CLASSES * 14
    for way, expected in (("forward", 3 * one), ("backward", 4 * one), ("kept", 3 * one)):
        with FlopCounterMode(display=False) as counter:
            outcome(WAYS[way], region, chunk_size=5)
        assert counter.get_total_flops() == expected


ROWS, WIDE_CLASSES, CHUNK = 64, 2000, 4


def peak_bytes(region: Region, way: str, **options: Any) -> int:
    outcome(WAYS[way], region, **options)
    with peak_memory(region.tensors["inputs"][0].device) as peak:
        outcome(WAYS[way], region, **options)
    return peak.bytes


@pytest.mark.parametrize(
    ("way", "frozen"),
    [
        ("forward", ()),
        ("backward", ()),
        ("backward", ("inputs1", "weights1", "biases")),
        ("forward", ("weights", "biases")),
        ("forward", OPERANDS),
    ],
    ids=str,
)
def test_peak(way: str, frozen: tuple[str, ...], device: torch.device) -> None:
    region = make_region("both_learn", ROWS, classes=WIDE_CLASSES, device=device)
    peak = peak_bytes(region, way, frozen=frozen, chunk_size=CHUNK, **({"grads_are_private": True}))
    asked = sum(
        leaf.nbytes
        for name, leaf in region.leaves().items()
        if not (frozen and name.startswith(frozen))
    )
    # Logits and gradients of both, and what autograd saves of this body: the difference, its square
    # and the factor of the square's derivative; eager, nothing is fused.
    chunk = CHUNK * WIDE_CLASSES * 4
    allowed = asked + 9 * chunk + 48 * ROWS + 2**15
    assert allowed < ROWS * WIDE_CLASSES * 4, "logits would pass unnoticed"
    assert peak <= allowed


def test_peak_does_not_grow_with_the_rows(device: torch.device) -> None:
    for way in ("forward", "backward"):
        peaks = []
        for rows in (64, 256):
            region = make_region("cross_entropy", rows, classes=1000, device=device)
            peak = peak_bytes(region, way, chunk_size=16)
            peaks.append(peak - region.tensors["inputs"][0].nbytes)
        assert peaks[1] - peaks[0] <= 96 * (256 - 64)


def test_no_second_grad_weight_for_the_upstream(device: torch.device) -> None:
    region = make_region("cross_entropy", 32, classes=64_000, device=device)

    def backward_bytes(retain_graph: bool) -> int:
        for leaf in region.leaves().values():
            leaf.grad = None
            leaf.requires_grad_()
        _, total = forward_way(region, chunk_size=4, grads_are_private=True)
        upstream = torch.full_like(total, 0.5)
        with peak_memory(device) as peak:
            total.backward(upstream, retain_graph=retain_graph)
        return peak.bytes

    weight = region.tensors["weights"][0].nbytes
    assert backward_bytes(retain_graph=False) < weight / 4
    assert backward_bytes(retain_graph=True) >= weight


def test_chunk_budget_is_for_all_projections() -> None:
    region = make_region("both_learn", 256)
    for leaf in region.leaves().values():
        leaf.requires_grad_()
    seen = []
    record = row_region._Loops.run

    def watch(self: Any, start: int, stop: int, *args: Any) -> Any:
        seen.append(stop - start)
        return record(self, start, stop, *args)

    budget = 32 * 2 * 2 * 12 * 4  # 32 rows of logits and gradient of two padded vocabularies
    with pytest.MonkeyPatch.context() as patch, config.override(chunk_budget_bytes=budget):
        patch.setattr(row_region._Loops, "run", watch)
        forward_way(region)
    assert max(seen) == 32


# --------------------------------------------------------------------------------------- errors


def bad(**changes: Any) -> Callable[[], Any]:
    def run() -> Any:
        region = make_region("learned")
        tensors = {name: changes.pop(name, region.tensors[name]) for name in OPERANDS}
        return torch.ops.greyhound.row_region(
            *tensors.values(),
            changes.pop("body", region.text),
            changes.pop("compute_dtypes", "float32"),
            changes.pop("has_bias", [True]),
            changes.pop("coefficients", []),
            **changes,
        )

    return run


ROW_BODY = "def body(logits, row_args, whole_args):\n    return "
ERRORS = {
    "no projection": ({"inputs": [], "weights": [], "biases": [], "has_bias": []}, "inputs"),
    "weights": ({"weights": []}, "weights: expected 1"),
    "dtypes": ({"compute_dtypes": "float32,float32"}, "compute_dtypes: expected 1"),
    "dtype": ({"compute_dtypes": "int8"}, "compute_dtypes: expected one of"),
    "biases": ({"biases": []}, "biases: expected 1"),
    "has_bias": ({"has_bias": [True, False]}, "has_bias: expected 1"),
    "hidden": ({"weights": [torch.ones(11, 7)]}, "projection 0: input: expected last dimension"),
    "batch": ({"inputs": [torch.ones(2, 3, 8)]}, r"expected shape \[N, D\]"),
    "row_args": ({"row_args": [torch.ones(12)]}, r"row_args\[0\]: expected a row per row"),
    "flags": ({"need_grad_inputs": [True, True]}, "need_grad_inputs: expected 1 flags"),
    "flag": ({"need_grad_row_args": [True, True]}, r"row_args\[0\]: expected dtype"),
    "chunk": ({"chunk_size": 0}, "chunk_size: expected at least 1"),
    "accum": ({"grad_weight_accum_dtype": "bf16"}, "grad_weight_accum_dtype"),
    "same_head": ({"same_head": [1]}, "same_head: expected the first"),
    "no body": ({"body": "x = 1"}, "body: expected source that defines"),
    "syntax": ({"body": "def body(:"}, "body: expected Python source"),
    "no list": ({"body": f"{ROW_BODY}logits[0]"}, "body: expected a list of tensors"),
    "no tensor": ({"body": f"{ROW_BODY}[1.0]"}, "body: expected tensors, got float"),
    "no rows": (
        {"body": f"{ROW_BODY}[torch.ops.aten.sum.default(logits[0])]"},
        "body: expected outputs of a value per row",
    ),
    "primitive": (
        {"body": f"{ROW_BODY}[torch.ops.prims.sin.default(logits[0])]", "need_grad_inputs": [True]},
        "torch.ops.prims.sin",
    ),
    "coefficients": ({"coefficients": [torch.ones(13)]}, "coefficients: expected 2, one per"),
    "coefficient": (
        {"coefficients": [torch.ones(12), torch.empty(0)]},
        "coefficients: expected the shape of the output",
    ),
}


@pytest.mark.parametrize("fault", ERRORS)
def test_errors(fault: str) -> None:
    changes, message = ERRORS[fault]
    with pytest.raises((ValueError, TypeError), match=message):
        bad(**dict(changes))()


def test_operand_that_learns_without_a_flag() -> None:
    for name in OPERANDS[:3]:
        region = make_region("learned")
        region.tensors[name][0].requires_grad_()
        with pytest.raises(ValueError, match=f"need_grad_{name}: expected True at 0"):
            torch.ops.greyhound.row_region(
                *(region.tensors[each] for each in OPERANDS), region.text, "float32", [True], []
            )
    region = make_region("learned")
    region.tensors["inputs"][0].requires_grad_()
    region.coefficients[0].requires_grad_()
    with pytest.raises(ValueError, match="coefficients: expected tensors that need no gradient"):
        call(region, coefficients=True)


def test_body_sees_nothing_else() -> None:
    for expression in ("open('x')", "math.pi"):
        with pytest.raises(NameError):
            bad(body=f"{ROW_BODY}[{expression}]")()
    for text in (
        f"{ROW_BODY}[__import__('os')]",
        f"import os\n{ROW_BODY}[os]",
        f"{ROW_BODY}[__builtins__['__import__']('os')]",
        f"{ROW_BODY}[body.__globals__['__builtins__']]",
        f"{ROW_BODY}[body.__builtins__]",
    ):
        with pytest.raises(ValueError, match=r"body: .* it imports something"):
            bad(body=text)()


def test_torch_may_import_where_a_body_calls_it() -> None:
    # An op's C++ that imports asks the caller's frame for the name: a KeyError on torch 2.14.
    text = f"{ROW_BODY}[torch.ops.aten.sum.dim_IntList(logits[0], [1])]"
    assert row_region._function(text).__globals__["__builtins__"].keys() == {"__import__"}


# ------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@by_way
@by_case
def test_no_synchronisation(name: str, way: str) -> None:
    region = make_region(name, dtype=torch.float16, device="cuda")
    outcome(WAYS[way], region, chunk_size=5)  # compiles, which may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome(WAYS[way], region, chunk_size=5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_compiled_and_eager_bodies_agree_on_cuda() -> None:
    for way, dtype in itertools.product(WAYS.values(), (torch.float32, torch.bfloat16)):
        region = make_region("learned", 300, classes=1000, dtype=dtype, device="cuda")
        for choice in ("compiled", "eager"):
            with config.override(region_body=choice):
                compare(region, way, chunk_size=128)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_peak_on_cuda(way: str) -> None:
    # Compiled, a chunk is its logits, over which their gradient is written.
    rows, classes, chunk_size = 4096, 32_000, 256
    region = make_region(
        "cross_entropy", rows, classes=classes, dtype=torch.bfloat16, device="cuda"
    )
    peak = peak_bytes(region, way, chunk_size=chunk_size, grads_are_private=True)
    asked = sum(leaf.nbytes for leaf in region.leaves().values())
    asked += region.tensors["weights"][0].numel() * 4  # the fp32 sum
    chunk = chunk_size * classes * 2
    assert peak <= asked + chunk + chunk // 2 + 2**21
    assert peak < rows * classes * 2


@pytest.mark.gpu
def test_peak_of_kept_logits_on_cuda() -> None:
    # Logits, their gradient in the same place, and beside it the gradient of the head.
    rows, classes = 4096, 32_000
    region = make_region(
        "cross_entropy", rows, classes=classes, dtype=torch.bfloat16, device="cuda", hidden=2048
    )
    # A bias's gradient is a sum over rows, for which torch takes 16 MiB of its own.
    peak = peak_bytes(region, "kept", frozen=("biases",), chunk_size=1024)
    asked = sum(leaf.nbytes for leaf in region.leaves().values())
    assert peak <= asked + rows * classes * 2 + 2**21


@by_case
@pytest.mark.parametrize("frozen", [(), ("input",)], ids=lambda names: "+".join(names) or "all")
def test_kept_gradients(
    name: str, frozen: tuple[str, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = make_region(name, 8, dtype=torch.bfloat16, device=device)
    for way in WAYS.values():
        with kept_gradients(monkeypatch):
            compare(region, way, frozen=frozen, chunk_size=5)
