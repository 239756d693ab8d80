"""Every option of the losses, in every way in which torch lets one spell it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowering.rewriting import Backend, assert_left, assert_rewritten, check, run

N, D, V = 12, 8, 37

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class HeadAndLoss(nn.Module):
    """A head, then a loss of ``(logits, target, class_weight)``."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.head = nn.Linear(D, V)
        self.loss = loss
        self.register_buffer("class_weight", torch.rand(V) + 0.5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.head(x), target, self.class_weight)


def make(loss: Loss, *, ignored: int | None = -100, all_ignored: bool = False) -> Any:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        module = HeadAndLoss(loss)
        x = torch.randn(N, D, requires_grad=True)
        target = torch.randint(0, V, (N,))
        if ignored is not None:
            target[:: 1 if all_ignored else 5] = ignored
        return module, (x, target)

    return made


def options_of(backend: Backend) -> dict[str, Any]:
    (node,) = backend.op_nodes
    return {
        "weighted": node.args[4] is not None,
        **{k: node.kwargs[k] for k in ("ignore_index", "reduction", "label_smoothing")},
    }


def wanted(
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    weighted: bool = False,
) -> dict[str, Any]:
    return {
        "weighted": weighted,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }


CROSS_ENTROPY: dict[str, tuple[Loss, dict[str, Any]]] = {
    "plain": (lambda z, y, w: F.cross_entropy(z, y), wanted()),
    "input and target by keyword": (
        lambda z, y, w: F.cross_entropy(target=y, input=z),
        wanted(),
    ),
    "all by position": (
        lambda z, y, w: F.cross_entropy(z, y, w, None, 3, None, "sum", 0.1),
        wanted(3, "sum", 0.1, True),
    ),
    "all by keyword": (
        lambda z, y, w: F.cross_entropy(
            z, y, weight=w, ignore_index=3, reduction="mean", label_smoothing=0.25
        ),
        wanted(3, "mean", 0.25, True),
    ),
    "mixed": (
        lambda z, y, w: F.cross_entropy(z, y, w, reduction="sum", ignore_index=0),
        wanted(0, "sum", 0.0, True),
    ),
    "weight None, smoothing an int": (
        lambda z, y, w: F.cross_entropy(z, y, None, label_smoothing=1),
        wanted(label_smoothing=1.0),
    ),
    "ignore_index beyond V": (
        lambda z, y, w: F.cross_entropy(z, y, ignore_index=V + 5),
        wanted(V + 5),
    ),
    "none": (
        lambda z, y, w: F.cross_entropy(z, y, w, reduction="none", label_smoothing=0.1),
        wanted(reduction="none", label_smoothing=0.1, weighted=True),
    ),
    "size_average=False": (
        lambda z, y, w: F.cross_entropy(z, y, size_average=False),
        wanted(reduction="sum"),
    ),
    "size_average=True by position": (
        lambda z, y, w: F.cross_entropy(z, y, None, True, -100, True, "sum"),
        wanted(reduction="mean"),
    ),
    "reduce=False": (
        lambda z, y, w: F.cross_entropy(z, y, reduce=False),
        wanted(reduction="none"),
    ),
    "reduce=True, size_average=False": (
        lambda z, y, w: F.cross_entropy(z, y, reduce=True, size_average=False),
        wanted(reduction="sum"),
    ),
    "module": (lambda z, y, w: nn.CrossEntropyLoss()(z, y), wanted()),
    "module, all options": (
        lambda z, y, w: nn.CrossEntropyLoss(
            weight=w, ignore_index=3, reduction="sum", label_smoothing=0.1
        )(z, y),
        wanted(3, "sum", 0.1, True),
    ),
    "module, reduction none": (
        lambda z, y, w: nn.CrossEntropyLoss(reduction="none", ignore_index=3)(z, y),
        wanted(3, "none"),
    ),
    "module, size_average=False": (
        lambda z, y, w: nn.CrossEntropyLoss(size_average=False)(z, y),
        wanted(reduction="sum"),
    ),
    "module, reduce=False": (
        lambda z, y, w: nn.CrossEntropyLoss(reduce=False)(z, y),
        wanted(reduction="none"),
    ),
}

NLL: dict[str, tuple[Loss, dict[str, Any]]] = {
    "function, dim by position": (
        lambda z, y, w: F.nll_loss(F.log_softmax(z, 1), y),
        wanted(),
    ),
    "function, dim by keyword": (
        lambda z, y, w: F.nll_loss(F.log_softmax(z, dim=-1), y, reduction="sum"),
        wanted(reduction="sum"),
    ),
    "input by keyword": (
        lambda z, y, w: F.nll_loss(input=F.log_softmax(z, dim=1), target=y),
        wanted(),
    ),
    "function with dtype": (
        lambda z, y, w: F.nll_loss(F.log_softmax(z, dim=-1, dtype=torch.float32), y),
        wanted(),
    ),
    "torch.log_softmax with dtype by position": (
        lambda z, y, w: F.nll_loss(torch.log_softmax(z, 1, torch.float32), y),
        wanted(),
    ),
    "method": (lambda z, y, w: F.nll_loss(z.log_softmax(-1), y), wanted()),
    "method, by keyword": (
        lambda z, y, w: F.nll_loss(z.log_softmax(dim=1, dtype=torch.float32), y),
        wanted(),
    ),
    "special": (lambda z, y, w: F.nll_loss(torch.special.log_softmax(z, 1), y), wanted()),
    "modules": (lambda z, y, w: nn.NLLLoss()(nn.LogSoftmax(dim=1)(z), y), wanted()),
    "all by position": (
        lambda z, y, w: F.nll_loss(z.log_softmax(1), y, w, None, 3, None, "sum"),
        wanted(3, "sum", 0.0, True),
    ),
    "all by keyword": (
        lambda z, y, w: F.nll_loss(z.log_softmax(1), y, weight=w, ignore_index=3, reduction="none"),
        wanted(3, "none", 0.0, True),
    ),
    "size_average=False": (
        lambda z, y, w: F.nll_loss(z.log_softmax(1), y, size_average=False),
        wanted(reduction="sum"),
    ),
    "reduce=False by position": (
        lambda z, y, w: F.nll_loss(z.log_softmax(1), y, None, None, -100, False),
        wanted(reduction="none"),
    ),
    "NLLLoss, all options": (
        lambda z, y, w: nn.NLLLoss(w, ignore_index=3, reduction="sum")(z.log_softmax(1), y),
        wanted(3, "sum", 0.0, True),
    ),
}


def spelled(losses: dict[str, tuple[Loss, dict[str, Any]]]) -> Any:
    return pytest.mark.parametrize(("loss", "options"), losses.values(), ids=losses)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="size_average and reduce args")
        yield


@spelled(CROSS_ENTROPY)
def test_cross_entropy(loss: Loss, options: dict[str, Any]) -> None:
    backend = check(make(loss, ignored=options["ignore_index"]))
    assert_rewritten(backend)
    assert options_of(backend) == options


@spelled(NLL)
def test_nll_of_log_softmax(loss: Loss, options: dict[str, Any]) -> None:
    backend = check(make(loss, ignored=options["ignore_index"]))
    assert_rewritten(backend)
    assert options_of(backend) == options


def test_log_softmax_with_its_input_by_keyword() -> None:
    """Nobody writes that: as a cross entropy it may be left, with a reason."""
    loss = make(lambda z, y, w: F.nll_loss(F.log_softmax(input=z, dim=1), y))
    backend = check(loss, kinds=("cross_entropy",))
    if not backend.op_nodes:
        assert_left(backend, "first argument")
    assert check(loss).our_nodes


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize("ignore_index", [-100, 0, 36])
def test_options_together(
    reduction: str, smoothing: float, weighted: bool, ignore_index: int
) -> None:
    def loss(z: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(
            z,
            y,
            weight=w if weighted else None,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=smoothing,
        )

    backend = check(make(loss, ignored=ignore_index))
    assert_rewritten(backend)
    assert options_of(backend) == wanted(ignore_index, reduction, smoothing, weighted)


@pytest.mark.fault("B13")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
def test_all_ignored_mean_is_nan_and_its_gradients_are_those_of_torch(
    smoothing: float, weighted: bool
) -> None:
    def loss(z: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(z, y, w if weighted else None, label_smoothing=smoothing)

    made = make(loss, all_ignored=True)
    function, inputs = made()
    plain = run(function, inputs)
    assert plain.loss.isnan()
    backend = Backend()
    function, inputs = made()
    torch._dynamo.reset()
    value = run(function, inputs, compiled=torch.compile(function, backend=backend))
    assert len(backend.op_nodes) == 1
    assert value.loss.isnan()
    for name, grad in plain.grads.items():
        torch.testing.assert_close(value.grads[name], grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_all_ignored_sum_is_zero(reduction: str) -> None:
    backend = check(
        make(lambda z, y, w: F.cross_entropy(z, y, reduction=reduction), all_ignored=True)
    )
    assert_rewritten(backend)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_class_weights_that_are_zero_where_it_counts(reduction: str) -> None:
    """The weighted mean divides by zero, as torch's does."""
    made = make(lambda z, y, w: F.cross_entropy(z, y, torch.zeros_like(w), reduction=reduction))
    backend = check(made)
    assert_rewritten(backend)


@pytest.mark.fault("B16")
@pytest.mark.parametrize("wrong", [V, -1, V + 1000])
def test_target_out_of_range_raises_index_error_as_torch(wrong: int) -> None:
    function, (x, target) = make(lambda z, y, w: F.cross_entropy(z, y))()
    target[1] = wrong
    with pytest.raises(IndexError):
        function(x, target)
    backend = Backend()
    torch._dynamo.reset()
    with pytest.raises(IndexError, match=str(wrong)):
        torch.compile(function, backend=backend)(x, target)
    assert len(backend.op_nodes) == 1


def test_no_rows_give_the_nan_of_torch() -> None:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        module = HeadAndLoss(lambda z, y, w: F.cross_entropy(z, y))
        return module, (torch.randn(0, D, requires_grad=True), torch.zeros(0, dtype=torch.int64))

    check(made)


@pytest.mark.fault("B87")
@pytest.mark.parametrize("gain", [0.5, -3.0, 0.0])
@pytest.mark.parametrize(
    "scaled",
    [lambda z, g: z * g, lambda z, g: g * z, lambda z, g: z.mul(g), lambda z, g: torch.mul(z, g)],
    ids=["operator", "reflected", "method", "function"],
)
def test_constant_scale(scaled: Callable[[Tensor, float], Tensor], gain: float) -> None:
    backend = check(make(lambda z, y, w: F.cross_entropy(scaled(z, gain), y)))
    assert_rewritten(backend)
    assert backend.op_nodes[0].kwargs["logit_scale"] == gain


@pytest.mark.fault("B63", "B64")
@pytest.mark.parametrize(
    "capped",
    [
        lambda z: 5.0 * torch.tanh(z / 5.0),
        lambda z: torch.tanh(z * 0.2).mul(5),
        lambda z: -5.0 * torch.tanh(z / -5.0),
        lambda z: F.tanh(z / 10.0 * 2.0) * 2.5 * 2.0,
        lambda z: z.tanh() * 5.0,
    ],
    ids=["usual", "method", "negative", "several factors", "no inner scale"],
)
def test_softcap(capped: Callable[[Tensor], Tensor]) -> None:
    backend = check(make(lambda z, y, w: F.cross_entropy(capped(z), y)))
    assert_rewritten(backend)
    assert backend.op_nodes[0].kwargs["softcap"] == pytest.approx(5.0)


class Spelling(nn.Module):
    """A head written by hand as ``project(x, weight, bias)``, then cross entropy."""

    def __init__(self, project: Callable[[Tensor, Tensor, Tensor], Tensor], frozen: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(V, D), requires_grad="weight" not in frozen)
        self.bias = nn.Parameter(torch.randn(V), requires_grad="bias" not in frozen)
        self.project = project

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.project(x, self.weight, self.bias)
        classes = logits.shape[-1]
        return F.cross_entropy(logits.reshape(-1, classes), y.reshape(-1))


def make_spelling(
    project: Callable[[Tensor, Tensor, Tensor], Tensor], frozen: str = ""
) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        module = Spelling(project, frozen)
        x = torch.randn(2, 6, D, requires_grad="input" not in frozen)
        return module, (x, torch.randint(0, 30, (2, 6)))

    return made


ROW_STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sizes of the logits": lambda x, w, b: (lambda z: z.view(z.shape[0] * z.shape[1], z.shape[2]))(
        F.linear(x, w, b)
    ),
    "size methods": lambda x, w, b: (lambda z: z.view(z.size(0) * z.size(1), z.size(-1)))(
        F.linear(x, w, b)
    ),
    "view with -1 last": lambda x, w, b: F.linear(x, w, b).view(12, -1),
    "flatten by negative dims": lambda x, w, b: F.linear(x, w, b).flatten(0, -2),
    "flatten by keyword": lambda x, w, b: F.linear(x, w, b).flatten(end_dim=-2),
    "unflatten": lambda x, w, b: F.linear(x, w, b).unflatten(1, (2, 3)),
    "unsqueeze": lambda x, w, b: F.linear(x, w, b).unsqueeze(-2),
    "new axis": lambda x, w, b: F.linear(x, w, b)[:, None],
    "einsum that keeps rows": lambda x, w, b: torch.einsum("bth,vh->btv", x, w) + b,
    "bias first": lambda x, w, b: b + F.linear(x, w),
    "bias subtracted": lambda x, w, b: F.linear(x, w) - b,
    "bias after a class slice": lambda x, w, b: F.linear(x, w)[..., :30] + b[:30],
    "class slice of biased logits": lambda x, w, b: F.linear(x, w, b)[..., :-7],
    "narrowed twice": lambda x, w, b: F.linear(x, w, b)[..., :33][..., :30],
    "stored transposed": lambda x, w, b: torch.matmul(x, w.t().contiguous()) + b,
    "stored transposed, sliced": lambda x, w, b: (x @ w.mT)[..., :31] - b[:31],
    "clone and contiguous": lambda x, w, b: F.linear(x, w, b).clone().contiguous(),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("project", ROW_STEPS.values(), ids=ROW_STEPS)
def test_steps_between_projection_and_loss(
    project: Callable[[Tensor, Tensor, Tensor], Tensor], dynamic: bool
) -> None:
    backend = check(make_spelling(project), dynamic=dynamic)
    assert_rewritten(backend)


class Reordered(nn.Module):
    """Rows in another order than the hidden states': targets must follow the loss's order."""

    def __init__(self, logits_of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(V, D))
        self.logits_of = logits_of

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.logits_of(x, self.weight), y)


REORDERED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "transpose": (lambda x, w: F.linear(x, w).transpose(0, 1).reshape(-1, V), (12,)),
    "permute": (lambda x, w: F.linear(x, w).permute(1, 0, 2).flatten(0, 1), (12,)),
    "einsum": (lambda x, w: torch.einsum("bth,vh->tbv", x, w).reshape(-1, V), (12,)),
    "einsum to class axis 1": (lambda x, w: torch.einsum("bth,vh->bvt", x, w), (2, 6)),
    "movedim": (lambda x, w: F.linear(x, w).movedim(-1, 1), (2, 6)),
    "transposed both ways": (lambda x, w: F.linear(x, w).permute(1, 2, 0), (6, 2)),
    "last token": (lambda x, w: F.linear(x, w)[:, -1], (2,)),
    "every other token": (lambda x, w: F.linear(x, w)[:, ::2].reshape(-1, V), (6,)),
    "one row": (lambda x, w: F.linear(x, w)[0, 1], ()),
    "one vector": (lambda x, w: F.linear(x[0, 0], w), ()),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("logits_of", "shape"), REORDERED.values(), ids=REORDERED)
def test_rows_in_another_order(
    logits_of: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], dynamic: bool
) -> None:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        x = torch.randn(2, 6, D, requires_grad=True)
        return Reordered(logits_of), (x, torch.randint(0, V, shape))

    assert_rewritten(check(made, dynamic=dynamic))


@pytest.mark.parametrize(
    "frozen",
    ["input", "weight", "bias", "input weight", "input bias", "weight bias", "input weight bias"],
)
@pytest.mark.parametrize(
    "project",
    [F.linear, lambda x, w, b: F.linear(x, w) + b, lambda x, w, b: x @ w.t() - b],
    ids=["linear", "added", "subtracted"],
)
def test_frozen_operands_get_no_gradient_and_the_others_do(
    project: Callable[[Tensor, Tensor, Tensor], Tensor], frozen: str
) -> None:
    backend = check(make_spelling(project, frozen))
    assert_rewritten(backend)
    (node,) = backend.op_nodes
    needs = {name: node.kwargs[f"need_grad_{name}"] for name in ("input", "weight", "bias")}
    assert needs == {name: name not in frozen.split() for name in needs}


@pytest.mark.parametrize(
    "project",
    [
        lambda x, w, b: F.linear(x, w, b[:1]),
        lambda x, w, b: torch.addmm(b[:1], x.view(-1, D), w.t()),
    ],
    ids=["linear", "addmm"],
)
def test_bias_of_one_element_is_broadcast(
    project: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    """The op wants [V]: left alone or expanded, but never an error that torch does not raise."""
    backend = check(make_spelling(project))
    if not backend.op_nodes:
        assert_left(backend)


class PartlyWithoutGrad(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.head = nn.Linear(D, V, bias=False)
        self.bias = nn.Parameter(torch.randn(V))
        self.where = where

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.where != "head"):
            logits = self.head(x)
        with torch.set_grad_enabled(self.where != "bias"):
            logits = logits + self.bias
        with torch.set_grad_enabled(self.where != "view"):
            logits = logits.view(-1, V)
        with torch.set_grad_enabled(self.where != "loss"):
            loss = F.cross_entropy(logits, y)
        return loss + self.bias.sum()


@pytest.mark.parametrize("where", ["head", "bias", "view", "loss"])
def test_a_part_runs_under_no_grad(where: str) -> None:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        return PartlyWithoutGrad(where), (
            torch.randn(N, D, requires_grad=True),
            torch.randint(0, V, (N,)),
        )

    check(made)
