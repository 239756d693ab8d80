"""Tensors that need no gradient, and calls that record none, over every op."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import pathlib

import pytest
import torch

import greyhound_ops
import samples
from faults import every
from faults.every import Entry, over

ONE_OF_EACH_OP = (
    "cross-entropy-none",
    "multi-head",
    "linear-loss-direct",
    "log-probs",
    "selective-log-softmax",
    "distillation-kl-none",
)
SUBSETS = [
    subset
    for size in range(1, 4)
    for subset in itertools.combinations(samples.DIFFERENTIABLE, size)
]
explicit = over(lambda entry: not entry.rewritten)
#: Ops whose only projection is that of the head: products can be counted.
ONE_PRODUCT = (
    "cross-entropy-mean",
    "cross-entropy-sum",
    "cross-entropy-none",
    "cross-entropy-lse",
    "linear-loss-direct",
    "log-probs",
    "entropy",
    "rewritten-cross-entropy",
    "rewritten-row-losses",
)


@pytest.mark.fault("B24")
@over()
def test_gradient_of_the_input_of_a_frozen_head(entry: Entry) -> None:
    sample = every.make()
    operands = every.leaves(sample, ("input",))
    loss = every.call(entry, operands, sample)
    upstream = every.upstream_like(loss, entry, sample)
    (grad,) = torch.autograd.grad(loss, operands["input"], upstream)
    every.assert_close(grad, every.run_plain(entry, sample).input)


@pytest.mark.fault("B24", "B25", "R01", "R11")
@pytest.mark.parametrize("frozen", SUBSETS, ids="+".join)
@explicit
def test_each_operand_may_be_frozen(entry: Entry, frozen: tuple[str, ...]) -> None:
    # `check` demands None for what is frozen and the right gradient for the rest.
    every.check(entry, every.make(batch=4, tokens=3), frozen=frozen)


@pytest.mark.fault("B25")
@pytest.mark.parametrize("frozen", [("weight", "bias"), ("input",), ("bias",)], ids="+".join)
@over(lambda entry: entry.rewritten)
def test_each_operand_of_a_rewritten_graph_may_be_frozen(
    entry: Entry, frozen: tuple[str, ...]
) -> None:
    every.check(entry, every.make(), frozen=frozen)


def products(entry: Entry, sample: samples.Sample, **options: object) -> int:
    """Matrix products of a step, after one that warms up."""
    every.run(entry, sample, **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        every.run(entry, sample, **options)
    return sum(
        event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm")
    )


@pytest.mark.fault("B25", "R01", "R11")
@over(lambda entry: entry.name in ONE_PRODUCT and not entry.rewritten)
def test_frozen_costs_no_product(entry: Entry) -> None:
    sample = every.make(batch=2, tokens=8)
    chunks = 4
    costs = {
        frozen: products(entry, sample, frozen=frozen, chunk_size=4)
        for frozen in ((), ("weight", "bias"), ("input", "bias"), samples.DIFFERENTIABLE)
    }
    assert costs[samples.DIFFERENTIABLE] == chunks, "forward only"
    # The backward projects again where an upstream per row has to come first.
    assert costs[("weight", "bias")] <= costs[()] - chunks
    assert costs[("input", "bias")] == costs[()] - chunks


@pytest.mark.fault("B25", "R01", "R11")
@over(lambda entry: entry.linear and not entry.rewritten)
def test_frozen_head_has_no_gradient_buffer(entry: Entry) -> None:
    """A head so wide that a buffer of its size stands out against the rows and their logits."""
    sample = every.make(dtype=torch.float32, batch=2, tokens=2, hidden=768, classes=500)
    extra = every.extra_for(sample.input, sample.weight)

    def peak(frozen: tuple[str, ...]) -> int:
        options = {"extra": extra, "frozen": frozen, "chunk_size": 2}
        every.run(entry, sample, **options)
        with greyhound_ops.testing.peak_memory("cpu") as measured:
            every.run(entry, sample, **options)
        return measured.bytes

    nbytes = sample.weight.nbytes
    own = nbytes // 2 if entry.name == "multi-head" else 0  # the second head is made by the caller
    assert peak(("weight", "bias")) < nbytes / 2 + 3 * own
    assert peak(("bias",)) >= nbytes, "or the bound above means nothing"


@pytest.mark.fault("B26")
@over()
def test_no_grad(entry: Entry) -> None:
    sample = every.make()
    operands = every.leaves(sample)
    with torch.no_grad():
        loss = every.call(entry, operands, sample)
    assert not loss.requires_grad
    every.assert_close(loss, every.run_plain(entry, sample).loss)


@pytest.mark.fault("B26", "R17")
@over(lambda entry: entry.name in ONE_PRODUCT and not entry.rewritten)
def test_no_grad_makes_no_gradient_of_leaves(entry: Entry) -> None:
    """Leaves that require grad, read under `no_grad`: one product per chunk and nothing else."""
    sample = every.make(batch=2, tokens=8)
    operands = every.leaves(sample)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        torch.no_grad(),
    ):
        every.call(entry, operands, sample, chunk_size=4)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts.get("aten::mm", 0) + counts.get("aten::addmm", 0) == 4


@pytest.mark.fault("B29", "B30", "B49")
@over(lambda entry: entry.name in ONE_OF_EACH_OP)
def test_compiled_gradients_of_a_frozen_head(entry: Entry) -> None:
    """Gradients, not only the loss, in one graph; those of a head that learns are tested by op."""
    torch._dynamo.reset()
    ours = dataclasses.replace(entry, ours=every.compiled(entry.ours, dynamic=False))
    every.check(ours, every.make(), frozen=("weight", "bias"))


@pytest.mark.fault("B30")
def test_every_operand_has_a_flag_of_its_own() -> None:
    """By convention ``need_grad_x`` beside an operand ``x``, in every op with an autograd rule."""
    flags = {
        name: [each.name for each in getattr(torch.ops.greyhound, name).default._schema.arguments]
        for name in OPS
    }
    for name, arguments in flags.items():
        wanted = [each.removeprefix("need_grad_") for each in arguments if "need_grad_" in each]
        assert wanted, name
        assert set(wanted) <= set(arguments), name


OPS = (
    "linear_cross_entropy",
    "linear_cross_entropy_terms",
    "linear_loss",
    "linear_log_probs",
    "cross_entropy",
    "selective_log_softmax",
    "linear_distillation",
)


@pytest.mark.fault("B29", "B30")
def test_no_fake_asks_a_tensor_whether_it_requires_grad() -> None:
    """Under AOTAutograd the answer is wrong inside a fake."""
    folder = pathlib.Path(inspect.getfile(greyhound_ops)).parent / "ops"
    asked, seen = [], 0
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef) or "fake" not in function.name:
                continue
            seen += 1
            asked += [
                f"{path.name}:{node.lineno}"
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute) and node.attr == "requires_grad"
            ]
    assert not asked
    assert seen >= 10
