from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from greyhound_ops import config, reference
from greyhound_ops.errors import ForwardModeError, NotDifferentiableTwiceError
from greyhound_ops.functional import (
    autograd_loss_and_logits_grad,
    chunked_linear_loss,
    per_row,
    whole,
)
from greyhound_ops.modules import ChunkedLinearLoss
from greyhound_ops.ops import linear_loss, loss_call
from greyhound_ops.ops.chunk_loop import GradientNeeds
from greyhound_ops.testing import assert_within_budget, relative_error
from samples import DTYPES, LAYOUTS, SLACK, dtype_id, kept_gradients

ROWS, HIDDEN, CLASSES = 13, 8, 11
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


# -------------------------------------------------------------------------------------- losses


def wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits), target, reduction="sum")


def multi_margin(logits: Tensor, target: Tensor) -> Tensor:
    # Torch has no kernel for bf16 on the CPU.
    return F.multi_margin_loss(wide(logits), target, reduction="sum")


def nll(logits: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(wide(logits), -1), target, reduction="sum")


def kl(logits: Tensor, soft: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(wide(logits), -1), wide(soft), reduction="sum")


def poisson(logits: Tensor, counts: Tensor) -> Tensor:
    return F.poisson_nll_loss(wide(logits), counts, reduction="sum")


def focal(logits: Tensor, target: Tensor, gamma: float = 2.0) -> Tensor:
    loss = F.cross_entropy(wide(logits), target, reduction="none")
    return ((1.0 - torch.exp(-loss)) ** gamma * loss).sum()


def weighted_mse(logits: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    return (weights.unsqueeze(1) * (logits - values).square()).sum()


def weighted_mse_and_grad(logits: Tensor, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    difference = logits - values
    weighted = weights.unsqueeze(1) * difference
    return (weighted * difference).sum(), 2.0 * weighted


def sum_of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return functools.partial(function, reduction="sum")


def arguments(dtype: torch.dtype, rows: int = ROWS, device: Any = "cpu") -> dict[str, Tensor]:
    """What the losses may take, by the name of their parameter."""
    options = {"dtype": dtype, "device": device}
    return {
        "target": torch.randint(0, CLASSES, (rows,), device=device),
        "values": torch.randn(rows, CLASSES, **options),
        "soft": torch.softmax(torch.randn(rows, CLASSES, **options), -1),
        "zeros_and_ones": torch.randint(0, 2, (rows, CLASSES), device=device).to(dtype),
        "counts": torch.randint(0, 4, (rows, CLASSES), device=device).to(dtype),
        "weights": torch.rand(rows, **options) + 0.25,
        "pos_weight": torch.rand(CLASSES, **options) + 0.25,
    }


# Loss, positional arguments, keyword arguments.
LOSSES: dict[str, tuple[Callable[..., Tensor], tuple[str, ...], dict[str, str]]] = {
    "cross-entropy": (cross_entropy, ("target",), {}),
    "nll": (nll, ("target",), {}),
    "mse": (sum_of(F.mse_loss), ("values",), {}),
    "smooth-l1": (sum_of(F.smooth_l1_loss), ("values",), {}),
    "huber": (functools.partial(F.huber_loss, reduction="sum", delta=0.5), ("values",), {}),
    "bce": (
        sum_of(F.binary_cross_entropy_with_logits),
        ("zeros_and_ones",),
        {"pos_weight": "pos_weight"},
    ),
    "kl": (kl, ("soft",), {}),
    "poisson": (poisson, ("counts",), {}),
    "multi-margin": (multi_margin, ("target",), {}),
    "focal": (focal, ("target",), {}),
    "weighted-mse": (weighted_mse, ("values", "weights"), {}),
}


@dataclasses.dataclass
class Problem:
    """Leaves and a loss over them."""

    loss: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    input: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def leaves(self, frozen: Collection[str] = ()) -> dict[str, Tensor | None]:
        found = {}
        for name in ("input", "weight", "bias"):
            value = getattr(self, name)
            found[name] = None if value is None else value.detach()
            if value is not None and name not in frozen:
                found[name] = value.detach().requires_grad_()
        return found

    def double(self) -> Problem:
        def cast(value: Any) -> Any:
            return (
                value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            )

        return Problem(
            self.loss,
            tuple(cast(each) for each in self.args),
            {name: cast(each) for name, each in self.kwargs.items()},
            self.input.double(), self.weight.double(), cast(self.bias),
        )  # fmt: skip


def problem(
    name: str,
    dtype: torch.dtype = torch.float32,
    rows: int = ROWS,
    *,
    bias: bool = True,
    device: Any = "cpu",
    hidden: int = HIDDEN,
) -> Problem:
    loss, positional, named = LOSSES[name]
    made = arguments(dtype, rows, device)
    options = {"dtype": dtype, "device": device}
    return Problem(
        loss,
        tuple(made[each] for each in positional),
        {key: made[each] for key, each in named.items()},
        torch.randn(rows, hidden, **options),
        torch.randn(CLASSES, hidden, **options) / hidden**0.5,
        torch.randn(CLASSES, **options) if bias else None,
    )


Results = dict[str, "Tensor | None"]


def run(
    call: Callable[..., Tensor],
    case: Problem,
    *,
    upstream: float = -1.7,
    frozen: Collection[str] = (),
    learns: dict[str, Tensor] | None = None,
) -> Results:
    """Loss and gradients by name; ``learns`` are leaves among the loss's arguments."""
    leaves = case.leaves(frozen)
    loss = call(leaves["input"], leaves["weight"], *case.args, bias=leaves["bias"], **case.kwargs)
    if loss.requires_grad:
        loss.backward(torch.full_like(loss, upstream))
    result = {"loss": loss.detach()}
    for name, leaf in (*leaves.items(), *(learns or {}).items()):
        result[f"grad_{name}"] = None if leaf is None else leaf.grad
    return result


def chunked(
    loss: Callable[..., Any], *, chunk_size: int | None = 5, adapter: bool = True, **options: Any
) -> Callable[..., Tensor]:
    function = autograd_loss_and_logits_grad(loss) if adapter else loss

    def call(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return chunked_linear_loss(
            input, weight, function, *args, chunk_size=chunk_size, **options, **kwargs
        )

    return call


def plain(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return reference.linear_loss(input, weight, loss, *args, **kwargs)

    return call


def check(
    call: Callable[..., Tensor],
    case: Problem,
    *,
    slack: float | None = None,
    **options: Any,
) -> Results:
    """Compare with fp64, as close as plain torch comes at this dtype."""
    dtype = case.input.dtype
    slack = SLACK[dtype] if slack is None else slack
    ours = run(call, case, **options)
    torchs = run(plain(case.loss), case, **options)
    truth = run(plain(case.loss), case.double(), **options)
    for name, expected in truth.items():
        value = ours[name]
        if expected is None:
            assert value is None, f"{name}: nobody asked for it"
            continue
        assert value is not None, name
        if name == "loss":
            assert value.dtype == torch.promote_types(dtype, torch.float32)
            # A bf16 loss of a chunk is rounded like torch's own.
            allowed = max(1e-6 if dtype != torch.float64 else 0, slack)
            assert_within_budget(name, value, torchs[name], expected, slack=allowed)
        else:
            assert value.dtype == dtype
            assert_within_budget(name, value, torchs[name], expected, slack=slack)
    return ours


# ------------------------------------------------------------------------------ loss, gradients


@by_dtype
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, dtype: torch.dtype, device: torch.device) -> None:
    case = problem(name, dtype, device=device)
    check(chunked(case.loss), case)


@by_dtype
def test_direct_gradients(dtype: torch.dtype, device: torch.device) -> None:
    case = problem("weighted-mse", dtype, device=device)
    check(chunked(weighted_mse_and_grad, adapter=False), case)


@pytest.mark.parametrize("chunk_size", [1, 5, 12, 13, 100, None])
def test_chunk_sizes(chunk_size: int | None) -> None:
    case = problem("bce", torch.float64)
    check(chunked(case.loss, chunk_size=chunk_size), case)


def test_chunk_budget_cuts_the_rows() -> None:
    lengths = []

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        lengths.append(logits.shape[0])
        return nll(logits, target)

    case = problem("nll", torch.float64)
    with config.override(chunk_budget_bytes=3 * 12 * 8):
        run(chunked(loss, chunk_size=None), case)
    assert lengths == [3, 3, 3, 3, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_id)
@pytest.mark.parametrize(
    "frozen",
    [("input",), ("weight",), ("bias",), ("weight", "bias"), ("input", "weight"),
     ("input", "weight", "bias")],
    ids="+".join,
)  # fmt: skip
def test_frozen(frozen: tuple[str, ...], dtype: torch.dtype) -> None:
    check(chunked(nll), problem("nll", dtype), frozen=frozen)


@pytest.mark.parametrize(
    ("frozen", "products"),
    [((), 3), (("weight",), 2), (("input",), 2), (("input", "weight"), 1)],
    ids=str,
)
def test_flops(frozen: tuple[str, ...], products: int) -> None:
    with FlopCounterMode(display=False) as counter:
        run(chunked(nll), problem("nll", bias=False), frozen=frozen)
    assert counter.get_total_flops() == products * 2 * ROWS * HIDDEN * CLASSES


@pytest.mark.parametrize("accum", ["fp32", "weight"])
@by_dtype
def test_accumulation(dtype: torch.dtype, accum: str) -> None:
    case = problem("kl", dtype, rows=64)
    slack = SLACK[dtype] * (8 if accum == "weight" else 1)
    check(chunked(kl, chunk_size=8, grad_weight_accum_dtype=accum), case, slack=slack)


@pytest.mark.parametrize("upstream", [0.0, 1.0, 2.5])
def test_upstream(upstream: float) -> None:
    result = check(chunked(nll), problem("nll"), upstream=upstream)
    assert bool(result["grad_weight"].any()) == bool(upstream)


def test_upstream_that_autograd_makes() -> None:
    case = problem("nll", torch.float64)

    def scaled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: call(*args, **kwargs).div(7).exp()

    ours, truth = run(scaled(chunked(nll)), case), run(scaled(plain(nll)), case)
    for name, value in ours.items():
        torch.testing.assert_close(value, truth[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operand", ["input", "weight"])
def test_strides(operand: str, layout: str) -> None:
    case = problem("mse", torch.float64)
    check(chunked(case.loss), dataclasses.replace(
        case, **{operand: LAYOUTS[layout](getattr(case, operand))}
    ))  # fmt: skip


@pytest.mark.parametrize("layout", ["padded", "strided", "transposed", "expanded"])
def test_strides_of_arguments(layout: str) -> None:
    case = problem("mse", torch.float64)
    check(chunked(case.loss), dataclasses.replace(case, args=(LAYOUTS[layout](case.args[0]),)))


@pytest.mark.parametrize("shape", [(2, 3), (1, 5), (2, 1, 4), (0,), (3, 0), (1,)], ids=str)
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    rows = torch.Size(shape).numel()
    case = problem("weighted-mse", torch.float64, rows=rows)
    values, weights = case.args
    folded = dataclasses.replace(case, input=case.input.reshape(*shape, HIDDEN))
    expected = run(plain(weighted_mse), case)
    for args in (
        (values, weights),
        (values.reshape(*shape, CLASSES), weights.reshape(shape)),
        (per_row(values), per_row(weights.reshape(shape))),
    ):
        result = run(chunked(weighted_mse, chunk_size=2), dataclasses.replace(folded, args=args))
        for name, value in result.items():
            torch.testing.assert_close(value.reshape(expected[name].shape), expected[name])


def test_one_row() -> None:
    case = problem("nll", torch.float64, rows=1)
    expected = run(plain(nll), case)
    result = run(chunked(nll), dataclasses.replace(case, input=case.input[0]))
    for name, value in result.items():
        torch.testing.assert_close(value.reshape(expected[name].shape), expected[name])


def test_no_rows_call_nothing() -> None:
    def never(logits: Tensor) -> Tensor:
        raise AssertionError

    case = dataclasses.replace(problem("nll", rows=0), args=())
    result = run(chunked(never), case)
    assert result["loss"] == 0
    assert not result["grad_weight"].any()
    assert not result["grad_bias"].any()


def test_deterministic() -> None:
    case = problem("focal", torch.bfloat16)
    first, second = (run(chunked(focal), case) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name])


# ------------------------------------------------------------------------------------ arguments


def test_what_is_cut_and_what_is_not() -> None:
    seen: list[Any] = []

    class Pair(NamedTuple):
        rows: Tensor
        table: Tensor

    def loss(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((args, kwargs))
        return logits.sum()

    rows, table = torch.randn(13, 2), torch.randn(4, 2)
    square = torch.randn(13, 13)
    chunked(loss)(
        torch.randn(13, 8), torch.randn(11, 8), rows, table, None, "text", 3, 0.5, True, torch.int8,
        [rows, (table, rows)], whole(rows), nest={"a": per_row(square), "b": [whole(square)]},
        pair=Pair(rows, table),
    )  # fmt: skip
    assert len(seen) == 3
    for (args, kwargs), cut in zip(seen, (slice(0, 5), slice(5, 10), slice(10, 13)), strict=True):
        assert torch.equal(args[0], rows[cut])
        assert torch.equal(args[1], table)
        assert args[2:8] == (None, "text", 3, 0.5, True, torch.int8)
        assert type(args[6]) is bool
        assert type(args[8]) is list
        assert type(args[8][1]) is tuple
        assert torch.equal(args[8][0], rows[cut])
        assert torch.equal(args[8][1][0], table)
        assert torch.equal(args[8][1][1], rows[cut])
        assert torch.equal(args[9], rows)
        assert torch.equal(kwargs["nest"]["a"], square[cut])
        assert torch.equal(kwargs["nest"]["b"][0], square)
        assert type(kwargs["pair"]) is Pair
        assert torch.equal(kwargs["pair"].rows, rows[cut])
        assert torch.equal(kwargs["pair"].table, table)


def test_classes_as_many_as_rows() -> None:
    # The accident that `whole` is for: a [V] tensor has as many elements as there are rows.
    case = problem("bce", torch.float64, rows=CLASSES)
    pos_weight = case.kwargs["pos_weight"]
    with pytest.raises(RuntimeError):
        run(chunked(case.loss), case)
    ours = run(
        chunked(case.loss), dataclasses.replace(case, kwargs={"pos_weight": whole(pos_weight)})
    )
    truth = run(plain(case.loss), case)
    for name, value in ours.items():
        torch.testing.assert_close(value, truth[name])


def test_per_row_of_another_length() -> None:
    case = problem("nll")
    for wrong in (case.args[0][:12], case.args[0].reshape(1, 13), torch.tensor(3)):
        with pytest.raises(ValueError, match=r"per_row: expected a tensor of 13 rows.*got shape"):
            run(chunked(nll), dataclasses.replace(case, args=({"t": [per_row(wrong)]},)))


@pytest.mark.parametrize("mark", [per_row, whole])
def test_marks_are_for_tensors(mark: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a tensor, got list"):
        mark([1])


# ------------------------------------------------------------------------------ learnable tensors


def tempered(logits: Tensor, target: Tensor, scale: Tensor, stretch: Tensor) -> Tensor:
    return nll(logits * scale * stretch, target)


@by_dtype
def test_learnable_arguments(dtype: torch.dtype) -> None:
    case = problem("nll", dtype)
    scale = torch.tensor(1.3, dtype=dtype)
    stretch = torch.rand(ROWS, 1, dtype=dtype) + 0.5

    def results(call: Any, case: Problem, dtype: torch.dtype) -> Results:
        learns = {
            name: value.to(dtype, copy=True).requires_grad_()
            for name, value in (("scale", scale), ("stretch", stretch))
        }
        args = (case.args[0], learns["scale"], learns["stretch"])
        return run(call, dataclasses.replace(case, args=args), learns=learns)

    ours = results(chunked(tempered), case, dtype)
    torchs = results(plain(tempered), case, dtype)
    truth = results(plain(tempered), case.double(), torch.float64)
    for name, expected in truth.items():
        # The scale's gradient is the sum of three, each rounded to the dtype of the tensor.
        slack = SLACK[dtype] * (3 if name == "grad_scale" else 1)
        if name != "loss":
            assert ours[name].dtype == dtype
        assert_within_budget(name, ours[name], torchs[name], expected, slack=slack)


def test_learnable_argument_alone() -> None:
    case = problem("nll", torch.float64)
    table = torch.randn(CLASSES, dtype=torch.float64)

    def shifted(logits: Tensor, target: Tensor, table: Tensor) -> Tensor:
        return nll(logits + table, target)

    results = []
    for call in (chunked(shifted), plain(shifted)):
        learns = {"table": table.clone().requires_grad_()}
        results.append(run(
            call, dataclasses.replace(case, args=(*case.args, learns["table"])),
            frozen=("input", "weight", "bias"), learns=learns,
        ))  # fmt: skip
    torch.testing.assert_close(results[0]["grad_table"], results[1]["grad_table"])
    assert results[0]["grad_weight"] is None


def test_learnable_argument_that_is_not_used() -> None:
    unused = torch.randn(3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(ROWS, dtype=torch.float64, requires_grad=True)
    case = problem("nll", torch.float64)
    case.args = (case.args[0], unused, rows)
    run(chunked(lambda logits, target, unused, rows: nll(logits, target)), case)
    assert not unused.grad.any()
    assert not rows.grad.any()


class Margin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.margin = nn.Parameter(torch.randn(CLASSES, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)
        self.register_buffer("shift", torch.randn(CLASSES, dtype=torch.float64))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return nll(self.frozen * logits - self.margin + self.shift, target)


def test_parameters_of_a_module_learn() -> None:
    case, module = problem("nll", torch.float64), Margin()
    truth = run(plain(module), case, learns={"margin": module.margin})
    module.margin.grad = None
    ours = run(chunked(module), case, learns={"margin": module.margin})
    for name, value in ours.items():
        torch.testing.assert_close(value, truth[name])
    assert module.frozen.grad is None
    assert list(dict(ChunkedLinearLoss(autograd_loss_and_logits_grad(module)).named_parameters()))


@pytest.mark.parametrize("kind", ["closure", "intermediate", "direct", "partial"])
def test_captured_learnable_tensor_is_an_error(kind: str) -> None:
    captured = torch.tensor(1.5, requires_grad=True)
    scale = captured * 2 if kind == "intermediate" else captured
    case = problem("nll")

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return nll(logits * scale, target)

    def direct(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return scale * logits.sum(), torch.ones_like(logits)

    call = chunked(direct, adapter=False) if kind == "direct" else chunked(loss)
    if kind == "partial":
        # Its positional tensors come before the logits, so they are nobody's arguments.
        call = chunked(functools.partial(lambda scale, z, t: nll(z * scale, t), captured))
    with pytest.raises(ValueError, match=r"holds a tensor of shape \[\] that requires grad"):
        run(call, case)
    with pytest.raises(ValueError, match=r"holds a tensor of shape \[\] that requires grad"):
        run(call, case, frozen=("input", "weight", "bias"))
    with torch.no_grad():
        run(call, case)


def test_keywords_of_a_partial_are_arguments() -> None:
    scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    stretch = torch.rand(ROWS, 1, dtype=torch.float64) + 0.5
    case = problem("nll", torch.float64)
    bound = functools.partial(tempered, scale=scale, stretch=stretch)
    truth = run(plain(bound), case, learns={"scale": scale})
    scale.grad = None
    ours = run(chunked(bound), case, learns={"scale": scale})
    for name, value in ours.items():
        torch.testing.assert_close(value, truth[name])


def test_direct_callable_cannot_give_gradients_of_arguments() -> None:
    case = problem("weighted-mse")
    case.args[1].requires_grad_()
    with pytest.raises(ValueError, match="got tensor argument 1 that requires grad"):
        run(chunked(weighted_mse_and_grad, adapter=False), case)
    with torch.no_grad():
        run(chunked(weighted_mse_and_grad, adapter=False), case)


def test_direct_callable_that_differentiates_by_itself() -> None:
    def direct(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        loss = nll(leaf, target)
        return loss, torch.autograd.grad(loss, leaf)[0]

    check(chunked(direct, adapter=False), problem("nll"))


# --------------------------------------------------------------------------- forward only, errors


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_only(mode: Any) -> None:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        assert not logits.requires_grad
        assert not torch.is_grad_enabled()
        return nll(logits, target)

    case = problem("nll", torch.float64)
    with mode():
        result = chunked(loss)(case.input.requires_grad_(), case.weight, *case.args, bias=case.bias)
        expected = plain(nll)(case.input, case.weight, *case.args, bias=case.bias)
    assert not result.requires_grad
    torch.testing.assert_close(result, expected)


def test_nothing_requires_grad() -> None:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        assert not logits.requires_grad
        return nll(logits, target)

    check(chunked(loss), problem("nll"), frozen=("input", "weight", "bias"))


def test_errors_of_the_callable() -> None:
    case = problem("nll")
    logits = "loss_and_grad_fn: expected a gradient of the logits,"
    scalar = "loss_fn: expected a scalar loss"
    cases: list[tuple[Any, bool, str]] = [
        (lambda z, t: z.sum(1), True, rf"{scalar} per chunk, got shape \[5\]"),
        (lambda z, t: 3.0, True, "loss_fn: expected a scalar loss tensor per chunk, got float"),
        (lambda z, t: t.sum(), True, "expected a floating-point loss per chunk, got torch.int64"),
        (lambda z, t: z.detach().sum(), True, "got one without a graph"),
        (lambda z, t: z.sum(), False, r"expected \(loss, grad_logits\), got Tensor"),
        (lambda z, t: (z.sum(1), z), False, r"expected a scalar loss per chunk, got shape \[5\]"),
        (lambda z, t: (z.sum(), z[:, 1:]), False, rf"{logits} .* \[5, 11\], got shape \[5, 10\]"),
        (lambda z, t: (z.sum(), None), False, f"{logits} a tensor, got NoneType"),
        (lambda z, t: (z.sum(), z.int()), False, f"{logits} of a floating dtype, got torch.int32"),
    ]  # fmt: skip
    for function, adapter, message in cases:
        with pytest.raises(ValueError, match=message):
            run(chunked(function, adapter=adapter), case)
    with pytest.raises(ValueError, match=r"expected a scalar loss per chunk, got shape \[13\]"):
        autograd_loss_and_logits_grad(lambda z: z.sum(1))(torch.randn(13, 2))


def test_errors_of_the_arguments() -> None:
    case = problem("nll")
    for changes, kind, message in (
        ({"chunk_size": 0}, ValueError, "chunk_size: expected at least 1 row, got 0"),
        ({"grad_weight_accum_dtype": "bf16"}, ValueError, "grad_weight_accum_dtype: expected one"),
        ({"bias": torch.ones(3)}, ValueError, r"bias: expected shape \[V\] = \[11\]"),
    ):
        with pytest.raises(kind, match=message):
            chunked_linear_loss(
                case.input, case.weight, autograd_loss_and_logits_grad(nll), *case.args, **changes
            )
    with pytest.raises(TypeError, match="loss_and_grad_fn: expected a callable, got int"):
        chunked_linear_loss(case.input, case.weight, 3, *case.args)
    with pytest.raises(TypeError, match="loss_fn: expected a callable, got NoneType"):
        autograd_loss_and_logits_grad(None)


@pytest.mark.fault("B82")
def test_exception_leaves_nothing_behind() -> None:
    calls = []

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("the user's own")
        return nll(logits, target)

    case = problem("nll", torch.float64)
    call = chunked(loss)
    gc.collect()
    before = set(loss_call._calls)  # graphs that other tests have compiled hold theirs
    with pytest.raises(KeyError, match="the user's own"):
        run(call, case)
    assert set(loss_call._calls) <= before
    assert torch.is_grad_enabled()
    calls.extend([1, 1])
    check(call, case)


def test_registry_does_not_grow() -> None:
    case = problem("nll")
    gc.collect()
    before = len(loss_call._calls), len(loss_call._kept), len(loss_call._alive)
    adapters = []
    for _ in range(5):
        adapter = autograd_loss_and_logits_grad(lambda logits, target: nll(logits, target))
        adapters.append(weakref.ref(adapter))
        chunked_linear_loss(
            case.input.requires_grad_(), case.weight, adapter, *case.args
        ).backward()
    del adapter
    gc.collect()
    assert all(each() is None for each in adapters)
    assert (len(loss_call._calls), len(loss_call._kept), len(loss_call._alive)) == before


def test_a_recorded_graph_keeps_its_callable() -> None:
    case = problem("nll", torch.float64)

    def record() -> Any:
        call = chunked(lambda logits, target: nll(logits, target))
        return make_fx(call)(case.input, case.weight, *case.args)

    graph = record()
    gc.collect()
    truth = plain(nll)(case.input, case.weight, *case.args)
    torch.testing.assert_close(graph(case.input, case.weight, *case.args), truth)
    before = len(loss_call._calls)
    with FakeTensorMode() as mode:
        chunked(nll)(*(mode.from_tensor(each) for each in (case.input, case.weight, *case.args)))
    assert len(loss_call._calls) == before


@pytest.mark.fault("B33")
@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint_and_another_loss(reentrant: bool) -> None:
    # Autograd inside the op, inside a backward; and the op inside a callable.
    head = torch.randn(5, CLASSES, dtype=torch.float64)

    def nested(logits: Tensor, target: Tensor) -> Tensor:
        inner = chunked(lambda z: z.square().sum(), chunk_size=2)(logits, head)
        return nll(logits, target) + inner

    def flat(logits: Tensor, target: Tensor) -> Tensor:
        return nll(logits, target) + F.linear(logits, head).square().sum()

    def call(*args: Any, **kwargs: Any) -> Tensor:
        return checkpoint(
            functools.partial(chunked(nested), **kwargs), *args, use_reentrant=reentrant
        )

    case = problem("nll", torch.float64, bias=False)
    truth = run(plain(flat), case)
    for name, value in run(call, case).items():
        torch.testing.assert_close(value, truth[name])


def test_threads() -> None:
    case = problem("nll", torch.float64)
    expected = run(plain(nll), case)
    call = chunked(nll)
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(run, call, case) for _ in range(16)]:
            for name, value in future.result().items():
                torch.testing.assert_close(value, expected[name])


def test_second_derivative_and_forward_mode_are_refused() -> None:
    case = problem("nll", torch.float64)
    leaves = case.leaves()
    loss = chunked(nll)(leaves["input"], leaves["weight"], *case.args)
    (grad,) = torch.autograd.grad(loss, leaves["input"], create_graph=True)
    with pytest.raises(NotDifferentiableTwiceError):
        grad.sum().backward()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(case.input, torch.ones_like(case.input))
        with pytest.raises(ForwardModeError):
            chunked(nll)(dual, case.weight, *case.args)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda x: chunked(nll)(x, case.weight, *case.args))(case.input)


@pytest.mark.parametrize("retain", [True, False])
def test_retained_graph(retain: bool) -> None:
    case = problem("nll", torch.float64)
    leaves = case.leaves()
    scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    wanted = (leaves["input"], leaves["weight"], leaves["bias"], scale)
    stretch = torch.ones(1, dtype=torch.float64)
    loss = chunked(tempered)(*wanted[:2], *case.args, scale, stretch, bias=wanted[2])
    first = torch.autograd.grad(loss, wanted, torch.tensor(3.0).double(), retain_graph=True)
    kept = [each.clone() for each in first]
    second = torch.autograd.grad(loss, wanted, torch.tensor(3.0).double(), retain_graph=retain)
    for one, copy, other in zip(first, kept, second, strict=True):
        assert torch.equal(one, copy)
        assert torch.equal(one, other)


# ------------------------------------------------------------------------------------- precision


@pytest.mark.fault("R07")
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)
def test_gradient_of_another_dtype(dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    def direct(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        loss, grad = autograd_loss_and_logits_grad(nll)(logits.to(grad_dtype), target)
        return loss, grad

    case = problem("nll", dtype)
    check(chunked(direct, adapter=False), case, slack=max(SLACK[dtype], SLACK[grad_dtype]))


@pytest.mark.parametrize("size", [2.0**-20, 2.0**20], ids=["small", "large"])
def test_fp16_with_gradients_out_of_its_range(size: float, device: torch.device) -> None:
    # Gradients in fp32 that fp16 cannot hold, and an upstream that brings them back: a mean
    # inside the loss and a GradScaler, for one.
    def direct(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        loss, grad = autograd_loss_and_logits_grad(nll)(logits.float() * 0.5, target)
        return loss * size, grad * 0.5 * size

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return nll(logits.float() * 0.5, target)

    case = problem("nll", torch.float16, device=device)
    ours = run(chunked(direct, adapter=False), case, upstream=1 / size)
    torchs = run(plain(loss), case, upstream=1.0)
    truth = run(plain(lambda z, t: nll(z * 0.5, t)), case.double(), upstream=1.0)
    for name in ("grad_input", "grad_weight", "grad_bias"):
        assert_within_budget(
            name, ours[name], torchs[name], truth[name], slack=SLACK[torch.float16]
        )


def test_fp16_scale_follows_the_chunks() -> None:
    # What CUDA does with fp32 gradients and fp16 products; each chunk has gradients of another
    # size, one has none.
    rows, weight = torch.randn(20, HIDDEN).half(), torch.randn(CLASSES, HIDDEN).half()
    grads = torch.randn(20, CLASSES)
    for start, size in ((0, 2.0**-30), (5, 2.0**20), (10, 0.0), (15, 1.0)):
        grads[start : start + 5] *= size
    loop = linear_loss.LossLoop(
        rows, weight, torch.zeros(CLASSES).half(), needs=GradientNeeds(True, True, True),
        compute_dtype=torch.float16, accum="fp32", chunk_size=5, gain=1.0,
    )  # fmt: skip
    for start, stop in loop.spans():
        loop._fold_scaled(start, stop, grads[start:stop])
    grad_input, grad_weight, grad_bias = loop.finish()
    assert grad_input.dtype == grad_weight.dtype == torch.float32
    wide = grads.double()
    for start in (0, 5, 10, 15):
        part = slice(start, start + 5)
        error = relative_error(grad_input[part], wide[part] @ weight.double())
        assert error < 2 * SLACK[torch.float16]
    assert relative_error(grad_weight, wide.t() @ rows.double()) < SLACK[torch.float16]
    assert relative_error(grad_bias, wide.sum(0)) < 1e-6


@pytest.mark.parametrize("rows", [None, 4096], ids=["sum", "mean"])
def test_fp16_scaler_lifts_small_gradients(rows: int | None) -> None:
    # Probabilities near 1e-5, below fp16's normal numbers, and a mean over many rows inside the
    # loss: plain torch multiplies by the upstream first.
    classes = 20000

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        total = F.cross_entropy(wide(logits), target, reduction="sum")
        return total if rows is None else total / rows

    case = Problem(
        loss, (torch.randint(0, classes, (24,)),), {}, torch.randn(24, 8).half(),
        torch.randn(classes, 8).half() / 3,
    )  # fmt: skip
    check(chunked(loss, chunk_size=10), case, upstream=1024.0 if rows is None else 65536.0)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_autocast(weight_dtype: torch.dtype) -> None:
    seen = []

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        seen.append((logits.dtype, torch.is_autocast_enabled("cpu")))
        return nll(logits, target)

    def under(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def inner(*args: Any, **kwargs: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return call(*args, **kwargs)

        return inner

    case = problem("nll", torch.float32)
    case.weight = case.weight.to(weight_dtype)
    ours = run(under(chunked(loss)), case)
    assert set(seen) == {(torch.bfloat16, True)}
    torchs = run(under(plain(nll)), case)
    truth = run(plain(nll), case.double())
    for name, value in ours.items():
        assert_within_budget(name, value, torchs[name], truth[name], slack=SLACK[torch.bfloat16])
    assert ours["grad_weight"].dtype == weight_dtype


# ------------------------------------------------------------------------------------- the module


def test_module() -> None:
    case = problem("nll", torch.float64)
    module = ChunkedLinearLoss(autograd_loss_and_logits_grad(nll), chunk_size=5)
    check(module, case)
    assert "chunk_size=5" in repr(module)
    direct = ChunkedLinearLoss(weighted_mse_and_grad, grad_weight_accum_dtype="weight")
    check(direct, problem("weighted-mse", torch.float64))
    with pytest.raises(ValueError, match="chunk_size"):
        ChunkedLinearLoss(weighted_mse_and_grad, chunk_size=-1)
    with pytest.raises(TypeError, match="expected a callable"):
        ChunkedLinearLoss(3)


def test_loss_of_an_adapter_is_fixed() -> None:
    # Compiled graphs know it by the adapter's name.
    with pytest.raises(AttributeError):
        autograd_loss_and_logits_grad(nll).loss_fn = focal


def test_adapter_by_itself() -> None:
    logits, target = torch.randn(4, 5, requires_grad=True), torch.randint(0, 5, (4,))
    with torch.no_grad():
        loss, grad = autograd_loss_and_logits_grad(nll)(logits, target)
    (expected,) = torch.autograd.grad(nll(logits, target), logits)
    assert torch.equal(grad, expected)
    assert not loss.requires_grad
    assert not grad.requires_grad


@pytest.mark.parametrize(
    "frozen", [(), ("input",), ("bias",)], ids=lambda names: "+".join(names) or "all"
)
def test_kept_gradients(frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    with kept_gradients(monkeypatch):
        check(chunked(nll), problem("nll", torch.bfloat16, hidden=16), frozen=frozen)


def one_row_for_all(logits: Tensor) -> tuple[Tensor, Tensor]:
    row = logits[:1].fill_(1.0)
    return logits.new_zeros((), dtype=torch.float32), row.expand(logits.shape)


def across(logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_zeros((), dtype=torch.float32), logits.t()


@pytest.mark.parametrize("loss_and_grad", [one_row_for_all, across])
def test_kept_gradients_that_are_views_of_the_logits(
    loss_and_grad: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    input, weight = torch.randn(24, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    made = []
    for keeps in (False, True):
        with kept_gradients(monkeypatch) if keeps else contextlib.nullcontext():
            leaves = [each.clone().requires_grad_() for each in (input, weight)]
            chunked_linear_loss(*leaves, loss_and_grad, chunk_size=8).backward()
            made.append([each.grad for each in leaves])
    for kept, other in zip(*made, strict=True):
        torch.testing.assert_close(kept, other, rtol=2**-6, atol=2**-4)
