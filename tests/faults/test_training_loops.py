"""What training loops rely on: counts, chunks of rows, determinism, no waiting, steady kernels."""

from __future__ import annotations

import ast
import inspect
import pathlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import greyhound_ops
import samples
from faults import every
from faults.every import Entry, over
from greyhound_ops import functional
from greyhound_ops.testing import peak_memory

explicit = over(lambda entry: not entry.rewritten)


# --------------------------------------------------------------------------- counts of the caller's


def microbatches() -> tuple[samples.Sample, list[samples.Sample]]:
    """12 rows that count, as one batch and as two with 3 and 9 of them."""
    sample = samples.make_sample(14, dtype=torch.float64, ignored=0.0)
    sample.target[[1, 12]] = -100
    parts = [
        sample.replace(input=sample.input[rows], target=sample.target[rows])
        for rows in (slice(0, 4), slice(4, 14))
    ]
    assert [int((part.target != -100).sum()) for part in parts] == [3, 9]
    return sample, parts


@pytest.mark.fault("B88", "B90")
@pytest.mark.parametrize(
    "how", ["denominator", "tensor", "sum", "callable", "distillation", "multi"]
)
def test_accumulated_gradients_are_those_of_the_whole_batch(how: str) -> None:
    """Mean over all tokens of a step that is made of two unequal batches."""
    whole, parts = microbatches()
    teacher = torch.randn(11, 8, dtype=torch.float64)

    def loss(part: samples.Sample, weight: Tensor, total: int | None) -> Tensor:
        """A mean over ``total`` rows, or over those that count in this part."""
        count = int((part.target != -100).sum()) if total is None else total
        if how in ("denominator", "tensor"):
            given = torch.tensor(count) if how == "tensor" else count
            return functional.chunked_linear_cross_entropy(
                part.input, weight, part.target, denominator=given, chunk_size=5
            )
        if how == "sum":
            return (
                functional.chunked_linear_cross_entropy(
                    part.input, weight, part.target, reduction="sum", chunk_size=5
                )
                / count
            )
        if how == "callable":
            return (
                functional.chunked_linear_loss(
                    part.input, weight, every.cross_entropy_and_grad, part.target, chunk_size=5
                )
                / count
            )
        if how == "multi":
            return (
                functional.chunked_multi_token_cross_entropy(
                    [part.input], weight, [part.target], reduction="sum", chunk_size=5
                ).loss
                / count
            )
        return (
            functional.chunked_linear_distillation(
                part.input, weight, part.input, teacher, part.target, reduction="sum", chunk_size=5
            )
            / count
        )

    grads, losses = [], []
    for batches, total in (([whole], None), (parts, 12)):
        weight = whole.weight.detach().requires_grad_()
        value = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            part = loss(batch, weight, total)
            part.backward()
            value += part.detach()
        grads.append(weight.grad)
        losses.append(value)
    every.assert_close(losses[0], losses[1], "loss")
    every.assert_close(grads[0], grads[1], "grad_weight")
    if how not in ("distillation",):
        plain = F.cross_entropy(F.linear(whole.input, whole.weight), whole.target)
        every.assert_close(losses[0], plain)


@pytest.mark.fault("B88")
def test_accumulated_policy_gradients_are_those_of_the_whole_batch() -> None:
    sample = every.make(bias=False)
    advantages = torch.randn(every.BATCH, dtype=torch.float64)
    count = int((sample.target != -100).sum())
    grads = []
    for parts in ([slice(0, 6)], [slice(0, 1), slice(1, 6)]):
        weight = sample.weight.detach().requires_grad_()
        for rows in parts:
            functional.chunked_linear_grpo(
                sample.input[rows], weight, sample.target[rows], advantages[rows],
                loss_type="dapo", denominator=count,
            ).loss.backward()  # fmt: skip
        grads.append(weight.grad)
    every.assert_close(*grads)


# ---------------------------------------------------------------------------------- rows and chunks


@pytest.mark.fault("B89")
@over(lambda entry: entry.linear and not entry.rewritten)
def test_one_long_sequence_is_many_chunks(entry: Entry) -> None:
    """Chunks are rows after flattening: the peak of one long row is far below its logits.

    Losses of pairs need two sequences; the second has a single token that counts.
    """
    sample = every.make(dtype=torch.float32, batch=2, tokens=1024, classes=500, ignored=0.0)
    sample.target[1, 1:] = -100
    extra = every.extra_for(sample.input, sample.weight)
    options = {"extra": extra, "chunk_size": 64}
    every.run(entry, sample, **options)
    with peak_memory("cpu") as peak:
        every.run(entry, sample, **options)
    logits = 2 * 1024 * 500 * 4
    assert peak.bytes < logits / 2


@pytest.mark.fault("B90")
@over(lambda entry: entry.linear and not entry.rewritten)
def test_bias_and_chunk_size_are_taken(entry: Entry) -> None:
    sample = every.make()
    with_bias = every.check(entry, sample, chunk_size=3)
    without = every.check(entry, sample.replace(bias=None), chunk_size=3)
    assert (with_bias.loss - without.loss).abs().max() > 1e-6
    with pytest.raises(ValueError, match="chunk_size: expected at least 1 row, got 0"):
        every.run(entry, sample, chunk_size=0)


@pytest.mark.fault("B90")
def test_weight_and_temperature_per_row() -> None:
    sample = samples.make_sample(dtype=torch.float64, ignored=0.0)
    factor = torch.rand(13, dtype=torch.float64) + 0.5
    rows = F.cross_entropy(F.linear(sample.input, sample.weight), sample.target, reduction="none")
    loss = functional.chunked_linear_cross_entropy(
        sample.input, sample.weight, sample.target, row_weight=factor, chunk_size=5
    )
    every.assert_close(loss, (rows * factor).sum() / factor.sum())
    log_probs = functional.chunked_linear_log_probs(
        sample.input, sample.weight, sample.target, temperature=factor, chunk_size=5
    )
    expected = (F.linear(sample.input, sample.weight) / factor.unsqueeze(-1)).log_softmax(-1)
    every.assert_close(log_probs, expected.gather(-1, sample.target.unsqueeze(-1)).squeeze(-1))


@pytest.mark.fault("B91")
def test_accuracy_without_logits() -> None:
    sample = samples.make_sample(40, dtype=torch.float64, ignored=0.0)
    outputs = functional.chunked_linear_log_probs(
        sample.input, sample.weight, sample.target, return_argmax=True, return_lse=True,
        return_entropy=True, chunk_size=7,
    )  # fmt: skip
    logits = F.linear(sample.input, sample.weight)
    assert outputs.argmax is not None
    assert torch.equal(outputs.argmax, logits.argmax(-1))
    every.assert_close(outputs.lse, logits.logsumexp(-1))
    every.assert_close(outputs.entropy, torch.distributions.Categorical(logits=logits).entropy())


@pytest.mark.fault("B94")
def test_chosen_nll_reads_the_labels_that_its_log_probs_read() -> None:
    """Labels are shifted by the caller, once; the NLL term does not shift again or not at all."""
    sample = every.make(bias=False)
    common = {"beta": 0.1, "ref_log_probs": torch.zeros(6, 4, dtype=torch.float64)}
    args = (sample.input, sample.weight, sample.target)
    with_nll = functional.chunked_linear_dpo(*args, nll_weight=1.0, **common).loss
    without = functional.chunked_linear_dpo(*args, nll_weight=0.0, **common).loss
    chosen = slice(0, 3)
    nll = F.cross_entropy(
        F.linear(sample.input[chosen], sample.weight).flatten(0, 1), sample.target[chosen].flatten()
    )
    every.assert_close(with_nll - without, nll)


@pytest.mark.fault("R02")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "name",
    ["linear_cross_entropy", "multi_token_cross_entropy", "linear_distillation", "cross_entropy"],
)
def test_unknown_reduction_is_refused_with_and_without_gradients(name: str, grad: bool) -> None:
    sample = samples.make_sample()
    function = getattr(functional, f"chunked_{name}", None) or getattr(functional, name)
    args = {
        "linear_cross_entropy": (sample.input, sample.weight, sample.target),
        "multi_token_cross_entropy": ([sample.input], sample.weight, [sample.target]),
        "linear_distillation": (sample.input, sample.weight, sample.input, sample.weight),
        "cross_entropy": (F.linear(sample.input, sample.weight), sample.target),
    }[name]
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(ValueError, match="reduction: expected one of"),
    ):
        function(*args, reduction="batchmean")


# ------------------------------------------------------------------- determinism, waiting, kernels


@pytest.mark.fault("B92")
@over()
def test_the_same_again(entry: Entry) -> None:
    """Bitwise, in torch's deterministic mode, which would raise at an operator with atomics."""
    sample = every.make(dtype=torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        first = every.run(entry, sample)
        for _ in range(2 if entry.rewritten else 20):
            samples.assert_equal_results(every.run(entry, sample), first)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.fault("B92")
@explicit
def test_the_same_again_on_a_gpu(entry: Entry) -> None:
    sample = every.make(dtype=torch.bfloat16, batch=4, tokens=16, device="cuda")
    first = every.run(entry, sample)
    for _ in range(19):
        samples.assert_equal_results(every.run(entry, sample), first)


@pytest.mark.fault("R12")
@explicit
def test_backward_reads_no_value_on_the_host(entry: Entry) -> None:
    """The upstream is compared with nothing: no number leaves the device."""
    sample = every.make()
    operands = every.leaves(sample)
    extra = every.extra_for(sample.input, sample.weight)
    loss = every.call(entry, operands, sample, extra=extra)
    upstream = every.upstream_like(loss, entry, sample)
    loss.backward(upstream, retain_graph=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward(upstream)
    read = [
        event.key
        for event in profile.key_averages()
        if event.key in ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
    ]
    assert not read


@pytest.mark.fault("R18")
def test_no_kernel_is_specialised_on_a_number_of_rows() -> None:
    """A constant that holds N or a chunk's length would compile anew for each ragged tail."""
    folder = pathlib.Path(inspect.getfile(greyhound_ops)).parent / "kernels"
    kernels = 0
    for path in sorted(folder.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            decorators = " ".join(ast.unparse(each) for each in function.decorator_list)
            if "triton.jit" not in decorators and "jit" not in decorators.split("."):
                continue
            kernels += 1
            constants = [
                argument.arg
                for argument in function.args.args
                if argument.annotation is not None
                and "constexpr" in ast.unparse(argument.annotation)
            ]
            bad = [name for name in constants if "rows" in name.lower() and "BLOCK" not in name]
            assert not bad, f"{path.name}: {function.name}({bad})"
    assert kernels > 5


@pytest.mark.gpu
@pytest.mark.fault("R18")
def test_row_counts_share_their_kernels() -> None:
    """At most one more for a number of rows that 16 divides and one for a single row."""
    from greyhound_ops.kernels import cross_entropy as kernels

    def compiled() -> int:
        found = 0
        for value in vars(kernels).values():
            caches = getattr(value, "device_caches", None)
            if caches:
                found += sum(len(each[0]) for each in caches.values())
        return found

    counts = []
    for rows in (33, 34, 35, 37, 38, 39, 41):
        sample = samples.make_sample(rows, 64, 300, dtype=torch.bfloat16, device="cuda")
        samples.run(functional.chunked_linear_cross_entropy, sample)
        counts.append(compiled())
    assert counts[0] > 0
    assert counts[-1] == counts[0]
