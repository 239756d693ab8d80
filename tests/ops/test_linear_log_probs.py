from __future__ import annotations

import dataclasses
import gc
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from greyhound_ops import config, reference
from greyhound_ops.errors import (
    ForwardModeError,
    NotDifferentiableTwiceError,
    TargetOutOfRangeError,
)
from greyhound_ops.functional import LogProbs, chunked_linear_log_probs
from greyhound_ops.modules import ChunkedLinearLogProbs
from greyhound_ops.ops import chunk_loop, gradients
from greyhound_ops.ops.linear_log_probs import keeps_logits
from greyhound_ops.testing import assert_within_budget, peak_memory
from log_prob_samples import (
    CASES,
    EVERYTHING,
    OPERANDS,
    OUTPUTS,
    Sample,
    assert_equal,
    check,
    make_sample,
    make_upstreams,
    run,
)
from samples import DTYPES, LAYOUTS, SLACK, dtype_id

SUBSETS = [subset for size in range(5) for subset in itertools.combinations(OPERANDS, size)]


by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


by_case = pytest.mark.parametrize("case", CASES)


# ---------------------------------------------------------------------------- values, gradients


@by_dtype
@by_case
def test_options(case: str, dtype: torch.dtype, device: torch.device) -> None:
    wanted, options = CASES[case]
    sample = make_sample(dtype=dtype, device=device, **wanted)
    for keeps in (False, True):
        check(sample, only_ours={"chunk_size": 5, "keep_logits": keeps}, **options)


@pytest.mark.fault("B08", "B68")
@pytest.mark.parametrize("names", [(), *itertools.combinations(OUTPUTS, 1), ("entropy", "lse")])
def test_each_output_contributes(names: tuple[str, ...], device: torch.device) -> None:
    # Entropy and log-sum-exp are no metrics: issues B08, B68.
    sample = make_sample(dtype=torch.float64, device=device)
    result = check(sample, make_upstreams(sample.target, names), softcap=3.0)
    if names:
        assert all(grad.any() for grad in result.grads.values())
    else:
        assert all(grad is None for grad in result.grads.values())


@pytest.mark.fault("B91")
@pytest.mark.parametrize(
    "asked", [each for size in range(4) for each in itertools.combinations(EVERYTHING, size)]
)
def test_what_is_asked_for(asked: tuple[str, ...], device: torch.device) -> None:
    sample = make_sample(device=device)
    options = dict.fromkeys(asked, True)
    call = (sample.input.requires_grad_(), sample.weight, sample.target, sample.bias)
    outputs = chunked_linear_log_probs(*call, temperature=sample.temperature, **options)
    if not asked:
        assert type(outputs) is Tensor
        return
    assert isinstance(outputs, LogProbs)
    full = chunked_linear_log_probs(*call, temperature=sample.temperature, **EVERYTHING)
    for name in ("log_probs", "entropy", "lse", "argmax"):
        value = getattr(outputs, name)
        if name != "log_probs" and f"return_{name}" not in asked:
            assert value is None
            continue
        assert value.shape == sample.target.shape
        assert value.requires_grad == (name != "argmax")
        assert torch.equal(value, getattr(full, name))
    if outputs.argmax is not None:
        assert outputs.argmax.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("chunk_size", [1, 6, 12, 100, None])
def test_chunk_sizes(chunk_size: int | None, dtype: torch.dtype, device: torch.device) -> None:
    for keeps in (False, True):
        ours = {"chunk_size": chunk_size, "keep_logits": keeps}
        check(make_sample(12, dtype=dtype, device=device), only_ours=ours)


@pytest.mark.parametrize("frozen", SUBSETS, ids=lambda names: "+".join(names) or "nothing")
def test_frozen(frozen: tuple[str, ...], device: torch.device) -> None:
    for keeps in (False, True):
        ours = {"chunk_size": 4, "keep_logits": keeps}
        check(make_sample(device=device), frozen=frozen, only_ours=ours)


@pytest.mark.fault("B01", "B04")
def test_upstream_that_autograd_makes(device: torch.device) -> None:
    # A policy's loss: ratio, mask, slice, entropy bonus (issues B01, B04, B09).
    sample = make_sample(16, dtype=torch.float64, device=device)
    old, advantages = torch.randn(2, 16, dtype=torch.float64, device=device)

    def grads(function: Callable[..., LogProbs], **options: Any) -> list[Tensor]:
        leaves = [getattr(sample, name).detach().requires_grad_() for name in OPERANDS]
        input, weight, bias, temperature = leaves
        out = function(input, weight, sample.target, bias, temperature=temperature, **options)
        assert out.entropy is not None
        assert out.lse is not None
        loss = -((0.1 * (out.log_probs - old)).exp() * advantages)[::2].sum()
        loss = loss - 0.3 * out.entropy.mean() + out.lse.view(4, 4).t()[1].square().sum()
        return list(torch.autograd.grad(loss, leaves))

    ours = grads(chunked_linear_log_probs, return_entropy=True, return_lse=True, chunk_size=5)
    for value, truth in zip(ours, grads(reference.linear_log_probs), strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-10, atol=1e-12)


def test_reference_is_torchs_categorical() -> None:
    sample = make_sample(dtype=torch.float64)
    target = sample.target.clamp(min=0)
    logits = torch.nn.functional.linear(sample.input, sample.weight, sample.bias)
    truth = torch.distributions.Categorical(logits=logits / sample.temperature.unsqueeze(-1))
    outputs = reference.linear_log_probs(
        sample.input, sample.weight, target, sample.bias, temperature=sample.temperature
    )
    torch.testing.assert_close(outputs.log_probs, truth.log_prob(target))
    torch.testing.assert_close(outputs.entropy, truth.entropy())
    assert torch.equal(outputs.argmax, truth.probs.argmax(-1))
    torch.testing.assert_close(
        reference.selective_log_softmax(logits, target, temperature=sample.temperature),
        truth.log_prob(target),
    )
    torch.testing.assert_close(
        reference.cross_entropy(logits, target), torch.nn.functional.cross_entropy(logits, target)
    )


@pytest.mark.fault("B90")
def test_scalar_tensor_as_temperature(device: torch.device) -> None:
    sample = make_sample(dtype=torch.float64, device=device, temperature=False)
    temperature = torch.tensor(0.8, dtype=torch.float64, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(
        chunked_linear_log_probs(
            sample.input, sample.weight, sample.target, temperature=temperature
        ).sum(),
        temperature,
    )
    (truth,) = torch.autograd.grad(
        reference.linear_log_probs(
            sample.input, sample.weight, sample.target, temperature=temperature
        ).log_probs.sum(),
        temperature,
    )
    torch.testing.assert_close(grad, truth)


@pytest.mark.parametrize("ignore_index", [0, 3, -1, 255, -(2**40)])
def test_ignore_index(ignore_index: int, device: torch.device) -> None:
    sample = make_sample(device=device, ignore_index=ignore_index)
    result = check(sample, ignore_index=ignore_index)
    ignored = sample.target == ignore_index
    assert ignored.any()
    assert not result.outputs.log_probs[ignored].any()
    assert (result.outputs.entropy[ignored] > 0).all()  # does not depend on the target


def test_int32_targets(device: torch.device) -> None:
    sample = make_sample(device=device)
    upstreams = make_upstreams(sample.target)
    narrow = dataclasses.replace(sample, target=sample.target.int())
    assert_equal(
        run(chunked_linear_log_probs, narrow, upstreams, **EVERYTHING),
        run(chunked_linear_log_probs, sample, upstreams, **EVERYTHING),
    )


@pytest.mark.parametrize("shape", [(), (2, 5), (2, 1, 3), (0,), (2, 0, 3)], ids=str)
def test_leading_dimensions(shape: tuple[int, ...], device: torch.device) -> None:
    result = check(make_sample(shape, device=device), only_ours={"chunk_size": 4})
    assert all(each.shape == shape for each in result.outputs)


@pytest.mark.parametrize(
    ("hidden", "classes"), [(1, 1), (3, 1), (1, 7), (5, 127), (9, 129)], ids=str
)
def test_odd_sizes(hidden: int, classes: int, device: torch.device) -> None:
    check(make_sample(hidden=hidden, classes=classes, dtype=torch.float64, device=device))


@pytest.mark.parametrize("name", ["input", "weight"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, name: str, device: torch.device) -> None:
    sample = make_sample(device=device)
    value = LAYOUTS[layout](getattr(sample, name))
    check(dataclasses.replace(sample, **{name: value}), only_ours={"chunk_size": 5})


def test_layouts_of_the_vectors(device: torch.device) -> None:
    sample = make_sample(device=device)
    strided = dataclasses.replace(
        sample,
        target=sample.target.repeat_interleave(2)[::2],
        bias=sample.bias.repeat_interleave(2)[::2],
        temperature=sample.temperature.repeat_interleave(3)[1::3],
    )
    check(strided, only_ours={"chunk_size": 5})
    expanded = dataclasses.replace(
        sample,
        target=sample.target[:1].expand(13),
        temperature=sample.temperature[:1].expand(13),
    )
    check(expanded, only_ours={"chunk_size": 5})


def test_permuted_leading_dimensions(device: torch.device) -> None:
    sample = make_sample((3, 4), device=device)
    check(
        Sample(
            sample.input.transpose(0, 1), sample.weight, sample.target.t(), sample.bias,
            sample.temperature.t(),
        ),
        only_ours={"chunk_size": 5},
    )  # fmt: skip


@pytest.mark.parametrize(
    "needs", [("weight",), ("input",), ("bias",), ("input", "weight")], ids="+".join
)
@pytest.mark.parametrize("accum", ["fp32", "weight"])
def test_both_passes_project_the_same_chunks(
    accum: str, needs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from greyhound_ops import chunking
    from greyhound_ops.ops import linear_log_probs

    budget = chunking.Budget(40 * 64, 20 * 64, 10 * 64)
    monkeypatch.setattr(chunking, "CPU_BUDGET", budget)
    seen: list[int] = []

    class Watched(linear_log_probs.ChunkLoop):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            seen.append(self.rows)

    monkeypatch.setattr(linear_log_probs, "ChunkLoop", Watched)
    sample = make_sample(200, 8, 16, dtype=torch.bfloat16)
    run(
        chunked_linear_log_probs, sample, make_upstreams(sample.target, ["log_probs"]),
        frozen=set(OPERANDS) - set(needs), grad_weight_accum_dtype=accum,
    )  # fmt: skip
    forward, backward = seen
    assert forward == backward < 200


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_large_offset(offset: float, device: torch.device) -> None:
    # The last bit of a log-sum-exp of 1e4 is 1e-3 in fp32.
    sample = make_sample(device=device)
    shifted = dataclasses.replace(sample, bias=torch.full_like(sample.bias, offset))
    check(shifted, make_upstreams(sample.target, ["log_probs", "entropy"]))


@pytest.mark.parametrize("value", [11, -1, 2**31 - 1])
@pytest.mark.parametrize("shape", [(13,), (1, 13)], ids=str)
def test_target_out_of_range_on_cpu(shape: tuple[int, ...], value: int) -> None:
    sample = make_sample(shape)
    sample.target.view(-1)[5] = value
    with pytest.raises(TargetOutOfRangeError, match=rf"target: .*got {value} in row 5"):
        chunked_linear_log_probs(sample.input, sample.weight, sample.target)


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan])
def test_temperature_out_of_range_on_cpu(value: float) -> None:
    sample = make_sample()
    sample.temperature[0] = value
    with pytest.raises(ValueError, match=r"temperature: expected a positive number, .*in row 0"):
        chunked_linear_log_probs(
            sample.input, sample.weight, sample.target, temperature=sample.temperature
        )


@pytest.mark.gpu
def test_rows_out_of_range_on_cuda() -> None:
    sample = make_sample(device="cuda")
    sample.target[:] = torch.arange(13, device="cuda") % 11
    sample.target[5], sample.temperature[7] = 11, 0.0
    upstreams = make_upstreams(sample.target)
    result = run(chunked_linear_log_probs, sample, upstreams, frozen=["weight"], **EVERYTHING)
    expected = torch.zeros(13, dtype=torch.bool, device="cuda")
    expected[[5, 7]] = True
    assert torch.equal(result.outputs.log_probs.isnan(), expected)
    assert torch.equal(result.grads["input"].isnan().any(1), expected)
    expected[5] = False
    assert torch.equal(result.outputs.entropy.isnan(), expected)
    with config.override(checks=True), pytest.raises(TargetOutOfRangeError, match="row 5"):
        run(chunked_linear_log_probs, sample, upstreams)


# --------------------------------------------------------------------------------- mixed dtypes


@pytest.mark.parametrize("cast_to", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_autocast(cast_to: torch.dtype, device: torch.device) -> None:
    sample = make_sample(device=device)
    upstreams = make_upstreams(sample.target)

    def under(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device.type, cast_to):
                return function(*args, **kwargs)

        return call

    ours = run(under(chunked_linear_log_probs), sample, upstreams, chunk_size=5, **EVERYTHING)
    plain = run(under(reference.linear_log_probs), sample, upstreams)
    truth = run(reference.linear_log_probs, sample.map(Tensor.double), upstreams)
    for name in OUTPUTS:
        assert getattr(ours.outputs, name).dtype == torch.float32
        assert_within_budget(
            name, *(getattr(each.outputs, name) for each in (ours, plain, truth)), slack=1e-6
        )
    for name in OPERANDS:
        assert ours.grads[name].dtype == torch.float32
        assert_within_budget(
            name, *(each.grads[name] for each in (ours, plain, truth)), slack=SLACK[cast_to]
        )


@pytest.mark.parametrize("accum", ["fp32", "weight"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_accumulation(dtype: torch.dtype, accum: str, device: torch.device) -> None:
    sample = make_sample(40, dtype=dtype, device=device)
    # In the dtype of the weight each of the four chunks rounds the sum once more.
    slack = SLACK[dtype] * (4 if accum == "weight" else 1)
    check(sample, slack=slack, only_ours={"chunk_size": 10, "grad_weight_accum_dtype": accum})


# ------------------------------------------------------------------------------ autograd contract


@pytest.mark.parametrize("keeps", [False, True], ids=["projected-again", "kept"])
def test_retained_graph(keeps: bool, device: torch.device) -> None:
    sample = make_sample(device=device)
    leaves = [getattr(sample, name).detach().requires_grad_() for name in OPERANDS]
    outputs = chunked_linear_log_probs(
        leaves[0], leaves[1], sample.target, leaves[2], temperature=leaves[3],
        return_entropy=True, chunk_size=4, keep_logits=keeps,
    )  # fmt: skip
    loss = outputs.log_probs.sum() + outputs.entropy.sum()
    zero, first, once, second = (
        torch.autograd.grad(loss, leaves, torch.tensor(factor, device=device), retain_graph=keep)
        for factor, keep in ((0.0, True), (3.0, True), (1.0, True), (3.0, False))
    )
    assert not any(grad.any() for grad in zero)
    for a, b, c in zip(first, second, once, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, 3.0 * c, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("keeps", [False, True], ids=["projected-again", "kept"])
def test_a_batch_of_gradients(keeps: bool, device: torch.device) -> None:
    # The backward runs once a sample, on one set of kept logits.
    sample = make_sample(device=device)
    leaves = [getattr(sample, name).detach().requires_grad_() for name in OPERANDS]
    log_probs = chunked_linear_log_probs(
        leaves[0], leaves[1], sample.target, leaves[2], temperature=leaves[3], chunk_size=4,
        keep_logits=keeps,
    )  # fmt: skip
    upstreams = torch.randn(3, *log_probs.shape, device=device)
    singly = [torch.autograd.grad(log_probs, leaves, each, retain_graph=True) for each in upstreams]
    batched = torch.autograd.grad(log_probs, leaves, upstreams, is_grads_batched=True)
    for made, expected in zip(batched, zip(*singly, strict=True), strict=True):
        torch.testing.assert_close(made, torch.stack(expected))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("keeps", [False, True], ids=["projected-again", "kept"])
def test_equal_calls_in_one_graph(keeps: bool, device: torch.device) -> None:
    # AOTAutograd makes one call of both, whose kept logits two backwards then share.
    sample = make_sample(device=device, temperature=False)

    def loss(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        first, second = (
            chunked_linear_log_probs(
                input, weight, sample.target, bias, chunk_size=4, keep_logits=keeps
            )
            for _ in range(2)
        )
        return first.exp().sum() + second.square().mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = []
    for function in (loss, compiled):
        leaves = [getattr(sample, name).clone().requires_grad_() for name in OPERANDS[:3]]
        results.append(torch.autograd.grad(function(*leaves), leaves))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_nothing_is_remembered_of_kept_logits_that_are_gone(device: torch.device) -> None:
    sample = make_sample(device=device)

    def remembered() -> int:
        gc.collect()
        gradients.to_write_over(torch.empty(0))  # looks for what is gone
        return len(gradients._written_over)

    before = remembered()
    for _ in range(3):
        run(chunked_linear_log_probs, sample, make_upstreams(sample.target, ("log_probs",)),
            keep_logits=True)  # fmt: skip
    assert remembered() == before


@pytest.mark.parametrize("name", OPERANDS)
def test_second_derivative_raises(name: str) -> None:
    sample = make_sample(dtype=torch.float64)
    leaf = getattr(sample, name).requires_grad_()
    outputs = chunked_linear_log_probs(
        sample.input, sample.weight, sample.target, sample.bias, temperature=sample.temperature,
        return_entropy=True,
    )  # fmt: skip
    upstream = torch.ones(13, dtype=torch.float64, requires_grad=True)
    loss = (upstream * (outputs.log_probs + outputs.entropy)).sum()
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    for wanted in (leaf, upstream):
        with pytest.raises(NotDifferentiableTwiceError, match="reference"):
            torch.autograd.grad(grad.sum(), wanted, retain_graph=True)


@pytest.mark.parametrize("name", OPERANDS)
def test_forward_mode_raises(name: str) -> None:
    sample = make_sample()
    with forward_ad.dual_level():
        value = getattr(sample, name)
        dual = dataclasses.replace(
            sample, **{name: forward_ad.make_dual(value, torch.ones_like(value))}
        )
        with pytest.raises(ForwardModeError, match="reference"):
            chunked_linear_log_probs(
                dual.input, dual.weight, dual.target, dual.bias, temperature=dual.temperature
            )


@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev", "jvp", "jacfwd", "hessian"])
def test_torch_func_is_right_or_refused(transform: str) -> None:
    sample = make_sample(4, 3, 5, dtype=torch.float64, temperature=False)

    def apply(function: Callable[..., LogProbs], **options: Any) -> list[Tensor]:
        def loss(input: Tensor, weight: Tensor) -> Tensor:
            outputs = function(input, weight, sample.target, **options)
            return outputs.log_probs.sum() + 2.0 * outputs.entropy.sum()

        both = (sample.input, sample.weight)
        if transform == "vjp":
            value, pull = torch.func.vjp(loss, *both)
            return [value, *pull(torch.full_like(value, 2.0))]
        if transform == "jvp":
            return list(torch.func.jvp(loss, both, (both[0].cos(), both[1].sin())))
        result = getattr(torch.func, transform)(loss, argnums=(0, 1))(*both)
        return list(torch.utils._pytree.tree_leaves(result))

    expected = apply(reference.linear_log_probs)
    try:
        values = apply(chunked_linear_log_probs, return_entropy=True)
    except (RuntimeError, NotImplementedError):
        assert transform not in ("grad", "vjp", "jacrev")
        return
    for value, truth in zip(values, expected, strict=True):
        torch.testing.assert_close(value, truth)


@pytest.mark.parametrize("in_dims", [(0, None, 0), (0, 0, 0), (None, 0, None), (1, 2, 1)], ids=str)
def test_vmap(in_dims: tuple[int | None, ...], device: torch.device) -> None:
    sample = make_sample(device=device, dtype=torch.float64, temperature=False)
    batched = [
        value if dim is None else torch.stack([value, value.flip(0), value], dim)
        for value, dim in zip((sample.input, sample.weight, sample.target), in_dims, strict=True)
    ]
    ours = torch.func.vmap(
        lambda *args: tuple(chunked_linear_log_probs(*args, chunk_size=5, **EVERYTHING)), in_dims
    )(*batched)
    truth = torch.func.vmap(lambda *args: tuple(reference.linear_log_probs(*args)), in_dims)(
        *batched
    )
    for one, other in zip(ours, truth, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_per_sample(device: torch.device) -> None:
    sample = make_sample((2, 7), device=device, dtype=torch.float64, temperature=False)

    def grads(function: Callable[..., LogProbs], **options: Any) -> Tensor:
        def loss(weight: Tensor, input: Tensor, target: Tensor) -> Tensor:
            outputs = function(input, weight, target, **options)
            return (outputs.log_probs * outputs.entropy).sum()

        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
        parts: Tensor = each(sample.weight, sample.input, sample.target)

        def total(weight: Tensor) -> Tensor:
            return torch.func.vmap(loss, (None, 0, 0))(weight, sample.input, sample.target).sum()

        torch.testing.assert_close(torch.func.grad(total)(sample.weight), parts.sum(0))
        return parts

    torch.testing.assert_close(
        grads(chunked_linear_log_probs, return_entropy=True), grads(reference.linear_log_probs)
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_without_gradients(mode: Any, device: torch.device) -> None:
    sample = make_sample(device=device)
    sample.weight.requires_grad_()
    sample.temperature.requires_grad_()
    call = (sample.input, sample.weight, sample.target)
    with_graph = chunked_linear_log_probs(*call, temperature=sample.temperature, **EVERYTHING)
    with mode():
        without = chunked_linear_log_probs(*call, temperature=sample.temperature, **EVERYTHING)
    for one, other in zip(without, with_graph, strict=True):
        assert not one.requires_grad
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", OPERANDS)
def test_op_refuses_a_leaf_whose_gradient_it_was_not_told_to_make(name: str) -> None:
    sample = make_sample()
    getattr(sample, name).requires_grad_()
    with pytest.raises(ValueError, match=f"need_grad_{name}: expected True"):
        torch.ops.greyhound.linear_log_probs(*vars(sample).values())


@by_case
def test_arguments_are_not_written(case: str, device: torch.device) -> None:
    wanted, options = CASES[case]
    sample = make_sample(device=device, **wanted)
    before = sample.map(Tensor.clone)
    upstreams = make_upstreams(sample.target)
    kept = {name: value.clone() for name, value in upstreams.items()}
    run(chunked_linear_log_probs, sample, upstreams, chunk_size=5, **EVERYTHING, **options)
    for name in sample.operands:
        assert torch.equal(getattr(sample, name), getattr(before, name))
    assert all(torch.equal(upstreams[name], kept[name]) for name in kept)


def test_writing_over_the_outputs_is_harmless(device: torch.device) -> None:
    # The statistics are the op's own.
    sample = make_sample(device=device)
    results = []
    for write in (False, True):
        input = sample.input.detach().requires_grad_()
        outputs = chunked_linear_log_probs(input, sample.weight, sample.target, **EVERYTHING)
        loss = outputs.log_probs.sum() + outputs.entropy.sum() + outputs.lse.sum()
        if write:
            with torch.no_grad():
                for each in outputs:
                    each.zero_()
        results.append(torch.autograd.grad(loss, input)[0])
    assert torch.equal(*results)


def test_writing_over_an_input_between_forward_and_backward_is_noticed() -> None:
    sample = make_sample()
    weight = sample.weight.requires_grad_()
    out = chunked_linear_log_probs(sample.input, weight, sample.target)
    sample.input.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_deterministic(device: torch.device) -> None:
    sample = make_sample(64, 16, 300, dtype=torch.bfloat16, device=device)
    upstreams = make_upstreams(sample.target)
    first, second = (
        run(chunked_linear_log_probs, sample, upstreams, chunk_size=10, **EVERYTHING)
        for _ in range(2)
    )
    assert_equal(first, second)


# -------------------------------------------------------------------------------- bad arguments


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "flat weight": ({"weight": torch.randn(88)}, ValueError, "weight: expected shape"),
    "hidden": ({"input": torch.randn(13, 7)}, ValueError, "input: expected last dimension"),
    "no classes": ({"weight": torch.randn(0, 8)}, ValueError, "weight: expected at least one"),
    "target shape": ({"target": torch.zeros(12).long()}, ValueError, "target: expected shape"),
    "target dtype": ({"target": torch.zeros(13)}, TypeError, "target: expected dtype"),
    "bias": ({"bias": torch.randn(10)}, ValueError, "bias: expected shape"),
    "dtypes": ({"weight": torch.randn(11, 8).bfloat16()}, TypeError, "weight: expected the dtype"),
    "temperature 0": ({"temperature": 0.0}, ValueError, "temperature: expected a positive"),
    "temperature -1": ({"temperature": -1}, ValueError, "temperature: expected a positive"),
    "temperature nan": ({"temperature": math.nan}, ValueError, "temperature: expected a finite"),
    "temperature str": ({"temperature": "1"}, TypeError, "temperature: expected a number"),
    "temperature shape": (
        {"temperature": torch.ones(11)}, ValueError, "temperature: expected a number or shape",
    ),
    "temperature dtype": (
        {"temperature": torch.ones(13).long()}, TypeError, "temperature: expected dtype",
    ),
    "temperature device": (
        {"temperature": torch.ones(13, device="meta")}, ValueError, "temperature: expected a tens",
    ),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap: expected a positive"),
    "logit_scale": ({"logit_scale": math.inf}, ValueError, "logit_scale: expected a finite"),
    "ignore_index": ({"ignore_index": 1.5}, TypeError, "ignore_index: expected an int"),
    "chunk_size": ({"chunk_size": 0}, ValueError, "chunk_size: expected at least 1"),
    "accum": ({"grad_weight_accum_dtype": "bf16"}, ValueError, "grad_weight_accum_dtype: expected"),
    "return_entropy": ({"return_entropy": 1}, TypeError, "return_entropy: expected a bool"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_argument(case: str) -> None:
    changes, error, message = BAD_ARGUMENTS[case]
    sample = make_sample()
    arguments = {"input": sample.input, "weight": sample.weight, "target": sample.target}
    with pytest.raises(error, match=message):
        chunked_linear_log_probs(**{**arguments, **changes})


@pytest.mark.parametrize("name", ["bias", "temperature"])
def test_gradient_of_what_is_not_there(name: str) -> None:
    sample = make_sample(bias=False, temperature=False)
    with pytest.raises(ValueError, match=f"need_grad_{name}: expected False"):
        torch.ops.greyhound.linear_log_probs(
            sample.input, sample.weight, sample.target, **{f"need_grad_{name}": True}
        )


def test_statistics_of_another_call_are_refused() -> None:
    sample = make_sample()
    one = torch.ones(13)
    for statistics, upstream in (
        (torch.ones(2, 12), {}),
        (torch.ones(2, 13), {"grad_entropy": one}),
    ):
        with pytest.raises(ValueError, match="statistics: expected shape"):
            torch.ops.greyhound.linear_log_probs_backward(
                sample.input, sample.weight, sample.target, statistics, one, **upstream,
                need_grad_input=True,
            )  # fmt: skip


# ------------------------------------------------------------------------------ the op, compiled


OPS = torch.ops.greyhound


OP_SAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"bias": False, "temperature": False}, {}),
    "all": ({}, {"softcap": 3.0, "logit_scale": 0.5, **EVERYTHING}),
    "entropy": ({"rows": (2, 3)}, {"chunk_size": 4, "return_entropy": True}),
    "one-row": ({"rows": ()}, {"return_lse": True}),
    "no-rows": ({"rows": 0}, EVERYTHING),
    "bfloat16": ({"dtype": torch.bfloat16}, {"chunk_size": 5, **EVERYTHING}),
    "float16-in-weight": (
        {"dtype": torch.float16},
        {"grad_weight_accum_dtype": "weight", "chunk_size": 5},
    ),
    "float64": ({"dtype": torch.float64}, {"fixed_temperature": 0.5, **EVERYTHING}),
    "products-in-bfloat16": ({}, {"compute_dtype": torch.bfloat16, "return_entropy": True}),
    "kept": ({"dtype": torch.bfloat16}, {"keep_logits": True, "chunk_size": 5, **EVERYTHING}),
    "kept-no-rows": ({"rows": 0}, {"keep_logits": True}),
}


@pytest.mark.parametrize("frozen", [(), ("weight", "temperature"), ("input",), OPERANDS], ids=str)
@pytest.mark.parametrize("case", OP_SAMPLES)
def test_opcheck(case: str, frozen: tuple[str, ...]) -> None:
    wanted, options = OP_SAMPLES[case]
    if frozen and case not in ("all", "bfloat16"):
        pytest.skip("needs no second look: only outputs and dtypes differ")
    sample = make_sample(**wanted)
    values = dict(vars(sample))
    flags = {}
    for name in OPERANDS:
        flags[f"need_grad_{name}"] = values[name] is not None and name not in frozen
        if flags[f"need_grad_{name}"]:
            values[name] = values[name].detach().requires_grad_()
    torch.library.opcheck(
        OPS.linear_log_probs.default, tuple(values.values()), {**flags, **options}
    )


@pytest.mark.parametrize("names", [("log_probs",), ("entropy", "lse"), OUTPUTS], ids=str)
@pytest.mark.parametrize("case", OP_SAMPLES)
def test_opcheck_of_the_backward(case: str, names: tuple[str, ...]) -> None:
    wanted, options = OP_SAMPLES[case]
    sample = make_sample(**wanted)
    arguments = {name: value for name, value in options.items() if not name.startswith("return")}
    *outputs, statistics, kept = OPS.linear_log_probs(
        *vars(sample).values(), return_entropy=True, **arguments
    )
    if arguments.pop("keep_logits", False):
        arguments["kept"] = kept
    upstreams = make_upstreams(outputs[0], names)
    torch.library.opcheck(
        OPS.linear_log_probs_backward.default,
        (
            sample.input, sample.weight, sample.target, statistics, *upstreams.values(),
            sample.bias, sample.temperature,
        ),
        {**arguments, **{f"need_grad_{name}": True for name in sample.operands}},
    )  # fmt: skip


@pytest.mark.gpu
def test_opcheck_on_cuda() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        sample = make_sample(dtype=dtype, device="cuda")
        values = [
            value.requires_grad_() if value.is_floating_point() else value
            for value in vars(sample).values()
        ]
        flags = {f"need_grad_{name}": True for name in OPERANDS}
        torch.library.opcheck(
            OPS.linear_log_probs.default, tuple(values), {"chunk_size": 5, **EVERYTHING, **flags}
        )


def head(**options: Any) -> Callable[..., LogProbs]:
    """Something before the call and something after it, so that there is a graph around it."""

    def call(input: Tensor, *args: Any, **kwargs: Any) -> LogProbs:
        out = chunked_linear_log_probs(input.tanh(), *args, **options, **kwargs)
        if isinstance(out, Tensor):
            return LogProbs(out.exp(), None, None, None)
        entropy = None if out.entropy is None else out.entropy.square()
        return LogProbs(out.log_probs.exp(), entropy, out.lse, out.argmax)

    return call


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("asked", [{}, EVERYTHING], ids=["alone", "everything"])
def test_compiled(asked: dict[str, bool], dynamic: bool, device: torch.device) -> None:
    sample = make_sample(device=device)
    function = head(chunk_size=5, **asked)
    call = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    upstreams = make_upstreams(sample.target, OUTPUTS if asked else ["log_probs"])
    assert_equal(
        run(call, sample, upstreams), run(function, sample, upstreams), rtol=1e-5, atol=1e-5
    )


@pytest.mark.usefixtures("fresh_compiler")
def test_one_output_of_a_compiled_call_is_used() -> None:
    # The others send no gradient, or a dense zero: the result is the same.
    sample = make_sample()
    function = head(**EVERYTHING)
    call = torch.compile(function, fullgraph=True, backend="aot_eager")
    upstreams = make_upstreams(sample.target, ["entropy"])
    assert_equal(
        run(call, sample, upstreams), run(function, sample, upstreams), rtol=1e-5, atol=1e-5
    )


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_by_inductor() -> None:
    sample = make_sample(temperature=False)
    function = head(return_entropy=True, temperature=0.7, softcap=4.0)
    call = torch.compile(function, fullgraph=True)
    upstreams = make_upstreams(sample.target, ["log_probs", "entropy"])
    assert_equal(
        run(call, sample, upstreams), run(function, sample, upstreams), rtol=1e-4, atol=1e-5
    )


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_one_compile_serves_every_row_count(dynamic: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function = head(return_entropy=True)
    call = torch.compile(function, fullgraph=True, dynamic=dynamic or None, backend=counter)
    first = None
    for rows in (7, 11, 3, 200, 64):
        sample = make_sample(rows)
        upstreams = make_upstreams(sample.target, ["log_probs", "entropy"])
        assert_equal(
            run(call, sample, upstreams), run(function, sample, upstreams), rtol=1e-4, atol=1e-5
        )
        first = counter.frame_count if first is None else first
    assert counter.frame_count - first == (0 if dynamic else 1)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_flops(in_backward: bool) -> None:
    sample = make_sample(12, 8, 10)
    sample.input.requires_grad_()
    sample.weight.requires_grad_()
    product = 2 * 12 * 8 * 10
    with FlopCounterMode(display=False) as counter:
        out = chunked_linear_log_probs(sample.input, sample.weight, sample.target % 10)
        if in_backward:
            out.sum().backward()
    assert counter.get_total_flops() == product * (4 if in_backward else 1)
    with FlopCounterMode(display=False) as counter:
        out = chunked_linear_log_probs(
            sample.input, sample.weight, sample.target % 10, keep_logits=True
        )
        if in_backward:
            out.sum().backward()
    assert counter.get_total_flops() == product * (3 if in_backward else 1)


# --------------------------------------------------------------------------------------- memory


ROWS, HIDDEN, CLASSES, CHUNK = 256, 64, 2000, 16


@pytest.mark.parametrize("needs", SUBSETS, ids=lambda names: "+".join(names) or "nothing")
def test_peak_memory_and_products(needs: tuple[str, ...], device: torch.device) -> None:
    sample = make_sample(ROWS, HIDDEN, CLASSES, device=device)
    upstreams = make_upstreams(sample.target)
    frozen = set(OPERANDS) - set(needs)

    def step() -> None:
        run(
            chunked_linear_log_probs, sample, upstreams, frozen=frozen, chunk_size=CHUNK,
            **EVERYTHING,
        )  # fmt: skip

    step()  # libraries have their workspaces now
    with peak_memory(device) as peak:
        step()
    # By PyTorch z, p and the entropy's factor of a chunk, in Triton one buffer for all.
    chunks = CHUNK * CLASSES * 4 * (1 if device.type == "cuda" else 4)
    allowed = chunks + sum(getattr(sample, name).nbytes for name in needs)
    allowed += 80 * ROWS + 24 * CLASSES  # numbers per row and per class
    assert allowed < ROWS * CLASSES * 4, "the logits would pass unnoticed"
    assert peak.bytes <= allowed

    gradients = len(set(needs) & {"input", "weight"})
    assert products(step) == ROWS // CHUNK * (1 + bool(needs) + gradients)


def products(function: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return sum(
        event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm")
    )


def train_half(rows: int, hidden: int = 64, **options: Any) -> Callable[[], Any]:
    """A step in bf16 with 96 classes."""
    sample = make_sample(rows, hidden, 96, dtype=torch.bfloat16, bias=False, temperature=False)
    upstreams = make_upstreams(sample.target, ("log_probs",))
    return lambda: run(chunked_linear_log_probs, sample, upstreams, **options)


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        (128, {}, 3),
        (128, {"keep_logits": False}, 4),
        (129, {}, 4),  # N > 2 D: a sum takes less
        (129, {"keep_logits": True}, 3),
        (128, {"grad_weight_accum_dtype": "weight"}, 4),
        (128, {"frozen": ("weight",)}, 3),  # projected again, but for one gradient
        (128, {"frozen": ("input",)}, 2),
    ],
    ids=str,
)
def test_logits_are_kept_where_a_sum_takes_more(
    rows: int, options: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_loop, "KEEPS_GRADIENT_ON_CPU", True)
    assert products(train_half(rows, **options)) == expected


def test_logits_are_not_kept_for_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_loop, "KEEPS_GRADIENT_ON_CPU", True)
    half, single = (torch.ones(8, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert keeps_logits(half, half, "fp32")
    assert not keeps_logits(single, single, "fp32")  # no cast at the end, and no sum to be spared
    with torch.autocast("cpu", torch.float16):
        assert not keeps_logits(half, half, "fp32")
    with torch.autocast("cpu", torch.bfloat16):
        assert keeps_logits(half, half, "fp32")


@pytest.mark.usefixtures("fresh_compiler")
def test_kept_logits_compile_once_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_loop, "KEEPS_GRADIENT_ON_CPU", True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(head(), backend=counter, dynamic=True, fullgraph=True)
    counts = []
    for rows in (24, 100, 128, 129, 200, 60):
        sample = make_sample(rows, 64, 96, dtype=torch.bfloat16, bias=False, temperature=False)
        upstreams = make_upstreams(sample.target, ("log_probs",))
        assert_equal(
            run(compiled, sample, upstreams), run(head(), sample, upstreams), rtol=0.02, atol=0.02
        )
        counts.append(counter.frame_count)
    assert [count - counts[0] for count in counts] == [0, 0, 0, 1, 1, 1]


def test_peak_memory_with_kept_logits(device: torch.device) -> None:
    """All logits and one chunk beside them: no sum, and no second ``[N, V]``."""
    sample = make_sample(ROWS, 256, CLASSES, dtype=torch.bfloat16, device=device)
    upstreams = make_upstreams(sample.target, ("log_probs",))

    def step() -> None:
        run(chunked_linear_log_probs, sample, upstreams, chunk_size=CHUNK, keep_logits=True)

    step()
    with peak_memory(device) as peak:
        step()
    kept = ROWS * CLASSES * 2
    chunk = 0 if device.type == "cuda" else 4 * CHUNK * CLASSES * 4
    sums = 0 if device.type == "cuda" else sample.weight.numel() * 4  # they are kept on CUDA alone
    allowed = kept + chunk + sums + sum(getattr(sample, name).nbytes for name in sample.operands)
    assert peak.bytes <= allowed + 80 * ROWS + 24 * CLASSES + 2**16


def test_plain_torch_would_need_more(device: torch.device) -> None:
    sample = make_sample(ROWS, HIDDEN, CLASSES, device=device)
    with peak_memory(device) as peak:
        run(reference.linear_log_probs, sample, make_upstreams(sample.target))
    assert peak.bytes > 2 * ROWS * CLASSES * 4


# ------------------------------------------------------------------------------------- module


def test_module_is_the_function(device: torch.device) -> None:
    sample = make_sample(device=device)
    options = {"logit_scale": 0.5, "softcap": 3.0, "chunk_size": 4, "ignore_index": 3}
    arguments = (sample.input, sample.weight, sample.target.clamp(min=0), sample.bias)
    module = ChunkedLinearLogProbs(temperature=0.8, **EVERYTHING, **options)
    for values, expected in (
        (
            module(*arguments),
            chunked_linear_log_probs(*arguments, temperature=0.8, **EVERYTHING, **options),
        ),
        (
            module(*arguments, temperature=sample.temperature),
            chunked_linear_log_probs(
                *arguments, temperature=sample.temperature, **EVERYTHING, **options
            ),
        ),
    ):
        for one, other in zip(values, expected, strict=True):
            assert torch.equal(one, other)
    assert "temperature=0.8" in repr(module)
    assert not list(module.parameters())


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"softcap": -1.0}, {"chunk_size": 0}, {"temperature": torch.ones(3)}],
    ids=str,
)
def test_module_checks_its_options(options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        ChunkedLinearLogProbs(**options)
