"""Several cross entropies in one call: multi-token prediction and several heads."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from greyhound_ops import functional, modules, reference
from greyhound_ops.errors import (
    ForwardModeError,
    NotDifferentiableTwiceError,
    TargetOutOfRangeError,
)
from greyhound_ops.testing import assert_within_budget, peak_memory
from samples import SLACK, dtype_id

HIDDEN, DTYPES = 8, (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass
class Terms:
    """K terms; one of the lists may have a single tensor that all share."""

    inputs: list[Tensor]
    weights: list[Tensor]
    targets: list[Tensor]
    biases: list[Tensor]

    def map(self, function: Any) -> Terms:
        return Terms(
            [function(each) for each in self.inputs],
            [function(each) for each in self.weights],
            self.targets,
            [function(each) for each in self.biases],
        )

    def leaves(self) -> dict[str, Tensor]:
        return {
            f"{name}{index}": each
            for name in ("inputs", "weights", "biases")
            for index, each in enumerate(getattr(self, name))
        }


def make_terms(
    shared: str,
    *,
    terms: int = 3,
    rows: int = 13,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Terms:
    inputs = 1 if shared == "input" else terms
    heads = 1 if shared == "head" else terms
    # Sizes of their own where nothing is shared: chunks and vocabularies then differ by term.
    lengths = [rows + (0 if shared == "input" else 3 * k) for k in range(terms)]
    classes = [11 + (0 if shared == "head" else 2 * k) for k in range(terms)]
    options = {"dtype": dtype, "device": device}
    targets = []
    for length, size in zip(lengths, classes, strict=True):
        target = torch.randint(0, size, (length,), device=device)
        targets.append(target.masked_fill(torch.rand(length, device=device) < 0.25, -100))
        targets[-1][0] = 0
    return Terms(
        [torch.randn(lengths[k], HIDDEN, **options) for k in range(inputs)],
        [torch.randn(classes[k], HIDDEN, **options) for k in range(heads)],
        targets,
        [torch.randn(classes[k], **options) for k in range(heads)] if bias else [],
    )


def ours(terms: Terms, *, shared: str, **options: Any) -> Any:
    if shared == "head":
        bias = terms.biases[0] if terms.biases else None
        return functional.chunked_multi_token_cross_entropy(
            terms.inputs, terms.weights[0], terms.targets, bias, **options
        )
    options.pop("detach_head", None)
    return functional.chunked_multi_head_cross_entropy(
        terms.inputs[0], terms.weights, terms.targets, terms.biases or None, **options
    )


def plain(
    terms: Terms,
    *,
    shared: str,
    term_weights: Any = None,
    detach_head: Any = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    count = len(terms.targets)
    flags = [detach_head] * count if isinstance(detach_head, bool) else detach_head
    losses = []
    for k in range(count):
        input = terms.inputs[k if len(terms.inputs) > 1 else 0]
        head = k if len(terms.weights) > 1 else 0
        weight = terms.weights[head]
        bias = terms.biases[head] if terms.biases else None
        if flags[k]:
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        losses.append(
            reference.linear_cross_entropy(input, weight, terms.targets[k], bias, **options)
        )
    stacked = torch.stack(losses)
    if term_weights is None:
        return stacked.sum(), stacked.detach()
    factors = torch.as_tensor(term_weights, dtype=stacked.dtype, device=stacked.device)
    return (stacked * factors).sum(), stacked.detach()


def outcome(
    function: Any,
    terms: Terms,
    *,
    upstream: float = -1.7,
    frozen: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, Tensor | None]:
    terms = terms.map(lambda each: each.detach().clone())
    leaves = terms.leaves()
    for name, leaf in leaves.items():
        leaf.requires_grad_(not name.startswith(frozen) if frozen else True)
    loss, losses = function(terms, **options)
    assert not losses.requires_grad
    if loss.requires_grad:
        loss.backward(torch.full_like(loss, upstream))
    return {"loss": loss.detach(), "losses": losses} | {
        f"grad_{name}": leaf.grad for name, leaf in leaves.items()
    }


def compare(
    terms: Terms,
    shared: str,
    *,
    function: Any = ours,
    only_ours: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Tensor | None]:
    made = outcome(function, terms, shared=shared, **options, **(only_ours or {}))
    same = outcome(plain, terms, shared=shared, **options)
    truth = outcome(plain, terms.map(Tensor.double), shared=shared, **options)
    dtype = terms.inputs[0].dtype
    for name, expected in truth.items():
        if expected is None or same[name] is None:
            assert made[name] is None, name
            continue
        slack = SLACK[dtype] if name.startswith("grad_") else min(SLACK[dtype], 1e-6)
        assert made[name] is not None, name
        assert_within_budget(name, made[name], same[name], expected, slack=slack)
    return made


by_shared = pytest.mark.parametrize("shared", ["head", "input", "nothing"])
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)

ROW_OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "all": {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_scale": 0.5, "softcap": 3.0},
}


def nothing_shared(terms: Terms, *, shared: str, **options: Any) -> Any:
    """The op itself: no functional has K inputs on K heads."""
    weights = options.pop("term_weights", None)
    detach = options.pop("detach_head", [])
    return torch.ops.greyhound.linear_cross_entropy_terms(
        terms.inputs, terms.weights, terms.targets, terms.biases,
        None if weights is None else terms.inputs[0].new_tensor(weights, dtype=torch.float64),
        detach, **options,
        need_grad_inputs=[each.requires_grad for each in terms.inputs],
        need_grad_weights=[each.requires_grad for each in terms.weights],
        need_grad_biases=[each.requires_grad for each in terms.biases],
    )[:2]  # fmt: skip


def function_for(shared: str) -> Any:
    return nothing_shared if shared == "nothing" else ours


@by_shared
@by_dtype
@pytest.mark.parametrize("row_options", ROW_OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_against_reference(
    reduction: str, row_options: str, dtype: torch.dtype, shared: str, device: torch.device
) -> None:
    if dtype == torch.float64 and device.type == "cuda":
        pytest.skip("needs the CPU: float64 has no kernel and takes the same path there")
    terms = make_terms(shared, bias=row_options == "all", dtype=dtype, device=device)
    compare(
        terms,
        shared,
        function=function_for(shared),
        reduction=reduction,
        term_weights=[1.0, 0.3, -2.0],
        only_ours={"chunk_size": 5},
        **ROW_OPTIONS[row_options],
    )


@by_shared
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 13, 100])
@pytest.mark.parametrize("accum", ["fp32", "weight"])
def test_chunk_sizes(accum: str, chunk_size: int | None, shared: str, device: torch.device) -> None:
    compare(
        make_terms(shared, device=device, bias=True),
        shared,
        function=function_for(shared),
        only_ours={"chunk_size": chunk_size, "grad_weight_accum_dtype": accum},
    )


@by_shared
@pytest.mark.parametrize(
    "frozen",
    [("inputs",), ("weights",), ("biases",), ("weights", "biases"), ("inputs", "weights", "biases"),
     ("inputs1",), ("weights1", "biases1")],
    ids="-".join,
)  # fmt: skip
def test_frozen(frozen: tuple[str, ...], shared: str, device: torch.device) -> None:
    compare(
        make_terms(shared, device=device, bias=True),
        shared,
        function=function_for(shared),
        frozen=frozen,
        only_ours={"chunk_size": 5},
    )


@pytest.mark.parametrize(
    "detach", [True, [True, False, False], [False, True, True], [False, False, True]]
)
@by_dtype
def test_detached_head(detach: Any, dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.float64 and device.type == "cuda":
        pytest.skip("needs the CPU: float64 has no kernel and takes the same path there")
    made = compare(
        make_terms("head", device=device, bias=True, dtype=dtype),
        "head",
        detach_head=detach,
        term_weights=[0.5, 1.0, 2.0],
        only_ours={"chunk_size": 5},
    )
    assert (made["grad_weights0"] is None) == (detach is True)


@by_shared
def test_stacked_equals_listed(shared: str, device: torch.device) -> None:
    torch.manual_seed(1)
    input, weight = torch.randn(3, 7, HIDDEN), torch.randn(3, 11, HIDDEN)
    target = torch.randint(0, 11, (3, 7))
    if shared == "head":
        listed = functional.chunked_multi_token_cross_entropy(list(input), weight[0], list(target))
        stacked = functional.chunked_multi_token_cross_entropy(input, weight[0], target)
    else:
        listed = functional.chunked_multi_head_cross_entropy(
            input[0], list(weight), list(target), list(weight[..., 0])
        )
        stacked = functional.chunked_multi_head_cross_entropy(
            input[0], weight, target, weight[..., 0]
        )
    torch.testing.assert_close(listed, stacked, rtol=0, atol=0)


def test_leading_dimensions_and_term_weight_tensor(device: torch.device) -> None:
    input = torch.randn(2, 3, HIDDEN, device=device, requires_grad=True)
    weights = [torch.randn(11, HIDDEN, device=device, requires_grad=True) for _ in range(2)]
    targets = torch.randint(0, 11, (2, 2, 3), device=device)
    factors = torch.tensor([0.25, 3.0], device=device)
    loss, losses = functional.chunked_multi_head_cross_entropy(
        input, weights, targets, term_weights=factors, chunk_size=4
    )
    expected = torch.stack(
        [reference.linear_cross_entropy(input, weights[k], targets[k]) for k in range(2)]
    )
    torch.testing.assert_close(losses, expected.detach())
    ours = torch.autograd.grad(loss, [input, *weights])
    plain = torch.autograd.grad((expected * factors).sum(), [input, *weights])
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other)


@by_shared
def test_no_row_counts_in_one_term(shared: str, device: torch.device) -> None:
    terms = make_terms(shared, device=device, bias=True)
    terms.targets[1].fill_(-100)
    made = compare(terms, shared, function=function_for(shared), only_ours={"chunk_size": 5})
    assert made["losses"][1] == 0
    if shared == "head":
        assert not made["grad_inputs1"].any()


def test_no_rows(device: torch.device) -> None:
    terms = make_terms("head", device=device, bias=True)
    terms.inputs = [each[:0] for each in terms.inputs]
    terms.targets = [each[:0] for each in terms.targets]
    made = outcome(ours, terms, shared="head")
    assert made["loss"] == 0
    assert not made["grad_weights0"].any()
    assert made["grad_inputs1"].shape == (0, HIDDEN)


def test_fp16_terms_apart(device: torch.device) -> None:
    # Undivided, the sums of the first term pass fp16's range at an upstream of 1024.
    compare(
        make_terms("head", device=device, dtype=torch.float16, rows=40),
        "head",
        upstream=1024.0,
        term_weights=[4.0, 1.0, 2.0**-4],
        only_ours={"chunk_size": 16},
    )


@pytest.mark.parametrize("shared", ["head", "input"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled(dynamic: bool, shared: str, device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (13, 17):
        compare(
            make_terms(shared, rows=rows, device=device, bias=True),
            shared,
            function=compiled,
            term_weights=[1.0, 0.5, 2.0],
            only_ours={"chunk_size": 5},
            **({"detach_head": [False, True, False]} if shared == "head" else {}),
        )


def test_one_graph_for_every_number_of_rows(device: torch.device) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for rows in (13, 17, 29):
        outcome(compiled, make_terms("head", rows=rows, device=device), shared="head")
        frames.append(counter.frame_count)
    assert frames == frames[:1] * 3


@by_shared
@pytest.mark.parametrize("frozen", [(), ("weights",), ("inputs1",)], ids=str)
def test_opcheck(frozen: tuple[str, ...], shared: str) -> None:
    terms = make_terms(shared, bias=True)
    for name, leaf in terms.leaves().items():
        leaf.requires_grad_(not name.startswith(frozen) if frozen else True)
    torch.library.opcheck(
        torch.ops.greyhound.linear_cross_entropy_terms.default,
        (terms.inputs, terms.weights, terms.targets, terms.biases, torch.rand(3)),
        {
            "detach_head": [False, True, False] if shared == "head" else [],
            "chunk_size": 5,
            "need_grad_inputs": [each.requires_grad for each in terms.inputs],
            "need_grad_weights": [each.requires_grad for each in terms.weights],
            "need_grad_biases": [each.requires_grad for each in terms.biases],
        },
    )


def test_retained_graph_and_second_derivative(device: torch.device) -> None:
    terms = make_terms("head", device=device)
    leaves = [each.requires_grad_() for each in (*terms.inputs, *terms.weights)]
    loss, _ = ours(terms, shared="head")
    first = torch.autograd.grad(loss, leaves, torch.tensor(3.0, device=device), retain_graph=True)
    second = torch.autograd.grad(loss, leaves, torch.tensor(6.0, device=device))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(2 * one, other)
    loss, _ = ours(terms, shared="head")
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    with pytest.raises(NotDifferentiableTwiceError):
        grads[0].sum().backward()


def test_forward_mode_is_refused() -> None:
    from torch.autograd import forward_ad

    terms = make_terms("head")
    with forward_ad.dual_level():
        terms.inputs[1] = forward_ad.make_dual(terms.inputs[1], torch.ones_like(terms.inputs[1]))
        with pytest.raises(ForwardModeError):
            ours(terms, shared="head")


@pytest.mark.parametrize("shared", ["head", "input"])
def test_autocast(shared: str, device: torch.device) -> None:
    terms = make_terms(shared, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        made = outcome(ours, terms, shared=shared)
    wide = outcome(ours, terms.map(lambda each: each.bfloat16()), shared=shared)
    assert made["grad_weights0"].dtype == torch.float32
    torch.testing.assert_close(made["loss"], wide["loss"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        made["grad_weights0"].bfloat16(), wide["grad_weights0"], rtol=2e-2, atol=1e-3
    )


def test_peak_memory(device: torch.device) -> None:
    rows, hidden, classes, chunk, count = 256, 64, 2000, 16, 4
    inputs = [torch.randn(rows, hidden, device=device, requires_grad=True) for _ in range(count)]
    weight = torch.randn(classes, hidden, device=device, requires_grad=True)
    targets = [torch.randint(0, classes, (rows,), device=device) for _ in range(count)]

    def step() -> None:
        loss, _ = functional.chunked_multi_token_cross_entropy(
            inputs, weight, targets, chunk_size=chunk
        )
        loss.backward()
        for leaf in (*inputs, weight):
            leaf.grad = None

    step()
    with peak_memory(device) as peak:
        step()
    gradients = weight.nbytes + sum(each.nbytes for each in inputs)
    # Chunk, gradients, and numbers per row and class; K calls would hold a second [V, D].
    assert peak.bytes < gradients + 2 * chunk * classes * 4 + weight.nbytes // 4


def test_products_counted() -> None:
    counts = {}
    for name, options in (("all", {}), ("detached", {"detach_head": [False, True, True]})):
        terms = make_terms("head")
        for leaf in terms.leaves().values():
            leaf.requires_grad_()
        with FlopCounterMode(display=False) as counter:
            ours(terms, shared="head", **options)
        counts[name] = counter.get_total_flops()
    each = [2 * rows * 11 * HIDDEN for rows in (13, 16, 19)]
    assert counts["all"] == 3 * sum(each)
    assert counts["detached"] == 3 * each[0] + 2 * sum(each[1:])


@pytest.mark.gpu
def test_no_host_sync() -> None:
    terms = make_terms("head", device="cuda", bias=True, dtype=torch.bfloat16)
    outcome(ours, terms, shared="head", term_weights=[1.0, 2.0, 3.0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome(ours, terms, shared="head", term_weights=[1.0, 2.0, 3.0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"inputs": []}, ValueError, "inputs: expected 1 tensor or 3"),
        ({"inputs": "no"}, TypeError, "inputs: expected a tensor or a sequence"),
        ({"targets": []}, ValueError, "targets: expected at least one"),
        ({"targets": [torch.zeros(13).long()] * 3}, ValueError, "term 1: target: expected shape"),
        ({"term_weights": [1.0]}, ValueError, "term_weights: expected 3 numbers, got 1"),
        ({"term_weights": [1.0, 2.0, "x"]}, TypeError, "term_weights: expected a number"),
        ({"term_weights": torch.ones(2)}, ValueError, r"term_weight: expected shape \[K\] = \[3\]"),
        (
            {"term_weights": torch.ones(3, requires_grad=True)},
            ValueError,
            "term_weights: expected a tensor that needs no gradient",
        ),
        ({"detach_head": [True]}, ValueError, "detach_head: expected 3 flags, got 1"),
        ({"detach_head": 1}, TypeError, "detach_head: expected a bool"),
        ({"reduction": "none"}, ValueError, "reduction: expected one of 'mean', 'sum'"),
        ({"chunk_size": 0}, ValueError, "chunk_size: expected at least 1 row"),
    ],
    ids=str,
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    terms = make_terms("head")
    arguments = {"inputs": terms.inputs, "targets": terms.targets, **change}
    inputs, targets = arguments.pop("inputs"), arguments.pop("targets")
    with pytest.raises(error, match=message):
        functional.chunked_multi_token_cross_entropy(inputs, terms.weights[0], targets, **arguments)


def test_target_out_of_range_names_the_term() -> None:
    terms = make_terms("head")
    terms.targets[1][4] = 11
    with pytest.raises(TargetOutOfRangeError, match=r"targets\[1\]: .* got 11 in row 4"):
        ours(terms, shared="head")


def test_op_refuses_a_missing_flag() -> None:
    terms = make_terms("head")
    terms.weights[0].requires_grad_()
    with pytest.raises(ValueError, match="need_grad_weights: expected True at 0"):
        torch.ops.greyhound.linear_cross_entropy_terms(
            terms.inputs, terms.weights, terms.targets, []
        )


def test_modules(device: torch.device) -> None:
    options = {"z_loss": 1e-2, "reduction": "sum"}
    terms = make_terms("head", device=device)
    module = modules.ChunkedMultiTokenCrossEntropyLoss([1.0, 2.0, 3.0], **options)
    made = module(terms.inputs, terms.weights[0], terms.targets, detach_head=True)
    expected = ours(terms, shared="head", term_weights=[1.0, 2.0, 3.0], **options)
    torch.testing.assert_close(made, expected, rtol=0, atol=0)
    terms = make_terms("input", device=device, bias=True)
    heads = modules.ChunkedMultiHeadCrossEntropyLoss(**options)
    made = heads(terms.inputs[0], terms.weights, terms.targets, terms.biases)
    torch.testing.assert_close(made, ours(terms, shared="input", **options), rtol=0, atol=0)
    assert "z_loss=0.01" in repr(heads)
    with pytest.raises(ValueError, match="softcap"):
        modules.ChunkedMultiHeadCrossEntropyLoss(softcap=-1.0)
